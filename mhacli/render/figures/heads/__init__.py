"""Pictures of heads."""
