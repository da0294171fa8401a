"""Compares two whole records: settings, texts, layers, steps and heads."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mhacli.commands.diff.arrays import (
    ORDER,
    NotComparable,
    Pair,
    RecordAxes,
    aligned,
    aligned_texts,
    compared_site,
    judged_indices,
    sizes_text,
    unlike_axes,
)
from mhacli.commands.diff.effects import compared_effects
from mhacli.commands.diff.result import (
    PATTERN_SITES,
    Differences,
    DiffLocation,
    HeadChange,
    LayerDifference,
    Setting,
    SiteDifference,
    SiteStatus,
    StatisticChange,
    TextDifference,
)
from mhacli.record.heads import STATISTICS, HeadStatistics
from mhacli.record.record import InspectedLayer, Record, Step, TensorSummary
from mhacli.record.tolerances import TOLERANCES


@dataclass(frozen=True)
class _LayerPair:
    """A layer of both records with its index in each; None if the records have no layers."""

    label: str
    cells: Pair
    index_a: int | None = None
    index_b: int | None = None

    @property
    def records(self) -> tuple[Record, Record]:
        """The layer of either record as a record."""
        return self.cells.a.record, self.cells.b.record


def compare(a: Record, b: Record, *, tolerance: float | None = None) -> Differences:
    """The differences of B from A.

    The tolerance is relative to the largest number of each site. 0 demands equal bits; None takes the tolerance of the
    coarser dtype.
    """
    coarser = _coarser_dtype(a, b)
    allowed = TOLERANCES[coarser].runs if tolerance is None else tolerance
    texts = aligned_texts("texts", a.sequences, b.sequences)
    if a.context is not None or b.context is not None:
        texts += aligned_texts("context", a.keys, b.keys)
    pairs = tuple(_layer_pairs(a, b, texts))
    layers = [
        (a.layers[p.index_a], b.layers[p.index_b]) for p in pairs if p.index_a is not None and p.index_b is not None
    ]
    differences = Differences(
        tolerance=allowed,
        dtype=coarser if tolerance is None else None,
        settings=different_settings(a, b, layers),
        alike=same_settings(a, b),
        n_sequences=(len(a.sequences), len(b.sequences)),
        texts=texts,
        layers=(),
        only_a=_labels_alone(a, {pair.index_a for pair in pairs}),
        only_b=_labels_alone(b, {pair.index_b for pair in pairs}),
    )
    heads = [_head_pairs(pair) for pair in pairs]
    changes = changed_heads([(pair.label, both) for pair, both in zip(pairs, heads, strict=True)], allowed)
    compared = [_compared_layer(pair, differences, with_trace=len(pairs) == 1) for pair in pairs]
    layers_with_heads = (
        replace(layer, heads=changed, n_heads=max([len(both), *_head_counts(layer)]))
        for layer, changed, both in zip(compared, changes, heads, strict=True)
    )
    return replace(differences, layers=tuple(layers_with_heads), effects=compared_effects(a, b, texts, allowed))


def _coarser_dtype(a: Record, b: Record) -> str:
    dtypes = {record.config.dtype if record.model is None else record.model.dtype for record in (a, b)}
    return next((name for name in TOLERANCES if name in dtypes), "float32")


def _layer_pairs(a: Record, b: Record, texts: Sequence[TextDifference]) -> Iterator[_LayerPair]:
    """The layers of A that B has too, in A's order; for records without layers the whole records."""
    if (a.model is None) != (b.model is None):
        return

    def pair(layer_a: Record, layer_b: Record) -> Pair:
        """The pair of two layers with the texts that this kind of layer reads."""
        families = [
            "texts" if (texts_a is a.sequences and texts_b is b.sequences) else "context"
            for texts_a, texts_b in ((layer_a.sequences, layer_b.sequences), (layer_a.keys, layer_b.keys))
        ]
        queries, keys = (tuple(text for text in texts if text.family == family) for family in families)
        return Pair(RecordAxes.of(layer_a), RecordAxes.of(layer_b), queries, keys)

    if a.model is None:
        yield _LayerPair("", pair(a, b))
        return
    indices_b = {key: index for index, key in enumerate(_layer_keys(b))}
    for index_a, key in enumerate(_layer_keys(a)):
        if key in indices_b:
            index_b = indices_b[key]
            cells = pair(a.of_layer(index_a), b.of_layer(index_b))
            yield _LayerPair(_labels(a)[index_a], cells, index_a, index_b)


