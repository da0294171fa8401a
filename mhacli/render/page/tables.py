"""Tables of heads: statistics, top keys of some queries, and blocks of single cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, isnan, log10

from rich.text import Text

from mhacli.io.files import format_size
from mhacli.record.heads import Corner, HeadStatistics, in_order, words_of_type
from mhacli.record.record import Record
from mhacli.render.base.colours import NAN_SIGN, level_of
from mhacli.render.base.format import count_of, percent_text, weight_text
from mhacli.render.base.options import ViewOptions
from mhacli.render.base.selection import chosen_heads, chosen_layers
from mhacli.render.heads.drawable import DrawableHead
from mhacli.render.heads.table import OverviewColumn, head_key, legend_parts, overview_cells
from mhacli.render.heads.view import (
    CornerCells,
    corner_cells,
    key_name,
    query_name,
    requested_queries,
    requested_title,
    rest_name,
    strongest_of,
)
from mhacli.render.page.elements import N_SHADES, WIDE, Html, joined, tag, text
from mhacli.render.page.payload import LIMIT_BYTES

# ---------------------------------------------------------------------------------------------------------- statistics


DECIMALS = 3
"""The least decimals of an attention weight, more than on a terminal."""
NONE = "–"
"""The sign for a missing number."""


def statistics(record: Record, options: ViewOptions, heads: Sequence[DrawableHead]) -> Html:
    """A section with a row per head, and uniform attention below; empty without heads."""
    listed = in_order(_listed(record, options), options.sort)
    if not listed:
        return Html("")
    exact = replace(options, precision=max(options.precision, DECIMALS))
    cells = overview_cells(record, listed, exact, WIDE)
    places = {head_key(head.statistics): place for place, head in enumerate(heads) if head.statistics is not None}
    body = [
        _statistics_row(cells.columns, row, places.get(head_key(head)), head)
        for row, head in zip(cells.heads, listed, strict=True)
    ]
    foot = [_statistics_row(cells.columns, row) for row in cells.baselines]
    head = tag("thead", tag("tr", *map(_heading, cells.columns)))
    over = (
        "documents; in each, over all queries that see a key"
        if record.corpus is not None
        else "all queries that see a key, of all sequences"
    )
    caption = tag("caption", text(f"means over {over}"))
    whole = tag("table", caption, head, tag("tbody", *body), *([tag("tfoot", *foot)] if foot else []))
    title = tag("h2", text("statistics"))
    legend = tag("p", text(" · ".join(legend_parts(cells.columns, listed))), class_="dim")
    return tag("section", title, tag("div", whole, class_="scroll"), legend, id="statistics")


def _listed(record: Record, options: ViewOptions) -> tuple[HeadStatistics, ...]:
    if record.model is not None:
        return chosen_heads(chosen_layers(record, options), options)
    return tuple(head for head in record.heads if options.heads is None or head.head in options.heads)


def _heading(column: OverviewColumn) -> Html:
    """The heading of a column, with its explanation as tooltip."""
    return tag("th", text(column.heading), scope="col", **({"title": column.explanation} if column.explanation else {}))


def _statistics_row(
    columns: Sequence[OverviewColumn],
    cells: Sequence[Text],
    place: int | None = None,
    head: HeadStatistics | None = None,
) -> Html:
    """A row with the index of its head among the drawn ones, and the meaning of its type."""
    meaning = {} if head is None else {"title": words_of_type(head.kind).explanation}
    html = [
        _cell(column, cell.plain, meaning if column.field == "kind" else {})
        for column, cell in zip(columns, cells, strict=True)
    ]
    return tag("tr", *html, **({} if place is None else {"data_head": str(place)}))


def _cell(column: OverviewColumn, words: str, attributes: Mapping[str, str]) -> Html:
    """A cell, with its number as sort key."""
    if column.cells == "name":
        return tag("th", text(words), scope="row")
    if column.cells == "word":
        return tag("td", text(words), class_="word", **attributes)
    number = "" if words == NONE else words.replace(",", "").removesuffix("%")
    return tag("td", text(words), **({} if number == words else {"data_value": number}))


# -------------------------------------------------------------------------------------------------------- single cells


_FRAME = 1 << 10
"""Bytes of a section without its tables."""
_MOST_OPEN = 8
"""The most tables that are open at first."""
_MOST_DECIMALS = 7
"""The most decimals that a 32-bit attention weight has."""


def kept_cells(
    heads: Sequence[DrawableHead], sequences: Sequence[int], options: ViewOptions, *, room: int | None
) -> Html:
    """Sections with the record's single cells, of as many heads as fit into `room` bytes (None: all); empty without
    cells.

    Sections name what was left out. If the record has both kinds of cells, the top keys get half of the room.
    """
    ordered = _ordered(heads, options.sort)
    has_corner = any("corner" in head.record.arrays for head in ordered)
    queries = _queries_section(ordered, sequences, room if room is None or not has_corner else room // 2)
    left = None if room is None else room - len(queries.encode())
    corners = _corner_section(ordered, sequences, options, left)
    return joined(section for section in (queries, corners) if section)


def _ordered(heads: Sequence[DrawableHead], sort: str) -> list[DrawableHead]:
    """The heads in the order of the statistics."""
    place_of = {head_key(head.statistics): head for head in heads if head.statistics is not None}
    listed = in_order([head.statistics for head in heads if head.statistics is not None], sort)
    return [place_of[head_key(statistics)] for statistics in listed]


def _cut(shown: str) -> Html:
    """A note that heads were left out, why, and how to see them."""
    why = f"such tables take at most half of what the rest of a page of {format_size(LIMIT_BYTES)} leaves"
    return tag(
        "p",
        text(f"there is room for {shown}: {why}. --full stores all; --sort sets their order, --head chooses some"),
        class_="warning",
    )


def _shelf(tables: Sequence[Html]) -> Iterator[Html]:
    """The tables side by side, all but the first few collapsed."""
    yield tag("div", joined(tables[:_MOST_OPEN]), class_="kept")
    rest = tables[_MOST_OPEN:]
    if rest:
        summary = tag("summary", text(count_of(len(rest), "more table")))
        yield tag("details", summary, tag("div", joined(rest), class_="kept"))


def _named(words: str) -> Html:
    """A token and its position, in this order in any script."""
    token, _, place = words.rpartition(" ")
    return joined([tag("bdi", text(token)), text(place)], " ")


# ------------------------------------------------------------------------------------------------------------ top keys


@dataclass(frozen=True)
class _QueryTable:
    """The table of a query's top keys. `place` orders tables by sequence and request.

    Its heads read the same text and see the same number of keys, unless it `varies`.
    """

    place: tuple[int, int]
    title: str
    n_keys: int
    rest: str
    varies: bool

    def html(self, rows: Sequence[Html]) -> Html:
        """The table with these rows."""
        names = [
            tag("th", text("head"), scope="col"),
            tag("th", text("strongest keys, in order"), scope="colgroup", colspan=str(self.n_keys)),
            tag("th", text(self.rest), scope="col"),
            *([tag("th", text("each if uniform"), scope="col")] if self.varies else []),
        ]
        groups = [tag("colgroup", span=str(n)) for n in (1, self.n_keys, 1 + self.varies)]
        head = tag("thead", tag("tr", *names))
        whole = tag("table", tag("caption", text(self.title)), *groups, head, tag("tbody", joined(rows)))
        return tag("div", whole, class_="scroll")


@dataclass(frozen=True)
class _QueryRow:
    """The top keys of a head's query, and the table of the row."""

    table: _QueryTable
    html: Html


