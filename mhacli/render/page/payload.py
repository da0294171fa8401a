"""The numbers of a page, schema `mha.page/1`: tokens, heads and their maps.

A map has the cells of the record while all maps fit into the page, or to three digits while they
fit so, else blocks of them and the strongest keys of every query.
"""

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any, NamedTuple

import numpy as np

from mhacli.io.data import Array
from mhacli.numbers import shown
from mhacli.record.glossary import words_of
from mhacli.record.heads import words_of_type
from mhacli.record.record import LayerView
from mhacli.render.base.colours import KIND_SIGNS, UNKNOWN, WEIGHTS, is_dark
from mhacli.render.base.grids import DECADES, MASKED, ends
from mhacli.render.base.options import Scale
from mhacli.render.base.selection import DrawableHead
from mhacli.render.heads.head_map import NOTHING, HeadMap, head_map, kv_head_of
from mhacli.text.escape import token_label
from mhacli.text.tokens import TokenSequence

from .elements import Html

SCHEMA = "mha.page/1"
PARTS = ("scores", "qk", "z", "v")
"""The arrays that explain a weight and its effect, the most informative first."""
MOST_KEYS = 8
"""The strongest keys of a query that a page of blocks has, or fewer if maps would have less than
`_LEAST_BLOCKS`."""
_LEAST_BLOCKS = 16 * 16
_NUMBER = 4.6
"""The bytes in the page of a number."""
_ROUNDED = 2.2
"""The bytes of a number that is rounded to `_DIGITS` digits, also of the mean of a block."""
_KEY = 2.7
"""The bytes of a key with its weight."""
_OVERHEAD = 800
"""The bytes of what else a map has."""
_MASKED_CODE = 0
_NOT_A_NUMBER = 1
_ZERO = 2
_FIRST = 3
"""The first code of a weight with digits, after those without."""
_DIGITS = 3
_LEAST_EXPONENT = -40
_EXPLAINED = (
    "attention weight",
    "weight",
    "score",
    "query",
    "key",
    "value",
    "head output",
    "sinks",
    "sink logit",
    "softcap",
)
"""The words of the glossary that the script explains."""


def page_data(
    heads: Sequence[DrawableHead],
    sequences: Sequence[int],
    scale: Scale,
    room: float,
    *,
    hides_sinks: bool,
) -> dict[str, Any]:
    """What the script of a page reads: the heads, their texts, and their maps in about `room`
    bytes.
    """
    texts: dict[tuple[str, ...], int] = {}
    layers = [*dict.fromkeys(head.layer for head in heads)]
    concepts = words_of("glossary", "concept").items()
    concept_of = {word: concept for name, concept in concepts for word in (name, *concept.also)}
    terms = {word: concept_of[word].explanation for word in _EXPLAINED}
    types = [words_of_type(head.statistics.kind) for head in heads]
    return {
        "schema": SCHEMA,
        "layers": [_layer(layer, sequences, texts) for layer in layers],
        "terms": terms | {kind.name: kind.explanation for kind in types},
        "texts": list(texts),
        "numbers": sequences,
        "heads": [_head(head, layers.index(head.layer)) for head in heads],
        "scale": scale,
        "decades": DECADES,
        "ramp": WEIGHTS.colours,
        "ink_from": [*map(is_dark, WEIGHTS.colours)].index(False),
        "lost": UNKNOWN,
        "hide_sinks": hides_sinks,
        **_maps([_Drawing(head, sequence) for head in heads for sequence in sequences], room),
    }


