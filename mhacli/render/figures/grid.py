"""Heads as small maps on one scale: a row per layer, or several rows for a single layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mhacli.record.arrays import Array
from mhacli.record.heads import words_of_type
from mhacli.record.record import Record
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.format import count_of, filled, short_text, weight_text
from mhacli.render.base.options import ViewOptions
from mhacli.render.base.selection import chosen_layers, names_of, ranges
from mhacli.render.figures.head import CellLayout, map_cells, map_frame, map_side
from mhacli.render.figures.head_picture import (
    HeadPicture,
    caption,
    drawn_as,
    head_picture,
    heads_to_draw,
    learned_mass,
    map_notes,
    of_same_texts,
    sequence_to_draw,
    sink_mass,
    sink_text,
    texts_of,
    unverified,
)
from mhacli.render.figures.scales import Shading, left_side, scale_bar, shading, top_side
from mhacli.render.figures.svg import (
    INK,
    MONO_EM,
    SOFT,
    Piece,
    Sheet,
    characters,
    element,
    heading,
    mono_width,
    paragraph,
    placed,
    stacked,
    value_text,
    written,
)
from mhacli.render.heads.drawable import scale_of
from mhacli.text.escape import visible

_LEAST = 560.0
_SIZES = ((16, 168.0, 128), (160, 84.0, 64), (1 << 30, 48.0, 32))
"""By number of heads: the size of each map, and its most cells per side."""
_COLUMNS = ((12, 4), (1 << 30, 8))
"""By number of heads of one layer: the heads per row."""
_ACROSS = 32
"""The most heads of a layer per row."""
_GAP, _NAME, _KINDS, _AXIS = 10.0, 10.0, 10.5, 13.0
_QUERY, _KEY = "query ↓", "key →"
_NARROW, _WIDE = 60.0, 120.0
"""The least widths of a map for a word in its name, and for its type."""
_TOOLTIP_DIGITS = 3
"""Digits of a sum of weights in a tooltip."""
_SHAPES = 2500
"""The most cells in total that are rectangles with the weight as tooltip."""


@dataclass(frozen=True)
class _HeadRow:
    """Heads in one row, with the name of their layer."""

    name: str
    places: tuple[int, ...]


def grid_figure(record: Record, options: ViewOptions) -> Sheet:
    """The picture of all chosen heads on one scale."""
    heads = heads_to_draw(record, options)
    side, most = next(sizes[1:] for sizes in _SIZES if len(heads) <= sizes[0])
    sequence = sequence_to_draw(record, options)
    pictures = [head_picture(head, sequence, options, most=most) for head in heads]
    shaded = shading([picture.shown for picture in pictures], scale_of(options, heads))
    body = _body(pictures, shaded, _Form(side, options.precision))
    has_sinks = any(picture.hidden_columns for picture in pictures)
    what = "attention weight, all heads"
    legend = scale_bar(shaded, options.precision, what=what, has_sinks=has_sinks)
    notes = [*map_notes(record, pictures, shaded), *_removed(pictures, options), *_of_layers(record, pictures, options)]
    width = max(_LEAST, body.width, legend.width)
    title = _name_of(pictures, sequence)
    cells = int(width / (MONO_EM * _KINDS))
    texts = paragraph([*texts_of(pictures, cells), *filled(_kinds(pictures), cells)], _KINDS, fill=SOFT)
    chosen = drawn_as(record, options, "grid", pictures=pictures, shaded=shaded)
    pieces = [stacked([heading(title, 16), texts], 3), body, legend, caption(notes, width=width)]
    return Sheet(stacked(pieces, 14), title, [shaded.range, *notes], [picture.label for picture in pictures], chosen)


def _name_of(pictures: Sequence[HeadPicture], sequence: int) -> str:
    """The layers, the number of heads, and the sequence if there are several."""
    layers = {(layer.layer, layer.name): layer for picture in pictures if (layer := picture.head.layer) is not None}
    parts = [names_of([*layers.values()])] if layers else []
    parts += [count_of(len(pictures), "head")]
    parts += [f"sequence {sequence}"] if len(pictures[0].head.record.sequences) > 1 else []
    return " · ".join(parts)


def _kinds(pictures: Sequence[HeadPicture]) -> list[str]:
    """Each head type with its sign and number of heads; an empty line if the record has no statistics."""
    kinds = [picture.head.statistics.kind for picture in pictures if picture.head.statistics is not None]
    counts = [
        f"{KIND_SIGNS[kind][0]} {words_of_type(kind).name} {kinds.count(kind)}" for kind in KIND_SIGNS if kind in kinds
    ]
    return counts or [""]


def _removed(pictures: Sequence[HeadPicture], options: ViewOptions) -> Iterator[str]:
    """The weights of hidden sinks over all heads of the picture."""
    learned = learned_mass(pictures)
    taken = "" if learned is None else f"{weight_text(learned, options.precision)} of the attention of their heads"
    if options.hide_sinks and not taken and not any(picture.whole.sinks for picture in pictures):
        yield "none of these heads has a sink, so nothing is taken out"
    elif options.hide_sinks:
        mass = sink_text(pictures, options.precision)
        also = f", and sink logits with {taken}," if taken else ""
        yield (
            f"sinks are hidden: {mass} of these heads{also} taken out (the part of each head is written above its map); "
            "the rest of each row is renormalised"
        )
    elif taken:
        yield f"sink logits take {taken}: no key gets it, so rows sum to less than 1"


def _of_layers(record: Record, pictures: Sequence[HeadPicture], options: ViewOptions) -> Iterator[str]:
    """Notes on layers that are unverified, were not kept, or have no attention matrix."""
    for layer in dict.fromkeys(picture.head.layer for picture in pictures):
        if layer is not None and not layer.verified:
            yield f"! {layer.label}: {unverified(layer)}"
    layers = () if record.model is None else chosen_layers(record, options)
    not_kept = [layer.inspected for layer in layers if not layer.is_drawable]
    if not_kept:
        yield f"not drawn, because the record has neither pattern nor map: {names_of(not_kept)}; --keep-limit makes room"
    without = () if record.model is None or options.layers is not None else record.model.without
    for kind in dict.fromkeys(other.type for other in without):
        numbers = [other.layer for other in without if other.type == kind]
        yield f"without an attention matrix: layer{'s' * (len(numbers) > 1)} {ranges(numbers)}, {visible(kind)}"


def _rows(pictures: Sequence[HeadPicture]) -> Iterator[_HeadRow]:
    layers: dict[tuple[int, str], list[int]] = {}
    for place, picture in enumerate(pictures):
        layer = picture.head.layer
        layers.setdefault((0, "") if layer is None else (layer.layer, layer.name), []).append(place)
    if len(layers) == 1:
        (places,) = layers.values()
        across = min(len(places), next(n for most, n in _COLUMNS if len(places) <= most))
        yield from (_HeadRow("", tuple(places[i : i + across])) for i in range(0, len(places), across))
        return
    for places in layers.values():
        layer = pictures[places[0]].head.layer
        name = "" if layer is None else layer.label + ("" if layer.verified else " !")
        yield from (_HeadRow(name, tuple(places[i : i + _ACROSS])) for i in range(0, len(places), _ACROSS))


def _body(pictures: Sequence[HeadPicture], shaded: Shading, form: _Form) -> Piece:
    rows = [*_rows(pictures)]
    cells = {place: _cell_size(picture, form.side) for place, picture in enumerate(pictures)}
    names = _names(pictures, cells[0]) if len(set(cells.values())) == 1 else None
    layer = max(mono_width(f"{row.name}  ", _NAME) if row.name else 0.0 for row in rows)
    left = max(layer if names is None else layer + names.left.width, mono_width(f"{_QUERY} ", _NAME))
    form = replace(
        form, names=names, is_small=sum(picture.shown.weights.size for picture in pictures) <= _SHAPES, above=_AXIS
    )
    content, y, width = written(left, 2 * _NAME + 3, _KEY, _NAME, fill=SOFT), 0.0, 0.0
    for row in rows:
        thumbs = [_thumb(pictures[i], shaded.levels[i], cells[i], form) for i in row.places]
        top = thumbs[0].height - pictures[row.places[0]].shown.weights.shape[0] * cells[row.places[0]]
        step = max(thumb.width for thumb in thumbs) + _GAP
        if form.above:
            content += written(left - 6, top - 8, _QUERY, _NAME, fill=SOFT, text_anchor="end")
            form = replace(form, above=0.0)
        if row.name:
            middle = (top + thumbs[0].height) / 2 + 0.35 * _NAME
            content += written(layer - 8, y + middle, row.name, _NAME, fill=INK, text_anchor="end")
        content += "" if names is None else placed(names.left, left - names.left.width, y + top)
        content += "".join(placed(thumb, left + place * step, y) for place, thumb in enumerate(thumbs))
        y += max(thumb.height for thumb in thumbs) + _GAP
        width = max(width, left + len(thumbs) * step - _GAP)
    return Piece(content, width, y - _GAP)


@dataclass(frozen=True)
class _Names:
    """The names of rows and columns common to all heads, if they fit. The last name of a row extends to the right by
    `reach`."""

    left: Piece
    top: Piece
    reach: float


def _names(pictures: Sequence[HeadPicture], cell: float) -> _Names | None:
    """The common names; None if cells are too small or heads read different texts."""
    rows, columns = (map_side(pictures[0], axis, cell) for axis in (0, 1))
    if not rows.is_named or not columns.is_named or len(of_same_texts(pictures)) > 1:
        return None
    return _Names(left_side(rows), *top_side(columns))


def _cell_size(picture: HeadPicture, side: float) -> float:
    return max(1.0, float(side // max(*picture.shown.weights.shape)))


@dataclass(frozen=True)
class _Form:
    """The look of heads: size, digits, names, whether each cell is a shape, and the space `above` the map for the word
    of columns."""

    side: float
    precision: int
    names: _Names | None = None
    is_small: bool = False
    above: float = 0.0


def _thumb(picture: HeadPicture, levels: Array, cell: float, form: _Form) -> Piece:
    """A head's map with its number and the sign of its type above."""
    rows, columns = levels.shape
    width, height = columns * cell, rows * cell
    cells = map_cells(picture, levels, CellLayout(cell, cell, form.is_small, 0.0), form.precision)
    frame = map_frame(width, height)
    y, name = _NAME + 5 + form.above, _short(picture, form)
    content = element("title", characters(_tooltip(picture))) + written(0, _NAME, name, _NAME, fill=INK)
    if form.names is not None:
        content += placed(form.names.top, 0, y)
        y += form.names.top.height
        width += form.names.reach
    content += element("g", cells, frame, transform=f"translate(0 {value_text(y)})")
    return Piece(element("g", content), max(width, form.side, mono_width(name, _NAME)), y + height)


