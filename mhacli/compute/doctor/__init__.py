"""The checks of `mha doctor`: this installation, or a checkpoint."""