@dataclass(frozen=True)
class _Question:
    """A requested query: its column, and its table without the remaining weights."""

    query: int
    table: _QueryTable


def _queries_section(heads: Sequence[DrawableHead], sequences: Sequence[int], room: int | None) -> Html:
    having = [head for head in heads if "top_keys" in head.record.arrays]
    if not having:
        return Html("")
    questions = _questions(having, sequences)
    rows, n_heads = _fitting(having, questions, room)
    tables: dict[_QueryTable, list[Html]] = {}
    for row in rows:
        tables.setdefault(row.table, []).append(row.html)
    cut = []
    if n_heads == 0 and rows:
        cut = [_cut(f"{len(rows)} of {len(questions[id(having[0].record)])} queries of {having[0].label} alone")]
    elif n_heads < len(having):
        cut = [_cut(f"the first {n_heads} of {count_of(len(having), 'head')}")]
    what = "the strongest keys of the chosen queries, with exact weights, rounded for print and not taken from the maps"
    parts = (table.html(table_rows) for table, table_rows in sorted(tables.items(), key=lambda item: item[0].place))
    body = _shelf([*parts])
    return tag(
        "section", tag("h2", text("chosen queries")), tag("p", text(what), class_="dim"), *cut, *body, id="asked"
    )


def _questions(heads: Sequence[DrawableHead], sequences: Sequence[int]) -> Mapping[int, list[_Question]]:
    """The requested queries in each layer's text, sequence by sequence, keyed by the id of the layer's record."""
    several = len({head.layer.kind for head in heads if head.layer is not None}) > 1
    questions: dict[int, list[_Question]] = {}
    for head in heads:
        if id(head.record) in questions:
            continue
        view, kind = head.record, f"{head.layer.kind} layers" if several and head.layer is not None else ""
        questions[id(view)] = of_record = []
        for b in sequences:
            for number, query in requested_queries(view, b):
                title = requested_title(view, b, query, layer=kind)
                varies = len({*view.arrays["visible"][b, :, query].tolist()}) > 1
                of_record.append(
                    _Question(query, _QueryTable((b, number), title, view.arrays["top_keys"].shape[-1], "", varies))
                )
    return questions


