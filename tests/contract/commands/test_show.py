"""`mha show` prints a saved record in every view and format with the numbers that the run
printed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import checkpoints
from support.mha import Ended, run

Mha = Callable[..., Ended]
Saved = Callable[[str], dict[str, Any]]
COMMANDS = {
    "run": ["the cat sat", "a dog", "--heads", "2", "--causal"],
    "context": ["a dog", "--context", "the cat sat"],
    "trace": ["the cat", "--values"],
    "heads": [
        "the cat sat on the mat and the cat sat too",
        *"--heads 4 --causal --map 1".split(),
    ],
    "decode": ["the cat sat on", "--prompt-len", "2", "--kv-heads", "2"],
}
"""What each command is given. `context` is `run` with a second text."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def saved(folder: Path) -> Saved:
    """`saved(command)` is the document that the command printed; its record has the name of the
    command.
    """

    @functools.cache
    def document(command: str) -> dict[str, Any]:
        name = "run" if command == "context" else command
        return dict(run(folder, name, *COMMANDS[command], "--save", command, "--json").json)

    return document


@pytest.mark.parametrize("command", COMMANDS)
def test_the_document_of_a_saved_record_is_that_of_the_run(
    folder: Path, saved: Saved, command: str
) -> None:
    printed = saved(command)
    assert run(folder, "show", command, "--json").json == printed
    assert printed["schema"] == "mha.record/1"


@pytest.mark.real
@pytest.mark.parametrize("command", COMMANDS)
def test_every_view_of_every_record_is_printed_with_its_self_check(
    folder: Path, saved: Saved, command: str
) -> None:
    saved(command)
    steps = [] if command == "heads" else ["--shapes", "--timings"]
    for options in (
        [],
        ["--brief"],
        ["--verbose"],
        ["--all", "--tokens", *steps],
        ["--view", "none"],
    ):
        assert "self-check ok" in run(folder, "show", command, *options).stdout


def test_a_heatmap_is_darker_where_the_weight_is_larger(folder: Path, saved: Saved) -> None:
    pattern = saved("run")["pattern"][0][1]
    options = ("--head", "1", "--sequence", "0", "--color", "never")
    text = run(folder, "show", "run", "--view", "heatmap", *options).stdout
    ramp = " ·░▒▓█"
    rows = [
        re.findall(r"([ ·░▒▓█])\1{2,}", line[5:])
        for line in text.splitlines()
        if re.match(r"(the|cat|sat) ", line)
    ]
    for shades, weights in zip(rows, pattern, strict=True):
        shades = [shade for shade in shades if shade != " "]
        order = sorted(range(len(shades)), key=lambda key: weights[key])
        assert [ramp.index(shades[key]) for key in order] == sorted(
            ramp.index(shade) for shade in shades
        )
        assert len(shades) == sum(weight > 0 for weight in weights)


def test_only_the_chosen_heads_and_sequences_are_printed(folder: Path, saved: Saved) -> None:
    tokens = [sequence["tokens"] for sequence in saved("run")["sequences"]]
    text = run(folder, "show", "run", "--view", "top", "--head", "1", "--sequence", "1").stdout
    rows = [line for line in text.splitlines() if "→" in line]
    assert len(rows) == len(tokens[1])
    assert all(f"“{token}”" in row for token, row in zip(tokens[1], rows, strict=True))
    wrong = (
        ("--head", "2"),
        ("--sequence", "2"),
        ("--head", "1-0"),
        ("--top", "0"),
        ("--precision", "x"),
    )
    for option, value in wrong:
        assert value in run(folder, "show", "run", option, value, code=2).said


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_map_of_one_head_is_printed_in_each_scale(folder: Path, saved: Saved, scale: str) -> None:
    saved("heads")
    text = run(folder, "show", "heads", "--map", "1", "--map-scale", scale).stdout
    assert scale in text
    assert "4" in run(folder, "show", "heads", "--map", "4", code=(1, 2)).said


def test_json_is_ascii_of_the_shortest_numbers_that_read_back(folder: Path, saved: Saved) -> None:
    saved("run")
    text = run(folder, "show", "run", "--json").stdout
    assert text.isascii()
    assert text.endswith("}\n")
    written = (
        text.split('"pattern":')[1].split(',\n"')[0].replace("[", "").replace("]", "").split(",")
    )
    for word in written:
        number = np.float32(word)
        shortest = next(n for n in range(1, 18) if np.float32(f"{number:.{n - 1}e}") == number)
        assert len(word.split("e")[0].replace(".", "").strip("0")) <= shortest


def test_in_colour_every_row_of_a_long_map_is_half_of_a_line(tmp_path: Path) -> None:
    words = (" ".join(f"w{i}" for i in range(40)), "--heads", "1", "--repeat", "1", "--save", "r")
    run(tmp_path, "run", *words)
    of_terminal = {"terminal": (80, 24), "colour": True, "env": {"COLORTERM": "truecolor"}}
    shown = run(tmp_path, "show", "r", "--view", "heatmap", **of_terminal).stdout
    assert len(re.findall("38;2;[0-9;]*;48;2;[0-9;]*m▀", shown)) == 40 * 20


@pytest.mark.parametrize("model", [(), ("--model", "gpt2")])
def test_a_chosen_head_without_pattern_is_drawn_in_blocks(
    tmp_path: Path, model: tuple[str, ...]
) -> None:
    words = [checkpoints.folder(word) if word == "gpt2" else word for word in model]
    run(tmp_path, "heads", "the cat sat on the mat", *words, "--save", "r")
    chosen = ("show", "r", *(("--layer", "1") if model else ()), "--head", "2")
    drawn = run(tmp_path, *chosen).stdout
    assert drawn == run(tmp_path, *chosen, "--map", "2").stdout
    assert drawn != run(tmp_path, *chosen, "--view", "none").stdout


def test_cross_attention_has_no_columns_of_keys_in_the_own_text(tmp_path: Path) -> None:
    within = {"self", "prev", "dup", "ind"}

    def columns(*words: str | Path) -> set[str]:
        screen = run(tmp_path, "heads", *words, env={"COLUMNS": "300"}).stdout
        (heading,) = re.findall(r"^.*\bhead type .*$", screen, re.M)
        return within & {*heading.split()}

    assert columns("the cat sat") == within
    assert not columns("the cat sat", "--context", "a dog")
    model = ("--model", checkpoints.folder("t5"), "--layer")
    assert not columns("the cat sat", *model, "cross.1")
    assert columns("the cat sat", *model, "cross.1,decoder.1", "--all") == within


def test_files_that_mha_wrote_are_no_arrays_of_another_program(tmp_path: Path) -> None:
    run(tmp_path, "run", "the cat sat", "--save-weights", "w", "--save", "r")
    (tmp_path / "labels.txt").write_text("the\ncat\nsat\n")
    for more in (("--labels", "labels.txt"), ("--axes", "head,query,key"), ("--raw",)):
        weights = run(tmp_path, "show", "w", *more, code=1).error
        assert weights == run(tmp_path, "show", "w", code=1).error
        assert "--weights w" in weights["hint"]
        assert more[0] in run(tmp_path, "show", "r", *more, code=2).error["message"]
