"""One head: its map with tokens or positions on both axes, what sinks got beside it, and the sums of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mhacli.errors import UsageError
from mhacli.render.base.cells import FORBIDDEN
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.format import short_text, weight_text
from mhacli.render.base.options import ViewOptions
from mhacli.render.figures.head_picture import (
    HeadPicture,
    caption,
    drawn_as,
    head_picture,
    heads_to_draw,
    map_notes,
    one_sequence,
    removed_note,
    texts_of,
    unverified,
)
from mhacli.render.figures.scales import (
    MapSide,
    Shading,
    colours_of,
    hex_of,
    ink_on,
    left_side,
    scale_bar,
    shading,
    sink_colours,
    top_side,
)
from mhacli.render.figures.svg import (
    ALARM,
    FAINT,
    MONO_EM,
    SOFT,
    Piece,
    Sheet,
    heading,
    image,
    mono_width,
    paragraph,
    placed,
    rectangle,
    stacked,
    value_text,
    wrapped,
    written,
)
from mhacli.render.heads.drawable import scale_of
from mhacli.render.heads.head_map import HeadMap
from mhacli.render.heads.matrix import kv_head_of
from mhacli.results.record.arrays import Array
from mhacli.results.record.record import Record

_MOST_CELLS = 512
"""Cells a side of a map that is drawn alone."""
_VECTOR = 48
"""Up to so many cells a side each is a shape of its own, with its number."""
_SIDE, _LEAST, _LARGEST = 720.0, 560.0, 64.0
_ROW, _TEXT = 14.0, 11.0
_STRIP, _APART = 14.0, 8.0
_DOWN = "query ↓"
_WHITE = 255


def head_figure(record: Record, options: ViewOptions) -> Sheet:
    """The picture of the one head that was chosen. Raises `UsageError` where several were."""
    heads = heads_to_draw(record, options)
    if len(heads) > 1:
        of_layers = record.model is not None and options.layers is None
        raise UsageError(
            f"figure head must be of one head, got {len(heads)}",
            hint="choose it with --layer N --head H" if of_layers else "choose it with --head H",
        )
    one = head_picture(heads[0], one_sequence(record, options), options, most=_MOST_CELLS)
    shaded = shading([one.shown], scale_of(options, heads))
    body = _body(one, shaded, options)
    notes = [*map_notes(record, [one], shaded)]
    notes += removed_note(one, options.precision, is_hidden=options.hide_sinks)
    legend = scale_bar(shaded, options.precision, what="share", has_sinks=_has_strip(one))
    title = _title(one, options)
    width = max(_LEAST, title.width, body.width, legend.width)
    told = paragraph(texts_of([one], int(width / (MONO_EM * _TEXT))), _TEXT, fill=SOFT)
    chosen = drawn_as(record, options, "head", subjects=[one], shaded=shaded)
    pieces = [stacked([title, told], 2), body, legend, caption(record, notes, chosen, width=width)]
    return Sheet(stacked(pieces, 12), one.label, [shaded.range, *notes], [one.label], chosen)


def _title(one: HeadPicture, options: ViewOptions) -> Piece:
    """The head's name, and what is said of it."""
    said = one.head.statistics
    layer = one.head.layer
    pieces = [heading(one.label + kv_head_of(one.head.record, one.head.head), 16)]
    if layer is not None and not layer.verified:
        pieces.append(paragraph(wrapped(unverified(layer), 80), 10, fill=ALARM))
    if said is not None:
        sure = "" if said.certainty is None or said.kind == "mixed" else f" {weight_text(said.certainty, 2)}"
        parts = [f"{KIND_SIGNS[said.kind][0]} {said.kind}{sure}"]
        parts += [] if said.entropy is None else [f"entropy {short_text(said.entropy)} nats"]
        parts += [] if said.sink is None else [f"on the first token {weight_text(said.sink, options.precision)}"]
        pieces.append(paragraph([" · ".join(parts)], 11, fill=SOFT))
    return stacked(pieces, 2)


@dataclass(frozen=True)
class _CellLayout:
    """How large cells are, whether each is a shape of its own, and the size of numbers in them, 0 for none."""

    width: float
    height: float
    is_vector: bool
    number: float


