"""The reports of `mha bench`, `mha check`, `mha doctor`, `mha weights` and `mha vocab`."""
