"""`mha diff`."""
