"""Colour, width, encoding and progress: what is printed fits the terminal, the pipe and the
environment.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from unicodedata import east_asian_width

import pyte
import pytest
from support import checkpoints
from support.mha import NO_TORCH, PATIENCE_S, Ended, environment, run, start

TEXT = "the cat sat on the mat 日本 é"
WORDS = {"the", "cat", "sat", "on", "mat"}
SCREEN = (80, 24)
ATTENTION = (Path(__file__).parents[2] / "golden/files/attention.py").read_text()
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

AT_ONCE: Env = {"MHA_PROGRESS_AFTER": "0"}
LONG = ("heads", "--file", "long.txt", "--heads", "4", "--device", "cpu", "--color", "never")


class Reading:
    """`mha vocab -` with a terminal as stderr, which works until it has read what it is given."""

    def __init__(self, folder: Path, **env: str | None) -> None:
        self._ours, theirs = pty.openpty()
        reading, self._writing = os.pipe()
        self.shown = b""
        variables = environment(folder, **AT_ONCE, **env)
        streams = {"stdin": reading, "stdout": subprocess.PIPE, "stderr": theirs}
        self.process = start(folder, "vocab", "-", env=variables, **streams)
        os.close(theirs)
        os.close(reading)

    def until(self, pattern: bytes) -> None:
        """Waits until this was written to the terminal."""
        while not re.search(pattern, self.shown):
            assert select.select([self._ours], [], [], PATIENCE_S)[0]
            self.shown += os.read(self._ours, 65536)

    def give(self, text: bytes) -> None:
        """The whole text."""
        os.write(self._writing, text)

    def end(self) -> tuple[int, str, list[str]]:
        """Exit code, stdout, and the lines that the terminal shows at the end."""
        os.close(self._writing)
        with contextlib.suppress(OSError):  # nobody is left at the other end
            while piece := os.read(self._ours, 65536):
                self.shown += piece
        os.close(self._ours)
        stdout, _ = self.process.communicate(timeout=PATIENCE_S)
        screen = pyte.Screen(*SCREEN)
        pyte.ByteStream(screen).feed(self.shown)
        assert not screen.cursor.hidden
        lines = [line.rstrip() for line in screen.display if line.strip()]
        return self.process.returncode, stdout.decode(), lines


def test_work_draws_itself_anew_on_a_terminal_and_leaves_nothing_behind(tmp_path: Path) -> None:
    work = Reading(tmp_path)
    work.until(rb"counting .*\r\x1b\[Kcounting ")
    work.give(b"the cat sat on the mat")
    code, stdout, lines = work.end()
    assert (code, lines) == (0, [])
    assert "counting" not in stdout
    assert "cat" in stdout


def test_an_interrupt_during_work_says_what_is_kept_on_a_line_of_its_own(tmp_path: Path) -> None:
    work = Reading(tmp_path)
    work.until(rb"counting ")
    work.process.send_signal(signal.SIGINT)
    assert work.end() == (130, "", ["mha: interrupted: nothing is kept"])


def test_a_dumb_terminal_gets_the_last_line_alone(tmp_path: Path) -> None:
    work = Reading(tmp_path, TERM="dumb")
    work.give(b"the cat sat on the mat")
    code, _, lines = work.end()
    assert (code, len(lines)) == (0, 1)
    assert b"\x1b" not in work.shown
    assert lines[0].startswith("mha: counting ")


def test_an_interrupt_in_a_log_says_what_is_kept(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with start(
        tmp_path,
        "vocab",
        "-",
        env=environment(tmp_path, **AT_ONCE),
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(reading)
        for _ in range(4):  # more than a pipe holds: it has begun to read
            os.write(writing, b"words " * 20_000)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE_S)[1] == b"mha: interrupted: nothing is kept\n"
        assert process.returncode == 130
    os.close(writing)


@pytest.mark.real
@pytest.mark.parametrize(
    ("words", "end"),
    [
        (LONG, r"query 5,000 of 5,000 · 100 % · [\d.]+ m?s"),
        (
            ("effect", "the cat sat", "--heads", "4", "--device", "cpu"),
            r"removal 4 of 4 · 100 % · [\d.]+ m?s",
        ),
        (("run", "the cat sat", "--model", "model"), r"layer 3 of 3 · 100 % · [\d.]+ m?s"),
        (("heads", "the cat sat", "--model", "model"), r"layer 3 of 3 · 100 % · [\d.]+ m?s"),
        (("check", "attention.py:Right"), r"[a-z].* · [\d.]+ m?s"),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
def test_a_log_has_the_last_line_of_the_work_alone(
    tmp_path: Path, words: tuple[str, ...], end: str
) -> None:
    (tmp_path / "model").symlink_to(checkpoints.folder("gpt2"))
    (tmp_path / "long.txt").write_text(" ".join(f"w{i % 97}" for i in range(5000)))
    (tmp_path / "attention.py").write_text(ATTENTION)
    done = run(tmp_path, *words, code=range(4), env=AT_ONCE)
    assert re.fullmatch(f"mha: {end}\n", done.stderr)
