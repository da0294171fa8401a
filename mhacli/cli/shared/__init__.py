"""Code that several commands share: requests, targets, output and progress."""
