"""The terminal view of a comparison: verdict, settings, tokens, sites, heads, heatmaps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mhacli.commands.diff.compare import SIZES, UNIT_OF, by_size
from mhacli.commands.diff.result import (
    Differences,
    HeadChange,
    LayerDifference,
    Setting,
    SiteDifference,
    StatisticChange,
    TextDifference,
)
from mhacli.commands.diff.views.effects import effects_view
from mhacli.commands.diff.views.maps import maps_view
from mhacli.commands.diff.views.words import layers_text, place_text, site_name, texts_of, verdict_text, views
from mhacli.record.glossary import column_words
from mhacli.record.heads import HEAD_TYPES
from mhacli.record.record import Record
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
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.text.escape import visible

_MAX_HEADS, _MAX_TEXTS, _MAX_CHANGES, _MAX_SETTINGS = 4, 4, 12, 40
_CONTEXT_TOKENS, _NAME_WIDTH, _TOKEN_WIDTH = 3, 16, 16
_MOST_LISTED, _LEAST_ROOM = 3, 24
_COLOURS = {"agree": "bold green", "differ": "bold red", "nothing": "bold yellow"}


def diff_view(
    differences: Differences,
    records: tuple[Record, Record],
    names: tuple[str, str],
    *,
    options: ViewOptions,
    screen: Screen,
) -> RenderableType:
    """The complete output of `mha diff`. `require_drawable` must accept the options."""
    a, b = records
    chosen = _of_chosen_layers(differences, a, options)
    sections: list[RenderableType] = [
        Group(
            *_names(names),
            Text(verdict_text(differences, a, b), style=_COLOURS[differences.verdict]),
            *_alike(differences, screen),
        ),
        *_settings(differences.settings, screen, everything=options.everything),
        *_texts(differences, a, b, everything=options.everything),
        *sites_view(chosen, a, b, screen, everything=options.everything),
        *effects_view(differences.effects, records, screen, everything=options.everything),
        *_heads(chosen, screen, everything=options.everything),
        *maps_view(differences, records, options=options, screen=screen),
        _tolerance(differences),
        Text(visible(differences.summary), style=_COLOURS[differences.verdict]),
    ]
    spaced: list[RenderableType] = []
    for section in sections:
        spaced += [section] if not spaced else [Text(""), section]
    return Group(*spaced)


def _of_chosen_layers(differences: Differences, a: Record, options: ViewOptions) -> Differences:
    """The differences of the chosen layers; of all if none is chosen, or if the records have none of them in common."""

    def is_chosen(layer: LayerDifference) -> bool:
        inspected = a.layers[layer.index_a] if layer.index_a is not None and a.layers else None
        return inspected is not None and any(
            inspected.layer == number and kind in (None, inspected.kind) for kind, number in options.layers or ()
        )

    layers = tuple(layer for layer in differences.layers if is_chosen(layer))
    return replace(differences, layers=layers) if layers else differences


def _names(names: tuple[str, str]) -> Iterator[RenderableType]:
    for letter, name in zip("AB", names, strict=True):
        yield Text(f"{letter} = {visible(name)}", style="bold")


def _alike(differences: Differences, screen: Screen) -> Iterator[RenderableType]:
    alike = [f"{name} {visible(word)}" for name, word in differences.alike]
    if alike:
        yield Text("\n".join(filled(["the same in both: " + alike[0], *alike[1:]], screen.width)), style="dim")


def _tolerance(differences: Differences) -> Text:
    tolerance, dtype = differences.tolerance, differences.dtype
    origin = "--tolerance" if dtype is None else f"{dtype}; --tolerance sets another"
    rule = (
        "numbers agree if they are equal bit for bit"
        if tolerance == 0
        else f"numbers agree if |B − A| ≤ {tolerance:.3g} × the largest number of the site"
    )
    return Text(f"{rule} ({origin})", style="dim")


# ------------------------------------------------------------------------------------------------------------------ settings


def _settings(settings: Sequence[Setting], screen: Screen, *, everything: bool) -> Iterator[RenderableType]:
    """The settings that differ. The commands only if nothing else differs, since they repeat the rest."""
    if not settings:
        return
    if not everything:
        settings = [setting for setting in settings if setting.name != "command"] or settings
    shown = settings if everything else settings[:_MAX_SETTINGS]
    table = plain_table(width=screen.width)
    table.add_column("", no_wrap=True, max_width=28)
    for letter in "AB":
        table.add_column(letter, ratio=1, overflow="fold")
    for setting in shown:
        name = visible(setting.name) + (f" ({layers_text(setting.layers)})" if setting.layers else "")
        table.add_row(Text(fitted(name, 28)), Text(visible(setting.a)), Text(visible(setting.b)))
    hidden = len(settings) - len(shown)
    more = [Text(f"⋮ {hidden} more (--all)", style="dim")] if hidden else []
    yield Group(title_rule("settings that differ"), table, *more)


# -------------------------------------------------------------------------------------------------------------------- tokens


def _texts(differences: Differences, a: Record, b: Record, *, everything: bool) -> Iterator[RenderableType]:
    """The number of equal tokens, and the changes, for each text that differs."""
    others = [text for text in differences.texts if not text.is_same or text.n_other_ids]
    lines: list[RenderableType] = []
    n_a, n_b = differences.n_sequences
    if n_a != n_b:
        lines.append(Text(f"A has {count_of(n_a, 'sequence')} and B has {n_b}: the first {min(n_a, n_b)} are compared"))
    shown = others if everything else others[:_MAX_TEXTS]
    for text in shown:
        lines += [Text(_text_counts(text, len(differences.texts))), *_changes(text, a, b, everything=everything)]
    if len(shown) < len(others):
        lines.append(Text(f"⋮ {len(others) - len(shown)} more texts (--all)", style="dim"))
    if lines:
        yield Group(title_rule("tokens"), *lines)


def _text_counts(text: TextDifference, n_texts: int) -> str:
    name = "" if n_texts == 1 else f"{'context' if text.family == 'context' else 'sequence'} {text.sequence}: "
    sentence = f"{name}{text.n_aligned} tokens are the same, of {text.n_a} in A and {text.n_b} in B"
    if text.n_other_ids:
        sentence += f"; {text.n_other_ids} of them have another id in the vocabulary"
    if text.n_aligned < max(text.n_a, text.n_b):
        sentence += "; numbers are compared for the same tokens" + (
            " and those replaced one to one" if text.replaced else " alone"
        )
    if not text.exact:
        sentence += (
            "; aligned by tokens that occur once in each text, because the texts are too long for the best alignment"
        )
    return sentence


def _changes(text: TextDifference, a: Record, b: Record, *, everything: bool) -> Iterator[Text]:
    """The changes with the tokens around them: `… on the -mat +rug`."""
    tokens_a, tokens_b = texts_of(text, a, b)
    changes = text.changes if everything else text.changes[:_MAX_CHANGES]
    for change in changes:
        line = Text("  ")
        before = range(max(0, change.a_begin - _CONTEXT_TOKENS), change.a_begin)
        line.append("… " if before and before[0] else "", style="dim")
        line.append("".join(f"{token_text(tokens_a, i)} " for i in before), style="dim")
        for sign, sequence, begin, end, style in (
            ("-", tokens_a, change.a_begin, change.a_end, "red"),
            ("+", tokens_b, change.b_begin, change.b_end, "green"),
        ):
            for index in range(begin, min(end, begin + _MAX_CHANGES)):
                line.append(f"{sign}{fitted(token_text(sequence, index), _TOKEN_WIDTH)} ", style=style)
            line.append(
                f"{sign}… {end - begin - _MAX_CHANGES} more " if end - begin > _MAX_CHANGES else "", style=style
            )
        after = range(change.a_end, min(text.n_a, change.a_end + _CONTEXT_TOKENS))
        line.append("".join(f"{token_text(tokens_a, i)} " for i in after), style="dim")
        line.append("…" if after and after[-1] + 1 < text.n_a else "", style="dim")
        yield line
    if len(changes) < len(text.changes):
        yield Text(f"  ⋮ {len(text.changes) - len(changes)} more places (--all)", style="dim")


# --------------------------------------------------------------------------------------------------------------------- heads


def _heads(differences: Differences, screen: Screen, *, everything: bool) -> Iterator[RenderableType]:
    """The heads that changed most: their types, and the statistics that changed."""
    changes = by_size([change for layer in differences.layers for change in layer.heads])
    if not changes:
        return
    shown = changes if everything else changes[:_MAX_HEADS]
    table = plain_table(("head", False), ("head type: A → B", False))
    table.add_column("statistics: A → B", overflow="fold", ratio=1)
    names = [(f"{visible(change.layer)} head {change.head}".strip(), _type(change)) for change in shown]
    room = screen.width - sum(
        max(map(len, column)) + 2 for column in zip(("head", "head type: A → B"), *names, strict=True)
    )
    for change, (label, kind) in zip(shown, names, strict=True):
        listed = change.statistics if everything else _foremost(change)
        words = "\n".join(filled([_statistic(statistic) for statistic in listed] or ["–"], max(_LEAST_ROOM, room)))
        table.add_row(Text(label), Text(kind, style="dim" if change.kind_a == change.kind_b else "bold"), Text(words))
    hidden = len(changes) - len(shown)
    more = [Text(f"⋮ {count_of(hidden, 'head')} more (--all)", style="dim")] if hidden else []
    yield Group(
        title_rule(f"{count_of(len(changes), 'head')} with changed statistics, the largest change first"),
        table,
        *more,
    )


def _type(change: HeadChange) -> str:
    a, b = (HEAD_TYPES[kind].words.name for kind in (change.kind_a, change.kind_b))
    return a if a == b else f"{a} → {b}"


def _foremost(change: HeadChange) -> Sequence[StatisticChange]:
    """The entropy, and the attention weights that changed most, missing and new numbers first."""
    gone = [row for row in change.statistics if row.a is None or row.b is None]
    finite = [row for row in change.statistics if row not in gone]
    weights = [row for row in finite if row.name in SIZES and UNIT_OF[row.name] == "weight"]
    weights.sort(key=lambda row: -abs((row.b or 0.0) - (row.a or 0.0)))
    entropy = [row for row in finite if row.name == "entropy"]
    return (*gone[:_MOST_LISTED], *weights[:_MOST_LISTED], *entropy)


def _statistic(change: StatisticChange) -> str:
    to_text = _weight if UNIT_OF[change.name] in ("weight", "fraction") else _number
    unit = " nats" if UNIT_OF[change.name] == "nats" else ""
    name, a, b = column_words().statistic[change.name].name, to_text(change.a), to_text(change.b)
    if a == b and change.a is not None and change.b is not None:  # too small a change for these decimals
        return f"{name} {a}{unit}, {'up' if change.b > change.a else 'down'} by {number_text(abs(change.b - change.a))}"
    return f"{name} {a} → {b}{unit}"


def _weight(value: float | None) -> str:
    return "none" if value is None else weight_text(value, 2)


def _number(value: float | None) -> str:
    return "none" if value is None else short_text(value)


# ---------------------------------------------------------------------------------------------------------------- sites

_STYLES = {"identical": "green", "within": "green", "beyond": "bold red", "shape": "bold red", "skipped": "dim"}
_WORDS = {
    **{name: column_words().diff[name].heading for name in ("identical", "within", "beyond")},
    "shape": "OTHER SHAPE",
    "skipped": "–",
}
_WIDE = 100


def sites_view(
    differences: Differences, a: Record, b: Record, screen: Screen, *, everything: bool = False
) -> Iterator[RenderableType]:
    """A line per layer and the sites of the first that differs; for a single layer its sites. With `everything` all
    sites."""
    is_single = len(differences.layers) == 1
    if not is_single:
        table = [_layers_table(differences)] if differences.layers else []
        yield Group(title_rule("layer by layer"), *table, *_layers_alone(differences))
    first = next((layer for layer in differences.layers if any(site.departs for site in layer.sites)), None)
    shown = [layer for layer in differences.layers if everything or is_single or layer is first]
    for layer in shown:
        yield _layer(layer, a, b, screen, everything=everything)


def _layers_table(differences: Differences) -> Table:
    table = plain_table(
        ("layer", False), ("sites", True), ("same bits", True), ("within", True), ("differ", True), ("largest, relative", True),
        ("first to differ", False),
    )  # fmt: skip
    for layer in differences.layers:
        counted = [site for site in layer.sites if site.status != "skipped"]
        same = sum(site.is_same_bits for site in counted)
        departs = [site for site in counted if site.departs]
        largest = max((site.relative or 0.0 for site in counted), default=0.0)
        first = Text(site_name(departs[0].site) if departs else "–", style="bold red" if departs else "dim")
        table.add_row(
            Text(visible(layer.label)),
            *(Text(str(n)) for n in (len(counted), same, sum(site.status == "within" for site in counted))),
            Text(str(len(departs)), style="bold red" if departs else ""),
            Text(number_text(largest)),
            first,
        )
    return table


def _layers_alone(differences: Differences) -> Iterator[RenderableType]:
    for name, labels in (("A", differences.only_a), ("B", differences.only_b)):
        if labels:
            yield Text(f"only in {name}: {visible(layers_text(labels))}", style="dim")
    if not differences.layers:
        yield Text("the records have no layer in common", style="yellow")


def _layer(layer: LayerDifference, a: Record, b: Record, screen: Screen, *, everything: bool) -> RenderableType:
    compared = [site for site in layer.sites if not _is_covered_by_tokens(site, a, b)]
    quiet = [site for site in compared if _is_quiet(site)] if not everything else []
    listed = [site for site in compared if site not in quiet]
    title = title_rule(f"{layer.label + ' · ' if layer.label else ''}site by site, in the order of execution")
    parts: list[RenderableType] = [title]
    if listed:
        parts.append(_sites_table(listed, layer, a, b, screen))
    if quiet:
        names = site_name(quiet[0].site) if len(quiet) == 1 else f"{len(quiet)} more sites (--all)"
        parts.append(Text(f"same shape, numbers not saved: {names}", style="dim"))
    for name, sites in (("A", layer.only_a), ("B", layer.only_b)):
        if sites:
            parts.append(Text(f"only in {name}: {', '.join(map(site_name, sites))}", style="dim"))
    return Group(*parts)


def _is_covered_by_tokens(site: SiteDifference, a: Record, b: Record) -> bool:
    """Whether the site is the step of token ids, which are compared as tokens."""
    return site.site == "ids" and site.status == "identical" and a.module is None and b.module is None


def _is_quiet(site: SiteDifference) -> bool:
    """Whether a step has no remark but that its shape is equal."""
    return site.seen == "shape" and site.status == "identical" and not site.told


def _sites_table(
    sites: Sequence[SiteDifference], layer: LayerDifference, a: Record, b: Record, screen: Screen
) -> Table:
    is_wide = screen.width >= _WIDE
    numbers = ("numbers", "others", "largest", "relative")[0 if is_wide else 2 :]
    names = numbers if any(site.n_cells for site in sites) else ()
    table = plain_table(("site", False), *((column_words().diff[name].heading, True) for name in names), ("", False))
    table.add_column("where", overflow="fold", ratio=1)
    records = views(layer, a, b)
    for site in sites:
        name = site_name(site.site)
        counts = (f"{site.n_cells:,}", f"{site.n_different:,}") if site.n_cells else ("", "")
        cells = (*counts, *("" if number is None else number_text(number) for number in (site.largest, site.relative)))
        table.add_row(
            Text(name, style="bold" if site.departs else ""),
            *(Text(cell) for cell in cells[-len(names) :] if names),
            Text(_status(site), style=_STYLES[site.status]),
            Text(_remark(site, records), style="" if site.departs else "dim"),
        )
    return table


def _status(site: SiteDifference) -> str:
    if site.status == "identical" and not site.is_same_bits:
        return "same shape" if site.seen == "shape" else "same"
    return _WORDS[site.status]


def _remark(site: SiteDifference, records: tuple[Record, Record]) -> str:
    """The location of the largest difference, or why nothing was compared, and differences in the trace's description."""
    parts = []
    if site.n_only_a or site.n_only_b:
        parts.append(f"{count_of(site.n_only_a, 'cell')} visible only in A, {site.n_only_b} only in B")
    elif site.n_nonfinite:
        parts.append(f"{count_of(site.n_nonfinite, 'number')} finite in only one")
    elif site.largest is None and site.n_different:
        parts.append(f"{site.n_different} of {site.n_cells} differ")
    if site.at is not None and site.status != "skipped":
        parts.append(place_text(site.at, *records))
    n_held = math.prod(site.shape_a or ())
    if "query block" in site.axes and 0 < site.n_cells < n_held:
        parts.append(
            f"{site.n_cells:,} of {n_held:,} cells compared: blocks with the same tokens at the same positions"
        )
    parts += [site.why] if site.why else []
    parts += [f"{setting.name}: {visible(setting.a)} against {visible(setting.b)}" for setting in site.told]
    return "; ".join(parts)
