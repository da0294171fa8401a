"""How far a backend is from the exact answer: the same inputs through `attend` in float64, block by block of queries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from mhacli.attention import masks
from mhacli.attention.backends.catalogue import Prepared, Projected
from mhacli.attention.core import attend
from mhacli.results.bench.workload import Workload

_BLOCK_BYTES = 64 << 20
"""Of one block's scores in float64."""
_MIN_QUERIES = 16


class Deviation(NamedTuple):
    """Largest and mean absolute difference from the exact numbers, over results and gradients of so many queries.

    NaN where a number is not finite.
    """

    max_error: float
    mean_error: float
    n_queries: int


class Exact(NamedTuple):
    """The exact result at some queries, and the gradients for a `weight` of the result that is 0 at all other queries."""

    queries: Int[Tensor, " n"]
    out: Tensor
    weight: Tensor | None
    gradients: Sequence[Tensor]


def exact_answer(prepared: Prepared, workload: Workload, *, most_flops: float) -> Exact:
    """The answer of backends with these leaves, by `attend` in float64; gradients where the direction has a backward pass.

    Where all of it would take more than `most_flops`, it is that of evenly spread queries only.
    """
    queries = _spread_queries(workload, most_flops).to(prepared.leaves[0].device)
    return _exact(prepared, workload, queries, is_differentiated=workload.direction != "forward")


def deviation(prepared: Prepared, workload: Workload, exact: Exact) -> Deviation:
    """How far one run of the backend is from the exact answer: result (forward), gradients (backward), or both."""
    with prepared.running(workload.direction):
        out = prepared.forward()
    pairs: list[tuple[Tensor, Tensor]] = []
    if workload.direction != "backward":
        pairs.append((out.detach().index_select(-2, exact.queries), exact.out))
    if exact.weight is not None:
        pairs += zip(torch.autograd.grad(out, prepared.leaves, exact.weight), exact.gradients, strict=True)
    return _compare(pairs, len(exact.queries))


def _spread_queries(workload: Workload, most_flops: float) -> Int[Tensor, " n"]:
    """All queries, or as many as the operations allow, the first and last among them."""
    share = min(1.0, most_flops / workload.attention_flops)
    n_queries = min(workload.q_len, max(_MIN_QUERIES, math.floor(workload.q_len * share)))
    # float32 would name some queries twice where the steps are little more than 1
    return torch.linspace(0, workload.q_len - 1, n_queries, dtype=torch.float64).round().long()


def _exact(prepared: Prepared, workload: Workload, queries: Int[Tensor, " n"], *, is_differentiated: bool) -> Exact:
    home = "cpu" if queries.device.type == "mps" else queries.device  # MPS has no float64
    leaves = [leaf.detach().to(home).to(torch.float64).requires_grad_(is_differentiated) for leaf in prepared.leaves]
    places = queries.to(home)
    q, k, v = prepared.heads(*leaves)
    blocks = places.split(max(1, _BLOCK_BYTES // (8 * q.shape[0] * q.shape[1] * k.shape[2])))
    fixed = (q.detach(), k.detach(), v.detach())
    z = torch.cat([_attend_at(fixed, block, workload) for block in blocks], dim=-2).requires_grad_(is_differentiated)
    out = prepared.joined(z)
    if not is_differentiated:
        return Exact(queries, out, None, ())
    weight = _weight(workload, out, prepared.leaves[0], places)
    (of_z,) = torch.autograd.grad(out, z, weight.to(out).index_select(-2, places))
    of_heads = [torch.zeros_like(heads) for heads in fixed]
    for block, of_block in zip(blocks, of_z.split([len(block) for block in blocks], dim=-2), strict=True):
        own = _leaves(fixed)
        parts = torch.autograd.grad(_attend_at(own, block, workload), own, of_block)
        of_heads = [total + part for total, part in zip(of_heads, parts, strict=True)]
    return Exact(queries, out.detach(), weight.to(queries.device), torch.autograd.grad((q, k, v), leaves, of_heads))


def _weight(workload: Workload, out: Tensor, leaf: Tensor, places: Int[Tensor, " n"]) -> Tensor:
    """A gradient of the whole result, in the leaf's dtype: normal numbers at these queries, 0 at others."""
    generator = torch.Generator(out.device).manual_seed(0)
    numbers = torch.randn(out.shape, generator=generator, dtype=leaf.dtype, device=out.device)
    whole = numbers.new_zeros((*out.shape[:-2], workload.q_len, out.shape[-1]))
    return whole.index_copy(-2, places, numbers)


def _attend_at(heads: Projected, queries: Int[Tensor, " n"], workload: Workload) -> Tensor:
    """`attend` for some of the queries, which keep their places under the mask."""
    q, k, v = heads
    causal = masks.causal(workload.offset)
    allowed = (lambda q_idx, k_idx: causal(queries, k_idx)) if workload.is_masked else None
    return attend(q.index_select(-2, queries), k, v, allowed=allowed)


def _leaves(heads: Projected) -> Projected:
    q, k, v = (t.clone().requires_grad_() for t in heads)
    return q, k, v


def _compare(pairs: Sequence[tuple[Tensor, Tensor]], n_queries: int) -> Deviation:
    differences = [(ours.to(exact.device).to(torch.float64) - exact).abs() for ours, exact in pairs]
    largest = torch.stack([difference.max() for difference in differences]).max()
    total = torch.stack([difference.sum() for difference in differences]).sum()
    return Deviation(float(largest), float(total) / sum(map(torch.numel, differences)), n_queries)
