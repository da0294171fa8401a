"""Compares two records: texts, sites, steps, heads, effects, settings. `diff` is the Python function."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec
import numpy as np

from mhacli.commands.diff.result import (
    STATISTICS_OF_ROWS,
    Difference,
    EffectDifference,
    HeadChange,
    LayerDifference,
    RecordDiff,
    Setting,
    Status,
    TextDifference,
    TokenFamily,
    change_of,
)
from mhacli.errors import UsageError
from mhacli.io.data import finite
from mhacli.record.arrays import Array
from mhacli.record.checks import TOLERANCES
from mhacli.record.effect import Effect
from mhacli.record.heads import FOR_ALL_HEADS, PER_QUERY, STATISTICS
from mhacli.record.record import InspectedLayer, Record, Step
from mhacli.record.storage import load
from mhacli.sites import SITES
from mhacli.text.align import MOST_STEPS, align, pairs
from mhacli.text.escape import without_surrogates
from mhacli.text.tokens import TokenSequence

_MASK = ("visible", "uniform_map", "uniform_received", "uniform_profile", "uniform_span_mass", "allowed")
_FOLLOWED_BY = {"qk": _MASK, "scores": STATISTICS_OF_ROWS[:2], "pattern": STATISTICS_OF_ROWS[2:]}
ORDER = tuple(name for site in SITES for name in (site, *_FOLLOWED_BY.get(site, ())))
"""Every array by name in the order of execution: the mask before the scores, and statistics after the pattern."""
_AXES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*PER_QUERY, "visible"), ("batch", "head", "query")),
    **dict.fromkeys(("received", "uniform_received"), ("batch", "head", "key")),
    **dict.fromkeys(("map", "uniform_map"), ("batch", "head", "query block", "key block")),
    **dict.fromkeys(("profile", "uniform_profile"), ("batch", "head", "step")),
    **dict.fromkeys(("span_mass", "uniform_span_mass"), ("batch", "head", "span", "spans")),
    "top_shares": ("batch", "head", "asked query", "rank"),
    "corner": ("batch", "head", "corner query", "corner key"),
    "allowed": ("batch", "head", "query", "key"),
}
_BY_TOKENS = ("query", "key", "query block", "key block")
_EXACT = ("ids", "visible", "allowed")
_Piece = tuple[list[tuple[str, Array]], Array, Array, Array]
"""The axes of some cells by name, with indices as of `_matched`; the numbers of both records; and which cells count."""


def diff(
    a: Record | str | os.PathLike[str], b: Record | str | os.PathLike[str], *, tolerance: float | None = None
) -> RecordDiff:
    """The differences of `b` from `a`, as `mha diff` prints them. Each is a record or the path of one.

    `tolerance` is relative to the largest number of a site. 0 demands equal bits; None takes the tolerance of the
    coarser dtype. Raises `MhaError` for a file that is no record.
    """
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise UsageError(f"tolerance {tolerance:g} is no number from 0 on")
    given = {"the first record": a, "the second record": b}
    names = [name if isinstance(record, Record) else os.fspath(record) for name, record in given.items()]
    a, b = (record if isinstance(record, Record) else load(record) for record in (a, b))
    dtypes = {record.config.dtype if record.model is None else record.model.dtype for record in (a, b)}
    coarser = next((name for name in TOLERANCES if name in dtypes), "float32")
    allowed = TOLERANCES[coarser].runs if tolerance is None else tolerance
    texts = (*_texts("texts", a.sequences, b.sequences),)
    texts += (*_texts("context", a.keys, b.keys),) if a.context is not None or b.context is not None else ()
    layers = [*_compared_layers(a, b, texts, allowed)]
    values = [head for layer in layers for both in layer.head_pairs for head in both]
    least = {
        row.field: allowed * max((abs(getattr(head, row.field) or 0.0) for head in values), default=0.0)
        for row in _CHANGES
    }
    of_a, of_b = _settings_of(a), _settings_of(b)
    return RecordDiff(
        a=a,
        b=b,
        names=(names[0], names[1]),
        tolerance=allowed,
        dtype=coarser if tolerance is None else None,
        settings=_different_settings(of_a, of_b, layers),
        alike={name: of_a[name] for name in _ALIKE if of_a.get(name, _NONE) == of_b.get(name) != _NONE},
        texts=texts,
        layers=tuple(replace(layer, heads=tuple(_changed_heads(layer, least))) for layer in layers),
        only_a=tuple(label for label in _layers(a) if label not in _layers(b)),
        only_b=tuple(label for label in _layers(b) if label not in _layers(a)),
        effects=_compared_effects(a, b, texts, allowed),
    )


def _texts(family: TokenFamily, a: tuple[TokenSequence, ...], b: tuple[TokenSequence, ...]) -> Iterator[TextDifference]:
    """The aligned texts that both have, paired by number."""
    for number, (x, y) in enumerate(zip(a, b, strict=False)):
        parts, is_exact = align(x.tokens, y.tokens, most_steps=MOST_STEPS // min(len(a), len(b)))
        equal = [(i, j) for i, j, is_equal in parts if is_equal]
        changes = [_token_change(x, y, i, j) for i, j, is_equal in parts if not is_equal]
        yield TextDifference(
            family=family,
            sequence=number,
            n_a=len(x.tokens),
            n_b=len(y.tokens),
            matches=[{"a": i.start, "b": j.start, "length": len(i)} for i, j in equal],
            n_other_ids=sum(x.ids[m] != y.ids[n] for i, j in equal for m, n in zip(i, j, strict=True)),
            exact=is_exact,
            n_aligned=sum(len(i) for i, _ in equal),
            is_same=not changes,
            n_replaced=sum(len(change["a"]) for change in changes if change["change"] == "replaced"),
            changes=changes,
        )


def _token_change(a: TokenSequence, b: TokenSequence, i: range, j: range) -> dict[str, Any]:
    """Consecutive tokens without an equal in the other text."""
    return {
        "change": "only B" if not i else "only A" if not j else "replaced",
        "a_begin": i.start,
        "a_end": i.stop,
        "b_begin": j.start,
        "b_end": j.stop,
        "a": [without_surrogates(a.tokens[n]) for n in i],
        "b": [without_surrogates(b.tokens[n]) for n in j],
    }


# ------------------------------------------------------------------------------------------------------------- layers


def _compared_layers(
    a: Record, b: Record, texts: Sequence[TextDifference], tolerance: float
) -> Iterator[LayerDifference]:
    """The layers of A that B has too, in A's order; for records without layers the whole records."""
    if a.model is None and b.model is None:
        places: list[tuple[str, Record, Record, tuple[InspectedLayer, ...]]] = [("", a, b, ())]
    else:
        of_a, of_b = _layers(a), _layers(b)
        both = [(label, of_a[label], of_b[label]) for label in of_a if label in of_b]
        places = [(label, a.of_layer(i), b.of_layer(j), (a.layers[i], b.layers[j])) for label, i, j in both]
    has_trace = len(places) == 1 and a.decoding is None and b.decoding is None  # steps of decoding are not sites
    for label, x, y, inspected in places:
        sides = ((x.sequences, y.sequences), (x.keys, y.keys))
        families = ["texts" if of_a == a.sequences and of_b == b.sequences else "context" for of_a, of_b in sides]
        queries, keys = (tuple(text for text in texts if text.family == family) for family in families)
        layer = LayerDifference(label, x, y, queries, keys, inspected)
        names = [name for name in ORDER if name in x.arrays and name in y.arrays]
        sites = [_compared_array(name, layer, tolerance) for name in names]
        if has_trace:  # steps stand in for missing arrays
            sites += [site for site in _compared_steps(layer, tolerance) if site.site not in names]
        if names:
            sites.sort(key=lambda site: ORDER.index(site.site) if site.site in ORDER else -1)
        yield replace(
            layer,
            sites=tuple(sites),
            only_a=_names_alone(x, y, has_trace=has_trace),
            only_b=_names_alone(y, x, has_trace=has_trace),
        )


