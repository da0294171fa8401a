"""Traces every step of attention, of mha or of a user, for `mha trace`."""
