"""Jumping to a token: which tokens match what was typed, and the line that takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from textual import events
from textual.message import Message

from mhacli.render.base.format import token_text
from mhacli.spec.tokens import TokenSequence
from mhacli.text.escape import visible
from mhacli.viewer.panes.base import Pane
from mhacli.viewer.pictures.lines import ACCENT, BOLD, CURSOR, DIM, Line, segments

Axis = Literal["query", "key"]


def matches(text: TokenSequence, typed: str) -> tuple[int, ...]:
    """The places of the tokens that hold what was typed, capital or not; of a number also the place of that number, first."""
    if not typed:
        return ()
    wanted = typed.casefold()
    found = [
        place
        for place, token in enumerate(text.tokens)
        if wanted in token.casefold() or wanted in token_text(text, place).casefold()
    ]
    number = int(typed) if typed.isascii() and typed.isdigit() and len(typed) < 10 else -1
    if 0 <= number < len(text.tokens):
        found = [number, *(place for place in found if place != number)]
    return tuple(found)


@dataclass(frozen=True)
class Search:
    """What was typed, on which axis, and which of the places that match is meant."""

    axis: Axis
    typed: str = ""
    places: tuple[int, ...] = ()
    at: int = 0

    def step(self, by: int) -> Search:
        """The next match, or another, around the ends."""
        return Search(self.axis, self.typed, self.places, (self.at + by) % len(self.places)) if self.places else self

    @property
    def place(self) -> int | None:
        """The place that is meant, None where nothing matches."""
        return self.places[self.at] if self.places else None


def searched(text: TokenSequence, axis: Axis, typed: str, begin: int) -> Search:
    """The matches of what was typed; meant is that number's place, or the first match from `begin` on."""
    places = matches(text, typed)
    if typed.isdigit() and places and places[0] == int(typed):
        return Search(axis, typed, places, 0)
    return Search(axis, typed, places, next((i for i, place in enumerate(places) if place >= begin), 0))


class Prompt(Pane, can_focus=True):
    """A line that takes every key while it has the focus, and tells what was typed."""

    class Typed(Message):
        """What stands in the line now."""

        def __init__(self, typed: str) -> None:
            super().__init__()
            self.typed = typed

    class Ended(Message):
        """The line is done with: what was found is taken, or not."""

        def __init__(self, *, taken: bool) -> None:
            super().__init__()
            self.taken = taken

    class Turned(Message):
        """The other axis is meant."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.search = Search("query")
        self._typed = ""

    def open(self, search: Search) -> None:
        """Begins anew."""
        self._typed = ""
        self.display = True
        self.show(search)

    def show(self, search: Search) -> None:
        """Shows what is searched for, and how much was found."""
        self.search = search
        self.repaint()

    def paint(self, width: int, height: int) -> Sequence[Line]:
        """What was typed, and how many tokens match."""
        search = self.search
        found = (
            f"{search.at + 1} of {len(search.places)}"
            if search.places
            else "no match"
            if search.typed
            else "token or place"
        )
        return [
            segments(
                [
                    (f"to a {search.axis}: ", BOLD),
                    (visible(search.typed), ACCENT),
                    (" ", CURSOR),
                    (f"  {found}", BOLD),
                    ("  Enter takes it, Esc goes back, Tab the other axis", DIM),
                ]
            )
        ]

    def on_key(self, event: events.Key) -> None:
        """Takes every key: none of them means anything else now."""
        event.stop()
        event.prevent_default()
        self.take(event)

    def take(self, event: events.Key) -> None:
        """Takes a key. What was typed is kept here: the next key may come before the screen has looked for the last."""
        if event.key in ("enter", "escape"):
            self.post_message(self.Ended(taken=event.key == "enter"))
        elif event.key == "tab":
            self.post_message(self.Turned())
        elif event.key == "backspace":
            self._type(self._typed[:-1])
        elif event.character is not None and event.is_printable:
            self._type(self._typed + event.character)

    def on_paste(self, event: events.Paste) -> None:
        """Takes what was pasted, its first line."""
        event.stop()
        self._type(self._typed + event.text.split("\n")[0])

    def _type(self, typed: str) -> None:
        self._typed = typed
        self.post_message(self.Typed(typed))
