"""How results show themselves: as HTML in notebooks, and by rich on terminals."""
