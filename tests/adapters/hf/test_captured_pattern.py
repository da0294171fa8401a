"""What a captured attention comes to: masks in every spelling, biases, softcaps and learned sinks, against plain numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mhacli.adapters.hf.calls import Call, ScoredCall, SoftmaxCall
from mhacli.adapters.hf.captured_pattern import CapturedPattern, KnownMasks, as_attention, full_matrices
from mhacli.attention.tiled.softmax import AttentionResult
from mhacli.attention.tiled.statistics import weights_of
from mhacli.attention.tiled.tiles import PatternTiles, reduce_tiles

BATCH, N_HEADS, N_KV_HEADS, Q_LEN, K_LEN, D_HEAD, D_V = 2, 6, 3, 5, 7, 11, 13
LOWEST = torch.finfo(torch.float32).min
Make = Callable[..., ScoredCall]


@pytest.fixture
def scored(normal: Callable[..., Tensor]) -> Make:
    """`scored(**fields)`: a call with random q, k and v, and the z that follows from it."""
    q, k, v = (
        normal(BATCH, heads, length, width, dtype=torch.float32)
        for heads, length, width in ((N_HEADS, Q_LEN, D_HEAD), (N_KV_HEADS, K_LEN, D_HEAD), (N_KV_HEADS, K_LEN, D_V))
    )

    def make(**fields: Any) -> ScoredCall:
        empty = torch.zeros(BATCH, N_HEADS, Q_LEN, D_V)
        call = ScoredCall(
            name="a",
            layer=0,
            kind="self",
            part=0,
            level="registry",
            implementation="sdpa",
            q=q,
            k=k,
            v=v,
            z=empty,
            scale=0.4,
            **fields,
        )
        z = by_hand(call)[1] @ np.repeat(v.numpy(), 2, axis=1)
        return replace(call, z=torch.from_numpy(z).float())

    return make


def by_hand(call: ScoredCall, keep: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Scores and pattern in float64. `keep` (default: all) are the cells that may be attended to; the mask is not looked at
    beyond what it adds where they may."""
    q, k = call.q.double().numpy(), np.repeat(call.k.double().numpy(), N_HEADS // N_KV_HEADS, axis=1)
    scores = np.einsum("bhid,bhjd->bhij", q, k) * call.scale
    if call.softcap is not None:
        scores = call.softcap * np.tanh(scores / call.softcap)
    for added in (call.mask, call.bias):
        if added is not None and added.dtype != torch.bool:
            scores = scores + np.broadcast_to(added.double().numpy(), scores.shape)
    keep = np.ones(scores.shape, dtype=bool) if keep is None else np.broadcast_to(keep, scores.shape)
    scores = np.where(keep, scores, -np.inf)
    top = np.where(keep.any(axis=-1, keepdims=True), scores.max(axis=-1, keepdims=True), 0.0)
    shares, rest = np.where(keep, np.exp(scores - top), 0.0), 0.0
    if call.sinks is not None:
        rest = np.exp(call.sinks.double().numpy()[None, :, None, None] - top)
    total = shares.sum(axis=-1, keepdims=True) + rest
    return scores, shares / np.where(total > 0, total, 1.0)


def every(n_rows: int = BATCH, n_queries: int = Q_LEN) -> Tensor:
    return torch.ones(n_rows, n_queries, dtype=torch.bool)


def reduced(attention: AttentionResult) -> AttentionResult:
    """The attention after a pass over its pattern."""
    reduce_tiles(attention.pattern, [])
    return attention.finished()


def looked_at(call: Call, real: Tensor | None = None) -> tuple[AttentionResult, dict[str, np.ndarray]]:
    attention = reduced(as_attention(call, every() if real is None else real, KnownMasks()))
    return attention, {name: tensor.numpy() for name, tensor in full_matrices(attention).items()}


def bias_of(attention: AttentionResult) -> Tensor | None:
    """What is added to the scores, as a whole tensor."""
    if attention.scores is None or attention.scores.bias is None:
        return None
    bias, (batch, n_heads, n_queries, n_keys) = attention.scores.bias, attention.shape
    idx = torch.arange(n_queries), torch.arange(n_keys)
    planes = [[bias(b, h, *idx).expand(n_queries, n_keys) for h in range(n_heads)] for b in range(batch)]
    return torch.stack([torch.stack(row) for row in planes])


def all_shares(pattern: PatternTiles) -> np.ndarray:
    """The pattern as it is asked for tile by tile."""
    batch, head, query, key = pattern.shape
    rows = [[weights_of(pattern, (b, h), range(query), range(key)) for h in range(head)] for b in range(batch)]
    return torch.stack([torch.stack(row) for row in rows]).numpy()


def require_same(call: ScoredCall, keep: np.ndarray | None = None, real: Tensor | None = None) -> AttentionResult:
    """Scores, pattern and mask of a call are those made by hand, whole and tile by tile."""
    keep = np.ones((BATCH, 1, Q_LEN, K_LEN), dtype=bool) if keep is None else keep
    scores, pattern = by_hand(call, keep)
    attention, found = looked_at(call, real)
    assert (np.broadcast_to(found["allowed"], scores.shape) == np.broadcast_to(keep, scores.shape)).all()
    assert (np.isneginf(found["scores"]) == np.isneginf(scores)).all()
    finite = np.isfinite(scores)
    assert np.abs(found["scores"][finite] - scores[finite]).max() < 1e-5
    for shares in (found["pattern"], all_shares(attention.known_pattern)):
        assert np.abs(shares - pattern).max() < 2e-6
        assert (shares[~np.broadcast_to(keep, shares.shape)] == 0).all()
    return attention


# ------------------------------------------------------------------------------------------------------------- masks


TRIANGLE = np.tri(Q_LEN, K_LEN, dtype=bool)


def test_without_a_mask_everything_is_allowed(scored: Make) -> None:
    attention = require_same(scored())
    assert attention.pattern.allowed is None
    assert bias_of(attention) is None
    assert attention.sink_mass is None


@pytest.mark.parametrize("forbidding", [-torch.inf, LOWEST, -1e4, -1e5, -1e9, LOWEST / 2, -9e3])
def test_a_score_put_far_down_is_forbidden_and_exactly_0(scored: Make, forbidding: float) -> None:
    mask = torch.from_numpy(np.where(TRIANGLE, 0.0, forbidding))[None, None].float()
    attention = require_same(scored(mask=mask), TRIANGLE)
    assert bias_of(attention) is None


@pytest.mark.parametrize("forbidding", [-torch.inf, LOWEST, -1e4])
def test_a_mask_as_a_bias_forbids_as_well(scored: Make, forbidding: float) -> None:
    bias = torch.from_numpy(np.where(TRIANGLE, 0.0, forbidding))[None, None].float()
    require_same(scored(bias=bias), TRIANGLE)


def test_true_in_a_mask_may_attend(scored: Make) -> None:
    attention = require_same(scored(mask=torch.from_numpy(TRIANGLE)[None, None]), TRIANGLE)
    assert bias_of(attention) is None


@pytest.mark.parametrize(
    "shape", [(Q_LEN, K_LEN), (1, Q_LEN, K_LEN), (BATCH, 1, 1, K_LEN), (BATCH, N_HEADS, Q_LEN, K_LEN)]
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_any_shape_that_broadcasts_is_understood(
    scored: Make, normal: Callable[..., Tensor], shape: tuple[int, ...], kind: str
) -> None:
    keep = normal(*shape) > -0.3
    keep[..., 0] = True
    mask = keep if kind == "bool" else torch.where(keep, 0.0, -torch.inf)
    require_same(scored(mask=mask), keep.reshape((1,) * (4 - len(shape)) + shape).numpy())


def test_a_causal_call_counts_query_0_as_key_0(scored: Make) -> None:
    attention = require_same(scored(causal=True), TRIANGLE)
    assert attention.pattern.allowed is not None
    assert attention.pattern.allowed.causal_offset == 0


def test_a_finite_bias_is_no_mask(scored: Make, normal: Callable[..., Tensor]) -> None:
    bias = normal(1, N_HEADS, Q_LEN, K_LEN, std=3.0, dtype=torch.float32)
    attention = require_same(scored(bias=bias))
    assert attention.pattern.allowed is None
    found = bias_of(attention)
    assert found is not None
    assert torch.equal(found, bias.expand_as(found))


@pytest.mark.parametrize("lowest", [-50.0, -8999.0])
def test_a_low_bias_forbids_nothing_although_no_share_may_be_left(scored: Make, lowest: float) -> None:
    steep = torch.linspace(0.0, lowest, K_LEN).expand(1, 1, Q_LEN, K_LEN)
    attention, found = looked_at(scored(mask=steep))
    assert attention.pattern.allowed is None
    assert found["allowed"].all()
    assert np.isfinite(found["scores"]).all()
    assert np.abs(found["pattern"] - by_hand(scored(mask=steep))[1]).max() < 2e-6


def test_a_mask_and_a_bias_and_a_bias_within_the_mask_add_up(scored: Make, normal: Callable[..., Tensor]) -> None:
    within = normal(1, N_HEADS, Q_LEN, K_LEN, dtype=torch.float32)
    mask = within.masked_fill(~torch.from_numpy(TRIANGLE), LOWEST)
    bias = normal(1, N_HEADS, Q_LEN, K_LEN, dtype=torch.float32)
    attention = require_same(scored(mask=mask, bias=bias), TRIANGLE)
    found = bias_of(attention)
    assert found is not None
    assert torch.allclose(found, bias + within.masked_fill(~torch.from_numpy(TRIANGLE), 0.0))


def test_padded_queries_see_nothing(scored: Make) -> None:
    real = every()
    real[1, 3:] = False
    keep = np.broadcast_to(real.numpy()[:, None, :, None], (BATCH, 1, Q_LEN, K_LEN))
    require_same(scored(), keep, real)
    require_same(scored(causal=True), keep & TRIANGLE, real)


def test_a_query_whose_scores_are_all_the_lowest_number_gets_zeros(scored: Make) -> None:
    real = every()
    real[0, 2] = False
    mask = torch.zeros(BATCH, 1, Q_LEN, K_LEN)
    mask[0, :, 2] = LOWEST
    for lse in (LOWEST, -torch.inf, torch.nan):
        call = scored(mask=mask)
        _, sure = looked_at(call, real)
        rows = torch.logsumexp(torch.from_numpy(sure["scores"]), dim=-1)
        rows[0, :, 2] = lse
        attention, found = looked_at(replace(call, lse=rows), real)
        assert (found["pattern"][0, :, 2] == 0).all()
        assert np.abs(all_shares(attention.known_pattern) - found["pattern"]).max() < 2e-6


def test_the_same_mask_is_made_ready_once_for_all_layers_that_share_it(scored: Make) -> None:
    known, mask = KnownMasks(), torch.from_numpy(TRIANGLE)[None, None]
    first, again = (known.of(scored(mask=mask), every()) for _ in range(2))
    assert first is again
    assert known.of(scored(mask=mask.clone()), every()) is not first
    assert known.of(scored(mask=mask, causal=True), every()) is not first
    assert known.of(scored(), every()) is known.of(scored(), every())
    call, square = scored(), torch.from_numpy(TRIANGLE)[:, :Q_LEN]
    assert known.of(replace(call, mask=square), every()) is not known.of(replace(call, mask=square.mT), every())
    fewer = every()
    fewer[0, 4:] = False
    assert known.of(scored(), fewer) is not known.of(scored(), every())


# -------------------------------------------------------------------------------------------------- softcaps and sinks


@pytest.mark.parametrize("softcap", [0.7, 50.0])
def test_a_softcap_bends_the_scores_before_anything_is_added(
    scored: Make, normal: Callable[..., Tensor], softcap: float
) -> None:
    bias = normal(1, N_HEADS, Q_LEN, K_LEN, std=4.0, dtype=torch.float32)
    require_same(scored(softcap=softcap, bias=bias, mask=torch.from_numpy(TRIANGLE)[None, None]), TRIANGLE)


def test_a_learned_sink_takes_its_share_and_nothing_is_scaled_up(scored: Make) -> None:
    sinks = torch.tensor([-30.0, -1.0, 0.0, 1.0, 3.0, 30.0])
    call = scored(sinks=sinks, causal=True)
    attention = require_same(call, TRIANGLE)
    assert attention.sink_mass is not None
    mass = 1 - by_hand(call, TRIANGLE)[1].sum(axis=-1)
    assert np.abs(attention.sink_mass.numpy() - mass).max() < 2e-6
    assert mass[:, 0].max() < 1e-9  # such a low one takes nothing,
    assert mass[:, 5].min() > 0.99  # such a high one almost all
    plain, _ = looked_at(scored(causal=True))
    assert (attention.lse - plain.lse).abs().max() < 1e-6  # that of the keys alone


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("base", [100.0, 300.0, -300.0, 1e4])
def test_shares_of_large_scores_with_a_bias_and_sinks_are_those_of_float64(
    scored: Make, normal: Callable[..., Tensor], base: float, with_sinks: bool
) -> None:
    bias = base + normal(1, N_HEADS, Q_LEN, K_LEN, dtype=torch.float32)
    sinks = base + normal(N_HEADS, dtype=torch.float32) if with_sinks else None
    call = scored(bias=bias, sinks=sinks)
    attention = as_attention(call, every(), KnownMasks())
    for shares in (full_matrices(attention)["pattern"].numpy(), all_shares(reduced(attention).known_pattern)):
        assert np.abs(shares - by_hand(call)[1]).max() < 1e-6


def test_the_log_sum_exp_of_a_kernel_is_believed_as_it_is_told(scored: Make) -> None:
    """So that the checks can find it wrong."""
    call = scored()
    true = torch.from_numpy(by_hand(call)[0]).logsumexp(dim=-1).float()
    right, wrong = (as_attention(replace(call, lse=true + shift), every(), KnownMasks()) for shift in (0.0, 0.01))
    assert np.abs(all_shares(right.pattern).sum(axis=-1) - 1).max() < 1e-5
    assert np.abs(all_shares(wrong.pattern).sum(axis=-1) - np.exp(-0.01)).max() < 1e-5
    assert right.kernel == "eager"


# ------------------------------------------------------------------------------------------------- a softmax seen whole


@pytest.fixture
def written(scored: Make) -> Callable[..., SoftmaxCall]:
    """`written(added)`: a softmax of scores with something added."""

    def make(added: Tensor, dtype: torch.dtype = torch.float32) -> SoftmaxCall:
        scores = (torch.from_numpy(by_hand(scored())[0]).float() + added).to(dtype)
        return SoftmaxCall(
            name="a",
            layer=0,
            kind="self",
            part=0,
            level="softmax",
            implementation="eager",
            scores=scores,
            pattern=scores.softmax(dim=-1),
        )

    return make


@pytest.mark.parametrize("forbidding", [-torch.inf, LOWEST, -1e4, -1e5])
def test_a_softmax_of_scores_put_far_down_has_forbidden_cells(
    written: Callable[..., SoftmaxCall], scored: Make, forbidding: float
) -> None:
    call = written(torch.from_numpy(np.where(TRIANGLE, 0.0, forbidding)).float())
    attention, found = looked_at(call)
    assert (found["allowed"] == TRIANGLE).all()
    assert (np.isneginf(found["scores"]) == ~TRIANGLE).all()
    assert (found["pattern"][..., ~TRIANGLE] == 0).all()
    assert np.abs(found["pattern"] - by_hand(scored(), TRIANGLE)[1]).max() < 2e-6
    assert (all_shares(attention.known_pattern) == found["pattern"]).all()
    lse = np.log(np.where(TRIANGLE, np.exp(by_hand(scored())[0]), 0).sum(axis=-1))
    assert np.abs(attention.lse.numpy() - lse).max() < 1e-5


def test_a_share_that_rounds_to_0_is_not_forbidden(written: Callable[..., SoftmaxCall]) -> None:
    steep = torch.linspace(0.0, -500.0, K_LEN)
    call = written(steep)
    _, found = looked_at(call)
    assert (call.pattern == 0).any()
    assert found["allowed"].all()


def test_padded_queries_of_a_softmax_see_nothing(written: Callable[..., SoftmaxCall]) -> None:
    real = every()
    real[1, :2] = False
    _, found = looked_at(written(torch.zeros(())), real)
    assert (found["pattern"][1, :, :2] == 0).all()
    assert not found["allowed"][1, :, :2].any()
    assert found["allowed"].sum() == (BATCH * Q_LEN - 2) * K_LEN


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_shares_of_16_bits_are_made_again_so_that_a_row_adds_up(
    written: Callable[..., SoftmaxCall], dtype: torch.dtype
) -> None:
    call = written(torch.from_numpy(np.where(TRIANGLE, 0.0, -torch.inf)).float(), dtype)
    attention, found = looked_at(call)
    assert found["pattern"].dtype == np.float32
    assert attention.pattern.like.dtype == torch.float32
    assert np.abs(found["pattern"].sum(axis=-1) - 1).max() < 1e-6
    rounding = torch.finfo(dtype).eps
    assert np.abs(found["pattern"] - call.pattern.float().numpy()).max() < rounding


# ------------------------------------------------------------------------------------------- some heads or queries alone


@pytest.mark.parametrize("heads", [range(6), range(2, 3), range(4, 6)])
def test_some_heads_alone_have_the_shares_that_they_have_among_all(
    scored: Make, written: Callable[..., SoftmaxCall], normal: Callable[..., Tensor], heads: range
) -> None:
    for call in _with_everything(scored, written, normal):
        attention = as_attention(call, every(), KnownMasks())
        assert attention.shape == (BATCH, N_HEADS, Q_LEN, K_LEN)
        some = reduced(attention.of_heads(heads))
        among = all_shares(reduced(attention).known_pattern)[:, heads.start : heads.stop]
        assert (all_shares(some.known_pattern) == among).all()


def test_some_queries_in_any_order_have_the_shares_that_they_have_among_all(
    scored: Make, written: Callable[..., SoftmaxCall], normal: Callable[..., Tensor]
) -> None:
    queries = torch.tensor([4, 1, 1])
    for call in _with_everything(scored, written, normal):
        pattern = reduced(as_attention(call, every(), KnownMasks())).known_pattern
        among = all_shares(pattern)[:, :, queries]
        chosen = pattern.of_queries(queries)
        rows = all_shares(chosen)
        assert np.abs(rows - among).max() < 1e-6
        assert ((rows == 0) == (among == 0)).all()
        if isinstance(chosen, CapturedPattern):
            assert (chosen.scores == call.scores[:, :, queries]).all()


def _with_everything(
    scored: Make, written: Callable[..., SoftmaxCall], normal: Callable[..., Tensor]
) -> tuple[Call, Call]:
    """A call whose mask and bias differ from head to head, with sinks, and a softmax under the same mask."""
    mask = torch.where(normal(1, N_HEADS, Q_LEN, K_LEN) > 0, 0.0, -torch.inf)
    mask[..., 0] = 0.0
    bias = normal(1, N_HEADS, Q_LEN, K_LEN, dtype=torch.float32)
    sinks = normal(N_HEADS, dtype=torch.float32)
    return scored(mask=mask.float(), bias=bias, sinks=sinks), written(mask.float())
