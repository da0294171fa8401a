"""The statistics once more, from nothing but torch's fused attention: no matrix, no tiles, no code of ours.

Fused attention gives one weighted mean of values per query. With the right values it gives every statistic that is a
mean, and with one more key and query of zeros the log-sum-exp too: a zero key takes 1 / (1 + e^lse) of a query.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from mhacli.attention import masks
from mhacli.attention.tiled.scores import Scores, VirtualPattern
from mhacli.attention.tiled.softmax import attend_lse
from mhacli.attention.tiled.statistics import Statistics, StatisticsRequest, distances_folded, summarise

Normal = Callable[..., Tensor]
LENGTH, HEADS, WIDTH, BLOCK, SCALE = 3000, 4, 48, 64, 48**-0.5
assert math.ceil(LENGTH / BLOCK) <= WIDTH
PLACES = torch.arange(LENGTH, dtype=torch.float64)


def means(q: Tensor, k: Tensor, values: Tensor, *, causal: bool, scale: float = SCALE) -> Tensor:
    """The mean of the values, `[batch, head, key, columns]`, under each query's attention, by torch alone."""
    columns = values.shape[-1]
    assert columns <= q.shape[-1]
    values = pad(values, (0, q.shape[-1] - columns))  # the kernel wants values as wide as keys
    return scaled_dot_product_attention(q, k, values, is_causal=causal, scale=scale)[..., :columns]


def log_sum_exp(q: Tensor, k: Tensor, *, causal: bool, scale: float = SCALE) -> Tensor:
    """By a first key of zeros, of score 0: its share p of a query is 1 / (1 + e^lse). A first query keeps causality."""
    first_key = torch.zeros(*k.shape[:2], k.shape[2] + 1, 1, dtype=k.dtype)
    first_key[:, :, 0] = 1.0
    share = means(pad(q, (0, 0, 1, 0)), pad(k, (0, 0, 1, 0)), first_key, causal=causal, scale=scale)[:, :, 1:, 0]
    return torch.log1p(-share) - share.log()


