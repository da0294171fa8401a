"""Terminal views of `mha run`, `mha trace` and `mha decode`."""
