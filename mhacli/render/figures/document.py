"""The picture of a record as a whole SVG document: of one head, of a grid of heads, or of the walkthrough."""

from __future__ import annotations

from mhacli.render.base.options import Figure, ViewOptions
from mhacli.render.figures.grid import grid_figure
from mhacli.render.figures.head import head_figure
from mhacli.render.figures.subject import metadata
from mhacli.render.figures.svg import MONO, PAPER, Sheet, characters, element, placed, rectangle, value_text
from mhacli.render.figures.walk import walk_figure
from mhacli.render.heads.drawable import drawable_heads
from mhacli.results.record.record import Record

_MARGIN = 18.0


def figure(record: Record, options: ViewOptions) -> str:
    """SVG text that needs nothing beside itself, the same bytes for the same record and options. Raises `UsageError` for choices
    that the record does not have or a picture cannot show, and `MhaError` where it holds nothing of what is to be drawn."""
    kind = options.figure or _usual(record, options)
    return _document({"head": head_figure, "grid": grid_figure, "walk": walk_figure}[kind](record, options), record)


def _usual(record: Record, options: ViewOptions) -> Figure:
    """What is drawn where nobody said: the one head that was chosen, all in a grid, or the walkthrough of a record that is not
    about heads."""
    if record.trace and not record.heads:
        return "walk"
    return "head" if len(drawable_heads(record, options)) == 1 else "grid"


def _document(sheet: Sheet, record: Record) -> str:
    width, height = sheet.body.width + 2 * _MARGIN, sheet.body.height + 2 * _MARGIN
    size = value_text(width), value_text(height)
    content = [
        element("title", characters(sheet.title), id="title"),
        element("desc", characters(". ".join(sheet.said)), id="desc"),
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
