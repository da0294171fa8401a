"""One head: its map with tokens or positions on both axes, the weights of sinks, and row sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mhacli.errors import UsageError
from mhacli.record.arrays import Array
from mhacli.record.record import Record
from mhacli.render.base.cells import FORBIDDEN
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.format import short_text, type_text, weight_text
from mhacli.render.base.options import ViewOptions
from mhacli.render.figures.head_picture import (
    HeadPicture,
    caption,
    drawn_as,
    head_picture,
    heads_to_draw,
    map_notes,
    removed_note,
    sequence_to_draw,
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

_MOST_CELLS = 512
"""The most cells per side of a single map."""
_VECTOR = 48
"""The most cells per side that are separate shapes with numbers."""
_SIDE, _LEAST, _LARGEST = 720.0, 560.0, 64.0
_ROW, _TEXT = 14.0, 11.0
_STRIP, _APART = 14.0, 8.0
_DOWN = "query ↓"
_WHITE = 255


def head_figure(record: Record, options: ViewOptions) -> Sheet:
    """The picture of the chosen head. Raises `UsageError` if several were chosen."""
    heads = heads_to_draw(record, options)
    if len(heads) > 1:
        of_layers = record.model is not None and options.layers is None
        raise UsageError(
            f"--figure head draws one head, and {len(heads)} are chosen",
            hint="try --layer 0 --head 0" if of_layers else "try --head 0",
        )
    picture = head_picture(heads[0], sequence_to_draw(record, options), options, most=_MOST_CELLS)
    shaded = shading([picture.shown], scale_of(options, heads))
    body = _body(picture, shaded, options)
    notes = [*map_notes(record, [picture], shaded)]
    notes += removed_note(picture, options.precision, is_hidden=options.hide_sinks)
    legend = scale_bar(shaded, options.precision, what="attention weight", has_sinks=_has_strip(picture))
    title = _title(picture, options)
    width = max(_LEAST, title.width, body.width, legend.width)
    texts = paragraph(texts_of([picture], int(width / (MONO_EM * _TEXT))), _TEXT, fill=SOFT)
    chosen = drawn_as(record, options, "head", pictures=[picture], shaded=shaded)
    pieces = [stacked([title, texts], 2), body, legend, caption(notes, width=width)]
    return Sheet(stacked(pieces, 12), picture.label, [shaded.range, *notes], [picture.label], chosen)


def _title(picture: HeadPicture, options: ViewOptions) -> Piece:
    """The head's name, type and main statistics."""
    statistics = picture.head.statistics
    layer = picture.head.layer
    pieces = [heading(picture.label + kv_head_of(picture.head.record, picture.head.head), 16)]
    if layer is not None and not layer.verified:
        pieces.append(paragraph(wrapped(unverified(layer), 80), 10, fill=ALARM))
    if statistics is not None:
        parts = [f"{KIND_SIGNS[statistics.kind][0]} {type_text(statistics)}"]
        parts += [] if statistics.entropy is None else [f"entropy {short_text(statistics.entropy)} nats"]
        parts += (
            [] if statistics.sink is None else [f"first-token weight {weight_text(statistics.sink, options.precision)}"]
        )
        pieces.append(paragraph([" · ".join(parts)], 11, fill=SOFT))
    return stacked(pieces, 2)


@dataclass(frozen=True)
class CellLayout:
    """The size of cells, whether each is a shape, and the size of numbers in them (0: none)."""

    width: float
    height: float
    is_vector: bool
    number: float


