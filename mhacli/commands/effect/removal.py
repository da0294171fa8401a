"""Removes heads and edges from an attention while a model computes it: z before the output projection is replaced."""

from __future__ import annotations

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
    here = [(row, removal) for row, removals in rows.items() for removal in removals]
    here = [(row, removal) for row, removal in here if removal.layer == (call.kind, call.layer)]
    z, edges = call.z.clone(), dict[int, list[tuple[int, Removal]]]()
    running = range(start, start + (width or call.shape[2]))
    for row, removal in here:
        for query in removal.queries if removal.keys is not None else ():
            if query in running:  # nothing is measured after these
                edges.setdefault(query - start + row * width, []).append((row, removal))
    seen, emptied = {row for row, _ in here} - {row for some in edges.values() for row, _ in some}, set[int]()
    for query, some in edges.items():
        was_visible, is_empty = _cut_edges(z, call, query, some, start=start, width=width)
        seen.update(row for row, _ in some if was_visible[0 if width else row].any())
        emptied.update(row for row, _ in some if is_empty[0 if width else row].any())
    for row, removal in here:  # after the edges, which bring no head back
        if removal.keys is None:
            sequence, shift = (0, row * width - start) if width else (row, -start)
            places = [query + shift for query in removal.queries] or slice(None)
            for head in removal.heads or range(z.shape[1]):
                own = call.z[sequence, head] if of_text is None else of_text[0, head]
                z[sequence, head, places] = stand_in(own, removal.replace, None if real is None else real[row])
    return z, seen, emptied


def stand_in(
    z: Float[Tensor, "query d_v"], replacement: Replacement, real: Bool[Tensor, " query"] | None = None
) -> Float[Tensor, "1 d_v"]:
    """What replaces the output of a head at every position: zeros, or its mean over the positions that are `real`."""
    if replacement == "mean":
        return (z if real is None else z[real]).mean(dim=0, keepdim=True)
    return torch.zeros_like(z[:1])


def _cut_edges(
    z: Tensor, call: Call, query: int, edges: Sequence[tuple[int, Removal]], *, start: int, width: int
) -> tuple[Tensor, Tensor]:
    """Removes edges of one query from the z of several rows: its weights are computed again without the scores of their keys.
    Whether a removed weight was visible, and whether no key is left, of each sequence and head."""
    assert call.v is not None
    batch, n_heads, n_queries, n_keys = call.shape
    part = call.cropped(slice(query, query + 1), slice(None))
    if call.causal:
        part = replace(part, causal=False, mask=torch.arange(n_keys, device=z.device)[None] <= query)
    attention = as_attention(part, torch.ones(batch, 1, dtype=torch.bool, device=z.device))
    scores, sinks = attention.matrices()["scores"], attention.sink_logits
    is_cut = torch.zeros(scores.shape, dtype=torch.bool, device=z.device)
    # a cache with a window lacks earlier keys; one of fixed size has unfilled places for later ones
    first_key = 0 if call.kind == "cross" else max(0, start + n_queries - n_keys)
    for row, removal in edges:
        keys = [key + (row * width if key >= start else 0) - first_key for key in removal.keys or ()]
        heads = torch.tensor([*removal.heads] or [*range(n_heads)])
        columns = torch.tensor([key for key in keys if 0 <= key < n_keys], dtype=torch.long)
        is_cut[0 if width else row, heads[:, None], 0, columns] = True
    was_visible = (is_cut & scores.isfinite()).any(dim=-1, keepdim=True)  # else z stays as it is, bit for bit
    left = scores.masked_fill(is_cut, -torch.inf)
    lse = left.logsumexp(dim=-1, keepdim=True)
    lse = lse if sinks is None else torch.logaddexp(lse, sinks[..., None].to(lse.dtype))
    weights = (left - lse).exp().nan_to_num(nan=0.0)
    group = n_heads // call.v.shape[1]
    v = call.v.to(weights.dtype)[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)
    z[:, :, query] = torch.where(was_visible, weights @ v, z[:, :, query, None]).squeeze(2).to(z.dtype)
    return was_visible, was_visible & (weights.sum(dim=-1, keepdim=True) == 0)
