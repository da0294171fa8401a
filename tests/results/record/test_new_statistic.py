"""A new statistic of heads takes edits in three files, as docs/CONTRIBUTING.md has them, and is then on every surface."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

import mhacli

pytestmark = pytest.mark.full

TEXT = "the cat sat on the mat and the dog ran"
REDUCER = '''class Cubes:
    """`Σ_k p³` of each query."""

    def __init__(self, pattern: PatternTiles) -> None:
        self.per_query: PerQuery = pattern.like.new_zeros(pattern.shape[:3])

    def add(self, tile: Tile) -> None:
        """Adds the sums of the cubes of the rows."""
        self.per_query[tile.at_rows].add_(tile.weights.pow(3).sum(dim=1))


class RowSquareSums:
'''
ROW = """    Statistic(
        field="cubes", unit="weight", heading="Σp³", name="sum of cubes", explanation="The sum of cubed weights.",
    ),
    Statistic(
        field="offset","""
EDITS: Mapping[str, Sequence[tuple[str, str]]] = {
    "attention/tiled/statistics.py": (
        ("class RowSquareSums:\n", REDUCER),
        ("    squares: PerQuery\n", "    squares: PerQuery\n    cubes: PerQuery\n"),
        ("    distance, received, profile = Distance",
         "    cubes = Cubes(pattern)\n    distance, received, profile = Distance"),
        ("[mass, *peaks, entropy, squares,", "[mass, *peaks, entropy, squares, cubes,"),
        ("        squares=squares.per_query,\n", "        squares=squares.per_query,\n        cubes=cubes.per_query,\n"),
    ),
    "compute/base/head_statistics.py": (
        ('_PER_QUERY = ("entropy", "squares",', '_PER_QUERY = ("entropy", "squares", "cubes",'),
        ('        "distance": mean_over(wide["distance"], seen),\n',
         '        "distance": mean_over(wide["distance"], seen),\n        "cubes": mean_over(wide["cubes"], seen),\n'),
    ),
    "results/record/head_statistics.py": (
        ("    near: float | None = None\n", "    near: float | None = None\n    cubes: float | None = None\n"),
        ('    Statistic(\n        field="offset",', ROW),
    ),
}  # fmt: skip
VIEWER = """
import asyncio, sys
from mhacli.results.record.storage import load
from mhacli.viewer.app import Viewer, ViewerOptions

async def shown():
    app = Viewer(load(sys.argv[1]), ViewerOptions(colour=False))
    async with app.run_test(size=(140, 50)) as pilot:
        await pilot.pause()
        print("\\n".join("".join(part.text for part in strip) for strip in app.screen._compositor.render_strips()))

asyncio.run(shown())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package to which the statistic is added, and two records that it wrote."""
    place = tmp_path_factory.mktemp("package")
    package = Path(mhacli.__file__).parent
    shutil.copytree(package, place / "mhacli", ignore=shutil.ignore_patterns("__pycache__"))
    for name, pairs in EDITS.items():
        path = place / "mhacli" / name
        text = path.read_text()
        for old, new in pairs:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        path.write_text(text)
    for seed in ("1", "2"):
        mha(place, "run", TEXT, "--heads", "2", "--seed", seed, "--save", f"{seed}.safetensors")
    return place


def python(folder: Path, *words: str, code: int = 0) -> str:
    """What the interpreter writes, with the package in `folder`."""
    env = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def mha(folder: Path, *words: str, code: int = 0) -> str:
    return python(folder, "-m", "mhacli", *words, code=code)


def test_its_numbers_are_those_of_the_pattern(folder: Path) -> None:
    record = json.loads(mha(folder, "show", "1.safetensors", "--json"))
    pattern = np.array(record["pattern"], dtype=float)
    expected = (pattern**3).sum(axis=-1).mean(axis=(0, 2))
    assert [head["cubes"] for head in record["heads"]] == pytest.approx(expected.tolist(), rel=1e-5)
    assert [head["uniform"]["cubes"] for head in record["heads"]] == pytest.approx([0.01, 0.01], rel=1e-5)


def test_it_is_in_the_overview_and_in_its_legend_and_orders_heads(folder: Path) -> None:
    shown = mha(folder, "heads", TEXT, "--heads", "2", "--sort", "cubes")
    assert "Σp³" in next(line for line in shown.split("\n") if "H/max" in line)
    assert "Σp³ = sum of cubes" in shown


def test_it_is_in_csv_beside_that_of_uniform_attention(folder: Path) -> None:
    (first, _) = csv.DictReader(StringIO(mha(folder, "heads", TEXT, "--heads", "2", "--csv")))
    assert float(first["uniform_cubes"]) == pytest.approx(0.01, rel=1e-5)
    assert float(first["cubes"]) > 0.01


def test_it_is_on_the_page(folder: Path) -> None:
    mha(folder, "show", "1.safetensors", "--html", "page.html", "--force")
    page = (folder / "page.html").read_text()
    assert re.search(r'<th scope="col"[^>]*>(<[^>]+>)?Σp³<', page)
    assert "The sum of cubed weights." in page


def test_it_is_among_the_numbers_of_the_viewer(folder: Path) -> None:
    pytest.importorskip("textual")
    assert "sum of cubes" in python(folder, "-c", VIEWER, "1.safetensors")


def test_a_comparison_names_its_change(folder: Path) -> None:
    shown = mha(folder, "diff", "1.safetensors", "2.safetensors", "--all", code=3)
    assert "sum of cubes ." in shown
