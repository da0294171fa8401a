"""What the installed program answers to hostile, broken and odd texts."""

import csv
import io
import json
import os
import pty
import subprocess
import unicodedata
from pathlib import Path

import pytest
from support.hostile import HOSTILE, MARKUP, WIDE, escaped, tokenizer_of
from support.processes import (
    SHELL,
    WITH_TORCH,
    WITHOUT_ROOT_RIGHTS,
    Launch,
    attempt,
    forms,
    is_root,
    limited_memory,
    state_of,
)

commands = pytest.mark.parametrize(
    ("command", "form"),
    [("run", ()), ("trace", ("--json",)), ("vocab", ()), ("vocab", ("--json",))],
    ids=["run-plain", "trace-json", "vocab-plain", "vocab-json"],
)
WEIGHTS_NAME = "w\x1b[2J\u202e[red].safetensors"


def cells(line: str) -> int:
    """Columns that a line takes on a terminal."""
    return sum(
        0 if unicodedata.category(c) in ("Mn", "Me") else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in line
    )


def splitting_at(pattern: str) -> tuple[str, str]:
    """What to replace in a `tokenizer_of`, and by what, so that it splits at a regular expression."""
    return '"WhitespaceSplit"', f'"Split", "pattern": {{"Regex": "{pattern}"}}, "behavior": "Isolated", "invert": false'


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text of hostile tokens, and the record and weights of a run over it."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "tokenizer.json").write_text(tokenizer_of(HOSTILE))
    (folder / "text.txt").write_text(" ".join(HOSTILE))
    words = ["--file", "text.txt", "--tokenizer", "tokenizer.json", "--heads", "1", "--repeat", "1", "--all"]
    attempt(folder, "run", *words, "--save", "record", writes={"record"}, launch=Launch(WITH_TORCH))
    words = ["--file", "text.txt", "--repeat", "1", "--save-weights", WEIGHTS_NAME]
    attempt(folder, "run", *words, writes={WEIGHTS_NAME}, launch=Launch(WITH_TORCH))
    return folder


# ------------------------------------------------------------------------------------------------------- nothing in it


@commands
def test_an_empty_argument_is_a_usage_error(tmp_path: Path, command: str, form: tuple[str, ...]) -> None:
    attempt(tmp_path, command, "", code=2, form=form, says=["the text is empty", "the cat sat on the mat"])


