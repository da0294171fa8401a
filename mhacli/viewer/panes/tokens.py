"""Panes of tokens: the text shaded by attention weights, the search line, and a query's top keys."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from textual import events
from textual.message import Message

from mhacli.render.base.cells import NOT_A_NUMBER
from mhacli.render.base.colours import EMPTY, NAN_SIGN, glyph, shade
from mhacli.render.base.format import fitted, token_text, weight_text
from mhacli.text.escape import visible
from mhacli.text.tokens import TokenSequence
from mhacli.viewer.lines import (
    ACCENT,
    BOLD,
    BROKEN,
    CURSOR,
    DIM,
    PLAIN,
    RULE_WIDTH,
    Line,
    Pane,
    ScrolledPane,
    ruled,
    segment,
    segments,
)
from mhacli.viewer.picture import Picture

_CHOSEN = "▸", ACCENT
"""The sign before a selected token that is shaded."""


@dataclass(frozen=True)
class TextFlow:
    """The layout of a text: each token's label and first column. `starts` are the first tokens of lines.

    One column before each token is free for the sign of its shade.
    """

    labels: tuple[str, ...]
    columns: tuple[int, ...]
    starts: tuple[int, ...]

    def line_of(self, token: int) -> int:
        """The line of a token."""
        return bisect_right(self.starts, token) - 1

    def tokens_of(self, line: int) -> range:
        """The tokens on a line."""
        end = self.starts[line + 1] if line + 1 < len(self.starts) else len(self.labels)
        return range(self.starts[line], end)

    def at(self, line: int, column: int) -> int | None:
        """The token at a line and column, or None."""
        if not 0 <= line < len(self.starts):
            return None
        tokens = [
            i for i in self.tokens_of(line) if self.columns[i] <= column < self.columns[i] + cell_len(self.labels[i])
        ]
        return tokens[0] if tokens else None

    def below(self, token: int, step: int) -> int:
        """The token below or above another, nearest to its column."""
        line = min(len(self.starts) - 1, max(0, self.line_of(token) + step))
        return min(self.tokens_of(line), key=lambda i: abs(self.columns[i] - self.columns[token]))


def flow(text: TokenSequence, width: int) -> TextFlow:
    """The tokens wrapped to `width` columns; longer tokens are cut."""
    labels, columns, starts, at = [], [], [], width
    for index in range(len(text.tokens)):
        label = fitted(token_text(text, index), max(1, width - 1))
        size = cell_len(label)
        if at + 1 + size > width:
            starts.append(index)
            at = 0
        labels.append(label)
        columns.append(at + 1)
        at += 1 + size
    return TextFlow(tuple(labels), tuple(columns), tuple(starts))


class Tokens(ScrolledPane):
    """A text with a selected token. Posts `Chosen` on a click."""

    class Chosen(Message):
        """A token was selected."""

        def __init__(self, pane: Tokens, place: int) -> None:
            super().__init__()
            self.pane, self.place = pane, place

    def __init__(self, *, colour: bool, id: str) -> None:
        super().__init__(id=id)
        self.colour = colour
        self.titles: Sequence[str] = ("",)
        self.text: TokenSequence | None = None
        self.chosen = (0, 0)
        self._level_of: Callable[[int], int] = lambda place: -1
        self._flow: tuple[TokenSequence, int, TextFlow] | None = None
        self._follows = True

    def show(
        self, text: TokenSequence, chosen: tuple[int, int], level_of: Callable[[int], int], titles: Sequence[str]
    ) -> None:
        """Draws a text with the range `chosen` marked and each token at its level, under the first of the titles that
        fits."""
        self._follows = self._follows or chosen != self.chosen or text is not self.text
        self.text, self.chosen, self._level_of, self.titles = text, chosen, level_of, titles
        self.repaint()

    def flow(self) -> TextFlow:
        """The text wrapped to the pane."""
        assert self.text is not None
        width = max(4, self.size.width)
        if self._flow is None or self._flow[:2] != (self.text, width):
            self._flow = self.text, width, flow(self.text, width)
        return self._flow[2]

    def paint(self, width: int, height: int) -> Sequence[Line]:
        """The title and the lines around the selected token or the scroll position."""
        if self.text is None:
            return [ruled(self.titles[0], width, focused=self.has_focus)]
        wrapped, room = self.flow(), max(1, height - 1)
        if self._follows:
            line = wrapped.line_of(self.chosen[0])
            if not self.top <= line < self.top + room:
                self.top = line - room // 2
            self._follows = False
        self.top = max(0, min(self.top, len(wrapped.starts) - room))
        shown = range(self.top, min(len(wrapped.starts), self.top + room))
        is_cut = len(wrapped.starts) > room
        more = f" · lines {shown.start + 1}–{shown.stop} of {len(wrapped.starts)}" if is_cut else ""
        fitting = (title for title in self.titles if cell_len(title + more) <= width - RULE_WIDTH)
        return [
            ruled(next(fitting, self.titles[-1]) + more, width, focused=self.has_focus),
            *(self._line(wrapped, line) for line in shown),
        ]

    def _line(self, wrapped: TextFlow, line: int) -> Line:
        pieces: list[Segment] = []
        for place in wrapped.tokens_of(line):
            level, is_chosen = self._level_of(place), self.chosen[0] <= place <= self.chosen[1]
            is_shaded = self.colour and level >= 0
            sign = NAN_SIGN if level == NOT_A_NUMBER else " " if self.colour or level < 0 else glyph(level)
            pieces.append(
                segment(*(_CHOSEN if is_chosen and is_shaded else (sign, BROKEN if sign == NAN_SIGN else PLAIN)))
            )
            style = EMPTY if level < 0 else shade(level) if self.colour else PLAIN
            pieces.append(segment(wrapped.labels[place], CURSOR if is_chosen and not is_shaded else style))
        return pieces

    def on_click(self, event: events.Click) -> None:
        """Selects the token under the mouse."""
        if self.text is not None and event.y >= 1:
            place = self.flow().at(self.top + event.y - 1, event.x)
            if place is not None:
                self.post_message(self.Chosen(self, place))


# -------------------------------------------------------------------------------------------------------------- search


SearchAxis = Literal["query", "key"]


def matches(text: TokenSequence, typed: str) -> tuple[int, ...]:
    """The positions of tokens that contain the typed text in any case; for a number, that position comes first."""
    if not typed:
        return ()
    needle = typed.casefold()
    places = [
        place
        for place, token in enumerate(text.tokens)
        if needle in token.casefold() or needle in token_text(text, place).casefold()
    ]
    number = int(typed) if typed.isascii() and typed.isdigit() and len(typed) < 10 else -1
    if 0 <= number < len(text.tokens):
        places = [number, *(place for place in places if place != number)]
    return tuple(places)


@dataclass(frozen=True)
class Search:
    """The typed text, the searched axis, the matching positions, and the current match."""

    axis: SearchAxis
    typed: str = ""
    places: tuple[int, ...] = ()
    at: int = 0

    def step(self, by: int) -> Search:
        """The next match or a later one, around the ends."""
        return Search(self.axis, self.typed, self.places, (self.at + by) % len(self.places)) if self.places else self

    @property
    def place(self) -> int | None:
        """The position of the current match; None without one."""
        return self.places[self.at] if self.places else None


def searched(text: TokenSequence, axis: SearchAxis, typed: str, begin: int) -> Search:
    """The matches of the typed text. The current one is the typed position, or the first match from `begin` on."""
    places = matches(text, typed)
    if typed.isdigit() and places and places[0] == int(typed):
        return Search(axis, typed, places, 0)
    return Search(axis, typed, places, next((i for i, place in enumerate(places) if place >= begin), 0))


class Prompt(Pane, can_focus=True):
    """The search line. It takes every key while focused, and posts the typed text."""

    class Typed(Message):
        """The typed text has changed."""

        def __init__(self, typed: str) -> None:
            super().__init__()
            self.typed = typed

    class Ended(Message):
        """The search has ended; its match was accepted or not."""

        def __init__(self, *, taken: bool) -> None:
            super().__init__()
            self.taken = taken

    class Turned(Message):
        """The search switched to the other axis."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.search = Search("query")
        self._typed = ""

    def open(self, search: Search) -> None:
        """Starts a new search."""
        self._typed = ""
        self.display = True
        self.show(search)

    def show(self, search: Search) -> None:
        """Shows the search and its number of matches."""
        self.search = search
        self.repaint()

    def paint(self, width: int, height: int) -> Sequence[Line]:
        """The typed text, and the number of matching tokens."""
        search = self.search
        count = (
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
                    (f"  {count}", BOLD),
                    ("  Enter takes it, Esc goes back, Tab the other axis", DIM),
                ]
            )
        ]

    def on_key(self, event: events.Key) -> None:
        """Takes every key."""
        event.stop()
        event.prevent_default()
        self.take(event)

    def take(self, event: events.Key) -> None:
        """Handles a key. The typed text is kept here, because the next key may arrive before the screen has searched."""
        if event.key in ("enter", "escape"):
            self.post_message(self.Ended(taken=event.key == "enter"))
        elif event.key == "tab":
            self.post_message(self.Turned())
        elif event.key == "backspace":
            self._type(self._typed[:-1])
        elif event.character is not None and event.is_printable:
            self._type(self._typed + event.character)

    def on_paste(self, event: events.Paste) -> None:
        """Takes the first line of pasted text."""
        event.stop()
        self._type(self._typed + event.text.split("\n")[0])

    def _type(self, typed: str) -> None:
        self._typed = typed
        self.post_message(self.Typed(typed))


