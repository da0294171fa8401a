"""The reference for user code: attention as exchangeable stages.

With all stages right, this computes `mhacli.attention.core.attend` between its projections, and is
tested against it. A mistake replaces a stage; mistakes.py holds the catalogue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise, zip_longest
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .core import Tap, four_axes, no_tap, per_query_head
from .layer import rates

Pairing = Literal["half", "interleaved"]
Letter = Literal["q", "k", "v"]
"""The role of queries, of keys or of values."""
LETTERS: tuple[Letter, ...] = ("q", "k", "v")


@dataclass(frozen=True, eq=False)
class Projection:
    """`y = x weightᵀ + bias`: `[width, d_in]` and `[width]`. It keeps its last result, for
    hypotheses project the same rows; they must not be changed in place.
    """

    weight: Tensor
    bias: Tensor | None = None
    _last: list[Tensor] = field(default_factory=list, init=False)

    def __call__(self, rows: Tensor) -> Tensor:
        """The projected vectors."""
        if not (self._last and self._last[0] is rows):
            require(rows.shape[-1] == self.weight.shape[1])
            require(self.bias is None or len(self.bias) in (1, len(self.weight)))
            product = rows @ self.weight.mT
            self._last[:] = rows, product if self.bias is None else product + self.bias
        return self._last[1]

    def map(self, change: Callable[[Tensor], Tensor]) -> Projection:
        """The same with `change` applied to the weight and the bias."""
        bias = None if self.bias is None else change(self.bias)
        return Projection(change(self.weight), bias)


class Projections(NamedTuple):
    """The projections of a layer. Without `out`, the result is the concatenated heads."""

    q: Projection
    k: Projection
    v: Projection
    out: Projection | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Projections:
        """The same with `change` applied to weights and biases."""
        q, k, v = (each.map(change) for each in self[:3])
        return Projections(q, k, v, None if self.out is None else self.out.map(change))


@dataclass(frozen=True)
class ReferenceLayer:
    """The configuration of a layer. Without `weights`, inputs come split into heads and nothing is
    projected.

    `pairing` is the column pairing of rotary positions, None without them; `rates` are the radians
    per position for each pair of the first columns, None for theta^(−2j/d) in all columns.
    `interleaved_split`: head h takes every n-th column instead of adjacent columns;
    `interleaved_merge`: the same when heads are merged. `causal`: the layer masks the future
    itself; the queries are the last positions of the keys, or with `top_left` the first.
    `visible_cells(q_len, k_len)`, bool `[query, key]`, is another mask of the layer.
    `queries(inputs)` are queries that the layer makes itself, in place of those of the inputs.
    `before(inputs)` and `after(out, input)` are further operations, such as a norm or a residual
    connection. `q_norm`, `k_norm` and `v_norm` act on the queries, keys and values of each head.
    `scale` is a number, or one for each head, `[head, 1, 1]`. `bias` returns the score bias `[1 or
    batch, head, query, key]` for some inputs, or None. `sinks`, `[head]`, are sink logits in the
    softmax.
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
    top_left: bool = False
    visible_cells: Callable[[int, int], Tensor] | None = None
    queries: Callable[[Inputs], Tensor] | None = None
    before: Callable[[Inputs], Inputs] | None = None
    after: Callable[[Tensor, Tensor], Tensor] | None = None
    q_norm: Callable[[Tensor], Tensor] | None = None
    k_norm: Callable[[Tensor], Tensor] | None = None
    v_norm: Callable[[Tensor], Tensor] | None = None
    bias: Callable[[Inputs], Tensor | None] | None = None
    sinks: Tensor | None = None

    def in_dtype(self, dtype: torch.dtype, *, is_rounded: bool = False) -> ReferenceLayer:
        """The layer whose weights are in a dtype, in which it computes; or, where it `is_rounded`,
        in float64 but with the values that they have there. Gradients reach the same parameters.
        What the layer does around attention, and its norms, is computed in float64 and rounded.
        """

        def cast(tensor: Tensor) -> Tensor:
            if is_rounded:
                return tensor + (tensor.to(dtype).to(tensor.dtype) - tensor).detach()
            return tensor.to(dtype)

        def around(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
            if function is None or is_rounded:
                return function
            return lambda *rows: _to(dtype, function(*(_to(torch.float64, each) for each in rows)))

        queries = self.queries
        return replace(
            self,
            queries=None if queries is None else lambda inputs: cast(queries(inputs)),
            weights=None if self.weights is None else self.weights.map(cast),
            scale=cast(self.scale) if isinstance(self.scale, Tensor) else self.scale,
            sinks=None if self.sinks is None else cast(self.sinks),
            before=around(self.before),
            after=around(self.after),
            q_norm=around(self.q_norm),
            k_norm=around(self.k_norm),
            v_norm=around(self.v_norm),
            bias=around(self.bias),
        )

    @property
    def d_head(self) -> int | None:
        """The width of a query head, None without weights."""
        return None if self.weights is None else self.weights.q.weight.shape[0] // self.n_heads


class Inputs(NamedTuple):
    """The inputs of a call, or of a layer.

    Queries `[batch, query, d_in]` and keys `[batch, key, d_in]`; for a function of q, k and v,
    `[batch, head, query, d_head]` and `[batch, kv_head, key, d_head]`. `keys` is None for
    self-attention; `values` is None if they are the keys. `allowed`, bool `[batch or 1, 1, query,
    key]`, is True where a query may attend to a key. `real`, bool `[batch, key]`, is True for
    tokens and False for padding. `ends`: where the steps end that read one causal text with a
    cache; empty for one call.
    """

    queries: Float[Tensor, "..."]
    keys: Float[Tensor, "..."] | None = None
    values: Float[Tensor, "..."] | None = None
    allowed: Bool[Tensor, "..."] | None = None
    real: Bool[Tensor, "batch key"] | None = None
    ends: tuple[int, ...] = ()

    @property
    def lengths(self) -> tuple[int, int, int]:
        """The numbers of sequences, queries and keys."""
        return self.queries.shape[0], self.queries.shape[-2], self.rows_of("k").shape[-2]

    def rows_of(self, role: str) -> Tensor:
        """The rows of a role, q, k or v."""
        rows = {
            "q": self.queries,
            "k": self.keys,
            "v": self.keys if self.values is None else self.values,
        }[role]
        return self.queries if rows is None else rows

    def with_queries(self, queries: Tensor) -> Inputs:
        """The same with other queries of the same keys and values."""
        return self._replace(queries=queries, keys=self.rows_of("k"), values=self.rows_of("v"))

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with `change` applied to queries, keys and values; the masks stay."""
        keys = None if self.keys is None else change(self.keys)
        values = None if self.values is None else change(self.values)
        return self._replace(queries=change(self.queries), keys=keys, values=values)


def _to(dtype: torch.dtype, rows: Any) -> Any:
    """Rows, or all of some inputs, in a dtype; None as it is."""
    if isinstance(rows, Inputs):
        return rows.map(lambda each: each.to(dtype))
    return None if rows is None else rows.to(dtype)


# ------------------------------------------------------------------------------------- right stages


def in_role(role: str, qkv: Sequence[Any] | None) -> Any:
    """What stands in a role, q, k or v, of what stands in all three and maybe more."""
    assert qkv is not None
    return qkv["qkv".index(role)]


def project(layer: ReferenceLayer, inputs: Inputs, role: str) -> Tensor:
    """The projected queries, keys or values, `[batch, length, head·d]`; `role` is q, k or v."""
    projected: Tensor = in_role(role, layer.weights)(inputs.rows_of(role))
    return projected


def split(layer: ReferenceLayer, rows: Tensor, role: str) -> Tensor:
    """`[batch, length, head·d]` split into heads `[batch, head, length, d]`; `role` is q, k or
    v.
    """
    n_heads = layer.n_heads if role == "q" else layer.n_kv_heads
    require(rows.shape[-1] % n_heads == 0)
    if layer.interleaved_split:
        return rows.reshape(*rows.shape[:-1], -1, n_heads).permute(0, 3, 1, 2)
    return rows.reshape(*rows.shape[:-1], n_heads, -1).transpose(1, 2)


def norm(layer: ReferenceLayer, heads: Tensor, role: str) -> Tensor:
    """The queries, keys or values of each head, normalised if the layer has norms."""
    function = {"q": layer.q_norm, "k": layer.k_norm, "v": layer.v_norm}[role]
    return heads if function is None else function(heads)


def rotate(layer: ReferenceLayer, heads: Tensor, start: int, role: str) -> Tensor:
    """The queries or keys rotated by position from `start` on, if the layer has rotary positions;
    `role` is q or k.
    """
    return heads if layer.pairing is None else rotated(layer, heads, start)


def take(layer: ReferenceLayer, qkv: Sequence[Tensor], role: str) -> Tensor:
    """The queries, keys or values that enter the products."""
    heads: Tensor = in_role(role, qkv)
    return heads


def repeat_kv(layer: ReferenceLayer, heads: Tensor, role: str) -> Tensor:
    """Each kv head repeated for its group of query heads: 0 0 1 1. `role` is k or v."""
    return per_query_head(heads, layer.n_heads * heads.shape[1] // layer.n_kv_heads)


def products(layer: ReferenceLayer, q: Tensor, k: Tensor) -> Tensor:
    """`q kᵀ`, `[batch, head, query, key]`."""
    require(q.shape[-1] == k.shape[-1])
    return q @ k.mT


def factor(layer: ReferenceLayer, d_head: int) -> float | Tensor:
    """The factor of the products."""
    return d_head**-0.5 if layer.scale is None else layer.scale


def scale(layer: ReferenceLayer, qk: Tensor, d_head: int) -> Tensor:
    """The scaled products."""
    return multiplied(qk, factor(layer, d_head))


def multiplied(tensor: Tensor, number: float | Tensor) -> Tensor:
    """A tensor times a number, or times one for each head."""
    require(not isinstance(number, Tensor) or do_broadcast(tensor.shape, number.shape))
    return tensor * number


def cap(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """The softcapped scores."""
    c = layer.softcap
    return scores if c is None else c * torch.tanh(scores / c)


def causal_rule(layer: ReferenceLayer, q_len: int, k_len: int, *, shift: int = 0) -> Tensor:
    """`[query, key]`, True for keys up to the query's position, shifted; the queries are the last
    positions of the keys, or the first.
    """
    first = 0 if layer.top_left else k_len - q_len
    return torch.ones(q_len, k_len, dtype=torch.bool).tril(first + shift)


def mask_rule(layer: ReferenceLayer, allowed: Tensor) -> Tensor:
    """The cells that the caller's mask allows."""
    return allowed


def padding_rule(layer: ReferenceLayer, real: Tensor) -> Tensor:
    """`[batch, 1, 1, key]`, False for padding."""
    return real[:, None, None, :]


def all_rules(
    layer: ReferenceLayer, rules: tuple[Tensor | None, Tensor | None, Tensor | None]
) -> Tensor | None:
    """The cells that causality, mask and padding all allow."""
    given = [rule for rule in rules if rule is not None]
    require(do_broadcast(*(rule.shape for rule in given)))
    return reduce(torch.logical_and, given) if given else None


def mask(
    layer: ReferenceLayer, scores: Tensor, keep: Tensor, *, value: float = -math.inf
) -> Tensor:
    """The scores, −∞ where masked."""
    return scores.masked_fill(~keep, value)


def softmax(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """The weights over keys, with the sink in the denominator; zeros for a query without a visible
    key.
    """
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    outcomes = with_sinks(layer, scores.masked_fill(empty, 0.0))
    return outcomes.softmax(dim=-1)[..., : scores.shape[-1]].masked_fill(empty, 0.0)


def with_sinks(layer: ReferenceLayer, scores: Tensor) -> Tensor:
    """The scores with the sink logit as an extra last column."""
    if layer.sinks is None:
        return scores
    require(len(layer.sinks) in (1, scores.shape[1]))
    return torch.cat([scores, layer.sinks[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)


def value_weights(
    layer: ReferenceLayer, pattern: Tensor, scaled: Tensor, keep: Tensor | None
) -> Tensor:
    """The weights of the values: the pattern. `scaled` are the scores before the mask."""
    return pattern


def weigh(layer: ReferenceLayer, pattern: Tensor, v: Tensor) -> Tensor:
    """The weighted values, `[batch, head, query, d_v]`."""
    require(pattern.shape[-1] == v.shape[-2])
    return pattern @ v


def merge(layer: ReferenceLayer, z: Tensor) -> Tensor:
    """The concatenated heads, `[batch, query, head·d_v]`."""
    order = (0, 2, 3, 1) if layer.interleaved_merge else (0, 2, 1, 3)
    return z.permute(order).flatten(2)


def project_out(layer: ReferenceLayer, rows: Tensor) -> Tensor:
    """The output projection of the concatenated heads."""
    return rows if layer.weights is None or layer.weights.out is None else layer.weights.out(rows)


# --------------------------------------------------------------------------- right stages of a step


def join(layer: ReferenceLayer, cached: Tensor, new: Tensor, role: str) -> Tensor:
    """The keys or values of a step with the cached ones; `role` is k or v."""
    return torch.cat([cached, new], dim=2)


def cache(layer: ReferenceLayer, keys: Tensor, values: Tensor, n_new: int) -> tuple[Tensor, Tensor]:
    """What is cached of the keys and values of a step."""
    return keys, values


def read(layer: ReferenceLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values that a step reads."""
    return keys, values


Stages = Mapping[str, Callable[..., Any]]
"""Every stage of attention by name."""
_SITES: Mapping[Callable[..., Any], str] = {
    project: "{}_proj",
    split: "{}_split",
    norm: "{}",
    rotate: "{}",
    take: "qk",
    join: "k",
    cache: "k",
    read: "k",
    repeat_kv: "qk",
    products: "qk",
    scale: "scaled",
    cap: "scaled",
    causal_rule: "scores",
    mask_rule: "scores",
    padding_rule: "scores",
    all_rules: "scores",
    mask: "scores",
    softmax: "pattern",
    value_weights: "pattern",
    weigh: "z",
    merge: "concat",
    project_out: "out",
}
"""The stages, with the site that each computes, of which `{}` is a letter of q, k and v."""
RIGHT: Stages = {stage.__name__: stage for stage in _SITES}


def run_stages(
    stages: Stages, layer: ReferenceLayer, inputs: Inputs, tap: Tap = no_tap
) -> tuple[Tensor, Tensor | None]:
    """The output of a layer with these stages, and the visible cells: None if all are visible, and
    in several steps, which are causal. Taps, of a single step: `q_proj k_proj v_proj q_split
    k_split v_split q k v qk scaled scores pattern z concat out`. Raises `NotPossible` if a mistake,
    or the layer, does not fit.
    """
    if layer.queries is not None:
        inputs = inputs.with_queries(layer.queries(inputs))
    rows = inputs if layer.before is None else layer.before(inputs)
    q, k, v = (heads(stages, layer, rows, role, tap) for role in "qkv")
    n_before = k.shape[2] - q.shape[2]  # the queries are the last positions of the keys
    if not inputs.ends:
        queries = stages["rotate"](layer, q, n_before, "q")
        keys = stages["rotate"](layer, k, 0, "k")
        visible, z = _attended(stages, layer, inputs, rows, (queries, keys, v), tap)
        return _projected(stages, layer, z, inputs.queries, tap), visible
    outs = []
    cached = k[:, :, :0], v[:, :, :0]
    for start, end in pairwise((0, *inputs.ends)):
        queries = stages["rotate"](layer, q[:, :, start:end], start + n_before, "q")
        keys = stages["rotate"](layer, k[:, :, start : end + n_before], start, "k")
        values = v[:, :, start : end + n_before]
        for before, new in zip(cached, (keys, values), strict=True):
            require(before.shape[:2] == new.shape[:2] and before.shape[3] == new.shape[3])
        keys = stages["join"](layer, cached[0], keys, "k")
        values = stages["join"](layer, cached[1], values, "v")
        cached = stages["cache"](layer, keys, values, end - start)
        keys, values = stages["read"](layer, keys, values)
        _, z = _attended(stages, layer, inputs, rows, (queries, keys, values), no_tap)
        out = _projected(stages, layer, z, inputs.queries[:, start:end], no_tap)
        outs.append(out)
        require(out.shape[:-2] == outs[0].shape[:-2] and out.shape[-1] == outs[0].shape[-1])
    return torch.cat(outs, dim=-2), None


def _attended(
    stages: Stages,
    layer: ReferenceLayer,
    inputs: Inputs,
    rows: Inputs,
    qkv: tuple[Tensor, Tensor, Tensor],
    tap: Tap,
) -> tuple[Tensor | None, Tensor]:
    """The visible cells of some queries, and their z."""
    require(qkv[0].shape[2] > 0 and qkv[1].shape[2] > 0)
    queries, keys, values = (stages["take"](layer, qkv, role) for role in "qkv")
    tap("q", queries)
    tap("k", keys)
    tap("v", values)
    lengths, layer_rule = (queries.shape[2], keys.shape[2]), None
    if layer.causal or inputs.ends:
        layer_rule = stages["causal_rule"](layer, *lengths)
    elif layer.visible_cells is not None:
        layer_rule = layer.visible_cells(*lengths)
        require(layer_rule.ndim < 3 or len(layer_rule) in (1, queries.shape[1]))
    caller_mask = None if rows.allowed is None else stages["mask_rule"](layer, rows.allowed)
    padding = None if rows.real is None else stages["padding_rule"](layer, rows.real)
    visible = stages["all_rules"](layer, (layer_rule, caller_mask, padding))
    if visible is not None:
        visible = four_axes(visible)
    keys = stages["repeat_kv"](layer, keys, "k")
    require(do_broadcast(queries.shape[:2], keys.shape[:2]))
    qk = stages["products"](layer, queries, keys)
    tap("qk", qk)
    scaled = stages["cap"](layer, stages["scale"](layer, qk, queries.shape[-1]))
    tap("scaled", scaled)
    bias = None if layer.bias is None or inputs.ends else layer.bias(inputs)
    if bias is not None:
        require(do_broadcast(scaled.shape, bias.shape))
        scaled = scaled + bias
    require(visible is None or do_broadcast(scaled.shape, visible.shape))
    scores = scaled if visible is None else stages["mask"](layer, scaled, visible)
    tap("scores", scores)
    pattern = stages["value_weights"](layer, stages["softmax"](layer, scores), scaled, visible)
    tap("pattern", pattern)
    values = stages["repeat_kv"](layer, values, "v")
    require(do_broadcast(pattern.shape[:2], values.shape[:2]))
    z = stages["weigh"](layer, pattern, values)
    tap("z", z)
    return visible, z


def _projected(
    stages: Stages, layer: ReferenceLayer, z: Tensor, queries: Tensor, tap: Tap
) -> Tensor:
    """The output of a layer from its z, which is its own output without weights."""
    if layer.weights is None:
        return z
    concat = stages["merge"](layer, z)
    tap("concat", concat)
    out = stages["project_out"](layer, concat)
    tap("out", out)
    return out if layer.after is None else layer.after(out, queries)


def heads(stages: Stages, layer: ReferenceLayer, inputs: Inputs, role: str, tap: Tap) -> Tensor:
    """Queries, keys or values `[batch, head, length, d]`: projected, split into heads, and
    normalised.
    """
    rows = inputs.rows_of(role)
    if layer.weights is not None:
        rows = stages["project"](layer, inputs, role)
        tap(f"{role}_proj", rows)
        rows = stages["split"](layer, rows, role)
        tap(f"{role}_split", rows)
    normed: Tensor = stages["norm"](layer, rows, role)
    return normed


# ----------------------------------------------------------------------------------------- rotation


def rates_of(layer: ReferenceLayer, heads: Tensor) -> Tensor:
    """The radians per position by which the layer rotates each pair of columns of heads."""
    if layer.rates is not None:
        return layer.rates.to(heads)
    return rates(heads.shape[-1], layer.theta, heads.device).to(heads)


def rotated(
    layer: ReferenceLayer,
    heads: Tensor,
    start: int,
    role: str = "",
    *,
    pairing: Pairing | None = None,
    angles: Pairing | None = None,
    sign: int = 1,
) -> Tensor:
    """Heads `[batch, head, length, d]` rotated by position, starting at `start`: pair `j` by
    position · theta^(−2j/d), or by position · rate if the layer has rates. Columns without a rate
    are unchanged.

    `pairing` is that of the layer unless another is given, and `angles` the column layout of the
    cosine table if it differs from the pairing. Source: Su et al. 2021, "RoFormer", equation 34;
    halves as in GPT-NeoX.
    """
    require(layer.pairing is not None)
    pairing = pairing or layer.pairing
    position = torch.arange(start, start + heads.shape[2], dtype=heads.dtype, device=heads.device)
    angle = position[:, None] * rates_of(layer, heads)
    require(2 * angle.shape[-1] <= heads.shape[-1])
    if (angles or pairing) == "half":
        angle = torch.cat([angle, angle], dim=-1)
    else:
        angle = angle.repeat_interleave(2, dim=-1)
    rotary, rest = heads[..., : angle.shape[-1]], heads[..., angle.shape[-1] :]
    if pairing == "half":
        a, b = rotary.chunk(2, dim=-1)
        turned = torch.cat([-b, a], dim=-1)
    else:
        turned = torch.stack([-rotary[..., 1::2], rotary[..., 0::2]], dim=-1).flatten(-2)
    return torch.cat([rotary * angle.cos() + sign * turned * angle.sin(), rest], dim=-1)


# ----------------------------------------------------------------------------------------- mistakes


class NotPossible(Exception):
    """A mistake is not possible in a layer, or a layer does not fit its inputs."""


def require(is_possible: bool) -> None:
    """Raises `NotPossible` unless a mistake is possible in a layer."""
    if not is_possible:
        raise NotPossible


def do_broadcast(*shapes: Sequence[int]) -> bool:
    """Whether tensors of these shapes can be combined cell by cell, as torch combines them."""
    sizes = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return all(len({*each} - {1}) <= 1 for each in sizes)


@dataclass(frozen=True, eq=False)
class Mistake:
    """One form of a mistake of the catalogue. Its `name` is that of its words in
    record/mistakes.toml: its code, which is stable, and after a comma its form, if that has words
    of its own; where several forms have one name, `detail` says in what it differs.

    `stages` are the wrong stages by name, the first is its `stage`; with `letters` they are wrong
    for some of q, k and v, their last argument, and right for the rest. `gives` is the role whose
    projection serves for another one, which `takes` it. `changes` is the site that it changes,
    where it is not that of the stage. Its source line is the first that matches a
    regular expression of `at`, the likelier first, else the one that computes its site. `needs` are
    facts without which it may be a choice: `causal` if attention is meant to be causal, `context`
    if a name says that an input is one, `pairing` if the rotary pairing is stated, `order` if it is
    known which projection is which, `fused` if they are parts of one. `shown_by`: `further` inputs,
    large ones and masks of windows, or `steps` with a cache. `may_be_nan`: it may leave only NaN.
    """

    name: str
    stages: Stages
    detail: str = ""
    changes: str = ""
    at: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    shown_by: Literal["", "further", "steps"] = ""
    may_be_nan: bool = False
    letters: str = ""
    gives: Letter | None = None

    @property
    def code(self) -> str:
        """The code that reports name."""
        return self.name.partition(",")[0]

    @property
    def stage(self) -> str:
        """The stage that it is a mistake of."""
        return next(iter(self.stages))

    @property
    def takes(self) -> Letter:
        """The first of q, k and v that it is wrong for."""
        return next((letter for letter in LETTERS if letter in self.letters), "q")

    @property
    def site(self) -> str:
        """The site that it changes."""
        return self.changes or _SITES[RIGHT[self.stage]].format(self.takes)

    def wrong(self, name: str) -> Callable[..., Any]:
        """Its stage of this name, which is right for other letters."""
        wrong, right = self.stages[name], RIGHT[name]
        if not self.letters:
            return wrong

        def chosen(*inputs: Any) -> Any:
            return (wrong if inputs[-1] in self.letters else right)(*inputs)

        return chosen


def stages_with(mistakes: Iterable[Mistake]) -> Stages:
    """The reference stages with these mistakes in place."""
    wrong = {name: mistake.wrong(name) for mistake in mistakes for name in mistake.stages}
    return {**RIGHT, **wrong}
