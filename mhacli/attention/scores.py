"""Attentions that are to be reduced: by the scores of queries and keys, or with weights that were
given whole.

Scores are taken to base 2, because torch's `exp2` takes half as long as its `exp`: the factor hides
in the scale. A hidden cell has `HIDDEN` instead of −∞: its weight is exactly 0 all the same, and 0
· log2 p is no NaN.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product as pairs
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .core import Allowed, four_axes, is_finite, visible_cells

LOG2_E = math.log2(math.e)
HIDDEN = -1e30
"""log2 p of a hidden cell: far below what any score brings, far above where float32 ends."""
BLOCKS = "blocks"
"""The kernel that makes z where it is made with the weights."""
LARGE = 16.0
"""Scores (nats) beyond which they are computed in float64: half a step of 16 in float32 is 5e-7,
and a dot product rounds some times."""
LARGE_ON_DEVICE = 512.0
"""The same on a GPU, which may take many times as long in float64: half a step of 512 is 3e-5."""

_SHARP = 8.0
"""Scores from which they are taken relative to the largest of their query. Below, 2^score is far
from overflow, and entropy loses no more by the difference of two sums."""
_MAX_DISTINCT_SCORE = 1e25
"""A score beyond which float32 distinguishes nothing: then weights are NaN."""
_MAX_EXACT_LSE = 1e8
"""The size of a log-sum-exp beyond which float64 does not give a weight by it within 1e-7."""
_MAX_SINK_BITS = 100.0
"""By which a sink may be above all scores of a query, to base 2: its weight is then still far from
overflow."""

Bias = Callable[
    [int, range, Int[Tensor, " query"], Int[Tensor, " key"]], Float[Tensor, "_head query key"]
]
"""A bias of the scores, computed for `(sequence, heads, q_idx, k_idx)`, with a head axis of 1 where
it is one for all. All of it is finite."""


class BlockPlace(NamedTuple):
    """Some queries of a sequence with the keys that they may see, in some heads."""

    batch: int
    heads: range
    queries: range
    keys: range


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """What every attention has: its mask, its values, and z where a `kernel` made it; else z is
    made with the weights.

    `sink_logits` are the scores of learned sinks, with axes of 1 where batch or query do not
    matter: they take part in the softmax and are no keys. `v` None: the values were not captured.
    `wide`: the maths are in float64. `has_large_scores`: some are known to be larger than float32
    holds.
    """

    allowed: Allowed | None = None
    v: Float[Tensor, "batch kv_head key d_v"] | None = None
    z: Float[Tensor, "batch head query d_v"] | None = None
    kernel: str = BLOCKS
    sink_logits: Float[Tensor, "_batch head _query"] | None = None
    wide: bool = False
    has_large_scores: bool = False

    @property
    def like(self) -> Tensor:
        """A tensor on the device of the attention, in the dtype of what it was computed from."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the maths."""
        return torch.float64 if self.wide else torch.promote_types(self.like.dtype, torch.float32)

    @cached_property
    def has_finite_values(self) -> bool:
        """Whether no value is NaN or infinite."""
        return self.v is None or is_finite(self.v)

    def visible(self, queries: Int[Tensor, " query"], keys: Int[Tensor, " key"]) -> Tensor:
        """Where the mask allows cells, `[#batch, #head, query, key]`."""
        return visible_cells(self.allowed, queries, keys)

    def _visible_in(
        self, full: Float[Tensor, "batch head query key"]
    ) -> Bool[Tensor, "batch _head query key"]:
        """Where the mask allows cells of a matrix of all queries and keys."""
        batch, _, n_queries, n_keys = full.shape
        q_idx, k_idx = (torch.arange(n, device=full.device) for n in (n_queries, n_keys))
        return self.visible(q_idx, k_idx).expand(batch, -1, n_queries, n_keys)


