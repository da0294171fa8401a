"""What all tests use. With MHA_TESTS_CHECK_SHAPES the shapes in the annotations of `mhacli.attention` are checked in every call.

One thread for each worker and for the processes that it starts: threads of tiny products only wait for each other.
"""

from __future__ import annotations

import ast
import functools
import gc
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it
os.environ["HF_HUB_OFFLINE"] = "1"
if os.environ.get("MHA_TESTS_CHECK_SHAPES"):  # before the import of what it annotates
    jaxtyping.install_import_hook("mhacli.attention", "beartype.beartype")
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

TESTS = Path(__file__).parent
OUTSIDE = ("contract", "golden", "support")
"""Folders whose files use `mhacli` as its users do."""
MANY_ROWS = 16
"""Of a test with more rows every second one is marked `real` where no file or folder of tests is named."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--approve", action="store_true", help="write what the commands of tests/golden print now as approved"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Makes the folder that all workers share during a run, for what is made once."""
    if not hasattr(config, "workerinput"):
        shared = tempfile.TemporaryDirectory(prefix="mha-tests-")
        os.environ["MHA_TESTS_SHARED"] = shared.name
        names_tests = config.args_source is pytest.Config.ArgsSource.ARGS
        os.environ["MHA_TESTS_ALL_ROWS"] = "1" if names_tests else ""
        config.add_cleanup(shared.cleanup)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """One process writes the approved outputs."""
    if config.getoption("--approve"):
        config.option.numprocesses, config.option.dist, config.option.tx = 0, "no", []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests marked `real` unless `-m` names them, and skips those that need a device that is not there."""
    if not os.environ.get("MHA_TESTS_ALL_ROWS"):
        _mark_rows(items)
    if "real" not in config.getoption("-m") and not any("::" in word for word in config.args):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("real")])
        items[:] = [item for item in items if not item.get_closest_marker("real")]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        for item in on_gpu if not torch.cuda.is_available() else []:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _mark_rows(items: list[pytest.Item]) -> None:
    """Marks every second row of tests with many rows as `real`, but for the approved outputs."""
    rows = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if "golden" not in item.path.parts:
            rows[item.nodeid.partition("[")[0]].append(item)
    for of_test in rows.values():
        for item in of_test[1::2] if len(of_test) > MANY_ROWS else ():
            item.add_marker(pytest.mark.real)


def pytest_collection_finish() -> None:
    """What is imported stays until the end, so that no collection of garbage need walk through it."""
    gc.collect()
    gc.freeze()


# ------------------------------------------------------------------------------------------- what a test of the outside imports


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> None:
    """Refuses files of the outside that import more of `mhacli` than its users do."""
    if module_path.relative_to(TESTS).parts[0] in OUTSIDE:
        for path in (module_path, *_files_without_tests()):
            _refuse_inside(path)


@functools.cache
def _files_without_tests() -> tuple[Path, ...]:
    """What the tests of the outside import, and the code that they give to `mha`."""
    files = (path for folder in OUTSIDE for path in (TESTS / folder).rglob("*.py"))
    return tuple(path for path in files if not path.name.startswith("test_"))


@functools.cache
def _refuse_inside(path: Path) -> None:
    inside = [f"line {line}: {name}" for line, name in _imports(ast.parse(path.read_text())) if not _is_public(name)]
    if inside:
        raise pytest.UsageError(f"{path.relative_to(TESTS.parent)} imports what only mhacli itself may use: {inside}")


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each name of `mhacli` that a file imports, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "mhacli")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mhacli":
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _is_public(name: str) -> bool:
    """Whether users import this: a public name, or `attend` and the masks."""
    import mhacli

    return name in {"mhacli", "mhacli.attention.attend", "mhacli.attention.masks"} | {
        f"mhacli.{n}" for n in mhacli.__all__
    }


# -------------------------------------------------------------------------------------------------------------- the fixtures


@pytest.fixture
def mha(tmp_path: Path) -> Callable[..., Any]:
    """`support.mha.run` in the test's own folder."""
    from support.mha import run

    return functools.partial(run, tmp_path)


@pytest.fixture
def normal() -> Callable[..., Any]:
    """`normal(*shape, std=1.0, dtype=torch.float64)`: the same normal numbers in every run of a test."""
    import torch

    generator = torch.Generator().manual_seed(20)

    def draw(*shape: int, std: float = 1.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return (std * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)

    return draw
