"""The record: the results and measurements of one run, frozen, in numpy, without torch. Every view
is computed from it.

On disk it is one safetensors file with the arrays, and the rest as one JSON string in the header,
schema `mha.record/1`.
"""

from __future__ import annotations

import dataclasses
import json
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar

from msgspec import Struct

from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.io import safetensors as tensorfile
from mhacli.io.data import Array, checksum, json_checksum, plain, under
from mhacli.io.files import write_whole
from mhacli.record.sites import Dims
from mhacli.settings import AttentionKind, Config, LayerChoice
from mhacli.text.escape import visible
from mhacli.text.tokens import (
    Sequences,
    Texts,
    TokenSequence,
    behind,
    places,
)

from .checks import SelfCheck
from .corpus import CorpusSummary
from .effect import Effect, EffectSummary
from .exports import (
    MEAN_OF_HEADS,
    EffectTable,
    HeadTable,
    Page,
    Pattern,
    pattern_of_layer,
    stacked,
)
from .heads import UNMEASURED, HeadsSummary, HeadStatistics
from .shown import Shown, renderer

if TYPE_CHECKING:
    Heads = HeadTable
    Effects = EffectTable
else:  # msgspec reads no subclass of a tuple; Record makes the tables
    Heads, Effects = tuple[HeadStatistics, ...], tuple[Effect, ...]

SCHEMA = "mha.record/1"
NOT_SEEN = ", not seen"
"""The suffix, in `Record.not_kept`, of requested arrays that could not be captured."""


