"""`mhacli.diff`; and two records compared: texts, layer by layer sites and heads, effects,
settings. Differences are B − A.

Dictionaries are parts of the JSON document as they are. Non-finite numbers are None.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace as changed

from mhacli.commands.diff.result import SCHEMA, Diff
from mhacli.errors import UsageError
from mhacli.io.data import Array, finite
from mhacli.record.checks import TOLERANCES
from mhacli.record.effect import Effect
from mhacli.record.heads import FOR_ALL_HEADS, STATISTICS, HeadStatistics
from mhacli.record.record import InspectedLayer, Record, Step
from mhacli.record.storage import load
from mhacli.sites import SITES
from mhacli.text.align import align, pairs
from mhacli.text.escape import without_surrogates
from mhacli.text.tokens import TokenSequence

_OF_QUERIES, _OF_KEYS, _CELLS = (
    ("batch", "head", "query"),
    ("batch", "head", "key"),
    ("batch", "head", "query", "key"),
)
_OF_STEPS, _OF_SPANS = ("batch", "head", "step"), ("batch", "head", "span", "spans")
_OF_BLOCKS = ("batch", "head", "query block", "key block")
_MASK = {
    "visible": _OF_QUERIES,
    "uniform_map": _OF_BLOCKS,
    "uniform_received": _OF_KEYS,
    "uniform_profile": _OF_STEPS,
    "uniform_span_mass": _OF_SPANS,
    "allowed": _CELLS,
}
_STATISTICS = {
    "max_score": _OF_QUERIES,
    "lse": _OF_QUERIES,
    "corner": ("batch", "head", "corner query", "corner key"),
    "top_shares": ("batch", "head", "asked query", "rank"),
    "map": _OF_BLOCKS,
    "received": _OF_KEYS,
    "profile": _OF_STEPS,
    "span_mass": _OF_SPANS,
    "sink": _OF_QUERIES,
    "distance": _OF_QUERIES,
    "participation": _OF_QUERIES,
    "entropy": _OF_QUERIES,
}
"""The arrays of a record that are no sites of the computation, with their axes: of its mask, of
scores and of patterns."""
_FOLLOWED_BY = {"qk": [*_MASK], "scores": [*_STATISTICS][:2], "pattern": [*_STATISTICS][2:]}
_ORDER = tuple(name for site in SITES for name in (site, *_FOLLOWED_BY.get(site, ())))
"""Every array by name in the order of execution: the mask before the scores, and statistics after
the pattern."""
_AXES = _MASK | _STATISTICS
_MATCHED = {axis for axes in _AXES.values() for axis in axes}
_MADE_OF = {"query block": "block", "step": "steps", "asked query": "kept", "corner query": "kept"}
"""Axes of statistics, and the field of the summary that says for what their cells stand."""


def diff(a: Any, b: Any, inputs: Any = None, *, tolerance: float | None = None) -> Diff:
    """The differences of `b` from `a`, as `mha diff` prints them. Each is a record or the path of
    one, or each is a model in memory, and both compute `inputs`: keywords, positional arguments, or
    a tensor.

    `tolerance`, of records, is relative to the largest number of a site. 0 demands equal bits; None
    takes the tolerance of the coarser dtype. Raises `MhaError` for a file that is no record, and
    for models that cannot be compared.
    """
    are_models = [hasattr(each, "named_modules") for each in (a, b)]
    if inputs is not None or any(are_models):
        if inputs is None or not all(are_models) or tolerance is not None:
            raise UsageError(
                "mhacli.diff compares two records, or two models over inputs",
                hint=(
                    "mhacli.diff(model_a, model_b, inputs), or mhacli.diff(record_a, record_b,"
                    " tolerance=…)"
                ),
            )
        from mhacli.commands.diff.models import diff_modules

        return diff_modules(a, b, inputs)
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise UsageError(f"tolerance {tolerance:g} is no number from 0 on")
    given = {"the first record": a, "the second record": b}
    names = [
        name if isinstance(record, Record) else os.fspath(record) for name, record in given.items()
    ]
    a, b = (record if isinstance(record, Record) else load(record) for record in given.values())
    dtype = None
    if tolerance is None:
        dtypes = {
            record.config.dtype if record.model is None else record.model.dtype for record in (a, b)
        }
        dtype = next((name for name in TOLERANCES if name in dtypes), "float32")
        tolerance = TOLERANCES[dtype].runs
    return record_diff(a, b, (names[0], names[1]), tolerance, dtype)


def record_diff(
    a: Record, b: Record, names: tuple[str, str], tolerance: float, dtype: str | None
) -> Diff:
    """All differences of two named records. `tolerance` is relative; `dtype` is that from which it
    follows, None if the user set it.
    """
    of_a, of_b = _layers(a), _layers(b)
    layers = [
        LayerDifference(each, *of_a[each], *of_b[each], tolerance) for each in of_a if each in of_b
    ]
    texts, effects = _texts(a, b), _effects(a, b, tolerance)
    # the first site in the order of execution; a statistic if no site of its layer differs
    sites = [
        (layer, site)
        for layer in layers
        for site in sorted(layer.sites, key=lambda site: site.site in _STATISTICS)
    ]
    first_site = next(
        ({"layer": layer.label, "site": site.site} for layer, site in sites if site.departs), None
    )
    where = None
    if len(a.sequences) != len(b.sequences) or not all(text["is_same"] for text in texts):
        where = "tokens"
    elif any(text["n_other_ids"] for text in texts):
        where = "ids"
    elif first_site is not None:
        where = "site"
    elif effects and (effects["changes"] or not effects["n_compared"]):
        where = "effects"
    is_known = any(site.status in ("identical", "within") for _, site in sites)
    verdict = "differ" if where else "agree" if is_known else "nothing"
    at = first_site if first_site and where == "site" else {"layer": "", "site": None}
    d = Diff(
        {
            "schema": SCHEMA,
            "command": [],
            "verdict": verdict,
            "summary": "",
            "said": "",
            "a": without_surrogates(names[0]),
            "b": without_surrogates(names[1]),
            "tolerance": {"relative": tolerance, "of_dtype": dtype},
            "first": where and {"where": where, **at},
            "first_site": first_site,
            "settings": _settings(a, b, layers),
            "n_sequences": [len(a.sequences), len(b.sequences)],
            "texts": texts,
            "layers": [
                {"layer": each.label, "sites": each.sites, "heads": each.heads, **each.only}
                for each in layers
            ],
            **_alone(*([label for label in labels if label] for labels in (of_a, of_b))),
            "effects": effects,
        }
    )
    d.records, d.layers = (a, b), layers
    d["summary"] = d["said"] = _summary(d)
    return d


def _summary(d: Diff) -> str:
    """The result in a sentence: `2 of 12 heads changed; the first difference is in layer 3
    pattern`.
    """
    if d.verdict == "nothing":
        return "nothing can be compared: the records have no layer, site or step in common"
    layers, first_site, where = d.layers, d["first_site"], d["first"] and d["first"]["where"]
    n_changed, n_heads = (
        sum(len(getattr(each, name)) for each in layers) for name in ("heads", "head_pairs")
    )
    parts = (
        [f"{n_changed or 'none'} of {n_heads} head{'s' * (n_heads != 1)} changed"]
        if n_heads
        else []
    )
    parts += [changed_effects(d["effects"])] if d["effects"] else []
    words = "the effects"
    if first_site is not None:
        words = (
            f"{first_site['layer']}"
            f" {'the mask' if first_site['site'] == 'allowed' else first_site['site']}".strip()
        )
    if where is None:
        known = ("identical", "within", "beyond")
        n = sum(
            site.seen != "shape" and site.status in known
            for layer in layers
            for site in layer.sites
        )
        parts.insert(0, f"no difference in {n} site{'s' * (n != 1)}" if n else "no difference")
    elif where in ("tokens", "ids"):
        parts.append(
            f"the first difference is in the {'ids of the ' if where == 'ids' else ''}tokens"
        )
        parts += [f"the first numbers that differ are in {words}"] if first_site else []
    else:
        parts.append(f"the first difference is in {words}")
    return "; ".join(parts)


def _texts(a: Record, b: Record) -> list[dict[str, Any]]:
    """The aligned texts that both have, paired by number."""
    families = {"texts": (a.sequences, b.sequences)}
    if a.context is not None or b.context is not None:
        families["context"] = (a.keys, b.keys)
    return [
        {"family": family, "sequence": number, **_aligned(*pair)}
        for family, sides in families.items()
        for number, pair in enumerate(zip(*sides, strict=False))
    ]


def _settings(a: Record, b: Record, layers: Sequence[LayerDifference]) -> list[dict[str, Any]]:
    """The settings that differ, with the labels of the layers concerned."""
    sides = [("", _settings_of(a), _settings_of(b))]
    for layer in layers if a.model is not None else ():
        sides.append(
            (
                layer.label,
                msgspec.to_builtins(layer.inspected_a),
                msgspec.to_builtins(layer.inspected_b),
            )
        )
    labels: dict[tuple[str, str, str], list[str]] = {}
    for label, of_a, of_b in sides:
        for name in of_a | of_b:
            before, after = _word(of_a.get(name)), _word(of_b.get(name))
            if before != after and name not in _NO_SETTINGS:
                labels.setdefault((name, before, after), []).extend([label] if label else [])
    return [
        {"name": name, "a": x, "b": y, "layers": concerned}
        for (name, x, y), concerned in labels.items()
    ]


def _effects(a: Record, b: Record, tolerance: float) -> dict[str, Any] | None:
    """The effects of B against those of A, of `n_compared` removals; None unless both have proven
    effects. Heads match by number, edges by tokens. The tolerance is relative to the largest
    effect; what is within the noise is no difference.
    """
    if a.effect is None or b.effect is None or not (a.effect.verified.ok and b.effect.verified.ok):
        return None
    metric = a.effect.metric if a.effect.metric == b.effect.metric else "d_output"
    texts, context = (
        dict(pairs(x[0].tokens, y[0].tokens)[::-1].T.tolist())
        for x, y in ((a.sequences, b.sequences), (a.keys, b.keys))
    )

    def in_a(effect: Effect) -> Effect:
        """An effect with the positions of its tokens in A, negative ones of tokens that A lacks."""
        if effect.query is None or effect.key is None:
            return effect
        queries = context if effect.kind == "encoder" else texts
        keys = context if effect.kind in ("encoder", "cross") else texts
        query, key = effect.query, effect.key
        return changed(effect, query=queries.get(query, -1 - query), key=keys.get(key, -1 - key))

    parts = attrgetter(
        "removed", "kind", "layer", "head", "heads", "kinds", "spans", "query", "key"
    )
    of_a = {parts(effect): effect for effect in a.effects}
    of_b = {parts(in_a(effect)): effect for effect in b.effects}
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


def changed_effects(effects: Mapping[str, Any]) -> str:
    """The number of changed effects: `3 of 72 effects changed`."""
    changes, n = effects["changes"], effects["n_compared"]
    if not n:
        return "no removal is in both, so no effects can be compared"
    return f"{len(changes) or 'none'} of {n} effect{'s' * (n != 1)} changed"


def _aligned(x: TokenSequence, y: TokenSequence) -> dict[str, Any]:
    """Runs of equal tokens of a text of A and one of B (`matches`), some with other ids, and the
    tokens between (`changes`).
    """
    parts, is_exact = align(x.tokens, y.tokens)
    equal = [(i, j) for i, j, is_equal in parts if is_equal]
    others = [(i, j) for i, j, is_equal in parts if not is_equal]
    changes: list[dict[str, Any]] = []
    for i, j in others:
        changes.append({"change": "only B" if not i else "only A" if not j else "replaced"})
        for side, text, places in (("a", x, i), ("b", y, j)):
            tokens = [without_surrogates(text.tokens[n]) for n in places]
            changes[-1] |= {f"{side}_begin": places.start, f"{side}_end": places.stop, side: tokens}
    return {
        "n_a": len(x.tokens),
        "n_b": len(y.tokens),
        "matches": [{"a": i.start, "b": j.start, "length": len(i)} for i, j in equal],
        "n_other_ids": sum(
            x.ids[m] != y.ids[n] for i, j in equal for m, n in zip(i, j, strict=True)
        ),
        "exact": is_exact,
        "n_aligned": sum(len(i) for i, _ in equal),
        "is_same": not others,
        "n_replaced": sum(len(i) for i, j in others if j),
        "changes": changes,
    }


def _layers(record: Record) -> dict[str, tuple[Record, InspectedLayer | None]]:
    """The record of each layer by its label, with its description; several attentions of a layer
    are numbered.
    """
    if record.model is None:
        return {"": (record, None)}
    layers: dict[str, tuple[Record, InspectedLayer | None]] = {}
    for index, layer in enumerate(record.layers):
        n_before = sum(other.label == layer.label for other in record.layers[:index])
        label = f"{layer.label}, attention {n_before + 1}" if n_before else layer.label
        layers[label] = record.of_layer(index), layer
    return layers


def _alone(a: Collection[Any], b: Collection[Any]) -> dict[str, list[Any]]:
    """What A alone has, and what B alone."""
    return {
        "only_a": [each for each in a if each not in b],
        "only_b": [each for each in b if each not in a],
    }


_NO_SETTINGS = (
    "random",
    "device asked",  # inputs have shapes, and the environment has the device
    "path",
    "compared_len",
    "identical_outputs",
    "without",
    "generated",  # of the model
    "layer",
    "kind",
    "unverified",
    "self_check",
    "survey",
    "call",
    "extras",  # of a layer
)


def _settings_of(record: Record) -> dict[str, object]:
    """The settings of a whole record, the command first."""
    model, module, decoding, config = record.model, record.module, record.decoding, record.config
    settings: dict[str, object] = {"command": shlex.join(record.command)}
    settings |= (
        {"weights": record.weights}
        if model is None
        else {"model": model.path, "padding": config.padding}
    )
    settings |= msgspec.to_builtins(model or config)
    if module is not None:
        arguments = {f"argument {argument.name}": argument.value for argument in module.arguments}
        settings |= {"module": module.target, "called": module.called, **arguments}
    if decoding is not None:
        settings |= {"cache": decoding.cache, "prompt length": decoding.prompt_len}
    settings["kernel"] = record.survey and record.survey.kernel
    settings |= {
        name: getattr(record.effect, name, None)
        for name in ("metric", "position", "target", "versus")
    }
    for name, word in (("removed", "removed"), ("replace", "replaced by"), ("at", "removed at")):
        settings[word] = tuple(dict.fromkeys(getattr(effect, name) for effect in record.effects))
    settings |= {
        name.replace("_", " "): value
        for name, value in msgspec.to_builtins(record.environment).items()
    }
    return settings | {"self-check": "ok" if record.self_check.ok else "FAILED"}


def _word(value: object) -> str:
    """A setting as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return ", ".join(map(_word, value)) or "none"
    return "none" if value is None else str(value)


