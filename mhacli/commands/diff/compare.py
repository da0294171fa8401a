"""Compares two records: texts, sites, steps, heads, effects, settings. `diff` is the Python function."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mhacli.commands.diff.result import (
    AFTER_SCORES,
    MASK,
    OF_PATTERN,
    PATTERN_SITES,
    Difference,
    EffectChange,
    EffectDifference,
    HeadChange,
    HeadLargest,
    LayerDifference,
    Place,
    RecordDiff,
    Setting,
    StatisticChange,
    Status,
    TextDifference,
    TokenFamily,
)
from mhacli.errors import UsageError
from mhacli.record.arrays import Array
from mhacli.record.checks import TOLERANCES
from mhacli.record.effect import Effect
from mhacli.record.heads import FOR_ALL_HEADS, PER_QUERY, STATISTICS
from mhacli.record.record import InspectedLayer, Record, Step, TensorSummary
from mhacli.record.storage import load
from mhacli.sites import SITES
from mhacli.text.align import MOST_STEPS, align
from mhacli.text.tokens import TokenSequence

Texts = tuple[TokenSequence, ...]
_FOLLOWED_BY = {"qk": MASK, "scores": AFTER_SCORES, "pattern": OF_PATTERN}
ORDER = tuple(name for site in SITES for name in (site, *_FOLLOWED_BY.get(site, ())))
"""Every array by name in the order of execution: the mask before the scores, and statistics after the pattern."""
_AXES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*PER_QUERY, "visible", "strongest_key"), ("batch", "head", "query")),
    **dict.fromkeys(("received", "uniform_received"), ("batch", "head", "key")),
    **dict.fromkeys(("map", "uniform_map"), ("batch", "head", "query block", "key block")),
    **dict.fromkeys(("profile", "uniform_profile"), ("batch", "head", "step")),
    **dict.fromkeys(("span_mass", "uniform_span_mass"), ("batch", "head", "span", "spans")),
    **dict.fromkeys(("top_keys", "top_shares"), ("batch", "head", "asked query", "rank")),
    "corner": ("batch", "head", "corner query", "corner key"),
    "allowed": ("batch", "head", "query", "key"),
}
_BY_TOKENS = ("query", "key", "query block", "key block")
_COUNTED = {"batch": "sequences", "head": "heads", "kv_head": "kv heads", "query": "queries", "key": "keys"}
"""Axes whose length is a count, with the noun to count."""
_PIECE = 1 << 16
"""The most cells compared at a time, so that the arrays involved stay in a processor's cache."""
_ONLY_WHERE_ALLOWED = ("qk", "scores")
_EXACT = ("ids", "visible", "allowed")
_INDICES = ("strongest_key", "top_keys")
"""Arrays of key indices. Rounding decides between keys of nearly equal weight, so these differ only if weights do."""
_WEIGHTS = ("pattern", "map", "entropy", "top_shares")
"""The arrays that show whether the weights behind the indices differ by more than rounding."""


def diff(a: Record | str, b: Record | str, *, tolerance: float | None = None) -> RecordDiff:
    """The differences of `b` from `a`, as `mha diff` prints them. Each is a record or the path of one.

    `tolerance` is relative to the largest number of a site. 0 demands equal bits; None takes the tolerance of the
    coarser dtype. Raises `MhaError` for a file that is no record.
    """
    if tolerance is not None and tolerance < 0:
        raise UsageError(f"tolerance {tolerance:g} is negative: the least is 0")
    names = a if isinstance(a, str) else "the first record", b if isinstance(b, str) else "the second record"
    first, second = (load(record) if isinstance(record, str) else record for record in (a, b))
    return compare(first, second, names, tolerance=tolerance)


def compare(a: Record, b: Record, names: tuple[str, str], *, tolerance: float | None = None) -> RecordDiff:
    """The differences of B from A. For `tolerance` see `diff`."""
    dtypes = {record.config.dtype if record.model is None else record.model.dtype for record in (a, b)}
    coarser = next((name for name in TOLERANCES if name in dtypes), "float32")
    allowed = TOLERANCES[coarser].runs if tolerance is None else tolerance
    texts = (*_texts("texts", a.sequences, b.sequences),)
    texts += (*_texts("context", a.keys, b.keys),) if a.context is not None or b.context is not None else ()
    has_same_tokens = len(a.sequences) == len(b.sequences) and all(text.is_same for text in texts)
    pairs = [*_layer_pairs(a, b, texts)]
    has_trace = len(pairs) == 1 and a.decoding is None and b.decoding is None  # steps of decoding are not sites
    scales = {row.field: _scale(pairs, row.field) for row in CHANGES}
    return RecordDiff(
        a=a,
        b=b,
        names=names,
        tolerance=allowed,
        dtype=coarser if tolerance is None else None,
        settings=(*_different_settings(a, b), *_settings_of_layers(pairs)),
        alike=_same_settings(a, b),
        texts=texts,
        layers=tuple(
            _compared_layer(pair, allowed, scales, has_trace=has_trace, has_same_tokens=has_same_tokens)
            for pair in pairs
        ),
        only_a=_labels_alone(a, b),
        only_b=_labels_alone(b, a),
        effects=_compared_effects(a, b, texts, allowed),
    )


