"""Tables of an HTML text as lists of cells, and an HTML text as a sanitizer leaves it."""

from __future__ import annotations

from html import escape
from html.parser import HTMLParser

ALLOWED_ELEMENTS = frozenset(
    [
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "br",
        "b",
        "i",
        "strong",
        "em",
        "a",
        "pre",
        "code",
        "img",
        "tt",
        "div",
        "ins",
        "del",
        "sup",
        "sub",
        "p",
        "picture",
        "ol",
        "ul",
        "table",
        "thead",
        "tbody",
        "tfoot",
        "blockquote",
        "dl",
        "dt",
        "dd",
        "kbd",
        "q",
        "samp",
        "var",
        "hr",
        "ruby",
        "rt",
        "rp",
        "li",
        "tr",
        "td",
        "th",
        "s",
        "strike",
        "summary",
        "details",
        "caption",
        "figure",
        "figcaption",
        "abbr",
        "bdo",
        "cite",
        "dfn",
        "mark",
        "small",
        "source",
        "span",
        "time",
        "wbr",
    ]
)
"""What GitHub leaves of HTML. Source: github.com/gjtorikian/html-pipeline, sanitization_filter.rb."""
ALLOWED_ATTRIBUTES = frozenset(
    [
        "align",
        "border",
        "colspan",
        "dir",
        "headers",
        "lang",
        "rowspan",
        "scope",
        "span",
        "summary",
        "title",
        "valign",
        "width",
    ]
)
"""Those of its attributes that tables and texts have: neither `style` nor `class` nor `id`."""


class Sanitizer(HTMLParser):
    """`text` is a text without the elements and attributes that are not allowed, `removed` the elements that are gone.
    Style sheets and scripts go with their content; `more` are attributes that are allowed besides."""

    def __init__(self, text: str, more: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.text, self.removed, self._allowed, self._hidden = "", set[str](), ALLOWED_ATTRIBUTES | more, 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag in ALLOWED_ELEMENTS:
            kept = "".join(f' {name}="{escape(value or "")}"' for name, value in attrs if name in self._allowed)
            self.text += f"<{tag}{kept}>"
        else:
            self.removed.add(tag)
            self._hidden += tag in ("style", "script")

    def handle_endtag(self, tag):
        if tag in ALLOWED_ELEMENTS:
            self.text += f"</{tag}>"
        else:
            self._hidden -= tag in ("style", "script")

    def handle_data(self, data):
        self.text += "" if self._hidden else escape(data)


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