@dataclass(frozen=True, repr=False)
class Record(Shown):
    """The complete result of one run.

    `heads` are the inspected heads. With `survey` (statistics without matrices), `arrays` has what
    `HeadsSummary` describes. Otherwise it is keyed by site, plus `allowed` `[batch, head or 1,
    query, key]`, and per query `entropy` (nats) and `strongest_key` `[batch, head, query]`. Padding
    is on the config's side; `first_query` and `first_key` are the indices of a sequence's first
    tokens.

    A record of a checkpoint has a `model` and `layers`, and each layer's arrays under
    `layers.INDEX.`; `of_layer` is the record of one layer. Its `heads` are those of all layers, in
    the order of `layers`, and `spans` are named parts of the texts. A record of user code has its
    `module` and no arrays, only steps. `effects` are the effects of removals, and `effect`
    describes their measurement. A record of a `corpus` is that of one example document, with the
    heads of the whole corpus: `heads`, and the arrays `profile`, `uniform_profile`, `span_mass` and
    `uniform_span_mass`, are means over documents, and checks are the worst.

    `timings` is keyed by site, plus `total`. `weights` is the weights file, None for weights from
    the seed; with a `random_embedding` it has no vectors of tokens. `not_kept` names the arrays
    left out by the size limit, and, with the suffix `NOT_SEEN`, those that a checkpoint did not
    reveal.

    The optional fields that a record has decide its kind (see `is_a`). Some fields are read and
    never written again: `routes` compares three formulations of a layer, `decoding.ways` has the
    times of each kind of cache, `module.n_runs`, now always 1, counts the runs of a trace, and
    `extras` of a layer describes other changes to its scores, by the keyword of the attention
    function.
    """

    command: tuple[str, ...]
    config: Config
    sequences: tuple[TokenSequence, ...]
    context: tuple[TokenSequence, ...] | None
    vocabulary: tuple[str, ...]
    trace: tuple[Step, ...]
    heads: Heads
    timings: Mapping[str, Timing]
    self_check: SelfCheck
    environment: Environment
    weights: str | None = None
    random_embedding: bool = False
    not_kept: tuple[str, ...] = ()
    routes: tuple[dict[str, Any], ...] = ()
    cell: Cell | None = None
    decoding: DecodeSummary | None = None
    survey: HeadsSummary | None = None
    model: Model | None = None
    layers: tuple[InspectedLayer, ...] = ()
    spans: tuple[SpanTokens, ...] = ()
    module: UserModule | None = None
    effects: Effects = field(default_factory=EffectTable)
    effect: EffectSummary | None = None
    corpus: CorpusSummary | None = None
    arrays: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Turns tuples of heads and effects into tables."""
        object.__setattr__(self, "heads", HeadTable(self.heads))
        object.__setattr__(self, "effects", EffectTable(self.effects))

    @property
    def scan(self) -> CorpusSummary | None:
        """The documents whose means its heads have; None for a record of texts, such as the example
        of a scan, whose `corpus` names its document alone.
        """
        return self.corpus if self.corpus is not None and self.corpus.heads else None

    @property
    def words_of_random(self) -> str:
        """What is said of random weights, or of the random embedding of a layer; empty for those of
        a file and for a module of the user.
        """
        if self.model is not None:
            return self.model.words_of_random
        if self.random_embedding:
            return words_of_random(self.config.seed, what="embedding of tokens")
        is_drawn = self.weights is None and self.module is None
        return words_of_random(self.config.seed if is_drawn else None)

    def __repr__(self) -> str:
        """One line on what was inspected."""
        model = ""
        if self.model is not None:
            model = f" of {visible(self.model.path)}, {len(self.layers)} layers"
        lengths = [str(len(sequence.tokens)) for sequence in self.sequences[:8]]
        if len(self.sequences) > 8:
            lengths.append("…")
        parts = [f"{len(self.heads)} heads", f"{' + '.join(lengths)} tokens"]
        if self.effects:
            parts.append(f"{len(self.effects)} effects")
        parts.append(self.self_check.words)
        return f"<Record{model}: {', '.join(parts)}>"

    @property
    def keys(self) -> tuple[TokenSequence, ...]:
        """The sequences of keys and values: the context, or the texts themselves."""
        return self.sequences if self.context is None else self.context

    @cached_property
    def attentions(self) -> tuple[LayerView, ...]:
        """Its attentions in the order of execution. A layer of mha, or one of a checkpoint by
        itself, is the only one.
        """
        if self.layers:
            return tuple(
                LayerView(layer, self.of_layer(i), layer.label, short_name(layer, self.layers))
                for i, layer in enumerate(self.layers)
            )
        config = self.config
        alone = InspectedLayer(
            layer=self.heads[0].layer if self.heads else 0,
            name="",
            kind="self",
            captured_by="",
            kernel="",
            mask="",
            bias=config.positions == "alibi" or config.score_bias is not None,
            sinks=False,
            verified=True,
            unverified=(),
            self_check=self.self_check,
            survey=self.survey or UNMEASURED,
            **sizes_of(config),
        )
        return (LayerView(alone, self),)

    @property
    def files(self) -> tuple[str, ...]:
        """The files of texts that its command names."""
        parser = ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("-f", "--file", action="append", nargs="?", default=[])
        return tuple(filter(None, parser.parse_known_args(self.command)[0].file))

    @cached_property
    def dims(self) -> Dims:
        """The sizes on which formulas and shapes depend."""
        return dims_of(
            self.config, Texts(self.sequences, self.context), n_tokens=len(self.vocabulary)
        )

    def inside(self, sequence: int) -> tuple[slice, slice]:
        """The rows and columns of arrays for a sequence's queries and keys, without padding."""
        first_query = self.first_query(sequence)
        first_key = self.first_key(sequence)
        return (
            slice(first_query, first_query + len(self.sequences[sequence].tokens)),
            slice(first_key, first_key + len(self.keys[sequence].tokens)),
        )

    def first_query(self, sequence: int) -> int:
        """The index of a sequence's first token on the query axis, after any left padding."""
        return self.config.first_column(len(self.sequences[sequence].tokens), self.dims.q_len)

    def first_key(self, sequence: int) -> int:
        """The index of a sequence's first key on the key axis."""
        return self.config.first_column(len(self.keys[sequence].tokens), self.dims.k_len)

    def of_layer(self, index: int) -> Record:
        """The record of one inspected layer, with its own sizes, heads, arrays and texts; of mha's
        own layer the record itself.
        """
        if not self.layers:
            return self
        layer = self.layers[index]
        queries, keys = texts_of(layer.kind, self.sequences, self.context, layer.positions)
        return dataclasses.replace(
            self,
            config=dataclasses.replace(self.config, **sizes_of(layer)),
            sequences=queries,
            context=None if keys is queries else keys,
            heads=HeadTable(
                head
                for head in self.heads
                if (head.layer, head.attention) == (layer.layer, layer.name)
            ),
            self_check=layer.self_check,
            survey=layer.survey,
            layers=(),
            arrays=under(self.arrays, layer_prefix(index)),
        )

    def pattern(
        self,
        *,
        layer: int | None = None,
        head: int | None = None,
        batch: int = 0,
        kind: AttentionKind | None = None,
        heads: Literal["mean"] | None = None,
        words: bool = False,
    ) -> Pattern:
        """The attention weights of a head with their tokens; without `head` of all heads, with
        `heads="mean"` their mean, without `layer` of all layers. `words` merges the parts of words:
        weights are summed over keys and averaged over queries.

        `batch` is the number of the text. In a model with several kinds of attention, `kind`
        selects one; without it, that is the attention of a text to itself if the model has an
        encoder besides. Raises `MhaError` if the record lacks the pattern, or has several that do
        not fit into one array.
        """
        in_layer = [each for each in self.attentions if layer in (None, each.inspected.layer)]
        if kind is None and "self" in {each.inspected.kind for each in in_layer}:
            kind = "self"
        chosen = [each for each in in_layer if kind in (None, each.inspected.kind)]
        numbers = [each.inspected.layer for each in chosen]
        if not chosen:
            names = (
                f"{each.inspected.kind} layer {each.inspected.layer}" for each in self.attentions
            )
            raise UsageError(
                f"no attention with layer={layer} and kind={kind} is in the record, which has"
                f" {', '.join(dict.fromkeys(names))}"
            )
        n_texts = min(len(each.record.sequences) for each in chosen)
        if not 0 <= batch < n_texts:
            raise UsageError(out_of_range("batch", batch, n_texts))
        if len(chosen) > len({*numbers}):
            hint = "choose one with kind=, or take record.of_layer(index).pattern()"
            raise UsageError(f"the record has several attentions of layer {numbers[0]}", hint=hint)
        patterns = [pattern_of_layer(each, head=head, batch=batch) for each in chosen]
        found = stacked(patterns) if self.layers and layer is None else patterns[0]
        if heads is not None:
            if heads != "mean" or head is not None:
                raise UsageError(f"heads={heads!r} is not 'mean' without head=")
            found = found.mean_of_heads()
        return found.of_words() if words else found

    def mean_of_heads(self) -> Record:
        """The record with one head in each layer, −1, whose pattern is the mean of all. It has no
        statistics. Raises `MhaError` if no pattern was kept.
        """
        import numpy as np

        layers, heads, arrays = list[InspectedLayer](), list[HeadStatistics](), dict[str, Array]()
        for view in self.attentions:
            if view.has_pattern:
                mean = view.record.arrays["pattern"].mean(axis=1, keepdims=True)
                parts = {
                    "pattern": mean,
                    "allowed": view.record.arrays["allowed"].any(axis=1, keepdims=True),
                    "strongest_key": np.where(mean.max(axis=-1) > 0, mean.argmax(axis=-1), -1),
                }
                prefix = layer_prefix(len(layers))
                arrays |= {prefix + name: array for name, array in parts.items()}
                survey = dataclasses.replace(UNMEASURED, checks=view.inspected.survey.checks)
                layers.append(dataclasses.replace(view.inspected, survey=survey))
                place = view.inspected.layer, view.inspected.name
                heads.append(HeadStatistics(layer=place[0], attention=place[1], head=MEAN_OF_HEADS))
        if not layers:
            raise MhaError("the record has no pattern to average", code="not-kept")
        return dataclasses.replace(
            self, layers=tuple(layers), heads=HeadTable(heads), arrays=arrays
        )

    def document(self) -> dict[str, Any]:
        """The record without arrays as JSON values."""
        document = {"schema": SCHEMA, **plain(dataclasses.replace(self, arrays={}))}
        del document["arrays"]
        names = ("layer", "attention", "head", "kind", "certainty")
        document["heads"] = [
            {name: head[name] for name in (*names, *head)} for head in document["heads"]
        ]
        return document

    def page(self) -> Page:
        """The interactive page of the record, as `mha show --html` writes it. Notebooks show it in
        a frame.
        """
        return Page(renderer().page_of(self))

    def save(self, path: str, *, force: bool = False) -> None:
        """Writes the record to one safetensors file, atomically. Raises `MhaError`."""
        write_whole(path, self.to_bytes(), force=force)

    def to_bytes(self) -> bytes:
        """The content of the file that `save` writes."""
        import numpy as np
        from safetensors.numpy import save

        arrays = {name: np.ascontiguousarray(self.arrays[name]) for name in sorted(self.arrays)}
        sums = {name: checksum(array) for name, array in arrays.items()}
        document = self.document() | {"array_checksums": sums}
        header = json.dumps(document | {"checksum": json_checksum(document)}, separators=(",", ":"))
        return save(arrays, metadata={tensorfile.METADATA_KEY: header})


