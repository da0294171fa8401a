"""The terminal view of a corpus: distributions over documents, sinks, effects and cells of the heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.record.corpus import CONFIDENCE, CorpusCell, CorpusHead, CorpusSummary, Spread, named
from mhacli.record.glossary import words_of
from mhacli.record.heads import HEAD_TYPES, STATISTICS, HeadStatistics, nearest_type
from mhacli.record.record import Record
from mhacli.render.base.format import (
    count_of,
    flowing,
    left_out,
    number_text,
    percent_text,
    plain_table,
    short_text,
    token_at,
    weight_text,
)
from mhacli.render.base.options import Screen
from mhacli.render.base.selection import LayerView, short_name
from mhacli.text.escape import token_label, visible

MAX_SINKS, MAX_CELLS, MAX_EFFECTS = 3, 3, 8
"""The largest number of sink tokens, of cells of a head, and of effects listed."""
INTERVAL, PART = f"{100 * CONFIDENCE:.0f} % interval", "5 to 95 % of documents"
_UNITS = {row.field: row.unit for row in STATISTICS}


def corpus_sinks(corpus: CorpusSummary, layers: Sequence[LayerView], record: Record, screen: Screen) -> Text:
    """The sink tokens: the number of heads for each, and the head with most documents."""
    heads_by_token: dict[str, list[tuple[int, str]]] = {}
    for layer, head in _of_layers(corpus, layers):
        for sink in head.sinks:
            name = f"{short_name(layer.inspected, record.layers)}.{head.head}"
            heads_by_token.setdefault(sink.token, []).append((sink.documents, name))
    if not heads_by_token:
        return Text("sinks: none", style="dim")
    ordered = sorted(heads_by_token.items(), key=lambda item: (-sum(n for n, _ in item[1]), item[0]))
    parts: list[Text] = []
    for token, heads in ordered[:MAX_SINKS]:
        n_documents, name_of_largest = max(heads, key=lambda pair: pair[0])
        percentage = percent_text(n_documents / corpus.n_documents)
        unit = "" if parts else "layer.head "  # explained once
        n_heads = count_of(len(heads), "head")
        parts.append(
            Text(
                f"“{token_label(token)}” in {n_heads}, in {percentage} of the documents at most ({unit}{name_of_largest})"
            )
        )
    parts += [Text(f"{len(ordered) - MAX_SINKS:,} others")] if len(ordered) > MAX_SINKS else []
    line = flowing([Text("sinks by token:"), *parts], screen.width)
    line.stylize("magenta")
    return line


def spread_view(corpus: CorpusSummary, record: Record, listed: Sequence[HeadStatistics]) -> RenderableType:
    """A row per head: the fraction of documents with its type, and the distribution of the type's statistic."""
    heads = {(corpus_head.layer, corpus_head.attention, corpus_head.head): corpus_head for corpus_head in corpus.heads}
    names = {(layer.layer, layer.name): short_name(layer, record.layers) for layer in record.layers}
    table = plain_table(
        ("layer", True),
        ("head", True),
        ("agree", True),
        ("statistic", False),
        ("mean", True),
        (INTERVAL, True),
        (PART, True),
    )
    for head in listed:
        corpus_head = heads[head.layer, head.attention, head.head]
        name = _field(head)
        spread = corpus_head.spread(name)
        cells = ["–"] * 3 if spread is None else _cells(spread)
        table.add_row(
            names[head.layer, head.attention],
            str(head.head),
            f"{100 * corpus_head.agree:.0f} %",
            words_of("columns", "statistic")[name].heading or name,
            *cells,
        )
    legend = "agree = documents where the head has this type · interval: bootstrap of the mean"
    return Group(Text("spread over documents", style="bold"), table, Text(legend, style="dim"))


def _field(head: HeadStatistics) -> str:
    """The statistic of a head's type, or of its nearest type; the entropy if there is none."""
    nearest = nearest_type(head)
    name = HEAD_TYPES[head.kind if nearest is None else nearest[0]]
    return name if name and name != "at_offset" else "entropy_share"


def _cells(spread: Spread) -> list[str]:
    def number_words(number: float | None) -> str:
        if number is None:
            return "–"
        return weight_text(number, 3) if _UNITS[spread.statistic] in ("weight", "fraction") else short_text(number)

    low, high = spread.quantiles[0], spread.quantiles[-1]
    interval = "–" if spread.low is None else f"{number_words(spread.low)} to {number_words(spread.high)}"
    return [number_words(spread.mean), interval, f"{number_words(low)} to {number_words(high)}"]


def effects_view(
    corpus: CorpusSummary, layers: Sequence[LayerView], record: Record, *, heads: Sequence[int] | None, everything: bool
) -> Iterator[RenderableType]:
    """The effect of removing each head, or those of some numbers, the largest mean first; empty without removals."""
    metric = next((name for name in ("d_logit", "d_output") if any(head.spread(name) for head in corpus.heads)), None)
    if metric is None:
        return
    rows = [
        (abs(change.mean), f"{short_name(layer.inspected, record.layers)}.{head.head}", change, head.spread("kl"))
        for layer, head in _of_layers(corpus, layers)
        if (heads is None or head.head in heads) and (change := head.spread(metric)) is not None
    ]
    ordered = sorted(rows, key=lambda row: -row[0])
    listed = ordered if everything else ordered[:MAX_EFFECTS]
    has_kl = metric == "d_logit"
    headings = ("removed", words_of("columns", "effect")[metric].heading, INTERVAL, PART, *(["KL"] * has_kl))
    table = plain_table(*((heading, heading != "removed") for heading in headings))
    for _, name, change, kl in listed:
        table.add_row(name, *_change_cells(change), *([number_text(kl.mean)] if has_kl and kl is not None else []))
    meaning = "change of the logit of the predicted token" if has_kl else "length of the change of the output"
    legend = [Text(f"{headings[1]} = {meaning}, at the first [MASK], else at the last token", style="dim")]
    legend += [Text("negative: the head supports the token · KL in nats", style="dim")] if has_kl else []
    remainder = [left_out(len(ordered) - len(listed))] if len(ordered) > len(listed) else []
    yield Group(Text("removing a head, mean over documents", style="bold"), table, *remainder, *legend)


def _change_cells(spread: Spread) -> list[str]:
    def number_words(number: float) -> str:
        return f"{number:+.4f}" if spread.statistic == "d_logit" else f"{number:.4f}"

    interval = (
        "–"
        if spread.low is None or spread.high is None
        else f"{number_words(spread.low)} to {number_words(spread.high)}"
    )
    return [
        number_words(spread.mean),
        interval,
        f"{number_words(spread.quantiles[0])} to {number_words(spread.quantiles[-1])}",
    ]


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
    return f"{place}, {tokens}: {weight_text(cell.share, 2)}, × {short_text(cell.lift)} of uniform"


def _of_layers(corpus: CorpusSummary, layers: Sequence[LayerView]) -> Iterator[tuple[LayerView, CorpusHead]]:
    views = {(layer.inspected.layer, layer.inspected.name): layer for layer in layers}
    shown = {(*layer_key, head.head) for layer_key, layer in views.items() for head in layer.record.heads}
    for head in corpus.heads:
        if (head.layer, head.attention, head.head) in shown:
            yield views[head.layer, head.attention], head
