"""Removes heads and edges from an attention while a model computes it: z before the output projection is replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mhacli.models.calls import Call, as_attention
from mhacli.models.layer_names import LayerKey
from mhacli.record.effect import Replacement


@dataclass(frozen=True)
class Removal:
    """A removal in the attention `layer`, for one row of a batch.

    Without `keys`, whole `heads` are removed: their output becomes zero, or its mean over the text, only at position `at`, or at
    all positions for None. With `keys`, the weights of these heads from `queries` to `keys` are
    removed, and the rest of each row is scaled to keep its sum.
    """

    layer: LayerKey
    heads: tuple[int, ...]
    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] | None = None
    replace: Replacement = "zero"
    at: int | None = None

    @property
    def first(self) -> int:
        """The first position at which the output of the attention can change."""
        return min(self.queries, default=0) if self.keys is not None else self.at or 0


class Remover:
    """Applies the removals `rows[i]` to row i in the attention calls of a batch, which begins at position `start`: the keys and
    values before it come from a cache.

    A mean is that of `z`, the outputs of the heads for one whole text, or of the call itself for a layer that `z` lacks; there
    `real` marks the positions that are not padding. `n_removed` counts the applied removals, to notice attentions that were
    never called. `emptied` are the rows with a query without any key left, whose head output is zeros; `seen` are the rows whose
    removed weights were not masked already.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[Removal]],
        z: Mapping[LayerKey, Tensor],
        *,
        start: int = 0,
        real: Bool[Tensor, "batch query"] | None = None,
    ) -> None:
        self._z, self._start, self._real = z, start, real
        self._here: dict[LayerKey, list[tuple[int, Removal]]] = {}
        self.n_removed, self.emptied, self.seen = 0, set[int](), set[int]()
        for row, removals in enumerate(rows):
            for removal in sorted(removals, key=lambda removal: removal.keys is None):  # an edge brings no head back
                self._here.setdefault(removal.layer, []).append((row, removal))

    def __call__(self, call: Call) -> Tensor | None:
        """z after the removals in this attention, None if there are none."""
        here = self._here.get((call.kind, call.layer), []) if call.part == 0 else []
        if not here or call.z is None:
            return None
        z = call.z.clone()
        for row, removal in here:
            self.n_removed += 1
            if removal.keys is not None:
                self._cut_edges(z, call, removal, row)
                continue
            places = (
                slice(None) if removal.at is None else slice(removal.at - self._start, removal.at - self._start + 1)
            )
            whole = self._z.get(removal.layer)
            for head in removal.heads:
                of_head = call.z[row, head] if whole is None else whole[0, head]
                real = None if whole is not None or self._real is None else self._real[row]
                z[row, head, places] = stand_in(of_head, removal.replace, real)
        return z

    def _cut_edges(self, z: Tensor, call: Call, removal: Removal, row: int) -> None:
        assert removal.keys is not None
        assert call.v is not None
        n_queries, n_keys = call.shape[2:]
        # a cache with a window lacks earlier keys; one of fixed size has unfilled places for later ones
        first_key = 0 if call.kind == "cross" else max(0, self._start + n_queries - n_keys)
        running = [query - self._start for query in removal.queries if 0 <= query - self._start < n_queries]
        if not running:  # nothing is measured after these
            self.seen.add(row)
            return
        heads, queries = torch.tensor(removal.heads), torch.tensor(running)
        scores, sinks = _scores(_part_of(call, row, queries))
        is_cut = torch.zeros(scores.shape[-1], dtype=torch.bool, device=z.device)
        is_cut[[key - first_key for key in removal.keys if 0 <= key - first_key < n_keys]] = True
        was_seen = scores[heads][..., is_cut].isfinite().any(dim=-1, keepdim=True)  # else z stays as it is, bit for bit
        self.seen |= {row} if bool(was_seen.any()) else set()
        weights = _softmax_without(scores[heads], is_cut, None if sinks is None else sinks[heads])
        self.emptied |= {row} if bool((weights.sum(dim=-1) == 0).any()) else set()
        group = z.shape[1] // call.v.shape[1]
        new = (weights @ call.v[row].to(weights.dtype)[heads // group]).to(z.dtype)
        place = (row, heads[:, None], queries)
        z[place] = torch.where(was_seen, new, z[place])


def stand_in(
    z: Float[Tensor, "query d_v"], replacement: Replacement, real: Bool[Tensor, " query"] | None = None
) -> Float[Tensor, "1 d_v"]:
    """What replaces the output of a head at every position: zeros, or its mean over the positions that are `real`."""
    if replacement == "mean":
        return (z if real is None else z[real]).mean(dim=0, keepdim=True)
    return torch.zeros_like(z[:1])


def _softmax_without(
    scores: Float[Tensor, "head query key"], is_cut: Bool[Tensor, " key"], sinks: Float[Tensor, "head query"] | None
) -> Float[Tensor, "head query key"]:
    """The weights of rows without some keys, each with its former sum; rows without any key left are zeros."""
    left = scores.masked_fill(is_cut, -torch.inf)
    lse = left.logsumexp(dim=-1)
    lse = lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype))
    return (left - lse[..., None]).exp().nan_to_num(nan=0.0)


def _scores(call: Call) -> tuple[Float[Tensor, "head query key"], Float[Tensor, "head query"] | None]:
    """The scores of a call of one sequence in at least float32, −∞ at masked cells, and those of its sinks."""
    n_heads, n_queries = call.shape[1:3]
    attention = as_attention(call, torch.ones(1, n_queries, dtype=torch.bool, device=call.device))
    sinks = attention.sink_logits
    return attention.matrices()["scores"][0], None if sinks is None else sinks.expand(1, n_heads, n_queries)[0]


def _part_of(call: Call, row: int, queries: Int[Tensor, " query"]) -> Call:
    """The part of a call for one sequence of a batch and some of its queries."""

    def rows(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.ndim < 4 or tensor.shape[0] == 1 else tensor[row : row + 1]

    def cells(tensor: Tensor | None) -> Tensor | None:
        of_row = rows(tensor)
        return of_row if of_row is None or of_row.shape[-2] == 1 else of_row[..., queries, :]

    mask, sinks = cells(call.mask), call.sinks
    if call.causal:
        mask = torch.arange(call.shape[3], device=queries.device) <= queries[:, None]
    sinks = sinks if sinks is None or sinks.ndim == 1 else sinks[row : row + 1][..., queries]
    names = ("q", "z", "bias", "scores", "pattern")
    given: dict[str, Any] = {name: cells(getattr(call, name)) for name in names}
    return replace(call, **given, k=rows(call.k), v=rows(call.v), mask=mask, sinks=sinks, causal=False)
