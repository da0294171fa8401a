"""What is said of removals without making them: first-order estimates, and usual pictures of attention."""
