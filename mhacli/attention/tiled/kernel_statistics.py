"""All statistics of a pattern by the Triton kernel: what it is given, how it is started, and what is made of its sums.

A mask is arithmetic on places and ids (`masks.Arithmetic`), or else numbers that are added to the scores of a strip of queries.
Conditions are comparisons (`comparisons`), or else left to the tiles of torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import compress
from typing import NamedTuple

import torch
import triton
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mhacli.attention.core import visible_cells
from mhacli.attention.masks import Arithmetic, Chosen, arithmetic_of
from mhacli.attention.tiled.comparisons import comparisons_of
from mhacli.attention.tiled.kernel import ALWAYS, FIRST, LEADING, NO_KEY, NO_QUERY, NO_TOKEN, NOR_THIS, reduce_pattern
from mhacli.attention.tiled.reduction import ADDED_BYTES, ROWS, Launch, launch_for, n_programs
from mhacli.attention.tiled.scores import LOG2_E, Scores, VirtualPattern
from mhacli.attention.tiled.statistics import ChosenCells, Statistics, StatisticsRequest
from mhacli.attention.tiled.tiles import PENALTY, indices, n_cells, reduce_tiles

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernel, on the CPU. It multiplies bfloat16 as if they were integers."""
_WIDE_FLOAT32 = 64
"""Numbers of a head in float32 that are multiplied at once."""
_UNIT, _ALIGNMENT = 16, 16
"""Numbers by which steps are counted where they are multiples of it, and bytes: what the compiler must know to load several
numbers at once."""
_FINE, _COARSE = 1, 8
"""Queries and keys that a map is summed by first, if its own cells are no larger than a tile: so few, that few are compiled."""


