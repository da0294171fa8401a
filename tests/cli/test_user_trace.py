"""`mha trace FILE.py:NAME` as a real process: what a word is taken for, what is refused, what is shown."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from support import forks
from support.processes import MHA

CODE = """
import sys
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, d_model=12, n_heads=3, axis=-1):
        super().__init__()
        self.h, self.axis = n_heads, axis
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        print("\\x1b[31mloud\\x1b[0m")
        b, t, c = x.shape
        q, k, v = (p(x).view(b, t, self.h, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        pattern = torch.softmax(q @ k.mT / (c // self.h) ** 0.5, dim=self.axis)
        return self.o_proj((pattern @ v).transpose(1, 2).reshape(b, t, c))

class Endless(nn.Module):
    def forward(self, x):
        while True:
            pass

class Loud(nn.Module):
    def forward(self, x):
        raise ValueError("no \\x1b[2J today")
"""


def mha(folder: Path, *words: str, columns: int = 80, **environment: str) -> subprocess.CompletedProcess[str]:
    """`mha trace` in a folder that holds the code."""
    (folder / "my.py").write_text(CODE)
    settings = {**os.environ, "COLUMNS": str(columns), **environment}
    return subprocess.run(
        [forks.program(), "trace", *words],
        cwd=folder,
        env=settings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A walk on 80 columns."""
    return mha(tmp_path_factory.mktemp("walked"), "my.py:Attention")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("columns", [40, 80, pytest.param(200, marks=pytest.mark.full)])
def test_the_walk_names_axes_and_shows_each_line_above_its_steps(
    walked: subprocess.CompletedProcess[str], tmp_path: Path, columns: int
) -> None:
    done = walked if columns == 80 else mha(tmp_path, "my.py:Attention", columns=columns)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= columns
    flat = " ".join(done.stdout.split())
    assert re.search(r"\d+ +pattern +batch head query key", done.stdout)
    assert "line 16: pattern = torch.softmax(q" in flat
    assert "\x1b" not in done.stdout
    assert "it printed: \\x1b[31mloud\\x1b[0m" in flat


@pytest.mark.full
def test_colour_and_the_numbers_of_each_tensor_appear_on_request(
    walked: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    done = mha(tmp_path, "my.py:Attention", "--color", "always", "--values")
    assert "\x1b[" in done.stdout
    assert "\x1b[31mloud" not in done.stdout
    assert "mean " in done.stdout
    assert "mean " not in walked.stdout


@pytest.mark.full
def test_a_softmax_over_the_queries_is_reported_twice_and_is_no_failure(tmp_path: Path) -> None:
    done = mha(tmp_path, "my.py:Attention", "--arg", "axis=-2", columns=200)
    assert done.returncode == 0
    assert "! the softmax runs over query, not over key: the weights of a query do not sum to 1" in done.stdout
    assert "! warning at step 14 pattern" in done.stdout


def test_json_is_the_record_and_a_saved_one_is_drawn_again_as_it_was(
    walked: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    (tmp_path / "no_torch").mkdir()
    (tmp_path / "no_torch" / "torch.py").write_text("import os\nos._exit(99)\n")
    done = mha(tmp_path, "my.py:Attention", "--json", "--save", "walk.safetensors")
    document = json.loads(done.stdout)
    assert document["schema"] == "mha.record/1"
    assert document["module"]["target"] == "my.py:Attention"
    pattern = next(step for step in document["trace"] if step["site"] == "pattern")
    assert pattern["axes"] == ["batch", "head", "query", "key"]
    assert (pattern["operation"], pattern["line"]) == ("softmax", 16)
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(tmp_path / "no_torch")}
    words = [MHA, "show", str(tmp_path / "walk.safetensors")]
    shown = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == walked.stdout
    refused = subprocess.run(
        [*words, "--csv"], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        "mha: error: --csv needs attention weights, which the trace of a module does not have\n"
    )


@pytest.mark.parametrize(
    "words", [("so my.py:Attention it is",), ("12:30",), ("the cat", "my.py:Attention"), ("a:b",), ("e.g.:",)]
)
def test_other_words_with_a_colon_are_texts(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = mha(tmp_path, *words, "--mask", "--d-model", "8", "--heads", "2")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("my.py:Attention", "the cat"), "my.py:Attention names code to trace, which takes no text, but 'the cat' follows"),
        (("my.py:Attention", "--cell", "0,1,2"), "--cell needs a text, not my.py:Attention: a trace of code keeps shapes"),
        (("the cat", "--arg", "d_model=8"), "--arg needs code to trace, FILE.py:NAME or package.module:NAME"),
        (("--time-limit", "3", "cat"),
         "--time-limit needs code to trace, "),
        (("my.py:Attention", "--arg", "d_model"), ""),
        (("my.py:Attention", "--arg", "d=1", "--arg", "d=2"), ""),
        *((("my.py:Attention", *option), f"{option[0]} does not work with your own code, which sets this itself")
          for option in (("--route", "fused"), ("--mask",), ("--heads", "4"), ("--file", "my.py"),
                         ("--dtype", "float16"), ("--context", "cat"), ("--keep", "z"), ("--save-weights", "w"))),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_a_usage_error(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "torch.py").write_text("import os\nos._exit(99)\n")
    done = mha(tmp_path, *words, PYTHONPATH=str(tmp_path))
    assert done.stderr.startswith(f"mha: error: {message}")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("command", ["trace", "check"])
def test_a_file_alone_is_refused_with_its_classes_and_is_not_run(tmp_path: Path, command: str) -> None:
    (tmp_path / "gpt.py").write_text(
        "raise SystemExit(99)\nclass One:\n    pass\nclass Two:\n    pass\ndef f():\n    pass\n"
    )
    done = subprocess.run(
        [MHA, command, "gpt.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "mha: error: 'gpt.py' is not of the form FILE.py:NAME or package.module:NAME", "hint: gpt.py:One; gpt.py:Two"
    ]  # fmt: skip


def test_a_name_behind_text_and_a_file_beside_other_words_are_texts(tmp_path: Path) -> None:
    for words in (("--text", "none.py"), ("the cat", "--text", "my.py"), ("a " * 5000 + "b.py",)):
        done = mha(tmp_path, *words, "--mask", "--d-model", "8", "--heads", "2")
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("missing.py:Attention", 1, "missing.py"),
        pytest.param("my.py:Missing", 1, "Missing", marks=pytest.mark.full),
        ("my.py:Endless", 1, "took longer than 1 seconds"),
        ("my.py:Loud", 1, "no \\x1b[2J today"),
    ],
)
def test_a_target_that_cannot_be_traced_is_reported_in_a_line(
    tmp_path: Path, target: str, code: int, said: str
) -> None:
    done = mha(tmp_path, target, *(["--time-limit", "1"] if "Endless" in target else []))
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("mha: error: ")
    assert said in done.stderr
    assert "\x1b" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_record_that_cannot_be_saved_is_refused_before_the_code_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("open('ran', 'w')\ndef attention(q, k, v):\n    return v\n")
    assert mha(tmp_path, "trace", "mine.py:attention", "--save", "none/r").returncode == 1
    assert not (tmp_path / "ran").exists()
