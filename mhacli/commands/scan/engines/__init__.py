"""Engines distribute the units of a corpus to workers, in one process or many."""