@dataclass(frozen=True, kw_only=True)
class ScoredAttention(_Attention):
    """The softmax of `softcap(scale · q kᵀ) + bias` where `allowed`, as `attend` defines it.

    Query head `h` reads kv head `h // (head / kv_head)`. 16-bit numbers are widened to float32
    block by block.
    """

    q: Float[Tensor, "batch head query d_head"]
    k: Float[Tensor, "batch kv_head key d_head"]
    scale: float
    softcap: float | None = None
    bias: Bias | None = None

    @property
    def like(self) -> Tensor:
        """The queries, on the device of the attention."""
        return self.q

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(batch, head, query, key)`."""
        return (*self.q.shape[:3], self.k.shape[2])

    @property
    def n_kv_heads(self) -> int:
        """The number of heads of keys."""
        return self.k.shape[1]

    @cached_property
    def is_finite(self) -> bool:
        """Whether no number of queries, keys and values is NaN or infinite."""
        return self.has_finite_values and is_finite(self.q) and is_finite(self.k)

    def scores_into(
        self,
        out: Float[Tensor, "head query key"],
        batch: int,
        heads: range,
        queries: range,
        keys: range,
    ) -> Tensor:
        """Writes the scores to base 2 of a block of some heads, without the mask, in the dtype of
        `out`, and returns it.
        """
        is_plain = self.softcap is None and self.bias is None
        q = self.q[batch, heads.start : heads.stop, queries.start : queries.stop]
        k = of_heads(self.k, batch, heads, self.shape[1], keys)
        q, k = q.to(out.dtype), k.to(out.dtype).mT
        factor = self.scale * (LOG2_E if is_plain else 1.0)
        if abs(factor) > _MAX_DISTINCT_SCORE:  # which may be no number of the dtype
            q, factor = q * factor, 1.0
        product(q, k, out, factor)
        if is_plain:
            return out
        scores = self._finish(out, batch, heads, indices(queries, out), indices(keys, out))
        return scores.mul_(LOG2_E)

    def masked_scores_into(
        self,
        out: Float[Tensor, "head query key"],
        place: BlockPlace,
        *,
        hidden: Bool[Tensor, "_batch _head query key"] | None,
        sink: Float[Tensor, "head query 1"] | None,
    ) -> Float[Tensor, "head query 1"] | None:
        """Writes the same with `HIDDEN` where masked. Where they are large, they are written
        relative to a reference of each query, which is returned, and computed in float64 where
        float32 cannot hold them.
        """

        batch, heads = place.batch, place.heads

        def largest_in(scores: Tensor) -> Tensor:
            self.scores_into(scores, *place)
            if hidden is not None:
                masked = hidden[min(batch, hidden.shape[0] - 1)]
                scores.masked_fill_(
                    masked if masked.shape[0] == 1 else masked[heads.start : heads.stop], HIDDEN
                )
            largest = scores.amax(dim=-1, keepdim=True)
            return torch.where(largest > HIDDEN / 10, largest, 0.0)

        known = largest_in(out)
        outcomes = known if sink is None else torch.maximum(known, sink)
        size = float(outcomes.abs().amax()) / LOG2_E
        if not size > _SHARP:
            return None
        wide, exact = out, exact_dtype(out.device)
        if size > large(out.device) and out.dtype != exact:
            wide = torch.empty_like(out, dtype=exact)
            known = largest_in(wide)
        reference = torch.where(known.abs() < _MAX_DISTINCT_SCORE, known, torch.nan).to(exact)
        if sink is not None:
            reference = torch.maximum(reference, sink - _MAX_SINK_BITS)
        out.copy_(wide.sub_(reference.to(wide.dtype)))
        return reference

    def _finish(
        self, scaled: Tensor, batch: int, heads: range, q_idx: Tensor, k_idx: Tensor
    ) -> Tensor:
        """From scaled products to scores, in place: all that comes after the scale, in this one
        place.
        """
        if self.softcap is not None:
            scaled.div_(self.softcap).tanh_().mul_(self.softcap)
        return scaled if self.bias is None else scaled.add_(self.bias(batch, heads, q_idx, k_idx))

    def weights_of(
        self,
        batch_head: tuple[int, int],
        queries: Int[Tensor, " query"],
        keys: Int[Tensor, " key"],
        lse: Float[Tensor, " query"],
    ) -> Float[Tensor, "query key"]:
        """Any weights of a sequence and head, in float64 where the device has it, by the
        log-sum-exp of these queries' scores; of scores that are so large that it is too coarse, by
        that of the same products. As many keys as there are, are all.
        """
        is_coarse = len(lse) > 0 and float(lse.abs().amax()) > _MAX_EXACT_LSE
        of_all = torch.arange(self.k.shape[2], device=keys.device) if is_coarse else keys
        _, _, weights = self._cells(
            batch_head,
            queries,
            of_all,
            self.visible(queries, of_all),
            dtype=exact_dtype(self.q.device),
            lse=None if is_coarse else lse,
        )
        return weights[:, keys] if is_coarse else weights

    def matrices(self) -> dict[str, Tensor]:
        """The matrices of all heads, `qk`, `scores`, −∞ at masked cells, `pattern`, and `allowed`:
        head by head in float64, and then rounded, where scores are large.
        """
        (batch, n_heads, n_queries, n_keys), device = self.shape, self.q.device
        shown = torch.promote_types(self.q.dtype, torch.float32)
        names = ("qk", "scores", "pattern")
        matrices = {name: self.q.new_empty(self.shape, dtype=shown) for name in names}
        queries, keys = (torch.arange(n, device=device) for n in (n_queries, n_keys))
        visible = self.visible(queries, keys)
        for batch_head in pairs(range(batch), range(n_heads)):
            rows = self._cells(batch_head, queries, keys, visible, dtype=self.dtype)
            largest = rows[1].amax(dim=-1).nan_to_num(neginf=0.0).abs()
            if self.dtype != exact_dtype(device) and bool((largest > large(device)).any()):
                rows = self._cells(batch_head, queries, keys, visible, dtype=torch.float64)
            for matrix, row in zip(matrices.values(), rows, strict=True):
                matrix[batch_head] = row
        return matrices | {"allowed": self._visible_in(matrices["pattern"])}

    def _cells(
        self,
        batch_head: tuple[int, int],
        queries: Tensor,
        keys: Tensor,
        visible: Tensor,
        *,
        dtype: torch.dtype,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The products, scores and weights of any queries and keys with their `visible` cells. The
        keys are all keys where the log-sum-exp is not given: only then are scores of masked cells
        −∞.
        """
        batch, head = batch_head
        q = self.q[batch, head, queries]
        k = self.k[batch, head // (self.shape[1] // self.n_kv_heads)]
        if len(keys) < len(k):
            k = k[keys]
        qk, hidden = q.to(dtype) @ k.to(dtype).mT, ~plane_of(visible, batch, head)
        scaled = (qk * self.scale)[None]
        # an index, as what unpacking gives must not be changed in place where gradients flow
        scores = self._finish(scaled, batch, range(head, head + 1), queries, keys)[0]
        if lse is None:
            lse = scores.masked_fill_(hidden, -torch.inf).logsumexp(dim=-1)
        rows = lse.to(dtype)
        if self.sink_logits is not None:
            sinks = self.sink_logits.expand(self.shape[:3])[batch, head, queries]
            rows = torch.logaddexp(rows, sinks.to(dtype))
        return qk, scores, (scores - rows[:, None]).exp_().masked_fill_(hidden, 0.0)


@dataclass(frozen=True, kw_only=True)
class GivenAttention(_Attention):
    """An attention whose `weights` were computed whole, from `scores`. Masked weights are 0."""

    weights: Float[Tensor, "batch head query key"]
    scores: Float[Tensor, "batch head query key"]

    @property
    def like(self) -> Tensor:
        """The weights, on the device of the attention."""
        return self.weights

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(batch, head, query, key)`."""
        return tuple(self.weights.shape)  # type: ignore[return-value]

    @property
    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite."""
        return self.has_finite_values

    @property
    def n_kv_heads(self) -> int:
        """The number of heads: those of keys are not known."""
        return self.weights.shape[1]

    def weights_of(
        self, batch_head: tuple[int, int], queries: Tensor, keys: Tensor, lse: Tensor
    ) -> Float[Tensor, "query key"]:
        """Any weights of a sequence and head, in float64 where the device has it."""
        return self.weights[batch_head][queries][:, keys].to(exact_dtype(self.weights.device))

    def lse(self, batch: int, heads: slice, queries: slice) -> Float[Tensor, "head query"]:
        """The log-sum-exp of the scores of visible keys."""
        q_idx, k_idx = (torch.arange(n, device=self.weights.device) for n in self.shape[2:])
        visible = self.visible(q_idx[queries], k_idx).expand(*self.shape[:2], -1, -1)[batch, heads]
        scores = self.scores[batch, heads, queries].to(exact_dtype(self.weights.device))
        lse = scores.masked_fill(~visible, -torch.inf).logsumexp(dim=-1)
        return torch.where(lse.isneginf(), 0.0, lse)

    def matrices(self) -> dict[str, Tensor]:
        """The matrices that were captured: `scores`, −∞ at masked cells, `pattern`, and
        `allowed`.
        """
        full = self._visible_in(self.weights)
        scores = self.scores.to(self.dtype).masked_fill(~full, -torch.inf)
        return {"scores": scores, "pattern": self.weights, "allowed": full}


