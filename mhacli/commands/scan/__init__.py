"""Scans a corpus: a worker that computes units, engines that share them out, and the study that writes and merges."""
