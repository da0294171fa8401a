"""The implementations that `mha bench` times."""
