"""The two streams: data on stdout, messages on stderr. Colour is decided for each stream
separately, by the same rule.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from textwrap import fill
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TextIO

from mhacli.errors import MhaError
from mhacli.io.long_work import Terminated, at_interrupt, raise_received
from mhacli.io.memory import gc_paused
from mhacli.numbers import shown
from mhacli.text.escape import harmless, visible, without_surrogates

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mhacli.render.base.options import Screen

ColourChoice = Literal["auto", "always", "never"]
SCREEN_WIDTHS = (20, 500)


# ------------------------------------------------------------------------------------------- stdout


def require_stdout() -> None:
    """Raises `MhaError` if there is no stdout. Otherwise lets both streams escape characters that
    their encoding lacks.
    """
    if sys.stdout is None:
        raise MhaError("stdout is closed, so nothing can be printed", code="unwritable")

    def escape(fault: UnicodeError) -> tuple[str, int]:
        """An escape for each letter that the encoding lacks, and ? for each sign."""
        assert isinstance(fault, UnicodeEncodeError)
        lost = fault.object[fault.start : fault.end]
        return "".join(ascii(c)[1:-1] if c.isalnum() else "?" for c in lost), fault.end

    codecs.register_error("mha", escape)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="mha")  # type: ignore[union-attr]


def write(text: str) -> None:
    """Prints text on stdout unchanged."""
    sys.stdout.write(text)


def flush() -> None:
    """Flushes stdout, if there is one."""
    if sys.stdout is not None:
        sys.stdout.flush()


def discard_stdout() -> None:
    """Discards all further output to stdout: nobody reads it, and a second failure would hide the
    first.
    """
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.close(sink)


def stdout_width() -> int:
    """The columns of stdout, from 20 to 500: COLUMNS, else the width of the terminal, else 80."""
    low, high = SCREEN_WIDTHS
    return min(high, max(low, shutil.get_terminal_size().columns))


def wants_colour(choice: ColourChoice, stream: TextIO) -> bool:
    """Whether a stream gets colour: by `--color always|never`, NO_COLOR, FORCE_COLOR, or else
    because it is a colour terminal.
    """
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def colour_system() -> Literal["STANDARD", "EIGHT_BIT", "TRUECOLOR"]:
    """The colours of the terminal, by COLORTERM and TERM, under rich's name."""
    if os.environ.get("COLORTERM", "").strip().lower() in ("truecolor", "24bit"):
        return "TRUECOLOR"
    return (
        "EIGHT_BIT"
        if "256color" in os.environ.get("TERM", "") or not os.environ.get("TERM")
        else "STANDARD"
    )


def draw(renderable: RenderableType, on: Screen) -> None:
    """Prints a view on stdout. It is printed line by line, so that long views need little
    memory.
    """
    for line in drawn_lines(renderable, on):
        write(line + "\n")


def drawn_lines(renderable: RenderableType, on: Screen) -> Iterator[str]:
    """The lines of a view, in colour or plain, without trailing blanks."""
    from io import StringIO

    from rich.color import ColorSystem
    from rich.console import Console
    from rich.segment import Segment
    from rich.style import Style

    colours = ColorSystem[colour_system()] if on.colour else None
    console = Console(
        file=StringIO(),
        width=on.width,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )
    for line in Segment.split_lines(console.render(renderable)):
        pieces = [
            (style or Style()).render(harmless(text), color_system=colours)
            for text, style, _ in line
        ]
        yield "".join(pieces).rstrip(" ")


# ------------------------------------------------------------------------------------------- stderr


def note(text: str) -> None:
    """Prints a message on stderr."""
    stderr_line(f"mha: {text}")


_QUOTED = r"""(?<!\w)(?:'[^']*'|"[^"]*")"""
_TYPED = re.compile(
    rf"(?:mha [a-z]+|pip install|python -c)(?: (?:--[a-z]\S*(?: \S+)?|\S*[./:=]\S*|{_QUOTED}))*"
    rf"|^mha: error: |--[a-z]\S* \S+|{_QUOTED}"
)
"""What may be typed as it stands in a message."""


def stderr_line(text: str) -> None:
    """Prints a line on stderr, if there is one. On a terminal it breaks at blanks, but not within
    what may be typed, nor if it is for programs.
    """
    if sys.stderr is not None:
        erase_progress()
        line = harmless(text).replace("\n", "\\n")
        if sys.stderr.isatty() and not line.startswith(("{", "::")):
            width = os.get_terminal_size(sys.stderr.fileno()).columns or stdout_width()
            line = _TYPED.sub(lambda typed: typed[0].replace(" ", "\0"), line)
            line = fill(line, width, break_long_words=False, break_on_hyphens=False)
            line = line.replace("\0", " ")
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def print_error(fault: MhaError) -> int:
    """Prints an error on stderr, as text or with --json as one JSON line, and returns its exit
    code. After a signal it is the interrupt, which a library took for a failure."""
    raise_received()
    words = sys.argv[1:]
    if "--json" in words[: words.index("--") if "--" in words else None]:
        typed, names = fault.typed(), ("code", "message", "hint", "path")
        error = {name: without_surrogates(typed[name] or "") or None for name in names}
        lines = [json.dumps({"error": error | {"exit": fault.exit_code}})]
    else:
        lines = [f"mha: error: {fault.typed_message}"]
        lines += [f"hint: {fault.typed_hint}"] if fault.typed_hint else []
    try:
        flush()  # output comes before the error
    except OSError:
        discard_stdout()
    with suppress(OSError):
        for line in lines:
            stderr_line(line)
    return fault.exit_code


