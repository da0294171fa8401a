"""What the machine can do at most, measured beside the rest: the rate of a matrix product, and of a copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from mhacli.benchmark import Ceiling
from mhacli.config import ITEM_BYTES, Dtype
from mhacli.studies.rounds import Clock, Timed

_COPY_BYTES = {"cpu": 128 << 20}
_COPY_BYTES_ELSEWHERE = 1 << 30
_SMALLEST, _LARGEST = 256, 8192
_LONG_ENOUGH_S, _SAMPLES = 0.05, 10


def measure_ceiling(dtype: Dtype, device: torch.device, clock: Clock, seed: int) -> Ceiling:
    """The best of several square matrix products, of a size that takes 50 ms or more, and of several copies."""
    generator = torch.Generator(device).manual_seed(seed)
    kind = getattr(torch, dtype)
    n = _SMALLEST
    while True:
        a, b = (torch.randn(n, n, generator=generator, dtype=kind, device=device) for _ in range(2))
        seconds = _best(partial(torch.mm, a, b), clock, 2)
        if seconds >= _LONG_ENOUGH_S or n == _LARGEST:
            break
        n *= 2
    matmul_s = min(seconds, _best(partial(torch.mm, a, b), clock, _SAMPLES))
    n_bytes = _COPY_BYTES.get(device.type, _COPY_BYTES_ELSEWHERE)
    source = torch.randn(n_bytes // ITEM_BYTES[dtype], generator=generator, dtype=kind, device=device)
    copy_s = _best(partial(torch.empty_like(source).copy_, source), clock, _SAMPLES)
    return Ceiling(dtype, 2 * n**3 / matmul_s / 1e12, 2 * n_bytes / copy_s / 1e9)


def _best(call: Callable[[], object], clock: Clock, n_samples: int) -> float:
    """The shortest of several samples, after one that warms up."""
    turn = [(Timed(call), 1)]
    return min(clock.round(turn)[0] for _ in range(n_samples + 1))
