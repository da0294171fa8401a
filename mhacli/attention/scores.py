"""Attentions that are to be reduced: by the scores of queries and keys, or with weights that were
given whole.

Scores are taken to base 2, because torch's `exp2` takes half as long as its `exp`: the factor hides
in the scale. A hidden cell has `HIDDEN` instead of −∞: its weight is exactly 0 all the same, and 0
· log2 p is no NaN.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mhacli.io.data import Array
from mhacli.run import heads_at_once

from .core import (
    Allowed,
    HeadOutputs,
    KeyIdx,
    Keys,
    Matrices,
    PerQuery,
    Queries,
    QueryIdx,
    ScoreBias,
    Values,
    four_axes,
    is_finite,
    visible_cells,
)
from .devices import has_numbers

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

_MAX_SINK_BITS = 100.0
"""By which a sink may be above all scores of a query, to base 2: its weight is then still far from
overflow."""

Chosen = Int[Tensor, " idx"] | Int[Tensor, "batch head idx"]
"""Some queries or keys by number, the same of all heads, or of each its own."""
Bias = Callable[[int, range, QueryIdx, KeyIdx], Float[Tensor, "_head query key"]]
"""A bias of the scores, computed for `(sequence, heads, q_idx, k_idx)`, with a head axis of 1 where
it is one for all. All of it is finite."""


_Numbers = TypeVar("_Numbers", Tensor, Array)


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
    v: Values | None = None
    z: HeadOutputs | None = None
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

    def visible(self, queries: QueryIdx, keys: KeyIdx) -> Tensor:
        """Where the mask allows cells, `[#batch, #head, query, key]`."""
        return visible_cells(self.allowed, queries, keys)

    def visible_to(
        self, heads: range, queries: Chosen, keys: Chosen
    ) -> Bool[Tensor, "#batch #head chosen_query chosen_key"]:
        """Where the mask allows the cells of some heads."""

        def planes(b: int, q_idx: Tensor, k_idx: Tensor) -> Tensor:
            return planes_of(self.visible(q_idx, k_idx), b, heads)

        if queries.ndim == keys.ndim == 1:
            return of_some(self.visible(queries, keys), heads)
        texts = [
            each_head(partial(planes, b), of_text(queries, b), of_text(keys, b))
            for b in range(len(self.like))
        ]
        # the copy of a single one would be a kernel more
        return torch.stack(texts) if len(texts) > 1 else texts[0][None]

    def _visible_in(self, full: Matrices) -> Bool[Tensor, "batch _head query key"]:
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

    q: Queries
    k: Keys
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
        q = of_some(self.q, heads)[batch, :, queries.start : queries.stop]
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

        def largest_in(scores: Tensor) -> Tensor:
            self.scores_into(scores, *place)
            if hidden is not None:
                scores.masked_fill_(planes_of(hidden, place.batch, place.heads), HIDDEN)
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
        place. Each head may have numbers of its own of queries or keys, `[head, idx]`.
        """
        if self.softcap is not None:
            scaled.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.bias is None:
            return scaled
        return scaled.add_(each_head(partial(self.bias, batch, heads), q_idx, k_idx))

    def weights_of(
        self,
        heads: range,
        queries: Chosen,
        keys: Chosen,
        visible: Bool[Tensor, "#batch #head chosen_query chosen_key"],
        lse: PerQuery | None,
    ) -> Float[Tensor, "batch head chosen_query chosen_key"]:
        """Any weights of some heads, in float64 where the device has it, by the log-sum-exp of the
        scores of all their queries; of scores that are so large that it is too coarse, which is
        then None, by that of the same products.
        """
        dtype = exact_dtype(self.q.device)
        if lse is not None:
            return self._cells(heads, queries, keys, visible, dtype=dtype, lse=lse)[2]
        of_all = torch.arange(self.shape[3], device=self.q.device)
        visible = self.visible_to(heads, queries, of_all)
        weights = self._cells(heads, queries, of_all, visible, dtype=dtype)[2]
        return rows_of(weights.mT, keys).mT

    def matrices(self) -> dict[str, Tensor]:
        """The matrices of all heads, `qk`, `scores`, −∞ at masked cells, `pattern`, and `allowed`:
        some heads at a time, those in float64, and then rounded, whose scores are large.
        """
        (_, n_heads, n_queries, n_keys), device = self.shape, self.q.device
        shown = torch.promote_types(self.q.dtype, torch.float32)
        names = ("qk", "scores", "pattern")
        matrices = {name: self.q.new_empty(self.shape, dtype=shown) for name in names}
        queries, keys = (torch.arange(n, device=device) for n in (n_queries, n_keys))
        most = heads_at_once(n_queries * n_keys, is_cpu=device.type == "cpu")
        for heads in head_groups(range(n_heads), n_heads // self.n_kv_heads, most=most):
            place = (heads, queries, keys, self.visible_to(heads, queries, keys))
            cells = self._cells(*place, dtype=self.dtype)
            if self.dtype != exact_dtype(device):
                largest = cells[1].amax(dim=-1).nan_to_num(neginf=0.0).abs()
                if has_numbers(device) and bool((largest > large(device)).any()):
                    cells = self._cells(*place, dtype=torch.float64)
            for matrix, of_heads in zip(matrices.values(), cells, strict=True):
                matrix[:, heads.start : heads.stop] = of_heads
        return matrices | {"allowed": self._visible_in(matrices["pattern"])}

    def _cells(
        self,
        heads: range,
        queries: Chosen,
        keys: Chosen,
        visible: Tensor,
        *,
        dtype: torch.dtype,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The products, scores and weights of some heads with their `visible` cells. The keys are
        all keys where the log-sum-exp is not given: only then are there products and scores, −∞ at
        masked cells.
        """
        q = rows_of(of_some(self.q, heads), queries)
        k = rows_of(of_group(self.k, heads, self.shape[1]), keys)
        qk = by_group(q.to(dtype), k.to(dtype).mT)
        hidden = ~visible
        scores = qk * self.scale if lse is None else qk.mul_(self.scale)
        for b in range(len(scores)):  # by an index, through which gradients flow
            self._finish(scores[b], b, heads, of_text(queries, b), of_text(keys, b))
        rows = (
            scores.masked_fill_(hidden, -torch.inf).logsumexp(dim=-1)
            if lse is None
            else _of_queries(lse, queries).to(dtype)
        )
        if self.sink_logits is not None:
            sinks = of_some(self.sink_logits.expand(self.shape[:3]), heads)
            rows = torch.logaddexp(rows, _of_queries(sinks, queries).to(dtype))
        weights = scores - rows[..., None] if lse is None else scores.sub_(rows[..., None])
        return qk, scores, weights.exp_().masked_fill_(hidden, 0.0)


@dataclass(frozen=True, kw_only=True)
class GivenAttention(_Attention):
    """An attention whose `weights` were computed whole, from `scores`. Masked weights are 0."""

    weights: Matrices
    scores: Matrices

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
        self, heads: range, queries: Chosen, keys: Chosen, visible: Tensor, lse: Tensor | None
    ) -> Float[Tensor, "batch head chosen_query chosen_key"]:
        """Any weights of some heads, in float64 where the device has it."""
        weights = rows_of(of_some(self.weights, heads), queries)
        return rows_of(weights.mT, keys).mT.to(exact_dtype(self.weights.device))

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
    pattern: Matrices,
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


def of_some(numbers: _Numbers, heads: Sequence[int]) -> _Numbers:
    """The numbers `[batch, head, …]` of some heads; with a head axis of 1 they hold for all."""
    index = slice(heads.start, heads.stop) if isinstance(heads, range) else list(heads)
    return numbers if numbers.shape[1] == 1 else numbers[:, index]


def planes_of(cells: Tensor, batch: int, heads: range) -> Tensor:
    """The planes of a sequence and of some heads, `[#head, …]`, of axes that may be 1."""
    planes: Tensor = of_some(cells, heads)[min(batch, len(cells) - 1)]
    return planes


def joined(parts: Sequence[dict[str, Tensor]], axis: int = 1) -> dict[str, Tensor]:
    """The numbers of several parts, by default of heads, as those of one."""
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts], axis) for name in parts[0]}


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
    of_these = of_group(shared, heads, n_heads)[batch, :, keys.start : keys.stop]
    if len(of_these) in (1, len(heads)):
        return of_these.expand(len(heads), -1, -1)
    return of_these.repeat_interleave(n_heads // shared.shape[1], dim=0)


def of_group(
    shared: Float[Tensor, "batch kv_head key d"], heads: range, n_heads: int
) -> Float[Tensor, "batch kv_head key d"]:
    """The keys or values of neighbouring query heads, once for those that share them."""
    group = n_heads // shared.shape[1]
    return shared[:, heads.start // group : (heads.stop - 1) // group + 1]


def by_group(
    left: Float[Tensor, "batch head row inner"], right: Float[Tensor, "batch kv_head inner column"]
) -> Float[Tensor, "batch head row column"]:
    """The products of the matrices of heads with those that they share."""
    batch, n_kv_heads, inner, width = right.shape
    rows = left.reshape(batch * n_kv_heads, -1, inner)
    return torch.bmm(rows, right.reshape(-1, inner, width)).view(*left.shape[:3], width)


def rows_of(
    tensor: Float[Tensor, "batch kv_head row width"], chosen: Chosen
) -> Float[Tensor, "batch head chosen width"]:
    """The chosen rows of the matrices of heads, which neighbours may share."""
    if chosen.ndim == 1:  # as many as there are, are all
        return tensor if len(chosen) == tensor.shape[2] else tensor[:, :, chosen]
    batch, n_kv_heads, _, width = tensor.shape
    of_shared = chosen.reshape(batch, n_kv_heads, -1, 1).expand(-1, -1, -1, width)
    return tensor.gather(2, of_shared).view(*chosen.shape, width)


def _of_queries(per_query: PerQuery, chosen: Chosen) -> Tensor:
    """The numbers of the chosen queries."""
    return rows_of(per_query[..., None], chosen).squeeze(-1)


def of_text(chosen: Chosen, batch: int) -> Tensor:
    """What is chosen of a sequence: the same of all heads, or `[head, idx]`."""
    return chosen[batch] if chosen.ndim == 3 else chosen


def each_head(
    function: Callable[[Tensor, Tensor], Float[Tensor, "_head query key"]],
    queries: Int[Tensor, "... query"],
    keys: Int[Tensor, "... key"],
) -> Float[Tensor, "_head query key"]:
    """What a function makes of numbers of queries and keys, each head's of its own numbers where
    one of both is `[head, idx]`.
    """
    planes = function(queries.flatten(), keys.flatten())
    if queries.ndim == keys.ndim == 1:
        return planes
    planes = planes.expand(-1, queries.numel(), keys.numel())
    if queries.ndim == 2:
        of_heads = planes.reshape(len(planes), *queries.shape, -1)
    else:
        of_heads = planes.reshape(len(planes), -1, *keys.shape).movedim(2, 1)
    return of_heads[0] if len(planes) == 1 else of_heads.diagonal(dim1=0, dim2=1).movedim(-1, 0)


def head_groups(heads: range, group: int, *, most: int) -> Iterator[range]:
    """The heads, `most` at a time; where `group` query heads share a kv head, at most those of one.

    >>> list(head_groups(range(6), 1, most=4)), list(head_groups(range(6), 3, most=2))
    ([range(0, 4), range(4, 6)], [range(0, 2), range(2, 3), range(3, 5), range(5, 6)])
    """
    width = len(heads) if group == 1 else group
    for start in range(0, len(heads), width):
        of_group = heads[start : start + width]
        yield from (of_group[i : i + most] for i in range(0, len(of_group), most))


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


def tensor_bias(numbers: ScoreBias) -> Bias:
    """A tensor that broadcasts to `[batch, head, query, key]`, block by block."""
    full = four_axes(numbers)

    def bias(batch: int, heads: range, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        planes = planes_of(full, batch, heads)
        rows: Tensor = planes if planes.shape[1] == 1 else planes[:, q_idx]
        return rows if planes.shape[2] == 1 else rows[:, :, k_idx]

    return bias


def sum_of_biases(*biases: Bias) -> Bias:
    """What several biases add together."""

    def total(batch: int, heads: range, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        terms = (bias(batch, heads, q_idx, k_idx) for bias in biases)
        return sum(terms)  # type: ignore[return-value]

    return total
