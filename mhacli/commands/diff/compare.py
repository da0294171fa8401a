"""Compares two records: texts, layer by layer sites and heads, effects, settings. A is the reference; differences are B − A.

Dictionaries are parts of the JSON document as they are. Non-finite numbers are None.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace as changed

from mhacli.commands.diff.result import SCHEMA
from mhacli.io.data import Array, finite, plain
from mhacli.record.exports import Shown
from mhacli.record.heads import FOR_ALL_HEADS, PER_QUERY, STATISTICS, HeadStatistics
from mhacli.record.record import InspectedLayer, Record, Step
from mhacli.sites import SITES
from mhacli.text.align import align, pairs
from mhacli.text.escape import without_surrogates
from mhacli.text.tokens import TokenSequence

_STATISTICS_OF_ROWS = (
    "max_score", "lse", "corner", "top_shares", "map", "received", "profile", "span_mass", "sink", "distance",
    "participation", "entropy",
)  # fmt: skip
"""Statistics of scores and patterns in records, which are not sites of the computation."""
_MASK = ("visible", "uniform_map", "uniform_received", "uniform_profile", "uniform_span_mass", "allowed")
_FOLLOWED_BY = {"qk": _MASK, "scores": _STATISTICS_OF_ROWS[:2], "pattern": _STATISTICS_OF_ROWS[2:]}
_ORDER = tuple(name for site in SITES for name in (site, *_FOLLOWED_BY.get(site, ())))
"""Every array by name in the order of execution: the mask before the scores, and statistics after the pattern."""
_AXES = {
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


@dataclass(frozen=True, repr=False)
class RecordDiff(Shown):
    """All differences of two records, whose labels are `names`. `tolerance` is relative; `dtype` is the dtype from which it
    follows, None if the user set it."""

    a: Record
    b: Record
    names: tuple[str, str]
    tolerance: float
    dtype: str | None

    def __repr__(self) -> str:
        """The verdict in a sentence."""
        return f"<RecordDiff: {self.summary}>"

    def view(self, screen: Any, options: Any = None) -> Any:
        """What `mha diff` prints on a screen."""
        from mhacli.commands.diff.view import diff_view
        from mhacli.render.base.options import ViewOptions

        return diff_view(self, options or ViewOptions(), screen)

    @cached_property
    def layers(self) -> list[LayerDifference]:
        """The layers that both records have."""
        of_a, of_b = _layers(self.a), _layers(self.b)
        return [LayerDifference(each, *of_a[each], *of_b[each], self.tolerance) for each in of_a if each in of_b]

    @cached_property
    def only(self) -> dict[str, list[str]]:
        """The labels of the layers in A alone, and in B alone."""
        return _alone(*([label for label in _layers(record) if label] for record in (self.a, self.b)))

    @cached_property
    def texts(self) -> list[dict[str, Any]]:
        """The aligned texts that both have, paired by number."""
        families = [("texts", self.a.sequences, self.b.sequences)]
        if self.a.context is not None or self.b.context is not None:
            families.append(("context", self.a.keys, self.b.keys))
        texts = []
        for family, of_a, of_b in families:
            for number, (x, y) in enumerate(zip(of_a, of_b, strict=False)):
                texts.append({"family": family, "sequence": number} | _aligned(x, y))
        return texts

    @cached_property
    def settings(self) -> list[dict[str, Any]]:
        """The settings that differ, with the labels of the layers concerned."""
        sides = [("", _settings_of(self.a), _settings_of(self.b))]
        for layer in self.layers:
            if layer.inspected_a is not None:
                both = (msgspec.to_builtins(each) for each in (layer.inspected_a, layer.inspected_b))
                sides.append((layer.label, *both))
        labels: dict[tuple[str, str, str], list[str]] = {}
        for label, of_a, of_b in sides:
            for name in of_a | of_b:
                before, after = _word(of_a.get(name)), _word(of_b.get(name))
                if before != after and name not in _NO_SETTINGS:
                    labels.setdefault((name, before, after), []).extend([label] if label else [])
        return [{"name": name, "a": x, "b": y, "layers": concerned} for (name, x, y), concerned in labels.items()]

    @cached_property
    def effects(self) -> dict[str, Any] | None:
        """The effects of B against those of A, of `n_compared` removals; None unless both have proven effects. Heads match by
        number, edges by tokens. The tolerance is relative to the largest effect; what is within the noise is no difference."""
        a, b = self.a, self.b
        if a.effect is None or b.effect is None or not (a.effect.verified.ok and b.effect.verified.ok):
            return None
        metric = a.effect.metric if a.effect.metric == b.effect.metric else "d_output"
        texts, context = (
            {None: None, **dict(pairs(x[0].tokens, y[0].tokens)[::-1].T.tolist())}
            for x, y in ((a.sequences, b.sequences), (a.keys, b.keys))
        )
        parts = attrgetter("removed", "kind", "layer", "head", "heads", "kinds", "spans")
        of_a = {(*parts(effect), effect.query, effect.key): effect for effect in a.effects}
        of_b = {}
        for effect in b.effects:  # tokens that A lacks stay apart
            queries = context if effect.kind == "encoder" else texts
            keys = context if effect.kind in ("encoder", "cross") else texts
            query, key = queries.get(effect.query, "only B"), keys.get(effect.key, ("only B", effect.key))
            of_b[*parts(effect), query, key] = effect
        both = [(effect, of_b[key]) for key, effect in of_a.items() if key in of_b]
        largest = max((abs(getattr(effect, metric)) for pair in both for effect in pair), default=0.0)
        least = max(self.tolerance * largest, a.effect.floor + b.effect.floor) if self.tolerance else 0.0
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

    @property
    def first_site(self) -> tuple[LayerDifference, Difference] | None:
        """The first site that differs, in the order of execution, with its layer; a statistic if no site of the layer does."""
        ordered = (
            (each, sorted(each.sites, key=lambda site: site.site in _STATISTICS_OF_ROWS)) for each in self.layers
        )
        return next(((layer, site) for layer, sites in ordered for site in sites if site.departs), None)

    @property
    def first(self) -> Literal["tokens", "ids", "site", "effects"] | None:
        """Where the records differ first, with inputs before numbers; None if they agree."""
        if len(self.a.sequences) != len(self.b.sequences) or not all(text["is_same"] for text in self.texts):
            return "tokens"
        if any(text["n_other_ids"] for text in self.texts):
            return "ids"
        if self.first_site is not None:
            return "site"
        has_others = self.effects and (self.effects["changes"] or not self.effects["n_compared"])
        return "effects" if has_others else None

    @property
    def verdict(self) -> Literal["agree", "differ", "nothing"]:
        """Whether the records agree in everything that both hold; `nothing` if they have nothing in common."""
        is_known = any(site.status in ("identical", "within") for layer in self.layers for site in layer.sites)
        if self.first is not None:
            return "differ"
        return "agree" if is_known else "nothing"

    @property
    def summary(self) -> str:
        """The result in a sentence: `2 of 12 heads changed; the first difference is in layer 3 pattern`."""
        if self.verdict == "nothing":
            return "nothing can be compared: the records have no layer, site or step in common"
        n_changed, n_heads = (sum(len(getattr(each, name)) for each in self.layers) for name in ("heads", "head_pairs"))
        parts = [f"{n_changed or 'none'} of {n_heads} head{'s' * (n_heads != 1)} changed"] if n_heads else []
        parts += [self.changed_effects] if self.effects else []
        if self.first is None:
            sites = [site for layer in self.layers for site in layer.sites if site.seen != "shape"]
            n_sites = sum(site.status not in ("shape", "skipped") for site in sites)
            where = f" in {n_sites} site{'s' * (n_sites != 1)}" if n_sites else ""
            return "; ".join([f"no difference{where}", *parts])
        words = "the effects"
        if self.first_site is not None:
            layer, site = self.first_site
            words = f"{layer.label} {'the mask' if site.site == 'allowed' else site.site}".strip()
        if self.first in ("tokens", "ids"):
            parts.append(f"the first difference is in the {'ids of the ' if self.first == 'ids' else ''}tokens")
            return "; ".join([*parts, *([f"the first numbers that differ are in {words}"] if self.first_site else [])])
        return "; ".join([*parts, f"the first difference is in {words}"])

    @property
    def changed_effects(self) -> str:
        """The number of changed effects, if there are `effects`: `3 of 72 effects changed`."""
        assert self.effects is not None
        changes, n = self.effects["changes"], self.effects["n_compared"]
        if not n:
            return "no removal is in both, so no effects can be compared"
        return f"{len(changes) or 'none'} of {n} effect{'s' * (n != 1)} changed"

    def to_dict(self, command: Sequence[str] = ()) -> dict[str, Any]:
        """The document that `mha diff --json` prints, of this `command`."""
        site = self.first_site and {"layer": self.first_site[0].label, "site": self.first_site[1].site}
        at = site if site and self.first == "site" else {"layer": "", "site": None}
        return plain({  # type: ignore[no-any-return]
            "schema": SCHEMA,
            "command": [*command],
            "verdict": self.verdict,
            "summary": self.summary,
            "said": self.summary,
            "a": without_surrogates(self.names[0]),
            "b": without_surrogates(self.names[1]),
            "tolerance": {"relative": self.tolerance, "of_dtype": self.dtype},
            "first": self.first and {"where": self.first, **at},
            "first_site": site,
            "settings": self.settings,
            "n_sequences": [len(self.a.sequences), len(self.b.sequences)],
            "texts": self.texts,
            "layers": [
                {"layer": each.label, "sites": each.sites, "heads": each.heads, **each.only} for each in self.layers
            ],
            **self.only,
            "effects": self.effects,
        })  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `--csv`: a site of a layer, or a statistic of a head, under the names of the document."""
        rows: list[dict[str, Any]] = []
        for layer in self.to_dict()["layers"]:
            named = {"layer": layer["layer"]}
            rows += [
                named | {name: site[name] for name in site if name not in ("heads", "told")} for site in layer["sites"]
            ]
            for head in layer["heads"]:
                of_head = named | {"head": head["head"]}
                rows += [of_head | {"statistic": each.pop("name")} | each for each in head["statistics"]]
        return rows


