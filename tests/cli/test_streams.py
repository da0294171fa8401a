import io
import os
import sys
from types import SimpleNamespace

import pytest
from rich.table import Table
from rich.text import Text

from mhacli.cli import streams
from mhacli.cli.streams import (
    draw,
    note,
    require_stdout,
    screen,
    show_activity,
    stderr_lines,
    wants_colour,
    write,
    write_pieces,
)
from mhacli.errors import MhaError
from mhacli.render.base.options import Screen


class Stream(io.StringIO):
    def __init__(self, terminal=False, encoding="utf-8"):
        super().__init__()
        self._terminal, self._encoding = terminal, encoding

    @property
    def encoding(self):
        return self._encoding

    def isatty(self):
        return self._terminal


@pytest.fixture
def environment(monkeypatch):
    """Sets exactly these variables of those that colour and width depend on."""

    def given(**variables):
        for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM", "COLUMNS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    given()
    return given


@pytest.mark.parametrize(
    ("choice", "terminal", "variables", "coloured"),
    [
        ("always", False, {"NO_COLOR": "1", "TERM": "dumb"}, True),
        ("never", True, {"FORCE_COLOR": "1", "TERM": "xterm"}, False),
        ("auto", True, {"TERM": "xterm"}, True),
        ("auto", True, {"TERM": "dumb"}, False),
        ("auto", True, {}, False),
        ("auto", False, {"TERM": "xterm"}, False),
        ("auto", False, {"TERM": "xterm", "FORCE_COLOR": "1"}, True),
        ("auto", False, {"FORCE_COLOR": ""}, False),
        ("auto", True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        ("auto", True, {"TERM": "xterm", "NO_COLOR": ""}, True),
        ("auto", False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colour_follows_one_rule(environment, choice, terminal, variables, coloured):
    environment(**variables)
    assert wants_colour(choice, Stream(terminal)) is coloured


@pytest.mark.parametrize(
    ("columns", "width"),
    [("100", 100), ("1", 20), ("19", 20), ("99999", 500), ("0", 80), ("-5", 80), ("wide", 80), ("", 80), (None, 80)],
)
def test_the_width_is_what_columns_says_within_reason(environment, monkeypatch, columns, width):
    environment(**({} if columns is None else {"COLUMNS": columns}))
    monkeypatch.setattr(sys, "stdout", Stream())
    assert screen("never") == Screen(width, False)


def test_the_width_is_that_of_the_terminal_where_nothing_is_said(environment, monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: 1, isatty=lambda: True))
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((123, 9)))
    assert screen("always") == Screen(123, True)
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((0, 0)))
    assert screen("never").width == 80


def drawn_on(monkeypatch, renderable, *, colour=False, width=30, encoding="utf-8"):
    stream = Stream(encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    draw(renderable, Screen(width, colour))
    return stream.getvalue()


def test_a_view_is_drawn_plain_and_without_trailing_blanks(monkeypatch, environment):
    table = Table(box=None)
    table.add_column("wide column", min_width=20)
    table.add_row(Text("[bold]x :smile: 12", style="red"))
    assert drawn_on(monkeypatch, table) == " wide column\n [bold]x :smile: 12\n"


def test_a_long_view_is_written_while_it_is_made(monkeypatch, environment):
    written = []

    class Long:
        def __rich_console__(self, console, options):
            for number in range(2000):
                yield Text(str(number))
                written.append(len(sys.stdout.getvalue().splitlines()))

    assert drawn_on(monkeypatch, Long()).splitlines() == [str(number) for number in range(2000)]
    assert written[0] == 0
    assert written[1000] > 500


def test_colour_is_drawn_where_it_is_wanted(monkeypatch, environment):
    environment(COLORTERM="truecolor", TERM="xterm")
    assert drawn_on(monkeypatch, Text("x", style="rgb(1,2,3)"), colour=True) == "\x1b[38;2;1;2;3mx\x1b[0m\n"


@pytest.mark.parametrize(
    ("variables", "system"),
    [
        ({"COLORTERM": "truecolor"}, "truecolor"),
        ({"COLORTERM": " 24BIT "}, "truecolor"),
        ({"TERM": "xterm-256color"}, "256"),
        ({"TERM": "xterm"}, "standard"),
        ({}, "256"),
    ],
)
def test_the_number_of_colours_is_what_the_terminal_says(environment, variables, system):
    environment(**variables)
    assert streams._colour_system() == system


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1", "cp1252"])
def test_signs_of_ours_have_stand_ins_where_the_encoding_lacks_them(monkeypatch, encoding):
    ours = "·×–−…⋮→Σ√─ᵀµ‹›␣◌∞✓✗ ▁▂▃▄▅▆▇█ ░▒▓"
    text = drawn_on(monkeypatch, Text(ours), width=80, encoding=encoding)
    assert text.isascii()
    assert len(text.rstrip("\n")) == len(ours)


def test_the_ramp_keeps_five_different_signs_in_plain_ascii(monkeypatch):
    plain = drawn_on(monkeypatch, Text("·░▒▓█"), encoding="ascii").strip()
    assert len(set(plain)) == 5
    assert " " not in plain


def test_utf8_keeps_every_sign(monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream := Stream(encoding="UTF-8"))
    write("Σ ‹pad› ·")
    assert stream.getvalue() == "Σ ‹pad› ·"


def test_data_is_written_as_it_is(monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream := Stream(encoding="ascii"))
    write_pieces(["{", '"a": 1', "}\n"])
    assert stream.getvalue() == '{"a": 1}\n'


def test_a_full_disk_is_told(monkeypatch):
    def full(text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(streams, "forget_stdout", lambda: None)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=full, encoding="utf-8"))
    with pytest.raises(MhaError) as caught:
        write("x")
    assert caught.value.message == "stdout cannot be written: No space left on device"


def test_a_reader_that_has_gone_is_no_error_of_ours(monkeypatch):
    def gone(text):
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=gone, encoding="utf-8"))
    with pytest.raises(BrokenPipeError):
        write("x")


