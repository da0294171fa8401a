"""Text: read with limits, cut into tokens, counted into a vocabulary, and made safe to show."""
