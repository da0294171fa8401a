"""Traits of an attention, read from watched runs: biases, norms and rotations."""
