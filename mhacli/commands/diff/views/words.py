"""Texts about a comparison: the verdict, and the location of a number."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from mhacli.commands.diff.arrays import MASK
from mhacli.commands.diff.result import (
    Departure,
    Differences,
    DiffLocation,
    LayerDifference,
    SiteDifference,
    TextDifference,
)
from mhacli.record.record import Record
from mhacli.render.base.format import count_of, fitted, number_text, token_text
from mhacli.render.base.selection import ranges
from mhacli.text.escape import visible
from mhacli.text.tokens import TokenSequence

_TOKEN_WIDTH = 16
_MOST_NAMED, _MOST_FORMULAS = 2, 8
_MASK = "allowed"


def verdict_text(differences: Differences, a: Record, b: Record) -> str:
    """One line: whether A and B agree, and where they first differ."""
    if differences.verdict == "nothing":
        return differences.summary
    if differences.first is None:
        return _agreement(differences)
    departed = [site for layer in differences.layers for site in layer.sites if site.departs]
    if differences.first.where == "site" and all(site.has_other_formula for site in departed):
        return _formulas_text(departed)
    return f"A and B differ; the first difference is in {_departure_text(differences, differences.first, a, b)}"


def _formulas_text(sites: Sequence[SiteDifference]) -> str:
    """The formulas that differ, if no numbers were saved: `A and B differ in 2 formulas: k, scaled (…)`."""
    names = [site_name(site.site) for site in sites]
    listed = ", ".join(names[:_MOST_FORMULAS]) + ("" if len(names) <= _MOST_FORMULAS else ", …")
    return f"A and B differ in {count_of(len(names), 'formula')}: {listed} (no numbers saved, so none compared)"


def _departure_text(differences: Differences, departure: Departure, a: Record, b: Record) -> str:
    """The first difference and its size: `layer 2 scores (largest difference 0.031 at head 3, …)`."""
    if departure.where == "effects" and differences.effects is not None:
        return f"the effects: {differences.effects.summary}"
    if departure.site is not None:
        return _at_site(differences, departure.layer, departure.site, a, b)
    input_text = _input_text(differences, a, b) if departure.where == "tokens" else _ids_text(differences)
    numbers = differences.first_site
    if numbers is None or numbers.site is None:
        return f"the tokens: {input_text}"
    place = _at_site(differences, numbers.layer, numbers.site, a, b)
    return f"the tokens: {input_text}; the first numbers that differ are in {place}"


def _agreement(differences: Differences) -> str:
    both = "" if not any((differences.only_a, differences.only_b)) else " of the layers that both hold"
    compared = [site for _, site in differences.compared]
    if not compared:
        n_steps = sum(len(layer.sites) for layer in differences.layers)
        alike = f"{count_of(n_steps, 'step')} with the same name, axes and shape"
        return f"A and B agree{both}: {alike}; they hold no numbers that could be compared"
    n_same = sum(site.is_same_bits for site in compared)
    head = f"A and B agree in {count_of(len(compared), 'site')}{both}"
    if n_same == len(compared):
        return f"{head}, bit for bit"
    label, worst = max(differences.compared, key=lambda pair: pair[1].relative or 0.0)
    place = _sentence_name(label, worst)
    return (
        f"{head}, bit for bit in {n_same}; the largest relative difference is {number_text(worst.relative)} in {place} "
        f"(tolerance {differences.tolerance:.3g})"
    )


def _input_text(differences: Differences, a: Record, b: Record) -> str:
    """The changed tokens, the first few by name."""
    counts = {"replaced": 0, "only A": 0, "only B": 0}
    for text in differences.texts:
        for change in text.changes:
            n_a, n_b = change.a_end - change.a_begin, change.b_end - change.b_begin
            counts["replaced"] += min(n_a, n_b)
            counts["only A"] += max(0, n_a - n_b)
            counts["only B"] += max(0, n_b - n_a)
    words = {"replaced": "replaced", "only A": "only in A", "only B": "only in B"}
    parts = [f"{count_of(n, 'token')} {words[kind]}" for kind, n in counts.items() if n]
    if differences.n_sequences[0] != differences.n_sequences[1]:
        parts.insert(0, f"{differences.n_sequences[0]} against {count_of(differences.n_sequences[1], 'sequence')}")
    named = _named_changes(differences.texts, a, b)
    has_other_ids = any(text.n_other_ids for text in differences.texts)
    return (
        ", ".join(parts) + (f" ({named})" if named else "") + (f", {_ids_text(differences)}" if has_other_ids else "")
    )


def _named_changes(texts: Sequence[TextDifference], a: Record, b: Record) -> str:
    """Single tokens by name, if they are few: `5 “mat” by “rug”`."""
    changes = [(text, change) for text in texts for change in text.changes]
    if len(changes) > _MOST_NAMED:
        return ""
    named = []
    for text, change in changes:
        tokens_a, tokens_b = texts_of(text, a, b)
        if max(change.a_end - change.a_begin, change.b_end - change.b_begin) > 1:
            return ""
        names = [
            _token_name(sequence, begin)
            for sequence, begin, end in (
                (tokens_a, change.a_begin, change.a_end),
                (tokens_b, change.b_begin, change.b_end),
            )
            if end > begin
        ]
        begin = change.a_begin if change.a_end > change.a_begin else change.b_begin
        family = "context " if text.family == "context" else ""
        named.append(f"{family}{begin} {' by '.join(names)}")
    return ", ".join(named)


def _ids_text(differences: Differences) -> str:
    n = sum(text.n_other_ids for text in differences.texts)
    return f"{count_of(n, 'token')} with another id in the vocabulary"


def texts_of(text: TextDifference, a: Record, b: Record) -> tuple[TokenSequence, TokenSequence]:
    """The two texts that were aligned."""
    if text.family == "texts":
        return a.sequences[text.sequence], b.sequences[text.sequence]
    return a.keys[text.sequence], b.keys[text.sequence]


def _token_name(sequence: TokenSequence, index: int) -> str:
    return f"“{fitted(token_text(sequence, index), _TOKEN_WIDTH)}”"


def layers_text(labels: Sequence[str]) -> str:
    """Layer labels in short: `layers 0–5`, `cross layer 1, decoder layer 2`."""
    numbers: dict[str, list[int]] = {}
    for label in labels:
        kind, _, number = label.rpartition(" ")
        numbers.setdefault(kind, []).append(int(number))
    return ", ".join(f"{kind}{'s' * (len(of_kind) > 1)} {ranges(of_kind)}" for kind, of_kind in numbers.items())


def site_name(name: str) -> str:
    """The escaped name of a site; the mask in plain words."""
    return "mask" if name == _MASK else visible(name)


def _sentence_name(label: str, site: SiteDifference) -> str:
    return f"{label} {'the ' * (site.site == _MASK)}{site_name(site.site)}".strip()


def _at_site(differences: Differences, label: str, site: SiteDifference, a: Record, b: Record) -> str:
    layer = next(layer for layer in differences.layers if layer.label == label)
    unseen = ", the first site whose numbers both records hold" if _is_unseen_before(differences, site, a) else ""
    return f"{_sentence_name(label, site)}{unseen} ({_how_far(differences, layer, site, a, b)})"


def _is_unseen_before(differences: Differences, site: SiteDifference, a: Record) -> bool:
    """Whether the records may differ before this site, at sites without numbers in both."""
    if site.largest is None or site.site in MASK:
        return False
    before = [
        *takewhile(lambda other: other is not site, (each for layer in differences.layers for each in layer.sites))
    ]
    has_unseen = a.model is not None or any(other.seen == "shape" and other.site != "ids" for other in before)
    return has_unseen and all(other.largest is None or other.site in MASK for other in before)


def _how_far(differences: Differences, layer: LayerDifference, site: SiteDifference, a: Record, b: Record) -> str:
    where = "" if site.at is None else place_text(site.at, *views(layer, a, b))
    if site.status == "shape":
        return site.why
    if site.has_other_formula:
        return "another formula; its numbers were not saved"
    if site.n_nonfinite:
        first = f", the first at {where}" if where else ""
        return f"{count_of(site.n_nonfinite, 'number')} finite in only one of the records{first}"
    if site.n_only_a or site.n_only_b:
        return f"{count_of(site.n_only_a, 'cell')} visible only in A, {site.n_only_b} only in B, the first at {where}"
    if site.largest is None:
        return f"{site.n_different} of {count_of(site.n_cells, 'number')} differ, one at {where}"
    at = (
        f" at {where}"
        if where
        else " among its smallest, largest, mean and deviation"
        if site.seen == "extremes"
        else ""
    )
    return (
        f"largest difference {number_text(site.largest)}{at}; "
        f"tolerance {differences.tolerance:.3g} × {number_text(site.magnitude)}"
    )


def views(layer: LayerDifference, a: Record, b: Record) -> tuple[Record, Record]:
    """The layer of each record as a record."""
    return (
        a if layer.index_a is None else a.of_layer(layer.index_a),
        b if layer.index_b is None else b.of_layer(layer.index_b),
    )


def place_text(place: DiffLocation, a: Record, b: Record) -> str:
    """The location of a number in A: `head 3, query 5 “mat”, key 2 “sat”`, with B's location if it differs."""
    parts = []
    sequence = place.a[0] if place.axes[:1] == ("sequence",) else 0
    for axis, index_a, index_b in zip(place.axes, place.a, place.b, strict=True):
        if axis == "sequence" and len(a.sequences) == 1:
            continue
        word = f"{axis} {index_a}"
        if axis in ("query", "key"):
            family = a.sequences if axis == "query" else a.keys
            names = [_token_name(family[sequence], index_a)]
            others = (b.sequences if axis == "query" else b.keys)[sequence]
            names += [_token_name(others, index_b)] if 0 <= index_b < len(others.tokens) else []
            word += f" {' replaced by '.join(dict.fromkeys(names))}"
        parts.append(word + (f" ({index_b} in B)" if index_b != index_a else ""))
    return ", ".join(parts)
