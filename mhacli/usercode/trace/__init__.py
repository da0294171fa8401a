"""The trace of a user's own module: `mha trace FILE.py:NAME`."""
