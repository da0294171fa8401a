"""The commands, one entry for each: a file, or a folder with its options, computation, result and
view.
"""
