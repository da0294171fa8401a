"""The viewer's app: which head, sequence and scale are looked at, and the screens between which one goes."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, get_args

from rich.console import RenderableType
from textual import events
from textual.app import App
from textual.screen import Screen

from mhacli.errors import MhaError
from mhacli.io.interrupts import Terminated, more_time
from mhacli.render.base.options import Scale, ViewOptions
from mhacli.render.heads.drawable import scale_of
from mhacli.results.record.arrays import are_read
from mhacli.results.record.consistency import contradictions
from mhacli.results.record.record import Record
from mhacli.text.escape import visible
from mhacli.viewer.driver import ForgivingDriver
from mhacli.viewer.pictures.gallery import Entry, Gallery, gallery
from mhacli.viewer.screens.base import ViewerScreen
from mhacli.viewer.screens.overview import Overview

if TYPE_CHECKING:  # numpy is loaded when the first screen can be seen
    from mhacli.viewer.pictures.picture import Picture

_SCALES: tuple[Scale, ...] = get_args(Scale)
_KEPT_PICTURES = 64
"""Pictures that are kept to come back to; of large maps only the last, for one may take hundreds of megabytes."""
_LARGE = 1_000_000
_ENDING = (signal.SIGINT, signal.SIGTERM)
_LOOKING_MS = 1000
"""How often it is seen whether the viewer is over; a terminal that is gone is seen at once."""
_RESTORING_S = 5.0
"""How long the terminal may take to be given back after a signal."""


@dataclass(frozen=True)
class ViewerOptions:
    """How the viewer begins. `place` is a layer's row and a head's column in the gallery, None for the first, `is_open` whether
    to look into it at once; `scale` None: linear for short texts, log for long ones and blocks."""

    colour: bool = True
    scale: Scale | None = None
    hides_sinks: bool = False
    sequence: int = 0
    place: tuple[int, int] | None = None
    is_open: bool = False


@contextmanager
def _colour_in_environment(has_colour: bool) -> Iterator[None]:
    """While it lasts the environment says what Textual asks it, and nobody else: whether there is colour."""
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
    #said { height: 2; }
    #legend { height: 1; }
    #body { height: 1fr; layout: grid; grid-size: 2 2; grid-columns: 1fr 31; grid-rows: 1fr 6; grid-gutter: 0 1; }
    #keys, #queries, #matrix, #strongest, #heads, #numbers, #page { width: 100%; height: 100%; }
    .small #body { grid-columns: 1fr 26; grid-rows: 1fr 4; }
    .wide #body { grid-size: 2 3; grid-columns: 1fr 68; grid-rows: 1fr 1fr 1fr; grid-gutter: 0 2; }
    .wide #matrix { row-span: 3; }
    Overview #body { grid-size: 1 2; grid-columns: 1fr; grid-rows: 1fr 6; }
    Overview.wide #body { grid-size: 2 1; grid-columns: 1fr 48; grid-rows: 1fr; }
    .tiny #body { grid-size: 1 1; grid-columns: 1fr; grid-rows: 1fr; }
    .tiny #strongest, .tiny #keys, .tiny #queries, .tiny #numbers { display: none; }
    Reading #page { height: 1fr; }
    """

    def __init__(self, record: Record, options: ViewerOptions) -> None:
        with _colour_in_environment(options.colour):
            super().__init__(driver_class=ForgivingDriver, ansi_color=True)
        self.record, self.colour = record, options.colour
        self.gallery: Gallery = gallery(record)
        self.sequence, self.scale, self.hides_sinks = options.sequence, options.scale, options.hides_sinks
        self.place = options.place or next(iter(self.gallery.places), (0, 0))
        self._is_open = options.is_open
        self.ended_by: int | None = None
        self._running_loop: asyncio.AbstractEventLoop | None = None
        self.fault: Exception | None = None
        self._pictures: dict[tuple[object, ...], Picture] = {}
        self._contradicts: dict[bool, bool] = {}

    def get_default_screen(self) -> Screen[None]:
        """The first screen: all heads, or the walkthrough of a record that has no heads."""
        return Overview(self.gallery, colour=self.colour) if self.gallery.places else self._walk()

    def on_mount(self) -> None:
        """Opens the head that was asked for."""
        self._running_loop = asyncio.get_running_loop()
        if self.ended_by is not None:  # before there was a loop to tell
            self.leave()
        elif self._is_open and self.gallery.places and self.entry().drawn is not None:
            self.open_head()

    # ------------------------------------------------------------------------------------------------------- what is seen

    def contradicts_itself(self) -> bool:
        """Whether something does not add up in the record, as far as it is read."""
        known = are_read(self.record.arrays)
        if known not in self._contradicts:
            self._contradicts[known] = bool(contradictions(self.record))
        return self._contradicts[known]

    def entry(self) -> Entry:
        """The head that is looked at."""
        found = self.gallery.entry(*self.place)
        assert found is not None, "the cursor stands on heads alone"
        return found

    def picture(self) -> Picture | None:
        """Its picture; None where the record holds nothing to draw."""
        return self.picture_of(self.entry())

    def picture_of(self, entry: Entry) -> Picture | None:
        """The picture of a head, kept while it is near."""
        key = (entry, self.sequence, self.scale, self.hides_sinks)
        if key not in self._pictures:
            made = self.new_picture_of(entry)
            if made is None:
                return None
            is_large = made.n_rows * made.n_columns > _LARGE
            while self._pictures and (is_large or len(self._pictures) >= _KEPT_PICTURES):
                self._pictures.pop(next(iter(self._pictures)))
            self._pictures[key] = made
        return self._pictures[key]

    def new_picture_of(self, entry: Entry) -> Picture | None:
        """The picture of a head for whoever keeps nothing of it."""
        from mhacli.viewer.pictures.picture import Picture

        if entry.drawn is None:
            return None
        return Picture(entry, entry.drawn, self.sequence, self.scale_for(entry), self.hides_sinks)

    def scale_for(self, entry: Entry) -> Scale:
        """The scale of a head's picture: the one that was chosen, or that which fits it."""
        return scale_of(ViewOptions(map_scale=self.scale), [] if entry.drawn is None else [entry.drawn])

    def why_nothing(self) -> str:
        """Why a head cannot be drawn, and what helps."""
        if self.record.survey is None and self.record.model is None:
            return "the record holds no pattern: mha run … --keep pattern keeps it"
        return "the record holds neither a pattern nor a map of this head"

    def scale_words(self) -> str:
        """How small pictures are shaded."""
        sinks = "sinks taken out, rows renormalised" if self.hides_sinks else "sinks shown"
        return f"pictures: {self.scale_for(self.entry())}, each up to its own largest · {sinks}"

    # ---------------------------------------------------------------------------------------------------------- what changes

    def to_head(self, step: int) -> None:
        """The next or previous head."""
        self.place = self.gallery.beside(self.place, step)

    def to_layer(self, step: int) -> bool:
        """The same head of another layer; False where there is none."""
        before, self.place = self.place, self.gallery.above(self.place, step)
        return self.place != before

    def to_sequence(self, step: int) -> bool:
        """Another sequence, around the ends; False where there is but one."""
        self.sequence = (self.sequence + step) % len(self.record.sequences)
        return len(self.record.sequences) > 1

    def to_next_scale(self) -> None:
        """Linear, log, rank, and again."""
        now = self.scale_for(self.entry())
        self.scale = _SCALES[(_SCALES.index(now) + 1) % len(_SCALES)]

    def turn_sinks(self) -> None:
        """Sinks out of the pictures, or back."""
        self.hides_sinks = not self.hides_sinks

    # ---------------------------------------------------------------------------------------------------------------- screens

    def on_key(self, event: events.Key) -> None:
        """Keys that came while the line of a search was opening, still on their way through the part that had the focus, belong
        to it."""
        if isinstance(self.screen, ViewerScreen) and self.screen.take(event):
            event.prevent_default()

    def open_head(self) -> None:
        """Looks into the head under the cursor."""
        from mhacli.viewer.screens.head import HeadScreen

        self.push_screen(HeadScreen(colour=self.colour))

    def back(self) -> None:
        """The screen before; from the first, the end."""
        if len(self.screen_stack) > 1:
            self.pop_screen()
        else:
            self.leave()

    def leave(self) -> None:
        """Ends the app."""
        self.exit()

    def end_by(self, number: int) -> None:
        """Ends the app for a signal, from its handler."""
        self.ended_by = number
        if self._running_loop is not None:
            self._running_loop.call_soon_threadsafe(self.leave)

    def _handle_exception(self, error: Exception) -> None:
        """Keeps what went wrong for whoever started the viewer, who tells it in our words, instead of a traceback."""
        self.fault = self.fault or error
        super()._handle_exception(error)
        self._exit_renderables.clear()

    def panic(self, *renderables: RenderableType) -> None:
        """Ends the app for a fault outside of its own messages, such as a terminal that can no longer be read; the traceback that
        Textual would show is not drawn."""
        self.fault = self.fault or MhaError(
            "the terminal must be readable, got a fault of its input", code="no-terminal"
        )
        self._close_messages_no_wait()

    def _fatal_error(self) -> None:
        """Ends the app without drawing Textual's traceback, which takes seconds where a record is among its locals."""
        self._close_messages_no_wait()

    def show_walk(self) -> None:
        """The walkthrough."""
        self.push_screen(self._walk())

    def _walk(self) -> Screen[None]:
        from mhacli.viewer.screens.text import Reading, walk_page

        return Reading("walkthrough", walk_page(self.record, colour=self.colour))

    def show_help(self) -> None:
        """All keys."""
        from mhacli.viewer.screens.text import Reading, help_page

        self.push_screen(Reading("keys", help_page()))

    def show_origin(self) -> None:
        """Where the numbers come from, and what is drawn of them."""
        from mhacli.viewer.screens.text import Reading, origin_page

        self.push_screen(Reading("where this comes from", origin_page(self.record, self._drawn_words())))

    def _drawn_words(self) -> Sequence[tuple[str, str]]:
        from mhacli.viewer.pictures.caption import scale_range, sink_words

        shown = self.picture() if self.gallery.places else None
        if shown is None:
            return ()
        kept = [("not kept", ", ".join(map(visible, self.record.not_kept)))] if self.record.not_kept else []
        return [
            ("drawn", shown.entry.label),
            ("scale", f"{shown.scale}, {scale_range(shown.at(1), shown.scale)}"),
            ("sinks", sink_words(shown)),
            *kept,
        ]


@contextmanager
def _ending_with_terminal() -> Iterator[None]:
    """While it lasts, a terminal that goes away ends the process as a hang-up does. Not every terminal sends that signal, and
    Textual would read the end of its input for ever."""
    is_over = threading.Event()

    def watch() -> None:
        poller = select.poll()
        poller.register(sys.stdin.fileno(), 0)
        while not is_over.is_set():
            if any(event & select.POLLHUP for _, event in poller.poll(_LOOKING_MS)):
                os._exit(128 + signal.SIGHUP)  # nothing is left to restore, and nobody to tell

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()


def run_viewer(record: Record, options: ViewerOptions) -> None:
    """Shows the viewer on the terminal until the reader leaves it. Raises what went wrong in it, and `KeyboardInterrupt` or
    `Terminated` where a signal ended it, when the terminal is as it was."""
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
