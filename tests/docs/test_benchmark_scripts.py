"""What the scripts below `benchmarks/` say of measurements that show nothing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
MIB = 1 << 20


@pytest.fixture(scope="module")
def heads() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_heads", FOLDER / "heads.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_by_hand_the_slope_of_memory_that_grows_with_length(heads: ModuleType) -> None:
    said = heads.growth({4096: 3 * MIB, 32768: 24 * MIB}, 600 * MIB)
    assert said == "slope 1.00; explicit at 4096: 600 MiB, 200 x as much"


@pytest.mark.parametrize("extra", [(0, 0), (0, 5), (5, 0), (-3, 5), (5, -3), (-1, -2)])
def test_memory_that_does_not_grow_has_no_slope(heads: ModuleType, extra: tuple[int, int]) -> None:
    small, large = extra
    said = heads.growth({4096: small * MIB, 32768: large * MIB}, 100 * MIB)
    assert said.startswith("no slope, because memory did not grow; explicit at 4096: 100 MiB")
    assert ("x as much" in said) == (small > 0)


def test_explicit_matrices_that_take_nothing_are_not_put_beside_it(heads: ModuleType) -> None:
    assert heads.growth({4096: MIB, 32768: 2 * MIB}, 0) == "slope 0.33; explicit at 4096: 0 MiB"


def test_a_vocabulary_of_an_empty_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    words = [sys.executable, str(FOLDER / "vocab.py"), str(tmp_path / "empty.txt")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"{words[2]} must hold some text to repeat, got an empty file\n")
