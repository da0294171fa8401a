"""The table of heads: a row for each with its type and statistics, and uniform attention below; and
the line of their sinks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from rich.text import Text

from mhacli.numbers import shown
from mhacli.record.heads import (
    CERTAIN_ENOUGH,
    HEAD_TYPES,
    OF_REMOVAL,
    SINK_LIFT,
    STATISTICS,
    Averages,
    HeadKey,
    HeadStatistics,
    Statistic,
    nearest_type,
    removal_columns,
    require_order,
    statistic_of_type,
    where_possible,
    words_of_type,
)
from mhacli.record.record import LayerView, Record
from mhacli.render.base.colours import KIND_SIGNS, type_sign
from mhacli.render.base.doc import Column, Table
from mhacli.render.base.format import (
    UNITS,
    count_of,
    fitted,
    flowing,
    sparkline,
    token_at,
    token_text,
    type_text,
)
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import chosen_layers, grouped, names_of, survey_of
from mhacli.text.escape import visible
from mhacli.text.tokens import TokenSequence


class HeadRow(NamedTuple):
    """A head, or, with the name of that row, uniform attention over the keys of the head."""

    head: HeadStatistics
    baseline: str = ""

    @property
    def averages(self) -> Averages:
        """The statistics of the row."""
        return self.head.uniform or Averages() if self.baseline else self.head


MEASURED_AT = "at the first [MASK], else at the last token; classes and answers: of the text"
"""Where the removals of all heads are measured."""


def beside_types(heads: Sequence[HeadStatistics]) -> Iterator[str]:
    """What stands beside the types of heads."""
    has_nearest = any(nearest_type(head) is not None for head in heads)
    yield f"type: excess over uniform{', (…) the nearest' if has_nearest else ''}"
    if any(deciding_statistic(head).endswith(where_possible("")) for head in heads):
        yield "type by dup or ind: over the queries that see a copy"


def deciding_statistic(head: HeadStatistics) -> str:
    """The statistic that makes the type of a head, or its nearest type; else the entropy."""
    nearest = nearest_type(head)
    kind = head.kind if nearest is None else nearest[0]
    return statistic_of_type(head, kind) or "entropy_share"


_OF_TYPES = (
    "The type with the largest excess over uniform attention, if that is at least"
    f" {CERTAIN_ENOUGH}, and this excess. Beside mixed stands the nearest type with its excess."
)
_OF_CONTROL = "the type on as many random tokens, which only positions and special tokens can make"
_WITHIN_A_TEXT = ("diagonal", "previous", "duplicate", "induction")
"""The statistics that compare a query with keys of its own text."""
_WIDEST_TYPE = 40
"""The width down to which the column of types is shortened."""
_WIDEST_LABEL = 21
"""The most characters of the name of a row of uniform attention."""
_TOO_SMALL = 5e-4
"""Smaller weights get no spark."""


def head_key(head: HeadStatistics) -> HeadKey:
    """A unique key of a head within a record: its layer's number, the attention's name, its own
    number.
    """
    return head.layer, head.attention, head.head


def heads_table(
    record: Record, listed: Sequence[HeadStatistics], options: ViewOptions
) -> Table[HeadRow]:
    """A row per head, with its layer if there are several, and uniform attention over the same keys
    below.

    The column by which heads are sorted is never dropped. The profile of distances is there if the
    record has one. What compares a query with its own text is no number in cross-attention.
    """
    across = {
        head_key(head)
        for view in record.attentions
        if view.inspected.kind == "cross" or (record.context is not None and record.model is None)
        for head in view.record.heads
    }
    columns = [
        *_layer_column(record, listed, options),
        Column("head", lambda row: "" if row.baseline else row.head.head, unit="id"),
        Column(
            "type",
            lambda row: row.baseline or _type_text(row.head),
            least=_WIDEST_TYPE,
            style=_type_style,
            explanation=_OF_TYPES,
            about=lambda row: "" if row.baseline else words_of_type(row.head.kind).explanation,
        ),
    ]
    if any(head.control is not None for head in listed):
        columns.append(
            Column("on random tokens", _control_text, meaning=_OF_CONTROL, explanation=_OF_CONTROL)
        )
    return Table(
        [*columns, *_number_columns(record, listed, options, across), *_profile_column(record)],
        [*map(HeadRow, listed)],
        foot=[*_baselines(record, listed)],
        remarks=[*_remarks(record, listed, across)],
        gap=1,
    )


# ------------------------------------------------------------------------------------------ columns


def _type_style(row: HeadRow) -> str:
    """The colour of a type; dim where there is none."""
    return "dim" if row.baseline or _has_no_choice(row.head) else KIND_SIGNS[row.head.kind].colour


def _control_text(row: HeadRow) -> str:
    """The type of a head on random tokens."""
    control = row.head.control
    return "" if row.baseline or control is None else _type_text(control)


def _layer_column(
    record: Record, listed: Sequence[HeadStatistics], options: ViewOptions
) -> Iterator[Column[HeadRow]]:
    """The column of layers; none if the record has a single layer, or one was chosen."""
    layers = {(view.inspected.layer, view.inspected.name): view for view in record.attentions}
    is_chosen = options.layers is not None and len(chosen_layers(record, options)) == 1
    if len(layers) == 1 or not listed or is_chosen:
        return

    def layer_of(row: HeadRow) -> LayerView:
        return layers[row.head.layer, row.head.attention]

    yield Column(
        "layer",
        lambda row: "" if row.baseline else layer_of(row).name,
        unit="id",
        style=lambda row: "" if layer_of(row).inspected.verified else "bold red",
    )


def _number_columns(
    record: Record,
    listed: Sequence[HeadStatistics],
    options: ViewOptions,
    across: Set[HeadKey],
) -> list[Column[HeadRow]]:
    """A column for each statistic with a heading, in display order, and for each condition. Heads
    `across` two texts have no number of `_WITHIN_A_TEXT`, and alone no column.
    """
    survey, (sort, _) = survey_of(record), require_order(options.sort)
    is_across = bool(across) and all(head_key(head) in across for head in listed)
    columns = [
        _statistic_column(statistic, options, survey.sink_tokens, across)
        for statistic in (*OF_REMOVAL, *STATISTICS)
        if statistic.priority is not None
        and not (record.scan and statistic in OF_REMOVAL and statistic.field != sort)
        and not (
            statistic.optional
            and all(getattr(head, statistic.field) is None for head in record.heads)
        )
        and not (is_across and statistic.field in _WITHIN_A_TEXT)
    ]
    for number, name in enumerate(survey.patterns):
        columns.append(_pattern_column(number, visible(name), options.precision))
    return columns


def _statistic_column(
    statistic: Statistic, options: ViewOptions, sink_tokens: int, across: Set[HeadKey]
) -> Column[HeadRow]:
    """The column of a statistic; bold where the statistic made the type of the head."""
    words = statistic.words
    name = statistic.field
    unit = UNITS.get(statistic.unit, "short")
    sort, _ = require_order(options.sort)

    def value(row: HeadRow) -> float | None:
        is_across = name in _WITHIN_A_TEXT and head_key(row.head) in across
        return None if is_across else getattr(row.averages, name, None)

    def style(row: HeadRow) -> str:
        kind = row.head.kind
        return f"bold {KIND_SIGNS[kind].colour}" if HEAD_TYPES[kind] == name else ""

    return Column(
        words.heading.format(sink_tokens=sink_tokens),
        value,
        unit=unit,
        digits=options.precision if unit == "weight" else None,
        drop=0 if name == sort else statistic.priority or 0,
        style=style,
        meaning=(words.legend or words.name).format(sink_tokens=sink_tokens),
        explanation=words.explanation + (f" Formula: {words.formula}" if words.formula else ""),
    )


def _pattern_column(number: int, pattern: str, digits: int) -> Column[HeadRow]:
    """The column of the weight where a condition holds."""

    def weight(row: HeadRow) -> float | None:
        weights = row.averages.patterns
        return weights[number] if weights else None

    return Column(
        f"p{number + 1}",
        weight,
        unit="weight",
        digits=digits,
        meaning=f"weight where {pattern}",
    )


def _profile_column(record: Record) -> Iterator[Column[HeadRow]]:
    """The column of attention weights by distance, relative to the largest, if the record has
    them.
    """
    steps = survey_of(record).steps
    if not steps:
        return
    ends = [
        f"{end:,}" if end - before == 1 else f"{before + 1:,}–{end:,}"
        for before, end in pairwise((-1, *steps))
    ]
    places = {
        head_key(head): (view.record.arrays, place)
        for view in record.attentions
        for place, head in enumerate(view.record.heads)
    }

    def sparks(row: HeadRow) -> str:
        import numpy as np  # not before the viewer's first screen

        arrays, place = places[head_key(row.head)]
        profiles = arrays["uniform_profile" if row.baseline else "profile"]
        weights = (
            np.nan_to_num(profiles[:, min(place, profiles.shape[1] - 1)], posinf=0)
            .mean(axis=0)
            .tolist()
        )
        return sparkline([weight if weight > _TOO_SMALL else 0.0 for weight in weights])

    yield Column(
        "distance →",
        sparks,
        drop=1,
        style=lambda row: "cyan",
        meaning="weights by distance",
        explanation=(
            f"The attention weight at distances of {', '.join(ends)} tokens, relative to the"
            " largest."
        ),
    )


# ------------------------------------------------------------------------------ types and baselines


def _type_text(head: HeadStatistics) -> str:
    """The sign and name of a type with its excess; a dash if no query sees several keys."""
    is_unknown = _has_no_choice(head) or head.certainty is None
    return "–" if is_unknown else f"{KIND_SIGNS[head.kind].sign} {type_text(head)}"


def types_of(heads: Iterable[HeadStatistics]) -> list[Text]:
    """The types of heads, each with its sign and the number of heads."""
    n_of = Counter(head.kind for head in heads)
    return [
        Text.assemble(type_sign(kind), f" {words_of_type(kind).name} {n_of[kind]}")
        for kind in KIND_SIGNS
        if n_of[kind]
    ]


def _has_no_choice(head: HeadStatistics) -> bool:
    return head.uniform is not None and head.uniform.effective_keys == 1


def _baselines(record: Record, listed: Sequence[HeadStatistics]) -> Iterator[HeadRow]:
    """Uniform attention: one row if all heads share it, else a row for each head or each group of
    layers.
    """
    groups: dict[Averages, list[HeadStatistics]] = {}
    for head in listed:
        if head.uniform is not None:
            groups.setdefault(replace(head.uniform, offset=None, at_offset=None), []).append(head)
    if len(groups) > 1 and not record.layers:
        for head in listed:
            if head.uniform is not None:
                yield HeadRow(head, f"head {head.head} if uniform")
        return
    for heads in groups.values():
        name = "if uniform"
        if len(groups) > 1:
            keys = {head_key(head)[:2] for head in heads}
            layers = [layer for layer in record.layers if (layer.layer, layer.name) in keys]
            name = f"uniform, {names_of(layers)}"
        yield HeadRow(heads[0], fitted(name, _WIDEST_LABEL))


def _remarks(
    record: Record, listed: Sequence[HeadStatistics], across: Set[HeadKey]
) -> Iterator[str]:
    """What numbers are means of, and the meaning of the names and numbers beside head types."""
    yield f"means over {'documents' if record.scan else 'queries'}"
    changes = [row.words.heading for row in removal_columns(listed) if row.field != "floor"]
    if changes and not record.scan:
        n_texts = len(record.sequences)
        mean = f"mean over {n_texts} texts, " if n_texts > 1 else ""
        yield f"{' and '.join(changes)}: {mean}{MEASURED_AT}"
    yield from beside_types(listed)
    headings = {row.words.heading for row in STATISTICS if row.priority == 1}
    nearest = filter(None, map(nearest_type, listed))
    for kind in dict.fromkeys(kind for kind, _ in nearest):
        words = words_of_type(kind)
        if words.short not in {*headings, words.name}:
            yield f"{words.short} = {words.name}"
    if 0 < sum(head_key(head) in across for head in listed) < len(listed):
        yield "–: queries and keys are of two texts"


# ------------------------------------------------------------------------------- the sinks of heads

TOKEN_WIDTH = 12
"""The largest width of a token in a list."""
_MAX_SINKS = 5
"""The most sinks that a line lists."""


class SinkOfHead(NamedTuple):
    """The name of a sink, what it gets as a fraction, and the head that gives it."""

    name: str
    fraction: float
    head: str


def sinks_are(least: float) -> str:
    """The definition of a sink key in words. `least` is its least fraction of all attention."""
    return (
        f"sinks (at least {100 * least:g} % of all attention and {SINK_LIFT:g} × uniform, from most"
        " queries)"
    )


def sinks_line(
    record: Record, layers: Sequence[LayerView], heads: Sequence[HeadStatistics], screen: Screen
) -> Text:
    """The sink keys of heads of some layers."""
    views = {(layer.inspected.layer, layer.inspected.name): layer for layer in layers}
    sinks = []
    for head in heads:
        layer = views[head.layer, head.attention]
        has_encoder_keys = layer.inspected.kind in ("encoder", "cross")
        stack = "encoder " if record.context is not None and has_encoder_keys else ""
        name = f"{layer.name}.{head.head}".lstrip(".")
        for sink in head.sink_keys:
            key = token_name(layer.record.keys, sink.sequence, sink.key)
            sinks.append(SinkOfHead(f"{stack}{key}", sink.share, name))
    unit = "layer.head " if record.layers else "head "
    return sinks_text(sinks, sinks_are(survey_of(record).sink_share), unit, screen.width)


def sinks_text(
    sinks: Sequence[SinkOfHead], label: str, unit: str, width: int, n_documents: int = 0
) -> Text:
    """Each sink with the number of heads that have it, and the head with most; of many the
    commonest. The `unit` of heads is printed once. Fractions may be of documents.
    """
    groups = grouped(sinks, lambda sink: sink.name).values()
    ordered = sorted(groups, key=lambda group: (-len(group), -max(group).fraction, group[0].name))
    parts: list[str] = []
    for group in ordered[:_MAX_SINKS]:
        most = max(group)
        where = most.head if parts else f"{unit}{most.head}"
        parts.append(
            f"{most.name} in {count_of(len(group), 'head')}, at most"
            f" {_part(most.fraction, n_documents)} ({where})"
        )
    if len(ordered) > _MAX_SINKS:
        parts.append(f"{len(ordered) - _MAX_SINKS} others")
    if not parts:
        return Text(f"{label}: none", "dim")
    return Text(f"{label}:\n", "magenta").append_text(flowing(parts, width, style="magenta"))


def _part(fraction: float, n_documents: int) -> str:
    """A fraction of all attention, or of documents their number."""
    if not n_documents:
        return shown(fraction, "percent")
    return f"in {round(fraction * n_documents):,} of {count_of(n_documents, 'document')}"


def token_name(
    texts: Sequence[TokenSequence], sequence: int, index: int, width: int = TOKEN_WIDTH
) -> str:
    """A position and its token, `25 “for”`, with its sequence if there are several, `1:25
    “for”`.
    """
    several = f"{sequence}:" if len(texts) > 1 else ""
    return token_at(token_text(texts[sequence].tokens, index), f"{several}{index}", width)
