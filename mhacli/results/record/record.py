"""The record: everything one run computed and measured, frozen, in numpy, without torch. Every view is a function of it.

On disk it is one safetensors file: arrays as arrays, the rest as one JSON string in the header, schema `mha.record/1`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from mhacli.errors import UsageError, out_of_range
from mhacli.io import safetensors as tensorfile
from mhacli.io.files import write_whole
from mhacli.io.json_schema import plain
from mhacli.results.display import Page, Shown, page_of
from mhacli.results.record.arrays import Array, Prefixed
from mhacli.results.record.corpus import CorpusSummary
from mhacli.results.record.effect import EffectSummary
from mhacli.results.record.head_statistics import Check, HeadsSummary
from mhacli.results.record.pattern import Pattern, pattern_of_heads, stacked
from mhacli.results.record.tables import EffectTable, HeadTable
from mhacli.spec.config import Config
from mhacli.spec.facts import Facts
from mhacli.spec.tokens import AttentionKind, TokenSequence
from mhacli.text.escape import visible

SCHEMA = "mha.record/1"
MAX_FILE_BYTES = 64 << 30
NOT_SEEN = ", not seen"
"""What stands behind the arrays of `Record.not_kept` that were asked for and that nobody saw."""


@dataclass(frozen=True, repr=False)
class Record(Shown):
    """One run, whole.

    `heads` are those that were looked at. Where `survey` says how that was done without matrices, `arrays` has the names and
    shapes of `mhacli.results.record.head_statistics.survey_shapes`; else it is keyed by site, plus `allowed`
    `[batch, head or 1, query, key]`, and per query `entropy` (nats) and `strongest_key` `[batch, head, query]`. Padding stands
    beside the sequence's own tokens, on the side that the config says: `first_query` and `first_key` tell where those begin.
    A record of a checkpoint has its `model` and `layers`, and the arrays of each layer under `layers.INDEX.`; `of_layer` is
    the record of one of them. `heads` then has those of all layers, in the order of `layers`; `spans` are named parts.
    A record of somebody's own attention has its `module`, and no arrays: its steps are all there is.
    `effects` are what removing parts of a checkpoint's attention changes, and `effect` says of what.
    A record of a `corpus` is that of one of its documents, the example, with the heads of the whole corpus: `heads` are means
    over the documents, as are the arrays `profile`, `uniform_profile`, `span_mass`, `uniform_span_mass`; checks are the worst.
    `timings` is keyed by site, plus `total`. `weights` is the file that gave them, None for the seed. `not_kept` names the
    arrays that were left out to stay within the limit, and with `NOT_SEEN` behind them those that a checkpoint did not show.
    """

    command: tuple[str, ...]
    config: Config
    sequences: tuple[TokenSequence, ...]
    context: tuple[TokenSequence, ...] | None
    vocabulary: tuple[str, ...]
    trace: tuple[Step, ...]
    heads: HeadTable
    timings: Mapping[str, Timing]
    self_check: SelfCheck
    environment: Environment
    weights: str | None = None
    not_kept: tuple[str, ...] = ()
    routes: tuple[RouteCheck, ...] = ()
    cell: Cell | None = None
    decoding: DecodeSummary | None = None
    survey: HeadsSummary | None = None
    model: Model | None = None
    layers: tuple[InspectedLayer, ...] = ()
    spans: tuple[SpanTokens, ...] = ()
    module: UserModule | None = None
    effects: EffectTable = field(default_factory=EffectTable)
    effect: EffectSummary | None = None
    corpus: CorpusSummary | None = None
    arrays: Mapping[str, Array] = field(default_factory=dict, metadata={"json": False})

    def __post_init__(self) -> None:
        """Makes tables of heads and effects that are given as tuples."""
        object.__setattr__(self, "heads", HeadTable(self.heads))
        object.__setattr__(self, "effects", EffectTable(self.effects))

    def __repr__(self) -> str:
        """What was inspected, in a line."""
        model = "" if self.model is None else f" of {visible(self.model.path)}, {len(self.layers)} layers"
        n_tokens = " + ".join(str(len(sequence.tokens)) for sequence in self.sequences[:8])
        parts = [f"{len(self.heads)} heads", f"{n_tokens}{' + …' * (len(self.sequences) > 8)} tokens"]
        parts += [f"{len(self.effects)} effects"] if self.effects else []
        return f"<Record{model}: {', '.join([*parts, 'self-check ' + ('ok' if self.self_check.ok else 'FAILED')])}>"

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

        layer = self.layers[index]
        queries, keys = texts_of(layer.kind, self.sequences, self.context)
        sizes = {name: getattr(layer, name) for name in ("n_heads", "n_kv_heads", "d_head", "d_v", "scale", "softcap")}
        return dataclasses.replace(
            self,
            config=dataclasses.replace(self.config, **sizes),
            sequences=queries,
            context=None if keys is queries else keys,
            heads=HeadTable(head for head in self.heads if (head.layer, head.attention) == (layer.layer, layer.name)),
            self_check=layer.self_check,
            survey=layer.survey,
            layers=(),
            arrays=Prefixed(self.arrays, layer_prefix(index)),
        )

    def pattern(
        self, *, layer: int | None = None, head: int | None = None, batch: int = 0, kind: AttentionKind | None = None
    ) -> Pattern:
        """The attention weights of a head, with their tokens; without `head` of all heads, without `layer` of all layers.

        `batch` is the number of the text. Where a model has an encoder and a decoder, `kind` says whose attention is meant.
        Raises `MhaError` where the record does not have it, or has several that do not fit into one array.
        """
        if not 0 <= batch < len(self.sequences):
            raise UsageError(out_of_range("batch", batch, len(self.sequences)))
        chosen = self._layer_views(layer, kind)
        patterns = []
        for number, view in chosen:
            heads = range(view.config.n_heads) if view.survey is None else [own.head for own in view.heads]
            texts = view.sequences[batch], view.keys[batch]
            first = view.first_query(batch), view.first_key(batch)
            patterns.append(pattern_of_heads(view.arrays, number, heads, texts, head=head, batch=batch, first=first))
        return stacked(patterns) if self.layers and layer is None else patterns[0]

    def _layer_views(self, layer: int | None, kind: AttentionKind | None) -> list[tuple[int, Record]]:
        """The layers of that number and kind, None for any, with their records. Raises `UsageError` for none, or several of one
        number."""
        if not self.layers:
            number = self.heads[0].layer if self.heads else 0
            known = [number] if kind is None else []
            found = [(number, self)] if known and layer in (None, number) else []
        else:
            numbered = [(i, own) for i, own in enumerate(self.layers) if kind in (None, own.kind)]
            known = [own.layer for _, own in numbered]
            found = [(own.layer, self.of_layer(i)) for i, own in numbered if layer in (None, own.layer)]
        if not known:
            kinds = ", ".join(dict.fromkeys(own.kind for own in self.layers)) or "self"
            raise UsageError(f"kind {kind!r} is not in the record, which has {kinds}")
        name = " ".join([*([kind] if kind else []), f"layer {layer}"])
        if not found:
            raise UsageError(f"{name} is not in the record, which has layers {', '.join(map(str, known))}")
        if len(found) > len({number for number, _ in found}):
            hint = "choose one with kind=, or take record.of_layer(index).pattern()"
            several = "several attentions of a layer" if layer is None else f"{len(found)} attentions of {name}"
            raise UsageError(f"the record has {several}", hint=hint)
        return found

    def document(self) -> dict[str, Any]:
        """Everything but the arrays, as plain JSON values."""
        names = [f.name for f in dataclasses.fields(self) if f.metadata.get("json", True)]
        document = {name: plain(getattr(self, name)) for name in names}
        return {"schema": SCHEMA, **document}

    def page(self) -> Page:
        """The interactive page of the record, as `mha show --html` writes it; a notebook shows it in a frame."""
        return page_of(self)

    def save(self, path: str, *, force: bool = False) -> None:
        """Writes the record to one safetensors file, whole or not at all. Raises `MhaError`."""
        write_whole(path, self.to_bytes(), force=force)

    def to_bytes(self) -> bytes:
        """The bytes of the file that `save` writes."""
        import numpy as np
        from safetensors.numpy import save

        header = json.dumps(self.document(), separators=(",", ":"), allow_nan=False)
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        return save(arrays, metadata={tensorfile.METADATA_KEY: header})


def layer_prefix(index: int) -> str:
    """What the names of a layer's arrays begin with."""
    return f"layers.{index}."


