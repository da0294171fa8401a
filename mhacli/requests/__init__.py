"""What was asked for, settled once."""