@commands
@pytest.mark.parametrize(
    ("content", "why"),
    [(b"", "empty"), (b" \n\t \r\n", "white space"), ("?!… —\n«»".encode(), "punctuation")],
    ids=["empty", "white-space", "punctuation"],
)
def test_a_file_without_a_token_is_refused_with_the_reason(
    tmp_path: Path, command: str, content: bytes, why: str, form: tuple[str, ...]
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    attempt(tmp_path, command, "--file", "text.txt", code=1, form=form, says=[why])


# ------------------------------------------------------------------------------------------------------------ encodings


@commands
@pytest.mark.parametrize("offset", [0, 7, (1 << 20) - 1, (1 << 20) + 5])
def test_a_byte_that_is_not_utf8_is_named_with_its_offset(
    tmp_path: Path, command: str, offset: int, form: tuple[str, ...]
) -> None:
    (tmp_path / "text.txt").write_bytes((b"many words " * (1 << 17))[:offset] + b"\xff rest")
    says = ["text.txt", "UTF-8", r"\xff", f"offset {offset}", "--encoding", "--errors"]
    attempt(tmp_path, command, "--file", "text.txt", code=1, form=form, says=says)


def test_a_sequence_cut_by_the_end_is_named_where_it_begins(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"caf\xe2\x82")
    attempt(tmp_path, "vocab", "--file", "text.txt", code=1, says=[r"\xe2", "offset 3"])


def test_a_byte_order_mark_and_line_ends_do_not_change_the_tokens(tmp_path: Path) -> None:
    for name, content in {
        "bare": b"the cat\nsat",
        "bom": b"\xef\xbb\xbfthe cat\nsat",
        "crlf": b"the cat\r\nsat",
    }.items():
        (tmp_path / name).write_bytes(content)
    files = ["--file", "bare", "--file", "bom", "--file", "crlf"]
    done = attempt(
        tmp_path, "run", *files, "--tokenizer", "char", "--repeat", "1", form=["--json"], launch=Launch(WITH_TORCH)
    )
    bare, bom, crlf = json.loads(done.stdout)["sequences"]
    assert bare["tokens"] == list("the cat\nsat")
    assert bom == bare
    assert crlf == bare
    for tokenizer in ("word", "char", "byte"):
        counted = [
            attempt(tmp_path, "vocab", "--file", f, "--tokenizer", tokenizer).stdout for f in ("bare", "bom", "crlf")
        ]
        assert counted[1:] == counted[:1] * 2


@commands
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_named_and_the_option_that_reads_it(
    tmp_path: Path, command: str, encoding: str, form: tuple[str, ...]
) -> None:
    (tmp_path / "text.txt").write_bytes("the cat".encode(encoding))
    attempt(tmp_path, command, "--file", "text.txt", code=1, form=form, says=["text.txt", "UTF-16", "--encoding"])


def test_the_named_encoding_reads_utf16(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes("the cat".encode("utf-16"))
    done = attempt(tmp_path, "vocab", "--file", "text.txt", "--encoding", "utf-16", form=["--json"])
    assert done.tokens == ["cat", "the"]


# ----------------------------------------------------------------------------------------------- characters that do harm


@pytest.mark.parametrize("tokenizer", ["char", "byte", "word"])
def test_odd_line_breaks_take_one_line_and_show_as_escapes(tmp_path: Path, tokenizer: str) -> None:
    breaks = "\r\x0b\x0c\x1c\x1d\x85\u2028\u2029"
    (tmp_path / "text.txt").write_text("x".join(breaks) + "x\ny", newline="")
    words = ["vocab", "--file", "text.txt", "--tokenizer", tokenizer]
    table = attempt(tmp_path, *words).stdout.splitlines()
    tokens = attempt(tmp_path, *words, form=["--json"]).tokens
    assert len(table) == len(tokens) + 2
    for token, line in zip(tokens, table[2:], strict=True):
        label = {"\r": r"\r", "\n": r"\n"}.get(token, escaped(token))
        assert line.split()[1] == label


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a\r b\x0b c\x85 d\u2028 e\n\nf\x0c g", newline="")
    words = ["--file", "text.txt", "--lines", "--repeat", "1"]
    done = attempt(tmp_path, "run", *words, form=["--json"], launch=Launch(WITH_TORCH))
    assert [s["tokens"] for s in json.loads(done.stdout)["sequences"]] == [["a", "b", "c", "d", "e"], ["f", "g"]]


@commands
def test_a_file_with_a_nul_looks_binary(tmp_path: Path, command: str, form: tuple[str, ...]) -> None:
    (tmp_path / "text.txt").write_bytes(b"text\0more")
    attempt(tmp_path, command, "--file", "text.txt", code=1, form=form, says=["text.txt", "NUL", "looks binary"])


def test_a_table_shows_every_hostile_token_as_an_escape(hostile: Path) -> None:
    words = ["vocab", "--file", "text.txt", "--tokenizer", "tokenizer.json"]
    lines = attempt(hostile, *words, "--all").stdout.splitlines()
    shown = {line.split()[1].removeprefix("◌") for line in lines[2:]}
    assert shown == {escaped(token) for token in HOSTILE}
    assert len(shown) == len(HOSTILE)
    assert sorted(attempt(hostile, *words, form=["--json"]).tokens) == sorted(HOSTILE)


@pytest.mark.parametrize("view", ["matrix", "heatmap", "top", "none"])
def test_every_view_shows_every_hostile_token_as_an_escape(hostile: Path, view: str) -> None:
    done = attempt(
        hostile, "show", "record", "--view", view, "--all", "--tokens", launch=Launch(env={"COLUMNS": "500"})
    )
    for token in HOSTILE:
        assert escaped(token) in done.stdout


def test_colour_adds_no_other_escape_than_colour(hostile: Path) -> None:
    for view in ("matrix", "heatmap"):
        done = attempt(hostile, "show", "record", "--view", view, "--color", "always", colour=True)
        assert "\x1b[" in done.stdout


def test_weights_with_a_hostile_name_and_vocabulary_show_as_escapes(hostile: Path) -> None:
    words = ["--file", "text.txt", "--weights", WEIGHTS_NAME, "--repeat", "1", "--tokens"]
    done = attempt(hostile, "run", *words, launch=Launch(WITH_TORCH))
    assert f"weights {escaped(WEIGHTS_NAME)}" in done.stdout
    assert escaped("\x9b31mred") in done.stdout


@forms
@pytest.mark.parametrize(
    "words",
    [["vocab", "--file"], ["trace", "a", "--weights"], ["show"]],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"\x1b]52;c;aGk=\x07[red].txt", r"\x1b]52;c;aGk=\x07[red].txt"),
        ("\u202etxt.exe".encode(), r"\u202etxt.exe"),
        (b"a\xff", r"a\xff"),
    ],
    ids=["control", "bidi", "no-utf8"],
)
def test_an_error_shows_a_hostile_name_as_an_escape(
    tmp_path: Path, words: list[str], name: bytes, shown: str, form: tuple[str, ...]
) -> None:
    done = attempt(tmp_path, *words, name, code=1, form=form)
    if form:
        assert done.error["path"] == name.decode(errors="backslashreplace")
    else:
        assert done.stderr == f"mha: error: {shown} does not exist\n"


