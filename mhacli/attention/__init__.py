"""Attention itself: the definition, its masks and positions, the layer around it, its statistics,
its weights on disk.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mhacli.attention import masks

    from .core import attend

__all__ = ["attend", "masks"]


def __getattr__(name: str) -> Any:
    """A public name, imported on first use: reading a weights file needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'mhacli.attention' has no attribute {name!r}")
    from importlib import import_module

    return (
        import_module("mhacli.attention.masks")
        if name == "masks"
        else import_module("mhacli.attention.core").attend
    )
