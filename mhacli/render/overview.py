"""The overview of heads: a row for each, with its kind, its numbers, and those of uniform attention below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.table import Table
from rich.text import Text

from mhacli.heads import NEAR, SINK_TOKENS, Averages, HeadStatistics, Kind, Survey
from mhacli.record import Record
from mhacli.render.options import Screen, ViewOptions
from mhacli.render.words import share_text, short_text, sparkline, told

GLYPHS: Mapping[Kind, tuple[str, str]] = {
    "previous-token": ("◀", "cyan"),
    "sink": ("┃", "magenta"),
    "diagonal": ("╲", "blue"),
    "duplicate-token": ("≡", "yellow"),
    "induction": ("↻", "green"),
    "local": ("▪", "bright_blue"),
    "positional": ("⇠", "bright_cyan"),
    "uniform": ("░", "white"),
    "mixed": ("∗", "white"),
}
"""A sign and a colour for each kind of head."""


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
    """A row per head; below, what uniform attention over the same keys would give. `gap` says before which row how many
    heads are left out.

    Columns give way where there is no room; the profile of distances stands where the record has one.
    """
    columns, has_profile = _chosen(record, options, screen)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("head", justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True, width=_KIND_WIDTH - 1)
    for column in columns:
        table.add_column(column.name, justify="right", no_wrap=True, min_width=column.width)
    if has_profile:
        table.add_column(_PROFILE, no_wrap=True, min_width=len(_profile_steps(record)))
    known = [head.head for head in record.heads]
    for row, head in enumerate(listed):
        if gap[1] and row == gap[0]:
            table.add_row("⋮", Text(f"{gap[1]} more (--all)", style="dim"))
        own = [Text(column.tell(head), style=_emphasis(head, column)) for column in columns]
        line = [Text(_sparks(record, "profile", known.index(head.head)), style="cyan")] if has_profile else []
        table.add_row(str(head.head), _kind_text(head), *own, *line)
    for label, uniform, place in _baselines(record, listed):
        numbers = [Text(column.tell(uniform), style="dim") for column in columns]
        line = [Text(_sparks(record, "uniform_profile", place), style="dim")] if has_profile else []
        table.add_row("", Text(label, style="dim"), *numbers, *line)
    return table


def column_names(record: Record, options: ViewOptions, screen: Screen) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The headings that the overview shows on a screen, and those that gave way."""
    columns, has_profile = _chosen(record, options, screen)
    shown = [*(column.name for column in columns), *([_PROFILE] if has_profile else [])]
    every = [column.name for column in _columns(record.survey, options.precision)]
    return tuple(shown), tuple(name for name in every if name not in shown)


def _chosen(record: Record, options: ViewOptions, screen: Screen) -> tuple[list[_Column], bool]:
    """The columns that fit, and whether the profile of distances does too."""
    steps, room = len(_profile_steps(record)), screen.width - _HEAD_WIDTH - _KIND_WIDTH
    width = max(steps, len(_PROFILE)) if steps else 0
    every = _columns(record.survey, options.precision)
    columns = _fitting(every, room, width, options.sort.partition(":")[0])
    return columns, bool(steps) and sum(column.width + 1 for column in columns) + width <= room


def _profile_steps(record: Record) -> tuple[int, ...]:
    return () if record.survey is None else record.survey.steps


_PROFILE = "distance →"
_TOO_SMALL = 5e-4
"""What no spark is drawn for."""
_HEAD_WIDTH, _KIND_WIDTH = 5, 22


def _columns(survey: Survey | None, precision: int) -> list[_Column]:
    """All columns, in the order in which they stand. The last to give way are those that name the kind."""
    sink_tokens, n_patterns = (SINK_TOKENS, 0) if survey is None else (survey.sink_tokens, len(survey.patterns))

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


def _baselines(record: Record, listed: Sequence[HeadStatistics]) -> Iterator[tuple[str, Averages, int]]:
    """Uniform attention: one row where it is the same for all heads, else one for each."""
    beside = [head for head in listed if head.uniform is not None]
    if len({head.uniform and replace(head.uniform, offset=None, at_offset=None) for head in beside}) == 1:
        beside = beside[:1]
    known = [head.head for head in record.heads]
    for head in beside:
        label = "if uniform" if len(beside) == 1 else f"head {head.head} if uniform"
        yield label, head.uniform or Averages(), known.index(head.head)


def _kind_text(head: HeadStatistics) -> Text:
    """The sign and name of a kind, and how sure it is."""
    glyph, style = GLYPHS[head.kind]
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
    return f"bold {GLYPHS[head.kind][1]}" if _COLUMN_OF.get(head.kind) == column.name else ""


def _sparks(record: Record, name: str, place: int) -> str:
    """The share of the mass at each distance of a profile, over all sequences, relative to the largest."""
    profiles = record.arrays[name]
    shares = np.nan_to_num(profiles[:, min(place, profiles.shape[1] - 1)]).mean(axis=0)
    return sparkline([float(share) if share > _TOO_SMALL else 0.0 for share in shares])
