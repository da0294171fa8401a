"""The record: everything one run computed and measured, frozen, in numpy, without torch. Every view is a function of it.

On disk it is one safetensors file: arrays as arrays, the rest as one JSON string in the header, schema `mha.record/1`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mhacli.io import safetensors as tensorfile
from mhacli.io.files import write_whole
from mhacli.io.json_schema import section
from mhacli.results.record.arrays import Array, Prefixed
from mhacli.results.record.heads import HeadStatistics
from mhacli.results.record.measures import Environment, SelfCheck, Timing
from mhacli.results.record.steps import Step
from mhacli.spec.config import Config
from mhacli.spec.facts import Facts
from mhacli.spec.tokens import TokenSequence

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


def layer_prefix(index: int) -> str:
    """What the names of a layer's arrays begin with."""
    return f"layers.{index}."


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        known = ((f.metadata, f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: _plain(held) for metadata, name, held in known if held or not metadata.get("omit_empty")}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
