"""The computations of `--model`: the attention layers of a checkpoint."""
