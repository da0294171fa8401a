"""Heatmaps of the heads that changed most: A, B, and B − A, on common axes and scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.style import Style
from rich.text import Text

from mhacli.commands.diff.result import Differences, LayerDifference, Match, SiteDifference, TextDifference
from mhacli.errors import UsageError
from mhacli.record.arrays import Array
from mhacli.record.record import Record
from mhacli.render.base.cells import (
    CHANGES,
    FORBIDDEN,
    NOT_A_NUMBER,
    WEIGHTS,
    Ramp,
    cell,
    change_levels,
    half_cells,
    levels,
    range_text,
    ticks,
)
from mhacli.render.base.colours import NAN_SIGN
from mhacli.render.base.format import count_of, filled, fitted, number_text, title_rule, token_at, weight_text
from mhacli.render.base.options import Scale, Screen, ViewOptions, chosen
from mhacli.render.heads.drawable import DrawableHead, drawable_heads, is_before_dropout, scale_of
from mhacli.render.heads.head_map import HeadMap, head_map, largest_of_maps, pooled_means, sums
from mhacli.render.heads.heatmap import AXES

_MAX_MAPS = 1
"""The most heads drawn by default; --all draws all that changed."""
_MAX_LINES, _MAX_STACKED, _LABEL, _NARROW_LABEL, _BETWEEN = 40, 24, 12, 7, "  "
_MOST_NAMED = 3
"""The most changes listed below pictures whose cells have no room for numbers."""
_WIDE, _NAMED, _SIGN_AND_GAP, _MAX_CELL = 100, 5, 3, 8
"""The width of a number in a cell besides its decimals: a sign, a point, and a gap."""


@dataclass(frozen=True)
class _HeadPair:
    """A head of a sequence in both records, its layer's label, and the largest change of its weights."""

    label: str
    a: DrawableHead
    b: DrawableHead
    sequence: int
    largest: float | None


@dataclass(frozen=True)
class _Scales:
    """Common to all pictures: the largest weight, the largest change, and the type of scale."""

    top: float
    change: float
    kind: Scale


