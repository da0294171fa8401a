"""The overview of heads: a row for each with its type and statistics, and uniform attention below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from mhacli.record.heads import (
    CERTAIN_ENOUGH,
    HEAD_TYPES,
    LEAST_PRIORITY,
    STATISTICS,
    UNTYPED,
    Averages,
    HeadStatistics,
    Statistic,
    nearest_type,
    removal_columns,
    require_order,
    words_of_type,
)
from mhacli.record.record import Record, layer_prefix
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.format import (
    count_of,
    filled,
    fitted,
    left_out,
    number_text,
    or_dash,
    plain_table,
    short_text,
    sparkline,
    type_excess,
    weight_text,
)
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import names_of, short_name, survey_of
from mhacli.settings import SINK_TOKENS
from mhacli.text.escape import visible

_PROFILE, _TYPE, _CONTROL = "distance →", "head type", "on random tokens"
_HEAD_WIDTH, _LABEL_WIDTH = 5, 21
_OF_TYPES = (
    f"The type with the largest excess over uniform attention, if that is at least {CERTAIN_ENOUGH}, and this excess. Beside "
    "uniform stands H/max, beside mixed the nearest type with its excess."
)
_OF_CONTROL = "the type on random tokens of the same number, where only positions can make one"
_TOO_SMALL = 5e-4
"""Smaller weights get no spark."""


@dataclass(frozen=True)
class OverviewColumn:
    """A column of the overview: its heading, the type of its cells, its least width, and the meaning of its heading.

    `explanation` has sentences for a page. `to_text` formats a number, and `field` is its name in `HeadStatistics`, if
    any. On narrow screens, columns with the largest `priority` are dropped first.
    """

    heading: str
    cells: Literal["name", "word", "number"] = "number"
    width: int = 0
    priority: int = 0
    to_text: Callable[[Averages], str] = lambda averages: ""
    field: str = ""
    legend: str = ""
    explanation: str = ""


@dataclass(frozen=True)
class OverviewCells:
    """The contents of the overview: columns, a row per head, and a row per baseline of uniform attention."""

    columns: tuple[OverviewColumn, ...]
    heads: tuple[tuple[Text, ...], ...]
    baselines: tuple[tuple[Text, ...], ...]


def overview(
    record: Record,
    listed: Sequence[HeadStatistics],
    options: ViewOptions,
    screen: Screen,
    *,
    gap: tuple[int, int] = (0, 0),
) -> Table:
    """The overview as a terminal table. `gap` is the row before which heads are left out, and their number."""
    cells = overview_cells(record, listed, options, screen)
    table = plain_table(gap=1)
    for column in cells.columns:
        table.add_column(
            column.heading,
            justify="left" if column.cells == "word" else "right",
            no_wrap=True,
            min_width=column.width,
            max_width=column.width if column.heading == _TYPE else None,
        )
    for row, head in enumerate(cells.heads):
        if gap[1] and row == gap[0]:
            table.add_row("⋮", left_out(gap[1]))
        table.add_row(*head)
    for baseline in cells.baselines:
        table.add_row(*baseline)
    return table


def legend(record: Record, listed: Sequence[HeadStatistics], options: ViewOptions, screen: Screen) -> Iterator[Text]:
    """The meaning of the shown headings, and the headings that are hidden."""
    columns, hidden = _shown_columns(record, listed, options, screen)
    parts = legend_parts(columns, listed)
    elsewhere = "with --sort, --csv" if record.survey is not None or record.layers else "in mha heads"
    parts += [f"{count_of(len(hidden), 'more column')} on a wider screen or {elsewhere}"] if hidden else []
    for line in filled(parts, screen.width):
        yield Text(line, style="dim")


def legend_parts(columns: Sequence[OverviewColumn], listed: Sequence[HeadStatistics]) -> list[str]:
    """The meaning of the headings, and of the numbers beside head types."""
    parts = [f"{column.heading} = {column.legend}" for column in columns if column.legend]
    least = weight_text(CERTAIN_ENOUGH, 2)
    if any(map(_has_no_choice, listed)):
        parts.append("no type: no query sees more than one key, so every attention weight is 1")
    excess = "excess (weight − uniform) ÷ (1 − uniform)"
    has_type = any(head.kind not in UNTYPED for head in listed)
    if has_type:
        parts.append(f"beside a type: its {excess}, at least {least}")
    if any(head.kind == "uniform" for head in listed):
        parts.append("beside uniform: H/max")
    nearest = [words_of_type(nearest_kind[0]) for nearest_kind in map(nearest_type, listed) if nearest_kind is not None]
    if nearest:
        parts.append(f"mixed (nearest type): no {'excess' if has_type else excess} reaches {least}")
    explained = {column.heading for column in columns}
    abbreviated = [kind for kind in nearest if kind.short not in (*explained, kind.name)]
    parts += dict.fromkeys(f"{kind.short} = {kind.name}" for kind in abbreviated)
    return parts


def overview_cells(
    record: Record, listed: Sequence[HeadStatistics], options: ViewOptions, screen: Screen
) -> OverviewCells:
    """A row per head, with its layer if there are several, and uniform attention over the same keys below.

    Columns are dropped if they do not fit. The profile of distances is shown if the record has one.
    """
    columns, _ = _shown_columns(record, listed, options, screen)
    names, places = _layer_names(record, listed, options), _places(record)
    numbers = [column for column in columns if column.cells == "number"]
    has_profile = columns[-1].heading == _PROFILE
    heads, baselines = [], []
    for head in listed:
        layer = [names[head_key(head)[:2]]] if names else []
        values = [Text(column.to_text(head), style=_emphasis(head, column)) for column in numbers]
        line = [Text(_sparks(record, "profile", places[head_key(head)]), style="cyan")] if has_profile else []
        types = [_type_text(each) for each in (head, head.control) if each is not None]
        heads.append((*layer, Text(str(head.head)), *types, *values, *line))
    for label, head in _baselines(record, listed):
        values = [Text(column.to_text(head.uniform or Averages()), style="dim") for column in numbers]
        line = [Text(_sparks(record, "uniform_profile", places[head_key(head)]), style="dim")] if has_profile else []
        types = [Text(label, style="dim"), *([] if head.control is None else [Text()])]
        baselines.append((*([Text()] if names else []), Text(), *types, *values, *line))
    return OverviewCells(columns, tuple(heads), tuple(baselines))


# ------------------------------------------------------------------------------------------------------------------ columns


def _shown_columns(
    record: Record, listed: Sequence[HeadStatistics], options: ViewOptions, screen: Screen
) -> tuple[tuple[OverviewColumn, ...], tuple[str, ...]]:
    """The columns that fit, and the headings of the others."""
    names = _layer_names(record, listed, options).values()
    of_layers = max(cell_len(name) for name in ("layer", *(name.plain for name in names))) + 1 if names else 0
    of_type = _type_width(record, listed)
    controls = [head.control for head in listed if head.control is not None]
    of_control = max(map(cell_len, [_CONTROL, *(_type_text(each).plain for each in controls)]))
    room = screen.width - of_layers - _HEAD_WIDTH - of_type - 1 - (of_control + 1 if controls else 0)
    numbers, profile = _number_columns(record, options.precision), _profile_columns(record)
    width = max((max(column.width, len(_PROFILE)) for column in profile), default=0)
    shown = _fitting(numbers, room, width, require_order(options.sort)[0])
    profile = profile if sum(column.width + 1 for column in shown) + width <= room else []
    first = [
        *([OverviewColumn("layer", "name")] if names else []),
        OverviewColumn("head", "name"),
        OverviewColumn(_TYPE, "word", of_type, field="kind", explanation=_OF_TYPES),
        *(
            [OverviewColumn(_CONTROL, "word", of_control, legend=_OF_CONTROL, explanation=_OF_CONTROL)]
            if controls
            else []
        ),
    ]
    return (*first, *shown, *profile), tuple(column.heading for column in numbers if column not in shown)


def _type_width(record: Record, listed: Sequence[HeadStatistics]) -> int:
    texts = [*(_type_text(head).plain for head in listed), *(label for label, _ in _baselines(record, listed))]
    return max(map(cell_len, [_TYPE, *texts]))


def _number_columns(record: Record, precision: int) -> list[OverviewColumn]:
    """A column for each statistic with a heading and for each condition, in display order."""
    survey = survey_of(record) if record.survey is not None or record.layers else None
    sink_tokens, patterns = (SINK_TOKENS, ()) if survey is None else (survey.sink_tokens, survey.patterns)
    weights: list[OverviewColumn] = []
    scores: list[OverviewColumn] = []
    for statistic in (*removal_columns(record.heads), *STATISTICS):
        is_missing = all(getattr(head, statistic.field) is None for head in record.heads)
        if statistic.priority is None or (statistic.optional and is_missing):
            continue
        column = _statistic_column(statistic, precision, sink_tokens)
        if statistic.unit == "score":
            scores.append(column)
        else:
            fields = [column.field for column in weights]
            weights.insert(fields.index(statistic.beside) + 1 if statistic.beside else len(fields), column)
    for index, pattern in enumerate(patterns):
        pattern_text = partial(_pattern_text, index, precision)
        weights.append(
            OverviewColumn(
                f"p{index + 1}", width=precision + 2, to_text=pattern_text, legend=f"weight where {visible(pattern)}"
            )
        )
    return [*weights, *scores]


def _statistic_column(statistic: Statistic, precision: int, sink_tokens: int) -> OverviewColumn:
    """The column of a statistic. Its unit decides the number format."""
    write: Mapping[str, tuple[int, Callable[[float], str]]] = {
        "weight": (precision + 2, lambda number: weight_text(number, precision)),
        "fraction": (5, lambda number: f"{100 * number:.0f}%"),
        "nats": (5, lambda number: f"{number:.2f}"),
        "score": (6, short_text),
        "change": (7, number_text),
    }
    width, to_text = write.get(statistic.unit, (5, short_text))
    words = statistic.words
    heading = words.heading.format(sink_tokens=sink_tokens)
    return OverviewColumn(
        heading=heading,
        width=max(width, cell_len(heading)),
        priority=statistic.priority or 0,
        to_text=lambda averages: or_dash(getattr(averages, statistic.field, None), to_text),
        field=statistic.field,
        legend=(words.legend or words.name).format(sink_tokens=sink_tokens),
        explanation=words.explanation + (f" Formula: {words.formula}" if words.formula else ""),
    )


def _pattern_text(index: int, precision: int, averages: Averages) -> str:
    return or_dash(averages.patterns[index], lambda weight: weight_text(weight, precision))


def _profile_columns(record: Record) -> list[OverviewColumn]:
    """The column of attention weights by distance, if the record has them."""
    steps = survey_of(record).steps if record.survey is not None or record.layers else ()
    if not steps:
        return []
    ends = [f"{end:,}" if end - before == 1 else f"{before + 1:,}–{end:,}" for before, end in pairwise((-1, *steps))]
    distances = ", ".join(ends if len(ends) <= _FEW else ends[: _FEW - 1]) + f" … {ends[-1]}" * (len(ends) > _FEW)
    return [OverviewColumn(_PROFILE, "word", len(steps), legend=f"weight at distances {distances}")]


_FEW = 6


def _fitting(columns: list[OverviewColumn], width: int, profile: int, sort: str) -> list[OverviewColumn]:
    """The columns that fit beside the profile. The sorted column is never dropped."""
    room, kept = width - profile, columns
    for step in range(LEAST_PRIORITY, 1, -1):
        if sum(column.width + 1 for column in kept) <= room:
            break
        kept = [column for column in kept if column.priority < step or column.field == sort]
    while kept and sum(column.width + 1 for column in kept) > width:
        last = max(range(len(kept)), key=lambda place: (kept[place].field != sort, kept[place].priority, place))
        kept = kept[:last] + kept[last + 1 :]
    return kept


# --------------------------------------------------------------------------------------------------------------------- rows


def _baselines(record: Record, listed: Sequence[HeadStatistics]) -> Iterator[tuple[str, HeadStatistics]]:
    """Uniform attention: one row if all heads share it, else a row for each head or each group of layers."""
    groups: dict[Averages, list[HeadStatistics]] = {}
    for head in listed:
        if head.uniform is not None:
            groups.setdefault(replace(head.uniform, offset=None, at_offset=None), []).append(head)
    if len(groups) > 1 and not record.layers:
        yield from ((f"head {head.head} if uniform", head) for head in listed if head.uniform is not None)
        return
    for heads in groups.values():
        layer_keys = {head_key(head)[:2] for head in heads}
        layers = names_of([layer for layer in record.layers if (layer.layer, layer.name) in layer_keys])
        label = "if uniform" if len(groups) == 1 else f"uniform, {layers}"
        yield fitted(label, _LABEL_WIDTH), heads[0]


def _type_text(head: HeadStatistics) -> Text:
    """The sign and name of a type with its excess; a dash if no query sees several keys."""
    if _has_no_choice(head):
        return Text("–", style="dim")
    glyph, style = KIND_SIGNS[head.kind]
    beside = "dim" if head.kind in UNTYPED else ""  # faint colours are hard to read
    return Text(f"{glyph} {words_of_type(head.kind).name}", style=style).append(type_excess(head), style=beside)


def _has_no_choice(head: HeadStatistics) -> bool:
    return head.uniform is not None and head.uniform.effective_keys == 1


def _emphasis(head: HeadStatistics, column: OverviewColumn) -> str:
    """The style of a number: bold if it determined the head's type."""
    return f"bold {KIND_SIGNS[head.kind][1]}" if column.field and HEAD_TYPES[head.kind] == column.field else ""


