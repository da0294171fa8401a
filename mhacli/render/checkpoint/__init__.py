"""Terminal views of a checkpoint: its layers, heads, spans and words."""
