"""Collects the results of a unit's documents, and makes its files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import chain

import numpy as np

from mhacli.attention.taps import to_array
from mhacli.commands.scan.folded import worst_layers
from mhacli.commands.scan.request import ScanSettings
from mhacli.commands.scan.units import (
    EFFECTS,
    Unit,
    UnitDocument,
    UnitFacts,
    UnitFiles,
    add_sum,
    document_digest,
    statistic_names,
    strongest,
    sums_to_bytes,
    uniform_names,
    values,
    widened,
)
from mhacli.compute.checkpoint.layers import LayerResults
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.record.arrays import Array
from mhacli.record.corpus import BadEntry, CorpusCell, CorpusHead, CorpusSummary, TokenSink
from mhacli.record.effect import Effect
from mhacli.record.heads import HEAD_TYPES, MAX_LARGEST, Averages, HeadStatistics
from mhacli.record.record import InspectedLayer, Record, texts_of
from mhacli.record.tables import Columns, EffectTable, HeadTable, Table
from mhacli.text.corpus import Document
from mhacli.text.tokens import TokenSequence

EXAMPLE_LEN = 64
"""The number of tokens up to which a longer document is a better example."""
_KINDS = {kind: number for number, kind in enumerate(HEAD_TYPES)}


@dataclass
class Gathered:
    """The results of the documents of a unit computed so far."""

    unit: Unit
    settings: ScanSettings
    documents: list[UnitDocument] = field(default_factory=list)
    bad: list[BadEntry] = field(default_factory=list)
    heads: list[tuple[HeadStatistics, ...]] = field(default_factory=list)
    effects: list[tuple[Effect, ...]] = field(default_factory=list)
    _layers: list[tuple[InspectedLayer, ...]] = field(default_factory=list)
    _sums: dict[str, Array] = field(default_factory=dict)
    _sinks: list[dict[str, list[float]]] = field(default_factory=list)
    _cells: list[list[CorpusCell]] = field(default_factory=list)
    _identical: bool = True
    _example: tuple[tuple[bool, int], Record] | None = None

    def leave_out(self, document: Document, reason: str) -> None:
        """Adds a bad document."""
        self.bad.append(BadEntry(document.file, document.place, reason))

    def add(self, document: Document, run: CheckpointRun, effects: tuple[Effect, ...] = ()) -> None:
        """Adds a computed document, with the effects of removing each head."""
        texts, results = run.inputs.context or run.inputs.sequences, run.results
        n_tokens = len(texts[0].ids)
        heads = tuple(head for result in results for head in result.heads)
        digest = document_digest(document)
        self.documents.append(UnitDocument(document.file, document.place, digest, n_tokens))
        self.heads.append(heads)
        self.effects.append(effects)
        self._layers.append(tuple(result.layer for result in results))
        self._identical &= run.identical is not False
        self._add_sums(results, run)
        self._add_sinks_and_cells(document, run)
        self._update_example(self.documents[-1], run)

    def _add_sums(self, results: Sequence[LayerResults], run: CheckpointRun) -> None:
        """Adds the profiles and span masses of a document to the sums."""
        for name in ("profile", "uniform_profile"):
            rows = [_of_heads(result, name) for result in results]
            width = max(row.shape[1] for row in rows)
            add_sum(self._sums, name, np.concatenate([widened(row, width) for row in rows]))
        names = self.settings.span_names
        if not names:
            return
        indices = [names.index(span.name) for span in run.spans]
        grid, n = np.ix_(indices, indices), len(names)
        counts = np.zeros((n, n))
        counts[grid[0], grid[1]] = 1
        add_sum(self._sums, "span_counts", counts)
        for name in ("span_mass", "uniform_span_mass"):
            mass = np.zeros((len(self.heads[-1]), n, n))
            if indices:
                mass[:, grid[0], grid[1]] = np.concatenate([_of_heads(result, name) for result in results])
            add_sum(self._sums, name, mass)

    def _add_sinks_and_cells(self, document: Document, run: CheckpointRun) -> None:
        """Adds the sinks and the strongest cells of a document, with their tokens."""
        self._sinks = self._sinks or [{} for _ in self.heads[-1]]
        self._cells = self._cells or [[] for _ in self.heads[-1]]
        number = 0
        for result in run.results:
            queries, keys = texts_of(result.layer.kind, run.inputs.sequences, run.inputs.context)
            for head in result.heads:
                self._add_sinks(self._sinks[number], head, keys[0])
                best = self._cells[number]
                threshold = best[-1].lift if len(best) == MAX_LARGEST else -math.inf
                cells = [
                    CorpusCell(
                        document.file, document.place, cell.query, cell.key, queries[0].tokens[cell.query],
                        keys[0].tokens[cell.key], cell.share, cell.lift,
                    )
                    for cell in head.largest if cell.lift > threshold
                ]  # fmt: skip
                self._cells[number] = strongest([*best, *cells]) if cells else best
                number += 1

    @staticmethod
    def _add_sinks(weights_by_token: dict[str, list[float]], head: HeadStatistics, keys: TokenSequence) -> None:
        weights: dict[str, float] = {}
        for sink in head.sink_keys:
            token = keys.tokens[sink.key]
            weights[token] = weights.get(token, 0.0) + sink.share
        for token, weight in weights.items():
            weights_by_token.setdefault(token, []).append(weight)

    def _update_example(self, document: UnitDocument, run: CheckpointRun) -> None:
        """Keeps the record of the document if it is a better example than earlier ones: the longest of at most `EXAMPLE_LEN`
        tokens, otherwise the shortest."""
        if not self.unit.wants_example:
            return
        n = document.n_tokens
        rank = (True, n) if n <= EXAMPLE_LEN else (False, -n)
        if self._example is None or rank > self._example[0]:
            self._example = rank, self._example_record(run.record(), document)

    def _example_record(self, record: Record, document: UnitDocument) -> Record:
        """The record as that of a corpus of one document, without timings, details of the machine and text behind the tokens."""
        device, n = self.settings.device, document.n_tokens
        environment = replace(record.environment, device=device.partition(" ")[0], device_name=device)
        corpus = CorpusSummary(1, n, 0, n, document.file, document.place, (device,), ())
        return replace(
            record,
            sequences=tuple(sequence.covered for sequence in record.sequences),
            context=record.context and tuple(sequence.covered for sequence in record.context),
            timings={},
            environment=environment,
            corpus=corpus,
        )

    # ------------------------------------------------------------------------------------------------------ the files

    def files(self) -> UnitFiles:
        """The files of the unit."""
        effects = EffectTable(chain.from_iterable(self.effects))
        table = _DocumentTable(self.documents, HeadTable(chain.from_iterable(self.heads)), effects)
        rows = _rows_to_bytes(table, self.settings.row_format)
        sums = sums_to_bytes(self._facts(hashlib.sha256(rows).hexdigest()), self._arrays())
        return rows, b"" if self._example is None else self._example[1].to_bytes(), sums

    def _facts(self, rows_digest: str) -> UnitFacts:
        layers: tuple[InspectedLayer, ...] = ()
        if self.documents:
            longest = max(range(len(self.documents)), key=lambda i: (self.documents[i].n_tokens, -i))
            layers = worst_layers(self._layers[longest], self._layers)
        return UnitFacts(
            number=self.unit.number,
            settings=self.settings.digest,
            device=self.settings.device,
            rows=rows_digest,
            documents=tuple(self.documents),
            bad=tuple(self.bad),
            statistics=self._names() if self.documents else (),
            heads=tuple(
                CorpusHead(
                    layer=head.layer,
                    attention=head.attention,
                    head=head.head,
                    sinks=tuple(TokenSink(token, len(s), math.fsum(s) / len(s)) for token, s in sorted(sinks.items())),
                    cells=tuple(cells),
                )
                for head, sinks, cells in zip(
                    self.heads[0] if self.heads else (), self._sinks, self._cells, strict=True
                )
            ),
            layers=layers,
            identical=self._identical,
        )

    def _names(self) -> tuple[str, ...]:
        return (*statistic_names(len(self.settings.conditions)), *(EFFECTS if self.settings.effect else ()))

    def _arrays(self) -> dict[str, Array]:
        if not self.documents:
            return {}
        plain = [[head.uniform or Averages() for head in document_heads] for document_heads in self.heads]
        uniform = values(plain, uniform_names(len(self.settings.conditions)))
        statistics = values(self.heads, statistic_names(len(self.settings.conditions)))
        if self.settings.effect:
            statistics = np.concatenate([statistics, values(self.effects, EFFECTS)])
        return {
            "statistics": statistics,
            "kinds": np.array(
                [[_KINDS[head.kind] for head in document_heads] for document_heads in self.heads], dtype=np.uint8
            ),
            "uniform": np.nansum(uniform, axis=1),
            "uniform_counts": np.isfinite(uniform).sum(axis=1),
            **self._sums,
        }


def _of_heads(result: LayerResults, name: str) -> Array:
    """An array of one text, for all heads of the layer, in float64."""
    array = to_array(result.arrays[name])[0].astype(np.float64)
    return np.broadcast_to(array, (len(result.heads), *array.shape[1:]))


@dataclass(frozen=True)
class _DocumentTable(Table):
    """A row for each document, layer and head. The columns are `file`, `place` (line or row from 1, 0 for a whole file),
    `n_documents` (1) and `n_tokens`, those of `HeadTable`, and the `effects` of removing the heads, if there are any."""

    documents: Sequence[UnitDocument]
    heads: HeadTable
    effects: EffectTable

    def columns(self) -> Columns:
        """The columns by name."""
        n_heads = len(self.heads) // max(1, len(self.documents))
        rows = [document for document in self.documents for _ in range(n_heads)]
        types = {"file": str, "place": int, "n_documents": int, "n_tokens": int}
        columns = {name: (kind, [getattr(document, name) for document in rows]) for name, kind in types.items()}
        changes = self.effects.columns()
        return {
            **columns,
            **self.heads.columns(),
            **({name: changes[name] for name in EFFECTS} if self.effects else {}),
        }


def _rows_to_bytes(table: Table, row_format: str) -> bytes:
    """The contents of the file of rows, `jsonl` or `parquet`; equal rows give equal bytes."""
    if row_format == "jsonl":
        encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
        return "".join(f"{encode(row)}\n" for row in table.to_dicts()).encode()
    from pyarrow import parquet

    file = BytesIO()
    parquet.write_table(table.to_arrow(), file, compression="zstd")
    return file.getvalue()