def kernel_statistics(
    pattern: VirtualPattern,
    request: StatisticsRequest,
    report_progress: Callable[[int], None] = lambda cells: None,
    *,
    launch: Launch | None = None,
) -> Statistics:
    """What `summarise` returns, by the kernel, of a pattern that it can reduce (`reducer.refusal`)."""
    q = pattern.scores.q
    launch = launch_for(q.dtype.itemsize, q.shape[3]) if launch is None else launch
    n_queries, like, known = pattern.shape[2], pattern.like, arithmetic_of(pattern.allowed)
    mask = Arithmetic() if known is None else known
    inputs = _Inputs(
        pattern.scores,
        (pattern.lse.to(like) * LOG2_E).contiguous(),
        *_ids(pattern, request, mask),
        _Chosen.made(pattern, request),
        mask,
        request,
    )
    sums = _Sums.made(pattern, request, len(inputs.chosen.places), launch)
    is_added, total = known is None or pattern.scores.bias is not None, n_cells(pattern)
    step = _queries_at_once(pattern, launch) if is_added else n_queries
    for start in range(0, n_queries, step):
        queries = range(start, min(start + step, n_queries))
        _start(inputs, sums, queries, _added(pattern, queries, known) if is_added else None, launch)
        report_progress(total * len(queries) // n_queries)
    return sums.statistics(pattern, request, inputs.chosen, launch)


class _Chosen(NamedTuple):
    """The cells that a request chooses itself, as comparisons: those of the conditions that can be written so, by their `numbers`
    in the request, and behind them the keys of every span."""

    places: Int[Tensor, "chosen 3"]
    of_queries: Int[Tensor, "comparison 2 batch query"]
    of_keys: Int[Tensor, "comparison batch key"]
    numbers: tuple[int, ...]

    @classmethod
    def made(cls, pattern: VirtualPattern, request: StatisticsRequest) -> _Chosen:
        """The comparisons of all sequences side by side."""
        (batch, _, n_queries, n_keys), device = pattern.shape, pattern.like.device
        low, keys, places, numbers = list[Tensor](), list[Tensor](), list[tuple[int, int, int]](), list[int]()
        for number, matches in enumerate(request.matches):
            texts = [comparisons_of(condition, n_queries, n_keys, device) for condition in matches]
            known = [text for text in texts if text is not None]
            if not known or len(known) < len(texts):
                continue
            n_before, table = len(keys), known[0].table
            low += torch.stack([torch.stack([text.low, text.high], dim=1) for text in known], dim=2).unbind()
            keys += torch.stack([text.key for text in known], dim=1).unbind()
            places.append((n_before, len(keys), table - (table >> 31 << 32)))
            numbers.append(number)
        one = torch.ones(2, batch, n_queries, dtype=torch.int32, device=device)
        for marked in () if request.k_spans is None else request.k_spans.to(device, torch.int32).unbind(dim=1):
            places.append((len(keys), len(keys) + 1, 2))
            low, keys = [*low, one], [*keys, marked]
        of_queries = torch.stack(low) if low else one.new_empty(0, *one.shape)
        of_keys = torch.stack(keys) if keys else one.new_empty(0, batch, n_keys)
        return cls(one.new_tensor(places).view(-1, 3), of_queries, of_keys, tuple(numbers))


class _Inputs(NamedTuple):
    """What the kernel reads, beside what is added to scores."""

    scores: Scores
    lse: Float[Tensor, "batch head query"]
    q_ids: Int[Tensor, "2 batch query"]
    k_ids: Int[Tensor, "4 batch key"]
    chosen: _Chosen
    mask: Arithmetic
    request: StatisticsRequest


class _Sums(NamedTuple):
    """What the kernel adds to: per query whole, per key and distance a part of each program, and the map by rows of a few
    queries."""

    rows: Float[Tensor, "9 batch head query"]
    chosen: Float[Tensor, "chosen batch head query"]
    received: Float[Tensor, "program batch head key"]
    profile: Float[Tensor, "program batch head distance"]
    cells: Float[Tensor, "batch head row column"]

    @classmethod
    def made(cls, pattern: VirtualPattern, request: StatisticsRequest, n_chosen: int, launch: Launch) -> _Sums:
        """All 0."""
        (batch, n_heads, n_queries, n_keys), zeros = pattern.shape, pattern.like.new_zeros
        n = n_programs(launch, batch * n_heads, n_queries, n_keys)
        rows, columns = _cell(request.block, launch)
        return cls(
            zeros(ROWS, batch, n_heads, n_queries),
            zeros(n_chosen, batch, n_heads, n_queries),
            zeros(n, batch, n_heads, n_keys),
            zeros(n, batch, n_heads, n_queries + n_keys - 1),
            zeros(batch, n_heads, -(-n_queries // rows), -(-n_keys // columns)),
        )

    def statistics(
        self, pattern: VirtualPattern, request: StatisticsRequest, chosen: _Chosen, launch: Launch
    ) -> Statistics:
        """The sums of all programs, in their order, in nats, and what the kernel leaves to torch."""
        mass, bits, squares, peak, distance, first, leading, duplicate, induction = self.rows
        is_other = [number not in chosen.numbers for number in range(len(request.matches))]
        others = replace(request, matches=tuple(compress(request.matches, is_other)), q_spans=None, k_spans=None)
        cells = ChosenCells(pattern, others)
        if cells.reducers:
            reduce_tiles(pattern, cells.reducers)
        n, conditions = len(chosen.numbers), self.chosen.double().sum(dim=-1)
        matched = cells.matched.new_zeros(*mass.shape[:2], len(request.matches))
        matched[..., [not other for other in is_other]] = conditions[:n].movedim(0, -1)
        matched[..., is_other] = cells.matched
        return Statistics(
            mass=mass,
            entropy=(bits * math.log(2)).clamp(min=0),
            squares=squares,
            peak=peak * math.log(2),
            distance=distance,
            first=first,
            leading=leading,
            received=self.received.sum(dim=0),
            map=_blocks(self.cells, request.block, _cell(request.block, launch)),
            profile=self.profile.sum(dim=0),
            duplicate=duplicate.double().sum(dim=-1),
            induction=induction.double().sum(dim=-1),
            matched=matched,
            between=_between(self.chosen[n:], request) if request.q_spans is not None else cells.between,
        )


def grain_of(block: int, launch: Launch) -> int:
    """How many queries and keys a map of such blocks is summed by first: one of three numbers, so that a text of another length
    seldom needs another kernel."""
    return max(grain for grain in (_FINE, _COARSE, launch.keys) if grain <= block)


def _cell(block: int, launch: Launch) -> tuple[int, int]:
    """Queries and keys of a cell of what the kernel sums first."""
    grain = grain_of(block, launch)
    return (launch.queries, block) if grain == launch.keys else (grain, grain)


def _between(
    of_spans: Float[Tensor, "span batch head query"], request: StatisticsRequest
) -> Float[Tensor, "batch head span span"]:
    """The mass from the queries of each span to the keys of each."""
    assert request.q_spans is not None
    mass: Tensor = request.q_spans.to(of_spans.device).double()[:, None] @ of_spans.double().permute(1, 2, 3, 0)
    return mass


def _blocks(
    cells: Float[Tensor, "batch head row column"], block: int, cell: tuple[int, int]
) -> Float[Tensor, "batch head query_block key_block"]:
    """Sums over blocks of cells that are so many queries and keys large; the last may have fewer."""
    for dim, size in enumerate(cell, start=2):
        n, columns = block // size, cells.movedim(dim, -1)
        columns = torch.nn.functional.pad(columns, (0, -columns.shape[-1] % n))
        cells = columns.unflatten(-1, (-1, n)).sum(dim=-1).movedim(-1, dim)
    return cells


def _ids(
    pattern: VirtualPattern, request: StatisticsRequest, mask: Arithmetic
) -> tuple[Int[Tensor, "2 batch query"], Int[Tensor, "4 batch key"]]:
    """What the kernel knows of each query and key: its id in the mask and its tokens, and the marks of keys."""
    (batch, _, n_queries, n_keys), like = pattern.shape, pattern.like
    q_idx, k_idx = indices(range(n_queries), like), indices(range(n_keys), like)
    q_seen, k_seen = _all_of(mask.queries, q_idx), _all_of(mask.keys, k_idx)
    q_text, k_text = (
        (q_idx[:1, None], q_idx[:1, None])
        if mask.ids is None
        else (ids.to(like.device)[:, idx] for ids, idx in zip(mask.ids, (q_idx, k_idx), strict=True))
    )
    q_id = torch.where(q_seen, q_text, NO_QUERY.value)
    k_id = torch.where(k_seen, k_text, NO_KEY.value)
    marks = request.first * FIRST.value + request.leading * LEADING.value
    if mask.always is not None:
        marks = marks + mask.always(k_idx) * ALWAYS.value
    of_keys = (torch.where(tokens < 0, NOR_THIS.value, tokens) for tokens in (request.k_tokens, request.before_k))
    return (
        _side_by_side(batch, q_id, request.q_tokens.clamp(min=NO_TOKEN.value)),
        _side_by_side(batch, k_id, *of_keys, marks),
    )


def _all_of(rules: Sequence[Chosen], idx: Int[Tensor, " idx"]) -> Bool[Tensor, "_batch idx"]:
    return reduce(torch.bitwise_and, (rule(idx) for rule in rules), torch.ones_like(idx, dtype=torch.bool)[None])


def _side_by_side(batch: int, *numbers: Int[Tensor, "_batch idx"]) -> Int[Tensor, "n batch idx"]:
    return torch.stack([row.to(torch.int32).expand(batch, -1) for row in numbers])


def _queries_at_once(pattern: VirtualPattern, launch: Launch) -> int:
    """How many queries what is added to scores is made for: whole blocks."""
    batch, n_heads, n_queries, n_keys = pattern.shape
    n = ADDED_BYTES // (4 * batch * n_heads * n_keys) // launch.queries * launch.queries
    return min(n_queries, max(launch.queries, n))


def _added(pattern: VirtualPattern, queries: range, mask: Arithmetic | None) -> Float[Tensor, "_batch _head query key"]:
    """What is added to the scores of some queries: their bias, and the penalty of a mask that is no arithmetic."""
    (batch, n_heads, _, n_keys), like = pattern.shape, pattern.like
    q_idx, k_idx = indices(queries, like), indices(range(n_keys), like)
    added = like.new_zeros(1, 1, len(queries), n_keys)
    bias = pattern.scores.bias
    if bias is not None:
        planes = [
            torch.stack([bias(b, h, q_idx, k_idx).expand(added.shape[2:]) for h in range(n_heads)])
            for b in range(batch)
        ]
        added = torch.stack(planes).to(like)
    keep = visible_cells(pattern.allowed, q_idx, k_idx) if mask is None else None
    return added if keep is None else torch.where(keep, added, PENALTY)


def _start(inputs: _Inputs, sums: _Sums, queries: range, added: Tensor | None, launch: Launch) -> None:
    """Starts the kernel for some queries of all heads."""
    scores, request, mask, chosen = inputs.scores, inputs.request, inputs.mask, inputs.chosen
    (batch, n_heads, n_queries, n_keys), d_head = scores.shape, scores.q.shape[3]
    n_parts = max(scores.n_parts, -(-d_head // _WIDE_FLOAT32) if scores.q.dtype == torch.float32 else 1)
    wide = inputs.lse.new_zeros(1, 1, 1, 1) if added is None else added
    steps = [0 if size == 1 else step for size, step in zip(wide.shape, wide.stride(), strict=True)]
    programs, cap = sums.received.shape[0], scores.softcap
    unit = _unit_of(scores.q, scores.k)
    (*q_steps, q_d), (*k_steps, k_d) = (tensor.stride() for tensor in (scores.q, scores.k))
    with torch.cuda.device_of(scores.q):
        reduce_pattern[(programs * batch * n_heads,)](
            scores.q, scores.k, inputs.lse, inputs.q_ids, inputs.k_ids,
            chosen.places, chosen.of_queries, chosen.of_keys, wide, *sums,
            *(step // unit for step in q_steps), q_d, *(step // unit for step in k_steps), k_d, *steps,
            programs, batch * n_heads, n_heads, n_heads // scores.k.shape[1], n_queries, n_keys,
            queries.start, queries.stop, *mask.band, *mask.near,
            scores.scale * LOG2_E if cap is None else 2.0 * scores.scale / cap, 1.0 if cap is None else cap * LOG2_E,
            request.block, *sums.cells.shape[2:], len(chosen.places),
            Q=launch.queries, K=launch.keys, D_HEAD=d_head,
            WIDTH=max(16, triton.next_power_of_2(-(-d_head // n_parts))), N_PARTS=n_parts,
            WIDENS=IS_INTERPRETED and scores.q.dtype == torch.bfloat16, UNIT=unit, GRAIN=grain_of(request.block, launch),
            HAS_SOFTCAP=cap is not None, HAS_ADDED=added is not None, HAS_NEAR=mask.always is not None,
            HAS_CHOSEN=len(chosen.places) > 0, IS_BAND=not any((mask.always, mask.ids, mask.queries, mask.keys)),
            IS_SELF=request.is_self, num_warps=launch.warps, enable_fp_fusion=True,
        )  # fmt: skip


def _unit_of(*tensors: Tensor) -> int:
    """By what the steps of the tensors can be counted, where they also begin at such a place."""
    steps = [
        step for tensor in tensors for size, step in zip(tensor.shape[:3], tensor.stride(), strict=False) if size > 1
    ]
    is_aligned = all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors)
    return _UNIT if is_aligned and not any(step % _UNIT for step in steps) else 1
