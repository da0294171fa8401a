"""Examines an installation or a checkpoint for `mha doctor`."""
