"""`attend` is attention: against the formula, against torch, by hand, and what holds whatever the
numbers are.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle

from mhacli.attention import attend, masks

CEILING = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 2e-2}
LENGTHS = (3, 5)


class Sizes(NamedTuple):
    n_heads: int
    n_kv_heads: int
    q_len: int
    k_len: int
    d_head: int
    d_v: int


GROUPED = Sizes(9, 3, 5, 7, 11, 13)
SIZES = {
    "grouped": GROUPED,
    "more queries than keys": Sizes(9, 3, 7, 5, 11, 13),
    "two groups of two": Sizes(4, 2, 5, 7, 3, 2),
    "one key head": Sizes(3, 1, 5, 7, 2, 3),
    "one head": Sizes(1, 1, 5, 7, 3, 2),
    "one token": Sizes(3, 3, 1, 1, 5, 7),
    "one query": Sizes(9, 3, 1, 7, 11, 13),
}
MASKS: dict[str, Any] = {
    "all": (None, lambda b, i, j: True),
    "causal": (masks.causal(), lambda b, i, j: j <= i),
    "first queries see nothing": (masks.causal(-2), lambda b, i, j: j <= i - 2),
    "right padding": (masks.padding(torch.tensor(LENGTHS)), lambda b, i, j: j < LENGTHS[b]),
    "left padding": (
        masks.padding(torch.tensor(LENGTHS), "left", padded_len=7),
        lambda b, i, j: j >= 7 - LENGTHS[b],
    ),
    "one sequence of padding": (
        masks.both(masks.causal(), masks.padding(torch.tensor([0, 3]))),
        lambda b, i, j: j <= i and j < (0, 3)[b],
    ),
    "window": (masks.window(1, 2), lambda b, i, j: i - 1 <= j <= i + 2),
    "plain function": (
        lambda q_idx, k_idx: (q_idx[:, None] + k_idx[None, :]) % 3 != 1,
        lambda b, i, j: (i + j) % 3 != 1,
    ),
}


def inputs(
    sizes: Sizes, normal: Any, dtype: torch.dtype = torch.float64, std: float = 1.5
) -> tuple[torch.Tensor, ...]:
    q = normal(2, sizes.n_heads, sizes.q_len, sizes.d_head, std=std, dtype=dtype)
    k = normal(2, sizes.n_kv_heads, sizes.k_len, sizes.d_head, std=std, dtype=dtype)
    return q, k, normal(2, sizes.n_kv_heads, sizes.k_len, sizes.d_v, std=std, dtype=dtype)


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> oracle.Attention:
    return oracle.attention(*(t.detach().double().numpy() for t in (q, k, v)), **how)


def cells(rule: Any, q: torch.Tensor, k: torch.Tensor) -> np.ndarray:
    plane = [
        [[rule(b, i, j) for j in range(k.shape[2])] for i in range(q.shape[2])] for b in range(2)
    ]
    return np.repeat(np.array(plane)[:, None], q.shape[1], axis=1)


def tapped(*tensors: torch.Tensor, **how: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    seen: dict[str, torch.Tensor] = {}
    return attend(*tensors, tap=lambda site, tensor, **_: seen.update({site: tensor}), **how), seen


def worst(tensor: torch.Tensor, array: np.ndarray) -> float:
    assert np.isfinite(array).all()
    return (tensor.detach().double() - torch.from_numpy(np.array(array))).abs().max().item()


# -------------------------------------------------------------------------------------- the formula


@pytest.mark.parametrize(
    ("sizes", "mask"),
    [
        *(("grouped", mask) for mask in MASKS),
        *((sizes, mask) for sizes in list(SIZES)[1:] for mask in ("causal", "window")),
    ],
)
def test_attend_is_the_formula(sizes: str, mask: str, normal: Any) -> None:
    allowed, rule = MASKS[mask]
    for dtype in (torch.float64, torch.float32):
        q, k, v = inputs(SIZES[sizes], normal, dtype)
        z, seen = tapped(q, k, v, allowed=allowed)
        visible = cells(rule, q, k)
        right = formula(q, k, v, allowed=visible)
        assert z.dtype == dtype
        assert worst(z, right.z) <= CEILING[dtype]
        assert worst(seen["pattern"], right.pattern) <= CEILING[dtype]
        assert (seen["pattern"][torch.from_numpy(~visible)] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scale_softcap_bias_and_mask_act_in_this_order(dtype: torch.dtype, normal: Any) -> None:
    q, k, v = inputs(GROUPED, normal, dtype)
    bias, how = normal(2, 9, 5, 7, dtype=dtype), {"scale": 0.7, "softcap": 1.3}
    z, seen = tapped(q, k, v, allowed=masks.causal(1), bias=bias, **how)
    visible = cells(lambda b, i, j: j <= i + 1, q, k)
    right = formula(q, k, v, allowed=visible, bias=bias.numpy(), **how)
    assert worst(z, right.z) <= CEILING[dtype]
    assert worst(seen["qk"], right.qk) <= 20 * CEILING[dtype]
    assert (
        worst(seen["scores"][torch.from_numpy(visible)], right.scores[visible])
        <= 4 * CEILING[dtype]
    )
    assert (seen["scores"][torch.from_numpy(~visible)] == -torch.inf).all()


@pytest.mark.parametrize("shape", [(), (7,), (5, 1), (9, 1, 7), (2, 1, 5, 7), (2, 9, 5, 7)])
def test_a_bias_may_leave_out_axes_and_minus_infinity_in_it_masks(
    shape: tuple[int, ...], normal: Any
) -> None:
    q, k, v = inputs(GROUPED, normal)
    bias = normal(*shape)
    if shape and shape[-1] == 7:
        bias[..., 2] = -torch.inf
        v[:, :, 2] = torch.nan
    full = np.broadcast_to(bias.numpy(), (2, 9, 5, 7))
    right = formula(
        q,
        k,
        torch.nan_to_num(v),
        bias=np.where(np.isneginf(full), 0, full),
        allowed=~np.isneginf(full),
    )
    assert worst(attend(q, k, v, bias=bias), right.z) <= 1e-12


@pytest.mark.parametrize("dtype", CEILING)
def test_scores_a_thousand_times_larger_stay_exact(dtype: torch.dtype, normal: Any) -> None:
    q, k = normal(2, 9, 5, 11, std=3).round(), normal(2, 3, 7, 11, std=3).round()
    v = normal(2, 3, 7, 13, dtype=dtype)
    z = attend(q.to(dtype), k.to(dtype), v, scale=1000.0, allowed=masks.causal(2))
    right = formula(q, k, v, scale=1000.0, allowed=cells(lambda b, i, j: j <= i + 2, q, k))
    assert right.scores[np.isfinite(right.scores)].max() > torch.finfo(torch.float16).max
    assert worst(z, right.z) <= CEILING[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", ["all", "causal", "right padding"])
def test_sixteen_bits_get_their_softmax_in_float32(
    dtype: torch.dtype, mask: str, normal: Any
) -> None:
    q, k, v = inputs(GROUPED, normal, dtype, std=1.0)
    allowed, rule = MASKS[mask]
    z, seen = tapped(q, k, v, allowed=allowed)
    assert [seen[site].dtype for site in ("qk", "scores", "pattern")] == [
        dtype,
        torch.float32,
        dtype,
    ]
    assert torch.equal(seen["pattern"], torch.nan_to_num(seen["scores"].softmax(dim=-1)).to(dtype))
    right = formula(q, k, v, allowed=cells(rule, q, k)).z
    kv = (t.repeat_interleave(3, dim=1) for t in (k * 11**-0.5, v))
    hidden = torch.from_numpy(~cells(rule, q, k))
    plain = (q @ next(kv).mT).masked_fill(hidden, -torch.inf).softmax(-1) @ next(kv)
    assert z.dtype == dtype
    assert worst(z, right) <= CEILING[dtype]
    # no worse than the formula in 16 bits
    assert worst(z, right) <= 2 * worst(plain, right) + 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_invisible_keys_and_values_hold_never_reaches_the_result(
    poison: float, normal: Any
) -> None:
    q, k, v = inputs(GROUPED, normal)
    allowed = masks.padding(torch.tensor(LENGTHS))
    right = attend(q, k, v, allowed=allowed)
    for b, length in enumerate(LENGTHS):
        k[b, :, length:], v[b, :, length:] = poison, poison
    assert torch.equal(attend(q, k, v, allowed=allowed), right)


def test_a_query_without_a_visible_key_gets_zeros_and_a_finite_gradient(normal: Any) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(GROUPED, normal))
    z, seen = tapped(q, k, v, allowed=masks.causal(-2))
    assert (z[:, :, :2] == 0).all()
    assert (seen["pattern"][:, :, :2] == 0).all()
    with torch.autograd.set_detect_anomaly(True):
        z.square().sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))
    assert (q.grad[:, :, :2] == 0).all()
    assert (q.grad[:, :, 2:] != 0).any()


@pytest.mark.parametrize("mask", ["all", "causal", "right padding", "window"])
def test_attend_and_its_gradients_are_those_of_torch(mask: str, normal: Any) -> None:
    ours = [t.requires_grad_() for t in inputs(GROUPED, normal)]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    allowed, rule = MASKS[mask]
    visible = torch.from_numpy(cells(rule, *ours[:2]))
    z = attend(*ours, allowed=allowed)
    right = torch.nn.functional.scaled_dot_product_attention(
        *theirs, attn_mask=visible, enable_gqa=True
    )
    assert (z - right).abs().max() <= 1e-12
    z.square().sum().backward()
    right.square().sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.grad - other.grad).abs().max() <= 1e-11


def test_gradients_are_those_of_small_differences(normal: Any) -> None:
    q, k, v, bias = normal(1, 2, 3, 2), normal(1, 1, 4, 2), normal(1, 1, 4, 3), normal(3, 4)
    tensors = [t.requires_grad_() for t in (q, k, v, bias)]

    def attended(q: Any, k: Any, v: Any, bias: Any) -> torch.Tensor:
        return attend(q, k, v, bias=bias, softcap=2.0, allowed=masks.causal(-1))

    assert torch.autograd.gradcheck(attended, tensors)


def test_a_tap_sees_every_tensor_in_the_order_of_the_computation(normal: Any) -> None:
    seen: list[Any] = []
    attend(
        *inputs(SIZES["two groups of two"], normal),
        tap=lambda site, t, **_: seen.append((site, tuple(t.shape))),
    )
    assert seen == [
        ("qk", (2, 4, 5, 7)),
        ("scores", (2, 4, 5, 7)),
        ("pattern", (2, 4, 5, 7)),
        ("z", (2, 4, 5, 2)),
    ]


@pytest.mark.parametrize("dtype", CEILING)
def test_the_same_inputs_give_the_same_bits_whatever_the_default_dtype(
    dtype: torch.dtype, normal: Any
) -> None:
    q, k, v = inputs(GROUPED, normal, dtype)
    first = attend(q, k, v, allowed=masks.causal(2), softcap=2.0)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(first, attend(q, k, v, allowed=masks.causal(2), softcap=2.0))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.skipif(
    "MHA_TESTS_CHECK_SHAPES" not in os.environ, reason="tests/unit/test_shapes.py runs it"
)
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
def test_the_shapes_in_the_signature_hold(shapes: Any, wrong: str) -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match=f"'{wrong}'"):
        attend(*(torch.zeros(shape) for shape in shapes))


# ------------------------------------------------------------------------------------------ by hand


LN3 = math.log(3)
BY_HAND: dict[str, tuple[Any, dict[str, Any], list[float]]] = {
    "a query of ln 2 gives thirds": (
        ([math.log(2)], [0.0, 1.0], [10.0, 40.0]),
        {"scale": 1.0},
        [30.0],
    ),
    "e² / (e¹ + e²)": (
        ([1.0, 2.0], [1.0, 2.0], [0.0, 1.0]),
        {"scale": 1.0},
        [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))],
    ),
    "a bias decides": (
        ([0.0], [1.0, 2.0], [0.0, 1.0]),
        {"bias": torch.tensor([0.0, LN3]).double()},
        [0.75],
    ),
    "softcap bounds scores": (([1.0], [1e9, -1e9], [1.0, 0.0]), {"softcap": LN3 / 2}, [0.75]),
    "the bias comes after the softcap": (
        ([1.0], [1e9, -1e9], [1.0, 0.0]),
        {"softcap": LN3 / 2, "bias": torch.tensor([0.0, LN3]).double()},
        [0.5],
    ),
    "the first causal query takes the first value": (
        ([3.0, 5.0], [7.0, 7.0], [11.0, 13.0]),
        {"allowed": masks.causal()},
        [11.0, 12.0],
    ),
    "nothing visible": (([3.0], [7.0], [11.0]), {"allowed": masks.causal(-1)}, [0.0]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    numbers, how, right = BY_HAND[name]
    q, k, v = (
        torch.tensor([[[[x] for x in row]]], dtype=torch.float64) for row in numbers
    )  # [1, 1, query or key, 1]
    assert attend(q, k, v, **how).flatten().tolist() == pytest.approx(right, abs=1e-7)


def test_by_hand_the_default_scale_is_one_over_the_root_of_the_width_of_a_head() -> None:
    q = torch.tensor([[[[2.0, 0, 0, 0]]]], dtype=torch.float64)
    k = torch.tensor([[[[LN3, 5, 5, 5], [0.0, 5, 5, 5]]]], dtype=torch.float64)
    _, seen = tapped(q, k, torch.zeros(1, 1, 2, 1, dtype=torch.float64))  # 2 · ln 3 / √4 = ln 3
    assert seen["pattern"].flatten().tolist() == pytest.approx([0.75, 0.25], abs=1e-15)


def test_neighbouring_query_heads_share_a_key_head() -> None:
    values = torch.tensor([20.0, 30.0], dtype=torch.float64).view(1, 2, 1, 1)
    q, k = torch.ones(1, 6, 1, 1, dtype=torch.float64), torch.ones(1, 2, 1, 1, dtype=torch.float64)
    assert attend(q, k, values).flatten().tolist() == [20.0, 20.0, 20.0, 30.0, 30.0, 30.0]


# ------------------------------------------------------------------------- whatever the numbers are

some = settings(max_examples=20, derandomize=True)


class Case(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pick: torch.Generator

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def order(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self.pick)


@st.composite
def cases(draw: Any, least_keys: int = 1, least_batch: int = 1) -> Case:
    batch, n_kv, group, q_len, k_len, d_head, d_v = (
        draw(st.integers(low, high))
        for low, high in ((least_batch, 3), (1, 3), (1, 3), (1, 6), (least_keys, 7), (1, 5), (1, 4))
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shapes = (
        (batch, n_kv * group, q_len, d_head),
        (batch, n_kv, k_len, d_head),
        (batch, n_kv, k_len, d_v),
    )
    return Case(
        *(2 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes),
        generator,
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-11)


@some
@given(cases(least_keys=2), st.integers(0, 6))
def test_a_later_key_changes_no_earlier_result(case: Case, place: int) -> None:
    at = place % case.k.shape[2]
    k, v = case.k.clone(), case.v.clone()
    k[:, :, at] += 1
    v[:, :, at] += 1
    before, after = (
        attend(case.q, keys, values, allowed=masks.causal())
        for keys, values in ((case.k, case.v), (k, v))
    )
    assert torch.equal(before[:, :, :at], after[:, :, :at])
    assert case.q.shape[2] <= at or not same(before[:, :, at:], after[:, :, at:])


@some
@given(cases(least_batch=2))
def test_sequences_of_a_batch_do_not_know_of_each_other(case: Case) -> None:
    together = attend(*case[:3], allowed=masks.causal(1))
    assert same(together[1:2], attend(*(t[1:2] for t in case[:3]), allowed=masks.causal(1)))


@some
@given(cases(least_keys=2))
def test_the_order_of_keys_does_not_matter_and_that_of_queries_is_that_of_results(
    case: Case,
) -> None:
    keys, queries = case.order(case.k.shape[2]), case.order(case.q.shape[2])
    z = attend(*case[:3])
    assert same(z, attend(case.q, case.k[:, :, keys], case.v[:, :, keys]))
    assert same(z[:, :, queries], attend(case.q[:, :, queries], case.k, case.v))


@some
@given(cases(), st.sampled_from(["left", "right"]), st.integers(0, 6))
def test_a_padded_sequence_gives_what_it_gives_alone(case: Case, side: Any, length: int) -> None:
    k_len = case.k.shape[2]
    length = 1 + length % k_len
    allowed = masks.padding(torch.tensor([length] * case.q.shape[0]), side, padded_len=k_len)
    real = slice(0, length) if side == "right" else slice(k_len - length, None)
    assert same(
        attend(*case[:3], allowed=allowed), attend(case.q, case.k[:, :, real], case.v[:, :, real])
    )


@some
@given(cases(), st.floats(-50, 50), st.floats(-3, 3))
def test_a_constant_on_a_row_changes_nothing_and_the_result_is_linear_in_the_values(
    case: Case, constant: float, factor: float
) -> None:
    row = torch.zeros(case.q.shape[2], 1, dtype=torch.float64)
    row[-1] = constant
    mask, other = masks.causal(2), case.v.flip(0, 2)
    z = attend(*case[:3], allowed=mask)
    assert same(attend(*case[:3], bias=row, allowed=mask), z)
    assert same(
        attend(case.q, case.k, case.v + factor * other, allowed=mask),
        z + factor * attend(case.q, case.k, other, allowed=mask),
    )


@some
@given(cases())
def test_every_result_lies_between_the_values_and_one_key_hands_over_its_value(case: Case) -> None:
    z, alone = attend(*case[:3]), attend(case.q, case.k[:, :, :1], case.v[:, :, :1])
    values = case.v.repeat_interleave(case.group, dim=1)
    assert (z >= values.amin(dim=2, keepdim=True) - 1e-11).all()
    assert (z <= values.amax(dim=2, keepdim=True) + 1e-11).all()
    assert torch.equal(alone, values[:, :, :1].expand_as(z))


@some
@given(cases())
def test_scales_multiply_and_a_mask_of_true_is_no_mask(case: Case) -> None:
    z = attend(*case[:3])
    assert same(z, attend(4 * case.q, case.k / 4, case.v))
    assert same(attend(*case[:3], scale=0.5), attend(case.q / 2, case.k, case.v, scale=1.0))
    cells = torch.ones(case.q.shape[2], case.k.shape[2], dtype=torch.bool)
    assert torch.equal(attend(*case[:3], allowed=masks.from_tensor(cells)), z)
