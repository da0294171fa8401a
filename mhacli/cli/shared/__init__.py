"""What several commands share: requests, targets, output and progress."""
