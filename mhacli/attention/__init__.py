"""Attention itself: the definition, its masks and positions, the layer around it, its statistics, its weights on disk."""

from mhacli.attention import masks
from mhacli.attention.core import attend

__all__ = ["attend", "masks"]
