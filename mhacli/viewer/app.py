"""The viewer's app: its screens, and its start and end on the terminal."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from rich.console import RenderableType
from textual import events
from textual.app import App
from textual.drivers import linux_driver
from textual.screen import Screen

from mhacli.errors import MhaError
from mhacli.io.interrupts import Terminated, more_time
from mhacli.record.record import Record
from mhacli.viewer.overview import Overview
from mhacli.viewer.screen import HeadsScreen, ViewerScreen
from mhacli.viewer.session import Session, ViewerOptions

_ENDING = (signal.SIGINT, signal.SIGTERM)
_LOOKING_MS = 1000
"""The interval of checks whether the viewer has ended. A vanished terminal is noticed at once."""
_RESTORING_S = 5.0
"""Seconds for restoring the terminal after a signal."""


@contextmanager
def _colour_in_environment(has_colour: bool) -> Iterator[None]:
    """Sets the environment variables from which Textual decides about colour, within the context."""
    before = os.environ.pop("NO_COLOR", None)
    if not has_colour:
        os.environ["NO_COLOR"] = "1"
    try:
        yield
    finally:
        os.environ.pop("NO_COLOR", None)
        if before is not None:
            os.environ["NO_COLOR"] = before


class Viewer(App[None]):
    """The viewer of a record."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "mha"
    CSS = """
    Screen { background: ansi_default; color: ansi_default; overflow: hidden; }
    #top, #last, #prompt { height: 1; }
    #read-out { height: 2; }
    #legend { height: 1; }
    #body { height: 1fr; layout: grid; grid-size: 2 2; grid-columns: 1fr 31; grid-rows: 1fr 6; grid-gutter: 0 1; }
    #keys, #queries, #matrix, #top-keys, #heads, #numbers, #page { width: 100%; height: 100%; }
    .small #body { grid-columns: 1fr 26; grid-rows: 1fr 4; }
    .wide #body { grid-size: 2 3; grid-columns: 3fr 2fr; grid-rows: 1fr 1fr 1fr; grid-gutter: 0 2; }
    .wide #matrix { row-span: 3; }
    Overview #body { grid-size: 1 2; grid-columns: 1fr; grid-rows: 1fr 7; }
    Overview.broad #body { grid-rows: 1fr 5; }
    Overview.wide #body { grid-size: 2 1; grid-columns: 1fr 48; grid-rows: 1fr; }
    .tiny #body { grid-size: 1 1; grid-columns: 1fr; grid-rows: 1fr; }
    .tiny #top-keys, .tiny #keys, .tiny #queries, .tiny #numbers { display: none; }
    TextScreen #page { height: 1fr; }
    EffectsScreen #effects { height: 1fr; }
    """

    def __init__(self, record: Record, options: ViewerOptions) -> None:
        with _colour_in_environment(options.colour):
            super().__init__(driver_class=ForgivingDriver, ansi_color=True)
        self.session = Session(record, options)
        self._is_open = options.is_open
        self.ended_by: int | None = None
        self._running_loop: asyncio.AbstractEventLoop | None = None
        self.fault: Exception | None = None

    def get_default_screen(self) -> Screen[None]:
        """The first screen: all heads, or the walkthrough of a record without heads."""
        return Overview(self.session) if self.session.head_table.places else self._walk()

    def on_mount(self) -> None:
        """Opens the requested head."""
        self._running_loop = asyncio.get_running_loop()
        if self.ended_by is not None:  # a signal before the event loop started
            self.exit()
        elif self._is_open and self.session.head_table.places and self.session.head().drawable is not None:
            from mhacli.viewer.head import HeadScreen

            self.push_screen(HeadScreen(self.session))

    # ---------------------------------------------------------------------------------------------------------------- screens

    def on_key(self, event: events.Key) -> None:
        """Passes keys to the search line that arrived while it was opening."""
        if isinstance(self.screen, ViewerScreen) and self.screen.take(event):
            event.prevent_default()

    async def action_back(self) -> None:
        """Returns to the previous screen; ends the app on the first."""
        if len(self.screen_stack) > 1:
            self.pop_screen()
        else:
            self.exit()

    def end_by(self, number: int) -> None:
        """Ends the app from the handler of a signal."""
        self.ended_by = number
        if self._running_loop is not None:
            self._running_loop.call_soon_threadsafe(self.exit)

    def _handle_exception(self, error: Exception) -> None:
        """Keeps the exception for the caller of the viewer, which reports it, instead of showing a traceback."""
        self.fault = self.fault or error
        super()._handle_exception(error)
        self._exit_renderables.clear()

    def panic(self, *renderables: RenderableType) -> None:
        """Ends the app, without a traceback, for a fault outside of its messages, such as an unreadable terminal."""
        self.fault = self.fault or MhaError("the terminal can no longer be read", code="no-terminal")
        self._close_messages_no_wait()

    def _fatal_error(self) -> None:
        """Ends the app without Textual's traceback, which takes seconds if a record is among the locals."""
        self._close_messages_no_wait()

    def action_walk(self) -> None:
        """Opens the walkthrough."""
        self.push_screen(self._walk())

    def _walk(self) -> Screen[None]:
        from mhacli.viewer.text import TextScreen, walk_page

        return TextScreen("walkthrough", walk_page(self.session.record, colour=self.session.colour))

    def action_effects(self) -> None:
        """Opens the effects of removals."""
        if self.session.record.effect is not None:
            from mhacli.viewer.effects import EffectsScreen

            self.push_screen(EffectsScreen(self.session))
        elif isinstance(self.screen, HeadsScreen):
            self.screen.say("the record has no effects: mha effect … --save makes one that has")

    def action_help(self) -> None:
        """Opens the list of keys."""
        from mhacli.viewer.text import TextScreen, help_page

        self.push_screen(TextScreen("keys", help_page()))

    def action_origin(self) -> None:
        """Opens the provenance of the record and the settings of the picture."""
        from mhacli.viewer.text import TextScreen, origin_page

        self.push_screen(
            TextScreen("where this comes from", origin_page(self.session.record, self.session.picture_facts()))
        )