def _layer_keys(record: Record) -> Sequence[tuple[str, int, int]]:
    """The kind, number and call of each layer. A layer may have several attentions of a kind."""
    seen: Counter[tuple[str, int]] = Counter()
    keys: list[tuple[str, int, int]] = []
    for layer in record.layers:
        kind_and_number = (layer.kind, layer.layer)
        keys.append((*kind_and_number, seen[kind_and_number]))
        seen[kind_and_number] += 1
    return keys


def _labels(record: Record) -> Sequence[str]:
    """A unique label for each layer: `layer 0, attention 2` if a layer has several attentions of a kind."""
    keys = _layer_keys(record)
    counts = Counter(key[:2] for key in keys)
    return [
        f"{layer.label}, attention {key[2] + 1}" if counts[key[:2]] > 1 else layer.label
        for layer, key in zip(record.layers, keys, strict=True)
    ]


def _labels_alone(record: Record, paired: set[int | None]) -> tuple[str, ...]:
    return tuple(label for index, label in enumerate(_labels(record)) if index not in paired)


def _head_pairs(pair: _LayerPair) -> tuple[tuple[HeadStatistics, HeadStatistics], ...]:
    """The heads with statistics in both records; none if the numbers of heads differ."""
    a, b = pair.records
    if a.config.n_heads != b.config.n_heads:
        return ()
    heads_b = {head.head: head for head in b.heads}
    return tuple((head, heads_b[head.head]) for head in a.heads if head.head in heads_b)


def _compared_layer(pair: _LayerPair, differences: Differences, *, with_trace: bool) -> LayerDifference:
    """The comparison of a layer's sites in the order of execution. The trace stands in for missing arrays."""
    a, b = pair.records
    names = [name for name in ORDER if name in a.arrays and name in b.arrays]
    alone = [tuple(name for name in ORDER if name in x.arrays and name not in y.arrays) for x, y in ((a, b), (b, a))]
    sites = judged_indices([compared_site(name, pair.cells, differences.tolerance) for name in names])
    if with_trace:
        steps = compared_steps(a, b, differences.tolerance, compared=names, has_same_tokens=differences.has_same_tokens)
        sites = tuple(_in_order(sites, steps))
        more = names_alone(a, b)
        alone = [tuple(dict.fromkeys((*arrays, *steps_alone))) for arrays, steps_alone in zip(alone, more, strict=True)]
    only_a, only_b = alone
    return LayerDifference(pair.label, pair.index_a, pair.index_b, sites, heads=(), only_a=only_a, only_b=only_b)


def _head_counts(layer: LayerDifference) -> list[int]:
    return [len(site.heads) for site in layer.sites if site.site in PATTERN_SITES]


def _in_order(sites: Sequence[SiteDifference], steps: Sequence[SiteDifference]) -> Iterator[SiteDifference]:
    """The sites in the order of a walkthrough. Arrays without a step follow the site before them.

    The step of a site whose array is compared is listed only if it differs in shape or description.
    """
    waiting = {site.site: site for site in sites}
    for step in steps:
        rank = ORDER.index(step.site) if step.site in ORDER else -1
        for name in [name for name in waiting if ORDER.index(name) < rank]:
            yield waiting.pop(name)
        with_array = waiting.pop(step.site, None)
        yield step if with_array is None else replace(with_array, told=step.told)
    yield from waiting.values()


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


def different_settings(
    a: Record, b: Record, layers: Sequence[tuple[InspectedLayer, InspectedLayer]]
) -> tuple[Setting, ...]:
    """All settings that differ, the command first."""
    settings_a, settings_b = _settings_of(a), _settings_of(b)
    names = [*settings_a, *(name for name in settings_b if name not in settings_a)]
    if (a.model is None) != (b.model is None):  # a checkpoint and mha's own layer have different settings
        settings_a, settings_b = (
            {**settings, **_shared(record)} for settings, record in ((settings_a, a), (settings_b, b))
        )
        names = [name for name in names if name in settings_a and name in settings_b]
    differing = [Setting(name, settings_a.get(name, _NONE), settings_b.get(name, _NONE)) for name in names]
    return (*(setting for setting in differing if setting.a != setting.b), *_of_layers(layers))


