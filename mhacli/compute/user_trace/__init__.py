"""The walkthrough of a module of your own: `mha trace FILE.py:NAME`."""
