"""The numbers of a page, schema `mha.page/1`: tokens, heads and their maps.

A map has the cells of the record while all maps fit into the page, else blocks and the strongest keys of every query.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any

import numpy as np

from mhacli.errors import first_names
from mhacli.record.arrays import Array
from mhacli.record.glossary import words_of
from mhacli.record.heads import words_of_type
from mhacli.render.base.cells import DECADES, FORBIDDEN
from mhacli.render.base.colours import KIND_SIGNS, UNKNOWN, is_dark, ramp_colour
from mhacli.render.base.format import token_text
from mhacli.render.base.options import Scale
from mhacli.render.heads.drawable import DrawableHead
from mhacli.render.heads.head_map import HeadMap, head_map, kv_head_of
from mhacli.render.heads.view import token_name
from mhacli.render.page.elements import Html
from mhacli.text.numbers import shown
from mhacli.text.tokens import TokenSequence

SCHEMA = "mha.page/1"
PageMap = Mapping[str, Any]
"""A map as the script reads it; see `_page_map`."""
LIMIT_BYTES = 1 << 20
"""The largest size of a page if possible: small enough for a mail, a ticket, a chat."""
PARTS = ("scores", "qk", "z", "v")
"""The arrays that explain a weight and its effect, the most informative first."""
MOST_KEYS = 8
"""The most strongest keys of a query beside blocks."""
_NO_KEY = 0xFFFFFFFF
_NUMBER, _KEY, _OVERHEAD = 5.1, 6.25, 800
"""The bytes that a number takes in the page, a key with its weight, and what else a map has: packed, and in base64."""
_FOR_KEYS = 0.65
"""The part of the room for the strongest keys; the rest is for blocks."""


@dataclass(frozen=True)
class PageView:
    """The contents of a page: heads of sequences, the scale, whether sinks are hidden, and the head shown first."""

    heads: tuple[DrawableHead, ...]
    sequences: tuple[int, ...]
    scale: Scale
    hide_sinks: bool
    begin: int

    @property
    def bits(self) -> int:
        """The bits of an attention weight in the record. The page rounds those of more than 32."""
        weights = (head.record.arrays.get("pattern", head.record.arrays.get("map")) for head in self.heads)
        return max((8 * array.itemsize for array in weights if array is not None), default=32)


@dataclass(frozen=True)
class PageMaps:
    """The maps of a page in order, blocks of `factor` × `factor` cells with the `n_keys` strongest keys of every query. The
    tops of the scale are with and without sinks."""

    maps: Sequence[PageMap] = ()
    factor: int = 1
    n_keys: int = 0
    tops: tuple[float, float] = (1.0, 1.0)
    is_exceeded: bool = False


def page_maps(view: PageView, room: float) -> PageMaps:
    """The maps of a page in about `room` bytes: every cell if there is room, and as many of `PARTS` as fit, else blocks."""
    of = [(head, sequence) for head in view.heads for sequence in view.sequences]
    n_cells = sum(_n_cells(*pair) for pair in of)
    factor, n_keys, parts = 1, 0, []
    room -= len(of) * _OVERHEAD + n_cells * _NUMBER
    if room >= 0:
        for name in PARTS:
            room -= _NUMBER * (n_cells if name in ("scores", "qk") else sum(_n_numbers(*pair, name) for pair in of))
            if room >= 0:
                parts.append(name)
    else:
        room += n_cells * _NUMBER
        n_queries = sum(len(head.record.sequences[b].tokens) for head, b in of if "pattern" in head.record.arrays)
        n_keys = min(MOST_KEYS, int(_FOR_KEYS * room / (_KEY * n_queries))) if n_queries else 0
        factor = ceil(sqrt(n_cells * _NUMBER / (room - n_keys * n_queries * _KEY)))
    maps, largest, rest, most = [], 0.0, 0.0, 0.0
    for head, sequence in of:
        cells = head_map(head, sequence)
        blocks = cells.pooled(factor)
        without = blocks.without_sinks()
        about = _about_sinks(head, sequence, cells)
        strongest = _strongest_keys(cells, n_keys) if n_keys and "pattern" in head.record.arrays else None
        packed_parts = dict(_parts(head, sequence, parts))
        maps.append(_page_map(blocks, without) | {"about": about, "top": strongest, "parts": packed_parts})
        largest, rest = max(largest, blocks.largest), max(rest, without.largest)
        most = max(most, float(np.nanmax(blocks.weights, initial=0.0)))
    is_exceeded = most > largest * (1 + _ALIKE)
    return PageMaps(maps, factor, n_keys, (largest or 1.0, rest or 1.0), is_exceeded)


_ALIKE = 1e-4
"""A relative excess over the scale's top that its digits cannot show."""


def _n_cells(head: DrawableHead, sequence: int) -> int:
    """The number of cells that are not masked."""
    arrays = head.record.arrays
    if "pattern" not in arrays:
        return int(np.prod(arrays["map"].shape[2:]))
    allowed = arrays["allowed"]
    return int(allowed[sequence, min(head.place, allowed.shape[1] - 1)].sum())


