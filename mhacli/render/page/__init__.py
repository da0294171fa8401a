"""A self-contained HTML page of a record: every head to explore, and every number as text."""
