"""Checks of an attention layer, and what they are worth: every wrong layer of `mutants` must fail one of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support import oracle
from support.mutants import MUTANTS, Mutant, OrdinaryAttention, Settings
from torch import Tensor

from mhacli.attention import masks
from mhacli.attention.layer import ConcatCache, MultiHeadAttention, PreallocatedCache
from mhacli.attention.positions import sinusoidal

Factory = Callable[[Settings, Mapping[str, Tensor]], Any]
Check = Callable[[Factory], None]

TOLERANCE = 1e-10
FLOAT16_TOLERANCE = 5e-3
GROUPED = Settings(d_model=7, n_heads=6, n_kv_heads=2, d_head=4, d_v=3)
PAIRED = Settings(d_model=11, n_heads=6, n_kv_heads=3, d_head=4, d_v=5)
ODD = Settings(d_model=10, n_heads=9, n_kv_heads=3, d_head=5, d_v=2)
SQUARE = Settings(d_model=12, n_heads=3, n_kv_heads=3, d_head=4, d_v=4)  # where a wrong width or order still fits
ALIBI = Settings(d_model=7, n_heads=4, n_kv_heads=2, d_head=4, d_v=3, positions="alibi")
HALVES = replace(
    GROUPED, d_v=6, positions="rope"
)  # an even d_v: values that are turned too must not stop by themselves
NEIGHBOURS = replace(HALVES, positions="rope-interleaved")
BATCH = 2

CHECKS: dict[str, Check] = {}


def check(name: str, **choices: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a function to the checks, with some of its arguments chosen."""

    def put(function: Callable[..., None]) -> Callable[..., None]:
        CHECKS[name] = functools.partial(function, **choices)
        return function

    return put


# The truth


@dataclass(frozen=True)
class Case:
    """One call of a layer. `k_len` of None is self-attention; `loud` multiplies the queries."""

    settings: Settings
    q_len: int = 5
    k_len: int | None = None
    causal: bool = False
    lengths: tuple[int, ...] | None = None
    side: str = "right"
    loud: float = 1.0
    dtype: torch.dtype = torch.float64

    @property
    def keys(self) -> int:
        return self.q_len if self.k_len is None else self.k_len

    def weights(self) -> dict[str, Tensor]:
        weights = random_weights(self.settings)
        weights |= {f"q_proj.{kind}": self.loud * weights[f"q_proj.{kind}"] for kind in ("weight", "bias")}
        return {name: tensor.to(self.dtype) for name, tensor in weights.items()}

    def rows(self) -> tuple[Tensor, Tensor | None]:
        """The querying rows, and the context where there is one."""
        x = normal(BATCH, self.q_len, self.settings.d_model, seed=1).to(self.dtype)
        if self.k_len is None:
            return x, None
        return x, normal(BATCH, self.k_len, self.settings.d_model, seed=2).to(self.dtype)

    def sees(self, b: int, i: int, j: int) -> bool:
        """Whether query `i` may attend to key `j`; the last query stands at the last key."""
        n_pads = 0 if self.lengths is None else self.keys - self.lengths[b]
        is_real = j >= n_pads if self.side == "left" else j < self.keys - n_pads
        return is_real and (not self.causal or j <= i + self.keys - self.q_len)

    def visible(self) -> np.ndarray:
        return oracle.full(self.sees, BATCH, self.settings.n_heads, self.q_len, self.keys)


def normal(*shape: int, seed: int, std: float = 1.0) -> Tensor:
    return std * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_weights(settings: Settings) -> dict[str, Tensor]:
    """Weights that keep the size of what they read, and biases that are not zero, which would hide mistakes with them."""
    heads, kv_heads = settings.n_heads, settings.n_kv_heads
    shapes = {
        "q": (heads * settings.d_head, settings.d_model), "k": (kv_heads * settings.d_head, settings.d_model),
        "v": (kv_heads * settings.d_v, settings.d_model), "o": (settings.d_model, heads * settings.d_v),
    }  # fmt: skip
    weights = {}
    for seed, (name, (d_out, d_in)) in enumerate(shapes.items()):
        weights[f"{name}_proj.weight"] = normal(d_out, d_in, seed=10 + seed, std=d_in**-0.5)
        weights[f"{name}_proj.bias"] = normal(d_out, seed=20 + seed, std=0.5)
    return weights


class Truth(NamedTuple):
    pattern: Tensor
    out: Tensor


