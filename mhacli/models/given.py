"""`mhacli.record_of`: a record of attention that other programs computed, with statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mhacli.attention import masks
from mhacli.attention.axes import make_statistics_request
from mhacli.attention.environment import environment
from mhacli.attention.head_statistics import Place, statistics_of
from mhacli.attention.reduction import make_baseline
from mhacli.attention.scores import Attention, GivenAttention, ScoredAttention
from mhacli.errors import UsageError
from mhacli.record.checks import TOLERANCES, SelfCheck, growth
from mhacli.record.given import AS_GIVEN, Stack, array_of, record_of_stack, stack_of
from mhacli.record.record import Record
from mhacli.run import Run

from .capture import are_of_one_attention
from .layers import LayerResults, ModelInputs, axes_of, fields_of

_CPU = torch.device("cpu")


def record_of(
    attentions: Any = None,
    *,
    q: Sequence[Any] | None = None,
    k: Sequence[Any] | None = None,
    v: Sequence[Any] | None = None,
    tokens: Sequence[Any] | None = None,
    axes: str | Sequence[str] | None = None,
    scale: float | None = None,
    causal: bool = False,
    raw: bool = False,
) -> Record:
    """The record of attention that was computed elsewhere, which is shown, saved and compared like
    those of mha.

    `attentions` are weights: a list or tuple of layers, each `[batch, head, query, key]`, or one
    array whose `axes` are named, such as "layer,head,query,key". `q`, `k` and `v` are lists of
    layers, each `[batch, head, token, width]`, of which `k` and `v` may have fewer heads. Arrays
    are those of numpy, torch or jax. `tokens` are texts, one for each query and key, or a list of
    them for each sequence; without them there are positions.

    Which cells a mask hid is not known of weights. Without q and k nothing can be checked, and
    `self_check.ok` is None. With them, weights are computed again, by `scale` (None: width ** -0.5)
    and without the cells of weight 0, and compared. Of q and k alone they are computed, `causal` or
    not; `v` makes z. Raises `MhaError` for axes that may be read in several ways, for counts of
    tokens that do not fit, and for numbers that are no weights, which `raw` shows as they are,
    without statistics.
    """
    if scale is not None and not isinstance(scale, int | float):
        raise UsageError("scale= is not a number")
    scored = _scored(q, k, v, scale)
    if attentions is None and not scored:
        raise UsageError("record_of needs attentions, or q and k")
    if attentions is not None and causal:
        raise UsageError("causal= is for q and k alone: weights of 0 are the masked ones")
    if not scored and scale is not None:
        raise UsageError("scale= needs q and k")
    if raw and scored:
        raise UsageError("raw= shows weights as given: leave q, k and v out")
    if attentions is None:
        allowed = masks.causal() if causal else None
        scored = [replace(each, allowed=allowed) for each in scored]
        weights = tuple(each.matrices()["pattern"].numpy() for each in scored)
        stack = Stack(weights, str(scored[0].q.dtype).rpartition(".")[2])
    else:
        stack = stack_of(attentions, axes, "attentions")
    record = record_of_stack(
        stack, tokens, source="attentions", name="arrays in memory", is_raw=raw
    )
    if raw:
        return record
    if scored and len(scored) != len(stack.layers):
        raise UsageError(f"q and k have {len(scored)} layers, and attentions {len(stack.layers)}")
    if attentions is not None and scored:
        scored = [*map(_masked_as, scored, map(torch.from_numpy, stack.layers))]
    return with_statistics(record, scored, is_computed=attentions is None)


def _scored(
    q: Sequence[Any] | None, k: Sequence[Any] | None, v: Sequence[Any] | None, scale: float | None
) -> list[ScoredAttention]:
    """The attention of each layer from its queries and keys; none without them."""
    if q is None and k is None and v is None:
        return []
    given = {"q": q, "k": k, "v": v}
    for name, layers in given.items():
        if not isinstance(layers, (list, tuple)) and not (name == "v" and layers is None):
            raise UsageError(f"{name} is not a list of layers, each [batch, head, token, width]")
    if len({len(layers) for layers in given.values() if layers is not None}) > 1:
        raise UsageError("q, k and v have different numbers of layers")
    attentions = []
    for number in range(len(q or ())):
        tensors = {
            name: torch.from_numpy(array_of(layers[number], f"{name} of layer {number}")[0])
            for name, layers in given.items()
            if layers is not None
        }
        shapes = {name: tuple(each.shape) for name, each in tensors.items()}
        have_axes = all(len(shape) == 4 for shape in shapes.values())
        if not have_axes or not are_of_one_attention(**shapes):
            words = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise UsageError(
                f"q, k and v of layer {number} do not fit: {words}",
                hint="each is [batch, head, token, width]; k and v may have fewer heads",
            )
        width = tensors["q"].shape[3]
        attentions.append(
            ScoredAttention(
                q=tensors["q"],
                k=tensors["k"],
                v=tensors.get("v"),
                scale=width**-0.5 if scale is None else scale,
            )
        )
    return attentions


def _masked_as(attention: ScoredAttention, weights: Tensor) -> ScoredAttention:
    """The attention without the cells whose weight is 0."""
    if attention.shape != tuple(weights.shape):
        raise UsageError(f"q and k give weights {attention.shape}, not {tuple(weights.shape)}")
    return replace(attention, allowed=masks.from_tensor(weights > 0))


def with_statistics(
    record: Record, scored: Sequence[ScoredAttention] = (), *, is_computed: bool = False
) -> Record:
    """The record with the statistics of its heads, and with the checks of what its weights were
    computed from: they are compared, unless they were `computed` here.
    """
    results = [
        _measured(record, number, scored[number] if scored else None, is_computed=is_computed)
        for number in range(len(record.layers))
    ]
    checks = [each.layer.self_check for each in results]
    return replace(
        record,
        **fields_of(results),
        self_check=max(checks, key=lambda check: check.severity),
        environment=environment(_CPU, "auto"),
    )


def _measured(
    record: Record, number: int, scored: ScoredAttention | None, *, is_computed: bool
) -> LayerResults:
    """The statistics of a layer."""
    layer, arrays = record.layers[number], dict(record.of_layer(number).arrays)
    weights = torch.from_numpy(arrays["pattern"])
    attention: Attention = GivenAttention(weights=weights, scores=weights.log(), kernel="given")
    if scored is not None:
        attention = scored if is_computed else replace(attention, allowed=scored.allowed)
    axes = axes_of(
        ModelInputs(record.sequences), "self", record.config.dtype, _CPU, layer.positions
    )
    request = make_statistics_request(axes)
    baseline = make_baseline(attention, request)
    heads, of_heads, survey, _ = statistics_of(
        attention,
        request,
        baseline=baseline,
        run=Run(allow_nonfinite=True),
        place=Place(layer.layer, layer.name),
    )
    if not isinstance(attention, ScoredAttention):  # of weights no score is known
        heads = tuple(replace(head, max_score=None, max_score_at=None) for head in heads)
        of_heads = {name: x for name, x in of_heads.items() if name not in ("max_score", "lse")}
    arrays |= of_heads
    layer = replace(layer, survey=survey)
    if scored is None:
        return LayerResults(layer, heads, arrays)
    matrices = scored.matrices()
    arrays["allowed"] = matrices["allowed"].numpy()
    for name in ("scores", "qk"):
        if name in matrices:
            arrays[name] = matrices[name].numpy()
    check = SelfCheck.of_layers([survey.checks])
    if not is_computed:
        error = (matrices["pattern"].double() - weights.double()).abs().max().item()
        tolerance = TOLERANCES[record.config.dtype].output * growth(weights.shape[3])
        check = SelfCheck.of(error, tolerance, holds=check.ok is True)
    layer = replace(
        layer,
        captured_by="given",
        n_kv_heads=scored.n_kv_heads,
        d_head=scored.q.shape[3],
        d_v=scored.q.shape[3] if scored.v is None else scored.v.shape[3],
        scale=scored.scale,
        mask="as given" if scored.allowed is not None else "all keys",
        verified=check.ok is True,
        unverified=() if check.ok else (f"{AS_GIVEN} are not those of q and k",),
        self_check=check,
    )
    if scored.v is not None:
        kv = scored.v.repeat_interleave(weights.shape[1] // scored.v.shape[1], dim=1)
        arrays["z"] = (weights.to(kv) @ kv).numpy()
    return LayerResults(layer, heads, arrays)
