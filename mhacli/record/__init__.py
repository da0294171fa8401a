"""The record: what one run computed, as data and as a file."""
