"""Heads as pictures: half-block cells with colour, or a ramp of characters without.

`heatmap` draws the pattern of a run. `pooled_map` draws the map of head statistics, with the sink in its own column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.style import Style
from rich.text import Text

from mhacli.record.heads import words_of_type
from mhacli.record.record import Record
from mhacli.render.base.cells import WEIGHTS, cell, half_cells, levels, range_text, ticks
from mhacli.render.base.colours import NAN_SIGN, sink_shade
from mhacli.render.base.format import fitted, title_rule, weight_text
from mhacli.render.base.options import Scale, Screen, ViewOptions
from mhacli.render.heads.drawable import SHORT
from mhacli.render.heads.head_map import HeadMap, HeadPattern, block_map, largest_of_maps, pattern_map, where

MAX_LINES = 40
SMALL = 24
"""The most tokens per axis for cells with a line and a name each."""
_LABEL_WIDTH, _QUERY = 12, "query"
AXES = "keys from left to right, queries downward"
"""What runs along the axes of a picture of a head."""


# ------------------------------------------------------------------------------------------------ the pattern of a run


@dataclass(frozen=True)
class HeatScale:
    """The common scale of some heads. With `is_exceeded`, some cells lie above the top and are drawn like it."""

    kind: Scale
    largest: float
    is_exceeded: bool = False

    @property
    def range(self) -> str:
        """`log, 0.0006 or less … 0.6`."""
        return f"{self.kind}, {range_text(self.kind, self.largest, is_exceeded=self.is_exceeded)}"


def heat_scale(heads: Sequence[HeadPattern], largest: float, options: ViewOptions, screen: Screen) -> HeatScale:
    """The requested scale, else linear for short texts and log for long ones. Its top is `largest`, or the largest of
    pooled cells."""
    is_short = all(len(keys.tokens) <= SHORT for head in heads for keys in head.record.keys)
    kind = options.map_scale or ("linear" if is_short else "log")
    maps = [fitted_map(head, options, screen) for head in heads if len(head.weights)]
    if any(head_map.block > 1 for head_map in maps):
        largest = largest_of_maps(maps)
    most = max((float(np.nanmax(head_map.weights, initial=0.0)) for head_map in maps), default=0.0)
    is_exceeded = most > largest and weight_text(most, options.precision) != weight_text(largest, options.precision)
    return HeatScale(kind, largest, is_exceeded)


def fitted_map(head: HeadPattern, options: ViewOptions, screen: Screen) -> HeadMap:
    """The map of a pattern in cells as large as the screen requires. Requested rows are never pooled."""
    cells = pattern_map(head)
    if _is_small(head, screen):
        return cells
    columns = max(1, screen.width - _LABEL_WIDTH - 1)
    if head.rows is not None:
        return cells.of_rows(range(len(head.rows)), max(1, -(-cells.weights.shape[1] // columns)))
    lines = len(cells.weights) if options.everything else MAX_LINES
    return cells.fitting(max(1, 2 * lines if screen.colour else lines), columns)


def heatmap(head: HeadPattern, scale: HeatScale, options: ViewOptions, screen: Screen) -> Text:
    """The picture with tokens or positions on its axes. Long patterns are pooled."""
    if _is_small(head, screen):
        return _named_cells(head, scale, screen)
    head_map = fitted_map(head, options, screen)
    cells = levels(head_map.weights, scale.kind, scale.largest).astype(int).tolist()
    lines = [_key_axis(head, head_map)]
    for row in range(0, len(cells), 2 if screen.colour else 1):
        label = _line_label(head, row if head.rows is not None else row * head_map.block)
        lines.append(label.append_tokens(_line(cells, row, colour=screen.colour, is_halved=screen.colour)))
    return Text("\n").join(lines)


def scale_caption(heads: Sequence[HeadPattern], scale: HeatScale, screen: Screen, precision: int) -> Text:
    """The scale: its range and type, the meaning of signs, and that several heads share it."""
    reach = f"linear, 0 … {weight_text(scale.largest, precision)}" + " or more" * scale.is_exceeded
    reach = reach if scale.kind == "linear" else scale.range
    caption = Text(f"scale {reach}{' for all heads' * (len(heads) > 1)}: ")
    caption = caption.append_tokens(WEIGHTS.swatches(colour=screen.colour))
    caption.append(" from small to large, a blank is masked")
    has_nan = any(np.isnan(head.record.arrays["pattern"]).any() for head in heads)
    return caption.append(f", {NAN_SIGN} is not a number") if has_nan else caption


def _line(
    cells: Sequence[Sequence[int]], row: int, width: int = 1, *, colour: bool, is_halved: bool
) -> Iterable[tuple[str, Style]]:
    """A row of levels as a line; if `is_halved`, together with the next row."""
    if is_halved:
        return half_cells(cells[row], cells[row + 1] if row + 1 < len(cells) else None)
    return (cell(level, width, colour=colour) for level in cells[row])


def _is_small(head: HeadPattern, screen: Screen) -> bool:
    n_queries, n_keys = (int(n) for n in head.weights.shape)
    return max(n_queries, n_keys) <= SMALL and n_keys * 3 + _LABEL_WIDTH + 1 <= screen.width


def _named_cells(head: HeadPattern, scale: HeatScale, screen: Screen) -> Text:
    n_queries, n_keys = head.weights.shape
    label = min(_LABEL_WIDTH, max(len(_QUERY), *(cell_len(head.row_label(i)) for i in range(n_queries))))
    width = max(3, min(8, (screen.width - label - 1) // n_keys))
    picture = Text().append(f"{_QUERY:<{label + 1}}", style="dim")
    for key in range(n_keys):
        name = fitted(head.key_name(key), width - 1)
        picture.append(name + " " * (width - cell_len(name)), style="dim")
    cells = levels(head.masked_weights, scale.kind, scale.largest).astype(int).tolist()
    for query, row in enumerate(cells):
        name = fitted(head.row_label(query), label)
        picture.append("\n" + name + " " * (label - cell_len(name) + 1), style="bold")
        for level in row:
            picture.append(*cell(level, width, colour=screen.colour, gap=1))
    return picture


def _key_axis(head: HeadPattern, head_map: HeadMap) -> Text:
    """Key positions along the top, every tenth column, and the size of a cell."""
    n = head_map.block
    of_queries = f"the mean weight that {n} queries give" if head.rows is None else "the weight that a query gives"
    note = f"{AXES}, each mark one cell\n" if n == 1 else f"{AXES}\neach mark {of_queries} to {n} keys together\n"
    places = [column * n for column in range(head_map.weights.shape[1])]
    return Text(note + " " * (_LABEL_WIDTH + 1) + ticks(places), style="dim")


def _line_label(head: HeadPattern, query: int) -> Text:
    number = str(head.query_index(query))
    name = fitted(head.query_name(query), _LABEL_WIDTH - len(number) - 1)
    return Text().append(f"{name}{' ' * (_LABEL_WIDTH - len(number) - cell_len(name))}{number} ", style="dim")


# ------------------------------------------------------------------------------------------- the map of `mha heads`

_PLACE_WIDTH, _SINK_WIDTH, _MIN_LINES = 7, 4, 20


def pooled_map(
    record: Record, place: int, sequence: int, options: ViewOptions, screen: Screen, *, layer: str = ""
) -> RenderableType:
    """The picture of a head of a sequence with its scale and the removed sink. `layer` is an optional name."""
    lines = max(_MIN_LINES, screen.width // 4) if not options.everything else 1 << 30
    room = screen.width - _PLACE_WIDTH - _SINK_WIDTH - 2
    head_map = renormalised(record, place, sequence, rows=lines * (2 if screen.colour else 1), columns=room)
    is_roomy = 2 * head_map.weights.shape[1] <= room and head_map.weights.shape[0] <= lines
    scale = options.map_scale or "log"
    width = 2 if is_roomy else 1
    places = [column * head_map.block + head_map.first[1] for column in range(head_map.weights.shape[1])]
    of_sink = f"{'sink':<{_SINK_WIDTH + 1}}" if head_map.sinks else ""
    axis = Text(f"{_QUERY:>{_PLACE_WIDTH - 1}} {of_sink}{ticks(places, width)}", style="dim")
    cells = levels(head_map.weights, scale).astype(int).tolist()
    body = [axis, *_map_lines(head_map, cells, width, is_halved=screen.colour and not is_roomy, colour=screen.colour)]
    head = record.heads[place]
    place_name = where(record, sequence, layer, head.head)
    name = f"{place_name} · {words_of_type(head.kind).name} · each cell {head_map.block} × {head_map.block} tokens"
    return Group(title_rule(name), Text("\n").join(body), _caption(head_map, scale, options, screen))


def renormalised(record: Record, place: int, sequence: int, *, rows: int, columns: int) -> HeadMap:
    """The map without first tokens that are sinks, in cells as large as `rows` × `columns` require."""
    return block_map(record, place, sequence).fitting(rows, columns).without_sinks()


def _map_lines(
    head_map: HeadMap, cells: Sequence[Sequence[int]], width: int, *, is_halved: bool, colour: bool
) -> Iterator[Text]:
    """A line for each row, or if `is_halved` for two: the first query, the weight of any sink, and the cells."""
    for row in range(0, len(cells), 2 if is_halved else 1):
        index = row * head_map.block + head_map.first[0]
        line = Text().append(f"{index if index >= 0 else '':>{_PLACE_WIDTH - 1}} ", style="dim")
        lower = row + 1 if is_halved and row + 1 < len(cells) else row
        if head_map.sinks and colour:
            level = (_sink_level(head_map, row) + _sink_level(head_map, lower)) // 2
            line.append(" " * _SINK_WIDTH, style=sink_shade(level)).append(" ")
        elif head_map.sinks:
            line.append(_sink_percent(head_map, row))
        yield line.append_tokens(_line(cells, row, width, colour=colour, is_halved=is_halved))


def _sink_percent(head_map: HeadMap, row: int) -> str:
    """The sink's weight in percent; blank if no query of the row sees a key."""
    return (
        f"{100 * head_map.sink_weights[row]:>{_SINK_WIDTH}.0f} " if head_map.n_queries[row] else " " * (_SINK_WIDTH + 1)
    )


