"""Weights of a layer: its file, and the layouts of other libraries."""
