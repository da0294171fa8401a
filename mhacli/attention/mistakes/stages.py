"""The reference for user code: attention as exchangeable stages.

With all stages right, this computes `mhacli.attention.core.attend` between its projections, and is tested against it. A
`Mistake` replaces one stage; the other files of this folder hold the catalogue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mhacli.attention.core import Tap, no_tap, per_query_head
from mhacli.record.glossary import Word, words_of

Pairing = Literal["half", "interleaved"]


class Projection(NamedTuple):
    """`y = x weightᵀ + bias`: `[width, d_in]` and `[width]`."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """The projected vectors."""
        product = rows @ self.weight.mT
        return product if self.bias is None else product + self.bias


class Projections(NamedTuple):
    """The projections of a layer. Without `out`, the result is the concatenated heads."""

    q: Projection
    k: Projection
    v: Projection
    out: Projection | None = None


@dataclass(frozen=True)
class ReferenceLayer:
    """The configuration of a layer. Without `weights`, inputs come split into heads and nothing is projected.

    `pairing` is the column pairing of rotary positions, None without them; `rates` are the radians per position for each pair
    of the first columns, None for theta^(−2j/d) in all columns. `interleaved_split`: head h takes every n-th column instead of
    adjacent columns; `interleaved_merge`: the same when heads are merged. `causal`: the layer masks the future itself. `sees`,
    bool `[query, key]`, is another mask of the layer. `before(input)` and `after(out, input)` are further operations, such as a
    norm or a residual connection. `q_norm` and `k_norm` act on the queries and keys of each head. `scale` is a number, or one
    for each head, `[head, 1, 1]`. `bias` returns the score bias `[1, head, query, key]` for some inputs, or None. `sinks`,
    `[head]`, are sink logits in the softmax. `hidden` is the score of a hidden key.
    """

    n_heads: int
    n_kv_heads: int
    scale: float | Tensor | None = None
    weights: Projections | None = None
    softcap: float | None = None
    pairing: Pairing | None = None
    theta: float = 10000.0
    rates: Tensor | None = None
    interleaved_split: bool = False
    interleaved_merge: bool = False
    causal: bool = False
    sees: Tensor | None = None
    before: Callable[[Tensor], Tensor] | None = None
    after: Callable[[Tensor, Tensor], Tensor] | None = None
    q_norm: Callable[[Tensor], Tensor] | None = None
    k_norm: Callable[[Tensor], Tensor] | None = None
    bias: Callable[[ReferenceInputs], Tensor | None] | None = None
    sinks: Tensor | None = None
    hidden: float = -math.inf

    @property
    def d_head(self) -> int | None:
        """The width of a query head, None without weights."""
        return None if self.weights is None else self.weights.q.weight.shape[0] // self.n_heads


class ReferenceInputs(NamedTuple):
    """Queries, keys and values `[batch, length, d_in]`, or heads `[batch, head, length, d]`, and the caller's masks, True = may
    attend: `allowed` `[batch or 1, 1, query, key]`, `real` `[batch, key]`."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    allowed: Tensor | None = None
    real: Tensor | None = None


class Result(NamedTuple):
    """The output, and the visible cells, None if all are visible."""

    out: Tensor
    keep: Tensor | None


# --------------------------------------------------------------------------------------------------------------- right stages


def project(layer: ReferenceLayer, rows: ReferenceInputs) -> tuple[Tensor, Tensor, Tensor]:
    """The projected queries, keys and values, `[batch, length, head·d]`."""
    assert layer.weights is not None
    return layer.weights.q(rows.queries), layer.weights.k(rows.keys), layer.weights.v(rows.values)


def split(layer: ReferenceLayer, rows: Tensor, n_heads: int, role: str) -> Tensor:
    """`[batch, length, head·d]` split into heads `[batch, head, length, d]`; `role` is q, k or v."""
    if layer.interleaved_split:
        return rows.reshape(*rows.shape[:-1], -1, n_heads).permute(0, 3, 1, 2)
    return rows.reshape(*rows.shape[:-1], n_heads, -1).transpose(1, 2)


