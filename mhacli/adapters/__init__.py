"""What others wrote: transformers models, and attention in Python files."""
