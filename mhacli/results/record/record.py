"""The record: everything one run computed and measured, frozen, in numpy, without torch. Every view is a function of it.

On disk it is one safetensors file: arrays as arrays, the rest as one JSON string in the header, schema `mha.record/1`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mhacli.errors import MhaError, UsageError
from mhacli.io import safetensors as tensorfile
from mhacli.io.files import write_whole
from mhacli.io.json_schema import decode, section
from mhacli.results.record.arrays import Array, Prefixed, StoredArrays
from mhacli.results.record.consistency import impossible
from mhacli.results.record.heads import HeadStatistics
from mhacli.results.record.steps import Environment, SelfCheck, Step, Timing, TokenSequence
from mhacli.spec.config import Config
from mhacli.spec.facts import Facts

SCHEMA = "mha.record/1"
MAX_FILE_BYTES = 64 << 30

if TYPE_CHECKING:  # loaded where a record has them
    from mhacli.results.record.checkpoint import InspectedLayer, Model, SpanTokens
    from mhacli.results.record.sections import Cell, DecodeSummary, OwnModule, RouteCheck
    from mhacli.results.record.tiled import Survey


NOT_SEEN = ", not seen"
"""What stands behind the arrays of `Record.not_kept` that were asked for and that nobody saw."""


@dataclass(frozen=True)
class Record:
    """One run, whole.

    `heads` are those that were looked at. Where `survey` says how that was done without matrices, `arrays` has the names and
    shapes of `mhacli.results.record.tiled.survey_shapes`; else it is keyed by site, plus `allowed`
    `[batch, head or 1, query, key]`, and per query `entropy` (nats) and `strongest_key` `[batch, head, query]`. Padding stands
    beside the sequence's own tokens, on the side that the config says: `first_query` and `first_key` tell where those begin.
    A record of a checkpoint has its `model` and `layers`, and the arrays of each layer under `layers.INDEX.`; `of_layer` is
    the record of one of them. `heads` then has those of all layers, in the order of `layers`; `spans` are named parts.
    A record of somebody's own attention has its `module`, and no arrays: its steps are all there is.
    `timings` is keyed by site, plus `total`. `weights` is the file that gave them, None for the seed. `not_kept` names the
    arrays that were left out to stay within the limit, and with `NOT_SEEN` behind them those that a checkpoint did not show.
    """

    command: tuple[str, ...]
    config: Config
    sequences: tuple[TokenSequence, ...]
    context: tuple[TokenSequence, ...] | None
    vocabulary: tuple[str, ...]
    trace: tuple[Step, ...]
    heads: tuple[HeadStatistics, ...]
    timings: Mapping[str, Timing]
    self_check: SelfCheck
    environment: Environment
    weights: str | None = None
    not_kept: tuple[str, ...] = ()
    routes: tuple[RouteCheck, ...] = field(default=(), metadata=section("mhacli.results.record.sections"))
    cell: Cell | None = field(default=None, metadata=section("mhacli.results.record.sections"))
    decoding: DecodeSummary | None = field(default=None, metadata=section("mhacli.results.record.sections"))
    survey: Survey | None = field(default=None, metadata=section("mhacli.results.record.tiled"))
    model: Model | None = field(default=None, metadata=section("mhacli.results.record.checkpoint"))
    layers: tuple[InspectedLayer, ...] = field(default=(), metadata=section("mhacli.results.record.checkpoint"))
    spans: tuple[SpanTokens, ...] = field(default=(), metadata=section("mhacli.results.record.checkpoint"))
    module: OwnModule | None = field(default=None, metadata=section("mhacli.results.record.sections"))
    arrays: Mapping[str, Array] = field(default_factory=dict, metadata={"json": False})

    @property
    def keys(self) -> tuple[TokenSequence, ...]:
        """The sequences that keys and values come from: the context, or the texts themselves."""
        return self.sequences if self.context is None else self.context

    @cached_property
    def facts(self) -> Facts:
        """What formulas and shapes depend on."""
        return Facts.of(self.config, self.sequences, self.context, n_tokens=len(self.vocabulary))

    def first_query(self, sequence: int) -> int:
        """Where a sequence's first token stands on the query axis: behind its padding, if that is on the left."""
        return self.config.first_column(len(self.sequences[sequence].tokens), self.facts.q_len)

    def first_key(self, sequence: int) -> int:
        """Where its first key stands on the key axis."""
        return self.config.first_column(len(self.keys[sequence].tokens), self.facts.k_len)

    def of_layer(self, index: int) -> Record:
        """The record of one inspected layer, as if it were alone: its own sizes, heads, arrays, and the texts that it reads."""
        from mhacli.results.record.checkpoint import texts_of

        layer = self.layers[index]
        queries, keys = texts_of(layer.kind, self.sequences, self.context)
        sizes = {name: getattr(layer, name) for name in ("n_heads", "n_kv_heads", "d_head", "d_v", "scale", "softcap")}
        return dataclasses.replace(
            self,
            config=dataclasses.replace(self.config, **sizes),
            sequences=queries,
            context=None if keys is queries else keys,
            heads=tuple(head for head in self.heads if (head.layer, head.attention) == (layer.layer, layer.name)),
            self_check=layer.self_check,
            survey=layer.survey,
            layers=(),
            arrays=Prefixed(self.arrays, layer_prefix(index)),
        )

    def document(self) -> dict[str, Any]:
        """Everything but the arrays, as plain JSON values."""
        names = [f.name for f in dataclasses.fields(self) if f.metadata.get("json", True)]
        plain = {name: _plain(getattr(self, name)) for name in names}
        return {"schema": SCHEMA, **plain}

    def save(self, path: str, *, force: bool = False) -> None:
        """Writes the record to one safetensors file, whole or not at all. Raises `MhaError`."""
        import numpy as np
        from safetensors.numpy import save

        header = json.dumps(self.document(), separators=(",", ":"), allow_nan=False)
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        write_whole(path, save(arrays, metadata={tensorfile.METADATA_KEY: header}), force=force)

    @staticmethod
    def load(path: str) -> Record:
        """The record in a file. Raises `MhaError` for a file that is no record, or one whose parts do not fit together."""
        file = tensorfile.read_tensor_file(path, MAX_FILE_BYTES)
        record = _described(file, lambda: file)
        return dataclasses.replace(record, arrays=dict(record.arrays))

    @staticmethod
    def opened(path: str) -> Record:
        """The record in a file that stays as it is: its arrays are read, and numpy loaded, when the first is asked for.

        Raises `MhaError` for a file that is no record, or one whose parts do not fit together; an array that is asked for
        does where numbers have no meaning, or the file is another by then.
        """
        header = tensorfile.read_tensor_header(path)
        return _described(header, lambda: tensorfile.read_tensors_of(header, MAX_FILE_BYTES))


