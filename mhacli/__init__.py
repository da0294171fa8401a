"""mha, the attention inspector for the terminal. Importing this package does not import torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mhacli.attention.blocks import MultiHeadAttention
    from mhacli.config import Config
    from mhacli.errors import MhaError
    from mhacli.record import Record
    from mhacli.studies.inspect import inspect

__version__ = "0.1.0"
__all__ = ["Config", "MhaError", "MultiHeadAttention", "Record", "__version__", "inspect"]

_HOMES = {
    "Config": "mhacli.config",
    "MhaError": "mhacli.errors",
    "MultiHeadAttention": "mhacli.attention.blocks",
    "Record": "mhacli.record",
    "inspect": "mhacli.studies.inspect",
}


def __getattr__(name: str) -> Any:
    """The public names, imported from their rooms on first use, so that `import mhacli` stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mhacli' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, those not imported yet too, for completion at a prompt."""
    return __all__
