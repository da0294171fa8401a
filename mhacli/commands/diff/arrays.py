"""Compares two arrays of one site cell by cell: matches their axes and measures their difference."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import pairwise

import numpy as np

from mhacli.commands.diff.result import (
    AFTER_SCORES,
    OF_PATTERN,
    DiffLocation,
    HeadLargest,
    Match,
    SiteDifference,
    SiteStatus,
    TextDifference,
    TokenFamily,
)
from mhacli.record.arrays import Array
from mhacli.record.heads import FOR_ALL_HEADS, PER_QUERY
from mhacli.record.record import Record
from mhacli.sites import SITES
from mhacli.text.tokens import TokenSequence

_PIECE = 1 << 16
"""Cells compared at a time. The eight or so float64 arrays involved then stay in a core's cache, which halves the time."""
_ONLY_WHERE_ALLOWED = ("qk", "scores")
_EXACT = ("ids", "visible", "allowed")
_INDICES = ("strongest_key", "top_keys")
"""Arrays of key indices. Rounding decides between keys of nearly equal weight, so these differ only if weights do."""
_WEIGHTS = ("pattern", "map", "entropy", "top_shares")
"""The arrays that show whether the weights behind the indices differ by more than rounding."""


def compared_site(name: str, pair: Pair, tolerance: float) -> SiteDifference:
    """The comparison of an array that both records have."""
    a, b = (side.record.arrays[name] for side in (pair.a, pair.b))
    axes = pair.a.axes(name)
    unlike = pair.layout(name)
    if unlike is not None:
        return _not_compared(name, axes, (a, b), unlike)
    tally = Tally()
    has_batch = "batch" in axes
    for sequence in range(pair.n_sequences if has_batch else 1):
        matched = pair.cells(name, sequence)
        both = (a[sequence], b[sequence]) if has_batch else (a, b)
        _count_sequence(tally, name, pair, sequence=sequence, axes=matched, both=both)
    if tally.n_cells == 0:
        return _not_compared(name, axes, (a, b), NotComparable("no cells have tokens in common", departs=False))
    is_measured = name not in (*_EXACT, *_INDICES)
    return SiteDifference(
        site=name,
        seen="array",
        status=_status(name, tally, tolerance),
        axes=axes,
        shape_a=a.shape,
        shape_b=b.shape,
        n_cells=tally.n_cells,
        n_different=tally.n_different,
        n_nonfinite=tally.n_nonfinite,
        n_only_a=tally.n_only_a,
        n_only_b=tally.n_only_b,
        largest=tally.largest if is_measured and math.isfinite(tally.largest) else None,
        magnitude=tally.magnitude if is_measured else None,
        at=tally.first_nonfinite or tally.at,
        why="rounding exchanges keys of like weight" if name in _INDICES and tally.n_different else "",
        heads=tally.by_head(),
    )


def judged_indices(sites: Sequence[SiteDifference]) -> tuple[SiteDifference, ...]:
    """The sites of a layer, where different key indices count as differences only if the weights differ."""
    if not any(site.departs for site in sites if site.site in _WEIGHTS):
        return tuple(sites)
    return tuple(
        replace(site, status="beyond", why="") if site.site in _INDICES and site.n_different else site for site in sites
    )


def _not_compared(name: str, axes: tuple[str, ...], both: tuple[Array, Array], unlike: NotComparable) -> SiteDifference:
    status: SiteStatus = "shape" if unlike.departs else "skipped"
    return SiteDifference(name, "array", status, axes, both[0].shape, both[1].shape, why=unlike.why)


def _status(name: str, tally: Tally, tolerance: float) -> SiteStatus:
    if tally.is_identical:
        return "identical"
    if name in _INDICES:
        return "beyond" if tolerance == 0 else "skipped"
    if name in _EXACT or tally.n_nonfinite:
        return "beyond"
    return "within" if tolerance > 0 and tally.largest <= tolerance * tally.magnitude else "beyond"


