"""The interactive viewer of a record: heads, matrix, tokens and walkthrough on a terminal, by keys or mouse."""
