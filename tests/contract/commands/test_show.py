"""`mha show` prints a saved record in every view and format with the numbers that the run printed."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.mha import Ended, run

Mha = Callable[..., Ended]
Saved = tuple[Path, dict[str, Any]]
COMMANDS = {
    "run": ["the cat sat", "a dog", "--heads", "2", "--causal"],
    "context": ["a dog", "--context", "the cat sat"],
    "trace": ["the cat", "--values"],
    "heads": ["the cat sat on the mat and the cat sat too", "--heads", "4", "--causal", "--map", "1"],
    "decode": ["the cat sat on", "--prompt-len", "2", "--kv-heads", "2"],
}
"""What each command is given. `context` is `run` with a second text."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def saved(folder: Path) -> Callable[[str], dict[str, Any]]:
    """`saved(command)` is the document that the command printed; its record has the name of the command."""
    printed: dict[str, dict[str, Any]] = {}

    def document(command: str) -> dict[str, Any]:
        if command not in printed:
            name = "run" if command == "context" else command
            printed[command] = run(folder, name, *COMMANDS[command], "--save", command, "--json").json
        return printed[command]

    return document


def numbers(text: str, digits: int) -> list[float]:
    """The weights with so many digits after the point."""
    return [float(word) for word in re.findall(rf"(?<![\w.])[01]?\.\d{{{digits}}}(?!\d)", text)]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_document_of_a_saved_record_is_that_of_the_run(
    folder: Path, saved: Callable[[str], dict[str, Any]], command: str
) -> None:
    printed = saved(command)
    assert run(folder, "show", command, "--json").json == printed
    assert printed["schema"] == "mha.record/1"


@pytest.mark.real
@pytest.mark.parametrize("command", COMMANDS)
def test_every_view_of_every_record_is_printed_with_its_self_check(
    folder: Path, saved: Callable[[str], dict[str, Any]], command: str
) -> None:
    saved(command)
    steps = [] if command == "heads" else ["--shapes", "--timings"]
    for options in ([], ["--brief"], ["--verbose"], ["--all", "--tokens", *steps], ["--view", "none"]):
        assert "self-check ok" in run(folder, "show", command, *options).stdout


def test_a_matrix_has_the_weights_of_the_pattern(folder: Path, saved: Callable[[str], dict[str, Any]]) -> None:
    printed = saved("run")
    for sequence, head in ((0, 1), (1, 0)):
        options = ("--head", str(head), "--sequence", str(sequence), "--precision", "6")
        text = run(folder, "show", "run", "--view", "matrix", *options).stdout
        n_tokens = len(printed["sequences"][sequence]["tokens"])
        rows = printed["pattern"][sequence][head][:n_tokens]
        visible = [row[key] for query, row in enumerate(rows) for key in range(query + 1)]
        table = re.split(r"^query ", text, flags=re.MULTILINE)[1]
        assert numbers(table.partition("attention weights")[0], 6) == [round(weight, 6) for weight in visible]


def test_the_strongest_keys_are_those_of_the_pattern(folder: Path, saved: Callable[[str], dict[str, Any]]) -> None:
    pattern = saved("run")["pattern"][0][0]
    options = ("--head", "0", "--sequence", "0", "--top", "2", "--precision", "5")
    text = run(folder, "show", "run", "--view", "top", *options).stdout
    lines = [line for line in text.splitlines() if "→" in line]
    assert len(lines) == 3
    for line, row in zip(lines, pattern, strict=True):
        strongest = sorted((key for key, weight in enumerate(row) if weight), key=lambda key: -row[key])[:2]
        pairs = re.findall(r"(\d+) “\w+” +(1?\.\d{5})", line.partition("→")[2])
        assert [(int(key), float(weight)) for key, weight in pairs] == [(key, round(row[key], 5)) for key in strongest]


def test_a_heatmap_is_darker_where_the_weight_is_larger(folder: Path, saved: Callable[[str], dict[str, Any]]) -> None:
    pattern = saved("run")["pattern"][0][1]
    options = ("--head", "1", "--sequence", "0", "--color", "never")
    text = run(folder, "show", "run", "--view", "heatmap", *options).stdout
    ramp = " ·░▒▓█"
    rows = [
        re.findall(r"([ ·░▒▓█])\1{2,}", line[5:]) for line in text.splitlines() if re.match(r"(the|cat|sat) ", line)
    ]
    for shades, weights in zip(rows, pattern, strict=True):
        shades = [shade for shade in shades if shade != " "]
        order = sorted(range(len(shades)), key=lambda key: weights[key])
        assert [ramp.index(shades[key]) for key in order] == sorted(ramp.index(shade) for shade in shades)
        assert len(shades) == sum(weight > 0 for weight in weights)


