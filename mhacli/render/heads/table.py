"""The overview of heads: a row for each, with its kind, its numbers, and those of uniform attention below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.format import fitted, share_text, short_text, sparkline, told
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import names_of, short_name, survey_of
from mhacli.render.base.tables import left_out, plain_table
from mhacli.results.record.heads import NEAR, SINK_TOKENS, Averages, HeadStatistics, Kind
from mhacli.results.record.record import Record, layer_prefix

_Tell = Callable[[Averages], str]


@dataclass(frozen=True)
class _Column:
    """A column of the overview: its heading, its width, what it says, and how soon it gives way where there is no room.

    `field` is the number that it tells, by its name in `HeadStatistics`.
    """

    name: str
    width: int
    yields: int
    tell: _Tell
    field: str = ""


def overview(
    record: Record,
    listed: Sequence[HeadStatistics],
    options: ViewOptions,
    screen: Screen,
    *,
    gap: tuple[int, int] = (0, 0),
) -> Table:
    """A row per head, with its layer where there are several; below, what uniform attention over the same keys would give.
    `gap` says before which row how many heads are left out.

    Columns give way where there is no room; the profile of distances stands where the record has one.
    """
    columns, has_profile = _chosen(record, listed, options, screen)
    names, places = _layer_names(record, listed), _places(record)
    table = plain_table(*[("layer", True)] * bool(names), ("head", True), gap=1)
    table.add_column("kind", no_wrap=True, width=_KIND_WIDTH - 1)
    for column in columns:
        table.add_column(column.name, justify="right", no_wrap=True, min_width=column.width)
    if has_profile:
        table.add_column(_PROFILE, no_wrap=True, min_width=len(_profile_steps(record)))
    for row, head in enumerate(listed):
        if gap[1] and row == gap[0]:
            table.add_row("⋮", left_out(gap[1]))
        own = [Text(column.tell(head), style=_emphasis(head, column)) for column in columns]
        line = [Text(_sparks(record, "profile", places[_key(head)]), style="cyan")] if has_profile else []
        layer = [names[_key(head)[:2]]] if names else []
        table.add_row(*layer, str(head.head), _kind_text(head), *own, *line)
    for label, head in _baselines(record, listed):
        numbers = [Text(column.tell(head.uniform or Averages()), style="dim") for column in columns]
        line = [Text(_sparks(record, "uniform_profile", places[_key(head)]), style="dim")] if has_profile else []
        table.add_row(*([""] if names else []), "", Text(label, style="dim"), *numbers, *line)
    return table


def column_names(
    record: Record, listed: Sequence[HeadStatistics], options: ViewOptions, screen: Screen
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The headings that the overview shows on a screen, and those that gave way."""
    columns, has_profile = _chosen(record, listed, options, screen)
    shown = [*(column.name for column in columns), *([_PROFILE] if has_profile else [])]
    every = [column.name for column in _columns(record, options.precision)]
    return tuple(shown), tuple(name for name in every if name not in shown)


def _chosen(
    record: Record, listed: Sequence[HeadStatistics], options: ViewOptions, screen: Screen
) -> tuple[list[_Column], bool]:
    """The columns that fit, and whether the profile of distances does too."""
    names = _layer_names(record, listed).values()
    of_layers = max(cell_len(name) for name in ("layer", *(name.plain for name in names))) + 1 if names else 0
    steps, room = len(_profile_steps(record)), screen.width - of_layers - _HEAD_WIDTH - _KIND_WIDTH
    width = max(steps, len(_PROFILE)) if steps else 0
    columns = _fitting(_columns(record, options.precision), room, width, options.sort.partition(":")[0])
    return columns, bool(steps) and sum(column.width + 1 for column in columns) + width <= room


_Key = tuple[int, str, int]


def _key(head: HeadStatistics) -> _Key:
    return head.layer, head.attention, head.head


def _places(record: Record) -> Mapping[_Key, tuple[str, int]]:
    """For each head the prefix of its layer's arrays, and where it stands on their head axis."""
    if not record.layers:
        return {_key(head): ("", place) for place, head in enumerate(record.heads)}
    prefixes = {(layer.layer, layer.name): layer_prefix(index) for index, layer in enumerate(record.layers)}
    found: dict[_Key, tuple[str, int]] = {}
    counts = dict.fromkeys(prefixes.values(), 0)
    for head in record.heads:
        prefix = prefixes[_key(head)[:2]]
        found[_key(head)] = (prefix, counts[prefix])
        counts[prefix] += 1
    return found


def _layer_names(record: Record, listed: Sequence[HeadStatistics]) -> Mapping[tuple[int, str], Text]:
    """The name of each layer of the listed heads; none where there is but one."""
    wanted = {_key(head)[:2] for head in listed}
    named = {
        (layer.layer, layer.name): Text(short_name(layer, record.layers), style="" if layer.verified else "bold red")
        for layer in record.layers
        if (layer.layer, layer.name) in wanted
    }
    return named if len(named) > 1 else {}


def _profile_steps(record: Record) -> tuple[int, ...]:
    return survey_of(record).steps if record.survey is not None or record.layers else ()


_PROFILE, LEARNED = "distance →", "σ"
_TOO_SMALL = 5e-4
"""What no spark is drawn for."""
_HEAD_WIDTH, _KIND_WIDTH = 5, 22


