"""The result of a benchmark, its formulas and comparisons."""
