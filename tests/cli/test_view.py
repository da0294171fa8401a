"""`mha view` as an installed command on a real terminal, and what it refuses."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("textual")
pytest.importorskip("pyte")

import pyte
from support.processes import MHA, NO_TORCH, Launch, attempt, shell_code, start
from support.records import make_record

from mhacli.cli.commands import view
from mhacli.errors import MhaError
from mhacli.results.record import storage

WAIT_S = 120
COLOUR = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "cat.safetensors"
    make_record(("the", "cat", "sat"), causal=True).save(str(path))
    return path


@dataclass(frozen=True)
class Session:
    """How a session on a terminal ended: exit code, all that was written, and whether the terminal is as it was before."""

    code: int
    written: bytes
    is_restored: bool


class Terminal:
    """A terminal of 80 × 24 with an `mha` on it, that tells what it shows."""

    def __init__(self, folder: Path, words: Sequence[str], env: Mapping[str, str], modules: Mapping[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._modes = termios.tcgetattr(theirs)
        launch = Launch(modules=modules, env={"COLUMNS": None, "LINES": None, **env})
        self.process = start(folder, ["view", *words], launch, stdin=theirs, stdout=theirs, stderr=theirs)
        self._theirs = theirs
        self.written = b""
        self._screen = pyte.Screen(80, 24)
        self._stream = pyte.ByteStream(self._screen)

    def until(self, words: str) -> str:
        """The screen as soon as it has these words."""
        begun = time.monotonic()
        while time.monotonic() - begun < WAIT_S:
            self._read(0.1)
            shown = "\n".join(line.rstrip() for line in self._screen.display)
            if words in shown:
                return shown
        self.process.kill()
        self.process.wait()
        raise AssertionError(f"{words!r} did not come up in:\n{shown}")

    def press(self, keys: str | bytes) -> None:
        os.write(self._ours, keys if isinstance(keys, bytes) else keys.encode())

    def end(self) -> Session:
        """Waits for the process."""
        begun = time.monotonic()
        while self.process.poll() is None and time.monotonic() - begun < WAIT_S:
            self._read(0.05)
        self.process.kill()
        while self._read(0.1):
            pass
        modes = termios.tcgetattr(self._theirs)
        os.close(self._theirs)
        os.close(self._ours)
        return Session(shell_code(self.process.wait()), self.written, modes[:4] == self._modes[:4])

    def hang_up(self) -> int:
        """Takes the terminal away, and gives the exit code."""
        os.close(self._theirs)
        os.close(self._ours)
        try:
            return shell_code(self.process.wait(WAIT_S))
        finally:
            self.process.kill()

    def _read(self, seconds: float) -> bool:
        """Takes what was written meanwhile; False where that is nothing."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        piece = os.read(self._ours, 65536)
        self.written += piece
        # pyte takes the private CSI sequences of keyboards and mouse modes for text
        self._stream.feed(re.sub(rb"\x1b\[[<>=][0-9;]*[a-zA-Z]|\x1b\[\?[0-9;]*\$p", b"", piece))
        return bool(piece)


def require_clean(session: Session, code: int = 0) -> None:
    assert session.code == code
    assert session.is_restored
    assert b"Traceback" not in session.written
    assert session.written.count(b"\x1b[?1049h") == session.written.count(b"\x1b[?1049l") == 1


def test_a_record_is_looked_at_without_torch_and_left_with_q(saved: Path, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, [str(saved)], COLOUR, NO_TORCH)
    assert "d_model 6 · 2 heads × d_head 3  3 tokens  the cat sat" in terminal.until("2 heads ─")
    terminal.press("\r")
    assert "query 2 sat  key" in terminal.until("row sum 1.0000")
    terminal.press("\x1b[<64;10;6M")  # the wheel, upward, over the matrix
    terminal.until("query 0 the  key")
    lines = terminal.until("from query 0 the").splitlines()
    below = next(n for n, line in enumerate(lines, 1) if "from query 0" in line) + 1
    terminal.press(f"\x1b[<0;4;{below}M\x1b[<0;4;{below}m")  # a click on the first of the keys
    terminal.until("query 0 the  key 0 the  weight 1.0000")
    terminal.press("q")
    terminal.until("Enter open")
    terminal.press("q")
    session = terminal.end()
    require_clean(session)
    assert b"38;2;" in session.written, "colours of the ramp"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", [("the", "cat", "sat"), ("a", *"bcdefgh")], ids=len)
