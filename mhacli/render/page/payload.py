"""The data for a page's script: tokens, heads, the finest maps that fit, and exact weights as far as there is room."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mhacli.record.arrays import Array
from mhacli.record.glossary import words_of
from mhacli.record.heads import words_of_type
from mhacli.render.base.cells import DECADES
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.format import token_text
from mhacli.render.base.options import Rows, Scale
from mhacli.render.base.selection import first_produced, rows_in
from mhacli.render.heads.drawable import DrawableHead
from mhacli.render.heads.head_map import HeadMap, head_map, kv_head_of
from mhacli.render.page.elements import Html
from mhacli.render.page.maps import (
    EXACT,
    MOST_KEYS,
    PARTS,
    CellEncoding,
    EncodedMap,
    MapFacts,
    bits,
    encoded,
    requested_keys,
    sink_weights,
    top_keys,
    with_keys,
    with_part,
    with_rows,
)
from mhacli.text.tokens import TokenSequence

# --------------------------------------------------------------------------------------- the JSON, schema `mha.page/1`


SCHEMA = "mha.page/1"


@dataclass(frozen=True)
class PageView:
    """The contents of a page: heads of sequences, the scale, and whether sinks are hidden.

    `quantised` describes the effect of coarse codes, None if weights are exact. `begin` is the index of the first head
    shown.
    """

    heads: tuple[DrawableHead, ...]
    sequences: tuple[int, ...]
    scale: Scale
    hide_sinks: bool
    quantised: str | None = None
    begin: int = 0

    @property
    def bits(self) -> int:
        """The bits of an attention weight in the record. The page rounds those of more than 32."""
        weights = (head.record.arrays.get("pattern", head.record.arrays.get("map")) for head in self.heads)
        return max((8 * array.itemsize for array in weights if array is not None), default=32)


def payload(view: PageView, maps: PageMaps) -> Html:
    """The content of the script element, in ASCII and safe against ending the element."""
    texts: dict[tuple[str, ...], int] = {}
    layers = {id(head.record): head for head in view.heads}
    places = {key: place for place, key in enumerate(layers)}
    tops = {"largest": maps.top(hide_sinks=False), "largest_without_sinks": maps.top(hide_sinks=True)}
    document = {
        "schema": SCHEMA,
        "layers": [_layer(head, view.sequences, texts) for head in layers.values()],
        "terms": _terms(view),
        "texts": list(texts),
        "sequences": len(view.sequences),
        "numbers": view.sequences,
        "begin": view.begin,
        "heads": [_head(head, places[id(head.record)]) for head in view.heads],
        "masks": [asdict(mask) for mask in maps.masks],
        "scale": {"kind": view.scale, "decades": DECADES, **tops},
        "hide_sinks": view.hide_sinks,
        "bits": view.bits,
        "quantised": _quantised(view, maps),
    }
    head = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return script_safe(f'{head[:-1]},"maps":[{",".join(encoded.json for encoded in maps.maps)}]}}')


def script_safe(text: str) -> Html:
    """JSON in which nothing begins a tag or a comment, with the same value."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(text)


