"""The terminal views of a comparison. Of two records: settings, tokens, sites, effects, heads,
maps, and the verdict last. Of two models: a grid of blocks × places that shows where it grows, the
places, and last in a sentence where they first differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.commands.diff.compare import (
    Difference,
    LayerDifference,
    change_of,
    changed_effects,
    heads_of,
)
from mhacli.commands.diff.result import CAUSES, Diff, Row, where
from mhacli.errors import UsageError, first_names
from mhacli.record.glossary import words_of
from mhacli.record.heads import STATISTICS, words_of_type
from mhacli.render.base.doc import Column, Grid, Table, column, fields
from mhacli.render.base.format import count_of, fitted, token_text
from mhacli.render.base.grids import grids
from mhacli.render.base.options import Screen, ViewOptions, chosen
from mhacli.render.base.selection import DrawableHead, chosen_layers, drawable_heads, scale_of
from mhacli.render.base.terminal import table
from mhacli.render.checkpoint.effect import number_column, removal_name, removal_words
from mhacli.render.heads.head_map import grid_of, head_map, largest_of_maps
from mhacli.text.escape import token_label, visible
from mhacli.text.numbers import Unit, shown

_COLOURS = {"agree": "bold green", "differ": "bold red", "nothing": "bold yellow"}
_OF_CHANGE = {row.field for row in STATISTICS if row.is_change}
_LABEL = 12
"""The most columns of the name of a row of a map."""
_LEAST = 8
"""The fewest columns of a map beside others."""


def require_drawable(d: Diff, options: ViewOptions) -> None:
    """Raises `UsageError` for a head, layer or sequence that one of the records lacks."""
    for record in d.records or ():
        chosen(options.sequences, len(record.sequences), 1, False, "sequence")
        if record.model is None and options.layers is not None:
            raise UsageError(
                "--layer works only with records of a checkpoint", hint="leave --layer out"
            )
        drawable_heads(record, options)


def diff_view(d: Diff, screen: Screen, options: ViewOptions | None = None) -> RenderableType:
    """The complete output of `mha diff`. `require_drawable` must accept the options."""
    options = options or ViewOptions()
    if d.records is None:
        return _model_view(d, screen, options)
    inspected = [each.inspected for each in chosen_layers(d.records[0], options)]
    layers = [layer for layer in d.layers if layer.inspected_a in inspected] or d.layers
    sections = (
        _settings(d, options),
        *(
            _text(text, options, screen)
            for text in d["texts"]
            if not text["is_same"] or text["n_other_ids"]
        ),
        _sites(d, layers, options, screen),
        _effects(d, options, screen),
        _heads(layers, options, screen),
        *_maps(layers, options, screen),
    )
    lines = [line for section in map(list, sections) if section for line in (*section, Text())]
    rule = (
        f"numbers agree if |B − A| ≤ {d['tolerance']['relative']:.3g} × the site's largest"
        " (--tolerance)"
    )
    return Group(
        *lines, Text(rule, style="dim"), Text(visible(d.summary), style=_COLOURS[d.verdict])
    )


def _settings(d: Diff, options: ViewOptions) -> Iterator[Text]:
    """The names, and the settings that differ; the commands only if nothing else differs, since
    they repeat the rest.
    """
    yield Text(f"A = {visible(d['a'])} · B = {visible(d['b'])}", style="bold")
    n_a, n_b = d["n_sequences"]
    if n_a != n_b:
        yield Text(
            f"A has {count_of(n_a, 'sequence')} and B has {n_b}: the first {min(n_a, n_b)} are"
            " compared"
        )
    others = [row for row in d["settings"] if row["name"] != "command"]
    is_alone = not others and all(text["is_same"] for text in d["texts"])
    for row in d["settings"] if is_alone or options.everything else others:
        of_layers = f" ({first_names(row['layers'], 1)})" if row["layers"] else ""
        yield Text(visible(f"{row['name']}{of_layers}: {row['a']} → {row['b']}"))


def _text(text: dict[str, Any], options: ViewOptions, screen: Screen) -> Iterator[RenderableType]:
    """The number of equal tokens of a text, and the tokens between them."""
    words = f"{text['n_aligned']} tokens are the same, of {text['n_a']} in A and {text['n_b']} in B"
    if text["n_other_ids"]:
        words += f"; {text['n_other_ids']} of them have another id in the vocabulary"
    rows = []
    for change in text["changes"]:
        before, after = (" ".join(map(token_label, change[side])) or "–" for side in "ab")
        rows.append({"position": change["a_begin"], "A": before, "B": after})
    yield Text(f"{text['family'].replace('texts', 'sequence')} {text['sequence']}: {words}")
    yield from _listed({"position": "id", "A": "word", "B": "word"}, rows, 12, options, screen)


def _listed(
    units: Mapping[str, Unit],
    rows: Sequence[Row],
    most: int,
    options: ViewOptions,
    screen: Screen,
    title: str = "",
) -> Iterator[RenderableType]:
    """Rows under fields of these units: the first of them, or all on request. Nothing without
    rows.
    """
    listed = Table(
        columns=fields(units), rows=rows, title=title, most=None if options.everything else most
    )
    yield from table(listed, screen.width) if rows else ()


def _alone(words: str, *sides: Iterable[str]) -> Iterator[Text]:
    """The layers, sites or removals that one record alone has."""
    for letter, names in zip("AB", sides, strict=True):
        if text := ", ".join(dict.fromkeys(map(visible, names))):
            yield Text(f"{words} {letter}: {text}", style="dim")


# -------------------------------------------------------------------------------------------- sites


def _sites(
    d: Diff, layers: Sequence[LayerDifference], options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The sites of a layer that differ, or the first of each of several layers; with `everything`
    all sites.
    """
    is_brief, rows = len(layers) > 1 and not options.everything, []
    for layer in layers:
        sites = [
            site
            for site in layer.sites
            if options.everything or site.status not in ("identical", "skipped")
        ]
        sites.sort(key=lambda site: is_brief and not site.departs)
        rows += [(layer, site) for site in (sites[:1] if is_brief else sites)]
    columns: list[Column[tuple[LayerDifference, Difference]]] = [
        Column(
            heading="site",
            value=lambda row: _site_name(row[1].site),
            style=lambda row: "red" * row[1].departs,
        ),
        column("diff", "largest", lambda row: row[1].largest, "number"),
        column("diff", "relative", lambda row: row[1].relative, "number"),
        Column(
            heading="where",
            value=lambda row: "; ".join(_remarks(row[1], row[0])),
            least=24,
            wraps=True,
        ),
    ]
    if len(layers) > 1:
        columns.insert(0, Column(heading="layer", value=lambda row: visible(row[0].label)))
    title = f"sites{' that differ' * (not options.everything)}, in the order of execution"
    title = "the first site of each layer that differs" if is_brief else title
    n_more = sum(len(layer.sites) for layer in layers) - len(rows)
    notes = (
        [f"{count_of(n_more, 'more site')}{' without a difference' * (not is_brief)} (--all)"]
        if n_more
        else []
    )
    if rows:
        yield from table(Table(columns=columns, rows=rows, title=title), screen.width, *notes)
    elif not layers:
        yield Text("the records have no layer in common", style="yellow")
    yield from _alone("only in", d["only_a"], d["only_b"])
    for layer in () if is_brief else layers:
        yield from _alone(
            f"{layer.label} only in".lstrip(),
            *(map(_site_name, names) for names in layer.only.values()),
        )