def _aligned(x: TokenSequence, y: TokenSequence) -> dict[str, Any]:
    """Runs of equal tokens of a text of A and one of B (`matches`), some with other ids, and the tokens between (`changes`)."""
    parts, is_exact = align(x.tokens, y.tokens)
    matches, changes, n_other_ids, n_replaced = [], [], 0, 0
    for i, j, is_equal in parts:
        if is_equal:
            matches.append({"a": i.start, "b": j.start, "length": len(i)})
            n_other_ids += sum(x.ids[m] != y.ids[n] for m, n in zip(i, j, strict=True))
            continue
        change: dict[str, Any] = {"change": "only B" if not i else "only A" if not j else "replaced"}
        for side, text, places in (("a", x, i), ("b", y, j)):
            tokens = [without_surrogates(text.tokens[n]) for n in places]
            change |= {f"{side}_begin": places.start, f"{side}_end": places.stop, side: tokens}
        changes.append(change)
        n_replaced += len(i) if j else 0
    return {
        "n_a": len(x.tokens),
        "n_b": len(y.tokens),
        "matches": matches,
        "n_other_ids": n_other_ids,
        "exact": is_exact,
        "n_aligned": sum(match["length"] for match in matches),
        "is_same": not changes,
        "n_replaced": n_replaced,
        "changes": changes,
    }


