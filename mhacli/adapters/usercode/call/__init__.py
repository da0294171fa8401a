"""Finds out how a target is called: its inputs, masks and results."""
