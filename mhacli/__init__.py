"""mha, the attention inspector for the terminal. Importing this package does not import torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mhacli.attention.layer import MultiHeadAttention
    from mhacli.compute.bench.sizes import bench
    from mhacli.compute.check.run import check
    from mhacli.compute.checkpoint.inspecting import inspecting
    from mhacli.compute.doctor.run import doctor
    from mhacli.compute.effect.in_memory.effects import effects
    from mhacli.compute.effect.in_memory.removed import removed
    from mhacli.compute.layer.run import inspect
    from mhacli.errors import MhaError
    from mhacli.results.diff.records import diff
    from mhacli.results.record.record import Record
    from mhacli.results.record.storage import load
    from mhacli.spec.config import Config

__version__ = "0.1.0"
__all__ = [
    "Config", "MhaError", "MultiHeadAttention", "Record", "__version__", "bench", "check", "diff", "doctor", "effects",
    "inspect", "inspecting", "load", "removed",
]  # fmt: skip

_MODULES = {
    "Config": "mhacli.spec.config",
    "MhaError": "mhacli.errors",
    "MultiHeadAttention": "mhacli.attention.layer",
    "Record": "mhacli.results.record.record",
    "bench": "mhacli.compute.bench.sizes",
    "check": "mhacli.compute.check.run",
    "diff": "mhacli.results.diff.records",
    "doctor": "mhacli.compute.doctor.run",
    "effects": "mhacli.compute.effect.in_memory.effects",
    "inspect": "mhacli.compute.layer.run",
    "inspecting": "mhacli.compute.checkpoint.inspecting",
    "load": "mhacli.results.record.storage",
    "removed": "mhacli.compute.effect.in_memory.removed",
}


def __getattr__(name: str) -> Any:
    """A public name, imported from its module on first use, so that `import mhacli` is fast."""
    if name not in _MODULES:
        raise AttributeError(f"module 'mhacli' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def renderers() -> Any:
    """The module that renders results for notebooks and terminals; results may not import it directly."""
    from importlib import import_module

    return import_module("mhacli.render.display.show")


def __dir__() -> list[str]:
    """The public names, also those not imported yet, for completion."""
    return __all__
