"""The attentions of one pass of a model: each is reduced to statistics, or its matrices are kept,
while the model waits.

Memory holds one layer at a time. The caller runs the model. A captured `Call` becomes an
`Attention` (`masking.py`), which is reduced to the `LayerResults` of a record.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mhacli.attention.axes import Axes, Axis, StatisticsRequest, make_statistics_request
from mhacli.attention.core import dtype_name
from mhacli.attention.devices import has_numbers
from mhacli.attention.environment import environment
from mhacli.attention.head_statistics import Measurements, Place
from mhacli.attention.scores import Attention, ScoredAttention, strongest_key
from mhacli.attention.taps import stage_timings, to_array
from mhacli.errors import MhaError
from mhacli.io.data import Array
from mhacli.io.long_work import Progress, no_progress
from mhacli.record.checks import SelfCheck, coarsest
from mhacli.record.exports import HeadTable
from mhacli.record.heads import UNMEASURED, HeadsSummary, HeadStatistics
from mhacli.record.record import (
    NOT_SEEN,
    InspectedLayer,
    Model,
    Positions,
    Record,
    SpanTokens,
    layer_prefix,
    texts_of,
)
from mhacli.run import KEPT, Run
from mhacli.settings import AttentionKind, Config, LayerChoice, PaddingSide
from mhacli.text.tokens import TokenSequence

from .capture import Call
from .layer_names import (
    LayerKey,
    config_of,
    dtype_of,
    positions_of,
    rope_theta_of,
    text_config_of,
    without_attention,
)
from .load import device_of
from .masking import MaskCache, Masking, as_attention

NO_NUMBERS = "not known without numbers"
"""What is said of a mask that is a tensor of the device meta."""


class MeasuredLayer(NamedTuple):
    """A layer whose attention was measured: its entry in the record, which lacks what follows from
    numbers, the texts on its axes, and the kept matrices. `number` is that of its measurement, None
    for shapes alone, and `from_first` that of one with distances that count from the first key, if
    there is one.
    """

    layer: InspectedLayer
    axes: Axes
    number: int | None
    from_first: int | None
    matrices: dict[str, Array]


class LayerResults(NamedTuple):
    """The entry of a finished layer in the record, and the statistics and arrays of its heads."""

    layer: InspectedLayer
    heads: tuple[HeadStatistics, ...]
    arrays: dict[str, Array]


def fields_of(results: Sequence[LayerResults]) -> dict[str, Any]:
    """The fields of a record that follow from its layers."""
    return {
        "layers": tuple(each.layer for each in results),
        "heads": HeadTable(head for each in results for head in each.heads),
        "arrays": {
            layer_prefix(number) + name: array
            for number, each in enumerate(results)
            for name, array in each.arrays.items()
        },
    }


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """The texts of a pass, and the keywords for the model. In an encoder-decoder, the encoder reads
    `context` and the decoder `sequences`. `spans` are named parts of the texts, `notes` are for the
    user.
    """

    sequences: tuple[TokenSequence, ...] = ()
    context: tuple[TokenSequence, ...] | None = None
    side: PaddingSide = "right"
    keywords: dict[str, Tensor] = field(default_factory=dict)
    spans: tuple[SpanTokens, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class PassInspection:
    """The attentions of one pass of `model` over the texts of `inputs`. `take` inspects each;
    `record_of` has the finished ones.

    `n_layers` is the expected number of attentions. `on_layer` is called with every requested
    attention before it is reduced. With `any_length`, an attention over something else than the
    texts is shown by positions. `found` are the attentions of the texts, requested or not; `unfit`
    has the reasons for the others.
    """

    model: Any
    inputs: ModelInputs
    request: Run
    n_layers: int = 1
    on_layer: Callable[[Call, Attention], None] | None = None
    report_progress: Progress = no_progress
    peak_bytes: int = 0
    any_length: bool = False
    measured: list[MeasuredLayer] = field(default_factory=list)
    found: list[LayerKey] = field(default_factory=list)
    unfit: dict[LayerKey, str] = field(default_factory=dict)
    not_kept: list[str] = field(default_factory=list)
    _masks: MaskCache = field(default_factory=MaskCache)
    _measurements: Measurements = field(default_factory=Measurements)
    _requests: dict[object, StatisticsRequest] = field(default_factory=dict)
    _kept_bytes: int = 0

    def take(self, call: Call) -> None:
        """Reduces one attention, if it is requested, while the model waits."""
        positions = self.positions_of(call)
        reason = call.unreadable
        if positions is not None and not self._shows_positions(call):
            batch, _, q_len, k_len = call.shape
            reason = (
                f"attention in a batch of {batch} from {q_len} to {k_len} positions, which are not"
                " the tokens of the texts"
            )
        if reason is not None:
            self.unfit.setdefault(call.place, reason)
            return
        self.found.append(call.place)
        if not self.request.model.includes(call.layer, call.kind):
            return
        request = self._request_of(call, positions)
        attention, number = self._measure(call, request)
        from_first = None
        if positions is not None and positions[1] is None and call.kind != "cross":
            from_first = self._measure_from_first(call, request)
        layer = _unmeasured(call, attention, positions)
        matrices = self._matrices(call, attention)
        self.measured.append(MeasuredLayer(layer, request.axes, number, from_first, matrices))
        n_done = len(self.measured)
        n_layers = max(n_done, self.n_layers)
        self.report_progress(f"layer {n_done} of {n_layers}", n_done / n_layers)

    @property
    def has_shapes_alone(self) -> bool:
        """Whether the model is on the device meta, which computes shapes and no numbers."""
        return not has_numbers(device_of(self.model))

    def positions_of(self, call: Call) -> Positions | None:
        """The sizes of the axes of an attention that are not the tokens of the texts; None if all
        are.
        """
        n_texts, _, *lengths = call.shape
        texts = texts_of(call.kind, self.inputs.sequences, self.inputs.context)
        are_tokens = [
            len(of_axis) == n_texts and max(len(text.ids) for text in of_axis) == n
            for of_axis, n in zip(texts, lengths, strict=True)
        ]
        if all(are_tokens):
            return None
        has_prefix = are_tokens == [True, False] and lengths[0] < lengths[1]
        is_of_one_length = len({len(text.ids) for text in texts[0]}) == 1
        if call.kind != "cross" and not (has_prefix and is_of_one_length):
            are_tokens = [False, False]
        q_len, k_len = (
            None if is_text else n for is_text, n in zip(are_tokens, lengths, strict=True)
        )
        return n_texts, q_len, k_len

    def _shows_positions(self, call: Call) -> bool:
        """Whether an attention over something else than the texts is shown, by positions. Without
        values it may be one of windows, whose axes stand in another order.
        """
        n_heads = getattr(config_of(self.model), "num_attention_heads", call.shape[1])
        return self.any_length and (call.v is not None or n_heads == call.shape[1])

    def _dtype_of(self, call: Call) -> str:
        """The dtype that decides tolerances: the coarser of the model's and that of the values,
        which autocast may change.
        """
        dtypes = {dtype_of(self.model)}
        if call.v is not None:
            dtypes.add(call.v.dtype)
        return coarsest(map(dtype_name, dtypes))

    def _request_of(self, call: Call, positions: Positions | None) -> StatisticsRequest:
        """What the statistics of an attention need of its texts, made once for all that read
        them.
        """
        inputs, dtype = self.inputs, self._dtype_of(call)
        key = (inputs, call.kind, dtype, call.device, positions)
        if key not in self._requests:
            axes = axes_of(*key)
            self._requests[key] = make_statistics_request(
                axes, self.request.statistics, inputs.spans
            )
        return self._requests[key]

    def _measure_from_first(self, call: Call, request: StatisticsRequest) -> int | None:
        """Measures an attention with distances that count from the first key, which was in a cache:
        as behind queries of padding.
        """
        axes = request.axes
        n = axes.keys.length - axes.queries.length
        if request not in self._requests:
            queries = replace(axes.queries, length=axes.keys.length, side="left")
            keys = replace(axes.keys, side="left")
            padded = replace(axes, queries=queries, keys=keys, is_self=True)
            chosen, spans = self.request.statistics, self.inputs.spans
            self._requests[request] = make_statistics_request(padded, chosen, spans)
        return self._measure(call.behind(n), self._requests[request])[1]

    def _measure(self, call: Call, request: StatisticsRequest) -> tuple[Attention, int | None]:
        """The attention of a call, and the number of its measurement; without its mask and None for
        shapes alone. On a CPU every thread takes its own heads.
        """
        baseline = None
        if self.has_shapes_alone:
            added = call.mask if call.bias is None else call.bias
            is_bias = added is not None and positions_of(self.model) in ("relative", "alibi")
            attention = as_attention(call, masking=Masking(None, added if is_bias else None, None))
        else:
            attention, baseline = self._masks.attention_of(call, request)
        if self.on_layer is not None:
            self.on_layer(call, attention)
        if baseline is None:
            return attention, None
        number = self._measurements.add(
            attention,
            request,
            baseline=baseline,
            run=self.request,
            place=Place(call.layer, call.title),
            peak_bytes=self.peak_bytes,
        )
        return attention, number

    def wait(self) -> None:
        """Waits until all that was measured is computed."""
        self._measurements.wait()

    def results(self) -> Iterator[LayerResults]:
        """The measured layers with their numbers. Raises `MhaError` where scores overflow."""
        results = self._measurements.results()
        for layer, axes, number, from_first, matrices in self.measured:
            if number is None:
                yield LayerResults(layer, (), {})
                continue
            heads, arrays, survey, visible = results[number]
            if from_first is not None:
                behind, n = results[from_first], axes.keys.length - axes.queries.length
                heads, visible = behind.heads, behind.visible[..., n:]
                names = ("profile", "uniform_profile")
                arrays |= {name: behind.arrays[name] for name in names}
                arrays["distance"] = behind.arrays["distance"][..., n:]
            first, length = axes.queries.first(0), len(axes.queries.ids[0])
            counts = visible[0, 0, first : first + length]
            mask = _mask_words(counts, first - axes.keys.first(0), len(axes.keys.ids[0]))
            reasons = (*_doubts(survey), *layer.unverified)
            layer = replace(
                layer,
                mask=mask,
                verified=not reasons,
                unverified=reasons,
                self_check=SelfCheck.of_layers([survey.checks]),
                survey=survey,
            )
            yield LayerResults(layer, heads, arrays | matrices)

    def _matrices(self, call: Call, attention: Attention) -> dict[str, Array]:
        """The matrices to keep of the requested heads: those that were chosen, or as many as fit
        for all layers.
        """
        matrix_bytes, limit = 4 * prod(attention.shape), self.request.keep_limit
        keep = self.request.keep
        if keep is None:
            keep = KEPT[: max(1, limit // max(1, matrix_bytes * self.n_layers))]
        if not keep:
            return {}
        if self._kept_bytes + matrix_bytes * len(keep) > limit:
            self.not_kept.append(f"matrices of {call.title}")
            return {}
        self._kept_bytes += matrix_bytes * len(keep)
        matrices = attention.matrices()
        if attention.v is not None and attention.z is not None:
            matrices["z"] = attention.z.clone()
        missing = [name for name in keep if name not in matrices]
        if missing and self.request.keep is not None:
            self.not_kept.append(f"{' and '.join(missing)} of {call.title}{NOT_SEEN}")
        matrices["strongest_key"] = strongest_key(matrices["pattern"])
        chosen = self.request.statistics.heads
        kept = dict[str, Array]()
        for name in (*keep, "allowed", "strongest_key"):
            if name in matrices:
                full = matrices[name]
                is_whole = chosen is None or full.shape[1] == 1  # one row may stand for all heads
                kept[name] = to_array(full if is_whole else full[:, list(chosen or ())])
        return kept

    def record_of(
        self, model: Model, seconds: Mapping[str, float], *, device: str | None = None
    ) -> Record:
        """The record of the finished layers, at least one, with the entry of the `model`; `device`
        is as the user named it.
        """
        of_layers = fields_of([*self.results()])
        layers: tuple[InspectedLayer, ...] = of_layers["layers"]
        target = device_of(self.model)
        checks = [layer.survey.checks for layer in layers]
        n_doubtful = len([layer for layer in layers if not layer.verified])
        names = [
            "hand-written" if layer.captured_by == "softmax" else model.implementation
            for layer in layers
        ]
        model = replace(
            model,
            n_layers=model.n_layers or len({layer for _, layer in (*self.found, *self.unfit)}),
            path_inspected=f"{' and '.join(dict.fromkeys(names))} (unchanged)",
            without=without_attention(config_of(self.model), self.found, self.unfit),
        )
        return Record(
            command=(),
            config=self._config(model, layers),
            sequences=self.inputs.sequences,
            context=self.inputs.context,
            vocabulary=(),
            trace=(),
            timings=stage_timings(seconds, [seconds]),
            self_check=SelfCheck.of_layers(
                checks,
                holds=model.identical_outputs is not False,
                doubt=f"{n_doubtful} of {len(layers)} attentions" if n_doubtful else "",
            ),
            environment=environment(target, device or str(target)),
            not_kept=tuple(self.not_kept),
            model=model,
            spans=self.inputs.spans,
            **of_layers,
        )

    def _config(self, model: Model, layers: tuple[InspectedLayer, ...]) -> Config:
        """The sizes and choices as a `Config`; those of each layer are in `layers`."""
        first = next((layer for layer in layers if layer.kind == "self"), layers[0])
        config = config_of(self.model)
        text = None if config is None else text_config_of(config)
        known = ("rope", "rope-interleaved", "alibi", "learned")
        positions = model.positions if model.positions in known else "none"
        config_of_first = Config(
            d_model=int(getattr(text, "hidden_size", 0) or first.n_heads * first.d_v),
            n_heads=first.n_heads,
            n_kv_heads=first.n_kv_heads,
            d_head=first.d_head,
            d_v=first.d_v,
            positions=positions,  # type: ignore[arg-type]
            causal=first.mask.startswith("causal"),
            padding=self.inputs.side,
            scale=first.scale,
            softcap=first.softcap,
            dtype=model.dtype,  # type: ignore[arg-type]
            max_positions=model.max_positions or Config.max_positions,
            rope_theta=Config.rope_theta if config is None else rope_theta_of(config, first.layer),
        ).resolved()
        if self.has_shapes_alone:  # no computation has the device meta
            return config_of_first
        # which may be one that no layer of mha can have
        return replace(config_of_first, device=str(device_of(self.model)))


# ---------------------------------------------------------------------------------- nothing to show


def nothing_seen(
    name: str,
    chosen: Sequence[LayerChoice] | None,
    met: Iterable[LayerKey],
    unfit: Mapping[LayerKey, str],
) -> MhaError:
    """The error where no requested attention of a model could be shown: others were met, or those
    requested are unfit.
    """
    if unfit:
        words = unfit_words(unfit)
        return MhaError(
            f"no attention of {name} could be shown: {words}",
            hint="make a pass of each step with use_cache=False"
            if "beam search" in words
            else None,
            code="not-tokens",
        )
    if chosen is not None and (layers := sorted({layer for _, layer in met})):
        return MhaError(
            f"none of the layers {layer_words(chosen)} was seen in {name}",
            hint="layers with attention: " + ", ".join(map(str, layers)),
            code="no-layer",
        )
    return MhaError(
        f"no attention was seen in {name}",
        hint=(
            "mha captures scaled_dot_product_attention everywhere, and softmax(q kᵀ) v of torch's"
            " functions in modules whose class or name contains attn or atten, but not"
            " flex_attention, compiled functions or kernels of other libraries; layers without a"
            " matrix of queries × keys, such as state-space layers, have nothing to show"
        ),
        code="no-attention",
    )


def unfit_words(unfit: Mapping[LayerKey, str]) -> str:
    """The first of the attentions that cannot be shown, with its reason."""
    (kind, layer), reason = next(iter(unfit.items()))
    return f"layer {layer} ({kind}) has {reason}"


def layer_words(layers: Sequence[LayerChoice]) -> str:
    """Layers as a user chooses them."""
    return ", ".join(f"{kind}.{n}" if kind else str(n) for kind, n in layers)


# --------------------------------------------------------------------------- the tokens of the axes


def axes_of(
    inputs: ModelInputs,
    kind: AttentionKind,
    dtype: str,
    device: torch.device,
    positions: Positions | None = None,
) -> Axes:
    """The texts on the query and key axes of an attention of this kind, or its positions."""
    queries, keys = texts_of(kind, inputs.sequences, inputs.context, positions)
    ids = {
        token: i
        for text in (*queries, *keys)
        for token, i in zip(text.tokens, text.ids, strict=True)
    }
    return Axes(
        queries=Axis.of(queries, inputs.side, device),
        keys=Axis.of(keys, inputs.side, device),
        is_self=kind != "cross" and (positions is None or positions[1] == positions[2]),
        id_of=lambda word: ids.get(word, -1),
        dtype=dtype,
    )


# ---------------------------------------------------------------------------------------- one layer


def _mask_words(counts: Array, n_before: int, n_keys: int) -> str:
    """A mask in words, by the number of keys that each query of a text sees, of `n_keys`. So many
    keys stand `n_before` the one at the place of the first query.
    """
    most = int(counts.max())
    if np.array_equal(counts, np.minimum(n_before + 1 + np.arange(len(counts)), most)):
        return "causal" if most == n_before + len(counts) else f"causal, window {most}"
    return "all keys" if counts.min() == most == n_keys else f"at most {most} keys"


def _doubts(survey: HeadsSummary) -> Iterator[str]:
    """The reasons in its checks why a layer is not verified; none for most."""
    for check in survey.checks:
        if not check.ok:
            fault = "gives NaN or Inf" if check.error is None else f"differs by {check.error}"
            yield f"the check '{check.name}' {fault}"
        if check.rounding:
            size = f"{check.rounding:.3g}"
            yield f"scores are so large that rounding alone may change z by {size}"


def _doubts_of_call(call: Call, attention: Attention) -> Iterator[str]:
    """The reasons in its call why a layer cannot be verified."""
    if call.is_changed:
        yield "the weights were changed after the softmax, and do not follow from the scores"
    for name in call.unknown:
        if name != "dropout":
            yield f"the keyword {name} is not understood"
    if "dropout" in call.unknown:
        yield (
            "dropout was active: the weights are those before dropout, but the layer's output was"
            " computed after it"
        )
    elif attention.v is None:
        yield "only the pattern was captured, not the values"


def _unmeasured(call: Call, attention: Attention, positions: Positions | None) -> InspectedLayer:
    """The entry of a layer in the record, without its heads and what follows from numbers."""
    assert attention.z is not None, "the model made it"
    d_v = attention.z.shape[3]
    scored = attention if isinstance(attention, ScoredAttention) else None
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
        mask="causal" if call.causal else NO_NUMBERS,
        bias=scored is not None and scored.bias is not None,
        sinks=attention.sink_logits is not None,
        verified=False,
        unverified=tuple(_doubts_of_call(call, attention)),
        self_check=SelfCheck(error=None, tolerance=0.0, ok=None),
        survey=UNMEASURED,
        call=call.part + 1,
        positions=positions,
    )