def _described(
    file: tensorfile.TensorFile | tensorfile.TensorHeader, read: Callable[[], tensorfile.TensorFile]
) -> Record:
    """The record that a file describes; `read` gives the file with its numbers."""
    path, document = file.path, file.metadata
    schema = document.get("schema", document.get("format")) if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise MhaError(
            f"{path} must be a record (schema {SCHEMA}), got {'no schema' if schema is None else repr(schema)}",
            hint="mha run … --save FILE writes a record" if schema is None else None,
            code="bad-file",
            path=path,
        )
    record = decode(Record, document, path)
    _require_whole(record, path)
    record = dataclasses.replace(record, config=_resolved(record.config, path))
    views = {layer_prefix(i): record.of_layer(i) for i in range(len(record.layers))} or {"": record}
    return dataclasses.replace(record, arrays=StoredArrays(file, {} if record.module else views, read))


def layer_prefix(index: int) -> str:
    """What the names of a layer's arrays begin with."""
    return f"layers.{index}."


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _resolved(config: Config, path: str) -> Config:
    try:
        return config.resolved()
    except UsageError as fault:
        raise MhaError(f"{path}: {fault.message}", code="bad-file", path=path) from None


def _require_whole(record: Record, path: str) -> None:
    if not record.sequences or len(record.keys) != len(record.sequences):
        raise MhaError(f"{path} must hold sequences, and as many contexts if any", code="bad-file", path=path)
    for sequence in (*record.sequences, *record.keys):
        if not len(sequence.tokens) == len(sequence.ids) == len(sequence.offsets) > 0:
            raise MhaError(f"{path} must give every token its id and offsets", code="bad-file", path=path)
        if not {len(sequence.documents), len(sequence.pieces)} <= {0, len(sequence.tokens)}:
            raise MhaError(f"{path} must give every token its document and piece, or none", code="bad-file", path=path)
    fault = impossible(record)
    if fault is not None:
        raise MhaError(f"{path}: {fault}", code="bad-file", path=path)
    if record.decoding is not None and not all(_is_step(step, record) for step in record.trace):
        raise MhaError(f"{path}: every step of a decoding must tell its tokens and shape", code="bad-file", path=path)
    views = [record.of_layer(index) for index in range(len(record.layers))] or [record]
    if record.cell is not None and not _is_inside(record.cell, views[0]):  # a walk is of one layer
        raise MhaError(f"{path}: cell must lie within the record", code="bad-file", path=path)
    if any(view.survey is not None and not _is_survey(view.survey, view) for view in views):
        raise MhaError(f"{path}: heads and survey must lie within the record", code="bad-file", path=path)
    if bool(record.layers) != (record.model is not None) or sum(len(view.heads) for view in views) != len(record.heads):
        raise MhaError(
            f"{path} must have layers for its model, and every head in one of them", code="bad-file", path=path
        )
    made = None if record.model is None else record.model.generated
    if made is not None and not _are_prompts(made.prompt_lens, record):
        raise MhaError(
            f"{path}: generated must tell of every sequence how many of its tokens were given",
            code="bad-file",
            path=path,
        )
    for span in record.spans:
        if len(span.tokens) != len(record.sequences) or not all(
            0 <= i < len(s.tokens) for s, own in zip(record.sequences, span.tokens, strict=True) for i in own
        ):
            raise MhaError(f"{path}: spans must lie within their sequences", code="bad-file", path=path)