def _site_name(site: str) -> str:
    return "mask" if site == "allowed" else visible(site)


def _remarks(site: Difference, layer: LayerDifference) -> Iterator[str]:
    """How a site differs if no size tells, where, and why nothing was compared; or how equal it
    is.
    """
    if site.status in ("identical", "within"):
        yield (
            words_of("columns", "diff")[site.status].heading
            if site.seen != "shape"
            else "same shape"
        )
    if site.n_only_a or site.n_only_b:
        yield f"{count_of(site.n_only_a, 'cell')} visible only in A, {site.n_only_b} only in B"
    elif site.n_nonfinite:
        yield f"{count_of(site.n_nonfinite, 'number')} finite in only one"
    elif site.largest is None and site.n_different:
        yield f"{site.n_different} of {site.n_cells} differ"
    if site.at is not None:
        yield ", ".join(_place(layer, *site.at.values()))
    if site.why:
        yield site.why
    yield from (
        f"{told['name']}: {visible(told['a'])} against {visible(told['b'])}" for told in site.told
    )


def _place(
    layer: LayerDifference, axes: Sequence[str], of_a: Sequence[int], of_b: Sequence[int]
) -> Iterator[str]:
    """The place of a number in A: `head 3`, `query 5 “mat”`, `key 2 “sat”`, with that in B if it
    differs.
    """
    sequence = of_a[0] if axes[0] == "sequence" else 0
    for axis, i, j in zip(axes, of_a, of_b, strict=True):
        if axis == "sequence" and len(layer.a.sequences) == 1:
            continue
        name = ""
        if axis in ("query", "key"):
            text = (layer.a.sequences if axis == "query" else layer.a.keys)[sequence]
            name = f" “{fitted(token_text(text.tokens, i), 16)}”"
        yield f"{axis} {i}{name}" + (f" ({j} in B)" if i != j else "")


