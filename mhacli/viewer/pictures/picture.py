"""A head as the viewer draws it: its map on a scale, with or without sinks, at any zoom; and what a row of it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mhacli.render.base.cells import FORBIDDEN, levels
from mhacli.render.base.format import token_text
from mhacli.render.base.options import Scale
from mhacli.render.heads.drawable import DrawableHead
from mhacli.render.heads.maps import HeadMap, head_map
from mhacli.results.record.arrays import Array
from mhacli.spec.tokens import TokenSequence
from mhacli.text.escape import without_surrogates
from mhacli.viewer.pictures.gallery import Entry

ROW_SCHEMA = "mha.row/1"
TAKEN_SIGN = "–"
"""In place of the share of a sink that was taken out: it is no small share, but none."""


@dataclass(frozen=True, eq=False)
class Shades:
    """A map, its cells as levels of 0 … 255 on a scale (negative as `levels` says; what was taken out as what is not allowed),
    the top of the scale, and whether there are cells with more than it."""

    map: HeadMap
    cells: Array
    largest: float
    is_exceeded: bool


@dataclass(frozen=True, eq=False)
class Picture:
    """A head of a sequence. `base` is the map at its finest; `scale` and whether sinks are taken out hold at every zoom."""

    entry: Entry
    drawn: DrawableHead
    sequence: int
    scale: Scale
    hides_sinks: bool

    @cached_property
    def whole(self) -> HeadMap:
        """The finest map that the record holds, sinks and all."""
        return head_map(self.drawn, self.sequence)

    @cached_property
    def base(self) -> HeadMap:
        """The finest map, without sinks where those are hidden."""
        return self.whole.without_sinks() if self.hides_sinks else self.whole

    @cached_property
    def is_taken(self) -> Array:
        """The cells of the finest map that were taken out: those of sinks. A block is never taken out as a whole."""
        is_taken = np.zeros(self.base.shares.shape, dtype=bool)
        if self.hides_sinks and self.base.block == 1:
            columns = [place - self.base.first[1] for place in self.base.sinks]
            is_taken[:, columns] = self.base.shares[:, columns] == 0
        return is_taken

    @cached_property
    def _shown(self) -> Array:
        """The finest map, what was taken out like what is not allowed."""
        return np.where(self.is_taken, FORBIDDEN, self.base.shares) if self.hides_sinks else self.base.shares

    @cached_property
    def _made(self) -> dict[int, Shades]:
        return {}

    def at(self, factor: int) -> Shades:
        """The map in blocks of `factor` × `factor` cells, shaded."""
        if factor not in self._made:
            pooled = self.base.pooled(factor)
            shares = self._shown if factor == 1 else pooled.shares
            strongest = float(shares.max(initial=0.0, where=np.isfinite(shares)))
            top = pooled.largest or strongest
            cells = levels(shares, self.scale, top or None).astype(np.int16)
            self._made[factor] = Shades(pooled, cells, top, strongest > top)
        return self._made[factor]

    @property
    def n_rows(self) -> int:
        """How many rows the finest map has."""
        return int(self.base.shares.shape[0])

    @property
    def n_columns(self) -> int:
        """How many columns it has."""
        return int(self.base.shares.shape[1])

    def query_places(self, row: int) -> tuple[int, int]:
        """The first and the last place of the text that a row stands for."""
        return self.base.query_places(row)

    def key_places(self, column: int) -> tuple[int, int]:
        """The first and the last place that a column stands for."""
        return self.base.key_places(column)

    def row_of(self, place: int) -> int:
        """The row of a query's place."""
        return min(self.n_rows - 1, max(0, (place - self.base.first[0]) // self.base.block))

    def column_of(self, place: int) -> int:
        """The column of a key's place."""
        return min(self.n_columns - 1, max(0, (place - self.base.first[1]) // self.base.block))

    def query_name(self, row: int) -> str:
        """A query as sentences name it: `2 sat`, or `32–63`."""
        return _name(self.base, self.base.queries, self.query_places(row))

    def key_name(self, column: int) -> str:
        """A key as sentences name it."""
        return _name(self.base, self.base.keys, self.key_places(column))

    def strongest(self, row: int) -> tuple[tuple[int, float], ...]:
        """The columns that a row may attend to and that were not taken out, with their shares, the largest first, NaN last; equal
        ones as they stand."""
        shares = self._shown[row]
        seen = np.flatnonzero(shares != FORBIDDEN)
        order = np.argsort(-np.nan_to_num(shares[seen], nan=-1.0), kind="stable")
        return tuple((int(seen[i]), float(shares[seen[i]])) for i in order)

    def entropy(self, row: int) -> float | None:
        """Nats of a row as it was computed, sinks and all; the mean over the queries of a block. None where none sees a key."""
        view, (first, last) = self.drawn.view, self.query_places(row)
        begin = view.first_query(self.sequence)
        nats = view.arrays["entropy"][self.sequence, self.drawn.place, begin + first : begin + last + 1]
        if not self.base.n_queries[row]:
            return None
        return float(nats.mean()) if self.base.block == 1 else float(np.nanmean(nats))

    def row_levels(self, row: int) -> tuple[list[int], float]:
        """What a query gives to each column, as levels up to the largest of them; and that."""
        return _own_levels(self._shown[row], self.scale)

    def column_levels(self, column: int) -> tuple[list[int], float]:
        """What each row gives to a key, as levels up to the largest of them; and that."""
        return _own_levels(self._shown[:, column], self.scale)

    def row_sum(self, row: int) -> float:
        """What all keys together get of a row, as it is drawn."""
        shares = self.base.shares[row]
        return float(shares[shares != FORBIDDEN].sum())

    def row_document(self, row: int) -> Mapping[str, Any]:
        """The row as JSON values, schema `mha.row/1`: exact numbers, null where one is not finite; without keys that were taken
        out."""
        keys = [
            {
                **_json_place(self.base, self.base.keys, self.key_places(column)),
                "share": _json_number(self._exact(row, column, share)),
            }
            for column, share in sorted(self.strongest(row))
        ]
        said = self.entry.said
        return {
            "schema": ROW_SCHEMA,
            "layer": None if self.drawn.layer is None else self.drawn.layer.layer,
            "attention": None if self.drawn.layer is None else self.drawn.layer.name,
            "head": self.drawn.head,
            "kind": None if said is None else said.kind,
            "sequence": self.sequence,
            "query": _json_place(self.base, self.base.queries, self.query_places(row)),
            "entropy": _json_number(self.entropy(row)),
            "sinks": {
                "places": list(self.base.sinks),
                "share": _json_number(float(self.base.sink_shares[row])),
                "removed": self.hides_sinks,
            },
            "learned_sink": None if self.base.learned is None else _json_number(float(self.base.learned[row])),
            "shares": "renormalised without sinks" if self.hides_sinks else "as computed",
            "keys": keys,
        }

    def _exact(self, row: int, column: int, share: float) -> float:
        """A share with the digits that the record's own numbers have: as few as tell it from its neighbours."""
        if self.hides_sinks or "pattern" not in self.drawn.view.arrays:
            return share
        return float(str(self.drawn.view.arrays["pattern"].dtype.type(share)))


def _own_levels(shares: Array, scale: Scale) -> tuple[list[int], float]:
    is_known = (shares != FORBIDDEN) & np.isfinite(shares)
    return levels(shares, scale).astype(int).tolist(), float(shares.max(initial=0.0, where=is_known))


def _name(drawn: HeadMap, text: TokenSequence, places: tuple[int, int]) -> str:
    first, last = places
    return f"{first}–{last}" if drawn.block > 1 else f"{first} {token_text(text, first)}"


def _json_place(drawn: HeadMap, text: TokenSequence, places: tuple[int, int]) -> dict[str, Any]:
    first, last = places
    if drawn.block > 1:
        return {"first": first, "last": last}
    return {"place": first, "token": without_surrogates(text.tokens[first])}


def _json_number(number: float | None) -> float | None:
    return number if number is not None and np.isfinite(number) else None
