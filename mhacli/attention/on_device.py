"""The statistics of heads by the kernels of `kernels`: when, with which tiles, and the calls."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from math import prod
from threading import Timer
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from .axes import Axes, Axis, StatisticsRequest, make_statistics_request
from .core import dtype_name
from .masks import causal, mask_of
from .scores import HIDDEN, LOG2_E, ScoredAttention, joined, planes_of
from .statistics import PADDED_APART, reduce_blocks

OF_QUERIES = ("mass", "entropy", "squares", "peak", "distance", "first", "leading")
"""The rows of what `kernels.rows` writes of each query."""
TEMPORARY_BYTES = 1 << 28
"""Memory beside the results, at most: heads and sequences are reduced in parts."""
MIN_TOKENS = 512
"""Fewer are left to torch, so that a short text compiles nothing."""
MAX_TOKENS = 1 << 16
"""One head of more takes more memory."""
TOLERANCE = 1e-4
"""The largest difference from torch in float64, relative to numbers above 1."""


class Tiles(NamedTuple):
    """The queries and the keys of a tile, and the warps and stages of a program."""

    side: int
    warps: int
    stages: int


WIDTHS = (64, 256)
TILES = {
    (80, 2, 64): Tiles(64, 4, 3),
    (80, 2, 256): Tiles(32, 4, 3),
    (80, 4, 64): Tiles(32, 4, 3),
    (80, 4, 256): Tiles(32, 4, 2),
    (90, 2, 64): Tiles(64, 4, 3),
    (90, 2, 256): Tiles(64, 8, 2),
    (90, 4, 64): Tiles(64, 8, 3),
    (90, 4, 256): Tiles(32, 4, 2),
}
"""By the compute capability of a GPU, the bytes of a number and the width of a head, at most. They
are fixed, since the order of sums depends on them."""


_NOT_CHOSEN = "kernels are chosen by MHA_KERNELS=1"


class _Numbers(NamedTuple):
    """What a trial of the kernels is for."""

    device: torch.device
    dtype: torch.dtype
    width: int


Sums = dict[str, Tensor]
"""What kernels made, by its names in `BLOCK_STATISTICS`, and as `lse` the log-sum-exp, 0 without
keys: NaN where scores are not finite, or float32 does not hold their powers."""


# ----------------------------------------------------------------------------------------- a choice


_faults: dict[_Numbers, str | None] = {}
"""Why kernels cannot be used for such numbers, None where they can, as this process found."""
_SILENT_S = 1.0
"""Seconds of compilation before it is announced."""


def runs_kernels(device: torch.device) -> bool:
    """Whether a device may run kernels."""
    return device.type == "cuda"


def reducer_on(device: torch.device) -> str:
    """What computes the statistics of usual heads on a device."""
    because = _fault(_Numbers(device, torch.float32, 64)) if is_chosen() else _NOT_CHOSEN
    return f"kernels of {compiler_on(device)}" if because is None else f"torch: {because}"


def compiler_on(device: torch.device) -> str | None:
    """The compiler of kernels that this process used on a device; None without them."""
    if any(used.device == device and because is None for used, because in _faults.items()):
        return f"triton {metadata.version('triton')}"
    return None


def is_chosen() -> bool:
    """Whether kernels are wanted: not by default, as long as no GPU has been seen to run them."""
    return os.environ.get("MHA_KERNELS", "0") != "0"


def no_kernels_because(attention: ScoredAttention, request: StatisticsRequest) -> str | None:
    """Why torch computes the statistics of an attention on a device; None where kernels do."""
    batch, _, n_q, n_k = attention.shape
    if not is_chosen():
        return _NOT_CHOSEN
    if max(n_q, n_k) < MIN_TOKENS:
        return f"kernels begin at {MIN_TOKENS} tokens"
    if max(n_q, n_k) > MAX_TOKENS:
        return f"kernels take at most {MAX_TOKENS:,} tokens"
    if attention.dtype != torch.float32 or attention.k.dtype != attention.q.dtype:
        return f"kernels compute in float32, not in {dtype_name(attention.dtype)}"
    if attention.q.shape[3] > WIDTHS[-1]:
        return f"kernels take heads of at most {WIDTHS[-1]} columns"
    if any(map(request.axes.ahead, range(batch))):
        return PADDED_APART
    if attention.has_large_scores:
        return "some scores are larger than float32 holds"
    if _bytes_per_head(attention, request) > TEMPORARY_BYTES:
        return f"a mask or bias of this text takes more than {TEMPORARY_BYTES >> 20} MiB"
    return _fault(_numbers_of(attention))


def sums_of_kernels(attention: ScoredAttention, request: StatisticsRequest, heads: range) -> Sums:
    """The sums of some neighbouring heads; none where the kernels fail."""
    try:
        return kernel_sums(attention, request, heads)
    except Exception as fault:  # the trial has neither mask nor bias
        _refuse(_numbers_of(attention), fault)
        return {}


def _numbers_of(attention: ScoredAttention) -> _Numbers:
    return _Numbers(attention.q.device, attention.q.dtype, attention.q.shape[3])


def _fault(numbers: _Numbers) -> str | None:
    """Why kernels cannot be used for such numbers: the first time, by a small random case."""
    if numbers not in _faults:
        try:
            with _announced():
                _try(numbers)
            _faults[numbers] = None
        except Exception as fault:  # a compiler may lack anything
            _refuse(numbers, fault)
    return _faults[numbers]


def _refuse(numbers: _Numbers, fault: Exception) -> None:
    """Remembers why kernels cannot be used, and says each reason once."""
    why = str(fault).partition("\n")[0] or type(fault).__name__
    because = f"kernels cannot be used here, {why}"
    if because not in _faults.values():
        warnings.warn(f"torch computes statistics: {because}", RuntimeWarning, stacklevel=2)
    _faults[numbers] = because


@contextmanager
def _announced() -> Iterator[None]:
    """Says on a terminal that kernels are compiled, where it takes long."""

    def say() -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write("mha: the kernels of the statistics are compiled, once on a machine\n")

    timer = Timer(_SILENT_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _try(numbers: _Numbers) -> None:
    """Raises an error where kernels do not give what torch gives in float64, in a small random
    case.
    """
    device, dtype, width = numbers
    generator, n, heads = torch.Generator().manual_seed(0), 130, range(2)
    q, k = (torch.randn(1, h, n, width, generator=generator).to(device, dtype) for h in (2, 1))
    ids = tuple(torch.randint(9, (n,), generator=generator).tolist())
    axis = Axis((ids,), ((),), n, "right", device)
    request = make_statistics_request(Axes(axis, axis, True, lambda word: -1, dtype_name(dtype)))
    attention = ScoredAttention(q=q, k=k, scale=width**-0.5, allowed=causal())
    sums = kernel_sums(attention, request, heads)
    right = reduce_blocks(replace(attention, q=q.double(), k=k.double()), request, heads, {})
    for name in sums.keys() & right.statistics.keys():
        ours, exact = sums[name].cpu(), right.statistics[name].cpu()
        error = ((ours - exact).abs() / exact.abs().clamp(min=1)).amax()
        if not error <= TOLERANCE:
            raise ArithmeticError(f"{name} differs from torch's by {error:.1e}")


# ----------------------------------------------------------------------------------------- the sums


def kernel_sums(attention: ScoredAttention, request: StatisticsRequest, heads: range) -> Sums:
    """The sums of some neighbouring heads, on the device and the stream of the attention. Nothing
    waits for them.
    """
    most = max(1, TEMPORARY_BYTES // _bytes_per_head(attention, request))
    parts = [heads[start : start + most] for start in range(0, len(heads), most)]
    rows = [
        joined([_of_heads(attention, request, b, part) for part in parts])
        for b in range(attention.shape[0])
    ]
    return joined(rows, axis=0)


def _tiles(q: Tensor) -> Tiles:
    """The tiles for such queries."""
    is_new = q.is_cuda and torch.cuda.get_device_capability(q.device) >= (9, 0)
    width = next(width for width in WIDTHS if width >= q.shape[3])
    return TILES[90 if is_new else 80, q.dtype.itemsize, width]


def _bytes_per_head(attention: ScoredAttention, request: StatisticsRequest) -> int:
    """The temporary memory for a head: the sums over the queries of a tile, and a mask that is no
    band, of all sequences, and a bias while they are made.
    """
    batch, _, n_q, n_k = attention.shape
    of_mask = 0 if mask_of(attention.allowed).cells is None else 4 * batch
    of_bias = 0 if attention.bias is None else 8
    n_groups = -(-n_q // min(_tiles(attention.q).side, request.block))
    return n_k * (4 * n_groups + n_q * (of_mask + of_bias))


def _added(
    attention: ScoredAttention, batch: int, heads: range
) -> Float[Tensor, "_head query key"] | None:
    """What is added to the scores of a sequence: a bias, and what hides cells."""
    if attention.bias is None and mask_of(attention.allowed).cells is None:
        return None
    every_q, every_k = (torch.arange(n, device=attention.q.device) for n in attention.shape[2:])
    added = None
    if attention.bias is not None:
        added = attention.bias(batch, heads, every_q, every_k)
    if mask_of(attention.allowed).cells is not None:
        seen = planes_of(attention.visible(every_q, every_k), batch, heads)
        nothing = attention.q.new_zeros((), dtype=torch.bfloat16)
        added = torch.where(seen, nothing if added is None else added, HIDDEN)
    assert added is not None
    return added.expand(-1, *attention.shape[2:]).contiguous()


def _padded(vectors: Tensor) -> Tensor:
    """Vectors with as many columns as a product of tiles needs, a power of two."""
    width = vectors.shape[-1]
    n_more = max(16, 1 << (width - 1).bit_length()) - width
    return pad(vectors, (0, n_more)) if n_more else vectors.contiguous()


def _of_heads(
    attention: ScoredAttention, request: StatisticsRequest, batch: int, heads: range
) -> Sums:
    """The sums of some heads of a sequence, `[1, head, …]`."""
    from .kernels import diagonals, rows  # of an extra

    n_q, n_k = attention.shape[2:]
    n_sharing = attention.shape[1] // attention.n_kv_heads
    some = slice(heads.start, heads.stop)
    q = _padded(attention.q[batch, some])
    k = _padded(attention.k[batch, heads.start // n_sharing : -(-heads.stop // n_sharing)])
    added, sinks = _added(attention, batch, heads), None
    if attention.sink_logits is not None:
        sinks = attention.sink_logits.expand(attention.shape[:3])[batch, some].float() * LOG2_E
    (side, warps, stages), block = _tiles(attention.q), request.block
    group, n_rows = min(side, block), -(-n_q // side)
    n_diagonals = n_rows + -(-n_k // side) - 1
    n_columns = -(-n_k // block) * block
    sums = torch.empty(len(OF_QUERIES) + 2, len(q), n_q, device=q.device)
    lse = torch.empty(len(q), n_q, dtype=torch.float64, device=q.device)
    copies = torch.empty(2, len(q), n_diagonals, device=q.device)
    shapes = (
        (len(q), -(-n_q // block) * (block // group), n_columns),
        (len(q), 2, n_diagonals + 1, side),
    )
    zeros = torch.zeros(sum(map(prod, shapes)), device=q.device)
    of_rows, profile = map(Tensor.view, zeros.split([*map(prod, shapes)]), shapes)
    softcap = None if attention.softcap is None else attention.softcap * LOG2_E
    per_head = 0 if added is None or len(added) == 1 else n_q
    band = mask_of(attention.allowed).band
    rule = (attention.scale * LOG2_E, *band, softcap, added, per_head)
    shape = heads.start % n_sharing, n_sharing, n_q, n_k, rule
    given = {
        "WIDTH": q.shape[2],
        "N": side,
        "PRECISION": "ieee" if os.environ.get("MHA_KERNELS") == "ieee" else "tf32x3",
        "num_warps": warps,
        "num_stages": stages,
        "enable_fp_fusion": True,  # versions of triton differ in it
    }
    *of_queries, reference, log = sums
    tokens = tuple(labels[batch] for labels in request.labels)
    with torch.cuda.device_of(q):
        rows[len(q), n_rows](q, k, sinks, request.marks[batch], sums, lse, *shape, **given)
        diagonals[len(q), n_diagonals](
            *(q, k, reference, log, tokens, of_rows, profile, copies, *of_rows.shape[1:], *shape),
            IS_SELF=request.axes.is_self,
            GROUP=group,
            **given,
        )
    start = n_rows * side - n_q + 1
    by_distance = profile.sum(dim=1).flatten(1)[:, start : start + n_q + n_k - 1]
    of_cells = of_rows.view(len(q), -1, block // group, n_columns // block, block)
    same, after = copies.sum(dim=2, dtype=torch.float64)
    found = {
        **dict(zip(OF_QUERIES, of_queries, strict=True)),
        "received": of_rows.sum(dim=1)[:, :n_k],
        "map": of_cells.sum(dim=(2, 4)),
        "profile": by_distance,
        "duplicate": same,
        "induction": after,
        "lse": lse,
    }
    return {name: numbers[None] for name, numbers in found.items()}
