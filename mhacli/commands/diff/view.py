"""The terminal view of a comparison: verdict, settings, tokens, sites, effects, heads, maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from mhacli.commands.diff.compare import heads_of
from mhacli.commands.diff.result import (
    MASK,
    Difference,
    HeadChange,
    HeadLargest,
    LayerDifference,
    Place,
    RecordDiff,
    Setting,
    StatisticChange,
    TextDifference,
)
from mhacli.errors import UsageError, first_names
from mhacli.record.arrays import Array
from mhacli.record.glossary import words_of
from mhacli.record.heads import STATISTICS, words_of_type
from mhacli.record.record import Record
from mhacli.render.base.cells import (
    CHANGES,
    FORBIDDEN,
    NOT_A_NUMBER,
    WEIGHTS,
    Ramp,
    cell,
    change_levels,
    levels,
    range_text,
    ticks,
)
from mhacli.render.base.colours import NAN_SIGN
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
from mhacli.render.base.options import Scale, Screen, ViewOptions, chosen
from mhacli.render.base.selection import ranges
from mhacli.render.checkpoint.effect import number_words, removal_words, signed_text
from mhacli.render.checkpoint.effect_map import removal_name
from mhacli.render.heads.drawable import DrawableHead, drawable_heads, is_before_dropout, scale_of
from mhacli.render.heads.head_map import HeadMap, head_map, largest_of_maps, pooled_means, sums
from mhacli.render.heads.heatmap import AXES
from mhacli.text.escape import visible
from mhacli.text.tokens import TokenSequence

_TOKEN_WIDTH = 16
_COLOURS = {"agree": "bold green", "differ": "bold red", "nothing": "bold yellow"}


def diff_view(d: RecordDiff, options: ViewOptions, screen: Screen) -> RenderableType:
    """The complete output of `mha diff`. `require_drawable` must accept the options."""
    layers = [layer for layer in d.layers if _is_chosen(layer, options)]
    shown, everything = layers or d.layers, options.everything
    alike = [f"{name} {visible(word)}" for name, word in d.alike]
    head = [Text(f"{letter} = {visible(name)}", style="bold") for letter, name in zip("AB", d.names, strict=True)]
    head.append(Text(verdict_text(d), style=_COLOURS[d.verdict]))
    if alike:
        lines = filled([f"the same in both: {alike[0]}", *alike[1:]], screen.width)
        head.append(Text("\n".join(lines), style="dim"))
    sections = [
        Group(*head),
        *_settings(d.settings, screen, everything=everything),
        *_texts(d, everything=everything),
        *_sites(d, shown, screen, everything=everything),
        *_effects(d, everything=everything),
        *_heads(shown, screen, everything=everything),
        *_maps(d, layers, options, screen),
        Text(_tolerance(d), style="dim"),
        Text(visible(d.summary), style=_COLOURS[d.verdict]),
    ]
    return Group(*[part for section in sections for part in (section, Text(""))][:-1])


def _is_chosen(layer: LayerDifference, options: ViewOptions) -> bool:
    """Whether `--layer` names the layer, or is not given."""
    names = [(kind, each.layer) for each in layer.inspected for kind in (None, each.kind)]
    return options.layers is None or any(name in options.layers for name in names)


def _tolerance(d: RecordDiff) -> str:
    origin = "--tolerance" if d.dtype is None else f"{d.dtype}; --tolerance sets another"
    if d.tolerance == 0:
        return f"numbers agree if they are equal bit for bit ({origin})"
    return f"numbers agree if |B − A| ≤ {d.tolerance:.3g} × the largest number of the site ({origin})"


def _more(n: int, noun: str) -> list[Text]:
    """The line for what is left out."""
    return [Text(f"⋮ {count_of(n, noun)} more (--all)", style="dim")] if n else []


# ------------------------------------------------------------------------------------------------------------- verdict


def verdict_text(d: RecordDiff) -> str:
    """One line: whether A and B agree, and where they first differ."""
    if d.verdict == "nothing":
        return d.summary
    if d.first is None:
        return _agreement(d)
    place = "" if d.first_site is None else _at_site(d, *d.first_site)
    if d.first == "effects" and d.effects is not None:
        place = f"the effects: {d.effects.summary}"
    elif d.first != "site":
        numbers = f"; the first numbers that differ are in {place}" if place else ""
        place = f"the tokens: {_inputs(d)}{numbers}"
    return f"A and B differ; the first difference is in {place}"


def _agreement(d: RecordDiff) -> str:
    both = " of the layers that both hold" if d.only_a or d.only_b else ""
    if not d.compared:
        steps = count_of(sum(len(layer.sites) for layer in d.layers), "step")
        alike = f"{steps} with the same name, axes and shape"
        return f"A and B agree{both}: {alike}; they hold no numbers that could be compared"
    n_same = sum(site.is_same_bits for _, site in d.compared)
    head = f"A and B agree in {count_of(len(d.compared), 'site')}{both}, bit for bit"
    if n_same == len(d.compared):
        return head
    layer, worst = max(d.compared, key=lambda pair: pair[1].relative or 0.0)
    return (
        f"{head} in {n_same}; the largest relative difference is {number_text(worst.relative)} in "
        f"{visible(layer.name(worst))} (tolerance {d.tolerance:.3g})"
    )


def _inputs(d: RecordDiff) -> str:
    """The changed tokens, the first few by name, and tokens with other ids."""
    changes = [(text, a, b) for text in d.texts for a, b in text.changes]
    n_a, n_b = len(d.a.sequences), len(d.b.sequences)
    counts = {
        "replaced": sum(min(len(a), len(b)) for _, a, b in changes),
        "only in A": sum(max(0, len(a) - len(b)) for _, a, b in changes),
        "only in B": sum(max(0, len(b) - len(a)) for _, a, b in changes),
        "with another id in the vocabulary": sum(text.n_other_ids for text in d.texts),
    }
    parts = [f"{n_a} against {count_of(n_b, 'sequence')}"] if n_a != n_b else []
    parts += [f"{count_of(n, 'token')} {words}" for words, n in counts.items() if n]
    if 0 < len(changes) <= 2 and all(len(a) <= 1 >= len(b) for _, a, b in changes):
        named = ", ".join(_replacement(*change) for change in changes)
        parts[-1 - bool(counts["with another id in the vocabulary"])] += f" ({named})"
    return ", ".join(parts)


def _replacement(text: TextDifference, a: range, b: range) -> str:
    """A changed token by name: `5 “mat” by “rug”`."""
    names = [*(_token(text.a, i) for i in a), *(_token(text.b, j) for j in b)]
    return f"{'context ' if text.family == 'context' else ''}{(a or b).start} {' by '.join(names)}"


def _token(sequence: TokenSequence, index: int) -> str:
    return f"“{fitted(token_text(sequence, index), _TOKEN_WIDTH)}”"


def _at_site(d: RecordDiff, layer: LayerDifference, site: Difference) -> str:
    """A site with the size and place of its difference, and whether the records may differ before it."""
    before = [*takewhile(lambda other: other is not site, (each for layer in d.layers for each in layer.sites))]
    is_unseen = d.a.model is not None or any(other.seen == "shape" and other.site != "ids" for other in before)
    has_seen = any(other.largest is not None and other.site not in MASK for other in before)
    is_first_seen = site.largest is not None and site.site not in MASK and is_unseen and not has_seen
    unseen = ", the first site whose numbers both records hold" if is_first_seen else ""
    return f"{visible(layer.name(site))}{unseen} ({_how_far(d, layer, site)})"


def _how_far(d: RecordDiff, layer: LayerDifference, site: Difference) -> str:
    where = "" if site.at is None else _place(site.at, layer)
    if site.status == "shape":
        return site.why
    if site.seen == "shape":
        return "another formula; its numbers were not saved"
    if site.n_nonfinite:
        first = f", the first at {where}" if where else ""
        return f"{count_of(site.n_nonfinite, 'number')} finite in only one of the records{first}"
    if site.n_only_a or site.n_only_b:
        return f"{count_of(site.n_only_a, 'cell')} visible only in A, {site.n_only_b} only in B, the first at {where}"
    if site.largest is None:
        return f"{site.n_different} of {count_of(site.n_cells, 'number')} differ, one at {where}"
    among = " among its smallest, largest, mean and deviation" if site.seen == "extremes" else ""
    at = f" at {where}" if where else among
    tolerance = f"tolerance {d.tolerance:.3g} × {number_text(site.magnitude)}"
    return f"largest difference {number_text(site.largest)}{at}; {tolerance}"


def _place(place: Place, layer: LayerDifference) -> str:
    """The place of a number in A: `head 3, query 5 “mat”, key 2 “sat”`, with that in B if it differs."""
    a, b = layer.a, layer.b
    parts = []
    sequence = place.a[0] if place.axes[:1] == ("sequence",) else 0
    for axis, i, j in zip(place.axes, place.a, place.b, strict=True):
        if axis == "sequence" and len(a.sequences) == 1:
            continue
        word = f"{axis} {i}"
        if axis in ("query", "key"):
            texts = [(record.sequences if axis == "query" else record.keys)[sequence] for record in (a, b)]
            names = [_token(texts[0], i), *([_token(texts[1], j)] if 0 <= j < len(texts[1].tokens) else [])]
            word += f" {' replaced by '.join(dict.fromkeys(names))}"
        parts.append(word + (f" ({j} in B)" if i != j else ""))
    return ", ".join(parts)


# -------------------------------------------------------------------------------------------------- settings and tokens


def _settings(settings: Sequence[Setting], screen: Screen, *, everything: bool) -> Iterator[RenderableType]:
    """The settings that differ. The commands only if nothing else differs, since they repeat the rest."""
    if not settings:
        return
    listed = settings if everything else [s for s in settings if s.name != "command"] or settings
    table = plain_table(width=screen.width)
    table.add_column("", no_wrap=True, max_width=28)
    for letter in "AB":
        table.add_column(letter, ratio=1, overflow="fold")
    for setting in listed:
        name = visible(setting.name) + (f" ({_layers_text(setting.layers)})" if setting.layers else "")
        table.add_row(Text(fitted(name, 28)), Text(visible(setting.a)), Text(visible(setting.b)))
    yield Group(title_rule("settings that differ"), table)


def _layers_text(labels: Sequence[str]) -> str:
    """Layer labels in short: `layers 0–5`, `cross layer 1, decoder layer 2`."""
    numbers: dict[str, list[int]] = {}
    for label in labels:
        kind, _, number = label.rpartition(" ")
        numbers.setdefault(kind, []).append(int(number))
    return ", ".join(f"{kind}{'s' * (len(of_kind) > 1)} {ranges(of_kind)}" for kind, of_kind in numbers.items())


def _texts(d: RecordDiff, *, everything: bool) -> Iterator[RenderableType]:
    """The number of equal tokens, and the changes, for each text that differs."""
    others = [text for text in d.texts if not text.is_same or text.n_other_ids]
    n_a, n_b = len(d.a.sequences), len(d.b.sequences)
    lines = []
    if n_a != n_b:
        lines.append(Text(f"A has {count_of(n_a, 'sequence')} and B has {n_b}: the first {min(n_a, n_b)} are compared"))
    shown = others if everything else others[:4]
    for text in shown:
        changes = text.changes if everything else text.changes[:12]
        lines += [Text(_counts(text, len(d.texts))), *(_change(text, *change) for change in changes)]
        lines += _more(len(text.changes) - len(changes), "place")
    lines += _more(len(others) - len(shown), "text")
    if lines:
        yield Group(title_rule("tokens"), *lines)


def _counts(text: TextDifference, n_texts: int) -> str:
    name = "" if n_texts == 1 else f"{'context' if text.family == 'context' else 'sequence'} {text.sequence}: "
    aligned = text.alignment
    parts = [f"{name}{aligned.n_equal} tokens are the same, of {aligned.n_a} in A and {aligned.n_b} in B"]
    parts += [f"{text.n_other_ids} of them have another id in the vocabulary"] if text.n_other_ids else []
    if not text.is_same:
        has_replaced = any(len(a) == len(b) for a, b in text.changes)
        which = " and those replaced one to one" if has_replaced else " alone"
        parts.append(f"numbers are compared for the same tokens{which}")
    parts += [] if aligned.exact else ["aligned by position, because the texts are too long for the best alignment"]
    return "; ".join(parts)


def _change(text: TextDifference, a: range, b: range) -> Text:
    """A change with the tokens around it: `… on the -mat +rug`."""
    before, after = range(max(0, a.start - 3), a.start), range(a.stop, min(text.alignment.n_a, a.stop + 3))
    line = Text("  ").append("… " if before.start else "", style="dim")
    line.append("".join(f"{token_text(text.a, i)} " for i in before), style="dim")
    for sign, sequence, places, style in (("-", text.a, a, "red"), ("+", text.b, b, "green")):
        words = [f"{sign}{fitted(token_text(sequence, i), _TOKEN_WIDTH)} " for i in places[:12]]
        words += [f"{sign}… {len(places) - 12} more "] if len(places) > 12 else []
        line.append("".join(words), style=style)
    line.append("".join(f"{token_text(text.a, i)} " for i in after), style="dim")
    return line.append("…" if after.stop < text.alignment.n_a else "", style="dim")


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
            words = number_words(change.a, metric), number_words(change.b, metric)
            table.add_row(*map(Text, (removal_words(change.a, d.a), *words, signed_text(change.change))))
        least = f"differences up to {number_text(d.effects.tolerance)} are noise or within the tolerance"
        parts += [table, *_more(len(changes) - len(shown), "removal"), Text(least, style="dim")]
    for letter, effects, record in (("A", d.effects.only_a, d.a), ("B", d.effects.only_b, d.b)):
        if effects:
            names = first_names(dict.fromkeys(removal_name(effect, record) for effect in effects))
            parts.append(Text(f"removed only in {letter}: {names}", style="dim"))
    if parts:
        yield Group(title_rule(f"{d.effects.summary}, the largest difference first"), *parts)


_UNITS = {row.field: row.unit for row in STATISTICS}


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
        listed = [_statistic(row) for row in (change.statistics if everything else _foremost(change))]
        words = "\n".join(filled(listed or ["–"], max(24, screen.width - used)))
        table.add_row(Text(label), Text(kind, style="dim" if change.kind_a == change.kind_b else "bold"), Text(words))
    title = f"{count_of(len(changes), 'head')} with changed statistics, the largest change first"
    yield Group(title_rule(title), table, *_more(len(changes) - len(shown), "head"))


def _type(change: HeadChange) -> str:
    return " → ".join(dict.fromkeys(words_of_type(kind).name for kind in (change.kind_a, change.kind_b)))


def _foremost(change: HeadChange) -> list[StatisticChange]:
    """The attention weights that changed most, missing and new numbers first, and the entropy."""
    gone = [row for row in change.statistics if math.isinf(row.size)]
    finite = [row for row in change.statistics if not math.isinf(row.size)]
    is_weight = {row.field for row in STATISTICS if row.is_change and row.unit == "weight"}
    weights = sorted((row for row in finite if row.name in is_weight), key=lambda row: -row.size)
    return [*gone[:3], *weights[:3], *(row for row in finite if row.name == "entropy")]


def _statistic(change: StatisticChange) -> str:
    unit = _UNITS[change.name]
    a, b = (
        "none" if value is None else weight_text(value, 2) if unit in ("weight", "fraction") else short_text(value)
        for value in (change.a, change.b)
    )
    name = words_of("columns", "statistic")[change.name].name
    nats = " nats" if unit == "nats" else ""
    if a == b and change.a is not None and change.b is not None:  # too small a change for these decimals
        way = "up" if change.b > change.a else "down"
        return f"{name} {a}{nats}, {way} by {number_text(change.size)}"
    return f"{name} {a} → {b}{nats}"


# ---------------------------------------------------------------------------------------------------------------- sites


_STYLES = {"identical": "green", "within": "green", "beyond": "bold red", "shape": "bold red", "skipped": "dim"}
_WORDS = {
    **{name: words_of("columns", "diff")[name].heading for name in ("identical", "within", "beyond")},
    "shape": "OTHER SHAPE",
    "skipped": "–",
}


def _sites(
    d: RecordDiff, layers: Sequence[LayerDifference], screen: Screen, *, everything: bool
) -> Iterator[RenderableType]:
    """A line per layer and the sites of the first that differs; for a single layer its sites. With `everything` all
    sites."""
    if len(layers) != 1:
        alone = [(name, labels) for name, labels in (("A", d.only_a), ("B", d.only_b)) if labels]
        lines = [Text(f"only in {name}: {visible(_layers_text(labels))}", style="dim") for name, labels in alone]
        lines += [] if layers else [Text("the records have no layer in common", style="yellow")]
        yield Group(title_rule("layer by layer"), *([_layers_table(layers)] if layers else []), *lines)
    first = next((layer for layer in layers if any(site.departs for site in layer.sites)), None)
    for layer in layers:
        if everything or len(layers) == 1 or layer is first:
            yield _layer(layer, screen, everything=everything)


def _layers_table(layers: Sequence[LayerDifference]) -> Table:
    table = plain_table(
        ("layer", False), ("sites", True), ("same bits", True), ("within", True), ("differ", True), ("largest, relative", True),
        ("first to differ", False),
    )  # fmt: skip
    for layer in layers:
        counted = [site for site in layer.sites if site.status != "skipped"]
        departs = [_site_name(site.site) for site in counted if site.departs]
        largest = max((site.relative or 0.0 for site in counted), default=0.0)
        n_same, n_within = sum(s.is_same_bits for s in counted), sum(s.status == "within" for s in counted)
        style = "bold red" if departs else ""
        table.add_row(
            *(Text(word) for word in (visible(layer.label), str(len(counted)), str(n_same), str(n_within))),
            Text(str(len(departs)), style=style),
            Text(number_text(largest)),
            Text(departs[0] if departs else "–", style=style or "dim"),
        )
    return table


def _site_name(name: str) -> str:
    return "mask" if name == "allowed" else visible(name)


def _layer(layer: LayerDifference, screen: Screen, *, everything: bool) -> RenderableType:
    """The sites of a layer, but for token ids, which are compared as tokens; those of equal shape are only counted."""
    is_code = layer.a.module is not None or layer.b.module is not None
    compared = [site for site in layer.sites if is_code or site.site != "ids" or site.status != "identical"]
    quiet = [s for s in compared if s.seen == "shape" and s.status == "identical" and not s.told and not everything]
    listed = [site for site in compared if site not in quiet]
    parts: list[RenderableType] = [
        title_rule(f"{layer.label + ' · ' if layer.label else ''}site by site, in the order of execution")
    ]
    parts += [_sites_table(listed, layer, screen)] if listed else []
    if quiet:
        names = _site_name(quiet[0].site) if len(quiet) == 1 else f"{len(quiet)} more sites (--all)"
        parts.append(Text(f"same shape, numbers not saved: {names}", style="dim"))
    for name, sites in (("A", layer.only_a), ("B", layer.only_b)):
        parts += [Text(f"only in {name}: {', '.join(map(_site_name, sites))}", style="dim")] if sites else []
    return Group(*parts)


def _sites_table(sites: Sequence[Difference], layer: LayerDifference, screen: Screen) -> Table:
    names = ("numbers", "others", "largest", "relative")[0 if screen.width >= 100 else 2 :]
    names = names if any(site.n_cells for site in sites) else ()
    table = plain_table(
        ("site", False), *((words_of("columns", "diff")[name].heading, True) for name in names), ("", False)
    )
    table.add_column("where", overflow="fold", ratio=1)
    for site in sites:
        cells = {
            "numbers": f"{site.n_cells:,}" if site.n_cells else "",
            "others": f"{site.n_different:,}" if site.n_cells else "",
            "largest": "" if site.largest is None else number_text(site.largest),
            "relative": "" if site.relative is None else number_text(site.relative),
        }
        is_partial = site.status == "identical" and not site.is_same_bits
        status = ("same shape" if site.seen == "shape" else "same") if is_partial else _WORDS[site.status]
        table.add_row(
            Text(_site_name(site.site), style="bold" if site.departs else ""),
            *(Text(cells[name]) for name in names),
            Text(status, style=_STYLES[site.status]),
            Text("; ".join(_remarks(site, layer)), style="" if site.departs else "dim"),
        )
    return table


def _remarks(site: Difference, layer: LayerDifference) -> Iterator[str]:
    """The place of the largest difference, or why nothing was compared, and differences in the trace's description."""
    if site.n_only_a or site.n_only_b:
        yield f"{count_of(site.n_only_a, 'cell')} visible only in A, {site.n_only_b} only in B"
    elif site.n_nonfinite:
        yield f"{count_of(site.n_nonfinite, 'number')} finite in only one"
    elif site.largest is None and site.n_different:
        yield f"{site.n_different} of {site.n_cells} differ"
    if site.at is not None and site.status != "skipped":
        yield _place(site.at, layer)
    n_held = math.prod(site.shape_a or ())
    if "query block" in site.axes and 0 < site.n_cells < n_held:
        yield f"{site.n_cells:,} of {n_held:,} cells compared: blocks with the same tokens at the same positions"
    if site.why:
        yield site.why
    yield from (f"{told.name}: {visible(told.a)} against {visible(told.b)}" for told in site.told)


