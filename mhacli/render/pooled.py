"""The pooled map of one head as a picture: the sink in a column of its own, the rest renormalised, half-block cells."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from mhacli.record import Array, Record
from mhacli.render.cells import where
from mhacli.render.colours import GLYPHS, glyph, half_block, shade, sink_shade
from mhacli.render.options import Scale, Screen, ViewOptions
from mhacli.render.words import count_of, number_text, share_text

_LABEL_WIDTH, _SINK_WIDTH, _MIN_LINES = 7, 4, 20
_DECADES = 3
"""What a log scale spans below the largest share; smaller ones are as dark as nothing."""
FORBIDDEN = -1.0


@dataclass(frozen=True)
class PooledMap:
    """A map as it is drawn: `shares` `[row, column]` of what is left without the first token, renormalised per row, and
    `FORBIDDEN` where no cell of a block is visible; `sinks` the share of the first token that was taken out of each row, which
    stands for `n_queries`; `learned` what a learned sink takes of it, None where there is none. `block` queries and keys make a
    cell, and `first` are the columns where the text begins."""

    shares: Array
    sinks: Array
    learned: Array | None
    n_queries: Array
    block: int
    first: tuple[int, int]


def pooled_map(
    record: Record, place: int, sequence: int, options: ViewOptions, screen: Screen, *, layer: str = ""
) -> RenderableType:
    """The picture of a head of a sequence, with its scale, and what was taken out of it; of a layer that may have a name."""
    lines = max(_MIN_LINES, screen.width // 4) if not options.everything else 1 << 30
    room = screen.width - _LABEL_WIDTH - _SINK_WIDTH - 2
    drawn = renormalised(record, place, sequence, rows=lines * (2 if screen.colour else 1), columns=room)
    is_roomy = 2 * drawn.shares.shape[1] <= room and drawn.shares.shape[0] <= lines
    levels = scaled(drawn.shares, options.map_scale)
    body = [_axis(drawn, columns_per_cell=2 if is_roomy else 1)]
    if not screen.colour:
        body += _glyph_lines(drawn, levels, 2 if is_roomy else 1)
    elif is_roomy:
        body += _square_lines(drawn, levels)
    else:
        body += _half_lines(drawn, levels)
    head = record.heads[place]
    place_name = where(record, sequence, layer, head.head)
    name = f"{place_name} · {head.kind} · each cell {drawn.block} × {drawn.block} tokens"
    title = Rule(Text(name, style="bold"), align="left", style="dim")
    return Group(title, Text("\n").join(body), _caption(drawn, options, screen))


def renormalised(record: Record, place: int, sequence: int, *, rows: int, columns: int) -> PooledMap:
    """The map without the first token of each text, in cells large enough that no more than `rows` × `columns` are needed.

    What each row gives the first token is taken from the cell that holds it, and the rest is divided by what is left.
    """
    block = _block(record)
    shares = record.arrays["map"][sequence, place].astype(np.float64)
    sink = np.nan_to_num(record.arrays["sink"][sequence, place].astype(np.float64))
    seen = np.broadcast_to(record.arrays["visible"][sequence], record.arrays["sink"].shape[1:])[place] > 0
    n_seen = _sums(seen.astype(np.float64), block)
    shares = shares - _first_tokens(record, sequence, sink, shares.shape) / np.maximum(n_seen, 1)[:, None]
    uniform = record.arrays["uniform_map"][sequence]
    factor = max(1, -(-shares.shape[0] // rows), -(-shares.shape[1] // columns))
    masses = _sums(_sums(shares * n_seen[:, None], factor, axis=0), factor, axis=1)
    n_queries = _sums(n_seen, factor)
    sinks = _sums(_sums(sink, block), factor) / np.maximum(n_queries, 1)
    means = np.clip(masses / np.maximum(n_queries, 1)[:, None], 0, None)
    has_learned = record.heads[place].learned_sink is not None
    learned = np.clip(1 - sinks - means.sum(axis=1), 0, None) if has_learned else None
    left = 1 - sinks - (0.0 if learned is None else learned)
    drawn = np.where(left[:, None] > _NOTHING, means / np.maximum(left, _NOTHING)[:, None], 0.0)
    is_open = _sums(_sums(uniform[min(place, uniform.shape[0] - 1)], factor, axis=0), factor, axis=1) > 0
    first = record.first_query(sequence), record.first_key(sequence)
    return PooledMap(np.where(is_open, drawn, FORBIDDEN), sinks, learned, n_queries, block * factor, first)


_NOTHING = 1e-6
"""Where less than this is left of a row, it is not blown up: it would be rounding."""


def _sums(numbers: Array, size: int, axis: int = 0) -> Array:
    """Sums of `size` neighbours along an axis; the last may be of fewer."""
    return np.add.reduceat(numbers, np.arange(0, numbers.shape[axis], size), axis=axis)


def _first_tokens(record: Record, sequence: int, sink: Array, shape: tuple[int, ...]) -> Array:
    """What the first token of each query's text or document got, in the cells of the map: sums over queries."""
    queries, keys = record.sequences[sequence], record.keys[sequence]
    documents = keys.documents or (0,) * len(keys.tokens)
    begins = {document: index for index, document in reversed(list(enumerate(documents)))}
    of_query = queries.documents or (0,) * len(queries.tokens)
    firsts = np.array([begins.get(document, 0) for document in of_query]) + record.first_key(sequence)
    columns = record.first_query(sequence) + np.arange(len(of_query))
    taken = np.zeros(shape)
    np.add.at(taken, (columns // _block(record), firsts // _block(record)), sink[columns])
    return taken


def scaled(shares: Array, scale: Scale) -> Array:
    """Levels of 0 … 255 on a scale, `FORBIDDEN` left as it is: `linear` from 0 to the largest share, `log` over the decades
    below it, `rank` by the share of visible cells that are smaller."""
    is_open = shares != FORBIDDEN
    largest = float(shares.max(initial=0.0, where=is_open)) or 1.0
    if scale == "rank":
        order = np.sort(shares[is_open])
        levels = np.searchsorted(order, shares) / max(1, len(order) - 1)
    elif scale == "log":
        levels = 1 + np.log10(np.maximum(shares, largest * 10.0**-_DECADES) / largest) / _DECADES
    else:
        levels = shares / largest
    return np.where(is_open, np.rint(255 * np.clip(levels, 0, 1)), FORBIDDEN)


def _axis(drawn: PooledMap, columns_per_cell: int) -> Text:
    """Key positions along the top, every tenth column."""
    columns = drawn.shares.shape[1]
    axis = [" "] * (columns * columns_per_cell)
    for column in range(0, columns, 10):
        index, at = column * drawn.block - drawn.first[1], column * columns_per_cell
        number = str(index) if index >= 0 else ""
        if at + len(number) <= len(axis):
            axis[at : at + len(number)] = number
    return Text(f"{'query':>{_LABEL_WIDTH - 1}} {'sink':<{_SINK_WIDTH + 1}}" + "".join(axis), style="dim")


def _line(drawn: PooledMap, row: int) -> Text:
    index = row * drawn.block - drawn.first[0]
    return Text(f"{index if index >= 0 else '':>{_LABEL_WIDTH - 1}} ", style="dim")


def _square_lines(drawn: PooledMap, levels: Array) -> list[Text]:
    """A line for each row, cells of two columns, for small maps."""
    lines = []
    for row, cells in enumerate(levels.astype(int).tolist()):
        line = _line(drawn, row).append(" " * _SINK_WIDTH, style=sink_shade(_sink_level(drawn, row))).append(" ")
        for level in cells:
            line.append("  ", style=shade(level) if level >= 0 else "")
        lines.append(line)
    return lines


def _half_lines(drawn: PooledMap, levels: Array) -> list[Text]:
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


def _glyph_lines(drawn: PooledMap, levels: Array, columns_per_cell: int) -> list[Text]:
    """Without colour: a character per cell, and the sink's share as a number of percent."""
    lines = []
    for row, cells in enumerate(levels.astype(int).tolist()):
        line = _line(drawn, row).append(_sink_percent(drawn, row))
        lines.append(line.append("".join((" " if level < 0 else glyph(level)) * columns_per_cell for level in cells)))
    return lines


def _sink_percent(drawn: PooledMap, row: int) -> str:
    """The sink's share as a number of percent; blank where no query of the row sees a key."""
    return f"{100 * drawn.sinks[row]:>{_SINK_WIDTH}.0f} " if drawn.n_queries[row] else " " * (_SINK_WIDTH + 1)


def _sink_level(drawn: PooledMap, row: int) -> int:
    return round(255 * min(1.0, max(0.0, float(drawn.sinks[row]))))


def _caption(drawn: PooledMap, options: ViewOptions, screen: Screen) -> Text:
    """What was taken out, and the scale: its kind and range, and what the signs mean."""
    sink, learned = (
        0.0 if rows is None else float((rows * drawn.n_queries).sum() / max(1.0, drawn.n_queries.sum()))
        for rows in (drawn.sinks, drawn.learned)
    )
    is_open = drawn.shares != FORBIDDEN
    largest = float(drawn.shares.max(initial=0.0, where=is_open))
    ranges = {
        "linear": f"0 … {number_text(largest)}",
        "log": f"{number_text(largest / 10**_DECADES)} or less … {number_text(largest)}",
        "rank": f"the smallest … the largest of {count_of(int(is_open.sum()), 'cell')}",
    }
    said = f"sink {share_text(sink, options.precision)}"
    said += "" if drawn.learned is None else f" · learned sink {share_text(learned, options.precision)}"
    text = Text(f"{said} · shown {share_text(1 - sink - learned, options.precision)}", style="bold")
    text.append(": the first token stands in a column of its own, ", style="not bold")
    text.append("the rest of each row is renormalised\n", style="not bold")
    if largest <= 0:
        return text.append("nothing is left beside it", style="not bold")
    text.append(f"scale {options.map_scale}, {ranges[options.map_scale]}: ", style="not bold dim")
    if screen.colour:
        for level in range(0, 256, 17):
            text.append(" ", style=shade(level))
        text.append(" sink 0 … 1: ", style="not bold dim")
        for level in range(0, 256, 51):
            text.append(" ", style=sink_shade(level))
    else:
        text.append(f"{GLYPHS}; sink in %", style="not bold")
    return text.append("; a blank is not allowed", style="not bold dim")


def _block(record: Record) -> int:
    assert record.survey is not None, "a map is of a record of heads"
    return record.survey.block
