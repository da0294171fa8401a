"""z and the log-sum-exp of every query: by a fused kernel where there is one for the mask, else by tiles of our own.

Neither builds the pattern. The log-sum-exp is what makes a share computable later, cell by cell.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from mhacli.attention.fused import Attended, fused_lse
from mhacli.attention.masks import Mask
from mhacli.attention.tiled.rectangles import PENALTY, rectangles, tile_shape
from mhacli.attention.tiled.reducers import Mass
from mhacli.attention.tiled.scores import Scores, VirtualPattern
from mhacli.attention.tiled.tiles import reduce_tiles

SHARP_LSE, SHARP_PARTS = 16.0, 4
"""A log-sum-exp above which scores are large: that of a hundred thousand normal scores is 12. Each part of a sum rounds at a
quarter of its size."""
WIDE_LSE = 512.0
"""A log-sum-exp beyond this is rounded in float32 by more than shares may be: half a step of it is 3e-5."""
_LOWEST = PENALTY / 10
"""Where a running maximum begins: above every forbidden cell, so that 2^(penalty − maximum) is 0 and not 1."""


def attend_lse(scores: Scores, v: Float[Tensor, "batch kv_head key d_v"]) -> Attended:
    """`attend`'s z with the log-sum-exp of each query's scores, at the cost of fused attention."""
    is_causal = isinstance(scores.allowed, Mask) and scores.allowed.causal_offset == 0
    if scores.is_plain and scores.scale > 0 and (scores.allowed is None or is_causal):
        fused = fused_lse(scores.q, scores.k, v, scale=scores.scale, causal=is_causal)
        if fused is not None:
            return fused
    return tiled_attend(scores, v)


def pattern_of(scores: Scores, lse: Float[Tensor, "batch head query"]) -> VirtualPattern:
    """The pattern that follows from a log-sum-exp, its shares within 1e-5 of themselves in float32.

    Large scores, those of sharp heads, round too much: then dot products are summed in parts, or in float64 where float32
    cannot hold the scores themselves, and the log-sum-exp is mended by what the shares of each query add up to, in a pass of
    its own.
    """
    if scores.like.dtype == torch.float64 or not bool((lse.abs() > SHARP_LSE).any()):
        return VirtualPattern(scores, lse)
    if bool((lse.abs() > WIDE_LSE).any()) and lse.device.type != "mps":  # which has no float64
        finer = VirtualPattern(replace(scores, is_wide=True), lse.double())
    else:
        finer = VirtualPattern(replace(scores, n_parts=SHARP_PARTS), lse)
    mass = Mass(finer)
    reduce_tiles(finer, [mass])
    return replace(finer, lse=finer.lse + torch.where(mass.per_query > 0, mass.per_query, 1.0).log())


def tiled_attend(scores: Scores, v: Float[Tensor, "batch kv_head key d_v"]) -> Attended:
    """The same by our own tiles, for every mask, bias and softcap: softmax with a running maximum, to base 2.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3; Dao et al. 2022.
    """
    state = _Running(scores, v)
    _, _, n_queries, n_keys = scores.shape
    shape = tile_shape(v.device)
    buffer = scores.like.new_empty(shape.queries * shape.keys)
    for rectangle in rectangles(range(n_queries), range(n_keys), scores.allowed, shape, scores.like):
        queries, keys, _ = rectangle
        tile = buffer[: len(queries) * len(keys)].view(len(queries), len(keys))
        for place in ((b, h) for b in range(scores.shape[0]) for h in range(scores.shape[1])):
            scores.log2_into(tile, place, rectangle)
            state.add(tile, place, queries, keys)
    return state.result()


class _Running:
    """What is known of each query so far: its largest score, and the sums of shares and of weighted values relative to it."""

    def __init__(self, scores: Scores, v: Tensor) -> None:
        batch, head, query, _ = scores.shape
        self._v, self._group = v, head // v.shape[1]
        self._is_finite = bool(v.isfinite().all())
        self._largest = scores.like.new_full((batch, head, query), _LOWEST)
        self._mass = scores.like.new_zeros(batch, head, query)
        self._z = scores.like.new_zeros(batch, head, query, v.shape[3])

    def add(self, log2: Float[Tensor, "query key"], place: tuple[int, int], queries: range, keys: range) -> None:
        """Takes a tile of scores, in place: what was summed is scaled down where a larger score has come."""
        batch, head = place
        rows = slice(queries.start, queries.stop)
        largest, mass, z = self._largest[place][rows], self._mass[place][rows], self._z[place][rows]
        now = torch.maximum(largest, log2.amax(dim=1))
        shrunk = torch.exp2(largest - now)
        shares = log2.sub_(now.unsqueeze(-1)).exp2_()
        mass.mul_(shrunk).add_(shares.sum(dim=1))
        values = self._v[batch, head // self._group, keys.start : keys.stop].to(log2.dtype)
        if not self._is_finite:  # 0 · NaN is NaN, and a forbidden key may hold anything
            values = values.masked_fill((shares == 0).all(dim=0).unsqueeze(-1), 0.0)
        z.mul_(shrunk.unsqueeze(-1)).addmm_(shares, values)
        largest.copy_(now)

    def result(self) -> Attended:
        """Sums become means; a query without keys has zeros."""
        has_keys = self._mass > 0
        mass = torch.where(has_keys, self._mass, 1.0)
        lse = torch.where(has_keys, (self._largest + mass.log2()) * math.log(2), 0.0)
        return Attended(self._z.div_(mass.unsqueeze(-1)).to(self._v.dtype), lse, "tiles")
