"""`mhacli.diff`; and two records compared: texts, layers (`sites.py`), effects, settings.
Differences are B − A.

Dictionaries are parts of the JSON document as they are. Non-finite numbers are None.
"""

from __future__ import annotations

import math
import os
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

import msgspec
from msgspec.structs import replace as changed

from mhacli.commands.diff.result import SCHEMA, Diff
from mhacli.commands.diff.sites import LayerDifference, alone
from mhacli.errors import UsageError
from mhacli.record.checks import TOLERANCES
from mhacli.record.effect import Effect
from mhacli.record.record import InspectedLayer, Record
from mhacli.record.storage import load
from mhacli.text.align import align, pairs
from mhacli.text.escape import without_surrogates
from mhacli.text.tokens import TokenSequence


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
    names = tuple(
        name if isinstance(record, Record) else os.fspath(record)
        for name, record in (("the first record", a), ("the second record", b))
    )
    a, b = (record if isinstance(record, Record) else load(record) for record in (a, b))
    dtype = None
    if tolerance is None:
        dtypes = {(record.model or record.config).dtype for record in (a, b)}
        dtype = next((name for name in TOLERANCES if name in dtypes), "float32")
        tolerance = TOLERANCES[dtype].runs
    return record_diff(a, b, names, tolerance, dtype)


def record_diff(
    a: Record, b: Record, names: Sequence[str], tolerance: float, dtype: str | None
) -> Diff:
    """All differences of two named records. `tolerance` is relative; `dtype` is that from which it
    follows, None if the user set it.
    """
    of_a, of_b = _layers(a), _layers(b)
    layers = [
        LayerDifference(each, *of_a[each], *of_b[each], tolerance) for each in of_a if each in of_b
    ]
    texts, effects = _texts(a, b), _effects(a, b, tolerance)
    first_site = _first_site(layers)
    where = _where(a, b, texts, first_site, effects)
    statuses = {site.status for layer in layers for site in layer.sites}
    verdict = "agree" if statuses & {"identical", "within"} else "nothing"
    first = None
    if where is not None:
        verdict = "differ"
        at = first_site if first_site and where == "site" else {"layer": "", "site": None}
        first = {"where": where, **at}
    d = Diff(
        {
            "schema": SCHEMA,
            "command": [],
            "verdict": verdict,
            "summary": "",
            "said": "",  # the summary again, as documents have had it
            "a": without_surrogates(names[0]),
            "b": without_surrogates(names[1]),
            "tolerance": {"relative": tolerance, "of_dtype": dtype},
            "first": first,
            "first_site": first_site,
            "settings": _settings(a, b, layers),
            "n_sequences": [len(a.sequences), len(b.sequences)],
            "texts": texts,
            "layers": [
                {"layer": each.label, "sites": each.sites, "heads": each.heads, **each.only}
                for each in layers
            ],
            **alone([label for label in of_a if label], [label for label in of_b if label]),
            "effects": effects,
        }
    )
    d.records, d.layers = (a, b), layers
    d["summary"] = d["said"] = _summary(d)
    return d


def _first_site(layers: Sequence[LayerDifference]) -> dict[str, str] | None:
    """The first site that differs, in the order of execution; a statistic if no site of its layer
    differs.
    """
    for layer in layers:
        for site in sorted(layer.sites, key=lambda site: site.is_statistic):
            if site.departs:
                return {"layer": layer.label, "site": site.site}
    return None


def _where(
    a: Record,
    b: Record,
    texts: Sequence[Mapping[str, Any]],
    first_site: Mapping[str, str] | None,
    effects: Mapping[str, Any] | None,
) -> Literal["tokens", "ids", "site", "effects"] | None:
    """In what two records first differ, None if in nothing."""
    if len(a.sequences) != len(b.sequences) or not all(text["is_same"] for text in texts):
        return "tokens"
    if any(text["n_other_ids"] for text in texts):
        return "ids"
    if first_site is not None:
        return "site"
    return "effects" if effects and (effects["changes"] or not effects["n_compared"]) else None


def _summary(d: Diff) -> str:
    """The result in a sentence: `2 of 12 heads changed; the first difference is in layer 3
    pattern`.
    """
    if d.verdict == "nothing":
        return "nothing can be compared: the records have no layer, site or step in common"
    where = d["first"] and d["first"]["where"]
    parts = list[str]()
    if n_heads := sum(len(layer.head_pairs) for layer in d.layers):
        n_changed = sum(len(layer.heads) for layer in d.layers)
        parts.append(f"{n_changed or 'none'} of {_count(n_heads, 'head')} changed")
    if d["effects"]:
        parts.append(changed_effects(d["effects"]))
    if where is None:
        sites = (site for layer in d.layers for site in layer.sites if site.seen != "shape")
        n = sum(site.status in ("identical", "within", "beyond") for site in sites)
        parts.insert(0, f"no difference in {_count(n, 'site')}" if n else "no difference")
        return "; ".join(parts)
    site = "the effects"
    if first_site := d["first_site"]:
        name = "the mask" if first_site["site"] == "allowed" else first_site["site"]
        site = f"{first_site['layer']} {name}".strip()
    match where:
        case "tokens" | "ids":
            what = "tokens" if where == "tokens" else "ids of the tokens"
            parts.append(f"the first difference is in the {what}")
            if first_site:
                parts.append(f"the first numbers that differ are in {site}")
        case _:
            parts.append(f"the first difference is in {site}")
    return "; ".join(parts)


