"""What panes draw: text and shaded cells, without a widget."""
