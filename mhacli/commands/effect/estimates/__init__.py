"""Estimates of effects without removals: first-order estimates, and common pictures of attention."""
