"""The layers of two records compared: their sites, which are the arrays and steps that both have,
and their heads. Differences are B − A; a non-finite number is None.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
from msgspec.structs import replace as changed

from mhacli.io.data import Array, finite
from mhacli.record.fits import OF_MASK, OF_STATISTICS, axes_of
from mhacli.record.heads import FOR_ALL_HEADS, STATISTICS, HeadStatistics
from mhacli.record.record import Record, Step, TensorSummary
from mhacli.record.sites import SITES
from mhacli.text.align import pairs
from mhacli.text.tokens import TokenSequence

from .result import (
    CellPlace,
    FormulaChange,
    HeadChange,
    HeadGap,
    LayerDifference,
    SiteDifference,
    StatisticChange,
)

_FOLLOWED_BY = {"qk": [*OF_MASK], "scores": [*OF_STATISTICS][:2], "pattern": [*OF_STATISTICS][2:]}
_ORDER = tuple(name for site in SITES for name in (site, *_FOLLOWED_BY.get(site, ())))
"""Every array by name in the order of execution: the mask before the scores, and statistics after
the pattern."""
_MATCHED = {axis for axes in {**OF_MASK, **OF_STATISTICS}.values() for axis in axes}
_MADE_OF = {"query block": "block", "step": "steps", "asked query": "kept", "corner query": "kept"}
"""Axes of statistics, and the field of the summary that says for what their cells stand."""


def is_statistic(site: SiteDifference) -> bool:
    """Whether it is no site of the computation."""
    return site.site in OF_STATISTICS


def alone(a: Collection[str], b: Collection[str]) -> tuple[list[str], list[str]]:
    """What A alone has, and what B alone."""
    return [each for each in a if each not in b], [each for each in b if each not in a]


def labels_of(record: Record) -> list[str]:
    """The label of each layer, empty for a record without layers; several attentions of a layer are
    numbered.
    """
    if record.model is None:
        return [""]
    labels = list[str]()
    names = [layer.label for layer in record.layers]
    for index, name in enumerate(names):
        n_before = names[:index].count(name)
        labels.append(f"{name}, attention {n_before + 1}" if n_before else name)
    return labels


@dataclass(frozen=True)
class LayerPair:
    """The records of one layer, or the whole records if they have no layers, and the tolerance;
    whether their masks can be compared, which are not known of weights as given, and whether their
    statistics are of the same tokens.
    """

    a: Record
    b: Record
    tolerance: float
    has_masks: bool
    are_measured_alike: bool

    @property
    def records(self) -> tuple[Record, Record]:
        """Both."""
        return self.a, self.b

    @property
    def is_code(self) -> bool:
        """Whether both are traces of user code, whose axes have words of their own."""
        return self.a.module is not None and self.b.module is not None

    @property
    def texts(self) -> dict[str, list[tuple[TokenSequence, TokenSequence]]]:
        """The texts of the queries and of the keys that both have."""
        sides = {"query": (self.a.sequences, self.b.sequences), "key": (self.a.keys, self.b.keys)}
        return {axis: [*zip(*both, strict=False)] for axis, both in sides.items()}

    @cached_property
    def places(self) -> dict[str, list[Array]]:
        """The positions of the tokens of queries and of keys that correspond, `[2, tokens]` for
        each sequence.
        """
        return {
            axis: [pairs(x.tokens, y.tokens) for x, y in texts]
            for axis, texts in self.texts.items()
        }

    @cached_property
    def has_same_tokens(self) -> bool:
        """Whether the texts that both have are the same."""
        return all(x.tokens == y.tokens for texts in self.texts.values() for x, y in texts)

    @property
    def heads_of_both(self) -> list[tuple[HeadStatistics, HeadStatistics]]:
        """The heads with statistics in both records; none if the numbers of heads differ, or the
        masks or tokens of the statistics.
        """
        has_same = self.has_masks and self.are_measured_alike
        if self.a.config.n_heads != self.b.config.n_heads or not has_same:
            return []
        of_b = {head.head: head for head in self.b.heads}
        return [(head, of_b[head.head]) for head in self.a.heads if head.head in of_b]

    def difference(self, label: str) -> LayerDifference:
        """What differs: the sites in order, which are arrays of either and steps that both have, of
        user code also steps of one alone; and the heads that changed. The ids of a text are
        compared with its tokens.
        """
        arrays = [[name for name in _ORDER if name in each.arrays] for each in self.records]
        heads = [_changed_head(label, *both, self.tolerance) for both in self.heads_of_both]
        sites = [site for site in self._sites() if (site.site, site.status) != ("ids", "skipped")]
        return LayerDifference(label, sites, [*filter(None, heads)], *alone(*arrays))

    def _sites(self) -> Iterator[SiteDifference]:
        """The comparison of each site in order."""
        a, b = ({step.site: step for step in record.trace} for record in self.records)
        if self.a.decoding is not None or self.b.decoding is not None:
            a = b = {}
        steps = a.keys() | b.keys() if self.is_code else a.keys() & b.keys()
        names = [name for name in a | b if name in steps and (self.is_code or name not in _ORDER)]
        for name in dict.fromkeys((*names, *_ORDER)):
            is_step = name in steps
            if is_step or any(name in record.arrays for record in self.records):
                x, y = (
                    _stored(record, name, trace.get(name) if is_step else None)
                    for record, trace in zip(self.records, (a, b), strict=True)
                )
                yield _compared_site(self, name, x, y)


# -------------------------------------------------------------------------------------------- heads


_CHANGES = sorted(
    STATISTICS, key=lambda row: (not row.is_change, row.is_change and row.unit != "weight")
)
"""The statistics in the order of listing changes: those that measure how far a head changed come
first."""


def change_of(a: float | None, b: float | None) -> float:
    """The size of a change; infinite if only one record has a value, 0 if neither has."""
    if a is None or b is None:
        return 0.0 if a == b else math.inf
    return abs(b - a)


def _changed_head(
    label: str, a: HeadStatistics, b: HeadStatistics, tolerance: float
) -> HeadChange | None:
    """How a head of a layer changed, None if it did not."""
    statistics = list[StatisticChange]()
    size = 0.0
    for row in _CHANGES:
        before, after = getattr(a, row.field), getattr(b, row.field)
        change = change_of(before, after)
        if change > tolerance * max(1.0, abs(before or 0.0), abs(after or 0.0)):
            statistics.append(StatisticChange(row.field, before, after))
            if row.is_change or math.isinf(change):
                size = max(size, change)
    if not statistics and a.kind == b.kind:
        return None
    return HeadChange(label, a.head, a.kind, b.kind, finite(size), statistics)


# -------------------------------------------------------------------------------------------- sites


class _StoredSite(NamedTuple):
    """The axes of a site in a record, its shape, its numbers as far as they are known, and what its
    trace says of them; and the formula of user code.
    """

    axes: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    numbers: Array | None = None
    summary: TensorSummary | None = None
    formula: str | None = None


def _stored(record: Record, name: str, step: Step | None) -> _StoredSite:
    """A site of a record, an array or a step of its trace; empty if the record lacks it."""
    stored = _StoredSite()
    if step is not None:
        formula = step.formula if step.operation else None
        stored = _StoredSite(step.axes, step.shape, None, step.values, formula)
    array = record.arrays.get(name)
    if array is not None:
        return stored._replace(axes=axes_of(name, record.dims), shape=array.shape, numbers=array)
    if stored.summary is None or stored.summary.numbers is None or stored.shape is None:
        return stored
    return stored._replace(numbers=np.array(stored.summary.numbers, float).reshape(stored.shape))


def _compared_site(pair: LayerPair, name: str, x: _StoredSite, y: _StoredSite) -> SiteDifference:
    """The comparison of a site, and of the formulas of user code."""
    row = _by_numbers(pair, name, x, y)
    if x.formula is None or y.formula is None or x.formula == y.formula:
        return row
    status = "shape" if row.status == "shape" else "beyond"
    return changed(row, status=status, told=[FormulaChange(x.formula, y.formula)])


def _by_numbers(pair: LayerPair, name: str, x: _StoredSite, y: _StoredSite) -> SiteDifference:
    """The comparison of a site: of all numbers if both are known, else of extremes and moments.
    Shapes alone are no comparison, unless they differ.
    """
    is_array = all(name in record.arrays for record in pair.records)
    seen: Literal["array", "shape"] = "array" if is_array else "shape"
    why = _why_not_compared(x, y)
    row = SiteDifference(name, seen, "skipped", x.axes or y.axes, x.shape, y.shape, why=why)
    if name in OF_MASK and not pair.has_masks:
        return changed(row, why="the mask of weights as given is not known")
    if None in (x.shape, y.shape) and not pair.is_code:
        return row
    other = _other_shape(pair, row, y.axes)
    if other:
        return changed(row, status="shape", why=other)
    can_match = is_array or (x.shape == y.shape and pair.has_same_tokens)
    if can_match and x.axes == y.axes and x.numbers is not None and y.numbers is not None:
        row = changed(row, seen="array" if is_array else "numbers", why="")
        row = _with_all_numbers(pair, row, (x.numbers, y.numbers))
    elif can_match and not is_array and x.summary is not None and y.summary is not None:
        row = changed(row, seen="extremes", why="only min, max, mean and std")
        of_a, of_b = (
            np.array([each.min, each.max, each.mean, each.std], float)
            for each in (x.summary, y.summary)
        )
        row = _with_numbers(row, [_MatchedCells(of_a, of_b)], pair.tolerance)
        row = changed(row, status="within" if row.status == "identical" else row.status)
    if row.seen in ("numbers", "extremes") and _has_other_nonfinite(x, y):
        return changed(row, status="beyond")
    return row


def _has_other_nonfinite(x: _StoredSite, y: _StoredSite) -> bool:
    """Whether the traces count other numbers that are not finite."""
    summaries = [each.summary for each in (x, y) if each.summary is not None]
    return len({(each.n_nan, each.n_inf) for each in summaries}) > 1


def _why_not_compared(x: _StoredSite, y: _StoredSite) -> str:
    """Why the numbers of a site cannot be compared, by the records that have any."""
    known = [
        letter
        for letter, site in (("A", x), ("B", y))
        if site.numbers is not None or site.summary is not None
    ]
    if len(known) == 1:
        return f"numbers in {known[0]} alone"
    return "numbers of other tokens or of another kind" if known else "numbers in neither record"


def _with_all_numbers(
    pair: LayerPair, row: SiteDifference, arrays: tuple[Array, Array]
) -> SiteDifference:
    """The comparison of a site whose numbers both records have."""
    is_mask = row.site in ("visible", "allowed")  # a count or a mask is the same, or it is not
    cells = _cells(pair, row.site, row.axes, arrays)
    row = _with_numbers(row, cells, 0.0 if is_mask else pair.tolerance)
    if not row.n_cells:
        row = changed(row, status="skipped", why="they have no cells in common", heads=[])
    if is_mask or not row.n_cells:
        row = changed(row, largest=None, magnitude=None, relative=None)
    return row


def _other_shape(pair: LayerPair, row: SiteDifference, axes_b: tuple[str, ...]) -> str:
    """Why two shapes differ, empty if they do not. Padding decides whether sequences have positions
    in common, so a batch is excused.
    """
    if row.shape_a is None or row.shape_b is None:
        return f"only {'B' if row.shape_a is None else 'A'} has it"
    axes_a = [axis for axis in row.axes if axis != "batch"]
    if axes_a != [axis for axis in axes_b if axis != "batch"]:
        return f"axes {' '.join(row.axes)} against {' '.join(axes_b)}"
    excused = {"batch"} if pair.is_code else _MATCHED
    a = dict(zip(row.axes, row.shape_a, strict=True))
    b = dict(zip(axes_b, row.shape_b, strict=True))
    sizes = {axis: (n, b[axis]) for axis, n in a.items() if axis not in excused}
    if "head" in a and row.site not in FOR_ALL_HEADS:
        sizes = {"head": (pair.a.config.n_heads, pair.b.config.n_heads)} | sizes
    return next((f"{axis} {n} against {m}" for axis, (n, m) in sizes.items() if n != m), "")


class _MatchedAxis(NamedTuple):
    """The cells along an axis that correspond in A and in B, `[2, cells]`: their places, as they
    are named, and their indices in the arrays. An axis without a name stands for all heads.
    """

    name: str
    places: Array
    indices: Array


class _MatchedCells(NamedTuple):
    """Some cells of both records: their numbers, the sequence and the head, None for all heads,
    their axes, and which of them count.
    """

    a: Array
    b: Array
    sequence: int = 0
    head: int | None = None
    axes: Sequence[_MatchedAxis] = ()
    counted: Array | bool = True


def _cells(
    pair: LayerPair, name: str, axes: Sequence[str], arrays: tuple[Array, Array]
) -> Iterator[_MatchedCells]:
    """The cells of two arrays that correspond, a sequence and a head at a time, which bounds
    memory.
    """
    heads: list[int | None] = [None]  # all at once
    is_one_row = name in FOR_ALL_HEADS and all(array.shape[1] == 1 for array in arrays)
    if "head" in axes and not pair.is_code and not is_one_row:
        heads = [head for head in _heads_of(pair.a) if head in _heads_of(pair.b)]
    sequences = range(len(pair.places["query"]) if "batch" in axes else 1)
    has_masks = all("allowed" in record.arrays for record in pair.records)
    for sequence, head in product(sequences, heads):
        sizes = zip(axes, arrays[0].shape, strict=True)
        matched = [_axis(pair, axis, n, sequence, head) for axis, n in sizes]
        counted: Array | bool = True
        if has_masks and name in ("qk", "scores"):  # scores of masked cells have no meaning
            masks = (record.arrays["allowed"] for record in pair.records)
            counted = np.logical_and(*_chosen(masks, matched))
        x, y = _chosen(arrays, matched)
        yield _MatchedCells(x, y, sequence, head, matched, counted)


def _axis(pair: LayerPair, axis: str, n: int, sequence: int, head: int | None) -> _MatchedAxis:
    """What corresponds along an axis: tokens, the one sequence and head, or all cells of the same
    meaning.
    """
    if axis == "batch":
        return _alike("sequence", np.array([sequence]))
    if axis == "head" and not pair.is_code:
        if head is None:
            return _alike("", np.array([0]))
        indices = [[_heads_of(record).index(head)] for record in pair.records]
        return _MatchedAxis("head", np.full((2, 1), head), np.array(indices))
    if axis in ("query", "key") and not pair.is_code:
        places = pair.places[axis][sequence]
        firsts = [
            [record.first_query(sequence) if axis == "query" else record.first_key(sequence)]
            for record in pair.records
        ]
        return _MatchedAxis(axis, places, places + np.array(firsts))
    is_same = True
    if axis == "span":
        is_same = [span.name for span in pair.a.spans] == [span.name for span in pair.b.spans]
    elif axis in _MADE_OF:
        a, b = (getattr(record.survey, _MADE_OF[axis], None) for record in pair.records)
        is_same = a == b and (pair.has_same_tokens or axis == "step")
    return _alike(axis, np.arange(n if is_same else 0))


def _alike(axis: str, numbers: Array) -> _MatchedAxis:
    """The cells with these numbers in both records."""
    places = np.tile(numbers, (2, 1))
    return _MatchedAxis(axis, places, places)


def _chosen(arrays: Iterable[Array], axes: Sequence[_MatchedAxis]) -> Iterator[Array]:
    """The numbers of the arrays of A and of B; one row may stand for all heads."""
    for side, array in enumerate(arrays):
        sizes = zip(axes, array.shape, strict=True)
        yield array[np.ix_(*(np.minimum(axis.indices[side], n - 1) for axis, n in sizes))]


def _heads_of(record: Record) -> list[int]:
    """The numbers of the heads on the head axis of a layer's arrays."""
    if record.survey:
        return [head.head for head in record.heads]
    return [*range(record.config.n_heads)]


