"""The layer of a sentence or a long text: `mha run`, `mha trace` and `mha decode`."""
