"""Times attention backends for `mha bench`."""
