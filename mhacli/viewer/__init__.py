"""The interactive viewer of a record: heads, matrix, tokens and walkthrough in a terminal, by keys
or mouse.
"""
