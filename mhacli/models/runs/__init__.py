"""Runs of a checkpoint: its inspected pass, its trace, its decoding, and passes of a text that grows."""