def maps_view(
    differences: Differences, records: tuple[Record, Record], *, options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The chosen heads, or those that changed most. `require_drawable` must accept the options."""
    if options.view == "none":
        return
    pairs, n_hidden = _pairs(differences, records, options)
    if not pairs:
        if options.heads or options.layers or options.sequences:
            yield Text(f"no head is drawn: {_why_nothing(differences)}", style="yellow")
        return
    panels = [_fitted(pair, differences, screen, options) for pair in pairs]
    fitting = [panel for panel in panels if panel is not None]
    maps = [each for panel in fitting for each in (panel.aligned_maps.a, panel.aligned_maps.b)]
    kind = scale_of(options, [head for pair in pairs for head in (pair.a, pair.b)])
    scales = _Scales(
        largest_of_maps(maps), max((panel.aligned_maps.largest_change for panel in fitting), default=0.0), kind
    )
    cells = _levels_of_all(maps, scales)
    for pair, panel in zip(pairs, panels, strict=True):
        body = _LIKE_NOTHING
        if panel is not None:
            body = _panels(panel, (next(cells), next(cells)), scales, screen=screen, precision=options.precision)
        yield Group(_title(pair, panel), body)
    if n_hidden:
        yield Text(f"⋮ {count_of(n_hidden, 'more head')} changed (--all, --head N)", style="dim")
    if fitting:
        yield _caption(
            maps, scales, screen, remarks=_remarks(fitting, records, has_same_tokens=differences.has_same_tokens)
        )


_LIKE_NOTHING = Text("not drawn side by side: the blocks of its maps cover other tokens", style="dim")


def _title(pair: _HeadPair, panels: _HeadPanels | None) -> Rule:
    parts = [pair.label] if pair.label else []
    parts += [f"head {pair.a.head}"]
    parts += [f"sequence {pair.sequence}"] if len(pair.a.record.sequences) > 1 else []
    if panels is not None:
        block = panels.aligned_maps.block
        parts += [f"largest change {number_text(panels.whole.largest_change)}"]
        parts += [f"each mark {block} × {block} tokens"] if block > 1 else []
    return title_rule(" · ".join(parts))


# ------------------------------------------------------------------------------------------------------------------- choices


def require_drawable(records: tuple[Record, Record], options: ViewOptions) -> None:
    """Raises `UsageError` for a head, layer or sequence that one of the records lacks."""
    for record in records:
        chosen(options.sequences, len(record.sequences), 1, False, "sequence")
        if record.model is None and options.layers is not None:
            raise UsageError("--layer works only with records of a checkpoint", hint="leave --layer out")
        if record.model is None:
            chosen(options.heads, record.config.n_heads, 1, False, "head")
        drawable_heads(record, options)


def _pairs(
    differences: Differences, records: tuple[Record, Record], options: ViewOptions
) -> tuple[list[_HeadPair], int]:
    """The requested heads whose pattern is in both records; otherwise the changed heads, the largest changes first."""
    heads_of_a, heads_of_b = (
        {_key(head, record): head for head in drawable_heads(record, options)} for record in records
    )
    pairs = [
        _HeadPair(layer.label, heads_of_a[key_a], heads_of_b[key_b], sequence, head.largest)
        for layer in differences.layers
        for site in _site_to_draw(layer)
        for head in site.heads
        if (key_a := (layer.index_a, head.head)) in heads_of_a and (key_b := (layer.index_b, head.head)) in heads_of_b
        for sequence in options.sequences or (head.sequence,)
    ]
    if options.heads is not None or options.layers is not None:
        return pairs, 0
    changed = sorted((pair for pair in pairs if pair.largest != 0), key=lambda pair: -_rank(pair))
    shown = changed if options.everything else changed[:_MAX_MAPS]
    return shown, len(changed) - len(shown)


def _why_nothing(differences: Differences) -> str:
    reasons = dict.fromkeys(site.why for layer in differences.layers for site in _site_to_draw(layer) if not site.heads)
    return "; ".join(reasons) or "one of the records does not hold its pattern or map (--keep pattern)"


def _key(head: DrawableHead, record: Record) -> tuple[int | None, int]:
    """The index of the head's layer and its number. Labels of layers may repeat."""
    return next((index for index, layer in enumerate(record.layers) if layer is head.layer), None), head.head


def _rank(pair: _HeadPair) -> float:
    """The sort key: numbers in only one record come first."""
    return math.inf if pair.largest is None else pair.largest


def _site_to_draw(layer: LayerDifference) -> Sequence[SiteDifference]:
    """The site to draw: the pattern if both have it, else the map."""
    return [site for name in ("pattern", "map") for site in layer.sites if site.site == name][:1]


def _text(differences: Differences, pair: _HeadPair, *, is_key: bool) -> TextDifference:
    """The token matches of an axis: those of the context for an encoder, and for keys from a context."""
    kind = None if pair.a.layer is None else pair.a.layer.kind
    families = {text.family for text in differences.texts}
    is_context = "context" in families and (kind == "encoder" or (is_key and kind in (None, "cross")))
    family = "context" if is_context else "texts"
    return next(text for text in differences.texts if text.family == family and text.sequence == pair.sequence)


# -------------------------------------------------------------------------------------------------------------- common axes


@dataclass(frozen=True)
class AlignedLine:
    """A row or column of both maps: its index in A and in B (−1 if absent), and whether the tokens are equal or
    replaced."""

    a: int
    b: int
    is_same: bool
    is_replaced: bool = False

    @property
    def is_compared(self) -> bool:
        """Whether the numbers of both are compared."""
        return self.is_same or self.is_replaced


@dataclass(frozen=True)
class AlignedMaps:
    """The maps of A, of B, and their `change` `[row, column]` on the same axes.

    Maps have `FORBIDDEN` where there is no cell. `change` is B − A, NaN if not compared, and infinite if only one
    number is NaN. `rows` and `columns` are the names of tokens or blocks, `row_places` and `column_places` their
    positions in A. A cell stands for `block` × `block` tokens and has the mean weight from its queries to its keys, or
    the mean change.
    """

    a: HeadMap
    b: HeadMap
    change: Array
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_places: tuple[int, ...]
    column_places: tuple[int, ...]

    @property
    def block(self) -> int:
        """The number of tokens that a cell stands for on each axis."""
        return self.a.block

    @property
    def largest_change(self) -> float:
        """The largest absolute change; 0 if none is finite."""
        return float(np.abs(self.change).max(initial=0.0, where=np.isfinite(self.change)))

    def fitting(self, rows: int, columns: int) -> AlignedMaps:
        """The maps in blocks, so that at most `rows` × `columns` cells are needed."""
        n_rows, n_columns = self.change.shape
        factor = max(1, -(-n_rows // max(1, rows)), -(-n_columns // max(1, columns)))
        if factor == 1:
            return self
        return replace(
            self,
            a=self.a.pooled(factor),
            b=self.b.pooled(factor),
            change=self._mean_change(factor),
            rows=self.rows[::factor],
            columns=self.columns[::factor],
            row_places=self.row_places[::factor],
            column_places=self.column_places[::factor],
        )

    def _mean_change(self, factor: int) -> Array:
        """The mean change of each block over the compared queries; NaN without any."""
        is_finite = ~np.isnan(self.change)
        n_queries = np.where(is_finite.any(axis=1), np.maximum(self.a.n_queries, self.b.n_queries), 0.0)
        means = pooled_means(np.where(is_finite, self.change, 0.0), n_queries, factor)
        n_compared = sums(sums(is_finite.astype(int), factor), factor, axis=1)
        return np.where(n_compared > 0, means, np.nan)


def aligned_maps(a: HeadMap, b: HeadMap, queries: TextDifference, keys: TextDifference) -> AlignedMaps | None:
    """Both maps and their difference; None if blocks of tokens cannot be aligned."""
    rows, columns = _lines(a, b, queries, 0), _lines(a, b, keys, 1)
    if rows is None or columns is None:
        return None
    of_a = _spread(a, [line.a for line in rows], [line.a for line in columns])
    of_b = _spread(b, [line.b for line in rows], [line.b for line in columns])
    same = np.outer([line.is_compared for line in rows], [line.is_compared for line in columns])
    change = np.where(of_b.is_open, of_b.weights, 0.0) - np.where(of_a.is_open, of_a.weights, 0.0)
    n_nan = np.isnan(of_a.weights).astype(int) + np.isnan(of_b.weights)
    change = np.select([n_nan == 1, n_nan == 2], [np.inf, 0.0], change)
    return AlignedMaps(
        a=of_a,
        b=of_b,
        change=np.where(same & (of_a.is_open | of_b.is_open), change, np.nan),
        rows=tuple(_name(line, a.query_name, b.query_name) for line in rows),
        columns=tuple(_name(line, a.key_name, b.key_name) for line in columns),
        row_places=tuple(_place(line, a, 0) for line in rows),
        column_places=tuple(_place(line, a, 1) for line in columns),
    )


def _name(line: AlignedLine, of_a: Callable[[int], str], of_b: Callable[[int], str]) -> str:
    if line.is_same or line.b < 0:
        return of_a(line.a)
    return of_b(line.b) if line.a < 0 else f"{of_a(line.a)}|{of_b(line.b)}"


def _place(line: AlignedLine, head_map: HeadMap, axis: int) -> int:
    """The position of a line's first token in A; negative for padding, and for lines in B alone."""
    return -1 if line.a < 0 else line.a * head_map.block + head_map.first[axis]


def _spread(head_map: HeadMap, rows: list[int], columns: list[int]) -> HeadMap:
    """The map at these rows and columns, `FORBIDDEN` at −1."""
    weights = np.pad(head_map.weights, ((0, 1), (0, 1)), constant_values=FORBIDDEN)[np.ix_(rows, columns)]
    n_queries = np.pad(head_map.n_queries, (0, 1))[rows]
    learned = None if head_map.learned is None else np.pad(head_map.learned, (0, 1))[rows]
    return replace(head_map, weights=weights, of_sinks=np.zeros_like(weights), learned=learned, n_queries=n_queries)


def _lines(a: HeadMap, b: HeadMap, text: TextDifference, axis: int) -> tuple[AlignedLine, ...] | None:
    if a.block == b.block == 1 and a.first[axis] == b.first[axis] == 0:
        return tuple(_token_lines(text))
    if (a.block, a.first[axis], a.weights.shape[axis]) != (b.block, b.first[axis], b.weights.shape[axis]):
        return None
    return tuple(_block_lines(a, text, axis))


def _token_lines(text: TextDifference) -> Iterator[AlignedLine]:
    """The lines of tokens. Tokens that replace each other share a line."""
    a = b = 0
    for match in (*text.matches, Match(text.n_a, text.n_b, 0)):
        is_replaced = match.a - a == match.b - b
        for n in range(max(match.a - a, match.b - b)):
            places = a + n if a + n < match.a else -1, b + n if b + n < match.b else -1
            yield AlignedLine(*places, is_same=False, is_replaced=is_replaced)
        yield from (AlignedLine(match.a + n, match.b + n, True) for n in range(match.length))
        a, b = match.a + match.length, match.b + match.length


def _block_lines(head_map: HeadMap, text: TextDifference, axis: int) -> Iterator[AlignedLine]:
    """The lines of blocks. Blocks are equal if each of their tokens, or its replacement, has the same position in both
    texts; padding is equal."""
    first = head_map.first[axis]
    is_same = np.ones(head_map.block * head_map.weights.shape[axis], bool)
    is_same[-first : -first + max(text.n_a, text.n_b)] = False
    for match in text.compared:
        if match.a == match.b:
            is_same[match.a - first : match.a - first + match.length] = True
    blocks = is_same.reshape(-1, head_map.block)
    yield from (AlignedLine(index, index, bool(block.all())) for index, block in enumerate(blocks))


# -------------------------------------------------------------------------------------------------------------------- panels


@dataclass(frozen=True)
class _HeadPanels:
    """The pictures of a head in as many cells as fit, `n_beside` of the three in a row.

    A cell is `cell` columns wide, or half a character if `is_halved`; `label` columns are for row names. `whole` are
    the maps before pooling.
    """

    aligned_maps: AlignedMaps
    whole: AlignedMaps
    n_beside: int
    cell: int
    is_halved: bool
    label: int

    @property
    def is_pooled(self) -> bool:
        """Whether a cell stands for more than one cell of the maps."""
        return self.aligned_maps.block > self.whole.block

    def has_numbers(self, precision: int) -> bool:
        """Whether numbers with this many decimals fit into the cells."""
        return not self.is_halved and self.cell >= precision + _SIGN_AND_GAP


@dataclass(frozen=True)
class _Panel:
    """One of the pictures: the levels of cells, and their numbers as text."""

    name: str
    levels: Sequence[Sequence[int]]
    words: Sequence[Sequence[str]]
    ramp: Ramp = WEIGHTS


def _fitted(pair: _HeadPair, differences: Differences, screen: Screen, options: ViewOptions) -> _HeadPanels | None:
    """Three panels, side by side or, if numbers then fit into their cells, stacked; None if the maps cannot be
    compared."""
    queries, keys = (_text(differences, pair, is_key=is_key) for is_key in (False, True))
    whole = aligned_maps(head_map(pair.a, pair.sequence), head_map(pair.b, pair.sequence), queries, keys)
    if whole is None:
        return None
    label = _LABEL if screen.width >= _WIDE else _NARROW_LABEL
    rooms = {n: max(1, (screen.width - label - 1 - (n - 1) * len(_BETWEEN)) // n) for n in (3, 2, 1)}
    lines = 1 << 30 if options.everything else _MAX_LINES
    fit = whole.fitting(2 * lines if screen.colour else lines, rooms[3])
    n_rows, n_columns = fit.change.shape
    numbered = [
        n for n, room in rooms.items()
        if room // n_columns >= options.precision + _SIGN_AND_GAP and -(-3 // n) * (n_rows + 2) <= _MAX_STACKED
    ]  # fmt: skip
    n_beside = numbered[0] if numbered else 3
    width = min(_MAX_CELL, rooms[n_beside] // n_columns)
    is_halved = screen.colour and (width < 2 or n_rows > lines)
    return _HeadPanels(fit, whole, n_beside, 1 if is_halved else width, is_halved, label)


def _panels(
    layout: _HeadPanels, of_maps: tuple[Array, Array], scales: _Scales, *, screen: Screen, precision: int
) -> Text:
    panels = _three(layout.aligned_maps, of_maps, scales, precision)
    parts = [panels[start : start + layout.n_beside] for start in range(0, len(panels), layout.n_beside)]
    text = Text("\n").join(_beside(part, layout, precision, colour=screen.colour) for part in parts)
    named = [] if layout.has_numbers(precision) else _largest_changes(layout.whole, precision)
    return text.append("\n" + "\n".join(filled(named, screen.width))) if named else text


def _largest_changes(whole: AlignedMaps, precision: int) -> list[str]:
    """The cells that changed most, with their weights in A and B; none for pooled cells."""
    if whole.block > 1:
        return []
    sizes = np.where(np.isfinite(whole.change), np.abs(whole.change), 0.0)
    order = np.argsort(-sizes, axis=None, kind="stable")[:_MOST_NAMED]
    named = []
    for row, column in zip(*np.unravel_index(order, sizes.shape), strict=True):
        if sizes[row, column] >= 10.0**-precision:
            query = token_at(whole.rows[row], whole.row_places[row], _LABEL)
            key = token_at(whole.columns[column], whole.column_places[column], _LABEL)
            before, after = (
                "masked" if weight == FORBIDDEN else weight_text(float(weight), precision)
                for weight in (whole.a.weights[row, column], whole.b.weights[row, column])
            )
            named.append(f"{query} → {key} from {before} to {after}")
    return [f"largest changes: {named[0]}", *named[1:]] if named else []


def _beside(panels: Sequence[_Panel], layout: _HeadPanels, precision: int, *, colour: bool) -> Text:
    """Panels side by side, with row names."""
    maps = layout.aligned_maps
    text = _header(layout, [panel.name for panel in panels])
    for row in range(0, len(maps.rows), 2 if layout.is_halved else 1):
        is_token = maps.block == 1 and not layout.is_halved
        name = maps.rows[row] if is_token else _number(maps.row_places[row])
        text.append("\n").append(_padded(name, layout.label) + " ", style="bold" if is_token else "dim")
        for number, panel in enumerate(panels):
            text.append(_BETWEEN if number else "")
            text.append_tokens(_line(panel, row, layout, precision, colour=colour))
    return text


def _levels_of_all(maps: Sequence[HeadMap], scales: _Scales) -> Iterator[Array]:
    """The levels of all maps on one scale. Ranks are among the cells of all maps."""
    if not maps:
        return
    all_levels = levels(np.concatenate([each.weights.ravel() for each in maps]), scales.kind, scales.top)
    ends = np.cumsum([each.weights.size for each in maps])
    for each, part in zip(maps, np.split(all_levels, ends[:-1]), strict=True):
        yield part.reshape(each.weights.shape)


def _three(fit: AlignedMaps, of_maps: tuple[Array, Array], scales: _Scales, precision: int) -> tuple[_Panel, ...]:
    weights = [
        _Panel(name, part.astype(int).tolist(), _words(each.weights, precision))
        for name, part, each in zip("AB", of_maps, (fit.a, fit.b), strict=True)
    ]
    has_digits = scales.change >= 10.0**-precision  # otherwise all would round to 0
    words = _words(fit.change, precision, signed=True) if has_digits else [[""] * len(fit.columns)] * len(fit.rows)
    change = change_levels(fit.change, scales.change).astype(int).tolist()
    return (*weights, _Panel("B − A", change, words, CHANGES))


def _words(cells: Array, precision: int, *, signed: bool = False) -> list[list[str]]:
    """Numbers as text, signed for changes. A change that rounds to 0 has no sign."""

    def word(value: float) -> str:
        if not math.isfinite(value):
            return NAN_SIGN
        text = weight_text(abs(value), precision)
        is_zero = not text.strip("0.")
        return text if not signed or is_zero else ("+" if value > 0 else "−") + text

    return [[word(value) for value in row] for row in cells.tolist()]


def _number(place: int) -> str:
    """A position in A as text; empty if there is none."""
    return str(place) if place >= 0 else ""


def _header(layout: _HeadPanels, names: Sequence[str]) -> Text:
    """The titles and columns of the panels: tokens if they fit, else positions, all or every tenth."""
    maps, width, margin = layout.aligned_maps, layout.cell, " " * (layout.label + 1)
    room = width * len(maps.columns)
    text = Text(margin)
    text.append(_BETWEEN.join(f"{fitted(name, room):<{room}}" for name in names).rstrip(), style="bold")
    if width >= _NAMED and maps.block == 1:
        axis = "".join(_padded(name, width - 1) + " " for name in maps.columns)
    else:
        axis = ticks(maps.column_places, width, every=1 if width > len(str(max(maps.column_places))) else 10)
    return text.append("\n" + margin).append(_BETWEEN.join([axis] * len(names)).rstrip(), style="dim")


def _padded(name: str, width: int) -> str:
    """A name in exactly `width` cells."""
    short = fitted(name, width)
    return short + " " * (width - cell_len(short))


def _line(panel: _Panel, row: int, layout: _HeadPanels, precision: int, *, colour: bool) -> Iterator[tuple[str, Style]]:
    """One line of a panel: two rows in half blocks, or shades with numbers if they fit, or signs."""
    if layout.is_halved:
        below = panel.levels[row + 1] if row + 1 < len(panel.levels) else None
        yield from half_cells(panel.levels[row], below, ramp=panel.ramp)
        return
    width = layout.cell
    for level, word in zip(panel.levels[row], panel.words[row], strict=True):
        fits = 0 < len(word) < width and layout.has_numbers(precision)
        number = NAN_SIGN if level == NOT_A_NUMBER else word if fits else ""
        yield cell(level, width, colour=colour, ramp=panel.ramp, gap=int(width > 1), word=number)


# ------------------------------------------------------------------------------------------------------------------- caption


def _remarks(layouts: Sequence[_HeadPanels], records: tuple[Record, Record], *, has_same_tokens: bool) -> Sequence[str]:
    """The meaning of signs, and what the pictures leave out."""
    remarks = [
        AXES,
        "a blank cell is masked"
        if has_same_tokens
        else "a blank cell is masked, or has other tokens in the other record",
    ]
    maps = [each for panels in layouts for each in (panels.aligned_maps.a, panels.aligned_maps.b)]
    remarks += [f"{NAN_SIGN} is not a number"] if any(np.isnan(each.weights).any() for each in maps) else []
    if any(panels.is_pooled for panels in layouts):
        remarks += ["a mark of several cells shows their mean weight, in B − A their mean change"]
    trained = [letter for letter, record in zip("AB", records, strict=True) if is_before_dropout(record)]
    remarks += [f"{' and '.join(trained)} before dropout"] if trained else []
    return remarks + (
        ["the weight of sink logits is not drawn"] if any(each.learned is not None for each in maps) else []
    )


def _caption(maps: Sequence[HeadMap], scales: _Scales, screen: Screen, *, remarks: Sequence[str]) -> RenderableType:
    """Both scales with their ranges, and the remarks."""
    n_open = sum(int((each.is_open & ~np.isnan(each.weights)).sum()) for each in maps)
    is_exceeded = any((each.weights > scales.top).any() for each in maps)
    reach = range_text(scales.kind, scales.top, n_open, is_exceeded=is_exceeded)
    ramp = Text(f"A and B: {scales.kind}, {reach}, the same for all: ")
    change = Text(f"B − A: linear, −{number_text(scales.change)} … +{number_text(scales.change)}: ")
    ramp.append_tokens(WEIGHTS.swatches(colour=screen.colour))
    if screen.colour:
        change.append_tokens(CHANGES.swatches(colour=True)).append(" blue less in B, grey the same, orange more")
    else:
        ramp.append(" from small to large")
        change.append("= - less in B, . about the same, + # more")
    if not scales.change:
        change = Text("B − A: no change of a number")
    return Group(ramp, change, Text("; ".join(remarks), style="dim"))
