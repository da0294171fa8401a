"""The attentions of one pass of a model: each is reduced to statistics, or its matrices are kept,
while the model waits.

Memory holds one layer at a time. The caller runs the model. A captured `Call` becomes an
`Attention` (`masking.py`), which is reduced to the `LayerResults` of a record.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.attention.axes import Axes, Axis, make_statistics_request
from mhacli.attention.core import dtype_name
from mhacli.attention.devices import environment
from mhacli.attention.head_statistics import statistics_of
from mhacli.attention.scores import Attention, ScoredAttention, strongest_key
from mhacli.attention.taps import stage_timings, to_array
from mhacli.errors import MhaError
from mhacli.io.long_work import Progress, no_progress
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

from .capture import Call
from .layer_names import (
    LayerKey,
    config_of,
    dtype_of,
    rope_theta_of,
    without_attention,
)
from .load import device_of
from .masking import MaskCache


class LayerResults(NamedTuple):
    """The entry of a finished layer in the record, and the statistics and arrays of its heads."""

    layer: InspectedLayer
    heads: tuple[HeadStatistics, ...]
    arrays: dict[str, Tensor]


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
    _masks: MaskCache = field(default_factory=MaskCache)
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
        axes = axes_of(self.inputs, call.kind, self._dtype_of(call), call.device, positions)
        results = self._inspect(call, axes)
        if positions is not None and positions[1] is None and call.kind != "cross":
            results = self._from_first_key(call, axes, results)
        layer = replace(results.layer, positions=positions)
        self.results.append(results._replace(layer=layer))
        self.report_progress(min(1.0, len(self.results) / self.n_layers), layer.label)

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
        names = {dtype_name(dtype) for dtype in dtypes}
        return next((name for name in TOLERANCES if name in names), "float32")

    def _from_first_key(self, call: Call, axes: Axes, results: LayerResults) -> LayerResults:
        """The results with distances that count from the first key, which was in a cache: as behind
        queries of padding.
        """
        n = axes.keys.length - axes.queries.length
        queries = replace(axes.queries, length=axes.keys.length, side="left")
        keys = replace(axes.keys, side="left")
        padded = replace(axes, queries=queries, keys=keys, is_self=True)
        behind = self._inspect(call.behind(n), padded, keeps=False)
        arrays = results.arrays | {
            "profile": behind.arrays["profile"],
            "uniform_profile": behind.arrays["uniform_profile"],
            "distance": behind.arrays["distance"][..., n:],
        }
        return LayerResults(replace(results.layer, mask=behind.layer.mask), behind.heads, arrays)

    def _inspect(self, call: Call, axes: Axes, *, keeps: bool = True) -> LayerResults:
        """The statistics of all requested heads, the kept matrices, and the checks. On a CPU every
        thread takes its own heads.
        """
        request = make_statistics_request(axes, self.request.statistics, self.inputs.spans)
        attention, baseline = self._masks.attention_of(call, axes, request)
        if self.on_layer is not None:
            self.on_layer(call, attention)
        heads, arrays, survey = statistics_of(
            attention, request, baseline=baseline, run=self.request, peak_bytes=self.peak_bytes
        )
        if keeps:
            arrays |= self._matrices(call, attention)
        heads = tuple(replace(head, layer=call.layer, attention=call.title) for head in heads)
        first, n = axes.queries.first(0), len(axes.queries.ids[0])
        counts = baseline["visible"][0, 0, first : first + n].long().tolist()
        n_before = first - axes.keys.first(0)
        mask = _mask_words(counts, n_before, n_keys=len(axes.keys.ids[0]))
        return LayerResults(_layer(call, attention, mask=mask, survey=survey), heads, arrays)

    def _matrices(self, call: Call, attention: Attention) -> dict[str, Tensor]:
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
        kept = dict[str, Tensor]()
        for name in (*keep, "allowed", "strongest_key"):
            if name in matrices:
                full = matrices[name]
                is_whole = chosen is None or full.shape[1] == 1  # one row may stand for all heads
                kept[name] = (full if is_whole else full[:, list(chosen or ())]).cpu()
        return kept

    def record_of(
        self, model: Model, seconds: Mapping[str, float], *, device: str | None = None
    ) -> Record:
        """The record of the finished layers, at least one, with the entry of the `model`; `device`
        is as the user named it.
        """
        layers = tuple(results.layer for results in self.results)
        target = device_of(self.model)
        checks = [layer.survey.checks for layer in layers]
        n_doubtful = sum(not layer.verified for layer in layers)
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
            heads=HeadTable(head for results in self.results for head in results.heads),
            timings=stage_timings(seconds, [seconds]),
            self_check=SelfCheck.of_layers(
                checks,
                holds=model.identical_outputs is not False,
                doubt=f"{n_doubtful} of {len(layers)} attentions" if n_doubtful else "",
            ),
            environment=environment(target, device or str(target)),
            not_kept=tuple(self.not_kept),
            model=model,
            layers=layers,
            spans=self.inputs.spans,
            arrays={
                layer_prefix(i) + name: to_array(array)
                for i, results in enumerate(self.results)
                for name, array in results.arrays.items()
            },
        )

    def _config(self, model: Model, layers: tuple[InspectedLayer, ...]) -> Config:
        """The sizes and choices as a `Config`; those of each layer are in `layers`."""
        first = next((layer for layer in layers if layer.kind == "self"), layers[0])
        config = config_of(self.model)
        text = None if config is None else config.get_text_config(decoder=True)
        known = ("rope", "rope-interleaved", "alibi", "learned")
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


def _mask_words(counts: Sequence[int], n_before: int, n_keys: int) -> str:
    """A mask in words, by the number of keys that each query of a text sees, of `n_keys`. So many
    keys stand `n_before` the one at the place of the first query.
    """
    most = max(counts)
    if counts == [min(n_before + i + 1, most) for i in range(len(counts))]:
        return "causal" if most == n_before + len(counts) else f"causal, window {most}"
    return "all keys" if min(counts) == most == n_keys else f"at most {most} keys"


def _doubts(call: Call, attention: Attention, survey: HeadsSummary) -> Iterator[str]:
    """The reasons why a layer is not verified; none for most."""
    for check in survey.checks:
        if not check.ok:
            fault = "gives NaN or Inf" if check.error is None else f"differs by {check.error}"
            yield f"the check '{check.name}' {fault}"
        if check.rounding:
            size = f"{check.rounding:.3g}"
            yield f"scores are so large that rounding alone may change z by {size}"
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


def _layer(call: Call, attention: Attention, *, mask: str, survey: HeadsSummary) -> InspectedLayer:
    """The entry of a layer in the record, without its heads. It is verified unless there is a
    reason why not.
    """
    assert attention.z is not None, "the model made it"
    reasons = tuple(_doubts(call, attention, survey))
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
        unverified=reasons,
        self_check=SelfCheck.of_layers([survey.checks]),
        survey=survey,
        call=call.part + 1,
    )