def _cell_layout(one: HeadPicture, options: ViewOptions) -> _CellLayout:
    rows, columns = one.shown.shares.shape
    longest = max(rows, columns)
    if longest > _VECTOR:
        pitch = max(1.0, _SIDE // longest)
        return _CellLayout(pitch, max(pitch, _ROW) if rows <= _VECTOR else pitch, False, 0.0)
    number, pitch = next(sizes[1:] for sizes in _SIZES if longest <= sizes[0])
    widest = max(len(weight_text(x, options.precision)) for x in (0.5, _largest(one.shown), _largest(one.whole)))
    needed = mono_width("0" * widest, number) + 5
    if needed > _LARGEST:
        return _CellLayout(pitch, pitch, True, 0.0)
    return _CellLayout(max(pitch, needed), pitch, True, number)


def _largest(shown: HeadMap) -> float:
    return float(np.fmax.reduce(shown.shares, axis=None))


_SIZES = ((10, 11.0, 42.0), (16, 10.0, 34.0), (32, 8.5, 26.0), (_VECTOR, 7.0, 20.0))
"""Up to so many cells a side: the size of numbers, and of cells."""


def _body(one: HeadPicture, shaded: Shading, options: ViewOptions) -> Piece:
    """The map between its names, and the strips to its right."""
    layout, shown = _cell_layout(one, options), one.shown
    rows, columns = shown.shares.shape
    left = left_side(
        MapSide([one.query_name(row) for row in range(rows)], layout.height, *_places(one, 0), _DOWN + " ")
    )
    names = [shown.key_name(column) for column in range(columns)]
    top, reach = top_side(MapSide(names, layout.width, *_places(one, 1), ""))
    cells = _cells(one, shaded, layout, options)
    frame = map_frame(cells.width, cells.height)
    strips = _strips(one, layout, options)
    x, y = left.width, top.height + 16
    content = placed(left, 0, y) + placed(top, x, y - top.height) + placed(cells, x, y)
    content += placed(Piece(frame, 0, 0), x, y)
    content += written(x, 10, "key →", 10, fill=SOFT)
    content += written(x - 6, y - 8, _DOWN, 10, fill=SOFT, text_anchor="end")
    content += placed(strips, x + cells.width + _APART, y)
    width = x + max(cells.width + reach, cells.width + _APART + strips.width)
    return Piece(content, width, y + cells.height)


def _places(one: HeadPicture, axis: int) -> tuple[int, int]:
    """The token at which cell 0 begins, and the tokens of a cell; rows that were asked for have names instead."""
    return (0, 1) if axis == 0 and one.rows is not None else (one.shown.first[axis], one.shown.block)


def _cells(one: HeadPicture, shaded: Shading, layout: _CellLayout, options: ViewOptions) -> Piece:
    rows, columns = one.shown.shares.shape
    colours = cell_colours(one, shaded.levels[0])
    width, height = columns * layout.width, rows * layout.height
    if not layout.is_vector:
        return Piece(image(0, 0, colours, (layout.width, layout.height)), width, height)
    content = "".join(
        _cell(one, row, column, colours[row, column].tolist(), layout, options)
        for row in range(rows)
        for column in range(columns)
    )
    return Piece(content, width, height)


def _cell(
    one: HeadPicture, row: int, column: int, colour: Sequence[int], layout: _CellLayout, options: ViewOptions
) -> str:
    """A cell with its number, and what a pointer is told."""
    drawn = cell_shape(one, (row, column), colour, (layout.width, layout.height))
    if not layout.number:
        return drawn
    share = cell_share(one, row, column)
    fill = SOFT if share == FORBIDDEN else ink_on(colour)
    x, y = column * layout.width, row * layout.height
    return drawn + _number(x, y, cell_text(share, options.precision), fill, layout)


def _number(x: float, y: float, text: str, fill: str, layout: _CellLayout) -> str:
    """A number in the middle of a cell, which a pointer goes through."""
    middle = x + layout.width / 2, y + layout.height / 2 + 0.35 * layout.number
    return written(*middle, text, layout.number, fill=fill, text_anchor="middle", pointer_events="none")


def _has_strip(one: HeadPicture) -> bool:
    return one.shown.taken is not None or one.shown.learned is not None


def _strips(one: HeadPicture, layout: _CellLayout, options: ViewOptions) -> Piece:
    """To the right of the map: what sinks took of each row, what a learned sink took, and what the drawn cells add up to."""
    columns: list[tuple[str, Array, bool]] = []
    if one.shown.taken is not None:
        columns.append(("sinks", one.shown.taken, True))
    if one.shown.learned is not None:
        columns.append(("learned", one.shown.learned, True))
    if layout.number:
        open_shares = np.where(one.shown.is_open, one.shown.shares, 0.0)
        columns.append(("Σ", open_shares.sum(axis=1), False))
    width = layout.width if layout.number else _STRIP
    content = ""
    for place, (name, numbers, is_shaded) in enumerate(columns):
        x = place * (width + _APART)
        content += _header(name, x + width / 2)
        content += placed(_strip(one, numbers, layout, width, options, is_shaded=is_shaded), x, 0)
    return Piece(content, len(columns) * (width + _APART) - _APART + 30 if columns else 0.0, 0.0)


def _header(name: str, x: float) -> str:
    if len(name) == 1:
        return written(x, -5, name, 10, fill=SOFT, text_anchor="middle")
    return written(x, -5, name, 10, fill=SOFT, transform=f"rotate(-50 {value_text(x)} -5)")


def _strip(
    one: HeadPicture, numbers: Array, layout: _CellLayout, width: float, options: ViewOptions, *, is_shaded: bool
) -> Piece:
    colours, sees = sink_colours(numbers), one.shown.n_queries > 0
    if not layout.is_vector:
        colours[~sees] = _WHITE
        return Piece(image(0, 0, colours[:, None], (width, layout.height)), width, 0)
    content = ""
    for row, number in enumerate(numbers.tolist()):
        y, colour = row * layout.height, colours[row].tolist()
        is_coloured = is_shaded and bool(sees[row])
        if is_coloured:
            said = f"{one.query_name(row)}: {number:.{DIGITS}g}"
            content += rectangle(0, y, width, layout.height, hex_of(colour), said, shape_rendering="crispEdges")
        if layout.number:
            text = cell_text(number if sees[row] else FORBIDDEN, options.precision)
            content += _number(0, y, text, ink_on(colour) if is_coloured else SOFT, layout)
    return Piece(content, width, 0)


# ------------------------------------------------------------------------------------------------------- maps of cells


DIGITS = 6
"""Of a share that is told to a pointer: what a float32 holds."""


def cell_colours(one: HeadPicture, levels: Array) -> Array:
    """The colours of the cells, `[row, column, 3]`; of sinks that are hidden those of what they got."""
    colours = colours_of(levels)
    columns = [*one.hidden_columns]
    is_open = one.whole.is_open[:, columns]
    of_sinks = sink_colours(one.whole.of_sinks[:, columns])
    colours[:, columns] = np.where(is_open[..., None], of_sinks, colours[:, columns])
    return colours


def cell_share(one: HeadPicture, row: int, column: int) -> float:
    """The share of a cell that is drawn; of a sink that is hidden what it got."""
    shown = one.whole if column in one.hidden_columns else one.shown
    return float(shown.shares[row, column])


def cell_text(share: float, precision: int) -> str:
    """The number of a cell: `0` where nothing may be attended, which looks unlike `.00`."""
    return "0" if share == FORBIDDEN else "?" if math.isnan(share) else weight_text(share, precision)


def cell_said(one: HeadPicture, row: int, column: int) -> str:
    """What a pointer is told about a cell: `cat → the: 0.170927`."""
    share = cell_share(one, row, column)
    told = "not a number" if math.isnan(share) else f"{share:.{DIGITS}g}"
    told += ", a sink, taken out" if column in one.hidden_columns else ""
    names = f"{one.query_name(row)} → {one.shown.key_name(column)}"
    return f"{names}: {'not allowed' if share == FORBIDDEN else told}"


def cell_shape(one: HeadPicture, at: tuple[int, int], colour: Sequence[int], cell: tuple[float, float]) -> str:
    """A cell as a shape of that width and height, which tells a pointer its share."""
    (row, column), (width, height) = at, cell
    said = cell_said(one, row, column)
    return rectangle(column * width, row * height, width, height, hex_of(colour), said, shape_rendering="crispEdges")


def map_frame(width: float, height: float) -> str:
    """The line around a map."""
    return rectangle(0, 0, width, height, "none", stroke=FAINT, stroke_width=0.8)
