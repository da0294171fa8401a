"""Folders with models from strangers, by what their headers and configs say: nothing here reads a tensor or needs torch."""
