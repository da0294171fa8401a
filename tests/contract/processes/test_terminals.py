"""Colour, width, encoding and progress: what is printed fits the terminal, the pipe and the
environment.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from unicodedata import east_asian_width

import pyte
import pytest
from support.mha import NO_TORCH, Ended, environment, run, start

TEXT = "the cat sat on the mat 日本 é"
WORDS = {"the", "cat", "sat", "on", "mat"}
SCREEN = (80, 24)
Env = dict[str, str | None]
Mha = Callable[..., Ended]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a record `r`."""
    place = tmp_path_factory.mktemp("terminals")
    run(place, "run", TEXT, "--repeat", "1", "--save", "r")
    return place


# ------------------------------------------------------------------------------------------- colour


@pytest.mark.parametrize(
    ("env", "on_terminal", "in_pipe"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
        *(
            pytest.param(env, env != {"TERM": None}, False, marks=pytest.mark.real)
            for env in (
                {"NO_COLOR": ""},
                {"FORCE_COLOR": ""},
                {"TERM": None},
                {"CI": "true", "GITHUB_ACTIONS": "true"},
            )
        ),
    ],
    ids=str,
)
def test_colour_follows_terminal_and_environment_and_never_reaches_json(
    folder: Path, env: Env, on_terminal: bool, in_pipe: bool
) -> None:
    def is_coloured(*options: str, terminal: tuple[int, int] | None, colour: bool) -> bool:
        return (
            "\x1b["
            in run(folder, "show", "r", *options, env=env, terminal=terminal, colour=colour).stdout
        )

    assert is_coloured(terminal=SCREEN, colour=on_terminal) == on_terminal
    assert is_coloured(terminal=None, colour=in_pipe) == in_pipe
    assert not is_coloured("--json", terminal=SCREEN, colour=False)


def test_the_option_for_colour_overrules_the_environment(folder: Path) -> None:
    never = run(folder, "show", "r", "--color", "never", env={"FORCE_COLOR": "1"}, terminal=SCREEN)
    assert "\x1b[" not in never.stdout
    plain = {"NO_COLOR": "1", "TERM": "dumb"}
    assert "\x1b[" in run(folder, "show", "r", "--color", "always", env=plain, colour=True).stdout


@pytest.mark.real
def test_errors_and_help_are_not_coloured_in_a_pipe_or_on_a_dumb_terminal(folder: Path) -> None:
    """Each in a process of its own, since libraries read these variables when they are imported."""
    for words, code in (
        (["run", "a", "--heads", "0"], 2),
        (["show", "missing"], 1),
        (["run", "--help"], 0),
    ):
        for env in ({"CI": "true", "GITHUB_ACTIONS": "true"}, {"TERM": "dumb"}):
            terminal = SCREEN if "TERM" in env else None
            run(folder, *words, code=code, env=env, terminal=terminal, modules=NO_TORCH)


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"COLORTERM": "truecolor"}, "[34]8;2"),
        ({"TERM": "xterm-256color"}, "[34]8;5"),
        ({"TERM": "xterm"}, "[34][0-7]"),
    ],
    ids=str,
)
def test_the_codes_of_colours_are_those_that_the_terminal_has(
    folder: Path, env: Env, code: str
) -> None:
    done = run(folder, "show", "r", "--view", "heatmap", env=env, terminal=SCREEN, colour=True)
    assert re.search(rf"\x1b\[(?:[0-9;]*;)?{code}", done.stdout)
    assert not (code == "[34][0-7]" and re.search(r"\x1b\[(?:[0-9;]*;)?[34]8;", done.stdout))


# -------------------------------------------------------------------------------------------- width


@pytest.mark.parametrize(
    ("columns", "width"),
    [
        ("1", 20),
        ("100000", 500),
        *(pytest.param(word, 80, marks=pytest.mark.real) for word in ("-5", "abc")),
    ],
)
def test_any_width_keeps_the_words_readable(folder: Path, columns: str, width: int) -> None:
    """Without a useful number the width is 80. No line is shorter than 20 or longer than 500 on
    purpose.
    """
    env = {"COLUMNS": columns}
    printed = [run(folder, "vocab", TEXT, env=env).stdout]
    for view in ("matrix", "heatmap", "top"):
        printed.append(run(folder, "show", "r", "--tokens", "--view", view, env=env).stdout)
    for text in printed:
        assert set(re.findall(r"\w+", text)) >= WORDS
        assert max(map(len, text.splitlines())) <= max(width, 40)
    for words in (["--help"], ["run", "--help"], ["explain"]):
        run(folder, *words, env=env)


def test_a_terminal_gives_its_width_where_the_environment_does_not(folder: Path) -> None:
    def width(columns: int) -> int:
        done = run(
            folder,
            "show",
            "r",
            "--view",
            "matrix",
            env={"COLUMNS": None, "TERM": "dumb"},
            terminal=(columns, 24),
        )
        return max(map(len, done.stdout.splitlines()))

    assert width(61) <= 61 < width(97) <= 97


def test_a_terminal_of_ten_columns_and_three_rows_shows_every_word(folder: Path) -> None:
    for words in (["vocab", TEXT], ["show", "r", "--tokens"], ["show", "r", "--view", "top"]):
        env = {"TERM": "dumb", "COLUMNS": None}
        shown = run(folder, *words, env=env, terminal=(10, 3)).stdout
        assert set(re.findall(r"\w+", shown)) >= WORDS


LONG = (
    "international organisations interrogated interns internationally about multihead attention"
    " mechanisms which internalise interesting things inside"
)
FOURTEEN = (
    "the cat sat on the mat while a small dog slept in the sun",
    LONG,
    "猫 小狗 全角文字 " * 4,
)