def _layers(record: Record) -> dict[str, tuple[Record, InspectedLayer | None]]:
    """The record of each layer by its label, with its description; several attentions of a layer are numbered."""
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
    return {"only_a": [each for each in a if each not in b], "only_b": [each for each in b if each not in a]}


_NO_SETTINGS = (
    "random", "device asked",  # inputs have shapes, and the environment has the device
    "path", "compared_len", "identical_outputs", "without", "generated",  # of the model
    "layer", "kind", "unverified", "self_check", "survey", "call", "extras",  # of a layer
)  # fmt: skip


def _settings_of(record: Record) -> dict[str, object]:
    """The settings of a whole record, the command first."""
    model, module, decoding = record.model, record.module, record.decoding
    settings: dict[str, object] = {"command": shlex.join(record.command)}
    settings |= (
        {"weights": record.weights} if model is None else {"model": model.path, "padding": record.config.padding}
    )
    settings |= msgspec.to_builtins(model or record.config)
    if module is not None:
        arguments = {f"argument {argument.name}": argument.value for argument in module.arguments}
        settings |= {"module": module.target, "called": module.called, **arguments}
    if decoding is not None:
        settings |= {"cache": decoding.cache, "prompt length": decoding.prompt_len}
    settings["kernel"] = record.survey and record.survey.kernel
    settings |= {name: getattr(record.effect, name, None) for name in ("metric", "position", "target", "versus")}
    for name, word in (("removed", "removed"), ("replace", "replaced by"), ("at", "removed at")):
        settings[word] = tuple(dict.fromkeys(getattr(effect, name) for effect in record.effects))
    settings |= {name.replace("_", " "): value for name, value in msgspec.to_builtins(record.environment).items()}
    return settings | {"self-check": "ok" if record.self_check.ok else "FAILED"}


