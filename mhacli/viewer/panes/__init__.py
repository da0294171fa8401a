"""The panes of the viewer's screens."""
