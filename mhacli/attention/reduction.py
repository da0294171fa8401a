"""Every statistic of some heads, by what computes it on their device; and the same statistics of
uniform attention.
"""

from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from mhacli.io.long_work import Progress, no_progress

from . import on_device
from .axes import StatisticsRequest
from .devices import moved
from .masks import Band, mask_of
from .scores import LARGE_ON_DEVICE, Attention, ScoredAttention
from .statistics import (
    Cells,
    PassResults,
    Reduced,
    blocks_of,
    copies_of,
    no_block_because,
    of_first_keys,
    reduce_blocks,
    visible_in,
)


def reduce_heads(
    attention: Attention,
    request: StatisticsRequest,
    heads: range,
    report_progress: Progress = no_progress,
    *,
    is_careful: bool = False,
) -> Reduced:
    """Every statistic of some neighbouring heads, in one pass over blocks of queries and memory
    that grows with the length of the text. `report_progress` receives the completed fraction of the
    queries.
    """
    attention, made = _made_by_kernels(attention, request, heads, is_careful=is_careful)
    return reduce_blocks(attention, request, heads, made, report_progress)


def _made_by_kernels(
    attention: Attention, request: StatisticsRequest, heads: range, *, is_careful: bool
) -> tuple[Attention, PassResults]:
    """What kernels made of some heads, nothing where others have to; and the attention, which says
    so where its scores are the reason, for which the device is waited for if it `is_careful`.
    """
    if (
        not isinstance(attention, ScoredAttention)
        or reducer_of(attention, request).name != "triton"
    ):
        return attention, {}
    made = on_device.sums_of_kernels(attention, request, heads)
    if is_careful and made and not bool(made["lse"].abs().amax() <= LARGE_ON_DEVICE):
        return replace(attention, has_large_scores=True), {}
    return attention, made


class Reducer(NamedTuple):
    """What computes statistics, and why it is torch."""

    name: Literal["c", "torch", "triton"]
    torch_because: str | None = None


def reducer_of(attention: Attention, request: StatisticsRequest) -> Reducer:
    """What computes the statistics of an attention: the compiled block, kernels on a device, or
    torch.
    """
    if isinstance(attention, ScoredAttention) and on_device.runs_kernels(attention.q.device):
        because = on_device.no_kernels_because(attention, request)
        return Reducer("triton" if because is None else "torch", because)
    because = no_block_because(attention, request)
    return Reducer("c" if because is None else "torch", because)


# -------------------------------------------------------------------------------- uniform attention


def make_baseline(attention: Attention, request: StatisticsRequest) -> PassResults:
    """The statistics of uniform attention over the same visible keys, and as `visible` how many of
    them each query sees; `n_duplicate_queries` and `n_induction_queries` count the queries that see
    a copy of their token, and a token after one. By formula without a mask and with a causal one,
    on the CPU except for `visible`, else of scores that are all 0. Head axes of 1 hold for all.
    """
    batch, _, n_queries, n_keys = attention.shape
    mask, like = mask_of(attention.allowed), attention.like
    if mask.cells is None and mask.band.low == Band().low and not request.matches:
        newest = min(mask.band.high, n_keys)
        statistics = of_first_keys(newest, request.host, (batch, n_queries, n_keys))
        sums = {name: of_text[:, None].to(attention.dtype) for name, of_text in statistics.items()}
        return sums | {"visible": moved(sums["visible"], like.device)}
    first = torch.zeros(1, dtype=torch.int64, device=like.device)
    n_heads = attention.visible(first, first).shape[1]
    zeros = torch.zeros((), dtype=attention.dtype, device=like.device)
    q, k = zeros.expand(batch, n_heads, n_queries, 1), zeros.expand(batch, 1, n_keys, 1)
    reduced = reduce_heads(
        ScoredAttention(q=q, k=k, scale=1.0, allowed=mask), request, range(n_heads)
    )
    visible = torch.where(reduced.has_keys, reduced.lse.exp().round(), 0.0)
    counts = _n_copy_queries(attention, request, n_heads)
    return reduced.statistics | {"visible": visible.to(attention.dtype)} | counts


def _n_copy_queries(attention: Attention, request: StatisticsRequest, n_heads: int) -> PassResults:
    """How many queries of a text see a copy of their token, and a token after one, in so many heads
    of the mask.
    """
    batch = attention.shape[0]
    copies = copies_of(request)
    counts = {f"n_{name}_queries": labels.new_zeros(batch, n_heads) for name, labels, _ in copies}
    for queries, keys in blocks_of(attention, request):
        # a mask without an axis of the batch is that of every text
        of_texts = visible_in(attention, queries, keys).expand(batch, -1, -1, -1)
        for b, visible in enumerate(of_texts):
            cells = Cells(attention, request, b, queries, keys)
            for name, labels, shift in copies:
                are_possible = (visible & cells.equal_to(labels, shift)).any(dim=-1)
                counts[f"n_{name}_queries"][b] += are_possible.sum(dim=-1)
    return counts