def _layers(record: Record) -> dict[str, int]:
    """The index of each layer by its label; several attentions of a layer are numbered."""
    layers: dict[str, int] = {}
    for index, layer in enumerate(record.layers):
        n_before = sum(other.label == layer.label for other in record.layers[:index])
        layers[f"{layer.label}, attention {n_before + 1}" if n_before else layer.label] = index
    return layers


def _names_alone(a: Record, b: Record, *, has_trace: bool) -> tuple[str, ...]:
    """The sites of A that B lacks: arrays, and steps if both have a trace."""
    arrays = [name for name in ORDER if name in a.arrays and name not in b.arrays]
    steps_b = {step.site for step in b.trace}
    steps = [step.site for step in a.trace if has_trace and steps_b and step.site not in steps_b]
    return tuple(dict.fromkeys((*arrays, *steps)))


# ------------------------------------------------------------------------------------------------------------- arrays


def _compared_array(name: str, layer: LayerDifference, tolerance: float) -> Difference:
    """The comparison of an array that both records have."""
    shape_a, shape_b = (record.arrays[name].shape for record in (layer.a, layer.b))
    row = Difference(name, "array", "skipped", _axes(name, layer.a), shape_a, shape_b)
    unlike = _unlike_arrays(name, layer)
    if unlike is not None:
        return msgspec.structs.replace(row, status=unlike[0], why=unlike[1])
    row = _compared(row, _pieces(name, layer), tolerance)
    if not row.n_cells:
        return msgspec.structs.replace(row, status="skipped", why="no cells have tokens in common")
    if name not in _EXACT:
        return row
    status: Status = "identical" if row.status == "identical" else "beyond"
    return msgspec.structs.replace(row, status=status, largest=None, magnitude=None, relative=None)


