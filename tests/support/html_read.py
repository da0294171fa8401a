"""Tables of an HTML text as lists of cells."""

from __future__ import annotations

from html.parser import HTMLParser


class TableReader(HTMLParser):
    """The tables of a text, as `tables[table][row][cell]`; `titles` and `styles` alike."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.titles: list[list[list[str]]] = []
        self.styles: list[list[list[str]]] = []
        self.tags: set[str] = set()
        self._is_cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        every = (self.tables, self.titles, self.styles)
        if tag == "table":
            for one in every:
                one.append([])
        elif tag == "tr":
            for one in every:
                one[-1].append([])
        elif tag in ("td", "th"):
            found = dict(attrs)
            for one, first in zip(every, ("", found.get("title") or "", found.get("style") or ""), strict=True):
                one[-1][-1].append(first)
            self._is_cell = True

    def handle_endtag(self, tag):
        self._is_cell = self._is_cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self._is_cell:
            self.tables[-1][-1][-1] += data
