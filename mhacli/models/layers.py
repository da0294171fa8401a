"""Inspects the attentions of one pass of a model: each is reduced to statistics, or its matrices are kept, while the model waits.

Memory holds one layer at a time. The caller runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.attention.devices import environment, one_thread, shared_out
from mhacli.attention.head_results import HeadResults, joined, results_of
from mhacli.attention.head_statistics import Axes, make_statistics_request
from mhacli.attention.scores import Attention, ScoredAttention, strongest_key
from mhacli.attention.statistics import StatisticsRequest
from mhacli.attention.taps import stage_timings, to_array
from mhacli.attention.uniform import Baseline, make_baseline
from mhacli.io.progress import Progress, no_progress
from mhacli.layer.heads import SMALL_CELLS
from mhacli.models.calls import DROPOUT, Call
from mhacli.models.captured_pattern import KEPT_MASKS, KnownMasks, as_attention
from mhacli.models.inputs import ModelInputs
from mhacli.models.layer_names import LayerKey, rope_theta_of, without_attention
from mhacli.record.checks import SelfCheck
from mhacli.record.heads import HeadsSummary, HeadStatistics
from mhacli.record.record import (
    NOT_SEEN,
    InspectedLayer,
    Model,
    NonAttentionLayer,
    Positions,
    Record,
    SpanTokens,
    layer_prefix,
    texts_of,
)
from mhacli.record.tables import HeadTable
from mhacli.run import Run
from mhacli.settings import Config
from mhacli.text.tokens import AttentionKind

KEPT = ("pattern", "z", "scores", "qk")
"""The matrices of a layer that can be kept, the most important first."""


class LayerResults(NamedTuple):
    """A finished layer: its entry in the record, and the statistics and arrays of its heads."""

    layer: InspectedLayer
    heads: tuple[HeadStatistics, ...]
    arrays: Mapping[str, Tensor]


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model for the record, besides its attentions.

    `config` is that of transformers, None for a module without one; `d_model` is 0 if unknown. `weights` is the path of the
    checkpoint, `tokenizer` the name of its tokenizer in the record's config, `device_asked` the device as the user named it.
    """

    model: Model
    config: Any
    d_model: int
    device: torch.device
    device_asked: str
    tokenizer: str = "word"
    weights: str | None = None


