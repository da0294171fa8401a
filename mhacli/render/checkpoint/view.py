"""The terminal view of a checkpoint's record: the model, all heads of all layers, the tokens,
chosen details, and of a corpus the distributions over documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.style import Style
from rich.text import Text

from mhacli.record.corpus import CONFIDENCE, CorpusHead, CorpusSummary, Spread, named
from mhacli.record.glossary import words_of
from mhacli.record.heads import (
    HEAD_TYPES,
    STATISTICS,
    UNTYPED,
    HeadStatistics,
    in_order,
    nearest_type,
)
from mhacli.record.record import Record
from mhacli.render.base.colours import type_sign
from mhacli.render.base.doc import Column, Grid, Table, fields
from mhacli.render.base.format import fitted, flowing, token_at
from mhacli.render.base.grids import grids
from mhacli.render.base.options import Screen, ViewOptions, sequences_to_draw
from mhacli.render.base.selection import (
    LayerView,
    chosen_heads,
    chosen_layers,
    require_inspected_heads,
    short_name,
    survey_of,
)
from mhacli.render.base.terminal import bare, spaced, table
from mhacli.render.base.tokens import hidden, token_tables
from mhacli.render.checkpoint.header import checks_view, model_header
from mhacli.render.checkpoint.patterns import are_drawn, patterns_view
from mhacli.render.heads.head_map import maps_view
from mhacli.render.heads.table import heads_table, sinks_are, sinks_text, token_name, types_of
from mhacli.render.heads.view import cells_view, strong_places
from mhacli.text.escape import token_label, visible
from mhacli.text.numbers import Unit, shown

_EFFECTS = ("d_logit", "d_output")
"""What ranks removals: the first number that they have."""
MAX_LISTED, MAX_RANKED, MAX_OF_CORPUS, MAX_DRAWN = 24, 8, 4, 8
"""The largest number of heads in the table of one layer, of several, and of a corpus, which has two
tables; and of patterns."""


def layers_view(record: Record, options: ViewOptions, screen: Screen) -> RenderableType:
    """The complete view of a checkpoint's record: of chosen heads their patterns first. Raises
    `UsageError` for a layer, head or sequence that the record lacks.
    """
    assert record.model is not None, "a record of a checkpoint has its model"
    layers = chosen_layers(record, options)
    heads = chosen_heads(layers, options)
    require_inspected_heads(layers, options.maps)
    sequences = sequences_to_draw(options, len(record.sequences))
    listed, description = listed_heads(record, heads, options)
    options_of_more = "--all, --sort" if record.corpus else "--all, --layer N, --sort"
    remarks = [Text(f"{description} ({options_of_more})", style="dim")] if description else []
    of_heads = heads_table(record, listed, options)
    checks = checks_view(record, screen, in_detail=options.verbose)
    if options.brief:
        return Group(*remarks, bare(of_heads, screen.width), Text(""), checks)
    has_all = options.verbose or options.everything
    is_drawn = are_drawn(layers, options)
    is_asked = (
        is_drawn and len(listed) == 1 and not has_all
    )  # one head: its matrix first, how it was read last
    drawn = Group(*patterns_view(record, layers, sequences.shown, options, screen))
    numbers = Group(*remarks, *table(of_heads, screen.width, has_all=options.verbose))
    overview: list[RenderableType] = [grid(record, layers, screen)] if len(layers) > 1 else []
    overview.append(_sinks(record, layers, heads, screen))
    header = model_header(record, record.model, screen, in_brief=not options.verbose)
    sections: list[RenderableType] = [header, Group(*overview), Group(numbers, drawn)]
    if is_asked:
        sections = [Group(drawn, numbers)]
    elif is_drawn:
        sections = [
            header,
            drawn,
            numbers,
            *([Group(*overview)] if has_all or options.heads is None else ()),
        ]
    sections += corpus_tables(record, layers, listed, options, screen)
    of_layers = [
        (layer, [head for head in listed if head in layer.record.heads]) for layer in layers
    ]
    is_chosen = (options.layers is not None or options.heads is not None) and len(
        listed
    ) <= MAX_DRAWN
    if record.corpus is not None and is_chosen:
        sections.append(
            Group(*table(cells_table(record, record.corpus, layers, listed), screen.width))
        )
    elif has_all and is_chosen:
        for layer, of_layer in (each for each in of_layers if each[1]):
            title = Text(layer.inspected.label, style="bold")
            sections.append(Group(title, strong_places(layer.record, of_layer, options, screen)))
    sections += (
        token_tables(record, sequences, options, screen)
        if options.tokens or options.verbose
        else ()
    )
    if any("span_mass" in layer.record.arrays for layer in layers):
        sections.append(span_view(record, layers, sequences.shown, options, screen))
    n_drawn = len(of_layers) if options.everything or options.layers is not None else MAX_DRAWN
    of_maps = [(layer.record, layer.inspected.label) for layer, _ in of_layers[:n_drawn]]
    sections += [maps_view(of_maps, b, options, screen) for b in sequences.shown if options.maps]
    for layer, of_layer in of_layers[:n_drawn]:
        sections += cells_view(layer.record, of_layer, options, screen, layer.inspected.label)
    if options.maps and len(of_layers) > n_drawn:
        sections.append(hidden(len(of_layers) - n_drawn, "layer", "--all or --layer"))
    sections.append(Group(header, checks) if is_asked else checks)
    return spaced(sections)


def listed_heads(
    record: Record, heads: Sequence[HeadStatistics], options: ViewOptions
) -> tuple[tuple[HeadStatistics, ...], str]:
    """The heads with a table row, in order, and how they were selected if not all: by the requested
    order, or by excess.
    """
    effects = [name for name in _EFFECTS if any(getattr(head, name) is not None for head in heads)]
    sort = effects[0] if effects and options.sort == "head" else options.sort
    ordered = in_order(heads, sort)
    n_layers = len({(head.layer, head.attention) for head in heads})
    ranked = MAX_RANKED if record.corpus is None else MAX_OF_CORPUS
    limit = MAX_LISTED if n_layers == 1 else ranked
    is_table = any(head.control is not None for head in heads)  # requested: all are shown
    if options.everything or is_table or len(ordered) <= limit:
        return ordered, ""
    typed = [head for head in heads if head.kind not in UNTYPED]
    if sort == "head" and n_layers > 1 and typed:
        listed = in_order(typed, "certainty")[:limit]
        description = (
            f"{len(listed)} of {len(ordered)} heads, by excess over uniform, mixed left out"
        )
    else:
        listed, by = ordered[:limit], "" if sort == "head" else f" by {sort}"
        description = f"the first {len(listed)} of {len(ordered)} heads{by}"
    return listed, description


def _sinks(
    record: Record, layers: Sequence[LayerView], heads: Sequence[HeadStatistics], screen: Screen
) -> Text:
    """The sink keys of all heads."""
    if record.corpus is not None:
        by_token = [
            (f"“{token_label(sink.token)}”", sink.documents / record.corpus.n_documents, name)
            for name, head in _by_key(record.corpus, layers, record).values()
            for sink in head.sinks
        ]
        return sinks_text(
            by_token, "sinks by token", "layer.head ", screen.width, " of the documents"
        )
    views = {(layer.inspected.layer, layer.inspected.name): layer for layer in layers}
    found = []
    for head in heads:
        layer = views[head.layer, head.attention]
        stack = (
            "encoder "
            if record.context is not None and layer.inspected.kind in ("encoder", "cross")
            else ""
        )
        name = f"{short_name(layer.inspected, record.layers)}.{head.head}"
        for sink in head.sink_keys:
            found.append(
                (
                    f"{stack}{token_name(layer.record.keys, sink.sequence, sink.key)}",
                    sink.share,
                    name,
                )
            )
    return sinks_text(found, sinks_are(survey_of(record).sink_share), "layer.head ", screen.width)


# ------------------------------------------------------------------------------------ grid of heads


def grid(record: Record, layers: Sequence[LayerView], screen: Screen) -> RenderableType:
    """A grid with a row per layer and a column per head, grouped by the kind of layer, and the
    number of heads by type. A layer without attention has its type and no heads, and one that is
    not verified a !.
    """
    kinds = [*dict.fromkeys(layer.inspected.kind for layer in layers)]
    rows: list[tuple[int, int, str, Sequence[HeadStatistics]]] = []
    for layer in layers:
        of = layer.inspected
        name = short_name(of, record.layers) + ("" if of.verified else " !")
        rows.append((kinds.index(of.kind), of.layer, name, layer.record.heads))
    if record.model is not None and len(layers) == len(record.layers):
        group = int(kinds[0] == "encoder" and len(kinds) > 1)
        rows += [
            (group, of.layer, f"{of.layer} {visible(of.type)}", ()) for of in record.model.without
        ]
    rows.sort(key=lambda row: row[:2])
    n_heads = max(layer.inspected.n_heads for layer in layers)
    signs = [[(" ", Style.null())] * n_heads for _ in rows]
    heads = [(place, head) for place, row in enumerate(rows) for head in row[3]]
    for place, head in heads:
        signs[place][head.head] = type_sign(head.kind)
    width = max(len("layer ↓ head →"), *(cell_len(name) for _, _, name, _ in rows))
    shown = Grid(
        values=np.zeros((len(rows), n_heads)),
        allowed=np.ones((len(rows), n_heads), bool),
        rows=[f"{name:>{width}}" for _, _, name, _ in rows],
        columns=[str(head) for head in range(n_heads)],
        top=1.0,
        corner="layer ↓ head →",
        signs=signs,
        has_all_rows=True,
    )
    return Group(
        *grids([shown], screen, form="shades"),
        flowing(types_of([head for _, head in heads]), screen.width),
    )


# -------------------------------------------------------------------------------------------- spans

_MAX_ROWS, _NAME_WIDTH = 24, 12


def span_view(
    record: Record,
    layers: Sequence[LayerView],
    sequences: Sequence[int],
    options: ViewOptions,
    screen: Screen,
) -> RenderableType:
    """Rows per layer or chosen head, one for each attending span, and the weight of each attended
    span.
    """
    names = [fitted(token_label(span.name), _NAME_WIDTH) for span in record.spans]
    rows: list[Sequence[str]] = []
    for layer in layers:
        if "span_mass" in layer.record.arrays:
            rows += _span_rows(
                short_name(layer.inspected, record.layers), layer.record, names, sequences, options
            )
    headings = ["layer", "from", *(f"to {name}" for name in names)]
    columns: list[Column[Sequence[str]]] = [
        Column(heading=heading, value=itemgetter(place), unit="word" if heading == "from" else "id")
        for place, heading in enumerate(headings)
    ]
    over = [
        "the tokens of a row",
        *["heads"] * (options.heads is None),
        *["sequences"] * (len(sequences) > 1),
    ]
    legend = [
        f"the weight of all tokens of a span together, averaged over {' and '.join(over)}",
        "×: its ratio to uniform attention over the same keys, which favours no long span",
    ]
    most = None if options.everything else _MAX_ROWS
    of = Table(
        columns=columns, rows=rows, most=most, has_ends=True, title="between spans", legend=legend
    )
    return Group(*table(of, screen.width))


def _span_rows(
    name: str, view: Record, names: Sequence[str], sequences: Sequence[int], options: ViewOptions
) -> Iterator[Sequence[str]]:
    """The rows of a layer, or of each of its chosen heads: its name, the attending span, and of
    each attended span the weight and its ratio to uniform attention, means of finite numbers.
    """

    def words(weight: float, uniform: float) -> str:
        ratio = weight / uniform if uniform > 0 else None
        return (
            "–"
            if np.isnan(weight)
            else f"{shown(weight, 'weight', options.precision)} ×{shown(ratio, 'short')}"
        )

    kept = (
        view.arrays[key][list(sequences)].astype(np.float64)
        for key in ("span_mass", "uniform_span_mass")
    )
    of_heads = np.broadcast_arrays(*kept)
    chosen = [place for place, head in enumerate(view.heads) if head.head in (options.heads or ())]
    groups = {f"{name} · head {view.heads[place].head}": [place] for place in chosen}
    if options.heads is None:
        groups = {name: [*range(len(view.heads))]}
    for label, heads in groups.items():
        mass, uniform = (
            np.ma.masked_invalid(of[:, heads]).mean(axis=(0, 1)).filled(np.nan) for of in of_heads
        )
        for query, span in enumerate(names):
            yield "" if query else label, span, *map(words, mass[query], uniform[query])


# ------------------------------------------------------------------------------------------ corpora

_MOST_CELLS, _MOST_EFFECTS = 3, 8
"""The largest number of cells of a head, and of effects listed."""
_FORMS: dict[str, tuple[Unit, int]] = {
    row.field: ("weight", 3) for row in STATISTICS if row.unit == "weight"
}
_FORMS |= {row.field: ("fraction", 1) for row in STATISTICS if row.unit == "fraction"}
_FORMS |= {"d_logit": ("brief", 3), "d_output": ("brief", 3)}
"""The form of a number that is no score, with decimals."""
_Named = tuple[str, CorpusHead]
_Row = tuple[str, CorpusHead, Spread]
"""The name of a head, such as `5.1`, the head, and the distribution of a statistic of it."""


def _by_key(
    corpus: CorpusSummary, layers: Sequence[LayerView], record: Record
) -> Mapping[tuple[Any, ...], _Named]:
    """The heads of some layers by layer, attention and number."""
    names = {
        (of.inspected.layer, of.inspected.name): short_name(of.inspected, record.layers)
        for of in layers
    }
    return {
        (head.layer, head.attention, head.head): (
            f"{names[head.layer, head.attention]}.{head.head}",
            head,
        )
        for head in corpus.heads
        if (head.layer, head.attention) in names
    }


def corpus_tables(
    record: Record,
    layers: Sequence[LayerView],
    listed: Sequence[HeadStatistics],
    options: ViewOptions,
    screen: Screen,
) -> Iterator[RenderableType]:
    """The spread of statistics over documents, and the effect of removing heads; nothing for a
    record of no corpus.
    """
    if record.corpus is None:
        return
    heads = _by_key(record.corpus, layers, record)
    of_types = []
    for head in listed:
        nearest = nearest_type(head)
        field = HEAD_TYPES[head.kind if nearest is None else nearest[0]]
        field = "entropy_share" if field in (None, "", "at_offset") else field
        of_types.append((*heads[head.layer, head.attention, head.head], field))
    spreads = [
        (name, head, spread)
        for name, head, field in of_types
        if (spread := head.spread(field)) is not None
    ]
    yield Group(*table(_spreads(spreads), screen.width, "interval: bootstrap of the mean"))
    chosen = [row for row in heads.values() if options.shows_head(row[1].head)]
    for metric in _EFFECTS:
        removed = [
            (name, head, spread)
            for name, head in chosen
            if (spread := head.spread(metric)) is not None
        ]
        if removed:
            yield Group(
                *table(_effects(removed, metric, everything=options.everything), screen.width)
            )
            return


def _spreads(rows: Sequence[_Row]) -> Table[_Row]:
    """A row per head: the fraction of documents with its type, and the distribution of the type's
    statistic.
    """
    words = words_of("columns", "statistic")
    meaning = "documents where the head has this type"
    columns: list[Column[_Row]] = [
        Column(heading="head", value=lambda row: row[0]),
        Column(heading="agree", value=lambda row: row[1].agree, unit="fraction", meaning=meaning),
        Column(
            heading="statistic",
            value=lambda row: words[row[2].statistic].heading or row[2].statistic,
        ),
        *_distribution("mean"),
    ]
    return Table(columns=columns, rows=rows, title="spread over documents")


def _distribution(heading: str) -> Iterator[Column[_Row]]:
    """The columns of a distribution over documents: the mean, its interval, and where most
    documents lie.
    """

    def words(spread: Spread, *numbers: float | None) -> str | None:
        texts = [
            shown(number, *_FORMS.get(spread.statistic, ("short", None))) for number in numbers
        ]
        return None if None in numbers else " to ".join(texts)

    yield Column(heading=heading, value=lambda row: words(row[2], row[2].mean), unit="id")
    percent = f"{100 * CONFIDENCE:.0f} % interval"
    yield Column(
        heading=percent, value=lambda row: words(row[2], row[2].low, row[2].high), unit="id", drop=2
    )
    yield Column(
        heading="5 to 95 % of documents",
        value=lambda row: words(row[2], row[2].quantiles[0], row[2].quantiles[-1]),
        unit="id",
        drop=1,
    )


def _effects(rows: Sequence[_Row], metric: str, *, everything: bool) -> Table[_Row]:
    """The effect of removing each head, the largest mean first."""
    word = words_of("columns", "effect")[metric]
    return Table(
        columns=[Column(heading="removed", value=lambda row: row[0]), *_distribution(word.heading)],
        rows=sorted(rows, key=lambda row: -abs(row[2].mean)),
        title="removing a head, mean over documents",
        most=None if everything else _MOST_EFFECTS,
        legend=[f"{word.heading} = {word.legend}, at the first [MASK], else at the last token"],
    )


def cells_table(
    record: Record,
    corpus: CorpusSummary,
    layers: Sequence[LayerView],
    listed: Sequence[HeadStatistics],
) -> Table[Mapping[str, Any]]:
    """The cells of some heads with the largest ratio to uniform in the corpus, each with its
    document and positions.
    """
    heads, rows = _by_key(corpus, layers, record), []
    for head in listed:
        name, of_corpus = heads[head.layer, head.attention, head.head]
        for cell in of_corpus.cells[:_MOST_CELLS]:
            query = token_at(token_label(cell.query_token), cell.query)
            key = token_at(token_label(cell.key_token), cell.key)
            document = visible(named(cell.file, cell.place, cell.n_documents))
            numbers = {"weight": cell.share, "× uniform": cell.lift}
            rows.append(
                {"head": name, "query → key": f"{query} → {key}", **numbers, "document": document}
            )
    columns = fields(
        {
            "head": "word",
            "query → key": "word",
            "weight": "weight",
            "× uniform": "short",
            "document": "word",
        }
    )
    return Table(columns=columns, rows=rows, title="cells that stand out most")