# -------------------------------------------------------------------------------- effects and heads


def _effects(d: Diff, options: ViewOptions, screen: Screen) -> Iterator[RenderableType]:
    """The effects that changed; empty unless both records have effects."""
    effects = d["effects"]
    if d.records is None or effects is None:
        return
    number, rows = number_column(effects["metric"]), []
    for change in effects["changes"]:
        before, after = number.value(change["a"]), number.value(change["b"])
        name = removal_words(change["a"], d.records[0])
        rows.append({"removed": name, "A": before, "B": after, "B − A": change["change"]})
    units: dict[str, Unit] = {
        "removed": "word",
        "A": number.unit,
        "B": number.unit,
        "B − A": "change",
    }
    title = f"{changed_effects(effects)}, the largest difference of {number.heading} first"
    yield from _listed(units, rows, 7, options, screen, title)
    sides = zip((effects["only_a"], effects["only_b"]), d.records, strict=True)
    yield from _alone(
        "removed only in", *([removal_name(each, of) for each in removed] for removed, of in sides)
    )


def _heads(
    layers: Sequence[LayerDifference], options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The heads that changed most, missing and new ones first, each with the statistic that changed
    most; with `everything` all that changed.
    """
    heads = [head for layer in layers for head in layer.heads]
    heads.sort(key=lambda head: -math.inf if head["size"] is None else -head["size"])
    rows, names = [], words_of("columns", "statistic")
    for head in heads:
        kinds = dict.fromkeys(words_of_type(head[kind]).name for kind in ("kind_a", "kind_b"))
        name = f"{visible(head['layer'])} head {head['head']}".removeprefix(" head ")
        about = {"head": name, "type": " → ".join(kinds)}
        changes = sorted(head["statistics"], key=lambda row: -change_of(row["a"], row["b"]))
        changes.sort(key=lambda row: row["name"] not in _OF_CHANGE)
        for row in changes[: None if options.everything else 1]:
            rows.append(
                {**about, "statistic": names[row["name"]].name, "A": row["a"], "B": row["b"]}
            )
        if not changes:
            rows.append({**about, "statistic": None, "A": None, "B": None})
    units: dict[str, Unit] = {
        "head": "word",
        "type": "word",
        "statistic": "word",
        "A": "number",
        "B": "number",
    }
    title = f"{count_of(len(heads), 'head')} changed, the largest change first"
    yield from _listed(units, rows, 4, options, screen, title)


# --------------------------------------------------------------------------------------------- maps


def _maps(
    layers: Sequence[LayerDifference], options: ViewOptions, screen: Screen
) -> Iterator[Iterator[RenderableType]]:
    """A, B and B − A of the chosen heads, or of the head that changed most."""
    if options.view == "none":
        return
    is_chosen, found = options.heads is not None or options.layers is not None, []
    for layer in layers:
        heads = next((site.heads for site in layer.sites if site.site in ("pattern", "map")), [])
        found += [(layer, head) for head in heads if options.shows_head(head["head"])]
    if not is_chosen:
        found = [(layer, head) for layer, head in found if head["largest"] != 0]
        found.sort(
            key=lambda pair: -math.inf if pair[1]["largest"] is None else -pair[1]["largest"]
        )
    drawn = found if is_chosen or options.everything else found[:1]
    n_more = len(found) - len(drawn)
    more = f" · {n_more} more changed (--all, --head N)" if n_more else ""
    for layer, head in drawn:
        for sequence in options.sequences or (head["sequence"],):
            yield _map(layer, head["head"], sequence, options, screen, more)
    if is_chosen and not drawn:
        yield iter(
            [
                Text(
                    "no head is drawn: the records have no pattern or map that can be compared",
                    style="yellow",
                )
            ]
        )


def _map(
    layer: LayerDifference,
    head: int,
    sequence: int,
    options: ViewOptions,
    screen: Screen,
    more: str,
) -> Iterator[RenderableType]:
    """A head in A, in B, and B − A, of the tokens that correspond."""
    heads = [DrawableHead(record, heads_of(record).index(head)) for record in (layer.a, layer.b)]
    a, b = (head_map(each, sequence) for each in heads)
    title = f"{visible(layer.label)} head {head}".lstrip()
    title += f" · sequence {sequence}" if len(layer.a.sequences) > 1 else ""
    is_other = (a.block, a.first) != (b.block, b.first) or not layer.has_same_tokens
    if a.block == b.block == 1:
        rows, columns, is_other = (
            layer.places["query"][sequence],
            layer.places["key"][sequence],
            False,
        )
        a, b = (
            each.part(rows[side]).part(slice(None), columns[side])
            for side, each in enumerate((a, b))
        )
    if is_other or not a.weights.size:
        yield Text(
            f"{title}: not drawn side by side: the records hold maps of other tokens", style="dim"
        )
        return
    largest = _change(*(grid_of(each, "", scale="linear") for each in (a, b))).top
    most, side_by_side = (
        len(a.weights) if options.everything else 40,
        screen.width // 3 - _LABEL - 2,
    )
    n_columns = (
        side_by_side if side_by_side >= min(len(a.keys), _LEAST) else screen.width - _LABEL - 2
    )
    a, b = (each.fitting(most, n_columns) for each in (a, b))
    scale, top, digits = scale_of(options, heads), largest_of_maps((a, b)), options.precision
    meaning = f"each cell {a.block} × {a.block} tokens" if a.block > 1 else ""
    panels = [
        grid_of(each, name, scale=scale, top=top, digits=digits)
        for each, name in ((a, "A"), (b, "B"))
    ]
    names = [fitted(name, _LABEL) for name in panels[0].rows]
    of_a, of_b = (
        replace(panel, rows=names, has_all_rows=True, meaning=meaning) for panel in panels
    )
    panels = [of_a, of_b, _change(of_a, of_b)]
    yield Text(f"{title} · largest change {shown(largest, 'number')}{more}", style="bold")
    yield from grids(
        panels, screen, everything=options.everything, in_one_row=not options.everything
    )


def _change(of_a: Grid, of_b: Grid) -> Grid:
    """B − A, up to the largest change; a hidden cell counts as zero."""
    change = of_b.values - of_a.values
    top = float(np.abs(change).max(initial=0.0, where=np.isfinite(change)))
    return replace(
        of_a,
        values=change,
        allowed=of_a.allowed | of_b.allowed,
        title="B − A",
        scale="change",
        top=top,
    )


# --------------------------------------------------------------------------------------- two models


_MOST_UNMATCHED, _OF_INFINITE = 6, 1e12
_SHORT = {
    "scores": "score",
    "residual": "sum",
    "q_rotated": "q′",
    "k_rotated": "k′",
    "output_norm": "norm",
}


def _model_view(d: Diff, screen: Screen, options: ViewOptions) -> RenderableType:
    """The complete output for two models."""
    sides = [" ".join([d[side], *d["dtypes"][n : n + 1]]) for n, side in enumerate("ab")]
    parts = [*_model_grid(d, screen), *_model_places(d, screen, options)]
    return Group(
        Text(visible(f"A = {sides[0]} · B = {sides[1]}"), style="bold"),
        *(Text(visible(note), style="yellow") for note in d["notes"]),
        *((Text(), *parts) if parts else ()),
        Text(),
        Text(visible(d["summary"]), style="bold green" if d["verdict"] == "agree" else "bold red"),
    )


def _model_grid(d: Diff, screen: Screen) -> Iterator[RenderableType]:
    """The blocks in rows, their places in columns, shaded by how far differences are above
    rounding; nothing if none is.
    """
    cells: dict[str, dict[tuple[str, str], float]] = {}
    for place in d["places"]:
        if place["layer"] is not None:
            of_layer = cells.setdefault(f"{place['stack'] or ''} {place['layer']}".strip(), {})
            ratio = (
                _OF_INFINITE if place["relative"] is None else place["relative"] / place["rounding"]
            )
            of_layer[place["part"], place["site"]] = math.log10(max(1.0, ratio))
    if not cells or d["first"] is None:
        return
    columns = [key for key in CAUSES if any(key in of_layer for of_layer in cells.values())]
    values = np.array(
        [[of_layer.get(key, math.nan) for key in columns] for of_layer in cells.values()]
    )
    names = [
        "mlp" if key == ("mlp", "output") else _SHORT.get(key[1], key[1].replace("_", " "))
        for key in columns
    ]
    grid = Grid(
        title="how far each place is beyond rounding",
        values=np.nan_to_num(values),
        allowed=~np.isnan(values),
        rows=[*cells],
        columns=[name.replace("output", "out").replace("pattern", "patt.") for name in names],
        top=max(1.0, float(np.nanmax(values))),
        corner="layer ",
        unit="short",
        meaning=(
            "powers of ten of relative difference ÷ rounding; beyond rounding from"
            f" {math.log10(d['times_rounding']):.1f} on"
        ),
    )
    yield from grids([grid], screen, form="shades")
    yield Text()


def _model_places(d: Diff, screen: Screen, options: ViewOptions) -> Iterator[RenderableType]:
    """The first place and those outside of blocks that differ, with `everything` all places; and
    what is unmatched.
    """
    places, unmatched = d["places"], d["unmatched"]
    some = [
        place
        for place in places
        if (place["layer"] is None and place["relative"] != 0) or place == d["first"]
    ]
    rows = places if options.everything else some
    columns: list[Column[Row]] = [
        Column(
            heading="place",
            value=where,
            style=lambda row: "red" * (row["beyond"] and not row["healed"]),
            least=34,
        ),
        Column(
            heading="relative",
            value=lambda row: row["relative"],
            unit="number",
            meaning="|B − A| ÷ |A|",
        ),
        Column(
            heading="rounding",
            value=lambda row: row["rounding"],
            unit="number",
            meaning="change by rounding",
        ),
        column("diff", "largest", lambda row: row["largest"], "number", drop=1),
        Column(heading="module in A", value=lambda row: visible(row["name_a"]), drop=2),
    ]
    more = [f"{len(places) - len(rows)} more places (--all)"] if len(places) > len(rows) else []
    yield from table(Table(columns=columns, rows=rows), screen.width, *more) if rows else ()
    why: Column[Row] = Column(
        heading="why", value=lambda row: visible(row["why"]), least=24, wraps=True
    )
    most = None if options.everything else _MOST_UNMATCHED
    listed = Table(
        columns=[Column(heading="not compared", value=where), why], rows=unmatched, most=most
    )
    yield from table(listed, screen.width) if unmatched else ()
