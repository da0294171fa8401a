"""Draws tables as HTML, for pages and notebooks. Headings have their explanations as tooltips."""

from __future__ import annotations

from mhacli.render.page.elements import Html, tag, text
from mhacli.views.doc import Row, Table


def table(of: Table[Row]) -> Html:
    """The table with all columns, in an element that scrolls. The first cell of each row is its heading."""
    kinds = [{"class_": "word"} if column.unit == "word" else {} for column in of.columns]
    headings = [
        tag(
            "th",
            text(column.heading),
            scope="col",
            **({"title": column.explanation} if column.explanation else {}),
            **kind,
        )
        for column, kind in zip(of.columns, kinds, strict=True)
    ]
    rows = []
    for row in of.rows if of.most is None else of.rows[: of.most]:
        first, *others = (text(column.text(row)) for column in of.columns)
        cells = (tag("td", cell, **kind) for cell, kind in zip(others, kinds[1:], strict=True))
        rows.append(tag("tr", tag("th", first, scope="row", **kinds[0]), *cells))
    caption = [tag("caption", text(of.title))] if of.title else []
    whole = tag("table", *caption, tag("thead", tag("tr", *headings)), tag("tbody", *rows))
    return tag("div", whole, class_="scroll")
