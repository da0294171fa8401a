"""Model folders, by their headers."""
