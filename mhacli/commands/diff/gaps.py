"""How far what two models compute at a place is apart: two tensors, or two attentions, whose scores
and patterns are made from queries and keys in blocks of queries.
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mhacli.models.capture import Call
from mhacli.models.masking import as_attention
from mhacli.run import rows_of_block

from .places import OF_CALLS, ModelPlace

_CHUNK = 1 << 18
"""The most numbers of a tensor that are compared at once: what a cache holds."""
_N_SAMPLES = 2
"""Where queries are many, the rounding of scores is measured in so many blocks of them."""
_SAMPLE_LEN = 64
"""The number of queries in such a block."""


class Relative(NamedTuple):
    """How far something is apart relative to its size, as a whole and each head."""

    whole: float
    heads: list[float]


class Deviation:
    """How far two arrays of a `shape` are apart: the squares of the difference and of the first
    array, for each head if the second of four axes is that of heads; and the largest difference.
    `add` fills it with all numbers in turn, of one head at a time: of `n_of_head` numbers each, and
    of the whole array where there are no heads.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._n_heads = shape[1] if len(shape) == 4 else 0
        self.n_of_head = math.prod(shape[2:] if self._n_heads else shape)
        self._squares = [[0.0, 0.0] for _ in range(self._n_heads or 1)]
        self.largest = 0.0
        self.at: tuple[int, ...] | None = None
        """The place of the largest difference."""

    def add(self, head: int, offset: int, a: Tensor, b: Tensor) -> None:
        """Adds numbers of the two arrays that follow each other in one head, from `offset` on in
        it; rows may lack their last columns. The heads of all texts are counted on.

        Numbers that are the same on both sides, such as −∞, do not differ. Any other one that is
        not finite is infinitely far apart, and counts nothing for the size of the first array.
        """
        n_columns = a.shape[-1]
        wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
        a, b = a.flatten().to(wide), b.flatten().to(wide)
        change = b - a
        sizes = _norms(change, a)
        # squares of float32 overflow, and those of small numbers are 0
        if not all(map(math.isfinite, sizes)) or (not sizes[0] and change.any()):
            is_same = (a == b) | (a.isnan() & b.isnan())
            change = change.double().masked_fill(is_same, 0.0)
            change = change.nan_to_num(math.inf, math.inf, math.inf)
            sizes = _norms(change, a.double().nan_to_num(posinf=0.0, neginf=0.0))
        squares = self._squares[head % len(self._squares)]
        squares[:] = [before + size * size for before, size in zip(squares, sizes, strict=True)]
        worst = max(map(abs, torch.stack(change.aminmax()).tolist())) if sizes[0] else 0.0
        if worst > self.largest:
            self.largest = worst
            row, column = divmod(int(change.abs().argmax()), n_columns)
            index = head * self.n_of_head + offset + row * math.prod(self.shape[-1:]) + column
            self.at = tuple(map(int, np.unravel_index(index, self.shape)))

    @property
    def relative(self) -> Relative:
        """The norm of the difference over that of the first array; of no head without heads."""
        whole = _ratio(*map(sum, zip(*self._squares, strict=True)))
        return Relative(whole, [_ratio(*of_head) for of_head in self._squares[: self._n_heads]])


def _norms(*tensors: Tensor) -> list[float]:
    """The norm of each tensor."""
    return [torch.linalg.vector_norm(tensor).item() for tensor in tensors]


def _ratio(change: float, of_first: float) -> float:
    """The root of a ratio of squares: 0 if nothing differs."""
    if change == 0.0:
        return 0.0
    return math.inf if of_first == 0.0 else math.sqrt(change / of_first)


