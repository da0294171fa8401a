"""What `mha bench` answers without measuring must not pay for torch, numpy or matplotlib."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.benchmarks_made import made_benchmark, made_row

HEAVY = ("torch", "numpy", "matplotlib")
REPORT = f"""
import os, sys
real_exit = os._exit
def report(code):
    sys.stderr.write("LOADED " + " ".join(name for name in {HEAVY!r} if name in sys.modules))
    sys.stderr.flush()
    real_exit(code)
os._exit = report
sys.argv[0] = "mha"
from mhacli.__main__ import main
main()
"""


def loaded_by(*words: str, cwd: Path) -> tuple[int, str]:
    """The exit code of a fresh process that runs `mha bench`, and which heavy libraries it had loaded at its end."""
    whole = [sys.executable, "-c", REPORT, "bench", *words]
    done = subprocess.run(whole, capture_output=True, text=True, cwd=cwd, check=False)
    assert "LOADED" in done.stderr, done.stderr
    return done.returncode, done.stderr.rpartition("LOADED")[2].strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a baseline, one that is none, and a file that exists."""
    run = made_benchmark(made_row("sdpa", [0.5, 0.25]))
    (tmp_path / "then.json").write_text(run.to_json())
    (tmp_path / "other.json").write_text(json.dumps(run.to_dict() | {"schema": "mha.record/1"}))
    (tmp_path / "rows.json").write_text(json.dumps(run.to_dict() | {"rows": [{}]}))
    (tmp_path / "old").write_text("old")
    return tmp_path


def test_a_device_that_is_asked_for_is_looked_for_so_that_the_report_can_be_trusted(folder: Path) -> None:
    code, loaded = loaded_by("--device", "cuda:99", "--lengths", "8", cwd=folder)
    assert code == 1
    assert loaded == "torch numpy"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["--nope"], 2),
        (["--lengths", "few"], 2),
        (["--lengths", "9999999k"], 2),
        (["--backends", "sdpa3"], 2),
        (["--dtype", "float8"], 2),
        (["--direction", "up"], 2),
        (["--decode", "--direction", "both"], 2),
        (["--heads", "9", "--kv-heads", "2"], 2),
        (["--threads", "0"], 2),
        (["--seed", "-1"], 2),
        (["--repeat", "0"], 2),
        (["--budget", "0"], 2),
        (["--call-limit", "0"], 2),
        (["--device", "tpu"], 2),
        (["--json", "--csv"], 2),
        (["--fail-if", "slower"], 2),
        (["--fail-if", "slower:2"], 2),
        (["--compare", "gone.json"], 1),
        (["--compare", "old"], 1),
        (["--compare", "other.json"], 1),
        (["--compare", "rows.json"], 1),
        (["--compare", "then.json", "--backends", "sdpa3"], 2),
        (["--compare", "then.json", "--decode", "--direction", "both"], 2),
        (["--save-baseline", "old"], 1),
        (["--svg", "old"], 1),
        (["--html", "old"], 1),
        (["--svg", "none/new"], 1),
        (["--svg", "new", "--html", "new"], 2),
    ],
    ids=str,
)
def test_help_and_errors_load_neither_torch_nor_numpy_nor_matplotlib(folder: Path, words: list[str], code: int) -> None:
    assert loaded_by(*words, cwd=folder) == (code, "")