def _columns(record: Record, precision: int) -> list[_Column]:
    """All columns, in the order in which they stand. The last to give way are those that name the kind."""
    survey = survey_of(record) if record.survey is not None or record.layers else None
    sink_tokens, n_patterns = (SINK_TOKENS, 0) if survey is None else (survey.sink_tokens, len(survey.patterns))
    has_learned = any(head.learned_sink is not None for head in record.heads)

    def share(name: str) -> _Tell:
        return lambda of: told(getattr(of, name), lambda x: share_text(x, precision))

    def number(name: str) -> _Tell:
        return lambda of: told(getattr(of, name, None), short_text)

    wide = precision + 2
    columns = [
        _Column("H", 5, 3, lambda of: told(of.entropy, lambda x: f"{x:.2f}"), "entropy"),
        _Column("H/max", 5, 1, lambda of: told(of.entropy_share, lambda x: f"{100 * x:.0f}%"), "entropy_share"),
        _Column("keys", 5, 2, number("effective_keys"), "effective_keys"),
        _Column("1/Σp²", 5, 7, number("participation"), "participation"),
        _Column("|i−j|", 5, 1, number("distance"), "distance"),
        _Column("50%", 5, 6, number("window_50"), "window_50"),
        _Column("90%", 5, 5, number("window_90"), "window_90"),
        _Column("99%", 5, 7, number("window_99"), "window_99"),
        _Column("sink", wide, 1, share("sink"), "sink"),
        *([_Column(LEARNED, wide, 0, share("learned_sink"), "learned_sink")] if has_learned else []),
        _Column(f"≤{sink_tokens}", wide, 7, share("leading"), "leading"),
        _Column("diag", wide, 3, share("diagonal"), "diagonal"),
        _Column("prev", wide, 1, share("previous"), "previous"),
        _Column("dup", wide, 1, share("duplicate"), "duplicate"),
        _Column("ind", wide, 1, share("induction"), "induction"),
        _Column(f"±{NEAR}", wide, 6, share("near"), "near"),
    ]
    for index in range(n_patterns):
        columns.append(_Column(f"p{index + 1}", wide, 0, _pattern_teller(index, precision)))
    return [*columns, _Column("max", 6, 4, number("max_score"), "max_score")]


def _pattern_teller(index: int, precision: int) -> _Tell:
    return lambda of: told(of.patterns[index], lambda x: share_text(x, precision))


def _fitting(columns: list[_Column], width: int, profile: int, sort: str) -> list[_Column]:
    """The columns that fit, with room for the profile: those that yield soonest go first, that which heads
    are ordered by never."""
    room, kept = width - profile, columns
    for step in range(7, 1, -1):
        if sum(column.width + 1 for column in kept) <= room:
            break
        kept = [column for column in kept if column.yields < step or column.field == sort]
    while kept and sum(column.width + 1 for column in kept) > width:
        last = max(range(len(kept)), key=lambda place: (kept[place].field != sort, kept[place].yields, place))
        kept = kept[:last] + kept[last + 1 :]
    return kept


def _baselines(record: Record, listed: Sequence[HeadStatistics]) -> Iterator[tuple[str, HeadStatistics]]:
    """Uniform attention, by a head that has it beside itself: one row where it is the same for all, else one for each head,
    or for all layers of a checkpoint that share it."""
    groups: dict[Averages, list[HeadStatistics]] = {}
    for head in listed:
        if head.uniform is not None:
            groups.setdefault(replace(head.uniform, offset=None, at_offset=None), []).append(head)
    if len(groups) > 1 and not record.layers:
        yield from ((f"head {head.head} if uniform", head) for head in listed if head.uniform is not None)
        return
    for heads in groups.values():
        own = {_key(head)[:2] for head in heads}
        layers = names_of([layer for layer in record.layers if (layer.layer, layer.name) in own])
        label = "if uniform" if len(groups) == 1 else f"uniform, {layers}"
        yield fitted(label, _KIND_WIDTH - 1), heads[0]


def _kind_text(head: HeadStatistics) -> Text:
    """The sign and name of a kind, and how sure it is."""
    glyph, style = KIND_SIGNS[head.kind]
    sure = "" if head.certainty is None or head.kind == "mixed" else f" {share_text(head.certainty, 2)}"
    return Text(f"{glyph} {head.kind}", style=style).append(sure, style="dim")


_COLUMN_OF: Mapping[Kind, str] = {
    "sink": "sink",
    "previous-token": "prev",
    "diagonal": "diag",
    "duplicate-token": "dup",
    "induction": "ind",
    "local": f"±{NEAR}",
    "uniform": "H/max",
}


def _emphasis(head: HeadStatistics, column: _Column) -> str:
    """The number that gave the head its kind stands out."""
    return f"bold {KIND_SIGNS[head.kind][1]}" if _COLUMN_OF.get(head.kind) == column.name else ""


def _sparks(record: Record, name: str, at: tuple[str, int]) -> str:
    """The share of the mass at each distance of a profile, over all sequences, relative to the largest."""
    prefix, place = at
    profiles = record.arrays[prefix + name]
    shares = np.nan_to_num(profiles[:, min(place, profiles.shape[1] - 1)]).mean(axis=0)
    return sparkline([float(share) if share > _TOO_SMALL else 0.0 for share in shares])
