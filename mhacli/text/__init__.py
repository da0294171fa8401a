"""Reads texts within limits, cuts them into tokens, builds vocabularies, and escapes text for
display.
"""