@forms
def test_a_hostile_vocabulary_file_is_refused_in_escapes(tmp_path: Path, form: tuple[str, ...]) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"\x1b[2J\u202e": "one"}))
    attempt(tmp_path, "run", "a", "--vocab", "vocab.json", code=1, form=form, says=["vocab.json", "2J", "one"])


def test_tokens_that_look_like_markup_are_printed_literally(hostile: Path) -> None:
    for words in (
        ["vocab", "--file", "text.txt", "--tokenizer", "tokenizer.json", "--all"],
        ["show", "record", "--all", "--tokens"],
    ):
        printed = attempt(hostile, *words).stdout
        for token in MARKUP:
            assert token in printed


# -------------------------------------------------------------------------------------------------------------- widths


def test_the_columns_of_a_table_are_aligned_around_wide_characters(hostile: Path) -> None:
    (hostile / "wide.txt").write_text(" ".join([*WIDE, "cat", "a\u0301"]))
    table = attempt(hostile, "vocab", "--file", "wide.txt").stdout.splitlines()[1:]
    assert len(table) == 7
    assert len({cells(line) for line in table}) == 1


def test_the_columns_of_a_matrix_are_aligned_around_wide_characters(hostile: Path) -> None:
    done = attempt(hostile, "show", "record", "--all", "--verbose", launch=Launch(env={"COLUMNS": "500"}))
    rows = [line for line in done.stdout.splitlines() if " 1.00 " in line]
    wide = [row for row in rows if row.startswith(tuple(WIDE))]
    assert len(wide) >= len(WIDE)
    plain = next(row for row in rows if row.startswith("[mask]"))
    for row in wide:
        assert cells(row[: row.rindex(" 1.00 ")]) == cells(plain[: plain.rindex(" 1.00 ")])


# ----------------------------------------------------------------------------------------------------------------- csv


def test_no_cell_of_a_csv_begins_a_formula_and_every_token_comes_back(hostile: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(attempt(hostile, "show", "record", "--csv").stdout)))
    assert len(rows) == len(HOSTILE) ** 2
    cells = [row["key_token"] for row in rows[: len(HOSTILE)]]
    assert [json.loads(cell) if cell.startswith('"') else cell for cell in cells] == HOSTILE
    assert not [cell for row in rows for cell in row.values() if cell[:1] in "=+-@\t\r"]


# ------------------------------------------------------------------------------------------------------------- arguments

LOCALES = pytest.mark.parametrize(
    "env",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"LC_ALL": "C.UTF-8"},
        {"LC_ALL": "en_US.UTF-8"},
    ],
    ids=["C", "C-strict", "C.UTF-8", "UTF-8"],
)