def _compared(row: Difference, pieces: Iterable[_Piece], tolerance: float) -> Difference:
    """The comparison of numbers: how many differ, by how much, where, and by head."""
    counts, largest, magnitude, worst, at = np.zeros(5, int), 0.0, 0.0, 0.0, None
    is_identical, heads = True, dict[int, tuple[float, int]]()
    for cut, x, y, where in pieces:
        of_piece, gaps, most, has_same_bits = _measured(x, y, where)
        counts += of_piece
        magnitude, is_identical = max(magnitude, most), is_identical and has_same_bits
        largest = max(largest, float(gaps.max(initial=0.0, where=np.isfinite(gaps))))
        if gaps.max(initial=0.0) > worst:
            worst, place = gaps.max(), np.unravel_index(gaps.argmax(), gaps.shape)
            named = [(word, *axis[2:, n].tolist()) for (word, axis), n in zip(cut, place, strict=False)]
            named = [each for each in named if each[0] != "head" or each[1] >= 0]  # -1 stands for all heads
            at = {name: [each[n] for each in named] for n, name in enumerate(("axes", "a", "b"))} if named else None
        if row.seen == "array" and cut[1][0] == "head":
            head, gap = int(cut[1][1][2, 0]), float(gaps.max())
            if head >= 0 and gap > heads.get(head, (-1.0, 0))[0]:
                heads[head] = gap, int(cut[0][1][0, 0])
    is_within = tolerance > 0 and not counts[2] and largest <= tolerance * magnitude
    names = ("n_cells", "n_different", "n_nonfinite", "n_only_a", "n_only_b")
    return msgspec.structs.replace(
        row,
        status="identical" if is_identical else "within" if is_within else "beyond",
        **dict(zip(names, counts.tolist(), strict=True)),
        largest=largest if counts[0] else None,
        magnitude=magnitude if counts[0] else None,
        at=at,
        heads=tuple({"head": n, "largest": finite(gap), "sequence": s} for n, (gap, s) in sorted(heads.items())),
        relative=largest / (magnitude or 1.0) if counts[0] else None,
    )


