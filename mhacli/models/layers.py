"""The attentions of one pass of a model: each is reduced to statistics, or its matrices are kept,
while the model waits.

Memory holds one layer at a time. The caller runs the model. A captured `Call` becomes an
`Attention`, and that the `LayerResults` of which a record is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.weak import WeakIdRef

from mhacli.attention import masks
from mhacli.attention.axes import Axes, Axis, StatisticsRequest, make_statistics_request
from mhacli.attention.devices import environment
from mhacli.attention.head_statistics import statistics_of
from mhacli.attention.masks import Mask
from mhacli.attention.scores import (
    Attention,
    GivenAttention,
    ScoredAttention,
    strongest_key,
    tensor_bias,
)
from mhacli.attention.statistics import PassResults, make_baseline
from mhacli.attention.taps import stage_timings, to_array
from mhacli.errors import MhaError
from mhacli.io.long_work import Progress, no_progress
from mhacli.models.capture import FORBIDDING, Call
from mhacli.models.layer_names import (
    LayerKey,
    config_of,
    dtype_of,
    rope_theta_of,
    without_attention,
)
from mhacli.models.load import device_of
from mhacli.record.checks import TOLERANCES, SelfCheck
from mhacli.record.exports import HeadTable
from mhacli.record.heads import HeadsSummary, HeadStatistics
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
from mhacli.settings import Config, PaddingSide
from mhacli.text.tokens import AttentionKind, LayerChoice, TokenSequence

_KEPT_MASKS = 4
"""The number of masks kept: a model has one, or two with and without a window; an encoder-decoder
has one per kind of attention. Other models make a tensor as large as the pattern for every
layer."""


LayerResults = tuple[InspectedLayer, tuple[HeadStatistics, ...], Mapping[str, Tensor]]
"""The entry of a finished layer in the record, and the statistics and arrays of its heads."""


@dataclass(frozen=True)
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
    results: list[LayerResults] = field(default_factory=list)
    found: list[LayerKey] = field(default_factory=list)
    unfit: dict[LayerKey, str] = field(default_factory=dict)
    not_kept: list[str] = field(default_factory=list)
    _known: dict[object, tuple[Masking, PassResults]] = field(default_factory=dict)
    _kept_bytes: int = 0

    def take(self, call: Call) -> None:
        """Reduces one attention, if it is requested, while the model waits."""
        place, positions = (call.kind, call.layer), _positions_of_axes(call, self.inputs)
        reason, n_heads = (
            call.unread_mask,
            getattr(config_of(self.model), "num_attention_heads", call.shape[1]),
        )
        is_other = (
            call.v is None and n_heads != call.shape[1]
        )  # such as windows, whose axes stand in another order
        is_shown = self.any_length and call.shape[0] >= len(self.inputs.sequences) and not is_other
        if positions is not None and not is_shown:
            batch, _, q_len, k_len = call.shape
            reason = (
                f"attention in a batch of {batch} from {q_len} to {k_len} positions, which are not"
                " the tokens of the texts"
            )
        if reason is not None:
            self.unfit.setdefault(place, reason)
            return
        self.found.append(place)
        if self.request.model.includes(call.layer, call.kind):
            # the coarser of the model's dtype and that of the values, which autocast may change,
            # decides tolerances
            dtypes = {dtype_of(self.model), *([] if call.v is None else [call.v.dtype])}
            names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
            dtype = next((name for name in TOLERANCES if name in names), "float32")
            axes = axes_of(self.inputs, call.kind, dtype, call.device, positions)
            layer, heads, arrays = self._inspect(call, axes)
            if positions is not None and positions[1] is None and call.kind != "cross":
                # distances count from the first key, which was in a cache: as behind queries of
                # padding
                n = axes.keys.length - axes.queries.length
                queries = replace(axes.queries, length=axes.keys.length, side="left")
                padded = replace(
                    axes, queries=queries, keys=replace(axes.keys, side="left"), is_self=True
                )
                behind, heads, others = self._inspect(call.behind(n), padded, keeps=False)
                arrays = {
                    **arrays,
                    **{name: others[name] for name in ("profile", "uniform_profile")},
                }
                layer, arrays["distance"] = (
                    replace(layer, mask=behind.mask),
                    others["distance"][..., n:],
                )
            self.results.append((replace(layer, positions=positions), heads, arrays))
            self.report_progress(min(1.0, len(self.results) / self.n_layers), layer.label)

    def _inspect(self, call: Call, axes: Axes, *, keeps: bool = True) -> LayerResults:
        """The statistics of all requested heads, the kept matrices, and the checks. On a CPU every
        thread takes its own heads.
        """
        request = make_statistics_request(axes, self.request.statistics, self.inputs.spans)
        attention, baseline = self._masked(call, axes, request)
        if self.on_layer is not None:
            self.on_layer(call, attention)
        heads, arrays, survey = statistics_of(
            attention, request, baseline=baseline, run=self.request, peak_bytes=self.peak_bytes
        )
        if keeps:
            arrays |= self._matrices(call, attention)
        heads = tuple(replace(head, layer=call.layer, attention=call.title) for head in heads)
        n, first = len(axes.queries.ids[0]), axes.queries.first(0)
        # the keys that each query of the first text sees
        counts = baseline["visible"][0, 0, first : first + n].long().tolist()
        most, n_keys, n_before = max(counts), len(axes.keys.ids[0]), first - axes.keys.first(0)
        mask = "all keys" if counts == [n_keys] * n else f"at most {most} keys"
        if counts == [min(n_before + i + 1, most) for i in range(n)]:
            mask = "causal" if most == n_before + n else f"causal, window {most}"
        return _layer(call, attention, mask=mask, survey=survey), heads, arrays

    def _masked(
        self, call: Call, axes: Axes, request: StatisticsRequest
    ) -> tuple[Attention, PassResults]:
        """The attention of a call, and uniform attention under its mask, made once for successive
        layers that share the mask.
        """
        real = axes.queries.filled(axes.queries.places, -1) >= 0
        n_first = len(axes.queries.ids[0])
        key = (
            call.kind,
            call.causal,
            call.device,
            call.shape,
            n_first,
            state_of(call.mask),
            state_of(call.bias),
        )
        known = None if call.q is None else self._known.get(key)
        masking = None if call.q is None else masking_of(call, real) if known is None else known[0]
        attention = as_attention(call, real, masking)
        baseline = make_baseline(attention, request) if known is None else known[1]
        if masking is not None:
            self._known = dict([*self._known.items(), (key, (masking, baseline))][-_KEPT_MASKS:])
        has_other_weights = "dropout" in call.unknown  # of which z is made
        return replace(attention, v=None) if has_other_weights else attention, baseline

    def _matrices(self, call: Call, attention: Attention) -> dict[str, Tensor]:
        """The matrices to keep of the requested heads: those that were chosen, or as many as fit
        for all layers.
        """
        matrix_bytes, keep, limit = (
            4 * prod(attention.shape),
            self.request.keep,
            self.request.keep_limit,
        )
        if keep is None:
            keep = KEPT[: max(1, limit // max(1, matrix_bytes * self.n_layers))]
        if not keep:
            return {}
        if self._kept_bytes + matrix_bytes * len(keep) > limit:
            self.not_kept.append(f"matrices of {call.title}")
            return {}
        self._kept_bytes += matrix_bytes * len(keep)
        made = attention.matrices()
        if attention.v is not None and attention.z is not None:
            made["z"] = attention.z.clone()
        missing = [name for name in keep if name not in made]
        if missing and self.request.keep is not None:
            self.not_kept.append(f"{' and '.join(missing)} of {call.title}{NOT_SEEN}")
        made["strongest_key"] = strongest_key(made["pattern"])
        heads = (
            slice(None)
            if self.request.statistics.heads is None
            else list(self.request.statistics.heads)
        )
        kept = {name: made[name] for name in (*keep, "allowed", "strongest_key") if name in made}
        return {
            name: (full if full.shape[1] == 1 else full[:, heads]).cpu()
            for name, full in kept.items()
        }

    def record_of(
        self, model: Model, seconds: Mapping[str, float], *, device: str | None = None
    ) -> Record:
        """The record of the finished layers, of which there must be one at least, with the entry of
        the `model`; `device` is as the user named it.
        """
        layers, on = tuple(layer for layer, *_ in self.results), device_of(self.model)
        checks = [layer.survey.checks for layer in layers]
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
            heads=HeadTable(head for _, heads, _ in self.results for head in heads),
            timings=stage_timings(seconds, [seconds]),
            self_check=SelfCheck.of_layers(checks, holds=model.identical_outputs is not False),
            environment=environment(on, device or str(on)),
            not_kept=tuple(self.not_kept),
            model=model,
            layers=layers,
            spans=self.inputs.spans,
            arrays={
                layer_prefix(i) + name: to_array(array)
                for i, (*_, arrays) in enumerate(self.results)
                for name, array in arrays.items()
            },
        )

    def _config(self, model: Model, layers: tuple[InspectedLayer, ...]) -> Config:
        """The sizes and choices as a `Config`; those of each layer are in `layers`."""
        first = next((layer for layer in layers if layer.kind == "self"), layers[0])
        config, known = config_of(self.model), ("rope", "rope-interleaved", "alibi", "learned")
        text = None if config is None else config.get_text_config(decoder=True)
        positions = model.positions if model.positions in known else "none"
        return Config(
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
            device=str(device_of(self.model)),
            max_positions=model.max_positions or Config.max_positions,
            rope_theta=Config.rope_theta if config is None else rope_theta_of(config, first.layer),
        ).resolved()


# ----------------------------------------------------------------------- an attention to be reduced


Masking = tuple[Mask | None, Float[Tensor, "..."] | None, Bool[Tensor, "batch head query"] | None]
"""The mask of a call, the bias added to its scores, and the queries that see a key, None if all
do."""


def state_of(tensor: Tensor | None) -> object:
    """What stands for a tensor and its numbers: a reference that does not keep it alive, and the
    number of writes in place, which inference mode does not count. There a tensor is never known.
    """
    if tensor is None:
        return None
    return object() if tensor.is_inference() else (WeakIdRef(tensor), tensor._version)


def masking_of(call: Call, real: Bool[Tensor, "batch query"]) -> Masking:
    """The mask of a call, and the bias added to its scores; `real` marks the queries that are not
    padding.
    """
    rules: list[Mask] = [masks.causal()] if call.causal else []
    sees: Tensor | None = None
    added: list[Tensor] = []
    for tensor in (call.mask, call.bias):
        if tensor is None:
            continue
        keep = tensor.clone() if tensor.dtype == torch.bool else tensor > FORBIDDING
        keep = _alike(keep.reshape((1,) * (4 - keep.ndim) + tuple(keep.shape)))
        if not bool(keep.all()):
            rules.append(masks.from_tensor(keep))
            sees = keep.any(dim=-1) if sees is None else sees & keep.any(dim=-1)
        if tensor.dtype != torch.bool:
            rest = tensor.masked_fill(~keep, 0.0)
            added += (
                [rest.to(torch.promote_types(rest.dtype, torch.float32))]
                if bool(rest.any())
                else []
            )
    if not bool(real.all()):
        rules.append(masks.from_tensor(real[:, None, :, None]))
    return (
        masks.both(*rules) if rules else None,
        sum(added[1:], start=added[0]) if added else None,
        sees,
    )


def as_attention(
    call: Call, real: Bool[Tensor, "batch query"] | None = None, masking: Masking | None = None
) -> Attention:
    """A captured attention with all heads, ready for evaluation; `real` marks the queries that are
    not padding, None if none is, and a `masking` is that of another call with the same mask. The
    output of a query that sees no key is zeros, whatever the model's code makes of it. A cell of a
    captured pattern is masked if its weight is 0 because of a very low score; weights in 16 bits,
    whose rows do not sum to 1, are computed again from the scores.
    """
    if real is None:
        real = torch.ones(call.shape[0], call.shape[2], dtype=torch.bool, device=call.device)
    if call.q is not None:
        (q, k, v), (allowed, bias, sees) = call.qkv, masking or masking_of(call, real)
        is_of_heads = call.sinks is not None and call.sinks.ndim == 1
        return ScoredAttention(
            q=q.contiguous(),  # each is read many times
            k=k.contiguous(),
            v=v,
            z=(
                call.z
                if call.z is None or sees is None
                else call.z.masked_fill(~sees[..., None], 0.0)
            ),
            scale=call.scale,
            softcap=call.softcap,
            bias=None if bias is None else tensor_bias(bias),
            allowed=allowed,
            kernel=call.kernel,
            sink_logits=(
                call.sinks.reshape(1, -1, 1)
                if call.sinks is not None and is_of_heads
                else call.sinks
            ),
        )
    pattern, scores = call.pattern, call.scores
    assert pattern is not None
    assert scores is not None
    hidden = (pattern == 0) & (scores <= FORBIDDING)
    keep = _alike(~hidden) & real[:, None, :, None]
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(
        hidden, -torch.inf
    )
    weights = pattern if pattern.dtype in (torch.float32, torch.float64) else wide.softmax(dim=-1)
    has_values = call.v is not None and call.z is not None
    return GivenAttention(
        weights=weights.masked_fill(~keep, 0.0),
        scores=scores,
        allowed=masks.from_tensor(keep),
        v=call.v if has_values else None,
        z=call.z if has_values else wide.new_zeros(*wide.shape[:3], 1),
        kernel="softmax",
    )


def _alike(keep: Bool[Tensor, "batch head query key"]) -> Bool[Tensor, "batch _head query key"]:
    """The mask with a head axis of 1 if it is equal for all heads."""
    return keep[:, :1] if keep.shape[1] > 1 and bool((keep == keep[:, :1]).all()) else keep


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
        hint = "make a pass of each step with use_cache=False" if "beam search" in words else None
        return MhaError(
            f"no attention of {name} could be shown: {words}", hint=hint, code="not-tokens"
        )
    if chosen is not None and (layers := sorted({layer for _, layer in met})):
        hint = "layers with attention: " + ", ".join(map(str, layers))
        return MhaError(
            f"none of the layers {layer_words(chosen)} was seen in {name}",
            hint=hint,
            code="no-layer",
        )
    hint = (
        "mha captures scaled_dot_product_attention everywhere, and softmax(q kᵀ) v of torch's"
        " functions in modules whose class or name contains attn or atten, but not flex_attention,"
        " compiled functions or kernels of other libraries; layers without a matrix of queries ×"
        " keys, such as state-space layers, have nothing to show"
    )
    return MhaError(f"no attention was seen in {name}", hint=hint, code="no-attention")


def unfit_words(unfit: Mapping[LayerKey, str]) -> str:
    """The first of the attentions that cannot be shown, with its reason."""
    (kind, layer), reason = next(iter(unfit.items()))
    return f"layer {layer} ({kind}) has {reason}"


def layer_words(layers: Sequence[LayerChoice]) -> str:
    """Layers as a user chooses them."""
    return ", ".join(f"{kind}.{n}" if kind else str(n) for kind, n in layers)


# --------------------------------------------------------------------------- the tokens of the axes


def _positions_of_axes(call: Call, inputs: ModelInputs) -> Positions | None:
    """The sizes of the axes of an attention that are not the tokens of the texts; None if all
    are.
    """
    n_texts, _, *lengths = call.shape
    texts = texts_of(call.kind, inputs.sequences, inputs.context)
    are_tokens = [
        len(of_axis) == n_texts and max(len(text.ids) for text in of_axis) == n
        for of_axis, n in zip(texts, lengths, strict=True)
    ]
    if all(are_tokens):
        return None
    has_prefix = (
        are_tokens[0] and lengths[0] < lengths[1] and len({len(text.ids) for text in texts[0]}) == 1
    )
    if call.kind != "cross" and not has_prefix:
        are_tokens = [False, False]
    q_len, k_len = (None if is_text else n for is_text, n in zip(are_tokens, lengths, strict=True))
    return n_texts, q_len, k_len


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


def _layer(call: Call, attention: Attention, *, mask: str, survey: HeadsSummary) -> InspectedLayer:
    """The entry of a layer in the record, without its heads. It is verified unless there is a
    reason why not.
    """
    assert attention.z is not None, "the model made it"
    reasons = list[str]()
    for check in survey.checks:
        if not check.ok:
            fault = "gives NaN or Inf" if check.error is None else f"differs by {check.error}"
            reasons.append(f"the check '{check.name}' {fault}")
        if check.rounding:
            reasons.append(
                f"scores are so large that rounding alone may change z by {check.rounding:.3g}"
            )
    reasons += [
        f"the keyword {name} is not understood" for name in call.unknown if name != "dropout"
    ]
    if "dropout" in call.unknown:
        reasons.append(
            "dropout was active: the weights are those before dropout, but the layer's output was"
            " computed after it"
        )
    elif attention.v is None:
        reasons.append("only the pattern was captured, not the values")
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
        mask=mask,
        bias=scored is not None and scored.bias is not None,
        sinks=attention.sink_logits is not None,
        verified=not reasons,
        unverified=tuple(reasons),
        self_check=SelfCheck.of_layers([survey.checks]),
        survey=survey,
        call=call.part + 1,
    )
