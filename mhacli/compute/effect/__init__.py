"""How much attention matters: what is removed, what it changes, and the proof that it was removed."""
