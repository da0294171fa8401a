"""Merges the units of a scan into one record. They are folded in the order of their names, whichever worker computed them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mhacli.commands.scan.folded import Folded
from mhacli.commands.scan.folder import ScanFolder
from mhacli.commands.scan.spread import spreads
from mhacli.commands.scan.units import (
    EARLIER_EFFECTS,
    EFFECTS,
    PATTERN,
    UNIFORM_AT_OFFSET,
    WITHOUT_MEAN,
    read_sums,
    uniform_names,
)
from mhacli.errors import MhaError
from mhacli.io.safetensors import read_tensor_header
from mhacli.record import storage
from mhacli.record.arrays import Array
from mhacli.record.checks import SelfCheck
from mhacli.record.corpus import CorpusHead, CorpusSummary, Spread
from mhacli.record.heads import HEAD_TYPES, Averages, HeadStatistics, with_kind
from mhacli.record.record import InspectedLayer, Record, SpanTokens, layer_prefix
from mhacli.record.tables import HeadTable

_VALUES_AT_ONCE = 1 << 25
"""Values of a statistic held in memory at once: 256 MiB."""


def merge(folder: ScanFolder, names: Sequence[str], command: tuple[str, ...]) -> Record:
    """The record of the corpus, merged from the units with these names and written into the folder with its manifest.

    The same units give the same bytes. Raises `MhaError` for a missing or damaged unit, for units of different heads, and if no
    document is good.
    """
    folded = Folded()
    for name in names:
        folded.add(*read_sums(folder.sums_path(name)))
    if not folded.heads:
        first = f": {folded.bad[0].named}: {folded.bad[0].reason}" if folded.bad else ""
        more = f", and {folded.n_bad - 1:,} more" if folded.n_bad > 1 else ""
        raise MhaError(f"the corpus has no good document{first}{more}", code="no-documents")
    settings = folder.settings[0]
    spreads, means = _over_documents([folder.sums_path(name) for name in names], len(folded.heads), folded.statistics)
    example = storage.load(folder.example_path(folder.examples()[0]))
    record = replace(_record(example, folded, spreads, means, settings.span_names), command=command)
    folder.finish(record.to_bytes(), folded.manifest(names))
    return record


# ------------------------------------------------------------------------------------------------------------- spreads


class _Numbers(NamedTuple):
    """The place of a unit's statistics in its file, `[statistic, document, head]` in float64."""

    path: str
    start: int
    n_documents: int
    n_heads: int

    def read(self, statistic: int) -> Array:
        """One statistic, `[document, head]`."""
        n_bytes = 8 * self.n_documents * self.n_heads
        with open(self.path, "rb") as file:
            file.seek(self.start + statistic * n_bytes)
            numbers = np.frombuffer(file.read(n_bytes), dtype="<f8")
        return numbers.reshape(self.n_documents, self.n_heads)


def _numbers(paths: Sequence[str]) -> Iterator[_Numbers]:
    """The statistics of units that have good documents."""
    for path in paths:
        header = read_tensor_header(path)
        if "statistics" in header.tensors:
            info = header.tensors["statistics"]
            yield _Numbers(path, info.start, *info.shape[1:])