def _count(n: int, noun: str) -> str:
    """A number of things: `1 head`, `2 heads`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


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
    if a.model is not None:
        for layer in layers:
            x, y = layer.inspected_a, layer.inspected_b
            sides.append((layer.label, msgspec.to_builtins(x), msgspec.to_builtins(y)))
    labels = defaultdict[tuple[str, str, str], list[str]](list)
    for label, of_a, of_b in sides:
        for name in of_a | of_b:
            before, after = _word(of_a.get(name)), _word(of_b.get(name))
            if before != after and name not in _NO_SETTINGS:
                labels[name, before, after].append(label)
    return [
        {"name": name, "a": x, "b": y, "layers": [label for label in concerned if label]}
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
    texts = _positions_in_a(a.sequences[0], b.sequences[0])
    context = _positions_in_a(a.keys[0], b.keys[0])

    of_a = {_removal(effect): effect for effect in a.effects}
    of_b = {_removal(_in_a(effect, texts, context)): effect for effect in b.effects}
    both = [(effect, of_b[key]) for key, effect in of_a.items() if key in of_b]
    size = attrgetter(metric)
    largest = max((abs(size(effect)) for pair in both for effect in pair), default=0.0)
    least = max(tolerance * largest, a.effect.floor + b.effect.floor) if tolerance else 0.0
    changes = [{"a": x, "b": y, "change": size(y) - size(x)} for x, y in both]
    changes = [change for change in changes if abs(change["change"]) > least]
    return {
        "metric": metric,
        "tolerance": least,
        "n_compared": len(both),
        "changes": sorted(changes, key=lambda change: -abs(change["change"])),
        "only_a": [effect for key, effect in of_a.items() if key not in of_b],
        "only_b": [effect for key, effect in of_b.items() if key not in of_a],
    }


_removal = attrgetter("removed", "kind", "layer", "head", "heads", "kinds", "spans", "query", "key")
"""What an effect is the effect of."""


def _in_a(effect: Effect, texts: Mapping[int, int], context: Mapping[int, int]) -> Effect:
    """An effect of B with the positions of its tokens in A, negative ones if A lacks them."""
    if effect.query is None or effect.key is None:
        return effect
    queries = context if effect.kind == "encoder" else texts
    keys = context if effect.kind in ("encoder", "cross") else texts
    query, key = effect.query, effect.key
    return changed(effect, query=queries.get(query, -1 - query), key=keys.get(key, -1 - key))


def _positions_in_a(a: TokenSequence, b: TokenSequence) -> dict[int, int]:
    """The positions in A of the tokens of B that correspond."""
    of_a, of_b = pairs(a.tokens, b.tokens).tolist()
    return dict(zip(of_b, of_a, strict=True))


def changed_effects(effects: Mapping[str, Any]) -> str:
    """The number of changed effects: `3 of 72 effects changed`."""
    changes, n = effects["changes"], effects["n_compared"]
    if not n:
        return "no removal is in both, so no effects can be compared"
    return f"{len(changes) or 'none'} of {_count(n, 'effect')} changed"


def _aligned(x: TokenSequence, y: TokenSequence) -> dict[str, Any]:
    """Runs of equal tokens of a text of A and one of B (`matches`), some with other ids, and the
    tokens between (`changes`).
    """
    parts, is_exact = align(x.tokens, y.tokens)
    equal = [(i, j) for i, j, is_equal in parts if is_equal]
    others = [(i, j) for i, j, is_equal in parts if not is_equal]
    n_other_ids = sum(x.ids[m] != y.ids[n] for i, j in equal for m, n in zip(i, j, strict=True))
    return {
        "n_a": len(x.tokens),
        "n_b": len(y.tokens),
        "matches": [{"a": i.start, "b": j.start, "length": len(i)} for i, j in equal],
        "n_other_ids": n_other_ids,
        "exact": is_exact,
        "n_aligned": sum(len(i) for i, _ in equal),
        "is_same": not others,
        "n_replaced": sum(len(i) for i, j in others if j),
        "changes": [_change(x, y, i, j) for i, j in others],
    }


def _change(x: TokenSequence, y: TokenSequence, i: range, j: range) -> dict[str, Any]:
    """Tokens of A, of B, or of both, between equal ones."""
    change: dict[str, Any] = {"change": "replaced"}
    if not i or not j:
        change["change"] = "only A" if i else "only B"
    for side, text, places in (("a", x, i), ("b", y, j)):
        tokens = [without_surrogates(text.tokens[n]) for n in places]
        change |= {f"{side}_begin": places.start, f"{side}_end": places.stop, side: tokens}
    return change


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
