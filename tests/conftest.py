"""What all tests share. The shapes in the annotations of the tensor rooms are executed: the hook comes before their import.

One thread for each worker and for the processes that it starts: threads of tiny products only wait for each other.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it
jaxtyping.install_import_hook("mhacli.attention", "beartype.beartype")
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all rows that can differ, and every process a cold one")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--full"):
        os.environ["MHA_TESTS_COLD"] = "1"  # before support.forks reads it


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of the tier, all where rows are asked for by name; skips what needs a device or another library."""
    from support import tiers

    if not any("[" in word for word in config.args):
        kept = tiers.chosen(items, full=config.getoption("--full"))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    _skip_without_device(items)
    _skip_without_interpreter(items)
    _skip_without_ray(items)


def pytest_collection_finish() -> None:
    """What is imported stays until the end, so that no collection of garbage need walk through it."""
    gc.collect()
    gc.freeze()


def _skip_without_device(items: list[pytest.Item]) -> None:
    """torch is imported only if there is a test that needs a device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _skip_without_interpreter(items: list[pytest.Item]) -> None:
    """Triton decides by this variable when a kernel is defined: it must be there from the start."""
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        return
    for item in items:
        if item.get_closest_marker("triton"):
            item.add_marker(pytest.mark.skip(reason="needs Triton and TRITON_INTERPRET=1"))


def _skip_without_ray(items: list[pytest.Item]) -> None:
    """Both libraries of the extra `scan`."""
    if find_spec("ray") is not None and find_spec("pyarrow") is not None:
        return
    for item in items:
        if item.get_closest_marker("scan"):
            item.add_marker(pytest.mark.skip(reason="needs Ray and pyarrow"))


@pytest.fixture
def normal() -> Callable[..., Any]:
    """`normal(*shape, std=1.0, dtype=torch.float64)`: the same normal numbers in every run of a test."""
    import torch

    generator = torch.Generator().manual_seed(20)

    def draw(*shape: int, std: float = 1.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return (std * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)

    return draw


@pytest.fixture(scope="module")
def biases():
    """For the shapes of `variant_cases`: an additive bias for each kind, with some cells of −∞.

    A few cells, one row of one head, and one cell of all heads."""
    import torch
    from support.variant_cases import K_LEN, N_HEADS, Q_LEN

    generator = torch.Generator().manual_seed(3)
    tensors = {
        kind: torch.randn(N_HEADS, Q_LEN, k_len, generator=generator, dtype=torch.float64)
        for kind, k_len in (("self", Q_LEN), ("cross", K_LEN))
    }
    for tensor in tensors.values():
        tensor[4, 2], tensor[1, 3, 1], tensor[:, 1, 0] = -torch.inf, -torch.inf, -torch.inf
    return tensors


@pytest.fixture(scope="module")
def bias_file(biases, tmp_path_factory):
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("biases") / "bias.safetensors"
    save_file(biases, path)
    return str(path)
