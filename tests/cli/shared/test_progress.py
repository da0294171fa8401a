"""How far a long run is: said on a terminal, taken back, never in between, and never elsewhere."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pyte
import pytest

from mhacli.cli.streams import progress
from mhacli.errors import MhaError

ROWS, COLUMNS = 6, 70


class Paper(io.StringIO):
    """A stream that says whether it is a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


class Terminal:
    """A pseudo-terminal as stderr: what was written to it, and the screen that it makes."""

    def __init__(self, columns: int) -> None:
        self.screen = pyte.Screen(columns, ROWS)
        self._stream = pyte.ByteStream(self.screen)
        self.bytes = b""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        os.set_blocking(self._ours, False)
        self.stderr = os.fdopen(theirs, "w", encoding="utf-8")

    def read(self) -> list[str]:
        """The lines of the screen that are not empty, once all that was written has arrived."""
        self.stderr.flush()
        termios.tcdrain(self.stderr.fileno())
        while True:
            try:
                piece = os.read(self._ours, 65536)
            except (BlockingIOError, OSError):
                break
            self.bytes += piece
            self._stream.feed(piece)
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def close(self) -> None:
        self.stderr.close()
        os.close(self._ours)


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int = COLUMNS) -> Iterator[Terminal]:
    shown = Terminal(columns)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", shown.stderr)
            patched.setenv("COLUMNS", str(columns))  # the descriptors that rich would ask are not this terminal
            yield shown
    finally:
        shown.close()


@pytest.mark.parametrize("stream", [Paper(terminal=False), None], ids=["a pipe", "closed"])
def test_nothing_is_said_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch, stream: Paper | None) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress() as report_progress:
        report_progress(0.5, "8 tokens: sdpa")
    assert stream is None or stream.getvalue() == ""


@pytest.mark.parametrize("name", ["dumb", None])
def test_nothing_is_said_on_a_terminal_that_cannot_take_it_back(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    if name is None:
        monkeypatch.delenv("TERM")
    else:
        monkeypatch.setenv("TERM", name)
    monkeypatch.setattr(sys, "stderr", stream := Paper(terminal=True))
    with progress() as report_progress:
        report_progress(0.5, "8 tokens: sdpa")
    assert stream.getvalue() == ""


def test_a_bar_a_share_and_the_words_are_drawn_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown:
        with progress() as report_progress:
            report_progress(0.25, "8 tokens: sdpa")
            (line,) = shown.read()
            assert line.endswith(" 8 tokens: sdpa")
            assert line.startswith("━" * 6 + "╺━"), "a quarter of 24"
            report_progress(1.0, "16 tokens: rounds")
            (line,) = shown.read()
            assert line.startswith("━" * 24 + " ")
            assert line.endswith(" 16 tokens: rounds")
        assert shown.read() == []
        assert (shown.screen.cursor.x, shown.screen.cursor.y) == (0, 0)
        assert shown.bytes.count(b"\x1b[?25l") == shown.bytes.count(b"\x1b[?25h") == 1


@pytest.mark.parametrize("fault", [MhaError("it broke"), KeyboardInterrupt()], ids=lambda fault: type(fault).__name__)
def test_the_bar_is_taken_back_whatever_ends_the_run(monkeypatch: pytest.MonkeyPatch, fault: BaseException) -> None:
    with terminal(monkeypatch) as shown:
        seen = []

        def broken() -> None:
            with progress() as report_progress:
                report_progress(0.5, "rounds")
                seen.extend(shown.read())
                raise fault

        with pytest.raises(type(fault)):
            broken()
        assert len(seen) == 1
        assert shown.read() == []
        assert shown.bytes.count(b"\x1b[?25l") == shown.bytes.count(b"\x1b[?25h") == 1


def test_between_two_words_nothing_is_drawn_and_no_thread_waits_to_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    with terminal(monkeypatch) as shown, progress() as report_progress:
        report_progress(0.5, "rounds")
        assert threading.active_count() == before
        shown.read()
        drawn = len(shown.bytes)
        threading.Event().wait(0.4)  # rich's own thread would draw four times
        shown.read()
        assert len(shown.bytes) == drawn


def test_words_from_outside_are_harmless_and_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown, progress() as report_progress:
        report_progress(0.5, "[red]a\x1b]52;c;eA==\x07\u202e :bug:")
        (line,) = shown.read()
        assert line.endswith("[red]a\\x1b]52;c;eA==\\x07\\u202e :bug:")
        assert b"\x1b]" not in shown.bytes


@pytest.mark.parametrize(
    ("variables", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False)], ids=["plain", "NO_COLOR"]
)
def test_the_bar_has_colour_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_coloured: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with terminal(monkeypatch) as shown:
        with progress() as report_progress:
            report_progress(0.5, "rounds")
            shown.read()
        assert bool(re.search(rb"\x1b\[[0-9;]*3[0-9]", shown.bytes)) is is_coloured


@pytest.mark.parametrize("columns", [20, 30, 40, 63, 64])
def test_on_a_narrow_terminal_it_is_taken_back_as_well(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    with terminal(monkeypatch, columns) as shown:
        with progress() as report_progress:
            report_progress(0.5, "16384 tokens: torch-mha-weights")
            assert shown.read()
            report_progress(0.6, "16384 tokens: rounds")
            assert "rounds" in shown.read()[-1]
        assert shown.read() == []
