"""The table of heads: a row for each with its type and statistics, and uniform attention below; and
the line of their sinks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter

from rich.text import Text

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
    require_order,
    words_of_type,
)
from mhacli.record.record import Record
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
from mhacli.render.base.selection import grouped, names_of, short_name, survey_of
from mhacli.settings import SINK_TOKENS
from mhacli.text.escape import visible
from mhacli.text.numbers import shown
from mhacli.text.tokens import TokenSequence

HeadRow = tuple[HeadStatistics, str]
"""A head; with a name uniform attention over the keys of the head."""

_OF_TYPES = (
    "The type with the largest excess over uniform attention, if that is at least"
    f" {CERTAIN_ENOUGH}, and this excess. Beside mixed stands the nearest type with its excess."
)
_OF_CONTROL = "the type on random tokens of the same number, where only positions can make one"
_WIDEST_TYPE, _WIDEST_LABEL = 40, 21
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
    record has one.
    """
    columns = [
        *_layer_column(record, listed, options),
        Column(heading="head", value=lambda row: "" if row[1] else row[0].head, unit="id"),
        Column(
            heading="type",
            value=lambda row: row[1] or _type_text(row[0]),
            least=_WIDEST_TYPE,
            style=lambda row: (
                "dim" if row[1] or _has_no_choice(row[0]) else KIND_SIGNS[row[0].kind][1]
            ),
            explanation=_OF_TYPES,
            about=lambda row: "" if row[1] else words_of_type(row[0].kind).explanation,
        ),
    ]
    if any(head.control is not None for head in listed):
        control: Column[HeadRow] = Column(
            heading="on random tokens",
            value=lambda row: (
                "" if row[1] or row[0].control is None else _type_text(row[0].control)
            ),
            meaning=_OF_CONTROL,
            explanation=_OF_CONTROL,
        )
        columns.append(control)
    return Table(
        columns=[*columns, *_number_columns(record, options), *_profile_column(record)],
        rows=[(head, "") for head in listed],
        foot=[*_baselines(record, listed)],
        legend=[*_legend(listed)],
        gap=1,
    )


def _means(row: HeadRow) -> Averages:
    head, name = row
    return head if not name else head.uniform or Averages()


# ------------------------------------------------------------------------------------------ columns


def _layer_column(
    record: Record, listed: Sequence[HeadStatistics], options: ViewOptions
) -> Iterator[Column[HeadRow]]:
    """The column of layers; none if the record has a single layer, or one was chosen."""
    keys = {head_key(head)[:2] for head in listed}
    layers = {
        (layer.layer, layer.name): layer
        for layer in record.layers
        if (layer.layer, layer.name) in keys
    }
    if len(record.layers) == 1 or not layers or (options.layers is not None and len(layers) == 1):
        return
    yield Column(
        heading="layer",
        value=lambda row: "" if row[1] else short_name(layers[head_key(row[0])[:2]], record.layers),
        unit="id",
        style=lambda row: "" if layers[head_key(row[0])[:2]].verified else "bold red",
    )


def _number_columns(record: Record, options: ViewOptions) -> list[Column[HeadRow]]:
    """A column for each statistic with a heading, in display order, and for each condition."""
    survey = survey_of(record) if record.survey is not None or record.layers else None
    sort, _ = require_order(options.sort)
    sink_tokens = SINK_TOKENS if survey is None else survey.sink_tokens
    numbers = [
        _statistic_column(row, options, sink_tokens, sort)
        for row in (*OF_REMOVAL, *STATISTICS)
        if row.priority is not None
        and not (row.optional and all(getattr(head, row.field) is None for head in record.heads))
    ]
    patterns = enumerate(() if survey is None else survey.patterns)
    return [
        *numbers,
        *(_pattern_column(number, visible(name), options.precision) for number, name in patterns),
    ]


def _statistic_column(
    statistic: Statistic, options: ViewOptions, sink_tokens: int, sort: str
) -> Column[HeadRow]:
    """The column of a statistic; bold where the statistic made the type of the head."""
    words, name = statistic.words, statistic.field
    unit = UNITS.get(statistic.unit, "short")
    return Column(
        heading=words.heading.format(sink_tokens=sink_tokens),
        value=lambda row: getattr(_means(row), name, None),
        unit=unit,
        digits=options.precision if unit == "weight" else None,
        drop=0 if name == sort else statistic.priority or 0,
        style=lambda row: (
            f"bold {KIND_SIGNS[row[0].kind][1]}" if HEAD_TYPES[row[0].kind] == name else ""
        ),
        meaning=(words.legend or words.name).format(sink_tokens=sink_tokens),
        explanation=words.explanation + (f" Formula: {words.formula}" if words.formula else ""),
    )


def _pattern_column(number: int, pattern: str, digits: int) -> Column[HeadRow]:
    def weight(row: HeadRow) -> float | None:
        weights = _means(row).patterns
        return weights[number] if weights else None

    return Column(
        heading=f"p{number + 1}",
        value=weight,
        unit="weight",
        digits=digits,
        meaning=f"weight where {pattern}",
    )


