"""Attention that someone else wrote: found, built, called, watched."""
