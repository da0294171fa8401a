"""Views of a record. Nothing here computes attention, opens a file or prints."""
