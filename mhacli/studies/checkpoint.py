"""The attention of a real checkpoint: one pass of the path that always runs, every layer looked at as it is computed.

Each layer is reduced to statistics, or its matrices are kept, and then it is gone: memory holds one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from mhacli.attention.stats import Asked, strongest_key
from mhacli.config import DEFAULT_KEEP_LIMIT, Config
from mhacli.errors import MhaError
from mhacli.heads import HeadStatistics, Survey, Wanted
from mhacli.layers import AttentionKind, Generated, InspectedLayer, LayerChoice, Model, SpanTokens
from mhacli.models.calls import Call, ScoredCall, SoftmaxCall
from mhacli.models.capture import captured
from mhacli.models.inputs import ModelInputs
from mhacli.models.load import Loaded
from mhacli.models.places import most_positions, n_layers_of, place_of, positions_of, without_attention
from mhacli.models.sight import KnownMasks, Sight, see, whole
from mhacli.parts import SelfCheck, Timing
from mhacli.record import Record, layer_prefix
from mhacli.studies.axes import Axes
from mhacli.studies.capture import to_array
from mhacli.studies.devices import environment
from mhacli.studies.looks import Attention, Look, joined_arrays, look, profile_steps, uniform_arrays
from mhacli.studies.statistics import Baseline, make_asked, make_baseline

COMPARED_WHOLE, COMPARED_LEN = 1024, 256
"""Texts up to this length are run a second time without inspection, whole; of longer ones so many first tokens, twice."""


@dataclass(frozen=True)
class ModelWanted:
    """What to find out of a checkpoint: of which `layers` (None: all), which matrices to `keep` of each within `keep_limit`
    bytes in all, what to ask of the heads, the tokens of named `spans`, and whether outputs are compared with those of a pass
    without inspection."""

    heads: Wanted
    layers: tuple[LayerChoice, ...] | None = None
    keep: tuple[str, ...] = ()
    keep_limit: int = DEFAULT_KEEP_LIMIT
    spans: tuple[SpanTokens, ...] = ()
    compare: bool = True

    def is_wanted(self, layer: int, kind: AttentionKind) -> bool:
        """Whether a layer is asked for."""
        return self.layers is None or any(n == layer and k in (None, kind) for k, n in self.layers)


@dataclass(frozen=True)
class SeenLayer:
    """A layer that is done: what is said of it, of its heads, and its arrays."""

    said: InspectedLayer
    heads: tuple[HeadStatistics, ...]
    arrays: Mapping[str, Tensor]


@dataclass
class CheckpointRun:
    """A look at a checkpoint. `run` does it; `record` tells the layers that are finished."""

    loaded: Loaded
    inputs: ModelInputs
    wanted: ModelWanted
    device_asked: str = "auto"
    generated: Generated | None = None
    seen: list[SeenLayer] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    identical: bool | None = None
    compared_len: int = 0
    not_kept: list[str] = field(default_factory=list)
    _masks: KnownMasks = field(default_factory=KnownMasks)
    _baselines: dict[object, Baseline] = field(default_factory=dict)
    _found: list[int] = field(default_factory=list)
    _kept_bytes: int = 0
    _tell: Callable[[float, str], None] = lambda share, doing: None

    @property
    def n_layers(self) -> int:
        """How many layers will be told, as far as the config says."""
        return len(self.wanted.layers) if self.wanted.layers is not None else max(1, n_layers_of(self.loaded.config))

    @torch.no_grad()
    def run(self, tell: Callable[[float, str], None] = lambda share, doing: None) -> None:
        """One pass with every layer looked at, and the passes that show that looking changes nothing."""
        began = perf_counter()
        self._tell = tell
        tell(0.0, "the first layer")
        outputs = self._pass(self.inputs.keywords, self._take)
        self.seconds["pass and statistics"] = perf_counter() - began
        if not self.seen:
            raise self._nothing_seen()
        if self.wanted.compare:
            began = perf_counter()
            self._compare(outputs)
            self.seconds["comparison"] = perf_counter() - began

    def _pass(self, keywords: Mapping[str, Tensor], take: Callable[[Call], None] | None) -> Mapping[str, Any]:
        """The outputs of the model, watched by `take` or by nobody."""
        model, batch = self.loaded.model, len(self.inputs.sequences)
        if take is None:
            return dict(model(**keywords, use_cache=False)) if _takes_cache(model) else dict(model(**keywords))
        with captured(model, take, batch=batch):
            return self._pass(keywords, None)

    def _compare(self, outputs: Mapping[str, Any]) -> None:
        """Whether the same bits come out without inspection: of the whole text, or where it is long of its first tokens."""
        longest = max(tensor.shape[1] for tensor in self.inputs.keywords.values())
        self.compared_len = longest if longest <= COMPARED_WHOLE else COMPARED_LEN
        keywords = self.inputs.beginning(self.compared_len)
        watched = outputs if longest <= COMPARED_WHOLE else self._pass(keywords, lambda call: None)
        self.identical = _are_identical(watched, self._pass(keywords, None))

    def _nothing_seen(self) -> MhaError:
        family, asked = self.loaded.config.model_type, self.wanted.layers
        if self._found and asked is not None:
            return MhaError(
                f"layer must be one of those with attention, {', '.join(map(str, sorted(set(self._found))))}, got "
                f"{', '.join(str(n) for _, n in asked)}",
                code="no-layer",
            )
        return MhaError(
            f"the model must compute attention in a way that can be seen, got none in {family}",
            hint="layers without a matrix of queries × keys, such as state spaces, cannot be inspected",
            code="no-attention",
        )

    def _take(self, call: Call) -> None:
        """Looks at one attention, if it is asked for, while the model waits."""
        layer, kind = place_of(call.name, call.repeat, is_pair=bool(self.loaded.config.is_encoder_decoder))
        self._found.append(layer)
        if not self.wanted.is_wanted(layer, kind):
            return
        self.seen.append(self._look(call, layer, kind))
        self._tell(min(1.0, len(self.seen) / self.n_layers), self.seen[-1].said.label)

    def axes(self, kind: AttentionKind) -> Axes:
        """Whose tokens stand on the axes of an attention of this kind."""
        decoder, encoder = self.inputs.sequences, self.inputs.context or self.inputs.sequences
        queries, keys = (
            (encoder if kind == "encoder" else decoder),
            (encoder if kind in ("encoder", "cross") else decoder),
        )
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

    def _look(self, call: Call, layer: int, kind: AttentionKind) -> SeenLayer:
        """Statistics of all heads that are asked for, the matrices that are kept, and the checks."""
        axes, wanted = self.axes(kind), self.wanted.heads
        sight = see(call, axes.real_queries(), self._masks)
        _require_axes(sight, axes, call)
        asked = make_asked(axes, wanted.patterns, sink_tokens=wanted.sink_tokens, spans=self._spans(kind))
        baseline = self._baseline(call, sight, kind, asked)
        looks = [
            look(
                axes,
                attention_of_heads(call, sight, heads),
                asked=asked,
                sink_share=wanted.sink_share,
                baseline=baseline,
                kept=wanted.kept,
                allow_nonfinite=wanted.allow_nonfinite,
            )
            for heads in _head_ranges(sight.shape[1], wanted.heads)
        ]
        heads = tuple(replace(head, layer=layer, attention=call.name) for done in looks for head in done.said)
        arrays = joined_arrays(looks, uniform_arrays(baseline, axes, asked)) | self._matrices(call, sight)
        said = self._said(call, sight, looks, axes, asked, mask_words(baseline, axes))
        return SeenLayer(replace(said, layer=layer, kind=kind), heads, arrays)

    def _spans(self, kind: AttentionKind) -> tuple[tuple[SpanTokens, ...], tuple[SpanTokens, ...]] | None:
        """The named parts, which are parts of the text itself: attention to or of an encoder has none."""
        is_of_text = kind in ("self", "decoder") or (kind == "encoder" and self.inputs.context is None)
        return (self.wanted.spans, self.wanted.spans) if self.wanted.spans and is_of_text else None

    def _baseline(self, call: Call, sight: Sight, kind: AttentionKind, asked: Asked) -> Baseline:
        """Uniform attention under the mask of a call: asked once for all layers that share it."""
        if not isinstance(call, ScoredCall):
            return make_baseline(sight.pattern, asked)
        key = (kind, id(sight.allowed))  # the mask stays alive in `_masks`
        if key not in self._baselines:
            self._baselines[key] = make_baseline(sight.pattern, asked)
        return self._baselines[key]

    def _matrices(self, call: Call, sight: Sight) -> dict[str, Tensor]:
        """The matrices of this layer that are to be kept, as far as the limit goes."""
        if not self.wanted.keep:
            return {}
        batch, n_heads, n_queries, n_keys = sight.shape
        n_bytes = 4 * batch * n_heads * n_queries * n_keys * len(self.wanted.keep)
        if self._kept_bytes + n_bytes > self.wanted.keep_limit:
            self.not_kept.append(f"matrices of {call.name}")
            return {}
        self._kept_bytes += n_bytes
        made = whole(call, sight)
        z = call.z if isinstance(call, (ScoredCall, SoftmaxCall)) else None
        if z is not None:
            made["z"] = z
        kept = {name: made[name].cpu() for name in (*self.wanted.keep, "allowed") if name in made}
        return kept | {"strongest_key": strongest_key(made["pattern"]).cpu()}

    def _said(self, call: Call, sight: Sight, looks: list[Look], axes: Axes, asked: Asked, mask: str) -> InspectedLayer:
        """What is said of a layer besides its heads. Its number and kind are filled in later."""
        wanted = self.wanted.heads
        checks = tuple(
            max(same, key=lambda c: _strain(c.error, c.tolerance))
            for same in zip(*(d.checks for d in looks), strict=True)
        )
        reasons = [f"the check '{check.name}' differs by {check.error}" for check in checks if not check.ok]
        reasons += [f"the keyword {name} is not understood" for name in call.unknown]
        is_scored = isinstance(call, ScoredCall)
        z = call.z if isinstance(call, (ScoredCall, SoftmaxCall)) else None
        if z is None:
            reasons.append("only the pattern was seen, not the values")
        error, tolerance = checks[-1].error, checks[-1].tolerance
        _, n_heads, q_len, k_len = sight.shape
        return InspectedLayer(
            layer=0,
            name=call.name,
            kind="self",
            captured_by=call.rung,
            kernel=sight.kernel,
            n_heads=n_heads,
            n_kv_heads=call.k.shape[1] if isinstance(call, ScoredCall) else n_heads,
            d_head=call.q.shape[3] if isinstance(call, ScoredCall) else z.shape[3] if z is not None else 1,
            d_v=z.shape[3] if z is not None else 1,
            scale=call.scale if isinstance(call, ScoredCall) else None,
            softcap=call.softcap if isinstance(call, ScoredCall) else None,
            mask=mask,
            bias=sight.bias is not None,
            sinks=sight.sink_mass is not None,
            verified=not reasons,
            unverified=tuple(reasons),
            self_check=SelfCheck(error, tolerance, all(check.ok for check in checks)),
            survey=Survey(
                block=asked.block,
                steps=profile_steps(axes),
                patterns=tuple(pattern.text for pattern in wanted.patterns),
                sink_tokens=wanted.sink_tokens,
                sink_share=wanted.sink_share,
                kernel=sight.kernel if is_scored else "softmax",
                checks=checks,
                peak_bytes=0,
                full_bytes=sight.shape[0] * n_heads * q_len * k_len * 4,
                kept=wanted.kept,
            ),
        )

    def record(self) -> Record:
        """The record of the layers that are finished, of which there must be one at least."""
        seen = list(self.seen)
        arrays = {
            layer_prefix(i) + name: to_array(array)
            for i, done in enumerate(seen)
            for name, array in done.arrays.items()
        }
        ok = all(done.said.self_check.ok for done in seen)
        worst = max((done.said.self_check for done in seen), key=lambda c: _strain(c.max_abs_error, c.tolerance))
        model = self._model()
        return Record(
            command=self.wanted.heads.command,
            config=self._config(seen[0].said, model),
            sequences=self.inputs.sequences,
            context=self.inputs.context,
            vocabulary=(),
            trace=(),
            heads=tuple(head for done in seen for head in done.heads),
            timings={
                name: Timing(s, (s,), s, 0.0)
                for name, s in (self.seconds | {"total": sum(self.seconds.values())}).items()
            },
            self_check=SelfCheck(worst.max_abs_error, worst.tolerance, ok and self.identical is not False),
            environment=environment(self.loaded.model.device, self.device_asked),
            weights=self.loaded.checkpoint.path,
            not_kept=tuple(self.not_kept),
            model=model,
            layers=tuple(done.said for done in seen),
            spans=self.wanted.spans,
            arrays=arrays,
        )

    def _model(self) -> Model:
        loaded = self.loaded
        implementation = str(getattr(loaded.config, "_attn_implementation", None) or "eager")
        rungs = dict.fromkeys(done.said.captured_by for done in self.seen)
        inspected = " and ".join(
            dict.fromkeys("hand-written" if rung == "softmax" else implementation for rung in rungs)
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
            without=without_attention(loaded.config, self._found),
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
        ).resolved()


def _takes_cache(model: Any) -> bool:
    return hasattr(model.config, "use_cache")


def _are_identical(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two outputs hold the same bits, NaN being like NaN."""
    pairs = [(one[name], other.get(name)) for name in one if isinstance(one[name], Tensor)]
    return bool(pairs) and all(
        isinstance(b, Tensor) and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
        for a, b in pairs
    )