def norm(layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The queries and keys of each head, normalised if the layer has norms."""
    return q if layer.q_norm is None else layer.q_norm(q), k if layer.k_norm is None else layer.k_norm(k)


def rotate(layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The queries and keys rotated by position; the queries are the last positions of the keys."""
    if layer.pairing is None:
        return q, k
    return rotated(q, layer, k.shape[2] - q.shape[2], layer.pairing), rotated(k, layer, 0, layer.pairing)


def rotate_values(layer: ReferenceLayer, v: Tensor) -> Tensor:
    """The values, which are not rotated."""
    return v


def take(layer: ReferenceLayer, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values that enter the products."""
    return q, k, v


def repeat_kv(layer: ReferenceLayer, heads: Tensor, role: str) -> Tensor:
    """Each kv head repeated for its group of query heads: 0 0 1 1. `role` is k or v."""
    return per_query_head(heads, layer.n_heads * heads.shape[1] // layer.n_kv_heads)


def products(layer: ReferenceLayer, q: Tensor, k: Tensor) -> Tensor:
    """`q kᵀ`, `[batch, head, query, key]`."""
    return q @ k.mT


def scale(layer: ReferenceLayer, qk: Tensor, d_head: int) -> Tensor:
    """The scaled products."""
    return qk * (d_head**-0.5 if layer.scale is None else layer.scale)


def cap(layer: ReferenceLayer, scores: Tensor, keep: Tensor | None) -> tuple[Tensor, bool]:
    """The softcapped scores, and whether they still need the mask."""
    c = layer.softcap
    return scores if c is None else c * torch.tanh(scores / c), True


def add_bias(layer: ReferenceLayer, scores: Tensor, bias: Tensor) -> Tensor:
    """The scores plus the bias `[1, head, query, key]`."""
    return scores + bias


def causal_rule(layer: ReferenceLayer, q_len: int, k_len: int) -> Tensor:
    """`[query, key]`, True for keys up to the query's position; the queries are the last positions of the keys."""
    return torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)


def mask_rule(layer: ReferenceLayer, allowed: Tensor) -> Tensor:
    """The cells that the caller's mask allows."""
    return allowed


def padding_rule(layer: ReferenceLayer, real: Tensor) -> Tensor:
    """`[batch, 1, 1, key]`, False for padding."""
    return real[:, None, None, :]


def together(layer: ReferenceLayer, rules: tuple[Tensor | None, Tensor | None, Tensor | None]) -> Tensor | None:
    """The cells that causality, mask and padding all allow."""
    keep = None
    for rule in rules:
        if rule is not None:
            keep = rule if keep is None else keep & rule
    return keep


def mask(layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """The scores, −∞ where masked, or the number that the layer has for it."""
    return scores.masked_fill(~keep, layer.hidden)


def softmax(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """The weights over keys, with the sink in the denominator; zeros for a query without a visible key."""
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    filled = scores.masked_fill(empty, 0.0)
    return with_sinks(layer, filled).softmax(dim=-1)[..., : scores.shape[-1]].masked_fill(empty, 0.0)


def with_sinks(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """The scores with the sink logit as an extra last column."""
    if layer.sinks is None:
        return scores
    return torch.cat([scores, layer.sinks[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)


def value_weights(layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
    """The weights of the values: the pattern. `scaled` are the scores before the mask."""
    return pattern


def weigh(layer: ReferenceLayer, pattern: Tensor, v: Tensor) -> Tensor:
    """The weighted values, `[batch, head, query, d_v]`."""
    return pattern @ v


def merge(layer: ReferenceLayer, z: Tensor) -> Tensor:
    """The concatenated heads, `[batch, query, head·d_v]`."""
    return z.permute(0, 2, 3, 1).flatten(2) if layer.interleaved_merge else z.transpose(1, 2).flatten(2)


def project_out(layer: ReferenceLayer, rows: Tensor) -> Tensor:
    """The output projection of the concatenated heads."""
    return rows if layer.weights is None or layer.weights.out is None else layer.weights.out(rows)


@dataclass(frozen=True)
class Stages:
    """Every stage of attention by name."""

    project: Callable[..., tuple[Tensor, Tensor, Tensor]] = project
    split: Callable[..., Tensor] = split
    norm: Callable[..., tuple[Tensor, Tensor]] = norm
    rotate: Callable[..., tuple[Tensor, Tensor]] = rotate
    rotate_values: Callable[..., Tensor] = rotate_values
    take: Callable[..., tuple[Tensor, Tensor, Tensor]] = take
    repeat_kv: Callable[..., Tensor] = repeat_kv
    products: Callable[..., Tensor] = products
    scale: Callable[..., Tensor] = scale
    cap: Callable[..., tuple[Tensor, bool]] = cap
    add_bias: Callable[..., Tensor] = add_bias
    causal_rule: Callable[..., Tensor] = causal_rule
    mask_rule: Callable[..., Tensor] = mask_rule
    padding_rule: Callable[..., Tensor] = padding_rule
    together: Callable[..., Tensor | None] = together
    mask: Callable[..., Tensor] = mask
    softmax: Callable[..., Tensor] = softmax
    value_weights: Callable[..., Tensor] = value_weights
    weigh: Callable[..., Tensor] = weigh
    merge: Callable[..., Tensor] = merge
    project_out: Callable[..., Tensor] = project_out


RIGHT = Stages()


def run(stages: Stages, layer: ReferenceLayer, inputs: ReferenceInputs, tap: Tap = no_tap) -> Result:
    """The output of a layer with these stages. Taps: `q_proj k_proj v_proj q k v qk scaled scores pattern z concat out`."""
    rows = inputs
    if layer.before is not None:
        rows = inputs._replace(
            queries=layer.before(inputs.queries), keys=layer.before(inputs.keys), values=layer.before(inputs.values)
        )
    q, k, v = heads(stages, layer, rows, tap)
    keep = _allowed_cells(stages, layer, rows, q.shape[2], k.shape[2])
    bias = None if layer.bias is None else layer.bias(inputs)
    return Result(attend_and_merge(stages, layer, (q, k, v), keep, bias, inputs.queries, tap), keep)


def heads(
    stages: Stages, layer: ReferenceLayer, rows: ReferenceInputs, tap: Tap = no_tap
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[batch, head, length, d]`: projected, split into heads, normalised and rotated."""
    q, k, v = rows.queries, rows.keys, rows.values
    if layer.weights is not None:
        projected = stages.project(layer, rows)
        for site, tensor in zip(("q_proj", "k_proj", "v_proj"), projected, strict=True):
            tap(site, tensor)
        q = stages.split(layer, projected[0], layer.n_heads, "q")
        k = stages.split(layer, projected[1], layer.n_kv_heads, "k")
        v = stages.split(layer, projected[2], layer.n_kv_heads, "v")
    q, k = stages.norm(layer, q, k)
    q, k = stages.rotate(layer, q, k)
    q, k, v = stages.take(layer, q, k, stages.rotate_values(layer, v))
    for site, tensor in zip("qkv", (q, k, v), strict=True):
        tap(site, tensor)
    return q, k, v


def _allowed_cells(
    stages: Stages, layer: ReferenceLayer, rows: ReferenceInputs, q_len: int, k_len: int
) -> Tensor | None:
    layer_rule = stages.causal_rule(layer, q_len, k_len) if layer.causal else layer.sees
    caller_mask = None if rows.allowed is None else stages.mask_rule(layer, rows.allowed)
    padding = None if rows.real is None else stages.padding_rule(layer, rows.real)
    keep = stages.together(layer, (layer_rule, caller_mask, padding))
    return None if keep is None else keep.reshape((1,) * (4 - keep.ndim) + tuple(keep.shape))


def attend_and_merge(
    stages: Stages,
    layer: ReferenceLayer,
    qkv: tuple[Tensor, Tensor, Tensor],
    keep: Tensor | None,
    bias: Tensor | None,
    queries: Tensor,
    tap: Tap = no_tap,
) -> Tensor:
    """The output from heads of queries, keys and values; `queries` is the layer input for a residual connection."""
    z = _attend(stages, layer, qkv, keep, bias, tap)
    if layer.weights is None:
        return z
    concat = stages.merge(layer, z)
    tap("concat", concat)
    out = stages.project_out(layer, concat)
    tap("out", out)
    return out if layer.after is None else layer.after(out, queries)


def _attend(
    stages: Stages,
    layer: ReferenceLayer,
    qkv: tuple[Tensor, Tensor, Tensor],
    keep: Tensor | None,
    bias: Tensor | None,
    tap: Tap,
) -> Tensor:
    q, k, v = qkv
    qk = stages.products(layer, q, stages.repeat_kv(layer, k, "k"))
    tap("qk", qk)
    scaled, is_unmasked = stages.cap(layer, stages.scale(layer, qk, q.shape[-1]), keep)
    tap("scaled", scaled)
    scaled = scaled if bias is None else stages.add_bias(layer, scaled, bias)
    scores = scaled if keep is None or not is_unmasked else stages.mask(layer, scaled, keep)
    tap("scores", scores)
    pattern = stages.value_weights(layer, stages.softmax(layer, scores), scaled, keep)
    tap("pattern", pattern)
    z = stages.weigh(layer, pattern, stages.repeat_kv(layer, v, "v"))
    tap("z", z)
    return z


# ---------------------------------------------------------------------------------------------------------------- rotation


def rotated(
    t: Tensor, layer: ReferenceLayer, start: int, pairing: Pairing, angles: Pairing | None = None, *, sign: int = 1
) -> Tensor:
    """Heads `[batch, head, length, d]` rotated by position, starting at `start`: pair `j` by position · theta^(−2j/d), or by
    position · rate if the layer has rates. Columns without a rate are unchanged.

    `angles` is the column layout of the cosine table if it differs from the pairing. Source: Su et al. 2021, "RoFormer",
    equation 34; halves as in GPT-NeoX.
    """
    d = t.shape[-1]
    position = torch.arange(start, start + t.shape[2], dtype=t.dtype, device=t.device)
    rates = layer.rates
    if rates is None:
        rates = layer.theta ** -(torch.arange(0, d, 2, dtype=t.dtype, device=t.device) / d)
    angle = position[:, None] * rates.to(t)
    angle_columns = (
        torch.cat([angle, angle], dim=-1) if (angles or pairing) == "half" else angle.repeat_interleave(2, dim=-1)
    )
    rotary, rest = t[..., : angle_columns.shape[-1]], t[..., angle_columns.shape[-1] :]
    return torch.cat(
        [rotary * angle_columns.cos() + sign * _rotated_by_90_degrees(rotary, pairing) * angle_columns.sin(), rest],
        dim=-1,
    )


def _rotated_by_90_degrees(t: Tensor, pairing: Pairing) -> Tensor:
    if pairing == "half":
        a, b = t.chunk(2, dim=-1)
        return torch.cat([-b, a], dim=-1)
    return torch.stack([-t[..., 1::2], t[..., 0::2]], dim=-1).flatten(-2)


# ------------------------------------------------------------------------------------------------------------------- mistakes


class Inapplicable(Exception):
    """Raised by a mistake that is impossible in this layer, such as omitting a bias that it does not have."""


def require(is_applicable: bool) -> None:
    """Raises `Inapplicable` unless the mistake is possible."""
    if not is_applicable:
        raise Inapplicable


def inputs_of(layer: ReferenceLayer) -> tuple[Projection, Projection, Projection]:
    """The projections of queries, keys and values. Raises `Inapplicable` for a layer without weights."""
    if layer.weights is None:
        raise Inapplicable
    return layer.weights.q, layer.weights.k, layer.weights.v


def out_of(layer: ReferenceLayer) -> Projection:
    """The output projection. Raises `Inapplicable` if there is none."""
    if layer.weights is None or layer.weights.out is None:
        raise Inapplicable
    return layer.weights.out


class SourceHints(NamedTuple):
    """Hints from options and source: whether attention is meant to be causal, whether the rotary pairing is stated, whether the
    order of the projections is known, and whether the code unpacks a fused projection in the order of its name."""

    expects_causal: bool = False
    is_pairing_stated: bool = False
    is_order_known: bool = True
    is_unpacked_in_order: bool = True


@dataclass(frozen=True)
class Symptoms:
    """The measurements of probes, for mistakes that are found without a matching hypothesis.

    `messages` are the messages of all probes, by name. `leaks_batch`: a sequence changes the output of another one, and nothing
    explains it; `unused` are projections that change no output. `n_nan_rows` counts NaN rows caused by left padding under its
    own causal mask; `largest_future` is the largest relative change of an output by a later token. `layer` is the diagnosed
    layer, None without one. `n_heads` is the stated number of heads, 1 if unstated or if a head width is given. `query_name`
    makes `query_width` columns of queries; `may_be_narrow`: a numeric argument may reduce the width inside.
    """

    messages: Mapping[str, str]
    is_random: bool | None = None
    is_random_with_dropout: bool | None = None
    is_rescaled: bool | None = None
    keeps_state: bool | None = None
    leaks_batch: bool = False
    unused: tuple[str, ...] = ()
    largest_future: float | None = None
    n_nan_rows: int = 0
    expects_causal: bool = False
    takes_mask: bool = False
    layer: ReferenceLayer | None = None
    n_heads: int = 1
    d_in: int = 0
    query_width: int = 0
    query_name: str = ""
    may_be_narrow: bool = False

    @property
    def joins_heads(self) -> bool:
        """Whether an output projection reads the heads; True if unknown."""
        return self.layer is None or (self.layer.weights is not None and self.layer.weights.out is not None)


@dataclass(frozen=True)
class MistakeVariant:
    """One form of a mistake: the replacement of the stage. `description` completes the sentence "matches exactly if …".

    `sites` override the site of the mistake; `besides` are replacements of further stages.
    `effect` overrides that of the mistake.
    """

    description: str
    replacement: Callable[..., Any]
    sites: tuple[str, ...] = ()
    besides: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    effect: str = ""


def _always(hints: SourceHints, layer: ReferenceLayer) -> bool:
    return True


_MASKED = ("mask_rule", "padding_rule", "together", "mask", "value_weights", "causal_rule", "softmax")
"""The stages whose mistakes show only with a mask."""
_SITES: Mapping[str, str] = {
    "split": "q", "norm": "q", "rotate": "q", "project": "q_proj", "rotate_values": "v", "repeat_kv": "qk", "products": "qk",
    "scale": "scaled", "cap": "scaled", "weigh": "z", "merge": "concat", "project_out": "out", "take": "qk",
    **dict.fromkeys(("add_bias", "causal_rule", "mask_rule", "padding_rule", "together", "mask"), "scores"),
    **dict.fromkeys(("softmax", "value_weights"), "pattern"),
}  # fmt: skip
"""The site that each stage computes."""


@dataclass(frozen=True)
class Mistake:
    """An entry of the catalogue: a mistake with its stable `code`, and all that `mha check` knows about it.

    `stage` is the stage that each of the `variants` replaces, None for a mistake that a probe finds. `site` is used to find the
    source line, by default the site of the stage. Its words stand in record/mistakes.toml; of several entries with a code, the
    further ones have words of their own under `code, form`.

    The source line is the line of the first of the `operations`, else a line that matches the regular expression `in_source`,
    else the line that computes the site. `applies` tells whether it is a mistake in a layer at all. `shown_by` are further kinds
    of inputs that show it. `may_be_nan`: it may leave only NaN. `with_number` makes variants from a number in the user's masks.
    `symptom` returns the evidence from probes, or None.
    """

    code: str
    stage: str | None = None
    variants: tuple[MistakeVariant, ...] = ()
    form: str = ""
    site: str = ""
    operations: tuple[str, ...] = ()
    in_source: str = ""
    applies: Callable[[SourceHints, ReferenceLayer], bool] = _always
    shown_by: tuple[Literal["large", "windows"], ...] = ()
    may_be_nan: bool = False
    with_number: Callable[[float], tuple[MistakeVariant, ...]] | None = None
    symptom: Callable[[Symptoms], str | None] | None = None

    def __post_init__(self) -> None:
        """Sets the default site."""
        if self.stage is not None and not self.site:
            object.__setattr__(self, "site", _SITES[self.stage])

    @property
    def words(self) -> Word:
        """Its message, effect and fix."""
        words = words_of("mistakes", "mistake")
        return words.get(f"{self.code}, {self.form}") or words[self.code]

    @property
    def is_shown_by_masks(self) -> bool:
        """Whether inputs with a mask or padding may show it."""
        return self.stage in _MASKED

    def may_be_made(self, hints: SourceHints, layer: ReferenceLayer) -> bool:
        """Whether to try it in a layer, which must use the stage."""
        return self.stage not in _idle_stages(layer) and self.applies(hints, layer)


def _idle_stages(layer: ReferenceLayer) -> set[str]:
    idle = {"project", "split", "merge", "project_out"} if layer.weights is None else set()
    idle |= {"add_bias"} if layer.bias is None else set()
    return idle | ({"rotate", "rotate_values"} if layer.pairing is None else set())