class Difference(msgspec.Struct, frozen=True):
    """The comparison of one site of one layer: of arrays, of all numbers of a small tensor in
    traces, of extremes and moments, or of shapes alone (`seen`). `status` is equal bits, within the
    tolerance, beyond it, another shape or formula, or not comparable (`why`). `largest` is the
    largest |B − A| of numbers finite in both, `magnitude` the largest number of either, and
    `relative` their ratio. `n_different` cells are unequal, of which `n_nonfinite` are not finite
    in one, or differently in both; of a mask one record alone allows `n_only_a` and `n_only_b`.
    `at` has the `axes` of the largest or first difference, with its indices in `a` and in `b`:
    tokens of their text, and numbers of heads. `heads` are the largest difference of each head and
    its sequence, `told` other formulas, as settings.
    """

    site: str
    seen: Literal["array", "numbers", "extremes", "shape"]
    status: Literal["identical", "within", "beyond", "shape", "skipped"]
    axes: tuple[str, ...]
    shape_a: tuple[int, ...] | None
    shape_b: tuple[int, ...] | None
    n_cells: int = 0
    n_different: int = 0
    n_nonfinite: int = 0
    n_only_a: int = 0
    n_only_b: int = 0
    largest: float | None = None
    magnitude: float | None = None
    at: dict[str, Any] | None = None
    why: str = ""
    heads: list[dict[str, Any]] = []
    told: list[dict[str, Any]] = []
    relative: float | None = None

    @property
    def departs(self) -> bool:
        """Whether the records differ here."""
        return self.status in ("beyond", "shape")


