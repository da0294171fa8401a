"""A result in a notebook, as HTML: no script, no network, and a size limit. And what else results
become through `mhacli.record.shown`: a terminal view, the page of a record, and the page and the
picture of a report that is no record.

GitHub removes `<style>`, ids and scripts from notebooks. So cells have inline colours and a sign
that is readable without colour; the style sheet is optional. Source:
github.com/jupyter/nbviewer/issues/450.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from mhacli.numbers import Unit, shown
from mhacli.record.exports import Pattern, Table
from mhacli.record.record import EffectRecord, Record, is_a
from mhacli.record.shown import Shown

from .base import doc
from .base.format import fitted, type_text
from .base.options import Scale, Screen, ViewOptions
from .base.selection import drawable_heads, scale_of, usual_scale
from .checkpoint.effect import effect_view
from .figures.svg import Piece, document, picture, printed
from .heads.head_map import HeadMap, cell_map, grid_of, head_map
from .page.document import most_certain, page
from .page.elements import (
    STATIC,
    Html,
    dim,
    joined,
    page_part,
    preformatted,
    tag,
    text,
    whole,
)
from .page.elements import table as rows_and_columns
from .page.tables import effect_pictures, legend
from .page.tables import grid as grid_table
from .run.view import record_views

COLUMNS = 100
"""The width of a terminal view in a notebook."""
_SCREEN = Screen(COLUMNS, colour=False)
_OPTIONS = ViewOptions(view="none")
_ELSEWHERE = "record.page() shows every head, record.pattern(layer=…, head=…) one of them"
_MOST_CELLS = 24
"""The most cells of a matrix per side before pooling."""
_MOST_ROWS = 40
"""The most rows of a table."""
_UNITS: Mapping[type, Unit] = {int: "integer", float: "number"}
_NAME = 12
"""The widest name of a row or column."""


def html_of(result: Shown | Table) -> str:
    """The HTML of a result."""
    if isinstance(result, Pattern):
        return pattern_html(result)
    if isinstance(result, Table):
        return table_html(result)
    if isinstance(result, Record):
        return record_html(result)
    return fragment([("the report", terminal_part([result.view(_SCREEN)], result))])


def views_of(result: Shown, width: int, *, colour: bool) -> Iterator[RenderableType]:
    """The parts of the terminal view of a result."""
    screen = Screen(width, colour)
    if isinstance(result, Record):
        return (InPython(view, result) for view in record_views(result, ViewOptions(), screen))
    return iter([InPython(result.view(screen), result)])


def page_of(record: Record) -> str:
    """The interactive page of a record, as `mha show --html` writes it."""
    return page(record, ViewOptions())


def record_html(record: Record) -> str:
    """What the terminal shows of a record, with its effects as coloured tables, or with the head of
    the largest excess.
    """
    if is_a(record, EffectRecord) and record.effect.verified.ok:
        words = effect_view(record, _OPTIONS, _SCREEN, has_map=False)
        pictures = joined(effect_pictures(record))
        return fragment([("the pictures", pictures), ("the tables", terminal_part(words, record))])
    parts = [("the tables", terminal_part(record_views(record, _OPTIONS, _SCREEN), record))]
    heads = drawable_heads(record, _OPTIONS)
    if heads:
        head = heads[most_certain(heads)]
        title = f"{head.label}: {type_text(head.statistics)}"
        matrix = _matrix(head_map(head, 0), scale_of(_OPTIONS, [head]), title)
        parts.append(("the matrix of a head", matrix))
        parts.append(("", dim(_ELSEWHERE)))
    return fragment(parts)


def pattern_html(pattern: Pattern) -> str:
    """The cells of the pattern of one head; for several heads a description."""
    if pattern.head is None:
        words = f"{pattern!r}: record.pattern(layer=…, head=…) shows one head"
        return fragment([("", tag("p", text(words)))])
    cells = cell_map(pattern.query_tokens, pattern.key_tokens, pattern.values, pattern.allowed)
    title = f"layer {pattern.layer} · head {pattern.head}"
    return fragment([("the matrix", _matrix(cells, usual_scale([pattern.key_tokens]), title))])


def table_html(table: Table) -> str:
    """The first rows of a table, and its columns that have a value."""
    units = {
        name: _UNITS.get(kind, "word")
        for name, (kind, values) in table.columns().items()
        if any(value is not None for value in values)
    }
    rows = table.to_dicts()
    title = f"{_MOST_ROWS} of {len(rows)} rows" if len(rows) > _MOST_ROWS else ""
    content = doc.Table(doc.fields(units), rows, title=title, most=_MOST_ROWS)
    return fragment([("the table", rows_and_columns(content))])


def _matrix(cells: HeadMap, scale: Scale, title: str) -> Html:
    """The cells of a pattern, or blocks of a long one, with tooltips that have one decimal more."""
    blocks = cells.fitting(_MOST_CELLS, _MOST_CELLS)
    g = grid_of(blocks, "", scale=scale)

    def about(row: int, key: int) -> str:
        return f"{g.rows[row]} → {g.columns[key]} {shown(float(g.values[row, key]), 'weight', 3)}"

    panel = replace(
        g,
        rows=[fitted(name, _NAME) for name in g.rows],
        columns=[fitted(name, _NAME) for name in g.columns],
        corner="query ↓ key →",
        meaning=g.meaning if g.allowed.all() else f"{g.meaning} · 0 is masked",
        about=about,
    )
    return joined([tag("p", tag("b", text(title))), grid_table(panel), legend([panel])])


# ---------------------------------------------------------------------------------------- the frame

LIMIT_BYTES = 200_000
"""The largest output. A notebook stores every output."""
_STYLE = """
.mha-repr { color-scheme: light dark; background: light-dark(#fff, #161d25);
color: light-dark(#17202b, #e4e9ef); border: 1px solid light-dark(#d5dbe3, #2b3642);
border-radius: 8px; padding: 10px 14px; font: 13px/1.45 system-ui, sans-serif; }
.mha-repr .dim { color: light-dark(#566273, #9ba8b7); }
.mha-repr .ok { color: light-dark(#1d6b3a, #7fd09b); }
.mha-repr .sink { color: light-dark(#a8127d, #ff86d6); }
.mha-repr .warning { color: light-dark(#8a5a00, #e8b85c); }
.mha-repr .failed { color: light-dark(#b3261e, #ff8a80); font-weight: 600; }
.mha-repr .bold { font-weight: 600; }
.mha-repr .name { color: light-dark(#0d6270, #6cc5d1); }
.mha-repr.mha-repr.mha-repr p { margin: 0 0 4px; } .mha-repr > div { overflow-x: auto; }
.mha-repr.mha-repr.mha-repr pre { margin: 8px 0; padding: 0; background: none; color: inherit;
font: 12px/1.35 ui-monospace, Menlo, Consolas, monospace; }
.mha-repr.mha-repr.mha-repr table { border-collapse: collapse; margin: 8px 0; font-size: 12px;
color: inherit; background: none; }
.mha-repr.mha-repr.mha-repr tr:nth-child(n) { background: none; color: inherit; }
.mha-repr table th, .mha-repr table td { padding: 1px 6px; text-align: right; font-weight: 400;
border: 0; white-space: nowrap; }
.mha-repr table .word { text-align: left; }
.mha-repr caption { text-align: left; caption-side: top; color: inherit; }
"""


def fragment(parts: Iterable[tuple[str, Html]]) -> str:
    """The parts, each with its name, in one element. Parts above the limit are left out and
    listed.
    """
    content = [tag("style", Html(_STYLE.strip()))]
    missing = []
    room = LIMIT_BYTES - len(_STYLE.encode()) - _FRAME
    for name, part in parts:
        n_bytes = len(part.encode())
        if n_bytes > room:
            missing.append(name)
        else:
            content.append(part)
            room -= n_bytes
    if missing:
        message = f"left out, to stay below {shown(LIMIT_BYTES, 'bytes')}: {', '.join(missing)}"
        content.append(dim(message))
    return tag("div", joined(content), class_="mha-repr")


_FRAME = 500
"""Bytes for the element and for the list of omitted parts."""


def terminal_part(views: Iterable[RenderableType], result: Shown) -> Html:
    """A terminal view of a result, which names parameters of Python."""
    return joined(preformatted(InPython(view, result), COLUMNS) for view in views)


@dataclass(frozen=True)
class InPython:
    """A terminal view of a result, in which options have the names of parameters."""

    view: RenderableType
    result: Shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """The parts of the view."""
        for part in console.render(self.view, options):
            yield part if part.is_control else part._replace(text=self.result.in_python(part.text))


# ------------------------------------------------------------------------------------------ reports

PAPER = Screen(width=110, colour=False)
"""The screen whose view a picture and a page show; cells have signs in place of shades."""
PHONE = Screen(width=42, colour=False)
"""The screen whose view a page shows on a narrow screen."""
_BY_WIDTH = (
    ".narrow { display: none } @media (max-width: 700px) { .narrow { display: block } .wide {"
    " display: none } }\n"
)
View = Callable[[Screen], RenderableType]


def report_page(view: View, name: str, command: Sequence[str], figures: Sequence[Piece]) -> str:
    """A page without script: what the terminal prints, in its colours, below the `name` of the
    report and its command; then `figures`.
    """

    def section(screen: Screen, kind: str) -> Html:
        return tag("section", preformatted(view(screen), screen.width), class_=kind)

    top = tag("header", tag("h1", text(name)), tag("p", text(shlex.join(command)), id="origin"))
    sections = [section(PAPER, "wide"), section(PHONE, "narrow")]
    if figures:
        boxes = (tag("div", picture(piece, aria_label=name), class_="scroll") for piece in figures)
        sections.append(tag("section", *boxes, class_="figures"))
    body = joined([top, tag("main", *sections)])
    return whole(name, STATIC, page_part("10-page.css") + _BY_WIDTH, body)


def report_figure(view: View, name: str, command: Sequence[str], figures: Sequence[Piece]) -> str:
    """An SVG picture of what the terminal prints, in its colours, with `figures` below and the
    command in its metadata.
    """
    return document(name, [printed(view(PAPER), PAPER.width), *figures], {"command": [*command]})
