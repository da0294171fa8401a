"""`mha heads` as a real process: what it prints and writes, what it refuses, and how it ends when it is interrupted."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.cells import cell_len
from support.processes import (
    PATIENCE_S,
    WITH_TORCH,
    Launch,
    attempt,
    obeyed_or_hidden,
    shell_code,
    start,
    state_of,
)

from mhacli.attention.tiled.softmax import AttentionResult
from mhacli.cli.app import main

CAT = "the cat sat on the mat and the dog sat on the cat"
STORY = Path(__file__).parents[2] / "sample_texts" / "story.txt"
ASKED = ["--causal", "--rows", "2:5", "--query", "3,7", "--where", "k == q - 1"]
DRAWN = ["--map", "1", "--sort", "sink:up"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

# -------------------------------------------------------------------------------------------------- what it is asked for


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a record `r`, and what was printed when it was made."""
    folder = tmp_path_factory.mktemp("saved")
    made = attempt(
        folder, "heads", CAT, *ASKED, *DRAWN, "--save", "r", "--keep-z", writes={"r"}, launch=Launch(WITH_TORCH)
    )
    return folder, made


def test_heads_prints_an_overview_and_all_that_was_asked_for(saved):
    _, made = saved
    assert made.stderr.startswith("mha: saved r, ")
    for piece in ("head head type", "if uniform", "sequence 0 · head 1 · ", "scale log", "p1 = weight where k == q - 1",
                  "self-check ok", "sequence 0 · head 3 · cells", "sequence 0 · query 3 “on” · 4 visible keys"):  # fmt: skip
        assert piece in made.stdout, piece
    assert "\x1b" not in made.stdout
    assert max(map(cell_len, made.stdout.splitlines())) <= 80


def test_show_draws_a_saved_record_the_same_without_torch(saved):
    folder, made = saved
    assert attempt(folder, "show", "r", *DRAWN).stdout == made.stdout


def test_show_draws_it_in_another_order_and_as_csv_and_json_too(saved):
    folder, _ = saved
    rows = list(csv.DictReader(StringIO(attempt(folder, "show", "r", "--csv").stdout)))
    assert [row["head"] for row in rows] == ["0", "1", "2", "3"]
    document = json.loads(attempt(folder, "show", "r", form=("--json",)).stdout)
    assert [head["head"] for head in document["heads"]] == [0, 1, 2, 3]
    for row, head in zip(rows, document["heads"], strict=True):
        for name in ("entropy", "sink", "window_90", "max_score"):
            assert float(row[name]) == head[name]
        assert float(row["pattern_1"]) == head["patterns"][0] == pytest.approx(head["previous"], abs=1e-6)
    assert document["survey"]["kept"] == {
        "queries": [3, 7], "top": 10, "corner": {"first_query": 2, "n_queries": 3, "first_key": 0, "n_keys": 13}, "z": True,
    }  # fmt: skip
    assert document["command"][:3] == ["mha", "heads", CAT]
    attempt(folder, "show", "r", "--map", "4", code=2, says=["head 4"])


@pytest.mark.full
def test_the_json_of_a_text_from_stdin_is_one_document(tmp_path):
    (tmp_path / "text").write_text(CAT)
    with (tmp_path / "text").open("rb") as text:
        launch = Launch(WITH_TORCH, stdin=text)
        done = attempt(tmp_path, "heads", "-", "--head", "1,3", form=("--json",), launch=launch)
    document = json.loads(done.stdout)
    assert done.stderr == ""
    assert document["sequences"][0]["tokens"] == CAT.split()
    assert [head["head"] for head in document["heads"]] == [1, 3]
    assert document["self_check"]["ok"] is True


# ----------------------------------------------------------------------------------------------------- hostile, and drawn

HOSTILE = (
    "\x1b]52;c;aGk=\x07", "\x1b[2J", "\x9b31m", "[mask]", "[/b]", "[/INST]", "[red]", "[link=http://e]", ":bug:",
    "\u202eevil", "\u2066iso", "\u061c", "\u200bzero", "\ufeff", "\U000e0041", "日本語", "👨‍👩‍👧", "plain",
)  # fmt: skip


