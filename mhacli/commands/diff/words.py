"""Of two models the first place that differs, in words: where it is, how far the two are apart, and
what may be the cause.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar

from mhacli.numbers import shown
from mhacli.render.base.format import count_of

from .result import MAPPED, Difference, ModelDocument, Unmatched

Row = Difference | Unmatched
"""A place, compared or not."""
AnyRow = TypeVar("AnyRow", Difference, Unmatched)
PartAndSite = tuple[str, str]
"""A part of a model, and a site in it."""
CAUSES: Mapping[PartAndSite, str] = {
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
    "embedding": "input of layer 0",
    "q_rotated": "q as rotated",
    "k_rotated": "k as rotated",
    "output_norm": "norm of the output",
}


def summary_of(d: ModelDocument) -> str:
    """The result in a sentence: where the two first differ, how far, and what may be its cause."""
    if d.ids is not None:
        return _other_ids(*d.ids)
    if d.first is not None:
        return f"they first differ in {_size(d.first)}; {_cause(d, d.first)}{_not_in_both(d)}"
    equal = [place for place in d.places if not place.healed]
    nearest = max(equal, key=times_rounding)
    words = "all their numbers are equal"
    if nearest.relative:
        n = d.times_rounding or 1
        limit = shown(n * nearest.rounding, "number")
        words = (
            f"the nearest to it is {_size(nearest)}; differences count beyond {limit}, {n} ×"
            " rounding"
        )
    if n_healed := len(d.places) - len(equal):
        words += f"; {n_healed} more differ, and what follows from them does not"
    return f"no difference beyond rounding in {len(equal)} places; {words}{_not_in_both(d)}"


def times_rounding(place: Difference) -> float:
    """How many times its rounding a difference is."""
    return (place.relative or 0.0) / place.rounding


def not_compared(n: int, noun: str, which: str = "") -> str:
    """How many things are not compared, and `which`."""
    return f"{count_of(n, noun)}{which} {'is' if n == 1 else 'are'} not compared"


def _not_in_both(d: ModelDocument) -> str:
    """How many places are not compared, as the end of a sentence."""
    return f"; {not_compared(len(d.unmatched), 'place')}" if d.unmatched else ""


def _size(place: Difference) -> str:
    relative = shown(math.inf if place.relative is None else place.relative, "number")
    return f"{where(place)}: relative {relative}, rounding {shown(place.rounding, 'number')}"


def _other_ids(a: Sequence[int], b: Sequence[int]) -> str:
    """The first ids that two tokenizers give differently, or that one lacks."""
    pairs = enumerate(zip_longest(a, b, fillvalue="no token"))
    at, (of_a, of_b) = next((at, ids) for at, ids in pairs if ids[0] != ids[1])
    return (
        f"the two tokenizers give other ids: {len(a)} tokens and {len(b)}, the first difference is"
        f" token {at}, {of_a} in A and {of_b} in B; nothing else is compared (--ids gives both the"
        " same)"
    )


def where(place: Row) -> str:
    """A place in words: `layer 2, attention, head 1 (z)`. What a model without a head gives is its
    output. Tables of embeddings have their names, and other places of the same kind numbers.
    """
    site = _NAMES.get(place.site, place.site)
    if site == "lookup":
        tables = (name.rpartition(".")[2] for name in (place.name_a, place.name_b) if name)
        site = f"lookup in {' / '.join(dict.fromkeys(tables))}"
    elif place.number:
        site = f"{site} {place.number + 1}"
    part: str = place.part
    words = [] if place.layer is None else [f"layer {place.layer}"]
    if site.startswith(MAPPED):
        part = site  # the part is not known of every module
    words.append("output" if part == "logits" and not place.name_a else part)
    if place.stack:
        words[0] = f"{place.stack} {words[0]}"
    if isinstance(place, Difference) and place.heads:
        noun = "kv head" if place.of_kv_heads else "head"
        if len(place.heads) == place.n_heads > 1:
            words.append(f"all {noun}s")
        else:
            numbers = ", ".join(map(str, place.heads))
            words.append(f"{noun if len(place.heads) == 1 else f'{noun}s'} {numbers}")
    name = ", ".join(words)
    return name if site == part else f"{name} ({site})"


def _cause(d: ModelDocument, first: Difference) -> str:
    """What is equal before the first place, and what therefore differs: its cause, or what could
    not be compared before it.
    """
    part = first.part
    if first is d.places[0] and part != "embedding":
        return "nothing before it could be compared"
    known, unknown = (
        {row.of_layer for row in rows if row.layer is not None} for rows in (d.places, d.unmatched)
    )
    n_lacking = len(unknown - known)
    if n_lacking and part in ("norm", "logits"):
        return (
            f"before it, {count_of(n_lacking, 'layer')} could not be compared; the others are equal"
        )
    compared = _sites_beside(first, d.places)
    unmatched = _sites_beside(first, d.unmatched)
    equal = {site for site, place in compared.items() if not place.beyond}
    site = (part, first.site)
    order = [*CAUSES]  # that of execution
    before = order[: order.index(site)] if site in order else []
    causes = [*_not_compared(before, part, equal, unmatched), CAUSES.get(site, first.site)]
    if _repeats_keys(first, compared.get(("attention", "k"))):
        causes[-1] += ", or the order in which kv heads are repeated,"
    is_captured = any((part, inner) in {*compared, *unmatched} for inner in ("scores", "z"))
    if site == ("attention", "output") and not is_captured:
        causes.insert(-1, "inside of attention, of which nothing was captured,")
    what = f"the {' or the '.join(causes)} differs"
    if part == "embedding":
        return what
    names = [name for of_part, name in before if of_part == part and (part, name) in equal]
    return f"{_equal_words(names if part == 'attention' else [])} equal, so {what}"


def _repeats_keys(first: Difference, keys: Difference | None) -> bool:
    """Whether the keys at the first place have more heads than the projected ones."""
    return first.site == "k_rotated" and keys is not None and keys.n_heads < first.n_heads


def _sites_beside(first: Difference, rows: Sequence[AnyRow]) -> dict[PartAndSite, AnyRow]:
    """The places of the layer of the first one, by part and site."""
    return {(row.part, row.site): row for row in rows if row.of_layer == first.of_layer}


def _not_compared(
    before: Sequence[PartAndSite],
    part: str,
    equal: Collection[PartAndSite],
    unmatched: Mapping[PartAndSite, Unmatched],
) -> list[str]:
    """What may differ between the last equal place `before` the first different one and that one,
    in the order of execution, because it was not compared. All of another part is one cause.
    """
    causes = list[str]()
    for site in reversed(before):
        if site in unmatched:
            if site[0] != part and site != ("norm", "norm"):
                causes.append(f"{site[0]}, of which not all could be compared,")
                break
            place, cause = unmatched[site], CAUSES[site]
            if site[1] == "norm":
                cause = f"norm before it, {place.name_a or place.name_b} ({place.why}),"
            causes.append(cause)
        if site in equal:  # if not all of its kind are compared, the others are equal
            break
    return causes[::-1]


def _equal_words(sites: Sequence[str]) -> str:
    """What is equal before, of the same attention, norms only if nothing else is."""
    names = [_NAMES.get(site, site) for site in sites if site != "norm"] or [*sites]
    if not names:
        return "what is compared before it is"
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
