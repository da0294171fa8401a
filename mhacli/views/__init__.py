"""What commands show, as data, and how it is drawn on the terminal and in pages."""