def _cell_layout(picture: HeadPicture, options: ViewOptions) -> CellLayout:
    rows, columns = picture.shown.weights.shape
    longest = max(rows, columns)
    if longest > _VECTOR:
        pitch = max(1.0, _SIDE // longest)
        return CellLayout(pitch, max(pitch, _ROW) if rows <= _VECTOR else pitch, False, 0.0)
    number, pitch = next(sizes[1:] for sizes in _SIZES if longest <= sizes[0])
    widest = max(
        len(weight_text(x, options.precision)) for x in (0.5, _largest(picture.shown), _largest(picture.whole))
    )
    needed = mono_width("0" * widest, number) + 5
    if needed > _LARGEST:
        return CellLayout(pitch, pitch, True, 0.0)
    return CellLayout(max(pitch, needed), pitch, True, number)


def _largest(head_map: HeadMap) -> float:
    return float(np.fmax.reduce(head_map.weights, axis=None))


_SIZES = ((10, 11.0, 42.0), (16, 10.0, 34.0), (32, 8.5, 26.0), (_VECTOR, 7.0, 20.0))
"""By number of cells per side: the size of numbers, and of cells."""


def _body(picture: HeadPicture, shaded: Shading, options: ViewOptions) -> Piece:
    """The map with its names, and the strips on its right."""
    layout = _cell_layout(picture, options)
    rows, columns = picture.shown.weights.shape
    left = left_side(map_side(picture, 0, layout.height, _DOWN + " "))
    top, reach = top_side(map_side(picture, 1, layout.width))
    drawing = map_cells(picture, shaded.levels[0], layout, options.precision)
    cells = Piece(drawing, columns * layout.width, rows * layout.height)
    frame = map_frame(cells.width, cells.height)
    strips = _strips(picture, layout, options)
    x, y = left.width, top.height + 16
    content = placed(left, 0, y) + placed(top, x, y - top.height) + placed(cells, x, y)
    content += placed(Piece(frame, 0, 0), x, y)
    content += written(x, 10, "key →", 10, fill=SOFT)
    content += written(x - 6, y - 8, _DOWN, 10, fill=SOFT, text_anchor="end")
    content += placed(strips, x + cells.width + _APART, y)
    width = x + max(cells.width + reach, cells.width + _APART + strips.width)
    return Piece(content, width, y + cells.height)


def map_side(picture: HeadPicture, axis: int, pitch: float, title: str = "") -> MapSide:
    """The names of the rows (axis 0) or columns (axis 1) of a map. Requested rows have names, never positions."""
    shown, size = picture.shown, picture.shown.weights.shape[axis]
    names = [shown.key_name(i) if axis else picture.query_name(i) for i in range(size)]
    first, block = (0, 1) if axis == 0 and picture.rows is not None else (shown.first[axis], shown.block)
    return MapSide(names, pitch, first, block, title)


def map_cells(picture: HeadPicture, levels: Array, layout: CellLayout, precision: int) -> str:
    """The cells of a map as an image, or as rectangles with the weight as tooltip."""
    colours = cell_colours(picture, levels)
    if not layout.is_vector:
        return image(0, 0, colours, (layout.width, layout.height))
    rows, columns = levels.shape
    return "".join(
        _cell(picture, (row, column), colours[row, column].tolist(), layout, precision)
        for row in range(rows)
        for column in range(columns)
    )


def _cell(picture: HeadPicture, at: tuple[int, int], colour: Sequence[int], layout: CellLayout, precision: int) -> str:
    """A cell with its tooltip, and its number if it fits."""
    x, y = at[1] * layout.width, at[0] * layout.height
    tooltip = cell_tooltip(picture, *at)
    shape = rectangle(x, y, layout.width, layout.height, hex_of(colour), tooltip, shape_rendering="crispEdges")
    if not layout.number:
        return shape
    weight = cell_weight(picture, *at)
    fill = SOFT if weight == FORBIDDEN else ink_on(colour)
    return shape + _number(x, y, cell_text(weight, precision), fill, layout)


def _number(x: float, y: float, text: str, fill: str, layout: CellLayout) -> str:
    """A number in the middle of a cell. It ignores the pointer, so that the cell's tooltip shows."""
    middle = x + layout.width / 2, y + layout.height / 2 + 0.35 * layout.number
    return written(*middle, text, layout.number, fill=fill, text_anchor="middle", pointer_events="none")


def _has_strip(picture: HeadPicture) -> bool:
    return picture.shown.taken is not None or picture.shown.learned is not None


def _strips(picture: HeadPicture, layout: CellLayout, options: ViewOptions) -> Piece:
    """The columns right of the map: the weight of sinks in each row, that of a sink logit, and the row sum."""
    columns: list[tuple[str, Array, bool]] = []
    if picture.shown.taken is not None:
        columns.append(("sinks", picture.shown.taken, True))
    if picture.shown.learned is not None:
        columns.append(("learned", picture.shown.learned, True))
    if layout.number:
        open_weights = np.where(picture.shown.is_open, picture.shown.weights, 0.0)
        columns.append(("Σ", open_weights.sum(axis=1), False))
    width = layout.width if layout.number else _STRIP
    content = ""
    for index, (name, numbers, is_shaded) in enumerate(columns):
        x = index * (width + _APART)
        content += _header(name, x + width / 2)
        content += placed(_strip(picture, numbers, layout, width, options, is_shaded=is_shaded), x, 0)
    return Piece(content, len(columns) * (width + _APART) - _APART + 30 if columns else 0.0, 0.0)


def _header(name: str, x: float) -> str:
    if len(name) == 1:
        return written(x, -5, name, 10, fill=SOFT, text_anchor="middle")
    return written(x, -5, name, 10, fill=SOFT, transform=f"rotate(-50 {value_text(x)} -5)")


def _strip(
    picture: HeadPicture, numbers: Array, layout: CellLayout, width: float, options: ViewOptions, *, is_shaded: bool
) -> Piece:
    colours, sees = sink_colours(numbers), picture.shown.n_queries > 0
    if not layout.is_vector:
        colours[~sees] = _WHITE
        return Piece(image(0, 0, colours[:, None], (width, layout.height)), width, 0)
    content = ""
    for row, number in enumerate(numbers.tolist()):
        y, colour = row * layout.height, colours[row].tolist()
        is_coloured = is_shaded and bool(sees[row])
        if is_coloured:
            tooltip = f"{picture.query_name(row)}: {number:.{DIGITS}g}"
            content += rectangle(0, y, width, layout.height, hex_of(colour), tooltip, shape_rendering="crispEdges")
        if layout.number:
            text = cell_text(number if sees[row] else FORBIDDEN, options.precision)
            content += _number(0, y, text, ink_on(colour) if is_coloured else SOFT, layout)
    return Piece(content, width, 0)


# ------------------------------------------------------------------------------------------------------- maps of cells


DIGITS = 6
"""Digits of an attention weight in a tooltip: all digits of a float32."""


def cell_colours(picture: HeadPicture, levels: Array) -> Array:
    """The colours of the cells, `[row, column, 3]`. Hidden sinks have the colour of their removed weight."""
    colours = colours_of(levels)
    columns = [*picture.hidden_columns]
    is_open = picture.whole.is_open[:, columns]
    of_sinks = sink_colours(picture.whole.of_sinks[:, columns])
    colours[:, columns] = np.where(is_open[..., None], of_sinks, colours[:, columns])
    return colours


def cell_weight(picture: HeadPicture, row: int, column: int) -> float:
    """The attention weight of a cell; for a hidden sink its weight before removal."""
    shown = picture.whole if column in picture.hidden_columns else picture.shown
    return float(shown.weights[row, column])


def cell_text(weight: float, precision: int) -> str:
    """The number in a cell: `0` if masked, unlike `.00`."""
    return "0" if weight == FORBIDDEN else "?" if math.isnan(weight) else weight_text(weight, precision)


def cell_tooltip(picture: HeadPicture, row: int, column: int) -> str:
    """The tooltip of a cell: `cat → the: 0.170927`."""
    weight = cell_weight(picture, row, column)
    text = "not a number" if math.isnan(weight) else f"{weight:.{DIGITS}g}"
    text += ", a sink, taken out" if column in picture.hidden_columns else ""
    names = f"{picture.query_name(row)} → {picture.shown.key_name(column)}"
    return f"{names}: {'masked' if weight == FORBIDDEN else text}"


def map_frame(width: float, height: float) -> str:
    """The border of a map."""
    return rectangle(0, 0, width, height, "none", stroke=FAINT, stroke_width=0.8)
