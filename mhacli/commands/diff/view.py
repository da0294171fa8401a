"""The terminal view of a comparison: verdict, settings, tokens, sites, effects, heads, maps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.commands.diff.compare import Difference, LayerDifference, RecordDiff, change_of, heads_of
from mhacli.errors import UsageError, first_names
from mhacli.record.glossary import words_of
from mhacli.record.heads import STATISTICS, words_of_type
from mhacli.record.record import Record
from mhacli.render.base.doc import Column, Table, column
from mhacli.render.base.format import count_of, filled, fitted, title_rule, token_text
from mhacli.render.base.grids import grids
from mhacli.render.base.options import Screen, ViewOptions, chosen
from mhacli.render.base.terminal import table
from mhacli.render.checkpoint.effect import number_column, removal_name, removal_words
from mhacli.render.heads.drawable import DrawableHead, drawable_heads, scale_of
from mhacli.render.heads.grids import grid_of
from mhacli.render.heads.head_map import head_map, largest_of_maps
from mhacli.text.escape import token_label, visible
from mhacli.text.numbers import shown

_COLOURS = {"agree": "bold green", "differ": "bold red", "nothing": "bold yellow"}


def diff_view(d: RecordDiff, options: ViewOptions, screen: Screen) -> RenderableType:
    """The complete output of `mha diff`. `require_drawable` must accept the options."""
    layers = d.layers
    if options.layers is not None:
        of_a = [(layer, layer.inspected_a) for layer in d.layers if layer.inspected_a is not None]
        layers = [layer for layer, each in of_a if {(None, each.layer), (each.kind, each.layer)} & {*options.layers}]
    origin = "--tolerance" if d.dtype is None else f"{d.dtype}; --tolerance sets another"
    rule = f"|B − A| ≤ {d.tolerance:.3g} × the largest number of the site" if d.tolerance else "all bits are equal"
    names = f"A = {visible(d.names[0])} · B = {visible(d.names[1])}"
    sections = [
        Group(Text(names, style="bold"), *_settings(d, everything=options.everything)),
        *_texts(d, everything=options.everything),
        *_sites(d, layers or d.layers, screen, everything=options.everything),
        *_effects(d, everything=options.everything),
        *_heads(layers or d.layers, screen, everything=options.everything),
        *_maps(d, layers, options, screen),
        Group(
            Text(f"numbers agree if {rule} ({origin})", style="dim"),
            Text(visible(d.summary), style=_COLOURS[d.verdict]),
        ),
    ]
    return Group(*[part for section in sections for part in (section, Text(""))][:-1])


def _more(n: int, noun: str) -> list[Text]:
    """The line for what is left out."""
    return [Text(f"⋮ {count_of(n, noun)} more (--all)", style="dim")] if n > 0 else []


def _alone(words: str, names_a: Sequence[str], names_b: Sequence[str]) -> list[Text]:
    """The layers, sites or removals that one record alone has."""
    sides = (("A", names_a), ("B", names_b))
    return [Text(f"{words} {letter}: {', '.join(names)}", style="dim") for letter, names in sides if names]


# --------------------------------------------------------------------------------------------------------------- sites


def verdict_text(d: RecordDiff) -> str:
    """One line: whether A and B agree, and where they first differ, with the size and place of the difference."""
    if d.verdict == "nothing":
        return d.summary
    if d.verdict == "agree":
        compared = [site for layer in d.layers for site in layer.sites if site.is_compared]
        n_same = sum(site.is_same_bits for site in compared)
        sites = f"{count_of(len(compared), 'site')}, bit for bit in {n_same}"
        return f"A and B agree in {sites if compared else 'the shapes and formulas of their steps'}"
    details = ""
    if d.first_site is not None:
        layer, site = d.first_site
        details = "; ".join(_remarks(site, layer))
        if site.largest is not None and not site.n_nonfinite:
            size = f"largest difference {shown(site.largest, 'number')}" + " at " * bool(site.at)
            details = f"{size}{details}; tolerance {d.tolerance:.3g} × {shown(site.magnitude, 'number')}"
        details = f" ({details})"
    return f"A and B differ; {d.first_text(details)}"


def _remarks(site: Difference, layer: LayerDifference) -> Iterator[str]:
    """How a site differs if no size tells, where, and why nothing was compared."""
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
    yield from (f"{told['name']}: {visible(told['a'])} against {visible(told['b'])}" for told in site.told)


def _place(layer: LayerDifference, axes: Sequence[str], of_a: Sequence[int], of_b: Sequence[int]) -> Iterator[str]:
    """The place of a number in A: `head 3`, `query 5 “mat”`, `key 2 “sat”`, with that in B if it differs."""
    sequence = of_a[0] if axes[0] == "sequence" else 0
    for axis, i, j in zip(axes, of_a, of_b, strict=True):
        if axis == "sequence" and len(layer.a.sequences) == 1:
            continue
        name = ""
        if axis in ("query", "key"):
            texts = [(each.sequences if axis == "query" else each.keys)[sequence] for each in (layer.a, layer.b)]
            tokens = [f"“{fitted(token_text(text, n), 16)}”" for text, n in zip(texts, (i, j), strict=True)]
            name = f" {' replaced by '.join(dict.fromkeys(tokens))}"
        yield f"{axis} {i}{name}" + (f" ({j} in B)" if i != j else "")


# ------------------------------------------------------------------------------------------------- settings and tokens


def _settings(d: RecordDiff, *, everything: bool) -> Iterator[RenderableType]:
    """The settings that differ. The commands only if nothing else differs, since they repeat the rest."""
    listed = d.settings if everything else [row for row in d.settings if row["name"] != "command"] or d.settings
    for row in listed:
        of_layers = f" ({first_names(row['layers'], 1)})" if row["layers"] else ""
        yield Text(visible(f"{row['name']}{of_layers}: {row['a']} → {row['b']}"))


def _texts(d: RecordDiff, *, everything: bool) -> Iterator[RenderableType]:
    """The number of equal tokens, and the changes, for each text that differs."""
    others = [text for text in d.texts if not text["is_same"] or text["n_other_ids"]]
    n_a, n_b, lines = len(d.a.sequences), len(d.b.sequences), list[Text]()
    if n_a != n_b:
        lines.append(Text(f"A has {count_of(n_a, 'sequence')} and B has {n_b}: the first {min(n_a, n_b)} are compared"))
    for text in others if everything else others[:4]:
        name = f"{text['family'].replace('texts', 'sequence')} {text['sequence']}: " if len(d.texts) > 1 else ""
        parts = [f"{name}{text['n_aligned']} tokens are the same, of {text['n_a']} in A and {text['n_b']} in B"]
        parts += [f"{text['n_other_ids']} of them have another id in the vocabulary"] if text["n_other_ids"] else []
        changes = text["changes"] if everything else text["changes"][:12]
        lines += [Text("; ".join(parts)), *(_change(change) for change in changes)]
        lines += _more(len(text["changes"]) - len(changes), "place")
    lines += [] if everything else _more(len(others) - 4, "text")
    if lines:
        yield Group(title_rule("tokens"), *lines)


def _change(change: dict[str, Any]) -> Text:
    """A change with the position of its first token in A and in B: `5 -mat +rug`."""
    places = dict.fromkeys((change["a_begin"], change["b_begin"]))
    line = Text(f"  {' → '.join(map(str, places))} ", style="dim")
    for sign, side, style in (("-", "a", "red"), ("+", "b", "green")):
        shown = [f"{sign}{fitted(token_label(token), 16)} " for token in change[side][:12]]
        shown += [f"{sign}… {len(change[side]) - 12} more "] if len(change[side]) > 12 else []
        line.append("".join(shown), style=style)
    return line


_STATUS = {
    **{name: (words_of("columns", "diff")[name].heading, "green") for name in ("identical", "within")},
    "beyond": (words_of("columns", "diff")["beyond"].heading, "bold red"),
    **{"shape": ("OTHER SHAPE", "bold red"), "skipped": ("–", "dim")},
}
"""The word for each status, and its style."""


def _sites(
    d: RecordDiff, layers: Sequence[LayerDifference], screen: Screen, *, everything: bool
) -> Iterator[RenderableType]:
    """A line per layer and the sites of the first that differs; for a single layer its sites. With `everything` all
    sites."""
    first = next((layer for layer in layers if any(site.departs for site in layer.sites)), None)
    if not layers:
        yield Text("the records have no layer in common", style="yellow")
    elif len(layers) > 1:
        yield Group(*table(_layers_table(layers), screen.width), *_alone("only in", *d.only.values()))
    for layer in layers:
        if everything or len(layers) == 1 or layer is first:
            quiet = 0 if everything else sum(map(_is_quiet, layer.sites))
            note = [f"same shape, numbers not saved: {count_of(quiet, 'more site')} (--all)"] if quiet else []
            sides = ([*map(_site_name, names)] for names in layer.only.values())
            yield Group(*table(_sites_table(layer, everything), screen.width, *note), *_alone("only in", *sides))


def _layers_table(layers: Sequence[LayerDifference]) -> Table[LayerDifference]:
    """A row for each layer: the number of sites by how they compare, and the first that differs."""

    def counted(layer: LayerDifference) -> list[Difference]:
        return [site for site in layer.sites if site.status != "skipped"]

    def departs(layer: LayerDifference) -> list[str]:
        return [_site_name(site.site) for site in counted(layer) if site.departs]

    columns: list[Column[LayerDifference]] = [
        Column(heading="layer", value=lambda layer: visible(layer.label)),
        Column(heading="sites", value=lambda layer: len(counted(layer)), unit="integer"),
        Column(heading="differ", value=lambda layer: len(departs(layer)), unit="integer"),
        Column(
            heading="largest, relative",
            value=lambda layer: max((site.relative or 0.0 for site in counted(layer)), default=0.0),
            unit="number",
            drop=1,
        ),
        Column(heading="first to differ", value=lambda layer: (departs(layer) or ["–"])[0]),
    ]
    red = [replace(column, style=lambda layer: "bold red" if departs(layer) else "") for column in columns]
    return Table(columns=red, rows=layers, title="layer by layer")


def _site_name(site: str) -> str:
    return "mask" if site == "allowed" else visible(site)


def _is_quiet(site: Difference) -> bool:
    """Whether the site has no numbers to compare, and the same shape."""
    return site.seen == "shape" and site.status == "identical"


def _sites_table(layer: LayerDifference, everything: bool) -> Table[Difference]:
    """A row for each site of a layer, quiet ones with `everything` only."""

    def status(site: Difference) -> tuple[str, str]:
        return ("same shape", "green") if _is_quiet(site) else _STATUS[site.status]

    return Table(
        columns=[
            Column(
                heading="site",
                value=lambda site: _site_name(site.site),
                style=lambda site: "bold" if site.departs else "",
            ),
            column("diff", "largest", lambda site: "" if site.largest is None else shown(site.largest, "number"), "id"),
            column(
                "diff", "relative", lambda site: "" if site.relative is None else shown(site.relative, "number"), "id"
            ),
            Column(heading="", value=lambda site: status(site)[0], style=lambda site: status(site)[1]),
            Column(
                heading="where",
                value=lambda site: "; ".join(_remarks(site, layer)),
                least=24,
                wraps=True,
                style=lambda site: "" if site.departs else "dim",
            ),
        ],
        rows=[site for site in layer.sites if everything or not _is_quiet(site)],
        title=layer.label,
    )


# ---------------------------------------------------------------------------------------------------- effects and heads


def _effects(d: RecordDiff, *, everything: bool) -> Iterator[RenderableType]:
    """The effects that changed; empty unless both records have effects."""
    if d.effects is None:
        return
    metric, changes, lines = d.effects["metric"], d.effects["changes"], list[Text]()
    listed = changes if everything else changes[:10]
    for change in listed:
        numbers = " → ".join(number_column(metric).text(change[side]) for side in "ab")
        lines.append(Text(f"{removal_words(change['a'], d.a)}: {numbers} ({shown(change['change'], 'change')})"))
    lines += _more(len(changes) - len(listed), "removal")
    sides = ((d.effects["only_a"], d.a), (d.effects["only_b"], d.b))
    names = [list(dict.fromkeys(removal_name(effect, record) for effect in effects)) for effects, record in sides]
    lines += _alone("removed only in", *names)
    if lines:
        heading = words_of("columns", "effect")[metric].heading
        title = f"{d.changed_effects}, the largest difference first: {heading} of A → of B (B − A)"
        yield Group(title_rule(title if changes else d.changed_effects), *lines)


_OF_WEIGHT = {row.field for row in STATISTICS if row.is_change and row.unit == "weight"}


def _heads(layers: Sequence[LayerDifference], screen: Screen, *, everything: bool) -> Iterator[RenderableType]:
    """The heads that changed most, with their types and the statistics that changed: the weights that changed most,
    missing and new ones first, and the entropy."""
    heads = [head for layer in layers for head in layer.heads]
    heads.sort(key=lambda head: -math.inf if head["size"] is None else -head["size"])
    shown = heads if everything else heads[:4]
    lines = list[Text]()
    for head in shown:
        rows = sorted(head["statistics"], key=lambda row: -change_of(row["a"], row["b"]))
        weights = [row for row in rows if row["name"] in _OF_WEIGHT]
        rows = head["statistics"] if everything else weights[:3] + [row for row in rows if row["name"] == "entropy"]
        kinds = dict.fromkeys(words_of_type(head[kind]).name for kind in ("kind_a", "kind_b"))
        label = f"{visible(head['layer'])} head {head['head']}".strip()
        first, *others = filled(
            [f"{label}: {' → '.join(kinds)}", *(_statistic(**row) for row in rows)], screen.width - 2
        )
        lines.append(Text("\n  ".join([first, *others])))
    if heads:
        title = f"{count_of(len(heads), 'head')} changed, the largest change first"
        yield Group(title_rule(title), *lines, *_more(len(heads) - len(shown), "head"))


def _statistic(name: str, a: float | None, b: float | None) -> str:
    before, after = ("none" if value is None else shown(value, "number") for value in (a, b))
    if before == after:  # they differ beyond the digits that are shown
        before, after = str(a), str(b)
    return f"{words_of('columns', 'statistic')[name].name} {before} → {after}{' nats' * (name == 'entropy')}"


# ---------------------------------------------------------------------------------------------------------------- maps


_LABEL = 12
"""The most columns of the name of a row."""


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
    """A, B and B − A of the chosen heads, or of the head that changed most."""
    if options.view == "none":
        return
    is_asked, found = options.heads is not None or options.layers is not None, []
    for layer in layers:
        heads = next((site.heads for site in layer.sites if site.site in ("pattern", "map")), [])
        found += [(layer, head) for head in heads if options.heads is None or head["head"] in options.heads]
    if not is_asked:
        found = [(layer, head) for layer, head in found if head["largest"] != 0]
        found.sort(key=lambda pair: -math.inf if pair[1]["largest"] is None else -pair[1]["largest"])
    shown = found if is_asked or options.everything else found[:1]
    for layer, head in shown:
        for sequence in options.sequences or (head["sequence"],):
            yield _map(layer, head["head"], sequence, options, screen)
    if is_asked and not shown:
        yield Text("no head is drawn: the records have no pattern or map that can be compared", style="yellow")
    elif len(found) > len(shown):
        yield Text(f"⋮ {count_of(len(found) - len(shown), 'more head')} changed (--all, --head N)", style="dim")


def _map(layer: LayerDifference, head: int, sequence: int, options: ViewOptions, screen: Screen) -> RenderableType:
    """A head in A, in B, and B − A, of the tokens that correspond."""
    heads = [DrawableHead(record, heads_of(record).index(head), head) for record in (layer.a, layer.b)]
    a, b = (head_map(each, sequence) for each in heads)
    rows, columns = layer.queries[sequence], layer.keys[sequence]
    title = [layer.label] if layer.label else []
    title += [f"head {head}", *([f"sequence {sequence}"] if len(layer.a.sequences) > 1 else [])]
    if a.block > 1:
        rows, columns = (np.stack([np.arange(n)] * 2) for n in a.weights.shape)
    is_other = (a.block, a.first) != (b.block, b.first) or (a.block > 1 and not layer.has_same_tokens)
    if is_other or not rows.size or not columns.size:
        words = "not drawn side by side: the records hold maps of other tokens"
        return Text(f"{' · '.join(title)}: {words}", style="dim")
    names = [
        ["|".join(dict.fromkeys((of_a(i), of_b(j)))) for i, j in places.T.tolist()]
        for places, of_a, of_b in ((rows, a.query_name, b.query_name), (columns, a.key_name, b.key_name))
    ]
    block, first = a.block, a.first[1]
    a, b = (
        each.part(rows[side])
        .part(slice(None), columns[side])
        .fitting(rows.shape[1] if options.everything else 40, screen.width // 3 - _LABEL - 2)
        for side, each in enumerate((a, b))
    )
    change = np.where(b.is_open, b.weights, 0.0) - np.where(a.is_open, a.weights, 0.0)
    largest = float(np.abs(change).max(initial=0.0, where=np.isfinite(change)))
    factor = a.block // block  # a cell stands for so many rows and columns
    labels = [fitted(name, _LABEL) for name in names[0][::factor]]
    whole = replace(
        grid_of(a, "A", scale=scale_of(options, heads), top=largest_of_maps((a, b)), digits=options.precision),
        rows=labels,
        columns=names[1][::factor],
        places=(columns[0, ::factor] * block + first).tolist(),
        has_all_rows=True,
    )
    panels = [
        whole,
        replace(whole, values=b.weights, allowed=b.is_open, title="B"),
        replace(whole, values=change, allowed=a.is_open | b.is_open, top=largest, scale="change", title="B − A"),
    ]
    each = f" · each mark {a.block} × {a.block} tokens" * (a.block > 1)
    heading = Text(f"{' · '.join(title)} · largest change {shown(largest, 'number')}{each}", style="bold")
    return Group(heading, *grids(panels, screen, everything=options.everything))