@forms
@LOCALES
def test_an_argument_that_is_not_utf8_is_shown_and_can_be_read_anyway(
    tmp_path: Path, env: dict[str, str], form: tuple[str, ...]
) -> None:
    says = [r"\xff", "offset 2", "--errors"]
    attempt(tmp_path, "run", b"ab\xff", code=1, form=form, says=says, launch=Launch(env=env))
    words = ["vocab", b"\xff", "--errors", "escape", "--tokenizer", "char"]
    assert attempt(tmp_path, *words, form=["--json"], launch=Launch(env=env)).tokens == sorted(set(r"\xff"))


@commands
@pytest.mark.parametrize("text", ["-5", "-5 degrees outside", "-5,3"])
def test_a_text_that_begins_with_a_minus_gets_the_hint_to_put_dashes(
    tmp_path: Path, command: str, text: str, form: tuple[str, ...]
) -> None:
    attempt(tmp_path, command, text, code=2, form=form, says=["-5", "hint: " * (not form) + "put -- before"])


def test_dashes_let_a_text_begin_with_a_minus(tmp_path: Path) -> None:
    assert attempt(tmp_path, "vocab", "--", "-5 degrees", form=["--json"]).tokens == ["5", "degrees"]


# ---------------------------------------------------------------------------------------------------------------- sizes

UNDER_A_LIMIT = limited_memory(600 << 20)


@forms
@pytest.mark.parametrize("command", ["run"])
def test_a_file_of_100_mb_is_refused_with_the_limit_in_flat_memory(
    tmp_path: Path, command: str, form: tuple[str, ...]
) -> None:
    (tmp_path / "text.txt").write_bytes(b"many words " * 9_100_000)
    says = ["text.txt", "64.0 MiB", "--max-bytes"]
    attempt(tmp_path, command, "--file", "text.txt", code=1, form=form, says=says, launch=Launch(shell=UNDER_A_LIMIT))


@pytest.mark.parametrize(("command", "form"), [("run", ()), ("vocab", ("--json",))], ids=["run-plain", "vocab-json"])
def test_endless_stdin_is_refused_with_the_limit_in_flat_memory(
    tmp_path: Path, command: str, form: tuple[str, ...]
) -> None:
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        launch = Launch(shell=UNDER_A_LIMIT, stdin=endless.stdout)
        words = ["--max-bytes", "32M"] if command == "vocab" else []  # counting takes its time, reading does not
        says = ["stdin", "MiB", "--max-bytes"]
        attempt(tmp_path, command, "-", *words, code=1, form=form, says=says, launch=launch)
        endless.kill()


@commands
def test_a_word_of_a_million_letters_is_refused_with_the_limit(
    tmp_path: Path, command: str, form: tuple[str, ...]
) -> None:
    (tmp_path / "text.txt").write_text("a " + "b" * 1_000_000)
    launch = Launch(shell=UNDER_A_LIMIT)
    attempt(tmp_path, command, "--file", "text.txt", code=1, form=form, says=["1000", "--max-token-len"], launch=launch)


@forms
def test_too_many_tokens_are_refused_with_the_limit(tmp_path: Path, form: tuple[str, ...]) -> None:
    (tmp_path / "text.txt").write_text("a" * 1_000_000)
    words = ["--file", "text.txt", "--tokenizer", "char"]
    attempt(tmp_path, "run", *words, code=1, form=form, says=["32768", "--max-tokens"])


# ---------------------------------------------------------------------------------------------------------------- stdin


@commands
def test_a_closed_stdin_is_named(tmp_path: Path, command: str, form: tuple[str, ...]) -> None:
    attempt(tmp_path, command, "-", code=1, form=form, says=["stdin", "closed"], launch=Launch(shell=f"{SHELL} <&-"))


@commands
@pytest.mark.parametrize("words", [["-", "-"], ["-", "--file", "-"], ["--file", "-", "--file", "-"]], ids=" ".join)
def test_stdin_can_be_named_once(tmp_path: Path, command: str, words: list[str], form: tuple[str, ...]) -> None:
    attempt(tmp_path, command, *words, code=2, form=form, says=["stdin", "twice"])


@commands
def test_no_text_on_a_terminal_is_a_usage_error_and_no_wait(
    tmp_path: Path, command: str, form: tuple[str, ...]
) -> None:
    ours, theirs = pty.openpty()
    attempt(tmp_path, command, code=2, form=form, says=["no text is given", "--file"], launch=Launch(stdin=theirs))
    os.close(ours)
    os.close(theirs)