def _sink_level(head_map: HeadMap, row: int) -> int:
    return round(255 * min(1.0, max(0.0, float(np.nan_to_num(head_map.sink_weights[row])))))


def _caption(head_map: HeadMap, scale: Scale, options: ViewOptions, screen: Screen) -> Text:
    """What was removed, and the scale: its type, range and signs."""
    sink, learned = head_map.sink_mass, head_map.learned_mass or 0.0
    largest = float(head_map.weights.max(initial=0.0, where=head_map.is_open))
    taken = [f"sink {weight_text(sink, options.precision)}"] if head_map.sinks else []
    taken += [] if head_map.learned is None else [f"sink logit {weight_text(learned, options.precision)}"]
    text = Text().append(
        " · ".join([*taken, f"shown {weight_text(1 - sink - learned, options.precision)} of all attention"]),
        style="bold",
    )
    if head_map.sinks:
        text.append(": the first token, a sink, has a column of its own, and the rest of each row is renormalised\n")
    elif taken:
        text.append(": the first token is no sink of this head; the rest beside the sink logit is renormalised\n")
    else:
        text.append(": the first token is no sink of this head\n")
    if largest <= 0:
        return text.append("nothing is left beside it")
    text.append(f"scale {scale}, {range_text(scale, largest)}: ", style="dim")
    text.append_tokens(WEIGHTS.swatches(colour=screen.colour))
    text.append(" from small to large, a blank is masked", style="dim")
    if head_map.sinks and screen.colour:
        text.append(" · sink 0 … 1: ", style="dim")
        text.append_tokens((" ", sink_shade(level)) for level in range(0, 256, 51))
    elif head_map.sinks:
        text.append(" · sink in %", style="dim")
    return text.append(f"\n{AXES}", style="dim")