def script_safe(data: Mapping[str, Any]) -> Html:
    """The content of a script element: JSON in which nothing begins a tag or a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(text)


# --------------------------------------------------------------------------------------------- maps


class _Drawing(NamedTuple):
    """A head of a sequence, which has a map in the page."""

    head: DrawableHead
    sequence: int

    def n_cells(self) -> int:
        """The number of cells that are not masked."""
        if not self.head.layer.has_pattern:
            return self.n_numbers("map")
        allowed = self.head.record.arrays["allowed"]
        return int(allowed[self.sequence, min(self.head.place, allowed.shape[1] - 1)].sum())

    def n_numbers(self, name: str) -> int:
        """The size of one of `PARTS`, or of the map; 0 if the record lacks it."""
        if name in ("scores", "qk"):
            return self.n_cells()
        array = self.head.record.arrays.get(name)
        return 0 if array is None else int(np.prod(array.shape[2:]))

    def n_queries(self) -> int:
        """The queries whose strongest keys are known."""
        has_pattern = self.head.layer.has_pattern
        return len(self.head.record.sequences[self.sequence].tokens) if has_pattern else 0


def _maps(drawings: Sequence[_Drawing], room: float) -> Mapping[str, Any]:
    """The maps and the ends of their scale, with and without sinks: every cell if there is room,
    and as many of `PARTS` as fit, or every cell to `_DIGITS` digits, else blocks of `factor` ×
    `factor` cells and the `n_keys` strongest keys of every query.
    """
    n = len(drawings)
    n_cells = sum(drawing.n_cells() for drawing in drawings)
    room = max(room - n * _OVERHEAD, n * _NUMBER)
    factor = 1
    n_keys = 0
    least = n * _LEAST_BLOCKS * _ROUNDED
    if n_cells * _ROUNDED > room:
        n_queries = sum(drawing.n_queries() for drawing in drawings)
        if n_queries:
            n_keys = min(MOST_KEYS, int(max(0, room - least) / (_KEY * n_queries)))
    strongest = [_strongest(*drawing, n_keys) for drawing in drawings]
    if n_cells * _ROUNDED > room:
        n_bytes = sum(len(text) for keys in strongest for text in keys.values())
        factor = ceil(sqrt(n_cells * _ROUNDED / max(room - n_bytes, least)))
    is_rounded = n_cells * _NUMBER > room
    parts = _fitting_parts(drawings, room - n_cells * _NUMBER)
    maps = []
    scale = _Scale()
    scale_of_rest = _Scale()
    for (head, sequence), keys in zip(drawings, strongest, strict=True):
        cells = head_map(head, sequence)
        blocks = cells.pooled(factor)
        rest = blocks.without_sinks()
        scale.add(blocks)
        scale_of_rest.add(rest)
        others = {
            "about": _about_sinks(cells),
            "parts": dict(_parts(head, sequence, parts)),
            "strongest": keys,
        }
        maps.append(_map(blocks, rest, is_rounded=is_rounded) | others)
    return {
        "factor": factor,
        "n_keys": n_keys,
        "precision": f"to {_DIGITS} digits" if is_rounded else "exact",
        "scales": [scale.document(), scale_of_rest.document()],
        "maps": maps,
    }


def _fitting_parts(drawings: Sequence[_Drawing], room: float) -> list[str]:
    """The first of `PARTS` that fit."""
    parts = []
    for name in PARTS:
        room -= _NUMBER * sum(drawing.n_numbers(name) for drawing in drawings)
        if room >= 0:
            parts.append(name)
    return parts


@dataclass
class _Scale:
    """The common scale of the maps that were added: its `top`, and the `largest` weight."""

    top: float = 0.0
    largest: float = 0.0

    def add(self, cells: HeadMap) -> None:
        """Extends the scale to the weights of a map."""
        self.top = max(self.top, cells.largest)
        self.largest = max(self.largest, float(np.nanmax(cells.weights, initial=0.0)))

    def document(self) -> Mapping[str, Any]:
        """The top, and what the ends of the scale stand for."""
        top = self.top or 1.0
        return {
            "top": top,
            "linear": ends("linear", top, "weight", largest=self.largest),
            "log": ends("log", top, "weight", largest=self.largest),
        }


def _map(cells: HeadMap, without: HeadMap, *, is_rounded: bool) -> dict[str, Any]:
    """A map with and without sinks. The cells of a rounded one have `_DIGITS` digits.

    `cells` `[row, column]` are `MASKED` where masked. Where sinks are hidden, cells of columns with
    a sink are `beside_sinks` `[row, sink column]`, a row is divided by `left`, and `taken` is what
    sinks had. `learned` is the weight of a sink logit.
    """
    beside = np.clip(cells.weights - cells.of_sinks, 0, None)
    rest = np.where(cells.is_open, beside, 0.0).sum(axis=1)
    columns = np.flatnonzero((cells.of_sinks != 0).any(axis=0))
    has_queries = cells.n_queries > 0
    numbers = {} if is_rounded else {"cells": cells.weights}
    numbers |= {
        "beside_sinks": beside[:, columns],
        "left": np.where(rest > NOTHING, rest, np.where(np.isnan(rest), np.nan, np.inf)),
        "taken": np.where(has_queries, without.sink_weights, MASKED),
    }
    if cells.learned is not None:
        numbers["learned"] = np.where(has_queries, cells.learned, MASKED)
    return {
        "rows": len(cells.weights),
        "columns": cells.weights.shape[1],
        "block": cells.block,
        "first": cells.first,
        "sinks": cells.sinks,
        "sink_columns": columns.tolist(),
        "numbers": {name: packed(array) for name, array in numbers.items()},
        "rounded": packed(_codes(cells.weights), "<u2") if is_rounded else "",
        "masked": int((~cells.is_open).sum()),
        "missing": int(np.isnan(cells.weights).sum()),
    }


def _strongest(head: DrawableHead, sequence: int, k: int) -> dict[str, str]:
    """The `k` strongest keys of every query, the largest first, counted from 1, with 0 where a
    query sees fewer and where weights are no numbers; and the codes of their weights: the first of
    a query, and of each other what it lacks of the one before.
    """
    if not head.layer.has_pattern or not k:
        return {}
    known = np.nan_to_num(head_map(head, sequence).weights, nan=MASKED)
    keys = np.argsort(-known, axis=1, kind="stable")[:, :k]
    weights = np.take_along_axis(known, keys, axis=1)
    codes = _codes(weights)
    codes[:, 1:] = codes[:, :-1] - codes[:, 1:]
    return {
        "keys": packed(np.where(weights == MASKED, 0, keys + 1), "<u2"),
        "shares": packed(codes, "<u2"),
    }


def _codes(weights: Array) -> Array:
    """Weights in `_DIGITS` digits as whole numbers, which grow with them: 900 for every power of
    ten.
    """
    has_digits = weights > 10.0**_LEAST_EXPONENT
    known = np.where(has_digits, weights, 1.0)
    exponents = np.floor(np.log10(known))
    digits = np.rint(known / 10.0 ** (exponents - _DIGITS + 1))
    least = 10 ** (_DIGITS - 1)
    codes = _FIRST + (exponents - _LEAST_EXPONENT) * 9 * least + digits - least
    is_none = [weights == MASKED, np.isnan(weights), ~has_digits]
    return np.select(is_none, [_MASKED_CODE, _NOT_A_NUMBER, _ZERO], codes).astype(np.int64)


def _about_sinks(cells: HeadMap) -> str:
    """What the sinks of a map and a sink logit get of all its attention; empty without both."""
    parts = []
    if cells.sinks:
        parts.append(f"{shown(cells.sink_mass, 'percent')} of all attention")
    if cells.learned_mass is not None:
        parts.append(
            f"the sink logit, which is no key, gets {shown(cells.learned_mass, 'percent')}"
        )
    return " · ".join(parts)


def _parts(head: DrawableHead, sequence: int, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The arrays behind the weights, for the sequence's own tokens, as far as the record has
    them.
    """
    record = head.record
    if not head.layer.has_pattern:
        return
    queries, keys = record.inside(sequence)
    for name in names:
        if name in record.arrays:
            array = record.arrays[name][sequence]
            if name == "v":
                numbers = array[head.place * len(array) // record.config.n_heads, keys]
            elif name == "z":
                numbers = array[head.place, queries]
            else:
                numbers = array[head.place, queries, keys]
            yield name, packed(numbers)


def packed(numbers: Array, dtype: str = "<f4") -> str:
    """Numbers in row-major order, little-endian, the first bytes of all before the second bytes;
    deflated, in base 85 with digits that a script need not escape.
    """
    ordered = np.ascontiguousarray(numbers, dtype=dtype)
    content = zlib.compress(ordered.reshape(-1, 1).view(np.uint8).T.tobytes(), 9)
    return base64.b85encode(content).translate(bytes.maketrans(b"<>&", b",./")).decode("ascii")


# --------------------------------------------------------------------------------- layers and heads


def _layer(
    view: LayerView, sequences: Sequence[int], texts: dict[tuple[str, ...], int]
) -> Mapping[str, Any]:
    """The texts of a layer, how its scores are computed, and why arrays are absent."""

    def places(family: Sequence[TokenSequence]) -> list[int]:
        labels = [tuple(map(token_label, family[b].tokens)) for b in sequences]
        return [texts.setdefault(text, len(texts)) for text in labels]

    record = view.record
    layer = view.inspected
    words = view.label.replace(",", "").split()
    return {
        "label": view.label,
        "name": "-".join(word for word in words if word != "layer"),
        "verified": layer.verified,
        "queries": places(record.sequences),
        "keys": places(record.keys),
        "absent": {name: _why_absent(view, name) for name in PARTS if name not in record.arrays},
        "scale": layer.scale,
        "softcap": layer.softcap,
        "bias": layer.bias or bool(layer.extras),
        "dropout": record.config.dropout if record.config.train else 0,
    }


def _why_absent(view: LayerView, name: str) -> str:
    """Why the record lacks one of `PARTS`, and the option that keeps it."""
    if not view.has_pattern:
        return "the record holds sums; mha run keeps single cells of texts that fit"
    if view.label and name == "v":
        return "the record of a checkpoint does not hold it"
    return f"{name} was not kept; --keep {','.join(('pattern', *PARTS))} and --keep-limit make room"


def _head(head: DrawableHead, layer: int) -> Mapping[str, Any]:
    """A head with its type and entropy, which `about` says in words."""
    statistics = head.statistics
    label = head.label + kv_head_of(head)
    name = words_of_type(statistics.kind).name
    sign = KIND_SIGNS[statistics.kind].sign
    if statistics.certainty is None:
        sign, name = "", "no statistics"
    about = f"{sign} {name}".strip()
    if statistics.entropy is not None:
        about += f" · entropy {shown(statistics.entropy, 'nats')} nats"
    return {
        "layer": layer,
        "head": statistics.head,
        "label": label,
        "kind": statistics.kind,
        "entropy": statistics.entropy,
        "type": name,
        "sign": sign,
        "about": about,
    }
