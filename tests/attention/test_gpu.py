"""The same numbers on a CUDA device. Skipped where there is none."""

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from support import oracle

from mhacli import Config, inspect
from mhacli.attention import attend, masks
from mhacli.compute.bench.run import BenchOptions, bench
from mhacli.results.bench.workload import BACKENDS, Sweep

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "ceiling"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_attend_on_the_device_agrees_with_the_oracle(dtype, ceiling, normal):
    q, k, v = normal(2, 9, 5, 11), normal(2, 3, 7, 11), normal(2, 3, 7, 13)
    allowed = np.broadcast_to(np.arange(7) <= np.arange(5)[:, None] + 2, (2, 9, 5, 7))
    expected = oracle.attention(q.numpy(), k.numpy(), v.numpy(), allowed=allowed)
    found = attend(*(t.to("cuda", dtype) for t in (q, k, v)), allowed=masks.causal(offset=2))
    np.testing.assert_allclose(found.cpu().double().numpy(), expected.z, rtol=0, atol=ceiling)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_a_run_on_the_device_passes_its_self_check(dtype):
    record = inspect(["the cat sat on the mat", "a dog"], Config(n_heads=4, causal=True, device="cuda", dtype=dtype))
    assert record.environment.device.startswith("cuda")
    assert record.self_check.ok


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rope", "rope-interleaved", "alibi", "none"])
@pytest.mark.parametrize(
    "choices",
    [
        {"padding": "left", "causal": True},
        {"documents": "|", "window": (2, 0), "sink": 1},
        {"prefix": 2, "d_input": 24},
    ],
)
def test_a_run_on_the_device_agrees_with_the_cpu_whatever_the_positions_and_the_mask(positions, choices):
    texts = ["the cat sat | on the mat", "a dog | ran"]
    here, there = (
        inspect(texts, Config(d_model=32, n_heads=4, dtype="float64", positions=positions, device=device, **choices))
        for device in ("cpu", "cuda")
    )
    assert here.arrays.keys() == there.arrays.keys()
    assert np.array_equal(here.arrays["allowed"], there.arrays["allowed"])
    for name in ("pattern", "z", "out"):
        np.testing.assert_allclose(there.arrays[name], here.arrays[name], rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("random", [None, (2, 5)])
def test_a_bias_of_a_file_on_the_device_agrees_with_the_cpu(random, tmp_path):
    path, bias = str(tmp_path / "b.safetensors"), np.linspace(-2, 2, 2 * 5 * 5).reshape(2, 5, 5)
    bias[:, 3, 1] = -np.inf
    save_file({"bias": bias}, path)
    texts = ["a b c d e", "a b"] if random is None else []
    here, there = (
        inspect(
            texts,
            Config(d_model=32, n_heads=2, dtype="float64", score_bias=path, random=random, device=device),
        )
        for device in ("cpu", "cuda")
    )
    for name in ("pattern", "z", "out"):
        np.testing.assert_allclose(there.arrays[name], here.arrays[name], rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize("causal", [False, True])
def test_every_backend_on_the_device_has_a_row_and_those_that_run_are_exact(direction, causal):
    sweep = Sweep(
        lengths=(256,), batch=(2,), n_heads=(8,), dtypes=("bfloat16",), causal=causal, directions=(direction,)
    )
    found = bench(sweep, "cuda", BenchOptions(repeat=7))
    assert [row.backend for row in found.rows] == list(BACKENDS)
    ran = {row.backend: row for row in found.rows if row.status == "ok"}
    assert {"explicit", "sdpa", "math", "torch-mha", "torch-mha-weights"} <= ran.keys()
    assert all(row.status in ("ok", "unsupported") for row in found.rows), found.rows
    for row in ran.values():
        assert row.max_error is not None
        assert row.max_error < 0.1, row
        assert row.extra_bytes is not None
        assert len(row.samples_s) == 7
        assert all(0 < seconds < 1 for seconds in row.samples_s)
    for kernel in {"flash", "efficient", "cudnn"} & ran.keys():
        assert ran[kernel].ran == kernel


def test_grouped_heads_and_decoding_are_measured_on_the_device():
    sweep = Sweep(lengths=(512,), n_heads=(8,), n_kv_heads=(2,), decode=True)
    found = bench(sweep, "cuda", BenchOptions(repeat=7))
    assert {row.backend for row in found.rows if row.status == "ok"} >= {"explicit", "sdpa", "math"}


def test_what_does_not_fit_the_device_is_a_row_and_no_crash():
    sweep = Sweep(backends=("explicit", "sdpa"), lengths=(1 << 19,), batch=(1,), n_heads=(8,))
    explicit, _ = bench(sweep, "cuda", BenchOptions(repeat=3)).rows
    assert explicit.status == "too-large"
    assert explicit.reason is not None
    assert "is available" in explicit.reason