@dataclass
class PassInspection:
    """The attentions of one pass over the texts of `inputs`. `take` inspects each; `record` has the finished ones.

    `n_layers` is the expected number of attentions, `dtype` that of the model. `on_layer` is called with every requested
    attention before it is reduced. With `any_length`, an attention over something else than the texts is shown by positions.
    """

    inputs: ModelInputs
    wanted: Run
    spans: tuple[SpanTokens, ...]
    dtype: str
    n_layers: int
    on_layer: Callable[[Call, Attention], None] | None = None
    report_progress: Progress = no_progress
    peak_bytes: int = 0
    any_length: bool = False
    results: list[LayerResults] = field(default_factory=list)
    found: list[LayerKey] = field(default_factory=list)
    unfit: dict[LayerKey, str] = field(default_factory=dict)
    not_kept: list[str] = field(default_factory=list)
    _masks: KnownMasks = field(default_factory=dict)
    _baselines: dict[object, tuple[Baseline, object]] = field(default_factory=dict)
    _kept_bytes: int = 0

    def take(self, call: Call) -> None:
        """Reduces one attention, if it is requested, while the model waits."""
        dtype, place = coarser(self.dtype, call), (call.kind, call.layer)
        positions = positions_of_axes(call, self.inputs) if self.any_length else None
        axes = axes_of(self.inputs, call.kind, dtype=dtype, device=call.device, positions=positions)
        reason = misfit(call, axes)
        if positions is not None and call.shape[0] < len(self.inputs.sequences):
            reason = f"attention of {call.shape[0]} sequences, not of {len(self.inputs.sequences)}"
        if reason is not None:
            self.unfit.setdefault(place, reason)
            return
        self.found.append(place)
        if not self.wanted.model.includes(call.layer, call.kind):
            return
        done = self._inspect(call, axes)
        self.results.append(done._replace(layer=replace(done.layer, positions=positions)))
        self.report_progress(min(1.0, len(self.results) / self.n_layers), self.results[-1].layer.label)

    def release(self) -> None:
        """Frees the masks that layers share, so that no tensor of the model is held after its pass."""
        self._masks, self._baselines = {}, {}

    def _inspect(self, call: Call, axes: Axes) -> LayerResults:
        """The statistics of all requested heads, the kept matrices, and the checks."""
        wanted = self.wanted
        attention = as_attention(call, axes.real_queries(), self._masks)
        if call.has_dropout:  # z belongs to other weights
            attention = replace(attention, v=None)
        if self.on_layer is not None:
            self.on_layer(call, attention)
        statistics_request = make_statistics_request(
            axes, wanted.statistics.conditions, sink_tokens=wanted.statistics.first_tokens, spans=self.spans
        )
        is_small = call.device.type == "cpu" and prod(attention.shape[2:]) <= SMALL_CELLS
        with one_thread() if is_small else nullcontext():
            baseline = self._baseline(call, attention, statistics_request)
            parts = self._reduced(attention, axes, statistics_request, baseline)
            matrices = self._matrices(call, attention)
        results, survey = joined(
            parts,
            baseline,
            wanted,
            axes=axes,
            statistics_request=statistics_request,
            peak_bytes=self.peak_bytes,
            full_bytes=4 * prod(attention.shape),
        )
        heads = tuple(replace(head, layer=call.layer, attention=call.title) for head in results.heads)
        layer = make_layer(call, attention, mask=mask_words(baseline, axes), survey=survey)
        return LayerResults(layer, heads, {**results.arrays, **matrices})

    def _reduced(
        self,
        attention: Attention,
        axes: Axes,
        statistics_request: StatisticsRequest,
        baseline: Baseline,
    ) -> list[HeadResults]:
        """The results of all requested heads. On a CPU every thread takes its own."""
        wanted = self.wanted

        def of_heads(heads: range) -> HeadResults:
            return results_of(
                axes, attention, heads, statistics_request=statistics_request, wanted=wanted, baseline=baseline
            )

        n_parts = torch.get_num_threads() if axes.device.type == "cpu" else 1
        return shared_out(
            [partial(of_heads, heads) for heads in head_ranges(attention, wanted.statistics.heads, n_parts)]
        )

    def _baseline(self, call: Call, attention: Attention, statistics_request: StatisticsRequest) -> Baseline:
        """Uniform attention under the mask of a call, computed once for successive layers that share the mask."""
        if call.q is None:
            return make_baseline(attention, statistics_request)
        key = (call.kind, call.device, call.shape[2:], id(attention.allowed))
        if key not in self._baselines:
            while len(self._baselines) >= KEPT_MASKS:
                del self._baselines[next(iter(self._baselines))]
            # the mask is kept alive, so that its id stays unique
            self._baselines[key] = make_baseline(attention, statistics_request), attention.allowed
        return self._baselines[key][0]

    def _matrices(self, call: Call, attention: Attention) -> dict[str, Tensor]:
        """The matrices to keep of the requested heads, within the limit for all layers."""
        matrix_bytes, heads = 4 * prod(attention.shape), self.wanted.statistics.heads
        keep = self._keep(matrix_bytes)
        if not keep:
            return {}
        n_bytes = matrix_bytes * len(keep)
        if self._kept_bytes + n_bytes > self.wanted.keep_limit:
            self.not_kept.append(f"matrices of {call.title}")
            return {}
        self._kept_bytes += n_bytes
        made = attention.matrices()
        if attention.v is not None and attention.z is not None:
            made["z"] = attention.z.clone()
        missing = [name for name in keep if name not in made]
        self.not_kept += (
            [f"{' and '.join(missing)} of {call.title}{NOT_SEEN}"] if missing and self.wanted.keep is not None else []
        )
        made["strongest_key"] = strongest_key(made["pattern"])
        names = [name for name in (*keep, "allowed", "strongest_key") if name in made]
        arrays = {
            name: made[name]
            if heads is None or (name == "allowed" and made[name].shape[1] == 1)
            else made[name][:, list(heads)]
            for name in names
        }
        return {name: array.cpu() for name, array in arrays.items()}

    def _keep(self, matrix_bytes: int) -> tuple[str, ...]:
        """The names of the matrices to keep of a layer: the requested ones, or as many as fit for all layers."""
        if self.wanted.keep is not None:
            return self.wanted.keep
        room = self.wanted.keep_limit // max(1, matrix_bytes * self.n_layers)
        return KEPT[: max(1, room)]

    def record(self, facts: ModelFacts, seconds: Mapping[str, float]) -> Record:
        """The record of the layers that are finished, of which there must be one at least."""
        results = list(self.results)
        arrays = {
            layer_prefix(i) + name: to_array(array)
            for i, done in enumerate(results)
            for name, array in done.arrays.items()
        }
        layers, model = tuple(done.layer for done in results), self._model(facts)
        return Record(
            command=self.wanted.command,
            config=_config(
                facts, next((each for each in layers if each.kind == "self"), layers[0]), model, self.inputs
            ),
            sequences=self.inputs.sequences,
            context=self.inputs.context,
            vocabulary=(),
            trace=(),
            heads=HeadTable(head for done in results for head in done.heads),
            timings=stage_timings(seconds, [seconds]),
            self_check=SelfCheck.of_layers(
                [layer.survey.checks for layer in layers], holds=model.identical_outputs is not False
            ),
            environment=environment(facts.device, facts.device_asked),
            weights=facts.weights,
            not_kept=tuple(self.not_kept),
            model=model,
            layers=layers,
            spans=self.spans,
            arrays=arrays,
        )

    def _model(self, facts: ModelFacts) -> Model:
        """The model for the record, with the inspected layers and those without attention."""
        levels = dict.fromkeys(done.layer.captured_by for done in self.results)
        inspected = " and ".join(
            dict.fromkeys("hand-written" if level == "softmax" else facts.model.implementation for level in levels)
        )
        without = (
            tuple(NonAttentionLayer(number, reason) for (_, number), reason in self.unfit.items())
            if facts.config is None
            else without_attention(facts.config, self.found, self.unfit)
        )
        n_layers = facts.model.n_layers or len({layer for _, layer in (*self.found, *self.unfit)})
        return replace(facts.model, n_layers=n_layers, path_inspected=f"{inspected} (unchanged)", without=without)