def is_interactive() -> bool:
    """Whether stderr is a terminal that can erase a line."""
    return (
        sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    )


def require_folder() -> None:
    """Raises `MhaError` in a deleted working folder, in which torch's matrix library would end the
    process.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        message = "the working folder does not exist any more"
        raise MhaError(message, hint="cd to another folder", code="no-folder") from None


@contextmanager
def loading_torch() -> Iterator[None]:
    """Shows that torch is loading. Garbage collection is off meanwhile, which saves a quarter of
    the time.
    """
    require_folder()
    with show_activity("loading torch"), gc_paused():
        yield


# ----------------------------------------------------------------------------------------- progress

_REDRAWN_S = 0.25
_works = list["_Work"]()
"""The works that are going on, each within the one before it. The last one is drawn."""


@dataclass
class _Work:
    """Work, its `part` that is going on, and the completed `fraction`, None where it is unknown.

    `kept` says what an interruption leaves, None for nothing. In a log each `log_every_s` seconds
    and the end have a line; preparations, for which it is None, say nothing there.
    """

    part: str
    kept: Callable[[], str] | None
    log_every_s: float | None
    fraction: float | None = None
    first_fraction: float = 0.0
    is_drawn: bool = False
    began: float = field(default_factory=monotonic)
    logged: float = field(default_factory=monotonic)

    @property
    def long_after_s(self) -> float:
        """After how many seconds it is shown."""
        with suppress(ValueError):
            return float(os.environ.get("MHA_PROGRESS_AFTER", ""))
        return 2.0

    @property
    def is_long(self) -> bool:
        """Whether it is shown, in a log, and by a word about its interruption."""
        return monotonic() - self.began >= self.long_after_s

    def report(self, part: str, fraction: float | None = None, **_: Any) -> None:
        """Names the part that begins, when this fraction is completed."""
        if self.fraction is None:
            self.first_fraction = fraction or 0.0
        self.part, self.fraction = part, fraction
        if self.log_every_s is not None and monotonic() - self.logged >= self.log_every_s:
            self.log()

    def log(self) -> None:
        """Writes a line of a log, where stderr is one."""
        if self.is_long and not is_interactive():
            self.logged = monotonic()
            note(str(self))

    def __str__(self) -> str:
        """`removal 12 of 72 · 17 % · 40.2 s left`. Before a tenth of this work, and at its end, the
        time is that since it began.
        """
        seconds = monotonic() - self.began
        if self.fraction is None:
            return f"{self.part} · {shown(seconds, 'seconds')}"
        done = (self.fraction - self.first_fraction) / max(1 - self.first_fraction, 1e-9)
        time = shown(seconds, "seconds")
        if 0.1 <= done < 1:
            time = f"{shown(seconds * (1 - done) / done, 'seconds')} left"
        return f"{self.part} · {shown(self.fraction, 'fraction')} · {time}"

    def redraw_until(self, end: threading.Event) -> None:
        """Draws it anew four times a second, once it is long."""
        waits_s = max(0.0, min(self.long_after_s, threading.TIMEOUT_MAX))
        while not end.wait(waits_s):
            waits_s = _REDRAWN_S
            if self is _works[-1]:
                from rich.cells import set_cell_size

                self.is_drawn = True
                replace_line(set_cell_size(visible(str(self)), stdout_width() - 1).rstrip())

    def say_kept(self) -> None:
        """Says what its interruption leaves."""
        if self.kept is not None:
            note(f"interrupted: {self.kept()}")
        elif self.is_long and self.log_every_s is not None:
            note("interrupted: nothing is kept")


def replace_line(text: str) -> None:
    """Writes over the last line of a terminal as stderr, past the buffer and the lock of
    `sys.stderr`."""
    if is_interactive():
        os.write(sys.stderr.fileno(), f"\r\x1b[K{text}".encode(sys.stderr.encoding, "mha"))


def erase_progress() -> None:
    """Removes the line of a work from a terminal."""
    for work in _works:
        if work.is_drawn:
            work.is_drawn = False
            replace_line("")


@contextmanager
def progress(
    part: str = "starting",
    *,
    kept: Callable[[], str] | None = None,
    log_every_s: float | None = inf,
) -> Iterator[Callable[..., None]]:
    """A callback that takes the part of a work that begins, and the completed fraction if known.

    Work that lasts 2 seconds (`MHA_PROGRESS_AFTER`) is shown: on a terminal's stderr by a line that
    is removed at its end, in a log by its last line. A signal that ends it is answered by what is
    `kept`. The line takes less than a thousandth of the time from what is computed meanwhile.
    """
    work, end = _Work(part, kept, log_every_s), threading.Event()
    drawing = threading.Thread(target=work.redraw_until, args=(end,), daemon=True)
    _works.append(work)
    at_interrupt.append(work.say_kept)
    try:
        if is_interactive():
            drawing.start()
        yield work.report
        if log_every_s is not None:
            work.log()
    finally:
        if not isinstance(sys.exception(), KeyboardInterrupt | Terminated):
            at_interrupt.remove(work.say_kept)
        end.set()
        if drawing.is_alive():
            drawing.join()
        erase_progress()
        _works.remove(work)


def show_activity(activity: str) -> AbstractContextManager[Callable[..., None]]:
    """The same for preparations, which a terminal alone shows."""
    return progress(activity, log_every_s=None)
