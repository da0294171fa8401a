"""A report that is no record, such as that of `check`, `diff` or `doctor`, as a page and as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from mhacli.render.base.options import Screen
from mhacli.render.page import elements
from mhacli.render.page.elements import joined, tag, text

PAPER = Screen(width=110, colour=False)
"""The screen whose view a page and a picture show; cells have signs in place of shades."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def report_page(view: RenderableType, name: str, command: Sequence[str]) -> str:
    """A page without script: what the terminal prints, in its colours, below the `name` of the report and its command."""
    top = tag("header", tag("h1", text(name)), tag("p", text(" ".join(command)), id="origin"))
    body = joined([top, tag("main", tag("section", elements.preformatted(view, PAPER.width)))])
    return elements.whole(name, POLICY, elements.page_part("10-page.css"), body)


def report_figure(view: RenderableType, name: str, command: Sequence[str]) -> str:
    """An SVG picture of what the terminal prints, with the command in its metadata."""
    from mhacli.render.figures.document import document
    from mhacli.render.figures.svg import Sheet, lines, printed

    sheet = Sheet(title=name, body=[lines(printed(view, PAPER.width))])
    return document(sheet, {"command": [*command]})