@dataclass(frozen=True)
class LayerDifference:
    """One layer of both records, or the whole records with an empty `label` if they have no layers.
    `inspected_a` and `inspected_b` describe the layers of checkpoints.
    """

    label: str
    a: Record
    inspected_a: InspectedLayer | None
    b: Record
    inspected_b: InspectedLayer | None
    tolerance: float

    @cached_property
    def places(self) -> dict[str, list[Array]]:
        """The positions of the tokens of queries and of keys that correspond, `[2, tokens]` for
        each sequence.
        """
        of = {"query": (self.a.sequences, self.b.sequences), "key": (self.a.keys, self.b.keys)}
        return {
            axis: [pairs(x.tokens, y.tokens) for x, y in zip(*both, strict=False)]
            for axis, both in of.items()
        }

    @cached_property
    def has_same_tokens(self) -> bool:
        """Whether the texts that both have are the same."""
        texts = [
            *zip(self.a.sequences, self.b.sequences, strict=False),
            *zip(self.a.keys, self.b.keys, strict=False),
        ]
        return all(x.tokens == y.tokens for x, y in texts)

    @property
    def only(self) -> dict[str, list[str]]:
        """The arrays of A alone, and of B alone."""
        return _alone(
            *([name for name in _ORDER if name in record.arrays] for record in (self.a, self.b))
        )

    @cached_property
    def sites(self) -> list[Difference]:
        """The sites in order: arrays that both have, other steps of their traces, and of user code
        steps of one alone.
        """
        is_decoded = self.a.decoding is not None or self.b.decoding is not None
        a, b = (
            {step.site: step for step in record.trace if not is_decoded}
            for record in (self.a, self.b)
        )
        of_code = [name for name in a | b if self.is_code or name not in _ORDER]
        of_one = a | b if self.is_code else {}
        return [
            _compared_site(self, name, a.get(name), b.get(name))
            for name in dict.fromkeys((*of_code, *_ORDER))
            if (name in self.a.arrays and name in self.b.arrays)
            or (name in a and name in b)
            or name in of_one
        ]

    @property
    def is_code(self) -> bool:
        """Whether both are traces of user code, whose axes have words of their own."""
        return self.a.module is not None and self.b.module is not None

    @property
    def head_pairs(self) -> list[tuple[HeadStatistics, HeadStatistics]]:
        """The heads with statistics in both records; none if the numbers of heads differ."""
        of_b = {head.head: head for head in self.b.heads}
        is_alike = self.a.config.n_heads == self.b.config.n_heads
        return [(head, of_b[head.head]) for head in self.a.heads if is_alike and head.head in of_b]

    @cached_property
    def heads(self) -> list[dict[str, Any]]:
        """The heads that changed; `size` is the largest change of a weight, None if a number is
        missing or new.
        """
        heads = []
        for a, b in self.head_pairs:
            statistics, size = [], 0.0
            for row in _CHANGES:
                before, after = getattr(a, row.field), getattr(b, row.field)
                change = change_of(before, after)
                if change > self.tolerance * max(1.0, abs(before or 0.0), abs(after or 0.0)):
                    statistics.append({"name": row.field, "a": before, "b": after})
                    size = max(size, change) if row.is_change or math.isinf(change) else size
            if statistics or a.kind != b.kind:
                head = {
                    "layer": self.label,
                    "head": a.head,
                    "kind_a": a.kind,
                    "kind_b": b.kind,
                    "size": finite(size),
                }
                heads.append(head | {"statistics": statistics})
        return heads


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