def same_settings(a: Record, b: Record) -> tuple[tuple[str, str], ...]:
    """The equal settings worth showing, as pairs of name and value."""
    settings_a, settings_b = _settings_of(a), _settings_of(b)
    return tuple(
        (name, settings_a[name])
        for name in _ALIKE
        if settings_a.get(name) == settings_b.get(name) and settings_a.get(name, _NONE) != _NONE
    )


def _settings_of(record: Record) -> Mapping[str, str]:
    settings: dict[str, object] = {"command": shlex.join(record.command), "kind of record": _kind(record)}
    if record.model is not None:
        model, names = record.model, (f.name for f in dataclasses.fields(record.model))
        settings |= {"model": model.path} | {name: getattr(model, name) for name in names if name not in _MODEL_PLACES}
        settings |= {"dtype": model.dtype, "padding": record.config.padding}
    else:
        settings["weights"] = record.weights
        c, names = record.config, (f.name for f in dataclasses.fields(record.config))
        settings |= {name: getattr(c, name) for name in names if name not in _OF_OTHERS}
    if record.module is not None:
        settings |= {"module": record.module.target, "called": record.module.called}
        settings |= {f"argument {argument.name}": argument.value for argument in record.module.arguments}
    if record.decoding is not None:
        settings |= {"cache": record.decoding.cache, "prompt length": record.decoding.prompt_len}
    if record.survey is not None:
        settings["kernel"] = record.survey.kernel
    settings |= _of_effects(record)
    e = record.environment
    settings |= {"device": e.device, "device name": e.device_name, "threads": e.threads, "platform": e.platform}
    settings |= {"mha": e.mha, "torch": e.torch, "numpy": e.numpy, "python": e.python}
    settings["self-check"] = "ok" if record.self_check.ok else "FAILED"
    return {name: _word(value) for name, value in settings.items()}


def _of_effects(record: Record) -> Mapping[str, object]:
    """The settings of effects: what was removed and measured."""
    if record.effect is None:
        return {}
    summary, effects = record.effect, record.effects
    token = record.sequences[0].tokens[summary.position]
    settings = {"measured": "the logit" if summary.metric == "d_logit" else "the output vector"}
    settings |= {"position": f"{summary.position} {token}", "target": summary.target, "versus": summary.versus}  # type: ignore[dict-item]
    kinds: Mapping[str, Sequence[object]] = {
        "removed": [effect.removed for effect in effects],
        "replaced by": [effect.replace for effect in effects],
        "removed at": ["all positions" if effect.at is None else effect.at for effect in effects],
    }
    return settings | {name: tuple(dict.fromkeys(values)) for name, values in kinds.items()}


def _shared(record: Record) -> Mapping[str, str]:
    return {name: _word(getattr(record.config, name)) for name in _SHARED}


def _kind(record: Record) -> str:
    if record.module is not None:
        return "a trace of user code"
    layer = "a checkpoint" if record.model is not None else "a layer made by mha"
    if record.decoding is not None:
        return f"decoding with {layer}"
    return layer if record.survey is None else f"head statistics of {layer}"


def _of_layers(layers: Sequence[tuple[InspectedLayer, InspectedLayer]]) -> tuple[Setting, ...]:
    """The settings of layers that differ, each once with its layers."""
    labels_of: dict[tuple[str, str, str], list[str]] = {}
    for a, b in layers:
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


# ----------------------------------------------------------------------------------------------------- head statistics


_ORDER = {"weight": 0, "fraction": 1}
CHANGES = (
    *sorted((row for row in STATISTICS if row.is_change), key=lambda row: _ORDER[row.unit]),
    *(row for row in STATISTICS if not row.is_change),
)
"""The statistics in the order of listing changes: those that measure how far a head changed come first."""
UNIT_OF = {row.field: row.unit for row in STATISTICS}
SIZES = frozenset(row.field for row in STATISTICS if row.is_change)
"""Statistics from 0 to 1, by which changes are sorted."""

_Heads = Sequence[tuple[HeadStatistics, HeadStatistics]]
"""Matching heads of one layer."""


