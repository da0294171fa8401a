"""Masks as predicates: each answers, for query and key positions, which cells may be attended to
(True = may attend).

They take no T×T memory: cells are evaluated on call, for some queries at a time. All results
broadcast to `[batch, head, query, key]`. A mask also knows its band, outside of which no query sees
a key.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import and_, or_
from typing import Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from mhacli.record.sites import Dims

from .axes import Axes
from .core import Allowed, KeyIdx, QueryIdx, VisibleCells, four_axes

_FAR = 1 << 30


class Band(NamedTuple):
    """The keys from `query + low` to `query + high`."""

    low: int = -_FAR
    high: int = _FAR


_EVERYWHERE = Band()


@dataclass(frozen=True)
class Mask:
    """A mask: `mask(q_idx, k_idx)` evaluates its cells. No query sees a key outside of the `band`;
    without `cells` it sees all keys within. Tensors that a mask was made of must not change
    afterwards.
    """

    cells: Callable[[QueryIdx, KeyIdx], VisibleCells] | None = None
    band: Band = _EVERYWHERE

    def __call__(self, q_idx: QueryIdx, k_idx: KeyIdx) -> VisibleCells:
        """True where the query may attend to the key."""
        if self.cells is not None:
            return self.cells(q_idx, k_idx)
        keys, (low, high) = k_idx[None, None, None, :], self.band
        queries = q_idx.long()[:, None]  # the end of a wide band overflows int32
        cells: Tensor = keys <= queries + high
        return cells if low == -_FAR else cells & (keys >= queries + low)

    def covers(self, n_queries: int, n_keys: int) -> bool:
        """Whether it is known by the band alone that each query sees a key and each key is seen."""
        (low, high), n_more = self.band, n_keys - n_queries
        return self.cells is None and low <= min(0, n_more) and high >= max(0, n_more)


def mask_of(allowed: Allowed | None) -> Mask:
    """A mask with its band, which is not known of a mere function; None allows everything."""
    return allowed if isinstance(allowed, Mask) else Mask(allowed)


def keys_seen(allowed: Allowed | None, queries: range, n_keys: int) -> range:
    """The keys that some of the queries may see as far as the band of a mask says so; one key where
    there is none.
    """
    band = mask_of(allowed).band
    start, stop = max(0, queries[0] + band.low), min(n_keys, queries[-1] + band.high + 1)
    return range(start, stop) if start < stop else range(min(1, n_keys))


def causal(offset: int = 0) -> Mask:
    """No query sees a later key. `offset` is the key position of the first query (`k_len - q_len`
    for a cache).

    >>> causal()(torch.arange(2), torch.arange(3))[0, 0].tolist()
    [[True, False, False], [True, True, False]]
    """
    return Mask(band=Band(high=offset))


def window(left: int, right: int, offset: int = 0) -> Mask:
    """Keys from `left` before to `right` after the query, itself included. `offset` as for
    `causal`.

    Source: Beltagy et al. 2020, "Longformer", section 3.1 (sliding window).
    """
    return Mask(band=Band(offset - left, offset + right))


def prefix(n: int, offset: int = 0) -> Mask:
    """The first `n` keys are seen by every query, the others causally: a prefix language model.
    `offset` as for `causal`.

    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning …" (T5), section 3.2.1.
    """
    return either(leading(n), causal(offset))


def leading(n: int, places: Int[Tensor, "... key"] | None = None) -> Mask:
    """The first `n` keys, for every query: with `either(window(…), leading(n))` the sinks of a
    sliding window.

    `places` `[batch, key]` or `[key]` says which is first where texts do not begin with their row
    (padding on the left, packed documents): the place of each key in its own text. Source: Xiao et
    al. 2023, "Efficient Streaming Language Models with Attention Sinks", section 3.

    >>> leading(1)(torch.arange(2), torch.arange(3)).tolist()
    [[[[True, False, False]]]]
    """

    def allowed(q_idx: QueryIdx, k_idx: KeyIdx) -> VisibleCells:
        rows = (
            k_idx[None, :]
            if places is None
            else torch.atleast_2d(places).to(k_idx.device)[:, k_idx]
        )
        return (rows < n)[:, None, None, :]

    return Mask(allowed)


def padding(
    lengths: Int[Tensor, " batch"] | Sequence[int],
    side: Literal["left", "right"] = "right",
    *,
    padded_len: int | None = None,
    of: Literal["key", "query"] = "key",
) -> Mask:
    """Only real tokens: sequence `b` has `lengths[b]` of them, and padding on one side up to
    `padded_len`.

    `padded_len` defaults to the longest length. `of` says whose padding it is: keys that no query
    may attend to, or queries that attend to nothing.
    """
    n_real = torch.as_tensor(lengths)
    total = int(n_real.max()) if padded_len is None and side == "left" else padded_len or 0

    def is_real(idx: Int[Tensor, " idx"]) -> Tensor:
        counts = n_real.to(idx.device)[:, None]
        return idx[None, :] < counts if side == "right" else idx[None, :] >= total - counts

    def allowed(q_idx: QueryIdx, k_idx: KeyIdx) -> VisibleCells:
        return is_real(k_idx)[:, None, None, :] if of == "key" else is_real(q_idx)[:, None, :, None]

    return Mask(allowed)


def documents(ids: Int[Tensor, "... idx"], k_ids: Int[Tensor, "... k_idx"] | None = None) -> Mask:
    """Texts packed into one row see only themselves: a query and a key with the same document id.

    `ids` `[batch, idx]`, or `[idx]` for all alike, are those of the queries; `k_ids` those of the
    keys (default the same).
    """
    q_rows: Tensor = torch.atleast_2d(ids)
    k_rows: Tensor = q_rows if k_ids is None else torch.atleast_2d(k_ids)

    def allowed(q_idx: QueryIdx, k_idx: KeyIdx) -> VisibleCells:
        of_query, of_key = q_rows.to(q_idx.device)[:, q_idx], k_rows.to(q_idx.device)[:, k_idx]
        return (of_query[:, :, None] == of_key[:, None, :])[:, None]

    return Mask(allowed)


def from_tensor(t: Tensor) -> Mask:
    """A bool tensor that broadcasts to `[batch, head, query, key]`, True = may attend. Raises
    `TypeError` for others.

    A float mask is refused: 0/1 floats mean "allowed" to some and are *added* to the scores by
    others.
    """
    if t.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor with True = may attend, got {t.dtype}")
    full = four_axes(t)

    def allowed(q_idx: QueryIdx, k_idx: KeyIdx) -> VisibleCells:
        cells = full.to(q_idx.device)
        rows = cells if full.shape[-2] == 1 else cells[..., q_idx, :]
        return rows if full.shape[-1] == 1 else rows[..., k_idx]

    return Mask(allowed)


def both(*masks: Allowed) -> Mask:
    """What every one of the masks allows.

    >>> both(causal(), window(0, 9))(torch.arange(2), torch.arange(2))[0, 0].tolist()
    [[True, False], [False, True]]
    """
    every = [*map(mask_of, masks)]
    band = Band(
        max((m.band.low for m in every), default=-_FAR),
        min((m.band.high for m in every), default=_FAR),
    )
    if all(mask.cells is None for mask in every):
        return Mask(band=band)
    return Mask(
        lambda q_idx, k_idx: reduce(and_, (four_axes(mask(q_idx, k_idx)) for mask in masks)), band
    )


def either(*masks: Allowed) -> Mask:
    """What at least one of the masks allows.

    >>> either(window(0, 0), leading(1))(torch.arange(3), torch.arange(3))[0, 0].tolist()
    [[True, False, False], [True, True, False], [True, False, True]]
    """

    bands = [mask_of(mask).band for mask in masks]
    band = Band(min((b.low for b in bands), default=0), max((b.high for b in bands), default=-1))
    no_cell = torch.zeros(1, 1, 1, 1, dtype=torch.bool)

    def allowed(q_idx: QueryIdx, k_idx: KeyIdx) -> VisibleCells:
        return reduce(
            or_, (four_axes(mask(q_idx, k_idx)) for mask in masks), no_cell.to(q_idx.device)
        )

    return Mask(allowed, band)


def shifted(mask: Allowed, offset: int) -> Mask:
    """The mask for queries that begin at position `offset`: what a step of decoding asks, whose
    query 0 is the newest.

    >>> shifted(causal(), 2)(torch.arange(1), torch.arange(4))[0, 0].tolist()
    [[True, True, True, False]]
    """
    cells, (low, high) = mask_of(mask).cells, mask_of(mask).band
    band = Band(low + offset, high + offset)
    return (
        Mask(band=band)
        if cells is None
        else Mask(lambda q_idx, k_idx: mask(q_idx + offset, k_idx), band)
    )


def of_run(axes: Axes, dims: Dims, places: Int[Tensor, "... key"]) -> Mask | None:
    """The mask of a run by its settings, or None if all cells are allowed. `places` are the
    positions of the keys in their texts.

    A cell is allowed if no rule forbids it: the config's order of positions (causality, a window
    with its sinks, and the prefix that all queries see), padding of queries and keys, and
    documents.
    """
    config, rules = dims.config, list[Mask]()
    if config.causal or config.prefix is not None:
        rules.append(causal())
    if config.window is not None:
        near = window(*config.window)
        if config.sink is not None:
            near = either(near, leading(config.sink, places))
        rules.append(near)
    if config.prefix is not None:
        rules = [either(leading(config.prefix, places), both(*rules))]
    if dims.padded:
        real = partial(padding, side=config.padding)
        rules.append(real([*map(len, axes.keys.ids)], padded_len=dims.k_len))
        rules.append(real([*map(len, axes.queries.ids)], padded_len=dims.q_len, of="query"))
    if dims.packed:
        sides = (axes.queries, axes.keys)
        rules.append(documents(*(x.filled(x.documents, -1).to(x.device) for x in sides)))
    return both(*rules) if rules else None