def test_hostile_tokens_are_visible_wherever_they_are_drawn(tmp_path):
    known = {token: index for index, token in enumerate(["<unk>", *HOSTILE])}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": known, "unk_token": "<unk>"},
    }  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps(tokenizer))
    (tmp_path / "\x1b[31m.txt").write_text(" ".join(HOSTILE))
    words = [
        "--file",
        "\x1b[31m.txt",
        "--tokenizer",
        "t.json",
        "--rows",
        ":",
        "--query",
        "0-17",
        "--top",
        "18",
        "--map",
        "0",
    ]
    words += ["--all", "--heads", "1", "--d-model", "8", "--where", 'tok[k] == "\x1b[2J"', "--sink-weight", "0.01"]
    launch = Launch(WITH_TORCH, env={"COLUMNS": "120"})
    done = attempt(tmp_path, "heads", *words, "--save", "r", writes={"r"}, launch=launch)
    for piece in (r"\x1b]52", r"\x1b[2J", r"\u009b31m", "[mask]", "[/b]", "[/INST]", "[red]", "[link=http", ":bug:",
                  r"\u202eevil", r"\u2066iso", r"\u061c", r"\u200bzero", r"\ufeff", r"\U000e0041", "日本語",
                  r'p1 = weight where tok[k] == "\x1b[2J"'):  # fmt: skip
        assert piece in done.stdout, piece
    assert max(map(cell_len, done.stdout.splitlines())) <= 120
    again = attempt(tmp_path, "show", "r", "--map", "0", "--all", launch=Launch(env={"COLUMNS": "120"}))
    assert again.stdout == done.stdout


@pytest.mark.parametrize(
    ("env", "colour"), [({"NO_COLOR": "1", "TERM": "xterm-256color"}, False), ({"COLORTERM": "truecolor"}, True)]
)
def test_a_terminal_gets_its_width_and_its_colours(env, colour, saved):
    folder, _ = saved
    launch = Launch(env={"TERM": "xterm-256color", **env}, terminal=(60, 30))
    done = attempt(folder, "show", "r", *DRAWN, colour=True, launch=launch)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert max(map(cell_len, plain.splitlines())) <= 60
    assert bool(re.search(r"\x1b\[[0-9;]*48;2;", done.stdout)) is colour
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", done.stdout) or colour
    assert not obeyed_or_hidden(plain)


# -------------------------------------------------------------------------------------------------------- what it refuses

USAGE = {
    "head": (["--head", "4"], "--head 4"),
    "map": (["--map", "9"], "--map 9 "),
    "map of another head": (
        ["--head", "0,1", "--map", "2"],
        "--map 2: head 2 is not among the heads chosen with --head",
    ),
    "query": (["--query", "1,13"], "--query 13 "),
    "rows": (["--rows", "4:14"], "4:14"),
    "keys": (["--keys", "5:5"], "5:5"),
    "rows that are no span": (["--rows", "3"], "rows"),
    "where": (["--where", "k = q"], "--where: 'k = q' "),
    "sort": (["--sort", "size"], "size"),
    "sink-weight": (["--sink-weight", "0"], "--sink-weight 0 is out of range: above 0, at most 1"),
    "sink-weight above 1": (["--sink-weight", "1.5"], "--sink-weight 1.5 "),
    "sink-weight no number": (["--sink-weight", "nan"], "nan"),
    "first-tokens": (["--first-tokens", "0"], "first-tokens"),
    "top": (["--query", "1", "--top", "0"], "top"),
    "sequence": (["--sequence", "1"], "sequence"),
    "train": (
        ["--train", "--dropout", "0.5"],
        "--train does not work with mha heads",
    ),
    "left padding": (
        ["a dog", "--padding", "left", "--query", "1"],
        "--query, --rows and --keys need texts of one length where padding is on the left",
    ),
}


