"""One layer of our own: `mha run`, `mha trace` and `mha decode`."""