def _are_prompts(prompt_lens: Sequence[int], record: Record) -> bool:
    lengths = [len(sequence.tokens) for sequence in record.sequences]
    return len(prompt_lens) == len(lengths) and all(1 <= p <= n for p, n in zip(prompt_lens, lengths, strict=True))


def _is_step(step: Step, record: Record) -> bool:
    if step.cache is None or len(step.shape) != 3 or step.shape[1] < 1:
        return False
    is_placed = 0 <= step.cache.start <= record.facts.q_len - step.shape[1]
    return is_placed and len(step.cache.tokens) == len(record.sequences)


def _is_inside(cell: Cell, record: Record) -> bool:
    if not 0 <= cell.sequence < len(record.sequences):
        return False
    n_queries, n_keys = (len(family[cell.sequence].tokens) for family in (record.sequences, record.keys))
    is_placed = 0 <= cell.head < record.config.n_heads and 0 <= cell.query < n_queries and 0 <= cell.key < n_keys
    return is_placed and len(cell.scores_row) == len(cell.pattern_row) == n_keys


def _is_survey(survey: Survey, record: Record) -> bool:
    from mhacli.results.record.tiled import Corner

    facts, heads = record.facts, [head.head for head in record.heads]
    are_heads = heads and len(set(heads)) == len(heads) and all(0 <= head < record.config.n_heads for head in heads)
    are_steps = survey.steps and survey.steps[0] == 0 and all(a < b for a, b in pairwise(survey.steps))
    is_block = 1 <= survey.block <= 1 << 31 and not survey.block & (survey.block - 1)
    is_asked = is_block and bool(survey.checks) and survey.kept.top >= bool(survey.kept.queries)
    c = survey.kept.corner or Corner(0, 1, 0, 1)
    is_corner = c.n_queries >= 1 <= c.n_keys and c.first_query >= 0 <= c.first_key
    is_within = c.first_query + c.n_queries <= facts.q_len and c.first_key + c.n_keys <= facts.k_len
    places = [(sink.sequence, sink.key) for head in record.heads for sink in head.sinks]
    places += [(cell.sequence, cell.key) for head in record.heads for cell in head.largest]
    places += [(head.max_score_at[0], head.max_score_at[2]) for head in record.heads if head.max_score_at]
    queries = [(0, query) for query in survey.kept.queries]
    queries += [(cell.sequence, cell.query) for head in record.heads for cell in head.largest]
    queries += [head.max_score_at[:2] for head in record.heads if head.max_score_at]
    return bool(
        are_heads and are_steps and is_asked and is_corner and is_within
        and all(0 <= b < facts.batch and 0 <= key < facts.k_len for b, key in places)
        and all(0 <= b < facts.batch and 0 <= query < facts.q_len for b, query in queries)
        and all(len(head.patterns) == len(survey.patterns) for head in record.heads)
        and all(head.uniform is None or len(head.uniform.patterns) == len(survey.patterns) for head in record.heads)
    )  # fmt: skip
