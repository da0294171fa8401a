"""Which cells of an array of one record belong to which of the other's: axis by axis, by tokens, heads and blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mhacli.results.diff.result import AFTER_SCORES, OF_PATTERN, TextDifference
from mhacli.results.record.arrays import Array
from mhacli.results.record.record import Record
from mhacli.results.record.tiled import FOR_ALL_HEADS, PER_QUERY
from mhacli.spec.sites import SITES

_PER_QUERY = ("batch", "head", "query")
_BLOCKS = ("batch", "head", "query block", "key block")
_SURVEYED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*PER_QUERY, "visible", "strongest_key"), _PER_QUERY),
    **dict.fromkeys(("received", "uniform_received"), ("batch", "head", "key")),
    **dict.fromkeys(("map", "uniform_map"), _BLOCKS),
    **dict.fromkeys(("profile", "uniform_profile"), ("batch", "head", "step")),
    **dict.fromkeys(("span_mass", "uniform_span_mass"), ("batch", "head", "span", "spans")),
    **dict.fromkeys(("top_keys", "top_shares"), ("batch", "head", "asked query", "rank")),
    "corner": ("batch", "head", "corner query", "corner key"),
    "allowed": ("batch", "head", "query", "key"),
}
MASK = ("visible", "uniform_map", "uniform_received", "uniform_profile", "uniform_span_mass", "allowed")
"""What follows from the mask alone, whatever the numbers."""
_FOLLOWED_BY = {"qk": MASK, "scores": AFTER_SCORES, "pattern": OF_PATTERN}
ORDER = tuple(name for site in SITES for name in (site, *_FOLLOWED_BY.get(site, ())))
"""Every array by its name in the order of execution: the mask before the scores that it forbids, and what is counted of a pattern
after it."""


@dataclass(frozen=True)
class RecordAxes:
    """One record, or one layer of one, and the numbers of the heads on its head axis."""

    record: Record
    heads: tuple[int, ...]

    @staticmethod
    def of(record: Record) -> RecordAxes:
        """The side of a record of one layer: heads that were looked at, or all."""
        if record.survey is None:
            return RecordAxes(record, tuple(range(record.config.n_heads)))
        return RecordAxes(record, tuple(head.head for head in record.heads))

    def axes(self, name: str) -> tuple[str, ...]:
        """The axis words of one of its arrays."""
        return _SURVEYED[name] if name in _SURVEYED else SITES[name].axes_for(self.record.facts)


@dataclass(frozen=True)
class Axis:
    """Indices of both records along an axis that belong together, and what they are called there: `names` are tokens, heads."""

    word: str
    a: Array
    b: Array
    names_a: Array
    names_b: Array


@dataclass(frozen=True)
class Unlike:
    """Why two arrays cannot be compared, and whether that is a difference between the records."""

    why: str
    departs: bool = True


def unlike_axes(a: Sequence[str], b: Sequence[str]) -> Unlike | None:
    """Why arrays of these axes cannot be compared, None where they can. Positions are the same for all sequences, or each has its
    own: that follows from padding and documents, and is no difference by itself."""
    if tuple(a) == tuple(b):
        return None
    without_batch = [[axis for axis in axes if axis != "batch"] for axes in (a, b)]
    is_same = without_batch[0] == without_batch[1]
    return Unlike(f"axes {' '.join(a)} against {' '.join(b)}", departs=not is_same)


@dataclass(frozen=True)
class Pair:
    """Both records, and how the tokens of their queries and keys match, sequence by sequence."""

    a: RecordAxes
    b: RecordAxes
    queries: Sequence[TextDifference]
    keys: Sequence[TextDifference]

    @property
    def n_sequences(self) -> int:
        """How many sequences both have."""
        return len(self.queries)

    def layout(self, name: str) -> Unlike | None:
        """Why an array that both hold cannot be compared; None where it can."""
        axes = self.a.axes(name)
        other = unlike_axes(axes, self.b.axes(name))
        if other is not None:
            return other
        asked = self._survey_layout(name, axes)
        if asked is not None:
            return asked
        shapes = [side.record.arrays[name].shape for side in (self.a, self.b)]
        for axis, n_a, n_b in zip(axes, *shapes, strict=True):
            if axis not in _BY_TOKENS and axis not in ("batch", "head") and n_a != n_b:
                return Unlike(f"{axis} {n_a} against {n_b}")
        is_for_all = name in FOR_ALL_HEADS and all(shape[axes.index("head")] == 1 for shape in shapes)
        if "head" in axes and not is_for_all:
            n_a, n_b = (side.record.config.n_heads for side in (self.a, self.b))
            if n_a != n_b:
                return Unlike(f"{n_a} heads against {n_b}")
            if not {*self.a.heads} & {*self.b.heads}:
                return Unlike("other heads were looked at", departs=False)
        return None

    def _survey_layout(self, name: str, axes: Sequence[str]) -> Unlike | None:
        """Blocks, distances, spans and chosen cells must be the same ones: they are what was asked, not what was found."""
        a, b = (side.record.survey for side in (self.a, self.b))
        if name not in _SURVEYED or a is None or b is None:
            return None
        spans = [tuple(span.name for span in side.record.spans) for side in (self.a, self.b)]
        unlike = {
            "query block": a.block != b.block and f"blocks of {a.block} against {b.block} tokens",
            "step": a.steps != b.steps and "other distances were asked about",
            "span": spans[0] != spans[1] and "other spans were asked about",
            "asked query": (a.kept.queries, a.kept.top) != (b.kept.queries, b.kept.top)
            and "other queries were asked about",
            "corner query": a.kept.corner != b.kept.corner and "another corner was kept",
        }
        has_same_tokens = all(text.is_same for text in (*self.queries, *self.keys))
        moved = {"asked query", "corner query"} & {*axes} and not has_same_tokens and "its places hold other tokens"
        why = next((said for axis, said in unlike.items() if said and axis in axes), moved)
        return Unlike(why, departs=False) if why else None

    def cells(self, name: str, sequence: int) -> tuple[Axis, ...]:
        """The axes of one sequence's cells that belong together, those of `layout` that are alike."""
        return tuple(self._axes(name, sequence))

    def _axes(self, name: str, sequence: int) -> Iterator[Axis]:
        sides, axes = (self.a, self.b), self.a.axes(name)
        sizes = [side.record.arrays[name].shape for side in sides]
        for place, axis in enumerate(axes):
            if axis == "batch":
                continue
            n_a, n_b = (size[place] for size in sizes)
            if axis in _BY_TOKENS and "batch" not in axes:  # the same for all sequences: places, not tokens
                yield _same(axis, min(n_a, n_b))
            elif axis in ("query", "key"):
                yield self._tokens(axis, sequence, n_a, n_b)
            elif axis in ("query block", "key block"):
                yield self._blocks(axis, sequence)
            elif axis == "head":
                yield self._heads(n_a, n_b)
            else:
                yield _same(axis, n_a)

    def _tokens(self, axis: str, sequence: int, n_a: int, n_b: int) -> Axis:
        first_a, first_b = (_first(side.record, axis, sequence) for side in (self.a, self.b))
        text = (self.queries if axis == "query" else self.keys)[sequence]
        if text.is_same and (n_a, first_a) == (n_b, first_b):  # padding too
            columns = np.arange(n_a)
            return Axis(axis, columns, columns, columns - first_a, columns - first_b)
        names_a, names_b = _places(text)
        return Axis(axis, names_a + first_a, names_b + first_b, names_a, names_b)

    def _blocks(self, axis: str, sequence: int) -> Axis:
        """Blocks of which every token stands in the same column of both."""
        survey = self.a.record.survey
        assert survey is not None, "only a survey has blocks"
        token = axis.partition(" ")[0]
        lengths = [side.record.facts.sizes[token] for side in (self.a, self.b)]
        columns = self._tokens(token, sequence, *lengths)
        kept = np.zeros(max(lengths), bool)
        kept[columns.a[columns.a == columns.b]] = True
        starts = np.arange(0, max(lengths), survey.block)
        found = np.flatnonzero(np.logical_and.reduceat(kept, starts))
        return Axis(axis, found, found, found, found)

    def _heads(self, n_a: int, n_b: int) -> Axis:
        if n_a == n_b == 1:
            is_one = len(self.a.heads) == len(self.b.heads) == 1
            heads = np.array(self.a.heads if is_one else [_ALL_HEADS])
            return Axis("head", np.zeros(1, int), np.zeros(1, int), heads, heads)
        common = [head for head in self.a.heads if head in self.b.heads]
        places = [
            np.array([side.heads.index(head) for head in common]) * (n > 1)
            for side, n in ((self.a, n_a), (self.b, n_b))
        ]
        return Axis("head", places[0], places[1], np.array(common), np.array(common))


_ALL_HEADS = -1
"""The number of what holds for all heads."""
_BY_TOKENS = ("query", "key", "query block", "key block")


def _first(record: Record, axis: str, sequence: int) -> int:
    return record.first_query(sequence) if axis == "query" else record.first_key(sequence)


def _places(text: TextDifference) -> tuple[Array, Array]:
    """The places of the tokens that are compared, in either text."""
    pairs = [(match.a + n, match.b + n) for match in text.compared for n in range(match.length)]
    places = np.array(pairs, dtype=int).reshape(-1, 2)
    return places[:, 0], places[:, 1]


def _same(axis: str, size: int) -> Axis:
    index = np.arange(size)
    return Axis(axis, index, index, index, index)
