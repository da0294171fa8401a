"""The terminal view of a checkpoint's record: the model, all heads of all layers, the tokens,
chosen details, and of a corpus the distributions over documents.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, repeat
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.style import Style
from rich.text import Text

from mhacli.io.data import Array
from mhacli.numbers import Unit, shown
from mhacli.record.corpus import CONFIDENCE, CorpusHead, CorpusSummary, Spread, named
from mhacli.record.glossary import words_of
from mhacli.record.heads import (
    STATISTICS,
    UNTYPED,
    HeadStatistics,
    in_order,
    where_possible,
)
from mhacli.record.record import CheckpointRecord, LayerView, Record
from mhacli.render.base.colours import KIND_SIGNS, type_sign
from mhacli.render.base.doc import Column, Grid, Table, fields
from mhacli.render.base.format import fitted, flowing, plural, random_line, token_at, type_text
from mhacli.render.base.grids import MAX_LINES, grids
from mhacli.render.base.options import Screen, Selection, ViewOptions, sequences_to_draw
from mhacli.render.base.selection import (
    DrawableHead,
    chosen_heads,
    chosen_layers,
    drawable_heads,
    grouped,
    names_of,
    ranges,
    require_inspected_heads,
)
from mhacli.render.base.terminal import bare, spaced, table
from mhacli.render.base.tokens import hidden, token_tables
from mhacli.render.heads.head_map import (
    HeadMap,
    TitledMap,
    head_map,
    kv_head_of,
    maps_view,
    patterns,
    where,
)
from mhacli.render.heads.table import (
    MEASURED_AT,
    SinkOfHead,
    deciding_statistic,
    head_key,
    heads_table,
    sinks_line,
    sinks_text,
    types_of,
)
from mhacli.render.heads.view import cells_view, strong_places
from mhacli.text.escape import token_label, visible

from .header import checks_view, model_header
from .patterns import WORDS_CAPTION, mean_map, queries_of, words_map

_EFFECTS = ("d_logit", "d_output")
"""What ranks removals: the first number that they have."""
MAX_LISTED = 24
"""The most heads in the table of one layer."""
MAX_RANKED = 8
"""The most heads in the table of several layers."""
MAX_OF_CORPUS = 4
"""The most heads in each of the two tables of a corpus."""
MAX_PATTERNS = 16
"""The most patterns that are drawn without a request of them all."""
HINT = "--layer N --head H draws a pattern"
MAX_DRAWN = 8
"""The most heads, and the most layers, whose single cells are shown."""


@dataclass(frozen=True)
class _Content:
    """What is shown of a checkpoint's record. Of the chosen `heads` the table has those that are
    `listed`, and `remark` says how they were selected if they are not all.
    """

    record: CheckpointRecord
    layers: Sequence[LayerView]
    heads: Sequence[HeadStatistics]
    listed: Sequence[HeadStatistics]
    remark: str
    sequences: Selection
    options: ViewOptions
    screen: Screen

    @property
    def has_all(self) -> bool:
        """Whether every detail was requested."""
        return self.options.verbose or self.options.everything

    @property
    def has_patterns(self) -> bool:
        """Whether layers or heads were chosen for their patterns, and one can be drawn. In a record
        with spans, layers are chosen for span masses.
        """
        options = self.options
        has_layers = options.layers is not None and not self.record.spans
        return (has_layers or options.heads is not None) and self.can_draw

    @property
    def has_statistics(self) -> bool:
        """Whether the statistics of heads were computed, as they are unless weights are foreign."""
        return not self.heads or any(head.certainty is not None for head in self.heads)

    @property
    def can_draw(self) -> bool:
        """Whether patterns are wanted, and there is one."""
        has_any = any(layer.has_pattern for layer in self.layers)
        return has_any and self.options.view != "none"

    @property
    def is_of_one_head(self) -> bool:
        """Whether one head was chosen: its pattern comes first, and the model last."""
        return self.has_patterns and len(self.listed) == 1 and not self.has_all

    def listed_in(self, layer: LayerView) -> list[HeadStatistics]:
        """The heads of a layer that the table has."""
        return [head for head in self.listed if head in layer.record.heads]

    def remarks(self) -> list[Text]:
        """The line above the table."""
        more = "--all, --sort" if self.record.scan else "--all, --layer N, --sort"
        return [Text(f"{self.remark} ({more})", "dim")] if self.remark else []

    def header(self) -> RenderableType:
        """The model and how it was inspected."""
        return model_header(self.record, self.screen, in_brief=not self.options.verbose)

    def checks(self) -> Text:
        """The verdict."""
        return checks_view(self.record, self.screen, in_detail=self.options.verbose)


def layers_view(record: CheckpointRecord, options: ViewOptions, screen: Screen) -> RenderableType:
    """The complete view of a checkpoint's record: of chosen heads their patterns first. Raises
    `UsageError` for a layer, head or sequence that the record lacks.
    """
    layers = chosen_layers(record, options)
    heads = chosen_heads(record, options)
    require_inspected_heads(layers, options.maps)
    sequences = sequences_to_draw(options, len(record.sequences))
    listed, remark = listed_heads(record, heads, options)
    content = _Content(record, layers, heads, listed, remark, sequences, options, screen)
    first = list[RenderableType]()
    if options.brief or content.is_of_one_head:  # their header stands below, or is left out
        first += random_line(record)
    if options.brief:
        rows = bare(heads_table(record, listed, options), screen.width)
        return Group(*first, *content.remarks(), rows, Text(""), content.checks())
    return spaced([*first, *(section for block in _BLOCKS for section in block(content))])


# -------------------------------------------------------------------------------- blocks of a view


def _heads(content: _Content) -> Iterator[RenderableType]:
    """The model, an overview of its heads, and their table with chosen patterns before it; of one
    head its pattern and its row alone.
    """
    record = content.record
    options = content.options
    screen = content.screen
    patterns = Group(*_patterns(content))
    if not content.has_statistics:
        yield content.header()
        yield patterns
        yield Text("without statistics of heads", "dim")
        return
    rows = heads_table(record, content.listed, options)
    numbers = Group(*content.remarks(), *table(rows, screen.width, has_all=options.verbose))
    if content.is_of_one_head:
        yield Group(patterns, numbers)
        return
    yield content.header()
    if not content.has_patterns:
        yield _overview(content)
        yield Group(numbers, patterns)
        return
    yield patterns
    yield numbers
    if content.has_all or options.heads is None:
        yield _overview(content)


def _patterns(content: _Content) -> Iterator[RenderableType]:
    """The patterns of chosen layers or heads on a common scale; without a choice, how to choose."""
    options = content.options
    if not content.has_patterns:
        if content.can_draw and options.rows is not None and not content.record.spans:
            yield from _mean_rows(content)
        if content.can_draw:
            yield Text(HINT, "dim")
        return
    missing = [layer.inspected for layer in content.layers if not layer.has_pattern]
    if missing:
        why = "is not in this record, so it is not drawn; --keep-limit makes room"
        yield Text(f"the pattern of {names_of(missing)} {why}", "yellow")
    heads = [head for head in drawable_heads(content.record, options) if head.layer.has_pattern]
    chosen = [*product(heads, content.sequences.shown)]
    n_heads = len(chosen)
    is_requested = options.everything or (options.layers is not None and options.heads is not None)
    most = None
    if not is_requested:
        most = MAX_LINES
        chosen = chosen[:MAX_PATTERNS]
        if options.view == "auto" and options.rows is None:
            options = replace(options, view="heatmap")
    maps = [_titled_map(head, b, options, is_alone=n_heads == 1) for head, b in chosen]
    yield from patterns(maps, options, content.screen, most=most, n_more=n_heads - len(maps))
    yield from _captions(maps, options)


def _mean_rows(content: _Content) -> Iterator[RenderableType]:
    """What the requested queries attend to, averaged over the heads of all layers of a kind."""
    options = content.options
    listed = replace(options, view="top" if options.view == "auto" else options.view)
    heads = [head for head in drawable_heads(content.record, options) if head.layer.has_pattern]
    texts = grouped(heads, lambda head: (head.layer.inspected.kind, head.record.keys[0].tokens))
    maps = []
    for same, b in product(texts.values(), content.sequences.shown):
        kind = same[0].layer.inspected.kind
        layers = [*dict.fromkeys(head.layer.inspected.layer for head in same)]
        label = f"{'' if kind == 'self' else kind} {plural(len(layers), 'layer')} {ranges(layers)}"
        cells, queries = (
            mean_map([_cells(head, b, options) for head in same]),
            queries_of(same[0], b, options),
        )
        cells = replace(cells, produced=queries.produced)
        rows = cells.of_rows(queries.rows or ())
        if queries.rows:
            title = where(content.record, b, label.strip(), f"mean of {len(same)} heads")
            maps.append(TitledMap(title, rows))
    yield from patterns(maps, listed, content.screen)
    yield from _captions(maps, options)


def _cells(head: DrawableHead, sequence: int, options: ViewOptions) -> HeadMap:
    """The map of a head, of words on request."""
    return words_map(head, sequence) if options.words else head_map(head, sequence)


def _captions(maps: Sequence[TitledMap], options: ViewOptions) -> Iterator[Text]:
    """What names of queries and words mean."""
    if any(cells.is_followed(row) for _, cells in maps for row in range(len(cells.weights))):
        yield Text("a → b: after query a the model generated token b", "dim")
    if options.words:
        yield Text(WORDS_CAPTION, "dim")


def _titled_map(
    head: DrawableHead, sequence: int, options: ViewOptions, *, is_alone: bool
) -> TitledMap:
    """The map of a head with its title, of words on request. A head that `is_alone` has its type in
    words.
    """
    statistics = head.statistics
    queries = queries_of(head, sequence, options)
    cells = _cells(head, sequence, options)
    cells = replace(cells, produced=queries.produced)
    if queries.rows is not None:
        cells = cells.of_rows(queries.rows)
    doubt = "" if head.layer.inspected.verified else "NOT verified"
    kind = "" if statistics.certainty is None else KIND_SIGNS[statistics.kind].sign
    if is_alone and kind:
        kind += f" {type_text(statistics)}"
    label = head.label + kv_head_of(head)
    return TitledMap(where(head.record, sequence, label, doubt, kind), cells)


def _overview(content: _Content) -> RenderableType:
    """The types of all heads, if there are several layers, and their sinks."""
    sinks = _sinks(content)
    if len(content.layers) == 1:
        return Group(sinks)
    return Group(grid(content), sinks)


def _corpus(content: _Content) -> Iterator[RenderableType]:
    """The distributions over documents."""
    return corpus_tables(
        content.record, content.layers, content.listed, content.options, content.screen
    )


def _strong_cells(content: _Content) -> Iterator[RenderableType]:
    """Of a few chosen heads the cells that stand out, in a corpus or on request."""
    record = content.record
    options = content.options
    screen = content.screen
    is_chosen = options.layers is not None or options.heads is not None
    if not is_chosen or len(content.listed) > MAX_DRAWN:
        return
    if record.scan is not None:
        cells = cells_table(record.scan, content.layers, content.listed)
        yield Group(*table(cells, screen.width))
    elif content.has_all:
        for layer in content.layers:
            heads = content.listed_in(layer)
            if heads:
                title = Text(layer.label, "bold")
                yield Group(title, strong_places(layer.record, heads, options, screen))


def _tokens(content: _Content) -> Iterator[RenderableType]:
    """The tokens on request."""
    options = content.options
    if options.tokens or options.verbose:
        yield from token_tables(content.record, content.sequences, options, content.screen)


def _maps(content: _Content) -> Iterator[RenderableType]:
    """The requested maps, and the cells that were kept, of as many layers as have room."""
    options = content.options
    screen = content.screen
    has_all_layers = options.everything or options.layers is not None
    layers = content.layers if has_all_layers else content.layers[:MAX_DRAWN]
    if options.maps:
        for sequence in content.sequences.shown:
            yield maps_view(layers, sequence, options, screen)
    for layer in layers:
        heads = content.listed_in(layer)
        yield from cells_view(layer, heads, options, screen)
    if options.maps and len(layers) < len(content.layers):
        yield hidden(len(content.layers) - len(layers), "layer", "--all or --layer")


def _end(content: _Content) -> Iterator[RenderableType]:
    """The verdict, below the model of a single head."""
    checks = content.checks()
    has_no_header = content.is_of_one_head and content.has_statistics
    yield Group(content.header(), checks) if has_no_header else checks


def sort_of(record: Record, heads: Sequence[HeadStatistics], options: ViewOptions) -> str:
    """The order of the table: as requested, or else by the effects of removals if known, which have
    a table of their own in a scan.
    """
    if record.scan:
        return options.sort
    effects = [name for name in _EFFECTS if any(getattr(head, name) is not None for head in heads)]
    return effects[0] if effects and options.sort == "head" else options.sort


def listed_heads(
    record: Record, heads: Sequence[HeadStatistics], options: ViewOptions
) -> tuple[tuple[HeadStatistics, ...], str]:
    """The heads with a table row, in order, and how they were selected if not all: by the requested
    order, or by excess.
    """
    sort = sort_of(record, heads, options)
    ordered = in_order(heads, sort)
    n_layers = len({(head.layer, head.attention) for head in heads})
    ranked = MAX_RANKED if record.scan is None else MAX_OF_CORPUS
    limit = MAX_LISTED if n_layers == 1 else ranked
    if options.everything or len(ordered) <= limit:
        return ordered, ""
    typed = [head for head in heads if head.kind not in UNTYPED]
    if sort == "head" and n_layers > 1 and typed:
        listed = in_order(typed, "certainty")[:limit]
        part = f"{len(listed)} of {len(ordered)} heads"
        return listed, f"{part}, by excess over uniform, mixed left out"
    by = "" if sort == "head" else f" by {sort}"
    return ordered[:limit], f"the first {limit} of {len(ordered)} heads{by}"


def _sinks(content: _Content) -> Text:
    """The sink keys of all chosen heads."""
    record = content.record
    layers = content.layers
    if record.scan is not None:
        n_documents = record.scan.n_documents
        tokens = [
            SinkOfHead(f"“{token_label(sink.token)}”", sink.documents / n_documents, name)
            for name, head in _by_key(record.scan, layers).values()
            for sink in head.sinks
        ]
        width = content.screen.width
        return sinks_text(tokens, "sinks by token", "layer.head ", width, n_documents)
    return sinks_line(record, layers, content.heads, content.screen)


# ------------------------------------------------------------------------------------ grid of heads


def grid(content: _Content) -> RenderableType:
    """A grid with a row per layer and a column per head, grouped by the kind of layer, and the
    number of heads by type. A layer without attention has its type and no heads, and one that is
    not verified a !.
    """
    screen = content.screen
    rows = sorted(_layer_rows(content), key=lambda row: (row.group, row.layer))
    n_heads = max(layer.inspected.n_heads for layer in content.layers)
    signs = [[(" ", Style.null())] * n_heads for _ in rows]
    for row, signs_of_row in zip(rows, signs, strict=True):
        for head in row.heads:
            signs_of_row[head.head] = type_sign(head.kind)
    width = max(len("layer ↓ head →"), *(cell_len(row.name) for row in rows))
    panel = Grid(
        values=np.zeros((len(rows), n_heads)),
        allowed=np.ones((len(rows), n_heads), bool),
        rows=[f"{row.name:>{width}}" for row in rows],
        columns=[str(head) for head in range(n_heads)],
        top=1.0,
        corner="layer ↓ head →",
        signs=signs,
        has_all_rows=True,
    )
    types = types_of([head for row in rows for head in row.heads])
    return Group(*grids([panel], screen, form="shades"), flowing(types, screen.width))


class _LayerRow(NamedTuple):
    """A layer in the grid of heads. Layers of a `group` stand together, by their number."""

    group: int
    layer: int
    name: str
    heads: Sequence[HeadStatistics] = ()


def _layer_rows(content: _Content) -> Iterator[_LayerRow]:
    """The rows of layers, and, if no layer was left out, those without attention, which belong to
    the decoder of a model with two stacks.
    """
    record, layers = content.record, content.layers
    kinds = [*dict.fromkeys(layer.inspected.kind for layer in layers)]
    for view in layers:
        layer = view.inspected
        name = view.name + ("" if layer.verified else " !")
        yield _LayerRow(kinds.index(layer.kind), layer.layer, name, view.record.heads)
    if len(layers) == len(record.layers):
        group = 1 if kinds[0] == "encoder" and len(kinds) > 1 else 0
        for other in record.model.without:
            yield _LayerRow(group, other.layer, f"{other.layer} {visible(other.type)}")


# -------------------------------------------------------------------------------------------- spans

_MAX_ROWS = 24
"""The most rows of the table of spans."""
_NAME_WIDTH = 12
"""The most characters of the name of a span."""


def _spans(content: _Content) -> Iterator[RenderableType]:
    """The weights between spans, if the record has them: rows per layer or chosen head, one for
    each attending span, and the weight of each attended span.
    """
    layers = [layer for layer in content.layers if "span_mass" in layer.record.arrays]
    if not layers:
        return
    options = content.options
    sequences = content.sequences.shown
    names = [fitted(token_label(span.name), _NAME_WIDTH) for span in content.record.spans]
    rows = [row for layer in layers for row in _span_rows(layer, names, sequences, options)]
    headings = ["layer", "from", *(f"to {name}" for name in names)]
    columns: list[Column[Sequence[str]]] = [
        Column(heading, itemgetter(place), unit="word" if heading == "from" else "id")
        for place, heading in enumerate(headings)
    ]
    axes = ["the tokens of a row"]
    if options.heads is None:
        axes.append("heads")
    if len(sequences) > 1:
        axes.append("sequences")
    weights = Table(
        columns,
        rows,
        most=None if options.everything else _MAX_ROWS,
        has_ends=True,
        title="between spans",
        legend=[
            f"the weight of all tokens of a span together, averaged over {' and '.join(axes)}",
            "×: its ratio to uniform attention over the same keys, which favours no long span",
        ],
    )
    yield Group(*table(weights, content.screen.width))


def _span_rows(
    layer: LayerView, names: Sequence[str], sequences: Sequence[int], options: ViewOptions
) -> Iterator[Sequence[str]]:
    """The rows of a layer, or of each of its chosen heads: its name, the attending span, and of
    each attended span the weight and its ratio to uniform attention, means of finite numbers.
    """

    def words(weight: float, uniform: float) -> str:
        if np.isnan(weight):
            return "–"
        ratio = weight / uniform if uniform > 0 else None
        return f"{shown(weight, 'weight', options.precision)} ×{shown(ratio, 'short')}"

    def mean(weights: Array) -> Array:
        numbers: Array = np.ma.masked_invalid(weights).mean(axis=(0, 1)).filled(np.nan)
        return numbers

    view = layer.record
    places = list(sequences)
    mass, uniform_mass = np.broadcast_arrays(
        view.arrays["span_mass"][places].astype(np.float64),
        view.arrays["uniform_span_mass"][places].astype(np.float64),
    )
    if options.heads is None:
        groups = {layer.name: [*range(len(view.heads))]}
    else:
        groups = {
            f"{layer.name} · head {head.head}": [place]
            for place, head in enumerate(view.heads)
            if head.head in options.heads
        }
    for label, heads in groups.items():
        weights = mean(mass[:, heads])
        uniform = mean(uniform_mass[:, heads])
        for query, span in enumerate(names):
            yield "" if query else label, span, *map(words, weights[query], uniform[query])


_BLOCKS: Sequence[Callable[[_Content], Iterator[RenderableType]]] = (
    _heads,
    _corpus,
    _strong_cells,
    _tokens,
    _spans,
    _maps,
    _end,
)
"""The blocks of the view in their order. Each has any number of sections."""


# ------------------------------------------------------------------------------------------ corpora

_MOST_CELLS = 3
"""The most cells of a head that are listed."""
_MOST_EFFECTS = 8
"""The most effects that are listed."""
_FORMS: dict[str, tuple[Unit, int | None]] = {
    name: ("weight", 3)
    for row in STATISTICS
    if row.unit == "weight"
    for name in (row.field, where_possible(row.field))
}
_FORMS |= {row.field: ("fraction", 1) for row in STATISTICS if row.unit == "fraction"}
_FORMS |= {"d_logit": ("brief", 3), "d_output": ("brief", 3)}
"""The form of a number that is no score, with decimals."""
_SCORE: tuple[Unit, int | None] = ("short", None)
"""The form of a score."""


class _NamedHead(NamedTuple):
    """A head with its name, such as `5.1`."""

    name: str
    head: CorpusHead


class _Row(NamedTuple):
    """A head with its name, and the distribution of one of its statistics."""

    name: str
    head: CorpusHead
    spread: Spread


def _by_key(
    corpus: CorpusSummary, layers: Sequence[LayerView]
) -> Mapping[tuple[Any, ...], _NamedHead]:
    """The heads of some layers by layer, attention and number."""
    names = {(layer.inspected.layer, layer.inspected.name): layer.name for layer in layers}
    heads = {}
    for head in corpus.heads:
        name = names.get((head.layer, head.attention))
        if name is not None:
            key = head.layer, head.attention, head.head
            heads[key] = _NamedHead(f"{name}.{head.head}", head)
    return heads


def corpus_tables(
    record: Record,
    layers: Sequence[LayerView],
    listed: Sequence[HeadStatistics],
    options: ViewOptions,
    screen: Screen,
) -> Iterator[RenderableType]:
    """The spread of statistics over documents, and the effect of removing heads; nothing for a
    record of no scan.
    """
    if record.scan is None:
        return
    heads = _by_key(record.scan, layers)
    of_table = [heads[head_key(head)] for head in listed]
    spreads = _spreads([*_rows(of_table, map(deciding_statistic, listed))])
    yield Group(*table(spreads, screen.width, "interval: bootstrap of the mean"))
    chosen = [
        named_head for named_head in heads.values() if options.shows_head(named_head.head.head)
    ]
    for metric in _EFFECTS:
        removals = [*_rows(chosen, repeat(metric))]
        if removals:
            effects = _effects(removals, metric, everything=options.everything)
            yield Group(*table(effects, screen.width))
            return


def _heading(statistic: str) -> str:
    """The heading of a statistic that makes types."""
    if statistic == "at_offset":
        return "at distance"
    name = statistic.removesuffix(where_possible(""))
    heading = words_of("columns", "statistic")[name].heading
    return heading if name == statistic else f"{heading} if any"


def _rows(heads: Iterable[_NamedHead], statistics: Iterable[str]) -> Iterator[_Row]:
    """The distribution of a statistic of each head, as far as documents have values."""
    for (name, head), statistic in zip(heads, statistics, strict=False):
        spread = head.spread(statistic)
        if spread is not None:
            yield _Row(name, head, spread)


def _spreads(rows: Sequence[_Row]) -> Table[_Row]:
    """A row per head: the fraction of documents with its type, and the distribution of the type's
    statistic.
    """
    meaning = "documents where the head has this type"
    columns: list[Column[_Row]] = [
        Column("head", lambda row: row.name),
        Column("agree", lambda row: row.head.agree, unit="fraction", meaning=meaning),
        Column("statistic", lambda row: _heading(row.spread.statistic)),
        *_distribution("mean"),
    ]
    legends = {
        "at_offset": "at distance: weight at the commonest strongest distance, else 0",
        where_possible(""): "if any: over the queries that see a copy",
    }
    legend = [
        words
        for end, words in legends.items()
        if any(row.spread.statistic.endswith(end) for row in rows)
    ]
    return Table(columns, rows, title="spread over documents", legend=legend)


def _distribution(heading: str) -> Iterator[Column[_Row]]:
    """The columns of a distribution over documents: the mean, its interval, and where most
    documents lie.
    """

    def words(spread: Spread, *numbers: float | None) -> str | None:
        if None in numbers:
            return None
        unit, digits = _FORMS.get(spread.statistic, _SCORE)
        return " to ".join(shown(number, unit, digits) for number in numbers)

    yield Column(heading, lambda row: words(row.spread, row.spread.mean), unit="id")
    yield Column(
        f"{100 * CONFIDENCE:.0f} % interval",
        lambda row: words(row.spread, row.spread.low, row.spread.high),
        unit="id",
        drop=2,
    )
    yield Column(
        "5 to 95 % of documents",
        lambda row: words(row.spread, row.spread.quantiles[0], row.spread.quantiles[-1]),
        unit="id",
        drop=1,
    )


def _effects(rows: Sequence[_Row], metric: str, *, everything: bool) -> Table[_Row]:
    """The effect of removing each head, the largest mean first."""
    word = words_of("columns", "effect")[metric]
    return Table(
        [
            Column("removed", lambda row: row.name),
            *_distribution(word.heading),
        ],
        sorted(rows, key=lambda row: -abs(row.spread.mean)),
        title="removing a head, mean over documents",
        most=None if everything else _MOST_EFFECTS,
        legend=[f"{word.heading} = {word.legend}, {MEASURED_AT}"],
    )


def cells_table(
    corpus: CorpusSummary, layers: Sequence[LayerView], listed: Sequence[HeadStatistics]
) -> Table[Mapping[str, Any]]:
    """The cells of some heads with the largest ratio to uniform in the corpus, each with its
    document and positions.
    """
    heads = _by_key(corpus, layers)
    rows = []
    for statistics in listed:
        name, head = heads[head_key(statistics)]
        for cell in head.cells[:_MOST_CELLS]:
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
    return Table(columns, rows, title="cells that stand out most")
