"""How much of a record goes into a page of about a megabyte: the finest maps that fit, then exact numbers while there is room."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mhacli.render.base.options import Rows
from mhacli.render.base.rows import first_produced, rows_in
from mhacli.render.heads.head_map import DrawableHead, HeadMap, head_map
from mhacli.render.page.encoding import bits
from mhacli.render.page.maps import (
    EXACT,
    MOST_KEYS,
    EncodedMap,
    Fineness,
    Measured,
    asked_keys,
    encoded,
    sink_shares,
    strongest,
    with_keys,
    with_rows,
)
from mhacli.results.record.arrays import Array

LIMIT_BYTES = 1 << 20
"""What a page weighs at most, if that can be: small enough for a mail, a ticket, a chat."""
MOST_ROWS = 32
_SMALLEST = 16
"""Cells per side below which a map says nothing any more."""
_SAMPLES = 4
_OVERHEAD = 300
"""Bytes that a map takes beside its cells."""
_SURE = 0.9
"""The part of the room that an estimate may take: a sample is a sample."""


@dataclass(frozen=True)
class Drawn:
    """A head of a sequence, and of which queries exact rows are wanted: `n_wanted` were, of which `rows` are the first."""

    head: DrawableHead
    sequence: int
    rows: tuple[int, ...]
    n_wanted: int

    @property
    def n_cells(self) -> int:
        """How many cells there are."""
        view = self.head.record
        return len(view.sequences[self.sequence].tokens) * len(view.keys[self.sequence].tokens)

    @property
    def longest(self) -> int:
        """The longer side of its map."""
        map_of = self.head.record.arrays.get("map")
        if "pattern" not in self.head.record.arrays and map_of is not None:
            return int(max(map_of.shape[2:]))
        return max(len(texts[self.sequence].tokens) for texts in (self.head.record.sequences, self.head.record.keys))


@dataclass(frozen=True)
class PackedMask:
    """Which cells may be attended, as a page carries it: each distinct one once."""

    rows: int
    columns: int
    bits: str


@dataclass(frozen=True)
class Maps:
    """The maps of a page, in the order of what is drawn, with what is to be said of each. `n_keys` strongest keys of each query
    and `n_rows` rows of those that were wanted were kept exactly; `n_wanted` is how many rows were wanted at most. `is_small`:
    everything is within the limit."""

    maps: tuple[EncodedMap, ...]
    masks: tuple[PackedMask, ...]
    measured: tuple[Measured, ...]
    fineness: Fineness = EXACT
    n_keys: int = 0
    n_rows: int = 0
    n_wanted: int = 0
    is_small: bool = True

    @property
    def n_bytes(self) -> int:
        """What the maps and masks take as JSON."""
        return sum(len(one.json) + 1 for one in self.maps) + sum(len(mask.bits) + 40 for mask in self.masks)

    def top(self, *, hide_sinks: bool) -> float:
        """The top of the common scale, with sinks or without; 1 where there is nothing."""
        name = "largest_without_sinks" if hide_sinks else "largest"
        return max((getattr(one, name) for one in self.measured), default=0.0) or 1.0

    @property
    def error(self) -> float:
        """How far any share in the page is from that in the record at most."""
        return max((one.error for one in self.measured), default=0.0)


@dataclass(frozen=True)
class _Exact:
    """Exact numbers of a map that a page may carry besides."""

    keys: Array
    shares: Array
    rows: Array


def drawn_head(head: DrawableHead, sequence: int, rows: Rows | None) -> Drawn:
    """A head to draw with the queries whose rows are to be exact: those asked for, as many as a page takes, else the last one."""
    made = None if head.record.model is None else head.record.model.generated
    produced = None if head.layer is None else first_produced(head.layer.kind, made, sequence)
    wanted = rows_in("last" if rows is None else rows, head.record.sequences[sequence], produced)
    return Drawn(head, sequence, wanted[:MOST_ROWS], len(wanted))


def exact_maps(drawn: Sequence[Drawn]) -> Maps:
    """Every cell of every map, whatever that takes."""
    maps, _ = _encoded(drawn, EXACT, None)
    return maps


def fitting_maps(drawn: Sequence[Drawn], room: int, *, rows_first: bool) -> Maps:
    """The finest maps that take at most `room` bytes, and exact numbers as far as there is room: the strongest keys of every
    query, and some rows, or with `rows_first` these first. The coarsest that say anything where none fit."""
    *candidates, coarsest = _finenesses(max((one.longest for one in drawn), default=1))
    for fineness in candidates:
        if _estimate(drawn, fineness, room) <= room:
            maps, exact = _encoded(drawn, fineness, room)
            if maps.is_small:
                return _with_exact(maps, exact, drawn, room, rows_first=rows_first)
    maps, exact = _encoded(drawn, coarsest, None)
    maps = replace(maps, is_small=maps.n_bytes <= room)
    return _with_exact(maps, exact, drawn, room, rows_first=rows_first)


def _finenesses(longest: int) -> Iterator[Fineness]:
    """From the finest to the coarsest."""
    yield EXACT
    yield Fineness("u16", 1)
    yield Fineness("u8", 1)
    factor = 2
    while longest / factor >= _SMALLEST:
        yield Fineness("u8", factor)
        factor *= 2


def _estimate(drawn: Sequence[Drawn], fineness: Fineness, room: int) -> float:
    """About how many bytes all maps take, from a few; as soon as that is clearly too much, no more are tried."""
    step = max(1, len(drawn) // _SAMPLES)
    n_all, total, n_cells = sum(one.n_cells for one in drawn), 0, 0
    expected = 0.0
    for one in drawn[step // 2 :: step]:
        cells = head_map(one.head, one.sequence)
        given = sink_shares(one.head, one.sequence, cells)
        total += len(encoded(cells.pooled(fineness.factor), 0, fineness, given)[0].json) - _OVERHEAD
        n_cells += one.n_cells
        expected = (total / n_cells * n_all + _OVERHEAD * len(drawn)) / (1 if step == 1 else _SURE)
        if expected > 2 * room:
            break
    return expected


def _encoded(drawn: Sequence[Drawn], fineness: Fineness, room: int | None) -> tuple[Maps, list[_Exact | None]]:
    """All maps in one fineness; not all of them, and not `is_small`, where they take more than `room`."""
    masks: dict[PackedMask, int] = {}
    done: list[tuple[EncodedMap, Measured]] = []
    exact: list[_Exact | None] = []
    n_bytes = 0
    for one in drawn:
        cells = head_map(one.head, one.sequence)
        shown = cells.pooled(fineness.factor)
        mask = PackedMask(len(shown.shares), shown.shares.shape[1], bits(shown.is_open))
        given = sink_shares(one.head, one.sequence, cells)
        made, measured = encoded(shown, masks.setdefault(mask, len(masks)), fineness, given)
        made = replace(made, asked=asked_keys(one.head, one.sequence))
        done.append((made, measured))
        n_bytes += len(made.json)
        if room is not None and n_bytes > room:
            break
        exact.append(None if made.exact else _exact(one, cells))
    maps = Maps(tuple(made for made, _ in done), tuple(masks), tuple(measured for _, measured in done), fineness)
    return replace(maps, is_small=room is None or maps.n_bytes <= room), exact


def _exact(one: Drawn, cells: HeadMap) -> _Exact | None:
    """What can be kept exactly beside a map that is not; None where the record has no single cells."""
    if "pattern" not in one.head.record.arrays:
        return None
    return _Exact(*strongest(cells, MOST_KEYS), cells.shares[list(one.rows)].astype(np.float32))


def _with_exact(
    maps: Maps, exact: Sequence[_Exact | None], drawn: Sequence[Drawn], room: int, *, rows_first: bool
) -> Maps:
    """The maps with exact numbers, as many as there is room for."""
    if all(one is None for one in exact):
        return maps
    for add in (_add_rows, _add_keys) if rows_first else (_add_keys, _add_rows):
        maps = add(maps, exact, drawn, room)
    return maps


def _add_keys(maps: Maps, exact: Sequence[_Exact | None], drawn: Sequence[Drawn], room: int) -> Maps:
    n_queries = sum(len(one.keys) for one in exact if one is not None)
    most = min(MOST_KEYS, (room - maps.n_bytes) // max(1, 4 * n_queries))  # fewer bytes than 4 are never enough for one
    best, least = maps, 1
    while least <= most:
        k = (least + most + 1) // 2

        def add(one: EncodedMap, own: _Exact, _: Drawn, k: int = k) -> EncodedMap:
            return with_keys(one, own.keys, own.shares, k)

        found = replace(_each(maps, exact, drawn, add), n_keys=k)
        if found.n_bytes <= room:
            best, least = found, k + 1
        else:
            most = k - 1
    return best


def _add_rows(maps: Maps, exact: Sequence[_Exact | None], drawn: Sequence[Drawn], room: int) -> Maps:
    n_wanted = max((of.n_wanted for one, of in zip(exact, drawn, strict=True) if one is not None), default=0)
    n_rows = min(n_wanted, MOST_ROWS)
    while n_rows:

        def add(one: EncodedMap, own: _Exact, of: Drawn, n: int = n_rows) -> EncodedMap:
            return with_rows(one, own.rows[:n], of.rows[:n])

        found = replace(_each(maps, exact, drawn, add), n_rows=n_rows, n_wanted=n_wanted)
        if found.n_bytes <= room:
            return found
        n_rows //= 2
    return replace(maps, n_wanted=n_wanted)


def _each(
    maps: Maps,
    exact: Sequence[_Exact | None],
    drawn: Sequence[Drawn],
    add: Callable[[EncodedMap, _Exact, Drawn], EncodedMap],
) -> Maps:
    added = (one if own is None else add(one, own, of) for one, own, of in zip(maps.maps, exact, drawn, strict=True))
    return replace(maps, maps=tuple(added))
