"""What is computed again of the weights after a pass, of all heads at once: the rows with the
strongest cells, z of some queries, the columns of sinks, and cells that are kept.

Nothing here waits for a device: what would have to be known first, such as how large the scores
are, is taken as usual there, and the `doubt` says afterwards whether it was.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mhacli.record.heads import MAX_LARGEST, MAX_SINKS, SINK_LIFT, Kept
from mhacli.run import cells_at_once

from .core import Matrices, QueryIdx
from .scores import (
    BLOCKS,
    LARGE_ON_DEVICE,
    Attention,
    ScoredAttention,
    by_group,
    head_groups,
    joined,
    of_group,
    rows_of,
)
from .statistics import PassResults, Reduced

_ROUNDED_SCORE = 64.0
"""A score whose rounding in a kernel's float32 shows in z."""
_MAX_EXACT_LSE = 1e8
"""The size of a log-sum-exp beyond which float64 does not give a weight by it within 1e-7."""
_ALMOST = 1.0001
"""By which a sum may be rounded that is compared with a threshold."""
_MAX_EXPONENT = 300.0
"""An exponent beyond which nothing is known of a weight; e to its power is still a number."""


class Care(NamedTuple):
    """What must be cared for: values that are not finite, scores whose rounding in a kernel shows,
    and scores too large for their log-sum-exp.
    """

    is_finite: bool = True
    is_rounded: bool = False
    is_coarse: bool = False


def care_of(reduced: Reduced, sums: PassResults) -> Care:
    """What must be cared for, by numbers that can be read."""
    attention = reduced.attention
    largest = reduced.lse.nan_to_num(nan=0.0).abs().amax().item()
    return Care(
        is_finite=_are_finite(sums),
        is_rounded=isinstance(attention, ScoredAttention) and attention.kernel != BLOCKS,
        is_coarse=isinstance(attention, ScoredAttention) and largest > _MAX_EXACT_LSE,
    )


def is_usual(sums: PassResults, kernel: str) -> bool:
    """Whether nothing has to be cared for, by numbers that can be read."""
    most = LARGE_ON_DEVICE if kernel == BLOCKS else _ROUNDED_SCORE
    return _are_finite(sums) and float(sums["doubt"].amax()) <= most


def _are_finite(sums: PassResults) -> bool:
    """Whether no log-sum-exp is NaN or infinite, and no value: 0 · NaN is NaN, also in the product
    of a value with a weight of 0.
    """
    largest = [sums[name].amax() for name in ("doubt", "z_size") if name in sums]
    return all(math.isfinite(number) for number in largest)


def cells_again(
    reduced: Reduced, baseline: PassResults, kept: Kept, care: Care, *, least: float
) -> PassResults:
    """What is computed again, by name, each `[batch, head, …]`. The `baseline` is that of these
    heads, and `least` the fraction of all attention of a sink.
    """
    strongest, rows = _strongest(reduced, baseline["visible"])
    n_kept = len(strongest["best_lift"][0, 0])
    keys = reduced.keys

    def of_rows(heads: range) -> PassResults:
        span = reduced.span(heads)
        weights, _ = reduced.weights_of(heads, rows[:, span], keys, is_coarse=care.is_coarse)
        best, best_keys = weights[:, :, :n_kept].topk(min(MAX_LARGEST, len(keys)), dim=-1)
        found = {
            "best_weight": best,
            "best_key": best_keys,
            "top_key": weights[:, :, n_kept].argmax(dim=-1),
        }
        if reduced.z is not None and reduced.attention.v is not None:
            found |= _z_again(reduced, heads, rows[:, span], weights, care)
        return found

    results = strongest | _by_heads(reduced, rows.shape[2] * len(keys), of_rows)
    results |= _columns(reduced, baseline, care, least=least)
    return results | _kept_cells(reduced, kept, care)