def _layer(head: DrawableHead, sequences: Sequence[int], texts: dict[tuple[str, ...], int]) -> Mapping[str, Any]:
    def places(family: Sequence[TokenSequence]) -> list[int]:
        return [texts.setdefault(_labels(family[b]), len(texts)) for b in sequences]

    return {
        "label": "" if head.layer is None else head.layer.label,
        "verified": head.layer is None or head.layer.verified,
        "queries": places(head.record.sequences),
        "keys": places(head.record.keys),
        "absent": {name: _why_absent(head, name) for name in PARTS if name not in head.record.arrays},
        **_scoring(head),
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


def _scoring(head: DrawableHead) -> Mapping[str, Any]:
    """The computation of scores from dot products, whether they have additive terms, and whether dropout follows."""
    config, layer = head.record.config, head.layer
    if layer is not None:
        return {"scale": layer.scale, "softcap": layer.softcap, "bias": layer.bias or bool(layer.extras), "dropout": 0}
    bias = config.positions == "alibi" or config.score_bias is not None
    return {
        "scale": config.scale,
        "softcap": config.softcap,
        "bias": bias,
        "dropout": config.dropout if config.train else 0,
    }


def _terms(view: PageView) -> Mapping[str, str]:
    """The explanations that the script shows as tooltips."""
    types = {head.statistics.kind for head in view.heads if head.statistics is not None}
    words = {word: words_of("glossary", "concept")[word].explanation for word in _EXPLAINED}
    words["entropy"] = words_of("columns", "statistic")["entropy"].explanation
    return words | {words_of_type(kind).name: words_of_type(kind).explanation for kind in KIND_SIGNS if kind in types}


_EXPLAINED = (
    "attention weight",
    "attention scores",
    "query",
    "key",
    "value",
    "head output",
    "sink",
    "sink logit",
    "softcap",
)


def _labels(sequence: TokenSequence) -> tuple[str, ...]:
    return tuple(token_text(sequence, place) for place in range(len(sequence.tokens)))


def _head(head: DrawableHead, layer: int) -> Mapping[str, Any]:
    statistics = head.statistics
    return {
        "layer": layer,
        "head": head.head,
        "label": head.label,
        "kv": kv_head_of(head.record, head.head),
        "kind": None if statistics is None else statistics.kind,
        "type": None if statistics is None else words_of_type(statistics.kind).name,
        "sign": "" if statistics is None else KIND_SIGNS[statistics.kind][0],
        "certainty": None if statistics is None else statistics.certainty,
        "entropy": None if statistics is None else statistics.entropy,
    }


def _quantised(view: PageView, maps: PageMaps) -> Mapping[str, Any] | None:
    if view.quantised is None:
        return None
    return {"code": maps.encoding.code, "error": maps.error, "block": maps.encoding.factor, "text": view.quantised}


# -------------------------------------------------------------------------------------------------------- fitting maps


LIMIT_BYTES = 1 << 20
"""The largest size of a page if possible: small enough for a mail, a ticket, a chat."""
MOST_ROWS = 32
_SMALLEST = 16
"""The least number of cells per side of a map."""


@dataclass(frozen=True)
class MapRequest:
    """A head of a sequence, with the queries (`rows`) whose rows are exact, the first of `n_wanted` requested ones."""

    head: DrawableHead
    sequence: int
    rows: tuple[int, ...]
    n_wanted: int

    @property
    def longest(self) -> int:
        """The longer side of the map."""
        map_of = self.head.record.arrays.get("map")
        if "pattern" not in self.head.record.arrays and map_of is not None:
            return int(max(map_of.shape[2:]))
        return max(len(texts[self.sequence].tokens) for texts in (self.head.record.sequences, self.head.record.keys))


@dataclass(frozen=True)
class PackedMask:
    """A mask as the page stores it. Equal masks are stored once."""

    rows: int
    columns: int
    bits: str


@dataclass(frozen=True)
class PageMaps:
    """The maps of a page in order, with facts about each.

    `n_keys` top keys of each query and `n_rows` requested rows are exact; `n_wanted` is the largest number of requested
    rows. `is_small`: everything is within the limit.
    """

    maps: tuple[EncodedMap, ...]
    masks: tuple[PackedMask, ...]
    facts: tuple[MapFacts, ...]
    encoding: CellEncoding = EXACT
    n_keys: int = 0
    n_rows: int = 0
    n_wanted: int = 0
    is_small: bool = True

    @property
    def n_bytes(self) -> int:
        """The size of maps and masks as JSON."""
        return sum(len(encoded_map.json) + 1 for encoded_map in self.maps) + sum(
            len(mask.bits) + 40 for mask in self.masks
        )

    def top(self, *, hide_sinks: bool) -> float:
        """The top of the common scale, with or without sinks; 1 without maps."""
        name = "largest_without_sinks" if hide_sinks else "largest"
        return max((getattr(facts, name) for facts in self.facts), default=0.0) or 1.0

    @property
    def error(self) -> float:
        """The largest error of an attention weight in the page."""
        return max((facts.error for facts in self.facts), default=0.0)


@dataclass(frozen=True)
class _ExactWeights:
    """The exact weights of a map that a page may add."""

    keys: Array
    weights: Array
    rows: Array


def map_request(head: DrawableHead, sequence: int, rows: Rows | None) -> MapRequest:
    """A head to draw with the queries whose rows are exact: the requested ones up to the limit, else the last one."""
    generated = None if head.record.model is None else head.record.model.generated
    produced = None if head.layer is None else first_produced(head.layer.kind, generated, sequence)
    requested = rows_in("last" if rows is None else rows, head.record.sequences[sequence], produced)
    return MapRequest(head, sequence, requested[:MOST_ROWS], len(requested))


def exact_maps(requests: Sequence[MapRequest]) -> PageMaps:
    """Every cell of every map, whatever the size."""
    maps, _ = _encoded(requests, EXACT, None)
    for name in PARTS:
        maps = _with_part(maps, requests, name)
    return maps


def fitting_maps(requests: Sequence[MapRequest], room: int, *, rows_first: bool) -> PageMaps:
    """The finest maps within `room` bytes, with exact numbers as far as there is room; the coarsest maps if none fit.

    Exact numbers are the top keys of every query, then some rows; with `rows_first` rows come first.
    """
    *candidates, coarsest = _encodings(max((request.longest for request in requests), default=1))
    for encoding in candidates:
        maps, exact = _encoded(requests, encoding, room)
        if maps.is_small:
            return _with_exact(maps, exact, requests, room, rows_first=rows_first)
    maps, exact = _encoded(requests, coarsest, None)
    maps = replace(maps, is_small=maps.n_bytes <= room)
    return _with_exact(maps, exact, requests, room, rows_first=rows_first)


def _encodings(longest: int) -> Iterator[CellEncoding]:
    """The encodings from the finest to the coarsest."""
    yield EXACT
    yield CellEncoding("u8", 1)
    factor = 2
    while longest / factor >= _SMALLEST:
        yield CellEncoding("u8", factor)
        factor *= 2


def _encoded(
    requests: Sequence[MapRequest], encoding: CellEncoding, room: int | None
) -> tuple[PageMaps, list[_ExactWeights | None]]:
    """All maps in one encoding, or some of them and not `is_small` if they exceed `room`."""
    masks: dict[PackedMask, int] = {}
    done: list[tuple[EncodedMap, MapFacts]] = []
    exact: list[_ExactWeights | None] = []
    n_bytes = 0
    for request in requests:
        cells = head_map(request.head, request.sequence)
        pooled = cells.pooled(encoding.factor)
        mask = PackedMask(len(pooled.weights), pooled.weights.shape[1], bits(pooled.is_open))
        sinks = sink_weights(request.head, request.sequence, cells)
        encoded_map, facts = encoded(pooled, masks.setdefault(mask, len(masks)), encoding, sinks)
        encoded_map = replace(encoded_map, asked=requested_keys(request.head, request.sequence))
        done.append((encoded_map, facts))
        n_bytes += len(encoded_map.json)
        if room is not None and n_bytes > room:
            break
        exact.append(None if encoded_map.exact else _exact(request, cells))
    maps = PageMaps(
        tuple(encoded_map for encoded_map, _ in done), tuple(masks), tuple(facts for _, facts in done), encoding
    )
    return replace(maps, is_small=room is None or maps.n_bytes <= room), exact


def _exact(request: MapRequest, cells: HeadMap) -> _ExactWeights | None:
    """The exact weights to add to a coarse map; None if the record has no single cells."""
    if "pattern" not in request.head.record.arrays:
        return None
    return _ExactWeights(*top_keys(cells, MOST_KEYS), cells.weights[list(request.rows)].astype(np.float32))


def _with_exact(
    maps: PageMaps,
    exact: Sequence[_ExactWeights | None],
    requests: Sequence[MapRequest],
    room: int,
    *,
    rows_first: bool,
) -> PageMaps:
    """The maps with as many top keys and rows as there is room for, tried from the most on in halves."""
    if maps.encoding == EXACT:
        for name in PARTS:
            added = _with_part(maps, requests, name)
            maps = added if added.n_bytes <= room else maps
    exact_requests = [of for of, weights in zip(requests, exact, strict=True) if weights is not None]
    if not exact_requests:
        return maps
    best = replace(maps, n_wanted=max(of.n_wanted for of in exact_requests))
    for add in (_with_rows, _with_keys) if rows_first else (_with_keys, _with_rows):
        n = MOST_KEYS if add is _with_keys else min(best.n_wanted, MOST_ROWS)
        while n:
            added = add(best, exact, requests, n)
            if added.n_bytes <= room:
                best = added
                break
            n //= 2
    return best


def _with_part(maps: PageMaps, requests: Sequence[MapRequest], name: str) -> PageMaps:
    """The maps with one of `PARTS`."""
    pairs = zip(maps.maps, requests, strict=True)
    added = (
        encoded_map if "pattern" not in of.head.record.arrays else with_part(encoded_map, of.head, of.sequence, name)
        for encoded_map, of in pairs
    )
    return replace(maps, maps=tuple(added))


def _with_keys(
    maps: PageMaps, exact: Sequence[_ExactWeights | None], requests: Sequence[MapRequest], n: int
) -> PageMaps:
    pairs = zip(maps.maps, exact, strict=True)
    added = (
        encoded_map if weights is None else with_keys(encoded_map, weights.keys, weights.weights, n)
        for encoded_map, weights in pairs
    )
    return replace(maps, maps=tuple(added), n_keys=n)


def _with_rows(
    maps: PageMaps, exact: Sequence[_ExactWeights | None], requests: Sequence[MapRequest], n: int
) -> PageMaps:
    triples = zip(maps.maps, exact, requests, strict=True)
    added = (
        encoded_map if weights is None else with_rows(encoded_map, weights.rows[:n], of.rows[:n])
        for encoded_map, weights, of in triples
    )
    return replace(maps, maps=tuple(added), n_rows=n)
