"""What a benchmark takes from the inside of torch. A failure names the version that changed it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mhacli.commands.bench import foreign

VERSION = f"torch {torch.__version__}"
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("backend", "kernel"),
    [(SDPBackend.MATH, "math"), (SDPBackend.FLASH_ATTENTION, "flash")],
)
def test_a_kernel_is_known_by_its_operator(backend: SDPBackend, kernel: str) -> None:
    q = torch.ones(1, 2, 5, 8)
    with sdpa_kernel(backend):
        _, operators, _ = foreign.observed(lambda: scaled_dot_product_attention(q, q, q), CPU)
    assert foreign.kernel_among(operators) == kernel, VERSION


def test_a_softmax_outside_a_kernel_is_unfused() -> None:
    _, operators, _ = foreign.observed(lambda: torch.ones(3, 5).softmax(-1), CPU)
    assert foreign.kernel_among(operators) == "unfused", VERSION


def test_the_memory_of_a_call_is_its_largest_sum() -> None:
    _, _, peak_bytes = foreign.observed(lambda: torch.ones(1000).exp(), CPU)
    assert peak_bytes is not None
    assert 8000 <= peak_bytes < 16000, VERSION
