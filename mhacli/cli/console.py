"""The two streams: data on stdout, messages on stderr. Colour is decided for each stream
separately, by the same rule.
"""

from __future__ import annotations

import codecs
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TextIO

from mhacli.errors import MhaError
from mhacli.io.long_work import Progress, no_progress, raise_received
from mhacli.io.memory import gc_paused
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


def stderr_line(text: str) -> None:
    """Prints a line on stderr, if there is one."""
    if sys.stderr is not None:
        sys.stderr.write(harmless(text).replace("\n", "\\n") + "\n")
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


@contextmanager
def show_activity(activity: str = "starting") -> Iterator[Callable[..., None]]:
    """Names an activity on a terminal's stderr, and erases the line at its end; the callback names
    the next one in its place. Nothing else runs, which would disturb measurements.
    """

    def name(activity: str, **_: Any) -> None:
        if is_interactive():
            sys.stderr.write(f"\r\x1b[K{visible(activity)[: stdout_width() - 3]} …")
            sys.stderr.flush()

    name(activity)
    try:
        yield name
    finally:
        if is_interactive():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


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


@contextmanager
def progress(*, has_time_left: bool = True) -> Iterator[Progress]:
    """A callback that draws a progress bar on a terminal's stderr, by default with the remaining
    time; without a terminal, one that does nothing. Text that does not fit beside the bar continues
    on the next line.

    The bar is drawn only when the callback is called: a drawing thread would disturb measurements.
    """
    if not is_interactive():
        yield no_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as ProgressBar
    from rich.table import Column

    console = Console(
        stderr=True, no_color=not wants_colour("auto", sys.stderr), legacy_windows=False
    )
    words = TextColumn("{task.description}", markup=False, table_column=Column())
    columns = (
        BarColumn(24),
        *([TimeRemainingColumn(compact=True)] if has_time_left else []),
        words,
    )
    with ProgressBar(
        *columns, console=console, transient=True, auto_refresh=False, redirect_stderr=False
    ) as bar:
        task = bar.add_task("", total=1.0)

        def report_progress(fraction: float, step: str) -> None:
            bar.update(task, completed=fraction, description=visible(step), refresh=True)

        yield report_progress
