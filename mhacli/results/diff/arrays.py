"""Two arrays of one site compared cell by cell, in pieces: the largest difference, where it is, and what is not equal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mhacli.results.diff.axes import Axis, Pair, Unlike
from mhacli.results.diff.result import HeadLargest, Place, SiteDifference, Status
from mhacli.results.record.arrays import Array

_PIECE = 1 << 16
"""Cells that are compared at once: the eight or so arrays of float64 that this takes stay in a core's cache: half the time."""
_ONLY_WHERE_ALLOWED = ("qk", "scores")
_EXACT = ("ids", "visible", "allowed")
_INDICES = ("strongest_key", "top_keys")
"""Keys by their columns. Of two keys that get nearly the same rounding names one, so that these never depart by themselves."""


def compared_site(name: str, pair: Pair, tolerance: float) -> SiteDifference:
    """What becomes of an array that both records hold."""
    a, b = (side.record.arrays[name] for side in (pair.a, pair.b))
    axes = pair.a.axes(name)
    unlike = pair.layout(name)
    if unlike is not None:
        return _not_compared(name, axes, (a, b), unlike)
    tally = Tally()
    has_batch = "batch" in axes
    for sequence in range(pair.n_sequences if has_batch else 1):
        own = pair.cells(name, sequence)
        both = (a[sequence], b[sequence]) if has_batch else (a, b)
        _count_sequence(tally, name, pair, sequence=sequence, axes=own, both=both)
    if tally.n_cells == 0:
        return _not_compared(name, axes, (a, b), Unlike("no cell belongs to the same tokens", departs=False))
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
        why="near-equal keys may change places by rounding alone" if name in _INDICES and tally.n_different else "",
        heads=tally.by_head(),
    )


def _not_compared(name: str, axes: tuple[str, ...], both: tuple[Array, Array], unlike: Unlike) -> SiteDifference:
    status: Status = "shape" if unlike.departs else "skipped"
    return SiteDifference(name, "array", status, axes, both[0].shape, both[1].shape, why=unlike.why)


def _status(name: str, tally: Tally, tolerance: float) -> Status:
    if tally.is_identical:
        return "identical"
    if name in _INDICES:
        return "beyond" if tolerance == 0 else "skipped"
    if name in _EXACT or tally.n_nonfinite:
        return "beyond"
    return "within" if tolerance > 0 and tally.largest <= tolerance * tally.magnitude else "beyond"


@dataclass
class Tally:
    """What has been seen of a site so far."""

    n_cells: int = 0
    n_different: int = 0
    n_nonfinite: int = 0
    n_only_a: int = 0
    n_only_b: int = 0
    largest: float = 0.0
    magnitude: float = 0.0
    is_identical: bool = True
    at: Place | None = None
    first_nonfinite: Place | None = None
    _heads: dict[int, HeadLargest] = field(default_factory=dict)

    def add_head(self, head: int, largest: float, sequence: int) -> None:
        """The largest difference of a head in a piece; NaN where a number is not finite in one alone."""
        known = self._heads.get(head)
        rank = math.inf if math.isnan(largest) else largest
        if known is None or (known.largest is not None and rank > known.largest):
            self._heads[head] = HeadLargest(head, None if math.isinf(rank) else rank, sequence)

    def by_head(self) -> tuple[HeadLargest, ...]:
        """The largest difference of each head, in their order."""
        return tuple(self._heads[head] for head in sorted(self._heads))


def _count_sequence(
    tally: Tally, name: str, pair: Pair, *, sequence: int, axes: Sequence[Axis], both: tuple[Array, Array]
) -> None:
    """Adds the cells of one sequence, piece by piece."""
    allowed = _allowed(pair, sequence) if name in _ONLY_WHERE_ALLOWED else None
    for piece in _pieces(axes):
        a, b = _cut(both[0], [axis.a for axis in piece]), _cut(both[1], [axis.b for axis in piece])
        if name in _INDICES:
            a, b = _as_places(a, b, pair, sequence)
        counted = None if allowed is None else _both_allowed(allowed, piece)
        _count(tally, a, b, sequence=sequence, axes=piece, counted=counted)


