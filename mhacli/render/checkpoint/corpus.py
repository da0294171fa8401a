"""The terminal view of a corpus: distributions over documents, sinks, effects and cells of the heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.record.corpus import CONFIDENCE, CorpusCell, CorpusHead, CorpusSummary, Spread, named
from mhacli.record.glossary import words_of
from mhacli.record.heads import HEAD_TYPES, STATISTICS, HeadStatistics, nearest_type
from mhacli.record.record import Record
from mhacli.render.base.doc import Column, Row, Table
from mhacli.render.base.format import token_at
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import LayerView, short_name
from mhacli.render.base.terminal import table
from mhacli.render.heads.view import sinks_text
from mhacli.text.escape import token_label, visible
from mhacli.text.numbers import Unit, shown

MAX_CELLS, MAX_EFFECTS = 3, 8
"""The largest number of cells of a head, and of effects listed."""
INTERVAL, PART = f"{100 * CONFIDENCE:.0f} % interval", "5 to 95 % of documents"
_INTERVAL_NOTE = "interval: bootstrap of the mean"
_UNITS: dict[str, Unit] = {row.field: "weight" for row in STATISTICS if row.unit in ("weight", "fraction")}
_UNITS |= {"d_logit": "change", "d_output": "size"}


def corpus_sinks(corpus: CorpusSummary, layers: Sequence[LayerView], record: Record, screen: Screen) -> Text:
    """The sink tokens of all heads, by the documents that have them."""
    found = [
        (
            f"“{token_label(sink.token)}”",
            sink.documents / corpus.n_documents,
            f"{short_name(layer.inspected, record.layers)}.{head.head}",
        )
        for layer, head in _of_layers(corpus, layers)
        for sink in head.sinks
    ]
    return sinks_text(found, "sinks by token", "layer.head ", screen.width, " of the documents")


def corpus_tables(
    record: Record,
    layers: Sequence[LayerView],
    listed: Sequence[HeadStatistics],
    options: ViewOptions,
    screen: Screen,
) -> Iterator[RenderableType]:
    """The spread of statistics over documents, and the effect of removing heads; nothing for a record of no corpus."""
    if record.corpus is not None:
        yield Group(*table(_spread_table(record.corpus, record, listed), screen.width, _INTERVAL_NOTE))
        yield from _effects(record.corpus, layers, record, options, screen)


def _spread_table(corpus: CorpusSummary, record: Record, listed: Sequence[HeadStatistics]) -> Table[HeadStatistics]:
    """A row per head: the fraction of documents with its type, and the distribution of the type's statistic."""
    heads = {(corpus_head.layer, corpus_head.attention, corpus_head.head): corpus_head for corpus_head in corpus.heads}
    names = {(layer.layer, layer.name): short_name(layer, record.layers) for layer in record.layers}

    def of_corpus(head: HeadStatistics) -> CorpusHead:
        return heads[head.layer, head.attention, head.head]

    def spread(head: HeadStatistics) -> Spread | None:
        return of_corpus(head).spread(_field(head))

    def heading(head: HeadStatistics) -> str:
        name = _field(head)
        return words_of("columns", "statistic")[name].heading or name

    columns: list[Column[HeadStatistics]] = [
        Column(heading="layer", value=lambda head: names[head.layer, head.attention], unit="id"),
        Column(heading="head", value=lambda head: head.head, unit="id"),
        Column(
            heading="agree",
            value=lambda head: of_corpus(head).agree,
            unit="percent",
            meaning="documents where the head has this type",
        ),
        Column(heading="statistic", value=heading),
        *_of_spread(spread),
    ]
    return Table(columns=columns, rows=listed, title="spread over documents")


def _of_spread(spread: Callable[[Row], Spread | None], heading: str = "mean") -> list[Column[Row]]:
    """The columns of a distribution over documents: the mean, its interval, and where most documents lie."""

    def cell(words: Callable[[Spread], str | None]) -> Callable[[Row], str | None]:
        return lambda row: None if (found := spread(row)) is None else words(found)

    return [
        Column(heading=heading, value=cell(lambda of: _number(of, of.mean)), unit="id"),
        Column(heading=INTERVAL, value=cell(_interval), unit="id", drop=2),
        Column(
            heading=PART,
            value=cell(lambda of: f"{_number(of, of.quantiles[0])} to {_number(of, of.quantiles[-1])}"),
            unit="id",
            drop=1,
        ),
    ]