def changed_heads(layers: Sequence[tuple[str, _Heads]], tolerance: float) -> tuple[tuple[HeadChange, ...], ...]:
    """For each layer, given by label and heads, the heads with a statistic that changed by more than the tolerance.

    The tolerance is relative to the largest value of the statistic among all heads of both records.
    """
    scales = {
        name: _scale([pair for _, heads in layers for pair in heads], name) for name in (row.field for row in CHANGES)
    }
    return tuple(tuple(_changed(label, heads, scales, tolerance)) for label, heads in layers)


def _changed(label: str, heads: _Heads, scales: Mapping[str, float], tolerance: float) -> Iterator[HeadChange]:
    for a, b in heads:
        changes = tuple(_changes(a, b, scales, tolerance))
        if changes or a.kind != b.kind:
            yield HeadChange(label, a.head, a.kind, b.kind, _size(changes), changes)


def by_size(changes: Sequence[HeadChange]) -> tuple[HeadChange, ...]:
    """The largest changes first: new and missing numbers, then by attention weight."""
    return tuple(sorted(changes, key=lambda change: -math.inf if change.size is None else -change.size))


def _changes(
    a: HeadStatistics, b: HeadStatistics, scales: Mapping[str, float], tolerance: float
) -> Iterator[StatisticChange]:
    for name in (row.field for row in CHANGES):
        value_a, value_b = getattr(a, name), getattr(b, name)
        if value_a is None and value_b is None:
            continue
        if value_a is None or value_b is None or abs(value_b - value_a) > tolerance * scales[name]:
            yield StatisticChange(name, value_a, value_b)


def _scale(heads: _Heads, name: str) -> float:
    values = (getattr(head, name) for both in heads for head in both)
    return max((abs(value) for value in values if value is not None), default=0.0)


def _size(changes: Sequence[StatisticChange]) -> float | None:
    """The largest change of an attention weight."""
    if any((change.a is None) != (change.b is None) for change in changes):
        return None
    return max((abs((c.b or 0.0) - (c.a or 0.0)) for c in changes if c.name in SIZES), default=0.0)


# --------------------------------------------------------------------------------------------------------------- steps


_TOKEN_AXES = ("batch", "query", "key")
_DESCRIBED = ("layout", "formula", "operation")
_EXTREMES = ("min", "max", "mean", "std")


def compared_steps(
    a: Record, b: Record, tolerance: float, *, compared: Collection[str], has_same_tokens: bool
) -> tuple[SiteDifference, ...]:
    """The steps of both traces in order, those of B inserted between those of A.

    For sites whose arrays were compared (`compared`), only shapes are compared. A step in one trace alone counts as a
    difference only between records without arrays.
    """
    if a.decoding is not None or b.decoding is not None:  # decoding steps are not sites
        return ()
    is_all = a.module is not None and b.module is not None
    rows = []
    for step_a, step_b in _pairs(a.trace, b.trace):
        if step_a is not None and step_b is not None:
            is_counted = has_same_tokens and step_a.site not in compared
            row = _compared_step(step_a, step_b, tolerance, has_same_tokens=has_same_tokens, is_counted=is_counted)
            rows.append(_by_formula(row) if is_all and has_same_tokens else row)
        elif is_all and (step := step_a or step_b) is not None:
            rows.append(_alone(step, is_of_a=step_b is None))
    return tuple(rows)