def _sparks(record: Record, name: str, at: tuple[str, int]) -> str:
    """The attention weights at each distance, over all sequences, relative to the largest."""
    prefix, place = at
    profiles = record.arrays[prefix + name]
    weights = np.nan_to_num(profiles[:, min(place, profiles.shape[1] - 1)]).mean(axis=0)
    return sparkline([float(weight) if weight > _TOO_SMALL else 0.0 for weight in weights])


# -------------------------------------------------------------------------------------------------------- layers and indices

HeadKey = tuple[int, str, int]


def head_key(head: HeadStatistics) -> HeadKey:
    """A unique key of a head within a record: its layer's number, the attention's name, its own number."""
    return head.layer, head.attention, head.head


def _places(record: Record) -> Mapping[HeadKey, tuple[str, int]]:
    """For each head the prefix of its layer's arrays, and its index on their head axis."""
    if not record.layers:
        return {head_key(head): ("", place) for place, head in enumerate(record.heads)}
    prefixes = {(layer.layer, layer.name): layer_prefix(index) for index, layer in enumerate(record.layers)}
    places: dict[HeadKey, tuple[str, int]] = {}
    counts = dict.fromkeys(prefixes.values(), 0)
    for head in record.heads:
        prefix = prefixes[head_key(head)[:2]]
        places[head_key(head)] = (prefix, counts[prefix])
        counts[prefix] += 1
    return places


def _layer_names(
    record: Record, listed: Sequence[HeadStatistics], options: ViewOptions
) -> Mapping[tuple[int, str], Text]:
    """The names of the listed heads' layers; none if the record has a single layer."""
    keys = {head_key(head)[:2] for head in listed}
    named = {
        (layer.layer, layer.name): Text(short_name(layer, record.layers), style="" if layer.verified else "bold red")
        for layer in record.layers
        if (layer.layer, layer.name) in keys
    }
    is_only = len(record.layers) == 1 or (options.layers is not None and len(named) == 1)
    return {} if is_only else named
