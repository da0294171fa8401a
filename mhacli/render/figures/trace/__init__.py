"""Pictures of the trace."""