def dims_of(config: Config, texts: Texts, *, n_tokens: int) -> Dims:
    """The sizes of a run of these texts under a resolved config."""
    queries, context = texts
    keys = queries if context is None else context
    q_lens, k_lens = ([len(text.ids) for text in of_axis] for of_axis in (queries, keys))
    return Dims(
        config,
        batch=len(queries),
        q_len=max(q_lens),
        k_len=max(k_lens),
        cross=context is not None,
        padded=len(set(q_lens)) > 1 or len(set(k_lens)) > 1,
        packed=any(len(set(text.documents)) > 1 for text in (*queries, *keys)),
        n_tokens=n_tokens,
    )


def layer_prefix(index: int) -> str:
    """The prefix of a layer's array names."""
    return f"layers.{index}."


# -------------------------------------------------------------------------------------------- kinds


class CheckpointRecord(Record):
    """A record of a checkpoint."""

    model: Model


class CodeRecord(Record):
    """A trace of user code."""

    module: UserModule


class DecodingRecord(Record):
    """A record of decoding, by a layer of mha or a checkpoint."""

    decoding: DecodeSummary


class EffectRecord(Record):
    """A record of the effects of removals, in a layer of mha or a checkpoint."""

    effect: EffectSummary


OfKind = TypeVar("OfKind", bound=Record)


