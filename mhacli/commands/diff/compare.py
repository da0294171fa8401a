"""`mhacli.diff`; and two records compared: texts and layers (`sites.py`). Differences are B − A.

Dictionaries are parts of the JSON document as they are. Non-finite numbers are None.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mhacli.commands.diff.result import SCHEMA, Diff
from mhacli.commands.diff.sites import LayerDifference, alone
from mhacli.errors import UsageError
from mhacli.record.checks import TOLERANCES
from mhacli.record.record import InspectedLayer, Record
from mhacli.record.storage import load
from mhacli.text.align import align
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
    texts = _texts(a, b)
    first_site = _first_site(layers)
    where = _where(a, b, texts, first_site)
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
            "n_sequences": [len(a.sequences), len(b.sequences)],
            "texts": texts,
            "layers": [
                {"layer": each.label, "sites": each.sites, "heads": each.heads, **each.only}
                for each in layers
            ],
            **alone([label for label in of_a if label], [label for label in of_b if label]),
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
) -> Literal["tokens", "ids", "site"] | None:
    """In what two records first differ, None if in nothing."""
    if len(a.sequences) != len(b.sequences) or not all(text["is_same"] for text in texts):
        return "tokens"
    if any(text["n_other_ids"] for text in texts):
        return "ids"
    return None if first_site is None else "site"


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
    if d.records is not None and all(record.effect for record in d.records):
        parts.append("the effects are not compared")
    if where is None:
        sites = (site for layer in d.layers for site in layer.sites if site.seen != "shape")
        n = sum(site.status in ("identical", "within", "beyond") for site in sites)
        parts.insert(0, f"no difference in {_count(n, 'site')}" if n else "no difference")
        return "; ".join(parts)
    first = "the first difference is"
    if where != "site":
        parts.append(f"{first} in the {'tokens' if where == 'tokens' else 'ids of the tokens'}")
        first = "the first numbers that differ are"
    if first_site := d["first_site"]:
        name = "the mask" if first_site["site"] == "allowed" else first_site["site"]
        parts.append(f"{first} in {first_site['layer']} {name}".replace("  ", " "))
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