def in_columns(line: str) -> str:
    """The line with a character for each column of a terminal: a wide one with a blank before."""
    return "".join(f"\0{c}" if east_asian_width(c) in "WF" else c for c in line)


def columns_named(printed: str) -> list[str]:
    """The names above the first grid of numbers, each read downward within its column."""
    lines = printed.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("query"))
    (row, *_) = (at for at in range(begin, len(lines)) if re.search(r" \.\d", lines[at]))
    ends = [found.end() for found in re.finditer(r"\d?\.\d+[ *]", in_columns(lines[row]))]
    size = ends[1] - ends[0]
    above = [in_columns(line) for line in lines[begin:row]]
    return ["".join(line[end - size : end].strip(" \0") for line in above) for end in ends]


@pytest.mark.parametrize("terminal", [None, SCREEN])
@pytest.mark.parametrize("text", FOURTEEN)
def test_every_word_above_fourteen_columns_can_be_read_in_eighty(
    mha: Mha, text: str, terminal: tuple[int, int] | None
) -> None:
    layer = ("--heads", "4", "--d-model", "8", "--repeat", "1", "--view", "matrix")
    printed = mha("run", text, *layer, terminal=terminal, env={"TERM": "dumb"}).stdout
    names = [name.replace("\0", "") for name in columns_named(printed)]
    assert 8 <= len(names) <= 14
    assert names == text.split()[: len(names)]


@pytest.mark.parametrize("n_tokens", [20, 40])
def test_columns_without_room_for_names_have_the_numbers_of_rows(mha: Mha, n_tokens: int) -> None:
    words = [f"w{place}" for place in range(n_tokens)]
    layer = ("--heads", "1", "--d-model", "8", "--repeat", "1", "--scale", "1e9", "--causal")
    lines = mha("run", " ".join(words), *layer).stdout.splitlines()
    rows = [line.split()[:2] for line in lines if re.match(r" *\d+ w\d", line)][:n_tokens]
    assert rows == [[str(place), word] for place, word in enumerate(words)]
    (first,) = (line for line in lines if line.startswith(" 0 w0"))
    (heading,) = (line for line in lines if line.startswith("query"))
    begin = first.index("█")
    size = first.count("█")
    numbers = [(int(found[0]), found.start()) for found in re.finditer(r"\d+", heading)]
    assert len(numbers) >= n_tokens // 10
    assert all(at == begin + size * number for number, at in numbers)


# ----------------------------------------------------------------------------------------- encoding

STRICT: Env = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.mark.real
@pytest.mark.parametrize(
    "env", [{**STRICT, "PYTHONIOENCODING": "ascii"}, STRICT], ids=["ascii", "C"]
)
def test_a_poor_encoding_keeps_the_words_readable(folder: Path, env: Env) -> None:
    (folder / "wide.txt").write_text(TEXT)
    for words in (
        ["vocab", "--file", "wide.txt"],
        ["show", "r", "--view", "heatmap"],
        ["show", "r", "--view", "top"],
    ):
        text = run(folder, *words, env=env, modules=NO_TORCH).stdout
        assert set(re.findall(r"\w+", text)) >= WORDS
        assert r"\u65e5\u672c" in text
        assert text.isascii()
    assert (
        "missing-"
        in run(folder, "vocab", "--file", "missing-é", code=1, env=env, modules=NO_TORCH).said
    )


# ----------------------------------------------------------------------------------------- progress


def on_terminal(folder: Path, *words: str, env: Env) -> tuple[bytes, bytes, list[str], bool]:
    """Stdout, all that was written to a terminal as stderr, the lines that it shows at the end, and
    whether its cursor is.
    """
    ours, theirs = pty.openpty()
    variables = environment(folder, **env)
    shown = b""
    with tempfile.TemporaryFile() as out:
        with start(
            folder, *words, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=theirs
        ) as process:
            os.close(theirs)
            with contextlib.suppress(OSError):  # nobody is left at the other end
                while piece := os.read(ours, 65536):
                    shown += piece
        assert process.returncode == 0
        out.seek(0)
        stdout = out.read()
    os.close(ours)
    screen = pyte.Screen(*SCREEN)
    pyte.ByteStream(screen).feed(shown)
    return (
        stdout,
        shown,
        [line.rstrip() for line in screen.display if line.strip()],
        not screen.cursor.hidden,
    )


@pytest.mark.real
@pytest.mark.parametrize(
    ("env", "has_bar"),
    [({}, True), pytest.param({"TERM": "dumb"}, False, marks=pytest.mark.real)],
    ids=["terminal", "dumb"],
)
def test_a_long_computation_draws_its_progress_on_a_terminal_and_takes_it_back(
    folder: Path, env: Env, has_bar: bool
) -> None:
    text = " ".join(f"w{i % 97}" for i in range(5000))
    (folder / "long.txt").write_text(text)
    words = ("heads", "--file", "long.txt", "--heads", "4", "--device", "cpu", "--color", "never")
    stdout, shown, lines, has_cursor = on_terminal(folder, *words, env=env)
    assert ("━".encode() in shown) == has_bar
    assert not any("━" in line for line in lines)
    assert has_cursor
    assert "━".encode() not in stdout.partition(b"self-check")[2]
    assert b"\x1b" not in stdout
    assert has_bar or b"\x1b" not in shown


@pytest.mark.real
def test_no_progress_is_drawn_in_a_pipe(folder: Path) -> None:
    (folder / "long.txt").write_text(" ".join(f"w{i % 97}" for i in range(5000)))
    done = run(
        folder,
        *"heads --file long.txt --heads 4 --device cpu".split(),
        writes=["long.txt"],
    )
    assert "━" not in done.stderr
