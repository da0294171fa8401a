"""`mhacli.diff`; and two records compared: their texts, and their layers (`sites.py`). Differences
are B − A. Non-finite numbers are None.
"""

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from mhacli.commands.diff import view  # noqa: F401 - it registers the views of differences
from mhacli.errors import UsageError
from mhacli.record.checks import TOLERANCES
from mhacli.record.record import Record
from mhacli.record.storage import load
from mhacli.text.align import align
from mhacli.text.escape import without_surrogates
from mhacli.text.tokens import TokenSequence

from .result import (
    SCHEMA,
    Diff,
    First,
    LayerDifference,
    Match,
    RecordDocument,
    Site,
    TextDifference,
    TokenChange,
    Tolerance,
    Verdict,
)
from .sites import LayerPair, RecordDiff, alone, is_statistic


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
        from .models import diff_modules

        return diff_modules(a, b, inputs)
    return compare_records(a, b, tolerance)


def compare_records(a: Any, b: Any, tolerance: float | None) -> RecordDiff:
    """The differences of two records, or of those in two files, as for `diff`."""
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise UsageError(f"tolerance {tolerance:g} is no number from 0 on")
    names = list[str]()
    records = list[Record]()
    for letter, each in (("first", a), ("second", b)):
        is_record = isinstance(each, Record)
        names.append(f"the {letter} record" if is_record else without_surrogates(os.fspath(each)))
        records.append(each if is_record else load(each))
    of_dtype = None
    if tolerance is None:
        dtypes = {(record.model or record.config).dtype for record in records}
        of_dtype = next((name for name in TOLERANCES if name in dtypes), "float32")
        tolerance = TOLERANCES[of_dtype].runs
    return _record_diff(records, names, Tolerance(tolerance, of_dtype))


def _record_diff(
    records: Sequence[Record], names: Sequence[str], tolerance: Tolerance
) -> RecordDiff:
    """All differences of two named records."""
    a, b = records
    labels_a, labels_b = _labels(a), _labels(b)
    pairs = list[LayerPair]()
    for index, label in enumerate(labels_a):
        if label in labels_b:
            of_a, of_b = _of_layer(a, index), _of_layer(b, labels_b.index(label))
            pairs.append(LayerPair(label, index, of_a, of_b, tolerance.relative))
    layers = [pair.difference for pair in pairs]
    texts = _texts(a, b)
    first_site = _first_site(layers)
    first = None
    if len(a.sequences) != len(b.sequences) or not all(text.is_same for text in texts):
        first = First("tokens")
    elif any(text.n_other_ids for text in texts):
        first = First("ids")
    elif first_site is not None:
        first = First("site", first_site.layer, first_site.site)
    statuses = {site.status for layer in layers for site in layer.sites}
    verdict: Verdict = "agree" if statuses & {"identical", "within"} else "nothing"
    if first is not None:
        verdict = "differ"
    summary = "nothing can be compared: the records have no layer, site or step in common"
    if verdict != "nothing":
        n_heads = sum(len(pair.heads_of_both) for pair in pairs)
        has_effects = a.effect is not None and b.effect is not None
        summary = "; ".join(_sentences(layers, n_heads, first, first_site, has_effects=has_effects))
    only_a, only_b = alone([*filter(None, labels_a)], [*filter(None, labels_b)])
    document = RecordDocument(
        schema=SCHEMA,
        command=[],
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
    return RecordDiff(document, (a, b), pairs)


def _labels(record: Record) -> list[str]:
    """The label of each layer, empty for a record without layers; several attentions of a layer are
    numbered.
    """
    if record.model is None:
        return [""]
    labels = list[str]()
    for index, layer in enumerate(record.layers):
        n_before = sum(other.label == layer.label for other in record.layers[:index])
        labels.append(f"{layer.label}, attention {n_before + 1}" if n_before else layer.label)
    return labels


def _of_layer(record: Record, index: int) -> Record:
    """The record of a layer, the whole record if it has none."""
    return record if record.model is None else record.of_layer(index)


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
    n_heads: int,
    first: First | None,
    first_site: Site | None,
    *,
    has_effects: bool,
) -> Iterator[str]:
    """The result: `2 of 12 heads changed; the first difference is in layer 3 pattern`."""
    if first is None:
        sites = (site for layer in layers for site in layer.sites if site.seen != "shape")
        n = sum(site.status in ("identical", "within", "beyond") for site in sites)
        yield f"no difference in {_count(n, 'site')}" if n else "no difference"
    if n_heads:
        n_changed = sum(len(layer.heads) for layer in layers)
        yield f"{n_changed or 'none'} of {_count(n_heads, 'head')} changed"
    if has_effects:
        yield "the effects are not compared"
    what = "first difference is"
    if first is not None and first.where != "site":
        yield f"the {what} in the {'tokens' if first.where == 'tokens' else 'ids of the tokens'}"
        what = "first numbers that differ are"
    if first_site is not None:
        name = "the mask" if first_site.site == "allowed" else first_site.site
        yield f"the {what} in " + f"{first_site.layer} {name}".strip()


def _count(n: int, noun: str) -> str:
    """A number of things: `1 head`, `2 heads`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


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
    equal = [(i, j) for i, j, is_equal in parts if is_equal]
    others = [(i, j) for i, j, is_equal in parts if not is_equal]
    return TextDifference(
        family,
        number,
        n_a=len(x.tokens),
        n_b=len(y.tokens),
        matches=[Match(i.start, j.start, len(i)) for i, j in equal],
        n_other_ids=sum(x.ids[m] != y.ids[n] for i, j in equal for m, n in zip(i, j, strict=True)),
        exact=is_exact,
        n_aligned=sum(len(i) for i, _ in equal),
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
