"""The statistics of heads come from a compiled block where it was built, else from torch: every
test of them runs with both.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

_OF_STATISTICS = ("test_heads", "test_where")
_FOLDER = Path(str(importlib.util.find_spec("mhacli").origin)).parent  # type: ignore[union-attr]
_HAS_BLOCK = (_FOLDER / "attention" / "libblock.so").exists() and os.environ.get(
    "MHA_BLOCK"
) != "torch"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test of statistics runs with the compiled block, and with torch: in the slow tier where
    there is the block.
    """
    if metafunc.module.__name__.rpartition(".")[2] in _OF_STATISTICS:
        metafunc.fixturenames.append("block")
        by_torch = pytest.param("torch", marks=[pytest.mark.real] if _HAS_BLOCK else [])
        metafunc.parametrize("block", ["c", by_torch], indirect=True)


@pytest.fixture
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes the statistics."""
    if request.param == "torch":
        monkeypatch.setenv("MHA_BLOCK", "torch")
    elif not _HAS_BLOCK:
        pytest.skip("the compiled block was not built, or MHA_BLOCK=torch")