def _n_numbers(head: DrawableHead, sequence: int, name: str) -> int:
    array = head.record.arrays.get(name)
    return 0 if array is None else int(np.prod(array.shape[2:]))


def _page_map(shown: HeadMap, without: HeadMap) -> dict[str, Any]:
    """A map with and without sinks, its arrays packed.

    `cells` `[row, column]` are `FORBIDDEN` where masked. Where sinks are hidden, `of_sinks` `[row, sink column]` is taken
    from the cells, the rest of a row is divided by `left`, and `taken` is what sinks had. `learned` is the weight of a sink
    logit.
    """
    rest = np.where(shown.is_open, np.clip(shown.weights - shown.of_sinks, 0, None), 0.0).sum(axis=1)
    columns = np.flatnonzero((shown.of_sinks != 0).any(axis=0))
    has_queries = shown.n_queries > 0
    return {
        "rows": len(shown.weights),
        "columns": shown.weights.shape[1],
        "block": shown.block,
        "first": shown.first,
        "cells": packed(shown.weights),
        "sinks": shown.sinks,
        "sink_columns": columns.tolist(),
        "of_sinks": packed(shown.of_sinks[:, columns]),
        "left": packed(np.where(rest > _NOTHING, rest, np.where(np.isnan(rest), np.nan, np.inf))),
        "taken": packed(np.where(has_queries, without.sink_weights, FORBIDDEN)),
        "learned": None if shown.learned is None else packed(np.where(has_queries, shown.learned, FORBIDDEN)),
        "masked": int((~shown.is_open).sum()),
        "missing": int(np.isnan(shown.weights).sum()),
    }


def _about_sinks(head: DrawableHead, sequence: int, cells: HeadMap) -> str:
    """The sinks of a map, and what they and a sink logit get of all its attention; empty without both."""
    parts = []
    if cells.sinks:
        names = first_names([token_name(head.record.keys, sequence, key) for key in cells.sinks], _MOST_SINKS)
        uniform = shown(_uniform_weight(head, sequence, cells), "percent")
        parts += [names, f"{shown(cells.sink_mass, 'percent')} of all attention, {uniform} if uniform"]
    if cells.learned_mass is not None:
        parts.append(f"the sink logit, which is no key, gets {shown(cells.learned_mass, 'percent')}")
    return " · ".join(parts)


_MOST_SINKS = 4


_NOTHING = 1e-6
"""Rows with a smaller remaining weight are not renormalised, because it consists of rounding errors."""


def _uniform_weight(head: DrawableHead, sequence: int, cells: HeadMap) -> float:
    """The weight of a map's sinks under uniform attention, from single cells or from the record's map."""
    if "pattern" in head.record.arrays:
        received = (cells.is_open / np.maximum(1, cells.is_open.sum(axis=1, keepdims=True))).sum(axis=0)
    else:
        of_all = head.record.arrays["uniform_received"][sequence]
        received = of_all[min(head.place, len(of_all) - 1), head.record.first_key(sequence) :]
    return float(received[list(cells.sinks)].sum()) / max(1.0, float(cells.n_queries.sum()))


def _strongest_keys(cells: HeadMap, k: int) -> Mapping[str, Any]:
    """The `k` strongest keys of every query with their weights, both `[query, k]` in descending order. `_NO_KEY` fills rows
    with fewer visible keys, and those with NaN."""
    weights = np.where(np.isnan(cells.weights).any(axis=1, keepdims=True), FORBIDDEN, cells.weights)
    keys = np.argsort(-weights, axis=1, kind="stable")[:, :k]
    shares = np.take_along_axis(weights, keys, axis=1)
    is_none = shares == FORBIDDEN
    named = np.where(is_none, _NO_KEY, keys).astype(np.uint32)
    return {"k": keys.shape[1], "keys": packed(named), "shares": packed(np.where(is_none, 0.0, shares))}


