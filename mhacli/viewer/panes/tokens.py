"""Panes of tokens: the text shaded by attention weights, the line of a search, and the top keys of a query."""

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
from mhacli.spec.tokens import TokenSequence
from mhacli.text.escape import visible
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
"""In front of a chosen token that is shaded."""


@dataclass(frozen=True)
class TextFlow:
    """Where each token of a text stands: its label, and the column it begins at; `starts` are the first tokens of lines.

    In front of each token one column is free, for a sign of its shade.
    """

    labels: tuple[str, ...]
    columns: tuple[int, ...]
    starts: tuple[int, ...]

    def line_of(self, token: int) -> int:
        """The line that a token stands on."""
        return bisect_right(self.starts, token) - 1

    def tokens_of(self, line: int) -> range:
        """The tokens on a line."""
        end = self.starts[line + 1] if line + 1 < len(self.starts) else len(self.labels)
        return range(self.starts[line], end)

    def at(self, line: int, column: int) -> int | None:
        """The token at a place, None where there is none."""
        if not 0 <= line < len(self.starts):
            return None
        own = [
            i for i in self.tokens_of(line) if self.columns[i] <= column < self.columns[i] + cell_len(self.labels[i])
        ]
        return own[0] if own else None

    def below(self, token: int, step: int) -> int:
        """The token that stands below or above another, as near to its column as can be."""
        line = min(len(self.starts) - 1, max(0, self.line_of(token) + step))
        return min(self.tokens_of(line), key=lambda i: abs(self.columns[i] - self.columns[token]))


def flow(text: TokenSequence, width: int) -> TextFlow:
    """The tokens wrapped into `width` columns, longer ones cut."""
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
    """A text, one token of it chosen. It posts `Chosen` where the mouse chooses another."""

    class Chosen(Message):
        """A token was chosen."""

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
        """Draws a text with the places from the first to the last of `chosen` marked, each token at the level of its place; above
        it the first of the titles that fits."""
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
        """The title and the lines around the chosen token, or where the wheel went."""
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
        """Chooses the token under the mouse."""
        if self.text is not None and event.y >= 1:
            place = self.flow().at(self.top + event.y - 1, event.x)
            if place is not None:
                self.post_message(self.Chosen(self, place))


# -------------------------------------------------------------------------------------------------------------- search


SearchAxis = Literal["query", "key"]


def matches(text: TokenSequence, typed: str) -> tuple[int, ...]:
    """The places of the tokens that hold what was typed, capital or not; of a number also the place of that number, first."""
    if not typed:
        return ()
    wanted = typed.casefold()
    places = [
        place
        for place, token in enumerate(text.tokens)
        if wanted in token.casefold() or wanted in token_text(text, place).casefold()
    ]
    number = int(typed) if typed.isascii() and typed.isdigit() and len(typed) < 10 else -1
    if 0 <= number < len(text.tokens):
        places = [number, *(place for place in places if place != number)]
    return tuple(places)


@dataclass(frozen=True)
class Search:
    """What was typed, on which axis, and which of the places that match is meant."""

    axis: SearchAxis
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


def searched(text: TokenSequence, axis: SearchAxis, typed: str, begin: int) -> Search:
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


# -------------------------------------------------------------------------------------------------------- the top keys


DECIMALS = 5
_BLOCKS = " ▏▎▍▌▋▊▉█"
_MOST_NAME = 18


def bar(part: float, width: int) -> str:
    """A bar as long as a part of `width` columns, in eighths of one.

    >>> bar(0.5, 3)
    '█▌'
    """
    eighths = round(8 * width * min(1.0, max(0.0, part))) if part == part else 0
    return "█" * (eighths // 8) + (_BLOCKS[eighths % 8] if eighths % 8 else "")


class TopKeys(ScrolledPane):
    """The strongest keys of a query. It posts `Chosen` where the mouse chooses one."""

    class Chosen(Message):
        """A key was chosen, by its column in the finest map."""

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
        """Lists at most so many keys of a row (None: as many as fit), that of the cursor marked."""
        is_other = picture is not self.picture or (row, most) != (self.row, self.most)
        self.picture, self.row, self.column, self.most = picture, row, column, most
        if is_other:
            self._listed, self.top = () if picture is None else picture.top_keys(row), 0
        self.repaint()

    @property
    def shown_keys(self) -> tuple[tuple[int, float], ...]:
        """The columns that are listed, with their attention weights."""
        return self._listed[: self._room() if self.most is None else self.most]

    def _room(self) -> int:
        """How many keys fit, with what is said below."""
        n_lines = max(1, self.size.height - 1)
        has_learned = self.picture is not None and self.picture.base.learned is not None
        return max(1, n_lines - has_learned - (len(self._listed) > n_lines - has_learned))

    def paint(self, width: int, height: int) -> Sequence[Line]:
        """The title, the keys from the strongest down, and what the others get."""
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
        """What the longest bar stands for: the strongest key's attention weight."""
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
        """What keys get that are not listed, and what a sink logit takes."""
        assert self.picture is not None
        rest, lines = self._listed[len(self.shown_keys) :], []
        if rest:
            lines.append(segments([(f"  {len(rest)} more get {weight_text(sum(s for _, s in rest), DECIMALS)}", DIM)]))
        learned = self.picture.base.learned
        if learned is not None and not self.picture.hides_sinks:
            lines.append(segments([(f"  sink logit {weight_text(float(learned[self.row]), DECIMALS)}", DIM)]))
        return lines

    def on_click(self, event: events.Click) -> None:
        """Chooses the key under the mouse."""
        place = self.top + event.y - 1
        if event.y >= 1 and place < len(self.shown_keys):
            self.post_message(self.Chosen(self.shown_keys[place][0]))
