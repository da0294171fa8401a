"""The picture of a record as an SVG document (a head, a grid of heads, the trace, or effects), and as PNG."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Group

from mhacli.errors import EXIT_CHECK, MhaError, library
from mhacli.record.record import Record
from mhacli.render.base.format import provenance
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import drawable_heads
from mhacli.render.base.terminal import bare
from mhacli.render.checkpoint.effect import effect_grids, effect_words, measured_words
from mhacli.render.figures.grids import grids, legend
from mhacli.render.figures.heads import heads_sheet
from mhacli.render.figures.svg import (
    MONO,
    PAPER,
    SOFT,
    STYLE,
    Piece,
    Sheet,
    element,
    paragraph,
    placed,
    printed,
    rectangle,
    stacked,
    value_text,
    written,
)
from mhacli.render.page.elements import segments_of, text
from mhacli.render.run.steps import steps_table
from mhacli.render.run.trace import closing, header, step_table

_MARGIN, _LEAST, _GAP = 18.0, 560.0, 14.0
_TITLE, _TITLE_EM, _ABOUT = 16.0, 0.68, 11.0
"""The sizes of the title and of the lines below it, and an upper bound of the width of bold characters in ems."""
_MOST, _COLUMNS = 64, 160
"""The most steps of a picture, and the columns of the terminal whose view it shows."""


def figure(record: Record, options: ViewOptions) -> str:
    """Self-contained SVG text, with the same bytes for the same record and options.

    The default picture is effects, the single chosen head, a grid of all heads, or the walkthrough of a record without heads.
    Raises `UsageError` for options that the record or the picture does not support, and `MhaError` if the record lacks
    the data.
    """
    kind = options.figure
    if kind == "effects" or (kind is None and record.effect is not None and options.heads is None):
        sheet = effects_sheet(record)
    elif kind == "walk" or (kind is None and record.trace and not record.heads):
        sheet = _walk(record)
    else:
        usual = "head" if len(drawable_heads(record, options)) == 1 else "grid"
        sheet = heads_sheet(record, options, kind or usual)
    return document(sheet, {"command": [*record.command], **dict(provenance(record))})


def _walk(record: Record) -> Sheet:
    """The table of a record's steps as the terminal prints it. Raises `MhaError` if it has none."""
    if not record.trace:
        raise MhaError("the record has no steps to draw", hint="mha trace records them")
    screen = Screen(_COLUMNS, colour=False)
    about = segments_of(header(record, screen), _COLUMNS)
    if record.decoding is not None:
        steps = step_table(record.trace, range(len(record.sequences)), _MOST)
        title, parts = "decoding, step by step", [bare(steps, _COLUMNS)]
    else:
        title, steps = "attention, site by site", replace(steps_table(record), most=_MOST, has_ends=True)
        parts = [bare(steps, _COLUMNS), closing(record, screen)]
    return Sheet(
        title=title,
        about=[" ".join(segment.text for row in about for segment in row)],
        body=[printed(Group(*parts), _COLUMNS)],
    )


_SIDE = 720.0
"""The size of the map of heads."""


def effects_sheet(record: Record) -> Sheet:
    """The picture of a record's effects. Raises `MhaError` if it has none, or they are not proven."""
    summary = record.effect
    if summary is None:
        raise MhaError(
            "the record has no effects, so none can be drawn", hint="mha effect … --save makes such a record"
        )
    if not summary.verified.ok:
        raise MhaError(
            "the effects are not drawn: a second computation gives other numbers",
            code="self-check",
            exit_code=EXIT_CHECK,
        )
    maps = effect_grids(record)
    return Sheet(
        title=f"effect on {measured_words(record, summary)}",
        body=[*(grids([("", [of])], _SIDE) for of in maps), *([legend(maps, maps[0].meaning)] if maps else [])],
        caption=[part.plain for part in effect_words(record, Screen(10_000, False))],
    )


def document(sheet: Sheet, metadata: Mapping[str, object]) -> str:
    """A picture as an SVG document."""
    title = written(
        0, _TITLE, sheet.title, _TITLE, font_weight="bold", font_family="'DejaVu Sans', Helvetica, Arial, sans-serif"
    )
    title_width = cell_len(sheet.title) * _TITLE_EM * _TITLE
    width = max(_LEAST, title_width, *(piece.width for piece in sheet.body))
    head = [Piece(title, title_width, 1.35 * _TITLE)]
    head += [paragraph(line, width, size=_ABOUT, fill=SOFT) for line in sheet.about]
    caption = [paragraph(" · ".join(sheet.caption), width)] if sheet.caption else []
    body = stacked([stacked(head, 2), *sheet.body, *caption], _GAP)
    width, height = max(width, body.width) + 2 * _MARGIN, body.height + 2 * _MARGIN
    whole = element(
        "svg",
        element("title", text(sheet.title), id="title"),
        element("desc", text(". ".join(sheet.caption or sheet.about or [sheet.title])), id="desc"),
        element("metadata", text(json.dumps(metadata))),
        element("style", STYLE),
        rectangle(0, 0, width, height, PAPER),
        placed(body, _MARGIN, _MARGIN),
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {value_text(width)} {value_text(height)}",
        role="img",
        aria_labelledby="title desc",
        font_family=MONO,
    )
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{whole}\n'


# -------------------------------------------------------------------------------------------------------------- as PNG

_ZOOM = 2.0
"""Pixels per unit of the picture, for screens of twice the usual density."""


def require_png() -> None:
    """Raises `MhaError` if PNG is not available: without the library, or without a font, which would drop all text."""
    library("resvg_py", "--png")
    words = [written(0, 12, text, 12, font_family=MONO) for text in ("mha", "")]
    with_text, without = (
        png(element("svg", word, xmlns="http://www.w3.org/2000/svg", width=40.0, height=16.0)) for word in words
    )
    if with_text == without:
        raise MhaError(
            "--png needs a font, and none is installed", hint="install one, such as DejaVu Sans Mono, or use --svg"
        )


def png(svg: str) -> bytes:
    """The picture as PNG, at twice its size."""
    import resvg_py

    rendered: bytes = resvg_py.svg_to_bytes(svg_string=svg, zoom=_ZOOM, background="#ffffff")
    return rendered
