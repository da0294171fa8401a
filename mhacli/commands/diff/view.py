"""The terminal views of a comparison. Of two records: tokens, sites, heads, and the verdict last.
Of two models: a grid of blocks × places that shows where it grows, the places, and last in a
sentence where they first differ.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.errors import UsageError
from mhacli.numbers import Unit
from mhacli.record.glossary import words_of
from mhacli.record.heads import STATISTICS, words_of_type
from mhacli.record.record import Record
from mhacli.record.shown import draws
from mhacli.render.base.doc import Column, Grid, Table, column, fields
from mhacli.render.base.format import count_of, escaped, fitted, token_text
from mhacli.render.base.grids import grids
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import chosen_layers
from mhacli.render.base.terminal import table
from mhacli.text.escape import token_label, visible

from .result import (
    CellPlace,
    Difference,
    HeadChange,
    LayerDifference,
    ModelDiff,
    ModelDocument,
    RecordDiff,
    RecordDocument,
    SiteDifference,
    TextDifference,
    Unmatched,
)
from .sites import change_of, labels_of
from .words import CAUSES, PartAndSite, where

_COLOURS = {"agree": "bold green", "differ": "bold red", "nothing": "bold yellow"}
_OPTIONS = ViewOptions()
_HEAD_UNITS: Mapping[str, Unit] = {
    "head": "word",
    "type": "word",
    "statistic": "word",
    "A": "number",
    "B": "number",
}
_OF_CHANGE = {row.field for row in STATISTICS if row.is_change}


def require_layers(d: RecordDiff, options: ViewOptions) -> None:
    """Raises `UsageError` for a layer that one of the records lacks."""
    for record in d.records:
        if record.model is None and options.layers is not None:
            raise UsageError(
                "--layer works only with records of a checkpoint", hint="leave --layer out"
            )
        chosen_layers(record, options)


# -------------------------------------------------------------------------------------- two records


@draws(RecordDiff)
def record_view(d: RecordDiff, screen: Screen, options: ViewOptions = _OPTIONS) -> RenderableType:
    """The complete output for two records. `require_layers` must accept the options."""
    document, layers = d.document, shown_layers(d, options)
    names = [escaped(f"A = {document.a} · B = {document.b}", "bold")]
    n_a, n_b = document.n_sequences
    if n_a != n_b:
        words = f"A has {count_of(n_a, 'sequence')} and B has {n_b}"
        names.append(Text(f"{words}: the first {min(n_a, n_b)} are compared"))
    texts = [text for text in document.texts if not text.is_same or text.n_other_ids]
    sections: list[Iterable[RenderableType]] = [
        names,
        *(_text(text, options, screen) for text in texts),
        _sites(d, layers, options, screen),
        _heads([head for layer in layers for head in layer.heads], options, screen),
    ]
    lines = list[RenderableType]()
    for section in map(list, sections):
        if section:
            lines += [*section, Text()]
    limit = f"{document.tolerance.relative:.3g} × the site's largest"
    rule = Text(f"numbers agree if |B − A| ≤ {limit} (--tolerance)", style="dim")
    return Group(*lines, rule, escaped(d.summary, _COLOURS[d.verdict]))


def shown_layers(d: RecordDiff, options: ViewOptions) -> list[LayerDifference]:
    """The requested layers, or all."""
    record = d.records[0]
    labels = labels_of(record)
    chosen = [
        labels[record.layers.index(each.inspected)] for each in chosen_layers(record, options)
    ]
    every = d.document.layers
    return [layer for layer in every if layer.layer in chosen] or every


def by_size(heads: Iterable[HeadChange]) -> list[HeadChange]:
    """Heads with the largest change first, missing and new ones before all."""
    return sorted(heads, key=lambda head: -math.inf if head.size is None else -head.size)


def _text(text: TextDifference, options: ViewOptions, screen: Screen) -> Iterator[RenderableType]:
    """The number of equal tokens of a text, and the tokens between them."""
    words = f"{text.n_aligned} tokens are the same, of {text.n_a} in A and {text.n_b} in B"
    if text.n_other_ids:
        words += f"; {text.n_other_ids} of them have another id in the vocabulary"
    rows = []
    for change in text.changes:
        before, after = (" ".join(map(token_label, side)) or "–" for side in (change.a, change.b))
        rows.append({"position": change.a_begin, "A": before, "B": after})
    yield Text(f"{text.family.replace('texts', 'sequence')} {text.sequence}: {words}")
    yield from _listed({"position": "id", "A": "word", "B": "word"}, rows, 12, options, screen)


def _listed(
    units: Mapping[str, Unit],
    rows: Sequence[Mapping[str, Any]],
    most: int,
    options: ViewOptions,
    screen: Screen,
    title: str = "",
) -> Iterator[RenderableType]:
    """Rows under fields of these units: the first of them, or all on request. Nothing without
    rows.
    """
    if rows:
        limit = None if options.everything else most
        listed = Table(fields(units), rows, title=title, most=limit)
        yield from table(listed, screen.width)


# -------------------------------------------------------------------------------------------- sites


class _SiteRow(NamedTuple):
    """A site of a layer, and the record of the layer in A."""

    layer: str
    record: Record
    site: SiteDifference


def _sites(
    d: RecordDiff, layers: Sequence[LayerDifference], options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The sites of a layer that differ, or the first of each of several layers; with `everything`
    all sites.
    """
    is_brief = len(layers) > 1 and not options.everything
    labels = labels_of(d.records[0])
    rows = list[_SiteRow]()
    for layer in layers:
        sites = [
            site for site in layer.sites if options.everything or site.departs or site.n_different
        ]
        if is_brief:
            sites = sorted(sites, key=lambda site: not site.departs)[:1]
        record = d.records[0].of_layer(labels.index(layer.layer))
        rows += [_SiteRow(layer.layer, record, site) for site in sites]
    title = "sites that differ, in the order of execution"
    if options.everything:
        title = "sites, in the order of execution"
    elif is_brief:
        title = "the first site of each layer that differs"
    n_compared = len([site for each in layers for site in each.sites if site.status != "skipped"])
    notes = list[str]()
    if n_compared > len(rows) and not options.everything:
        words = f"{count_of(n_compared - len(rows), 'more site')} compared"
        notes.append(f"{words} (--all)" if is_brief else f"{words}, without a difference (--all)")
    if rows:
        columns = _SITE_COLUMNS if len(layers) > 1 else _SITE_COLUMNS[1:]
        yield from table(Table(columns, rows, title=title), screen.width, *notes)
    elif not layers:
        yield Text("the records have no layer in common", style="yellow")
    yield from _not_compared(d.document, [] if options.everything else layers)


