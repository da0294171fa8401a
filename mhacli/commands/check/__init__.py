"""The examination of a user's attention, `mha check`, and of a checkpoint, which `mha doctor --model` reports."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mhacli.commands.check.result import CheckStatus, ExaminedModel, HealthCheck

if TYPE_CHECKING:
    from mhacli.commands.check.checkpoint import examine_checkpoint

__all__ = ["CheckStatus", "ExaminedModel", "HealthCheck", "examine_checkpoint"]


def __getattr__(name: str) -> Any:
    """What needs torch, imported on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("mhacli.commands.check.checkpoint"), name)
