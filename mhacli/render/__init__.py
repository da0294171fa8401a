"""Renders records as text, JSON, CSV, HTML and SVG. No module here computes attention, opens files
or prints.
"""
