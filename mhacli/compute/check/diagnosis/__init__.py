"""The search for the mistake that explains what an attention gives."""