def _config(facts: ModelFacts, first: InspectedLayer, model: Model, inputs: ModelInputs) -> Config:
    """The sizes and choices as a `Config`; those of each layer are in `layers`."""
    known = ("rope", "rope-interleaved", "alibi", "learned")
    theta = Config.rope_theta if facts.config is None else rope_theta_of(facts.config, first.layer)
    return Config(
        d_model=facts.d_model or first.n_heads * first.d_v,
        n_heads=first.n_heads,
        n_kv_heads=first.n_kv_heads,
        d_head=first.d_head,
        d_v=first.d_v,
        positions=model.positions if model.positions in known else "none",  # type: ignore[arg-type]
        causal=first.mask.startswith("causal"),
        padding=inputs.side,
        scale=first.scale,
        softcap=first.softcap,
        dtype=model.dtype,  # type: ignore[arg-type]
        device=str(facts.device),
        tokenizer=facts.tokenizer,
        max_positions=model.max_positions or Config.max_positions,
        rope_theta=theta,
    ).resolved()


def coarser(dtype: str, call: Call) -> str:
    """The coarser of the model's dtype and that of the call's values, which autocast may change. It decides the tolerances."""
    found = None if call.v is None else call.v.dtype
    own: torch.dtype = getattr(torch, dtype)
    is_coarser = found in ROUNDED and (own not in ROUNDED or torch.finfo(found).eps > torch.finfo(own).eps)
    return str(found).removeprefix("torch.") if is_coarser else dtype


