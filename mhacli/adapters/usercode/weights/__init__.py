"""Reads the parameters of a target as projections."""
