"""Of two models the first place that differs, in words: where it is, how far the two are apart, and
what may be the cause.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mhacli.text.numbers import shown

Row = Mapping[str, Any]
"""A place in the document, compared or not."""
Site = tuple[str, str]
"""A part of a model, and a site in it."""
CAUSES: Mapping[Site, str] = {
    ("embedding", "lookup"): "table of embeddings or what is looked up in it (ids, positions)",
    ("embedding", "embedding"): "sum, scale or norm of the embeddings",
    ("attention", "norm"): "norm before attention (weights, epsilon or kind)",
    ("attention", "q"): "projection of the queries (weights or layout)",
    ("attention", "k"): "projection of the keys (weights or layout)",
    ("attention", "v"): "projection of the values (weights or layout)",
    ("attention", "inner_norm"): "norm inside of attention or what it reads",
    ("attention", "q_norm"): "norm of the queries",
    ("attention", "k_norm"): "norm of the keys",
    ("attention", "q_rotated"): "rotation or scale of the queries",
    ("attention", "k_rotated"): "rotation or scale of the keys",
    ("attention", "scores"): "scale, softcap or bias of the scores",
    ("attention", "pattern"): "mask or sink",
    ("attention", "z"): "kernel or the choice of values",
    ("attention", "output"): "output projection",
    ("attention", "output_norm"): "norm after attention",
    ("mlp", "norm"): "norm before the MLP or the residual sum after attention",
    ("mlp", "inner_norm"): "norm inside of the MLP or what it reads",
    ("mlp", "output"): "MLP (weights or activation)",
    ("mlp", "output_norm"): "norm after the MLP",
    ("mlp", "residual"): "residual sum",
    ("norm", "norm"): "final norm",
    ("logits", "head"): "head",
    ("logits", "norm"): "norm in the head",
    ("logits", "logits"): "head, or what is done after the last norm",
}
"""What differs where two models first differ, by part and site in the order of execution."""
_NAMES = {
    "q_rotated": "q as rotated",
    "k_rotated": "k as rotated",
    "output_norm": "norm of the output",
}


def summary_of(d: Mapping[str, Any]) -> str:
    """The result in a sentence: where the two first differ, how far, and what may be its cause."""
    if d["ids"] is not None:
        return _other_ids(*d["ids"])
    first, places = d["first"], d["places"]
    place = first
    if first is None:  # the nearest to a difference, by what rounding explains
        equal = (place for place in places if not place["healed"])
        place = max(equal, key=lambda place: place["relative"] / place["rounding"])
    relative = math.inf if place["relative"] is None else place["relative"]
    rounding = shown(place["rounding"], "number")
    size = f"{where(place)}: relative {shown(relative, 'number')}, rounding {rounding}"
    if first is not None:
        return f"they first differ in {size}; {_cause(d, first)}"
    nearest = f"the nearest to it is {size}" if relative else "they are the same, bit for bit"
    return f"no difference beyond rounding in {len(places)} places; {nearest}"


def _other_ids(a: Sequence[int], b: Sequence[int]) -> str:
    """The first ids that two tokenizers give differently, or that one lacks."""
    n = min(len(a), len(b))
    at = next((i for i in range(n) if a[i] != b[i]), n)
    of_a, of_b = (str(ids[at]) if at < len(ids) else "no token" for ids in (a, b))
    return (
        f"the two tokenizers give other ids: {len(a)} tokens and {len(b)}, the first difference is"
        f" token {at}, {of_a} in A and {of_b} in B; nothing else is compared (--ids gives both the"
        " same)"
    )


def where(place: Row) -> str:
    """A place in words: `layer 2, attention, head 1 (z)`. What a model without a head gives is its
    output.
    """
    part, site = place["part"], _NAMES.get(place["site"], place["site"])
    words = [] if place["layer"] is None else [f"layer {place['layer']}"]
    words.append("output" if part == "logits" and not place["name_a"] else part)
    if place["stack"]:
        words[0] = f"{place['stack']} {words[0]}"
    if heads := place.get("heads"):
        noun = "kv head" if place["site"].startswith(("k", "v")) else "head"
        if len(heads) == place["n_heads"] > 1:
            words.append(f"all {noun}s")
        else:
            words.append(f"{noun if len(heads) == 1 else f'{noun}s'} {', '.join(map(str, heads))}")
    name = ", ".join(words)
    return name if site == part else f"{name} ({site})"


def _cause(d: Mapping[str, Any], first: Row) -> str:
    """What is equal before the first place, and what therefore differs: its cause, or what could
    not be compared before it.
    """
    places, part = d["places"], first["part"]
    if first is places[0] and part != "embedding":
        return "nothing before it could be compared"
    n_lacking = len(_layers(d["unmatched"]) - _layers(places))
    if n_lacking and part in ("norm", "logits"):
        layers = "1 layer" if n_lacking == 1 else f"{n_lacking} layers"
        return f"before it, {layers} could not be compared; the others are equal"
    layer = (first["layer"], first["stack"])
    compared, unmatched = _sites_of(places, layer), _sites_of(d["unmatched"], layer)
    equal = {site for site, place in compared.items() if not place["beyond"]}
    site, order = (part, first["site"]), [*CAUSES]
    before = order[: order.index(site)] if site in order else []
    causes = [*_not_compared(before, part, equal, unmatched), CAUSES.get(site, first["site"])]
    is_captured = any((part, inner) in {*compared, *unmatched} for inner in ("scores", "z"))
    if site == ("attention", "output") and not is_captured:
        causes.insert(-1, "inside of attention, of which nothing was captured,")
    what = f"the {' or the '.join(causes)} differs"
    if part == "embedding":
        return what
    names = [name for of_part, name in before if of_part == part and (part, name) in equal]
    return f"{_equal_words(names if part == 'attention' else [])} equal, so {what}"


def _layers(rows: Sequence[Row]) -> set[tuple[int, str | None]]:
    """The layers of places, with their stacks."""
    return {(row["layer"], row["stack"]) for row in rows if row["layer"] is not None}


def _sites_of(rows: Sequence[Row], layer: tuple[int | None, str | None]) -> dict[Site, Row]:
    """The places of a layer by part and site."""
    return {
        (row["part"], row["site"]): row for row in rows if (row["layer"], row["stack"]) == layer
    }


def _not_compared(
    before: Sequence[Site], part: str, equal: Collection[Site], unmatched: Mapping[Site, Row]
) -> list[str]:
    """What may differ between the last equal place `before` the first different one and that one,
    in the order of execution, because it was not compared. All of another part is one cause.
    """
    causes = list[str]()
    for site in reversed(before):
        if site in equal:
            break
        if site not in unmatched:
            continue
        if site[0] != part and site != ("norm", "norm"):
            causes.append(f"{site[0]}, of which not all could be compared,")
            break
        place, cause = unmatched[site], CAUSES[site]
        if site[1] == "norm":
            name = place["name_a"] or place["name_b"]
            cause = f"norm before it, {name} ({place['why']}),"
        causes.append(cause)
    return causes[::-1]


def _equal_words(sites: Sequence[str]) -> str:
    """What is equal before, of the same attention, norms only if nothing else is."""
    names = [_NAMES.get(site, site) for site in sites if site != "norm"] or [*sites]
    if not names:
        return "what is before it is"
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