# -------------------------------------------------------------------------------------------- sites


def _compared_site(layer: LayerDifference, name: str, a: Step | None, b: Step | None) -> Difference:
    """The comparison of a site: of all numbers if both are known, else of extremes and moments, or
    of shapes.
    """
    (axes, shape_a, x), (axes_b, shape_b, y) = _tensor(layer.a, name, a), _tensor(layer.b, name, b)
    is_array = name in layer.a.arrays and name in layer.b.arrays
    is_mask = name in ("visible", "allowed")  # a count or a mask is the same, or it is not
    is_same = shape_a == shape_b and layer.has_same_tokens
    values = [step.values for step in (a, b) if step is not None and step.values is not None]
    row = Difference(
        name, "array" if is_array else "shape", "identical", axes or axes_b, shape_a, shape_b
    )
    why = _other_shape(layer, row, axes_b)
    if why:
        row = changed(row, status="shape", why=why)
    elif x is not None and y is not None and axes == axes_b and (is_array or is_same):
        found = _compared(_cells(layer, name, axes, (x, y)), 0.0 if is_mask else layer.tolerance)
        row = changed(row, seen="array" if is_array else "numbers", **found)
        if not row.n_cells:
            row = changed(row, status="skipped", why="they have no cells in common", heads=[])
        if is_mask or not row.n_cells:
            row = changed(row, largest=None, magnitude=None, relative=None)
    elif len(values) == 2 and is_same:
        x, y = (np.array([each.min, each.max, each.mean, each.std], float) for each in values)
        found = _compared([(0, None, [], x, y, np.ones(1, bool))], layer.tolerance)
        row = changed(row, seen="extremes", why="by min, max, mean, std", **found)
    if (
        row.seen in ("numbers", "extremes")
        and len({(each.n_nan, each.n_inf) for each in values}) > 1
    ):
        row = changed(row, status="beyond")
    if a and b and a.operation and b.operation and a.formula != b.formula:
        told = [{"name": "formula", "a": a.formula, "b": b.formula, "layers": []}]
        row = changed(row, status=row.status if why else "beyond", told=told)
    return row