# -------------------------------------------------------------------------------------------------------- the top keys


DECIMALS = 5
_BLOCKS = " ▏▎▍▌▋▊▉█"
_MOST_NAME = 18


def bar(part: float, width: int) -> str:
    """A bar for a fraction of `width` columns, in eighths of a column.

    >>> bar(0.5, 3)
    '█▌'
    """
    eighths = round(8 * width * min(1.0, max(0.0, part))) if part == part else 0
    return "█" * (eighths // 8) + (_BLOCKS[eighths % 8] if eighths % 8 else "")


class TopKeys(ScrolledPane):
    """The top keys of a query. Posts `Chosen` on a click."""

    class Chosen(Message):
        """A key was selected by its column in the finest map."""

        def __init__(self, column: int) -> None:
            super().__init__()
            self.column = column

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.picture: Picture | None = None
        self.row, self.column = 0, 0
        self.most: int | None = None
        self._listed: tuple[tuple[int, float], ...] = ()

    def show(self, picture: Picture | None, row: int, column: int, *, most: int | None) -> None:
        """Lists at most `most` keys of a row (None: as many as fit), with the cursor's marked."""
        is_other = picture is not self.picture or (row, most) != (self.row, self.most)
        self.picture, self.row, self.column, self.most = picture, row, column, most
        if is_other:
            self._listed, self.top = () if picture is None else picture.top_keys(row), 0
        self.repaint()

    @property
    def shown_keys(self) -> tuple[tuple[int, float], ...]:
        """The listed columns with their weights."""
        return self._listed[: self._room() if self.most is None else self.most]

    def _room(self) -> int:
        n_lines = max(1, self.size.height - 1)
        has_learned = self.picture is not None and self.picture.base.learned is not None
        return max(1, n_lines - has_learned - (len(self._listed) > n_lines - has_learned))

    def paint(self, width: int, height: int) -> Sequence[Line]:
        """The title, the top keys in descending order, and the weight of the others."""
        if self.picture is None:
            return [ruled("strongest keys", width, focused=self.has_focus)]
        noun = "key" if self.picture.base.block == 1 else "block"
        count = len(self._listed)
        title = (
            self._why_none(noun) if not count else f"top {len(self.shown_keys)} of {count} {noun}{'s' * (count != 1)}"
        )
        below = self._below()
        room = max(1, height - 1 - len(below))
        self.top = max(0, min(self.top, len(self.shown_keys) - room))
        visible = self.shown_keys[self.top : self.top + room]
        lines = [self._line(column, weight, width) for column, weight in visible]
        return [ruled(title, width, focused=self.has_focus), *lines, *below][:height]

    def _why_none(self, noun: str) -> str:
        assert self.picture is not None
        return f"no {noun} but sinks" if self.picture.is_taken[self.row].any() else f"no visible {noun}"

    @property
    def _largest(self) -> float:
        strongest = self._listed[0][1] if self._listed else 0.0
        return strongest if strongest > 0 else 1.0

    def _line(self, column: int, weight: float, width: int) -> Line:
        assert self.picture is not None
        label = min(_MOST_NAME, max(6, width - DECIMALS - 12))
        name = set_cell_size(fitted(self.picture.key_name(column), label), label)
        is_own = column == self.column
        number = f"{weight_text(weight, DECIMALS):>{DECIMALS + 2}}"
        room = max(0, width - label - len(number) - 4)
        return segments(
            [
                ("▸ " if is_own else "  ", ACCENT),
                (name, CURSOR if is_own else PLAIN),
                (f" {number} ", BOLD),
                (bar(weight / self._largest, room), ACCENT),
            ]
        )

    def _below(self) -> list[Line]:
        assert self.picture is not None
        rest, lines = self._listed[len(self.shown_keys) :], []
        if rest:
            lines.append(segments([(f"  {len(rest)} more get {weight_text(sum(s for _, s in rest), DECIMALS)}", DIM)]))
        learned = self.picture.base.learned
        if learned is not None and not self.picture.hides_sinks:
            lines.append(segments([(f"  sink logit {weight_text(float(learned[self.row]), DECIMALS)}", DIM)]))
        return lines

    def on_click(self, event: events.Click) -> None:
        """Selects the key under the mouse."""
        place = self.top + event.y - 1
        if event.y >= 1 and place < len(self.shown_keys):
            self.post_message(self.Chosen(self.shown_keys[place][0]))
