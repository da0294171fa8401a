"""Two records compared, whole: their settings, texts, layers, sites and heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mhacli.results.diff.arrays import compared_site
from mhacli.results.diff.axes import ORDER, Pair, RecordAxes
from mhacli.results.diff.result import Differences, LayerDifference, SiteDifference, TextDifference
from mhacli.results.diff.settings import different_settings, same_settings
from mhacli.results.diff.statistics import changed_heads
from mhacli.results.diff.steps import compared_steps, names_alone
from mhacli.results.diff.tokens import aligned_texts
from mhacli.results.record.heads import HeadStatistics
from mhacli.results.record.record import Record

TOLERANCES: Mapping[str, float] = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-5, "float64": 1e-12}
"""Relative to the largest number of a site, by the number format, the coarsest first. They are those of a record's self-check
(docs/DESIGN.md), in float32 five times as much: two machines add up in other orders."""


@dataclass(frozen=True)
class _LayerPair:
    """A layer of both records, with its place among their layers; None where records have no layers."""

    label: str
    cells: Pair
    index_a: int | None = None
    index_b: int | None = None

    @property
    def records(self) -> tuple[Record, Record]:
        """The layer alone, of either."""
        return self.cells.a.record, self.cells.b.record


def compare(a: Record, b: Record, *, tolerance: float | None = None) -> Differences:
    """What B has other than A. The tolerance is relative to the largest number of each site, 0 demands the same bits; None takes
    that of the coarser of both number formats."""
    coarser = _coarser_dtype(a, b)
    allowed = TOLERANCES[coarser] if tolerance is None else tolerance
    texts = aligned_texts("texts", a.sequences, b.sequences)
    if a.context is not None or b.context is not None:
        texts += aligned_texts("context", a.keys, b.keys)
    pairs = tuple(_layer_pairs(a, b, texts))
    layers = [
        (a.layers[p.index_a], b.layers[p.index_b]) for p in pairs if p.index_a is not None and p.index_b is not None
    ]
    found = Differences(
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
    changes = changed_heads([(pair.label, _head_pairs(pair)) for pair in pairs], allowed)
    compared = [_compared_layer(pair, found, with_trace=len(pairs) == 1) for pair in pairs]
    return replace(
        found, layers=tuple(replace(layer, heads=heads) for layer, heads in zip(compared, changes, strict=True))
    )


def _coarser_dtype(a: Record, b: Record) -> str:
    """The coarser of the number formats that the two were computed in."""
    own = {record.config.dtype if record.model is None else record.model.dtype for record in (a, b)}
    return next((name for name in TOLERANCES if name in own), "float32")


def _layer_pairs(a: Record, b: Record, texts: Sequence[TextDifference]) -> Iterator[_LayerPair]:
    """The layers of A that B has too, in the order of A; of records without layers the whole."""
    if (a.model is None) != (b.model is None):
        return

    def pair(one: Record, other: Record) -> Pair:
        """Whose tokens are queries and keys is a matter of the layer's kind, which is the same in both."""
        families = [
            "texts" if (own_a is a.sequences and own_b is b.sequences) else "context"
            for own_a, own_b in ((one.sequences, other.sequences), (one.keys, other.keys))
        ]
        queries, keys = (tuple(text for text in texts if text.family == family) for family in families)
        return Pair(RecordAxes.of(one), RecordAxes.of(other), queries, keys)

    if a.model is None:
        yield _LayerPair("", pair(a, b))
        return
    known = {key: index for index, key in enumerate(_layer_keys(b))}
    for index_a, key in enumerate(_layer_keys(a)):
        if key in known:
            index_b = known[key]
            own = pair(a.of_layer(index_a), b.of_layer(index_b))
            yield _LayerPair(_labels(a)[index_a], own, index_a, index_b)


def _layer_keys(record: Record) -> Sequence[tuple[str, int, int]]:
    """Kind, number, and which attention of that layer, of each: a layer may have several of a kind."""
    seen: Counter[tuple[str, int]] = Counter()
    keys: list[tuple[str, int, int]] = []
    for layer in record.layers:
        own = (layer.kind, layer.layer)
        keys.append((*own, seen[own]))
        seen[own] += 1
    return keys


def _labels(record: Record) -> Sequence[str]:
    """What each layer is called, no two the same: `layer 0, attention 2` where a layer has several of a kind."""
    keys = _layer_keys(record)
    counts = Counter(key[:2] for key in keys)
    return [
        f"{layer.label}, attention {key[2] + 1}" if counts[key[:2]] > 1 else layer.label
        for layer, key in zip(record.layers, keys, strict=True)
    ]


def _labels_alone(record: Record, paired: set[int | None]) -> tuple[str, ...]:
    return tuple(label for index, label in enumerate(_labels(record)) if index not in paired)


def _head_pairs(pair: _LayerPair) -> tuple[tuple[HeadStatistics, HeadStatistics], ...]:
    """The heads of a layer that both say something of; none where the layers have other numbers of heads."""
    a, b = pair.records
    if a.config.n_heads != b.config.n_heads:
        return ()
    known = {head.head: head for head in b.heads}
    return tuple((head, known[head.head]) for head in a.heads if head.head in known)


def _compared_layer(pair: _LayerPair, found: Differences, *, with_trace: bool) -> LayerDifference:
    """Its sites in the order of execution; what a trace says of a site stands where its array would."""
    a, b = pair.records
    names = [name for name in ORDER if name in a.arrays and name in b.arrays]
    alone = [tuple(name for name in ORDER if name in x.arrays and name not in y.arrays) for x, y in ((a, b), (b, a))]
    sites = tuple(compared_site(name, pair.cells, found.tolerance) for name in names)
    if with_trace:
        steps = compared_steps(a, b, found.tolerance, known=names, has_same_tokens=found.has_same_tokens)
        sites = tuple(_in_order(sites, steps))
        more = names_alone(a, b)
        alone = [tuple(dict.fromkeys((*own, *others))) for own, others in zip(alone, more, strict=True)]
    return LayerDifference(pair.label, pair.index_a, pair.index_b, sites, (), *alone)


def _in_order(sites: Sequence[SiteDifference], steps: Sequence[SiteDifference]) -> Iterator[SiteDifference]:
    """Arrays where a walkthrough has their step; what follows from them, which no walkthrough has, behind the site before it. The
    step of a site whose array is compared is told only where it says more: another shape, other words."""
    waiting = {site.site: site for site in sites}
    for step in steps:
        rank = ORDER.index(step.site) if step.site in ORDER else -1
        for name in [name for name in waiting if ORDER.index(name) < rank]:
            yield waiting.pop(name)
        own = waiting.pop(step.site, None)
        yield step if own is None else replace(own, told=step.told)
    yield from waiting.values()
