"""The attention of a real checkpoint: one unchanged pass of the model, in which every layer is inspected as it is computed.

Each layer is reduced to statistics, or its matrices are kept, before the next one runs: memory holds one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.adapters.hf.capture import Call, ScoredCall, captured
from mhacli.adapters.hf.captured_pattern import KEPT_MASKS, KnownMasks, as_attention, full_matrices
from mhacli.adapters.hf.inputs import ModelInputs, are_identical, outputs_of
from mhacli.adapters.hf.layer_names import (
    LayerKey,
    most_positions,
    n_attentions_of,
    n_layers_of,
    positions_of,
    rope_theta_of,
    size_of,
    without_attention,
)
from mhacli.adapters.hf.load import Loaded
from mhacli.attention.tiled.scores import AttentionResult
from mhacli.attention.tiled.statistics import StatisticsRequest, strongest_key
from mhacli.compute.base.devices import environment, free_bytes, one_thread, shared_out
from mhacli.compute.base.head_statistics import Axes, Baseline, make_baseline, statistics_request
from mhacli.compute.base.taps import stage_timings, to_array
from mhacli.compute.heads import HeadResults, joined, make_summary, second_pass
from mhacli.errors import MhaError
from mhacli.io.progress import Progress, no_progress
from mhacli.requests.memory import CheckpointFacts, predict_checkpoint_memory
from mhacli.results.record.head_statistics import HeadsRequest, HeadsSummary, HeadStatistics
from mhacli.results.record.record import (
    NOT_SEEN,
    AttentionKind,
    Generated,
    InspectedLayer,
    LayerChoice,
    Model,
    Record,
    SelfCheck,
    SpanTokens,
    layer_prefix,
    texts_of,
)
from mhacli.results.record.tables import HeadTable
from mhacli.spec.config import DEFAULT_KEEP_LIMIT, Config

KEPT = ("pattern", "z", "scores", "qk")
"""The matrices of a layer, the most wanted first."""
COMPARED_WHOLE, COMPARED_LEN = 1024, 256
"""Texts up to this length are run a second time without inspection, whole; of longer ones so many first tokens, twice."""


@dataclass(frozen=True)
class CheckpointRunRequest:
    """What to find out of a checkpoint: what to ask of the heads, and of which `layers` (None: all).

    `keep` are matrices of each layer (None: as many as fit) within `keep_limit` bytes in all; `spans` the tokens of named
    parts.
    """

    heads: HeadsRequest
    layers: tuple[LayerChoice, ...] | None = None
    keep: tuple[str, ...] | None = ()
    keep_limit: int = DEFAULT_KEEP_LIMIT
    spans: tuple[SpanTokens, ...] = ()

    def is_wanted(self, layer: int, kind: AttentionKind) -> bool:
        """Whether a layer is asked for."""
        return self.layers is None or any(n == layer and k in (None, kind) for k, n in self.layers)


class LayerResults(NamedTuple):
    """A layer that is done: what a record says of it, and the statistics and arrays of its heads."""

    layer: InspectedLayer
    heads: tuple[HeadStatistics, ...]
    arrays: Mapping[str, Tensor]


@dataclass
class CheckpointRun:
    """A look at a checkpoint. `run` does it; `record` tells the layers that are finished."""

    loaded: Loaded
    inputs: ModelInputs
    wanted: CheckpointRunRequest
    device_asked: str = "auto"
    generated: Generated | None = None
    results: list[LayerResults] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    identical: bool | None = None
    compared_len: int = 0
    peak_bytes: int = 0
    on_layer: Callable[[Call, AttentionResult], None] | None = None
    not_kept: list[str] = field(default_factory=list)
    _masks: KnownMasks = field(default_factory=KnownMasks)
    _baselines: dict[object, tuple[Baseline, object]] = field(default_factory=dict)
    _found: list[LayerKey] = field(default_factory=list)
    _unfit: dict[LayerKey, str] = field(default_factory=dict)
    _kept_bytes: int = 0
    _tell: Progress = no_progress

    @property
    def n_layers(self) -> int:
        """How many attentions will be told, as far as the config says."""
        config = self.loaded.config
        if self.wanted.layers is None:
            return max(1, n_attentions_of(config))
        return sum(3 if kind is None and config.is_encoder_decoder else 1 for kind, _ in self.wanted.layers)

    @property
    def n_finished(self) -> int:
        """How many layers are done."""
        return len(self.results)

    def facts(self) -> CheckpointFacts:
        """What the memory of a pass depends on."""
        config, families = self.loaded.text_config, (self.inputs.sequences, self.inputs.context or ())
        name = getattr(self.loaded.config, "_attn_implementation", None)
        d_model = size_of(config, "hidden_size") or 1
        kept, keep = self.wanted.heads.kept, KEPT if self.wanted.keep is None else self.wanted.keep
        corner = 0 if kept.corner is None else kept.corner.n_queries * kept.corner.n_keys
        return CheckpointFacts(
            batch=len(self.inputs.sequences),
            length=max(len(text.ids) for family in families for text in family),
            d_model=d_model,
            d_inner=size_of(config, "intermediate_size") or 4 * d_model,
            n_heads=size_of(config, "num_attention_heads") or 1,
            item_bytes=torch.empty(0, dtype=self.loaded.model.dtype).element_size(),
            holds_matrices=name != "sdpa",
            kept_matrices=len(keep) * self.n_layers,
            kept_cells=self.n_layers * (corner + 2 * len(kept.queries) * kept.top),
            keep_limit=self.wanted.keep_limit,
        )

    def foresee(self) -> None:
        """Predicts the memory of the pass. Raises `MhaError` where it does not fit."""
        self.peak_bytes = predict_checkpoint_memory(self.facts(), free_bytes(self.device_asked))

    @torch.no_grad()
    def run(self, tell: Progress = no_progress) -> None:
        """One pass with every layer looked at, and the passes that show that looking changes nothing."""
        self.foresee()  # what is kept cell by cell may have been asked for since
        began = perf_counter()
        self._tell = tell
        tell(0.0, "the first layer")
        outputs = self._pass(self.inputs.keywords, self._take)
        self.seconds["pass and statistics"] = perf_counter() - began
        if not self.results:
            raise self._nothing_seen()
        began = perf_counter()
        self._compare(outputs)
        self.seconds["comparison"] = perf_counter() - began

    def _pass(self, keywords: Mapping[str, Tensor], take: Callable[[Call], None] | None) -> Mapping[str, Any]:
        """The outputs of the model, watched by `take` or by nobody."""
        model, batch = self.loaded.model, len(self.inputs.sequences)
        if take is None:
            return outputs_of(model, keywords)
        with captured(model, take, batch=batch):
            return self._pass(keywords, None)

    def _compare(self, outputs: Mapping[str, Any]) -> None:
        """Whether the same bits come out without inspection: of the whole text, or where it is long of its first tokens."""
        longest = max(tensor.shape[1] for tensor in self.inputs.keywords.values())
        self.compared_len = longest if longest <= COMPARED_WHOLE else COMPARED_LEN
        keywords = self.inputs.beginning(self.compared_len)
        watched = outputs if longest <= COMPARED_WHOLE else self._pass(keywords, lambda call: None)
        self.identical = are_identical(watched, self._pass(keywords, None))

    def _nothing_seen(self) -> MhaError:
        unfit = [reason for (kind, layer), reason in self._unfit.items() if self.wanted.is_wanted(layer, kind)]
        return nothing_seen(self.loaded.config.model_type, self.wanted.layers, self._found, unfit)

    def _take(self, call: Call) -> None:
        """Looks at one attention, if it is asked for, while the model waits."""
        axes, place = self.axes(call.kind), (call.kind, call.layer)
        reason = misfit(call, axes)
        if reason is not None:
            self._unfit.setdefault(place, reason)
            return
        self._found.append(place)
        if not self.wanted.is_wanted(call.layer, call.kind):
            return
        self.results.append(self._inspect(call, axes))
        self._tell(min(1.0, len(self.results) / self.n_layers), self.results[-1].layer.label)

    def axes(self, kind: AttentionKind) -> Axes:
        """Whose tokens stand on the axes of an attention of this kind."""
        queries, keys = texts_of(kind, self.inputs.sequences, self.inputs.context)
        ids = {token: i for text in (*queries, *keys) for token, i in zip(text.tokens, text.ids, strict=True)}
        return Axes(
            queries=queries,
            keys=keys,
            q_len=max(len(text.ids) for text in queries),
            k_len=max(len(text.ids) for text in keys),
            side=self.inputs.side,
            is_self=kind != "cross",
            id_of=lambda word: ids.get(word, -1),
            dtype=self.loaded.dtype,
            device=self.loaded.model.device,
        )

    def _inspect(self, call: Call, axes: Axes) -> LayerResults:
        """Statistics of all heads that are asked for, the matrices that are kept, and the checks."""
        wanted = self.wanted.heads
        attention = as_attention(call, axes.real_queries(), self._masks)
        if self.on_layer is not None:
            self.on_layer(call, attention)
        asked = statistics_request(axes, wanted.patterns, sink_tokens=wanted.sink_tokens, spans=self.wanted.spans)
        is_small = self.loaded.model.device.type == "cpu" and prod(attention.shape[2:]) <= SMALL_CELLS
        with one_thread() if is_small else nullcontext():
            baseline = self._baseline(call, attention, asked)
            results = joined(self._second_passes(attention, axes, asked, baseline), baseline, axes, asked)
        heads = tuple(replace(head, layer=call.layer, attention=call.title) for head in results.heads)
        survey = make_summary(
            results,
            wanted,
            axes=axes,
            asked=asked,
            peak_bytes=self.peak_bytes,
            full_bytes=4 * prod(attention.shape),
        )
        layer = make_layer(call, attention, mask=mask_words(baseline, axes), survey=survey)
        return LayerResults(layer, heads, {**results.arrays, **self._matrices(call, attention)})

    def _second_passes(
        self, attention: AttentionResult, axes: Axes, asked: StatisticsRequest, baseline: Baseline
    ) -> list[HeadResults]:
        """What is found of all heads that are asked for. On a CPU every thread takes its own."""
        wanted = self.wanted.heads

        def of_heads(heads: range) -> HeadResults:
            return second_pass(axes, attention.of_heads(heads), asked=asked, wanted=wanted, baseline=baseline)

        n_parts = torch.get_num_threads() if self.loaded.model.device.type == "cpu" else 1
        return shared_out([partial(of_heads, heads) for heads in head_ranges(attention, wanted.heads, n_parts)])

    def _baseline(self, call: Call, attention: AttentionResult, asked: StatisticsRequest) -> Baseline:
        """Uniform attention under the mask of a call: asked once for neighbouring layers that share it."""
        if not isinstance(call, ScoredCall):
            return make_baseline(attention.pattern, asked)
        allowed = attention.pattern.allowed
        key = (call.kind, id(allowed))
        if key not in self._baselines:
            while len(self._baselines) >= KEPT_MASKS:
                del self._baselines[next(iter(self._baselines))]
            self._baselines[key] = make_baseline(attention.pattern, asked), allowed  # alive, so that its id names it
        return self._baselines[key][0]

    def _matrices(self, call: Call, attention: AttentionResult) -> dict[str, Tensor]:
        """The matrices of this layer that are to be kept, as far as the limit goes."""
        matrix_bytes = 4 * prod(attention.shape)
        keep = self._keep(matrix_bytes)
        if not keep:
            return {}
        n_bytes = matrix_bytes * len(keep)
        if self._kept_bytes + n_bytes > self.wanted.keep_limit:
            self.not_kept.append(f"matrices of {call.title}")
            return {}
        self._kept_bytes += n_bytes
        made = full_matrices(attention) | ({} if attention.v is None else {"z": attention.z})
        missing = [name for name in keep if name not in made]
        self.not_kept += (
            [f"{' and '.join(missing)} of {call.title}{NOT_SEEN}"] if missing and self.wanted.keep is not None else []
        )
        made["strongest_key"] = strongest_key(made["pattern"])
        names = [name for name in (*keep, "allowed", "strongest_key") if name in made]
        heads = self.wanted.heads.heads
        arrays = {
            name: made[name] if heads is None or made[name].shape[1] == 1 else made[name][:, heads] for name in names
        }
        return {name: array.cpu() for name, array in arrays.items()}

    def _keep(self, matrix_bytes: int) -> tuple[str, ...]:
        """Which matrices to keep of a layer: those that were asked for, or as many as fit for all layers."""
        if self.wanted.keep is not None:
            return self.wanted.keep
        room = self.wanted.keep_limit // max(1, matrix_bytes * self.n_layers)
        return KEPT[: max(1, room)]

    def record(self) -> Record:
        """The record of the layers that are finished, of which there must be one at least."""
        results = list(self.results)
        arrays = {
            layer_prefix(i) + name: to_array(array)
            for i, done in enumerate(results)
            for name, array in done.arrays.items()
        }
        ok = all(done.layer.self_check.ok for done in results)
        worst = max(
            results, key=lambda done: done.layer.survey.checks[-1].severity
        ).layer.self_check  # that is its last check
        model = self._model()
        return Record(
            command=self.wanted.heads.command,
            config=self._config(results[0].layer, model),
            sequences=self.inputs.sequences,
            context=self.inputs.context,
            vocabulary=(),
            trace=(),
            heads=HeadTable(head for done in results for head in done.heads),
            timings=stage_timings(self.seconds),
            self_check=SelfCheck(worst.max_abs_error, worst.tolerance, ok and self.identical is not False),
            environment=environment(self.loaded.model.device, self.device_asked),
            weights=self.loaded.checkpoint.path,
            not_kept=tuple(self.not_kept),
            model=model,
            layers=tuple(done.layer for done in results),
            spans=self.wanted.spans,
            arrays=arrays,
        )

    def _model(self) -> Model:
        loaded = self.loaded
        implementation = str(getattr(loaded.config, "_attn_implementation", None) or "eager")
        levels = dict.fromkeys(done.layer.captured_by for done in self.results)
        inspected = " and ".join(
            dict.fromkeys("hand-written" if level == "softmax" else implementation for level in levels)
        )
        return Model(
            path=loaded.source,
            revision=loaded.revision,
            family=loaded.config.model_type,
            architecture=type(loaded.model).__name__,
            implementation=implementation,
            path_inspected=f"{inspected} (unchanged)",
            identical_outputs=self.identical,
            compared_len=self.compared_len,
            n_layers=n_layers_of(loaded.config),
            n_parameters=sum(p.numel() for p in loaded.model.parameters()),
            n_vocabulary=int(getattr(loaded.text_config, "vocab_size", 0) or 0),
            positions=positions_of(loaded.model),
            max_positions=most_positions(loaded.config),
            dtype=loaded.dtype,
            without=without_attention(loaded.config, self._found, self._unfit),
            generated=self.generated,
        )

    def _config(self, first: InspectedLayer, model: Model) -> Config:
        """The sizes and choices in the house's words; those of each layer stand in `layers`."""
        known = ("rope", "rope-interleaved", "alibi", "learned")
        return Config(
            d_model=int(getattr(self.loaded.text_config, "hidden_size", 0) or first.n_heads * first.d_v),
            n_heads=first.n_heads,
            n_kv_heads=first.n_kv_heads,
            d_head=first.d_head,
            d_v=first.d_v,
            positions=model.positions if model.positions in known else "none",  # type: ignore[arg-type]
            causal=first.mask.startswith("causal"),
            padding=self.inputs.side,
            scale=first.scale,
            softcap=first.softcap,
            dtype=model.dtype,  # type: ignore[arg-type]
            device=str(self.loaded.model.device),
            tokenizer=self.loaded.checkpoint.tokenizer or "word",
            max_positions=model.max_positions or Config.max_positions,
            rope_theta=rope_theta_of(self.loaded.config, first.layer),
        ).resolved()