def _number(spread: Spread, number: float) -> str:
    """A number of a distribution, in the form of its statistic."""
    unit = _UNITS.get(spread.statistic, "short")
    return shown(number, unit, 3 if unit == "weight" else None)


def _interval(spread: Spread) -> str | None:
    if spread.low is None or spread.high is None:
        return None
    return f"{_number(spread, spread.low)} to {_number(spread, spread.high)}"


def _field(head: HeadStatistics) -> str:
    """The statistic of a head's type, or of its nearest type; the entropy if there is none."""
    nearest = nearest_type(head)
    name = HEAD_TYPES[head.kind if nearest is None else nearest[0]]
    return name if name and name != "at_offset" else "entropy_share"


def _effects(
    corpus: CorpusSummary, layers: Sequence[LayerView], record: Record, options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The effect of removing each head, or those of some numbers, the largest mean first; empty without removals."""
    metric = next((name for name in ("d_logit", "d_output") if any(head.spread(name) for head in corpus.heads)), None)
    if metric is None:
        return
    rows = [
        (f"{short_name(layer.inspected, record.layers)}.{head.head}", head, change)
        for layer, head in _of_layers(corpus, layers)
        if (options.heads is None or head.head in options.heads) and (change := head.spread(metric)) is not None
    ]
    has_kl = metric == "d_logit"
    columns: list[Column[tuple[str, CorpusHead, Spread]]] = [
        Column(heading="removed", value=lambda row: row[0]),
        *_of_spread(lambda row: row[2], words_of("columns", "effect")[metric].heading),
    ]
    if has_kl:
        columns.append(Column(heading="KL", value=lambda row: _kl(row[1]), unit="number", meaning="divergence in nats"))
    meaning = "change of the logit of the predicted token" if has_kl else "length of the change of the output"
    notes = [f"{columns[1].heading} = {meaning}, at the first [MASK], else at the last token"]
    notes += ["negative: the head supports the token"] if has_kl else []
    removals = Table(
        columns=columns,
        rows=sorted(rows, key=lambda row: -abs(row[2].mean)),
        title="removing a head, mean over documents",
        most=None if options.everything else MAX_EFFECTS,
    )
    yield Group(*table(removals, screen.width, *notes))


def _kl(head: CorpusHead) -> float | None:
    spread = head.spread("kl")
    return None if spread is None else spread.mean


def cells_view(corpus: CorpusSummary, layers: Sequence[LayerView], listed: Sequence[HeadStatistics]) -> Iterator[Text]:
    """The cells of some heads with the largest ratio to uniform in the corpus, each with its document and positions."""
    keys = {(head.layer, head.attention, head.head) for head in listed}
    lines = [Text("stands out most: document, query → key", style="bold")]
    for layer, head in _of_layers(corpus, layers):
        if (head.layer, head.attention, head.head) in keys:
            name = f"{layer.inspected.label}, head {head.head}"
            lines += [Text(f"{name}: {_cell(cell)}") for cell in head.cells[:MAX_CELLS]]
    yield Text("\n").join(lines)


def _cell(cell: CorpusCell) -> str:
    place = visible(named(cell.file, cell.place, cell.n_documents))
    tokens = (
        f"{token_at(token_label(cell.query_token), cell.query)} → {token_at(token_label(cell.key_token), cell.key)}"
    )
    return f"{place}, {tokens}: {shown(cell.share, 'weight', 2)}, × {shown(cell.lift, 'short')} of uniform"


def _of_layers(corpus: CorpusSummary, layers: Sequence[LayerView]) -> Iterator[tuple[LayerView, CorpusHead]]:
    views = {(layer.inspected.layer, layer.inspected.name): layer for layer in layers}
    shown = {(*layer_key, head.head) for layer_key, layer in views.items() for head in layer.record.heads}
    for head in corpus.heads:
        if (head.layer, head.attention, head.head) in shown:
            yield views[head.layer, head.attention], head
