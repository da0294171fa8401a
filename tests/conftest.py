"""What all tests use. With MHA_TESTS_CHECK_SHAPES the shapes in the annotations of
`mhacli.attention` are checked in every call.

One thread for each worker and for the processes that it starts: threads of tiny products only wait
for each other. The workers hold what they import in huge pages where the system has them: a fork
copies the table of all pages.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings

gc.disable()  # until all is imported

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it
os.environ.setdefault(
    "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
)  # of the workers, which start later
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("GITHUB_ACTIONS", None)  # in which mha prints annotations
if os.environ.get("MHA_TESTS_CHECK_SHAPES"):  # before the import of what it annotates
    jaxtyping.install_import_hook("mhacli.attention", "beartype.beartype")
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--approve",
        action="store_true",
        help="write what the commands of tests/golden print now as approved",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Makes the folder that all workers share during a run, for what is made once."""
    if not hasattr(config, "workerinput"):
        shared = tempfile.TemporaryDirectory(prefix="mha-tests-")
        os.environ["MHA_TESTS_SHARED"] = shared.name
        config.add_cleanup(shared.cleanup)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """One process writes the approved outputs."""
    if config.getoption("--approve"):
        config.option.numprocesses, config.option.dist, config.option.tx = 0, "no", []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests marked `real` unless `-m` names them, and skips those that need a device
    that is not there.
    """
    if "real" not in config.getoption("-m") and not any("::" in word for word in config.args):
        config.hook.pytest_deselected(
            items=[item for item in items if item.get_closest_marker("real")]
        )
        items[:] = [item for item in items if not item.get_closest_marker("real")]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        for item in on_gpu if not torch.cuda.is_available() else []:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What is imported stays until the end, so that no collection of garbage need walk through
    it.
    """
    gc.freeze()
    gc.set_threshold(7000)
    gc.enable()


@pytest.fixture
def mha(tmp_path: Path) -> Callable[..., Any]:
    """`support.mha.run` in the test's own folder. An examination has time enough, so that a busy
    machine changes no verdict.
    """
    from support.mha import run
    from support.user_code import PATIENCE_S

    def run_patiently(*words: Any, **how: Any) -> Any:
        if words[:1] == ("check",) and not {"--max-time", "--model"} & {*words}:
            words = (*words, "--max-time", f"{PATIENCE_S:g}")
        return run(tmp_path, *words, **how)

    return run_patiently


@pytest.fixture
def normal() -> Callable[..., Any]:
    """`normal(*shape, std=1.0, dtype=torch.float64)`: the same normal numbers in every run of a
    test.
    """
    import torch

    generator = torch.Generator().manual_seed(20)

    def draw(*shape: int, std: float = 1.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return (std * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)

    return draw
