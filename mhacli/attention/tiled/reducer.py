"""Which code makes the statistics of heads: tiles of torch, or the Triton kernel where it can run and agrees with them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

from mhacli.attention.masks import causal
from mhacli.attention.tiled.reduction import MAX_HEAD
from mhacli.attention.tiled.scores import PatternOfScores, Scores, VirtualPattern
from mhacli.attention.tiled.softmax import SoftmaxPattern, tiled_attend
from mhacli.attention.tiled.statistics import Statistics, StatisticsRequest, summarise
from mhacli.attention.tiled.tiles import PatternTiles, reduce_tiles
from mhacli.errors import MhaError
from mhacli.settings import Reducer

_LARGEST_ERROR = 1e-4
"""By which both may differ, relative to the largest number of a statistic: ten times their rounding."""


class ReducerChoice(NamedTuple):
    """What makes the statistics of a pattern, and why that is torch."""

    reducer: Reducer
    reason: str | None = None


def summarise_by(
    reducer: Reducer,
    pattern: PatternTiles | SoftmaxPattern,
    request: StatisticsRequest,
    report_progress: Callable[[int], None] = lambda cells: None,
) -> Statistics:
    """`summarise`, by the kernel where `choice_for` this pattern says so, else by torch."""
    if choice_for(reducer, pattern).reducer == "torch":
        return summarise(pattern, request, report_progress)
    if isinstance(pattern, SoftmaxPattern):  # of which the kernel has to know the log-sum-exp
        reduce_tiles(pattern, [])
        return summarise_by(reducer, pattern.known(), request, report_progress)
    from mhacli.attention.tiled.kernel_statistics import kernel_statistics

    assert isinstance(pattern, VirtualPattern)  # or it would be refused
    return kernel_statistics(pattern, request, report_progress)


def choice_for(reducer: Reducer, pattern: PatternTiles | SoftmaxPattern) -> ReducerChoice:
    """Torch or the kernel for a pattern; torch, too, where the kernel is requested and cannot reduce it."""
    dtype = pattern.scores.q.dtype if isinstance(pattern, PatternOfScores) else torch.float32
    reason = _torch_because(reducer, pattern.like.device, dtype) or refusal(pattern)
    return ReducerChoice("triton") if reason is None else ReducerChoice("torch", reason)


def refusal(pattern: PatternTiles | SoftmaxPattern) -> str | None:
    """Why the kernel cannot reduce the pattern; None where it can."""
    if not isinstance(pattern, PatternOfScores):
        return "the model computes its weights whole"
    if not all(pattern.shape):
        return "there is nothing to reduce"
    if pattern.like.dtype != torch.float32:
        return "the kernel sums in float32, not in float64"
    d_head = pattern.scores.q.shape[3]
    return f"heads of {d_head} numbers are wider than {MAX_HEAD}" if d_head > MAX_HEAD else None


def choice(reducer: Reducer, device: torch.device, dtype: torch.dtype) -> ReducerChoice:
    """Torch or the kernel, for queries of this dtype on a device.

    Raises `MhaError` where the kernel is requested and cannot run.
    """
    reason = _torch_because(reducer, device, dtype)
    if reason is not None and reducer == "triton":
        raise MhaError(f"--reducer triton: {reason}", hint="--reducer torch works everywhere", code="no-kernel")
    return ReducerChoice("triton") if reason is None else ReducerChoice("torch", reason)


def _torch_because(reducer: Reducer, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why torch makes the statistics there; None where the kernel does."""
    if reducer == "torch":
        return "--reducer torch"
    return _needs_cuda(device) if reducer == "auto" and device.type != "cuda" else kernel_fault(device, dtype)


def _needs_cuda(device: torch.device) -> str:
    return f"the kernel needs a CUDA device, and this one is {device.type}"


@lru_cache
def kernel_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot make the statistics there; None where it can, and agrees with torch on a small case."""
    if dtype == torch.float64:
        return "the kernel sums in float32, not in float64"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return _needs_cuda(device)
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        return _disagreement(device, dtype)
    except Exception as fault:
        return f"the kernel does not run here: {' '.join(str(fault).split())[:200] or type(fault).__name__}"


def _disagreement(device: torch.device, dtype: torch.dtype) -> str | None:
    """The statistic in which the kernel differs from torch, for two heads that share keys under a causal mask."""
    from mhacli.attention.tiled.kernel_statistics import kernel_statistics

    generator = torch.Generator().manual_seed(0)
    n = 70
    q, k, v = (torch.randn(1, heads, n, 64, generator=generator).to(device, dtype) for heads in (2, 1, 1))
    scores = Scores(q, k, 0.125, allowed=causal())
    pattern = VirtualPattern(scores, tiled_attend(scores, v).lse)
    tokens, places = torch.randint(0, 9, (1, n), generator=generator), torch.arange(n)[None]
    request = StatisticsRequest(64, tokens, tokens, tokens.roll(1, dims=1), places < 1, places < 4).on(device)
    by_torch, by_kernel = (make(pattern, request) for make in (summarise, kernel_statistics))
    for statistic in fields(Statistics):
        wanted, got = (getattr(statistics, statistic.name) for statistics in (by_torch, by_kernel))
        if not wanted.numel():
            continue
        error = ((got - wanted).abs().max() / wanted.abs().max()).item()
        if not error <= _LARGEST_ERROR:
            return f"the kernel's {statistic.name} differs from torch's by {error:.1e} of its largest number"
    return None
