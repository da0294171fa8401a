"""The views of `mha diff`."""
