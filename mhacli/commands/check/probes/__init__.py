"""The probes of `mha check`: questions that need no weights."""
