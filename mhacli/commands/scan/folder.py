"""The folder of a scan: its manifest, the rows and sums of finished units, and the summary.

A unit is finished when its file in `units` exists and is intact; this file is written last. Every
file is written completely or not at all, so a scan may be killed at any moment and resumes from the
finished units. The sums of units, merged in their order, and their spread give the record of a
corpus.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

from mhacli.cli.console import note
from mhacli.errors import MhaError, UsageError, bad_file
from mhacli.io.data import Array, checksum, decode, json_checksum, load_json, plain
from mhacli.io.files import TEMPORARY, read_whole, write_whole
from mhacli.io.safetensors import METADATA_KEY, read_tensor_file
from mhacli.models.means import CONDITION, COUNTS, MEANS, mean_head
from mhacli.record.checks import SelfCheck, worst_check
from mhacli.record.corpus import (
    CONFIDENCE,
    MAX_LISTED_BAD,
    QUANTILES,
    BadEntry,
    CorpusCell,
    CorpusHead,
    Spread,
    TokenSink,
    named,
)
from mhacli.record.effect import EFFECT_NUMBERS
from mhacli.record.exports import Columns, HeadTable
from mhacli.record.heads import HEAD_TYPES, MAX_LARGEST, OF_REMOVAL, HeadKey, HeadStatistics
from mhacli.record.record import InspectedLayer, Record, SpanTokens, layer_prefix
from mhacli.record.storage import MANIFEST, SUMMARY, load
from mhacli.text.reading import Document

Settings = Mapping[str, Any]
"""The settings that, with the documents, determine the results, as JSON: equal settings give equal
bytes."""
UNIT_SIZE = 16
"""Documents in a unit, bad ones counted; the last unit of a corpus may have fewer."""
_ANEW = "--out another folder starts anew"
"""The hint for a folder that cannot be resumed."""
_SCHEMA = "mha.scan/1"
_ROWS = "rows"
_UNITS = "units"
_OF_DEVICE = {"device", "reducer", "build"}
"""The settings in which results of several devices may differ."""


class UnitFiles(NamedTuple):
    """The contents of the files of a unit: rows, the record of a document as an example, empty if
    none is good, and sums, whose file marks the unit as finished.
    """

    rows: bytes
    example: bytes
    sums: bytes


class UnitPaths(NamedTuple):
    """The paths of the files of a unit, as `UnitFiles`."""

    rows: str
    example: str
    sums: str


class Unit(NamedTuple):
    """Consecutive documents of a corpus, which are computed, written and repeated as a whole, by
    their number from 0.
    """

    number: int
    documents: tuple[Document, ...]

    @property
    def named(self) -> str:
        """The first and last document, for messages: `corpus.jsonl:1 to corpus.jsonl:16`."""
        return " to ".join(
            named(document.file, document.place)
            for document in (self.documents[0], self.documents[-1])
        )

    def name(self, settings: Settings) -> str:
        """The number, so that names sort like the documents, and a digest of what determines the
        results.
        """
        return f"{self.number:08d}-{json_checksum([_digest_of(settings), self.documents])[:16]}"


def _digest_of(settings: Settings) -> str:
    """The digest of settings without the name of the model, which is only its location."""
    return json_checksum(sorted({**settings, "model": ""}.items()))


def differences(old: Settings, new: Settings) -> dict[str, str]:
    """The settings that differ, with both values."""
    names = [name for name in new if old.get(name) != new[name] and name != "model"]
    return {name: f"{name} was {old.get(name)} and is {new[name]}" for name in names}


@dataclass(frozen=True)
class ScanFolder:
    """An open folder. `settings` are those of this scan, then those of other devices that computed
    units.
    """

    path: Path
    settings: tuple[Settings, ...]

    def paths(self, name: str) -> UnitPaths:
        """The paths of a unit's files."""
        form = self.settings[0]["rows"].split()[0]
        return UnitPaths(
            rows=str(self.path / _ROWS / f"{name}.{form}"),
            example=str(self.path / f"example-{name.partition('-')[0]}.safetensors"),
            sums=str(self.path / _UNITS / f"{name}.safetensors"),
        )

    def write(self, name: str, files: UnitFiles) -> None:
        """Writes the files of a unit, the example only if no unit before has one. Raises `MhaError`
        if one cannot be written.
        """
        paths = self.paths(name)
        write_whole(paths.rows, files.rows, force=True)
        if files.example and not any(other <= paths.example for other in self.examples()):
            write_whole(paths.example, files.example, force=True)
        write_whole(paths.sums, files.sums, force=True)

    def totals(self, name: str) -> Totals:
        """The sums of a unit. Raises `MhaError` for a unit without its files, or with a damaged
        one.
        """
        rows, _, sums = self.paths(name)
        totals = read_totals(sums)
        if sha256(read_whole(rows, MAX_FILE_BYTES)).hexdigest() != totals.rows:
            raise bad_file(rows, f"{rows} is damaged: its content is not what was written")
        return totals

    def finished(self, unit: Unit, names: Iterable[str]) -> tuple[str, Totals | None]:
        """The name of the unit, and its sums if it is finished and the corpus has an example, of
        the units with its number and these `names`. Damaged files are named.

        Earlier forms of the unit are removed: the last one of a shorter corpus, one that cannot be
        read, or one with bad documents. Raises `UsageError` for a whole unit of other documents.
        """
        names_here = [unit.name(settings) for settings in self.settings]
        for name in names:
            totals = None
            try:
                totals = self.totals(name)
            except MhaError as fault:
                if name in names_here and os.path.lexists(self.paths(name).sums):
                    note(f"{fault.typed_message}; it is computed again")
            if name in names_here:
                if totals is not None and self.examples():
                    return name, totals
            elif totals is not None and totals.n_documents == UNIT_SIZE:
                message = f"{self.path} was made of other documents: {unit.named} have changed"
                raise UsageError(message, hint=_ANEW, path=str(self.path))
            else:
                for path in reversed(self.paths(name)):  # first the file that marks it as finished
                    Path(path).unlink(missing_ok=True)
        return names_here[0], None

    def names(self) -> dict[int, list[str]]:
        """The sorted names of all units with files, finished or not, by their number."""
        files = [path.name for part in (_ROWS, _UNITS) for path in (self.path / part).glob("[!.]*")]
        names = sorted({file.partition(".")[0] for file in files})
        return {
            number: [*same]
            for number, same in groupby(names, key=lambda name: int(name.partition("-")[0]))
        }

    def examples(self) -> list[str]:
        """The paths of the examples, in the order of their units."""
        return sorted(map(str, self.path.glob("example-*")))

    def require_no_more(self, others: Collection[int]) -> None:
        """Raises `UsageError` if there are units with other numbers than those of the corpus."""
        if others:
            message = (
                f"{self.path} has {len(others)} units of documents that the corpus does not have"
            )
            raise UsageError(message, hint=_ANEW, path=str(self.path))

    def record(
        self, names: Sequence[str], *, spans: Sequence[str], command: tuple[str, ...]
    ) -> Record:
        """The record of all units, which is also written, and in the manifest its sums. Raises
        `MhaError` if no document is good. Removes unneeded examples, and temporary files of killed
        processes.
        """
        paths = [self.paths(name).sums for name in names]
        totals = Totals()
        for path in paths:
            totals.merge(read_totals(path))
        if not totals.n_documents:
            message = "the corpus has no good document"
            if totals.bad:
                message += f": {totals.bad[0].named}: {totals.bad[0].reason}"
            raise MhaError(message, code="no-documents")
        example = load(self.examples()[0])
        record = replace(summary(totals, example, paths, spans=spans), command=command)
        record.save(str(self.path / SUMMARY), force=True)
        facts = {
            name: getattr(totals, name) for name in ("n_documents", "n_tokens", "n_bad", "devices")
        }
        _write_manifest(
            self.path,
            self.settings,
            **facts,
            documents=json_checksum(totals.documents),
            units=names,
        )
        for path in self.examples()[1:]:
            Path(path).unlink(missing_ok=True)
        for temporary in [*self.path.rglob(f".*{TEMPORARY}")]:
            temporary.unlink(missing_ok=True)
        return record