# ------------------------------------------------------------------------------------------------------------ one layer


def make_layer(call: Call, attention: AttentionResult, *, mask: str, survey: HeadsSummary) -> InspectedLayer:
    """What a record says of a layer besides its heads."""
    checks, scores = survey.checks, attention.scores
    reasons = [
        f"the check '{check.name}' " + ("gives NaN or Inf" if check.error is None else f"differs by {check.error}")
        for check in checks
        if not check.ok
    ]
    reasons += [
        f"scores are so large that their rounding alone may move z by {check.rounding:.3g}"
        for check in checks
        if check.rounding
    ]
    reasons += [f"the keyword {name} is not understood" for name in call.unknown]
    if attention.v is None:
        reasons.append("only the pattern was seen, not the values")
    d_v = attention.z.shape[3]
    return InspectedLayer(
        layer=call.layer,
        name=call.title,
        kind=call.kind,
        captured_by=call.level,
        kernel=attention.kernel,
        n_heads=attention.shape[1],
        n_kv_heads=attention.n_kv_heads,
        d_head=d_v if scores is None else scores.q.shape[3],
        d_v=d_v,
        scale=None if scores is None else scores.scale,
        softcap=None if scores is None else scores.softcap,
        mask=mask,
        bias=scores is not None and scores.bias is not None,
        sinks=attention.sink_logits is not None,
        verified=not reasons,
        unverified=tuple(reasons),
        self_check=SelfCheck(checks[-1].error, checks[-1].tolerance, all(check.ok for check in checks)),
        survey=survey,
        call=call.part + 1,
        extras=call.extras,
    )


