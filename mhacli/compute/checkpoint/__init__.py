"""The layers of a real checkpoint: `--model`."""