def _fitting(
    heads: Sequence[DrawableHead], questions: Mapping[int, list[_Question]], room: int | None
) -> tuple[list[_QueryRow], int]:
    """The rows of the first heads that fit, and the number of heads. If not even one fits, a part of its rows and 0."""
    taken: list[_QueryRow] = []
    seen: set[_QueryTable] = set()
    n_bytes = _FRAME
    for n_whole, head in enumerate(heads):
        of_head: list[_QueryRow] = []
        for question in questions[id(head.record)]:
            row = _row(head, question)
            n_bytes += len(row.html.encode()) + 1 + (0 if row.table in seen else len(row.table.html(()).encode()))
            if room is not None and n_bytes > room:
                return taken or of_head, n_whole
            of_head.append(row)
            seen.add(row.table)
        taken += of_head
    return taken, len(heads)


def _row(head: DrawableHead, question: _Question) -> _QueryRow:
    view, (b, number) = head.record, question.table.place
    table = replace(question.table, rest=rest_name(view.heads[head.place]))
    strongest = strongest_of(view, head.place, b, number)
    cells = [tag("td", _named(name), text(" "), tag("b", text(weight))) for name, weight in strongest.keys]
    if cells:
        cells += [tag("td")] * (table.n_keys - len(cells))
        cells.append(tag("td", text(strongest.rest or NONE)))
    else:
        cells = [tag("td", text(strongest.instead), colspan=str(table.n_keys + 1), class_="dim")]
    if table.varies:
        visible = view.arrays["visible"][b, :, question.query]
        n_visible = int(visible[min(head.place, len(visible) - 1)])
        cells.append(tag("td", text(percent_text(1 / n_visible) if n_visible else NONE)))
    return _QueryRow(table, tag("tr", tag("th", text(head.label), scope="row"), *cells))


# --------------------------------------------------------------------------------------------------------------- cells


