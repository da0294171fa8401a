"""The vocabulary of attention without tensors: configuration, sites, variants and formulas."""