@functools.cache
def by_loops(case: Case) -> Truth:
    """The layer by its formula, in Python floats."""
    settings = case.settings
    weights = {name: tensor.double().tolist() for name, tensor in case.weights().items()}
    x, context = (None if rows is None else rows.double().tolist() for rows in case.rows())
    n_pads = [case.keys - n if case.lengths and case.side == "left" else 0 for n in case.lengths or [0] * BATCH]
    q_at = [[i + case.keys - case.q_len - n for i in range(case.q_len)] for n in n_pads]
    k_at = [[j - n for j in range(case.keys)] for n in n_pads]
    rows = x if context is None else context
    q = turned(oracle.cut(oracle.linear(x, weights, "q_proj"), settings.n_heads), q_at, settings)
    k = turned(oracle.cut(oracle.linear(rows, weights, "k_proj"), settings.n_kv_heads), k_at, settings)
    v = oracle.cut(oracle.linear(rows, weights, "v_proj"), settings.n_kv_heads)
    bias = distances(settings.n_heads, q_at, k_at) if settings.positions == "alibi" else None
    found = oracle.attention(q, k, v, scale=settings.scale, softcap=settings.softcap, bias=bias, allowed=case.visible())
    out = oracle.linear(oracle.joined(found.z), weights, "o_proj")
    return Truth(torch.from_numpy(found.pattern), torch.from_numpy(out))


