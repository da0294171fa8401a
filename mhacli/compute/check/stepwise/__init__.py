"""The examination of an attention step by step, with its cache."""