def test_only_the_chosen_heads_and_sequences_are_printed(folder: Path, saved: Callable[[str], dict[str, Any]]) -> None:
    tokens = [sequence["tokens"] for sequence in saved("run")["sequences"]]
    text = run(folder, "show", "run", "--view", "top", "--head", "1", "--sequence", "1").stdout
    rows = [line for line in text.splitlines() if "→" in line]
    assert len(rows) == len(tokens[1])
    assert all(f"“{token}”" in row for token, row in zip(tokens[1], rows, strict=True))
    for option, value in (
        ("--head", "2"),
        ("--sequence", "2"),
        ("--head", "1-0"),
        ("--top", "0"),
        ("--precision", "x"),
    ):
        assert value in run(folder, "show", "run", option, value, code=2).said


def test_csv_has_every_cell_of_the_pattern(folder: Path, saved: Callable[[str], dict[str, Any]]) -> None:
    """One line for each sequence, head, query and key that is no padding, with the shortest number that reads back."""
    for command in ("run", "context"):
        printed = saved(command)
        header, *rows = csv.reader(io.StringIO(run(folder, "show", command, "--csv").stdout, newline=""))
        assert header == ["sequence", "head", "query", "query_token", "key", "key_token", "allowed", "pattern"]
        places = set()
        for b, h, i, query_token, j, key_token, allowed, weight in rows:
            place = int(b), int(h), int(i), int(j)
            places.add(place)
            expected = printed["pattern"][place[0]][place[1]][place[2]][place[3]]
            assert np.float32(weight) == np.float32(expected)
            assert (float(weight) == 0) == (allowed == "0")
            keys = printed["context" if command == "context" else "sequences"][place[0]]["tokens"]
            assert (query_token, key_token) == (printed["sequences"][place[0]]["tokens"][place[2]], keys[place[3]])
        sizes = [
            (len(s["tokens"]), len((printed["context"] or printed["sequences"])[b]["tokens"]))
            for b, s in enumerate(printed["sequences"])
        ]
        n_heads = printed["config"]["n_heads"]
        assert len(rows) == len(places) == n_heads * sum(queries * keys for queries, keys in sizes)


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_map_of_one_head_is_printed_in_each_scale(
    folder: Path, saved: Callable[[str], dict[str, Any]], scale: str
) -> None:
    saved("heads")
    text = run(folder, "show", "heads", "--map", "1", "--map-scale", scale).stdout
    assert scale in text
    assert "4" in run(folder, "show", "heads", "--map", "4", code=(1, 2)).said


def test_json_is_ascii_of_the_shortest_numbers_that_read_back(
    folder: Path, saved: Callable[[str], dict[str, Any]]
) -> None:
    saved("run")
    text = run(folder, "show", "run", "--json").stdout
    assert text.isascii()
    assert text.endswith("}\n")
    written = text.split('"pattern":')[1].split(',\n"')[0].replace("[", "").replace("]", "").split(",")
    for word in written:
        number = np.float32(word)
        shortest = next(n for n in range(1, 18) if np.float32(f"{number:.{n - 1}e}") == number)
        assert len(word.split("e")[0].replace(".", "").strip("0")) <= shortest


def test_scores_are_null_exactly_where_a_query_may_not_attend(saved: Callable[[str], dict[str, Any]]) -> None:
    """The second sequence is shorter: its last key is padding, which nobody attends to."""
    printed = saved("run")
    for name in ("qk", "scores"):
        is_null = np.array(printed[name], dtype=object)[0, 0] == None  # noqa: E711
        assert (is_null == ~np.tri(3, dtype=bool)).all()
        padded = np.array(printed[name], dtype=object)[1, 0] == None  # noqa: E711
        assert padded[:, 2].all()


def test_arrays_that_were_not_kept_are_null_and_named(mha: Mha) -> None:
    mha("run", "the cat", "--keep", "z", "--save", "r")
    shown = mha("show", "r", "--json").json
    assert shown["pattern"] is None
    assert shown["z"] is not None
    done = mha("show", "r", "--csv", "--json", code=2)
    assert "--csv" in done.said
    assert "pattern" in mha("show", "r", "--csv", code=1).said
