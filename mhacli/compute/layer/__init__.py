"""One layer of mha: `mha run`, `mha trace` and `mha decode`."""