def _with_numbers(
    row: SiteDifference, pieces: Iterable[_MatchedCells], tolerance: float
) -> SiteDifference:
    """The comparison of a site by numbers, piece by piece: how many differ, by how much, where, and
    by head.
    """
    n = Counter[str]()
    largest = magnitude = worst = 0.0
    at: CellPlace | None = None
    is_identical = True
    heads = dict[int, HeadGap]()
    for cells in pieces:
        index = np.flatnonzero(np.broadcast_to(cells.counted, cells.a.shape))
        x, y = (numbers.ravel()[index].astype(np.float64) for numbers in (cells.a, cells.b))
        with np.errstate(over="ignore", invalid="ignore"):
            gaps = np.nan_to_num(np.abs(y - x), nan=np.inf, posinf=np.inf)
        gaps[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
        is_identical &= x.tobytes() == y.tobytes()
        differing = {"n_different": gaps, "n_nonfinite": np.isinf(gaps)}
        if cells.a.dtype == bool:
            differing |= {"n_only_a": x > y, "n_only_b": x < y}
        n.update({name: int(np.count_nonzero(each)) for name, each in differing.items()})
        n["n_cells"] += x.size
        largest = max(largest, _largest(gaps))
        magnitude = max(magnitude, _largest(np.maximum(np.abs(x), np.abs(y))))
        gap = float(gaps.max(initial=0.0))
        if gap > worst:
            worst, at = gap, _place(cells, int(index[gaps.argmax()]))
        if cells.head is not None:
            of_head = heads.get(cells.head)
            if of_head is None or (of_head.largest is not None and gap > of_head.largest):
                heads[cells.head] = HeadGap(cells.head, finite(gap), cells.sequence)
    is_within = tolerance > 0 and largest <= tolerance * magnitude and not n["n_nonfinite"]
    status = "within" if is_within else "beyond"
    return changed(
        row,
        status="identical" if is_identical else status,
        **n,
        largest=largest,
        magnitude=magnitude,
        relative=largest / (magnitude or 1.0),
        at=at,
        heads=[heads[head] for head in sorted(heads)],
    )


def _largest(numbers: Array) -> float:
    """The largest finite number; 0 without one."""
    return float(numbers.max(initial=0.0, where=np.isfinite(numbers)))


def _place(cells: _MatchedCells, index: int) -> CellPlace | None:
    """The place of a cell by the names of its axes, in A and in B; None without axes."""
    numbers = np.unravel_index(index, cells.a.shape)
    named = [(axis, n) for axis, n in zip(cells.axes, numbers, strict=False) if axis.name]
    if not named:
        return None
    of_a, of_b = ([int(axis.places[side, n]) for axis, n in named] for side in (0, 1))
    return CellPlace([axis.name for axis, _ in named], of_a, of_b)
