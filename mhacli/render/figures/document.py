"""The picture of a record as an SVG document (a head, a grid of heads, the trace, or effects), and as PNG."""

from __future__ import annotations

from importlib.util import find_spec

from mhacli.errors import MhaError, missing_library
from mhacli.record.record import Record
from mhacli.render.base.options import Figure, ViewOptions
from mhacli.render.figures.effects import effects_figure
from mhacli.render.figures.grid import grid_figure
from mhacli.render.figures.head import head_figure
from mhacli.render.figures.head_picture import metadata
from mhacli.render.figures.svg import (
    INK,
    MONO,
    PAPER,
    Sheet,
    characters,
    element,
    placed,
    rectangle,
    value_text,
    written,
)
from mhacli.render.figures.trace import trace_figure
from mhacli.render.heads.drawable import drawable_heads

_MARGIN = 18.0


def figure(record: Record, options: ViewOptions) -> str:
    """Self-contained SVG text, with the same bytes for the same record and options.

    Raises `UsageError` for options that the record or the picture does not support, and `MhaError` if the record lacks
    the data.
    """
    kind = options.figure or _usual(record, options)
    if kind == "effects":
        return _document(effects_figure(record), record)
    return _document({"head": head_figure, "grid": grid_figure, "walk": trace_figure}[kind](record, options), record)


def _usual(record: Record, options: ViewOptions) -> Figure:
    """The default picture: effects, the single chosen head, a grid of all heads, or the walkthrough of a record without
    heads."""
    if record.effect is not None and options.heads is None:
        return "effects"
    if record.trace and not record.heads:
        return "walk"
    return "head" if len(drawable_heads(record, options)) == 1 else "grid"


def _document(sheet: Sheet, record: Record) -> str:
    width, height = sheet.body.width + 2 * _MARGIN, sheet.body.height + 2 * _MARGIN
    size = value_text(width), value_text(height)
    content = [
        element("title", characters(sheet.title), id="title"),
        element("desc", characters(". ".join(sheet.sentences)), id="desc"),
        element("metadata", characters(metadata(record, sheet))),
        rectangle(0, 0, width, height, PAPER),
        placed(sheet.body, _MARGIN, _MARGIN),
    ]
    whole = element(
        "svg",
        *content,
        xmlns="http://www.w3.org/2000/svg",
        width=size[0],
        height=size[1],
        viewBox=f"0 0 {size[0]} {size[1]}",
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
    if find_spec("resvg_py") is None:
        raise missing_library("resvg-py", "--png")
    if png(_probe("mha")) == png(_probe("")):
        raise MhaError(
            "--png needs a font, and none is installed", hint="install one, such as DejaVu Sans Mono, or use --svg"
        )


def png(svg: str) -> bytes:
    """The picture as PNG, at twice its size."""
    import resvg_py

    rendered: bytes = resvg_py.svg_to_bytes(svg_string=svg, zoom=_ZOOM, background="#ffffff")
    return rendered


def _probe(text: str) -> str:
    """A picture of one word in the font family of pictures."""
    word = written(0, 12, text, 12, fill=INK, font_family=MONO)
    return element("svg", word, xmlns="http://www.w3.org/2000/svg", width=40.0, height=16.0)
