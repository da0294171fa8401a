"""Heads as numbers to draw, and their terminal views."""
