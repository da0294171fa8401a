"""HTML elements, and the style and script of a page.

`Html` is safe to insert; everything else goes through `text` first.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from importlib.resources import files
from io import StringIO
from itertools import takewhile
from typing import NewType

from rich.console import Console, RenderableType
from rich.segment import Segment

from mhacli.render.base.doc import Column, Row, Table
from mhacli.render.base.options import Screen
from mhacli.text.escape import harmless

Html = NewType("Html", str)
"""Text whose tags are all made by mha."""

STATIC = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""The policy of a page without script."""
WIDE = Screen(width=10_000, colour=False)
"""A screen wide enough for every terminal view."""
_CLASSES = {"red": "failed", "yellow": "warning", "green": "ok", "magenta": "sink", "cyan": "name"}
"""Classes for the colours of the terminal."""


def text(words: str) -> Html:
    """Escaped text."""
    return Html(escape(harmless(words), quote=True))


def tag(name: str, *inside: Html, **attributes: str | None) -> Html:
    """An element. Attributes are escaped, and those that are None are left out; a trailing
    underscore of a name is dropped, and inner ones become hyphens.

    >>> tag("th", text("a < b"), scope="row")
    '<th scope="row">a &lt; b</th>'
    """
    values = ""
    for key, value in attributes.items():
        if value is not None:
            values += f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
    return Html(f"<{name}{values}>{''.join(inside)}</{name}>")


def section(name: str, title: str, *body: Html, class_: str | None = None) -> Html:
    """A section with this name as its id, below a title."""
    return tag("section", tag("h2", text(title)), *body, id=name, class_=class_)


def dim(words: str) -> Html:
    """A paragraph that is less important."""
    return tag("p", text(words), class_="dim")


def sentence(words: str) -> Html:
    """Text with each command-line option as code that does not break at its hyphens."""
    return Html(_OPTION.sub(r"<code>\1</code>", text(words)))


_OPTION = re.compile(r"(--[a-z][a-z-]*)")


def joined(parts: Iterable[Html], between: str = "\n") -> Html:
    """The parts, joined by `between`."""
    return Html(between.join(parts))


def table(
    content: Table[Row],
    *,
    kind: str | None = None,
    of_row: Callable[[Row], Mapping[str, str]] = lambda row: {},
    of_cell: Callable[[Row, int], Mapping[str, str]] = lambda row, place: {},
) -> Html:
    """The table of a `kind` with all columns, in an element that scrolls. The first cell of each
    row is its heading, and so are the ids that follow it. `of_row` gives the attributes of a row,
    `of_cell` those of a cell that is no heading.
    """
    columns = content.columns
    n_names = max(1, len([*takewhile(lambda column: column.unit == "id", columns)]))

    def line(row: Row) -> Html:
        cells = []
        for place, column in enumerate(columns):
            words = text(column.text(row))
            attributes = {"title": column.about(row) or None, "class_": _class(column)}
            if place < n_names:
                cells.append(tag("th", words, scope="row", **attributes))
            else:
                cells.append(tag("td", words, **{**attributes, **of_cell(row, place)}))
        return tag("tr", *cells, **of_row(row))

    parts = []
    if content.title:
        parts.append(tag("caption", text(content.title)))
    if any(column.heading for column in columns):
        headings = (
            tag(
                "th",
                text(column.heading),
                scope="col",
                title=column.explanation or None,
                class_=_class(column),
            )
            for column in columns
        )
        parts.append(tag("thead", tag("tr", *headings)))
    parts.append(tag("tbody", *map(line, content.rows[: content.most])))
    if content.foot:
        parts.append(tag("tfoot", *map(line, content.foot)))
    return tag("div", tag("table", *parts, class_=kind), class_="scroll")


def _class(column: Column[Row]) -> str | None:
    """The class of the cells of a column."""
    return "word" if column.unit == "word" else None


def whole(title: str, policy: str, style: str, body: Html) -> str:
    """A document with its content security policy and its style sheet."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def segments_of(view: RenderableType, width: int) -> list[list[Segment]]:
    """The lines of a terminal view at this width."""
    console = Console(width=width, file=StringIO(), legacy_windows=False)
    return console.render_lines(view, console.options, pad=False)


def lines_of(view: RenderableType, width: int) -> Iterator[Html]:
    """The lines of a terminal view at this width, with styles as classes."""
    for line in segments_of(view, width):
        yield Html("".join(map(styled, line)).rstrip())


def paragraphs(view: RenderableType) -> list[Html]:
    """The lines of a terminal view on a wide screen, each as a paragraph."""
    return [tag("p", line) for line in lines_of(view, WIDE.width)]


def preformatted(view: RenderableType, width: int) -> Html:
    """A terminal view as preformatted text."""
    return tag("div", tag("pre", Html(joined(lines_of(view, width)).strip("\n"))), class_="scroll")


def styled(segment: Segment, element: str = "span") -> Html:
    """A part of a line, with its style as the classes of an element, which blanks and plain text
    need not have.
    """
    words = text(segment.text)
    style = segment.style
    if style is None or not segment.text.strip():
        return words
    colour = "" if style.color is None else style.color.name.removeprefix("bright_")
    classes = [_CLASSES[colour]] if colour in _CLASSES else []
    if style.bold:
        classes.append("bold")
    if style.dim:
        classes.append("dim")
    return tag(element, words, class_=" ".join(classes)) if classes else words


# --------------------------------------------------------------------------------- style and script


def page_script() -> str:
    """All scripts in order of file name, in one scope."""
    return f'(() => {{\n"use strict";\n{page_part(".js")}}})();\n'


def content_policy(script: str) -> str:
    """The content security policy: this script only, which it names by the digest of its text, and
    no network. Source: Content Security Policy Level 3, section 6.7.3.3.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return f"{STATIC}; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def page_part(ending: str) -> Html:
    """The assets whose names end so, in the order of their names: style sheets, scripts, or
    elements that the script fills.
    """
    folder = files("mhacli.render.page").joinpath("assets")
    named = sorted(
        (file for file in folder.iterdir() if file.name.endswith(ending)),
        key=lambda file: file.name,
    )
    return joined((_compact(file.read_text(encoding="utf-8")) for file in named), "")


def _compact(source: str) -> Html:
    """The source without indentation, blank lines, and comments on lines of their own."""
    without = re.sub(
        r"^[ \t]*(?://[^\n]*|/\*.*?\*/[ \t]*)$", "", source, flags=re.MULTILINE | re.DOTALL
    )
    return Html("".join(f"{line.strip()}\n" for line in without.splitlines() if line.strip()))
