"""Every backend that a CPU has, beside the exact answer; wrong ones, which must be far from it; and refusals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from mhacli.attention import attend, masks
from mhacli.attention.backends import (
    Prepared,
    UnsupportedError,
    deviation,
    draw_heads,
    exact_answer,
    explained,
    is_out_of_memory,
    outcome_of,
    prepare,
)
from mhacli.attention.fused import fused_attend, kernel_among, operators_of
from mhacli.results.bench.workload import BACKENDS, Direction, Workload
from mhacli.spec.config import Dtype

CPU = torch.device("cpu")
SIZE = Workload(2, 6, 6, 8, 23, 23, "float32", False, "forward")
ON_CPU = ("explicit", "sdpa", "math", "flash", "torch-mha", "torch-mha-weights")
ATTENTION_ALONE = ("explicit", "sdpa", "math", "flash")
CEILING: dict[str, tuple[float, float]] = {
    "float64": (2e-14, 2e-15), "float32": (1e-5, 1e-6), "bfloat16": (6e-2, 6e-3),
}  # fmt: skip
"""Of the largest and the mean error: some roundings of numbers near 1."""
WRONG_BY = 0.2
"""The least error of an attention that is wrong, not rounded."""


def made(backend: str, work: Workload, seed: int = 5) -> Prepared:
    return prepare(backend, work, draw_heads(work, CPU, seed), seed)


def error(prepared: Prepared, work: Workload) -> tuple[float, float]:
    return deviation(prepared, work, exact_answer(prepared, work, most_flops=1e15))[:2]


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("dtype", CEILING)
@pytest.mark.parametrize("direction", get_args(Direction))
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_backend_is_within_rounding_of_the_exact_answer(
    backend: str, dtype: Dtype, direction: Direction, causal: bool
) -> None:
    work = replace(SIZE, dtype=dtype, direction=direction, causal=causal)
    largest, mean = error(made(backend, work), work)
    assert largest <= CEILING[dtype][0]
    assert mean <= CEILING[dtype][1]
    assert mean <= largest


@pytest.mark.parametrize("backend", ATTENTION_ALONE)
@pytest.mark.parametrize("n_kv_heads", [3, 1])
@pytest.mark.parametrize("direction", get_args(Direction))
def test_shared_kv_heads_are_within_rounding_too(backend: str, n_kv_heads: int, direction: Direction) -> None:
    work = replace(SIZE, n_kv_heads=n_kv_heads, dtype="float64", direction=direction, causal=True)
    assert error(made(backend, work), work)[0] <= CEILING["float64"][0]


@pytest.mark.parametrize("backend", ATTENTION_ALONE)
def test_a_step_of_decoding_sees_every_key(backend: str) -> None:
    work = replace(SIZE, q_len=1, k_len=29, n_kv_heads=3, dtype="float64", causal=True)
    prepared = made(backend, work)
    assert error(prepared, work)[0] <= CEILING["float64"][0]
    assert (prepared.forward() - attend(*prepared.leaves)).abs().max() <= CEILING["float64"][0]


def wrong_forwards(leaves: tuple[Tensor, ...], weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    q, k, v = leaves
    causal = masks.causal()

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            return z.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    return {
        "causality dropped": lambda: attend(q, k, v),
        "causality off by one": lambda: attend(q, k, v, allowed=masks.causal(1)),
        "scale doubled": lambda: attend(q, k, v, allowed=causal, scale=2 * 8**-0.5),
        "scale left out": lambda: attend(q, k, v, allowed=causal, scale=1.0),
        "keys for values": lambda: attend(q, k, k, allowed=causal) + 0 * v,
        "heads exchanged": lambda: attend(q, k.flip(1), v, allowed=causal),
        "one row left out": lambda: fused_attend(q, k, v, causal=True) * weight,
        "gradient doubled": lambda: WrongGradient.apply(attend(q, k, v, allowed=causal)),
        "gradient of the keys stopped": lambda: attend(q, k.detach(), v, allowed=causal) + 0 * k,
        "zeros": lambda: 0 * (q + k + v),
    }


@pytest.mark.parametrize("direction", get_args(Direction))
@pytest.mark.parametrize("name", wrong_forwards((torch.ones(()),) * 3, torch.ones(())))
def test_a_wrong_attention_is_far_from_the_exact_answer(name: str, direction: Direction) -> None:
    if "gradient" in name and direction == "forward":
        pytest.skip("the result is right")
    work = replace(SIZE, causal=True, direction=direction)
    right = made("explicit", work)
    weight = torch.ones(23, 1)
    weight[-1] = 0
    wrong = replace(right, forward=wrong_forwards(right.leaves, weight)[name])
    assert error(wrong, work)[0] >= WRONG_BY
    assert error(right, work)[0] <= CEILING["float32"][0]


@pytest.mark.parametrize(("backend", "kernel"), [
    ("explicit", "unfused"), ("sdpa", "flash"), ("math", "math"), ("flash", "flash"), ("torch-mha", "unfused"),
    ("torch-mha-weights", "unfused"),
])  # fmt: skip
def test_on_a_cpu_each_runs_the_kernel_of_its_name(backend: str, kernel: str) -> None:
    prepared = made(backend, SIZE)

    def run() -> None:
        with prepared.around(), torch.no_grad():
            prepared.forward()

    assert kernel_among(operators_of(run)) == kernel


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_the_compiled_attention_is_within_rounding_too(tmp_path: Path) -> None:
    """In a process of its own, where nothing checks shapes: the compiler cannot read the checks."""
    program = (
        "import torch\n"
        "from mhacli.attention.backends import draw_heads, prepare\n"
        "from mhacli.attention.backends import deviation, exact_answer\n"
        "from mhacli.attention.fused import operators_of\n"
        "from mhacli.results.bench.workload import Workload\n"
        "work = Workload(1, 2, 1, 5, 7, 7, 'float32', True, 'forward')\n"
        "made = prepare('compiled', work, draw_heads(work, torch.device('cpu'), 5), 5)\n"
        "print(deviation(made, work, exact_answer(made, work, most_flops=1e15)).max_error)\n"
        "print(any(name.startswith('Torch-Compiled Region') for name in operators_of(made.forward)))\n"
    )
    own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    own |= {
        "TORCHINDUCTOR_VEC_ISA_OK": "0",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }  # compiles in half the time
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | own, capture_output=True, text=True, check=True, timeout=300
    )
    largest, was_compiled = done.stdout.split()
    assert float(largest) <= CEILING["float32"][0]
    assert was_compiled == "True"


# ------------------------------------------------------------------------------------------------------------- inputs


def test_inputs_are_normal_numbers_of_the_size_and_never_zeros() -> None:
    work = replace(SIZE, n_kv_heads=3, q_len=101, k_len=103)
    q, k, v = draw_heads(work, CPU, 7)
    assert (q.shape, k.shape, v.shape) == ((2, 6, 101, 8), (2, 3, 103, 8), (2, 3, 103, 8))
    for heads in (q, k, v):
        assert heads.dtype == torch.float32
        assert abs(heads.mean().item()) <= 5 / heads.numel() ** 0.5
        assert heads.std().item() == pytest.approx(1, abs=0.05)
        assert (heads != 0).float().mean() > 0.999
        assert heads.unique().numel() > 0.99 * heads.numel()
    assert abs(torch.corrcoef(torch.stack([k.flatten(), v.flatten()]))[0, 1]) < 0.05


@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("direction", get_args(Direction))
def test_inputs_have_the_dtype_and_gradients_of_the_size(dtype: Dtype, direction: Direction) -> None:
    for heads in draw_heads(replace(SIZE, dtype=dtype, direction=direction), CPU, 7):
        assert heads.dtype == getattr(torch, dtype)
        assert heads.requires_grad is (direction != "forward")


def test_the_same_seed_gives_the_same_inputs_and_another_others() -> None:
    same, again, other = (draw_heads(SIZE, CPU, seed) for seed in (7, 7, 8))
    assert all(torch.equal(a, b) for a, b in zip(same, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(same, other, strict=True))
    layers = [prepare("torch-mha", SIZE, same, seed) for seed in (7, 7, 8)]
    assert torch.equal(layers[0].forward(), layers[1].forward())
    assert not torch.equal(layers[0].leaves[0], layers[2].leaves[0])


def test_every_attention_gets_the_very_same_inputs() -> None:
    heads = draw_heads(SIZE, CPU, 7)
    assert all(prepare(backend, SIZE, heads, 7).leaves is heads for backend in ATTENTION_ALONE)


def test_a_layer_s_rows_and_heads_are_normal_too() -> None:
    work = replace(SIZE, d_head=16, q_len=67, k_len=67)
    prepared = made("torch-mha", work)
    (rows,) = prepared.leaves
    assert rows.shape == (2, 67, 96)
    assert rows.std().item() == pytest.approx(1, abs=0.05)
    for heads in prepared.heads(rows):
        assert heads.shape == (2, 6, 67, 16)
        assert heads.std().item() == pytest.approx(1, abs=0.1)


def test_only_a_layer_under_a_mask_keeps_one_as_a_tensor() -> None:
    causal = replace(SIZE, causal=True)
    assert made("torch-mha", causal).mask_bytes == 23 * 23 * 4
    assert made("torch-mha-weights", replace(causal, dtype="bfloat16")).mask_bytes == 23 * 23 * 2
    assert made("torch-mha", SIZE).mask_bytes == 0
    assert all(made(backend, causal).mask_bytes == 0 for backend in ATTENTION_ALONE)


def test_there_is_a_maker_for_every_backend_that_is_described() -> None:
    from mhacli.attention import backends

    assert set(backends._MAKERS) == set(BACKENDS)


@pytest.mark.parametrize("dtype", CEILING)
@pytest.mark.parametrize("work", [SIZE, replace(SIZE, causal=True), replace(SIZE, n_kv_heads=2, q_len=1, causal=True)])
def test_our_tiles_are_within_rounding_of_the_exact_answer(dtype: Dtype, work: Workload) -> None:
    work = replace(work, dtype=dtype)
    largest, mean = error(made("tiled", work), work)
    assert largest <= CEILING[dtype][0]
    assert mean <= CEILING[dtype][1]


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("direction", ["backward", "both"])
def test_our_tiles_have_no_backward_pass(direction: Direction) -> None:
    with pytest.raises(UnsupportedError) as caught:
        made("tiled", replace(SIZE, direction=direction))
    assert str(caught.value) == "tiled attention writes into buffers and has no backward pass"


@pytest.mark.parametrize(
    ("backend", "change", "reason"),
    [
        ("flex", {}, "FlexAttention is measured on CUDA, where it compiles to one kernel, not on cpu"),
        ("torch-mha", {"n_kv_heads": 3}, "nn.MultiheadAttention has no shared kv heads"),
        ("torch-mha-weights", {"n_kv_heads": 1}, "nn.MultiheadAttention has no shared kv heads"),
        ("torch-mha", {"q_len": 1}, "nn.MultiheadAttention has no cache to decode with"),
    ],
)
def test_what_a_backend_cannot_do_is_said_before_it_runs(backend: str, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        made(backend, replace(SIZE, **change))
    assert str(caught.value) == reason
    assert outcome_of(caught.value) == ("unsupported", reason)


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_a_kernel_that_this_device_lacks_is_unsupported(backend: str) -> None:
    prepared = made(backend, SIZE)
    with pytest.raises(UnsupportedError) as caught, explained(backend), prepared.around():
        prepared.forward()
    assert str(caught.value) == f"torch has no {backend} kernel for this device and these inputs"
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("words", ["No available kernel. Aborting execution.", "No viable backend for this"])
def test_torch_s_refusal_is_told_with_the_reasons_that_it_warned_of(words: str) -> None:
    def refuse() -> None:
        warnings.warn("cuDNN was not compiled. (Triggered internally at sdp.cpp:7.)", stacklevel=1)
        warnings.warn("Expected float16.", stacklevel=1)
        raise RuntimeError(words)

    with pytest.raises(UnsupportedError) as caught, explained("cudnn"):
        refuse()
    reasons = "cuDNN was not compiled. Expected float16."
    assert str(caught.value) == f"torch has no cudnn kernel for this device and these inputs: {reasons}"


def test_other_faults_pass_through_as_they_are_and_warnings_stay_where_they_were() -> None:
    fault = RuntimeError("something else")
    with pytest.raises(RuntimeError) as caught, explained("flash"):
        raise fault
    assert caught.value is fault
    before = list(warnings.filters)
    with explained("flash"):
        warnings.warn("not told", stacklevel=1)
    assert warnings.filters == before


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        (MemoryError(), "out-of-memory", "MemoryError"),
        (MemoryError("no room"), "out-of-memory", "no room"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\n to allocate 2.00 GiB"), "out-of-memory",
         "CUDA out of memory. Tried to allocate 2.00 GiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out-of-memory",
         "DefaultCPUAllocator: can't allocate memory: you tried"),
        (NotImplementedError("no such operator"), "unsupported", "no such operator"),
        (NotImplementedError(), "unsupported", "NotImplementedError"),
        (UnsupportedError("not here"), "unsupported", "not here"),
        (RuntimeError("\"addmm\" not implemented for 'Half'"), "unsupported", "\"addmm\" not implemented for 'Half'"),
        (RuntimeError("No working C++ compiler found"), "unsupported", "No working C++ compiler found"),
        (RuntimeError("Cannot find a working triton installation"), "unsupported",
         "Cannot find a working triton installation"),
        (RuntimeError("shapes do not match"), "failed", "shapes do not match"),
        (ValueError(""), "failed", "ValueError"),
        (KeyError("q"), "failed", "'q'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)  # fmt: skip
def test_what_became_of_a_backend_is_told_by_what_it_raised(fault: Exception, status: str, reason: str) -> None:
    assert outcome_of(fault) == (status, reason)


def test_a_long_reason_is_cut_and_stays_in_one_line() -> None:
    status, reason = outcome_of(RuntimeError("many\nwords \t" * 100))
    assert status == "failed"
    assert reason == ("many words " * 100)[:300]


def test_a_real_lack_of_memory_is_told_as_such() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.int8)
    assert is_out_of_memory(caught.value)
    assert outcome_of(caught.value)[0] == "out-of-memory"


def test_a_gradient_is_asked_of_the_leaves_only() -> None:
    work = replace(SIZE, direction="both")
    for backend in ON_CPU:
        prepared = made(backend, work)
        with prepared.around():
            out = prepared.forward()
        gradients = torch.autograd.grad(out, prepared.leaves, torch.ones_like(out))
        assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in prepared.leaves]


def test_forward_runs_again_with_the_same_numbers() -> None:
    for backend in ON_CPU:
        prepared = made(backend, SIZE)
        run = partial(prepared.forward)
        assert torch.equal(run(), run())


@pytest.mark.parametrize("direction", get_args(Direction))
def test_a_whole_pass_has_gradients_where_the_direction_has_them(direction: Direction) -> None:
    work = replace(SIZE, direction=direction)
    heads = draw_heads(work, CPU, 3)
    found: Any = prepare("explicit", work, heads, 3).once(direction)
    z = attend(*heads)
    assert torch.equal(found[0], z)
    if direction == "forward":
        assert len(found) == 1
        assert not found[0].requires_grad
    else:
        expected = torch.autograd.grad(z, heads, torch.ones_like(z))
        assert all(torch.equal(a, b) for a, b in zip(found[1], expected, strict=True))


@pytest.mark.parametrize("backend", ["sdpa", "math", "flash"])
def test_queries_that_are_the_last_of_the_tokens_are_no_work_for_torch_s_kernels(backend: str) -> None:
    work = replace(SIZE, q_len=5, k_len=7, causal=True)
    with pytest.raises(UnsupportedError) as caught:
        made(backend, work)
    assert str(caught.value) == "scaled_dot_product_attention assumes that the first query is the first token"


def test_explicit_queries_stand_at_the_end_of_the_tokens() -> None:
    work = replace(SIZE, q_len=5, k_len=7, causal=True, dtype="float64")
    prepared = made("explicit", work)
    assert torch.equal(prepared.forward(), attend(*prepared.leaves, allowed=masks.causal(2)))
    assert error(prepared, work)[0] <= CEILING["float64"][0]