def open_folder(out: str, settings: Settings, *, mixed: bool) -> ScanFolder:
    """The folder of a scan, created if it does not exist.

    Raises `UsageError` for a folder with other settings, naming them; with `mixed` the device may
    differ, and what follows it. Raises `MhaError` for a folder with other files, or one that cannot
    be written.
    """
    path = Path(out)
    recorded = _recorded_settings(path)
    if recorded is None:
        _make_folders(path)
        recorded = []
    changes = [differences(old, settings) for old in recorded]
    others = [old for old, changed in zip(recorded, changes, strict=True) if changed]
    if len(others) == len(recorded):
        for changed in changes:
            _require_same(changed, out, mixed=mixed)
        _write_manifest(path, [settings, *others])
    return ScanFolder(path, (settings, *others))


def _recorded_settings(path: Path) -> list[dict[str, Any]] | None:
    """The settings in the manifest of a folder, None without one. Raises `MhaError` for a file that
    is no manifest.
    """
    manifest = str(path / MANIFEST)
    if not os.path.lexists(manifest):
        return None
    try:
        content = load_json(read_whole(manifest, MAX_FILE_BYTES), manifest)
        document = decode(dict[str, Any], content, manifest)
        recorded = decode(list[dict[str, Any]], document.get("settings"), manifest)
        if document.get("schema") != _SCHEMA or any("torch" not in old for old in recorded):
            raise bad_file(manifest, f"{manifest} is not a manifest of the schema {_SCHEMA}")
    except MhaError as fault:
        fault.typed_hint = _ANEW
        raise
    return recorded


