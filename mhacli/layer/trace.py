"""`mha trace`: one layer observed site by site, by one of three routes; one cell in full; the mask alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, linear

from mhacli.attention.axes import Axes
from mhacli.attention.core import per_query_head
from mhacli.attention.devices import choose_device
from mhacli.attention.masks import both
from mhacli.errors import MhaError
from mhacli.io.data import finite
from mhacli.layer.run import prepare, record_run
from mhacli.layer.setup import Setup, make_axes, make_mask
from mhacli.record.record import Cell, Record, ScorePart
from mhacli.run import CellIndex, Run
from mhacli.settings import ROPE
from mhacli.sites import alibi_slopes

NEEDED = ("scores", "z", "q_rot", "k_rot", "alibi", "bias")
"""The sites needed to explain a cell, besides those that every run keeps."""


@torch.no_grad()
def walk(request: Run, *, route: str, values: bool, place: CellIndex | None) -> Record:
    """A record whose trace follows `route`; with `values`, a summary of each tensor's numbers, and with a `place`, which counts
    tokens, all numbers of one cell. Raises `MhaError` as `inspect` does."""
    setup = prepare(request)
    record, tensors = record_run(setup, request, route=route, values=values, also=NEEDED if place else ())
    if place is None:
        return record
    (sequence, _, query, key), axes, config = place, setup.axes, setup.config
    at = query + axes.first_query(sequence), key + axes.first_key(sequence)
    used = {name: tensors.get(f"{name}_rot", tensors[name]) for name in ("q", "k", "v")}  # after any rotation
    heads = {name: per_query_head(tensor, config.n_heads) for name, tensor in used.items()}
    given = {"scale": config.scale or 0.0, "softcap": config.softcap, "parts": tuple(_parts(setup, tensors, place, at))}
    return replace(record, cell=cell_of(axes, place, at, {**tensors, **heads}, **given))


# ------------------------------------------------------------------------------------------------------------- one cell


def cell_of(axes: Axes, place: CellIndex, at: tuple[int, int], tensors: Mapping[str, Tensor], **described: Any) -> Cell:
    """One cell, `at` a row and a column of the matrices. `tensors` has those of each query head, and as `shares` the weights
    after any dropout. `described` are the other fields of `Cell`."""
    (b, h, query, key), (i, j) = place, at
    first, allowed = axes.first_key(b), tensors["allowed"]
    keys = slice(first, first + len(axes.keys[b].ids))
    names = ("q", "k", "v", "qk", "scores", "pattern", "shares", "z")
    q, k, v, qk, scores, pattern, shares, z = (tensors[name][b, h] for name in names)
    return Cell(
        sequence=b,
        head=h,
        query=query,
        key=key,
        q=_numbers(q[i]),
        k=_numbers(k[j]),
        v=_numbers(v[j]),
        qk=finite(qk[i, j].item()),
        allowed=bool(allowed[b, min(h, allowed.shape[1] - 1), i, j]),
        score=finite(scores[i, j].item()),  # None where it is masked
        scores_row=_numbers(scores[i, keys]),
        pattern_row=_numbers(pattern[i, keys]),
        share=finite(shares[i, j].item()),
        z=_numbers(z[i]),
        **described,
    )


def _parts(setup: Setup, tensors: Mapping[str, Tensor], place: CellIndex, at: tuple[int, int]) -> Iterator[ScorePart]:
    """The terms of the score before the mask, in float64. Up to rounding they add up to the score."""
    (b, h, query, key), (i, j), config = place, at, setup.config
    scale, softcap, kv_head = config.scale or 0.0, config.softcap, h // config.heads_per_kv_head

    def scaled_product(q: Tensor, k: Tensor) -> float:
        return scale * float(q[b, h, i].double() @ k[b, kv_head, j].double())

    scaled = unrotated = scaled_product(tensors["q"], tensors["k"])
    if config.positions in ROPE:
        scaled = scaled_product(tensors["q_rot"], tensors["k_rot"])
        places = setup.axes.queries[b].places
        yield ScorePart("scale · q · k, before the rotation", "content", finite(unrotated))
        name = f"change by the rotation, distance {abs(places[query] - places[key])}"
        yield ScorePart(name, "position", finite(scaled - unrotated))
    elif config.positions in ("sinusoidal", "learned"):
        yield from _products(setup, place, at, scale)
    else:
        yield ScorePart("scale · q · k", "content", finite(scaled))
    if softcap is not None:
        capped = softcap * math.tanh(scaled / softcap)
        yield ScorePart("what the softcap changes", "softcap", finite(capped - scaled))
    if "alibi" in tensors:
        slope = alibi_slopes(config.n_heads)[h]
        value = tensors["alibi"].expand(setup.facts.batch, -1, -1, -1)[b, h, i, j].item()
        name = f"−slope {slope:.4g} · distance {round(-value / slope)}"
        yield ScorePart(name, "position", finite(value), added=True)
    if "bias" in tensors:
        given = tensors["bias"][b, h, i, j].item()
        yield ScorePart("the bias of the file", "given", finite(given), added=True)


def _products(setup: Setup, place: CellIndex, at: tuple[int, int], scale: float) -> Iterator[ScorePart]:
    """The expansion of `q · k` with `q = W(content + position) + b`: four products, with biases counted as content.

    Source: Dai et al. 2019, "Transformer-XL", section 3.3, which names the four terms of absolute positions.
    """
    layer, sides = setup.layer.attention, []
    b, h, *_ = place
    for tokens, projection, head, index in (
        (setup.queries, layer.q_proj, h, at[0]),
        (setup.context or setup.queries, layer.k_proj, h // setup.config.heads_per_kv_head, at[1]),
    ):
        rows, added = setup.content(tokens), setup.added(tokens.places)
        assert added is not None, "positions are added to the rows"
        columns = slice(head * layer.d_head, (head + 1) * layer.d_head)
        weight, bias = (None if p is None else p[columns].cpu().double() for p in (projection.weight, projection.bias))
        content, position = (part[b, index].cpu().double() for part in (rows, added.expand(rows.shape)))
        sides.append({"content": linear(content, weight, bias), "position": linear(position, weight)})
    for (of_query, query), (of_key, key) in product(*(side.items() for side in sides)):
        name = f"{of_query} of the query · {of_key} of the key"
        kind = of_query if of_query == of_key else "both"
        yield ScorePart(name, kind, finite(scale * float(query @ key)))  # type: ignore[arg-type]


def _numbers(tensor: Tensor) -> tuple[float | None, ...]:
    return tuple(finite(x) for x in tensor.double().tolist())


# ------------------------------------------------------------------------------------------------------ the mask alone


MAX_BLOCKS = 256
"""The most blocks along the longer side of the map."""
MAX_CELLS = 1 << 34
"""The most cells of a mask to evaluate, which takes minutes."""
_STRIP_CELLS = 1 << 20
"""The most cells to evaluate at a time."""


def masks_of(request: Run) -> list[dict[str, Any]]:
    """The mask of each sequence, as in JSON: its visible cells, the number of keys that each query sees, padding included, and
    the visible cells per block of `block` × `block` queries and keys, of which the last may be smaller. Raises `MhaError` if
    the device is missing or there are too many cells."""
    facts, device = request.facts, choose_device(request.config.device)
    n_asked = facts.batch * facts.q_len * facts.k_len
    if n_asked > MAX_CELLS:
        raise MhaError(
            f"the mask has {n_asked:,} cells; at most {MAX_CELLS:,} are drawn",
            hint="--max-tokens takes a shorter text, --random a smaller shape",
            code="too-large",
        )
    allowed = make_mask(make_axes(request.encoded, facts, device), facts) or both()
    queries, keys = (torch.arange(n, dtype=torch.int32, device=device) for n in (facts.q_len, facts.k_len))
    block = -(-max(facts.q_len, facts.k_len) // MAX_BLOCKS)
    height = block * max(1, _STRIP_CELLS // (facts.batch * facts.k_len * block))
    per_query, counts = [], []
    for q_idx in queries.split(height):
        cells = allowed(q_idx, keys)[:, 0].expand(facts.batch, len(q_idx), facts.k_len).float()
        per_query.append(cells.sum(dim=-1))
        counts.append(avg_pool2d(cells, block, ceil_mode=True, divisor_override=1))  # sums of blocks
    rows, blocks = (torch.cat(parts, dim=1).long().tolist() for parts in (per_query, counts))
    n_cells = facts.q_len * facts.k_len
    return [
        {
            "n_visible": sum(row),
            "density": sum(row) / n_cells,
            "visible_per_query": row,
            "n_cells": n_cells,
            "block": block,
            "block_counts": grid,
        }
        for row, grid in zip(rows, blocks, strict=True)
    ]
