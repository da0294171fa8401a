"""Watches which torch functions a target calls."""
