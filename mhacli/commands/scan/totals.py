"""Sums over the documents of a unit or of a corpus, and the file from which those of units are merged."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add

import numpy as np

from mhacli.attention.taps import to_array
from mhacli.commands.scan.units import MAX_FILE_BYTES, document_digest
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.errors import MhaError, bad_file
from mhacli.io.data import decode, load_json, plain
from mhacli.io.safetensors import METADATA_KEY, read_tensor_file
from mhacli.models.layers import LayerResults
from mhacli.record.arrays import Array
from mhacli.record.checks import SelfCheck, worst_check
from mhacli.record.corpus import MAX_LISTED_BAD, BadEntry, CorpusCell
from mhacli.record.effect import EFFECT_NUMBERS, Effect
from mhacli.record.heads import HEAD_TYPES, MAX_LARGEST
from mhacli.record.record import InspectedLayer, texts_of
from mhacli.record.totals import CONDITION, MEANS, HeadKey, HeadTotals, values, widened
from mhacli.text.corpus import Document

EFFECTS = tuple(name for name in EFFECT_NUMBERS if name != "first_order")
"""The numbers of a removal: fields of `Effect`."""
_MASSES = ("span_mass", "uniform_span_mass")


@dataclass
class Totals:
    """Sums over documents: of a unit, to which documents are added, and of a corpus, to which units are merged in their order.

    `bad` has the first of the `n_bad` bad documents. `layers` are those of the longest document, with the worst result of each
    check over all; `identical` says whether the model's outputs were the same bits without inspection. `heads` also has
    `kinds` `[type]`, the `profile` `[attention or uniform, step]`, and with spans `spans`, `[documents, mass or uniform mass,
    span, span]`. For each head, `sinks` has the number of documents and the sum of weights of a token, `offsets` those of a
    strongest distance, with the weight of uniform attention, and `cells` the strongest cells.

    A unit also has the `digests` of its good documents, and of its file of `rows`; and `statistics` `[statistic, document,
    head]`, NaN for a missing value.
    """

    heads: HeadTotals
    n_documents: int = 0
    n_tokens: int = 0
    n_bad: int = 0
    longest: int = 0
    bad: list[BadEntry] = field(default_factory=list)
    layers: tuple[InspectedLayer, ...] = ()
    identical: bool = True
    devices: list[str] = field(default_factory=list)
    sinks: list[dict[str, list[float]]] = field(default_factory=list)
    offsets: list[dict[str, list[float]]] = field(default_factory=list)
    cells: list[list[CorpusCell]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    rows: str = ""
    statistics: list[Array] = field(default_factory=list)

    def leave_out(self, document: Document, reason: str) -> None:
        """Adds a bad document."""
        self.n_bad += 1
        self.bad.append(BadEntry(document.file, document.place, reason))

    def add(
        self, document: Document, run: CheckpointRun, *, spans: Sequence[str], effects: Sequence[Effect] = ()
    ) -> int:
        """Adds a document, with the effects of removing each head. Returns its number of tokens."""
        n_tokens = len((run.inputs.context or run.inputs.sequences)[0].ids)
        one = Totals(HeadTotals(self.heads.names), 1, n_tokens, longest=n_tokens, identical=run.identical is not False)
        one.layers = tuple(result.layer for result in run.results)
        one.digests = [document_digest(document)]
        width = max(result.arrays["profile"].shape[-1] for result in run.results)
        for result in run.results:
            profiles = [widened(_of_heads(result, name), width) for name in ("profile", "uniform_profile")]
            sums = {"profile": np.stack(profiles, axis=1)}
            sums |= {"spans": _span_sums(result, run, spans)} if spans else {}
            one._add_tokens(document, result, run)
            for number, head in enumerate(result.heads):
                kinds = np.array([kind == head.kind for kind in HEAD_TYPES], dtype=np.int64)
                one.heads.add(head, kinds=kinds, **{name: array[number] for name, array in sums.items()})
        heads = [head for result in run.results for head in result.heads]
        statistics = values(heads, spread_names(self.heads))
        one.statistics = [np.concatenate([statistics, values(effects, EFFECTS)]) if effects else statistics]
        self.merge(one)
        return n_tokens

    def _add_tokens(self, document: Document, result: LayerResults, run: CheckpointRun) -> None:
        """Adds the sinks, strongest distances and strongest cells of a layer's heads."""
        queries, keys = texts_of(result.layer.kind, run.inputs.sequences, run.inputs.context)
        for head in result.heads:
            weights = defaultdict[str, float](float)
            for sink in head.sink_keys:
                weights[keys[0].tokens[sink.key]] += sink.share
            self.sinks.append({token: [1, weight] for token, weight in weights.items()})
            plain_weight = head.uniform.at_offset if head.uniform else None
            self.offsets.append(
                {} if head.offset is None else {str(head.offset): [1, head.at_offset or 0.0, plain_weight or 0.0]}
            )
            self.cells.append([
                CorpusCell(
                    document.file, document.place, cell.query, cell.key, queries[0].tokens[cell.query],
                    keys[0].tokens[cell.key], cell.share, cell.lift,
                )
                for cell in head.largest
            ])  # fmt: skip

    def merge(self, other: Totals) -> None:
        """Adds other documents, behind those added so far. Raises `MhaError` if they have other heads."""
        self.n_bad += other.n_bad
        self.bad += other.bad[: MAX_LISTED_BAD - len(self.bad)]
        if not other.n_documents:
            return
        if not self.n_documents:
            self.sinks, self.offsets = [{} for _ in other.sinks], [{} for _ in other.offsets]
            self.cells = [[] for _ in other.cells]
        elif [*self.heads.of_head] != [*other.heads.of_head]:
            raise MhaError("documents of a corpus have different heads", code="bad-file")
        is_longer = other.longest > self.longest
        self.layers = _worst_layers(
            other.layers if is_longer else self.layers, self.layers if is_longer else other.layers
        )
        self.n_documents += other.n_documents
        self.n_tokens += other.n_tokens
        self.longest = max(self.longest, other.longest)
        self.identical &= other.identical
        self.devices = sorted({*self.devices, *other.devices})
        self.digests += other.digests
        self.statistics += other.statistics
        self.heads.merge(other.heads)
        for mine, theirs in zip([*self.sinks, *self.offsets], [*other.sinks, *other.offsets], strict=True):
            for key, sums in theirs.items():
                mine[key] = [*map(add, mine[key], sums)] if key in mine else sums
        for number, cells in enumerate(other.cells):  # among equal ones, the first
            self.cells[number] = sorted([*self.cells[number], *cells], key=lambda cell: -cell.lift)[:MAX_LARGEST]


