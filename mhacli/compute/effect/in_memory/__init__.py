"""What Python offers of effects: on a model that is in memory."""
