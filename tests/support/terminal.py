"""`mha view` on a terminal: keys and clicks in, the characters of the screen out."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyte

from support.mha import PATIENCE_S, environment, forked

KEYS = {
    "up": "\x1b[A",
    "down": "\x1b[B",
    "right": "\x1b[C",
    "left": "\x1b[D",
    "home": "\x1b[H",
    "end": "\x1b[F",
    "pageup": "\x1b[5~",
    "pagedown": "\x1b[6~",
    "ctrl+home": "\x1b[1;5H",
    "ctrl+end": "\x1b[1;5F",
    "shift+pageup": "\x1b[5;2~",
    "shift+pagedown": "\x1b[6;2~",
    "enter": "\r",
    "escape": "\x1b",
    "tab": "\t",
    "shift+tab": "\x1b[Z",
    "backspace": "\x7f",
    "ctrl+c": "\x03",
    "space": " ",
}
"""What a terminal sends for keys that are no character."""
_CELL = re.compile(
    r"query (?P<query>\d+)(?:–\d+)? (?P<query_token>.*?)  key (?P<key>\d+)(?:–\d+)?"
    r" (?P<key_token>.*?)  weight "
    r"(?P<weight>masked|taken out|nan|\S+)(?: \((?:was )?(?P<exact>[\d.e-]+)\))?"
)
_FRAMES_QUERY, _FRAME = b"\x1b[?2026$p", re.compile(rb"\x1b\[\?2026([hl])")
"""A terminal that says that it draws whole frames is sent the begin and the end of each."""
_NOT_KNOWN_TO_PYTE = re.compile(rb"\x1b\[[<>=][0-9;]*[a-zA-Z]|\x1b\[\?[0-9;]*\$p")
COPIED = re.compile(rb"\x1b\]52;c;([A-Za-z0-9+/=]*)\x07")
"""A text that is sent to the clipboard, in base64."""


@dataclass(frozen=True)
class Cell:
    """What the line below the matrix says of the cell under the cursor. `weight` is a number, or
    the word in place of one.
    """

    query: int
    query_token: str
    key: int
    key_token: str
    weight: float | str

    @property
    def place(self) -> tuple[int, int]:
        """Query and key."""
        return self.query, self.key


@dataclass(frozen=True)
class Session:
    """How a session ended: the exit code, all that was written, and whether the terminal is as it
    was before.
    """

    code: int
    written: bytes
    is_restored: bool


class Terminal:
    """A terminal with a program on it. Each wait is for something on the screen."""

    def __init__(
        self, folder: Path, *words: str | Path, size: tuple[int, int] = (80, 24), **env: str | None
    ) -> None:
        self._ours, self._theirs = pty.openpty()
        self._screen = pyte.Screen(*size)
        self._stream = pyte.ByteStream(self._screen)
        self._set_size(size)
        self._modes = termios.tcgetattr(self._theirs)
        self.written = b""
        variables = environment(folder, **{"COLUMNS": None, "COLORTERM": "truecolor", **env})
        self.process = forked(folder, *map(str, words), env=variables, fds=(self._theirs,) * 3)

    def press(self, *keys: str) -> None:
        """Sends keys by their names, and other words letter by letter."""
        os.write(self._ours, "".join(KEYS.get(key, key) for key in keys).encode())

    def send(self, piece: bytes) -> None:
        """Sends bytes as they are."""
        os.write(self._ours, piece)

    def click(self, x: int, y: int, *, button: int = 0) -> None:
        """Clicks on a character, counted from 0; button 64 turns the wheel upward."""
        place = f"{button};{x + 1};{y + 1}"
        self.send(
            f"\x1b[<{place}M".encode() + (b"" if button >= 64 else f"\x1b[<{place}m".encode())
        )

    def resize(self, columns: int, rows: int) -> None:
        """Gives the terminal another size, and says so to the program."""
        self._screen.resize(rows, columns)
        self._set_size((columns, rows))
        self.signal(signal.SIGWINCH)

    def signal(self, number: int) -> None:
        """Sends a signal to the program."""
        assert self.process.pid
        os.kill(self.process.pid, number)

    @property
    def lines(self) -> list[str]:
        """The lines of the screen, without blanks at their ends."""
        return [line.rstrip() for line in self._screen.display]

    def until(self, pattern: str) -> re.Match[str]:
        """Waits until the screen has what the regular expression describes, over its lines."""
        return self.until_holds(
            lambda: re.search(pattern, "\n".join(self.lines), re.MULTILINE), pattern
        )

    def until_at(self, query: int, key: int) -> Cell:
        """Waits until the cursor is on this cell."""
        self.until(rf"query {query}(–\d+)? .*  key {key}(–\d+)? .*  weight ")
        return self.cell()

    def until_written(self, pattern: re.Pattern[bytes], times: int = 1) -> list[bytes]:
        """Waits until the program has sent the terminal something so many times."""

        def parsed() -> list[bytes]:
            pieces = pattern.findall(self.written)
            return pieces if len(pieces) >= times else []

        return self.until_holds(parsed, pattern)

    def cell(self) -> Cell:
        """The cell under the cursor."""
        read = self.until(_CELL.pattern).groupdict()
        number = read["exact"] or read["weight"]
        weight = read["weight"] if read["weight"] in ("masked", "taken out") else float(number)
        return Cell(
            int(read["query"]),
            read["query_token"].strip(),
            int(read["key"]),
            read["key_token"].strip(),
            weight,
        )

    def row_of(self, pattern: str) -> int:
        """The number of the first line that has this, counted from 0."""
        self.until(pattern)
        return next(number for number, line in enumerate(self.lines) if re.search(pattern, line))

    def end(self) -> Session:
        """Waits for the program's end."""
        begun = time.monotonic()
        while self.process.is_alive() and time.monotonic() - begun < PATIENCE_S:
            self._read(0.05)
        self.process.kill()
        while self._read(0.05):
            pass
        is_restored = termios.tcgetattr(self._theirs)[:4] == self._modes[:4]
        self.close()
        self.process.join()
        code = self.process.exitcode or 0
        return Session(code if code >= 0 else 128 - code, self.written, is_restored)

    def close(self) -> None:
        """Takes the terminal away."""
        for fd in (self._theirs, self._ours):
            os.close(fd)
        self._ours = -1

    @property
    def is_open(self) -> bool:
        """Whether it was not taken away."""
        return self._ours >= 0

    def until_holds(self, parsed: Callable[[], Any], what: object) -> Any:
        """Waits until what is read of whole screens is true, and returns it."""
        begun = time.monotonic()
        while True:
            ended, is_still = not self.process.is_alive(), not self._read(0.02)
            is_whole = not (frames := _FRAME.findall(self.written)) or frames[-1] == b"l"
            if is_still and is_whole and (result := parsed()):
                return result
            if is_still and (ended or time.monotonic() - begun > PATIENCE_S):
                raise AssertionError(f"{what!r} is not on the screen:\n" + "\n".join(self.lines))

    def _read(self, seconds: float) -> bool:
        """Takes what was written within some seconds; False if that is nothing."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        piece = os.read(self._ours, 65536)
        self.written += piece
        if _FRAMES_QUERY in piece:
            self.send(b"\x1b[?2026;2$y")
        self._stream.feed(_NOT_KNOWN_TO_PYTE.sub(b"", piece))
        return bool(piece)

    def _set_size(self, size: tuple[int, int]) -> None:
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))


@contextmanager
def viewing(
    folder: Path, *words: str | Path, size: tuple[int, int] = (80, 24), **env: str | None
) -> Iterator[Terminal]:
    """`mha view WORDS`, which ends at the latest with the block."""
    terminal = Terminal(folder, "view", *words, size=size, **env)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.join()
        if terminal.is_open:
            terminal.close()