def _over_documents(
    paths: Sequence[str], n_heads: int, names: Sequence[str]
) -> tuple[list[list[Spread]], list[dict[str, float | None]]]:
    """The spreads of each head, and its means by statistic, of `max_score` the largest. Computed for one statistic at a time, and
    for a few heads at a time if there are many documents."""
    units = [*_numbers(paths)]
    step = max(1, _VALUES_AT_ONCE // max(1, sum(unit.n_documents for unit in units)))
    head_spreads = list[list[Spread]]([] for _ in range(n_heads))
    head_means: list[dict[str, float | None]] = []
    for start in range(0, n_heads, step):
        kept: dict[str, Array] = {}
        for index, name in enumerate(names):
            values = np.concatenate([unit.read(index)[:, start : start + step] for unit in units])
            if name in _KEPT:
                kept[name] = values
            if name not in (*WITHOUT_MEAN, *EARLIER_EFFECTS):
                for head, spread in enumerate(spreads(name, values), start):
                    head_spreads[head] += [] if spread is None else [spread]
        for spreads_of_head, scores, *at_offset in zip(
            head_spreads[start:], *(kept[name].T.tolist() for name in _KEPT), strict=False
        ):
            means = {spread.statistic: spread.mean for spread in spreads_of_head if spread.statistic not in EFFECTS}
            largest = max((score for score in scores if not math.isnan(score)), default=None)
            offset = dict(zip(WITHOUT_MEAN, _strongest_offset(*at_offset), strict=True))
            head_means.append({**means, "max_score": largest, **offset})
    return head_spreads, head_means


_KEPT = ("max_score", *WITHOUT_MEAN)


def _strongest_offset(
    offsets: Sequence[float], weights: Sequence[float], uniform: Sequence[float]
) -> tuple[int | None, float | None, float | None]:
    """The distance that is the strongest in most documents, with the mean weight there and that of uniform attention. Documents
    with another strongest distance count as 0 in these means."""
    sums: dict[int, tuple[int, float, float]] = {}
    for offset, weight, plain in zip(offsets, weights, uniform, strict=True):
        if math.isfinite(offset):
            n, total, plain_total = sums.get(int(offset), (0, 0.0, 0.0))
            sums[int(offset)] = n + 1, total + weight, plain_total + plain
    if not sums:
        return None, None, None
    most, (_, total, plain_total) = max(sums.items(), key=lambda item: (item[1], -item[0]))
    return most, total / len(offsets), plain_total / len(offsets)


# -------------------------------------------------------------------------------------------------------------- record


def _record(
    example: Record,
    folded: Folded,
    head_spreads: Sequence[Sequence[Spread]],
    means: Sequence[Mapping[str, float | None]],
    spans: tuple[str, ...],
) -> Record:
    """The record of the example with the head statistics of all documents."""
    assert example.model is not None, "a scan is of a checkpoint"
    n_patterns = len(example.layers[0].survey.patterns)
    heads = [_head(folded, number, means[number], n_patterns) for number in range(len(folded.heads))]
    layers = tuple(_layer(layer, longest) for layer, longest in zip(example.layers, folded.layers, strict=True))
    in_example = {span.name: span for span in example.spans}
    return replace(
        example,
        heads=HeadTable(heads),
        self_check=SelfCheck.of_layers([layer.survey.checks for layer in layers], holds=folded.identical),
        model=replace(
            example.model,
            identical_outputs=folded.identical,
            compared_len=max(len(text.ids) for text in example.sequences),
        ),
        layers=layers,
        spans=tuple(in_example.get(name, SpanTokens(name, ((),) * len(example.sequences))) for name in spans),
        corpus=_summary(example, folded, heads, head_spreads),
        arrays={**example.arrays, **_arrays(folded, layers)},
    )


def _summary(
    example: Record, folded: Folded, heads: Sequence[HeadStatistics], head_spreads: Sequence[Sequence[Spread]]
) -> CorpusSummary:
    assert example.corpus is not None, "an example names its document"
    return replace(
        example.corpus,
        n_documents=folded.n_documents,
        n_tokens=folded.n_tokens,
        n_bad=folded.n_bad,
        longest=folded.longest,
        devices=tuple(sorted(folded.devices)),
        heads=tuple(_of_corpus(folded, number, head, head_spreads[number]) for number, head in enumerate(heads)),
        bad=tuple(folded.bad),
    )


def _of_corpus(folded: Folded, number: int, head: HeadStatistics, spreads: Sequence[Spread]) -> CorpusHead:
    counts = folded.sums["kinds"][:, number].tolist()
    kinds = {name: int(n) for name, n in zip(HEAD_TYPES, counts, strict=True) if n}
    return CorpusHead(
        layer=head.layer,
        attention=head.attention,
        head=head.head,
        agree=kinds.get(head.kind, 0) / folded.n_documents,
        kinds=kinds,
        spreads=tuple(spreads),
        sinks=folded.sinks_in_order(number),
        cells=tuple(folded.cells[number]),
    )


def _head(folded: Folded, number: int, means: Mapping[str, float | None], n_patterns: int) -> HeadStatistics:
    """The means of a head with the type that follows from them; its largest score is that of all documents."""
    names, head = uniform_names(n_patterns), folded.heads[number]
    counts = folded.sums["uniform_counts"][:, number].tolist()
    sums = folded.sums["uniform"][:, number].tolist()
    uniform = {name: total / n for name, total, n in zip(names, sums, counts, strict=True) if n}
    return with_kind(
        HeadStatistics(
            layer=head.layer,
            attention=head.attention,
            head=head.head,
            uniform=Averages(**_fields(uniform, n_patterns), at_offset=means[UNIFORM_AT_OFFSET]),
            **_fields(means, n_patterns),
        )
    )


def _fields(means: Mapping[str, float | None], n_patterns: int) -> dict[str, Any]:
    """The means as fields of `Averages`: distances rounded, and conditions in one field."""
    special = (PATTERN, UNIFORM_AT_OFFSET)
    fields: dict[str, Any] = {name: mean for name, mean in means.items() if not name.startswith(special)}
    fields |= {name: round(mean) for name, mean in means.items() if mean is not None and name.startswith("window_")}
    return fields | {"patterns": tuple(means.get(f"{PATTERN}{number + 1}") for number in range(n_patterns))}


def _layer(example: InspectedLayer, longest: InspectedLayer) -> InspectedLayer:
    """The layer of the longest document with the sizes of the example's arrays; only the profiles are of all documents."""
    survey = replace(example.survey, steps=longest.survey.steps, checks=longest.survey.checks)
    return replace(longest, survey=survey)


def _arrays(folded: Folded, layers: Sequence[InspectedLayer]) -> dict[str, Array]:
    """The means over all documents that replace arrays of the example."""
    arrays, first = {}, 0
    for index, layer in enumerate(layers):
        n_heads = sum((head.layer, head.attention) == (layer.layer, layer.name) for head in folded.heads)
        heads = slice(first, first + n_heads)
        first = heads.stop
        for name in ("profile", "uniform_profile"):
            arrays[layer_prefix(index) + name] = folded.mean(name, heads)[None, :, : len(layer.survey.steps)]
        if "span_counts" in folded.sums:
            with np.errstate(invalid="ignore"):  # pairs of spans that no document has
                masses = {name: folded.sums[name][heads] / folded.sums["span_counts"] for name in _MASSES}
            arrays |= {layer_prefix(index) + name: mass[None] for name, mass in masses.items()}
    return arrays


_MASSES = ("span_mass", "uniform_span_mass")
