"""Head statistics, which several computations use."""
