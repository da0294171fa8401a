"""What became of a backend that raised: unsupported, out of memory, or broken; and why, in one line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mhacli.attention.backends.catalogue import UnsupportedError
from mhacli.results.bench.result import Status

_NO_KERNEL = ("No available kernel", "No viable backend")
_CANNOT = ("not implemented for", "No working C++ compiler", "Cannot find a working triton")
_NO_MEMORY = ("can't allocate memory", "out of memory")
_LONGEST_REASON = 300


@contextmanager
def explained(backend: str) -> Iterator[None]:
    """Within it, torch's refusal of a kernel becomes an `UnsupportedError` with the reasons that torch gives as warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as fault:
            if not any(words in str(fault) for words in _NO_KERNEL):
                raise
            reasons = [str(warning.message).partition(" (Triggered")[0] for warning in said]
            refused = f"torch has no {backend} kernel for this device and these inputs"
            raise UnsupportedError(": ".join([refused, " ".join(reasons)] if reasons else [refused])) from fault


def is_out_of_memory(fault: Exception) -> bool:
    """Whether memory ran out, as Python, or torch for any device, says it."""
    return isinstance(fault, (MemoryError, torch.OutOfMemoryError)) or any(words in str(fault) for words in _NO_MEMORY)


def told(fault: Exception) -> tuple[Status, str]:
    """What became of the backend that raised this, and why."""
    reason = " ".join(str(fault).split())[:_LONGEST_REASON] or type(fault).__name__
    if is_out_of_memory(fault):
        return "out-of-memory", reason
    is_unsupported = isinstance(fault, (UnsupportedError, NotImplementedError)) or any(
        words in reason for words in _CANNOT
    )
    return "unsupported" if is_unsupported else "failed", reason