def test_the_first_screen_is_whole_but_for_its_small_pictures(text: tuple[str, ...], tmp_path: Path) -> None:
    make_record(text, causal=True).save(str(tmp_path / "r.safetensors"))
    terminal = Terminal(tmp_path, ["r.safetensors"], {**COLOUR, "NO_COLOR": "1"}, NO_TORCH)
    first, whole = (terminal.until(words).split("\n") for words in ("? help", "1.00"))
    assert "s scale" in first[-1]
    for before, after in zip(first, whole, strict=True):
        assert before == after or (not before and not re.search("[a-z]", after)), "a line of pictures has been empty"
    terminal.press("q")
    require_clean(terminal.end())


def test_keys_in_one_piece_wait_for_the_screen_that_they_open(saved: Path, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, [str(saved)], COLOUR, NO_TORCH)
    terminal.until("2 heads ─")
    terminal.press("\r\x1b[A\x1b[A")
    terminal.until("query 0 the  key ")
    terminal.press("q\r\x1b[A")
    terminal.until("query 1 cat")
    terminal.press("Q")
    require_clean(terminal.end())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "noise",
    [
        b"\xe9",
        b"caf\xe9\xff\xfe",
        bytes(range(128, 256)),
        b"\x1b[9999999999999u",
        b"\x1b[97;1;9999999999u",
        b"\xf0\x9f\x98",
    ],
    ids=["latin-1", "paste", "every byte", "no key", "no character", "part of a character"],
)
def test_bytes_that_are_no_keys_leave_the_viewer_as_it_is(saved: Path, tmp_path: Path, noise: bytes) -> None:
    terminal = Terminal(tmp_path, [str(saved)], COLOUR, NO_TORCH)
    terminal.until("2 heads ─")
    terminal.press(noise)
    time.sleep(0.3)  # so that it is read by itself
    terminal.press("\r")
    terminal.until("row sum 1.0000")
    terminal.press("Q")
    require_clean(terminal.end())


def test_enter_opens_a_head_also_before_the_terminal_is_taken_over(saved: Path, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, [str(saved)], COLOUR, NO_TORCH)
    terminal.press("\x1b[C\r")  # becomes a line feed on its way
    assert "head 1" in terminal.until("row sum 1.0000")
    terminal.press("Q")
    require_clean(terminal.end())


def test_numbers_without_meaning_end_the_viewer_with_the_reason(saved: Path, tmp_path: Path) -> None:
    record = storage.load(str(saved))
    pattern = np.full_like(record.arrays["pattern"], 1.5)
    replace(record, arrays={**record.arrays, "pattern": pattern}).save(str(tmp_path / "bad.safetensors"))
    session = Terminal(tmp_path, ["bad.safetensors"], COLOUR, NO_TORCH).end()
    require_clean(session, 1)
    assert b"mha: error: bad.safetensors: pattern must hold weights from 0 to 1" in session.written


def test_a_record_that_contradicts_itself_is_marked_and_ends_the_viewer_with_3(saved: Path, tmp_path: Path) -> None:
    record = storage.load(str(saved))
    halves = {**record.arrays, "pattern": record.arrays["pattern"] / 2}
    replace(record, arrays=halves).save(str(tmp_path / "halves.safetensors"))
    terminal = Terminal(tmp_path, ["halves.safetensors"], COLOUR, NO_TORCH)
    terminal.until("2 heads ─")
    terminal.press("\r")
    assert "the record contradicts itself: press i" in terminal.until("row sum")
    terminal.press("Q")
    session = terminal.end()
    require_clean(session, 3)
    assert "rows of pattern do not sum to 1, the worst to 0.5" in " ".join(session.written.decode().split())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("env", [{**COLOUR, "NO_COLOR": "1"}, {"TERM": "vt100"}], ids=["NO_COLOR", "vt100"])
def test_without_shades_signs_stand_in_for_them(saved: Path, tmp_path: Path, env: Mapping[str, str]) -> None:
    terminal = Terminal(tmp_path, [str(saved), "--head", "1"], env, NO_TORCH)
    shown = terminal.until("row sum 1.0000")
    assert "scale linear, 0 …" in shown
    assert "·░▒▓█" in shown
    terminal.press("Q")
    session = terminal.end()
    require_clean(session)
    assert not re.search(rb"[34]8;[25];", session.written)
    if "NO_COLOR" in env:
        assert not re.search(rb"\x1b\[(?:[0-9;]*;)?[34][0-7](?:;[0-9]+)*m", session.written)