def _make_folders(path: Path) -> None:
    """Makes the folder of a scan. Raises `UsageError` for a folder with other files."""
    entries = [*path.iterdir()] if path.is_dir() else []
    for entry in entries:
        if entry.name not in (_ROWS, _UNITS) and entry.suffix != TEMPORARY:
            message = f"--out {path} holds other files, and no scan"
            raise UsageError(message, hint="name a new folder", path=str(path))
    with suppress(OSError):  # the first file that is written says why it cannot be
        for part in (_ROWS, _UNITS):
            (path / part).mkdir(parents=True, exist_ok=True)


def _require_same(changed: Mapping[str, str], out: str, *, mixed: bool) -> None:
    """Raises `UsageError` for settings that differ, unless they follow from the device and results
    of several devices may be `mixed`.
    """
    hint = _ANEW
    if "device" in changed and changed.keys() <= _OF_DEVICE:
        if mixed:
            return
        hint = f"--mixed puts results of several devices together, and says so; {_ANEW}"
    message = f"{out} was made with other settings: {', '.join(changed.values())}"
    raise UsageError(message, hint=hint, path=out)


def _write_manifest(path: Path, settings: Iterable[Settings], **facts: Any) -> None:
    ordered = sorted(settings, key=_digest_of)  # whichever was first
    document = {"schema": _SCHEMA, "settings": ordered, **facts}
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    write_whole(str(path / MANIFEST), text.encode(), force=True)


# ------------------------------------------------------------------------------ sums over documents

MAX_FILE_BYTES = 4 << 30
MAX_SINKS = 10
"""The largest number of sink tokens of a head."""
_VALUES_AT_ONCE = 1 << 19
"""Values of a statistic held in memory at once: 4 MiB, and about 50 times as much for all."""
_OF_ROWS = "rows."
"""The prefix of the arrays that hold a statistic of each document."""
LARGEST = "max_score"
"""The statistic whose largest value is kept, in place of a mean."""
EFFECTS = tuple(name for name in EFFECT_NUMBERS if name != "first_order")
"""The numbers of a removal: fields of `Effect`."""


