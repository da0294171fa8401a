"""An HTML text read back: its elements, the cells of its tables, its scripts and its words."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Html(HTMLParser):
    """`tables[table][row][cell]` is the text of a cell; `titles` and `styles` are these attributes
    of the cells alike.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.titles: list[list[list[str]]] = []
        self.styles: list[list[list[str]]] = []
        self.text = ""
        self._within: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.elements.append((tag, attributes))
        if tag in ("script", "style", "td", "th"):
            self._within.append(tag)
        if tag == "script":
            self.scripts.append("")
        cell = ("", attributes.get("title", ""), attributes.get("style", ""))
        for held, first in zip((self.tables, self.titles, self.styles), cell, strict=True):
            if tag == "table":
                held.append([])
            elif tag == "tr":
                held[-1].append([])
            elif tag in ("td", "th"):
                held[-1][-1].append(first)

    def handle_endtag(self, tag: str) -> None:
        if self._within[-1:] == [tag]:
            self._within.pop()

    def handle_data(self, data: str) -> None:
        if "script" in self._within:
            self.scripts[-1] += data
        elif "style" not in self._within:
            self.text += data
            if self._within:
                self.tables[-1][-1][-1] += data

    @property
    def tags(self) -> set[str]:
        """The names of its elements."""
        return {tag for tag, _ in self.elements}

    @property
    def data(self) -> dict[str, Any]:
        """The JSON that one of its scripts holds."""
        (held,) = (script for script in self.scripts if script.lstrip().startswith("{"))
        return dict(json.loads(held))
