"""Statistics of attention in tiles, without its matrix."""