# ---------------------------------------------------------------------------------------------------------------- maps


_BETWEEN = "  "
_Panel = tuple[str, Array, Array, Ramp]
"""A title, the levels of cells, their numbers, and the colours."""


@dataclass(frozen=True)
class _Maps:
    """The maps of a head in A and in B, and B − A, on common axes.

    `change` is NaN where nothing was compared, and infinite where only one number is NaN. `rows` and `columns` are names
    with positions in A, which are negative for padding and for tokens in B alone.
    """

    a: HeadMap
    b: HeadMap
    change: Array
    rows: list[tuple[str, int]]
    columns: list[tuple[str, int]]

    @property
    def largest(self) -> float:
        """The largest absolute change; 0 if none is finite."""
        return float(np.abs(self.change).max(initial=0.0, where=np.isfinite(self.change)))

    def fitting(self, rows: int, columns: int) -> _Maps:
        """The maps in blocks of tokens, so that at most `rows` × `columns` cells are needed."""
        factor = max(1, -(-len(self.rows) // rows), -(-len(self.columns) // columns))
        if factor == 1:
            return self
        is_known = ~np.isnan(self.change)
        n_queries = np.where(is_known.any(axis=1), np.maximum(self.a.n_queries, self.b.n_queries), 0.0)
        means = pooled_means(np.where(is_known, self.change, 0.0), n_queries, factor)
        n_known = sums(sums(is_known.astype(int), factor), factor, axis=1)
        change = np.where(n_known > 0, means, np.nan)
        return _Maps(self.a.pooled(factor), self.b.pooled(factor), change, self.rows[::factor], self.columns[::factor])


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
    heads, n_hidden = _heads_to_draw(layers, options)
    if not heads and (options.heads or options.layers or options.sequences) and options.view != "none":
        reasons = dict.fromkeys(site.why for layer in layers for site in layer.drawn_site if not site.heads)
        why = "; ".join(reasons) or "one of the records does not hold its pattern or map (--keep pattern)"
        yield Text(f"no head is drawn: {why}", style="yellow")
    if not heads or options.view == "none":
        return
    drawable = [_drawable(record, head.head) for layer, head, _ in heads for record in (layer.a, layer.b)]
    whole = [_aligned(layer, head.head, sequence) for layer, head, sequence in heads]
    n_lines = 1 << 30 if options.everything else 40
    fitted_maps = [maps and maps.fitting(n_lines, _rooms(screen)[3]) for maps in whole]
    drawn = [maps for maps in fitted_maps if maps is not None]
    top = largest_of_maps(each for maps in drawn for each in (maps.a, maps.b))
    kind, change = scale_of(options, drawable), max((maps.largest for maps in drawn), default=0.0)
    for (layer, head, sequence), of_tokens, maps in zip(heads, whole, fitted_maps, strict=True):
        parts = [layer.label] if layer.label else []
        parts += [f"head {head.head}", *([f"sequence {sequence}"] if len(layer.a.sequences) > 1 else [])]
        body = Text("not drawn side by side: the blocks of its maps cover other tokens", style="dim")
        if maps is not None and of_tokens is not None:
            parts += [f"largest change {number_text(of_tokens.largest)}"]
            parts += [f"each mark {maps.a.block} × {maps.a.block} tokens"] if maps.a.block > 1 else []
            panels = [(x, levels(m.weights, kind, top), m.weights, WEIGHTS) for x, m in (("A", maps.a), ("B", maps.b))]
            panels.append(("B − A", change_levels(maps.change, change), maps.change, CHANGES))
            body = _painted(maps, panels, options.precision, screen)
        yield Group(title_rule(" · ".join(parts)), body)
    if n_hidden:
        yield Text(f"⋮ {count_of(n_hidden, 'more head')} changed (--all, --head N)", style="dim")
    if drawn:
        yield _caption(d, drawn, (kind, top, change), screen)


def _heads_to_draw(
    layers: Sequence[LayerDifference], options: ViewOptions
) -> tuple[list[tuple[LayerDifference, HeadLargest, int]], int]:
    """The chosen heads with a sequence; else those that changed, largest first, and how many of them are left out."""
    heads = [
        (layer, head, sequence)
        for layer in layers
        for site in layer.drawn_site
        for head in site.heads
        if options.heads is None or head.head in options.heads
        for sequence in options.sequences or (head.sequence,)
    ]
    if options.heads is not None or options.layers is not None:
        return heads, 0
    changed = [item for item in heads if item[1].largest != 0]
    changed.sort(key=lambda item: -math.inf if item[1].largest is None else -item[1].largest)
    shown = changed if options.everything else changed[:1]
    return shown, len(changed) - len(shown)


def _drawable(record: Record, head: int) -> DrawableHead:
    statistics = next((row for row in record.heads if row.head == head), None)
    return DrawableHead(record, heads_of(record).index(head), head, statistics)


def _aligned(layer: LayerDifference, head: int, sequence: int) -> _Maps | None:
    """Both maps and their difference on common axes; None if their blocks cover other tokens."""
    a, b = (head_map(_drawable(record, head), sequence) for record in (layer.a, layer.b))
    rows, columns = _lines(a, b, layer.queries[sequence], 0), _lines(a, b, layer.keys[sequence], 1)
    if rows is None or columns is None:
        return None
    of_a, of_b = (_spread(m, [row[i] for row in rows], [column[i] for column in columns]) for i, m in enumerate((a, b)))
    is_compared = np.outer([row[2] for row in rows], [column[2] for column in columns]) & (of_a.is_open | of_b.is_open)
    change = np.where(of_b.is_open, of_b.weights, 0.0) - np.where(of_a.is_open, of_a.weights, 0.0)
    n_nan = np.isnan(of_a.weights).astype(int) + np.isnan(of_b.weights)
    change = np.select([~is_compared, n_nan == 1, n_nan == 2], [np.nan, np.inf, 0.0], change)
    row_names = [
        (_name(i, j, a.query_name, b.query_name), i * a.block + a.first[0] if i >= 0 else -1) for i, j, _ in rows
    ]
    names = [(_name(i, j, a.key_name, b.key_name), i * a.block + a.first[1] if i >= 0 else -1) for i, j, _ in columns]
    return _Maps(of_a, of_b, change, row_names, names)


def _lines(a: HeadMap, b: HeadMap, text: TextDifference, axis: int) -> list[tuple[int, int, bool]] | None:
    """The rows or columns to draw: their indices in A and in B (−1 if absent), and whether numbers are compared."""
    if a.block == b.block == 1 and a.first[axis] == b.first[axis] == 0:
        parts = text.alignment.parts
        return [(i, j, len(x) == len(y)) for x, y, _ in parts for i, j in zip_longest(x, y, fillvalue=-1)]
    first, n_blocks = a.first[axis], a.weights.shape[axis]
    if (a.block, first, n_blocks) != (b.block, b.first[axis], b.weights.shape[axis]):
        return None
    is_same = np.ones(a.block * n_blocks, bool)  # padding is equal
    is_same[-first : -first + max(text.alignment.n_a, text.alignment.n_b)] = False
    is_same[[i - first for i, j in text.alignment.pairs if i == j]] = True
    return [(n, n, bool(block.all())) for n, block in enumerate(is_same.reshape(-1, a.block))]


def _name(i: int, j: int, of_a: Callable[[int], str], of_b: Callable[[int], str]) -> str:
    """The name of a line; `cat|dog` for different tokens."""
    return "|".join(dict.fromkeys(([of_a(i)] if i >= 0 else []) + ([of_b(j)] if j >= 0 else [])))


def _spread(each: HeadMap, rows: list[int], columns: list[int]) -> HeadMap:
    """The map at these rows and columns, `FORBIDDEN` at −1."""
    weights = np.pad(each.weights, ((0, 1), (0, 1)), constant_values=FORBIDDEN)[np.ix_(rows, columns)]
    learned = None if each.learned is None else np.pad(each.learned, (0, 1))[rows]
    n_queries = np.pad(each.n_queries, (0, 1))[rows]
    return replace(each, weights=weights, of_sinks=np.zeros_like(weights), learned=learned, n_queries=n_queries)


def _label_width(screen: Screen) -> int:
    return 12 if screen.width >= 100 else 7


def _rooms(screen: Screen) -> dict[int, int]:
    """The width of a panel, by the number of panels side by side."""
    width = screen.width - _label_width(screen) - 1
    return {n: max(1, (width - (n - 1) * len(_BETWEEN)) // n) for n in (3, 2, 1)}


def _painted(maps: _Maps, panels: Sequence[_Panel], precision: int, screen: Screen) -> Text:
    """The panels side by side; or, if numbers then fit into their cells, one below the other."""
    rooms, (n_rows, n_columns) = _rooms(screen), maps.change.shape
    least = precision + 3  # a sign, a point and a gap
    numbered = (n for n, room in rooms.items() if room // n_columns >= least and -(-3 // n) * (n_rows + 2) <= 24)
    n_beside = next(numbered, 3)
    width = min(8, rooms[n_beside] // n_columns)
    margin, label = " " * (_label_width(screen) + 1), _label_width(screen)
    is_token, places = maps.a.block == 1, [place for _, place in maps.columns]
    axis = ticks(places, width, every=1 if width > len(str(max(places))) else 10)
    if is_token and width >= 5:
        axis = "".join(_padded(name, width - 1) + " " for name, _ in maps.columns)
    lines = []
    for start in range(0, 3, n_beside):
        beside = panels[start : start + n_beside]
        titles = _BETWEEN.join(_padded(name, len(axis)) for name, *_ in beside)
        lines.append(Text(margin).append(titles.rstrip(), style="bold"))
        lines.append(Text(margin).append(_BETWEEN.join([axis] * len(beside)).rstrip(), style="dim"))
        for row, (name, place) in enumerate(maps.rows):
            word = name if is_token else str(place) if place >= 0 else ""
            line = Text().append(_padded(word, label) + " ", style="bold" if is_token else "dim")
            for number, panel in enumerate(beside):
                has_digits = width >= least and (panel[-1] is WEIGHTS or maps.largest >= 10.0**-precision)
                cells = _cells(panel, row, width, precision if has_digits else None, colour=screen.colour)
                line.append(_BETWEEN if number else "").append_tokens(cells)
            lines.append(line)
    return Text("\n").join(lines)


def _cells(panel: _Panel, row: int, width: int, precision: int | None, *, colour: bool) -> Iterator[tuple[str, Style]]:
    """A row of a panel: shades with numbers of a `precision`, or signs."""
    _, of_cells, numbers, ramp = panel
    for level, number in zip(of_cells[row].astype(int).tolist(), numbers[row].tolist(), strict=True):
        word = ""
        if level == NOT_A_NUMBER:
            word = NAN_SIGN
        elif level != FORBIDDEN and precision is not None:
            word = weight_text(abs(number), precision)
            if ramp is CHANGES and word.strip("0."):  # a change that rounds to 0 has no sign
                word = ("+" if number > 0 else "−") + word
        yield cell(level, width, colour=colour, ramp=ramp, gap=int(width > 1), word=word if len(word) < width else "")


def _padded(name: str, width: int) -> str:
    short = fitted(name, width)
    return short + " " * (width - cell_len(short))


def _caption(
    d: RecordDiff, drawn: Sequence[_Maps], scale: tuple[Scale, float, float], screen: Screen
) -> RenderableType:
    """Both scales with their ranges, the meaning of signs, and what the maps leave out."""
    maps, (kind, top, largest) = [each for pair in drawn for each in (pair.a, pair.b)], scale
    n_open = sum(int((each.is_open & ~np.isnan(each.weights)).sum()) for each in maps)
    reach = range_text(kind, top, n_open, is_exceeded=any((each.weights > top).any() for each in maps))
    weights = Text(f"A and B: {kind}, {reach}, the same for all: ")
    weights.append_tokens(WEIGHTS.swatches(colour=screen.colour)).append(
        "" if screen.colour else " from small to large"
    )
    change = Text(f"B − A: linear, −{number_text(largest)} … +{number_text(largest)}: ")
    if screen.colour:
        change.append_tokens(CHANGES.swatches(colour=True)).append(" blue less in B, grey the same, orange more")
    else:
        change.append("= - less in B, . about the same, + # more")
    trained = [letter for letter, record in (("A", d.a), ("B", d.b)) if is_before_dropout(record)]
    remarks = {
        AXES: True,
        "a blank cell is masked" + (", or has other tokens in the other record" if d.first == "tokens" else ""): True,
        f"{NAN_SIGN} is not a number": any(np.isnan(each.weights).any() for each in maps),
        "a mark of several cells shows their mean weight, in B − A their mean change": any(m.block > 1 for m in maps),
        f"{' and '.join(trained)} before dropout": bool(trained),
        "the weight of sink logits is not drawn": any(each.learned is not None for each in maps),
    }
    words = "; ".join(remark for remark, is_true in remarks.items() if is_true)
    return Group(weights, change if largest else Text("B − A: no change of a number"), Text(words, style="dim"))
