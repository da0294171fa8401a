"""A report that is no record, such as that of `check`, `diff` or `doctor`, as a page and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import RenderableType

from mhacli.render.base.options import Screen
from mhacli.render.page import elements
from mhacli.render.page.elements import Html, joined, tag, text

PAPER, PHONE = Screen(width=110, colour=False), Screen(width=42, colour=False)
"""The screens whose view a picture and a page show, and a page on a narrow screen; cells have signs in place of shades."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = ".narrow { display: none } @media (max-width: 700px) { .narrow { display: block } .wide { display: none } }\n"
View = Callable[[Screen], RenderableType]


def report_page(view: View, name: str, command: Sequence[str]) -> str:
    """A page without script: what the terminal prints, in its colours, below the `name` of the report and its command."""

    def printed(screen: Screen, kind: str) -> Html:
        return tag("section", elements.preformatted(view(screen), screen.width), class_=kind)

    top = tag("header", tag("h1", text(name)), tag("p", text(" ".join(command)), id="origin"))
    body = joined([top, tag("main", printed(PAPER, "wide"), printed(PHONE, "narrow"))])
    return elements.whole(name, POLICY, elements.page_part("10-page.css") + _STYLE, body)


def report_figure(view: View, name: str, command: Sequence[str]) -> str:
    """An SVG picture of what the terminal prints, in its colours, with the command in its metadata."""
    from mhacli.render.figures.document import document
    from mhacli.render.figures.svg import Sheet, printed

    sheet = Sheet(title=name, body=[printed(view(PAPER), PAPER.width)])
    return document(sheet, {"command": [*command]})
