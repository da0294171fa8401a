"""The timing of attention backends: `mha bench`."""