ROUNDED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes with known tolerances."""


# ----------------------------------------------------------------------------------------------------------- whose tokens


def positions_of_axes(call: Call, inputs: ModelInputs) -> Positions | None:
    """The sizes of the axes of an attention that are not the tokens of the texts; None if all are."""
    n_texts, _, *lengths = call.shape
    texts = texts_of(call.kind, inputs.sequences, inputs.context)
    fits = [
        len(of_axis) == n_texts and max(len(text.ids) for text in of_axis) == n
        for of_axis, n in zip(texts, lengths, strict=True)
    ]
    if all(fits):
        return None
    q_len, k_len = (
        lengths if call.kind != "cross" else (None if fits[0] else lengths[0], None if fits[1] else lengths[1])
    )
    return n_texts, q_len, k_len


def axes_of(
    inputs: ModelInputs, kind: AttentionKind, *, dtype: str, device: torch.device, positions: Positions | None = None
) -> Axes:
    """The texts on the query and key axes of an attention of this kind, or its positions."""
    queries, keys = texts_of(kind, inputs.sequences, inputs.context, positions)
    ids = {token: i for text in (*queries, *keys) for token, i in zip(text.tokens, text.ids, strict=True)}
    return Axes(
        queries=queries,
        keys=keys,
        q_len=max(len(text.ids) for text in queries),
        k_len=max(len(text.ids) for text in keys),
        side=inputs.side,
        is_self=kind != "cross" and (positions is None or positions[1] == positions[2]),
        id_of=lambda word: ids.get(word, -1),
        dtype=dtype,
        device=device,
    )


# ------------------------------------------------------------------------------------------------------------ one layer


def make_layer(call: Call, attention: Attention, *, mask: str, survey: HeadsSummary) -> InspectedLayer:
    """The entry of a layer in the record, without its heads."""
    checks, scored = survey.checks, attention if isinstance(attention, ScoredAttention) else None
    reasons = [
        f"the check '{check.name}' " + ("gives NaN or Inf" if check.error is None else f"differs by {check.error}")
        for check in checks
        if not check.ok
    ]
    reasons += [
        f"scores are so large that rounding alone may change z by {check.rounding:.3g}"
        for check in checks
        if check.rounding
    ]
    reasons += [f"the keyword {name} is not understood" for name in call.unknown if name not in DROPOUT]
    if call.has_dropout:
        reasons.append(
            "dropout was active: the weights are those before dropout, but the layer's output was computed after it"
        )
    elif attention.v is None:
        reasons.append("only the pattern was captured, not the values")
    assert attention.z is not None, "the model made it"
    d_v = attention.z.shape[3]
    return InspectedLayer(
        layer=call.layer,
        name=call.title,
        kind=call.kind,
        captured_by=call.level,
        kernel=attention.kernel,
        n_heads=attention.shape[1],
        n_kv_heads=attention.n_kv_heads,
        d_head=d_v if scored is None else scored.q.shape[3],
        d_v=d_v,
        scale=None if scored is None else scored.scale,
        softcap=None if scored is None else scored.softcap,
        mask=mask,
        bias=scored is not None and scored.bias is not None,
        sinks=attention.sink_logits is not None,
        verified=not reasons,
        unverified=tuple(reasons),
        self_check=SelfCheck.of_layers([checks]),
        survey=survey,
        call=call.part + 1,
    )


def misfit(call: Call, axes: Axes) -> str | None:
    """The reason why an attention cannot be shown: its axes are not the tokens of the text. None if they are."""
    batch, n_queries, n_keys = call.shape[0], *call.shape[-2:]
    if (batch, n_queries, n_keys) == (len(axes.queries), axes.q_len, axes.k_len):
        return _unread_mask(call)
    if (n_queries, n_keys) == (axes.q_len, axes.k_len):
        return f"attention of {batch} sequences, not of {len(axes.queries)}"
    return f"attention from {axes.q_len} to {axes.k_len} tokens laid out as {n_queries} × {n_keys}"


def _unread_mask(call: Call) -> str | None:
    """The reason why the mask of an attention cannot be read, None if it can or there is none."""
    mask: Any = call.mask
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        return f"attention whose mask is of type {type(mask).__name__}, not a tensor"
    is_of_keys = call.level != "sdpa" and mask.ndim == 2  # flash-attention has a mask for padding only
    sizes = zip(reversed(mask.shape), reversed(call.shape), strict=False)
    if is_of_keys or mask.ndim > len(call.shape) or any(n not in (1, of) for n, of in sizes):
        return f"attention whose mask {list(mask.shape)} has other axes than batch, head, query and key"
    return None


def head_ranges(attention: Attention, chosen: tuple[int, ...] | None, n_parts: int) -> list[range]:
    """The heads that go together: alone where they are chosen, else in parts, none of which cuts a group that shares keys."""
    n_heads, n_kv_heads = attention.shape[1], attention.n_kv_heads
    if chosen is not None:
        return [range(head, head + 1) for head in chosen]
    step = n_heads // n_kv_heads * -(-n_kv_heads // max(1, n_parts))
    return [range(start, min(start + step, n_heads)) for start in range(0, n_heads, step)]


def mask_words(baseline: Baseline, axes: Axes) -> str:
    """The mask in words, judged by the number of keys that each query of the first text sees."""
    n, first = len(axes.queries[0].ids), axes.first_query(0)
    counts = baseline.visible[0, 0, first : first + n].long().tolist()
    most, n_keys = max(counts), len(axes.keys[0].ids)
    if counts == [min(i + 1, most) for i in range(n)]:
        return "causal" if most == n else f"causal, window {most}"
    return "all keys" if counts == [n_keys] * n else f"at most {most} keys"