def misfit(call: Call, axes: Axes) -> str | None:
    """Why nothing can be said of an attention: its axes are not the tokens of the text. None where they are."""
    batch, n_queries, n_keys = call.shape[0], *call.shape[-2:]
    if (batch, n_queries, n_keys) == (len(axes.queries), axes.q_len, axes.k_len):
        return None
    return f"attention from {axes.q_len} to {axes.k_len} tokens laid out as {n_queries} × {n_keys}"


def nothing_seen(
    family: str, asked: tuple[LayerChoice, ...] | None, found: Sequence[LayerKey], unfit: Sequence[str]
) -> MhaError:
    """What to say where no attention that is asked for could be shown: some were `found`, others `unfit`."""
    if unfit:
        return MhaError(
            f"the attention of {family} is not laid out by tokens: {unfit[0]}",
            hint="its queries and keys are not tokens of the text, so mha cannot label them",
            code="not-tokens",
        )
    if found and asked is not None:
        numbers = ", ".join(str(n) for n in sorted({layer for _, layer in found}))
        return MhaError(
            f"--layer {','.join(str(n) for _, n in asked)} has no attention; layers with attention: {numbers}",
            code="no-layer",
        )
    return MhaError(
        f"no attention was found in {family}",
        hint="layers without a matrix of queries × keys, such as state-space layers, cannot be inspected",
        code="no-attention",
    )


SMALL_CELLS = 1 << 18
"""Queries × keys up to which one thread is as quick as several."""


def head_ranges(attention: AttentionResult, asked: tuple[int, ...] | None, n_parts: int) -> list[range]:
    """The heads that go together: alone where they are chosen, else in parts, none of which cuts a group that shares keys."""
    n_heads, n_kv_heads = attention.shape[1], attention.n_kv_heads
    if asked is not None:
        return [range(head, head + 1) for head in asked]
    step = n_heads // n_kv_heads * -(-n_kv_heads // max(1, n_parts))
    return [range(start, min(start + step, n_heads)) for start in range(0, n_heads, step)]


def mask_words(baseline: Baseline, axes: Axes) -> str:
    """What queries see, in words, by how many keys each of the first text's sees."""
    n, first = len(axes.queries[0].ids), axes.first_query(0)
    counts = baseline.visible[0, 0, first : first + n].long().tolist()
    most, n_keys = max(counts), len(axes.keys[0].ids)
    if counts == [min(i + 1, most) for i in range(n)]:
        return "causal" if most == n else f"causal, window {most}"
    return "all keys" if counts == [n_keys] * n else f"at most {most} keys"
