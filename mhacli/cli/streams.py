"""The two streams: data on stdout, messages on stderr. Colour is decided for each stream separately, by the same rule."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Literal, Protocol, TextIO

from mhacli.errors import MhaError
from mhacli.io.memory import uncollected
from mhacli.io.progress import Progress, no_progress
from mhacli.text.escape import message_text, visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mhacli.render.base.options import Screen

ColourChoice = Literal["auto", "always", "never"]
SCREEN_WIDTHS, _PIPED_WIDTH = (20, 500), 80
_PATIENCE_S = 0.3
_LINES_AT_ONCE = 100
_ERASE_LINE = "\r\x1b[K"
_PLAIN = str.maketrans(
    dict(
        (pair[0], pair[2])
        for pair in [
            "·=-",
            '“="',
            '”="',
            "×=x",
            "–=-",
            "−=-",
            "…=~",
            "⋮=:",
            "→=>",
            "Σ=S",
            "√=V",
            "─=-",
            "ᵀ='",
            "µ=u",
            "‹=<",
            "›=>",
            "␣=_",
            "◌=o",
            "∞=i",
            "≈=~",
            "◀=<",
            "┃=|",
            "╲=\\",
            "≡==",
            "↻=@",
            "▪=o",
            "⇠=<",
            "○=+",
            "≤=<",
            "±=+",
            "²=2",
            "✓=v",
            "✗=x",
        ]
    )
    | dict(zip("▁▂▃▄▅▆▇█░▒▓▀", "._-=+*##.:%#", strict=True))
)


def wants_colour(choice: ColourChoice, stream: TextIO) -> bool:
    """Whether a stream gets colour: by `--color always|never`, NO_COLOR, FORCE_COLOR, or else because it is a colour terminal."""
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def screen(choice: ColourChoice, width: int | None = None) -> Screen:
    """The width of stdout, or another one, and its colour."""
    from mhacli.render.base.options import Screen

    return Screen(width or stdout_width(), wants_colour(choice, sys.stdout))


def draw(renderable: RenderableType, on: Screen) -> None:
    """Prints a view on stdout, in colour or plain, without trailing blanks. It is printed in parts, so long views need little
    memory."""
    from io import StringIO

    from rich.console import Console
    from rich.segment import Segment, Segments

    paper = StringIO()
    console = Console(
        file=paper,
        width=on.width,
        force_terminal=on.colour,
        color_system=_colour_system() if on.colour else None,
        no_color=not on.colour,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )
    lines = Segment.split_lines(console.render(renderable))
    while some_lines := [*islice(lines, _LINES_AT_ONCE)]:
        console.print(Segments([segment for line in some_lines for segment in (*line, Segment.line())]), end="")
        write("\n".join(line.rstrip(" ") for line in paper.getvalue().split("\n")))
        paper.seek(0)
        paper.truncate()


def write(text: str) -> None:
    """Prints text on stdout; an encoding other than UTF gets ASCII substitutes for the signs of mha."""
    encoding = (sys.stdout.encoding or "ascii").lower()
    write_pieces([text if encoding.startswith("utf") else text.translate(_PLAIN)])


def write_pieces(pieces: Iterable[str]) -> None:
    """Prints data on stdout unchanged, piece by piece. Raises `MhaError` if it cannot be written."""
    for piece in pieces:
        with _output_faults():
            sys.stdout.write(piece)


def flush() -> int:
    """Flushes stdout and returns 0. Raises `MhaError` if it cannot be written."""
    if sys.stdout is not None:
        with _output_faults():
            sys.stdout.flush()
    return 0


def forget_stdout() -> None:
    """Discards all further output to stdout: nobody reads it, and a second failure would hide the first."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.close(sink)


@contextmanager
def _output_faults() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as fault:
        forget_stdout()
        raise MhaError(f"stdout cannot be written: {fault.strerror or fault}", code="unwritable") from fault


def note(text: str) -> None:
    """Prints a message on stderr, with control characters escaped."""
    if sys.stderr is not None:
        sys.stderr.write(f"{stderr_lines(f'mha: {message_text(text)}')}\n")


def stderr_line(text: str) -> None:
    """Prints a line on stderr unchanged, for programs."""
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def stderr_lines(message: str, *, has_commands: bool = True) -> str:
    """A message wrapped between words to the width of a terminal's stderr; one line if stderr is no terminal.

    A word longer than a line is not broken here, and a label is never alone on a line. With `has_commands`, a command in the
    message starts a new line if it does not fit, and is never broken, so that it can be copied.
    """
    width = _stderr_columns()
    if 2 * len(message) <= width:  # no character takes more than two cells
        return message
    from rich.cells import cell_len

    lines = [""]
    for piece in _COMMAND.split(message) if has_commands else [message]:
        is_command = has_commands and _COMMAND.match(f" {piece}") is not None
        for word in [piece] if is_command else piece.split(" "):
            is_first = not lines[-1]
            room = width - cell_len(lines[-1]) - 1
            is_kept = not is_command and (lines[-1] in _LABELS or cell_len(word) > width)
            if is_first or is_kept or cell_len(word) <= room:
                lines[-1] += word if is_first else f" {word}"
            else:
                lines.append(word)
    return "\n".join(lines)


