"""One head's pattern in the chosen view: a heatmap, each query's top keys, or a matrix.

A matrix is a shaded table with tokens on both axes and the maximum of each row marked. Hidden keys are always counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from mhacli.record.arrays import Array
from mhacli.record.record import Record
from mhacli.render.base.colours import EMPTY, level_of, shade
from mhacli.render.base.format import PADDING, filled, fitted, title_rule, token_at, weight_text
from mhacli.render.base.options import Screen, Selection, ViewOptions, balanced
from mhacli.render.base.tokens import MAX_TOKEN_ROWS
from mhacli.render.heads.head_map import HeadPattern
from mhacli.render.heads.heatmap import HeatScale, heat_scale, heatmap

MAX_ROWS = 24
_NAME, _NAME_WITH_NEXT = 16, 28
_LABEL_WIDTH, _KEY_WIDTH, _ENTROPY_WIDTH, _STRONGEST_WIDTH = 12, 10, 5, 12
_NARROW_LABEL = 6
_NEXT_WIDTH = 10
"""The width of a name that is followed by the generated next token."""
_HIDDEN = "… {} …"
_SINK_LOGIT = "s_aux"
_BETWEEN, _RULE = 2, 3
"""Blanks between matrices side by side, and the least extension of a title line."""


_BOLD, _DIM, _DIM_ITALIC, _MAGENTA = (Style.parse(name) for name in ("bold", "dim", "dim italic", "magenta"))
_TableCell = tuple[str, Style | None]


@dataclass(frozen=True)
class TitledPattern:
    """A pattern to draw with its title."""

    title: Text
    head: HeadPattern


@dataclass(frozen=True)
class PatternGroup:
    """Patterns drawn together. At `gap`, `hidden` names those left out."""

    patterns: Sequence[TitledPattern]
    gap: int = 0
    hidden: Text | None = None


def drawings(group: PatternGroup, scale: HeatScale, options: ViewOptions, screen: Screen) -> Iterator[RenderableType]:
    """Each pattern under its title, with as many matrices side by side as fit."""
    n = _n_beside(group, options, screen)
    if group.hidden is None:
        yield from _rows_of_drawings(group.patterns, n, scale, options, screen)
        return
    yield from _rows_of_drawings(group.patterns[: group.gap], n, scale, options, screen)
    yield group.hidden
    yield from _rows_of_drawings(group.patterns[group.gap :], n, scale, options, screen)


def _rows_of_drawings(
    patterns: Sequence[TitledPattern], n: int, scale: HeatScale, options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The drawings in rows of `n`."""
    if n == 1:
        for pattern in patterns:
            yield Group(title_rule(pattern.title), _drawing(pattern.head, scale, options, screen))
        return
    width = _panel_width(n, screen)
    for start in range(0, len(patterns), n):
        row = Table.grid(padding=(0, _BETWEEN, 0, 0), pad_edge=False)
        panels = [
            Group(title_rule(p.title), matrix(p.head, scale.largest, options, replace(screen, width=width)))
            for p in patterns[start : start + n]
        ]
        for pattern in patterns[start : start + n]:
            row.add_column(min_width=pattern.title.cell_len + _RULE)
        row.add_row(*panels)
        yield row


def _drawing(head: HeadPattern, scale: HeatScale, options: ViewOptions, screen: Screen) -> RenderableType:
    """The pattern as a matrix, a heatmap, or each query's top keys."""
    if not len(head.weights):
        return Text("none of the chosen rows is in this text", style="yellow")
    if options.view == "heatmap":
        return heatmap(head, scale, options, screen)
    if options.view == "top":
        return _top_keys(head, options)
    return matrix(head, scale.largest, options, screen)


