"""Attention itself: the definition, its masks and positions, the layer around it, its statistics, its weights on disk."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mhacli.attention import masks
    from mhacli.attention.core import attend

__all__ = ["attend", "masks"]


def __getattr__(name: str) -> Any:
    """The definition, imported on first use: reading a weights file needs no torch."""
    if name != "attend":
        raise AttributeError(f"module 'mhacli.attention' has no attribute {name!r}")
    from mhacli.attention.core import attend

    return attend