_COMMAND = re.compile(" (?=(?:mha|pip|python) [a-z-])")
"""The blank before a command to type."""
_LABELS = ("mha:", "mha: error:", "hint:")
"""Labels that are never alone on a line."""


def _stderr_columns() -> float:
    """The columns of stderr; infinite if it is no terminal or does not report them."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or math.inf
    except (OSError, ValueError):
        return math.inf


@contextmanager
def show_activity(activity: str) -> Iterator[None]:
    """Names an activity on a terminal's stderr once it takes longer than a moment, and erases the line at its end."""
    if not is_lively():
        yield
        return
    is_done = threading.Event()

    def show() -> None:
        if not is_done.wait(_PATIENCE_S):
            sys.stderr.write(f"{visible(activity)} …")
            sys.stderr.flush()
            is_done.wait()
            sys.stderr.write(_ERASE_LINE)
            sys.stderr.flush()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


@contextmanager
def loading_torch() -> Iterator[None]:
    """Shows that torch is loading. Garbage collection is off meanwhile, which saves a quarter of the time."""
    with show_activity("loading torch"), uncollected():
        yield


@contextmanager
def progress(*, has_time_left: bool = True) -> Iterator[Progress]:
    """A callback that draws a progress bar on a terminal's stderr, by default with the remaining time; without a terminal, one
    that does nothing. Text that does not fit beside the bar continues on the next line.

    The bar is drawn only when the callback is called: a drawing thread would disturb measurements.
    """
    if not is_lively():
        yield no_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as ProgressBar
    from rich.table import Column

    console = Console(stderr=True, no_color=not wants_colour("auto", sys.stderr), legacy_windows=False)
    words = TextColumn("{task.description}", markup=False, table_column=Column())
    columns = (BarColumn(24), *([TimeRemainingColumn(compact=True)] if has_time_left else []), words)
    with ProgressBar(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=1.0)

        def report_progress(fraction: float, step: str) -> None:
            bar.update(task, completed=fraction, description=visible(step), refresh=True)

        yield report_progress


def is_lively() -> bool:
    """Whether stderr is a terminal that can erase a line."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def read_key(prompt: str) -> str:
    """One key press from the terminal, without waiting for Enter; Ctrl-C interrupts as usual.

    The prompt is shown while waiting, then erased.
    """
    import termios
    import tty

    sys.stdout.flush()
    sys.stderr.write(prompt)
    sys.stderr.flush()
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        return os.read(fd, 32).decode(errors="replace")[:1]
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        sys.stderr.write(_ERASE_LINE)
        sys.stderr.flush()


def require_stdout() -> None:
    """Raises `MhaError` if there is no stdout. Otherwise lets both streams escape characters that their encoding lacks."""
    if sys.stdout is None:
        raise MhaError("stdout is closed, so nothing can be printed", code="unwritable")
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def stdout_width() -> int:
    """The columns of stdout, from 20 to 500: COLUMNS, else the width of the terminal, else 80."""
    try:
        columns = int(os.environ.get("COLUMNS", ""))
    except ValueError:
        columns = 0
    if columns <= 0:
        try:
            columns = os.get_terminal_size(sys.stdout.fileno()).columns
        except (OSError, ValueError):
            columns = _PIPED_WIDTH
    low, high = SCREEN_WIDTHS
    return min(high, max(low, columns or _PIPED_WIDTH))


def _colour_system() -> Literal["standard", "256", "truecolor"]:
    """The colours of the terminal, by COLORTERM and TERM."""
    if os.environ.get("COLORTERM", "").strip().lower() in ("truecolor", "24bit"):
        return "truecolor"
    return "256" if "256color" in os.environ.get("TERM", "") or not os.environ.get("TERM") else "standard"


# -------------------------------------------------------------------------------------------------- work with progress


_WAIT_S = 0.05


class LongWork(Protocol):
    """Work that reports its progress, such as the statistics of many heads."""

    def run(self, report_progress: Progress) -> None:
        """Does all the work; `report_progress` may raise an exception to stop it."""


def watch(work: LongWork) -> None:
    """Does the work with a progress bar. It runs in a second thread, so that Ctrl-C takes effect at once."""
    with progress() as report_progress:
        is_wanted, faults = threading.Event(), list[BaseException]()
        is_wanted.set()

        def report_unless_stopped(fraction: float, step: str) -> None:
            if not is_wanted.is_set():
                raise _Stopped
            report_progress(fraction, step)

        def run() -> None:
            try:
                work.run(report_unless_stopped)
            except BaseException as fault:
                faults.append(fault)

        worker = threading.Thread(target=run, daemon=True)
        worker.start()
        try:
            while worker.is_alive():
                worker.join(_WAIT_S)
        finally:
            is_wanted.clear()
    if faults:
        raise faults[0]


class _Stopped(Exception):
    """The main thread no longer waits for the work."""
