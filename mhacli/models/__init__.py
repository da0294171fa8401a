"""Checkpoints of transformers: loading them, and capturing their attention while it runs."""
