"""Characters that a terminal, a page or a spreadsheet would obey or hide: every view shows them as
text, and keeps them apart.
"""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from support import checkpoints
from support.html import Html
from support.mha import NO_TORCH, Ended, obeyed_or_hidden, run

Mha = Callable[..., Ended]

ESCAPES = [
    "\x1b]52;c;aGk=\x07",
    "\x1b[2J",
    "\x1b]8;;http://e\x1b\\here\x1b]8;;\x1b\\",
    "\x9b31mred",
    "\x90q\x9c",
]
MARKUP = ["[mask]", "[/b]", "[/INST]", "[red]", "[link=http://e]", ":bug:"]
HIDDEN = [
    "ab",
    *(f"a{sign}b" for sign in "\u202e\u2066\u061c\u200b\ufeff\U000e0041\u2060\u00ad\u3164"),
]
WIDE = ["日本語", "漢字", "ｶﾅ", "한국"]
JOINED = ["👨\u200d👩\u200d👧", "🇩🇪", "\u0301x", "\\x1b[2J"]
FORMULAS = ['=HYPERLINK("http://e")', "+1", "-1", "@SUM(A1)"]
WEB = [
    "<script>alert(1)</script>",
    "</script><!--",
    '"><img/src=x/onerror=alert(1)>',
    "'onmouseover='alert(1)",
    "&lt;b&gt;",
    "]]>",
    "</title></svg><style>*{display:none}</style>",
    "javascript:alert(1)",
    "{{7*7}}",
]
HOSTILE = [*ESCAPES, *MARKUP, *HIDDEN, *WIDE, *JOINED, *FORMULAS, *WEB]
NAME = "w\x1b[2J\u202e[red].safetensors"
BARE = ["--heads", "1", "--d-model", "4", "--repeat", "1"]


