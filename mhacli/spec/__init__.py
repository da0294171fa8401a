"""What attention is made of: configuration, sites, variants and formulas."""