def _short(picture: HeadPicture, form: _Form) -> str:
    """The head's number and type, and the weight of hidden sinks."""
    statistics = picture.head.statistics
    sign = "" if statistics is None else KIND_SIGNS[statistics.kind][0]
    name = "" if statistics is None else words_of_type(statistics.kind).name
    taken = ""
    if picture.shown.taken is not None and picture.whole.sinks:
        mass = sink_mass([picture])
        taken = "?" if mass is None else weight_text(mass, form.precision)
    if form.side > _WIDE:
        return f"head {picture.head.head}  {sign} {name}".rstrip() + (f" · sinks {taken}" if taken else "")
    is_worded = form.side > _NARROW
    parts = [
        "head" if is_worded and not taken else "",
        str(picture.head.head),
        sign,
        "sinks" if is_worded and taken else "",
    ]
    return " ".join(part for part in (*parts, taken) if part)


def _tooltip(picture: HeadPicture) -> str:
    statistics = picture.head.statistics
    parts = [picture.label]
    if statistics is not None:
        parts += [words_of_type(statistics.kind).name] + (
            [] if statistics.entropy is None else [f"entropy {short_text(statistics.entropy)} nats"]
        )
    parts += [f"sinks get {sink_text([picture], _TOOLTIP_DIGITS)}"] if picture.whole.sinks else []
    return " · ".join(parts)