def _other_shape(layer: LayerDifference, row: Difference, axes_b: tuple[str, ...]) -> str:
    """Why two shapes differ, empty if they do not. Padding decides whether sequences have positions
    in common, so a batch is excused.
    """
    if row.shape_a is None or row.shape_b is None:
        return f"only {'B' if row.shape_a is None else 'A'} has it"
    if [axis for axis in row.axes if axis != "batch"] != [
        axis for axis in axes_b if axis != "batch"
    ]:
        return f"axes {' '.join(row.axes)} against {' '.join(axes_b)}"
    excused = {"batch"} if layer.is_code else _MATCHED
    a, b = (
        dict(zip(row.axes, row.shape_a, strict=True)),
        dict(zip(axes_b, row.shape_b, strict=True)),
    )
    sizes = {axis: (n, b[axis]) for axis, n in a.items() if axis not in excused}
    if "head" in a and row.site not in FOR_ALL_HEADS:
        sizes = {"head": (layer.a.config.n_heads, layer.b.config.n_heads)} | sizes
    return next((f"{axis} {n} against {m}" for axis, (n, m) in sizes.items() if n != m), "")


def _tensor(
    record: Record, name: str, step: Step | None
) -> tuple[tuple[str, ...], tuple[int, ...] | None, Array | None]:
    """The axes of a site, its shape, and its numbers, if the record has them as an array or in a
    step of its trace.
    """
    if name in record.arrays:
        return (
            _AXES.get(name) or SITES[name].axes_for(record.dims),
            record.arrays[name].shape,
            record.arrays[name],
        )
    if step is None:
        return (), None, None
    numbers = None if step.values is None else step.values.numbers
    return (
        step.axes,
        step.shape,
        None if numbers is None else np.array(numbers, float).reshape(step.shape),
    )