@dataclass
class Tally:
    """The running result of a site's comparison."""

    n_cells: int = 0
    n_different: int = 0
    n_nonfinite: int = 0
    n_only_a: int = 0
    n_only_b: int = 0
    largest: float = 0.0
    magnitude: float = 0.0
    is_identical: bool = True
    at: DiffLocation | None = None
    first_nonfinite: DiffLocation | None = None
    _heads: dict[int, HeadLargest] = field(default_factory=dict)

    def add_head(self, head: int, largest: float, sequence: int) -> None:
        """Adds the largest difference of a head in a piece; NaN if a number is finite in only one record."""
        previous = self._heads.get(head)
        rank = math.inf if math.isnan(largest) else largest
        if previous is None or (previous.largest is not None and rank > previous.largest):
            self._heads[head] = HeadLargest(head, None if math.isinf(rank) else rank, sequence)

    def by_head(self) -> tuple[HeadLargest, ...]:
        """The largest difference of each head, in head order."""
        return tuple(self._heads[head] for head in sorted(self._heads))


def _count_sequence(
    tally: Tally, name: str, pair: Pair, *, sequence: int, axes: Sequence[MatchedAxis], both: tuple[Array, Array]
) -> None:
    """Adds the cells of one sequence, piece by piece."""
    allowed = _allowed(pair, sequence) if name in _ONLY_WHERE_ALLOWED else None
    for piece in _pieces(axes):
        a, b = _cut(both[0], [axis.a for axis in piece]), _cut(both[1], [axis.b for axis in piece])
        if name in _INDICES:
            a, b = _as_places(a, b, pair, sequence)
        counted = None if allowed is None else _both_allowed(allowed, piece)
        _count(tally, a, b, sequence=sequence, axes=piece, counted=counted)


def _count(
    tally: Tally, a: Array, b: Array, *, sequence: int, axes: Sequence[MatchedAxis], counted: Array | None
) -> None:
    tally.n_cells += a.size if counted is None else int(counted.sum())
    if a.dtype.kind == "b":
        tally.n_only_a += int((a & ~b).sum())
        tally.n_only_b += int((b & ~a).sum())
    a, b = a.astype(np.float64), b.astype(np.float64)
    different = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    other_bits = different | ((np.signbit(a) != np.signbit(b)) & (a == 0))
    is_finite = np.isfinite(a) & np.isfinite(b)
    if counted is not None:
        different, other_bits, is_finite = (cells & counted for cells in (different, other_bits, is_finite))
    tally.is_identical &= not other_bits.any()
    tally.n_different += int(different.sum())
    broken = different & ~is_finite
    tally.n_nonfinite += int(broken.sum())
    with np.errstate(over="ignore", invalid="ignore"):
        distance = np.where(is_finite, np.abs(b - a), 0.0)
        magnitude = np.where(is_finite, np.maximum(np.abs(a), np.abs(b)), 0.0)
    tally.magnitude = max(tally.magnitude, float(magnitude.max(initial=0.0)))
    if broken.any() and tally.first_nonfinite is None:
        tally.first_nonfinite = _place(int(broken.argmax()), a.shape, axes, sequence)
    if distance.size and distance.max() > tally.largest:
        tally.largest = float(distance.max())
        tally.at = _place(int(distance.argmax()), a.shape, axes, sequence)
    _count_heads(tally, np.where(broken, np.nan, distance), axes, sequence)


def _count_heads(tally: Tally, distance: Array, axes: Sequence[MatchedAxis], sequence: int) -> None:
    if axes[0].word != "head" or not distance.size:
        return
    per_head = distance.reshape(len(distance), -1).max(axis=1)
    for head, largest in zip(axes[0].names_a.tolist(), per_head.tolist(), strict=True):
        if head >= 0:  # one mask may serve all heads
            tally.add_head(head, largest, sequence)


def _place(flat: int, shape: tuple[int, ...], axes: Sequence[MatchedAxis], sequence: int) -> DiffLocation:
    indices = np.unravel_index(flat, shape)
    named = [
        (axis, int(i)) for axis, i in zip(axes, indices, strict=True) if axis.names_a[i] >= 0 or axis.word != "head"
    ]
    return DiffLocation(
        axes=("sequence", *(axis.word for axis, _ in named)),
        a=(sequence, *(int(axis.names_a[i]) for axis, i in named)),
        b=(sequence, *(int(axis.names_b[i]) for axis, i in named)),
    )


