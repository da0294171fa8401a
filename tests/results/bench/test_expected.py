"""The predicted operations and bytes of backends: by hand, and against torch's counts and allocations."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mhacli.results.bench.workload import (
    BACKENDS,
    Direction,
    Workload,
    expected_extra_bytes,
    expected_flops,
    expected_moved_bytes,
)
from mhacli.spec.config import Dtype

DIRECTIONS = get_args(Direction)
DTYPES = get_args(Dtype)
FUSED = ("sdpa", "flash", "efficient", "cudnn", "flex")
PROJECTS = ("torch-mha", "torch-mha-weights")
GROUPED = Workload(2, 6, 3, 8, 5, 7, "float32", False, "forward")
"""In float32 q has 1920 bytes, a matrix of scores 1680, k and v for every head 2688 each, log-sum-exp 240."""
LAYER = Workload(2, 6, 6, 8, 5, 5, "float32", False, "forward")
"""In float32 q has 1920 bytes and a matrix 1200."""


def counted(backend: str, work: Workload) -> dict[str, int]:
    """What torch counts of `nn.MultiheadAttention` in a forward pass, and in the backward pass to its rows."""
    width = work.n_heads * work.d_head
    layer = nn.MultiheadAttention(width, work.n_heads, batch_first=True)
    rows = torch.randn(work.batch, work.q_len, width, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out, _ = layer(rows, rows, rows, need_weights=True, average_attn_weights=False)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out, rows, torch.ones_like(out))
    return {"forward": forward.get_total_flops(), "backward": backward.get_total_flops()}


@pytest.mark.parametrize("backend", PROJECTS)
@pytest.mark.parametrize("size", [LAYER, replace(LAYER, batch=3, n_heads=2, n_kv_heads=2, d_head=5, q_len=7, k_len=7)])
def test_operations_with_projections_are_what_torch_counts(backend: str, size: Workload) -> None:
    found = counted(backend, size)
    anew = size.attention_flops // 2  # torch keeps the pattern; the formula is for those that compute the scores again
    assert expected_flops(backend, size) == found["forward"]
    assert expected_flops(backend, replace(size, direction="backward")) == found["backward"] + anew
    assert expected_flops(backend, replace(size, direction="both")) == sum(found.values()) + anew


def test_by_hand_the_operations_of_the_four_projections() -> None:
    assert expected_flops("torch-mha", LAYER) - LAYER.attention_flops == 4 * 2 * (2 * 5) * 48 * 48


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in PROJECTS])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_without_projections_work_is_that_of_attention(backend: str, direction: Direction) -> None:
    work = replace(GROUPED, direction=direction, causal=True)
    assert expected_flops(backend, work) == work.attention_flops
    assert expected_moved_bytes(backend, work) == work.attention_bytes


@pytest.mark.parametrize("backend", PROJECTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_moves_its_rows_its_result_its_weights_and_the_pattern_that_it_returns(
    backend: str, dtype: Dtype
) -> None:
    layer = nn.MultiheadAttention(48, 6, dtype=getattr(torch, dtype))
    rows = torch.ones(2, 5, 48, dtype=getattr(torch, dtype))
    weights = layer.in_proj_weight.nbytes + layer.out_proj.weight.nbytes
    forward = rows.nbytes + rows.nbytes + weights
    if backend == "torch-mha-weights":
        forward += rows.new_ones(2, 6, 5, 5).nbytes
    work = replace(LAYER, dtype=dtype)
    assert expected_moved_bytes(backend, work) == forward
    assert expected_moved_bytes(backend, replace(work, direction="backward")) == forward
    assert expected_moved_bytes(backend, replace(work, direction="both")) == 2 * forward


@pytest.mark.parametrize(
    ("backend", "work", "kind", "n_bytes"),
    [
        ("sdpa", GROUPED, "cpu", 1920 + 240),
        ("flash", replace(GROUPED, dtype="bfloat16"), "cuda", 960 + 240),
        ("flex", replace(GROUPED, direction="both"), "cuda", 4 * 1920 + 2 * 2688 + 2 * 240),
        ("explicit", GROUPED, "cpu", 1680 + 1920 + 2688),
        ("explicit", replace(GROUPED, n_kv_heads=6), "cpu", 1680 + 1920),
        ("explicit", replace(GROUPED, d_head=1, q_len=7, causal=True), "cpu", 2 * 2352 + 49 + 336),
        ("explicit", replace(GROUPED, dtype="bfloat16"), "cpu", 2 * 1680 + 840 + 1344),
        ("compiled", replace(GROUPED, direction="backward"), "cuda", 3 * 1680 + 1920 + 2 * 2688 + 2 * 2688),
        ("math", GROUPED, "cpu", 2 * 1680 + 420 + (1920 + 2688) + 2 * 2688),
        ("math", replace(GROUPED, n_kv_heads=6, q_len=7, causal=True), "cpu", 2 * 2352 + 588 + 4 * 49 + 2 * 2688),
        ("math", replace(GROUPED, n_kv_heads=6, dtype="float16"), "cpu", 2 * 1680 + 420 + 2 * (1920 + 2688)),
        ("math", replace(GROUPED, direction="both"), "cpu", 3 * 1680 + (1920 + 2688) + 1920 + 2 * 2688 + 2 * 2688),
        ("tiled", GROUPED, "cpu", 1920 + 8 * 240 + 2 * 4 * 5 * (7 + 2 * 6)),
        ("tiled", replace(GROUPED, dtype="bfloat16"), "cuda", 1920 + 960 + 8 * 240 + 2 * 4 * 5 * (7 + 2 * 6)),
        ("torch-mha", LAYER, "cpu", 3 * 1920 + 1200),
        ("torch-mha", LAYER, "cuda", 6 * 1920),
        ("torch-mha", replace(LAYER, causal=True), "cpu", 6 * 1920 + 100),
        ("torch-mha-weights", LAYER, "cpu", 5 * 1920 + 1200),
        ("torch-mha-weights", replace(LAYER, causal=True), "cuda", 3 * 1920 + 2 * 1200 + 100),
        ("torch-mha", replace(LAYER, n_heads=3, n_kv_heads=3, d_head=16), "cpu", 6 * 1920),
        ("torch-mha-weights", replace(LAYER, n_heads=3, n_kv_heads=3, d_head=16), "cpu", 3 * 1920 + 2 * 600),
        ("torch-mha", replace(LAYER, direction="both"), "cpu", 12 * 1920),
        ("torch-mha-weights", replace(LAYER, direction="both", causal=True), "cpu", 12 * 1920 + 100 + 3 * 1200),
    ],
)  # fmt: skip
def test_by_hand_the_memory_beyond_the_inputs(backend: str, work: Workload, kind: str, n_bytes: int) -> None:
    assert expected_extra_bytes(backend, work, kind) == n_bytes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_more_of_anything_never_needs_less(backend: str, direction: Direction) -> None:
    for causal in [False, True]:
        for dtype in DTYPES:
            small = replace(LAYER, direction=direction, dtype=dtype, causal=causal)
            larger = [
                replace(small, batch=3),
                replace(small, n_heads=12, n_kv_heads=12),
                replace(small, d_head=9),
                replace(small, q_len=11, k_len=11),
            ]
            for kind in ("cpu", "cuda", "mps"):
                for work in larger:
                    assert expected_extra_bytes(backend, work, kind) >= expected_extra_bytes(backend, small, kind)
                    assert expected_flops(backend, work) > expected_flops(backend, small)
                    assert expected_moved_bytes(backend, work) > expected_moved_bytes(backend, small)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "tiled"])
def test_a_backward_pass_needs_more_than_a_forward_one(backend: str, direction: Direction) -> None:
    forward, this = (expected_extra_bytes(backend, replace(LAYER, direction=d), "cpu") for d in ("forward", direction))
    assert this == forward if direction == "forward" else this > forward


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sixteen_bits_need_less_than_thirty_two_where_no_pattern_is_built(backend: str, direction: Direction) -> None:
    narrow, wide = (
        expected_extra_bytes(backend, replace(GROUPED, dtype=dtype, direction=direction), "cuda")
        for dtype in ("bfloat16", "float32")
    )
    assert narrow < wide


def test_only_what_builds_the_pattern_grows_with_the_square_of_the_tokens() -> None:
    short, long = (replace(LAYER, q_len=n, k_len=n, d_head=1) for n in (10**4, 10**5))
    for backend in (*FUSED, "explicit", "compiled", "math"):
        growth = expected_extra_bytes(backend, long, "cuda") / expected_extra_bytes(backend, short, "cuda")
        assert growth == pytest.approx(10 if backend in FUSED else 100, rel=0.01)
