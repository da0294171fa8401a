"""The probes of `mha check`: what an attention does with each input."""
