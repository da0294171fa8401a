"""The same numbers on a CUDA device. Skipped where there is none."""

import numpy as np
import oracle
import pytest
import torch

from mhacli import Config, inspect
from mhacli.attention import attend, masks

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
