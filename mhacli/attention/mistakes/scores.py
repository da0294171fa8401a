"""Mistakes in the scores and the softmax."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable

import torch
from torch import Tensor

from mhacli.attention.mistakes import stages
from mhacli.attention.mistakes.stages import (
    Inapplicable,
    Mistake,
    MistakeVariant,
    ReferenceLayer,
    require,
)

# ---------------------------------------------------------------------------------------------------- products and their scale


def assigned_names(source: str) -> list[str]:
    """The names that a line of code assigns."""
    try:
        parsed = ast.parse(source.strip())
    except SyntaxError:
        return []
    statement = parsed.body[0] if parsed.body else None
    if not isinstance(statement, ast.Assign):
        return []
    target = statement.targets[0]
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    return [name.id for name in names if isinstance(name, ast.Name)]


_PRODUCTS = (
    Mistake(
        "qk-swapped",
        "products",
        (MistakeVariant("the scores are k qᵀ instead of q kᵀ", lambda layer, q, k: k @ q.mT),),
        applies=lambda hints, layer: hints.is_order_known and hints.is_unpacked_in_order,
    ),
)


def scaled_by(factor: Callable[[ReferenceLayer, int, float | Tensor], float | Tensor]) -> Callable[..., Tensor]:
    """Products times a factor of the layer, d_head and the right scale. Inapplicable if the factor is right."""

    def scale(layer: ReferenceLayer, qk: Tensor, d_head: int) -> Tensor:
        right = d_head**-0.5 if layer.scale is None else layer.scale
        wrong_scale = factor(layer, d_head, right)
        require(not torch.allclose(torch.as_tensor(wrong_scale), torch.as_tensor(right), rtol=1e-9))
        return qk * wrong_scale

    return scale


def by_model_width(layer: ReferenceLayer, d_head: int, right: float | Tensor) -> float:
    """1 / √d_model; for split heads, d_model is the sum of their widths."""
    return float((d_head * layer.n_heads if layer.weights is None else layer.weights.q.weight.shape[1]) ** -0.5)


def by_whole_model_width(layer: ReferenceLayer, d_head: int, right: float | Tensor) -> float | Tensor:
    """1 / d_model; for a single head the right scale, because 1 / d_head is another mistake."""
    return right if layer.n_heads == 1 else by_model_width(layer, d_head, right) ** 2


def scaled_by_size(axis: int, power: float) -> Callable[..., Tensor]:
    """Products times a power of an axis size: heads, queries or keys. Inapplicable if that is right, or the size is 1."""

    def scale(layer: ReferenceLayer, qk: Tensor, d_head: int) -> Tensor:
        factor = float(qk.shape[axis]) ** power
        return scaled_by(lambda layer, d, right: right if qk.shape[axis] == 1 else factor)(layer, qk, d_head)

    return scale


def scaled_late(factor: Callable[[ReferenceLayer, int, float | Tensor], float | Tensor]) -> Callable[..., Tensor]:
    """Weights of unscaled scores, scaled after the softmax by a factor of the layer, d_head and the right scale."""

    def value_weights(layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
        require(layer.scale is not None or layer.d_head is not None)
        right = layer.scale if layer.scale is not None else (layer.d_head or 1) ** -0.5
        unscaled = scaled / right
        weights = stages.softmax(layer, unscaled if keep is None else stages.mask(layer, unscaled, keep))
        return weights * factor(layer, layer.d_head or 1, right)

    return value_weights


_SCALES = (
    Mistake(
        "scale-missing",
        "scale",
        (MistakeVariant("the scores are not scaled at all", scaled_by(lambda layer, d, right: 1.0)),),
    ),
    Mistake(
        "scale-d-model",
        "scale",
        (
            MistakeVariant("the scores are divided by √d_model", scaled_by(by_model_width)),
            MistakeVariant("the scores are divided by d_model", scaled_by(by_whole_model_width)),
        ),
    ),
    Mistake(
        "scale-not-root",
        "scale",
        (MistakeVariant("the scores are divided by d_head", scaled_by(lambda layer, d, right: 1 / d)),),
    ),
    Mistake(
        "scale-twice",
        "scale",
        (MistakeVariant("the scores are scaled twice", scaled_by(lambda layer, d, right: right * right)),),
    ),
    Mistake(
        "scale-one-side",
        "scale",
        (
            MistakeVariant(
                "the scores are divided by the fourth root of d_head", scaled_by(lambda layer, d, right: d**-0.25)
            ),
        ),
    ),
    Mistake(
        "scale-length",
        "scale",
        tuple(
            MistakeVariant(f"the scores are divided by {divisor}", scaled_by_size(axis, power))
            for divisor, axis, power in (
                ("√k_len", -1, -0.5),
                ("√q_len", -2, -0.5),
                ("k_len", -1, -1.0),
                ("q_len", -2, -1.0),
            )
        ),
    ),
    Mistake(
        "scale-batch",
        "scale",
        (MistakeVariant("the scores are divided by the root of the size of the batch", scaled_by_size(0, -0.5)),),
    ),
    Mistake(
        "scale-heads",
        "scale",
        (MistakeVariant("the scores are divided by √n_heads", scaled_by_size(1, -0.5)),),
    ),
    Mistake(
        "scale-multiplied",
        "scale",
        (MistakeVariant("the scores are multiplied by √d_head", scaled_by(lambda layer, d, right: d**0.5)),),
    ),
    Mistake(
        "scale-after-softmax",
        "value_weights",
        tuple(
            MistakeVariant(f"the softmax is over unscaled scores, and its result is {how}", scaled_late(factor))
            for how, factor in (
                ("scaled", lambda layer, d, right: right),
                ("divided by √d_model", by_model_width),
                ("divided by d_head", lambda layer, d, right: 1 / d),
                ("divided by d_model", by_whole_model_width),
            )
        ),
    ),
)


# --------------------------------------------------------------------------------------------------------------------- the cap


def _cap_of(layer: ReferenceLayer) -> float:
    if layer.softcap is None:
        raise Inapplicable
    return layer.softcap


def capped_late(layer: ReferenceLayer, scores: Tensor, keep: Tensor | None) -> tuple[Tensor, bool]:
    """Scores capped after the mask, −c where masked."""
    c = _cap_of(layer)
    return c * torch.tanh((scores if keep is None else scores.masked_fill(~keep, -math.inf)) / c), False


def capped_small(layer: ReferenceLayer, scores: Tensor, keep: Tensor | None) -> tuple[Tensor, bool]:
    """Scores capped to ±1."""
    return torch.tanh(scores / _cap_of(layer)), True


def not_capped(layer: ReferenceLayer, scores: Tensor, keep: Tensor | None) -> tuple[Tensor, bool]:
    """Uncapped scores."""
    _cap_of(layer)
    return scores, True


_CAPS = (
    Mistake(
        "softcap-after-mask",
        "cap",
        (MistakeVariant("masked scores are capped like the others", capped_late),),
        site="scores",
        shown_by=("large",),
    ),
    Mistake(
        "softcap-not-scaled-back",
        "cap",
        (MistakeVariant("tanh(score / c) stands without the factor c", capped_small),),
    ),
    Mistake(
        "softcap-missing",
        "cap",
        (MistakeVariant("the scores are not capped", not_capped),),
    ),
)


# ------------------------------------------------------------------------------------------------------------------- bias


def bias_reversed(layer: ReferenceLayer, scores: Tensor, bias: Tensor) -> Tensor:
    """Scores with a bonus for distance instead of a penalty."""
    return scores - bias


def bias_unmoved(layer: ReferenceLayer, scores: Tensor, bias: Tensor) -> Tensor:
    """Scores with a bias `[query, key, head]` read as `[head, query, key]`."""
    require(bias.shape[1] > 1)
    return scores + bias[0].permute(1, 2, 0).reshape(bias.shape)


def bias_repeated_inside(layer: ReferenceLayer, scores: Tensor, bias: Tensor) -> Tensor:
    """Scores with a bias repeated in the wrong order of batch and heads."""
    require(bias.shape[1] > 1 and scores.shape[0] > 1)
    return scores + bias[0].repeat_interleave(scores.shape[0], dim=0).reshape(scores.shape[0], *bias.shape[1:])


_BIASES = (
    Mistake(
        "bias-reversed",
        "add_bias",
        (MistakeVariant("the penalty for distance is added instead of subtracted", bias_reversed),),
    ),
    Mistake(
        "bias-head-order",
        "add_bias",
        (MistakeVariant("the bias is reshaped to [head, query, key] without a permute", bias_unmoved),),
    ),
    Mistake(
        "bias-head-order",
        "add_bias",
        (
            MistakeVariant(
                "the bias is repeated for the sequences in the other order than the scores", bias_repeated_inside
            ),
        ),
        form="batched",
    ),
)


# ----------------------------------------------------------------------------------------------------------------- the softmax


def softmax_over(axis: int) -> Callable[..., Tensor]:
    """A softmax over another axis than the keys."""
    return lambda layer, scores: scores.softmax(dim=axis)


def softmax_over_planes(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """A softmax over batch and heads together."""
    return scores.flatten(0, 1).softmax(dim=0).view_as(scores)


def softmax_over_cells(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """A softmax over queries and keys together."""
    return scores.flatten(-2).softmax(dim=-1).view_as(scores)


def pattern_transposed(layer: ReferenceLayer, pattern: Tensor, v: Tensor) -> Tensor:
    """Values weighted by the transposed pattern."""
    require(pattern.shape[-1] == pattern.shape[-2])
    return pattern.mT @ v


_AXES = (
    Mistake(
        "softmax-axis",
        "softmax",
        (
            MistakeVariant("the softmax runs over queries instead of keys", softmax_over(-2)),
            MistakeVariant("the softmax runs over heads instead of keys", softmax_over(1)),
            MistakeVariant("the softmax runs over the sequences of the batch instead of keys", softmax_over(0)),
            MistakeVariant("the softmax runs over the planes of batch and head", softmax_over_planes),
            MistakeVariant("the softmax runs over queries and keys together", softmax_over_cells),
        ),
    ),
    Mistake(
        "pattern-transposed",
        "weigh",
        (MistakeVariant("the values are weighed by the transposed pattern", pattern_transposed),),
    ),
)


def sink_kept(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """Weights with the sink's column kept and the first key's dropped."""
    require(layer.sinks is not None)
    return stages.with_sinks(layer, scores).softmax(dim=-1)[..., 1:]


def sink_left_out(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """Weights without the sink in the denominator."""
    require(layer.sinks is not None)
    return scores.softmax(dim=-1)


_SINKS = (
    Mistake(
        "sink-dropped-wrongly",
        "softmax",
        (MistakeVariant("the column of the first key is dropped instead of the sink's", sink_kept),),
    ),
    Mistake(
        "sink-without-effect",
        "softmax",
        (MistakeVariant("the sink takes no part", sink_left_out),),
    ),
)


def softmax_twice(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """A softmax of the weights."""
    return stages.softmax(layer, scores).softmax(dim=-1)


def softmax_first(layer: ReferenceLayer, qk: Tensor, d_head: int) -> Tensor:
    """Weights as scores, for another softmax after the mask."""
    return stages.scale(layer, qk, d_head).softmax(dim=-1)


def without_maximum(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """A softmax without subtracting the maximum."""
    powers = scores.exp()
    return powers / powers.sum(dim=-1, keepdim=True)


_SOFTMAXES = (
    Mistake(
        "softmax-missing",
        "softmax",
        (MistakeVariant("the scores themselves weigh the values", lambda layer, scores: scores),),
    ),
    Mistake(
        "softmax-twice",
        "softmax",
        (MistakeVariant("the softmax is applied to its own result", softmax_twice),),
    ),
    Mistake(
        "softmax-twice",
        "scale",
        (MistakeVariant("the softmax is applied to the scores before the mask too", softmax_first),),
        form="around the mask",
    ),
    Mistake(
        "softmax-overflow",
        "softmax",
        (MistakeVariant("exponentials are taken of the scores as they are", without_maximum),),
        shown_by=("large",),
        may_be_nan=True,
    ),
)


SCORES = (*_PRODUCTS, *_SCALES, *_CAPS, *_BIASES, *_AXES, *_SINKS, *_SOFTMAXES)