def is_a(record: Record, kind: type[OfKind]) -> TypeGuard[OfKind]:
    """Whether a record is of a kind: it has the fields that the kind names. A record may be of
    several. The kinds are types for the type checker; every record is made as a `Record`.
    """
    return all(getattr(record, name) is not None for name in kind.__annotations__)


# -------------------------------------------------------------------------------------- checkpoints


Positions = tuple[int, int | None, int | None]
"""The numbers of sequences, of query positions and of key positions of an attention whose axes are
not the tokens of the texts; None for an axis of tokens."""


def texts_of(
    kind: AttentionKind,
    sequences: Sequences,
    context: Sequences | None,
    positions: Positions | None = None,
) -> tuple[Sequences, Sequences]:
    """The texts of an attention's queries and of its keys, or bare positions. `context` is the
    encoder's input.
    """
    encoder = context or sequences
    queries = encoder if kind == "encoder" else sequences
    keys = sequences if kind in ("self", "decoder") else encoder
    if positions is None:
        return queries, keys
    n_texts, n_queries, n_keys = positions
    if kind != "cross" and n_queries is None and n_keys is not None:
        # the first keys were in a cache
        return queries, tuple(behind(n_keys - len(text.ids), text) for text in queries)
    if n_queries is not None:
        queries = (places(n_queries),) * n_texts
    if kind != "cross" and n_queries == n_keys:
        keys = queries
    elif n_keys is not None:
        keys = (places(n_keys),) * n_texts
    return queries, keys


def kinds_of(layers: tuple[LayerChoice, ...] | None, *, is_pair: bool) -> tuple[AttentionKind, ...]:
    """The kinds of attention among the requested layers (None: all), in the order of execution."""
    attentions: tuple[AttentionKind, ...] = (
        ("encoder", "decoder", "cross") if is_pair else ("self",)
    )
    chosen = {None} if layers is None else {kind for kind, _ in layers}
    return tuple(attention for attention in attentions if not chosen.isdisjoint((None, attention)))


class NonAttentionLayer(Struct, frozen=True):
    """A layer without an attention matrix, and its type in the checkpoint."""

    layer: int
    type: str


class Generated(Struct, frozen=True):
    """Tokens generated greedily by the model, from `prompt_lens` on in each sequence.

    `repeated` counts those that one pass over the whole text also predicts. The others are ties
    decided by rounding.
    """

    prompt_lens: tuple[int, ...]
    n_tokens: int
    repeated: int


