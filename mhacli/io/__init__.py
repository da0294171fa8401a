"""Files, JSON, memory and signals."""
