"""A fork of the server answers as a process with imports of its own does: the same bytes, the same files, the same end."""

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import forks, processes
from support.documents import settled
from support.processes import NO_TORCH, WITH_TORCH, Launch, Outcome

pytestmark = pytest.mark.every_row

LAYER = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, d_model=12, n_heads=3, scale=None):
        super().__init__()
        self.h, self.scale = n_heads, scale or (d_model // n_heads) ** -0.5
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (p(x).view(b, t, self.h, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        pattern = torch.softmax(q @ k.mT * self.scale, dim=-1)
        return self.o_proj((pattern @ v).transpose(1, 2).reshape(b, t, c))
"""
TEXT = "the cat sat on the 日本 mat"
TIMES = {"time_s", "timings", "created", "samples_s", "command", "loading_s", "memory", "free_bytes", "seed"}
WITHOUT_TORCH = [
    (),
    ("--version",),
    ("--help",),
    ("run", "--help"),
    ("weights", "info", "--help"),
    ("vocab", TEXT),
    ("vocab", TEXT, "--json"),
    ("show", "r"),
    ("show", "r", "--view", "heatmap", "--color", "always"),
    ("show", "r", "--html", "page.html", "--svg", "picture.svg"),
    ("diff", "r", "other"),
    ("diff", "r", "r", "--json"),
    ("weights", "info", "w"),
    ("rum",),
    ("run", TEXT, "--heads", "5"),
    ("run", TEXT, "--heads", "5", "--json"),
    ("show", "missing"),
    ("run", TEXT),  # needs torch: its stand-in ends the process
]
TORCHED = [
    ("run", TEXT, "--repeat", "1", "--json", "--kv-heads", "2", "--positions", "rope"),
    *(
        pytest.param(words, marks=pytest.mark.full)
        for words in (
            ("check", "layer.py:Attention", "--arg", "scale=0.3"),
            ("run", TEXT, "--repeat", "1", "--causal", "--save", "new"),
            ("run", TEXT, "--device", "cuda:99"),
            ("decode", TEXT, "--repeat", "1"),
            ("trace", "layer.py:Attention"),
        )
    ),
]


@pytest.fixture(autouse=True)
def with_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks also where all other tests start cold processes."""
    monkeypatch.setattr(forks, "IS_COLD", False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two records, weights and a layer."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "layer.py").write_text(LAYER)
    for words in (["--save", "r", "--save-weights", "w"], ["--save", "other", "--seed", "1"]):
        assert processes._run(folder, ["run", TEXT, "--repeat", "1", *words], (), Launch(WITH_TORCH)).code == 0
    return folder


def both(made: Path, place: Path, words: Sequence[str], **launch: Any) -> tuple[Outcome, Outcome]:
    """How the words end in a fork and in a process of their own, each in the same folder made anew; files are compared."""
    ends, states = [], []
    for is_cold in (False, True):
        folder = place / "folder"
        folder.mkdir()
        for file in made.iterdir():
            if file.is_file():
                (folder / file.name).write_bytes(file.read_bytes())
        ends.append(processes._run(folder, words, (), Launch(**launch, is_cold=is_cold)))
        states.append({path.name: path.stat().st_mode for path in folder.iterdir() if path.name != "__pycache__"})
        folder.rename(place / f"was {is_cold}")
    assert states[0] == states[1]
    return ends[0], ends[1]


def timeless(value: Any) -> Any:
    """A document without what differs from run to run."""
    if isinstance(value, dict):
        return {name: timeless(part) for name, part in value.items() if not name.endswith("_s") and name not in TIMES}
    return [timeless(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("words", WITHOUT_TORCH, ids=" ".join)
def test_without_torch_a_fork_gives_the_bytes_of_a_process_of_its_own(made, tmp_path, words):
    fork, own = both(made, tmp_path, words, modules=NO_TORCH)
    assert (fork.code, fork.stdout, fork.stderr) == (own.code, own.stdout, own.stderr)


@pytest.mark.parametrize("words", TORCHED, ids=" ".join)
def test_with_torch_a_fork_differs_from_a_process_of_its_own_in_times_alone(made, tmp_path, words):
    fork, own = both(made, tmp_path, words, modules=WITH_TORCH)
    assert (fork.code, fork.stderr) == (own.code, own.stderr)
    if "--json" in words:
        assert timeless(json.loads(fork.stdout)) == timeless(json.loads(own.stdout))
    else:
        assert lines_of(fork) == lines_of(own)


def lines_of(outcome: Outcome) -> list[str]:
    """What was printed without times, which have their columns, their rates and the sentence that compares them."""
    text = re.sub(r"^a step at \d.*?(?=\n\n)", "", outcome.stdout, flags=re.MULTILINE | re.DOTALL)
    settled_lines = (settled(line) for line in text.splitlines())
    return [" ".join(line.partition("TIME")[0].split()) for line in settled_lines if "tokens/s" not in line]


@pytest.mark.parametrize("columns", [60, 132])
def test_on_a_terminal_too(made, tmp_path, columns):
    fork, own = both(made, tmp_path, ("show", "r"), modules=NO_TORCH, terminal=(columns, 30), env={"COLUMNS": None})
    assert (fork.code, fork.stdout, fork.stderr) == (own.code, own.stdout, own.stderr)
    assert max(map(len, fork.stdout.splitlines())) > 40


def test_the_stand_in_passes_words_streams_and_the_end_on(made):
    for words in (["vocab", "-"], ["vocab", "a b\tc", "--csv"], ["show", "missing"]):
        ends = [
            subprocess.run([program, *words], cwd=made, input=b"x y x", capture_output=True, check=False)
            for program in (forks.MHA, forks.program())
        ]
        assert len({(end.returncode, end.stdout, end.stderr) for end in ends}) == 1