def words_of_random(seed: int | None, *, what: str = "weights", is_tiny: bool = False) -> str:
    """What is said of weights, or of `what` else, that were drawn from the seed, also for a shrunk
    config; empty for those of a file.
    """
    if seed is None:
        return ""
    return f"{'tiny, ' if is_tiny else ''}random {what} (seed {seed})"


@dataclass(frozen=True, slots=True)
class Model:
    """The inspected checkpoint, and which of its implementations of attention was inspected.

    `identical_outputs` says whether the first `compared_len` tokens gave equal bits without
    inspection; None if not tried. `implementation` is transformers' name, `path_inspected` the path
    that ran. `without` are the layers without an attention matrix. `random_weights` is the seed of
    weights that were drawn, None if they are those of a file; `tiny` whether the config was shrunk.
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
    random_weights: int | None = None
    tiny: bool = False

    @property
    def title(self) -> str:
        """Its path, and whether its weights are not those of the file."""
        is_widened = self.path.lower().endswith(".gguf")
        words = "dequantized" if is_widened else self.words_of_random
        return f"{self.path} · {words}" if words else self.path

    @property
    def words_of_random(self) -> str:
        """What is said of random weights; empty for weights of a file."""
        words = words_of_random(self.random_weights, is_tiny=self.tiny)
        return f"{words}: nothing was learned" if words else ""


@dataclass(frozen=True, slots=True)
class InspectedLayer:
    """One attention of a checkpoint.

    `name` is its module's, and `captured_by` the interception: "registry", "module", "sdpa" or
    "softmax" (`InterceptionLevel` in `mhacli.models.capture`). `mask` describes the mask in words.
    `bias`: scores have an additive bias; `sinks`: sink logits take part. `verified`: the pattern
    times the values is the layer's output, within the tolerance, and every argument is understood;
    else `unverified` has the reasons. If a module computes several attentions in one layer, `call`
    counts them from 1, and the `name` of later ones includes it. `positions` are the sizes of axes
    that are not the tokens of the texts, such as the patches of an image; None where they are.
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
    extras: Mapping[str, str] = field(default_factory=dict, hash=False)
    positions: Positions | None = None

    @property
    def label(self) -> str:
        """`layer 5`, with the kind in encoder-decoder models (`decoder layer 5`), and with the call
        if not the first.
        """
        text = f"layer {self.layer}" if self.kind == "self" else f"{self.kind} layer {self.layer}"
        return text if self.call == 1 else f"{text}, call {self.call}"


@dataclass(frozen=True, eq=False)
class LayerView:
    """One attention of a record with its own record. Its `label` and its `name`, of a checkpoint
    `layer 5` and `5`, are empty if it stands alone. What is not known of a layer of mha is empty
    in `inspected`.
    """

    inspected: InspectedLayer
    record: Record
    label: str = ""
    name: str = ""

    @property
    def has_pattern(self) -> bool:
        """Whether its patterns were kept."""
        return "pattern" in self.record.arrays

    @property
    def is_drawable(self) -> bool:
        """Whether its patterns or maps of blocks were kept."""
        return self.has_pattern or "map" in self.record.arrays


def short_name(layer: InspectedLayer, layers: Sequence[InspectedLayer]) -> str:
    """A layer's number, with its kind if there are several (`5`, `cross 5`), and its call if not
    the first.
    """
    name = str(layer.layer)
    if len({other.kind for other in layers}) > 1:
        name = f"{layer.kind} {name}"
    return name if layer.call == 1 else f"{name} call {layer.call}"


def sizes_of(layer: InspectedLayer | Config) -> dict[str, Any]:
    """The sizes of the heads of a layer, and the constants of its scores."""
    names = ("n_heads", "n_kv_heads", "d_head", "d_v", "scale", "softcap")
    return {name: getattr(layer, name) for name in names}


class SpanTokens(Struct, frozen=True):
    """A named part of the texts: the indices of its tokens in each sequence."""

    name: str
    tokens: tuple[tuple[int, ...], ...]


# -------------------------------------------------------------------------------------------- trace


