"""The statistics of heads by the kernels of `kernels`: when, with which tiles, and the calls."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from threading import Timer
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .axes import Axes, Axis, StatisticsRequest, make_statistics_request
from .core import dtype_name
from .masks import causal, mask_of
from .scores import LARGE_ON_DEVICE, LOG2_E, Attention, ScoredAttention

OF_QUERIES = ("mass", "entropy", "squares", "peak", "distance", "first", "leading")
"""The first rows of what `kernels.rows` writes of each query. Behind them are the largest score to
base 2, the logarithm of the sum of all powers relative to it, and the reference and the logarithm
by which weights are made, in which a sink takes part."""
TEMPORARY_BYTES = 1 << 28
"""Memory beside the results, at most: heads and sequences are reduced in parts."""
MIN_TOKENS = 512
"""Fewer are left to torch, so that a short text compiles nothing."""
MAX_TOKENS = 1 << 16
"""One head of more takes more memory."""
TOLERANCE = 1e-4
"""The largest difference from torch in float64, relative to numbers above 1."""


class Tiles(NamedTuple):
    """Queries and keys of a tile of `rows`, and of one of `diagonals`, which is square; warps and
    stages of each.
    """

    rows: tuple[int, int]
    side: int
    warps: tuple[int, int] = (4, 4)
    stages: tuple[int, int] = (2, 2)


TILES = {
    (2, 64): Tiles((64, 64), 64),
    (2, 128): Tiles((64, 64), 64),
    (2, 256): Tiles((64, 32), 32),
    (4, 64): Tiles((64, 64), 64),
    (4, 128): Tiles((64, 32), 32),
    (4, 256): Tiles((32, 32), 32),
}
"""By the bytes of a number and the width of a head, at most. They are fixed, since the order of
sums depends on them."""
MAX_WIDTH = 256


_NOT_CHOSEN = "kernels are chosen by MHA_KERNELS=1"
PADDED_APART = "texts of other lengths than their contexts are padded on the left"


class _Numbers(NamedTuple):
    """What a trial of the kernels is for."""

    device: torch.device
    dtype: torch.dtype
    width: int


class KernelSums(NamedTuple):
    """The sums that kernels made, by their names in `BLOCK_STATISTICS`, the log-sum-exp to base 2,
    −∞ without keys, and z where it was not given. They hold where `is_exact`: torch has to make
    those of scores that float32 does not hold.
    """

    statistics: dict[str, Tensor]
    lse: Float[Tensor, "batch head query"]
    z: Float[Tensor, "batch head query d_v"] | None
    is_exact: Bool[Tensor, ""]


# ----------------------------------------------------------------------------------------- a choice


_faults: dict[_Numbers, str | None] = {}
"""Why kernels cannot be used for such numbers, None where they can, as this process found."""
_SILENT_S = 1.0
"""Seconds of compilation before it is announced."""


def runs_kernels(device: torch.device) -> bool:
    """Whether a device may run kernels."""
    return device.type == "cuda"


def reducer_on(device: torch.device) -> str:
    """What computes the statistics of usual heads on a device, after a trial."""
    if not is_chosen():
        return f"torch: {_NOT_CHOSEN}"
    because = _fault(_Numbers(device, torch.float32, 64))
    return f"kernels of {compiler_on(device)}" if because is None else f"torch: {because}"


def compiler_on(device: torch.device) -> str | None:
    """The compiler of the kernels that compute statistics on a device; None where torch does."""
    is_refused = any(fault for numbers, fault in _faults.items() if numbers.device == device)
    if not runs_kernels(device) or not is_chosen() or is_refused:
        return None
    try:
        return f"triton {metadata.version('triton')}"
    except metadata.PackageNotFoundError:
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
    if _width(attention) > MAX_WIDTH:
        return f"kernels take heads of at most {MAX_WIDTH} columns"
    if any(map(request.axes.ahead, range(batch))):
        return PADDED_APART
    if attention.has_large_scores:
        return "some scores are larger than float32 holds"
    if attention.z is None and not attention.has_finite_values:
        return "some values are NaN or infinite"
    if _bytes_of_mask(attention) + _bytes_per_head(attention, request) > TEMPORARY_BYTES:
        return f"a mask or bias of this text takes more than {TEMPORARY_BYTES >> 20} MiB"
    return _fault(_numbers_of(attention))


def sums_of_kernels(
    attention: Attention, request: StatisticsRequest, heads: range
) -> KernelSums | None:
    """The sums of some neighbouring heads; None where kernels do not make them."""
    if not isinstance(attention, ScoredAttention) or not runs_kernels(attention.q.device):
        return None
    if no_kernels_because(attention, request) is not None:
        return None
    try:
        return kernel_sums(attention, request, heads)
    except Exception as fault:  # the trial has neither mask nor bias
        _refuse(_numbers_of(attention), fault)
        return None


def _numbers_of(attention: ScoredAttention) -> _Numbers:
    return _Numbers(attention.q.device, attention.q.dtype, attention.q.shape[3])


def _fault(numbers: _Numbers) -> str | None:
    """Why kernels cannot be used for such numbers: the first time, by a small random case."""
    if numbers not in _faults:
        try:
            with _announced():
                error = _trial(numbers)
            if not error <= TOLERANCE:
                raise ArithmeticError(f"they differ from torch by {error:.1e}")
            _faults[numbers] = None
        except Exception as fault:  # a compiler may lack anything
            _refuse(numbers, fault)
    return _faults[numbers]


def _refuse(numbers: _Numbers, fault: Exception) -> None:
    """Remembers why kernels cannot be used, and says it."""
    why = str(fault).partition("\n")[0] or type(fault).__name__
    _faults[numbers] = f"kernels cannot be used here, {why}"
    warnings.warn(f"torch computes statistics: {_faults[numbers]}", RuntimeWarning, stacklevel=2)


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


def _trial(numbers: _Numbers) -> float:
    """The largest difference of the kernels from torch in float64, relative to numbers above 1, in
    a small random case.
    """
    from .statistics import reduce_heads  # which asks this file

    device, dtype, width = numbers
    generator, n, heads = torch.Generator().manual_seed(0), 130, range(2)
    q, k = (torch.randn(1, h, n, width, generator=generator).to(device, dtype) for h in (2, 1))
    ids = tuple(torch.randint(9, (n,), generator=generator).tolist())
    axis = Axis((ids,), ((),), n, "right", device)
    axes = Axes(axis, axis, True, lambda word: -1, dtype_name(dtype))
    attention = ScoredAttention(q=q, k=k, scale=width**-0.5, allowed=causal())
    request = make_statistics_request(axes)
    ours = kernel_sums(attention, request, heads)
    right = reduce_heads(replace(attention, q=q.double(), k=k.double()), request, heads)
    pairs = [(ours.lse / LOG2_E, right.lse)]
    pairs += [(ours.statistics[name], right.statistics[name]) for name in ours.statistics]
    errors = [
        (sums.double().cpu() - exact.double().cpu()).abs() / exact.double().cpu().abs().clamp(min=1)
        for sums, exact in pairs
    ]
    return max(float(error.amax()) for error in errors)


# ----------------------------------------------------------------------------------------- the sums


def kernel_sums(attention: ScoredAttention, request: StatisticsRequest, heads: range) -> KernelSums:
    """The sums of some neighbouring heads, on the device and the stream of the attention. Nothing
    waits for them.
    """
    batch, _, n_q, n_k = attention.shape
    cells = None
    if mask_of(attention.allowed).cells is not None:
        every = (torch.arange(n, device=attention.q.device) for n in (n_q, n_k))
        cells = attention.visible(*every).expand(attention.shape).view(torch.uint8)
    most = (TEMPORARY_BYTES - _bytes_of_mask(attention)) // _bytes_per_head(attention, request)
    sequences = _parts(range(batch), most)
    some_heads = _parts(heads, most // len(sequences[0]))
    rows = [
        _joined([_of_part(attention, request, cells, texts, some) for some in some_heads], 1)
        for texts in sequences
    ]
    return _joined(rows, 0)


def _parts(whole: range, most: int) -> list[range]:
    """The range in parts of at most so many, at least one."""
    return [whole[start : start + max(1, most)] for start in range(0, len(whole), max(1, most))]


def _joined(parts: list[KernelSums], axis: int) -> KernelSums:
    """The sums of all parts."""
    if len(parts) == 1:
        return parts[0]
    statistics, lse, z, is_exact = zip(*parts, strict=True)
    return KernelSums(
        {name: torch.cat([sums[name] for sums in statistics], axis) for name in statistics[0]},
        torch.cat(lse, axis),
        None if z[0] is None else torch.cat(z, axis),
        torch.stack(is_exact).all(),
    )


def _width(attention: ScoredAttention) -> int:
    """The columns of queries, or of values that z is made of, if they are more."""
    values = attention.v
    of_values = 0 if values is None or attention.z is not None else values.shape[3]
    return max(attention.q.shape[3], of_values)


def _tiles(attention: ScoredAttention) -> Tiles:
    """The tiles for the dtype and the width of an attention."""
    width = next(w for w in (64, 128, MAX_WIDTH) if w >= _width(attention))
    return TILES[attention.q.dtype.itemsize, width]


def _bytes_of_mask(attention: ScoredAttention) -> int:
    """The memory of a mask that is no band, while it is made."""
    if mask_of(attention.allowed).cells is None:
        return 0
    _, _, n_q, n_k = attention.shape
    first = torch.zeros(1, dtype=torch.int64, device=attention.q.device)
    return 2 * n_q * n_k * attention.visible(first, first)[..., 0, 0].numel()


def _bytes_per_head(attention: ScoredAttention, request: StatisticsRequest) -> int:
    """The memory of the sums over the queries of a tile, and of a bias while it is made."""
    _, _, n_q, n_k = attention.shape
    of_rows = 4 * -(-n_q // min(_tiles(attention).side, request.block)) * n_k
    return of_rows if attention.bias is None else of_rows + 8 * n_q * n_k


def _of_part(
    attention: ScoredAttention,
    request: StatisticsRequest,
    cells: Tensor | None,
    sequences: range,
    heads: range,
) -> KernelSums:
    """The sums of some sequences and heads."""
    from .kernels import diagonals, rows  # of an extra

    _, n_all, n_q, n_k = attention.shape
    n_sharing = n_all // attention.n_kv_heads
    texts = slice(sequences.start, sequences.stop)
    of_heads = texts, slice(heads.start, heads.stop)
    of_keys = texts, slice(heads.start // n_sharing, (heads.stop - 1) // n_sharing + 1)
    q, k = attention.q[of_heads].contiguous(), attention.k[of_keys].contiguous()
    v = None if attention.v is None or attention.z is not None else attention.v[of_keys]
    v = None if v is None else v.contiguous()
    z = None if v is None else v.new_empty(*q.shape[:3], v.shape[3])
    bias = sinks = None
    if attention.bias is not None:
        every_q, every_k = (torch.arange(n, device=q.device) for n in (n_q, n_k))
        biases = [attention.bias(b, heads, every_q, every_k) for b in sequences]
        bias = biases[0][None] if len(biases) == 1 else torch.stack(biases)
        bias = bias.expand(*q.shape[:3], n_k)
    if attention.sink_logits is not None:
        sinks = attention.sink_logits.expand(attention.shape[:3])[of_heads][..., None]
    tiles, block = _tiles(attention), request.block
    (m, n), side, group = tiles.rows, tiles.side, min(tiles.side, block)
    sums = torch.empty(len(OF_QUERIES) + 4, *q.shape[:3], device=q.device)
    n_groups, n_columns = -(-n_q // block) * (block // group), -(-n_k // block) * block
    of_rows = torch.zeros(*q.shape[:2], n_groups, n_columns, device=q.device)
    # the diagonals of tiles in which some query sees some key
    band = mask_of(attention.allowed).band
    n_rows, n_tiles = -(-n_q // side), -(-n_k // side)
    first = min(max(1 - n_rows, -(-(band.low - side + 1) // side)), n_tiles - 1)
    n_diagonals = max(1, min(n_tiles, (band.high + side - 1) // side + 1) - first)
    profile = torch.zeros(*q.shape[:2], 2, n_diagonals + 1, side, device=q.device)
    copies = torch.empty(*q.shape[:2], n_diagonals, 2, device=q.device)
    softcap = None if attention.softcap is None else attention.softcap * LOG2_E
    planes = (_plane(bias), _plane(None if cells is None else cells[of_heads]))
    shape = (len(heads), k.shape[1], heads.start % n_sharing, n_sharing), n_q, n_k
    rule = (attention.scale * LOG2_E, *band, softcap, *planes)
    given = {
        "D": q.shape[3],
        "WIDTH": _padded(q.shape[3]),
        "PRECISION": "ieee" if os.environ.get("MHA_KERNELS") == "ieee" else "tf32x3",
        "enable_fp_fusion": True,
    }
    with torch.cuda.device_of(q):
        rows[len(sequences) * len(heads), -(-n_q // m)](
            *(q, k, v, _plane(sinks), request.marks[texts], sums, z, *shape, rule),
            D_V=0 if v is None else v.shape[3],
            WIDTH_V=_padded(0 if v is None else v.shape[3]),
            M=m,
            N=n,
            num_warps=tiles.warps[0],
            num_stages=tiles.stages[0],
            **given,
        )
        diagonals[len(sequences) * len(heads), n_diagonals](
            *(q, k, sums, tuple(labels[texts] for labels in request.labels)),
            *(of_rows, profile, copies, *shape, rule, first, n_groups, n_columns),
            N=side,
            GROUP=group,
            IS_SELF=request.axes.is_self,
            num_warps=tiles.warps[1],
            num_stages=tiles.stages[1],
            **given,
        )
    start = (first - 1) * side + n_q - 1
    end = n_q + n_k - 1 - start - (n_diagonals + 1) * side
    of_copies = copies.sum(dim=2, dtype=torch.float64)
    statistics = dict(zip(OF_QUERIES, sums, strict=False)) | {
        "received": of_rows.sum(dim=2)[..., :n_k],
        "map": of_rows.unflatten(3, (-1, block))
        .sum(dim=4)
        .unflatten(2, (-1, block // group))
        .sum(dim=3),
        # a width below 0 cuts
        "profile": torch.nn.functional.pad(profile.sum(dim=2).flatten(2), (start, end)),
        "duplicate": of_copies[..., 0],
        "induction": of_copies[..., 1],
    }
    top, log_of_keys, reference, _ = sums[len(OF_QUERIES) :]
    is_exact = reference.abs().amax() <= LARGE_ON_DEVICE * LOG2_E
    return KernelSums(statistics, top.double() + log_of_keys, z, is_exact)


def _padded(width: int) -> int:
    """The columns of a tile: a power of two, as many as a product of tiles needs."""
    return max(16, 1 << max(0, width - 1).bit_length())


def _plane(cells: Tensor | None) -> tuple[Tensor | int, ...] | None:
    """A tensor `[batch, head, query, key]` as kernels read it: with its strides."""
    return None if cells is None else (cells, *cells.stride())