@dataclass
class Totals:
    """Sums over the documents of a unit or a corpus, or of one document. Others are merged into
    them in their order.

    `bad` has the first of the `n_bad` bad documents. `layers` are those of the longest document,
    with the worst result of each check over all; `identical` says whether the model's outputs were
    the same bits without inspection. Of the heads `keys`, `sums` has the counts of `kinds` `[head,
    type]`, the `profile` `[head, attention or uniform, step]`, and with spans `spans`, `[head,
    documents, mass or uniform mass, span, span]`. For each head, `sinks` has the number of
    documents and the sum of weights of a token, and `cells` the strongest cells.

    `documents` has a digest of the documents of each unit. A unit also has that of its file of
    `rows`.
    """

    keys: list[HeadKey] = field(default_factory=list)
    sums: dict[str, Array] = field(default_factory=dict)
    n_documents: int = 0
    n_tokens: int = 0
    n_bad: int = 0
    longest: int = 0
    bad: tuple[BadEntry, ...] = ()
    devices: tuple[str, ...] = ()
    layers: tuple[InspectedLayer, ...] = ()
    identical: bool = True
    sinks: list[dict[str, list[float]]] = field(default_factory=list)
    cells: list[list[CorpusCell]] = field(default_factory=list)
    documents: tuple[str, ...] = ()
    rows: str = ""

    def add(self, document: Document, record: Record, *, spans: Sequence[str]) -> None:
        """Adds a document of a corpus with these `spans`; the document may lack some."""
        n_tokens = len(record.keys[0].ids)
        layers = [each.record for each in record.attentions]
        one = Totals(n_documents=1, n_tokens=n_tokens, longest=n_tokens, layers=record.layers)
        one.identical = record.model is None or record.model.identical_outputs is not False
        sums = [_sums(layer, spans) for layer in layers]
        one.sums = {
            name: np.concatenate(_alike([of_layer[name] for of_layer in sums])) for name in sums[0]
        }
        for layer in layers:
            queries, keys = layer.sequences[0].tokens, layer.keys[0].tokens
            for head in layer.heads:
                sinks: dict[str, list[float]] = {}
                cells: list[CorpusCell] = []
                for sink in head.sink_keys:
                    sinks.setdefault(keys[sink.key], [1, 0.0])[1] += sink.share
                for cell in head.largest:
                    tokens = queries[cell.query], keys[cell.key]
                    place = document.file, document.place, cell.query, cell.key
                    cells.append(CorpusCell(*place, *tokens, cell.share, cell.lift))
                one.keys.append((head.layer, head.attention, head.head))
                one.sinks.append(sinks)
                one.cells.append(cells)
        self.merge(one)

    def merge(self, other: Totals) -> None:
        """Adds other documents, behind those added so far. Raises `MhaError` if they have other
        heads.
        """
        self.documents += other.documents
        self.n_bad += other.n_bad
        self.bad += other.bad[: MAX_LISTED_BAD - len(self.bad)]
        self.devices = tuple(sorted({*self.devices, *other.devices}))
        if not self.n_documents:
            self.keys, self.sums = other.keys, other.sums
            self.layers, self.sinks, self.cells = other.layers, other.sinks, other.cells
        elif other.n_documents:
            if self.keys != other.keys:
                raise MhaError("documents of a corpus have different heads", code="bad-file")
            self.sums = {
                name: np.add(*_alike([array, other.sums[name]]))
                for name, array in self.sums.items()
            }
            longer, shorter = (other, self) if other.longest > self.longest else (self, other)
            self.layers = tuple(map(_worst, longer.layers, shorter.layers))
            for mine, theirs in zip(self.sinks, other.sinks, strict=True):
                for token, sums in theirs.items():
                    mine[token] = [*map(add, mine[token], sums)] if token in mine else sums
            of_heads = [mine + theirs for mine, theirs in zip(self.cells, other.cells, strict=True)]
            # among equal ones, the first
            self.cells = [
                sorted(cells, key=lambda cell: -cell.lift)[:MAX_LARGEST] for cells in of_heads
            ]
        self.n_documents += other.n_documents
        self.n_tokens += other.n_tokens
        self.longest = max(self.longest, other.longest)
        self.identical &= other.identical

    def to_bytes(self, rows: Columns) -> bytes:
        """The contents of the file of a unit: the totals, and each statistic of its rows, and that
        of uniform attention, `[document, head]`, NaN for a missing value.
        """
        arrays = {name: np.ascontiguousarray(array) for name, array in self.sums.items()}
        for name, (kind, numbers) in rows.items():
            if self.n_documents and kind is not str:
                column = np.array(numbers, np.float64).reshape(self.n_documents, -1)
                arrays[_OF_ROWS + name] = column
        facts = plain(replace(self, sums={}))
        metadata = json.dumps({"totals": facts, "digest": _digest(facts, arrays)})
        return safetensors.numpy.save(arrays, metadata={METADATA_KEY: metadata})