def _measured(a: Array, b: Array, counted: Array) -> tuple[Array, Array, float, bool]:
    """The comparison of the `counted` cells: the counts of `Difference` from `n_cells` on; the gap in each cell,
    infinite where only one number is finite; the largest number; and whether all bits are equal."""
    x, y, where = a.astype(np.float64), b.astype(np.float64), np.broadcast_to(counted, a.shape)
    differs = where & ~((x == y) | (np.isnan(x) & np.isnan(y)))
    other_bits = differs | (where & (x == 0) & (np.signbit(x) != np.signbit(y)))
    is_finite = where & np.isfinite(x) & np.isfinite(y)
    with np.errstate(over="ignore", invalid="ignore"):
        gaps = np.where(is_finite, np.abs(y - x), np.where(differs, np.inf, 0.0))
    masks = (differs & (x > y), differs & (x < y)) if a.dtype.kind == "b" else (np.zeros(1), np.zeros(1))
    counts = np.array([int(cells.sum()) for cells in (where, differs, differs & ~is_finite, *masks)])
    magnitude = np.maximum(np.abs(x), np.abs(y)).max(initial=0.0, where=is_finite)
    return counts, gaps, float(magnitude), not other_bits.any()


def _pieces(name: str, layer: LayerDifference) -> Iterator[_Piece]:
    """The corresponding cells of both records, a sequence and a head at a time, which bounds memory."""
    axes = _axes(name, layer.a)
    has_masks = name in ("qk", "scores") and all("allowed" in record.arrays for record in (layer.a, layer.b))
    for sequence in range(len(layer.queries) if "batch" in axes else 1):
        (word, first), *rest = [(axis, _matched(axis, name, layer, sequence)) for axis in axes if axis != "batch"]
        parts = first.T[:, :, None] if word == "head" else [first]
        for part in parts if all(axis.shape[1] for axis in (first, *(axis for _, axis in rest))) else ():
            cut, sides, counted = [(word, part), *rest], list[Array](), np.ones(1, bool)
            for side, record in enumerate((layer.a, layer.b)):
                cells = np.ix_(*(axis[side] for _, axis in cut))
                array = record.arrays[name][sequence] if "batch" in axes else record.arrays[name]
                sides.append(array[cells][None])
                if has_masks:  # scores of masked cells have no meaning
                    mask = record.arrays["allowed"][sequence]
                    counted = counted & mask[(np.minimum(cells[0], len(mask) - 1), *cells[1:])][None]
            yield [("sequence", np.full((4, 1), sequence)), *cut], sides[0], sides[1], counted


# --------------------------------------------------------------------------------------------------------------- axes


def _axes(name: str, record: Record) -> tuple[str, ...]:
    return _AXES[name] if name in _AXES else SITES[name].axes_for(record.facts)


def heads_of(record: Record) -> list[int]:
    """The numbers of the heads on the head axis of a layer's arrays."""
    return [head.head for head in record.heads] if record.survey else [*range(record.config.n_heads)]


def _unlike_arrays(name: str, layer: LayerDifference) -> tuple[Status, str] | None:
    """Why an array that both have cannot be compared, and whether that is a difference; None if it can."""
    a, b = layer.a, layer.b
    axes, shapes = _axes(name, a), [record.arrays[name].shape for record in (a, b)]
    unlike = _unlike_axes(axes, _axes(name, b))
    if unlike is not None:
        return unlike
    if any(_summarised(axis, a) != _summarised(axis, b) for axis in axes):
        return "skipped", "the records summarise different cells"
    has_same_tokens = all(text.is_same for text in (*layer.queries, *layer.keys))
    if not has_same_tokens and {"query block", "asked query", "corner query"} & {*axes}:
        return "skipped", "its positions hold other tokens"
    is_for_all = name in FOR_ALL_HEADS and all(shape[axes.index("head")] == 1 for shape in shapes)
    has_heads = "head" in axes and not is_for_all
    sizes = [size for size in zip(axes, *shapes, strict=True) if size[0] not in (*_BY_TOKENS, "batch", "head")]
    sizes += [("head", a.config.n_heads, b.config.n_heads)] if has_heads else []
    why = _sizes_text(sizes)
    if why:
        return "shape", why
    has_common = not has_heads or {*heads_of(a)} & {*heads_of(b)}
    return None if has_common else ("skipped", "the records hold different heads")