# ---------------------------------------------------------------------------------- what a record says of a checkpoint


LayerChoice = tuple[AttentionKind | None, int]
"""A layer that is asked for: of which kind, None for any, and its number."""

_Texts = tuple[TokenSequence, ...]


def texts_of(kind: AttentionKind, sequences: _Texts, context: _Texts | None) -> tuple[_Texts, _Texts]:
    """The texts whose tokens are the queries of an attention, and those whose tokens are its keys; `context` is what an encoder
    reads."""
    encoder = context or sequences
    return encoder if kind == "encoder" else sequences, encoder if kind in ("encoder", "cross") else sequences


def kinds_of(layers: tuple[LayerChoice, ...] | None, *, is_pair: bool) -> tuple[AttentionKind, ...]:
    """The kinds of attention among the layers that are asked for (None: all), in the order in which they run."""
    known: tuple[AttentionKind, ...] = ("encoder", "decoder", "cross") if is_pair else ("self",)
    return tuple(own for own in known if layers is None or any(kind in (None, own) for kind, _ in layers))


@dataclass(frozen=True)
class NonAttentionLayer:
    """A layer that has no attention matrix, and what the checkpoint calls its type."""

    layer: int
    type: str


@dataclass(frozen=True)
class Generated:
    """Tokens that the model made itself, greedily: each sequence's are those from `prompt_lens` on.

    `repeated` says of how many of them one pass over the whole text gives the same: all but those where rounding decides.
    """

    prompt_lens: tuple[int, ...]
    n_tokens: int
    repeated: int