def _not_compared(d: RecordDocument, layers: Sequence[LayerDifference]) -> Iterator[Text]:
    """The layers of one record alone, and the sites that are not compared, and why; the layers of
    each line, if it is not for all.
    """
    for letter, alone in zip("AB", (d.only_a, d.only_b), strict=True):
        if alone:
            yield escaped(f"not compared, in {letter} alone: {', '.join(alone)}", "dim")
    labels = dict[tuple[str, str], list[str]]()
    for layer in layers:
        skipped = [site for site in layer.sites if site.status == "skipped"]
        for why in dict.fromkeys(site.why for site in skipped):
            names = ", ".join(_site_name(site.site) for site in skipped if site.why == why)
            labels.setdefault((names, why), []).append(layer.layer)
    for (names, why), of_layers in labels.items():
        where = f" in {', '.join(of_layers)}" if len(of_layers) < len(layers) else ""
        yield escaped(f"not compared{where}: {names} ({why})", "dim")


def _site_name(site: str) -> str:
    return "mask" if site == "allowed" else site


def _remarks(row: _SiteRow) -> Iterator[str]:
    """How a site differs if no size tells, where, and why nothing was compared; or how equal it
    is.
    """
    site = row.site
    if site.status in ("identical", "within"):
        yield words_of("columns", "diff")[site.status].heading
    if site.has_same_shape:
        yield "same shape"
    if site.n_only_a or site.n_only_b:
        yield f"{count_of(site.n_only_a, 'cell')} visible only in A, {site.n_only_b} only in B"
    elif site.n_nonfinite:
        yield f"{count_of(site.n_nonfinite, 'number')} finite in only one"
    elif site.largest is None and site.n_different:
        yield f"{site.n_different} of {site.n_cells} differ"
    if site.at is not None:
        yield ", ".join(_place(row.record, site.at))
    if site.why:
        yield ("not compared: " if site.status == "skipped" else "") + visible(site.why)
    for change in site.told:
        yield f"{change.name}: {visible(change.a)} against {visible(change.b)}"