def _unlike_axes(a: Sequence[str], b: Sequence[str]) -> tuple[Status, str] | None:
    """Why arrays with these axes cannot be compared. Padding and documents decide whether sequences share positions, so
    a missing batch is no difference."""
    is_same = [axis for axis in a if axis != "batch"] == [axis for axis in b if axis != "batch"]
    why = f"axes {' '.join(a)} against {' '.join(b)}"
    return None if tuple(a) == tuple(b) else ("skipped" if is_same else "shape", why)


def _summarised(axis: str, record: Record) -> object:
    """What the cells along an axis of a summary stand for."""
    survey = record.survey
    if survey is None:
        return None
    cells: dict[str, object] = {"query block": survey.block, "step": survey.steps}
    cells |= {"span": [span.name for span in record.spans], "corner query": survey.kept.corner}
    return (cells | {"asked query": (survey.kept.queries, survey.kept.top)}).get(axis)


def _sizes_text(sizes: Sequence[tuple[str, int, int]]) -> str:
    """The first lengths that differ: `d_head 16 against 32`; empty if none does."""
    return next((f"{axis} {a} against {b}" for axis, a, b in sizes if a != b), "")


def _matched(axis: str, name: str, layer: LayerDifference, sequence: int) -> Array:
    """The matching indices of both records along an axis, and their names: positions of tokens, with the same text
    and padding the padding too, and numbers of heads. `[4, matches]`: indices in A and in B, names in A and in B."""
    axes = _axes(name, layer.a)
    n_a, n_b = (record.arrays[name].shape[axes.index(axis)] for record in (layer.a, layer.b))
    if axis == "head":
        heads_a, heads_b = heads_of(layer.a), heads_of(layer.b)
        if n_a == n_b == 1:  # an array of length 1 holds for all heads, -1, unless there is one
            head = heads_a[0] if len(heads_a) == len(heads_b) == 1 else -1
            return np.array([[0], [0], [head], [head]])
        common = np.array([head for head in heads_a if head in heads_b], int)
        a, b = (np.array([heads.index(head) for head in common], int) for heads in (heads_a, heads_b))
        return np.stack((a * (n_a > 1), b * (n_b > 1), common, common))
    if axis not in ("query", "key") or "batch" not in axes:
        return np.stack([np.arange(min(n_a, n_b))] * 4)  # sequences may share positions, of which one record has more
    text = (layer.queries if axis == "query" else layer.keys)[sequence]
    records = (layer.a, layer.b)
    firsts = [record.first_query(sequence) if axis == "query" else record.first_key(sequence) for record in records]
    names = np.array(pairs(text.parts), dtype=int).reshape(-1, 2).T
    if text.is_same and n_a == n_b and firsts[0] == firsts[1]:
        names = np.stack([np.arange(n_a) - firsts[0]] * 2)
    return np.concatenate((names + np.array(firsts)[:, None], names))


# ---------------------------------------------------------------------------------------------------- heads and effects


_CHANGES = sorted(STATISTICS, key=lambda row: (not row.is_change, row.is_change and row.unit != "weight"))
"""The statistics in the order of listing changes: those that measure how far a head changed come first."""
_SIZES = frozenset(row.field for row in STATISTICS if row.is_change)
"""Statistics from 0 to 1, by which changes are sorted."""


