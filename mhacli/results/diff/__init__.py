"""Compares two records: their first difference, and the changes in each head. Uses numpy alone."""
