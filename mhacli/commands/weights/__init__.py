"""`mha weights`."""