def of_each_head(kv: Tensor) -> Tensor:
    """Query head h reads kv head h // group: written out, so that torch need not know of groups."""
    group = HEADS // kv.shape[1]
    return torch.stack([kv[:, head // group] for head in range(HEADS)], dim=1)


def entropies(q: Tensor, k: Tensor, lse: Tensor, *, causal: bool) -> Tensor:
    """H = lse − E[score], and the mean score is the query's own product with the mean key."""
    mean_key = means(q, k, k, causal=causal)
    return lse - SCALE * (q * mean_key).sum(dim=-1)


def mean_places(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    """E[j], from values that are the places of the keys."""
    places = PLACES[None, None, :, None].expand(*k.shape[:2], -1, 1)
    return means(q, k, places, causal=causal)[..., 0]


def pooled(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    """The mass of each block of keys in each block of queries, from values that say in which block a key is."""
    n_blocks = math.ceil(LENGTH / BLOCK)
    in_block = torch.nn.functional.one_hot((PLACES // BLOCK).long(), n_blocks).double()
    of_queries = means(q, k, in_block.expand(*k.shape[:2], -1, -1), causal=causal)
    whole = pad(of_queries, (0, 0, 0, n_blocks * BLOCK - LENGTH))
    return whole.unflatten(2, (n_blocks, BLOCK)).sum(dim=3)


def received_by_transposing(q: Tensor, k: Tensor, lse: Tensor, *, causal: bool) -> Tensor:
    """Σ_i exp(s_ij − lse_i) is the exponential of a log-sum-exp where keys ask and queries answer.

    −lse_i is one more coordinate, which meets a 1. Turned round in time, later queries become earlier keys.
    """
    asking = torch.cat([SCALE * k, torch.ones_like(k[..., :1])], dim=-1)
    answering = torch.cat([q, -lse[..., None]], dim=-1)
    if causal:
        asking, answering = asking.flip(2), answering.flip(2)
    found = log_sum_exp(asking, answering, causal=causal, scale=1.0).exp()
    return found.flip(2) if causal else found


def received_by_gradient(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    """z = P V, so that the derivative of the sum of a column of z by V is the sum of the columns of P."""
    values = torch.zeros_like(k).requires_grad_()
    z = scaled_dot_product_attention(q, k, values, is_causal=causal, scale=SCALE, enable_gqa=q.shape[1] != k.shape[1])
    (gradient,) = torch.autograd.grad(z[..., 0].sum(), values)
    return gradient[..., 0]


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    causal: bool
    ours: Statistics
    exactly: Statistics
    """In float64; `ours` is in float32."""
    lse: Tensor


CASES = {
    "causal": (True, HEADS, 1.0),
    "causal, sharp, heads share keys": (True, 2, 3.0),
    "all, one kv head": (False, 1, 1.0),
}


def of_tiles(q: Tensor, k: Tensor, allowed: Any) -> Statistics:
    scores = Scores(q, k, scale=SCALE, allowed=allowed)
    tokens, marks = torch.zeros(1, LENGTH, dtype=torch.int64), torch.zeros(1, LENGTH, dtype=torch.bool)
    asked = StatisticsRequest(BLOCK, tokens, tokens - 1, tokens - 1, marks, marks)
    return summarise(VirtualPattern(scores, attend_lse(scores, k).lse), asked)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    causal, n_kv_heads, std = CASES[request.param]
    generator = torch.Generator().manual_seed(17)
    q, k = (std**0.5 * torch.randn(1, n, LENGTH, WIDTH, generator=generator) for n in (HEADS, n_kv_heads))
    allowed = masks.causal() if causal else None
    wide_q, wide_k = q.double(), of_each_head(k.double())
    lse = log_sum_exp(wide_q, wide_k, causal=causal)
    return Case(wide_q, wide_k, causal, of_tiles(q, k, allowed), of_tiles(q.double(), k.double(), allowed), lse)


def worst(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected).abs().max())


def worst_relative(found: Tensor, expected: Tensor, *, least: float = 1e-6) -> float:
    assert found.shape == expected.shape
    some = expected > least
    return float(((found.double() - expected).abs() / expected.clamp(min=least))[some].max())


@pytest.mark.sampled(3)
def test_entropy_is_the_sum_less_the_mean_score(case: Case) -> None:
    expected = entropies(case.q, case.k, case.lse, causal=case.causal)
    assert worst(case.exactly.entropy, expected) <= 1e-10
    assert worst(case.ours.entropy, expected) <= 5e-5


def test_the_mean_place_of_the_keys_gives_the_distance_of_a_causal_head_and_the_drift_of_any(case: Case) -> None:
    drift = mean_places(case.q, case.k, causal=case.causal) - PLACES
    steps = torch.arange(1 - LENGTH, LENGTH).double()
    assert worst((case.exactly.profile * steps).sum(dim=-1), drift.sum(dim=-1)) <= 1e-6 * LENGTH
    if case.causal:
        assert worst(case.exactly.distance, -drift) <= 1e-9
        assert worst_relative(case.ours.distance, -drift, least=1e-3) <= 1e-5
        folded = distances_folded(case.exactly.profile[0], LENGTH - 1)
        assert worst_relative((folded * PLACES).sum(dim=-1), -drift[0].sum(dim=-1)) <= 1e-10


def test_the_map_is_the_attention_to_blocks_of_keys(case: Case) -> None:
    expected = pooled(case.q, case.k, causal=case.causal)
    assert worst(case.exactly.map, expected) <= 1e-10
    assert worst_relative(case.ours.map, expected) <= 2e-5


def test_what_a_key_receives_is_the_sum_of_a_softmax_in_which_keys_ask(case: Case) -> None:
    expected = received_by_transposing(case.q, case.k, case.lse, causal=case.causal)
    assert worst_relative(case.exactly.received, expected) <= 1e-9
    assert worst_relative(case.ours.received, expected) <= 1e-5


def test_what_a_key_receives_is_the_derivative_of_z_by_its_value(case: Case) -> None:
    expected = received_by_gradient(case.q, case.k, causal=case.causal)
    assert worst_relative(case.exactly.received, expected) <= 1e-11
    assert worst_relative(case.ours.received, expected) <= 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_torch_reads_shared_keys_as_we_do(normal: Normal, n_kv_heads: int, causal: bool) -> None:
    """The groups are torch's own here: gradients of shared values are sums over the heads that share them."""
    q, k = normal(1, HEADS, LENGTH // 8, WIDTH), normal(1, n_kv_heads, LENGTH // 8, WIDTH)
    scores = Scores(q, k, scale=SCALE, allowed=masks.causal() if causal else None)
    attended = attend_lse(scores, k)
    tokens, marks = torch.zeros(1, LENGTH // 8, dtype=torch.int64), torch.zeros(1, LENGTH // 8, dtype=torch.bool)
    ours = summarise(
        VirtualPattern(scores, attended.lse), StatisticsRequest(4, tokens, tokens - 1, tokens - 1, marks, marks)
    )
    expected = received_by_gradient(q, k, causal=causal)
    assert worst(ours.received.unflatten(1, (n_kv_heads, -1)).sum(dim=2), expected) <= 1e-11
    theirs = scaled_dot_product_attention(q, k, k, is_causal=causal, scale=SCALE, enable_gqa=True)
    entropy = attended.lse - SCALE * (q * theirs).sum(dim=-1)
    assert worst(ours.entropy, entropy) <= 1e-11


def test_distances_to_both_sides_are_the_profile_folded(normal: Normal) -> None:
    """Without causality |i − j| needs i's own side: two causal calls, one of them turned round in time, weighted by mass."""
    q, k = normal(1, 2, 600, WIDTH), normal(1, 2, 600, WIDTH)
    scores = Scores(q, k, scale=SCALE)
    tokens, marks = torch.zeros(1, 600, dtype=torch.int64), torch.zeros(1, 600, dtype=torch.bool)
    asked = StatisticsRequest(4, tokens, tokens - 1, tokens - 1, marks, marks)
    ours = summarise(VirtualPattern(scores, attend_lse(scores, k).lse), asked)
    places = torch.arange(600).double()
    values = places[None, None, :, None].expand(1, 2, -1, 1)
    lse = log_sum_exp(q, k, causal=False)
    before, after = (
        (log_sum_exp(a, b, causal=True), means(a, b, values, causal=True)[..., 0])
        for a, b in ((q, k), (q.flip(2), k.flip(2)))
    )
    earlier = (before[0] - lse).exp() * (places - before[1])
    later = ((after[0] - lse.flip(2)).exp() * (places - after[1])).flip(2)
    assert worst(ours.distance, earlier + later) <= 1e-10