def _word(value: object) -> str:
    """A setting as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return ", ".join(map(_word, value)) or "none"
    return "none" if value is None else str(value)


class Difference(msgspec.Struct, frozen=True):
    """The comparison of one site of one layer: of arrays, of all numbers of a small tensor in traces, of extremes and moments, or
    of shapes alone (`seen`). `status` is equal bits, within the tolerance, beyond it, another shape or formula, or not
    comparable (`why`). `largest` is the largest |B − A| of numbers finite in both, `magnitude` the largest number of either, and
    `relative` their ratio. `n_different` cells are unequal, of which `n_nonfinite` are not finite in one, or differently in
    both; of a mask one record alone allows `n_only_a` and `n_only_b`. `at` has the `axes` of the largest or first difference,
    with its indices in `a` and in `b`: tokens of their text, and numbers of heads. `heads` are the largest difference of each
    head and its sequence, `told` other formulas, as settings."""

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
    """One layer of both records, or the whole records with an empty `label` if they have no layers. `inspected_a` and
    `inspected_b` describe the layers of checkpoints."""

    label: str
    a: Record
    inspected_a: InspectedLayer | None
    b: Record
    inspected_b: InspectedLayer | None
    tolerance: float

    @cached_property
    def places(self) -> dict[str, list[Array]]:
        """The positions of the tokens of queries and of keys that correspond, `[2, tokens]` for each sequence."""
        of = {"query": (self.a.sequences, self.b.sequences), "key": (self.a.keys, self.b.keys)}
        return {axis: [pairs(x.tokens, y.tokens) for x, y in zip(*both, strict=False)] for axis, both in of.items()}

    @cached_property
    def has_same_tokens(self) -> bool:
        """Whether the texts that both have are the same."""
        texts = [*zip(self.a.sequences, self.b.sequences, strict=False), *zip(self.a.keys, self.b.keys, strict=False)]
        return all(x.tokens == y.tokens for x, y in texts)

    @property
    def only(self) -> dict[str, list[str]]:
        """The arrays of A alone, and of B alone."""
        return _alone(*([name for name in _ORDER if name in record.arrays] for record in (self.a, self.b)))

    @cached_property
    def sites(self) -> list[Difference]:
        """The sites in order: arrays that both have, other steps of their traces, and of user code steps of one alone."""
        is_decoded = self.a.decoding is not None or self.b.decoding is not None
        a, b = ({step.site: step for step in record.trace if not is_decoded} for record in (self.a, self.b))
        of_code = [name for name in a | b if self.is_code or name not in _ORDER]
        sites = []
        for name in dict.fromkeys((*of_code, *_ORDER)):
            if (name in self.a.arrays and name in self.b.arrays) or (name in a and name in b):
                sites.append(_compared_site(self, name, a.get(name), b.get(name)))
            elif self.is_code and name in a | b:
                shape_a, shape_b = (side[name].shape if name in side else None for side in (a, b))
                why = f"only {'A' if name in a else 'B'} has it"
                sites.append(Difference(name, "shape", "shape", (a | b)[name].axes, shape_a, shape_b, why=why))
        return sites

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
        """The heads that changed; `size` is the largest change of a weight, None if a number is missing or new."""
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
                head = {"layer": self.label, "head": a.head, "kind_a": a.kind, "kind_b": b.kind, "size": finite(size)}
                heads.append(head | {"statistics": statistics})
        return heads


_CHANGES = sorted(STATISTICS, key=lambda row: (not row.is_change, row.is_change and row.unit != "weight"))
"""The statistics in the order of listing changes: those that measure how far a head changed come first."""


def change_of(a: float | None, b: float | None) -> float:
    """The size of a change; infinite if only one record has a value, 0 if neither has."""
    if a is None or b is None:
        return 0.0 if a == b else math.inf
    return abs(b - a)


# --------------------------------------------------------------------------------------------------------------- sites


def _compared_site(layer: LayerDifference, name: str, a: Step | None, b: Step | None) -> Difference:
    """The comparison of a site that both have: of all numbers if both are known, else of extremes and moments, or of shapes."""
    (axes, shape_a, x), (axes_b, shape_b, y) = _tensor(layer.a, name, a), _tensor(layer.b, name, b)
    is_array = name in layer.a.arrays and name in layer.b.arrays
    row = Difference(name, "array" if is_array else "shape", "identical", axes, shape_a, shape_b)
    why = _other_shape(layer, name, dict(zip(axes, shape_a, strict=True)), dict(zip(axes_b, shape_b, strict=True)))
    is_same = shape_a == shape_b and layer.has_same_tokens
    values = [step.values for step in (a, b) if step is not None and step.values is not None]
    if why:
        row = changed(row, status="shape", why=why)
    elif x is not None and y is not None and axes == axes_b and (is_array or is_same):
        is_mask = name in ("visible", "allowed")  # a count or a mask is the same, or it is not
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
    if row.seen in ("numbers", "extremes") and len({(each.n_nan, each.n_inf) for each in values}) > 1:
        row = changed(row, status="beyond")
    if a and b and a.operation and b.operation and a.formula != b.formula:
        told = [{"name": "formula", "a": a.formula, "b": b.formula, "layers": []}]
        row = changed(row, status=row.status if why else "beyond", told=told)
    return row


def _other_shape(layer: LayerDifference, name: str, a: dict[str, int], b: dict[str, int]) -> str:
    """Why two shapes differ, empty if they do not. Padding decides whether sequences share positions, so a batch is excused."""
    if [axis for axis in a if axis != "batch"] != [axis for axis in b if axis != "batch"]:
        return f"axes {' '.join(a)} against {' '.join(b)}"
    excused = {"batch"} if layer.is_code else _MATCHED
    sizes = {axis: (n, b[axis]) for axis, n in a.items() if axis not in excused}
    if "head" in a and name not in FOR_ALL_HEADS:
        sizes = {"head": (layer.a.config.n_heads, layer.b.config.n_heads)} | sizes
    return next((f"{axis} {n} against {m}" for axis, (n, m) in sizes.items() if n != m), "")


def _tensor(record: Record, name: str, step: Step | None) -> tuple[tuple[str, ...], tuple[int, ...], Array | None]:
    """The axes of a site, its shape, and its numbers if the record has them as an array or in a step of its trace."""
    if step is None or name in record.arrays:
        return _AXES.get(name) or SITES[name].axes_for(record.dims), record.arrays[name].shape, record.arrays[name]
    numbers = None if step.values is None else step.values.numbers
    return step.axes, step.shape, None if numbers is None else np.array(numbers, float).reshape(step.shape)


_Places = Sequence[tuple[str, Array]]
"""Along each axis, the indices `[2, cells]` that correspond in A and in B; an axis without a name stands for all heads."""
_Cells = tuple[int, int | None, _Places, Array, Array, Array]
"""The sequence and the head of some cells, their places, the numbers of both records there, and which of them count."""


def _cells(layer: LayerDifference, name: str, axes: Sequence[str], arrays: tuple[Array, Array]) -> Iterator[_Cells]:
    """The cells of two arrays that correspond, a sequence and a head at a time, which bounds memory."""
    records = layer.a, layer.b
    heads: list[int | None] = [None]  # all at once
    is_one_row = name in FOR_ALL_HEADS and all(array.shape[1] == 1 for array in arrays)
    if "head" in axes and not layer.is_code and not is_one_row:
        heads = [head for head in heads_of(layer.a) if head in heads_of(layer.b)]
    has_masks = name in ("qk", "scores") and all("allowed" in record.arrays for record in records)
    for sequence in range(len(layer.places["query"]) if "batch" in axes else 1):
        for head in heads:
            sizes = zip(axes, arrays[0].shape, strict=True)
            places = [_place(layer, axis, n, sequence, head) for axis, n in sizes]
            x, y = (_chosen(record, arrays[side], places, side) for side, record in enumerate(records))
            counted = np.ones(1, bool)
            if has_masks:  # scores of masked cells have no meaning
                a, b = (_chosen(record, record.arrays["allowed"], places, side) for side, record in enumerate(records))
                counted = a & b
            yield sequence, head, places, x, y, counted


def _place(layer: LayerDifference, axis: str, n: int, sequence: int, head: int | None) -> tuple[str, Array]:
    """The indices along an axis that correspond: of tokens, of the one sequence and head, or of all cells of the same meaning."""
    is_same = True
    if axis == "batch":
        return "sequence", np.array([[sequence]] * 2)
    if axis == "head" and not layer.is_code:
        return "" if head is None else "head", np.array([[head or 0]] * 2)
    if axis in ("query", "key") and not layer.is_code:
        return axis, layer.places[axis][sequence]
    if axis == "span":
        is_same = [span.name for span in layer.a.spans] == [span.name for span in layer.b.spans]
    elif axis in _MADE_OF:
        a, b = (getattr(record.survey, _MADE_OF[axis], None) for record in (layer.a, layer.b))
        is_same = a == b and (layer.has_same_tokens or axis == "step")
    return axis, np.tile(np.arange(n if is_same else 0), (2, 1))


def _chosen(record: Record, array: Array, places: _Places, side: int) -> Array:
    """The numbers of an array at the places of a side, behind padding; one row may stand for all heads."""
    indices, sequence = list[Any](), 0
    for axis, both in places:
        index = both[side].tolist()
        if axis == "sequence":
            (sequence,) = index
        elif axis == "head" and record.module is None:
            index = [min(heads_of(record).index(head), array.shape[1] - 1) for head in index]
        elif axis in ("query", "key"):
            first = record.first_query(sequence) if axis == "query" else record.first_key(sequence)
            index = [place + first for place in index]
        indices.append(index)
    return array[np.ix_(*indices)]


def heads_of(record: Record) -> list[int]:
    """The numbers of the heads on the head axis of a layer's arrays."""
    return [head.head for head in record.heads] if record.survey else [*range(record.config.n_heads)]


