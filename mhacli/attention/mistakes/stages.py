"""Attention cut into stages, so that one can be exchanged: the reference that a user's attention is compared with.

With every stage as it should be this is `mhacli.attention.core.attend` between its projections, and is tested against it. A
`Mistake` puts another function in a stage's place; the files beside this one hold the catalogue of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from mhacli.attention.core import Tap, no_tap, per_query_head

Pairing = Literal["half", "interleaved"]


class Projection(NamedTuple):
    """`y = x weightᵀ + bias`: `[width, d_in]` and `[width]`."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """The rows, projected."""
        made = rows @ self.weight.mT
        return made if self.bias is None else made + self.bias


class Projections(NamedTuple):
    """Those of a layer. Without `out` the heads side by side are the result."""

    q: Projection
    k: Projection
    v: Projection
    out: Projection | None = None


@dataclass(frozen=True)
class ReferenceLayer:
    """What a layer is told besides its input. Without `weights`, rows come split into heads and nothing is projected.

    `pairing`: how rotary positions pair columns, None without them; `rates` are the radians by which each pair of the first
    columns is turned from place to place, None for theta^(−2j/d) in all columns.
    `interleaved_split`: a head has every n-th column, not columns side by side; `interleaved_merge`: the same on the way back.
    `causal`: the layer masks the future itself. `sees`, bool `[query, key]`, is any other mask of its own. `before` and `after`
    are what it does to its input and with its output besides, such as a norm or a residual: `after(out, input)`. `q_norm` and
    `k_norm` act on queries and keys of each head. `scale` is a number, or one for each head, `[head, 1, 1]`. `bias` gives what is
    added to the scores of some rows, `[1, head, query, key]`, None for nothing; `sinks`, `[head]`, are logits that take part in
    the softmax and are no key's.
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

    @property
    def d_head(self) -> int | None:
        """The width of a head of queries, None where it comes with the input."""
        return None if self.weights is None else self.weights.q.weight.shape[0] // self.n_heads


class ReferenceInputs(NamedTuple):
    """What is asked: rows `[batch, length, d_in]` of queries, keys and values, or heads `[batch, head, length, d]`; and
    what the caller says of masks, True = may attend: `allowed` `[batch or 1, 1, query, key]`, `real` `[batch, key]`."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    allowed: Tensor | None = None
    real: Tensor | None = None


class Result(NamedTuple):
    """The output, and the cells that were allowed, None where all are."""

    out: Tensor
    keep: Tensor | None


# ------------------------------------------------------------------------------------------------------- stages as they should be


def project(layer: ReferenceLayer, rows: ReferenceInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of queries, keys and values, `[batch, length, head·d]`."""
    assert layer.weights is not None
    return layer.weights.q(rows.queries), layer.weights.k(rows.keys), layer.weights.v(rows.values)


def split(layer: ReferenceLayer, rows: Tensor, n_heads: int, which: str) -> Tensor:
    """`[batch, length, head·d]` split into heads, `[batch, head, length, d]`; `which` says q, k or v."""
    if layer.interleaved_split:
        return rows.reshape(*rows.shape[:-1], -1, n_heads).permute(0, 3, 1, 2)
    return rows.reshape(*rows.shape[:-1], n_heads, -1).transpose(1, 2)


