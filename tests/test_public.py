"""The public interface: every name of `mhacli.__all__` is there, documented, and costs nothing until it is used."""

import subprocess
import sys
from pathlib import Path

import pytest

import mhacli

HEAVY = ("torch", "numpy", "rich", "transformers", "polars", "pandas")


def test_every_public_name_exists_and_says_what_it_is() -> None:
    assert list(mhacli.__all__) == sorted(mhacli.__all__)
    assert dir(mhacli) == list(mhacli.__all__)
    for name in set(mhacli.__all__) - {"__version__"}:
        assert getattr(mhacli, name).__doc__, name


def test_importing_the_package_loads_none_of_its_libraries() -> None:
    code = f"import sys, mhacli; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SCRIPT = """
from torch import Tensor, nn
import mhacli

def entropies(model: nn.Module, ids: Tensor) -> list[float | None]:
    with mhacli.inspecting(model, keep=["pattern"]) as seen:
        model(ids)
    return [head.entropy for head in seen.record.heads]

def wrong(model: nn.Module) -> str:
    with mhacli.inspecting(model, kept=["pattern"]) as seen:
        return seen.record.heads[0].entropy
"""


@pytest.mark.full
def test_a_users_type_checker_knows_the_types(tmp_path: Path) -> None:
    """From a folder of their own, where the package is one that was installed."""
    pytest.importorskip("mypy")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    found = [line.rpartition(" ")[2] for line in done.stdout.splitlines() if ": error: " in line]
    assert found == ["[call-arg]", "[return-value]"]
