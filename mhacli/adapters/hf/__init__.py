"""Real checkpoints: what of them is loaded, and what their attention computes, seen while it runs."""