def _profile_column(record: Record) -> Iterator[Column[HeadRow]]:
    """The column of attention weights by distance, relative to the largest, if the record has
    them.
    """
    steps = survey_of(record).steps if record.survey is not None or record.layers else ()
    if not steps:
        return
    ends = [
        f"{end:,}" if end - before == 1 else f"{before + 1:,}–{end:,}"
        for before, end in pairwise((-1, *steps))
    ]
    views = [record.of_layer(index) for index in range(len(record.layers))] or [record]
    places = {
        head_key(head): (view.arrays, place)
        for view in views
        for place, head in enumerate(view.heads)
    }

    def sparks(row: HeadRow) -> str:
        import numpy as np  # not before the viewer's first screen

        arrays, place = places[head_key(row[0])]
        profiles = arrays["uniform_profile" if row[1] else "profile"]
        weights = (
            np.nan_to_num(profiles[:, min(place, profiles.shape[1] - 1)]).mean(axis=0).tolist()
        )
        return sparkline([weight if weight > _TOO_SMALL else 0.0 for weight in weights])

    yield Column(
        heading="distance →",
        value=sparks,
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
    return "–" if _has_no_choice(head) else f"{KIND_SIGNS[head.kind][0]} {type_text(head)}"


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
        yield from (
            (head, f"head {head.head} if uniform") for head in listed if head.uniform is not None
        )
        return
    for heads in groups.values():
        layer_keys = {head_key(head)[:2] for head in heads}
        layers = names_of(
            [layer for layer in record.layers if (layer.layer, layer.name) in layer_keys]
        )
        yield (
            heads[0],
            fitted("if uniform" if len(groups) == 1 else f"uniform, {layers}", _WIDEST_LABEL),
        )


def _legend(listed: Sequence[HeadStatistics]) -> Iterator[str]:
    """The meaning of the numbers and names beside head types."""
    least = shown(CERTAIN_ENOUGH, "weight")
    yield (
        "beside a type, or the nearest one: its excess (weight − uniform) ÷ (1 − uniform), of a"
        f" type at least {least}"
    )
    nearest = [words_of_type(found[0]) for found in map(nearest_type, listed) if found is not None]
    headings = [row.words.heading for row in STATISTICS]
    yield from dict.fromkeys(
        f"{kind.short} = {kind.name}"
        for kind in nearest
        if kind.short not in (*headings, kind.name)
    )


# ------------------------------------------------------------------------------- the sinks of heads

TOKEN_WIDTH, _MAX_SINKS = 12, 5
"""The largest width of a token in a list, and the sinks that a line lists."""


def sinks_are(least: float) -> str:
    """The definition of a sink key in words. `least` is its least fraction of all attention."""
    return (
        f"sinks (at least {100 * least:g} % of all attention and {SINK_LIFT:g} × uniform, from most"
        " queries)"
    )


def sinks_line(
    record: Record, listed: Sequence[HeadStatistics], least: float, screen: Screen
) -> Text:
    """The sink keys of the heads of a layer."""
    found = [
        (token_name(record.keys, sink.sequence, sink.key), sink.share, str(head.head))
        for head in listed
        for sink in head.sink_keys
    ]
    return sinks_text(found, sinks_are(least), "head ", screen.width)


def sinks_text(
    found: Sequence[tuple[str, float, str]], label: str, unit: str, width: int, of: str = ""
) -> Text:
    """Each sink with the number of heads that have it, and the head with most; of many the
    commonest. A sink is given by its name, its fraction (`of` what) and its head, whose `unit` is
    printed once.
    """
    heads_by_name = grouped(found, itemgetter(0)).items()
    ordered = sorted(heads_by_name, key=lambda item: (-len(item[1]), -max(item[1])[1], item[0]))
    parts: list[str] = []
    for name, heads in ordered[:_MAX_SINKS]:
        _, share, head = max(heads)
        where = f"({'' if parts else unit}{head})"
        parts.append(
            f"{name} in {count_of(len(heads), 'head')}, at most {shown(share, 'percent')}{of}"
            f" {where}"
        )
    parts += [f"{len(ordered) - _MAX_SINKS} others"] if len(ordered) > _MAX_SINKS else []
    if not parts:
        return Text(f"{label}: none", style="dim")
    return Text(f"{label}:\n", style="magenta").append_text(flowing(parts, width, style="magenta"))


def token_name(
    texts: Sequence[TokenSequence], sequence: int, index: int, width: int = TOKEN_WIDTH
) -> str:
    """A position and its token, `25 “for”`, with its sequence if there are several, `1:25
    “for”`.
    """
    several = f"{sequence}:" if len(texts) > 1 else ""
    return token_at(token_text(texts[sequence].tokens, index), f"{several}{index}", width)
