"""Masks as predicates: each answers, for query and key positions, which cells may be attended to (True = may attend).

They cost no T×T memory until they are asked, and can be asked tile by tile. All results broadcast to
`[batch, head, query, key]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mhacli.attention.core import Allowed

Queries = Int[Tensor, " query"]
Keys = Int[Tensor, " key"]
Cells = Bool[Tensor, "#batch #head #query #key"]


def causal(offset: int = 0) -> Allowed:
    """No query sees a later key. `offset` is the key position of the first query (`k_len - q_len` for a cache).

    >>> causal()(torch.arange(2), torch.arange(3))[0, 0].tolist()
    [[True, False, False], [True, True, False]]
    """
    return lambda q_idx, k_idx: _cells(k_idx[None, :] <= q_idx[:, None] + offset)


def window(left: int, right: int, offset: int = 0) -> Allowed:
    """Keys from `left` before to `right` after the query, itself included. `offset` as for `causal`.

    Source: Beltagy et al. 2020, "Longformer", section 3.1 (sliding window).
    """

    def allowed(q_idx: Queries, k_idx: Keys) -> Cells:
        distance = k_idx[None, :] - (q_idx[:, None] + offset)
        return _cells((distance >= -left) & (distance <= right))

    return allowed


def prefix(n: int, offset: int = 0) -> Allowed:
    """The first `n` keys are seen by every query, the others causally: a prefix language model. `offset` as for `causal`.

    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning …" (T5), section 3.2.1.
    """
    return either(leading(n), causal(offset))


def leading(n: int, places: Int[Tensor, "... key"] | None = None) -> Allowed:
    """The first `n` keys, for every query: with `either(window(…), leading(n))` the sinks of a sliding window.

    `places` `[batch, key]` or `[key]` says which is first where texts do not begin with their row (padding on the left,
    packed documents): the place of each key in its own text. Source: Xiao et al. 2023, "Efficient Streaming Language
    Models with Attention Sinks", section 3.

    >>> leading(1)(torch.arange(2), torch.arange(3)).tolist()
    [[[[True, False, False]]]]
    """

    def allowed(q_idx: Queries, k_idx: Keys) -> Cells:
        rows = k_idx[None, :] if places is None else torch.atleast_2d(places).to(k_idx.device)[:, k_idx]
        return (rows < n)[:, None, None, :]

    return allowed


def padding(
    lengths: Int[Tensor, " batch"] | Sequence[int],
    side: Literal["left", "right"] = "right",
    *,
    padded_len: int | None = None,
    of: Literal["key", "query"] = "key",
) -> Allowed:
    """Only real tokens: sequence `b` has `lengths[b]` of them, and padding on one side up to `padded_len`.

    `padded_len` defaults to the longest length. `of` says whose padding it is: keys that nobody may see, or queries
    that see nothing.
    """
    n_real = torch.as_tensor(lengths)
    total = int(n_real.max()) if padded_len is None and side == "left" else padded_len or 0

    def allowed(q_idx: Queries, k_idx: Keys) -> Cells:
        idx = k_idx if of == "key" else q_idx
        counts = n_real.to(idx.device)[:, None]
        real = idx[None, :] < counts if side == "right" else idx[None, :] >= total - counts
        return real[:, None, None, :] if of == "key" else real[:, None, :, None]

    return allowed


def documents(ids: Int[Tensor, "... idx"], k_ids: Int[Tensor, "... k_idx"] | None = None) -> Allowed:
    """Texts packed into one row see only themselves: a query and a key with the same document id.

    `ids` `[batch, idx]`, or `[idx]` for all alike, are those of the queries; `k_ids` those of the keys (default the same).
    """
    q_rows: Tensor = torch.atleast_2d(ids)
    k_rows: Tensor = q_rows if k_ids is None else torch.atleast_2d(k_ids)

    def allowed(q_idx: Queries, k_idx: Keys) -> Cells:
        of_query, of_key = q_rows.to(q_idx.device)[:, q_idx], k_rows.to(q_idx.device)[:, k_idx]
        return (of_query[:, :, None] == of_key[:, None, :])[:, None]

    return allowed


def from_tensor(t: Tensor) -> Allowed:
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

    return allowed


def both(*masks: Allowed) -> Allowed:
    """What every one of the masks allows.

    >>> both(causal(), window(0, 9))(torch.arange(2), torch.arange(2))[0, 0].tolist()
    [[True, False], [False, True]]
    """

    def allowed(q_idx: Queries, k_idx: Keys) -> Cells:
        cells = _cells(torch.ones(1, 1, dtype=torch.bool, device=q_idx.device))
        for mask in masks:
            cells = cells & mask(q_idx, k_idx)
        return cells

    return allowed


def either(*masks: Allowed) -> Allowed:
    """What at least one of the masks allows.

    >>> either(window(0, 0), leading(1))(torch.arange(3), torch.arange(3))[0, 0].tolist()
    [[True, False, False], [True, True, False], [True, False, True]]
    """

    def allowed(q_idx: Queries, k_idx: Keys) -> Cells:
        cells = _cells(torch.zeros(1, 1, dtype=torch.bool, device=q_idx.device))
        for mask in masks:
            cells = cells | mask(q_idx, k_idx)
        return cells

    return allowed


def shifted(mask: Allowed, offset: int) -> Allowed:
    """The mask for queries that begin at position `offset`: what a step of decoding asks, whose query 0 is the newest.

    >>> shifted(causal(), 2)(torch.arange(1), torch.arange(4))[0, 0].tolist()
    [[True, True, True, False]]
    """
    return lambda q_idx, k_idx: mask(q_idx + offset, k_idx)


def _cells(plane: Tensor) -> Cells:
    return plane[None, None]
