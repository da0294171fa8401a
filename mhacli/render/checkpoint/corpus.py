"""The terminal view of a corpus: distributions over documents, sinks, effects and cells of the heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.record.corpus import CONFIDENCE, CorpusHead, CorpusSummary, Spread, named
from mhacli.record.glossary import words_of
from mhacli.record.heads import HEAD_TYPES, STATISTICS, HeadStatistics, nearest_type
from mhacli.record.record import Record
from mhacli.render.base.doc import Column, Table, fields
from mhacli.render.base.format import token_at
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import LayerView, short_name
from mhacli.render.base.terminal import table
from mhacli.render.heads.view import sinks_text
from mhacli.text.escape import token_label, visible
from mhacli.text.numbers import Unit, shown

_MOST_CELLS, _MOST_EFFECTS = 3, 8
"""The largest number of cells of a head, and of effects listed."""
_UNITS: dict[str, Unit] = {row.field: "weight" for row in STATISTICS if row.unit in ("weight", "fraction")}
_UNITS |= {"d_logit": "change", "d_output": "size"}
_Named = tuple[str, CorpusHead]
_Row = tuple[str, CorpusHead, Spread]
"""The name of a head, such as `5.1`, the head, and the distribution of a statistic of it."""


def _by_key(corpus: CorpusSummary, layers: Sequence[LayerView], record: Record) -> Mapping[tuple[Any, ...], _Named]:
    """The heads of some layers by layer, attention and number."""
    names = {(of.inspected.layer, of.inspected.name): short_name(of.inspected, record.layers) for of in layers}
    return {
        (head.layer, head.attention, head.head): (f"{names[head.layer, head.attention]}.{head.head}", head)
        for head in corpus.heads
        if (head.layer, head.attention) in names
    }


def corpus_sinks(corpus: CorpusSummary, layers: Sequence[LayerView], record: Record, screen: Screen) -> Text:
    """The sink tokens of all heads, by the documents that have them."""
    found = [
        (f"“{token_label(sink.token)}”", sink.documents / corpus.n_documents, name)
        for name, head in _by_key(corpus, layers, record).values()
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
    if record.corpus is None:
        return
    heads = _by_key(record.corpus, layers, record)
    of_types = [(*heads[head.layer, head.attention, head.head], _field(head)) for head in listed]
    spreads = [(name, head, spread) for name, head, field in of_types if (spread := head.spread(field)) is not None]
    yield Group(*table(_spreads(spreads), screen.width, "interval: bootstrap of the mean"))
    for metric in ("d_logit", "d_output"):
        found = [(name, head, spread) for name, head in heads.values() if (spread := head.spread(metric)) is not None]
        if found:
            chosen = [row for row in found if options.heads is None or row[1].head in options.heads]
            yield Group(*table(_effects(chosen, metric, everything=options.everything), screen.width))
            return


def _spreads(rows: Sequence[_Row]) -> Table[_Row]:
    """A row per head: the fraction of documents with its type, and the distribution of the type's statistic."""
    words = words_of("columns", "statistic")
    meaning = "documents where the head has this type"
    columns: list[Column[_Row]] = [
        Column(heading="head", value=lambda row: row[0]),
        Column(heading="agree", value=lambda row: row[1].agree, unit="percent", meaning=meaning),
        Column(heading="statistic", value=lambda row: words[row[2].statistic].heading or row[2].statistic),
        *_distribution("mean"),
    ]
    return Table(columns=columns, rows=rows, title="spread over documents")


def _distribution(heading: str) -> Iterator[Column[_Row]]:
    """The columns of a distribution over documents: the mean, its interval, and where most documents lie."""

    def words(spread: Spread, *numbers: float | None) -> str | None:
        unit = _UNITS.get(spread.statistic, "short")
        texts = [shown(number, unit, 3 if unit == "weight" else None) for number in numbers]
        return None if None in numbers else " to ".join(texts)

    yield Column(heading=heading, value=lambda row: words(row[2], row[2].mean), unit="id")
    percent = f"{100 * CONFIDENCE:.0f} % interval"
    yield Column(heading=percent, value=lambda row: words(row[2], row[2].low, row[2].high), unit="id", drop=2)
    yield Column(
        heading="5 to 95 % of documents",
        value=lambda row: words(row[2], row[2].quantiles[0], row[2].quantiles[-1]),
        unit="id",
        drop=1,
    )


def _field(head: HeadStatistics) -> str:
    """The statistic of a head's type, or of its nearest type; the entropy if there is none."""
    nearest = nearest_type(head)
    name = HEAD_TYPES[head.kind if nearest is None else nearest[0]]
    return name if name and name != "at_offset" else "entropy_share"


def _effects(rows: Sequence[_Row], metric: str, *, everything: bool) -> Table[_Row]:
    """The effect of removing each head, the largest mean first."""
    heading, meaning = words_of("columns", "effect")[metric].heading, "length of the change of the output"
    columns: list[Column[_Row]] = [Column(heading="removed", value=lambda row: row[0]), *_distribution(heading)]
    if metric == "d_logit":
        meaning = "change of the logit of the predicted token (negative: the head supports it)"
        columns.append(Column(heading="KL", value=_kl, unit="number", meaning="divergence in nats"))
    return Table(
        columns=columns,
        rows=sorted(rows, key=lambda row: -abs(row[2].mean)),
        title="removing a head, mean over documents",
        most=None if everything else _MOST_EFFECTS,
        legend=[f"{heading} = {meaning}, at the first [MASK], else at the last token"],
    )


def _kl(row: _Row) -> float | None:
    spread = row[1].spread("kl")
    return None if spread is None else spread.mean


def cells_table(
    record: Record, corpus: CorpusSummary, layers: Sequence[LayerView], listed: Sequence[HeadStatistics]
) -> Table[Mapping[str, Any]]:
    """The cells of some heads with the largest ratio to uniform in the corpus, each with its document and positions."""
    heads, rows = _by_key(corpus, layers, record), []
    for head in listed:
        name, of_corpus = heads[head.layer, head.attention, head.head]
        for cell in of_corpus.cells[:_MOST_CELLS]:
            query = token_at(token_label(cell.query_token), cell.query)
            key = token_at(token_label(cell.key_token), cell.key)
            document = visible(named(cell.file, cell.place, cell.n_documents))
            numbers = {"weight": cell.share, "× uniform": cell.lift}
            rows.append({"head": name, "query → key": f"{query} → {key}", **numbers, "document": document})
    columns = fields(
        {"head": "word", "query → key": "word", "weight": "weight", "× uniform": "short", "document": "word"}
    )
    return Table(columns=columns, rows=rows, title="cells that stand out most")