def test_a_note_is_one_harmless_line_on_stderr(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := Stream())
    note("two\nlines \x1b[31m")
    assert stream.getvalue() == "mha: two\\nlines \\x1b[31m\n"


@pytest.mark.parametrize(
    ("message", "lines"),
    [
        ("mha: short enough", ["mha: short enough"]),
        (
            "mha: error: a message that is longer than a line, but has blanks",
            ["mha: error: a message that is longer", "than a line, but has blanks"],
        ),
        (
            "mha: /a/path/without/any/blank/that/is/too/long/for/it",
            ["mha: /a/path/without/any/blank/that/is/too/long/for/it"],
        ),
        (
            "mha: error: /a/path/that/fits/on/a/line/alone is missing",
            ["mha: error: /a/path/that/fits/on/a/line/alone", "is missing"],
        ),
        (
            'hint: try this one: mha run "the cat sat on the mat" --heads 4 --causal',
            ["hint: try this one:", 'mha run "the cat sat on the mat" --heads 4 --causal'],
        ),
        ("hint: one of mha show R or mha view R may be it", ["hint: one of mha show R or", "mha view R may be it"]),
    ],
)
def test_a_terminals_messages_break_between_words_and_never_in_a_command(message, lines, monkeypatch):
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(fileno=lambda: 2))
    monkeypatch.setattr(os, "get_terminal_size", lambda stream: os.terminal_size((40, 24)))
    assert stderr_lines(message).split("\n") == lines


def test_the_name_of_a_command_in_an_error_is_a_word_like_others(monkeypatch):
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(fileno=lambda: 2))
    monkeypatch.setattr(os, "get_terminal_size", lambda stream: os.terminal_size((40, 24)))
    message = "mha: error: mha decode needs attention that sees no later token"
    lines = ["mha: error: mha decode needs attention", "that sees no later token"]
    assert stderr_lines(message, has_commands=False).split("\n") == lines


def test_messages_that_go_to_no_terminal_are_not_broken(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Stream())
    message = "mha: " + "words " * 100
    assert stderr_lines(message) == message


@pytest.mark.parametrize("stream", [Stream(), None])
def test_nothing_is_said_meanwhile_where_there_is_no_terminal(monkeypatch, stream):
    monkeypatch.setattr(streams, "_PATIENCE_S", 0)
    monkeypatch.setattr(sys, "stderr", stream)
    with show_activity("computing"):
        pass
    assert stream is None or stream.getvalue() == ""


def test_what_takes_long_is_said_on_a_terminal_and_taken_back(monkeypatch, environment):
    environment(TERM="xterm")
    monkeypatch.setattr(streams, "_PATIENCE_S", 0)
    monkeypatch.setattr(sys, "stderr", stream := Stream(terminal=True))
    with show_activity("computing"):
        while "computing …" not in stream.getvalue():
            pass
    assert stream.getvalue() == "computing …\r\x1b[K"


def test_what_is_quick_is_not_said(monkeypatch, environment):
    environment(TERM="xterm")
    monkeypatch.setattr(streams, "_PATIENCE_S", 60)
    monkeypatch.setattr(sys, "stderr", stream := Stream(terminal=True))
    with show_activity("computing"):
        pass
    assert stream.getvalue() == ""


def test_a_closed_stdout_is_told_before_any_work(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(MhaError) as caught:
        require_stdout()
    assert caught.value.message == "stdout is closed, so nothing can be printed"


def test_characters_that_an_encoding_lacks_are_escaped_not_fatal(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(sys, "stderr", None)
    require_stdout()
    sys.stdout.write("漢")
    sys.stdout.flush()
    assert raw.getvalue() == b"\\u6f22"
