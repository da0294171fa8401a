"""`attend` against loops over the formula, against torch, and against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import NamedTuple

import jaxtyping
import numpy as np
import pytest
import torch
from support import oracle

from mhacli.attention import attend, masks
from mhacli.attention.core import attention_pattern, is_finite, per_query_head
from mhacli.spec.sites import SITES

CEILING = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    n_heads: int
    n_kv_heads: int
    q_len: int
    k_len: int
    d_head: int
    d_v: int


CASES = {
    "grouped, all sizes different": Case(9, 3, 5, 7, 11, 13),
    "more queries than keys": Case(9, 3, 7, 5, 11, 13),
    "two groups of two": Case(4, 2, 5, 7, 3, 2),
    "self with an odd count of heads": Case(3, 3, 7, 7, 5, 5),
    "one kv head for all": Case(3, 1, 5, 7, 2, 3),
    "one head": Case(1, 1, 5, 7, 3, 2),
    "one token": Case(3, 3, 1, 1, 5, 7),
    "one query of many keys": Case(9, 3, 1, 7, 11, 13),
}
LENGTHS = (3, 5)

MASKS = {
    "all": (None, lambda b, i, j: True),
    "causal": (masks.causal(), lambda b, i, j: j <= i),
    "causal, first queries see nothing": (masks.causal(-2), lambda b, i, j: j <= i - 2),
    "causal, aligned with the end": (masks.causal(2), lambda b, i, j: j <= i + 2),
    "right padding": (masks.padding(torch.tensor(LENGTHS)), lambda b, i, j: j < LENGTHS[b]),
    "left padding": (
        masks.padding(torch.tensor(LENGTHS), "left", padded_len=7),
        lambda b, i, j: j >= 7 - LENGTHS[b],
    ),
    "causal and one sequence of padding only": (
        masks.both(masks.causal(), masks.padding(torch.tensor([0, 3]))),
        lambda b, i, j: j <= i and j < (0, 3)[b],
    ),
    "window": (masks.window(1, 2), lambda b, i, j: i - 1 <= j <= i + 2),
}


def inputs(case, normal, dtype=torch.float64, std=1.5):
    q = normal(2, case.n_heads, case.q_len, case.d_head, std=std, dtype=dtype)
    k = normal(2, case.n_kv_heads, case.k_len, case.d_head, std=std, dtype=dtype)
    v = normal(2, case.n_kv_heads, case.k_len, case.d_v, std=std, dtype=dtype)
    return q, k, v


def loops(q, k, v, **how):
    return oracle.attention(*(t.double().numpy() for t in (q, k, v)), **how)


def cells(rule, q, k):
    return oracle.full(rule, q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def observed(*tensors, **how):
    seen = {}
    z = attend(*tensors, tap=lambda site, tensor, **_: seen.update({site: tensor}), **how)
    return z, seen


def worst(tensor, array):
    assert np.isfinite(array).all()
    return (tensor.double() - torch.from_numpy(np.asarray(array))).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("case", CASES)
def test_attend_agrees_with_loops_over_the_formula(case, mask, dtype, normal):
    q, k, v = inputs(CASES[case], normal, dtype)
    allowed, rule = MASKS[mask]
    z, seen = observed(q, k, v, allowed=allowed)
    expected = loops(q, k, v, allowed=cells(rule, q, k))
    assert z.dtype == dtype
    assert worst(z, expected.z) <= CEILING[dtype]
    assert worst(seen["pattern"], expected.pattern) <= CEILING[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scale_softcap_and_bias_act_in_the_stated_order(dtype, normal):
    q, k, v = inputs(CASES["grouped, all sizes different"], normal, dtype)
    bias = normal(2, 9, 5, 7, dtype=dtype)
    how = {"scale": 0.7, "softcap": 1.3}
    z, seen = observed(q, k, v, allowed=masks.causal(1), bias=bias, **how)
    expected = loops(q, k, v, allowed=cells(lambda b, i, j: j <= i + 1, q, k), bias=bias.tolist(), **how)
    assert worst(z, expected.z) <= CEILING[dtype]
    assert worst(seen["pattern"], expected.pattern) <= CEILING[dtype]


def test_a_bias_may_leave_out_axes_that_it_does_not_vary_over(normal):
    q, k, v = inputs(CASES["grouped, all sizes different"], normal)
    bias = normal(9, 1, 7)
    every_cell = np.broadcast_to(bias.numpy()[None], (2, 9, 5, 7))
    assert worst(attend(q, k, v, bias=bias), loops(q, k, v, bias=every_cell).z) <= 1e-12


def test_dot_products_and_scores_agree_with_the_loops(normal):
    q, k, v = inputs(CASES["grouped, all sizes different"], normal)
    _, seen = observed(q, k, v, allowed=masks.causal(1), softcap=2.5)
    allowed = cells(lambda b, i, j: j <= i + 1, q, k)
    expected = loops(q, k, v, allowed=allowed, softcap=2.5)
    assert worst(seen["qk"], expected.qk) <= 1e-12
    visible = torch.from_numpy(allowed)
    assert worst(seen["scores"][visible], expected.scores[allowed]) <= 1e-12
    assert (seen["scores"][~visible] == -torch.inf).all()


@pytest.mark.parametrize("dtype", CEILING)
def test_scores_a_thousand_times_larger_stay_exact(dtype, normal):
    q, k = normal(2, 9, 5, 11, std=3).round(), normal(2, 3, 7, 11, std=3).round()
    v = normal(2, 3, 7, 13, dtype=dtype)
    z = attend(q.to(dtype), k.to(dtype), v, scale=1000.0, allowed=masks.causal(2))
    expected = loops(q, k, v, scale=1000.0, allowed=cells(lambda b, i, j: j <= i + 2, q, k))
    assert expected.scores[np.isfinite(expected.scores)].max() > torch.finfo(torch.float16).max
    assert worst(z, expected.z) <= CEILING[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", ["all", "causal", "right padding"])
def test_sixteen_bits_err_at_most_twice_as_much_as_the_plain_formula(dtype, mask, normal):
    q, k, v = inputs(CASES["grouped, all sizes different"], normal, dtype, std=1.0)
    allowed, rule = MASKS[mask]
    visible = cells(rule, q, k)
    reference = loops(q, k, v, allowed=visible).z
    k_heads, v_heads = (torch.stack([t[:, h // 3] for h in range(9)], dim=1) for t in (k, v))
    scores = (q @ (k_heads * 11**-0.5).mT).masked_fill(~torch.from_numpy(visible), -torch.inf)
    plain = worst(scores.softmax(-1) @ v_heads, reference)
    rounded = torch.from_numpy(reference).to(dtype)
    rounding = 2 * worst(rounded + 0.3 - 0.3, reference)
    error = worst(attend(q, k, v, allowed=allowed), reference)
    assert error <= CEILING[dtype]
    assert error <= 2 * plain + rounding


def test_sixteen_bit_inputs_get_their_softmax_in_float32(normal):
    q, k, v = inputs(CASES["grouped, all sizes different"], normal, torch.float16)
    z, seen = observed(q, k, v)
    assert (seen["qk"].dtype, seen["scores"].dtype) == (torch.float16, torch.float32)
    assert (seen["pattern"].dtype, z.dtype) == (torch.float16, torch.float16)
    assert torch.equal(seen["pattern"], seen["scores"].softmax(dim=-1).half())


@pytest.mark.parametrize("mask", MASKS)
def test_the_pattern_is_the_softmax_of_the_scores_and_forbidden_cells_are_exactly_zero(mask, normal):
    q, k, v = inputs(CASES["grouped, all sizes different"], normal, torch.float32)
    allowed, rule = MASKS[mask]
    _, seen = observed(q, k, v, allowed=allowed)
    visible = torch.from_numpy(cells(rule, q, k))
    assert (seen["pattern"][~visible] == 0.0).all()
    assert (seen["pattern"][visible] > 0.0).all()
    assert torch.equal(torch.nan_to_num(seen["scores"].softmax(dim=-1)), seen["pattern"])
    sums = seen["pattern"].double().sum(dim=-1)
    assert (sums - visible.any(dim=-1).double()).abs().max() <= 1e-6


def test_a_query_without_any_key_gets_zeros_and_no_step_backwards_is_nan(normal):
    q, k, v = (t.requires_grad_() for t in inputs(CASES["grouped, all sizes different"], normal))
    z, seen = observed(q, k, v, allowed=masks.causal(-2))
    assert (z[:, :, :2] == 0.0).all()
    assert (seen["pattern"][:, :, :2] == 0.0).all()
    with torch.autograd.set_detect_anomaly(True):
        z.square().sum().backward()
    for tensor in (q, k, v):
        assert torch.isfinite(tensor.grad).all()
    assert (q.grad[:, :, :2] == 0.0).all()
    assert (q.grad[:, :, 2:] != 0.0).any()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_padded_keys_and_values_hold_never_reaches_the_result(poison, normal):
    q, k, v = inputs(CASES["grouped, all sizes different"], normal)
    allowed = masks.padding(torch.tensor(LENGTHS))
    expected = attend(q, k, v, allowed=allowed)
    for b, length in enumerate(LENGTHS):
        k[b, :, length:], v[b, :, length:] = poison, poison
    assert torch.equal(attend(q, k, v, allowed=allowed), expected)


@pytest.mark.parametrize("mask", ["all", "causal", "right padding", "window"])
def test_attend_and_its_gradients_agree_with_torch(mask, normal):
    ours = [t.requires_grad_() for t in inputs(CASES["grouped, all sizes different"], normal)]
    torchs = [t.detach().clone().requires_grad_() for t in ours]
    allowed, rule = MASKS[mask]
    visible = torch.from_numpy(cells(rule, *ours[:2]))
    z = attend(*ours, allowed=allowed)
    expected = torch.nn.functional.scaled_dot_product_attention(*torchs, attn_mask=visible, enable_gqa=True)
    assert (z - expected).abs().max() <= 1e-12
    z.square().sum().backward()
    expected.square().sum().backward()
    for mine, theirs in zip(ours, torchs, strict=True):
        assert (mine.grad - theirs.grad).abs().max() <= 1e-11


def test_the_tap_hears_the_sites_in_the_order_of_the_table(normal):
    q, k, v = inputs(CASES["two groups of two"], normal)
    heard = []
    attend(q, k, v, tap=lambda site, tensor, **_: heard.append((site, tuple(tensor.shape))))
    assert heard == [("qk", (2, 4, 5, 7)), ("scores", (2, 4, 5, 7)), ("pattern", (2, 4, 5, 7)), ("z", (2, 4, 5, 2))]
    assert [site for site, _ in heard] == [site for site in SITES if site in dict(heard)]


def test_the_last_query_alone_gives_the_last_row_of_the_whole(normal):
    q, k, v = inputs(CASES["self with an odd count of heads"], normal)
    whole = attend(q, k, v, allowed=masks.causal())
    alone = attend(q[:, :, -1:], k, v, allowed=masks.causal(offset=6))
    assert (whole[:, :, -1:] - alone).abs().max() <= 1e-12


@pytest.mark.parametrize("dtype", CEILING)
def test_the_same_inputs_give_the_same_bits_every_time(dtype, normal):
    q, k, v = inputs(CASES["grouped, all sizes different"], normal, dtype)
    first = attend(q, k, v, allowed=masks.causal(2))
    assert all(torch.equal(first, attend(q, k, v, allowed=masks.causal(2))) for _ in range(20))


def test_a_hostile_default_dtype_changes_nothing(normal):
    q, k, v = inputs(CASES["grouped, all sizes different"], normal, torch.float32)
    expected = attend(q, k, v, softcap=2.0)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(attend(q, k, v, softcap=2.0), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def one_query(q, keys, values):
    """One sequence, one head, one query; a key and a value are one number each."""
    column = [torch.tensor([[[[x] for x in row]]], dtype=torch.float64) for row in (q, keys, values)]
    return column[0], column[1], column[2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_noticed_wherever_it_stands(bad, dtype, normal):
    numbers = normal(3, 5, 7).to(dtype).transpose(0, 1)
    assert is_finite(numbers)
    numbers[4, 2, 6] = bad
    assert not is_finite(numbers)
    assert is_finite(numbers[:0])


def test_by_hand_a_query_of_ln_2_gives_thirds():
    q, k, v = one_query([math.log(2)], [0.0, 1.0], [10.0, 40.0])
    z, seen = observed(q, k, v, scale=1.0)
    assert seen["pattern"].flatten().tolist() == pytest.approx([1 / 3, 2 / 3], abs=1e-15)
    assert z.item() == pytest.approx(30.0, abs=1e-13)  # 10/3 + 80/3


def test_by_hand_the_default_scale_is_one_over_the_root_of_the_head_width():
    q = torch.tensor([[[[2.0, 0, 0, 0]]]], dtype=torch.float64)
    k = torch.tensor([[[[math.log(3), 5, 5, 5], [0.0, 5, 5, 5]]]], dtype=torch.float64)
    pattern = attention_pattern(q, k)  # 2 · ln 3 / √4 = ln 3
    assert pattern.flatten().tolist() == pytest.approx([0.75, 0.25], abs=1e-15)


def test_by_hand_a_bias_alone_decides_when_the_query_is_zero():
    q, k, v = one_query([0.0], [1.0, 2.0], [0.0, 1.0])
    assert attend(q, k, v, bias=torch.tensor([0.0, math.log(3)], dtype=torch.float64)).item() == pytest.approx(0.75)


def test_by_hand_softcap_bounds_the_scores_before_the_bias_is_added():
    q, k, v = one_query([1.0], [1e9, -1e9], [1.0, 0.0])
    cap = math.log(3) / 2  # scores ±ln(3)/2: shares e^ln3 : 1
    assert attend(q, k, v, softcap=cap).item() == pytest.approx(0.75, abs=1e-15)
    lifted = attend(q, k, v, softcap=cap, bias=torch.tensor([0.0, math.log(3)], dtype=torch.float64))
    assert lifted.item() == pytest.approx(0.5, abs=1e-15)


def test_by_hand_the_first_causal_query_takes_the_first_value():
    q, k, v = one_query([3.0, 5.0], [7.0, 7.0], [11.0, 13.0])
    assert attend(q, k, v, allowed=masks.causal()).flatten().tolist() == [11.0, 12.0]


def test_neighbouring_query_heads_share_a_kv_head():
    values = torch.tensor([20.0, 30.0], dtype=torch.float64).view(1, 2, 1, 1)
    q, k = torch.ones(1, 6, 1, 1, dtype=torch.float64), torch.ones(1, 2, 1, 1, dtype=torch.float64)
    assert attend(q, k, values).flatten().tolist() == [20.0, 20.0, 20.0, 30.0, 30.0, 30.0]
    assert per_query_head(values, 4).flatten().tolist() == [20.0, 20.0, 30.0, 30.0]


@pytest.mark.parametrize(
    ("shapes", "wrong"),
    [
        (((2, 9, 5, 11), (2, 3, 7, 12), (2, 3, 7, 13)), "k"),
        (((2, 9, 5, 11), (2, 3, 7, 11), (2, 3, 5, 13)), "v"),
        (((2, 9, 5, 11), (2, 3, 7, 11), (2, 9, 7, 13)), "v"),
        (((2, 9, 5, 11), (1, 3, 7, 11), (2, 3, 7, 13)), "k"),
        (((9, 5, 11), (2, 3, 7, 11), (2, 3, 7, 13)), "q"),
    ],
)
def test_the_shapes_in_the_annotations_are_executed(shapes, wrong):
    with pytest.raises(jaxtyping.TypeCheckError, match=f"typechecking parameter '{wrong}'"):
        attend(*(torch.zeros(shape) for shape in shapes))