def _parts(head: DrawableHead, sequence: int, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The arrays behind the weights, for the sequence's own tokens, as far as the record has them."""
    record = head.record
    queries = slice(record.first_query(sequence), record.first_query(sequence) + len(record.sequences[sequence].tokens))
    keys = slice(record.first_key(sequence), record.first_key(sequence) + len(record.keys[sequence].tokens))
    for name in names:
        if name not in record.arrays or "pattern" not in record.arrays:
            continue
        array = record.arrays[name][sequence]
        if name == "v":
            numbers = array[head.place * len(array) // record.config.n_heads, keys]
        else:
            numbers = array[head.place, queries] if name == "z" else array[head.place, queries, keys]
        yield name, packed(numbers)


def packed(numbers: Array) -> str:
    """Numbers of 32 bits in row-major order, little-endian, deflated, in base64; fractions as floats."""
    ordered = np.ascontiguousarray(numbers, dtype="<u4" if numbers.dtype == np.uint32 else "<f4")
    return base64.b64encode(zlib.compress(ordered.tobytes(), 9)).decode("ascii")


# ------------------------------------------------------------------------------------------------------------ the JSON


def payload(view: PageView, maps: PageMaps, orders: Sequence[Mapping[str, Any]]) -> Html:
    """The content of the script element, in ASCII and safe against ending the element. `orders` are those of the table of
    heads by each of its columns."""
    texts: dict[tuple[str, ...], int] = {}
    layers = {id(head.record): head for head in view.heads}
    places = {key: place for place, key in enumerate(layers)}
    document = {
        "schema": SCHEMA,
        "layers": [_layer(head, view.sequences, texts) for head in layers.values()],
        "terms": _terms(view),
        "texts": list(texts),
        "numbers": view.sequences,
        "begin": view.begin,
        "heads": [_head(head, places[id(head.record)]) for head in view.heads],
        "scale": view.scale,
        "scales": [_scale(top, is_exceeded=maps.is_exceeded) for top in maps.tops],
        "decades": DECADES,
        "ramp": [ramp_colour(level) for level in range(256)],
        "ink_from": next(level for level in range(256) if not is_dark(ramp_colour(level))),
        "lost": UNKNOWN,
        "hide_sinks": view.hide_sinks,
        "bits": view.bits,
        "orders": orders,
        "maps": maps.maps,
    }
    return script_safe(json.dumps(document, separators=(",", ":"), allow_nan=False))


def _scale(top: float, *, is_exceeded: bool) -> Mapping[str, Any]:
    """The top of the scale, and the ends of both kinds of it in words."""
    most = shown(top, "number") + " or more" * is_exceeded
    return {"top": top, "linear": ["0", most], "log": [f"{shown(top / 10**DECADES, 'number')} or less", most]}


def script_safe(text: str) -> Html:
    """JSON in which nothing begins a tag or a comment, with the same value."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(text)


def _layer(head: DrawableHead, sequences: Sequence[int], texts: dict[tuple[str, ...], int]) -> Mapping[str, Any]:
    """The texts of a layer, how its scores are computed, and why arrays are absent."""

    def places(family: Sequence[TokenSequence]) -> list[int]:
        labels = [tuple(token_text(family[b], i) for i in range(len(family[b].tokens))) for b in sequences]
        return [texts.setdefault(text, len(texts)) for text in labels]

    config, layer = head.record.config, head.layer
    if layer is None:
        has_bias = config.positions == "alibi" or config.score_bias is not None
    else:
        has_bias = layer.bias or bool(layer.extras)
    return {
        "label": "" if layer is None else layer.label,
        "name": "" if layer is None else layer.label.replace("layer ", "").replace(" ", "-"),
        "verified": layer is None or layer.verified,
        "queries": places(head.record.sequences),
        "keys": places(head.record.keys),
        "absent": {name: _why_absent(head, name) for name in PARTS if name not in head.record.arrays},
        "scale": (layer or config).scale,
        "softcap": (layer or config).softcap,
        "bias": has_bias,
        "dropout": config.dropout if layer is None and config.train else 0,
    }


def _why_absent(head: DrawableHead, name: str) -> str:
    """Why the record lacks one of `PARTS`, and the option that keeps it."""
    if "pattern" not in head.record.arrays:
        return "the record holds sums; mha run keeps single cells of texts that fit"
    if head.layer is None:
        return f"{name} was not kept; --keep qk,scores,pattern,z,out,v keeps it"
    if name == "v":
        return "the record of a checkpoint does not hold it"
    return f"{name} was not kept; --keep qk,scores,pattern,z and --keep-limit make room"


_EXPLAINED = {
    "attention weight": "attention weight",
    "weight": "attention weight",
    "score": "attention scores",
    "dot product": "attention scores",
    "query": "query",
    "key": "key",
    "value": "value",
    "head output": "head output",
    "sinks": "sink",
    "sink logit": "sink logit",
    "softcap": "softcap",
}
"""The words that the script explains, and the terms of the glossary that they are."""


def _terms(view: PageView) -> Mapping[str, str]:
    """The explanations that the script shows as tooltips."""
    types = {head.statistics.kind for head in view.heads if head.statistics is not None}
    concepts = words_of("glossary", "concept")
    words = {word: concepts[term].explanation for word, term in _EXPLAINED.items()}
    return words | {words_of_type(kind).name: words_of_type(kind).explanation for kind in KIND_SIGNS if kind in types}


def _head(head: DrawableHead, layer: int) -> Mapping[str, Any]:
    """A head with its type and entropy, which `about` says in words."""
    label = head.label + kv_head_of(head.record, head.head)
    numbers = {"layer": layer, "head": head.head, "label": label}
    statistics = head.statistics
    if statistics is None:
        return numbers | {"kind": None, "entropy": None, "type": "", "sign": "", "about": ""}
    name, sign = words_of_type(statistics.kind).name, KIND_SIGNS[statistics.kind][0]
    entropy = "" if statistics.entropy is None else f" · entropy {statistics.entropy:#.3g} nats"
    kind = {"kind": statistics.kind, "entropy": statistics.entropy, "type": name, "sign": sign}
    return numbers | kind | {"about": f"{sign} {name}{entropy}"}