def names_alone(a: Record, b: Record) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The sites that occur in only one of the traces, each once."""
    if a.decoding is not None or b.decoding is not None or not a.trace or not b.trace:
        return (), ()
    names = [{step.site: None for step in record.trace} for record in (a, b)]
    return tuple(n for n in names[0] if n not in names[1]), tuple(n for n in names[1] if n not in names[0])


def _pairs(a: Sequence[Step], b: Sequence[Step]) -> Iterator[tuple[Step | None, Step | None]]:
    """Steps of the same name paired, in the order of both."""
    matches, _ = aligned([step.site for step in a], [step.site for step in b])
    i = j = 0
    for match in matches:
        yield from ((step, None) for step in a[i : match.a])
        yield from ((None, step) for step in b[j : match.b])
        i, j = match.a + match.length, match.b + match.length
        yield from zip(a[match.a : i], b[match.b : j], strict=True)
    yield from ((step, None) for step in a[i:])
    yield from ((None, step) for step in b[j:])


def _by_formula(row: SiteDifference) -> SiteDifference:
    """A step of user code without comparable numbers, which counts as another step if its formula differs."""
    has_other_formula = (
        row.seen == "shape" and row.status == "identical" and any(setting.name == "formula" for setting in row.told)
    )
    return replace(row, status="beyond") if has_other_formula else row


def _alone(step: Step, *, is_of_a: bool) -> SiteDifference:
    a, b = (step.shape, None) if is_of_a else (None, step.shape)
    return SiteDifference(step.site, "shape", "shape", step.axes, a, b, why=f"only {'A' if is_of_a else 'B'} has it")


def _compared_step(a: Step, b: Step, tolerance: float, *, has_same_tokens: bool, is_counted: bool) -> SiteDifference:
    words = ((name, str(getattr(a, name)), str(getattr(b, name))) for name in _DESCRIBED)
    settings = tuple(Setting(name, of_a, of_b) for name, of_a, of_b in words if of_a != of_b)
    unlike = _unlike(a, b, has_same_tokens)
    row = SiteDifference(
        site=a.site,
        seen="shape",
        status="identical" if unlike is None else "shape" if unlike.departs else "skipped",
        axes=a.axes,
        shape_a=a.shape,
        shape_b=b.shape,
        why="" if unlike is None else unlike.why,
        told=settings if a.operation and b.operation else (),
    )
    if unlike is not None or not is_counted or a.values is None or b.values is None:
        return row
    return _compared_values(row, a.values, b.values, tolerance)


def _unlike(a: Step, b: Step, has_same_tokens: bool) -> NotComparable | None:
    """The difference in axes and sizes of a step, or None. Different tokens excuse different lengths."""
    if a.axes != b.axes:
        return unlike_axes(a.axes, b.axes)
    if len(a.shape) != len(b.shape):
        return NotComparable(f"{len(a.shape)} axes against {len(b.shape)}")
    sizes = zip(a.axes, a.shape, b.shape, strict=False)
    parts = [
        sizes_text(axis, n_a, n_b)
        for axis, n_a, n_b in sizes
        if n_a != n_b and (has_same_tokens or axis not in _TOKEN_AXES)
    ]
    return NotComparable(", ".join(parts)) if parts else None


def _compared_values(row: SiteDifference, a: TensorSummary, b: TensorSummary, tolerance: float) -> SiteDifference:
    """The comparison of all numbers if the trace has them, else of extremes and moments."""
    is_whole = a.numbers is not None and b.numbers is not None and len(a.numbers) == len(b.numbers)
    pairs = [*zip(*(_numbers(v, is_whole) for v in (a, b)), strict=True)]
    differences = [(n, abs(y - x)) for n, (x, y) in enumerate(pairs) if x is not None and y is not None]
    n_gone = sum((x is None) != (y is None) for x, y in pairs)
    n_broken = max(n_gone, abs(a.n_nan - b.n_nan), abs(a.n_inf - b.n_inf))
    place, largest = max(differences, key=lambda item: item[1], default=(0, 0.0))
    magnitude = max((abs(x) for pair in pairs for x in pair if x is not None), default=0.0)
    status: SiteStatus = "within" if tolerance > 0 and largest <= tolerance * magnitude else "beyond"
    return replace(
        row,
        seen="numbers" if is_whole else "extremes",
        status="beyond" if n_broken else "identical" if largest == 0 else status,
        n_cells=len(pairs) if is_whole else math.prod(row.shape_a or ()),
        n_different=sum(x != y for x, y in pairs) if is_whole else 0,
        n_nonfinite=n_broken,
        largest=largest,
        magnitude=magnitude,
        at=_place(place, row) if is_whole and largest else None,
        why="" if is_whole else f"by {', '.join(_EXTREMES)}",
    )


def _numbers(values: TensorSummary, is_whole: bool) -> Sequence[float | None]:
    if is_whole:
        return values.numbers or ()
    return [getattr(values, name) for name in _EXTREMES]


def _place(flat: int, row: SiteDifference) -> DiffLocation:
    """The location of a number of a small tensor, by its axes."""
    indices: list[int] = []
    for size in reversed(row.shape_a or ()):
        flat, index = divmod(flat, size)
        indices.insert(0, index)
    axes = tuple("sequence" if axis == "batch" else axis for axis in row.axes)
    return DiffLocation(axes, tuple(indices), tuple(indices))
