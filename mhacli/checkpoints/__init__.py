"""Reads untrusted checkpoints by their headers and configs, without tensors or torch."""
