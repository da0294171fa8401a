"""Statistics of heads over long texts, without their matrices: `mha heads`."""