Attention = ScoredAttention | GivenAttention
"""An attention that is to be reduced."""


def strongest_key(
    pattern: Float[Tensor, "batch head query key"],
) -> Int[Tensor, "batch head query"]:
    """The key with the largest weight, the first of equals; −1 for a row of zeros."""
    weight, key = pattern.max(dim=-1)
    return torch.where(weight > 0, key, -1)


def exact_dtype(device: torch.device) -> torch.dtype:
    """The widest dtype of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def large(device: torch.device) -> float:
    """The score from which on a device computes scores in float64."""
    return LARGE if device.type == "cpu" else LARGE_ON_DEVICE


def indices(span: range, like: Tensor) -> Int[Tensor, " idx"]:
    """The numbers of a range on the device of another tensor; 32 bits, which masks compare
    faster.
    """
    return torch.arange(span.start, span.stop, dtype=torch.int32, device=like.device)


def plane_of(cells: Tensor, batch: int, head: int) -> Tensor:
    """The plane `[query, key]` of a sequence and head, of axes that may be 1."""
    plane: Tensor = cells[min(batch, cells.shape[0] - 1), min(head, cells.shape[1] - 1)]
    return plane


def of_heads(
    shared: Float[Tensor, "batch kv_head key d"],
    batch: int,
    heads: range,
    n_heads: int,
    keys: range,
) -> Float[Tensor, "head key d"]:
    """Some keys or values of neighbouring query heads, which are whole groups of those that share a
    kv head, or a part of one.
    """
    group = n_heads // shared.shape[1]
    of_these = shared[
        batch, heads.start // group : (heads.stop - 1) // group + 1, keys.start : keys.stop
    ]
    if len(of_these) == len(heads):
        return of_these
    return (
        of_these.expand(len(heads), -1, -1)
        if len(of_these) == 1
        else of_these.repeat_interleave(group, dim=0)
    )


def product(
    left: Tensor, right: Tensor, out: Float[Tensor, "head row column"], scale: float = 1.0
) -> None:
    """Writes the scaled product of the matrices of some heads. That of one is a plain one, which
    BLAS does faster than a batch of one.
    """
    if len(left) == 1:
        torch.addmm(out[0], left[0], right[0], beta=0, alpha=scale, out=out[0])
    else:
        torch.baddbmm(out, left, right, beta=0, alpha=scale, out=out)


# ------------------------------------------------------------------------------------------- biases


def tensor_bias(numbers: Float[Tensor, "..."]) -> Bias:
    """A tensor that broadcasts to `[batch, head, query, key]`, block by block."""
    full = four_axes(numbers)

    def bias(batch: int, heads: range, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        planes: Tensor = full[min(batch, full.shape[0] - 1)]
        planes = planes if planes.shape[0] == 1 else planes[heads.start : heads.stop]
        rows: Tensor = planes if planes.shape[1] == 1 else planes[:, q_idx]
        return rows if planes.shape[2] == 1 else rows[:, :, k_idx]

    return bias


def sum_of_biases(*biases: Bias) -> Bias:
    """What several biases add together."""

    def total(batch: int, heads: range, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        terms = (bias(batch, heads, q_idx, k_idx) for bias in biases)
        return sum(terms)  # type: ignore[return-value]

    return total
