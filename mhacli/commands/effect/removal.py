"""Removes heads and edges from an attention while a model computes it: z before the output
projection is replaced.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, assert_never

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mhacli.attention.core import four_axes, per_query_head
from mhacli.models.capture import Call
from mhacli.models.layer_names import LayerKey
from mhacli.models.masking import as_attention
from mhacli.record.effect import HeadReplacement, Replacement


@dataclass(frozen=True, eq=False)
class Removal:
    """A removal in the attention `layer`, from the named `heads`, or from all for ().

    Without `keys`, whole heads are removed: their output becomes zero, or its mean over the text,
    at the positions `queries`, or at all for (). With `keys`, the weights of these heads from
    `queries` to `keys` are removed, and the rest of each row is scaled to keep its sum.
    """

    layer: LayerKey
    heads: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()
    replace: HeadReplacement = "zero"

    @property
    def replacement(self) -> Replacement:
        """The replacement of the removed part."""
        return "renormalise" if self.keys else self.replace

    @property
    def at(self) -> int | None:
        """The only position at which whole heads are removed; None for edges and all positions."""
        return self.queries[0] if self.queries and not self.keys else None

    @property
    def places(self) -> list[int] | slice:
        """The index of the positions at which whole heads are removed."""
        return list(self.queries) if self.queries else slice(None)

    def within(self, call: Call) -> "Removal | None":
        """The removal as the call numbers the heads; None if it removes nothing there."""
        if self.layer != call.place:
            return None
        if call.first_head is None or not self.heads:
            return self
        numbers = (head - call.first_head for head in self.heads)
        heads = tuple(number for number in numbers if 0 <= number < call.shape[1])
        return replace(self, heads=heads) if heads else None


class PlacedRemoval(NamedTuple):
    """A removal in a call: its row, the sequence of the call that holds the row, and the removal
    with the numbers that queries and keys have in the call.
    """

    row: int
    sequence: int
    removal: Removal


class RemovedHeads(NamedTuple):
    """z after removals, the rows that lose anything that was visible, and those with a query that
    has no key left, whose head output is zeros.
    """

    z: Float[Tensor, "batch head query d_v"]
    visible: set[int]
    emptied: set[int]


def without(
    call: Call,
    rows: Mapping[int, Sequence[Removal]],
    *,
    start: int = 0,
    width: int = 0,
    of_text: Float[Tensor, "batch head query d_v"] | None = None,
    real: Bool[Tensor, "batch query"] | None = None,
) -> RemovedHeads:
    """z after the removals from some rows in this layer.

    A row is a sequence of the call; with a `width` it is as many tokens of a single sequence, in
    which rows stand one behind the other. The tokens of a row begin at position `start`: the keys
    before come from a cache. A mean is that of `of_text`, the outputs for a whole text, or else of
    the call itself, where `real` marks the positions that are not padding.
    """
    assert call.z is not None
    of_layer = {
        row: [removal for removal in removals if removal.within(call)]
        for row, removals in rows.items()
    }
    placed = _placed(call, of_layer, start, width)
    removed = RemovedHeads(call.z.clone(), set(), set())
    _cut_edges(removed, call, [place for place in placed if place.removal.keys])
    for row, sequence, removal in placed:  # after the edges, which bring no head back
        if removal.keys:
            continue
        for head in removal.heads or range(call.z.shape[1]):
            of_head = call.z[sequence, head] if of_text is None else of_text[0, head]
            value = stand_in(of_head, removal.replace, None if real is None else real[row])
            removed.z[sequence, head, removal.places] = value
    for row, removals in of_layer.items():
        if any(not removal.keys for removal in removals):
            removed.visible.add(row)
    return removed


def as_used(call: Call, z: Tensor, rows: Mapping[int, Sequence[Removal]], *, start: int) -> Call:
    """A call with the weights and the values of which `z` after the removals follows: an edge is
    masked, and a removed head has what replaces it as the value of every key.
    """
    batch, n_heads, n_queries, n_keys = call.shape
    cut = torch.zeros(batch, n_heads, n_queries, n_keys, dtype=torch.bool, device=call.device)
    v = None if call.v is None else per_query_head(call.v, n_heads).clone()
    for _, sequence, removal in _placed(call, rows, start, 0):
        heads = removal.heads or range(n_heads)
        if removal.keys:
            cut[sequence][np.ix_(heads, removal.queries, removal.keys)] = True
        elif v is not None:
            v[sequence, list(heads)] = z[sequence, list(heads), :1].to(v.dtype)
    if not cut.any():
        return replace(call, v=v)
    if call.scores is not None and call.pattern is not None:
        scores = call.scores.masked_fill(cut, -torch.inf)
        weights = scores.softmax(dim=-1).nan_to_num(nan=0.0).to(call.pattern.dtype)
        is_cut = cut.any(dim=-1, keepdim=True)
        return replace(call, v=v, scores=scores, pattern=weights.where(is_cut, call.pattern))
    mask = ~cut
    if call.mask is not None:
        given = four_axes(call.mask)
        mask = mask & given if given.dtype == torch.bool else given.masked_fill(cut, -torch.inf)
    return replace(call, v=v, mask=mask)


def _placed(
    call: Call, rows: Mapping[int, Sequence[Removal]], start: int, width: int
) -> list[PlacedRemoval]:
    """The removals at positions of the call, and of keys that it has: nothing is measured after
    these.
    """
    n_queries, n_keys = call.shape[2:]
    # a cache with a window lacks earlier keys; one of fixed size has unfilled places for later ones
    first_key = 0 if call.kind == "cross" else max(0, start + n_queries - n_keys)
    positions = range(start, start + (width or n_queries))
    placed: list[PlacedRemoval] = []
    for row, removals in rows.items():
        shift = row * width
        for removal in filter(None, (each.within(call) for each in removals)):
            queries = tuple(
                query - start + shift for query in removal.queries if query in positions
            )
            columns = (key - first_key + (shift if key >= start else 0) for key in removal.keys)
            keys = tuple(column for column in columns if 0 <= column < n_keys)
            has_query = bool(queries) or not removal.queries
            has_key = bool(keys) or not removal.keys
            if has_query and has_key:
                moved = replace(removal, queries=queries, keys=keys)
                placed.append(PlacedRemoval(row, 0 if width else row, moved))
    return placed


def stand_in(
    z: Float[Tensor, "query d_v"],
    replacement: HeadReplacement,
    real: Bool[Tensor, " query"] | None = None,
) -> Float[Tensor, "1 d_v"]:
    """What replaces the output of a head at every position: zeros, or its mean over the positions
    that are `real`.
    """
    match replacement:
        case "zero":
            return torch.zeros_like(z[:1])
        case "mean":
            return (z if real is None else z[real]).mean(dim=0, keepdim=True)
        case _:
            assert_never(replacement)


def _cut_edges(removed: RemovedHeads, call: Call, placed: Sequence[PlacedRemoval]) -> None:
    """Removes edges from z, query by query."""
    assert call.v is not None
    z = removed.z
    by_query: dict[int, list[PlacedRemoval]] = defaultdict(list)
    for place in placed:
        for query in place.removal.queries:
            by_query[query].append(place)
    for query, places in by_query.items():
        weights, was_visible = _weights_without(places, call, query)
        outputs = weights @ per_query_head(call.v.to(weights.dtype), call.shape[1])
        before = z[:, :, query, None]  # stays as it is, bit for bit, where nothing visible is cut
        z[:, :, query] = torch.where(was_visible, outputs, before).squeeze(2).to(z.dtype)
        is_empty = was_visible & (weights.sum(dim=-1, keepdim=True) == 0)
        for row, sequence, _ in places:
            if was_visible[sequence].any():
                removed.visible.add(row)
            if is_empty[sequence].any():
                removed.emptied.add(row)


def _weights_without(
    edges: Sequence[PlacedRemoval], call: Call, query: int
) -> tuple[Float[Tensor, "batch head 1 key"], Bool[Tensor, "batch head 1 1"]]:
    """The weights of one query, computed again without the scores of the keys of some edges, and
    whether a removed weight was visible.
    """
    n_heads = call.shape[1]
    attention = as_attention(call.cropped(slice(query, query + 1), slice(None)))
    scores = attention.matrices()["scores"]
    is_cut = torch.zeros_like(scores, dtype=torch.bool)
    for _, sequence, removal in edges:
        is_cut[sequence, :, 0][np.ix_(removal.heads or range(n_heads), removal.keys)] = True
    was_visible = (is_cut & scores.isfinite()).any(dim=-1, keepdim=True)
    left = scores.masked_fill(is_cut, -torch.inf)
    lse = left.logsumexp(dim=-1, keepdim=True)
    if attention.sink_logits is not None:
        lse = torch.logaddexp(lse, attention.sink_logits[..., None].to(lse.dtype))
    return (left - lse).exp().nan_to_num(nan=0.0), was_visible
