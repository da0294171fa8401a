"""The list of the keys that a query gives most, with exact shares and bars."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import set_cell_size
from textual import events
from textual.message import Message

from mhacli.render.base.format import fitted, share_text
from mhacli.viewer.lines import ACCENT, BOLD, CURSOR, DIM, PLAIN, Line, Pane, ruled, segments
from mhacli.viewer.picture import Picture

DECIMALS = 5
_BLOCKS = " ▏▎▍▌▋▊▉█"
_MOST_NAME = 18


def bar(share: float, width: int) -> str:
    """A bar as long as a share of `width` columns, in eighths of one.

    >>> bar(0.5, 3)
    '█▌'
    """
    eighths = round(8 * width * min(1.0, max(0.0, share))) if share == share else 0
    return "█" * (eighths // 8) + (_BLOCKS[eighths % 8] if eighths % 8 else "")


class TopKeys(Pane, can_focus=True):
    """The strongest keys of a query. It posts `Chosen` where the mouse chooses one."""

    class Chosen(Message):
        """A key was chosen, by its column in the finest map."""

        def __init__(self, column: int) -> None:
            super().__init__()
            self.column = column

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.picture: Picture | None = None
        self.row, self.column, self.top = 0, 0, 0
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
        """The columns that are listed, with their shares."""
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
        lines = [self._line(column, share, width) for column, share in visible]
        return [ruled(title, width, focused=self.has_focus), *lines, *below][:height]

    def _why_none(self, noun: str) -> str:
        assert self.picture is not None
        return f"no {noun} but sinks" if self.picture.is_taken[self.row].any() else f"no {noun} allowed"

    @property
    def _largest(self) -> float:
        """What the longest bar stands for: the strongest key's share."""
        strongest = self._listed[0][1] if self._listed else 0.0
        return strongest if strongest > 0 else 1.0

    def _line(self, column: int, share: float, width: int) -> Line:
        assert self.picture is not None
        label = min(_MOST_NAME, max(6, width - DECIMALS - 12))
        name = set_cell_size(fitted(self.picture.key_name(column), label), label)
        is_own = column == self.column
        number = f"{share_text(share, DECIMALS):>{DECIMALS + 2}}"
        room = max(0, width - label - len(number) - 4)
        return segments(
            [
                ("▸ " if is_own else "  ", ACCENT),
                (name, CURSOR if is_own else PLAIN),
                (f" {number} ", BOLD),
                (bar(share / self._largest, room), ACCENT),
            ]
        )

    def _below(self) -> list[Line]:
        """What keys get that are not listed, and what a learned sink takes."""
        assert self.picture is not None
        rest, lines = self._listed[len(self.shown_keys) :], []
        if rest:
            lines.append(segments([(f"  {len(rest)} more get {share_text(sum(s for _, s in rest), DECIMALS)}", DIM)]))
        learned = self.picture.base.learned
        if learned is not None and not self.picture.hides_sinks:
            lines.append(segments([(f"  learned sink {share_text(float(learned[self.row]), DECIMALS)}", DIM)]))
        return lines

    def on_click(self, event: events.Click) -> None:
        """Chooses the key under the mouse."""
        place = self.top + event.y - 1
        if event.y >= 1 and place < len(self.shown_keys):
            self.post_message(self.Chosen(self.shown_keys[place][0]))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Shows the keys further down."""
        self.top += 1
        self.repaint()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Shows stronger keys again."""
        self.top -= 1
        self.repaint()
