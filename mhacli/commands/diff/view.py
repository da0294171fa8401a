"""The terminal view of a comparison: verdict, settings, tokens, sites, effects, heads, maps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mhacli.commands.diff.compare import heads_of
from mhacli.commands.diff.result import Difference, HeadChange, LayerDifference, RecordDiff, TextDifference, change_of
from mhacli.errors import UsageError, first_names
from mhacli.record.arrays import Array
from mhacli.record.glossary import words_of
from mhacli.record.heads import STATISTICS, words_of_type
from mhacli.record.record import Record
from mhacli.render.base.cells import CHANGES, WEIGHTS, Ramp, cell, change_levels, levels, range_text, ticks
from mhacli.render.base.format import (
    count_of,
    filled,
    fitted,
    number_text,
    plain_table,
    short_text,
    title_rule,
    token_text,
    weight_text,
)
from mhacli.render.base.options import Screen, ViewOptions, chosen
from mhacli.render.checkpoint.effect import number_words, removal_words, signed_text
from mhacli.render.checkpoint.effect_map import removal_name
from mhacli.render.heads.drawable import DrawableHead, drawable_heads, scale_of
from mhacli.render.heads.head_map import head_map, largest_of_maps
from mhacli.render.heads.heatmap import AXES
from mhacli.text.align import pairs
from mhacli.text.escape import visible
from mhacli.text.tokens import TokenSequence

_TOKEN_WIDTH = 16
_COLOURS = {"agree": "bold green", "differ": "bold red", "nothing": "bold yellow"}


def diff_view(d: RecordDiff, options: ViewOptions, screen: Screen) -> RenderableType:
    """The complete output of `mha diff`. `require_drawable` must accept the options."""
    layers = [layer for layer in d.layers if _is_chosen(layer, options)]
    everything = options.everything
    head = [Text(f"{letter} = {visible(name)}", style="bold") for letter, name in zip("AB", d.names, strict=True)]
    head.append(Text(verdict_text(d), style=_COLOURS[d.verdict]))
    alike = [f"{name} {visible(word)}" for name, word in d.alike.items()]
    if alike:
        lines = filled([f"the same in both: {alike[0]}", *alike[1:]], screen.width)
        head.append(Text("\n".join(lines), style="dim"))
    origin = "--tolerance" if d.dtype is None else f"{d.dtype}; --tolerance sets another"
    rule = f"|B − A| ≤ {d.tolerance:.3g} × the largest number of the site" if d.tolerance else "all bits are equal"
    sections = [
        Group(*head),
        *_settings(d, screen, everything=everything),
        *_texts(d, everything=everything),
        *_sites(d, layers or d.layers, screen, everything=everything),
        *_effects(d, everything=everything),
        *_heads(layers or d.layers, screen, everything=everything),
        *_maps(d, layers, options, screen),
        Text(f"numbers agree if {rule} ({origin})", style="dim"),
        Text(visible(d.summary), style=_COLOURS[d.verdict]),
    ]
    return Group(*[part for section in sections for part in (section, Text(""))][:-1])


def _is_chosen(layer: LayerDifference, options: ViewOptions) -> bool:
    """Whether `--layer` names the layer, or is not given."""
    names = [(kind, each.layer) for each in layer.inspected for kind in (None, each.kind)]
    return options.layers is None or any(name in options.layers for name in names)


def _more(n: int, noun: str) -> list[Text]:
    """The line for what is left out."""
    return [Text(f"⋮ {count_of(n, noun)} more (--all)", style="dim")] if n > 0 else []


# ------------------------------------------------------------------------------------------------------------- verdict


def verdict_text(d: RecordDiff) -> str:
    """One line: whether A and B agree, and where they first differ."""
    if d.verdict == "nothing":
        return d.summary
    if d.verdict == "agree":
        n_same = sum(site.is_same_bits for _, site in d.compared)
        sites = f"{count_of(len(d.compared), 'site')}, bit for bit in {n_same}"
        return f"A and B agree in {sites if d.compared else 'the shapes and formulas of their steps'}"
    return f"A and B differ; {d.first_text(_at_site(d, *d.first_site) if d.first_site else '')}"


def _at_site(d: RecordDiff, layer: LayerDifference, site: Difference) -> str:
    """A site with the size and place of its difference."""
    words = "; ".join(_remarks(site, layer))
    if site.largest is not None and not site.n_nonfinite:
        words = f"largest difference {number_text(site.largest)}{f' at {words}' if site.at else ''}"
        words += f"; tolerance {d.tolerance:.3g} × {number_text(site.magnitude)}"
    return f"{visible(layer.name(site))} ({words})"


def _remarks(site: Difference, layer: LayerDifference) -> Iterator[str]:
    """How a site differs if no size tells, where, and why nothing was compared."""
    if site.n_only_a or site.n_only_b:
        yield f"{count_of(site.n_only_a, 'cell')} visible only in A, {site.n_only_b} only in B"
    elif site.n_nonfinite:
        yield f"{count_of(site.n_nonfinite, 'number')} finite in only one"
    elif site.largest is None and site.n_different:
        yield f"{site.n_different} of {site.n_cells} differ"
    if site.at is not None and site.status != "skipped":
        yield _place(site.at, layer)
    if site.why:
        yield site.why
    yield from (f"{told['name']}: {visible(told['a'])} against {visible(told['b'])}" for told in site.told)


def _place(place: dict[str, Any], layer: LayerDifference) -> str:
    """The place of a number in A: `head 3, query 5 “mat”, key 2 “sat”`, with that in B if it differs."""
    sequence, parts = place["a"][0] if place["axes"][0] == "sequence" else 0, []
    for axis, i, j in zip(place["axes"], place["a"], place["b"], strict=True):
        if axis == "sequence" and len(layer.a.sequences) == 1:
            continue
        names = ""
        if axis in ("query", "key"):
            texts = [(r.sequences if axis == "query" else r.keys)[sequence] for r in (layer.a, layer.b)]
            tokens = [f"“{_token(text, n)}”" for text, n in zip(texts, (i, j), strict=True)]
            names = f" {' replaced by '.join(dict.fromkeys(tokens))}"
        parts.append(f"{axis} {i}{names}" + (f" ({j} in B)" if i != j else ""))
    return ", ".join(parts)


def _token(text: TokenSequence, index: int) -> str:
    return fitted(token_text(text, index), _TOKEN_WIDTH)


# -------------------------------------------------------------------------------------------------- settings and tokens


def _settings(d: RecordDiff, screen: Screen, *, everything: bool) -> Iterator[RenderableType]:
    """The settings that differ. The commands only if nothing else differs, since they repeat the rest."""
    listed = d.settings if everything else [s for s in d.settings if s["name"] != "command"] or d.settings
    table = plain_table(width=screen.width)
    table.add_column("", no_wrap=True, max_width=28)
    for letter in "AB":
        table.add_column(letter, ratio=1, overflow="fold")
    for setting in listed:
        of_layers = f" ({first_names(setting['layers'], 1)})" if setting["layers"] else ""
        words = fitted(visible(setting["name"]) + of_layers, 28), visible(setting["a"]), visible(setting["b"])
        table.add_row(*map(Text, words))
    if listed:
        yield Group(title_rule("settings that differ"), table)


def _texts(d: RecordDiff, *, everything: bool) -> Iterator[RenderableType]:
    """The number of equal tokens, and the changes, for each text that differs."""
    others = [text for text in d.texts if not text.is_same or text.n_other_ids]
    n_a, n_b = len(d.a.sequences), len(d.b.sequences)
    lines = []
    if n_a != n_b:
        lines.append(Text(f"A has {count_of(n_a, 'sequence')} and B has {n_b}: the first {min(n_a, n_b)} are compared"))
    for text in others if everything else others[:4]:
        changes = text.changes if everything else text.changes[:12]
        lines += [Text(_counts(text, len(d.texts))), *(_change(d, text, change) for change in changes)]
        lines += _more(len(text.changes) - len(changes), "place")
    lines += [] if everything else _more(len(others) - 4, "text")
    if lines:
        yield Group(title_rule("tokens"), *lines)


def _counts(text: TextDifference, n_texts: int) -> str:
    name = "" if n_texts == 1 else f"{'context' if text.family == 'context' else 'sequence'} {text.sequence}: "
    parts = [f"{name}{text.n_aligned} tokens are the same, of {text.n_a} in A and {text.n_b} in B"]
    parts += [f"{text.n_other_ids} of them have another id in the vocabulary"] if text.n_other_ids else []
    if not text.is_same:
        parts.append("numbers are compared for the same tokens and those replaced one to one")
    return "; ".join(parts + ([] if text.exact else ["long texts are aligned by position"]))


def _change(d: RecordDiff, text: TextDifference, change: dict[str, Any]) -> Text:
    """A change with the tokens around it: `… on the -mat +rug`."""
    of_a, of_b, begin, end = text.of(d.a), text.of(d.b), change["a_begin"], change["a_end"]
    around = range(max(0, begin - 3), begin), range(end, min(text.n_a, end + 3))
    before, after = ("".join(f"{token_text(of_a, i)} " for i in places) for places in around)
    line = Text("  ").append("… " * bool(around[0].start) + before, style="dim")
    places = range(begin, end), range(change["b_begin"], change["b_end"])
    for sign, sequence, shown, style in (("-", of_a, places[0], "red"), ("+", of_b, places[1], "green")):
        words = [f"{sign}{_token(sequence, i)} " for i in shown[:12]]
        words += [f"{sign}… {len(shown) - 12} more "] if len(shown) > 12 else []
        line.append("".join(words), style=style)
    return line.append(after + "…" * (around[1].stop < text.n_a), style="dim")


# ---------------------------------------------------------------------------------------------------- effects and heads


def _effects(d: RecordDiff, *, everything: bool) -> Iterator[RenderableType]:
    """A table of the effects that changed; empty unless both records have effects."""
    if d.effects is None:
        return
    parts: list[RenderableType] = []
    metric, changes = d.effects.metric, d.effects.changes
    if changes:
        heading = words_of("columns", "effect")[metric].heading
        table = plain_table(("removed", False), (f"{heading} of A", True), ("of B", True), ("B − A", True))
        shown = changes if everything else changes[:10]
        for change in shown:
            words = number_words(change["a"], metric), number_words(change["b"], metric)
            table.add_row(*map(Text, (removal_words(change["a"], d.a), *words, signed_text(change["change"]))))
        least = f"differences up to {number_text(d.effects.tolerance)} are noise or within the tolerance"
        parts += [table, *_more(len(changes) - len(shown), "removal"), Text(least, style="dim")]
    for letter, effects, record in (("A", d.effects.only_a, d.a), ("B", d.effects.only_b, d.b)):
        if effects:
            names = first_names(dict.fromkeys(removal_name(effect, record) for effect in effects))
            parts.append(Text(f"removed only in {letter}: {names}", style="dim"))
    if parts:
        yield Group(title_rule(d.effects.summary + ", the largest difference first" * bool(changes)), *parts)


_UNITS = {row.field: row.unit for row in STATISTICS}
_OF_WEIGHT = {row.field for row in STATISTICS if row.is_change and row.unit == "weight"}


def _heads(layers: Sequence[LayerDifference], screen: Screen, *, everything: bool) -> Iterator[RenderableType]:
    """The heads that changed most: their types, and the statistics that changed."""
    changes = [change for layer in layers for change in layer.heads]
    changes.sort(key=lambda change: -math.inf if change.size is None else -change.size)
    if not changes:
        return
    shown = changes if everything else changes[:4]
    table = plain_table(("head", False), ("head type: A → B", False))
    table.add_column("statistics: A → B", overflow="fold", ratio=1)
    names = [(f"{visible(change.layer)} head {change.head}".strip(), _type(change)) for change in shown]
    used = sum(max(map(len, column)) + 2 for column in zip(("head", "head type: A → B"), *names, strict=True))
    for change, (label, kind) in zip(shown, names, strict=True):
        listed = [_statistic(**row) for row in (change.statistics if everything else _foremost(change))]
        words = "\n".join(filled(listed or ["–"], max(24, screen.width - used)))
        table.add_row(Text(label), Text(kind, style="dim" if change.kind_a == change.kind_b else "bold"), Text(words))
    title = f"{count_of(len(changes), 'head')} with changed statistics, the largest change first"
    yield Group(title_rule(title), table, *_more(len(changes) - len(shown), "head"))


def _type(change: HeadChange) -> str:
    return " → ".join(dict.fromkeys(words_of_type(kind).name for kind in (change.kind_a, change.kind_b)))


def _foremost(change: HeadChange) -> list[dict[str, Any]]:
    """The attention weights that changed most, missing and new ones first, and the entropy."""
    weights = [row for row in change.statistics if row["name"] in _OF_WEIGHT]
    weights.sort(key=lambda row: -change_of(row["a"], row["b"]))
    return weights[:3] + [row for row in change.statistics if row["name"] == "entropy"]


def _statistic(name: str, a: float | None, b: float | None) -> str:
    is_part, nats = _UNITS[name] in ("weight", "fraction"), " nats" if _UNITS[name] == "nats" else ""
    before, after = (
        "none" if value is None else weight_text(value, 2) if is_part else short_text(value) for value in (a, b)
    )
    words = f"{words_of('columns', 'statistic')[name].name} {before}"
    if before == after and a is not None and b is not None:  # too small a change for these decimals
        return f"{words}{nats}, {'up' if b > a else 'down'} by {number_text(change_of(a, b))}"
    return f"{words} → {after}{nats}"


# ---------------------------------------------------------------------------------------------------------------- sites


_STYLES = {"identical": "green", "within": "green", "beyond": "bold red", "shape": "bold red", "skipped": "dim"}


def _sites(
    d: RecordDiff, layers: Sequence[LayerDifference], screen: Screen, *, everything: bool
) -> Iterator[RenderableType]:
    """A line per layer and the sites of the first that differs; for a single layer its sites. With `everything` all
    sites."""
    if len(layers) != 1:
        lines = _alone(d.only_a, d.only_b)
        lines += [] if layers else [Text("the records have no layer in common", style="yellow")]
        yield Group(title_rule("layer by layer"), *([_layers_table(layers)] if layers else []), *lines)
    first = next((layer for layer in layers if any(site.departs for site in layer.sites)), None)
    for layer in layers:
        if everything or len(layers) == 1 or layer is first:
            yield _layer(layer, screen, everything=everything)


def _layers_table(layers: Sequence[LayerDifference]) -> Table:
    counts = [(name, True) for name in ("sites", "same bits", "within", "differ", "largest, relative")]
    table = plain_table(("layer", False), *counts, ("first to differ", False))
    for layer in layers:
        counted = [site for site in layer.sites if site.status != "skipped"]
        departs = [_site_name(site.site) for site in counted if site.departs]
        n_same, n_within = sum(s.is_same_bits for s in counted), sum(s.status == "within" for s in counted)
        largest = number_text(max((site.relative or 0.0 for site in counted), default=0.0))
        style = "bold red" if departs else ""
        words = visible(layer.label), str(len(counted)), str(n_same), str(n_within)
        last = Text(departs[0] if departs else "–", style=style or "dim")
        table.add_row(*map(Text, words), Text(str(len(departs)), style=style), Text(largest), last)
    return table


def _alone(of_a: Sequence[str], of_b: Sequence[str]) -> list[Text]:
    """The layers or sites that one record alone has."""
    return [
        Text(f"only in {letter}: {', '.join(map(_site_name, names))}", style="dim")
        for letter, names in (("A", of_a), ("B", of_b))
        if names
    ]


def _site_name(site: str) -> str:
    return "mask" if site == "allowed" else visible(site)


def _layer(layer: LayerDifference, screen: Screen, *, everything: bool) -> RenderableType:
    """The sites of a layer, but for token ids, which are compared as tokens; those of equal shape are only counted."""
    is_code = layer.a.module is not None or layer.b.module is not None
    compared = [site for site in layer.sites if is_code or site.site != "ids" or site.status != "identical"]
    quiet = [site for site in compared if site.seen == "shape" and site.status == "identical" and not everything]
    listed = [site for site in compared if site not in quiet]
    parts: list[RenderableType] = [
        title_rule(f"{layer.label + ' · ' if layer.label else ''}site by site, in the order of execution")
    ]
    parts += [_sites_table(listed, layer, screen)] if listed else []
    if quiet:
        parts.append(Text(f"same shape, numbers not saved: {count_of(len(quiet), 'more site')} (--all)", style="dim"))
    return Group(*parts, *_alone(layer.only_a, layer.only_b))


def _sites_table(sites: Sequence[Difference], layer: LayerDifference, screen: Screen) -> Table:
    names = ("numbers", "others", "largest", "relative")[0 if screen.width >= 100 else 2 :]
    names = names if any(site.n_cells for site in sites) else ()
    table = plain_table(
        ("site", False), *((words_of("columns", "diff")[name].heading, True) for name in names), ("", False)
    )
    table.add_column("where", overflow="fold", ratio=1)
    words = {name: words_of("columns", "diff")[name].heading for name in ("identical", "within", "beyond")}
    words |= {"shape": "OTHER SHAPE", "skipped": "–"}
    for site in sites:
        cells = {
            "numbers": f"{site.n_cells:,}" if site.n_cells else "",
            "others": f"{site.n_different:,}" if site.n_cells else "",
            "largest": "" if site.largest is None else number_text(site.largest),
            "relative": "" if site.relative is None else number_text(site.relative),
        }
        status = "same shape" if site.seen == "shape" and site.status == "identical" else words[site.status]
        table.add_row(
            Text(_site_name(site.site), style="bold" if site.departs else ""),
            *(Text(cells[name]) for name in names),
            Text(status, style=_STYLES[site.status]),
            Text("; ".join(_remarks(site, layer)), style="" if site.departs else "dim"),
        )
    return table


# ---------------------------------------------------------------------------------------------------------------- maps


_GAP, _LABEL = 2, 8
_Panel = tuple[str, Array, Array, Ramp]
"""A title, the levels of cells, their numbers, and the colours."""


def require_drawable(records: Sequence[Record], options: ViewOptions) -> None:
    """Raises `UsageError` for a head, layer or sequence that one of the records lacks."""
    for record in records:
        chosen(options.sequences, len(record.sequences), 1, False, "sequence")
        if record.model is None and options.layers is not None:
            raise UsageError("--layer works only with records of a checkpoint", hint="leave --layer out")
        if record.model is None:
            chosen(options.heads, record.config.n_heads, 1, False, "head")
        drawable_heads(record, options)


def _maps(
    d: RecordDiff, layers: Sequence[LayerDifference], options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """A, B and B − A of the chosen heads, or of those that changed most."""
    is_asked = options.heads is not None or options.layers is not None
    found = [(layer, head) for layer in layers for site in layer.patterns[:1] for head in site.heads]
    found = [(layer, head) for layer, head in found if options.heads is None or head["head"] in options.heads]
    if not is_asked:
        found = [(layer, head) for layer, head in found if head["largest"] != 0]
        found.sort(key=lambda pair: -math.inf if pair[1]["largest"] is None else -pair[1]["largest"])
    shown = found if is_asked or options.everything else found[:1]
    if options.view == "none":
        return
    if not shown and is_asked:
        yield Text("no head is drawn: the records have no pattern or map that can be compared", style="yellow")
    for layer, head in shown:
        for sequence in options.sequences or (head["sequence"],):
            yield _map(layer, head["head"], sequence, options, screen)
    if len(found) > len(shown):
        yield Text(f"⋮ {count_of(len(found) - len(shown), 'more head')} changed (--all, --head N)", style="dim")
    if shown:
        alone = "; tokens of one text alone are left out" if d.first == "tokens" else ""
        yield Text(f"{AXES}; a blank cell is masked{alone}", style="dim")


def _map(layer: LayerDifference, head: int, sequence: int, options: ViewOptions, screen: Screen) -> RenderableType:
    """A head in A, in B, and B − A, of the tokens that correspond, with their scales."""
    heads = [_drawable(record, head) for record in (layer.a, layer.b)]
    a, b = (head_map(each, sequence) for each in heads)
    texts = layer.queries[sequence], layer.keys[sequence]
    title = [layer.label] if layer.label else []
    title += [f"head {head}", *([f"sequence {sequence}"] if len(layer.a.sequences) > 1 else [])]
    is_other = a.block > 1 and not all(text.is_same for text in texts)
    rows, columns = (
        pairs(text.parts) if a.block == 1 else [(n, n) for n in range(a.weights.shape[axis])]
        for axis, text in enumerate(texts)
    )
    if is_other or (a.block, a.first) != (b.block, b.first) or not rows or not columns:
        words = "not drawn side by side: the records hold maps of other tokens"
        return Group(title_rule(" · ".join(title)), Text(words, style="dim"))
    names = [
        ["|".join(dict.fromkeys((of_a(i), of_b(j)))) for i, j in lines]
        for lines, of_a, of_b in ((rows, a.query_name, b.query_name), (columns, a.key_name, b.key_name))
    ]
    places = [column * a.block + a.first[1] for column, _ in columns]
    kind, n_lines = scale_of(options, heads), len(rows) if options.everything else 40
    a, b = (
        each.part(np.array([row[side] for row in rows], int))
        .part(slice(None), np.array([column[side] for column in columns], int))
        .fitting(n_lines, screen.width // 3 - _LABEL - _GAP)
        for side, each in enumerate((a, b))
    )
    factor = -(-len(rows) // len(a.weights))
    change = np.where(b.is_open, b.weights, 0.0) - np.where(a.is_open, a.weights, 0.0)
    change = np.where(a.is_open | b.is_open, np.where(np.isnan(change), np.inf, change), np.nan)
    largest, top = float(np.abs(change).max(initial=0.0, where=np.isfinite(change))), largest_of_maps((a, b))
    title += [f"largest change {number_text(largest)}"]
    title += [f"each mark {a.block} × {a.block} tokens"] if a.block > 1 else []
    panels = [(name, levels(each.weights, kind, top), each.weights, WEIGHTS) for name, each in (("A", a), ("B", b))]
    panels.append(("B − A", change_levels(change, largest), change, CHANGES))
    reach = range_text(kind, top, int(a.is_open.sum() + b.is_open.sum()))
    scales = Text(f"A and B: {kind}, {reach}: ").append_tokens(WEIGHTS.swatches(colour=screen.colour))
    scales.append(f"\nB − A: linear, −{number_text(largest)} … +{number_text(largest)}: ")
    scales.append_tokens(CHANGES.swatches(colour=screen.colour)).append(" from less in B to more")
    names = [lines[::factor] for lines in names]
    painted = [_painted(panel, names, places[::factor], options.precision, screen) for panel in panels]
    return Group(title_rule(" · ".join(title)), Columns(painted, padding=(0, _GAP, 0, 0)), scales)


def _drawable(record: Record, head: int) -> DrawableHead:
    statistics = next((row for row in record.heads if row.head == head), None)
    return DrawableHead(record, heads_of(record).index(head), head, statistics)


def _painted(
    panel: _Panel, names: Sequence[Sequence[str]], places: Sequence[int], precision: int, screen: Screen
) -> Text:
    """A panel whose cells are as wide as up to three side by side allow, with numbers if these fit."""
    title, of_cells, numbers, ramp = panel
    (rows, columns), least = names, precision + 3  # a sign, a point and a gap
    rooms = [((screen.width - (n - 1) * _GAP) // n - _LABEL) // max(1, len(columns)) for n in (3, 2, 1)]
    width = max(1, min(8, next((room for room in rooms if room >= least), rooms[0])))
    axis = "".join(_padded(name, width - 1) + " " for name in columns) if width >= least else ticks(places, width)
    text = Text(" " * _LABEL).append(title, style="bold").append(f"\n{' ' * _LABEL}{axis}", style="dim")
    for name, row, values in zip(rows, of_cells.astype(int).tolist(), numbers.tolist(), strict=True):
        text.append(f"\n{_padded(name, _LABEL - 1)} ", style="bold")
        for level, number in zip(row, values, strict=True):
            word = weight_text(abs(number), precision) if level >= 0 and width >= least else ""
            if ramp is CHANGES and word.strip("0."):  # a change that rounds to 0 has no sign
                word = ("+" if number > 0 else "−") + word
            text.append(*cell(level, width, colour=screen.colour, ramp=ramp, gap=int(width > 1), word=word))
    return text


def _padded(name: str, width: int) -> str:
    short = fitted(name, width)
    return short + " " * (width - cell_len(short))
