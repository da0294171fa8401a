"""Finds a target in a file or a package."""
