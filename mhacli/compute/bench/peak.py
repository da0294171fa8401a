"""What the machine can do at most, measured beside the rest: the rate of a matrix product, and of a copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from mhacli.compute.base.devices import free_bytes
from mhacli.compute.bench.timing import Clock, Timed
from mhacli.results.bench.result import Ceiling
from mhacli.spec.config import ITEM_BYTES, Dtype

_COPY_BYTES = 512 << 20
"""More than fits in any cache, and a sixteenth of what is free at most."""
_SMALLEST, _LARGEST = 256, 8192
_LONG_ENOUGH_S, _SAMPLES = 0.04, 8


def measure_ceiling(dtype: Dtype, device: torch.device, clock: Clock, seed: int) -> Ceiling:
    """The best of several square matrix products and of several copies.

    A kernel may widen 16-bit numbers, so theirs is the better rate of their own product and of float32's.
    """
    generator = torch.Generator(device).manual_seed(seed)
    formats = dict.fromkeys((dtype, "float32") if ITEM_BYTES[dtype] == 2 else (dtype,))
    rate = max(_matmul_rate(getattr(torch, name), generator, clock) for name in formats)
    n_bytes = min(_COPY_BYTES, free_bytes(str(device)) // 16)
    numbers = torch.ones(
        n_bytes // ITEM_BYTES[dtype], dtype=getattr(torch, dtype), device=device
    )  # a copy takes as long
    copy_s = _best(partial(torch.empty_like(numbers).copy_, numbers), clock, _SAMPLES)
    return Ceiling(dtype, rate / 1e12, 2 * n_bytes / copy_s / 1e9)


def _matmul_rate(dtype: torch.dtype, generator: torch.Generator, clock: Clock) -> float:
    """Operations per second of a square product, of a size that takes 40 ms, or the largest."""
    n = _SMALLEST
    while True:
        a, b = (torch.randn(n, n, generator=generator, dtype=dtype, device=generator.device) for _ in range(2))
        seconds = _best(partial(torch.mm, a, b), clock, 2)
        if seconds >= _LONG_ENOUGH_S or n == _LARGEST:
            return 2 * n**3 / min(seconds, _best(partial(torch.mm, a, b), clock, _SAMPLES))
        n *= 2


def _best(call: Callable[[], object], clock: Clock, n_samples: int) -> float:
    """The shortest of several samples, after one that warms up."""
    turn = [(Timed(call), 1)]
    return min(clock.round(turn)[0] for _ in range(n_samples + 1))
