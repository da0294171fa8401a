"""Pictures for papers and pages: a head, a grid of heads, or the walkthrough, as self-contained
SVG.
"""
