"""Sums over the documents of a unit or of a corpus, the file of those of a unit, and the record of a corpus."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add

import numpy as np

from mhacli.commands.scan.spread import spreads
from mhacli.errors import MhaError, bad_file
from mhacli.io.data import decode, json_checksum, plain
from mhacli.io.safetensors import METADATA_KEY, read_tensor_file, read_tensor_header
from mhacli.record.arrays import Array, checksum
from mhacli.record.checks import SelfCheck, worst_check
from mhacli.record.corpus import MAX_LISTED_BAD, BadEntry, CorpusCell, CorpusHead, Spread, TokenSink
from mhacli.record.effect import EFFECT_NUMBERS
from mhacli.record.heads import HEAD_TYPES, MAX_LARGEST, HeadStatistics
from mhacli.record.record import InspectedLayer, Record, SpanTokens, layer_prefix
from mhacli.record.tables import Columns, HeadTable
from mhacli.record.totals import HeadTotals
from mhacli.text.corpus import Document

MAX_FILE_BYTES = 4 << 30
MAX_SINKS = 10
"""The largest number of sink tokens of a head."""
_VALUES_AT_ONCE = 1 << 25
"""Values of a statistic held in memory at once: 256 MiB."""
EFFECTS = tuple(name for name in EFFECT_NUMBERS if name != "first_order")
"""The numbers of a removal: fields of `Effect`."""


@dataclass
class Totals:
    """Sums over documents: of a unit, to which documents are added, and of a corpus, to which units are merged in their order.

    `bad` has the first of the `n_bad` bad documents. `layers` are those of the longest document, with the worst result of each
    check over all; `identical` says whether the model's outputs were the same bits without inspection. `heads` also sums
    `kinds` `[head, type]`, the `profile` `[head, attention or uniform, step]`, and with spans `spans`, `[head, documents, mass
    or uniform mass, span, span]`. For each head, `sinks` has the number of documents and the sum of weights of a token,
    `offsets` those of a strongest distance, with the weight of uniform attention, and `cells` the strongest cells.

    `documents` has a digest of the documents of each unit. A unit also has that of its file of `rows`.
    """

    heads: HeadTotals
    n_documents: int = 0
    n_tokens: int = 0
    n_bad: int = 0
    longest: int = 0
    bad: tuple[BadEntry, ...] = ()
    devices: tuple[str, ...] = ()
    layers: tuple[InspectedLayer, ...] = ()
    identical: bool = True
    sinks: list[dict[str, list[float]]] = field(default_factory=list)
    offsets: list[dict[str, list[float]]] = field(default_factory=list)
    cells: list[list[CorpusCell]] = field(default_factory=list)
    documents: tuple[str, ...] = ()
    rows: str = ""

    def add(self, document: Document, record: Record, *, spans: tuple[str, ...]) -> None:
        """Adds a document."""
        n_tokens = len(record.keys[0].ids)
        one = Totals(
            HeadTotals(self.heads.names),
            n_documents=1,
            n_tokens=n_tokens,
            longest=n_tokens,
            layers=record.layers,
            identical=record.model is None or record.model.identical_outputs is not False,
        )
        for number in range(len(record.layers)):
            one._add_layer(document, record.of_layer(number), spans)
        self.merge(one)

    def _add_layer(self, document: Document, layer: Record, spans: tuple[str, ...]) -> None:
        n_heads = len(layer.heads)

        def of_heads(name: str) -> Array:
            array = layer.arrays[name][0].astype(np.float64)
            return np.broadcast_to(array, (n_heads, *array.shape[1:]))

        sums = {
            "kinds": np.array([[kind == head.kind for kind in HEAD_TYPES] for head in layer.heads], np.int64),
            "profile": np.stack([of_heads("profile"), of_heads("uniform_profile")], axis=1),
        }
        if spans:
            sums["spans"] = np.zeros((n_heads, 3, len(spans), len(spans)))
            if layer.spans:  # of the pairs of spans that are in the document
                numbers = [spans.index(span.name) for span in layer.spans]
                masses = [of_heads("span_mass"), of_heads("uniform_span_mass")]
                parts = np.stack([np.ones_like(masses[0]), *masses], axis=1)
                sums["spans"][np.ix_(range(n_heads), range(3), numbers, numbers)] = parts
        self.heads.add(layer.heads, **sums)
        query_tokens, key_tokens = layer.sequences[0].tokens, layer.keys[0].tokens
        for head in layer.heads:
            weights = defaultdict[str, float](float)
            for sink in head.sink_keys:
                weights[key_tokens[sink.key]] += sink.share
            self.sinks.append({token: [1, weight] for token, weight in weights.items()})
            at_uniform = head.uniform.at_offset if head.uniform else None
            at_offset = [1, head.at_offset or 0.0, at_uniform or 0.0]
            self.offsets.append({} if head.offset is None else {str(head.offset): at_offset})
            self.cells.append([
                CorpusCell(
                    document.file, document.place, cell.query, cell.key, query_tokens[cell.query], key_tokens[cell.key],
                    cell.share, cell.lift,
                )
                for cell in head.largest
            ])  # fmt: skip

    def leave_out(self, document: Document, reason: str) -> None:
        """Adds a bad document."""
        self.n_bad += 1
        self.bad += (BadEntry(document.file, document.place, reason),)

    def merge(self, other: Totals) -> None:
        """Adds other documents, behind those added so far. Raises `MhaError` if they have other heads."""
        self.documents += other.documents
        self.n_bad += other.n_bad
        self.bad += other.bad[: MAX_LISTED_BAD - len(self.bad)]
        if not other.n_documents:
            return
        if not self.n_documents:
            self.sinks, self.offsets = [{} for _ in other.sinks], [{} for _ in other.offsets]
            self.cells = [[] for _ in other.cells]
        elif self.heads.keys != other.heads.keys:
            raise MhaError("documents of a corpus have different heads", code="bad-file")
        of_longest, others = self.layers, other.layers
        if other.longest > self.longest:
            of_longest, others = others, of_longest
        self.layers = tuple(map(_worst, of_longest, others)) if others else of_longest
        self.n_documents += other.n_documents
        self.n_tokens += other.n_tokens
        self.longest = max(self.longest, other.longest)
        self.identical &= other.identical
        self.devices = tuple(sorted({*self.devices, *other.devices}))
        self.heads.merge(other.heads)
        for mine, theirs in zip([*self.sinks, *self.offsets], [*other.sinks, *other.offsets], strict=True):
            for key, sums in theirs.items():
                mine[key] = [*map(add, mine[key], sums)] if key in mine else sums
        for number, cells in enumerate(other.cells):  # among equal ones, the first
            self.cells[number] = sorted([*self.cells[number], *cells], key=lambda cell: -cell.lift)[:MAX_LARGEST]


def _worst(layer: InspectedLayer, other: InspectedLayer) -> InspectedLayer:
    """The layer, with the worse result of each check of both."""
    checks = tuple(map(worst_check, zip(layer.survey.checks, other.survey.checks, strict=True)))
    return replace(
        layer,
        verified=layer.verified and other.verified,
        unverified=tuple(dict.fromkeys([*layer.unverified, *other.unverified])),
        self_check=SelfCheck.of_layers([checks]),
        survey=replace(layer.survey, checks=checks),
    )


# ------------------------------------------------------------------------------------------------------------ the file


def totals_to_bytes(totals: Totals, rows: Columns) -> bytes:
    """The contents of the file of a unit: the totals, and the `statistics` of its rows, `[statistic, document, head]`, NaN for a
    missing value."""
    from safetensors.numpy import save

    arrays = {name: np.ascontiguousarray(array) for name, array in totals.heads.sums.items()}
    if totals.n_documents:
        columns = [rows[name][1] for name in (*totals.heads.names, *EFFECTS) if name in rows]
        arrays["statistics"] = np.array(columns, np.float64).reshape(len(columns), totals.n_documents, -1)
    facts = plain(replace(totals, heads=replace(totals.heads, sums={})))
    return save(arrays, metadata={METADATA_KEY: json.dumps({"totals": facts, "digest": _digest(facts, arrays)})})


def read_totals(path: str) -> Totals:
    """The sums of a unit, without the `statistics`. Raises `MhaError` for a missing or damaged file."""
    from safetensors.numpy import load

    file = read_tensor_file(path, MAX_FILE_BYTES)
    document = file.metadata if isinstance(file.metadata, dict) else {}
    arrays = load(file.data)
    if document.get("digest") != _digest(document.get("totals"), arrays):
        raise bad_file(path, f"{path} is damaged: its content is not what was written")
    totals = decode(Totals, document["totals"], path)
    arrays.pop("statistics", None)
    totals.heads.sums = arrays
    return totals


def _digest(facts: object, arrays: Mapping[str, Array]) -> str:
    return json_checksum([facts, sorted((name, checksum(array)) for name, array in arrays.items())])


# ------------------------------------------------------------------------------------------------------------ the record


def merged(paths: Sequence[str], names: tuple[str, ...]) -> Totals:
    """The totals of the units in these files, with the statistics `names`. Raises `MhaError` for a missing or damaged unit, for
    units of different heads, and if no document is good."""
    totals = Totals(HeadTotals(names))
    for path in paths:
        totals.merge(read_totals(path))
    if not totals.n_documents:
        first = f": {totals.bad[0].named}: {totals.bad[0].reason}" if totals.bad else ""
        more = f", and {totals.n_bad - 1:,} more" if totals.n_bad > 1 else ""
        raise MhaError(f"the corpus has no good document{first}{more}", code="no-documents")
    return totals


def summary(totals: Totals, example: Record, *, spans: Sequence[str], spreads: Sequence[Sequence[Spread]]) -> Record:
    """The record of the example with the head statistics of all documents, and their `spreads` of each head."""
    assert example.model, "a scan is of a checkpoint"
    assert example.corpus, "an example names its document"
    heads = [_head(totals, number) for number in range(len(totals.cells))]
    layers = tuple(  # with the sizes of the example's arrays, of which only the profiles are of all documents
        replace(longest, survey=replace(layer.survey, steps=longest.survey.steps, checks=longest.survey.checks))
        for layer, longest in zip(example.layers, totals.layers, strict=True)
    )
    in_example = {span.name: span for span in example.spans}
    lengths = [len(text.ids) for text in example.sequences]
    of_corpus = [_of_corpus(totals, *of_head) for of_head in zip(range(len(heads)), heads, spreads, strict=True)]
    counts = {name: getattr(totals, name) for name in ("n_documents", "n_tokens", "n_bad", "longest", "devices", "bad")}
    return replace(
        example,
        heads=HeadTable(heads),
        self_check=SelfCheck.of_layers([layer.survey.checks for layer in layers], holds=totals.identical),
        model=replace(example.model, identical_outputs=totals.identical, compared_len=max(lengths)),
        layers=layers,
        spans=tuple(in_example.get(name, SpanTokens(name, ((),) * len(lengths))) for name in spans),
        corpus=replace(example.corpus, heads=tuple(of_corpus), **counts),
        arrays={**example.arrays, **_arrays(totals, layers)},
    )


def _head(totals: Totals, number: int) -> HeadStatistics:
    """The means of a head. Its strongest distance is that of most documents; others count as 0 in the weight there."""
    offsets = totals.offsets[number]
    if not offsets:
        return totals.heads.head(number)
    offset = max(offsets, key=lambda distance: (offsets[distance][0], -int(distance)))
    _, weight, uniform = offsets[offset]
    return totals.heads.head(number, int(offset), (weight / totals.n_documents, uniform / totals.n_documents))


def _of_corpus(totals: Totals, number: int, head: HeadStatistics, of_head: Sequence[Spread]) -> CorpusHead:
    counts = totals.heads.sums["kinds"][number].tolist()
    kinds = {kind: n for kind, n in zip(HEAD_TYPES, counts, strict=True) if n}
    sinks = sorted(totals.sinks[number].items(), key=lambda item: (-item[1][0], -item[1][1], item[0]))
    return CorpusHead(
        layer=head.layer,
        attention=head.attention,
        head=head.head,
        agree=kinds.get(head.kind, 0) / totals.n_documents,
        kinds=kinds,
        spreads=tuple(of_head),
        sinks=tuple(TokenSink(token, int(n), weight / n) for token, (n, weight) in sinks[:MAX_SINKS]),
        cells=tuple(totals.cells[number]),
    )


def spreads_of(paths: Sequence[str], totals: Totals) -> list[list[Spread]]:
    """The spreads of each head. They are computed for one statistic at a time, and for some heads if there are many documents."""
    units = [(path, info) for path in paths if (info := read_tensor_header(path).tensors.get("statistics"))]
    n_heads, step = len(totals.cells), max(1, _VALUES_AT_ONCE // totals.n_documents)
    of_heads = list[list[Spread]]([] for _ in range(n_heads))
    for index, name in enumerate([*totals.heads.names, *EFFECTS][: units[0][1].shape[0]]):
        for start in range(0, n_heads, step):
            parts = []
            for path, info in units:
                n_values = info.shape[1] * n_heads
                numbers = np.fromfile(path, "<f8", n_values, offset=info.start + 8 * index * n_values)
                parts.append(numbers.reshape(-1, n_heads)[:, start : start + step])
            for number, spread in enumerate(spreads(name, np.concatenate(parts)), start):
                of_heads[number] += [] if spread is None else [spread]
    return of_heads


def _arrays(totals: Totals, layers: Sequence[InspectedLayer]) -> dict[str, Array]:
    """The means over all documents that replace arrays of the example, `[1, head, …]`."""
    arrays = dict[str, Array]()
    for index, layer in enumerate(layers):
        of_layer = [number for number, key in enumerate(totals.heads.keys) if key[:2] == (layer.layer, layer.name)]
        sums = {name: array[None, of_layer] for name, array in totals.heads.sums.items()}
        profiles = sums["profile"][..., : len(layer.survey.steps)] / totals.n_documents
        means = {"profile": profiles[:, :, 0], "uniform_profile": profiles[:, :, 1]}
        if "spans" in sums:
            counts, *masses = np.moveaxis(sums["spans"], 2, 0)
            with np.errstate(invalid="ignore"):  # pairs of spans that no document has
                means |= {"span_mass": masses[0] / counts, "uniform_span_mass": masses[1] / counts}
        arrays |= {layer_prefix(index) + name: mean for name, mean in means.items()}
    return arrays
