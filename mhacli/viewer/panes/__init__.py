"""The panes that a screen is made of."""