def _compared(pieces: Iterable[_Cells], tolerance: float) -> dict[str, Any]:
    """The comparison of numbers as fields of `Difference`: how many differ, by how much, where, and by head."""
    counts, largest, magnitude, worst, is_identical = np.zeros(5, int), 0.0, 0.0, 0.0, True
    at: dict[str, list[Any]] | None = None
    heads: dict[int, tuple[float, int]] = {}
    for sequence, head, places, a, b, counted in pieces:
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
            found = [(axis, *both[:, n].tolist()) for (axis, both), n in zip(places, place, strict=False) if axis]
            at = dict(zip(("axes", "a", "b"), map(list, zip(*found, strict=True)), strict=True)) if found else None
        if head is not None:  # of equal gaps, the first sequence
            heads[head] = max(heads.get(head, (-1.0, 0)), (gap, -sequence))
    is_within = tolerance > 0 and not counts[2] and largest <= tolerance * magnitude
    return {
        "status": "identical" if is_identical else "within" if is_within else "beyond",
        **dict(zip(("n_cells", "n_different", "n_nonfinite", "n_only_a", "n_only_b"), counts.tolist(), strict=True)),
        "largest": largest,
        "magnitude": magnitude,
        "relative": largest / (magnitude or 1.0),
        "at": at,
        "heads": [{"head": n, "largest": finite(gap), "sequence": -s} for n, (gap, s) in sorted(heads.items())],
    }
