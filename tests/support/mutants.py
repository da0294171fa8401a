"""A zoo of wrong attentions: one ordinary layer, as people write it, and mistakes that each replace one of its stages.

`tests/test_mutants.py` holds the checks which every one of them must fail. Nothing here comes from mhacli.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """What a layer is told besides its weights. `positions`: none, sinusoidal, rope, rope-interleaved or alibi."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_v: int
    positions: str = "none"
    theta: float = 10000.0
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0


class Cache(NamedTuple):
    """Keys and values of the tokens so far, `[batch, kv_head, key, d]`."""

    keys: Tensor
    values: Tensor


class OrdinaryAttention:
    """Multi-head attention with each stage a method. Weights are named and laid out as on disk.

    Queries are taken to be the last of the keys: query `i` stands at place `k_len − q_len + i`. Padding is told by how many
    real tokens each sequence has, and on which side the others are.
    """

    def __init__(self, settings: Settings, weights: Mapping[str, Tensor]) -> None:
        self.settings, self.weights, self.training = settings, weights, True

    def train(self, mode: bool) -> None:
        self.training = mode

    def __call__(self, x, context=None, *, causal=False, lengths=None, side="right"):
        rows = x if context is None else context
        q_len, k_len = x.shape[1], rows.shape[1]
        q_at, k_at = self.places(q_len, k_len, lengths, side)
        q, k, v = self.heads(self.place(x, q_at), self.place(rows, k_at))
        q, k, v = self.rotate(q, k, v, q_at, k_at)
        return self.attend(q, k, v, self.distances(q_at, k_at), self.rules(q_len, k_len, causal, lengths, side))

    def step(self, rows, cache):
        """The same for new tokens only: `(out, pattern, cache)`. A cache of None is empty."""
        q_at, k_at = self.step_places(rows.shape[1], 0 if cache is None else cache.keys.shape[2])
        rows = self.place(rows, q_at)
        q, k, v = self.rotate_new(*self.heads(rows, rows), q_at)
        keys, values, cache = self.append(cache, k, v)
        rules = self.rules(q.shape[2], keys.shape[2], True, None, "right")
        return *self.attend(q, keys, values, self.distances(q_at, k_at), rules), cache

    def attend(self, q, k, v, bias, rules):
        pattern = self.pattern(q, self.repeat(k), bias, rules)
        z = self.weighted_sum(self.drop(pattern), self.repeat(v), rules)
        return self.project_out(self.merge(z)), pattern

    def places(self, q_len, k_len, lengths, side):
        """Where queries and keys stand among the real tokens, `[batch or 1, length]` each."""
        pads = (k_len - lengths)[:, None] if lengths is not None and side == "left" else 0
        return torch.arange(q_len)[None] + (k_len - q_len) - pads, torch.arange(k_len)[None] - pads

    def step_places(self, n_new, n_known):
        return self.places(n_new, n_known + n_new, None, "right")

    def place(self, rows, at):
        """Sinusoidal positions, added to the rows."""
        if self.settings.positions != "sinusoidal":
            return rows
        column = torch.arange(rows.shape[2])
        angle = at[..., None] * 10000.0 ** -(2 * (column // 2) / rows.shape[2])
        return rows + torch.where(column % 2 == 0, angle.sin(), angle.cos()).to(rows.dtype)

    def heads(self, x, rows):
        q, k, v = self.project(x, rows)
        n_kv_heads = self.settings.n_kv_heads
        return self.split(q, self.settings.n_heads), self.split(k, n_kv_heads), self.split(v, n_kv_heads)

    def project(self, x, rows):
        return self.linear(x, "q_proj"), self.linear(rows, "k_proj"), self.linear(rows, "v_proj")

    def linear(self, rows, name):
        return F.linear(rows, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def split(self, rows, n_heads):
        return rows.view(*rows.shape[:2], n_heads, -1).transpose(1, 2)

    def rotate(self, q, k, v, q_at, k_at):
        return self.turn(q, q_at), self.turn(k, k_at), v

    def rotate_new(self, q, k, v, at):
        return self.rotate(q, k, v, at, at)

    def turn(self, t, at):
        """RoPE: each pair of columns turned by place × frequency."""
        if not self.settings.positions.startswith("rope"):
            return t
        angle = at[:, None, :, None] * self.frequencies(t.shape[-1])
        return self.turn_pairs(t, angle.cos().to(t.dtype), angle.sin().to(t.dtype))

    def frequencies(self, d_head):
        return self.settings.theta ** -(torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)

    def turn_pairs(self, t, cos, sin):
        return (
            turn_neighbours(t, cos, sin) if self.settings.positions == "rope-interleaved" else turn_halves(t, cos, sin)
        )

    def distances(self, q_at, k_at):
        """ALiBi: what is added to the scores, `[batch, head, query, key]`."""
        if self.settings.positions != "alibi":
            return None
        return -self.slopes()[:, None, None] * (q_at[:, None, :, None] - k_at[:, None, None, :]).abs()

    def slopes(self):
        n_heads = self.settings.n_heads
        whole = 2 ** int(
            math.log2(n_heads)
        )  # the paper's rule is for powers of two; its code fills up from the next one
        return torch.cat([geometric(whole), geometric(2 * whole)[0::2]])[:n_heads]

    def rules(self, q_len, k_len, causal, lengths, side):
        """Bool masks that broadcast to `[batch, head, query, key]`, True = may attend."""
        causal_rules = [self.causal_rule(q_len, k_len)] if causal else []
        return causal_rules + ([] if lengths is None else [self.padding_rule(q_len, k_len, lengths, side)])

    def causal_rule(self, q_len, k_len):
        return torch.ones(1, 1, q_len, k_len, dtype=torch.bool).tril(k_len - q_len)

    def padding_rule(self, q_len, k_len, lengths, side):
        return real_tokens(k_len, lengths, side)[:, None, None, :]

    def repeat(self, t):
        return t.repeat_interleave(self.settings.n_heads // self.settings.n_kv_heads, dim=1)

    def pattern(self, q, k, bias, rules):
        return self.softmax(self.scores(q, k, bias, rules))

    def scores(self, q, k, bias, rules):
        return self.mask(self.add_bias(self.cap(self.scale(self.products(q, k))), bias), rules)

    def products(self, q, k):
        return q @ k.mT

    def scale(self, scores):
        return scores * (self.default_scale() if self.settings.scale is None else self.settings.scale)

    def default_scale(self):
        return self.settings.d_head**-0.5

    def cap(self, scores):
        c = self.settings.softcap
        return scores if c is None else c * torch.tanh(scores / c)

    def add_bias(self, scores, bias):
        return scores if bias is None else scores + bias.to(scores.dtype)

    def mask(self, scores, rules):
        return scores.masked_fill(~together(rules), -math.inf)

    def softmax(self, scores):
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        empty = (wide == -math.inf).all(dim=-1, keepdim=True)
        return wide.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0).to(scores.dtype)

    def drop(self, pattern):
        return F.dropout(pattern, self.settings.dropout, self.training)

    def weighted_sum(self, shares, v, rules):
        seen = together(rules).any(dim=-2)[..., None]  # what nobody sees may hold NaN
        return shares @ v.masked_fill(~seen, 0.0)

    def merge(self, z):
        return z.transpose(1, 2).flatten(2)

    def project_out(self, rows):
        return self.linear(rows, "o_proj")

    def append(self, cache, k, v):
        """What the new queries attend to, keys and values, and what the next step is given."""
        if cache is not None:
            k, v = torch.cat([cache.keys, k], dim=2), torch.cat([cache.values, v], dim=2)
        return k, v, Cache(k, v)


def together(rules: list[Tensor]) -> Tensor:
    """What every rule allows."""
    return functools.reduce(torch.logical_and, rules, torch.ones(1, 1, 1, 1, dtype=torch.bool))


def real_tokens(length: int, lengths: Tensor, side: str) -> Tensor:
    """`[batch, length]`, True where a sequence has a token and False where it is filled up."""
    idx = torch.arange(length)[None]
    return idx < lengths[:, None] if side == "right" else idx >= length - lengths[:, None]


def geometric(n_heads: int) -> Tensor:
    """ALiBi's slopes for a power of two."""
    return 2.0 ** (-8 * torch.arange(1, n_heads + 1, dtype=torch.float64) / n_heads)


def turn_halves(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Column `j` is rotated together with column `j + d/2`."""
    a, b = t.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def turn_neighbours(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Column `2j` is rotated together with column `2j + 1`."""
    a, b = t[..., 0::2], t[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


@dataclass(frozen=True)
class Mutant:
    """One mistake: the ordinary layer with one stage replaced. `equivalent` proves that nobody could notice."""

    name: str
    mistake: str
    seen_in: str
    stage: str
    replacement: Callable[..., Any]
    equivalent: str | None = None

    def __call__(self, settings: Settings, weights: Mapping[str, Tensor]) -> OrdinaryAttention:
        return type(self.name, (OrdinaryAttention,), {self.stage: self.replacement})(settings, weights)


_zoo: list[Mutant] = []


def replaces(stage: str, *, seen_in: str = "", equivalent: str | None = None) -> Callable[..., Any]:
    """Puts a function into the zoo: its name is the mutant's, its docstring the mistake."""

    def put(replacement: Callable[..., Any]) -> Callable[..., Any]:
        name, mistake = replacement.__name__.replace("_", "-"), (replacement.__doc__ or "").strip()
        _zoo.append(Mutant(name, mistake, seen_in, stage, replacement, equivalent))
        return replacement

    return put


# Softmax


@replaces("softmax", seen_in="fastNLP#254")
def softmax_over_queries(layer, scores):
    """The weights of each key sum to 1 over the queries, not those of each query over the keys."""
    return scores.softmax(dim=-2)


@replaces("softmax")
def softmax_over_heads(layer, scores):
    """The weights of a cell sum to 1 over the heads."""
    return scores.softmax(dim=1)


@replaces("softmax", seen_in="PyTorch-NLP#2, jadore801120#52")
def softmax_over_batch(layer, scores):
    """The weights of a cell sum to 1 over the sequences of the batch."""
    return scores.softmax(dim=0)


@replaces("softmax")
def softmax_without_maximum(layer, scores):
    """exp of the scores as they are: large scores become infinite, and infinite over infinite is NaN."""
    powers = scores.exp()
    total = powers.sum(dim=-1, keepdim=True)
    return powers / torch.where(total == 0, 1.0, total)


@replaces("softmax", seen_in="pytorch#41508, mlx#2608")
def fully_masked_row_nan(layer, scores):
    """A query without an allowed key gets 0/0: its row, and whatever reads it, is NaN."""
    return scores.softmax(dim=-1)


@replaces("pattern", seen_in="pytorch#41508")
def fully_masked_gradient_nan(layer, q, k, bias, rules):
    """−∞ is added, and the NaN of a fully masked row overwritten after the softmax: it lives on in the gradient."""
    scores = layer.scores(q, k, bias, [])
    scores = scores + torch.where(together(rules), 0.0, -math.inf).to(scores.dtype)
    return scores.softmax(dim=-1).masked_fill((scores == -math.inf).all(dim=-1, keepdim=True), 0.0)


@replaces(
    "softmax",
    equivalent="a score that was filled with −∞ has the gradient 0, and in such a row every score was filled",
)
def fully_masked_row_mended_late(layer, scores):
    """The NaN of a fully masked row is overwritten after the softmax."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    empty = (wide == -math.inf).all(dim=-1, keepdim=True)
    return wide.softmax(dim=-1).masked_fill(empty, 0.0).to(scores.dtype)


# Heads


@replaces("split", seen_in="FuxiCTR#30, Chinese-Text-Classification#53")
def split_without_transpose(layer, rows, n_heads):
    """The rows are read as heads without moving the axis: a head gets some tokens, not some columns."""
    return rows.reshape(rows.shape[0], n_heads, rows.shape[1], -1)


@replaces("split")
def split_by_every_nth_column(layer, rows, n_heads):
    """A head gets every n-th column, although the weights hold its columns side by side."""
    return rows.view(*rows.shape[:2], -1, n_heads).permute(0, 3, 1, 2)


@replaces("merge", seen_in="transformer-from-scratch#4, jadore801120#7")
def merge_without_transpose(layer, z):
    """The heads are read as rows without moving the axis back: tokens and heads are mixed."""
    return z.reshape(z.shape[0], z.shape[2], -1)


@replaces("merge")
def heads_averaged(layer, z):
    """The mean of the heads takes the place of each head."""
    return z.mean(dim=1, keepdim=True).expand_as(z).transpose(1, 2).flatten(2)


@replaces("merge", seen_in="functional-transformer#8")
def heads_summed(layer, z):
    """The sum of the heads takes the place of each head."""
    return z.sum(dim=1, keepdim=True).expand_as(z).transpose(1, 2).flatten(2)


@replaces("repeat", seen_in="onnx#7274, jax-js#180")
def kv_heads_tiled(layer, t):
    """The kv heads are repeated as 0 1 0 1, so that query heads read a neighbour's keys; right is 0 0 1 1."""
    return t.repeat(1, layer.settings.n_heads // layer.settings.n_kv_heads, 1, 1)


@replaces("repeat")
def kv_head_by_number_of_kv_heads(layer, t):
    """Query head h reads kv head h // n_kv_heads, where h // (heads per kv head) is meant."""
    return t[:, (torch.arange(layer.settings.n_heads) // t.shape[1]).clamp(max=t.shape[1] - 1)]


@replaces("repeat")
def first_kv_head_for_all(layer, t):
    """Every query head reads kv head 0."""
    return t[:, :1].expand(-1, layer.settings.n_heads, -1, -1)


# Scores


@replaces("products")
def queries_and_keys_swapped(layer, q, k):
    """k qᵀ instead of q kᵀ: the table of scores is transposed."""
    return k @ q.mT


@replaces("default_scale", seen_in="tiny-transformers#71")
def scale_missing(layer):
    """The scores are not divided by √d_head, and the softmax is too sharp."""
    return 1.0


@replaces("default_scale", seen_in="vit-pytorch#65, ViT-CIFAR#11, dfdx#171")
def scale_by_model_width(layer):
    """The scores are divided by √d_model."""
    return layer.settings.d_model**-0.5


@replaces("default_scale")
def scale_without_root(layer):
    """The scores are divided by d_head, not by its root."""
    return 1 / layer.settings.d_head


@replaces("default_scale", seen_in="perceiver-io#9")
def scale_multiplied(layer):
    """The scores are multiplied by √d_head."""
    return layer.settings.d_head**0.5


@replaces("scale")
def scale_applied_twice(layer, scores):
    """Both the queries and the scores are scaled."""
    return OrdinaryAttention.scale(layer, OrdinaryAttention.scale(layer, scores))


@replaces("pattern", seen_in="ViT#2")
def scale_after_softmax(layer, q, k, bias, rules):
    """The weights are scaled, not the scores."""
    shares = layer.softmax(layer.mask(layer.add_bias(layer.cap(layer.products(q, k)), bias), rules))
    return layer.scale(shares)


@replaces("scale", seen_in="TransformerLens#385")
def given_scale_ignored(layer, scores):
    """A model with a scale of its own is run with 1/√d_head."""
    return scores * layer.default_scale()


@replaces("cap", seen_in="TransformerLens#693")
def softcap_ignored(layer, scores):
    """The bound on the scores is not applied."""
    return scores


@replaces("cap")
def softcap_not_scaled_back(layer, scores):
    """tanh(score / c) without the factor c in front: every score ends within ±1."""
    return scores if layer.settings.softcap is None else torch.tanh(scores / layer.settings.softcap)


@replaces("scores")
def softcap_after_mask(layer, q, k, bias, rules):
    """The cap turns the −∞ of a masked key into −c: masked keys get a weight again."""
    return layer.cap(layer.mask(layer.add_bias(layer.scale(layer.products(q, k)), bias), rules))


@replaces("scores")
def softcap_after_bias(layer, q, k, bias, rules):
    """The cap squeezes the distances too, which are to be added after it."""
    return layer.mask(layer.cap(layer.add_bias(layer.scale(layer.products(q, k)), bias)), rules)


# Causal mask


@replaces("causal_rule", seen_in="former#10")
def causal_hides_self(layer, q_len, k_len):
    """Off by one: a token does not see itself."""
    return OrdinaryAttention.causal_rule(layer, q_len, k_len).tril(k_len - q_len - 1)


@replaces("causal_rule", seen_in="GPT-SoVITS#965")
def causal_shows_next(layer, q_len, k_len):
    """Off by one: a token sees the one that it should predict."""
    return torch.ones(1, 1, q_len, k_len, dtype=torch.bool).tril(k_len - q_len + 1)


@replaces("causal_rule")
def causal_transposed(layer, q_len, k_len):
    """The triangle is upside down: a token sees itself and the future, not the past."""
    return torch.ones(1, 1, q_len, k_len, dtype=torch.bool).triu(k_len - q_len)


@replaces("causal_rule", seen_in="pytorch#108108, mlx#2835")
def causal_from_top_left(layer, q_len, k_len):
    """The first query stands at the first key, although the queries are the last tokens."""
    return torch.ones(1, 1, q_len, k_len, dtype=torch.bool).tril()


@replaces("rules", seen_in="keras#23038, xformers#103")
def causal_lost_with_padding(layer, q_len, k_len, causal, lengths, side):
    """Where a padding mask is given, it takes the place of the causal one."""
    return OrdinaryAttention.rules(layer, q_len, k_len, causal and lengths is None, lengths, side)


# How a mask acts


@replaces("mask", seen_in="LLMs-from-scratch#1061, cs249r_book#1785")
def mask_inverted(layer, scores, rules):
    """True is taken for "hide": just the allowed keys are hidden."""
    return scores.masked_fill(together(rules), -math.inf) if rules else scores


@replaces("mask")
def mask_multiplied_before_softmax(layer, scores, rules):
    """The scores of masked keys become 0, which is a score like any other."""
    return scores * together(rules)


@replaces("mask", seen_in="pytorch#21518")
def mask_added_as_zeros_and_ones(layer, scores, rules):
    """The mask is added to the scores as 0 and 1: masked keys are a little less attractive."""
    return scores + together(rules).to(scores.dtype)


@replaces("mask")
def mask_times_infinity(layer, scores, rules):
    """(1 − mask) · −∞ is NaN wherever the mask is 1."""
    return scores + (1 - together(rules).to(scores.dtype)) * -math.inf


@replaces("pattern")
def mask_after_softmax(layer, q, k, bias, rules):
    """Masked weights are erased after the softmax, and the rest no longer sums to 1."""
    return layer.softmax(layer.scores(q, k, bias, [])) * together(rules)


@replaces("mask", seen_in="transformers#17306, TransformerLens#385")
def sentinel_too_small(layer, scores, rules):
    """Masked scores are −10000, and real ones can be lower still."""
    return scores.masked_fill(~together(rules), -1e4)


@replaces("mask", seen_in="apex#93, flax#982")
def sentinel_too_large_for_float16(layer, scores, rules):
    """Masked scores are −10⁹, a number that float16 does not have."""
    return scores.masked_fill(~together(rules), -1e9)


@replaces("mask", seen_in="transformers#38690")
def fully_masked_row_mean(layer, scores, rules):
    """Masked scores are the lowest finite number: a row of nothing else is uniform, and gives the mean of v."""
    return scores.masked_fill(~together(rules), torch.finfo(scores.dtype).min)


@replaces("mask", seen_in="NeMo Automodel#2658")
def lowest_number_added_twice(layer, scores, rules):
    """Each mask adds the lowest finite number; two of them overflow to −∞, and one beats the other."""
    for rule in rules:
        scores = scores + (~rule).to(scores.dtype) * torch.finfo(scores.dtype).min
    return scores


@replaces("mask", seen_in="attention-is-all-you-need-keras#36")
def mask_repeated_in_another_order(layer, scores, rules):
    """Batch and heads are one axis, the batch outside, but the mask is repeated with the batch inside."""
    batch, n_heads, q_len, k_len = scores.shape
    planes = together(rules).expand(batch, 1, q_len, k_len).flatten(0, 1).repeat(n_heads, 1, 1)
    return scores.masked_fill(~planes.view(batch, n_heads, q_len, k_len), -math.inf)


# Padding


@replaces("padding_rule")
def padding_ignored(layer, q_len, k_len, lengths, side):
    """Padding is attended to like any token."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool)


@replaces("padding_rule")
def padding_inverted(layer, q_len, k_len, lengths, side):
    """Only padding is attended to."""
    return ~real_tokens(k_len, lengths, side)[:, None, None, :]


@replaces("padding_rule")
def padding_of_queries(layer, q_len, k_len, lengths, side):
    """The mask lies along the queries: padding attends to nothing, but every token attends to it."""
    return real_tokens(q_len, lengths, side)[:, None, :, None]


@replaces("padding_rule")
def padding_on_the_right_always(layer, q_len, k_len, lengths, side):
    """Left padding is masked as if it were on the right: real tokens are lost."""
    return real_tokens(k_len, lengths, "right")[:, None, None, :]


@replaces("padding_rule")
def padding_of_the_first_sequence(layer, q_len, k_len, lengths, side):
    """Every sequence is taken to be as long as the first one."""
    return real_tokens(k_len, lengths[:1], side)[:, None, None, :]


@replaces("weighted_sum", seen_in="pytorch#101967")
def masked_nan_leaks(layer, shares, v, rules):
    """A weight of 0 times a NaN that stands in the padding is NaN."""
    return shares @ v


@replaces("places", seen_in="TransformerLens#1609")
def left_padding_counted_in_positions(layer, q_len, k_len, lengths, side):
    """Positions count from the first padding, so that a padded sentence stands elsewhere than the same one alone."""
    return OrdinaryAttention.places(layer, q_len, k_len, None, side)


@replaces(
    "places", equivalent="rotations and distances depend on the difference of two places, where the padding cancels"
)
def left_padding_counted_in_relative_positions(layer, q_len, k_len, lengths, side):
    """Positions count from the first padding, but only where rotations or distances use them."""
    absolute = layer.settings.positions == "sinusoidal"
    return OrdinaryAttention.places(layer, q_len, k_len, lengths if absolute else None, side)


# Projections


@replaces("project")
def fused_weights_cut_as_kqv(layer, x, rows):
    """Weights that lie as q, k, v in one matrix are cut as k, q, v."""
    parts = [torch.cat([layer.weights[f"{p}_proj.{kind}"] for p in "qkv"]) for kind in ("weight", "bias")]
    q_width, k_width, v_width = (len(layer.weights[f"{p}_proj.bias"]) for p in "qkv")
    weights, biases = (part.split([k_width, q_width, v_width]) for part in parts)
    return (
        F.linear(x, weights[1], biases[1]),
        F.linear(rows, weights[0], biases[0]),
        F.linear(rows, weights[2], biases[2]),
    )


@replaces("project", seen_in="slapo#46, NeMo-RL#2802")
def fused_weights_cut_per_group(layer, x, rows):
    """Weights that lie as q, k, v in one matrix are cut as q, k, v of each kv head in turn."""
    widths = [len(layer.weights[f"{p}_proj.bias"]) // layer.settings.n_kv_heads for p in "qkv"]
    fused = [torch.cat([layer.weights[f"{p}_proj.{kind}"] for p in "qkv"]) for kind in ("weight", "bias")]
    weights, biases = (part.unflatten(0, (layer.settings.n_kv_heads, -1)).split(widths, dim=1) for part in fused)
    sources = (x, rows, rows)
    return tuple(F.linear(r, w.flatten(0, 1), b.flatten()) for r, w, b in zip(sources, weights, biases, strict=True))


@replaces("project", seen_in="AnnotatedTransformer#1")
def values_from_the_projection_of_keys(layer, x, rows):
    """The values are made with the weights of the keys; where the widths agree, nothing complains."""
    return layer.linear(x, "q_proj"), layer.linear(rows, "k_proj"), layer.linear(rows, "k_proj")


@replaces("project")
def values_of_the_queries_rows(layer, x, rows):
    """In cross-attention the values are made from the querying rows, not from the context."""
    return layer.linear(x, "q_proj"), layer.linear(rows, "k_proj"), layer.linear(x, "v_proj")


def _without_bias_of(name: str) -> Callable[..., Tensor]:
    def linear(layer, rows, proj):
        return OrdinaryAttention.linear(layer, rows, proj) if proj != name else rows @ layer.weights[f"{proj}.weight"].T

    return linear


@replaces("linear")
def query_bias_dropped(layer, rows, name):
    """The queries are projected without their bias."""
    return _without_bias_of("q_proj")(layer, rows, name)


@replaces("linear")
def key_bias_dropped(layer, rows, name):
    """The keys are projected without their bias: seen only where a rotation or a cap follows."""
    return _without_bias_of("k_proj")(layer, rows, name)


@replaces(
    "linear",
    equivalent="q·b is the same for every key, and a constant added to all scores of a row cancels in the softmax",
)
def key_bias_dropped_without_rotation(layer, rows, name):
    """The keys are projected without their bias, but only where neither rotation nor cap follows."""
    plain = layer.settings.softcap is None and not layer.settings.positions.startswith("rope")
    return _without_bias_of("k_proj" if plain else "")(layer, rows, name)


@replaces("linear")
def value_bias_dropped(layer, rows, name):
    """The values are projected without their bias."""
    return _without_bias_of("v_proj")(layer, rows, name)


@replaces("linear")
def output_bias_dropped(layer, rows, name):
    """The output is projected without its bias."""
    return _without_bias_of("o_proj")(layer, rows, name)


@replaces("project_out", seen_in="Kyubyong/transformer#117")
def output_projection_missing(layer, rows):
    """The heads side by side are returned as they are."""
    return rows


@replaces("project_out")
def output_projection_transposed(layer, rows):
    """The weights of the output are stored the other way round; where they are square, nothing complains."""
    return rows @ layer.weights["o_proj.weight"] + layer.weights["o_proj.bias"]


# Dropout, and what is returned


@replaces("drop", seen_in="pytorch#124464, nanoGPT#240")
def dropout_in_evaluation(layer, pattern):
    """Dropout acts although the layer is not in training."""
    return F.dropout(pattern, layer.settings.dropout, training=True)


@replaces("train", seen_in="Megatron-LM#411")
def dropout_lost_after_evaluation(layer, mode):
    """After the first evaluation the layer never drops again."""
    layer.training = layer.training and mode


@replaces("drop")
def dropout_not_rescaled(layer, pattern):
    """The weights that are kept are not divided by 1 − p, and the expected sum is too small."""
    dropped = F.dropout(pattern, layer.settings.dropout, layer.training)
    return dropped * (1 - layer.settings.dropout) if layer.training else dropped


@replaces("drop")
def dropout_with_the_probability_of_keeping(layer, pattern):
    """The probability of keeping a weight is taken for that of dropping it."""
    return F.dropout(pattern, 1 - layer.settings.dropout, layer.training) if layer.settings.dropout else pattern


@replaces("attend")
def dropout_of_scores(layer, q, k, v, bias, rules):
    """Scores are dropped before the softmax: a score of 0 is not a weight of 0."""
    scores = layer.drop(layer.scores(q, layer.repeat(k), bias, []))
    pattern = layer.softmax(layer.mask(scores, rules))
    return layer.project_out(layer.merge(layer.weighted_sum(pattern, layer.repeat(v), rules))), pattern


@replaces("attend", seen_in="pytorch#33360, flash-attention#902")
def pattern_after_dropout(layer, q, k, v, bias, rules):
    """The pattern that is returned has lost the dropped weights, and its rows do not sum to 1."""
    shares = layer.drop(layer.pattern(q, layer.repeat(k), bias, rules))
    return layer.project_out(layer.merge(layer.weighted_sum(shares, layer.repeat(v), rules))), shares


@replaces("attend", seen_in="pytorch#47583, fairseq#3365")
def pattern_averaged_over_heads(layer, q, k, v, bias, rules):
    """The mean of the heads is returned as the pattern."""
    out, pattern = OrdinaryAttention.attend(layer, q, k, v, bias, rules)
    return out, pattern.mean(dim=1)


# Positions


@replaces("turn_pairs", seen_in="transformers#25199, LLMs-from-scratch#746")
def rope_pairs_neighbours_for_halves(layer, t, cos, sin):
    """Columns 2j and 2j + 1 are rotated together, although the weights were made for j and j + d/2."""
    return turn_neighbours(t, cos, sin)


@replaces("turn_pairs", seen_in="nanotron#427")
def rope_pairs_halves_for_neighbours(layer, t, cos, sin):
    """Columns j and j + d/2 are rotated together, although the weights were made for 2j and 2j + 1."""
    return turn_halves(t, cos, sin)


@replaces("rotate")
def rope_of_values_too(layer, q, k, v, q_at, k_at):
    """The values are rotated as well, and a token's content depends on its place."""
    return layer.turn(q, q_at), layer.turn(k, k_at), layer.turn(v, k_at)


@replaces("rotate")
def rope_of_queries_only(layer, q, k, v, q_at, k_at):
    """The keys are not rotated: scores depend on where the query stands, not on the distance."""
    return layer.turn(q, q_at), k, v


@replaces("rotate")
def rope_queries_off_by_one(layer, q, k, v, q_at, k_at):
    """The queries count from 1 and the keys from 0: every distance is one too large."""
    return layer.turn(q, q_at + 1), layer.turn(k, k_at), v


@replaces(
    "rotate", equivalent="a rotated pair's product depends on the difference of its places, where the shift cancels"
)
def rope_counted_from_one(layer, q, k, v, q_at, k_at):
    """Queries and keys both count from 1."""
    return layer.turn(q, q_at + 1), layer.turn(k, k_at + 1), v


@replaces("turn_pairs", seen_in="nanochat#489")
def rope_turned_backwards(layer, t, cos, sin):
    """The sign of the sine is wrong: the past is taken for the future."""
    return OrdinaryAttention.turn_pairs(layer, t, cos, -sin)


@replaces("frequencies", seen_in="TransformerLens#910")
def rope_base_ignored(layer, d_head):
    """A model with a base of its own is run with 10000."""
    return 10000.0 ** -(torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)


@replaces("frequencies")
def rope_exponent_halved(layer, d_head):
    """The frequencies fall with j/d, not with 2j/d."""
    return layer.settings.theta ** -(torch.arange(d_head // 2, dtype=torch.float64) / d_head)


@replaces("distances")
def alibi_sign_wrong(layer, q_at, k_at):
    """Distance is rewarded: the farther a key, the higher its score."""
    bias = OrdinaryAttention.distances(layer, q_at, k_at)
    return None if bias is None else -bias


@replaces("distances")
def alibi_of_the_key_alone(layer, q_at, k_at):
    """Slope × key position: the same as the distance only where nobody sees a later key."""
    bias = OrdinaryAttention.distances(layer, q_at, k_at)
    return None if bias is None else layer.slopes()[:, None, None] * k_at[:, None, None, :]


@replaces("slopes")
def alibi_slope_same_for_all_heads(layer):
    """Every head has the slope of the first one."""
    return OrdinaryAttention.slopes(layer)[:1].expand(layer.settings.n_heads)


@replaces("slopes")
def alibi_slopes_start_at_one(layer):
    """The heads are counted from 0 in the exponent: the first slope is 1."""
    return OrdinaryAttention.slopes(layer) * 2.0 ** (8 / layer.settings.n_heads)


@replaces("slopes")
def alibi_slopes_for_powers_of_two_only(layer):
    """The rule for powers of two is used for any number of heads, which the published code does not."""
    return geometric(layer.settings.n_heads)


# Cache


@replaces("append")
def cache_appended_after_use(layer, cache, k, v):
    """The new tokens attend to the cache as it was, without themselves."""
    seen = Cache(k[:, :, :0], v[:, :, :0]) if cache is None else cache
    return *seen, OrdinaryAttention.append(layer, cache, k, v)[2]


@replaces("append")
def cache_forgotten(layer, cache, k, v):
    """Each step overwrites what the cache held."""
    return k, v, Cache(k, v)


@replaces("append")
def cache_newest_first(layer, cache, k, v):
    """New tokens are put in front of the old ones."""
    if cache is not None:
        k, v = torch.cat([k, cache.keys], dim=2), torch.cat([v, cache.values], dim=2)
    return k, v, Cache(k, v)


@replaces("append")
def cache_keys_and_values_swapped(layer, cache, k, v):
    """The values are stored as keys and the keys as values; where the widths agree, nothing complains."""
    keys, values, _ = OrdinaryAttention.append(layer, cache, k, v)
    return keys, values, Cache(values, keys)


@replaces("step_places", seen_in="torchtune#1622")
def cache_position_always_zero(layer, n_new, n_known):
    """A new token is rotated as if it were the first."""
    return torch.arange(n_new)[None], torch.arange(n_known + n_new)[None]


@replaces("rotate_new", seen_in="torchtune#1622")
def cache_keys_not_turned(layer, q, k, v, at):
    """Keys go into the cache before the rotation, and they are never rotated later."""
    return layer.turn(q, at), k, v


@replaces("append")
def cache_keys_turned_again(layer, cache, k, v):
    """Keys are rotated before they are stored, and the whole cache is rotated again at every step."""
    if cache is not None:
        cache = Cache(layer.turn(cache.keys, torch.arange(cache.keys.shape[2])[None]), cache.values)
    return OrdinaryAttention.append(layer, cache, k, v)


MUTANTS = tuple(_zoo)
