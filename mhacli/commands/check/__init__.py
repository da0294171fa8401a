"""The examination of a user's attention: `mha check`."""
