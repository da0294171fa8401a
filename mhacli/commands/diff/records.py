"""Two records compared: their texts, and their layers (`sites.py`). Differences are B − A;
non-finite numbers are None.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from mhacli.errors import UsageError
from mhacli.record.checks import TOLERANCES, coarsest
from mhacli.record.given import ARRAYS, UNKNOWN_MASK
from mhacli.record.record import Record
from mhacli.record.storage import load
from mhacli.render.base.format import count_of
from mhacli.text.align import align
from mhacli.text.escape import without_surrogates
from mhacli.text.tokens import TokenSequence, places

from .result import (
    First,
    LayerDifference,
    Match,
    RecordDiff,
    RecordDocument,
    Site,
    SiteDifference,
    TextDifference,
    TokenChange,
    UsedTolerance,
    Verdict,
)
from .sites import LayerPair, alone, is_statistic, labels_of
from .words import not_compared


def compare_records(
    a: Any, b: Any, tolerance: float | None, read: Callable[[str], Record] = load
) -> RecordDiff:
    """The differences of two records, or of those that `read` finds in two files, as for `diff`."""
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise UsageError(f"tolerance {tolerance:g} is no number from 0 on")
    names = list[str]()
    records = list[Record]()
    for letter, each in (("first", a), ("second", b)):
        is_record = isinstance(each, Record)
        names.append(f"the {letter} record" if is_record else without_surrogates(os.fspath(each)))
        records.append(each if is_record else read(each))
    of_dtype = None
    if tolerance is None:
        of_dtype = coarsest((record.model or record.config).dtype for record in records)
        tolerance = TOLERANCES[of_dtype].runs
    both = _with_texts(*records), _with_texts(*records[::-1])
    tokens, known = (
        [text.tokens for record in every for text in record.sequences] for every in (records, both)
    )
    return _record_diff(
        both, names, UsedTolerance(tolerance, of_dtype), are_measured_alike=tokens == known
    )


def _with_texts(record: Record, other: Record) -> Record:
    """A record of arrays, which have no ids, with the texts of another record where it has the same
    tokens, or none.
    """
    if record.model is None or record.model.architecture != ARRAYS:
        return record
    texts = [
        y if x.tokens in (y.tokens, places(len(y.tokens)).tokens) else x
        for x, y in zip(record.sequences, other.sequences, strict=False)
    ]
    return replace(record, sequences=(*texts, *record.sequences[len(texts) :]))


def _has_mask(record: Record, index: int) -> bool:
    return not record.layers or record.layers[index].mask != UNKNOWN_MASK


def _record_diff(
    records: tuple[Record, Record],
    names: Sequence[str],
    tolerance: UsedTolerance,
    *,
    are_measured_alike: bool,
) -> RecordDiff:
    """All differences of two named records, of statistics only if these are of the same tokens."""
    a, b = records
    labels_a, labels_b = map(labels_of, records)
    pairs = {
        label: LayerPair(
            a.of_layer(i),
            b.of_layer(j),
            tolerance.relative,
            has_masks=_has_mask(a, i) == _has_mask(b, j),
            are_measured_alike=are_measured_alike,
        )
        for i, label in enumerate(labels_a)
        if label in labels_b
        for j in [labels_b.index(label)]
    }
    layers = [pair.difference(label) for label, pair in pairs.items()]
    texts = _texts(a, b)
    first_site = _first_site(layers)
    first = None
    if len(a.sequences) != len(b.sequences) or not all(text.is_same for text in texts):
        first = First("tokens")
    elif any(text.n_other_ids for text in texts):
        first = First("ids")
    elif first_site is not None:
        first = First("site", first_site.layer, first_site.site)
    is_compared = any(site.is_compared or site.has_same_shape for site in _sites(layers))
    verdict: Verdict = "agree" if is_compared else "nothing"
    if first is not None:
        verdict = "differ"
    only_a, only_b = alone([*filter(None, labels_a)], [*filter(None, labels_b)])
    summary = "nothing can be compared: the records have no layer, site or step in common"
    if verdict != "nothing":
        n_heads = sum(len(pair.heads_of_both) for pair in pairs.values())
        sentences = _sentences(layers, n_heads if a.heads or b.heads else None, first, first_site)
        summary = "; ".join((*sentences, *_left_out(records, len(only_a) + len(only_b))))
    document = RecordDocument(
        verdict=verdict,
        summary=summary,
        said=summary,
        a=names[0],
        b=names[1],
        tolerance=tolerance,
        first=first,
        first_site=first_site,
        n_sequences=(len(a.sequences), len(b.sequences)),
        texts=texts,
        layers=layers,
        only_a=only_a,
        only_b=only_b,
    )
    return RecordDiff(document, records)


def _first_site(layers: Sequence[LayerDifference]) -> Site | None:
    """The first site that differs, in the order of execution; a statistic if no site of its layer
    differs.
    """
    for layer in layers:
        for site in sorted(layer.sites, key=is_statistic):
            if site.departs:
                return Site(layer.layer, site.site)
    return None


def _sentences(
    layers: Sequence[LayerDifference],
    n_heads: int | None,
    first: First | None,
    first_site: Site | None,
) -> Iterator[str]:
    """The result, which says of what it is one: `the statistics of 2 of 12 heads changed; the first
    difference in what both hold is in layer 3 pattern; 4 sites before it are not compared`. Without
    statistics `n_heads` is None.
    """
    if first is None:
        yield _agreement([*_sites(layers)])
    if n_heads:
        n_changed = sum(len(layer.heads) for layer in layers)
        yield f"the statistics of {n_changed or 'none'} of {count_of(n_heads, 'head')} changed"
    elif n_heads is not None:
        yield "statistics of heads are not compared"
    what = "first difference in what both hold is"
    if first is not None and first.where != "site":
        which = "tokens" if first.where == "tokens" else "ids of the tokens"
        yield f"the first difference is in the {which}"
        what = "first numbers of both that differ are"
    if first_site is not None:
        name = "the mask" if first_site.site == "allowed" else first_site.site
        yield f"the {what} in " + f"{first_site.layer} {name}".strip()
        before = _sites_before(layers, first_site)
    else:
        before = _sites(layers)
    if n := len([site for site in before if site.status == "skipped"]):
        yield not_compared(n, "site", "" if first_site is None else " before it")


def _left_out(records: Sequence[Record], n_layers: int) -> Iterator[str]:
    """What else is not compared: effects, and layers of one record alone."""
    if any(record.effect is not None for record in records):
        yield "the effects are not compared"
    if n_layers:
        yield not_compared(n_layers, "layer", " of one record alone")


def _agreement(sites: Sequence[SiteDifference]) -> str:
    """In how many sites two records agree, and by what."""
    compared = [site for site in sites if site.is_compared]
    if not compared:
        n = len([site for site in sites if site.has_same_shape])
        return f"the same shapes in {count_of(n, 'step')}, without numbers to compare"
    limit = " beyond the tolerance" if any(site.n_different for site in compared) else ""
    words = f"no difference{limit} in {count_of(len(compared), 'site')}"
    n_extremes = len([site for site in compared if site.seen == "extremes"])
    return words + (f", in {n_extremes} by min, max, mean and std alone" if n_extremes else "")


def _sites(layers: Sequence[LayerDifference]) -> Iterator[SiteDifference]:
    return (site for layer in layers for site in layer.sites)


def _sites_before(layers: Sequence[LayerDifference], first: Site) -> Iterator[SiteDifference]:
    """The sites before one, in the order of execution."""
    for layer in layers:
        for site in layer.sites:
            if (layer.layer, site.site) == (first.layer, first.site):
                return
            yield site


# -------------------------------------------------------------------------------------------- texts


def _texts(a: Record, b: Record) -> list[TextDifference]:
    """The aligned texts that both have, paired by number."""
    families = {"texts": (a.sequences, b.sequences)}
    if a.context is not None or b.context is not None:
        families["context"] = (a.keys, b.keys)
    return [
        _aligned(family, number, *pair)
        for family, sides in families.items()
        for number, pair in enumerate(zip(*sides, strict=False))
    ]


def _aligned(family: str, number: int, x: TokenSequence, y: TokenSequence) -> TextDifference:
    """A text of A aligned with one of B."""
    parts, is_exact = align(x.tokens, y.tokens)
    matches = [Match(i.start, j.start, len(i)) for i, j, is_equal in parts if is_equal]
    equal = [(each.a + n, each.b + n) for each in matches for n in range(each.length)]
    others = [(i, j) for i, j, is_equal in parts if not is_equal]
    return TextDifference(
        family,
        number,
        n_a=len(x.tokens),
        n_b=len(y.tokens),
        matches=matches,
        n_other_ids=len([m for m, n in equal if x.ids[m] != y.ids[n]]),
        exact=is_exact,
        n_aligned=len(equal),
        is_same=not others,
        n_replaced=sum(len(i) for i, j in others if j),
        changes=[_change(x, y, i, j) for i, j in others],
    )


def _change(x: TokenSequence, y: TokenSequence, i: range, j: range) -> TokenChange:
    """Tokens of A, of B, or of both, between equal ones."""
    before, after = (
        [without_surrogates(text.tokens[n]) for n in places] for text, places in ((x, i), (y, j))
    )
    kind: Literal["replaced", "only A", "only B"] = "replaced"
    if not i or not j:
        kind = "only A" if i else "only B"
    return TokenChange(kind, i.start, i.stop, before, j.start, j.stop, after)
