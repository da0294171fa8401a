"""Removes heads and edges from an attention while a model computes it: z before the output projection is replaced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mhacli.models.calls import Call, as_attention
from mhacli.models.layer_names import LayerKey
from mhacli.record.effect import Replacement


@dataclass(frozen=True, eq=False)
class Removal:
    """A removal in the attention `layer`, from the named `heads`, or from all for ().

    Without `keys`, whole heads are removed: their output becomes zero, or its mean over the text, at the positions `queries`,
    or at all for (). With `keys`, the weights of these heads from `queries` to `keys` are removed, and the rest of each row is
    scaled to keep its sum.
    """

    layer: LayerKey
    heads: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] | None = None
    replace: Replacement = "zero"


Placed = tuple[int, int, Removal]
"""The row of a removal, its sequence in a call, and the removal with the numbers that queries and keys have in the call."""


def without(
    call: Call,
    rows: Mapping[int, Sequence[Removal]],
    *,
    start: int = 0,
    width: int = 0,
    of_text: Float[Tensor, "batch head query d_v"] | None = None,
    real: Bool[Tensor, "batch query"] | None = None,
) -> tuple[Tensor, set[int], set[int]]:
    """z after the removals from some rows in this layer, the rows that lose anything that was visible, and those with a query
    that has no key left, whose head output is zeros.

    A row is a sequence of the call; with a `width` it is as many tokens of a single sequence, in which rows stand one behind the
    other. The tokens of a row begin at position `start`: the keys before come from a cache. A mean is that of `of_text`, the
    outputs for a whole text, or else of the call itself, where `real` marks the positions that are not padding.
    """
    assert call.z is not None
    here = {row: [own for own in of_row if own.layer == (call.kind, call.layer)] for row, of_row in rows.items()}
    placed = _placed(call, here, start, width)
    z, edges, emptied = call.z.clone(), defaultdict[int, list[Placed]](list), set[int]()
    for each in placed:
        for query in each[2].queries if each[2].keys is not None else ():
            edges[query].append(each)
    seen = {row for row, removals in here.items() if removals} - {row for some in edges.values() for row, *_ in some}
    for query, some in edges.items():
        was_visible, is_empty = _cut_edges(z, call, query, some)
        seen.update(row for row, sequence, _ in some if was_visible[sequence].any())
        emptied.update(row for row, sequence, _ in some if is_empty[sequence].any())
    for row, sequence, removal in placed:  # after the edges, which bring no head back
        for head in () if removal.keys is not None else removal.heads or range(z.shape[1]):
            own = call.z[sequence, head] if of_text is None else of_text[0, head]
            value = stand_in(own, removal.replace, None if real is None else real[row])
            z[sequence, head, [*removal.queries] or slice(None)] = value
    return z, seen, emptied


def _placed(call: Call, rows: Mapping[int, Sequence[Removal]], start: int, width: int) -> list[Placed]:
    """The removals at positions of the call: nothing is measured after these."""
    n_queries, n_keys = call.shape[2:]
    # a cache with a window lacks earlier keys; one of fixed size has unfilled places for later ones
    first_key = 0 if call.kind == "cross" else max(0, start + n_queries - n_keys)
    running, placed = range(start, start + (width or n_queries)), list[Placed]()
    for row, removals in rows.items():
        shift = row * width
        for removal in removals:
            queries = tuple(query - start + shift for query in removal.queries if query in running)
            keys = [key - first_key + (shift if key >= start else 0) for key in removal.keys or ()]
            moved = replace(removal, queries=queries, keys=None if removal.keys is None else tuple(keys))
            if queries or not removal.queries:
                placed.append((row, 0 if width else row, moved))
    return placed


def stand_in(
    z: Float[Tensor, "query d_v"], replacement: Replacement, real: Bool[Tensor, " query"] | None = None
) -> Float[Tensor, "1 d_v"]:
    """What replaces the output of a head at every position: zeros, or its mean over the positions that are `real`."""
    if replacement == "mean":
        return (z if real is None else z[real]).mean(dim=0, keepdim=True)
    return torch.zeros_like(z[:1])


def _cut_edges(z: Tensor, call: Call, query: int, edges: Sequence[Placed]) -> tuple[Tensor, Tensor]:
    """Removes edges of one query from the z of several sequences: its weights are computed again without the scores of their
    keys. Whether a removed weight was visible, and whether no key is left, of each sequence and head."""
    assert call.v is not None
    batch, n_heads, _, n_keys = call.shape
    part = call.cropped(slice(query, query + 1), slice(None))
    if call.causal:
        part = replace(part, causal=False, mask=torch.arange(n_keys, device=z.device)[None] <= query)
    attention = as_attention(part, torch.ones(batch, 1, dtype=torch.bool, device=z.device))
    scores, sinks = attention.matrices()["scores"], attention.sink_logits
    is_cut = torch.zeros(scores.shape, dtype=torch.bool, device=z.device)
    for _, sequence, removal in edges:
        heads = torch.tensor([*removal.heads] or [*range(n_heads)])
        columns = torch.tensor([key for key in removal.keys or () if 0 <= key < n_keys], dtype=torch.long)
        is_cut[sequence, heads[:, None], 0, columns] = True
    was_visible = (is_cut & scores.isfinite()).any(dim=-1, keepdim=True)  # else z stays as it is, bit for bit
    left = scores.masked_fill(is_cut, -torch.inf)
    lse = left.logsumexp(dim=-1, keepdim=True)
    lse = lse if sinks is None else torch.logaddexp(lse, sinks[..., None].to(lse.dtype))
    weights = (left - lse).exp().nan_to_num(nan=0.0)
    group = n_heads // call.v.shape[1]
    v = call.v.to(weights.dtype)[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)
    z[:, :, query] = torch.where(was_visible, weights @ v, z[:, :, query, None]).squeeze(2).to(z.dtype)
    return was_visible, was_visible & (weights.sum(dim=-1, keepdim=True) == 0)