def _alike(arrays: Sequence[Array]) -> list[Array]:
    """Arrays whose last axes have one length, filled up with zeros."""
    longest = max(array.shape[-1] for array in arrays)
    return [
        np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, longest - array.shape[-1])])
        for array in arrays
    ]


def _sums(layer: Record, spans: Sequence[str]) -> dict[str, Array]:
    """The arrays of a layer that are summed, whose first axis is that of heads."""
    n_heads = len(layer.heads)

    def of_heads(*names: str) -> Array:
        arrays = [layer.arrays[name][0].astype(np.float64) for name in names]
        return np.stack(
            [np.broadcast_to(array, (n_heads, *array.shape[1:])) for array in arrays], axis=1
        )

    kinds = np.array([[kind == head.kind for kind in HEAD_TYPES] for head in layer.heads], np.int64)
    sums = {"kinds": kinds, "profile": of_heads("profile", "uniform_profile")}
    if spans:
        sums["spans"] = np.zeros((n_heads, 3, len(spans), len(spans)))
        if layer.spans:  # of the pairs of spans that are in the document
            numbers = [spans.index(span.name) for span in layer.spans]
            masses = of_heads("span_mass", "uniform_span_mass")
            sums["spans"][np.ix_(range(n_heads), range(3), numbers, numbers)] = np.insert(
                masses, 0, 1.0, axis=1
            )
    return sums


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


# ----------------------------------------------------------------------------------------- the file


def read_totals(path: str) -> Totals:
    """The sums of a unit. Raises `MhaError` for a missing or damaged file."""
    file = read_tensor_file(path)
    arrays = safetensors.numpy.load(file.data)
    metadata = decode(dict[str, Any], file.metadata, path)
    if metadata.get("digest") != _digest(metadata.get("totals"), arrays):
        raise bad_file(path, f"{path} is damaged: its content is not what was written")
    sums = {name: array for name, array in arrays.items() if not name.startswith(_OF_ROWS)}
    return replace(decode(Totals, metadata["totals"], path), sums=sums)


def _digest(facts: object, arrays: Mapping[str, Array]) -> str:
    return json_checksum([facts, sorted((name, checksum(array)) for name, array in arrays.items())])


# --------------------------------------------------------------------------------------- the record