def _texts(family: TokenFamily, a: Texts, b: Texts) -> Iterator[TextDifference]:
    """The aligned texts that both have, paired by number."""
    for number, (x, y) in enumerate(zip(a, b, strict=False)):
        alignment = align(x.tokens, y.tokens, most_steps=MOST_STEPS // min(len(a), len(b)))
        runs = [(m.a + n, m.b + n) for m in alignment.matches for n in range(m.length)]
        yield TextDifference(family, number, x, y, alignment, sum(x.ids[i] != y.ids[j] for i, j in runs))


# ------------------------------------------------------------------------------------------------------------- layers


def _layer_pairs(a: Record, b: Record, texts: Sequence[TextDifference]) -> Iterator[LayerDifference]:
    """The layers of A that B has too, in A's order, not compared yet; for records without layers the whole records."""

    def pair(label: str, x: Record, y: Record, *inspected: InspectedLayer) -> LayerDifference:
        sides = ((x.sequences, y.sequences), (x.keys, y.keys))
        families = ["texts" if of_a == a.sequences and of_b == b.sequences else "context" for of_a, of_b in sides]
        queries, keys = (tuple(text for text in texts if text.family == family) for family in families)
        return LayerDifference(label, x, y, queries, keys, inspected)

    if a.model is None and b.model is None:
        yield pair("", a, b)
    layers_b = _layers(b)
    for key, (label, i) in _layers(a).items():
        if key in layers_b:
            _, j = layers_b[key]
            yield pair(label, a.of_layer(i), b.of_layer(j), a.layers[i], b.layers[j])


def _layers(record: Record) -> dict[tuple[str, int, int], tuple[str, int]]:
    """The unique label and the index of each layer by kind, number and count. A layer may have several attentions of a
    kind."""
    counts, counted = Counter((layer.kind, layer.layer) for layer in record.layers), Counter[tuple[str, int]]()
    layers: dict[tuple[str, int, int], tuple[str, int]] = {}
    for index, layer in enumerate(record.layers):
        place = layer.kind, layer.layer
        label = f"{layer.label}, attention {counted[place] + 1}" if counts[place] > 1 else layer.label
        layers[*place, counted[place]] = label, index
        counted[place] += 1
    return layers


def _labels_alone(a: Record, b: Record) -> tuple[str, ...]:
    layers_b = _layers(b)
    return tuple(label for key, (label, _) in _layers(a).items() if key not in layers_b)


def _compared_layer(
    layer: LayerDifference, tolerance: float, scales: Mapping[str, float], *, has_trace: bool, has_same_tokens: bool
) -> LayerDifference:
    """The comparison of a layer's sites in the order of execution. Steps of a trace stand in for missing arrays."""
    a, b = layer.a, layer.b
    names = [name for name in ORDER if name in a.arrays and name in b.arrays]
    sites = [_compared_array(name, layer, tolerance) for name in names]
    if any(site.departs for site in sites if site.site in _WEIGHTS):  # other keys are then more than rounding
        others = [site.site in _INDICES and site.n_different > 0 for site in sites]
        sites = [
            replace(s, status="beyond", why="") if is_other else s for s, is_other in zip(sites, others, strict=True)
        ]
    n_heads = [len(site.heads) for site in sites if site.site in PATTERN_SITES]
    if has_trace:
        steps = _compared_steps(layer, tolerance, arrays=names, has_same_tokens=has_same_tokens)
        sites = [*_in_order(sites, steps)]
    return replace(
        layer,
        sites=tuple(sites),
        heads=tuple(_changed_heads(layer, scales, tolerance)),
        only_a=_names_alone(a, b, has_trace=has_trace),
        only_b=_names_alone(b, a, has_trace=has_trace),
        n_heads=max([len(layer.head_pairs), *n_heads]),
    )


def _in_order(sites: Sequence[Difference], steps: Iterable[Difference]) -> Iterator[Difference]:
    """The sites in the order of a trace. Arrays without a step follow the site before them."""
    waiting = {site.site: site for site in sites}
    for step in steps:
        rank = ORDER.index(step.site) if step.site in ORDER else -1
        for name in [name for name in waiting if ORDER.index(name) < rank]:
            yield waiting.pop(name)
        with_array = waiting.pop(step.site, None)
        yield step if with_array is None else replace(with_array, told=step.told)
    yield from waiting.values()


# ------------------------------------------------------------------------------------------------------------- arrays


class _Axis(NamedTuple):
    """Matching indices of both records along an axis, with the positions of tokens or the numbers of heads there."""

    word: str
    a: Array
    b: Array
    names_a: Array
    names_b: Array


class _Cells(NamedTuple):
    """What a comparison of two arrays of one shape finds. `counts` are those of `Difference`, from `n_cells` on.

    `ranks` are the largest gaps along the first axis, infinite where only one number is finite, and `at` is the index of
    the largest.
    """

    counts: tuple[int, ...]
    largest: float
    magnitude: float
    ranks: Array
    at: tuple[int, ...]
    is_identical: bool


_Piece = tuple[_Cells, int, list[_Axis]]
"""Cells of a sequence."""


def _measured(a: Array, b: Array, counted: Array | bool = True) -> _Cells:
    """The comparison of the `counted` cells."""
    x, y, where = a.astype(np.float64), b.astype(np.float64), np.broadcast_to(counted, a.shape)
    differs = where & ~((x == y) | (np.isnan(x) & np.isnan(y)))
    other_bits = differs | (where & (x == 0) & (np.signbit(x) != np.signbit(y)))
    finite = where & np.isfinite(x) & np.isfinite(y)
    with np.errstate(over="ignore", invalid="ignore"):
        gaps = np.where(finite, np.abs(y - x), np.where(differs, np.inf, 0.0))
    masks = (differs & (x > y), differs & (x < y)) if a.dtype.kind == "b" else ()
    counts = [int(cells.sum()) for cells in (where, differs, differs & ~finite, *masks)]
    return _Cells(
        counts=(*counts, 0, 0)[:5],
        largest=float(gaps.max(initial=0.0, where=finite)),
        magnitude=float(np.maximum(np.abs(x), np.abs(y)).max(initial=0.0, where=finite)),
        ranks=gaps.reshape(len(gaps), -1).max(axis=1),
        at=tuple(int(i) for i in np.unravel_index(gaps.argmax(), gaps.shape)),
        is_identical=not other_bits.any(),
    )


def _compared_array(name: str, pair: LayerDifference, tolerance: float) -> Difference:
    """The comparison of an array that both records have."""
    a, b = pair.arrays(name)
    row = Difference(name, "array", "skipped", _axes(name, pair.a), a.shape, b.shape)
    unlike = _unlike_arrays(name, pair)
    if unlike is not None:
        return replace(row, status=unlike[0], why=unlike[1])
    pieces = [*_pieces(name, pair)]
    n_cells, n_different, n_nonfinite, n_only_a, n_only_b = (
        sum(cells.counts[i] for cells, *_ in pieces) for i in range(5)
    )
    if not n_cells:
        return replace(row, why="no cells have tokens in common")
    is_measured = name not in (*_EXACT, *_INDICES)
    largest, magnitude = (max(getattr(cells, of) for cells, *_ in pieces) for of in ("largest", "magnitude"))
    status = _status(name, largest <= tolerance * magnitude and not n_nonfinite, tolerance)
    return replace(
        row,
        status="identical" if all(cells.is_identical for cells, *_ in pieces) else status,
        n_cells=n_cells,
        n_different=n_different,
        n_nonfinite=n_nonfinite,
        n_only_a=n_only_a,
        n_only_b=n_only_b,
        largest=largest if is_measured and math.isfinite(largest) else None,
        magnitude=magnitude if is_measured else None,
        at=_place(*max(pieces, key=lambda piece: piece[0].ranks.max())) if n_different else None,
        why="rounding exchanges keys of like weight" if name in _INDICES and n_different else "",
        heads=tuple(_largest_by_head(pieces)),
    )


def _place(cells: _Cells, sequence: int, axes: Sequence[_Axis]) -> Place:
    """The place of the largest gap."""
    named = [
        (axis.word, int(axis.names_a[i]), int(axis.names_b[i]))
        for axis, i in zip(axes, cells.at, strict=True)
        if axis.word != "head" or axis.names_a[i] >= 0
    ]
    words, a, b = zip(("sequence", sequence, sequence), *named, strict=True)
    return Place(words, a, b)


def _status(name: str, is_within: bool, tolerance: float) -> Status:
    """The status of a site that is not identical."""
    if tolerance == 0 or name in _EXACT:
        return "beyond"
    return "skipped" if name in _INDICES else "within" if is_within else "beyond"


def _largest_by_head(pieces: Sequence[_Piece]) -> Iterator[HeadLargest]:
    largest: dict[int, tuple[float, int]] = {}
    for cells, sequence, (first, *_) in pieces:
        if first.word == "head":
            for head, gap in zip(first.names_a.tolist(), cells.ranks.tolist(), strict=True):
                if head >= 0 and gap > largest.get(head, (-1.0, 0))[0]:
                    largest[head] = gap, sequence
    for head, (gap, sequence) in sorted(largest.items()):
        yield HeadLargest(head, gap if math.isfinite(gap) else None, sequence)


def _pieces(name: str, pair: LayerDifference) -> Iterator[_Piece]:
    """The corresponding cells of both records, a sequence and few cells at a time."""
    axes = _axes(name, pair.a)
    has_masks = name in _ONLY_WHERE_ALLOWED and "allowed" in pair.a.arrays and "allowed" in pair.b.arrays
    for sequence in range(len(pair.queries) if "batch" in axes else 1):
        a, b = (array[sequence] if "batch" in axes else array for array in pair.arrays(name))
        for cut in _chunks([_matched(axis, name, pair, sequence) for axis in axes if axis != "batch"]):
            x, y = a[np.ix_(*(axis.a for axis in cut))], b[np.ix_(*(axis.b for axis in cut))]
            if name in _INDICES:
                x, y = _as_tokens_of_a(x, y, pair, sequence)
            counted: Array | bool = True
            if has_masks:  # scores of masked cells have no meaning
                masks = [mask[sequence] for mask in pair.arrays("allowed")]
                head, *rest = cut
                counted = masks[0][np.ix_(np.minimum(head.a, len(masks[0]) - 1), *(axis.a for axis in rest))]
                counted = counted & masks[1][np.ix_(np.minimum(head.b, len(masks[1]) - 1), *(axis.b for axis in rest))]
            yield _measured(x, y, counted), sequence, cut


def _chunks(axes: list[_Axis]) -> Iterator[list[_Axis]]:
    """The axes cut, along as few as possible, into parts with few cells."""
    first, *rest = axes
    n_rest = math.prod(axis.a.size for axis in rest)
    n_rows = max(1, _PIECE // max(1, n_rest))
    for start in range(0, first.a.size if n_rest else 0, n_rows):
        cut = _Axis(first.word, *(indices[start : start + n_rows] for indices in first[1:]))
        yield from ([cut, *part] for part in (_chunks(rest) if n_rest > _PIECE else [rest]))


def _as_tokens_of_a(a: Array, b: Array, pair: LayerDifference, sequence: int) -> tuple[Array, Array]:
    """Key indices as tokens of A, so that a token equals itself and its replacement. Tokens that A lacks have no index."""
    text, first_b = pair.keys[sequence].alignment, pair.b.first_key(sequence)
    place_in_a = np.full(text.n_b, -2)
    for i, j in text.pairs:
        place_in_a[j] = i
    inside = (b >= first_b) & (b < first_b + text.n_b)
    moved = np.where(inside, place_in_a[np.clip(b - first_b, 0, text.n_b - 1)], np.where(b < 0, -1, -2))
    return np.where(a < 0, -1, a - pair.a.first_key(sequence)), moved


# --------------------------------------------------------------------------------------------------------------- axes


def _axes(name: str, record: Record) -> tuple[str, ...]:
    return _AXES[name] if name in _AXES else SITES[name].axes_for(record.facts)


def heads_of(record: Record) -> list[int]:
    """The numbers of the heads on the head axis of a layer's arrays."""
    return [head.head for head in record.heads] if record.survey else [*range(record.config.n_heads)]


def _unlike_arrays(name: str, pair: LayerDifference) -> tuple[Status, str] | None:
    """Why an array that both have cannot be compared, and whether that is a difference; None if it can."""
    axes, shapes = _axes(name, pair.a), [array.shape for array in pair.arrays(name)]
    unlike = _unlike_axes(axes, _axes(name, pair.b)) or (_unlike_summaries(axes, pair) if name in _AXES else None)
    if unlike is not None:
        return unlike
    sizes = [size for size in zip(axes, *shapes, strict=True) if size[0] not in (*_BY_TOKENS, "batch", "head")]
    is_for_all = name in FOR_ALL_HEADS and all(shape[axes.index("head")] == 1 for shape in shapes)
    has_heads = "head" in axes and not is_for_all
    sizes += [("head", pair.a.config.n_heads, pair.b.config.n_heads)] if has_heads else []
    for axis, n_a, n_b in sizes:
        if n_a != n_b:
            return "shape", _sizes_text(axis, n_a, n_b)
    has_common = not has_heads or {*heads_of(pair.a)} & {*heads_of(pair.b)}
    return None if has_common else ("skipped", "the records hold different heads")


def _unlike_axes(a: Sequence[str], b: Sequence[str]) -> tuple[Status, str] | None:
    """Why arrays with these axes cannot be compared. Padding and documents decide whether sequences share positions, so
    a missing batch is no difference."""
    is_same = [axis for axis in a if axis != "batch"] == [axis for axis in b if axis != "batch"]
    why = f"axes {' '.join(a)} against {' '.join(b)}"
    return None if tuple(a) == tuple(b) else ("skipped" if is_same else "shape", why)


def _unlike_summaries(axes: Sequence[str], pair: LayerDifference) -> tuple[Status, str] | None:
    """Why summaries cannot be compared: blocks, distances, spans and chosen cells must be the same."""
    a, b = pair.a.survey, pair.b.survey
    if a is None or b is None:
        return None
    spans = [[span.name for span in record.spans] for record in (pair.a, pair.b)]
    has_same_tokens = all(text.is_same for text in (*pair.queries, *pair.keys))
    moved = "" if has_same_tokens else "its positions hold other tokens"
    is_kept = (a.kept.queries, a.kept.top) == (b.kept.queries, b.kept.top)
    reasons = {
        "query block": f"blocks of {a.block} against {b.block} tokens" if a.block != b.block else "",
        "step": "the records hold different distances" if a.steps != b.steps else "",
        "span": "the records hold different spans" if spans[0] != spans[1] else "",
        "asked query": moved if is_kept else "the records hold rows of different queries",
        "corner query": moved if a.kept.corner == b.kept.corner else "the records hold different parts of the pattern",
    }
    return next((("skipped", reasons[axis]) for axis in axes if reasons.get(axis)), None)


def _sizes_text(axis: str, a: int, b: int) -> str:
    """Two lengths of an axis: `4 kv heads against 2`, `d_head 16 against 32`."""
    return f"{a} {_COUNTED[axis]} against {b}" if axis in _COUNTED else f"{axis} {a} against {b}"


def _matched(axis: str, name: str, pair: LayerDifference, sequence: int) -> _Axis:
    """The matching indices of both along an axis: of tokens, of blocks with the same tokens, of heads; else the same."""
    axes = _axes(name, pair.a)
    n_a, n_b = (array.shape[axes.index(axis)] for array in pair.arrays(name))
    if axis == "head":
        return _of_heads(pair, n_a, n_b)
    if axis in ("query", "key") and "batch" in axes:
        return _of_tokens(axis, pair, sequence)
    index = np.arange(min(n_a, n_b))  # sequences may share positions, of which one record has more
    if axis in ("query block", "key block") and pair.a.survey is not None:
        columns = _of_tokens(axis.partition(" ")[0], pair, sequence)
        kept = np.zeros(max(record.facts.sizes[columns.word] for record in (pair.a, pair.b)), bool)
        kept[columns.a[columns.a == columns.b]] = True
        index = np.flatnonzero(np.logical_and.reduceat(kept, np.arange(0, len(kept), pair.a.survey.block)))
    return _Axis(axis, index, index, index, index)


def _of_tokens(axis: str, pair: LayerDifference, sequence: int) -> _Axis:
    """The corresponding tokens; with the same text and padding, the padding too."""
    text = (pair.queries if axis == "query" else pair.keys)[sequence]
    first_a, first_b = (
        record.first_query(sequence) if axis == "query" else record.first_key(sequence) for record in (pair.a, pair.b)
    )
    n_a, n_b = (record.facts.sizes[axis] for record in (pair.a, pair.b))
    a, b = np.array(text.alignment.pairs, dtype=int).reshape(-1, 2).T
    if text.is_same and (n_a, first_a) == (n_b, first_b):
        a = b = np.arange(n_a) - first_a
    return _Axis(axis, a + first_a, b + first_b, a, b)


def _of_heads(pair: LayerDifference, n_a: int, n_b: int) -> _Axis:
    """The common heads. An array of length 1 holds for all heads, −1, unless there is one."""
    heads_a, heads_b = heads_of(pair.a), heads_of(pair.b)
    if n_a == n_b == 1:
        names, zero = np.array(heads_a if len(heads_a) == len(heads_b) == 1 else [-1]), np.zeros(1, int)
        return _Axis("head", zero, zero, names, names)
    common = np.array([head for head in heads_a if head in heads_b])
    a, b = (np.array([heads.index(head) for head in common]) for heads in (heads_a, heads_b))
    return _Axis("head", a * (n_a > 1), b * (n_b > 1), common, common)


# ---------------------------------------------------------------------------------------------------- heads and effects


_BY_UNIT = {"weight": 0, "fraction": 1}
CHANGES = (
    *sorted((row for row in STATISTICS if row.is_change), key=lambda row: _BY_UNIT[row.unit]),
    *(row for row in STATISTICS if not row.is_change),
)
"""The statistics in the order of listing changes: those that measure how far a head changed come first."""
_SIZES = frozenset(row.field for row in STATISTICS if row.is_change)
"""Statistics from 0 to 1, by which changes are sorted."""


def _scale(pairs: Sequence[LayerDifference], name: str) -> float:
    """The largest value of a statistic among all heads of both records, to which the tolerance is relative."""
    values = (getattr(head, name) for pair in pairs for both in pair.head_pairs for head in both)
    return max((abs(value) for value in values if value is not None), default=0.0)


def _changed_heads(pair: LayerDifference, scales: Mapping[str, float], tolerance: float) -> Iterator[HeadChange]:
    """The heads of another type, or with a statistic that changed by more than the tolerance."""
    for a, b in pair.head_pairs:
        both = (StatisticChange(row.field, getattr(a, row.field), getattr(b, row.field)) for row in CHANGES)
        changes = tuple(change for change in both if change.size > tolerance * scales[change.name])
        if changes or a.kind != b.kind:
            size = max((c.size for c in changes if c.name in _SIZES or math.isinf(c.size)), default=0.0)
            yield HeadChange(pair.label, a.head, a.kind, b.kind, size if math.isfinite(size) else None, changes)


def _compared_effects(
    a: Record, b: Record, texts: Sequence[TextDifference], tolerance: float
) -> EffectDifference | None:
    """The effects of B against those of A; None if either has none, or none that are proven.

    Heads match by number, edges by tokens. The tolerance is relative to the largest effect. Effects within the noise of
    either record are no difference.
    """
    if a.effect is None or b.effect is None or not (a.effect.verified.ok and b.effect.verified.ok):
        return None
    metric = a.effect.metric if a.effect.metric == b.effect.metric else "d_output"
    places = {text.family: {j: i for i, j in text.alignment.pairs} for text in texts if text.sequence == 0}
    effects_a = {_removed(effect): effect for effect in a.effects}
    effects_b = {_removed(_in_a(effect, places)): effect for effect in b.effects}
    pairs = [(effect, effects_b[key]) for key, effect in effects_a.items() if key in effects_b]
    changes = [EffectChange(x, y, getattr(y, metric) - getattr(x, metric)) for x, y in pairs]
    largest = max((abs(getattr(effect, metric)) for pair in pairs for effect in pair), default=0.0)
    least = max(tolerance * largest, a.effect.floor + b.effect.floor) if tolerance else 0.0
    changed = (change for change in changes if abs(change.change) > least)
    return EffectDifference(
        metric=metric,
        tolerance=least,
        n_compared=len(pairs),
        changes=tuple(sorted(changed, key=lambda change: -abs(change.change))),
        only_a=tuple(effect for key, effect in effects_a.items() if key not in effects_b),
        only_b=tuple(effect for key, effect in effects_b.items() if key not in effects_a),
    )


def _in_a(effect: Effect, places: Mapping[TokenFamily, Mapping[int, int]]) -> Effect:
    """An effect of B with the positions of its edge in A; negative for tokens that A lacks."""
    if effect.query is None or effect.key is None:
        return effect
    context = places.get("context", places["texts"])
    queries = context if effect.kind == "encoder" else places["texts"]
    keys = context if effect.kind in ("encoder", "cross") else places["texts"]
    return replace(effect, query=queries.get(effect.query, -1), key=keys.get(effect.key, -1 - effect.key))


def _removed(effect: Effect) -> tuple[object, ...]:
    """The removed parts, whatever replaces them."""
    e = effect
    return e.removed, e.kind, e.layer, e.head, e.query, e.key, e.heads, e.kinds, e.spans


# --------------------------------------------------------------------------------------------------------------- steps


_DESCRIBED = ("layout", "formula", "operation")
_EXTREMES = ("min", "max", "mean", "std")


def _compared_steps(
    pair: LayerDifference, tolerance: float, *, arrays: Collection[str], has_same_tokens: bool
) -> Iterator[Difference]:
    """The steps of both traces in order. Their numbers are compared unless both records have the `arrays`.

    Two traces of user code also differ in steps of one alone, and in formulas.
    """
    a, b = pair.a.trace, pair.b.trace
    is_code = pair.a.module is not None and pair.b.module is not None
    for steps_a, steps_b, is_same in align([step.site for step in a], [step.site for step in b]).parts:
        for x, y in (
            zip(a[steps_a.start : steps_a.stop], b[steps_b.start : steps_b.stop], strict=False) if is_same else ()
        ):
            row = _compared_step(x, y, has_same_tokens=has_same_tokens)
            has_other_formula = is_code and any(setting.name == "formula" for setting in row.told)
            if row.status == "identical" and has_same_tokens:
                if x.values is not None and y.values is not None and x.site not in arrays:
                    row = _compared_values(row, x.values, y.values, tolerance)
                elif has_other_formula:
                    row = replace(row, status="beyond")
            yield row
        if is_code and not is_same:
            for step in a[steps_a.start : steps_a.stop]:
                yield Difference(step.site, "shape", "shape", step.axes, step.shape, None, why="only A has it")
            for step in b[steps_b.start : steps_b.stop]:
                yield Difference(step.site, "shape", "shape", step.axes, None, step.shape, why="only B has it")


def _compared_step(a: Step, b: Step, *, has_same_tokens: bool) -> Difference:
    """The comparison of shapes and descriptions. Different tokens excuse different lengths."""
    words = ((name, str(getattr(a, name)), str(getattr(b, name))) for name in _DESCRIBED if a.operation and b.operation)
    told = tuple(Setting(*word) for word in words if word[1] != word[2])
    row = Difference(a.site, "shape", "identical", a.axes, a.shape, b.shape, told=told)
    unlike = _unlike_axes(a.axes, b.axes)
    if unlike is not None:
        return replace(row, status=unlike[0], why=unlike[1])
    if len(a.shape) != len(b.shape):
        return replace(row, status="shape", why=f"{len(a.shape)} axes against {len(b.shape)}")
    sizes = [size for size in zip(a.axes, a.shape, b.shape, strict=False) if size[1] != size[2]]
    excused = () if has_same_tokens else ("batch", "query", "key")
    why = ", ".join(_sizes_text(*size) for size in sizes if size[0] not in excused)
    return replace(row, status="shape", why=why) if why else row


def _compared_values(row: Difference, a: TensorSummary, b: TensorSummary, tolerance: float) -> Difference:
    """The comparison of all numbers if the trace has them, else of extremes and moments."""
    is_whole = a.numbers is not None and b.numbers is not None and len(a.numbers) == len(b.numbers)
    x, y = (np.array(v.numbers if is_whole else [getattr(v, name) for name in _EXTREMES], dtype=float) for v in (a, b))
    cells = _measured(x, y)
    n_nonfinite = max(cells.counts[2], abs(a.n_nan - b.n_nan), abs(a.n_inf - b.n_inf))
    is_within = tolerance > 0 and cells.largest <= tolerance * cells.magnitude
    place = tuple(int(i) for i in np.unravel_index(cells.at[0], row.shape_a or ())) if is_whole else ()
    axes = tuple("sequence" if axis == "batch" else axis for axis in row.axes)
    return replace(
        row,
        seen="numbers" if is_whole else "extremes",
        status="beyond" if n_nonfinite else "identical" if cells.is_identical else "within" if is_within else "beyond",
        n_cells=cells.counts[0] if is_whole else math.prod(row.shape_a or ()),
        n_different=cells.counts[1] if is_whole else 0,
        n_nonfinite=n_nonfinite,
        largest=cells.largest,
        magnitude=cells.magnitude,
        at=Place(axes, place, place) if is_whole and cells.largest else None,
        why="" if is_whole else f"by {', '.join(_EXTREMES)}",
    )


def _names_alone(a: Record, b: Record, *, has_trace: bool) -> tuple[str, ...]:
    """The sites of A that B lacks: arrays, and steps if both have a trace."""
    arrays = [name for name in ORDER if name in a.arrays and name not in b.arrays]
    steps_b = {step.site for step in b.trace}
    steps = [step.site for step in a.trace if has_trace and steps_b and step.site not in steps_b]
    return tuple(dict.fromkeys((*arrays, *steps)))


# ------------------------------------------------------------------------------------------------------------ settings


_LAYER_FIELDS = (
    "name", "captured_by", "kernel", "n_heads", "n_kv_heads", "d_head", "d_v", "scale", "softcap", "mask", "bias", "sinks",
    "verified",
)  # fmt: skip
_OF_OTHERS = ("device", "threads", "random")
"""Config fields that the environment covers better, or that are shapes of inputs."""
_ALIKE = ("dtype", "device", "device name", "seed", "weights", "model", "module", "torch", "mha", "threads")
_MODEL_PLACES = ("path", "compared_len", "identical_outputs", "without", "generated", "dtype")
_SHARED = ("d_model", "n_heads", "n_kv_heads", "d_head", "d_v", "causal", "scale", "softcap")
"""Config fields compared for a checkpoint against mha's own layer. Between two checkpoints each layer has its own."""
_NONE = "none"


def _different_settings(a: Record, b: Record) -> Iterator[Setting]:
    """All settings that differ, the command first."""
    of_a, of_b = _settings_of(a), _settings_of(b)
    names = [*of_a, *(name for name in of_b if name not in of_a)]
    if (a.model is None) != (b.model is None):  # a checkpoint and mha's own layer have different settings
        for settings, record in ((of_a, a), (of_b, b)):
            settings |= {name: _word(getattr(record.config, name)) for name in _SHARED}
        names = [name for name in names if name in of_a and name in of_b]
    values = ((name, of_a.get(name, _NONE), of_b.get(name, _NONE)) for name in names)
    return (Setting(*value) for value in values if value[1] != value[2])


def _same_settings(a: Record, b: Record) -> tuple[tuple[str, str], ...]:
    """The equal settings worth showing, as pairs of name and value."""
    of_a, of_b = _settings_of(a), _settings_of(b)
    return tuple((name, of_a[name]) for name in _ALIKE if of_a.get(name, _NONE) == of_b.get(name) != _NONE)


def _settings_of(record: Record) -> dict[str, str]:
    settings: dict[str, object] = {"command": shlex.join(record.command), "kind of record": _kind(record)}
    if record.model is not None:
        settings |= {"model": record.model.path}
        settings |= {name: value for name, value in vars(record.model).items() if name not in _MODEL_PLACES}
        settings |= {"dtype": record.model.dtype, "padding": record.config.padding}
    else:
        settings["weights"] = record.weights
        settings |= {name: value for name, value in vars(record.config).items() if name not in _OF_OTHERS}
    if record.module is not None:
        settings |= {"module": record.module.target, "called": record.module.called}
        settings |= {f"argument {argument.name}": argument.value for argument in record.module.arguments}
    if record.decoding is not None:
        settings |= {"cache": record.decoding.cache, "prompt length": record.decoding.prompt_len}
    if record.survey is not None:
        settings["kernel"] = record.survey.kernel
    if record.effect is not None:
        summary, effects = record.effect, record.effects
        settings |= {"measured": "the logit" if summary.metric == "d_logit" else "the output vector"}
        settings |= {"position": f"{summary.position} {record.sequences[0].tokens[summary.position]}"}
        settings |= {"target": summary.target, "versus": summary.versus}
        settings |= {"removed": tuple(dict.fromkeys(effect.removed for effect in effects))}
        settings |= {"replaced by": tuple(dict.fromkeys(effect.replace for effect in effects))}
        places = ("all positions" if effect.at is None else effect.at for effect in effects)
        settings |= {"removed at": tuple(dict.fromkeys(places))}
    e = record.environment
    settings |= {"device": e.device, "device name": e.device_name, "threads": e.threads, "platform": e.platform}
    settings |= {"mha": e.mha, "torch": e.torch, "numpy": e.numpy, "python": e.python}
    settings["self-check"] = "ok" if record.self_check.ok else "FAILED"
    return {name: _word(value) for name, value in settings.items()}


def _kind(record: Record) -> str:
    if record.module is not None:
        return "a trace of user code"
    layer = "a checkpoint" if record.model is not None else "a layer made by mha"
    if record.decoding is not None:
        return f"decoding with {layer}"
    return layer if record.survey is None else f"head statistics of {layer}"


def _settings_of_layers(pairs: Sequence[LayerDifference]) -> tuple[Setting, ...]:
    """The settings of layers that differ, each once with its layers."""
    labels_of: dict[tuple[str, str, str], list[str]] = {}
    for a, b in (pair.inspected for pair in pairs if pair.inspected):
        for name in _LAYER_FIELDS:
            words = _word(getattr(a, name)), _word(getattr(b, name))
            if words[0] != words[1]:
                labels_of.setdefault((name, *words), []).append(a.label)
    return tuple(Setting(*setting, layers=tuple(labels)) for setting, labels in labels_of.items())


def _word(value: object) -> str:
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(_word, value)) or _NONE
    return str(value)