@dataclass(frozen=True, slots=True)
class Step:
    """The observation of one site. `layout` says whether the tensor shares memory with `view_of`;
    strides count numbers.

    `parameters` maps weight names to shapes; `bytes` is the tensor's size; `time_s` is None if not
    timed. A tensor that is not `built` was computed for inspection only; the kernel that ran never
    makes it. In user code, `operation` is torch's name, `file`, `line` and `source` give the
    location, and `remark` notes oddities. A line that ran `repeats` times is one step: flops and
    bytes are totals, the rest is of the first run; `repeats_of` names what was repeated.
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


# ----------------------------------------------------------------------------------- optional parts


class CacheStep(Struct, frozen=True):
    """One decoding step: new tokens come in, attend to the cache, and are added to it.

    `start` is the position of the first new token; `tokens` names the new tokens of each sequence
    (empty for padding), and `n_visible` counts the keys that the last of them sees, in each
    sequence. Shapes are those of the new queries, keys and values. `read_bytes` are the keys and
    values that attention reads, `appended_bytes` those that the step adds, `moved_bytes` all that
    this kind of cache reads and writes, and `cache_bytes` its storage. `max_abs_difference`
    compares the output with a full recomputation; None if not finite.
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
    n_visible: tuple[int, ...] = ()


class DecodeSummary(Struct, frozen=True):
    """A decoded sequence: its kind of cache, its prompt length, and the sizes that its steps read.

    `weight_bytes` are read at every step; `token_bytes` per cached token and sequence. Both are
    equal at `crossing_len` tokens. `full_token_bytes` would be a token's size with a kv head for
    every query head.
    """

    cache: str
    prompt_len: int
    weight_bytes: int
    token_bytes: int
    full_token_bytes: int
    crossing_len: float
    ways: tuple[dict[str, Any], ...] = ()


class ScorePart(Struct, frozen=True):
    """One of the terms that add up to a score, and its origin: content, position, or both.

    `value` is None if not finite; for a `given` bias it then is −∞, and the cell is masked. `added`
    terms come after scale and softcap.
    """

    name: str
    kind: Literal["content", "position", "both", "given", "softcap"]
    value: float | None
    added: bool = False


class Cell(Struct, frozen=True):
    """All numbers behind one cell: how a query of a head came to give a key its weight.

    `q`, `k`, `v` are the vectors, `scores_row` and `pattern_row` the query's whole rows (None where
    masked), `share` the weight that multiplies `v` (after any dropout), and `z` the head's output
    for the query. `qk` is the dot product before scaling, after any rotation; `parts` are the terms
    of the score.
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


class Argument(Struct, frozen=True):
    """An argument of user code, and its origin: given, default, or guessed."""

    name: str
    value: str
    origin: Literal["given", "default", "guessed"]
    why: str = ""


@dataclass(frozen=True, slots=True)
class UserModule:
    """The user's attention that was traced: the `target` that names it, its `arguments`, and how it
    was `called`.

    `sizes` are the sizes of its axes as `(word, size)`. `result` is its output shape, `expected`
    the shape that attention must give, and `printed` its printed text.
    """

    target: str
    arguments: tuple[Argument, ...]
    called: str
    sizes: tuple[tuple[str, int], ...]
    n_runs: int
    result: tuple[int, ...]
    expected: tuple[int, ...]
    printed: str = ""


# ------------------------------------------------------------------------------------- measurements


class TensorSummary(Struct, frozen=True):
    """A tensor's numbers in one line: finite extremes and moments, a histogram of equal bins, and
    non-finite counts.

    `numbers` is a small tensor's content, flat in row-major order, with None for non-finite
    numbers.
    """

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    histogram: tuple[int, ...]
    n_nan: int
    n_inf: int
    numbers: tuple[float | None, ...] | None = None


class WeightShape(Struct, frozen=True):
    """The shape of a weight that a site uses, by its name on disk."""

    name: str
    shape: tuple[int, ...]


class Timing(Struct, frozen=True):
    """The seconds of one stage: the first run separately, then samples with their median and
    interquartile range.
    """

    first_s: float
    samples_s: tuple[float, ...]
    median_s: float
    iqr_s: float


@dataclass(frozen=True, slots=True)
class Environment:
    """Versions and device of a run. `device_asked` is the user's option, `device` the chosen
    device. `kernels` is the compiler of the kernels that computed statistics on a GPU, null where
    torch or the compiled block did.
    """

    mha: str
    torch: str
    numpy: str
    python: str
    platform: str
    device: str
    device_name: str
    device_asked: str
    threads: int
    kernels: str | None = None