@pytest.mark.parametrize("name", USAGE)
def test_what_does_not_exist_is_refused_before_torch_is_loaded(name, tmp_path):
    words, message = USAGE[name]
    form = ("--json",) if len(name) % 2 else ()
    done = attempt(tmp_path, "heads", CAT, *words, "--save", "r", code=2, form=form, says=[message])
    assert done.stdout == ""


def test_two_formats_are_refused_and_a_missing_file_is_told_as_json(tmp_path):
    attempt(tmp_path, "heads", CAT, "--csv", code=2, form=("--json",), says=["--json and --csv"])
    done = attempt(tmp_path, "heads", "--file", "absent", code=1, form=("--json",), says=["absent"])
    assert done.error["path"] == "absent"


def test_a_failed_check_ends_with_3(monkeypatch, capsys):
    finished = AttentionResult.finished
    monkeypatch.setattr(sys, "argv", ["mha", "heads", CAT])
    assert main() == 0
    assert "self-check ok" in capsys.readouterr().out
    monkeypatch.setattr(AttentionResult, "finished", lambda own: replace(f := finished(own), z=f.z + 1))
    assert main() == 3
    said = capsys.readouterr()
    assert "self-check FAILED" in said.out
    assert said.err.startswith("mha: error: ")


# ------------------------------------------------------------------------------------------------------- how it is stopped


@pytest.mark.full
def test_a_reader_that_takes_one_line_of_csv_is_served_in_silence(tmp_path):
    words = ["heads", CAT, "a dog", "--csv", "--padding", "left"]
    process = start(tmp_path, words, Launch(WITH_TORCH), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline().startswith(b"layer,head,kind,certainty,")
    process.stdout = None
    assert process.communicate(timeout=PATIENCE_S)[1] == b""
    assert shell_code(process.returncode) in (0, 141)


def ended(process, number):
    """Exit code, output and errors of a process after a signal."""
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    return shell_code(process.returncode), stdout.decode(), stderr.decode()


@pytest.mark.full
def test_a_signal_while_a_long_text_is_looked_at_ends_it(tmp_path):
    (tmp_path / "long.txt").write_text(STORY.read_text() * 6)
    before = state_of(tmp_path)
    words = ["heads", "--file", "long.txt", "--heads", "32", "--d-model", "64", "--causal", "--save", "r"]
    launch = Launch(WITH_TORCH, env=ONE_THREAD)
    process = start(tmp_path, words, launch, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    told = process.stderr.readline().decode()
    assert re.search(
        r"[\d,]+ tokens, 32 heads: at most about .* and .*; full attention matrices would take .*GiB", told
    )
    time.sleep(0.3)
    found = ended(process, signal.SIGINT)
    nothing = "mha: interrupted: 0 of 32 heads are finished, and nothing was saved\n"
    assert found == (130, "", nothing)
    assert state_of(tmp_path) == before


STOPPING = """
from pathlib import Path
import time
import mhacli.compute.heads as study
study._CELLS_AT_ONCE = 1
real, seen = study.reduce_heads, []
def slow(*given, **named):
    seen.append(1)
    if len(seen) == 3:
        Path('modules/reached').touch()
        time.sleep(600)
    return real(*given, **named)
study.reduce_heads = slow
"""


def test_the_heads_that_are_finished_are_told_when_it_is_interrupted(tmp_path):
    launch = Launch({"sitecustomize": STOPPING}, env=ONE_THREAD)
    words = ["heads", CAT, "--causal", "--save", "r"]
    process = start(tmp_path, words, launch, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "modules" / "reached").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    code, stdout, stderr = ended(process, signal.SIGINT)
    assert code == 130
    assert not (tmp_path / "r").exists()
    rows = [line.split()[0] for line in stdout.splitlines() if re.match(r"\s*\d [^\d\s] [a-z]", line)]
    assert rows == ["0", "1"]
    assert "self-check ok" in stdout
    assert stderr == "mha: interrupted: 2 of 4 heads are finished, and nothing was saved\n"
