"""The effect of attention on the output: removals, their effects, and the verification of both."""
