"""`mha explain`."""
