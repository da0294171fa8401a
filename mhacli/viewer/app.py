"""The viewer's app: its texts to read, its screens, and its start and end on the terminal."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import Footer

from mhacli.errors import MhaError
from mhacli.io.long_work import Terminated
from mhacli.record.record import DecodingRecord, EffectRecord, is_a
from mhacli.render.base.format import provenance
from mhacli.render.base.options import Screen as Paper
from mhacli.render.base.options import ViewOptions

from .heads import Overview
from .keys import KEYS
from .screen import Words
from .session import Session

if TYPE_CHECKING:  # numpy is imported after the first screen is visible
    from .picture import Picture

# -------------------------------------------------------------------------------------------- texts


class TextScreen(Screen[None]):
    """A screen with one text, drawn for its width, which also scrolls by the keys of pagers."""

    BINDINGS = KEYS["a text to read"]

    def __init__(
        self, session: Session, draw: Callable[[Session, int], Iterable[RenderableType]]
    ) -> None:
        super().__init__()
        self._text = Words(lambda width: draw(session, max(20, width - 1)), id="text")

    def compose(self) -> ComposeResult:
        """The text, with its keys below."""
        yield self._text
        yield Footer(compact=True)


def _walk(session: Session, width: int) -> Iterator[RenderableType]:
    """The walkthrough of a record; for decoding its steps."""
    from mhacli.render.run.trace import decode_view, walk

    record = session.record
    paper = Paper(width, session.colour)
    if is_a(record, DecodingRecord):
        yield decode_view(record, ViewOptions(everything=True), paper)
    elif record.trace:
        yield from walk(record, paper, in_detail=True)
    else:
        shows = "mha trace TEXT" if record.model is None else "mha trace TEXT --model DIR --layer N"
        yield Text(f"This record holds no steps. {shows} shows those of a layer.")


def _pairs(
    rows: Sequence[tuple[str, object]], width: int, title: str = ""
) -> Iterator[RenderableType]:
    """Rows with their names, below a title."""
    from mhacli.render.base.doc import pairs
    from mhacli.render.base.terminal import table

    return table(pairs(rows, style="bold cyan", title=title), width)


_EXPLAINED = (
    "A click chooses a head, a cell, a token or a key of the list; "
    "the wheel scrolls, with Shift sideways.\n\n"
    "A row of the matrix is a query, a column a key, a cell the attention weight between them; "
    "where not all fit, a cell stands for a\n"
    "block: the attention that its queries give, on average, to all its keys. "
    "The texts are shaded as the cursor's row and column."
)


def _help(session: Session, width: int) -> Iterator[RenderableType]:
    """All keys, and the use of the mouse."""
    for title, keys in KEYS.items():
        rows = [
            (f"{key.key_display:<11}", key.tooltip)
            for key in keys
            if isinstance(key, Binding) and key.tooltip
        ]
        yield from _pairs(rows, width, title)
        yield Text()
    yield Text(_EXPLAINED)


_TEXTS = {
    "walk": _walk,
    "origin": lambda session, width: _pairs(provenance(session.record), width),
    "help": _help,
}


# ---------------------------------------------------------------------------------------------- app


class Viewer(App[None]):
    """The viewer of a record, which opens a head at once if asked to."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen, Footer, FooterKey, FooterKey .footer-key--description, Words, Pane {
        background: ansi_default; color: ansi_default;
    }
    FooterKey .footer-key--key { background: ansi_default; color: ansi_cyan; }
    Screen { overflow: hidden; }
    TextScreen {
        overflow-y: auto;
        scrollbar-color: ansi_bright_black; scrollbar-background: ansi_default; scrollbar-size: 1 1;
    }
    Words { height: auto; }
    HeadScreen #top, Overview #top, #note { height: 1; }
    #note { display: none; }
    #about { height: 4; }
    #signs, #numbers, #effects { max-height: 50%; }
    #pictures, #body { height: 1fr; }
    #body {
        layout: grid; grid-size: 2 2; grid-columns: 1fr 28; grid-rows: 2fr 1fr; grid-gutter: 0 1;
    }
    #body Pane { width: 1fr; height: 100%; }
    .-wide #body {
        grid-size: 2 3; grid-columns: 5fr 3fr; grid-rows: 1fr 1fr 1fr; grid-gutter: 0 2;
    }
    .-wide #body Matrix { row-span: 3; }
    .-flat #pictures, .-flat #list, .-flat #query, .-flat #key, .-flat #numbers { display: none; }
    .-flat #about { height: 1; }
    .-flat #body { grid-size: 1 1; grid-columns: 1fr; grid-rows: 1fr; }
    """

    def __init__(self, session: Session, *, is_open: bool = False) -> None:
        os.environ.pop("NO_COLOR", None)
        if not session.colour:
            os.environ["NO_COLOR"] = ""  # Textual decides by it
        super().__init__(ansi_color=True)
        self.HORIZONTAL_BREAKPOINTS = [(120, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-flat"), (12, "-high")]
        self.animation_level = "none"
        self.session = session
        self._is_open = is_open

    def get_default_screen(self) -> Screen[None]:
        """The first screen: all heads, or the walkthrough of a record without heads."""
        return Overview(self.session) if self.session.heads else TextScreen(self.session, _walk)

    def get_key_display(self, binding: Binding) -> str:
        """The first of the keys that do the same, for which the last line has room."""
        return (binding.key_display or binding.key).split()[0]

    def on_mount(self) -> None:
        """Opens the requested head. A signal ends the app with its number."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.exit, None, number)
        if self._is_open and isinstance(self.screen, Overview):
            self.screen.action_open()

    def panic(self, *renderables: RenderableType) -> None:
        """Ends the app when bytes arrive that are no text, which Textual cannot read past."""
        self.session.fault = MhaError(
            "the terminal sent bytes that are no UTF-8", code="no-terminal"
        )
        self.exit()

    async def action_back(self) -> None:
        """Returns to the previous screen; ends the app on the first."""
        if len(self.screen_stack) > 1:
            self.pop_screen()
        else:
            self.exit()

    def open_head(self, picture: Picture) -> None:
        """Opens the screen of a head, whose picture this is."""
        from .head import HeadScreen

        self.push_screen(HeadScreen(self.session, picture))

    def open_effects(self, record: EffectRecord) -> None:
        """Opens the screen of the effects in a record."""
        from .effects import EffectsScreen

        self.push_screen(EffectsScreen(self.session, record))

    def action_read(self, name: str) -> None:
        """Opens the walkthrough, the provenance of the record, or the list of keys."""
        self.push_screen(TextScreen(self.session, _TEXTS[name]))


# -------------------------------------------------------------------------------- beginning and end


def _end_with_terminal() -> None:
    """Ends the process when the terminal vanishes. Not every terminal sends SIGHUP, and Textual
    would read the end of its input forever.
    """
    poller = select.poll()
    poller.register(sys.stdin.fileno(), 0)
    poller.poll()
    os._exit(128 + signal.SIGHUP)  # no terminal is left to restore


def run_viewer(session: Session, *, is_open: bool = False) -> None:
    """Shows the viewer until the user quits. Raises the fault of a picture that could not be read,
    and `KeyboardInterrupt` or `Terminated` after a signal, once the terminal is restored.
    """
    threading.Thread(target=_end_with_terminal, daemon=True).start()
    viewer = Viewer(session, is_open=is_open)
    viewer.run()
    if session.fault is not None:
        raise session.fault
    if viewer.return_code:
        raise Terminated if viewer.return_code == signal.SIGTERM else KeyboardInterrupt