def _changed_heads(layer: LayerDifference, least: Mapping[str, float]) -> Iterator[HeadChange]:
    """The heads of another type, or with a statistic that changed by more than `least`."""
    for a, b in layer.head_pairs:
        both = {row.field: (getattr(a, row.field), getattr(b, row.field)) for row in _CHANGES}
        sizes = {name: change_of(*values) for name, values in both.items()}
        changed = [name for name, size in sizes.items() if size > least[name]]
        if changed or a.kind != b.kind:
            size = max((sizes[name] for name in changed if name in _SIZES or math.isinf(sizes[name])), default=0.0)
            statistics = [{"name": name, "a": both[name][0], "b": both[name][1]} for name in changed]
            yield HeadChange(layer.label, a.head, a.kind, b.kind, finite(size), statistics)


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
    places = {text.family: {j: i for i, j in pairs(text.parts)} for text in texts if text.sequence == 0}
    effects_a = {_removed(effect, {}): effect for effect in a.effects}
    effects_b = {_removed(effect, places): effect for effect in b.effects}
    both = [(effect, effects_b[key]) for key, effect in effects_a.items() if key in effects_b]
    changes = [{"a": x, "b": y, "change": getattr(y, metric) - getattr(x, metric)} for x, y in both]
    largest = max((abs(getattr(effect, metric)) for pair in both for effect in pair), default=0.0)
    least = max(tolerance * largest, a.effect.floor + b.effect.floor) if tolerance else 0.0
    return EffectDifference(
        metric=metric,
        tolerance=least,
        n_compared=len(both),
        changes=sorted(
            (change for change in changes if abs(change["change"]) > least), key=lambda change: -abs(change["change"])
        ),
        only_a=tuple(effect for key, effect in effects_a.items() if key not in effects_b),
        only_b=tuple(effect for key, effect in effects_b.items() if key not in effects_a),
    )


def _removed(e: Effect, places: Mapping[TokenFamily, Mapping[int, int]]) -> tuple[object, ...]:
    """The removed parts, whatever replaces them. `places` are the positions in A of B's tokens, none for those of A;
    tokens that A lacks stay apart."""
    query, key = e.query, e.key
    if places and query is not None and key is not None:
        context = places.get("context", places["texts"])
        query = (context if e.kind == "encoder" else places["texts"]).get(query, -1)
        key = (context if e.kind in ("encoder", "cross") else places["texts"]).get(key, -1 - key)
    return e.removed, e.kind, e.layer, e.head, query, key, e.heads, e.kinds, e.spans


# --------------------------------------------------------------------------------------------------------------- steps


def _compared_steps(layer: LayerDifference, tolerance: float) -> Iterator[Difference]:
    """The steps that both traces have, in order; of user code also those that one alone has."""
    a, b = layer.a.trace, layer.b.trace
    is_code = layer.a.module is not None and layer.b.module is not None
    has_same_tokens = all(text.is_same for text in (*layer.queries, *layer.keys))
    for steps_a, steps_b, is_same in align([step.site for step in a], [step.site for step in b])[0]:
        of_a, of_b = a[steps_a.start : steps_a.stop], b[steps_b.start : steps_b.stop]
        for x, y in zip(of_a, of_b, strict=True) if is_same else ():
            yield _compared_step(x, y, tolerance, has_same_tokens=has_same_tokens)
        if is_code and not is_same:
            for step in of_a:
                yield Difference(step.site, "shape", "shape", step.axes, step.shape, None, why="only A has it")
            for step in of_b:
                yield Difference(step.site, "shape", "shape", step.axes, None, step.shape, why="only B has it")