def _n_beside(group: PatternGroup, options: ViewOptions, screen: Screen) -> int:
    """The number of matrices per row: as few rows as possible, evenly filled."""
    patterns = group.patterns
    if options.view != "matrix" or options.verbose or not all(len(p.head.weights) for p in patterns):
        return 1
    for n in range(len(patterns), 1, -1):
        width = _panel_width(n, screen)
        if all(p.title.cell_len + _RULE <= width and fits(p.head, options, width) for p in patterns):
            return -(-len(patterns) // -(-len(patterns) // n))
    return 1


def n_lines(group: PatternGroup, options: ViewOptions, screen: Screen) -> int:
    """The most lines that the patterns take, with titles and headings."""
    most = max((len(pattern.head.weights) for pattern in group.patterns), default=0)
    parts = [len(group.patterns)] if group.hidden is None else [group.gap, len(group.patterns) - group.gap]
    n_beside = _n_beside(group, options, screen)
    return sum(-(-part // n_beside) for part in parts) * (min(most, MAX_ROWS) + 2) + (group.hidden is not None)


def _panel_width(n: int, screen: Screen) -> int:
    return (screen.width - (n - 1) * _BETWEEN) // n


def fits(head: HeadPattern, options: ViewOptions, width: int) -> bool:
    """Whether a matrix of this width shows every key."""
    n_keys = int(head.weights.shape[1])
    return n_keys * (options.precision + 1) < width and layout_of(head, options, width).room >= n_keys


def drawing_scale(heads: Sequence[HeadPattern], largest: float, options: ViewOptions, screen: Screen) -> HeatScale:
    """The common scale of the chosen view. `largest` is the largest weight of a cell."""
    return heat_scale(heads, largest, options, screen) if options.view == "heatmap" else HeatScale("linear", largest)


def kv_head_of(record: Record, head: int) -> str:
    """The kv head of a query head, if it is shared."""
    group = record.config.heads_per_kv_head
    return f" · kv head {head // group}" if group > 1 else ""


# ------------------------------------------------------------------------------------------------------------ top keys


def _top_keys(head: HeadPattern, options: ViewOptions) -> RenderableType:
    """Each query's top keys with their weights in descending order, and the weight of any sink logit."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    width = _NAME if head.produced is None else _NAME_WITH_NEXT
    is_whole = options.everything or head.rows is not None
    weights, allowed = head.weights, head.allowed
    rows = balanced(len(weights), len(weights) if is_whole else MAX_TOKEN_ROWS)
    for place, query in enumerate(rows.shown):
        if rows.hidden and place == rows.before:
            table.add_row("", Text(f"⋮ {rows.hidden} rows (--all)", style="dim"))
        order = np.argsort(-weights[query], kind="stable")
        keys = order[allowed[query, order]][: options.top].tolist()
        keys_text = ", ".join(
            f"{token_at(head.key_name(k), head.key_index(k), width)} {weight_text(float(weights[query, k]), options.precision)}"
            for k in keys
        )
        sink = (
            f" · s_aux {weight_text(head.learned_weight(query), options.precision)}"
            if head.has_learned_sink and keys
            else ""
        )
        name = f"{token_at(head.query_name(query), head.query_index(query), width)} →"
        table.add_row(name, Text((keys_text or "no visible key") + sink))
    return table


# -------------------------------------------------------------------------------------------------------------- matrix


def matrix(head: HeadPattern, largest: float, options: ViewOptions, screen: Screen) -> RenderableType:
    """The table, or with `everything` as many tables as the keys need."""
    rows, layout = _rows_of(head, options), layout_of(head, options, screen.width)
    n_keys = head.weights.shape[1]
    if options.everything and n_keys > layout.room:
        starts = [*range(0, n_keys, layout.room), n_keys]
        panels = [Selection(tuple(range(a, b)), 0) for a, b in pairwise(starts)]
    else:
        panels = [balanced(n_keys, layout.room)]
    return Group(*(_Table(head, rows, keys, layout, largest, options, screen) for keys in panels))


def matrix_caption(groups: Sequence[PatternGroup], largest: float, options: ViewOptions, screen: Screen) -> Text:
    """The scale of matrices, and the meaning of the signs that occur."""
    small, top = weight_text(0.0, options.precision), weight_text(largest, options.precision)
    widths = [_panel_width(_n_beside(group, options, screen), screen) for group in groups]
    drawn = [(p.head, w) for group, w in zip(groups, widths, strict=True) for p in group.patterns]
    drawn = [(head, width) for head, width in drawn if len(head.weights)]
    layouts, heads = [layout_of(head, options, width) for head, width in drawn], [head for head, _ in drawn]
    most = max((float(np.nanmax(head.weights, initial=0.0)) for head in heads), default=0.0)
    is_exceeded = most > largest and weight_text(most, options.precision) != top  # by a query that sees a single key
    parts = [
        "each row: a query's attention weights over the keys",
        "* the row's maximum",
        f"shade linear, 0 … {top}{' or more' * is_exceeded}" + " for all heads" * (len(heads) > 1),
        f"0 masked, {small} small",
    ]
    parts += ["Σ sum of the row"] if any(layout.sum for layout in layouts) else []
    if any(head.has_learned_sink for head in heads):
        parts[-1] += f", less than 1 where the sink logit, which is no key, takes the rest: {_SINK_LOGIT}"
    parts += ["H entropy in nats"] if any(layout.has_entropy for layout in layouts) else []
    has_padding = any(len({len(s.tokens) for s in head.record.keys}) > 1 for head in heads)
    parts += [f"{PADDING} padding, masked"] if has_padding else []
    return Text("\n".join(filled(parts, screen.width)), style="dim")


@dataclass(frozen=True)
class MatrixLayout:
    """Widths in cells: of a query's name, a key's column, a number without mark, a row's sum (0: hidden) and the top
    key (0: hidden).

    `has_entropy`: rows show their entropy. `room` is the number of keys that fit. If not all do, `weight` is the width
    of the top key's weight after its name, 0 without room.
    """

    label: int
    key: int
    number: int
    room: int
    sum: int = 0
    has_entropy: bool = False
    strongest: int = 0
    weight: int = 0


def layout_of(head: HeadPattern, options: ViewOptions, width: int) -> MatrixLayout:
    """The widest layout that shows every key; else one that shows at least two keys and the number hidden.

    Rows show their sum if one is not 1, their entropy if it fits, and their top key if it may be hidden; all of these
    in the verbose view.
    """
    n_keys, rows, numbers = head.weights.shape[1], _rows_of(head, options), _number_widths(head, options)
    names = max(cell_len(head.key_name(j)) for j in range(n_keys))
    labels = max(len("query"), len(_gap(rows, 0)), *(cell_len(head.row_label(i)) for i in rows.shown))
    extra = 0 if head.produced is None else _NEXT_WIDTH
    total = numbers.sum if options.verbose or numbers.has_odd_sums else 0
    sums = _sums_width(head, total)
    for most, has_entropy, number in _preferences(head, numbers, options):
        label = min(labels, max(most + extra, len(_gap(rows, 0))))
        strongest = _STRONGEST_WIDTH if options.verbose else 0
        left = width - label - sums - (_ENTROPY_WIDTH + 1) * has_entropy - (strongest + 1 if strongest else 0)
        for key in range(max(number + 1, min(names, _KEY_WIDTH)), number, -1):
            if n_keys * (key + 1) <= left:
                return MatrixLayout(label, key, number, n_keys, total, has_entropy, strongest)
    return _cut_layout(head, options, width, MatrixLayout(labels, numbers.wide + 1, numbers.wide, n_keys, total))


def _preferences(head: HeadPattern, numbers: _NumberWidths, options: ViewOptions) -> Iterator[tuple[int, bool, int]]:
    """The widest name of a query, whether rows have their entropy, and the width of numbers, in order of preference."""
    if head.site == "pattern":  # after dropout a row is no distribution
        yield _LABEL_WIDTH, True, numbers.wide
        if options.verbose:
            return
        yield _LABEL_WIDTH, True, numbers.short
    yield from ((label, False, n) for label in (_LABEL_WIDTH, _NARROW_LABEL) for n in (numbers.wide, numbers.short))


def _sums_width(head: HeadPattern, total: int) -> int:
    sink = max(len(_SINK_LOGIT), total) + 1 if head.has_learned_sink else 0
    return total + 1 + sink if total else 0


def _cut_layout(head: HeadPattern, options: ViewOptions, width: int, whole: MatrixLayout) -> MatrixLayout:
    """The layout if not all keys fit: the others are counted, or follow in a table below."""
    n_keys, rows = whole.room, _rows_of(head, options)
    has_strongest = options.verbose or not options.everything
    gap = 0 if options.everything else len(_HIDDEN.format(n_keys)) + 1
    narrow = max(len("max"), len(str(n_keys - 1)))
    sums = _sums_width(head, whole.sum)
    tried = [
        (_LABEL_WIDTH, _STRONGEST_WIDTH, whole.number, head.site == "pattern"),
        (_NARROW_LABEL, narrow, whole.number, head.site == "pattern"),
        (_NARROW_LABEL, narrow, whole.number, False),
        (_NARROW_LABEL, narrow, 0, False),
    ]
    for most, strongest, weight, has_entropy in tried:
        most += 0 if head.produced is None else _NEXT_WIDTH
        label = min(whole.label, max(most, len(_gap(rows, 0))))
        left = width - label - sums - (_ENTROPY_WIDTH + 1) * has_entropy - gap
        left -= (strongest + 1 + (weight + 1 if weight else 0)) if has_strongest else 0
        if left // (whole.key + 1) >= 2:
            break
    room = max(2, left // (whole.key + 1))
    if not has_strongest:
        strongest = weight = 0
    return replace(whole, label=label, room=room, has_entropy=has_entropy, strongest=strongest, weight=weight)


@dataclass(frozen=True)
class _NumberWidths:
    """The width of a weight, of one in `short` form (weights from 1 on with a decimal less), and of a row's sum; and
    whether a printed sum differs from 1."""

    wide: int
    short: int
    sum: int
    has_odd_sums: bool


def _number_widths(head: HeadPattern, options: ViewOptions) -> _NumberWidths:
    precision = options.precision
    largest = float(np.fmax.reduce(head.weights, axis=None))
    sums = head.weights.sum(axis=1, dtype=np.float64)
    texts = {weight_text(float(x), precision) for x in sums}
    wide = max(len(weight_text(x, precision)) for x in (0.0, largest))
    least = len("drop") if head.site == "dropped" else len("nan") if np.isnan(sums).any() else 0
    return _NumberWidths(
        wide=max(wide, least),
        short=max(min(wide, max(precision + 1, wide - 1)), least),
        sum=max(map(len, texts)),
        has_odd_sums=texts != {weight_text(1.0, precision)},
    )


def _rows_of(head: HeadPattern, options: ViewOptions) -> Selection:
    is_whole = options.everything or head.rows is not None
    return balanced(len(head.weights), len(head.weights) if is_whole else MAX_ROWS)


def _gap(rows: Selection, width: int) -> str:
    """The number of hidden rows, in words if there is room."""
    text = f"⋮ {rows.hidden} rows"
    return text if len(text) <= width else f"⋮ {rows.hidden}"


@dataclass(frozen=True)
class _Column:
    """A column of a matrix: its heading, its width in cells, and its alignment."""

    heading: _TableCell
    width: int
    side: Literal["<", "^", ">"] = ">"

    def holding(self, cells: Iterable[_TableCell]) -> _Column:
        """The column, wide enough for its heading and these cells."""
        return replace(self, width=max(cell_len(self.heading[0]), *(cell_len(text) for text, _ in cells)))

    def padded(self, text: str) -> str:
        """The text in the width of the column."""
        blanks = self.width - (len(text) if text.isascii() else cell_len(text))
        before = {"<": 0, "^": blanks // 2, ">": blanks}[self.side]
        return " " * before + text + " " * (blanks - before)


@dataclass(frozen=True)
class _Table:
    """A table of the matrix. It yields line by line, so that memory does not grow with the text."""

    head: HeadPattern
    rows: Selection
    keys: Selection
    layout: MatrixLayout
    largest: float
    options: ViewOptions
    screen: Screen

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """The fixed width."""
        width = sum(column.width + 1 for column in self._columns()) - 1
        return Measurement(width, width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """The heading, then a line for each query."""
        columns = self._columns()
        yield from _line(columns, [column.heading for column in columns])
        weights, allowed = self.head.weights, self.head.allowed
        for place, query in enumerate(self.rows.shown):
            if self.rows.hidden and place == self.rows.before:
                yield Segment(_gap(self.rows, self.layout.label), _DIM)
                yield Segment.line()
            cells = iter([*self._beside(query, weights[query], allowed[query])])
            yield from _line(columns, [next(cells), *self._cells(weights[query], allowed[query]), *cells])

    def _columns(self) -> list[_Column]:
        """The columns, as wide as their contents."""
        head, layout = self.head, self.layout
        keys = [_Column(_key_heading(head, key, layout.key), layout.key) for key in self.keys.shown]
        if self.keys.hidden:
            keys.insert(self.keys.before, self._hidden_column())
        signs = ["Σ"] if layout.sum else []
        signs += [_SINK_LOGIT] if layout.sum and head.has_learned_sink else []
        signs += ["H"] if layout.has_entropy else []
        beside = [_Column((sign, _DIM), 0) for sign in signs]
        if layout.strongest:
            strongest = "strongest" if layout.strongest >= len("strongest") else "max"
            beside.append(_Column((strongest, _DIM), 0, "<"))
        weights, allowed = head.weights, head.allowed
        rows = [[*self._beside(query, weights[query], allowed[query])] for query in self.rows.shown]
        return [
            _Column(("query", _DIM), 0, "<").holding(row[0] for row in rows),
            *keys,
            *(column.holding(row[number] for row in rows) for number, column in enumerate(beside, 1)),
        ]

    def _hidden_column(self) -> _Column:
        weights, allowed = self.head.weights, self.head.allowed
        cells = (self._hidden_weight(weights[query], allowed[query]) for query in self.rows.shown)
        return _Column((_HIDDEN.format(self.keys.hidden), _DIM), 0, "^").holding(cells)

    def _beside(self, query: int, weights: Array, allowed: Array) -> Iterator[_TableCell]:
        """The cells of a row besides its keys: the query's name, then the columns on the right."""
        head, layout, precision = self.head, self.layout, self.options.precision
        yield fitted(head.row_label(query), layout.label), _BOLD
        if layout.sum:
            yield weight_text(float(weights.sum(dtype=np.float64)), precision), None
            if head.has_learned_sink:
                yield weight_text(head.learned_weight(query), precision), _MAGENTA
        if layout.has_entropy:
            yield f"{head.entropy[query]:.2f}", None
        if layout.strongest:
            yield _strongest_cell(head, _largest_key(weights, allowed), weights, allowed, layout, self.options)

    def _cells(self, weights: Array, allowed: Array) -> Iterator[_TableCell]:
        """The weights of the keys, with the sum of hidden ones in their place."""
        largest_key = _largest_key(weights, allowed)
        shown = list(self.keys.shown)
        numbers = zip(shown, weights[shown].tolist(), allowed[shown].tolist(), strict=True)
        for place, (key, weight, is_allowed) in enumerate(numbers):
            if self.keys.hidden and place == self.keys.before:
                yield self._hidden_weight(weights, allowed)
            text, style = self._cell(weight, is_allowed)
            yield text + ("*" if key == largest_key else " "), style if self.screen.colour else None

    def _hidden_weight(self, weights: Array, allowed: Array) -> _TableCell:
        before = self.keys.before
        hidden = slice(self.keys.shown[before - 1] + 1, self.keys.shown[before])
        mass = weight_text(float(weights[hidden].sum(dtype=np.float64)), self.options.precision)
        return mass if allowed[hidden].any() else "0", _DIM_ITALIC

    def _cell(self, weight: float, is_allowed: bool) -> _TableCell:
        """The text and shade of a cell. In a tight layout, weights from 1 on have a decimal less."""
        if not is_allowed:
            return "0", EMPTY
        if weight == 0 and self.head.site == "dropped":
            return "drop", EMPTY
        text = weight_text(weight, self.options.precision)
        if len(text) > self.layout.number:
            text = weight_text(weight, self.options.precision - 1)
        return text, None if math.isnan(weight) else shade(level_of(weight, self.largest))


def _line(columns: Sequence[_Column], cells: Sequence[_TableCell]) -> Iterator[Segment]:
    """The cells, padded to their columns, with a blank between them."""
    plain = ""
    for column, (text, style) in zip(columns, cells, strict=True):
        if style is None:
            plain += column.padded(text) + " "
            continue
        if plain:
            yield Segment(plain)
        yield Segment(column.padded(text), style)
        plain = " "
    yield Segment(plain[:-1] + "\n")


def _key_heading(head: HeadPattern, key: int, width: int) -> _TableCell:
    return fitted(head.key_name(key), width), _DIM if head.is_padding(key) else _BOLD


def _largest_key(weights: Array, allowed: Array) -> int:
    """The key with the largest weight of a row; −1 if there is none."""
    return int(weights.argmax()) if allowed.any() and not np.isnan(weights).any() else -1


def _strongest_cell(
    head: HeadPattern, key: int, weights: Array, allowed: Array, layout: MatrixLayout, options: ViewOptions
) -> _TableCell:
    """The top key of a row (−1: none), with its weight if it fits."""
    if key < 0:
        return _no_strongest(layout, "not a number" if allowed.any() else "none visible")
    index = str(head.key_index(key))
    is_narrow = layout.strongest < _STRONGEST_WIDTH
    name = index if is_narrow else fitted(f"{index} {head.key_name(key)}", layout.strongest)
    if layout.weight:
        name += " " * (layout.strongest - cell_len(name) + 1)
        name += f"{weight_text(float(weights[key]), options.precision):>{layout.weight}}"
    return name, None


def _no_strongest(layout: MatrixLayout, reason: str) -> _TableCell:
    return ("–", None) if layout.strongest < _STRONGEST_WIDTH else (reason, _DIM)