def norm(layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of each head, normed where the layer norms them."""
    return q if layer.q_norm is None else layer.q_norm(q), k if layer.k_norm is None else layer.k_norm(k)


def rotate(layer: ReferenceLayer, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by their places; queries are the last of the keys."""
    if layer.pairing is None:
        return q, k
    return rotated(q, layer, k.shape[2] - q.shape[2], layer.pairing), rotated(k, layer, 0, layer.pairing)


def rotate_values(layer: ReferenceLayer, v: Tensor) -> Tensor:
    """Values are not turned."""
    return v


def take(layer: ReferenceLayer, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is taken for queries, keys and values in the products."""
    return q, k, v


def repeat_kv(layer: ReferenceLayer, heads: Tensor, which: str) -> Tensor:
    """Keys or values, `which` says k or v, with each kv head repeated for the query heads that share it: 0 0 1 1."""
    return per_query_head(heads, layer.n_heads * heads.shape[1] // layer.n_kv_heads)


def products(layer: ReferenceLayer, q: Tensor, k: Tensor) -> Tensor:
    """`q kᵀ`, `[batch, head, query, key]`."""
    return q @ k.mT


def scale(layer: ReferenceLayer, qk: Tensor, d_head: int) -> Tensor:
    """The products times the scale."""
    return qk * (d_head**-0.5 if layer.scale is None else layer.scale)


def cap(layer: ReferenceLayer, scores: Tensor, keep: Tensor | None) -> tuple[Tensor, bool]:
    """The scores within ±softcap, where there is one, and whether the mask is still to come."""
    c = layer.softcap
    return scores if c is None else c * torch.tanh(scores / c), True


def add_bias(layer: ReferenceLayer, scores: Tensor, bias: Tensor) -> Tensor:
    """The scores with their bias, `[1, head, query, key]`."""
    return scores + bias


def causal_rule(layer: ReferenceLayer, q_len: int, k_len: int) -> Tensor:
    """`[query, key]`, True where the key is no later than the query; queries are the last of the keys."""
    return torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)


def mask_rule(layer: ReferenceLayer, allowed: Tensor) -> Tensor:
    """What the caller's mask allows."""
    return allowed


def padding_rule(layer: ReferenceLayer, real: Tensor) -> Tensor:
    """`[batch, 1, 1, key]`: what the caller calls padding is seen by nobody."""
    return real[:, None, None, :]


def together(layer: ReferenceLayer, rules: tuple[Tensor | None, Tensor | None, Tensor | None]) -> Tensor | None:
    """The cells that causality, mask and padding all allow."""
    keep = None
    for rule in rules:
        if rule is not None:
            keep = rule if keep is None else keep & rule
    return keep


def mask(layer: ReferenceLayer, scores: Tensor, keep: Tensor) -> Tensor:
    """Scores that are masked are −∞."""
    return scores.masked_fill(~keep, -math.inf)


def softmax(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """Weights over the keys, and a sink where there is one; a query without an allowed key gets zeros."""
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    filled = scores.masked_fill(empty, 0.0)
    return with_sinks(layer, filled).softmax(dim=-1)[..., : scores.shape[-1]].masked_fill(empty, 0.0)


def with_sinks(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """The scores, and behind those of the keys the sink's, where there is one."""
    if layer.sinks is None:
        return scores
    return torch.cat([scores, layer.sinks[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)


def value_weights(layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None) -> Tensor:
    """What the values are weighted by: the pattern. `scaled` are the scores before the mask."""
    return pattern


def weigh(layer: ReferenceLayer, pattern: Tensor, v: Tensor) -> Tensor:
    """`[batch, head, query, d_v]`: the values, weighted."""
    return pattern @ v


def merge(layer: ReferenceLayer, z: Tensor) -> Tensor:
    """The heads side by side, `[batch, query, head·d_v]`."""
    return z.permute(0, 2, 3, 1).flatten(2) if layer.interleaved_merge else z.transpose(1, 2).flatten(2)


def project_out(layer: ReferenceLayer, rows: Tensor) -> Tensor:
    """The heads mixed, where there is a projection for it."""
    return rows if layer.weights is None or layer.weights.out is None else layer.weights.out(rows)


@dataclass(frozen=True)
class Stages:
    """Every stage of attention by its name."""

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


def run(stages: Stages, layer: ReferenceLayer, asked: ReferenceInputs, tap: Tap = no_tap) -> Result:
    """The output of a layer with these stages. Taps: `q_proj k_proj v_proj q k v qk scaled scores pattern z concat out`."""
    rows = asked
    if layer.before is not None:
        rows = asked._replace(
            queries=layer.before(asked.queries), keys=layer.before(asked.keys), values=layer.before(asked.values)
        )
    q, k, v = heads(stages, layer, rows, tap)
    keep = _allowed_cells(stages, layer, rows, q.shape[2], k.shape[2])
    bias = None if layer.bias is None else layer.bias(asked)
    return Result(finished(stages, layer, (q, k, v), keep, bias, asked.queries, tap), keep)


def heads(
    stages: Stages, layer: ReferenceLayer, rows: ReferenceInputs, tap: Tap = no_tap
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[batch, head, length, d]`: projected, split into heads, normed and turned."""
    q, k, v = rows.queries, rows.keys, rows.values
    if layer.weights is not None:
        made = stages.project(layer, rows)
        for site, tensor in zip(("q_proj", "k_proj", "v_proj"), made, strict=True):
            tap(site, tensor)
        q = stages.split(layer, made[0], layer.n_heads, "q")
        k = stages.split(layer, made[1], layer.n_kv_heads, "k")
        v = stages.split(layer, made[2], layer.n_kv_heads, "v")
    q, k = stages.norm(layer, q, k)
    q, k = stages.rotate(layer, q, k)
    q, k, v = stages.take(layer, q, k, stages.rotate_values(layer, v))
    for site, tensor in zip("qkv", (q, k, v), strict=True):
        tap(site, tensor)
    return q, k, v


def _allowed_cells(
    stages: Stages, layer: ReferenceLayer, rows: ReferenceInputs, q_len: int, k_len: int
) -> Tensor | None:
    own = stages.causal_rule(layer, q_len, k_len) if layer.causal else layer.sees
    given = None if rows.allowed is None else stages.mask_rule(layer, rows.allowed)
    padding = None if rows.real is None else stages.padding_rule(layer, rows.real)
    keep = stages.together(layer, (own, given, padding))
    return None if keep is None else keep.reshape((1,) * (4 - keep.ndim) + tuple(keep.shape))


def finished(
    stages: Stages,
    layer: ReferenceLayer,
    made: tuple[Tensor, Tensor, Tensor],
    keep: Tensor | None,
    bias: Tensor | None,
    queries: Tensor,
    tap: Tap = no_tap,
) -> Tensor:
    """The output that heads of queries, keys and values give; `queries` are the rows that the queries were made of."""
    z = _mixed(stages, layer, made, keep, bias, tap)
    if layer.weights is None:
        return z
    concat = stages.merge(layer, z)
    tap("concat", concat)
    out = stages.project_out(layer, concat)
    tap("out", out)
    return out if layer.after is None else layer.after(out, queries)


def _mixed(
    stages: Stages,
    layer: ReferenceLayer,
    made: tuple[Tensor, Tensor, Tensor],
    keep: Tensor | None,
    bias: Tensor | None,
    tap: Tap,
) -> Tensor:
    q, k, v = made
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
    """Heads `[batch, head, length, d]` turned by their places, which begin at `start`: pair `j` by place · theta^(−2j/d), or by
    place · rate where the layer has rates; columns without a rate stay as they are.

    `angles` is how they lie in the table of cosines, where that is not how columns are paired. Source: Su et al. 2021,
    "RoFormer", equation 34; halves as in GPT-NeoX.
    """
    d = t.shape[-1]
    place = torch.arange(start, start + t.shape[2], dtype=t.dtype, device=t.device)
    rates = layer.rates
    if rates is None:
        rates = layer.theta ** -(torch.arange(0, d, 2, dtype=t.dtype, device=t.device) / d)
    angle = place[:, None] * rates.to(t)
    laid = torch.cat([angle, angle], dim=-1) if (angles or pairing) == "half" else angle.repeat_interleave(2, dim=-1)
    part, rest = t[..., : laid.shape[-1]], t[..., laid.shape[-1] :]
    return torch.cat([part * laid.cos() + sign * _rotated_by_90_degrees(part, pairing) * laid.sin(), rest], dim=-1)


def _rotated_by_90_degrees(t: Tensor, pairing: Pairing) -> Tensor:
    if pairing == "half":
        a, b = t.chunk(2, dim=-1)
        return torch.cat([-b, a], dim=-1)
    return torch.stack([-t[..., 1::2], t[..., 0::2]], dim=-1).flatten(-2)


# -------------------------------------------------------------------------------------------------- mistakes in a stage's place


class Inapplicable(Exception):
    """A mistake that cannot be made in this layer, such as leaving out a bias that is not there."""


def require(is_applicable: bool) -> None:
    """Raises `Inapplicable` unless the mistake can be made."""
    if not is_applicable:
        raise Inapplicable


def inputs_of(layer: ReferenceLayer) -> tuple[Projection, Projection, Projection]:
    """The projections of queries, keys and values. Raises `Inapplicable` where nothing is projected."""
    if layer.weights is None:
        raise Inapplicable
    return layer.weights.q, layer.weights.k, layer.weights.v


def out_of(layer: ReferenceLayer) -> Projection:
    """The output projection. Raises `Inapplicable` where there is none."""
    if layer.weights is None or layer.weights.out is None:
        raise Inapplicable
    return layer.weights.out


class SourceHints(NamedTuple):
    """What an author's documentation and source say of an attention: that it is to be causal, how rotary positions pair columns,
    that scores may be infinite, and which of the projections is whose."""

    expects_causal: bool = False
    is_pairing_stated: bool = False
    may_be_infinite: bool = True
    is_order_known: bool = True


@runtime_checkable
class WrittenOperation(Protocol):
    """An operation of a run that was watched: its name in torch, its tensors, and the author's line that asked for it."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def inputs(self) -> tuple[Tensor, ...]: ...  # noqa: D102
    @property
    def output(self) -> Tensor: ...  # noqa: D102
    @property
    def source(self) -> str: ...  # noqa: D102


class SourceEvidence(NamedTuple):
    """What an author has written: the operations of a run, and the order of the letters q, k and v in the name of a fused
    projection, None where there is none."""

    operations: Sequence[WrittenOperation]
    order: str | None = None


@dataclass(frozen=True)
class Symptoms:
    """What probes show of a user's attention, for mistakes that are found without a proof.

    `messages` are those of all probes, by their names. `n_nan_rows` are rows that are NaN where padding stands on the left of
    its own causal mask; `largest_future` is the largest relative move of an output by a later token. `layer` is the one that
    it was found to be, None where it is not understood. `n_heads` is how many heads it is told to have, 1 where nothing says
    so or a width of heads is given; `query_width` columns of queries are made by `query_name`; with `may_be_narrow` a number
    among its arguments may make it narrower inside.
    """

    messages: Mapping[str, str]
    is_random: bool | None = None
    is_random_with_dropout: bool | None = None
    is_rescaled: bool | None = None
    keeps_state: bool | None = None
    remembers_masks: bool = False
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
        """Whether an output projection reads the heads, or that is not known."""
        return self.layer is None or (self.layer.weights is not None and self.layer.weights.out is not None)


@dataclass(frozen=True)
class MistakeVariant:
    """One way to make a mistake: the function in the stage's place. `description` ends the sentence "matches exactly if …".

    `sites` are those that it spoils, where that is not the one of the mistake; `besides` are functions in the places of further
    stages. `is_rare`: not tried together with another mistake. `effect` is its own, where that of the mistake names several.
    """

    description: str
    replacement: Callable[..., Any]
    sites: tuple[str, ...] = ()
    besides: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    is_rare: bool = False
    effect: str = ""


def _always(hints: SourceHints, layer: ReferenceLayer) -> bool:
    return True


_MASKED = ("mask_rule", "padding_rule", "together", "mask", "value_weights", "causal_rule", "softmax")
"""The stages whose mistakes show when a mask is given."""
_SITES: Mapping[str, str] = {
    "split": "q", "norm": "q", "rotate": "q", "project": "q_proj", "rotate_values": "v", "repeat_kv": "qk", "products": "qk",
    "scale": "scaled", "cap": "scaled", "weigh": "z", "merge": "concat", "project_out": "out", "take": "qk",
    **dict.fromkeys(("add_bias", "causal_rule", "mask_rule", "padding_rule", "together", "mask"), "scores"),
    **dict.fromkeys(("softmax", "value_weights"), "pattern"),
}  # fmt: skip
"""What each stage makes."""


@dataclass(frozen=True)
class Mistake:
    """An entry of the catalogue: a mistake with its stable `code`, and everything that `mha check` knows of it.

    `stage` is the one of `Stages` that it changes, in each of its `variants`, None where a probe finds it; `site` is the one
    whose line is looked for, by default what the stage makes. `looks_like` is how it stands in people's code, `effect` what it
    does to the result, `fix` the corrected expression; `fix_in_torch` the same where torch's own fused function computes the
    stage.

    Its line is that of the first of its `operations`, whatever their result, or else one that looks like `in_source`, a regular
    expression, or else the one that makes its site. `applies` tells whether it is a mistake in a layer at all. Of mistakes that
    give the same numbers, this one is chosen `rather_than` the one of a code where the function of that code is true, and that
    one where it is not. `shown_by` are kinds of inputs that show it besides plain ones and those with masks. `may_be_nan`: it
    may leave nothing but NaN. `with_number` makes more variants of a number that the author uses in masks. `symptom` gives the
    evidence where probes show it, None where they do not.
    """

    code: str
    message: str
    looks_like: str
    effect: str
    fix: str
    stage: str | None = None
    variants: tuple[MistakeVariant, ...] = ()
    site: str = ""
    fix_in_torch: str = ""
    operations: tuple[str, ...] = ()
    in_source: str = ""
    applies: Callable[[SourceHints, ReferenceLayer], bool] = _always
    rather_than: Mapping[str, Callable[[SourceEvidence], bool]] = field(default_factory=dict)
    shown_by: tuple[Literal["large", "windows"], ...] = ()
    may_be_nan: bool = False
    with_number: Callable[[float], tuple[MistakeVariant, ...]] | None = None
    symptom: Callable[[Symptoms], str | None] | None = None

    def __post_init__(self) -> None:
        """Takes the site of the stage where none is given."""
        if self.stage is not None and not self.site:
            object.__setattr__(self, "site", _SITES[self.stage])

    @property
    def is_shown_by_masks(self) -> bool:
        """Whether an input with a mask, or with padding, may show it."""
        return self.stage in _MASKED

    def may_be_made(self, hints: SourceHints, layer: ReferenceLayer) -> bool:
        """Whether it is to be tried in a layer: its stage has something to do there."""
        return self.stage not in _idle_stages(layer) and self.applies(hints, layer)


def _idle_stages(layer: ReferenceLayer) -> set[str]:
    """The stages that have nothing to do in a layer."""
    idle = {"project", "split", "merge", "project_out"} if layer.weights is None else set()
    idle |= {"add_bias"} if layer.bias is None else set()
    return idle | ({"rotate", "rotate_values"} if layer.pairing is None else set())
