"""The first screen: all heads, and the statistics of the head under the cursor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container

from mhacli.record.heads import OF_REMOVAL, STATISTICS, HeadStatistics, Statistic, words_of_type
from mhacli.record.record import Record
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.format import check_text, count_of, fitted, short_text, token_text, weight_text
from mhacli.text.escape import visible
from mhacli.viewer.head_table import TableHead
from mhacli.viewer.lines import (
    ACCENT,
    BOLD,
    DIM,
    PLAIN,
    WARNING,
    Line,
    Lines,
    StyledText,
    flowed,
    kind_sign,
    kind_words,
    ruled,
    segments,
)
from mhacli.viewer.panes.heads import HeadGrid
from mhacli.viewer.screen import OVERVIEW_KEYS, HeadsScreen, bindings, keys_line
from mhacli.viewer.session import Session

_WIDE, _TOKEN, _MOST_CELLS = 110, 12, 5
_NUMBERS_WIDTH, _NUMBERS_LINES, _OTHER_LINES = 50, 5, 4
"""The width of the statistics beside the grid, their height below it, and the other lines of the screen."""


class Overview(HeadsScreen):
    """All heads of a record."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(OVERVIEW_KEYS)

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.head_table = session.head_table
        self.top_line, self.numbers, self.legend, self.last = (
            Lines(id=name) for name in ("top", "numbers", "legend", "last")
        )
        self.heads = HeadGrid(session.head_table, session.new_picture_of, colour=session.colour)

    def compose(self) -> ComposeResult:
        """The panes from the top."""
        yield self.top_line
        with Container(id="body"):
            yield self.heads
            yield self.numbers
        yield self.legend
        yield self.last

    def on_mount(self) -> None:
        """Focuses the grid."""
        self.heads.focus()

    def on_resize(self) -> None:
        """Redraws for the new size."""
        self._arrange()
        self.call_after_refresh(self.draw)

    def on_screen_resume(self) -> None:
        """Redraws for the head selected on another screen."""
        self._arrange()
        self._message = ""
        self.draw()

    def _arrange(self) -> None:
        """Places the statistics beside the grid on a wide screen unless thumbnails need the width, below it on others,
        and hides them on a tiny one."""
        width, height = self.size.width, self.size.height - _OTHER_LINES
        beside, above = (width - _NUMBERS_WIDTH, height), (width, height - _NUMBERS_LINES)
        fits_beside, fits_above = (self.heads.layout_for(*room).thumbnail is not None for room in (beside, above))
        is_wide = width >= _WIDE
        self.set_class(is_wide and (fits_beside or not fits_above), "wide")
        self.set_class(is_wide and fits_above and not fits_beside, "broad")
        self.set_class(not is_wide and self.size.height < 12, "tiny")

    def draw(self) -> None:
        """Redraws the screen."""
        if not self.is_mounted or self.size.width == 0:
            return
        head, record, sequence = self.session.head(), self.session.record, self.session.sequence
        self.top_line.show(
            lambda width: [_record_line(record, sequence, width, doubtful=self.session.contradicts_itself())]
        )
        self.heads.show(self.session.place, (sequence, self.session.scale, self.session.hides_sinks))
        self.numbers.show(partial(_numbers_beside if self.has_class("wide") else _numbers_below, head))
        if self.heads.size:
            self.legend.styles.height = len(self._legend(self.size.width))
        self.legend.show(self._legend)
        self.last.show(self._keys)

    def _has_pictures(self) -> bool:
        return self.heads.tiles_for(self.heads.size.width, self.heads.size.height) is not None

    def _keys(self, width: int) -> list[Line]:
        without = self.idle() if self._has_pictures() else (*self.idle(), "scale", "sinks")
        return [keys_line(OVERVIEW_KEYS, width, message=self._message, without=without)]

    def _legend(self, width: int) -> list[Line]:
        """The shading of thumbnails, and the signs of the types that occur unless thumbnails name them."""
        layout = self.heads.layout_for(self.heads.size.width, self.heads.size.height)
        shading: list[list[StyledText]] = [[(self.session.scale_words(), DIM)]] if self._has_pictures() else []
        if layout.thumbnail is not None and layout.width > self.heads.widest_title:
            return flowed(shading, width)
        kinds = [kind for kind in KIND_SIGNS if any(self._is_kind(place, kind) for place in self.head_table.places)]
        parts = [[kind_sign(self._first_of(kind)), (f" {words_of_type(kind).name}", PLAIN)] for kind in kinds]
        return flowed([*shading, *parts], width, "  ")[:2]

    def _is_kind(self, place: tuple[int, int], kind: str) -> bool:
        head = self.head_table.head_at(*place)
        return head is not None and head.statistics is not None and head.statistics.kind == kind

    def _first_of(self, kind: str) -> HeadStatistics | None:
        head = next(self.head_table.head_at(*place) for place in self.head_table.places if self._is_kind(place, kind))
        return None if head is None else head.statistics

    def action_move(self, direction: str) -> None:
        """Selects another head."""
        row, column = self.session.place
        places = self.head_table.places
        row_columns = [c for r, c in places if r == row]
        to = {
            "left": (row, max((c for c in row_columns if c < column), default=column)),
            "right": (row, min((c for c in row_columns if c > column), default=column)),
            "home": (row, row_columns[0]), "end": (row, row_columns[-1]), "top": places[0], "bottom": places[-1],
            "up": self.heads.beneath((row, column), -1), "down": self.heads.beneath((row, column), 1),
        }  # fmt: skip
        if direction in ("pageup", "pagedown"):
            page = max(1, self.heads.size.height - 3)
            column_places = [place for place in places if place[1] == column]
            at = column_places.index((row, column)) + (page if direction == "pagedown" else -page)
            to[direction] = column_places[min(len(column_places) - 1, max(0, at))]
        self._message = ""
        self.session.place = to.get(direction, (row, column))
        self.draw()

    def action_open(self) -> None:
        """Opens the head under the cursor."""
        if self.session.head().drawable is None:
            self.say(self.session.why_nothing())
        else:
            from mhacli.viewer.head import HeadScreen

            self.app.push_screen(HeadScreen(self.session))

    def on_head_grid_moved(self, message: HeadGrid.Moved) -> None:
        """Selects the clicked head; a second click opens it."""
        self.session.place = message.place
        self._message = ""
        self.action_open() if message.again else self.draw()