def summary(
    totals: Totals, example: Record, paths: Sequence[str], *, spans: Sequence[str]
) -> Record:
    """The record of the example with the head statistics of all documents, whose units are in the
    files `paths`.
    """
    assert example.model, "a scan is of a checkpoint"
    assert example.corpus, "an example names its document"
    heads = [*_heads(totals, paths)]
    # the sizes are those of the example's arrays; only its profiles become those of all documents
    layers = tuple(
        replace(
            longest,
            survey=replace(layer.survey, steps=longest.survey.steps, checks=longest.survey.checks),
        )
        for layer, longest in zip(example.layers, totals.layers, strict=True)
    )
    in_example = {span.name: span for span in example.spans}
    lengths = [len(text.ids) for text in example.sequences]
    counts = {
        name: getattr(totals, name)
        for name in ("n_documents", "n_tokens", "n_bad", "longest", "devices", "bad")
    }
    return replace(
        example,
        heads=HeadTable(head for head, _ in heads),
        self_check=SelfCheck.of_layers(
            [layer.survey.checks for layer in layers], holds=totals.identical
        ),
        model=replace(example.model, identical_outputs=totals.identical, compared_len=max(lengths)),
        layers=layers,
        spans=tuple(in_example.get(name, SpanTokens(name, ((),) * len(lengths))) for name in spans),
        corpus=replace(example.corpus, heads=tuple(of_corpus for _, of_corpus in heads), **counts),
        arrays={**example.arrays, **_arrays(totals, layers)},
    )