# ---------------------------------------------------------------------------------------------------------------- paths

READERS = pytest.mark.parametrize(
    ("words", "form"),
    [
        (["run", "--file"], ()),
        (["run", "a", "--weights"], ("--json",)),
        (["trace", "a", "--vocab"], ()),
        (["vocab", "a", "--tokenizer"], ("--json",)),
        (["vocab", "--file"], ("--json",)),
        (["show"], ()),
    ],
    ids=["run-file", "run-weights-json", "trace-vocab", "vocab-tokenizer-json", "vocab-file-json", "show"],
)


@READERS
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("folder", "is a directory"),
        ("missing.x", "does not exist"),
        ("broken.x", "is a broken link to nowhere"),
        ("loop.x", "loop of symbolic links"),
        ("fifo.x", "FIFO"),
        ("text/below.x", "below something that is not a folder"),
        ("n" * 300 + ".x", "too long a name"),
    ],
    ids=["directory", "missing", "broken-link", "link-loop", "fifo", "below-a-file", "long-name"],
)
def test_a_path_that_cannot_be_read_is_named_with_the_reason(
    tmp_path: Path, words: list[str], name: str, why: str, form: tuple[str, ...]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("a")
    (tmp_path / "broken.x").symlink_to("nowhere")
    (tmp_path / "loop.x").symlink_to("loop.x")
    os.mkfifo(tmp_path / "fifo.x")
    done = attempt(tmp_path, *words, name, code=1, form=form, says=[name, why])
    if form:
        assert done.error["path"] == name


@READERS
def test_a_file_without_permission_is_named(tmp_path: Path, words: list[str], form: tuple[str, ...]) -> None:
    (tmp_path / "secret.x").write_text("a")
    (tmp_path / "secret.x").chmod(0)
    launch = Launch(shell=WITHOUT_ROOT_RIGHTS if is_root() else SHELL)
    attempt(tmp_path, *words, "secret.x", code=1, form=form, says=["secret.x", "permission denied"], launch=launch)


# ------------------------------------------------------------------------------------------------------- tokenizer files


@pytest.mark.parametrize(("command", "form"), [("run", ()), ("vocab", ("--json",))], ids=["run-plain", "vocab-json"])
@pytest.mark.parametrize(
    "content",
    [
        pytest.param(tokenizer_of([], type="BPE", vocab={"a": 0}, merges=[["a", "zz"]]), id="unknown-merge"),
        pytest.param(tokenizer_of([], type="BPE", vocab={"a": 0}, merges=["a"]), id="half-merge"),
        pytest.param(tokenizer_of([], vocab={"a": 4_000_000_000}), id="id-4e9"),
        pytest.param(tokenizer_of([], vocab={"a": 10**30}), id="id-1e30"),
        pytest.param(tokenizer_of([], vocab={"a": -1}), id="id-negative"),
        pytest.param(tokenizer_of([], vocab={}), id="empty"),
        pytest.param(tokenizer_of(["a"]).replace(*splitting_at("(")), id="bad-regex"),
        pytest.param("{", id="cut"),
        pytest.param("[]", id="list"),
        pytest.param("[" * 100_000, id="deep"),
        pytest.param("\x80", id="no-utf8"),
    ],
)
def test_a_broken_tokenizer_file_is_refused(tmp_path: Path, command: str, content: str, form: tuple[str, ...]) -> None:
    (tmp_path / "t.json").write_text(content, encoding="latin-1")
    attempt(tmp_path, command, "a b", "--tokenizer", "t.json", code=1, form=form, says=["t.json"])


@commands
def test_a_regex_that_backtracks_without_end_is_refused_in_time(
    tmp_path: Path, command: str, form: tuple[str, ...]
) -> None:
    (tmp_path / "t.json").write_text(tokenizer_of(["a"]).replace(*splitting_at("^(a+)+$")))
    attempt(tmp_path, command, "a" * 200 + "b", "--tokenizer", "t.json", code=1, form=form, says=["t.json", "egex"])


def test_nothing_here_leaves_a_file_behind(hostile: Path) -> None:
    assert set(state_of(hostile)) <= {"tokenizer.json", "text.txt", "wide.txt", "record", WEIGHTS_NAME}