_Axis = tuple[str, Array, Array]
"""The cells along an axis that correspond in A and in B, `[2, cells]`: their places, as they are
named, and their indices in the arrays. An axis without a name stands for all heads."""
_Cells = tuple[int, int | None, Sequence[_Axis], Array, Array, Array]
"""The sequence and the head of some cells, their axes, the numbers of both records there, and which
of them count."""


def _cells(
    layer: LayerDifference, name: str, axes: Sequence[str], arrays: tuple[Array, Array]
) -> Iterator[_Cells]:
    """The cells of two arrays that correspond, a sequence and a head at a time, which bounds
    memory.
    """
    records = layer.a, layer.b
    heads: list[int | None] = [None]  # all at once
    is_one_row = name in FOR_ALL_HEADS and all(array.shape[1] == 1 for array in arrays)
    if "head" in axes and not layer.is_code and not is_one_row:
        heads = [head for head in heads_of(layer.a) if head in heads_of(layer.b)]
    has_masks = name in ("qk", "scores") and all("allowed" in record.arrays for record in records)
    for sequence in range(len(layer.places["query"]) if "batch" in axes else 1):
        for head in heads:
            sizes = zip(axes, arrays[0].shape, strict=True)
            matched = [_axis(layer, axis, n, sequence, head) for axis, n in sizes]
            x, y = (_chosen(array, matched, side) for side, array in enumerate(arrays))
            counted = np.ones(1, bool)
            if has_masks:  # scores of masked cells have no meaning
                a, b = (
                    _chosen(record.arrays["allowed"], matched, side)
                    for side, record in enumerate(records)
                )
                counted = a & b
            yield sequence, head, matched, x, y, counted