def turned(heads: np.ndarray, at: list[list[int]], settings: Settings) -> np.ndarray:
    """RoPE: Su et al. 2021, equation 34, with the pairs of the paper or those of its half-rotating relatives."""
    if not settings.positions.startswith("rope"):
        return heads
    d, result = heads.shape[3], np.zeros_like(heads)
    for b, h, t, j in np.ndindex(*heads.shape[:3], d // 2):
        first, second = (2 * j, 2 * j + 1) if settings.positions == "rope-interleaved" else (j, j + d // 2)
        angle = at[b][t] / settings.theta ** (2 * j / d)
        a, c = float(heads[b, h, t, first]), float(heads[b, h, t, second])
        result[b, h, t, first] = a * math.cos(angle) - c * math.sin(angle)
        result[b, h, t, second] = a * math.sin(angle) + c * math.cos(angle)
    return result


def distances(n_heads: int, q_at: list[list[int]], k_at: list[list[int]]) -> np.ndarray:
    """ALiBi: Press et al. 2022, section 3, and for other numbers of heads than powers of two their published code."""
    below = 1
    while 2 * below <= n_heads:
        below *= 2
    slopes = [2.0 ** (-8 * (h + 1) / below) for h in range(below)]
    slopes += [2.0 ** (-8 * (2 * h + 1) / (2 * below)) for h in range(n_heads - below)]
    cells = np.zeros((BATCH, n_heads, len(q_at[0]), len(k_at[0])))
    for b, h, i, j in np.ndindex(*cells.shape):
        cells[b, h, i, j] = -slopes[h] * abs(q_at[b][i] - k_at[b][j])
    return cells


@functools.cache
def of_equal_shares(settings: Settings, k_len: int) -> Tensor:
    """`w_o · mean(v) + b_o`, one row per sequence: what each query gets that attends to all keys alike."""
    weights = {name: tensor.tolist() for name, tensor in random_weights(settings).items()}
    context = Case(settings, k_len=k_len).rows()[1]
    v = oracle.cut(oracle.linear(context, weights, "v_proj"), settings.n_kv_heads)
    group = settings.n_heads // settings.n_kv_heads
    z = np.zeros((BATCH, settings.n_heads, 1, settings.d_v))
    for b, h, c in np.ndindex(BATCH, settings.n_heads, settings.d_v):
        z[b, h, 0, c] = sum(float(v[b, h // group, j, c]) for j in range(k_len)) / k_len
    return torch.from_numpy(oracle.linear(oracle.joined(z), weights, "o_proj"))


def close(found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    """NaN is never close: every comparison with it is false."""
    assert found.shape == wanted.shape
    difference = float((found.double() - wanted.double()).abs().max())
    assert difference <= tolerance


def ready(make: Factory, settings: Settings, weights: Mapping[str, Tensor] | None = None) -> Any:
    """A layer that is not in training."""
    layer = make(settings, random_weights(settings) if weights is None else weights)
    layer.train(False)
    return layer


def answer(make: Factory, case: Case, *, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What a layer says to a case: `(out, pattern)`."""
    own, context = case.rows()
    lengths = None if case.lengths is None else torch.tensor(case.lengths)
    layer = ready(make, case.settings, case.weights())
    return layer(own if x is None else x, context, causal=case.causal, lengths=lengths, side=case.side)


# Properties

PADDED = {side: Case(GROUPED, lengths=(5, 3), side=side) for side in ("right", "left")}
MASKED = (
    Case(GROUPED, causal=True), Case(GROUPED, q_len=3, k_len=7, causal=True), PADDED["right"], PADDED["left"],
    Case(GROUPED, causal=True, lengths=(5, 3), side="left"), replace(Case(GROUPED, causal=True), settings=ALIBI),
    Case(replace(GROUPED, softcap=2.0), causal=True, lengths=(2, 5)),
)  # fmt: skip


@check("rows-sum-to-one")
def each_row_sums_to_one(make: Factory) -> None:
    for case in (Case(GROUPED), Case(ODD, k_len=7), *MASKED):
        sums = answer(make, case)[1].sum(dim=-1)
        close(sums, torch.from_numpy(case.visible().any(axis=-1).astype(float)), 1e-12)


@check("masked-is-zero")
def just_the_masked_shares_are_zero(make: Factory) -> None:
    for case in MASKED:
        pattern, visible = answer(make, case)[1], torch.from_numpy(case.visible())
        assert (pattern[~visible] == 0).all()
        assert (pattern[visible] > 0).all()


@check("heads-apart")
def the_pattern_has_a_plane_for_each_head(make: Factory) -> None:
    for settings in (GROUPED, ODD):
        pattern = answer(make, Case(settings, k_len=7))[1]
        assert pattern.shape == (BATCH, settings.n_heads, 5, 7)
        assert (pattern[:, 1:] - pattern[:, :-1]).abs().amax(dim=(0, 2, 3)).min() > 1e-3


@check("future-unseen")
def a_later_token_changes_nothing_earlier_but_its_own_row(make: Factory) -> None:
    layer, (x, _) = ready(make, GROUPED), Case(GROUPED).rows()
    out, pattern = layer(x, x, causal=True)
    for t in range(5):
        other = x.clone()
        other[:, t] += 1.0
        new_out, new_pattern = layer(x, other, causal=True)
        if t:
            close(new_out[:, :t], out[:, :t], 1e-12)
            close(new_pattern[:, :, :t], pattern[:, :, :t], 1e-12)
        assert (new_out[:, t] - out[:, t]).abs().amax(dim=-1).min() > 1e-9


@check("sequences-apart")
def a_sequence_alone_gives_what_it_gives_in_a_batch(make: Factory) -> None:
    for case in (Case(GROUPED, k_len=7), Case(PAIRED, lengths=(4, 2)), Case(PAIRED, lengths=(2, 4), side="left")):
        layer, (x, context) = ready(make, case.settings), case.rows()
        lengths = None if case.lengths is None else torch.tensor(case.lengths)
        out, pattern = layer(x, context, lengths=lengths, side=case.side)
        for b in range(BATCH):
            one = slice(b, b + 1)
            of_one = None if lengths is None else lengths[one]
            alone = layer(x[one], None if context is None else context[one], lengths=of_one, side=case.side)
            close(alone[0], out[one], 1e-12)
            close(alone[1], pattern[one], 1e-12)


@check("padding-of-nan", filling=math.nan)
@check("padding-of-99", filling=99.0)
def what_stands_in_the_padding_does_not_matter(make: Factory, filling: float) -> None:
    for side, case in PADDED.items():
        for causal in (False, True):
            x, real = case.rows()[0], slice(0, 3) if side == "right" else slice(2, 5)
            filled = torch.full_like(x, filling)
            filled[0], filled[1, real] = x[0], x[1, real]
            out, pattern = answer(make, replace(case, causal=causal))
            new_out, new_pattern = answer(make, replace(case, causal=causal), x=filled)
            close(new_out[0], out[0], 1e-12)
            close(new_out[1, real], out[1, real], 1e-12)
            close(new_pattern[1, :, real], pattern[1, :, real], 1e-12)


@check("unpadded-left-sinusoidal", settings=replace(GROUPED, positions="sinusoidal"), side="left")
@check("unpadded-left-alibi", settings=ALIBI, side="left")
@check("unpadded-left-rope", settings=HALVES, side="left")
@check("unpadded-left", settings=GROUPED, side="left")
@check("unpadded-right", settings=GROUPED, side="right")
def a_padded_sentence_gives_what_it_gives_alone(make: Factory, settings: Settings, side: str) -> None:
    layer, (x, _) = ready(make, settings), Case(settings).rows()
    for causal in (False, True):
        out, pattern = layer(x, causal=causal, lengths=torch.tensor([5, 3]), side=side)
        for b, n in enumerate((5, 3)):
            real = slice(0, n) if side == "right" else slice(5 - n, 5)
            alone_out, alone_pattern = layer(x[b : b + 1, real], causal=causal)
            close(out[b : b + 1, real], alone_out)
            close(pattern[b : b + 1, :, real, real], alone_pattern)


@check("heads-reordered")
def heads_in_another_order_give_the_same(make: Factory) -> None:
    case, weights = Case(GROUPED, k_len=7), random_weights(GROUPED)
    head_order, kv_order = [4, 3, 5, 2, 0, 1], [1, 0]  # heads 0 1 2 share a kv head, and so do 3 4 5
    for name, order in (("q", head_order), ("k", kv_order), ("v", kv_order)):
        for kind in ("weight", "bias"):
            blocks = weights[f"{name}_proj.{kind}"].unflatten(0, (len(order), -1))
            weights[f"{name}_proj.{kind}"] = blocks[order].flatten(0, 1)
    weights["o_proj.weight"] = weights["o_proj.weight"].unflatten(1, (6, -1))[:, head_order].flatten(1)
    out, pattern = answer(make, case)
    new_out, new_pattern = ready(make, GROUPED, weights)(*case.rows())
    close(new_out, out)
    close(new_pattern, pattern[:, head_order])


@check("context-reordered")
def the_context_is_a_set(make: Factory) -> None:
    case, order = Case(GROUPED, k_len=7), [3, 0, 6, 1, 5, 2, 4]
    x, context = case.rows()
    out, pattern = answer(make, case)
    new_out, new_pattern = ready(make, GROUPED)(x, context[:, order])
    close(new_out, out)
    close(new_pattern, pattern[..., order])


@check("zero-queries")
def queries_of_zero_give_the_mean_of_the_values(make: Factory) -> None:
    for settings in (GROUPED, PAIRED, SQUARE):
        case = Case(settings, k_len=7, loud=0.0)
        out, pattern = answer(make, case)
        close(pattern, torch.full((BATCH, settings.n_heads, 5, 7), 1 / 7, dtype=torch.float64), 1e-12)
        close(out, of_equal_shares(settings, 7).expand(-1, 5, -1))


@check("single-token")
def a_single_key_gives_its_value(make: Factory) -> None:
    for settings in (GROUPED, PAIRED, SQUARE):
        out, pattern = answer(make, Case(settings, k_len=1))
        assert (pattern == 1).all()
        close(out, of_equal_shares(settings, 1).expand(-1, 5, -1))


@check("fully-masked")
def a_query_without_a_key_gets_zeros_and_the_output_bias(make: Factory) -> None:
    nobody = (Case(GROUPED, lengths=(0, 4), side=side) for side in ("right", "left"))
    for case in (*nobody, Case(GROUPED, q_len=5, k_len=3, causal=True)):
        out, pattern = answer(make, case)
        empty = torch.from_numpy(~case.visible().any(axis=-1))
        assert empty.any()
        assert (pattern[empty] == 0).all()
        assert (out[empty[:, 0]] == case.weights()["o_proj.bias"]).all()
        assert out.isfinite().all()


@check("fully-masked-gradient")
def a_query_without_a_key_leaves_the_gradient_finite(make: Factory) -> None:
    case = Case(GROUPED, lengths=(0, 4))
    x = case.rows()[0].requires_grad_()
    with torch.enable_grad():
        answer(make, case, x=x)[0].sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@check("key-bias-unseen")
def the_bias_of_the_keys_changes_no_pattern(make: Factory) -> None:
    case = Case(GROUPED, k_len=7)
    weights = random_weights(GROUPED)
    weights["k_proj.bias"] = weights["k_proj.bias"] + normal(len(weights["k_proj.bias"]), seed=3)
    close(ready(make, GROUPED, weights)(*case.rows())[1], answer(make, case)[1])


@check("loud-scores-float32", dtype=torch.float32)
@check("loud-scores", dtype=torch.float64)
def scores_in_the_thousands_are_finite_and_right(make: Factory, dtype: torch.dtype) -> None:
    masked = Case(GROUPED, causal=True, lengths=(3, 5), loud=4000.0)  # with rows whose best score is below −10000
    for case in (Case(GROUPED, loud=1000.0), masked):
        out, pattern = answer(make, replace(case, dtype=dtype))
        assert out.isfinite().all()
        assert pattern.isfinite().all()
        assert (pattern[~torch.from_numpy(case.visible())] == 0).all()
        if dtype == torch.float64:
            close(pattern, by_loops(case).pattern)
            close(out, by_loops(case).out)


@check("float16")
def float16_runs_and_is_close(make: Factory) -> None:
    for case in (Case(GROUPED), Case(GROUPED, causal=True, lengths=(3, 5), side="left"), Case(HALVES, causal=True)):
        out, pattern = answer(make, replace(case, dtype=torch.float16))
        assert out.dtype == pattern.dtype == torch.float16
        close(pattern, by_loops(replace(case, dtype=torch.float16)).pattern, FLOAT16_TOLERANCE)
        close(out, by_loops(replace(case, dtype=torch.float16)).out, FLOAT16_TOLERANCE)


# Dropout

T, P = 8, 0.25
LOOKING_GLASS = Settings(d_model=3 * T, n_heads=3, n_kv_heads=3, d_head=4, d_v=T, dropout=P)


def looking_glass() -> tuple[dict[str, Tensor], Tensor]:
    """Weights and rows for which the output is the shares: token `j` has the value 1 in column `j` of every head."""
    weights = random_weights(LOOKING_GLASS)
    eye = torch.eye(T, dtype=torch.float64)
    weights["v_proj.weight"] = torch.cat([eye, torch.zeros(T, 2 * T)], dim=1).repeat(3, 1)
    weights["o_proj.weight"] = torch.eye(3 * T, dtype=torch.float64)
    weights |= {f"{name}_proj.bias": torch.zeros(3 * T, dtype=torch.float64) for name in "vo"}
    return weights, torch.cat([eye.expand(16, -1, -1), normal(16, T, 2 * T, seed=4)], dim=2)


def shares_and_pattern(layer: Any, x: Tensor, seed: int = 5) -> tuple[Tensor, Tensor]:
    """The shares that the values were summed with, and the pattern that was returned."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        out, pattern = layer(x)
    return out.unflatten(2, (3, T)).transpose(1, 2), pattern


@check("evaluated-twice")
def evaluation_gives_the_same_bits_twice(make: Factory) -> None:
    layer, (x, _) = ready(make, replace(GROUPED, dropout=0.5)), Case(GROUPED).rows()
    (out, pattern), (again, pattern_again) = layer(x), layer(x)
    assert torch.equal(out, again)
    assert torch.equal(pattern, pattern_again)


@check("evaluated-without-dropout")
def evaluation_drops_nothing(make: Factory) -> None:
    out, pattern = answer(make, Case(replace(GROUPED, dropout=0.5)))
    close(pattern, by_loops(Case(GROUPED)).pattern)
    close(out, by_loops(Case(GROUPED)).out)


@check("dropped-share")
def training_drops_as_many_shares_as_asked_and_rescales_the_rest(make: Factory) -> None:
    weights, x = looking_glass()
    pattern = shares_and_pattern(ready(make, LOOKING_GLASS, weights), x)[1]
    layer = make(LOOKING_GLASS, weights)
    layer.train(True)
    shares, _ = shares_and_pattern(layer, x)
    kept = shares != 0
    assert abs(float((~kept).double().mean()) - P) < 0.03
    close(shares[kept], pattern[kept] / (1 - P))
    assert not torch.equal(shares, shares_and_pattern(layer, x, seed=6)[0])


@check("dropout-returns")
def dropout_returns_after_an_evaluation(make: Factory) -> None:
    weights, x = looking_glass()
    layer = make(LOOKING_GLASS, weights)
    for training in (True, False, True):
        layer.train(training)
        assert bool((shares_and_pattern(layer, x)[0] == 0).any()) == training


@check("pattern-before-dropout")
def the_returned_pattern_is_that_before_dropout(make: Factory) -> None:
    weights, x = looking_glass()
    layer = make(LOOKING_GLASS, weights)
    layer.train(True)
    pattern = shares_and_pattern(layer, x)[1]
    layer.train(False)
    close(pattern, shares_and_pattern(layer, x)[1], 1e-12)
    close(pattern.sum(dim=-1), torch.ones(16, 3, T), 1e-12)


# One token after the other


@check("last-query-alibi", settings=ALIBI)
@check("last-query-rope", settings=HALVES)
@check("last-query", settings=GROUPED)
def the_last_queries_with_all_keys_give_the_last_rows(make: Factory, settings: Settings) -> None:
    layer, (x, _) = ready(make, settings), Case(settings).rows()
    out, pattern = layer(x, causal=True)
    for n in (1, 2):
        last_out, last_pattern = layer(x[:, -n:], x, causal=True)
        close(last_out, out[:, -n:])
        close(last_pattern, pattern[:, :, -n:])


@check("cache-alibi", settings=ALIBI)
@check("cache-rope-interleaved", settings=NEIGHBOURS)
@check("cache-rope", settings=HALVES)
@check("cache-square", settings=SQUARE)
@check("cache", settings=GROUPED)
def token_by_token_with_a_cache_gives_the_rows_of_the_whole(make: Factory, settings: Settings) -> None:
    layer, (x, _) = ready(make, settings), Case(settings).rows()
    out, pattern = layer(x, causal=True)
    for steps in ((1, 1, 1, 1, 1), (2, 1, 2)):
        cache, end = None, 0
        for n in steps:
            start, end = end, end + n
            new_out, new_pattern, cache = layer.step(x[:, start:end], cache)
            close(new_out, out[:, start:end])
            close(new_pattern, pattern[:, :, start:end, :end])


# The formula

FORMULA = {
    "self": Case(GROUPED),
    "pairs": Case(PAIRED),
    "odd": Case(ODD, k_len=7),
    "square": Case(SQUARE, causal=True),
    "few-keys": Case(GROUPED, q_len=7, k_len=4),
    "causal": Case(PAIRED, causal=True),
    "causal-many-keys": Case(GROUPED, q_len=3, k_len=7, causal=True),
    "causal-few-keys": Case(GROUPED, q_len=7, k_len=4, causal=True),
    "padded-right": Case(PAIRED, lengths=(3, 5)),
    "padded-left": Case(PAIRED, lengths=(5, 2), side="left"),
    "padded-context": Case(GROUPED, q_len=5, k_len=7, lengths=(4, 7), side="left"),
    "causal-padded-left": Case(GROUPED, causal=True, lengths=(2, 5), side="left"),
    "rope": Case(HALVES, causal=True),
    "rope-interleaved": Case(NEIGHBOURS, causal=True),
    "rope-both-ways": Case(HALVES),
    "rope-base": Case(replace(HALVES, theta=100.0)),
    "alibi": Case(ALIBI, causal=True),
    "alibi-both-ways": Case(ALIBI),
    "alibi-six-heads": Case(replace(GROUPED, positions="alibi"), causal=True),
    "scale": Case(replace(GROUPED, scale=0.9)),
    "softcap": Case(replace(GROUPED, softcap=1.5), causal=True),
    "softcap-alibi": Case(replace(ALIBI, softcap=1.5)),
}


def a_case_agrees_with_loops_over_the_formula(make: Factory, case: Case) -> None:
    out, pattern = answer(make, case)
    truth = by_loops(case)
    close(pattern, truth.pattern)
    close(out, truth.out)


CHECKS |= {
    f"formula-{name}": functools.partial(a_case_agrees_with_loops_over_the_formula, case=case)
    for name, case in FORMULA.items()
}


# The layers


class Own:
    """The project's layer in the clothes of the ordinary one."""

    empty_cache = staticmethod(ConcatCache.empty)

    def __init__(self, settings: Settings, weights: Mapping[str, Tensor]) -> None:
        inside = settings.positions if settings.positions != "sinusoidal" else "none"
        self.settings = settings
        self.layer = MultiHeadAttention(
            settings.d_model, settings.n_heads, n_kv_heads=settings.n_kv_heads, d_head=settings.d_head, d_v=settings.d_v,
            positions=inside, rope_theta=settings.theta, scale=settings.scale, softcap=settings.softcap,
            dropout=settings.dropout,
        ).to(weights["q_proj.weight"].dtype)  # fmt: skip
        self.layer.load_state_dict(dict(weights))

    def train(self, mode: bool) -> None:
        self.layer.train(mode)

    def __call__(self, x, context=None, *, causal=False, lengths=None, side="right"):
        q_len, k_len = x.shape[1], (x if context is None else context).shape[1]
        rules = [masks.causal(k_len - q_len)] if causal else []
        rules += [] if lengths is None else [masks.padding(lengths, side, padded_len=k_len)]
        places = torch.arange(q_len)[None] + (k_len - q_len)
        if lengths is not None and side == "left":
            places = places - (k_len - lengths)[:, None]
        if self.settings.positions == "sinusoidal":
            x = x + sinusoidal(places, x.shape[2], dtype=x.dtype)
        return self.layer(x, context, allowed=masks.both(*rules) if rules else None, places=places)

    def step(self, rows, cache):
        cache = self.empty_cache(self.layer, len(rows), 5) if cache is None else cache
        return self.layer.decode(rows, cache, allowed=masks.causal(cache.length))


class OwnPreallocated(Own):
    """The same with the cache that is written in place."""

    empty_cache = staticmethod(PreallocatedCache.empty)


WITH_CACHE = tuple(name for name in CHECKS if name.startswith("cache"))


def failure(check: Check, make: Factory) -> str | None:
    """What stopped the check, by the name of its type; None where the layer passes."""
    try:
        with torch.no_grad():
            check(make)
    except Exception as stopped:
        return type(stopped).__name__
    return None


@functools.cache
def kills() -> dict[str, dict[str, str]]:
    """The checks that each mutant fails, each with what stopped it. A mistake that raises is found too."""
    failures = {mutant.name: {name: failure(check, mutant) for name, check in CHECKS.items()} for mutant in MUTANTS}
    return {
        mutant: {name: stopped for name, stopped in results.items() if stopped is not None}
        for mutant, results in failures.items()
    }


def table() -> str:
    """The zoo as a table for docs/CORRECTNESS.md."""
    lines = ["| mutant | mistake | seen in | killed by |", "|---|---|---|---|"]
    for mutant in MUTANTS:
        killers = list(kills()[mutant.name])
        verdict = f"{len(killers)}: {', '.join(killers[:3])}{', …' if len(killers) > 3 else ''}"
        if mutant.equivalent is not None:
            verdict = f"equivalent: {mutant.equivalent}"
        lines.append(f"| `{mutant.name}` | {mutant.mistake} | {mutant.seen_in or '–'} | {verdict} |")
    return "\n".join(lines)


@pytest.mark.parametrize("name", CHECKS)
def test_the_ordinary_layer_passes(name: str) -> None:
    with torch.no_grad():
        CHECKS[name](OrdinaryAttention)


@pytest.mark.parametrize("name", CHECKS)
def test_our_own_layer_passes(name: str) -> None:
    with torch.no_grad():
        CHECKS[name](Own)


@pytest.mark.parametrize("name", WITH_CACHE)
def test_our_own_layer_passes_with_a_cache_written_in_place(name: str) -> None:
    with torch.no_grad():
        CHECKS[name](OwnPreallocated)


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.equivalent is None], ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed_by_a_number_and_not_by_its_shapes_alone(mutant: Mutant) -> None:
    assert "AssertionError" in kills()[mutant.name].values()


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.equivalent is not None], ids=lambda mutant: mutant.name)
def test_a_mutant_that_is_equivalent_passes_every_check(mutant: Mutant) -> None:
    assert kills()[mutant.name] == {}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_kills_a_mutant(name: str) -> None:
    assert [mutant for mutant, killers in kills().items() if name in killers]


def test_the_zoo_is_large_and_every_animal_has_a_name_a_mistake_and_a_stage_of_its_own() -> None:
    assert len(MUTANTS) >= 42
    assert len([mutant for mutant in MUTANTS if mutant.equivalent is None]) >= 36
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert callable(getattr(OrdinaryAttention, mutant.stage))
        assert mutant.mistake.endswith(".")
        assert not {"|", "\n"} & set(mutant.mistake + mutant.seen_in + (mutant.equivalent or ""))


def test_the_table_in_the_docs_is_the_one_of_this_file() -> None:
    page = (Path(__file__).parents[1] / "docs" / "CORRECTNESS.md").read_text()
    _, begin, rest = page.partition("<!-- mutants -->\n")
    shown, end, _ = rest.partition("\n<!-- /mutants -->")
    assert begin
    assert end
    assert shown == table()