def _require_axes(sight: Sight, axes: Axes, call: Call) -> None:
    expected = (len(axes.queries), axes.q_len, axes.k_len)
    found = (sight.shape[0], *sight.shape[2:])
    if expected != found:
        raise MhaError(
            f"{call.name} must attend from {axes.q_len} queries to {axes.k_len} keys, got {found[1]} and {found[2]}",
            hint="its tokens are not those of the text, so nothing true could be said of them",
            code="not-tokens",
        )


def _head_ranges(n_heads: int, asked: tuple[int, ...] | None) -> list[range]:
    """The heads that are looked at, alone where they are chosen."""
    return [range(n_heads)] if asked is None else [range(head, head + 1) for head in asked]


def attention_of_heads(call: Call, sight: Sight, heads: range) -> Attention:
    """Some heads of a captured attention."""
    span = slice(heads.start, heads.stop)
    v, z, inputs = None, sight.lse.new_zeros(*sight.shape[:3], 1)[:, span], []
    if isinstance(call, (ScoredCall, SoftmaxCall)) and call.v is not None and call.z is not None:
        group = sight.shape[1] // call.v.shape[1]
        v, z = call.v[:, heads.start // group : (heads.stop - 1) // group + 1], call.z[:, span]
        inputs = [v, *((call.q, call.k) if isinstance(call, ScoredCall) else ())]
    return Attention(
        heads,
        sight.of_heads(heads),
        z,
        v,
        sight.lse[:, span],
        sight.kernel,
        None if sight.sink_mass is None else sight.sink_mass[:, span],
        is_finite=all(bool(tensor.isfinite().all()) for tensor in inputs),
    )


def mask_words(baseline: Baseline, axes: Axes) -> str:
    """What queries see, in words, by how many keys each of the first text's sees."""
    n, first = len(axes.queries[0].ids), axes.first_query(0)
    counts = baseline.visible[0, 0, first : first + n].long().tolist()
    most, n_keys = max(counts), len(axes.keys[0].ids)
    if counts == [min(i + 1, most) for i in range(n)]:
        return "causal" if most == n else f"causal, window {most}"
    return "all keys" if counts == [n_keys] * n else f"at most {most} keys"


def _strain(error: float | None, tolerance: float) -> float:
    return float("inf") if error is None else error / tolerance if tolerance else float(error > 0)