@dataclass(frozen=True)
class Model:
    """The checkpoint that was inspected, and which of its ways of computing attention.

    `identical_outputs` says whether the first `compared_len` tokens gave the same bits without inspection; None where that
    was not tried. `implementation` is transformers' word; `path_inspected` what that came to. `without` are the layers that
    have no attention matrix.
    """

    path: str
    revision: str | None
    family: str
    architecture: str
    implementation: str
    path_inspected: str
    identical_outputs: bool | None
    compared_len: int
    n_layers: int
    n_parameters: int
    n_vocabulary: int
    positions: str
    max_positions: int | None
    dtype: str
    without: tuple[NonAttentionLayer, ...] = ()
    generated: Generated | None = None


@dataclass(frozen=True)
class InspectedLayer:
    """One attention of a checkpoint.

    `name` is its module's, `captured_by` how it was seen: "registry", "module", "sdpa" or "softmax" (`InterceptionLevel` in
    `mhacli.adapters.hf.calls`).
    `mask` says in words what a query sees; `bias` whether something was added to the scores, `sinks` whether sink logits
    take a part. `verified`: the pattern times the values is what the layer returned, within the self-check's tolerance, and
    nothing was passed that is not understood; else `unverified` says why not. Where a module computes several attentions in one
    layer, `call` counts them from 1, and the later ones say it in their `name`. `extras` has what else changes the scores, by the
    keyword of the attention function, in words.
    """

    layer: int
    name: str
    kind: AttentionKind
    captured_by: str
    kernel: str
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_v: int
    scale: float | None
    softcap: float | None
    mask: str
    bias: bool
    sinks: bool
    verified: bool
    unverified: tuple[str, ...]
    self_check: SelfCheck
    survey: HeadsSummary
    call: int = 1
    extras: Mapping[str, str] = field(default_factory=dict, hash=False, metadata={"omit_empty": True})

    @property
    def departures(self) -> Mapping[str, str]:
        """What departs from plain attention in the scores, each in words."""
        known = {
            "softcap": "" if self.softcap is None else f"softcap {self.softcap:g}",
            "bias": "a bias on the scores" if self.bias else "",
            "sinks": "sink logits (s_aux), which entropy counts as one more key" if self.sinks else "",
        }
        return known | dict(self.extras)

    @property
    def label(self) -> str:
        """`layer 5`, or with the kind where a model has several: `decoder layer 5`; and which call, if not the first."""
        said = f"layer {self.layer}" if self.kind == "self" else f"{self.kind} layer {self.layer}"
        return said if self.call == 1 else f"{said}, call {self.call}"


