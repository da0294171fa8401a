"""Merges the units of a scan into one record, in the order of their names, whichever worker computed them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mhacli.commands.scan.folder import ScanFolder
from mhacli.commands.scan.spread import spreads
from mhacli.commands.scan.totals import EFFECTS, Totals, read_totals, spread_names
from mhacli.errors import MhaError
from mhacli.io.safetensors import read_tensor_header
from mhacli.record import storage
from mhacli.record.arrays import Array
from mhacli.record.checks import SelfCheck
from mhacli.record.corpus import CorpusHead, Spread, TokenSink
from mhacli.record.heads import HEAD_TYPES, HeadStatistics
from mhacli.record.record import InspectedLayer, Record, SpanTokens, layer_prefix
from mhacli.record.tables import HeadTable
from mhacli.record.totals import HeadTotals

MAX_SINKS = 10
"""The largest number of sink tokens of a head."""
_VALUES_AT_ONCE = 1 << 25
"""Values of a statistic held in memory at once: 256 MiB."""


def merge(folder: ScanFolder, names: Sequence[str], command: tuple[str, ...]) -> Record:
    """The record of the corpus, merged from the units with these names and written into the folder with its manifest.

    The same units give the same bytes. Raises `MhaError` for a missing or damaged unit, for units of different heads, and if no
    document is good.
    """
    settings, paths = folder.settings[0], [folder.sums_path(name) for name in names]
    totals, documents = Totals(HeadTotals(settings.mean_names)), hashlib.sha256()
    for path in paths:
        unit = read_totals(path)
        documents.update("".join(unit.digests).encode())
        totals.merge(replace(unit, digests=[]))
    if not totals.n_documents:
        first = f": {totals.bad[0].named}: {totals.bad[0].reason}" if totals.bad else ""
        more = f", and {totals.n_bad - 1:,} more" if totals.n_bad > 1 else ""
        raise MhaError(f"the corpus has no good document{first}{more}", code="no-documents")
    example = storage.load(folder.example_path(folder.examples()[0]))
    statistics = (*spread_names(totals.heads), *(EFFECTS if settings.effect else ()))
    record = replace(
        _record(example, totals, _spreads(paths, totals, statistics), settings.span_names), command=command
    )
    numbers = {name: getattr(totals, name) for name in ("n_documents", "n_tokens", "n_bad", "devices")}
    folder.finish(record.to_bytes(), {**numbers, "documents": documents.hexdigest(), "units": [*names]})
    return record


def _spreads(paths: Sequence[str], totals: Totals, statistics: Sequence[str]) -> list[list[Spread]]:
    """The spreads of each head. They are computed for one statistic at a time, and for some heads if there are many documents."""
    units = [(path, info) for path in paths if (info := read_tensor_header(path).tensors.get("statistics"))]
    n_heads, step = len(totals.cells), max(1, _VALUES_AT_ONCE // totals.n_documents)
    of_heads = list[list[Spread]]([] for _ in range(n_heads))
    for index, name in enumerate(statistics):
        for start in range(0, n_heads, step):
            parts = []
            for path, info in units:
                n_values = info.shape[1] * n_heads
                numbers = np.fromfile(path, "<f8", n_values, offset=info.start + 8 * index * n_values)
                parts.append(numbers.reshape(-1, n_heads)[:, start : start + step])
            for number, spread in enumerate(spreads(name, np.concatenate(parts)), start):
                of_heads[number] += [] if spread is None else [spread]
    return of_heads


# -------------------------------------------------------------------------------------------------------------- record


def _record(
    example: Record, totals: Totals, head_spreads: Sequence[Sequence[Spread]], spans: tuple[str, ...]
) -> Record:
    """The record of the example with the head statistics of all documents."""
    assert example.model, "a scan is of a checkpoint"
    assert example.corpus, "an example names its document"
    heads = [_head(totals, number) for number in range(len(totals.cells))]
    layers = tuple(  # with the sizes of the example's arrays, of which only the profiles are of all documents
        replace(longest, survey=replace(layer.survey, steps=longest.survey.steps, checks=longest.survey.checks))
        for layer, longest in zip(example.layers, totals.layers, strict=True)
    )
    in_example = {span.name: span for span in example.spans}
    n = len(example.sequences)
    return replace(
        example,
        heads=HeadTable(heads),
        self_check=SelfCheck.of_layers([layer.survey.checks for layer in layers], holds=totals.identical),
        model=replace(
            example.model,
            identical_outputs=totals.identical,
            compared_len=max(len(text.ids) for text in example.sequences),
        ),
        layers=layers,
        spans=tuple(in_example.get(name, SpanTokens(name, ((),) * n)) for name in spans),
        corpus=replace(
            example.corpus,
            n_documents=totals.n_documents,
            n_tokens=totals.n_tokens,
            n_bad=totals.n_bad,
            longest=totals.longest,
            devices=tuple(totals.devices),
            heads=tuple(_of_corpus(totals, number, head, head_spreads[number]) for number, head in enumerate(heads)),
            bad=tuple(totals.bad),
        ),
        arrays={**example.arrays, **_arrays(totals, layers)},
    )


def _head(totals: Totals, number: int) -> HeadStatistics:
    """The means of a head. Its strongest distance is that of most documents; others count as 0 in the weight there."""
    key, offsets = [*totals.heads.of_head][number], totals.offsets[number]
    if not offsets:
        return totals.heads.head(key)
    offset = max(offsets, key=lambda distance: (offsets[distance][0], -int(distance)))
    _, weight, uniform = offsets[offset]
    return totals.heads.head(key, int(offset), (weight / totals.n_documents, uniform / totals.n_documents))


def _of_corpus(totals: Totals, number: int, head: HeadStatistics, head_spreads: Sequence[Spread]) -> CorpusHead:
    counts = [*totals.heads.of_head.values()][number]["kinds"].tolist()
    kinds = {kind: n for kind, n in zip(HEAD_TYPES, counts, strict=True) if n}
    sinks = sorted(totals.sinks[number].items(), key=lambda item: (-item[1][0], -item[1][1], item[0]))
    return CorpusHead(
        layer=head.layer,
        attention=head.attention,
        head=head.head,
        agree=kinds.get(head.kind, 0) / totals.n_documents,
        kinds=kinds,
        spreads=tuple(head_spreads),
        sinks=tuple(TokenSink(token, int(n), weight / n) for token, (n, weight) in sinks[:MAX_SINKS]),
        cells=tuple(totals.cells[number]),
    )


def _arrays(totals: Totals, layers: Sequence[InspectedLayer]) -> dict[str, Array]:
    """The means over all documents that replace arrays of the example."""
    arrays = dict[str, Array]()
    for index, layer in enumerate(layers):
        of_layer = [sums for key, sums in totals.heads.of_head.items() if key[:2] == (layer.layer, layer.name)]
        profiles = np.stack([sums["profile"] for sums in of_layer], axis=1)[:, None] / totals.n_documents
        names, means = ["profile", "uniform_profile"], [*profiles[..., : len(layer.survey.steps)]]
        if "spans" in of_layer[0]:
            counts, *masses = np.stack([sums["spans"] for sums in of_layer], axis=1)[:, None]
            with np.errstate(invalid="ignore"):  # pairs of spans that no document has
                means += [mass / counts for mass in masses]
            names += ["span_mass", "uniform_span_mass"]
        arrays |= {layer_prefix(index) + name: mean for name, mean in zip(names, means, strict=True)}
    return arrays
