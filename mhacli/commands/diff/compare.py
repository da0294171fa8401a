"""Compares two records: texts, sites, steps, heads, effects, settings. `diff` is the Python function."""

from __future__ import annotations

import functools
import math
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace as changed

from mhacli.commands.diff.result import STATISTICS_OF_ROWS, Difference, LayerDifference, RecordDiff, change_of
from mhacli.errors import UsageError
from mhacli.io.data import finite
from mhacli.record.arrays import Array
from mhacli.record.checks import TOLERANCES
from mhacli.record.heads import FOR_ALL_HEADS, PER_QUERY, STATISTICS
from mhacli.record.record import InspectedLayer, Record, Step
from mhacli.record.storage import load
from mhacli.sites import SITES
from mhacli.text.align import MOST_STEPS, Part, align, pairs
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
_MATCHED = {axis for axes in _AXES.values() for axis in axes}
_MADE_OF = {"query block": "block", "step": "steps", "asked query": "kept", "corner query": "kept"}
"""Axes of statistics, and the field of the summary that says for what their cells stand."""
_Layer = tuple[Record, list[InspectedLayer]]
_Align = Callable[[tuple[str, ...], tuple[str, ...]], tuple[list[Part], bool]]
_Shape = tuple[tuple[str, ...], tuple[int, ...]]
"""The names of axes, and their lengths."""
_Piece = tuple[dict[str, int], list[tuple[str, Array]], Array, Array, Array]
"""The sequence and the head of some cells by their numbers; the indices `[2, cells]` that correspond along each other axis;
the numbers of both records; and which cells count."""


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
    a, b = (record if isinstance(record, Record) else load(record) for record in given.values())
    dtypes = {record.config.dtype if record.model is None else record.model.dtype for record in (a, b)}
    coarser = next((name for name in TOLERANCES if name in dtypes), "float32")
    allowed = TOLERANCES[coarser].runs if tolerance is None else tolerance
    n_texts = max(1, min(len(a.sequences), len(b.sequences)))
    aligned = functools.cache(functools.partial(align, most_steps=MOST_STEPS // n_texts))
    has_context = a.context is not None or b.context is not None
    of_a, of_b = _layers(a), _layers(b)
    both = [label for label in of_a if label in of_b]
    has_trace = len(both) == 1 and all(record.trace and record.decoding is None for record in (a, b))
    layers = [_compared_layer(label, of_a[label], of_b[label], aligned, allowed, has_trace=has_trace) for label in both]
    return RecordDiff(
        a=a,
        b=b,
        names=(names[0], names[1]),
        tolerance=allowed,
        dtype=coarser if tolerance is None else None,
        settings=_different_settings(a, b, layers),
        texts=_texts("texts", a.sequences, b.sequences, aligned)
        + (_texts("context", a.keys, b.keys, aligned) if has_context else []),
        layers=layers,
        only_a=[label for label in of_a if label and label not in of_b],
        only_b=[label for label in of_b if label and label not in of_a],
        effects=_compared_effects(a, b, aligned, allowed),
    )


def _texts(
    family: str, a: Sequence[TokenSequence], b: Sequence[TokenSequence], aligned: _Align
) -> list[dict[str, Any]]:
    """The aligned texts that both have, paired by number: runs of equal tokens, and the tokens between them."""
    texts = []
    for number, (x, y) in enumerate(zip(a, b, strict=False)):
        parts, is_exact = aligned(x.tokens, y.tokens)
        equal = [(i, j) for i, j, is_equal in parts if is_equal]
        changes = [
            {
                "change": "only B" if not i else "only A" if not j else "replaced",
                **{"a_begin": i.start, "a_end": i.stop, "b_begin": j.start, "b_end": j.stop},
                "a": [without_surrogates(token) for token in x.tokens[i.start : i.stop]],
                "b": [without_surrogates(token) for token in y.tokens[j.start : j.stop]],
            }
            for i, j, is_equal in parts
            if not is_equal
        ]
        text = {
            **{"family": family, "sequence": number, "n_a": len(x.tokens), "n_b": len(y.tokens)},
            "matches": [{"a": i.start, "b": j.start, "length": len(i)} for i, j in equal],
            "n_other_ids": sum(x.ids[m] != y.ids[n] for i, j in equal for m, n in zip(i, j, strict=True)),
            "exact": is_exact,
            "n_aligned": sum(len(i) for i, _ in equal),
            "is_same": not changes,
            "n_replaced": sum(len(i) for i, j, is_equal in parts if j and not is_equal),
            "changes": changes,
        }
        texts.append(text)
    return texts


# -------------------------------------------------------------------------------------------------------------- layers


def _layers(record: Record) -> dict[str, _Layer]:
    """The record of each layer by its label, with its description; several attentions of a layer are numbered."""
    if record.model is None:
        return {"": (record, [])}
    layers: dict[str, _Layer] = {}
    for index, layer in enumerate(record.layers):
        n_before = sum(other.label == layer.label for other in record.layers[:index])
        label = f"{layer.label}, attention {n_before + 1}" if n_before else layer.label
        layers[label] = record.of_layer(index), [layer]
    return layers


def _compared_layer(
    label: str, of_a: _Layer, of_b: _Layer, aligned: _Align, tolerance: float, *, has_trace: bool
) -> LayerDifference:
    """One layer of both, with its changed heads, and its sites in the order of execution: arrays that both have, and other
    steps of their traces. Of user code also steps that one alone has."""
    (a, inspected_a), (b, inspected_b) = of_a, of_b
    queries, keys = (
        [np.array(pairs(aligned(x.tokens, y.tokens)[0]), int).reshape(-1, 2).T for x, y in zip(*texts, strict=False)]
        for texts in ((a.sequences, b.sequences), (a.keys, b.keys))
    )
    layer = LayerDifference(label, a, b, inspected_a + inspected_b, queries, keys)
    arrays_a, arrays_b = ([name for name in ORDER if name in record.arrays] for record in (a, b))
    steps_a, steps_b = ({step.site: step for step in record.trace if has_trace} for record in (a, b))
    sites = [_compared_array(name, layer, tolerance) for name in arrays_a if name in arrays_b]
    is_code = a.module is not None and b.module is not None
    for name, step in (steps_a | steps_b).items():
        if name in steps_a and name in steps_b and not (name in arrays_a and name in arrays_b):
            sites.append(_compared_step(steps_a[name], step, tolerance, has_same_tokens=layer.has_same_tokens))
        elif is_code:
            shapes = step.shape if name in steps_a else None, step.shape if name in steps_b else None
            why = f"only {'A' if name in steps_a else 'B'} has it"
            sites.append(Difference(name, "shape", "shape", step.axes, *shapes, why=why))
    if not is_code:
        sites.sort(key=lambda site: ORDER.index(site.site) if site.site in ORDER else -1)
    return replace(
        layer,
        sites=sites,
        heads=_changed_heads(layer, sites, tolerance),
        only_a=[name for name in arrays_a if name not in arrays_b],
        only_b=[name for name in arrays_b if name not in arrays_a],
    )


_CHANGES = sorted(STATISTICS, key=lambda row: (not row.is_change, row.is_change and row.unit != "weight"))
"""The statistics in the order of listing changes: those that measure how far a head changed come first."""


def _changed_heads(layer: LayerDifference, sites: Sequence[Difference], tolerance: float) -> list[dict[str, Any]]:
    """The heads of another type, or whose pattern or a statistic changed by more than the tolerance."""
    heads, of_pattern = [], set[int]()
    for site in sites:
        if site.site in ("pattern", "map"):
            least = tolerance * (site.magnitude or 0.0)
            of_pattern |= {head["head"] for head in site.heads if head["largest"] is None or head["largest"] > least}
    for a, b in layer.head_pairs:
        statistics, size = [], 0.0
        for row in _CHANGES:
            before, after = getattr(a, row.field), getattr(b, row.field)
            change = change_of(before, after)
            if change > tolerance * max(1.0, abs(before or 0.0), abs(after or 0.0)):
                statistics.append({"name": row.field, "a": before, "b": after})
                size = max(size, change) if row.is_change or math.isinf(change) else size
        if statistics or a.kind != b.kind or a.head in of_pattern:
            head = {"layer": layer.label, "head": a.head, "kind_a": a.kind, "kind_b": b.kind, "size": finite(size)}
            heads.append(head | {"statistics": statistics})
    return heads


# --------------------------------------------------------------------------------------------------------------- sites


def _of_shapes(name: str, a: _Shape, b: _Shape, *, excused: Collection[str]) -> Difference:
    """The comparison of two shapes, in which the lengths of `excused` axes may differ. Padding and documents decide
    whether sequences share positions, so a missing batch is no difference."""
    row = Difference(name, "shape", "identical", *a, b[1])
    sizes_a, sizes_b = ([(axis, n) for axis, n in zip(*shape, strict=True) if axis != "batch"] for shape in (a, b))
    if [axis for axis, _ in sizes_a] != [axis for axis, _ in sizes_b]:
        return changed(row, status="shape", why=f"axes {' '.join(a[0])} against {' '.join(b[0])}")
    for (axis, n), (_, m) in zip(sizes_a, sizes_b, strict=True):
        if n != m and axis not in excused:
            return changed(row, status="shape", why=f"{axis} {n} against {m}")
    return row


def _compared_step(a: Step, b: Step, tolerance: float, *, has_same_tokens: bool) -> Difference:
    """The comparison of shapes, of the formulas of user code, and of all numbers if both traces have them, else of
    extremes and moments. Different tokens excuse different lengths."""
    row = _of_shapes(a.site, (a.axes, a.shape), (b.axes, b.shape), excused=() if has_same_tokens else ("query", "key"))
    if a.operation and b.operation and a.formula != b.formula:
        row = changed(row, told=[{"name": "formula", "a": a.formula, "b": b.formula, "layers": []}])
    if row.status != "shape" and a.values and b.values and a.shape == b.shape and has_same_tokens:
        is_whole = a.values.numbers is not None and b.values.numbers is not None
        x, y = (np.array(v.numbers if is_whole else [v.min, v.max, v.mean, v.std], float) for v in (a.values, b.values))
        axes = ["sequence" if axis == "batch" else axis for axis in a.axes] if is_whole else []
        shape = a.shape if is_whole else x.shape
        places = [(axis, np.stack([np.arange(n)] * 2)) for axis, n in zip(axes, shape, strict=False)]
        row = changed(row, seen="numbers" if is_whole else "extremes", why="" if is_whole else "by min, max, mean, std")
        row = _compared(row, [({}, places, x.reshape(shape), y.reshape(shape), np.ones(1, bool))], tolerance)
        if (a.values.n_nan, a.values.n_inf) != (b.values.n_nan, b.values.n_inf):
            row = changed(row, status="beyond")
    return changed(row, status="beyond") if row.told and row.status != "shape" else row


def _compared_array(name: str, layer: LayerDifference, tolerance: float) -> Difference:
    """The comparison of an array that both records have."""
    a, b = layer.a, layer.b
    x, y = a.arrays[name], b.arrays[name]
    axes, axes_b = (_AXES[name] if name in _AXES else SITES[name].axes_for(record.facts) for record in (a, b))
    row = changed(_of_shapes(name, (axes, x.shape), (axes_b, y.shape), excused=_MATCHED), seen="array")
    if "head" in axes and name not in FOR_ALL_HEADS and a.config.n_heads != b.config.n_heads:
        row = changed(row, status="shape", why=f"head {a.config.n_heads} against {b.config.n_heads}")
    if row.status == "shape":
        return row
    row = _compared(row, _pieces(name, axes, layer), tolerance)
    if not row.n_cells:
        row = changed(row, status="skipped", why="they have no cells in common", heads=[])
    elif name in ("visible", "allowed"):  # a count or a mask is the same, or it is not
        row = changed(row, status="identical" if row.status == "identical" else "beyond")
    else:
        return row
    return changed(row, largest=None, magnitude=None, relative=None)


def _pieces(name: str, axes: tuple[str, ...], layer: LayerDifference) -> Iterator[_Piece]:
    """The cells of an array that correspond, a sequence and a head at a time, which bounds memory."""
    records = layer.a, layer.b
    has_masks = name in ("qk", "scores") and all("allowed" in record.arrays for record in records)
    sizes = [
        (axis, n) for axis, n in zip(axes, layer.a.arrays[name].shape, strict=True) if axis not in ("batch", "head")
    ]
    for sequence in range(len(layer.queries)):
        places = [(axis, _matched(axis, n, layer, sequence)) for axis, n in sizes]
        firsts = [{"query": each.first_query(sequence), "key": each.first_key(sequence)} for each in records]
        cells = [np.ix_(*(both[side] + firsts[side].get(axis, 0) for axis, both in places)) for side in (0, 1)]
        for head, *indices in _common_heads(name, layer) if "head" in axes else [(None, ..., ...)]:
            fixed = {"sequence": sequence} | ({} if head is None else {"head": head})
            sides = list(zip(records, indices, cells, strict=True))
            x, y = (record.arrays[name][sequence, index][at] for record, index, at in sides)
            counted = np.ones(1, bool)
            for record, index, at in sides if has_masks else []:  # scores of masked cells have no meaning
                mask = record.arrays["allowed"][sequence]
                counted = counted & mask[min(index, len(mask) - 1)][at]
            yield fixed, places, x, y, counted


def _common_heads(name: str, layer: LayerDifference) -> list[tuple[Any, ...]]:
    """The number of each head that both have, and its index in both arrays; None for one row for all heads."""
    numbers, sizes = zip(*((heads_of(each), each.arrays[name].shape[1]) for each in (layer.a, layer.b)), strict=True)
    if name in FOR_ALL_HEADS and sizes == (1, 1) and len(numbers[0]) > 1:
        return [(None, 0, 0)]
    common = [head for head in numbers[0] if head in numbers[1]]
    return [(n, *(min(heads.index(n), size - 1) for heads, size in zip(numbers, sizes, strict=True))) for n in common]


def heads_of(record: Record) -> list[int]:
    """The numbers of the heads on the head axis of a layer's arrays."""
    return [head.head for head in record.heads] if record.survey else [*range(record.config.n_heads)]


def _matched(axis: str, n: int, layer: LayerDifference, sequence: int) -> Array:
    """The indices `[2, cells]` that correspond along an axis: positions of tokens, and all `n` cells of another axis, or
    none where they stand for other things."""
    if axis in ("query", "key"):
        return (layer.queries if axis == "query" else layer.keys)[sequence]
    if axis == "span":
        is_same = [span.name for span in layer.a.spans] == [span.name for span in layer.b.spans]
    else:
        a, b = (getattr(record.survey, _MADE_OF.get(axis, ""), None) for record in (layer.a, layer.b))
        is_same = a == b and (layer.has_same_tokens or not axis.startswith(("query", "asked", "corner")))
    return np.stack([np.arange(n if is_same else 0)] * 2)


def _compared(row: Difference, pieces: Iterable[_Piece], tolerance: float) -> Difference:
    """The comparison of numbers: how many differ, by how much, where, and by head."""
    counts, largest, magnitude, worst, is_identical = np.zeros(5, int), 0.0, 0.0, 0.0, True
    at: dict[str, list[Any]] = {}
    heads: dict[int, tuple[float, int]] = {}
    for fixed, places, a, b, counted in pieces:
        index = np.flatnonzero(np.broadcast_to(counted, a.shape))
        x, y = (numbers.ravel()[index].astype(np.float64) for numbers in (a, b))
        with np.errstate(over="ignore", invalid="ignore"):
            gaps = np.nan_to_num(np.abs(y - x), nan=np.inf, posinf=np.inf)
        gaps[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
        is_identical &= not gaps.any() and not (np.signbit(x) != np.signbit(y))[x == y].any()
        only = ((x > y).sum(), (x < y).sum()) if a.dtype == bool else (0, 0)
        counts += (x.size, np.count_nonzero(gaps), np.isinf(gaps).sum(), *only)
        largest = max(largest, float(gaps.max(initial=0.0, where=np.isfinite(gaps))))
        sizes = np.maximum(np.abs(x), np.abs(y))
        magnitude = max(magnitude, float(sizes.max(initial=0.0, where=np.isfinite(sizes))))
        gap = float(gaps.max(initial=0.0))
        if gap > worst:
            worst, place = gap, np.unravel_index(index[gaps.argmax()], a.shape)
            found = [(axis, n, n) for axis, n in fixed.items()]
            found += [(axis, *both[:, n].tolist()) for (axis, both), n in zip(places, place, strict=False)]
            at = dict(zip(("axes", "a", "b"), map(list, zip(*found, strict=True)), strict=True)) if found else {}
        if "head" in fixed:  # of equal gaps, the first sequence
            heads[fixed["head"]] = max(heads.get(fixed["head"], (-1.0, 0)), (gap, -fixed["sequence"]))
    is_within = tolerance > 0 and not counts[2] and largest <= tolerance * magnitude
    return changed(
        row,
        status="identical" if is_identical else "within" if is_within else "beyond",
        **dict(zip(("n_cells", "n_different", "n_nonfinite", "n_only_a", "n_only_b"), counts.tolist(), strict=True)),
        largest=largest,
        magnitude=magnitude,
        relative=largest / (magnitude or 1.0),
        at=at or None,
        heads=[{"head": n, "largest": finite(gap), "sequence": -s} for n, (gap, s) in sorted(heads.items())],
    )


# ------------------------------------------------------------------------------------------------------------ effects


def _compared_effects(a: Record, b: Record, aligned: _Align, tolerance: float) -> dict[str, Any] | None:
    """The effects of B against those of A; None if either has none, or none that are proven.

    Heads match by number, edges by tokens. The tolerance is relative to the largest effect. Effects within the noise of
    either record are no difference.
    """
    if a.effect is None or b.effect is None or not (a.effect.verified.ok and b.effect.verified.ok):
        return None
    metric = a.effect.metric if a.effect.metric == b.effect.metric else "d_output"
    texts, context = (
        {j: i for i, j in pairs(aligned(x[0].tokens, y[0].tokens)[0])}
        for x, y in ((a.sequences, b.sequences), (a.keys, b.keys))
    )
    parts = ("removed", "kind", "layer", "head", "query", "key", "heads", "kinds", "spans")
    of_a = {tuple(getattr(effect, part) for part in parts): effect for effect in a.effects}
    of_b = {}
    for effect in b.effects:
        removed = effect
        if effect.query is not None and effect.key is not None:  # tokens that A lacks stay apart
            queries = context if effect.kind == "encoder" else texts
            keys = context if effect.kind in ("encoder", "cross") else texts
            removed = replace(effect, query=queries.get(effect.query, -1), key=keys.get(effect.key, -1 - effect.key))
        of_b[tuple(getattr(removed, part) for part in parts)] = effect
    both = [(effect, of_b[key]) for key, effect in of_a.items() if key in of_b]
    largest = max((abs(getattr(effect, metric)) for pair in both for effect in pair), default=0.0)
    least = max(tolerance * largest, a.effect.floor + b.effect.floor) if tolerance else 0.0
    changes = [{"a": x, "b": y, "change": getattr(y, metric) - getattr(x, metric)} for x, y in both]
    changes = [change for change in changes if abs(change["change"]) > least]
    return {
        "metric": metric,
        "tolerance": least,
        "n_compared": len(both),
        "changes": sorted(changes, key=lambda change: -abs(change["change"])),
        "only_a": [effect for key, effect in of_a.items() if key not in of_b],
        "only_b": [effect for key, effect in of_b.items() if key not in of_a],
    }


# ------------------------------------------------------------------------------------------------------------ settings


_NO_SETTINGS = (
    "random", "device asked",  # inputs have shapes, and the environment has the device
    "path", "compared_len", "identical_outputs", "without", "generated",  # of the model
    "layer", "kind", "unverified", "self_check", "survey", "call", "extras",  # of a layer
)  # fmt: skip


def _different_settings(a: Record, b: Record, layers: Sequence[LayerDifference]) -> list[dict[str, Any]]:
    """The settings that differ, those of layers once each with the labels of the layers."""
    sides = [("", [_settings_of(record) for record in (a, b)])]
    sides += [(layer.label, [to_builtins(each) for each in layer.inspected]) for layer in layers if layer.inspected]
    labels: dict[tuple[str, str, str], list[str]] = {}
    for label, (of_a, of_b) in sides:
        for name in of_a | of_b:
            before, after = _word(of_a.get(name)), _word(of_b.get(name))
            if before != after and name not in _NO_SETTINGS:
                labels.setdefault((name, before, after), []).extend([label] if label else [])
    return [{"name": name, "a": x, "b": y, "layers": concerned} for (name, x, y), concerned in labels.items()]


def _settings_of(record: Record) -> dict[str, object]:
    """The settings of a whole record, the command first."""
    model, module, decoding = record.model, record.module, record.decoding
    settings: dict[str, object] = {"command": shlex.join(record.command)}
    settings |= (
        {"weights": record.weights} if model is None else {"model": model.path, "padding": record.config.padding}
    )
    settings |= to_builtins(model or record.config)
    if module is not None:
        settings |= {"module": module.target, "called": module.called}
        settings |= {f"argument {argument.name}": argument.value for argument in module.arguments}
    if decoding is not None:
        settings |= {"cache": decoding.cache, "prompt length": decoding.prompt_len}
    settings["kernel"] = record.survey and record.survey.kernel
    settings |= {name: getattr(record.effect, name, None) for name in ("metric", "position", "target", "versus")}
    for name, word in (("removed", "removed"), ("replace", "replaced by"), ("at", "removed at")):
        settings[word] = tuple(dict.fromkeys(getattr(effect, name) for effect in record.effects))
    settings |= {name.replace("_", " "): value for name, value in to_builtins(record.environment).items()}
    return settings | {"self-check": "ok" if record.self_check.ok else "FAILED"}


def _word(value: object) -> str:
    """A setting as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return ", ".join(map(_word, value)) or "none"
    return "none" if value is None else str(value)
