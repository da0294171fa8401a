"""mha, the attention inspector for the terminal. Importing this package does not import torch.

pytest leaves it as it is: PYTEST_DONT_REWRITE.
"""

import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mhacli.record.shown import register_renderer

if TYPE_CHECKING:
    from mhacli.attention.layer import MultiHeadAttention
    from mhacli.commands.bench.measure import bench
    from mhacli.commands.check.run import assert_right, check
    from mhacli.commands.diff.compare import diff
    from mhacli.commands.doctor.run import doctor
    from mhacli.commands.effect.in_memory import effects, heads
    from mhacli.commands.effect.removed import removed
    from mhacli.errors import MhaError
    from mhacli.layer.run import inspect
    from mhacli.models.given import record_of
    from mhacli.models.inspecting import inspecting
    from mhacli.record.record import Record
    from mhacli.record.storage import load
    from mhacli.settings import Config

__version__ = "0.3.0"
__all__ = [
    "Config",
    "MhaError",
    "MultiHeadAttention",
    "Record",
    "__version__",
    "assert_right",
    "bench",
    "check",
    "diff",
    "doctor",
    "effects",
    "heads",
    "inspect",
    "inspecting",
    "load",
    "record_of",
    "removed",
]

_MODULES = {
    "Config": "mhacli.settings",
    "MhaError": "mhacli.errors",
    "MultiHeadAttention": "mhacli.attention.layer",
    "Record": "mhacli.record.record",
    "assert_right": "mhacli.commands.check.run",
    "bench": "mhacli.commands.bench.measure",
    "check": "mhacli.commands.check.run",
    "diff": "mhacli.commands.diff.compare",
    "doctor": "mhacli.commands.doctor.run",
    "effects": "mhacli.commands.effect.in_memory",
    "heads": "mhacli.commands.effect.in_memory",
    "inspect": "mhacli.layer.run",
    "inspecting": "mhacli.models.inspecting",
    "load": "mhacli.record.storage",
    "record_of": "mhacli.models.given",
    "removed": "mhacli.commands.effect.removed",
}


register_renderer(lambda: import_module("mhacli.render.notebook"))


def __getattr__(name: str) -> Any:
    """A public name, imported from its module on first use, so that `import mhacli` is fast."""
    if name not in _MODULES:
        raise AttributeError(f"module 'mhacli' has no attribute {name!r}")
    state = random.getstate()
    found = getattr(import_module(_MODULES[name]), name)
    random.setstate(state)  # rich draws a number when it is imported
    return found


def __dir__() -> list[str]:
    """The public names, also those not imported yet, for completion."""
    return __all__
