"""How objects show themselves: as HTML in a notebook, and as rich prints them on a terminal."""