@contextmanager
def _ending_with_terminal() -> Iterator[None]:
    """Ends the process if the terminal vanishes, within the context. Not every terminal sends SIGHUP, and Textual would
    read the end of its input forever."""
    is_over = threading.Event()

    def watch() -> None:
        poller = select.poll()
        poller.register(sys.stdin.fileno(), 0)
        while not is_over.is_set():
            if any(event & select.POLLHUP for _, event in poller.poll(_LOOKING_MS)):
                os._exit(128 + signal.SIGHUP)  # no terminal is left to restore

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()


def run_viewer(record: Record, options: ViewerOptions) -> None:
    """Shows the viewer until the user quits. Raises the viewer's exception, and `KeyboardInterrupt` or `Terminated`
    after a signal, once the terminal is restored."""
    viewer = Viewer(record, options)
    before = {number: signal.getsignal(number) for number in _ENDING}

    def end(number: int, frame: FrameType | None) -> None:
        more_time(_RESTORING_S)
        viewer.end_by(number)

    for number in _ENDING:
        signal.signal(number, end)
    try:
        with _ending_with_terminal():
            viewer.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if viewer.fault is not None:
        raise viewer.fault
    if viewer.ended_by is not None:
        raise Terminated if viewer.ended_by == signal.SIGTERM else KeyboardInterrupt


# -------------------------------------------------------------------------------------------------------- the terminal


def _forgiving_decoder(encoding: str) -> Callable[[], IncrementalDecoder]:
    return partial(getincrementaldecoder(encoding), errors="replace")


class ForgivingDriver(linux_driver.LinuxDriver):
    """Textual's driver that skips bytes that are no UTF-8 and invalid escape sequences.

    Otherwise a paste in Latin-1, or noise on a serial line, would end its thread and the app.
    """

    def run_input_thread(self) -> None:
        """Reads until the app ends, and continues after invalid input."""
        linux_driver.getincrementaldecoder = _forgiving_decoder  # type: ignore[assignment, attr-defined]
        while not self.exit_event.is_set():
            try:
                super().run_input_thread()
            except (ValueError, OverflowError):  # numbers in an escape sequence
                continue
