"""The examination of somebody's attention: `mha check`."""