@dataclass(frozen=True)
class SpanTokens:
    """A named part of the texts: for each sequence the indices of its tokens."""

    name: str
    tokens: tuple[tuple[int, ...], ...]


# ------------------------------------------------------------------------------------------------- a step of the trace


@dataclass(frozen=True)
class Step:
    """What was seen at one site. `layout` says whether the tensor shares memory with `view_of`; strides count numbers.

    `parameters` maps weight names to shapes; `bytes` is the tensor's size; `time_s` is None where nothing was timed. What is
    not `built` was made to be looked at: the kernel that ran never makes it. Of somebody's own attention `operation` is what
    torch calls it, `file`, `line` and `source` say where it stands in their code, `remark` what is odd about it. A line that ran
    `repeats` times is one step: flops and bytes are those of all times, the rest of the first; `repeats_of` is the word for
    what it was repeated.
    """

    site: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    formula: str
    meaning: str
    layout: Literal["view", "copy"]
    strides: tuple[int, ...]
    flops: int
    bytes: int
    time_s: float | None = None
    view_of: str | None = None
    parameters: tuple[WeightShape, ...] = ()
    values: TensorSummary | None = None
    cache: CacheStep | None = None
    built: bool = True
    operation: str = ""
    file: str | None = None
    line: int | None = None
    source: str = ""
    remark: str = ""
    repeats: int = 1
    repeats_of: str = ""


# ----------------------------------------------------------------------------------------- what only some records have


@dataclass(frozen=True)
class CacheStep:
    """One step of decoding: new tokens come in, read what is kept of the past, and are kept themselves.

    `start` is the position of the first new token, `tokens` names the new ones of each sequence (empty for padding).
    Shapes are those of the new queries, keys and values. `read_bytes` are keys and values that attention reads,
    `appended_bytes` those that this step adds, `moved_bytes` all that this way of keeping the past reads and writes of it,
    `cache_bytes` the storage that it holds. `max_abs_difference` is the distance of the output from the rows of a full
    recomputation; None where not finite.
    """

    phase: Literal["prefill", "decode"]
    start: int
    tokens: tuple[tuple[str, ...], ...]
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    n_past: int
    read_bytes: int
    appended_bytes: int
    moved_bytes: int
    cache_bytes: int
    max_abs_difference: float | None


@dataclass(frozen=True)
class CacheTiming:
    """One way of keeping the past, at one length: time and bytes of its last step, and of the whole sequence.

    `total_s` is the sum over all steps, of which `n_timed` were timed and the rest interpolated between them.
    """

    cache: str
    length: int
    step: Timing
    total_s: float
    n_timed: int
    step_bytes: int
    total_bytes: int
    step_flops: int
    cache_bytes: int


@dataclass(frozen=True)
class DecodeSummary:
    """A decoded sequence: how the past was kept, how long the prompt was, and how the ways of keeping it compare.

    `weight_bytes` are read at every step whatever the length, `token_bytes` per token and sequence that is kept; they are
    equal at `crossing_len` tokens. `full_token_bytes` is what a token would take with a kv head for every query head.
    """

    cache: str
    prompt_len: int
    ways: tuple[CacheTiming, ...]
    weight_bytes: int
    token_bytes: int
    full_token_bytes: int
    crossing_len: float


@dataclass(frozen=True)
class RouteCheck:
    """One way of writing the computation: how far its output is from that of the separate projections."""

    route: str
    sites: tuple[str, ...]
    max_abs_difference: float | None
    tolerance: float
    ok: bool