def _compared_step(a: Step, b: Step, tolerance: float, *, has_same_tokens: bool) -> Difference:
    """The comparison of shapes, of the formulas of user code, and of all numbers if both traces have them, else of
    extremes and moments. Different tokens excuse different lengths."""
    has_other_formula = bool(a.operation and b.operation) and a.formula != b.formula
    told = ({"name": "formula", "a": a.formula, "b": b.formula, "layers": ()},) if has_other_formula else ()
    excused = () if has_same_tokens else ("batch", "query", "key")
    why = _sizes_text([size for size in zip(a.axes, a.shape, b.shape, strict=False) if size[0] not in excused])
    status, why = _unlike_axes(a.axes, b.axes) or ("shape" if why else "beyond" if told else "identical", why)
    row = Difference(a.site, "shape", status, a.axes, a.shape, b.shape, why=why, told=told)
    if why or a.values is None or b.values is None or not has_same_tokens:
        return row
    is_whole = a.values.numbers is not None and b.values.numbers is not None
    x, y = (np.array(v.numbers if is_whole else [v.min, v.max, v.mean, v.std], float) for v in (a.values, b.values))
    names = ["sequence" if axis == "batch" else axis for axis in a.axes]
    cut = [(name, np.stack([np.arange(n)] * 4)) for name, n in zip(names, a.shape, strict=True)] if is_whole else []
    shape = a.shape if is_whole else x.shape
    row = msgspec.structs.replace(row, seen="numbers" if is_whole else "extremes")
    row = _compared(row, [(cut, x.reshape(shape), y.reshape(shape), np.ones(1, bool))], tolerance)
    is_other = bool(told) or (a.values.n_nan, a.values.n_inf) != (b.values.n_nan, b.values.n_inf)
    why = "" if is_whole else "by min, max, mean, std"
    return msgspec.structs.replace(row, status="beyond" if is_other else row.status, why=why)


# ------------------------------------------------------------------------------------------------------------ settings


_LAYER_FIELDS = (
    "name", "captured_by", "kernel", "n_heads", "n_kv_heads", "d_head", "d_v", "scale", "softcap", "mask", "bias", "sinks",
    "verified",
)  # fmt: skip
_OF_OTHERS = ("device", "threads", "random")
"""Config fields that the environment covers better, or that are shapes of inputs."""
_ALIKE = ("dtype", "device", "device name", "seed", "weights", "model", "module", "torch", "mha", "threads")
_MODEL_PLACES = ("path", "compared_len", "identical_outputs", "without", "generated")
_NONE = "none"


def _different_settings(
    of_a: dict[str, str], of_b: dict[str, str], layers: Sequence[LayerDifference]
) -> tuple[Setting, ...]:
    """The settings that differ, those of layers once each with the labels of the layers."""
    sides = [("", of_a, of_b)]
    for layer in layers:
        words = [{name: _word(getattr(each, name)) for name in _LAYER_FIELDS} for each in layer.inspected]
        sides += [(layer.label, words[0], words[1])] if words else []
    labels_of: dict[tuple[str, str, str], list[str]] = {}
    for label, x, y in sides:
        for name in dict.fromkeys((*x, *y)):
            key = name, x.get(name, _NONE), y.get(name, _NONE)
            if key[1] != key[2]:
                labels_of.setdefault(key, []).extend([label] if label else [])
    return tuple({"name": name, "a": a, "b": b, "layers": labels} for (name, a, b), labels in labels_of.items())


def _settings_of(record: Record) -> dict[str, str]:
    """The settings of a whole record in words, the command first."""
    settings: dict[str, object] = {"command": shlex.join(record.command)}
    if record.model is not None:
        settings |= {"model": record.model.path, "padding": record.config.padding}
        settings |= {name: value for name, value in asdict(record.model).items() if name not in _MODEL_PLACES}
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
        settings |= {name: getattr(record.effect, name) for name in ("metric", "position", "target", "versus")}
        for name, word in (("removed", "removed"), ("replace", "replaced by"), ("at", "removed at")):
            settings[word] = tuple(dict.fromkeys(getattr(effect, name) for effect in record.effects))
    e = record.environment
    settings |= {"device": e.device, "device name": e.device_name, "threads": e.threads, "platform": e.platform}
    settings |= {"mha": e.mha, "torch": e.torch, "numpy": e.numpy, "python": e.python}
    settings["self-check"] = "ok" if record.self_check.ok else "FAILED"
    return {name: _word(value) for name, value in settings.items()}


def _word(value: object) -> str:
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(_word, value)) or _NONE
    return str(value)