def _heads(totals: Totals, paths: Sequence[str]) -> Iterator[tuple[HeadStatistics, CorpusHead]]:
    """The means of each head, and the rest of what is known of it, for some heads at a time if
    there are many documents.
    """
    n_heads = len(totals.keys)
    step = max(1, _VALUES_AT_ONCE // totals.n_documents)
    for start in range(0, n_heads, step):
        stop = min(start + step, n_heads)
        parts: dict[str, list[Array]] = defaultdict(list)
        for path in paths:
            with safetensors.safe_open(path, "numpy") as unit:
                for name in unit.keys():  # noqa: SIM118 - it is no mapping
                    if name.startswith(_OF_ROWS):
                        parts[name.removeprefix(_OF_ROWS)].append(
                            unit.get_slice(name)[:, start:stop]
                        )
        columns = {name: np.concatenate(of_units) for name, of_units in parts.items()}
        for number in range(start, stop):
            yield _head(
                totals,
                number,
                {name: column[:, number - start] for name, column in columns.items()},
            )


def _head(
    totals: Totals, number: int, columns: Mapping[str, Array]
) -> tuple[HeadStatistics, CorpusHead]:
    """A head with its means over documents. Its strongest distance is that of most documents;
    others count as 0 in the weight there.
    """
    n_documents = totals.n_documents
    n_conditions = len(totals.layers[0].survey.patterns)
    averaged = [*MEANS, *(f"{CONDITION}{n + 1}" for n in range(n_conditions))]
    averaged = [name for name in averaged if name in columns]  # units of earlier versions lack some
    means = {name: _mean(columns[name]) for name in averaged}
    uniform = {name: _mean(columns[f"uniform_{name}"]) for name in averaged}
    distances = columns["offset"][np.isfinite(columns["offset"])]
    if len(distances):
        known, n_known = np.unique(distances, return_counts=True)
        offset = known[n_known.argmax()]
        means["offset"] = offset
        for numbers, prefix in ((means, ""), (uniform, "uniform_")):
            weights = np.where(columns["offset"] == offset, columns[f"{prefix}at_offset"], 0.0)
            numbers["at_offset"] = float(np.nansum(weights)) / n_documents
            columns = {**columns, f"{prefix}at_offset": weights}
    means |= {name: np.nansum(columns[name]) for name in COUNTS.values() if name in columns}
    means[LARGEST] = np.fmax.reduce(columns[LARGEST])
    effects: dict[str, Any] = {
        row.field: _mean(columns[row.field])
        for row in OF_REMOVAL
        if row.field in columns and np.isfinite(columns[row.field]).any()
    }
    head = replace(mean_head(totals.keys[number], means, uniform), **effects)
    counts = totals.sums["kinds"][number].tolist()
    kinds = {kind: n for kind, n in zip(HEAD_TYPES, counts, strict=True) if n}
    sinks = sorted(
        totals.sinks[number].items(), key=lambda item: (-item[1][0], -item[1][1], item[0])
    )
    spread = [name for name in (*averaged, "at_offset", LARGEST, *EFFECTS) if name in columns]
    return head, CorpusHead(
        layer=head.layer,
        attention=head.attention,
        head=head.head,
        agree=kinds.get(head.kind, 0) / n_documents,
        kinds=kinds,
        spreads=tuple(spreads({name: columns[name] for name in spread})),
        sinks=tuple(
            TokenSink(token, int(n), weight / n) for token, (n, weight) in sinks[:MAX_SINKS]
        ),
        cells=tuple(totals.cells[number]),
    )


def _arrays(totals: Totals, layers: Sequence[InspectedLayer]) -> dict[str, Array]:
    """The means over all documents that replace arrays of the example, `[1, head, …]`."""
    arrays: dict[str, Array] = {}
    for index, layer in enumerate(layers):
        of_layer = [
            number for number, key in enumerate(totals.keys) if key[:2] == (layer.layer, layer.name)
        ]
        sums = {name: array[None, of_layer] for name, array in totals.sums.items()}
        profiles = sums["profile"][..., : len(layer.survey.steps)] / totals.n_documents
        means = {"profile": profiles[:, :, 0], "uniform_profile": profiles[:, :, 1]}
        if "spans" in sums:
            counts, *masses = np.moveaxis(sums["spans"], 2, 0)
            with np.errstate(invalid="ignore"):  # pairs of spans that no document has
                means |= {"span_mass": masses[0] / counts, "uniform_span_mass": masses[1] / counts}
        arrays |= {layer_prefix(index) + name: mean for name, mean in means.items()}
    return arrays


# ---------------------------------------------------------------------------- spread over documents

N_RESAMPLES = 1000
SEED = 0
_BLOCK = 2048
"""The number of documents whose resampling counts are drawn together."""


def spreads(columns: Mapping[str, Array]) -> Iterator[Spread]:
    """The spread over documents of each statistic that at least one of them has. NaN stands where a
    document has no value.
    """
    known = {name: values for name, values in columns.items() if np.isfinite(values).any()}
    intervals = _intervals(np.stack([*known.values()], axis=1)).T.tolist()
    for (statistic, values), (low, high) in zip(known.items(), intervals, strict=True):
        finite = values[np.isfinite(values)]
        std: float | None = None
        if len(finite) > 1:
            std = float(finite.std(ddof=1))
        else:
            low = high = None
        quantiles = np.quantile(finite, QUANTILES, method="inverted_cdf")
        yield Spread(
            statistic, len(finite), _mean(finite), std, low, high, tuple(quantiles.tolist())
        )


def _mean(values: Array) -> float:
    """The exact mean of the finite values, NaN without any."""
    known = values[np.isfinite(values)].tolist()
    return math.fsum(known) / len(known) if known else math.nan


def _intervals(values: Array) -> Array:
    """The bounds `[bound, column]` that contain the mean of a fraction `CONFIDENCE` of the
    resamples.

    The count of each document is Poisson with mean 1, the limit of resampling with replacement for
    many documents. Source: Hanley and MacGibbon 2006, "Creating non-parametric bootstrap samples
    using Poisson frequencies".
    """
    is_finite = np.isfinite(values)
    filled = np.where(is_finite, values, 0.0)
    totals, counts = np.zeros((2, N_RESAMPLES, values.shape[1]))
    for start in range(0, len(values), _BLOCK):
        rows = slice(start, start + _BLOCK)
        weights = _counts(start // _BLOCK)[:, : len(filled[rows])].astype(np.float64)
        totals += weights @ filled[rows]
        counts += weights @ is_finite[rows]
    with np.errstate(invalid="ignore"):  # a resample may contain no document
        return np.nanquantile(totals / counts, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)


@lru_cache(maxsize=16)
def _counts(number: int) -> Array:
    """How often each resample holds each document of a block, `[resample, document]`."""
    return (
        np.random.default_rng([SEED, number]).poisson(size=(N_RESAMPLES, _BLOCK)).astype(np.uint8)
    )