def test_a_signal_gives_the_terminal_back(saved: Path, tmp_path: Path) -> None:
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        terminal = Terminal(tmp_path, [str(saved)], COLOUR, NO_TORCH)
        terminal.until("2 heads ─")
        terminal.process.send_signal(number)
        require_clean(terminal.end(), code)


def test_a_terminal_that_goes_away_takes_the_viewer_with_it(saved: Path, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, [str(saved)], COLOUR, NO_TORCH)
    terminal.until("2 heads ─")
    assert terminal.hang_up() == 129


def test_a_text_is_computed_and_looked_at(tmp_path: Path) -> None:
    words = ["the cat sat on", "--heads", "2", "--head", "1", "--save", "cat.safetensors"]
    terminal = Terminal(tmp_path, words, COLOUR, {})
    assert "head 1" in terminal.until("row sum 1.0000")
    terminal.press("Q")
    require_clean(terminal.end())
    assert (tmp_path / "cat.safetensors").is_file()


# ------------------------------------------------------------------------------------------------------------- what is refused


def test_no_terminal_is_told_before_anything_else(saved: Path, tmp_path: Path) -> None:
    says = ("mha view needs a terminal: ", "hint: mha show RECORD prints a record")
    attempt(tmp_path, "view", str(saved), code=1, says=says)
    attempt(tmp_path, "view", "no such text matters", code=1, says=says[:1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("words", "env", "code", "message"),
    [
        ([], {"TERM": "dumb"}, 1, "mha view needs a terminal: TERM is dumb"),
        (["--heads", "3"], COLOUR, 2, "--heads does not work with a record, which is already computed"),
        (["--model", "."], COLOUR, 2, "--model does not work with a record"),
        (["--head", "7"], COLOUR, 2, "--head 7"),
        (["--layer", "3"], COLOUR, 2, "--layer 3"),
        (["--sequence", "2"], COLOUR, 2, "--sequence 2"),
        (["a text"], COLOUR, 2, "is a record, and mha view opens nothing else with it"),
    ],
    ids=str,
)
def test_what_cannot_be_looked_at_is_refused_without_touching_the_screen(
    saved: Path, tmp_path: Path, words: Sequence[str], env: Mapping[str, str], code: int, message: str
) -> None:
    terminal = Terminal(tmp_path, [str(saved), *words], env, NO_TORCH)
    session = terminal.end()
    assert session.code == code
    assert message in " ".join(session.written.decode().split())
    assert b"\x1b[?1049h" not in session.written


def test_a_file_that_is_no_record_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    session = Terminal(tmp_path, ["weights.safetensors"], COLOUR, NO_TORCH).end()
    assert session.code == 1
    assert b"weights.safetensors is not a record" in session.written


@pytest.mark.parametrize("word", ["poem.txt", "."])
def test_what_is_there_and_no_record_is_not_taken_for_a_text(word: str, tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text("the cat sat\n")
    session = Terminal(tmp_path, [word], COLOUR, NO_TORCH).end()
    assert (session.code, b"\x1b[?1049h" in session.written) == (2, False)


def test_textual_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "find_spec", lambda name: None)
    with pytest.raises(MhaError) as caught:
        view._require_textual()
    assert caught.value.message == "mha view needs textual, which is not installed"
    assert caught.value.hint == 'pip install "textual<9,>=8" installs it'


def test_a_word_is_a_record_by_its_ending_or_its_header_and_never_after_two_dashes(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "cat.rec"
    other.write_bytes(saved.read_bytes())
    (tmp_path / "story.txt").write_text("a text about mha.record/")
    assert view._is_record(str(saved))
    assert view._is_record(str(other))
    assert view._is_record("missing.safetensors")
    assert not view._is_record("the cat sat")
    assert not view._is_record(str(tmp_path))
    from mhacli.cli.options import SourceOptions

    monkeypatch.setattr(sys, "argv", ["mha", "view", "--", str(saved)])
    assert view._record_path(SourceOptions(typed=[str(saved)])) is None
    monkeypatch.setattr(sys, "argv", ["mha", "view", str(saved)])
    assert view._record_path(SourceOptions(typed=[str(saved)])) == str(saved)


def test_help_needs_no_terminal() -> None:
    done = subprocess.run([MHA, "view", "--help"], capture_output=True, text=True, check=True)
    assert "Explore a text, a checkpoint or a saved record" in " ".join(done.stdout.split())