@dataclass(frozen=True)
class ScorePart:
    """One of the terms that add up to a score, and whether it comes from what the tokens are, where they stand, or both.

    `value` is None where it is not finite; of a bias that is `given`, −∞: the cell is masked. What is `added` comes
    after scale and softcap.
    """

    name: str
    kind: Literal["content", "position", "both", "given", "softcap"]
    value: float | None
    added: bool = False


@dataclass(frozen=True)
class Cell:
    """One number followed all the way: how a query of a head came to give a key its weight.

    `q`, `k`, `v` are the vectors, `scores_row` and `pattern_row` the query's whole rows (None where masked),
    `share` the weight that multiplies `v` (after dropout, in training), `z` the head's result for the query. `qk` is the
    dot product as it was scaled, after any rotation; `parts` are the terms of the score.
    """

    sequence: int
    head: int
    query: int
    key: int
    q: tuple[float | None, ...]
    k: tuple[float | None, ...]
    v: tuple[float | None, ...]
    qk: float | None
    scale: float
    softcap: float | None
    allowed: bool
    score: float | None
    scores_row: tuple[float | None, ...]
    pattern_row: tuple[float | None, ...]
    share: float | None
    z: tuple[float | None, ...]
    parts: tuple[ScorePart, ...] = ()


@dataclass(frozen=True)
class Argument:
    """An argument that the class or function was given: `origin` says by whom: given, default, or guessed."""

    name: str
    value: str
    origin: Literal["given", "default", "guessed"]
    why: str = ""


@dataclass(frozen=True)
class UserModule:
    """Somebody's own attention that was walked: the `target` that names it, the `arguments` it was built with, how it was
    `called`, and the `sizes` that it was asked with, as `(word, size)`. `n_runs` with other sizes told the axes apart. The
    `result` has a shape, and `expected` is the one that attention must give; what it `printed` is kept."""

    target: str
    arguments: tuple[Argument, ...]
    called: str
    sizes: tuple[tuple[str, int], ...]
    n_runs: int
    result: tuple[int, ...]
    expected: tuple[int, ...]
    printed: str = ""


# ------------------------------------------------------------------------------------ what is measured in every record


@dataclass(frozen=True)
class TensorSummary:
    """A tensor's numbers in one line: finite extremes and moments, a histogram of equal bins, and what is not finite.

    `numbers` holds the tensor itself, flat in row-major order, when it is small; None where a number is not finite.
    """

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    histogram: tuple[int, ...]
    n_nan: int
    n_inf: int
    numbers: tuple[float | None, ...] | None = None


@dataclass(frozen=True)
class WeightShape:
    """A weight that a site uses, by its name on disk."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Timing:
    """Seconds of one stage: the first run apart, then the samples with their median and interquartile range."""

    first_s: float
    samples_s: tuple[float, ...]
    median_s: float
    iqr_s: float


@dataclass(frozen=True)
class SelfCheck:
    """The output recomputed in float64 from the pattern that is shown, against the output that was computed; of decoding
    also against a full recomputation, whichever is further."""

    max_abs_error: float | None
    tolerance: float
    ok: bool

    @staticmethod
    def of(checks: Sequence[Check]) -> SelfCheck:
        """The last of the checks, and whether all hold."""
        return SelfCheck(checks[-1].error, checks[-1].tolerance, all(check.ok for check in checks))

    @staticmethod
    def of_layers(layers: Sequence[InspectedLayer], *, identical: bool) -> SelfCheck:
        """The worst of the last checks of layers, and whether all hold and the model's outputs are `identical`."""
        worst = max((layer.survey.checks[-1] for layer in layers), key=lambda check: check.severity)
        return SelfCheck(worst.error, worst.tolerance, identical and all(layer.self_check.ok for layer in layers))


@dataclass(frozen=True)
class Environment:
    """Where it ran. `device_asked` is what the user said, `device` what that came to."""

    mha: str
    torch: str
    numpy: str
    python: str
    platform: str
    device: str
    device_name: str
    device_asked: str
    threads: int
