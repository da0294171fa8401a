"""Masks as predicates: each answers, for query and key positions, which cells may be attended to (True = may attend).

They take no T×T memory: cells are evaluated on call, tile by tile if need be. All results broadcast to
`[batch, head, query, key]`. What a tile holds is known beforehand, without its cells: its `Extent`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mhacli.attention.core import Allowed, visible_cells

Queries = Int[Tensor, " query"]
Keys = Int[Tensor, " key"]
Cells = Bool[Tensor, "#batch #head #query #key"]

Extent = Literal["all", "some", "none"]
"""What a mask allows of a rectangle of queries × keys, over every sequence and head of the batch: all cells, none, or some.

"some" is always a permissible answer, also where it is all or none: then the cells have to be evaluated.
"""


Idx = Int[Tensor, " idx"]
Chosen = Callable[[Idx], Bool[Tensor, "#batch idx"]]
"""A predicate of positions on one axis, for each sequence or for all."""


class Band(NamedTuple):
    """Cells by their distance `key − query`, both ends included."""

    low: int = -(1 << 30)
    high: int = 1 << 30

    def and_(self, other: Band) -> Band:
        """The cells in both."""
        return Band(max(self.low, other.low), min(self.high, other.high))


EVERYWHERE = Band()


@dataclass(frozen=True)
class Arithmetic:
    """A mask that is the same for all heads as arithmetic on one cell, which a kernel can do without asking.

    Visible are cells within `band`, whose key is in `near` or, where there is one, among the keys that are `always` seen,
    whose query and key are in all of `queries` and `keys`, and have the same one of the `ids` `[batch, query]` and
    `[batch, key]`.
    """

    band: Band = EVERYWHERE
    near: Band = EVERYWHERE
    always: Chosen | None = None
    queries: tuple[Chosen, ...] = ()
    keys: tuple[Chosen, ...] = ()
    ids: tuple[Int[Tensor, "#batch query"], Int[Tensor, "#batch key"]] | None = None


@dataclass(frozen=True)
class Mask:
    """A mask: `mask(q_idx, k_idx)` evaluates its cells, `extent` gives only the `Extent` of a rectangle of them.

    `extent(queries, keys)` takes ranges of positions with step 1 and at least one element. It evaluates no cells, except
    for a mask that is a tensor. Tensors that a mask was made of must not change afterwards.

    >>> [causal().extent(range(2, 4), keys) for keys in (range(3), range(4), range(4, 8))]
    ['all', 'some', 'none']
    """

    cells: Callable[[Queries, Keys], Cells]
    extent: Callable[[range, range], Extent]
    arithmetic: Arithmetic | None = None
    """The same as arithmetic, where the mask is made of bands, padding, leading keys and documents."""

    @property
    def causal_offset(self) -> int | None:
        """What `causal` was made with, where the mask is that and nothing else: fused kernels know it."""
        if self.arithmetic is None or self.arithmetic.band == EVERYWHERE:
            return None
        high = self.arithmetic.band.high
        return high if self.arithmetic == Arithmetic(Band(high=high)) else None

    def __call__(self, q_idx: Queries, k_idx: Keys) -> Cells:
        """True where the query may attend to the key."""
        return self.cells(q_idx, k_idx)


def extent_of(allowed: Allowed | None, queries: range, keys: range) -> Extent:
    """What any predicate allows of the rectangle: everything where there is none, "some" where it is no `Mask`."""
    if allowed is None:
        return "all"
    return allowed.extent(queries, keys) if isinstance(allowed, Mask) else "some"


def arithmetic_of(allowed: Allowed | None) -> Arithmetic | None:
    """Any predicate as arithmetic; None where it cannot be written so."""
    if allowed is None:
        return Arithmetic()
    return allowed.arithmetic if isinstance(allowed, Mask) else None


def causal(offset: int = 0) -> Mask:
    """No query sees a later key. `offset` is the key position of the first query (`k_len - q_len` for a cache).

    >>> causal()(torch.arange(2), torch.arange(3))[0, 0].tolist()
    [[True, False, False], [True, True, False]]
    """
    return Mask(
        lambda q_idx, k_idx: _cells(k_idx[None, :] <= q_idx[:, None] + offset),
        lambda queries, keys: _extent(keys[-1] <= queries[0] + offset, keys[0] > queries[-1] + offset),
        Arithmetic(Band(high=offset)),
    )


def window(left: int, right: int, offset: int = 0) -> Mask:
    """Keys from `left` before to `right` after the query, itself included. `offset` as for `causal`.

    Source: Beltagy et al. 2020, "Longformer", section 3.1 (sliding window).
    """

    def allowed(q_idx: Queries, k_idx: Keys) -> Cells:
        distance = k_idx[None, :] - (q_idx[:, None] + offset)
        return _cells((distance >= -left) & (distance <= right))

    def extent(queries: range, keys: range) -> Extent:
        nearest, farthest = keys[0] - (queries[-1] + offset), keys[-1] - (queries[0] + offset)  # all between occur too
        within = nearest >= -left and farthest <= right
        return _extent(within, max(nearest, -left) > min(farthest, right))

    return Mask(allowed, extent, Arithmetic(Band(offset - left, offset + right)))


def prefix(n: int, offset: int = 0) -> Mask:
    """The first `n` keys are seen by every query, the others causally: a prefix language model. `offset` as for `causal`.

    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning …" (T5), section 3.2.1.
    """
    return either(leading(n), causal(offset))


def leading(n: int, places: Int[Tensor, "... key"] | None = None) -> Mask:
    """The first `n` keys, for every query: with `either(window(…), leading(n))` the sinks of a sliding window.

    `places` `[batch, key]` or `[key]` says which is first where texts do not begin with their row (padding on the left,
    packed documents): the place of each key in its own text. Source: Xiao et al. 2023, "Efficient Streaming Language
    Models with Attention Sinks", section 3.

    >>> leading(1)(torch.arange(2), torch.arange(3)).tolist()
    [[[[True, False, False]]]]
    """

    def is_first(k_idx: Keys) -> Tensor:
        rows = k_idx[None, :] if places is None else torch.atleast_2d(places).to(k_idx.device)[:, k_idx]
        return rows < n

    def allowed(q_idx: Queries, k_idx: Keys) -> Cells:
        return is_first(k_idx)[:, None, None, :]

    def extent(queries: range, keys: range) -> Extent:
        if places is None:
            return _extent(keys[-1] < n, keys[0] >= n)
        part = _part(torch.atleast_2d(places), keys)
        if part is None:
            return "some"
        least, greatest = part.aminmax()
        return _extent(bool(greatest < n), bool(least >= n))

    return Mask(allowed, extent, Arithmetic(keys=(is_first,)))


def padding(
    lengths: Int[Tensor, " batch"] | Sequence[int],
    side: Literal["left", "right"] = "right",
    *,
    padded_len: int | None = None,
    of: Literal["key", "query"] = "key",
) -> Mask:
    """Only real tokens: sequence `b` has `lengths[b]` of them, and padding on one side up to `padded_len`.

    `padded_len` defaults to the longest length. `of` says whose padding it is: keys that no query may attend to, or
    queries that attend to nothing.
    """
    n_real = torch.as_tensor(lengths)
    total = int(n_real.max()) if padded_len is None and side == "left" else padded_len or 0
    known = n_real.tolist()
    shortest, longest = min(known, default=0), max(known, default=0)

    def is_real(idx: Idx) -> Tensor:
        counts = n_real.to(idx.device)[:, None]
        return idx[None, :] < counts if side == "right" else idx[None, :] >= total - counts

    def allowed(q_idx: Queries, k_idx: Keys) -> Cells:
        return is_real(k_idx)[:, None, None, :] if of == "key" else is_real(q_idx)[:, None, :, None]

    def extent(queries: range, keys: range) -> Extent:
        idx = keys if of == "key" else queries
        if side == "right":
            return _extent(idx[-1] < shortest, idx[0] >= longest)
        return _extent(idx[0] >= total - shortest, idx[-1] < total - longest)

    return Mask(allowed, extent, Arithmetic(keys=(is_real,)) if of == "key" else Arithmetic(queries=(is_real,)))


def documents(ids: Int[Tensor, "... idx"], k_ids: Int[Tensor, "... k_idx"] | None = None) -> Mask:
    """Texts packed into one row see only themselves: a query and a key with the same document id.

    `ids` `[batch, idx]`, or `[idx]` for all alike, are those of the queries; `k_ids` those of the keys (default the same).
    The extent compares the least and the greatest id of queries and keys: it is exact if both are one row that ascends.
    """
    q_rows: Tensor = torch.atleast_2d(ids)
    k_rows: Tensor = q_rows if k_ids is None else torch.atleast_2d(k_ids)

    def allowed(q_idx: Queries, k_idx: Keys) -> Cells:
        of_query, of_key = q_rows.to(q_idx.device)[:, q_idx], k_rows.to(q_idx.device)[:, k_idx]
        return (of_query[:, :, None] == of_key[:, None, :])[:, None]

    def extent(queries: range, keys: range) -> Extent:
        of_query, of_key = _part(q_rows, queries), _part(k_rows, keys)
        if of_query is None or of_key is None:
            return "some"
        q_least, q_greatest = of_query.aminmax(dim=1)
        k_least, k_greatest = (bound.to(q_rows.device) for bound in of_key.aminmax(dim=1))
        apart = (q_greatest < k_least) | (k_greatest < q_least)
        alike = (q_least == k_greatest) & (q_greatest == k_least)
        return _extent(bool(alike.all()), bool(apart.all()))

    return Mask(allowed, extent, Arithmetic(ids=(q_rows, k_rows)))


def from_tensor(t: Tensor) -> Mask:
    """A bool tensor that broadcasts to `[batch, head, query, key]`, True = may attend. Raises `TypeError` for others.

    A float mask is refused: 0/1 floats mean "allowed" to some and are *added* to the scores by others.
    """
    if t.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor with True = may attend, got {t.dtype}")
    full = t.reshape((1,) * (4 - t.ndim) + tuple(t.shape))

    def allowed(q_idx: Queries, k_idx: Keys) -> Cells:
        cells = full.to(q_idx.device)
        rows = cells if full.shape[-2] == 1 else cells[..., q_idx, :]
        return rows if full.shape[-1] == 1 else rows[..., k_idx]

    def extent(queries: range, keys: range) -> Extent:
        rows = _part(full, queries if full.shape[-2] > 1 else range(1), dim=-2)
        part = None if rows is None else _part(rows, keys if full.shape[-1] > 1 else range(1))
        if part is None:
            return "some"
        least, greatest = part.view(torch.uint8).aminmax()  # on a CPU 30 times as fast as `all` and `any` of bools
        return _extent(bool(least), not greatest)

    return Mask(allowed, extent)


def both(*masks: Allowed) -> Mask:
    """What every one of the masks allows.

    >>> both(causal(), window(0, 9))(torch.arange(2), torch.arange(2))[0, 0].tolist()
    [[True, False], [False, True]]
    """
    if len(masks) == 1 and isinstance(masks[0], Mask):
        return masks[0]

    def allowed(q_idx: Queries, k_idx: Keys) -> Cells:
        cells = _cells(torch.ones(1, 1, dtype=torch.bool, device=q_idx.device))
        for mask in masks:
            cells = cells & mask(q_idx, k_idx)
        return cells

    no_mask: Arithmetic | None = Arithmetic()
    arithmetic = reduce(_both, map(arithmetic_of, masks), no_mask)
    return Mask(allowed, lambda queries, keys: _settled(masks, queries, keys, by="none", otherwise="all"), arithmetic)


def either(*masks: Allowed) -> Mask:
    """What at least one of the masks allows.

    >>> either(window(0, 0), leading(1))(torch.arange(3), torch.arange(3))[0, 0].tolist()
    [[True, False, False], [True, True, False], [True, False, True]]
    """

    def allowed(q_idx: Queries, k_idx: Keys) -> Cells:
        cells = _cells(torch.zeros(1, 1, dtype=torch.bool, device=q_idx.device))
        for mask in masks:
            cells = cells | mask(q_idx, k_idx)
        return cells

    arithmetic = reduce(_either, map(arithmetic_of, masks)) if masks else None
    return Mask(allowed, lambda queries, keys: _settled(masks, queries, keys, by="all", otherwise="none"), arithmetic)


def shifted(mask: Allowed, offset: int) -> Mask:
    """The mask for queries that begin at position `offset`: what a step of decoding asks, whose query 0 is the newest.

    >>> shifted(causal(), 2)(torch.arange(1), torch.arange(4))[0, 0].tolist()
    [[True, True, True, False]]
    """
    return Mask(
        lambda q_idx, k_idx: mask(q_idx + offset, k_idx),
        lambda queries, keys: extent_of(mask, range(queries.start + offset, queries.stop + offset), keys),
    )


def of_heads(mask: Allowed, heads: range) -> Allowed:
    """The mask for some heads alone; a mask that is the same for all heads is the same for these.

    >>> of_heads(from_tensor(torch.tensor([[[True]], [[False]]])), range(1, 2))(torch.arange(1), torch.arange(1)).tolist()
    [[[[False]]]]
    """
    if arithmetic_of(mask) is not None:
        return mask

    def allowed(q_idx: Queries, k_idx: Keys) -> Cells:
        cells = visible_cells(mask, q_idx, k_idx)
        assert cells is not None
        return cells[:, heads.start : heads.stop] if cells.shape[1] > 1 else cells

    return Mask(allowed, lambda queries, keys: extent_of(mask, queries, keys))


def of_queries(mask: Allowed, queries: Queries) -> Allowed:
    """The mask for some queries alone, wherever they stand.

    >>> of_queries(causal(), torch.tensor([2, 0]))(torch.arange(2), torch.arange(3))[0, 0].tolist()
    [[True, True, True], [True, False, False]]
    """
    return lambda q_idx, k_idx: mask(queries[q_idx], k_idx)


def _both(one: Arithmetic | None, other: Arithmetic | None) -> Arithmetic | None:
    """What both allow; None where it takes two sets of leading keys, or of documents."""
    if one is None or other is None:
        return None
    if (one.always and other.always) or (one.ids and other.ids):
        return None
    windowed = one if one.always else other
    return Arithmetic(
        one.band.and_(other.band),
        windowed.near,
        windowed.always,
        one.queries + other.queries,
        one.keys + other.keys,
        one.ids or other.ids,
    )


def _either(one: Arithmetic | None, other: Arithmetic | None) -> Arithmetic | None:
    """A band or leading keys; None for anything else."""
    for keys, band in ((one, other), (other, one)):
        if keys is None or band is None or len(keys.keys) != 1:
            continue
        if keys == Arithmetic(keys=keys.keys) and band == Arithmetic(band.band):
            return Arithmetic(near=band.band, always=keys.keys[0])
    return None


def _cells(plane: Tensor) -> Cells:
    return plane[None, None]


def _extent(everything: bool, nothing: bool) -> Extent:
    return "all" if everything else "none" if nothing else "some"


def _settled(masks: tuple[Allowed, ...], queries: range, keys: range, *, by: Extent, otherwise: Extent) -> Extent:
    """`by` where one mask alone decides so, `otherwise` where all masks agree on that."""
    found = otherwise
    for mask in masks:
        extent = extent_of(mask, queries, keys)
        if extent == by:
            return by
        if extent != otherwise:
            found = "some"
    return found


def _part(rows: Tensor, idx: range, dim: int = -1) -> Tensor | None:
    """The entries at these positions. None where the cells would wrap round or raise, and where there is no entry."""
    is_inside = idx.start >= 0 and idx.stop <= rows.shape[dim] and rows.numel()
    return rows.narrow(dim, idx.start, len(idx)) if is_inside else None
