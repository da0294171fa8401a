"""A head as numbers to draw, and its views in the terminal."""
