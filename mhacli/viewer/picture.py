"""A head's picture: its map on a scale, with or without sinks, at any zoom; and a row of it as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from rich.segment import Segment

from mhacli.errors import first_names
from mhacli.io.data import finite
from mhacli.record.arrays import Array
from mhacli.render.base.cells import FORBIDDEN, cell, half_cells, levels, range_text
from mhacli.render.base.format import percent_text, token_text, weight_text
from mhacli.render.base.options import Scale
from mhacli.render.heads.drawable import DrawableHead
from mhacli.render.heads.head_map import HeadMap, head_map
from mhacli.text.escape import without_surrogates
from mhacli.text.tokens import TokenSequence
from mhacli.viewer.head_table import TableHead
from mhacli.viewer.lines import BROKEN, segment

ROW_SCHEMA = "mha.row/1"
TAKEN_SIGN = "–"
"""The sign of a removed sink's weight. `.00` would be a small weight."""
_MOST_NUMBER = 8
"""The most columns of a numbered cell in a thumbnail."""
_MOST_SINKS = 6
"""The most sinks that a caption names."""


@dataclass(frozen=True, eq=False)
class Shades:
    """A map with its cells as levels of 0 … 255 on a scale, the scale's top, and whether cells exceed it.

    Negative levels are the codes of `levels`. Removed cells look masked.
    """

    map: HeadMap
    cells: Array
    largest: float
    is_exceeded: bool