def _count(tally: Tally, a: Array, b: Array, *, sequence: int, axes: Sequence[Axis], counted: Array | None) -> None:
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


def _count_heads(tally: Tally, distance: Array, axes: Sequence[Axis], sequence: int) -> None:
    if axes[0].word != "head" or not distance.size:
        return
    per_head = distance.reshape(len(distance), -1).max(axis=1)
    for head, largest in zip(axes[0].names_a.tolist(), per_head.tolist(), strict=True):
        if head >= 0:  # a mask may be one for all heads
            tally.add_head(head, largest, sequence)


def _place(flat: int, shape: tuple[int, ...], axes: Sequence[Axis], sequence: int) -> Place:
    indices = np.unravel_index(flat, shape)
    named = [
        (axis, int(i)) for axis, i in zip(axes, indices, strict=True) if axis.names_a[i] >= 0 or axis.word != "head"
    ]
    return Place(
        axes=("sequence", *(axis.word for axis, _ in named)),
        a=(sequence, *(int(axis.names_a[i]) for axis, i in named)),
        b=(sequence, *(int(axis.names_b[i]) for axis, i in named)),
    )


# --------------------------------------------------------------------------------------------------------------------- cells


def _pieces(axes: Sequence[Axis]) -> Iterator[list[Axis]]:
    """The axes cut so that a piece has few cells: along the first, and where one step of it has too many along the second."""
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


def _part(axis: Axis, start: int, count: int) -> Axis:
    cut = slice(start, start + count)
    return Axis(axis.word, axis.a[cut], axis.b[cut], axis.names_a[cut], axis.names_b[cut])


def _cut(array: Array, indices: Sequence[Array]) -> Array:
    """The cells at these indices of every axis; neighbours are cut out without a copy."""
    if all(index[-1] - index[0] + 1 == index.size for index in indices):
        cut: Array = array[tuple(slice(int(index[0]), int(index[-1]) + 1) for index in indices)]
        return cut
    found: Array = array[np.ix_(*indices)]
    return found


def _allowed(pair: Pair, sequence: int) -> tuple[Array, Array] | None:
    arrays = [side.record.arrays.get("allowed") for side in (pair.a, pair.b)]
    return None if arrays[0] is None or arrays[1] is None else (arrays[0][sequence], arrays[1][sequence])


def _both_allowed(allowed: tuple[Array, Array], piece: Sequence[Axis]) -> Array:
    """Which cells of a piece both records allow: others hold no score that means anything."""
    cut = []
    for own, name in zip(allowed, ("a", "b"), strict=True):
        head, *rest = (getattr(axis, name) for axis in piece)
        cut.append(_cut(own, [head if own.shape[0] > 1 else np.zeros(1, int), *rest]))
    counts = [axis.a.size for axis in piece]
    both: Array = np.broadcast_to(cut[0] & cut[1], counts)
    return both


def _as_places(a: Array, b: Array, pair: Pair, sequence: int) -> tuple[Array, Array]:
    """Columns of keys as tokens of A, so that a token equals itself and what replaced it; what A does not have is no place."""
    first_a, first_b = (side.record.first_key(sequence) for side in (pair.a, pair.b))
    text = pair.keys[sequence]
    place_in_a = np.full(text.n_b, -2)
    for match in text.compared:
        place_in_a[match.b : match.b + match.length] = np.arange(match.a, match.a + match.length)
    inside = (b >= first_b) & (b < first_b + text.n_b)
    moved = np.where(inside, place_in_a[np.clip(b - first_b, 0, text.n_b - 1)], np.where(b < 0, -1, -2))
    return np.where(a < 0, -1, a - first_a), moved
