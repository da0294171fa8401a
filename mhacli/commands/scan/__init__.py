"""Scans a corpus: a worker that computes units, engines that distribute them, and the study that
writes and merges.
"""