@dataclass(frozen=True, eq=False)
class Picture:
    """A head of a sequence. `base` is its finest map. Scale and hidden sinks apply at every zoom."""

    head: TableHead
    drawable: DrawableHead
    sequence: int
    scale: Scale
    hides_sinks: bool

    @cached_property
    def whole(self) -> HeadMap:
        """The finest map in the record, with sinks."""
        return head_map(self.drawable, self.sequence)

    @cached_property
    def base(self) -> HeadMap:
        """The finest map, without hidden sinks."""
        return self.whole.without_sinks() if self.hides_sinks else self.whole

    @cached_property
    def is_taken(self) -> Array:
        """The removed cells of the finest map: hidden sinks. Blocks are never removed whole."""
        is_taken = np.zeros(self.base.weights.shape, dtype=bool)
        if self.hides_sinks and self.base.block == 1:
            columns = [place - self.base.first[1] for place in self.base.sinks]
            is_taken[:, columns] = self.base.weights[:, columns] == 0
        return is_taken

    @cached_property
    def _shown(self) -> Array:
        return np.where(self.is_taken, FORBIDDEN, self.base.weights) if self.hides_sinks else self.base.weights

    @cached_property
    def _shades(self) -> dict[int, Shades]:
        return {}

    def at(self, factor: int) -> Shades:
        """The shaded map in blocks of `factor` × `factor` cells."""
        if factor not in self._shades:
            pooled = self.base.pooled(factor)
            weights = self._shown if factor == 1 else pooled.weights
            strongest = float(weights.max(initial=0.0, where=np.isfinite(weights)))
            top = pooled.largest or strongest
            cells = levels(weights, self.scale, top or None).astype(np.int16)
            self._shades[factor] = Shades(pooled, cells, top, strongest > top)
        return self._shades[factor]

    @property
    def n_rows(self) -> int:
        """The rows of the finest map."""
        return int(self.base.weights.shape[0])

    @property
    def n_columns(self) -> int:
        """The columns of the finest map."""
        return int(self.base.weights.shape[1])

    def row_of(self, place: int) -> int:
        """The row of a query's position."""
        return min(self.n_rows - 1, max(0, (place - self.base.first[0]) // self.base.block))

    def column_of(self, place: int) -> int:
        """The column of a key's position."""
        return min(self.n_columns - 1, max(0, (place - self.base.first[1]) // self.base.block))

    def query_name(self, row: int) -> str:
        """A query in a sentence: `2 sat`, or `32–63`."""
        return _name(self.base, self.base.queries, self.base.query_places(row))

    def key_name(self, column: int) -> str:
        """A key in a sentence."""
        return _name(self.base, self.base.keys, self.base.key_places(column))

    def top_keys(self, row: int) -> tuple[tuple[int, float], ...]:
        """The visible columns of a row that were not removed, with their weights, in descending order with NaN last."""
        weights = self._shown[row]
        seen = np.flatnonzero(weights != FORBIDDEN)
        order = np.argsort(-np.nan_to_num(weights[seen], nan=-1.0), kind="stable")
        return tuple((int(seen[i]), float(weights[seen[i]])) for i in order)

    def entropy(self, row: int) -> float | None:
        """The entropy of a row in nats, with sinks, averaged over a block's queries; None without visible keys."""
        view, (first, last) = self.drawable.record, self.base.query_places(row)
        begin = view.first_query(self.sequence)
        nats = view.arrays["entropy"][self.sequence, self.drawable.place, begin + first : begin + last + 1]
        if not self.base.n_queries[row]:
            return None
        return float(nats.mean()) if self.base.block == 1 else float(np.nanmean(nats))

    def row_levels(self, row: int) -> tuple[list[int], float]:
        """A query's weights as levels relative to the largest, and the largest."""
        return _levels_to_largest(self._shown[row], self.scale)

    def column_levels(self, column: int) -> tuple[list[int], float]:
        """A key's weights as levels relative to the largest, and the largest."""
        return _levels_to_largest(self._shown[:, column], self.scale)

    def row_sum(self, row: int) -> float:
        """The sum of a row as drawn."""
        weights = self.base.weights[row]
        return float(weights[weights != FORBIDDEN].sum())

    def row_document(self, row: int) -> Mapping[str, Any]:
        """The row as JSON values, schema `mha.row/1`: exact numbers without removed keys; null if not finite."""
        keys = [
            {
                **_json_place(self.base, self.base.keys, self.base.key_places(column)),
                "share": finite(self._exact(weight)),
            }
            for column, weight in sorted(self.top_keys(row))
        ]
        statistics = self.head.statistics
        return {
            "schema": ROW_SCHEMA,
            "layer": None if self.drawable.layer is None else self.drawable.layer.layer,
            "attention": None if self.drawable.layer is None else self.drawable.layer.name,
            "head": self.drawable.head,
            "kind": None if statistics is None else statistics.kind,
            "sequence": self.sequence,
            "query": _json_place(self.base, self.base.queries, self.base.query_places(row)),
            "entropy": finite(self.entropy(row)),
            "sinks": {
                "places": list(self.base.sinks),
                "share": finite(float(self.base.sink_weights[row])),
                "removed": self.hides_sinks,
            },
            "learned_sink": None if self.base.learned is None else finite(float(self.base.learned[row])),
            "shares": "renormalised without sinks" if self.hides_sinks else "as computed",
            "keys": keys,
        }

    def _exact(self, weight: float) -> float:
        """An attention weight with as few digits as its dtype needs."""
        if self.hides_sinks or "pattern" not in self.drawable.record.arrays:
            return weight
        return float(str(self.drawable.record.arrays["pattern"].dtype.type(weight)))


def _levels_to_largest(weights: Array, scale: Scale) -> tuple[list[int], float]:
    is_known = (weights != FORBIDDEN) & np.isfinite(weights)
    return levels(weights, scale).astype(int).tolist(), float(weights.max(initial=0.0, where=is_known))


def _name(base: HeadMap, text: TokenSequence, places: tuple[int, int]) -> str:
    first, last = places
    return f"{first}–{last}" if base.block > 1 else f"{first} {token_text(text, first)}"


def _json_place(base: HeadMap, text: TokenSequence, places: tuple[int, int]) -> dict[str, Any]:
    first, last = places
    if base.block > 1:
        return {"first": first, "last": last}
    return {"place": first, "token": without_surrogates(text.tokens[first])}


# ---------------------------------------------------------------------------------------------------------- captions


def scale_range(shades: Shades, scale: Scale) -> str:
    """The range of a scale."""
    return range_text(scale, shades.largest, is_exceeded=shades.is_exceeded)


def sink_words(picture: Picture) -> str:
    """The sink keys, their weight, and whether they are hidden."""
    base, places = picture.base, list(map(str, picture.base.sinks))
    listed = first_names(places, _MOST_SINKS)
    if not places and base.learned_mass is None:
        return "no sink in blocks" if base.block > 1 else "no sink"
    parts = [f"key{'s' * (len(places) != 1)} {listed}, {percent_text(base.sink_mass)}"] if places else []
    parts += [] if base.learned_mass is None else [f"the sink logit, {percent_text(base.learned_mass)}"]
    what = f"sink{'s' * (len(places) > 1)}: {' and '.join(parts)}"
    return f"{what}, taken out, rows renormalised" if picture.hides_sinks else f"{what} of a row on average"


# ---------------------------------------------------------------------------------------------------------- thumbnails


def thumbnail(picture: Picture, width: int, height: int, *, colour: bool) -> list[list[Segment]]:
    """The lines of a thumbnail of this size, with numbers if every cell has room."""
    columns = min(_MOST_NUMBER, width // picture.n_columns)
    if columns >= TIGHT and picture.n_rows <= height and picture.base.block == 1:
        return _numbered(picture, columns, (width, height), colour=colour)
    rows = height * (2 if colour else 1)
    shape = picture.n_rows, picture.n_columns
    factor = max(1, -(-shape[0] // rows), -(-shape[1] // width))
    cells = picture.at(factor).cells
    times = max(1, min(width // cells.shape[1], rows * (1 if colour else 2) // cells.shape[0]))
    down = times if colour else max(1, times // 2)
    grown = np.repeat(np.repeat(cells, times, axis=1), down, axis=0)[:rows]
    blank = np.full((rows - len(grown), grown.shape[1]), FORBIDDEN, dtype=grown.dtype)
    lines = np.vstack([grown, blank]).tolist()
    rest = segment(" " * (width - grown.shape[1]))
    if not colour:
        return [[*(segment(*cell(level, colour=False)) for level in line), rest] for line in lines]
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return [[*(segment(*painted) for painted in half_cells(*pair, broken=BROKEN)), rest] for pair in pairs]


def _numbered(picture: Picture, columns: int, size: tuple[int, int], *, colour: bool) -> list[list[Segment]]:
    """The lines of a thumbnail with each cell `columns` wide and its weight in the middle."""
    shades, (width, height) = picture.at(1), size
    n_lines = min(columns // 2, height // picture.n_rows)
    rest = segment(" " * (width - columns * picture.n_columns))
    lines: list[list[Segment]] = []
    for row, weights in zip(shades.cells.tolist(), shades.map.weights.tolist(), strict=True):
        pairs = zip(row, weights, strict=True)
        numbers = [weight_text(weight, 2).center(columns) if level >= 0 else "" for level, weight in pairs]
        for line in range(n_lines):
            words = numbers if line == (n_lines - 1) // 2 else [""] * len(row)
            cells = (cell(level, columns, colour=colour, word=word) for level, word in zip(row, words, strict=True))
            lines.append([*(segment(*painted) for painted in cells), rest])
    return lines + [[segment(" " * width)] for _ in range(height - len(lines))]


# ---------------------------------------------------------------------------------------------------------------- zoom


SHADED, SQUARE, TIGHT, NUMBERS, DECIMALS = 1, 2, 4, 6, 8
"""The columns of a cell: shade alone, square, tight with two decimals, with two, with four."""


@dataclass(frozen=True)
class Zoom:
    """Blocks of `factor` × `factor` cells, `width` columns each. `halves`: two rows share a line."""

    factor: int = 1
    width: int = SHADED
    halves: bool = False

    @property
    def decimals(self) -> int:
        """The decimals of weights in cells; 0 for shades alone."""
        return {TIGHT: 2, NUMBERS: 2, DECIMALS: 4}.get(self.width, 0)

    def lines(self, n_rows: int) -> int:
        """The screen lines of rows of the map."""
        blocks = -(-n_rows // self.factor)
        return -(-blocks // 2) if self.halves else blocks

    def columns(self, n_columns: int) -> int:
        """The screen columns of columns of the map."""
        return -(-n_columns // self.factor) * self.width

    def fits(self, shape: tuple[int, int], room: tuple[int, int]) -> bool:
        """Whether a map of this shape fits into lines and columns."""
        return self.lines(shape[0]) <= room[0] and self.columns(shape[1]) <= room[1]


def zoom_levels(shape: tuple[int, int], room: tuple[int, int], *, colour: bool) -> tuple[Zoom, ...]:
    """Every zoom of a map from the smallest picture on: fitting blocks, blocks half as large, then cells of growing
    width.

    With colour, cells of one column are half blocks. Without, blocks are two columns wide if they fit.
    """
    smallest = max(1, -(-shape[0] // max(1, room[0] * (2 if colour else 1))), -(-shape[1] // max(1, room[1])))
    factors, factor = [smallest], 1 << (smallest.bit_length() - 1)
    while factor >= 1:
        factors += [factor] if factor < smallest else []
        factor //= 2
    blocks = [Zoom(factor, SHADED, colour) for factor in factors]
    if not colour:
        wide = [replace(zoom, width=SQUARE) for zoom in blocks]
        blocks = [
            wide_block if wide_block.columns(shape[1]) <= room[1] else narrow
            for narrow, wide_block in zip(blocks, wide, strict=True)
        ]
    return (
        *(zoom for zoom in blocks if zoom != Zoom(1, SQUARE)),
        *(Zoom(1, width) for width in (SQUARE, TIGHT, NUMBERS, DECIMALS)),
    )


def fitting(shape: tuple[int, int], room: tuple[int, int], *, colour: bool) -> Zoom:
    """The largest zoom at which the whole map fits."""
    steps = zoom_levels(shape, room, colour=colour)
    return next((zoom for zoom in reversed(steps) if zoom.fits(shape, room)), steps[0])


def nearest(zoom: Zoom, steps: tuple[Zoom, ...]) -> int:
    """The index of a zoom among the steps, or of the most similar one."""
    return min(range(len(steps)), key=lambda i: (abs(steps[i].factor - zoom.factor), abs(steps[i].width - zoom.width)))
