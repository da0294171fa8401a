"""Calls a target step by step, with its cache."""