def _axis(layer: LayerDifference, axis: str, n: int, sequence: int, head: int | None) -> _Axis:
    """What corresponds along an axis: tokens, the one sequence and head, or all cells of the same
    meaning.
    """
    records, is_same = (layer.a, layer.b), True
    if axis == "batch":
        places = np.full((2, 1), sequence)
        return "sequence", places, places
    if axis == "head" and not layer.is_code:
        indices = [[0 if head is None else heads_of(record).index(head)] for record in records]
        return "" if head is None else "head", np.full((2, 1), head or 0), np.array(indices)
    if axis in ("query", "key") and not layer.is_code:
        first = [
            record.first_query(sequence) if axis == "query" else record.first_key(sequence)
            for record in records
        ]
        places = layer.places[axis][sequence]
        return axis, places, places + np.array(first)[:, None]
    if axis == "span":
        is_same = [span.name for span in layer.a.spans] == [span.name for span in layer.b.spans]
    elif axis in _MADE_OF:
        a, b = (getattr(record.survey, _MADE_OF[axis], None) for record in records)
        is_same = a == b and (layer.has_same_tokens or axis == "step")
    places = np.tile(np.arange(n if is_same else 0), (2, 1))
    return axis, places, places


def _chosen(array: Array, axes: Sequence[_Axis], side: int) -> Array:
    """The numbers of the array of a side; one row may stand for all heads."""
    indices = [np.minimum(of[side], n - 1) for (_, _, of), n in zip(axes, array.shape, strict=True)]
    return array[np.ix_(*indices)]


def heads_of(record: Record) -> list[int]:
    """The numbers of the heads on the head axis of a layer's arrays."""
    return (
        [head.head for head in record.heads] if record.survey else [*range(record.config.n_heads)]
    )


def _compared(pieces: Iterable[_Cells], tolerance: float) -> dict[str, Any]:
    """The comparison of numbers as fields of `Difference`: how many differ, by how much, where, and
    by head.
    """
    counts, largest, magnitude, worst, is_identical = np.zeros(5, int), 0.0, 0.0, 0.0, True
    at: dict[str, list[Any]] | None = None
    heads: dict[int, tuple[float, int]] = {}
    for sequence, head, axes, a, b, counted in pieces:
        index = np.flatnonzero(np.broadcast_to(counted, a.shape))
        x, y = (numbers.ravel()[index].astype(np.float64) for numbers in (a, b))
        with np.errstate(over="ignore", invalid="ignore"):
            gaps = np.nan_to_num(np.abs(y - x), nan=np.inf, posinf=np.inf)
        gaps[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
        is_identical &= x.tobytes() == y.tobytes()
        only = ((x > y).sum(), (x < y).sum()) if a.dtype == bool else (0, 0)
        counts += (x.size, np.count_nonzero(gaps), np.isinf(gaps).sum(), *only)
        largest = max(largest, float(gaps.max(initial=0.0, where=np.isfinite(gaps))))
        sizes = np.maximum(np.abs(x), np.abs(y))
        magnitude = max(magnitude, float(sizes.max(initial=0.0, where=np.isfinite(sizes))))
        gap = float(gaps.max(initial=0.0))
        if gap > worst:
            worst, place = gap, np.unravel_index(index[gaps.argmax()], a.shape)
            found = [
                (axis, *places[:, n].tolist())
                for (axis, places, _), n in zip(axes, place, strict=False)
                if axis
            ]
            at = (
                dict(zip(("axes", "a", "b"), map(list, zip(*found, strict=True)), strict=True))
                if found
                else None
            )
        if head is not None:  # of equal gaps, the first sequence
            heads[head] = max(heads.get(head, (-1.0, 0)), (gap, -sequence))
    is_within = tolerance > 0 and not counts[2] and largest <= tolerance * magnitude
    return {
        "status": "identical" if is_identical else "within" if is_within else "beyond",
        **dict(
            zip(
                ("n_cells", "n_different", "n_nonfinite", "n_only_a", "n_only_b"),
                counts.tolist(),
                strict=True,
            )
        ),
        "largest": largest,
        "magnitude": magnitude,
        "relative": largest / (magnitude or 1.0),
        "at": at,
        "heads": [
            {"head": n, "largest": finite(gap), "sequence": -s}
            for n, (gap, s) in sorted(heads.items())
        ],
    }