def _corner_section(
    heads: Sequence[DrawableHead], sequences: Sequence[int], options: ViewOptions, room: int | None
) -> Html:
    places = [
        (head, head.record.survey.kept.corner, b)
        for head in heads
        for b in sequences
        if head.record.survey is not None and head.record.survey.kept.corner is not None
    ]
    within = [(head, corner, b) for head, corner, b in places if all(_inside(head, corner, b))]
    if not within:
        return Html("")
    tables: list[Html] = []
    n_bytes = _FRAME
    for head, corner, b in within:
        table = _corner_table(head, corner, b, options)
        n_bytes += len(table.encode()) + 1
        if room is not None and n_bytes > room:
            break
        tables.append(table)
    n, n_all = len(tables), len(within)
    cut = [_cut(f"the first {n} of {count_of(n_all, 'table')}")] if n < n_all else []
    title = tag("h2", text("single cells"))
    return tag("section", title, _corner_legend(), *cut, *_shelf(tables), id="cells")


def _corner_legend() -> Html:
    """The meaning of the shades. Each table has its own range."""
    ramp = tag("span", class_="ramp", role="img", aria_label="dark to bright")
    pairs = (
        [text("0"), ramp, text(f"the largest weight of the table, {N_SHADES} shades")],
        [tag("span", class_="swatch closed"), text("0 masked")],
    )
    what = text("the attention weight that a query (row) gives to a key (column): rounded, but not taken from the maps")
    return tag("p", tag("span", what), *(tag("span", *pair, class_="pair") for pair in pairs), class_="dim legend")


def _inside(head: DrawableHead, corner: Corner, b: int) -> tuple[Sequence[int], Sequence[int]]:
    """The rows and columns of the block without padding."""
    view = head.record
    first_query, first_key = corner.first_query - view.first_query(b), corner.first_key - view.first_key(b)
    n_queries, n_keys = len(view.sequences[b].tokens), len(view.keys[b].tokens)
    rows = [row for row in range(corner.n_queries) if 0 <= first_query + row < n_queries]
    return rows, [key for key in range(corner.n_keys) if 0 <= first_key + key < n_keys]


def _corner_table(head: DrawableHead, corner: Corner, b: int, options: ViewOptions) -> Html:
    view = head.record
    kept = corner_cells(view, corner, head.place, b, layer="" if head.layer is None else head.layer.label)
    precision = max(options.precision, _decimals(kept.largest))
    rows, keys = _inside(head, corner, b)
    first = corner.first_query - view.first_query(b), corner.first_key - view.first_key(b)
    names = (tag("th", _named(key_name(view, b, first[1] + key)), scope="col") for key in keys)
    body = (
        tag(
            "tr",
            tag("th", _named(query_name(view, b, first[0] + row)), scope="row"),
            *(_corner_cell(kept, (row, key), precision) for key in keys),
        )
        for row in rows
    )
    caption = joined([text(kept.title), text(kept.caption(precision))], "<br>")
    head_row = tag("thead", tag("tr", tag("th", text("query"), scope="col"), *names))
    return tag("div", tag("table", tag("caption", caption), head_row, tag("tbody", joined(body))), class_="scroll")


def _decimals(largest: float) -> int:
    """As many decimals as give the largest weight three digits."""
    return min(_MOST_DECIMALS, DECIMALS - 1 + max(1, -floor(log10(largest))))


def _corner_cell(cells: CornerCells, at: tuple[int, int], precision: int) -> Html:
    """A cell: shaded, masked, or NaN."""
    weight = float(cells.weights[at])
    if isnan(weight):
        return (
            tag("td", text(NAN_SIGN), class_="missing")
            if cells.is_broken[at[0]]
            else tag("td", text("0"), class_="closed")
        )
    shade = level_of(weight, cells.largest) * N_SHADES // 256
    return tag("td", text(weight_text(weight, precision)), **({"class_": f"l{shade}"} if shade else {}))
