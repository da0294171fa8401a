"""Finds out how to call a target: its inputs, masks and results."""