def _place(record: Record, at: CellPlace) -> Iterator[str]:
    """The place of a number in A, whose record is given: `head 3`, `query 5 “mat”`, `key 2 “sat”`,
    with that in B if it differs.
    """
    sequence = at.a[0] if at.axes[0] == "sequence" else 0
    for axis, i, j in zip(at.axes, at.a, at.b, strict=True):
        if axis == "sequence" and len(record.sequences) == 1:
            continue
        name = ""
        if axis in ("query", "key"):
            texts = record.sequences if axis == "query" else record.keys
            name = f" “{fitted(token_text(texts[sequence].tokens, i), 16)}”"
        yield f"{axis} {i}{name}" + (f" ({j} in B)" if i != j else "")


_SITE_COLUMNS: list[Column[_SiteRow]] = [
    Column("layer", lambda row: visible(row.layer)),
    Column(
        "site",
        lambda row: visible(_site_name(row.site.site)),
        style=lambda row: "red" if row.site.departs else "",
    ),
    column("diff", "largest", lambda row: row.site.largest, "number"),
    column("diff", "relative", lambda row: row.site.relative, "number"),
    Column("where", lambda row: "; ".join(_remarks(row)), least=24, wraps=True),
]
"""The columns of the table of sites; the first one only of several layers."""


def _heads(
    heads: Sequence[HeadChange], options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The heads that changed most, missing and new ones first, each with the statistic that changed
    most; with `everything` all that changed.
    """
    names = words_of("columns", "statistic")
    rows = list[dict[str, Any]]()
    for head in by_size(heads):
        kinds = dict.fromkeys(words_of_type(kind).name for kind in (head.kind_a, head.kind_b))
        name = f"{visible(head.layer)} head {head.head}".removeprefix(" head ")
        changes = sorted(
            head.statistics,
            key=lambda row: (row.name not in _OF_CHANGE, -change_of(row.a, row.b)),
        )
        listed = [{"statistic": names[row.name].name, "A": row.a, "B": row.b} for row in changes]
        listed = listed or [{"statistic": None, "A": None, "B": None}]
        for row in listed[: None if options.everything else 1]:
            rows.append({"head": name, "type": " → ".join(kinds), **row})
    title = f"{count_of(len(heads), 'head')} changed, the largest change first"
    yield from _listed(_HEAD_UNITS, rows, 4, options, screen, title)


# --------------------------------------------------------------------------------------- two models


_MOST_UNMATCHED = 6
"""The most places that are listed as not compared."""
_RATIO_OF_INFINITE = 1e12
"""The shade of a difference that is no finite number."""
_MLP = ("mlp", "output")
_HEADINGS = {
    "scores": "score",
    "pattern": "patt.",
    "residual": "sum",
    "output": "out",
    "q_rotated": "q′",
    "k_rotated": "k′",
    "q_norm": "q norm",
    "k_norm": "k norm",
    "inner_norm": "inner norm",
    "output_norm": "norm",
}
"""The columns of the grid whose sites have other names."""


@draws(ModelDiff)
def model_view(d: ModelDiff, screen: Screen, options: ViewOptions = _OPTIONS) -> RenderableType:
    """The complete output for two models."""
    document = d.document
    names = zip((document.a, document.b), document.dtypes or ("", ""), strict=True)
    of_a, of_b = (f"{name} {dtype}".strip() for name, dtype in names)
    parts = [*_model_grid(document, screen), *_model_places(document, screen, options)]
    if parts:
        parts.insert(0, Text())
    return Group(
        escaped(f"A = {of_a} · B = {of_b}", "bold"),
        *(escaped(note, "yellow") for note in document.notes),
        *parts,
        Text(),
        escaped(d.summary, _COLOURS[d.verdict]),
    )


def _model_grid(d: ModelDocument, screen: Screen) -> Iterator[RenderableType]:
    """The blocks in rows, their places in columns, shaded by how far differences are above
    rounding; nothing if none is.
    """
    cells = dict[str, dict[PartAndSite, float]]()
    for place in d.places:
        if place.layer is not None:
            of_layer = cells.setdefault(f"{place.stack or ''} {place.layer}".strip(), {})
            ratio = _RATIO_OF_INFINITE
            if place.relative is not None:
                ratio = place.relative / place.rounding
            of_layer[place.part, place.site] = math.log10(max(1.0, ratio))
    if not cells or d.first is None or d.times_rounding is None:
        return
    columns = [key for key in CAUSES if any(key in of_layer for of_layer in cells.values())]
    values = np.array(
        [[of_layer.get(key, math.nan) for key in columns] for of_layer in cells.values()]
    )
    headings = [_HEADINGS.get(site, site) for _, site in columns]
    if _MLP in columns:
        headings[columns.index(_MLP)] = "mlp"
    grid = Grid(
        title="how far each place is beyond rounding",
        values=np.nan_to_num(values),
        allowed=~np.isnan(values),
        rows=[*cells],
        columns=headings,
        top=max(1.0, float(np.nanmax(values))),
        corner="layer ",
        unit="short",
        has_words=True,
        masked="not compared",
        meaning=(
            "powers of ten of relative difference ÷ rounding; beyond rounding from"
            f" {math.log10(d.times_rounding):.1f} on"
        ),
    )
    yield from grids([grid], screen, form="shades")
    yield Text()


def _model_places(
    d: ModelDocument, screen: Screen, options: ViewOptions
) -> Iterator[RenderableType]:
    """The first place and those outside of blocks that differ, with `everything` all places; and
    what is unmatched.
    """
    rows = d.places
    if not options.everything:
        outside = [place for place in rows if place.layer is None and place.relative != 0]
        rows = [place for place in rows if place in (d.first, *outside)]
    if rows:
        n_more = len(d.places) - len(rows)
        notes = [f"{n_more} more places (--all)"] if n_more else []
        yield from table(Table(_PLACE_COLUMNS, rows), screen.width, *notes)
    if d.unmatched:
        listed = Table(
            _UNMATCHED_COLUMNS,
            d.unmatched,
            most=None if options.everything else _MOST_UNMATCHED,
        )
        yield from table(listed, screen.width)


_PLACE_COLUMNS: list[Column[Difference]] = [
    Column(
        "place",
        where,
        style=lambda row: "red" if row.beyond and not row.healed else "",
        least=34,
        wraps=True,
    ),
    Column("relative", lambda row: row.relative, unit="number", meaning="|B − A| ÷ |A|"),
    Column("rounding", lambda row: row.rounding, unit="number", meaning="change by rounding"),
    column("diff", "largest", lambda row: row.largest, "number", drop=1),
    Column("module in A", lambda row: visible(row.name_a or ""), drop=2),
]
_UNMATCHED_COLUMNS: list[Column[Unmatched]] = [
    Column("not compared", where),
    Column("why", lambda row: visible(row.why), least=24, wraps=True),
]