def _record_line(record: Record, sequence: int, width: int, *, doubtful: bool) -> Line:
    """One line: the checkpoint or layer, the texts, and the self-check."""
    c = record.config
    if record.model is not None:
        name = f"{visible(record.model.path.rstrip('/').rpartition('/')[2])} · {visible(record.model.family)}"
    else:
        name = f"d_model {c.d_model} · {count_of(c.n_heads, 'head')} × d_head {c.d_head}"
    text = record.sequences[sequence]
    tokens = count_of(len(text.tokens), "token", grouped=True)
    if len(record.sequences) > 1:
        tokens = f"sequence {sequence} of 0–{len(record.sequences) - 1}: {tokens}"
    if record.corpus is not None:
        n_documents = count_of(record.corpus.n_documents, "document", grouped=True)
        tokens = f"means over {n_documents}, patterns of one: {tokens}"
    check = record.self_check
    words = " ".join(token_text(text, i) for i in range(min(40, len(text.tokens))))
    parts: list[StyledText] = [(name, ACCENT), (f"  {tokens}", BOLD)]
    parts += [] if check.ok else [(f"  self-check {check_text(check)}", WARNING)]
    parts += [("  contradicts itself: press i", WARNING)] if doubtful else []
    used = sum(len(part) for part, _ in parts) + 2
    return segments([*parts, (f"  {fitted(words, max(0, width - used))}", DIM)])


def _numbers_below(head: TableHead, width: int) -> list[Line]:
    """The statistics of a head in a row, with uniform attention in parentheses."""
    parts: list[list[StyledText]] = []
    for name, value, uniform in _statistic_rows(head):
        parts.append([(f"{name} ", DIM), (value, BOLD), (f" ({uniform})" if uniform else "", DIM)])
    title = ruled(f"{head.label} · numbers (if uniform)", width, focused=False)
    return [title, *flowed(parts, width, "  ")]


def _numbers_beside(head: TableHead, width: int) -> list[Line]:
    """The statistics of a head in columns, and the cells with the largest ratio to uniform."""
    title = ruled(head.label, width, focused=False)
    is_verified = head.layer is None or head.layer.verified
    doubt = segments([] if is_verified else [("not verified", WARNING)])
    lines: list[Line] = [
        title,
        segments([kind_sign(head.statistics), (f" {kind_words(head.statistics)}", PLAIN)]),
        doubt,
    ]
    lines.append(segments([(f"{'':<25}{'this head':>10}{'uniform':>10}", DIM)]))
    for name, value, uniform in _statistic_rows(head):
        lines.append(segments([(f"{name:<25}", PLAIN), (f"{value:>10}", BOLD), (f"{uniform:>10}", DIM)]))
    cells = list(_standing_out(head, width))
    if cells:
        lines += [[], segments([("stands out: query → key, weight, × uniform", DIM)]), *cells]
    return lines


def _statistic_rows(head: TableHead) -> Iterator[tuple[str, str, str]]:
    statistics = head.statistics
    if statistics is None:
        return
    for statistic in (*STATISTICS, *OF_REMOVAL):
        value = getattr(statistics, statistic.field)
        if statistic.is_main and value is not None:
            uniform = getattr(statistics.uniform, statistic.field, None)
            yield (
                statistic.words.name or statistic.words.heading,
                _in_words(statistic, value),
                "" if uniform is None else _in_words(statistic, uniform),
            )


def _in_words(statistic: Statistic, number: float) -> str:
    if statistic.unit == "weight":
        return weight_text(number, 3)
    unit = " nats" if statistic.unit == "nats" else ""
    return f"{100 * number:.0f} %" if statistic.unit == "fraction" else short_text(number) + unit


def _standing_out(head: TableHead, width: int) -> Iterator[Line]:
    assert head.statistics is not None
    record = head.record
    for cell in head.statistics.largest[:_MOST_CELLS]:
        query, key = cell.query - record.first_query(cell.sequence), cell.key - record.first_key(cell.sequence)
        names = (
            f"{query} {fitted(token_text(record.sequences[cell.sequence], query), _TOKEN)}",
            f"{key} {fitted(token_text(record.keys[cell.sequence], key), _TOKEN)}",
        )
        several = f"{cell.sequence}: " if len(record.sequences) > 1 else ""
        cell_text = f"{several}{names[0]} → {names[1]}"
        yield segments(
            [
                (fitted(cell_text, max(8, width - 16)), PLAIN),
                (f"  {weight_text(cell.share, 3)}", BOLD),
                (f" ×{short_text(cell.lift)}", DIM),
            ]
        )
