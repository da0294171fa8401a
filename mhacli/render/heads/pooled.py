"""The pooled map of one head as a picture: the sink in a column of its own, the rest renormalised, half-block cells."""

from __future__ import annotations

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.render.base.cells import levels, range_text
from mhacli.render.base.colours import GLYPHS, glyph, half_block, shade, sink_shade
from mhacli.render.base.format import share_text
from mhacli.render.base.options import Scale, Screen, ViewOptions
from mhacli.render.base.tables import title_rule
from mhacli.render.heads.cells import where
from mhacli.render.heads.head_map import HeadMap, block_map
from mhacli.results.record.arrays import Array
from mhacli.results.record.record import Record

_LABEL_WIDTH, _SINK_WIDTH, _MIN_LINES = 7, 4, 20


def pooled_map(
    record: Record, place: int, sequence: int, options: ViewOptions, screen: Screen, *, layer: str = ""
) -> RenderableType:
    """The picture of a head of a sequence, with its scale, and what was taken out of it; of a layer that may have a name."""
    lines = max(_MIN_LINES, screen.width // 4) if not options.everything else 1 << 30
    room = screen.width - _LABEL_WIDTH - _SINK_WIDTH - 2
    drawn = renormalised(record, place, sequence, rows=lines * (2 if screen.colour else 1), columns=room)
    is_roomy = 2 * drawn.shares.shape[1] <= room and drawn.shares.shape[0] <= lines
    scale = options.map_scale or "log"
    cells = levels(drawn.shares, scale)
    body = [_axis(drawn, columns_per_cell=2 if is_roomy else 1)]
    if not screen.colour:
        body += _glyph_lines(drawn, cells, 2 if is_roomy else 1)
    elif is_roomy:
        body += _square_lines(drawn, cells)
    else:
        body += _half_lines(drawn, cells)
    head = record.heads[place]
    place_name = where(record, sequence, layer, head.head)
    name = f"{place_name} · {head.kind} · each cell {drawn.block} × {drawn.block} tokens"
    return Group(title_rule(name), Text("\n").join(body), _caption(drawn, scale, options, screen))


def renormalised(record: Record, place: int, sequence: int, *, rows: int, columns: int) -> HeadMap:
    """The map without the first token of each text where it is a sink, in as large cells as `rows` × `columns` of them need."""
    return block_map(record, place, sequence).fitting(rows, columns).without_sinks()


def _axis(drawn: HeadMap, columns_per_cell: int) -> Text:
    """Key positions along the top, every tenth column."""
    columns = drawn.shares.shape[1]
    axis = [" "] * (columns * columns_per_cell)
    for column in range(0, columns, 10):
        index, at = column * drawn.block + drawn.first[1], column * columns_per_cell
        number = str(index) if index >= 0 else ""
        if at + len(number) <= len(axis):
            axis[at : at + len(number)] = number
    return Text(f"{'query':>{_LABEL_WIDTH - 1}} {'sink':<{_SINK_WIDTH + 1}}" + "".join(axis), style="dim")


def _line(drawn: HeadMap, row: int) -> Text:
    """The beginning of a line, in a style of its own."""
    index = row * drawn.block + drawn.first[0]
    return Text().append(f"{index if index >= 0 else '':>{_LABEL_WIDTH - 1}} ", style="dim")


def _square_lines(drawn: HeadMap, levels: Array) -> list[Text]:
    """A line for each row, cells of two columns, for small maps."""
    lines = []
    for row, cells in enumerate(levels.astype(int).tolist()):
        line = _line(drawn, row).append(" " * _SINK_WIDTH, style=sink_shade(_sink_level(drawn, row))).append(" ")
        for level in cells:
            line.append("  ", style=shade(level) if level >= 0 else "")
        lines.append(line)
    return lines


def _half_lines(drawn: HeadMap, levels: Array) -> list[Text]:
    """A line for two rows, each cell half a character."""
    lines = []
    for row in range(0, len(levels), 2):
        lower = row + 1 if row + 1 < len(levels) else row
        sink = (_sink_level(drawn, row) + _sink_level(drawn, lower)) // 2
        line = _line(drawn, row).append(" " * _SINK_WIDTH, style=sink_shade(sink)).append(" ")
        pair = levels[row].astype(int), (levels[lower] if lower > row else np.full_like(levels[row], -1)).astype(int)
        for top, bottom in zip(pair[0].tolist(), pair[1].tolist(), strict=True):
            line.append(*half_block(top if top >= 0 else None, bottom if bottom >= 0 else None))
        lines.append(line)
    return lines


def _glyph_lines(drawn: HeadMap, levels: Array, columns_per_cell: int) -> list[Text]:
    """Without colour: a character per cell, and the sink's share as a number of percent."""
    lines = []
    for row, cells in enumerate(levels.astype(int).tolist()):
        line = _line(drawn, row).append(_sink_percent(drawn, row))
        lines.append(line.append("".join((" " if level < 0 else glyph(level)) * columns_per_cell for level in cells)))
    return lines


def _sink_percent(drawn: HeadMap, row: int) -> str:
    """The sink's share as a number of percent; blank where no query of the row sees a key."""
    return f"{100 * drawn.sink_shares[row]:>{_SINK_WIDTH}.0f} " if drawn.n_queries[row] else " " * (_SINK_WIDTH + 1)


def _sink_level(drawn: HeadMap, row: int) -> int:
    return round(255 * min(1.0, max(0.0, float(drawn.sink_shares[row]))))


def _caption(drawn: HeadMap, scale: Scale, options: ViewOptions, screen: Screen) -> Text:
    """What was taken out, and the scale: its kind and range, and what the signs mean."""
    sink, learned = drawn.sink_mass, drawn.learned_mass or 0.0
    largest = float(drawn.shares.max(initial=0.0, where=drawn.is_open))
    said = f"sink {share_text(sink, options.precision)}"
    said += "" if drawn.learned is None else f" · learned sink {share_text(learned, options.precision)}"
    text = Text().append(f"{said} · shown {share_text(1 - sink - learned, options.precision)}", style="bold")
    if drawn.sinks:
        text.append(": the first token, a sink, stands in a column of its own, the rest of each row is renormalised\n")
    else:
        text.append(": the first token is no sink of this head, so nothing is taken out\n")
    if largest <= 0:
        return text.append("nothing is left beside it")
    said = range_text(scale, largest, int(drawn.is_open.sum()))
    text.append(f"scale {scale}, {said}: ", style="dim")
    if screen.colour:
        for level in range(0, 256, 17):
            text.append(" ", style=shade(level))
        text.append(" sink 0 … 1: ", style="dim")
        for level in range(0, 256, 51):
            text.append(" ", style=sink_shade(level))
    else:
        text.append(f"{GLYPHS}; sink in %")
    return text.append("; a blank is not allowed", style="dim")