def spread_names(heads: HeadTotals) -> tuple[str, ...]:
    """The statistics whose spread over documents is computed: all that have a mean, and the largest score."""
    conditions = [name for name in heads.names if name.startswith(CONDITION)]
    return (*MEANS, "max_score", *conditions)


def _of_heads(result: LayerResults, name: str) -> Array:
    """An array of one text, for all heads of the layer, in float64."""
    array = to_array(result.arrays[name])[0].astype(np.float64)
    return np.broadcast_to(array, (len(result.heads), *array.shape[1:]))


def _span_sums(result: LayerResults, run: CheckpointRun, names: Sequence[str]) -> Array:
    """Of each pair of spans, whether the document has both, and the weights between them: `[head, 3, span, span]`."""
    sums = np.zeros((len(result.heads), 1 + len(_MASSES), len(names), len(names)))
    numbers = [names.index(span.name) for span in run.inputs.spans]
    if numbers:
        of_queries, of_keys = np.ix_(numbers, numbers)
        sums[:, 0, of_queries, of_keys] = 1
        for index, name in enumerate(_MASSES, 1):
            sums[:, index, of_queries, of_keys] = _of_heads(result, name)
    return sums


def _worst_layers(layers: tuple[InspectedLayer, ...], others: tuple[InspectedLayer, ...]) -> tuple[InspectedLayer, ...]:
    """The layers, with the worse result of each check of both; one of the two may have none."""
    return tuple(map(_worst, layers, others)) if layers and others else layers or others


def _worst(layer: InspectedLayer, other: InspectedLayer) -> InspectedLayer:
    checks = tuple(map(worst_check, zip(layer.survey.checks, other.survey.checks, strict=True)))
    return replace(
        layer,
        verified=layer.verified and other.verified,
        unverified=tuple(dict.fromkeys([*layer.unverified, *other.unverified])),
        self_check=SelfCheck.of_layers([checks]),
        survey=replace(layer.survey, checks=checks),
    )


# ------------------------------------------------------------------------------------------------------------ the file


def totals_to_bytes(totals: Totals) -> bytes:
    """The contents of the file of a unit."""
    from safetensors.numpy import save

    of_head = totals.heads.of_head
    without_arrays = replace(totals, heads=HeadTotals(totals.heads.names), statistics=[])
    facts_text = json.dumps(
        {"keys": [*of_head], "totals": plain(without_arrays)}, separators=(",", ":"), allow_nan=False
    )
    names = next(iter(of_head.values()), ())
    arrays = {name: np.ascontiguousarray([sums[name] for sums in of_head.values()]) for name in names}
    arrays |= {"statistics": np.ascontiguousarray(np.stack(totals.statistics, axis=1))} if of_head else {}
    return save(
        arrays, metadata={METADATA_KEY: json.dumps({"facts": facts_text, "digest": _digest(facts_text, arrays)})}
    )


def read_totals(path: str) -> Totals:
    """The sums of a unit, without the `statistics`. Raises `MhaError` for a missing or damaged file."""
    from safetensors.numpy import load

    file = read_tensor_file(path, MAX_FILE_BYTES)
    document = file.metadata if isinstance(file.metadata, dict) else {}
    facts_text, arrays = str(document.get("facts")), load(file.data)
    if document.get("digest") != _digest(facts_text, arrays):
        raise bad_file(path, f"{path} is damaged: its content is not what was written")
    facts = load_json(facts_text, path)
    totals = decode(Totals, facts["totals"], path)
    for number, key in enumerate(decode(list[HeadKey], facts["keys"], path)):
        totals.heads.of_head[key] = {name: array[number] for name, array in arrays.items() if name != "statistics"}
    return totals


def _digest(facts_text: str, arrays: Mapping[str, Array]) -> str:
    digest = hashlib.sha256(facts_text.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()