def escaped(token: str) -> str:
    """What a reader must see of a token: what is obeyed or hidden as an escape, a backslash
    doubled.
    """

    def shown(character: str) -> str:
        point = ord(character)
        if character == "\\":
            return "\\\\"
        if (
            not obeyed_or_hidden(character) and character != "\u3164"
        ):  # Hangul filler: a letter that draws nothing
            return character
        return (
            f"\\x{point:02x}"
            if point < 0x80
            else f"\\u{point:04x}"
            if point < 0x10000
            else f"\\U{point:08x}"
        )

    return "".join(map(shown, token))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text of hostile tokens, one of harmless tokens, and records of both."""
    place = tmp_path_factory.mktemp("hostile")
    harmless = [f"t{i}" for i in range(len(HOSTILE))]
    for name, tokens in (("hostile", HOSTILE), ("harmless", harmless)):
        (place / f"{name}.json").write_text(checkpoints.words_tokenizer(*tokens))
        (place / f"{name}.txt").write_text(" ".join(tokens))
        words = ["--file", f"{name}.txt", "--tokenizer", f"{name}.json", *BARE]
        run(place, "run", *words, "--save", f"{name}.record", "--view", "none")
        run(place, "heads", *words, "--save", f"{name}.heads")
    run(place, "run", "--file", "hostile.txt", *BARE, "--view", "none", "--save-weights", NAME)
    return place


def printed(folder: Path, *words: str, **choices: object) -> str:
    return run(folder, *words, env={"COLUMNS": "600"}, **choices).stdout  # type: ignore[arg-type]


def table_rows(shown: str) -> list[str]:
    """The rows of the table of `mha vocab`: an id, a token, its count and its bytes."""
    return [line for line in shown.splitlines() if re.fullmatch(r"\s*\d+ .* \d+ +\d+", line)]


OF_TEXT = ["--file", "hostile.txt", "--tokenizer", "hostile.json"]
VIEWS = {
    "vocab": ["vocab", *OF_TEXT, "--all"],
    "run": ["run", *OF_TEXT, *BARE, "--view", "top", "--all", "--tokens"],
    "decode": ["decode", *OF_TEXT, *BARE, "--all"],
    "heads": ["heads", *OF_TEXT, *BARE, "--tokens", "--all"],
    "matrix": ["show", "hostile.record", "--view", "matrix", "--all", "--verbose"],
    "heatmap": ["show", "hostile.record", "--view", "heatmap", "--all", "--tokens"],
    "top": ["show", "hostile.record", "--view", "top", "--all", "--tokens"],
    "record of heads": ["show", "hostile.heads", "--tokens", "--all"],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_shows_every_hostile_token_as_text(folder: Path, view: str) -> None:
    """That nothing obeyed or hidden is printed is required of every run."""
    shown = printed(folder, *VIEWS[view])
    assert [token for token in HOSTILE if escaped(token) not in shown] == []


def test_a_walk_shows_the_tokens_of_its_cell_as_text(folder: Path) -> None:
    shown = printed(folder, "trace", *OF_TEXT, *BARE, "--cell", "0,1,0")
    assert escaped(HOSTILE[0]) in shown
    assert escaped(HOSTILE[1]) in shown


def test_tokens_that_look_alike_differ_in_a_table(folder: Path) -> None:
    lines = table_rows(printed(folder, "vocab", *OF_TEXT, "--all"))
    shown = [line.split()[1].removeprefix("◌") for line in lines]
    assert sorted(shown) == sorted(map(escaped, HOSTILE))
    assert len(set(shown)) == len(HOSTILE)


@pytest.mark.parametrize("view", ["matrix", "heatmap", "top"])
def test_colour_adds_codes_of_colours_and_nothing_else(folder: Path, view: str) -> None:
    shown = printed(
        folder, "show", "hostile.record", "--view", view, "--color", "always", colour=True
    )
    assert "\x1b[" in shown


def test_json_gives_every_token_back(folder: Path) -> None:
    document = run(folder, "show", "hostile.record", "--json").json
    assert document["sequences"][0]["tokens"] == HOSTILE
    assert document["sequences"][0]["text"] == " ".join(HOSTILE)
    rows = run(folder, "vocab", *OF_TEXT, "--json").json["tokens"]
    assert sorted(row["token"] for row in rows) == sorted(HOSTILE)


def test_csv_gives_every_token_back_and_no_cell_begins_a_formula(folder: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run(folder, "show", "hostile.record", "--csv").stdout)))
    assert len(rows) == len(HOSTILE) ** 2
    tokens = [row["key_token"] for row in rows[: len(HOSTILE)]]
    assert [json.loads(cell) if cell.startswith('"') else cell for cell in tokens] == HOSTILE
    assert [
        cell
        for row in rows
        for cell in row.values()
        if cell[:1] in ("=", "+", "-", "@", "\t", "\r")
    ] == []


def test_a_csv_of_heads_begins_no_formula(folder: Path) -> None:
    condition = "tok[k] == '=HYPERLINK(1)'"
    shown = run(folder, "heads", *OF_TEXT, *BARE, "--where", condition, "--csv").stdout
    cells = [cell for row in csv.reader(io.StringIO(shown)) for cell in row]
    assert [cell for cell in cells if cell[:1] in ("=", "@", "\t", "\r")] == []


def strings_of(value: object) -> list[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in inner for text in strings_of(item)]


@pytest.mark.parametrize("kind", ["record", "heads"])
def test_a_page_holds_hostile_tokens_as_text_and_no_element_of_theirs(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    pages = {}
    for name in ("hostile", "harmless"):
        run(folder, "show", f"{name}.{kind}", "--html", tmp_path / f"{name}.html")
        pages[name] = Html((tmp_path / f"{name}.html").read_text())
    hostile, harmless = pages["hostile"], pages["harmless"]
    assert len(hostile.scripts) == len(harmless.scripts)
    assert hostile.tags <= harmless.tags
    attributes = [
        {(tag, name) for tag, names in page.elements for name in names}
        for page in (hostile, harmless)
    ]
    assert attributes[0] <= attributes[1]
    held = [value for _, names in hostile.elements for value in names.values()]
    words = "\n".join([hostile.text, *hostile.scripts, *held, *strings_of(hostile.data)])
    assert [token for token in HOSTILE if token not in words and escaped(token) not in words] == []


def test_hostile_records_are_compared_without_harm(folder: Path) -> None:
    shown = printed(folder, "diff", "hostile.record", "harmless.record", "--all", code=(0, 3))
    assert escaped(ESCAPES[1]) in shown
    document = run(folder, "diff", "hostile.record", "harmless.record", "--json", code=(0, 3)).json
    assert document["schema"] == "mha.diff/1"


def test_a_condition_with_hostile_words_is_shown_as_text(folder: Path) -> None:
    shown = printed(folder, "heads", *OF_TEXT, *BARE, "--where", "tok[k] == '\x1b[2J\u202e'")
    assert "\\x1b[2J\\u202e" in shown


def test_weights_with_a_hostile_name_and_vocabulary_show_as_text(folder: Path) -> None:
    shown = printed(
        folder, "run", "--file", "hostile.txt", "--weights", NAME, "--repeat", "1", "--tokens"
    )
    assert escaped(NAME) in shown
    assert escaped("\x9b31mred") in shown
    assert escaped(NAME) in printed(folder, "weights", "info", NAME)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"\x1b]52;c;aGk=\x07[red].txt", "\\x1b]52;c;aGk=\\x07[red].txt"),
        ("\u202etxt.exe".encode(), "\\u202etxt.exe"),
        (b"a\xff", "a\\xff"),
    ],
    ids=["control", "bidi", "no UTF-8"],
)
@pytest.mark.parametrize("words", [["vocab", "--file"], ["trace", "a", "--weights"], ["show"]])
def test_an_error_shows_a_hostile_file_name_as_text(
    mha: Mha, words: list[str], name: bytes, shown: str
) -> None:
    assert shown in mha(*words, name, code=1).said
    if words == ["show"]:
        assert mha(*words, name, "--json", code=1).error["path"] == name.decode(
            errors="backslashreplace"
        )


def test_a_file_saved_under_a_hostile_name_is_named_as_text(mha: Mha) -> None:
    ended = mha("vocab", "a b", "--save", "v\x1b[2J\u202e")
    assert "v\\x1b[2J\\u202e" in ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "\x1b[2J"],
        ["\x1b[2J\u202e"],
        ["run", "x", "--\x1b[2J"],
        ["run", "x", "--view", "\x1b[2J"],
    ],
)
def test_a_usage_error_shows_hostile_words_as_text(mha: Mha, words: list[str]) -> None:
    assert "\\x1b[2J" in mha(*words, code=2).said


def test_a_hostile_vocabulary_file_is_refused_in_text(mha: Mha, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"\x1b[2J\u202e": "one"}))
    ended = mha("run", "a", "--vocab", "vocab.json", "--json", code=1)
    assert ended.missing("vocab.json", "\\x1b[2J\\u202e") == []


@pytest.mark.parametrize("tokenizer", ["char", "byte", "word"])
def test_an_odd_line_break_takes_one_line_of_a_table(
    mha: Mha, tmp_path: Path, tokenizer: str
) -> None:
    (tmp_path / "text.txt").write_text(
        "x".join("\r\x0b\x0c\x1c\x1d\x85\u2028\u2029") + "x\ny", newline=""
    )
    words = ["vocab", "--file", "text.txt", "--tokenizer", tokenizer]
    tokens = [row["token"] for row in mha(*words, "--json").json["tokens"]]
    lines = table_rows(mha(*words, "--all").stdout)
    assert len(lines) == len(tokens)
    for token, line in zip(tokens, lines, strict=True):
        assert line.split()[1] == {"\r": "\\r", "\n": "\\n", "\t": "\\t"}.get(token, escaped(token))


def test_columns_are_aligned_around_wide_characters(mha: Mha, tmp_path: Path) -> None:
    def cells(line: str) -> int:
        return sum(
            0
            if unicodedata.category(c) in ("Mn", "Me")
            else 1 + (unicodedata.east_asian_width(c) in "WF")
            for c in line
        )

    (tmp_path / "wide.txt").write_text(" ".join([*WIDE, "cat", "a\u0301"]))
    rows = table_rows(mha("vocab", "--file", "wide.txt").stdout)
    assert len(rows) == 6
    assert len({cells(row) for row in rows}) == 1


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, id="C"),
        *(
            pytest.param({"LC_ALL": name}, id=name, marks=pytest.mark.real)
            for name in ("C.UTF-8", "en_US.UTF-8")
        ),
    ],
)
def test_a_byte_of_an_argument_that_is_no_utf8_is_shown_and_can_be_read_anyway(
    mha: Mha, env: dict[str, str]
) -> None:
    ended = mha("run", b"ab\xff", "--json", code=1, env=env, modules=NO_TORCH)
    assert ended.missing("\\xff", "2", "--errors") == []
    words = ["vocab", b"\xff", "--errors", "escape", "--tokenizer", "char", "--json"]
    assert [
        row["token"] for row in mha(*words, env=env, modules=NO_TORCH).json["tokens"]
    ] == sorted(set("\\xff"))


# Not a file of its own: it must hold an escape sequence and a sign that turns text around.
SOURCE = """
import torch
class Attention(torch.nn.Module):
    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.h = n_heads
        self.qkv = torch.nn.Linear(d_model, 3 * d_model)
        self.out = torch.nn.Linear(d_model, d_model)
    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (p.view(b, t, self.h, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        z = torch.softmax(q @ k.mT * (c // self.h) ** -0.5, dim=-2) @ v  # \x1b[2J \u202e [red]
        return self.out(z.transpose(1, 2).reshape(b, t, c))
"""


@pytest.mark.real
def test_hostile_lines_of_checked_code_are_shown_as_text(mha: Mha, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    shown = mha(
        "check", "mine.py:Attention", "--length", "8", code=3, env={"COLUMNS": "200"}
    ).stdout
    assert "\\x1b[2J \\u202e [red]" in shown
    (finding,) = mha("check", "mine.py:Attention", "--length", "8", "--json", code=3).json[
        "findings"
    ]
    assert "\x1b[2J" in finding["source"]


# ---------------------------------------------------------------------------------------- encodings


def test_a_byte_order_mark_and_line_ends_do_not_change_the_tokens(mha: Mha, tmp_path: Path) -> None:
    contents = {
        "bare": b"the cat\nsat",
        "bom": b"\xef\xbb\xbfthe cat\nsat",
        "crlf": b"the cat\r\nsat",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = [word for name in contents for word in ("--file", name)]
    bare, mark, ends = mha("run", *files, "--tokenizer", "char", *BARE, "--json").json["sequences"]
    assert bare["tokens"] == list("the cat\nsat")
    assert mark == ends == bare


def test_only_a_line_feed_ends_a_line(mha: Mha, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a\r b\x0b c\x85 d\u2028 e\n\nf\x0c g", newline="")
    record = mha("run", "--file", "text.txt", "--lines", *BARE, "--json").json
    assert [sequence["tokens"] for sequence in record["sequences"]] == [
        ["a", "b", "c", "d", "e"],
        ["f", "g"],
    ]


@pytest.mark.parametrize(
    ("content", "words", "tokens"),
    [
        ("née\r\nà".encode("utf-16"), ["--encoding", "utf-16"], list("née\nà")),
        ("née\r\nà".encode("latin-1"), ["--encoding", "latin-1"], list("née\nà")),
        (b"\xef\xbb\xbf" * 2 + b"a", [], ["\ufeff", "a"]),
        (b"a\xffb\xe2\x82", ["--errors", "replace"], ["a", "\ufffd", "b", "\ufffd"]),
        (b"a\xff", ["--errors", "escape"], list("a\\xff")),
        (b"a\r\nb\r\r\nc\rd\n\r", [], list("a\nb\r\nc\rd\n\r")),
    ],
    ids=["UTF-16", "Latin-1", "two marks", "replaced", "escaped", "line ends"],
)
def test_a_file_is_read_in_its_encoding(
    mha: Mha, tmp_path: Path, content: bytes, words: list[str], tokens: list[str]
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    record = mha("run", "--file", "text.txt", "--tokenizer", "char", *words, *BARE, "--json").json
    assert record["sequences"][0]["tokens"] == tokens


def test_dashes_let_a_text_begin_with_a_minus_and_take_a_name_as_a_text(
    mha: Mha, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    for words, tokens in (
        (["--", "-5 degrees"], ["5", "degrees"]),
        (["--", "notes"], ["notes"]),
        (["--text", "notes"], ["notes"]),
    ):
        assert [row["token"] for row in mha("vocab", "--json", *words).json["tokens"]] == tokens