def gaps_at(
    place: ModelPlace, a: Tensor | Call, b: Tensor | Call, *, sampled: bool = False
) -> dict[str, Deviation]:
    """The differences at a place by site: that of an array; or of an attention, those of the scores
    that both see and of the patterns. Empty where shapes do not fit.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        pair = fitted(place, a, b)
        return {} if pair is None else {place.site: _gap_of_tensors(*pair)}
    if isinstance(a, Call) and isinstance(b, Call) and a.shape == b.shape:
        return _gaps_of_attentions(a, b, sampled=sampled)
    return {}


def _gap_of_tensors(a: Tensor, b: Tensor) -> Deviation:
    """The difference of two tensors of one shape, in chunks that a cache holds."""
    gap = Deviation(tuple(a.shape))
    per_head = (tensor.detach().reshape(-1, gap.n_of_head or 1) for tensor in (a, b))
    for head, (x, y) in enumerate(zip(*per_head, strict=True)):
        for start in range(0, gap.n_of_head, _CHUNK):
            stop = start + _CHUNK
            gap.add(head, start, x[start:stop].cpu(), y[start:stop].cpu())
    return gap


def _gaps_of_attentions(a: Call, b: Call, *, sampled: bool) -> dict[str, Deviation]:
    """The differences of the scores and of the patterns of two attentions, which are made in blocks
    of queries, because a long text has more cells than fit into memory. Scores count where both
    sides see them; keys behind the block are left out where both hide them.
    """
    n_texts, n_heads, n_queries, n_keys = a.shape
    scores, pattern = Deviation(a.shape), Deviation(a.shape)
    hides_later = a.causal and b.causal and n_queries == n_keys
    for rows in _blocks(n_queries, n_keys, sampled=sampled):
        keys = slice(0, rows.stop if hides_later else n_keys)
        x, y = (as_attention(call.cropped(rows, keys)).matrices() for call in (a, b))
        # what is stored is on the CPU, what passes on its device
        hidden = ~(x["allowed"].cpu() & y["allowed"].cpu())
        for text, head in product(range(n_texts), range(n_heads)):
            at = (text * n_heads + head, rows.start * n_keys)
            cells = hidden[text, min(head, hidden.shape[1] - 1)]  # heads may share a mask
            of_scores = (each["scores"][text, head].cpu() for each in (x, y))
            scores.add(*at, *(each.masked_fill_(cells, 0.0) for each in of_scores))
            pattern.add(*at, *(each["pattern"][text, head].cpu() for each in (x, y)))
    return {"scores": scores, "pattern": pattern}


def _blocks(n_queries: int, n_keys: int, *, sampled: bool) -> Iterator[slice]:
    """The queries in blocks that fit into memory; of many, if `sampled`, the ends of equal
    parts.
    """
    if sampled and n_queries > 2 * _N_SAMPLES * _SAMPLE_LEN:
        part_len = n_queries // _N_SAMPLES
        for start in range(part_len - _SAMPLE_LEN, n_queries, part_len):
            yield slice(start, min(n_queries, start + _SAMPLE_LEN))
        return
    step = rows_of_block(n_keys, "cpu")
    for start in range(0, n_queries, step):
        yield slice(start, min(n_queries, start + step))


def fitted(place: ModelPlace, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Two tensors as far as they are the same, if their shapes differ: keys and values that heads
    share, merged axes, heads side by side, the last position of logits where one side has no more,
    and the entries that both vocabularies have. None if they do not fit.
    """
    if a.ndim == b.ndim == 4 and a.shape != b.shape and place.site in ("k", "v", "k_rotated"):
        n = max(a.shape[1], b.shape[1])
        if n % a.shape[1] == n % b.shape[1] == 0:
            a, b = (tensor.repeat_interleave(n // tensor.shape[1], dim=1) for tensor in (a, b))
    if place.site in OF_CALLS[:5] and b.shape == (*a.shape[::2], a.shape[1] * a.shape[-1]):
        b = b.unflatten(-1, (a.shape[1], a.shape[-1])).transpose(1, 2)
    if place.site == "logits" and a.ndim == b.ndim == 3:
        if 1 in (a.shape[1], b.shape[1]):
            a, b = a[:, -1:], b[:, -1:]
        n = min(a.shape[2], b.shape[2])
        a, b = a[..., :n], b[..., :n]
    are_rows = a.shape[-1:] == b.shape[-1:] or (b.ndim == 3 and a.shape[:2] == b.shape[:2])
    if a.ndim != b.ndim and a.numel() == b.numel() and are_rows:
        b = b.reshape(a.shape)
    return (a, b) if a.shape == b.shape else None
