"""The predicted cost of attention: by hand, cell by cell, and against torch's counts and allocations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.benchmarks_made import size
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mhacli.attention import attend
from mhacli.results.bench.workload import Direction, Workload, visible_pairs
from mhacli.spec.config import Dtype

DTYPES = get_args(Dtype)
GROUPED = Workload(2, 9, 3, 11, 5, 7, "float32", False, "forward")
SIZES = [
    GROUPED,
    Workload(3, 4, 4, 5, 7, 7, "bfloat16", True, "forward"),
    Workload(2, 6, 2, 3, 5, 11, "float16", True, "backward"),
    Workload(1, 3, 1, 7, 1, 13, "float64", True, "both"),
]


def cells(
    q_len: int, k_len: int, causal: bool, window: tuple[int, int] | None, offset: int
) -> Iterator[tuple[int, int]]:
    """Every cell that may be seen, asked one by one."""
    for i, j in product(range(q_len), range(k_len)):
        distance = j - (i + offset)
        if causal and distance > 0:
            continue
        if window is not None and not -window[0] <= distance <= window[1]:
            continue
        yield i, j


def tensors(work: Workload) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(work.batch, work.n_heads, work.q_len, work.d_head, dtype=getattr(torch, work.dtype))
    k, v = (torch.randn(work.batch, work.n_kv_heads, work.k_len, work.d_head, dtype=q.dtype) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize(
    ("sizes", "rules", "pairs"),
    [
        ((3, 3), {}, 9),
        ((3, 3), {"causal": True}, 6),
        ((2, 5), {"causal": True, "offset": 3}, 9),  # 4 + 5
        ((5, 2), {"causal": True}, 9),  # 1 + 2 + 2 + 2 + 2
        ((5, 3), {"causal": True, "offset": -3}, 3),  # 0 + 0 + 0 + 1 + 2
        ((4, 4), {"window": (1, 1)}, 10),  # 2 + 3 + 3 + 2
        ((4, 4), {"window": (1, 1), "causal": True}, 7),  # 1 + 2 + 2 + 2
        ((4, 4), {"window": (0, 0)}, 4),
        ((1, 7), {"causal": True, "offset": 6}, 7),
        ((2, 3), {"offset": 99}, 6),
        ((2, 3), {"window": (1, 1), "offset": 99}, 0),
    ],
)
def test_by_hand_the_pairs_that_a_mask_shows(sizes: tuple[int, int], rules: dict[str, Any], pairs: int) -> None:
    assert visible_pairs(*sizes, **rules) == pairs


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("window", [None, (0, 0), (2, 0), (0, 3), (2, 1), (1, 40), (40, 1)])
def test_visible_pairs_are_those_of_asking_every_cell(causal: bool, window: tuple[int, int] | None) -> None:
    for q_len, k_len, offset in product((1, 2, 3, 5, 8), (1, 2, 4, 7), range(-9, 10)):
        found = visible_pairs(q_len, k_len, causal=causal, window=window, offset=offset)
        assert found == len(list(cells(q_len, k_len, causal, window, offset))), (q_len, k_len, offset)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(-40, 40), st.integers(0, 35), st.integers(0, 35))
def test_a_wider_window_or_no_causality_never_hides_a_pair(
    q_len: int, k_len: int, offset: int, left: int, right: int
) -> None:
    def seen(*window: int, causal: bool = False) -> int:
        return visible_pairs(q_len, k_len, causal=causal, window=(window[0], window[1]), offset=offset)

    assert 0 <= seen(left, right, causal=True) <= seen(left, right) <= seen(left + 1, right) <= q_len * k_len
    assert seen(left, right) <= seen(left, right + 1)
    assert seen(left, right, causal=True) == seen(left, 0)


def test_long_texts_are_counted_without_asking_their_cells() -> None:
    n = 10**9
    assert visible_pairs(n, n, causal=True) == n * (n + 1) // 2
    assert visible_pairs(n, n, causal=True, window=(1, 0)) == 2 * n - 1


@pytest.mark.parametrize("work", SIZES, ids=str)
def test_operations_are_those_of_a_loop_over_visible_cells(work: Workload) -> None:
    counted = 0
    for _ in range(work.batch * work.n_heads):
        for _ in cells(work.q_len, work.k_len, work.causal, None, work.k_len - work.q_len):
            counted += 2 * work.d_head  # a product and a sum for each number of q·k
            counted += 2 * work.d_head  # and of the share times v
    assert replace(work, direction="forward").attention_flops == counted


def test_by_hand_the_operations_and_bytes_of_a_small_size() -> None:
    assert GROUPED.pairs == 35
    assert GROUPED.attention_flops == 4 * 2 * 9 * 35 * 11
    assert GROUPED.attention_bytes == (2 * (2 * 9 * 5 * 11) + 2 * (2 * 3 * 7 * 11)) * 4
    assert GROUPED.input_bytes == (2 * 9 * 5 * 11 + 2 * (2 * 3 * 7 * 11)) * 4
    causal = Workload(1, 1, 1, 1, 3, 3, "float16", True, "forward")
    assert (causal.pairs, causal.attention_flops, causal.attention_bytes, causal.input_bytes) == (6, 24, 24, 18)


@pytest.mark.parametrize("work", [replace(size, causal=False, dtype="float32") for size in SIZES], ids=str)
def test_operations_are_what_torch_counts_of_attend_and_of_its_gradients(work: Workload) -> None:
    leaves = [t.requires_grad_() for t in tensors(work)]
    with FlopCounterMode(display=False) as forward:
        z = attend(*leaves)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(z, leaves, torch.ones_like(z))
    again = forward.get_total_flops() // 2  # a fused backward pass has no pattern kept, and computes the scores anew
    found = {direction: replace(work, direction=direction).attention_flops for direction in get_args(Direction)}
    assert found["forward"] == forward.get_total_flops()
    assert found["backward"] == backward.get_total_flops() + again
    assert found["both"] == found["forward"] + found["backward"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bytes_are_those_of_real_tensors(size: Workload, dtype: Dtype) -> None:
    work = replace(size, dtype=dtype)
    q, k, v = (t.requires_grad_() for t in tensors(work))
    z = attend(q, k, v)
    of_z = torch.ones_like(z)
    gradients = torch.autograd.grad(z, (q, k, v), of_z)
    forward = sum(t.nbytes for t in (q, k, v, z))
    backward = forward + sum(t.nbytes for t in (of_z, *gradients))
    assert replace(work, direction="forward").attention_bytes == forward
    assert replace(work, direction="backward").attention_bytes == backward
    assert replace(work, direction="both").attention_bytes == forward + backward
    assert work.input_bytes == q.nbytes + k.nbytes + v.nbytes


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_backward_pass_has_two_and_a_half_times_the_operations_and_twice_the_bytes(size: Workload) -> None:
    forward, backward, both = (replace(size, direction=direction) for direction in get_args(Direction))
    assert (backward.attention_flops / forward.attention_flops, both.attention_flops / forward.attention_flops) == (
        2.5,
        3.5,
    )
    assert (backward.attention_bytes / forward.attention_bytes, both.attention_bytes / forward.attention_bytes) == (
        2,
        3,
    )
    assert backward.input_bytes == forward.input_bytes


@pytest.mark.parametrize(
    ("q_len", "k_len", "causal", "is_masked"),
    [(1, 7, True, False), (1, 1, True, False), (5, 5, True, True), (2, 7, True, True), (5, 5, False, False)],
)
def test_a_mask_that_forbids_nothing_is_none(q_len: int, k_len: int, causal: bool, is_masked: bool) -> None:
    work = replace(GROUPED, q_len=q_len, k_len=k_len, causal=causal)
    assert work.is_masked is is_masked


def test_the_newest_token_of_a_decoding_step_sees_every_key() -> None:
    step = replace(GROUPED, q_len=1, k_len=13, causal=True)
    assert step.pairs == 13
    assert step.attention_flops == replace(step, causal=False).attention_flops


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "9 heads × 11 · 3 kv heads · float32 · full · forward"),
        ({"n_kv_heads": 9}, "9 heads × 11 · float32 · full · forward"),
        ({"n_kv_heads": 1}, "9 heads × 11 · 1 kv head · float32 · full · forward"),
        ({"n_heads": 1, "n_kv_heads": 1}, "1 head × 11 · float32 · full · forward"),
        ({"d_head": 13}, "9 heads × 13 · 3 kv heads · float32 · full · forward"),
        ({"dtype": "bfloat16"}, "9 heads × 11 · 3 kv heads · bfloat16 · full · forward"),
        ({"causal": True}, "9 heads × 11 · 3 kv heads · float32 · causal · forward"),
        ({"direction": "backward"}, "9 heads × 11 · 3 kv heads · float32 · full · backward"),
        ({"direction": "both"}, "9 heads × 11 · 3 kv heads · float32 · full · forward and backward"),
        ({"q_len": 1}, "9 heads × 11 · 3 kv heads · float32 · one query, all keys"),
        ({"q_len": 1, "causal": True}, "9 heads × 11 · 3 kv heads · float32 · one query, all keys"),
    ],
)
def test_a_family_is_named_by_what_its_sizes_share(changes: dict[str, Any], name: str) -> None:
    assert size(**changes).family == name


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "2 × 5 tokens"),
        ({"batch": 1, "q_len": 1024, "k_len": 1024}, "1,024 tokens"),
        ({"batch": 1, "q_len": 1, "k_len": 8192}, "8,192 keys"),
    ],
)
def test_a_length_in_a_sentence_has_its_unit(changes: dict[str, Any], text: str) -> None:
    assert size(**changes).length_text == text