def _by_heads(
    reduced: Reduced, n_cells: int, function: Callable[[range], PassResults]
) -> PassResults:
    """What a function makes of all heads, as many at a time as their cells leave room for."""
    attention = reduced.attention
    group = attention.shape[1] // attention.n_kv_heads
    most = cells_at_once(attention.like.device.type) // max(1, n_cells * attention.shape[0])
    # whole groups of those that share keys, or parts of one
    most, group = (most // group * group, 1) if most >= group else (max(1, most), group)
    return joined([function(heads) for heads in head_groups(reduced.heads, group, most=most)])


def _strongest(
    reduced: Reduced, visible: Float[Tensor, "batch _head query"]
) -> tuple[PassResults, Int[Tensor, "batch head row"]]:
    """The queries with the best cells relative to uniform attention, which stand in the rows with
    the best peaks, and that with the largest score; and the rows that are computed again, in this
    order, with those whose z is checked.
    """
    peak = reduced.statistics["peak"].exp()
    lift = (peak * visible).masked_fill(visible <= 1, 0.0).nan_to_num(nan=0.0)
    lift, best = lift.topk(min(MAX_LARGEST, lift.shape[-1]), dim=-1)
    top = reduced.top_score.nan_to_num(nan=-torch.inf).argmax(dim=-1, keepdim=True)
    rows = [torch.where(lift > 0, best, top), top]
    if reduced.attention.v is not None:
        rows.append(reduced.request.checked[:, None].expand(-1, lift.shape[1], -1))
    found = {"best_lift": lift, "best_query": best, "top_query": top.squeeze(-1)}
    return found, torch.cat(rows, dim=-1)


def _z_again(
    reduced: Reduced,
    heads: range,
    rows: Int[Tensor, "batch head row"],
    weights: Float[Tensor, "batch head row key"],
    care: Care,
) -> PassResults:
    """How far z of some rows is from the products of their weights and the values, how far rounding
    of scores may have moved it, and the largest sum of magnitudes of each head.
    """
    attention = reduced.attention
    assert attention.v is not None
    assert reduced.z is not None
    v = of_group(attention.v, heads, attention.shape[1]).to(attention.dtype)
    if not care.is_finite:  # 0 · NaN is NaN, and a hidden key may hold anything
        v = v.repeat_interleave(len(heads) // v.shape[1], dim=1)
        v = v.masked_fill((weights == 0).all(dim=2)[..., None], 0.0)
    again = by_group(weights, v.to(weights.dtype))
    z = rows_of(reduced.z[:, reduced.span(heads)], rows)
    error, magnitudes = again - z, by_group(weights.to(v.dtype), v.abs())
    if not care.is_finite:
        are_both = again.isfinite() == z.isfinite()
        error = torch.where(are_both, error.nan_to_num(0.0, 0.0, 0.0), torch.inf)
        magnitudes = magnitudes.nan_to_num(nan=0.0, posinf=0.0)
    found = {
        "z_error": torch.linalg.vector_norm(error, torch.inf, dim=-1),
        "z_size": magnitudes.amax(dim=(-1, -2)),
    }
    found["z_moved"] = torch.zeros_like(found["z_error"])
    if care.is_rounded:
        lse = reduced.lse[:, reduced.span(heads)]
        is_large = lse.abs().amax(dim=-1) > _ROUNDED_SCORE
        for b, h in is_large.nonzero().cpu().tolist():
            values = v[b, h * v.shape[1] // len(heads)].to(weights.dtype)
            moved = _moved(attention, (b, heads[h]), rows[b, h], weights[b, h], values)
            found["z_moved"][b, h] = moved
    return found


def _moved(
    attention: Attention,
    place: tuple[int, int],
    queries: QueryIdx,
    weights: Float[Tensor, "query key"],
    values: Float[Tensor, "key d_v"],
) -> Float[Tensor, " query"]:
    """How far z of some queries of a sequence and head may move when a kernel rounds their scores,
    which are large, in float32.

    A dot product of n numbers is off by E = n u Σ|q||k| at most, whatever the order of summing,
    with u = 2⁻²⁴. So a weight is off by a factor between e^−E and e^E, and z by Σ p (e^E − 1) |v −
    z| / Σ p e^−E. Source: Higham 2002, "Accuracy and Stability of Numerical Algorithms", section
    3.1. Two more roundings are those of the scale and of the score itself.
    """
    assert isinstance(attention, ScoredAttention)
    (batch, head), wide = place, weights.dtype
    q = attention.q[batch, head, queries]
    k = attention.k[batch, head // (attention.shape[1] // attention.n_kv_heads)]
    products = q.to(wide).abs() @ k.to(wide).abs().mT
    of_product = (q.shape[1] + 2) * torch.finfo(torch.float32).eps / 2 * abs(attention.scale)
    off = (of_product * products).clamp(max=_MAX_EXPONENT)
    least = (weights * (-off).exp()).sum(dim=1)
    distances = [(values - z).abs().amax(dim=1) for z in weights @ values]
    sums = torch.stack(
        [(p * e.expm1() * far).sum() for p, e, far in zip(weights, off, distances, strict=True)]
    )
    farthest = torch.stack([far.amax() for far in distances])
    return torch.minimum(sums / least.clamp(min=torch.finfo(wide).tiny), farthest)


def _columns(reduced: Reduced, baseline: PassResults, care: Care, *, least: float) -> PassResults:
    """The keys that receive most, how many queries see each, and how many of these attend to it
    often. On a CPU only those of heads with a key that receives as much as a sink are counted.
    """
    received, visible = reduced.statistics["received"], baseline["visible"]
    n_queries = reduced.lse.shape[2]
    share, keys = received.topk(min(MAX_SINKS, received.shape[-1]), dim=-1)
    queries = torch.arange(n_queries, device=received.device)

    def counted(heads: range) -> PassResults:
        span = reduced.span(heads)
        weights, cells = reduced.weights_of(heads, queries, keys[:, span], is_coarse=care.is_coarse)
        uniform = visible if visible.shape[1] == 1 else visible[:, span]
        is_often = weights * uniform[..., None] >= SINK_LIFT
        n_sees = cells.expand(weights.shape).sum(dim=2)
        return {"n_sees": n_sees, "n_often": is_often.sum(dim=2)}

    results = {"sink_share": share, "sink_key": keys}
    if received.device.type != "cpu":
        return results | _by_heads(reduced, n_queries * keys.shape[-1], counted)
    results |= {name: torch.zeros_like(keys) for name in ("n_sees", "n_often")}
    may_be = may_be_sinks(received, keys, baseline["received"], least)
    for index in may_be.any(dim=-1).any(dim=0).nonzero().flatten().tolist():
        head = reduced.heads[index : index + 1]
        for name, numbers in counted(head).items():
            results[name][:, reduced.span(head)] = numbers
    return results


def may_be_sinks(
    received: Float[Tensor, "batch head key"],
    keys: Int[Tensor, "batch head chosen"],
    uniform: Float[Tensor, "batch _head key"],
    least: float,
) -> Bool[Tensor, "batch head chosen"]:
    """Which keys receive as much as a sink, or almost."""
    share, even = (
        each.expand(received.shape).take_along_dim(keys, dim=-1) for each in (received, uniform)
    )
    total = received.sum(dim=-1, keepdim=True)
    return (total > 0) & (share * _ALMOST >= torch.maximum(least * total, SINK_LIFT * even))


def _kept_cells(reduced: Reduced, kept: Kept, care: Care) -> PassResults:
    """The requested cells, by sequence and head: a corner, the strongest keys of queries, −1 where
    a weight is 0, and z.
    """
    arrays: PassResults = {}
    device, dtype = reduced.lse.device, reduced.statistics["mass"].dtype

    def of_all(queries: Tensor, keys: Tensor) -> Matrices:
        def of_heads(heads: range) -> PassResults:
            weights, _ = reduced.weights_of(heads, queries, keys, is_coarse=care.is_coarse)
            return {"cells": weights.to(dtype)}

        return _by_heads(reduced, len(queries) * len(keys), of_heads)["cells"]

    if kept.corner is not None:
        c = kept.corner
        queries = torch.arange(c.first_query, c.first_query + c.n_queries, device=device)
        keys = torch.arange(c.first_key, c.first_key + c.n_keys, device=device)
        seen = reduced.attention.visible_to(reduced.heads, queries, keys)
        arrays["corner"] = torch.where(seen, of_all(queries, keys), torch.nan)
    if kept.queries:
        rows = of_all(torch.tensor(kept.queries, device=device), reduced.keys)
        weights, strongest = rows.topk(min(kept.top, rows.shape[-1]), dim=-1)
        arrays["top_shares"] = weights
        arrays["top_keys"] = torch.where(weights > 0, strongest, -1)
    if kept.z and reduced.z is not None:
        arrays["z"] = reduced.z
    return arrays