# --------------------------------------------------------------------------------------------------------------------- cells


def _pieces(axes: Sequence[MatchedAxis]) -> Iterator[list[MatchedAxis]]:
    """The axes, cut along the first and, if a single step is still too large, the second, into pieces of few cells."""
    sizes = [axis.a.size for axis in axes]
    if not all(sizes):
        return
    steps = max(1, _PIECE // math.prod(sizes[1:]))
    inner = max(1, _PIECE // math.prod(sizes[2:])) if len(sizes) > 1 else 1
    for start in range(0, sizes[0], steps):
        first = _part(axes[0], start, steps)
        if len(sizes) == 1:
            yield [first]
            continue
        for begin in range(0, sizes[1], inner):
            yield [first, _part(axes[1], begin, inner), *axes[2:]]


def _part(axis: MatchedAxis, start: int, count: int) -> MatchedAxis:
    cut = slice(start, start + count)
    return MatchedAxis(axis.word, axis.a[cut], axis.b[cut], axis.names_a[cut], axis.names_b[cut])


def _cut(array: Array, indices: Sequence[Array]) -> Array:
    """The cells at these indices of every axis. Contiguous ones are not copied."""
    if all(index[-1] - index[0] + 1 == index.size for index in indices):
        cut: Array = array[tuple(slice(int(index[0]), int(index[-1]) + 1) for index in indices)]
        return cut
    cells: Array = array[np.ix_(*indices)]
    return cells


def _allowed(pair: Pair, sequence: int) -> tuple[Array, Array] | None:
    arrays = [side.record.arrays.get("allowed") for side in (pair.a, pair.b)]
    return None if arrays[0] is None or arrays[1] is None else (arrays[0][sequence], arrays[1][sequence])


def _both_allowed(allowed: tuple[Array, Array], piece: Sequence[MatchedAxis]) -> Array:
    """The cells of a piece that both records allow. Scores of other cells have no meaning."""
    cut = []
    for mask, name in zip(allowed, ("a", "b"), strict=True):
        head, *rest = (getattr(axis, name) for axis in piece)
        cut.append(_cut(mask, [head if mask.shape[0] > 1 else np.zeros(1, int), *rest]))
    counts = [axis.a.size for axis in piece]
    both: Array = np.broadcast_to(cut[0] & cut[1], counts)
    return both


def _as_places(a: Array, b: Array, pair: Pair, sequence: int) -> tuple[Array, Array]:
    """Key indices as tokens of A, so that a token equals itself and its replacement. Tokens that A lacks have no index."""
    first_a, first_b = (side.record.first_key(sequence) for side in (pair.a, pair.b))
    text = pair.keys[sequence]
    place_in_a = np.full(text.n_b, -2)
    for match in text.compared:
        place_in_a[match.b : match.b + match.length] = np.arange(match.a, match.a + match.length)
    inside = (b >= first_b) & (b < first_b + text.n_b)
    moved = np.where(inside, place_in_a[np.clip(b - first_b, 0, text.n_b - 1)], np.where(b < 0, -1, -2))
    return np.where(a < 0, -1, a - first_a), moved


# ------------------------------------------------------------------------------------------------------- matching axes


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
"""Arrays that depend only on the mask."""
_FOLLOWED_BY = {"qk": MASK, "scores": AFTER_SCORES, "pattern": OF_PATTERN}
ORDER = tuple(name for site in SITES for name in (site, *_FOLLOWED_BY.get(site, ())))
"""Every array by name in the order of execution: the mask before the scores, and statistics after the pattern."""


@dataclass(frozen=True)
class RecordAxes:
    """One record, or one layer of it, and the numbers of the heads on its head axis."""

    record: Record
    heads: tuple[int, ...]

    @staticmethod
    def of(record: Record) -> RecordAxes:
        """A record of one layer, with the inspected heads or all."""
        if record.survey is None:
            return RecordAxes(record, tuple(range(record.config.n_heads)))
        return RecordAxes(record, tuple(head.head for head in record.heads))

    def axes(self, name: str) -> tuple[str, ...]:
        """The axis names of one of its arrays."""
        return _SURVEYED[name] if name in _SURVEYED else SITES[name].axes_for(self.record.facts)


@dataclass(frozen=True)
class MatchedAxis:
    """Matching indices of both records along an axis, with the names of tokens or heads there."""

    word: str
    a: Array
    b: Array
    names_a: Array
    names_b: Array


@dataclass(frozen=True)
class NotComparable:
    """Why two arrays cannot be compared, and whether that is a difference between the records."""

    why: str
    departs: bool = True


_COUNTED = {"batch": "sequences", "head": "heads", "kv_head": "kv heads", "query": "queries", "key": "keys"}
"""Axes whose length is a count, with the noun to count."""


def sizes_text(axis: str, a: int, b: int) -> str:
    """Two lengths of an axis: `4 kv heads against 2`, `d_head 16 against 32`."""
    return f"{a} {_COUNTED[axis]} against {b}" if axis in _COUNTED else f"{axis} {a} against {b}"


def unlike_axes(a: Sequence[str], b: Sequence[str]) -> NotComparable | None:
    """Why arrays with these axes cannot be compared, or None.

    Positions may be shared by all sequences or separate. Padding and documents decide that, so it is no difference in
    itself.
    """
    if tuple(a) == tuple(b):
        return None
    without_batch = [[axis for axis in axes if axis != "batch"] for axes in (a, b)]
    is_same = without_batch[0] == without_batch[1]
    return NotComparable(f"axes {' '.join(a)} against {' '.join(b)}", departs=not is_same)


@dataclass(frozen=True)
class Pair:
    """Both records, with the matching tokens of their queries and keys, sequence by sequence."""

    a: RecordAxes
    b: RecordAxes
    queries: Sequence[TextDifference]
    keys: Sequence[TextDifference]

    @property
    def n_sequences(self) -> int:
        """The number of sequences that both have."""
        return len(self.queries)

    def layout(self, name: str) -> NotComparable | None:
        """Why an array that both have cannot be compared, or None."""
        axes = self.a.axes(name)
        unlike = unlike_axes(axes, self.b.axes(name))
        if unlike is not None:
            return unlike
        unlike_summary = self._survey_layout(name, axes)
        if unlike_summary is not None:
            return unlike_summary
        shapes = [side.record.arrays[name].shape for side in (self.a, self.b)]
        for axis, n_a, n_b in zip(axes, *shapes, strict=True):
            if axis not in _BY_TOKENS and axis not in ("batch", "head") and n_a != n_b:
                return NotComparable(sizes_text(axis, n_a, n_b))
        is_for_all = name in FOR_ALL_HEADS and all(shape[axes.index("head")] == 1 for shape in shapes)
        if "head" in axes and not is_for_all:
            n_a, n_b = (side.record.config.n_heads for side in (self.a, self.b))
            if n_a != n_b:
                return NotComparable(sizes_text("head", n_a, n_b))
            if not {*self.a.heads} & {*self.b.heads}:
                return NotComparable("the records hold different heads", departs=False)
        return None

    def _survey_layout(self, name: str, axes: Sequence[str]) -> NotComparable | None:
        """Why summary arrays cannot be compared, or None: blocks, distances, spans and chosen cells must be the same."""
        a, b = (side.record.survey for side in (self.a, self.b))
        if name not in _SURVEYED or a is None or b is None:
            return None
        spans = [tuple(span.name for span in side.record.spans) for side in (self.a, self.b)]
        unlike = {
            "query block": a.block != b.block and f"blocks of {a.block} against {b.block} tokens",
            "step": a.steps != b.steps and "the records hold different distances",
            "span": spans[0] != spans[1] and "the records hold different spans",
            "asked query": (a.kept.queries, a.kept.top) != (b.kept.queries, b.kept.top)
            and "the records hold rows of different queries",
            "corner query": a.kept.corner != b.kept.corner and "the records hold different parts of the pattern",
        }
        has_same_tokens = all(text.is_same for text in (*self.queries, *self.keys))
        moved = {"asked query", "corner query"} & {*axes} and not has_same_tokens and "its positions hold other tokens"
        why = next((reason for axis, reason in unlike.items() if reason and axis in axes), moved)
        return NotComparable(why, departs=False) if why else None

    def cells(self, name: str, sequence: int) -> tuple[MatchedAxis, ...]:
        """The matching axes of one sequence's cells."""
        return tuple(self._axes(name, sequence))

    def _axes(self, name: str, sequence: int) -> Iterator[MatchedAxis]:
        sides, axes = (self.a, self.b), self.a.axes(name)
        sizes = [side.record.arrays[name].shape for side in sides]
        for place, axis in enumerate(axes):
            if axis == "batch":
                continue
            n_a, n_b = (size[place] for size in sizes)
            if axis in _BY_TOKENS and "batch" not in axes:  # shared by all sequences: positions, not tokens
                yield _same(axis, min(n_a, n_b))
            elif axis in ("query", "key"):
                yield self._tokens(axis, sequence, n_a, n_b)
            elif axis in ("query block", "key block"):
                yield self._blocks(axis, sequence)
            elif axis == "head":
                yield self._heads(n_a, n_b)
            else:
                yield _same(axis, n_a)

    def _tokens(self, axis: str, sequence: int, n_a: int, n_b: int) -> MatchedAxis:
        first_a, first_b = (_first(side.record, axis, sequence) for side in (self.a, self.b))
        text = (self.queries if axis == "query" else self.keys)[sequence]
        if text.is_same and (n_a, first_a) == (n_b, first_b):  # including padding
            columns = np.arange(n_a)
            return MatchedAxis(axis, columns, columns, columns - first_a, columns - first_b)
        names_a, names_b = _places(text)
        return MatchedAxis(axis, names_a + first_a, names_b + first_b, names_a, names_b)

    def _blocks(self, axis: str, sequence: int) -> MatchedAxis:
        """The blocks in which every token has the same column in both."""
        survey = self.a.record.survey
        assert survey is not None, "only a survey has blocks"
        token = axis.partition(" ")[0]
        lengths = [side.record.facts.sizes[token] for side in (self.a, self.b)]
        columns = self._tokens(token, sequence, *lengths)
        kept = np.zeros(max(lengths), bool)
        kept[columns.a[columns.a == columns.b]] = True
        starts = np.arange(0, max(lengths), survey.block)
        blocks = np.flatnonzero(np.logical_and.reduceat(kept, starts))
        return MatchedAxis(axis, blocks, blocks, blocks, blocks)

    def _heads(self, n_a: int, n_b: int) -> MatchedAxis:
        if n_a == n_b == 1:
            is_one = len(self.a.heads) == len(self.b.heads) == 1
            heads = np.array(self.a.heads if is_one else [_ALL_HEADS])
            return MatchedAxis("head", np.zeros(1, int), np.zeros(1, int), heads, heads)
        common = [head for head in self.a.heads if head in self.b.heads]
        places = [
            np.array([side.heads.index(head) for head in common]) * (n > 1)
            for side, n in ((self.a, n_a), (self.b, n_b))
        ]
        return MatchedAxis("head", places[0], places[1], np.array(common), np.array(common))


_ALL_HEADS = -1
"""The head number for arrays that hold for all heads."""
_BY_TOKENS = ("query", "key", "query block", "key block")


def _first(record: Record, axis: str, sequence: int) -> int:
    return record.first_query(sequence) if axis == "query" else record.first_key(sequence)


def _places(text: TextDifference) -> tuple[Array, Array]:
    """The positions of the compared tokens in each text."""
    pairs = [(match.a + n, match.b + n) for match in text.compared for n in range(match.length)]
    places = np.array(pairs, dtype=int).reshape(-1, 2)
    return places[:, 0], places[:, 1]


def _same(axis: str, size: int) -> MatchedAxis:
    index = np.arange(size)
    return MatchedAxis(axis, index, index, index, index)


# ----------------------------------------------------------------------------------------------------- matching tokens


_MOST_STEPS = 20_000_000
"""The most steps of difflib for all texts together: about two seconds."""


def aligned_texts(
    family: TokenFamily, a: Sequence[TokenSequence], b: Sequence[TokenSequence]
) -> tuple[TextDifference, ...]:
    """The token matches of each sequence that both have. Sequences are paired by number."""
    most = _MOST_STEPS // max(1, min(len(a), len(b)))
    return tuple(_aligned_text(family, i, *pair, most) for i, pair in enumerate(zip(a, b, strict=False)))


def _aligned_text(family: TokenFamily, sequence: int, a: TokenSequence, b: TokenSequence, most: int) -> TextDifference:
    matches, exact = aligned(a.tokens, b.tokens, most_steps=most)
    pairs = ((match.a + n, match.b + n) for match in matches for n in range(match.length))
    n_other = sum(a.ids[i] != b.ids[j] for i, j in pairs)
    return TextDifference(family, sequence, len(a.tokens), len(b.tokens), matches, n_other, exact)


def aligned(
    a: Sequence[Hashable], b: Sequence[Hashable], *, most_steps: int = _MOST_STEPS
) -> tuple[tuple[Match, ...], bool]:
    """The parts that two sequences have in common, in order, and whether they are the longest.

    Beyond `most_steps`, only parts that contain or touch a token unique in both sequences are found.

    >>> aligned("the cat sat".split(), "the dog sat".split())
    ((Match(a=0, b=0, length=1), Match(a=2, b=2, length=1)), True)
    """
    first = _common(a, b)
    last = _common(a[first:][::-1], b[first:][::-1])
    inner_a, inner_b = a[first : len(a) - last], b[first : len(b) - last]
    exact = _worst_steps(inner_a, inner_b) <= most_steps
    inner = _longest(inner_a, inner_b) if exact else _anchored(inner_a, inner_b)
    matches = [Match(0, 0, first), *(Match(m.a + first, m.b + first, m.length) for m in inner)]
    return tuple(_joined([*matches, Match(len(a) - last, len(b) - last, last)])), exact


def _common(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _worst_steps(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """The most steps of difflib: all pairs of equal tokens, for each part that it finds."""
    counts = Counter(b)
    return sum(n * counts[token] for token, n in Counter(a).items()) * min(len(a), len(b))


def _longest(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Match]:
    return [Match(*block) for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()]


def _anchored(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Match]:
    """Matches grown from tokens that are unique in both sequences and in the same order.

    Source: "patience diff", Bram Cohen 2010, https://bramcohen.livejournal.com/73318.html, without its recursion.
    """
    ends = ((-1, -1), *_rising(_single_pairs(a, b)), (len(a), len(b)))
    matches = []
    for (a0, b0), (a1, b1) in pairwise(ends):
        inner_a, inner_b = a[a0 + 1 : a1], b[b0 + 1 : b1]
        after = _common(inner_a, inner_b)
        before = _common(inner_a[after:][::-1], inner_b[after:][::-1])
        matches += [Match(max(a0, 0), max(b0, 0), after + (a0 >= 0)), Match(a1 - before, b1 - before, before)]
    return matches


def _single_pairs(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    n_a, n_b = Counter(a), Counter(b)
    places = {token: place for place, token in enumerate(b) if n_b[token] == 1}
    return [(place, places[token]) for place, token in enumerate(a) if n_a[token] == 1 and token in places]


def _rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest subsequence of pairs whose second numbers rise. The first numbers rise already."""
    tops: list[int] = []
    top_of: list[int] = []
    before: list[int] = []
    for number, (_, b) in enumerate(pairs):
        place = bisect_left(tops, b)
        before.append(top_of[place - 1] if place else -1)
        tops[place : place + 1], top_of[place : place + 1] = [b], [number]
    chain, number = [], top_of[-1] if top_of else -1
    while number >= 0:
        chain.append(pairs[number])
        number = before[number]
    return chain[::-1]


def _joined(matches: Sequence[Match]) -> Iterator[Match]:
    """The matches without empty ones, with adjacent ones merged."""
    last = Match(0, 0, 0)
    for match in matches:
        if (last.a + last.length, last.b + last.length) == (match.a, match.b):
            last = Match(last.a, last.b, last.length + match.length)
        elif match.length:
            yield from [last] if last.length else []
            last = match
    yield from [last] if last.length else []
