"""The Python functions for effects in a model that is in memory."""
