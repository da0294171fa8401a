"""Which tests a plain `pytest` runs and which wait for `--full`: of rows that walk the same code, those that can differ.

A test with several parametrisations needs no product of them: mistakes come from one value or from two together. `--full` runs
every pair of values, plain runs every value at least once, and of more rows than `PLAIN_ROWS` so many. A test
marked `sampled(n)` has a number of its own, one marked `every_row` runs all rows always, and one marked `full` none plainly.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import pytest

PLAIN_ROWS = 4
QUICK = ("tests/io/", "tests/text/", "tests/requests/", "tests/checkpoints/", "tests/spec/test_config.py")
"""Tests that take milliseconds, whose rows are cases written by hand: all of them run plainly too."""
Row = tuple[str, ...]
"""The ids of a test's values, one for each of its parametrisations."""


def chosen(items: Sequence[pytest.Item], *, full: bool) -> set[pytest.Item]:
    """The tests of a tier."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    return {item for rows in functions.values() for item in _chosen_rows(rows, full=full)}


def _chosen_rows(items: list[pytest.Item], *, full: bool) -> Iterable[pytest.Item]:
    """Those of the rows of one test."""
    if not full:
        items = [item for item in items if not item.get_closest_marker("full")]
    if len(items) < 2 or items[0].get_closest_marker("every_row") or items[0].nodeid.startswith(QUICK):
        return items
    items = _at(items, covering(_rows(items), 2 if full else 1))
    sampled = items[0].get_closest_marker("sampled")
    return items if full else _at(items, drawn(_rows(items), sampled.args[0] if sampled else PLAIN_ROWS))


def _at(items: list[pytest.Item], places: Iterable[int]) -> list[pytest.Item]:
    return [items[place] for place in places]


def _rows(items: Iterable[pytest.Item]) -> list[Row]:
    return [tuple(item.callspec._idlist) if hasattr(item, "callspec") else () for item in items]


def covering(rows: Sequence[Row], strength: int) -> list[int]:
    """The places of few rows that hold all that any `strength` columns hold together, in their order. Always the same."""
    if not rows or len(rows[0]) <= strength:
        return list(range(len(rows)))
    held = [frozenset(_held(row, strength)) for row in rows]
    missing = set().union(*held)
    taken: list[int] = []
    while missing:
        best = max(range(len(rows)), key=lambda place: len(held[place] & missing))
        taken.append(best)
        missing -= held[best]
    return sorted(taken)


def _held(row: Row, strength: int) -> Iterator[tuple[tuple[int, str], ...]]:
    return itertools.combinations(enumerate(row), strength)


def drawn(rows: Sequence[Row], n: int) -> list[int]:
    """The places of n rows, drawn by their ids: tests over the same cases draw the same ones, whatever cases are added.

    Of rows with several values, each next one is the first drawn that has the most values which those before it have not.
    """
    lots = sorted(range(len(rows)), key=lambda place: zlib.crc32("-".join(rows[place]).encode()))
    taken: list[int] = []
    held: set[tuple[int, str]] = set()
    while lots and len(taken) < n:
        best = max(lots, key=lambda place: len(set(enumerate(rows[place])) - held))
        taken.append(best)
        lots.remove(best)
        held |= set(enumerate(rows[best]))
    return sorted(taken)
