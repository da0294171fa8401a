"""The terminal view of a run: patterns, a table of heads, the self-check; on request tokens, shapes and timings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO
from textwrap import wrap
from typing import NamedTuple

import numpy as np
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mhacli.record.checks import SelfCheck, error_text
from mhacli.record.record import Record
from mhacli.render.base.format import (
    bytes_text,
    configuration,
    count_of,
    filled,
    plain_table,
    rough_note,
    seconds_text,
    texts_in_words,
)
from mhacli.render.base.options import Screen, Selection, ViewOptions, chosen
from mhacli.render.base.terminal import bare, table
from mhacli.render.base.tokens import hidden, token_tables
from mhacli.render.heads.fitting_view import fitting_view
from mhacli.render.heads.head_map import HeadPattern, largest_weight
from mhacli.render.heads.heatmap import scale_caption
from mhacli.render.heads.matrix import (
    PatternGroup,
    TitledPattern,
    drawing_scale,
    drawings,
    kv_head_of,
    matrix_caption,
    n_lines,
)
from mhacli.render.heads.table import heads_table
from mhacli.render.heads.view import sinks_line
from mhacli.settings import SINK_SHARE
from mhacli.sites import token_bytes
from mhacli.text.escape import visible

MAX_HEADS, MAX_SEQUENCES, MAX_GROUPS = 8, 4, 8
FIRST_SCREEN, _BELOW = 45, 10
"""About as many lines as a view without more options may take, and those of them for captions, blanks, the self-check and what
to type next. Of more heads than the rest allows, the first ones are drawn."""
_FORMULA_ROOM, _BAR_WIDTH, _WIDE = 24, 20, 60
_BETWEEN_AXES = " · "


def run_view(record: Record, options: ViewOptions, screen: Screen) -> RenderableType:
    """The output of `mha run` and `mha show`. Raises `UsageError` for a head or sequence out of range."""
    sequences = chosen(options.sequences, len(record.sequences), MAX_SEQUENCES, options.everything, "sequence")
    heads = chosen(options.heads, record.config.n_heads, MAX_HEADS, options.everything, "head")
    listed = [head for head in record.heads if options.heads is None or head.head in options.heads]
    limit = None if options.everything or options.heads is not None else MAX_HEADS
    of_heads = replace(heads_table(record, listed, options), most=limit, has_ends=True)
    if options.brief:
        return Group(bare(of_heads, screen.width), Text(""), self_check_line(record.self_check))
    sections: list[RenderableType] = [
        Group(configuration(record, screen.width, *texts_in_words(record)), *_random_rows(record))
    ]
    if (options.tokens or options.verbose) and not record.config.random:
        sections += token_tables(record, sequences, options, screen)
    if options.shapes or options.verbose:
        sections.append(shape_trace(record, screen))
    sections += groups_table(record)
    sinks = [sinks_line(record, listed, SINK_SHARE, screen)] if any(head.sink_keys for head in listed) else []
    in_words = Group(*table(of_heads, screen.width, has_all=options.verbose), *sinks)
    room = FIRST_SCREEN - _BELOW - height_of(Group(sections[0], in_words), screen)
    sections.append(in_words)
    if options.timings or options.verbose:
        sections.append(timing_table(record, screen))
    drawn = _heads(record, sequences, heads, options, screen, room=room)
    sections.append(Group(*drawn, self_check_line(record.self_check)))
    return Group(*_spaced(sections))


class Comparison(NamedTuple):
    """What a self-check compares, in words: the claim if it passes, and the fault if no difference can be computed."""

    agrees: str
    has_none: str


OF_PATTERN = Comparison(
    "the pattern gives the output", "the output, or what the pattern gives for it, has NaN or infinite numbers"
)


def self_check_line(check: SelfCheck, compared: Comparison = OF_PATTERN) -> Text:
    """One line: whether the output follows from the pattern shown, or from what it was `compared` with."""
    verdict = Text("self-check ok" if check.ok else "self-check FAILED", style="bold green" if check.ok else "bold red")
    if check.error is None:
        return verdict.append(f": {compared.has_none}", style="not bold default")
    within = "within" if check.ok else "only within"
    return verdict.append(
        f": {compared.agrees} {within} {error_text(check.error)} (tolerance {error_text(check.tolerance)})",
        style="not bold default",
    )


def height_of(view: RenderableType, screen: Screen) -> int:
    """The lines that a view takes on a screen."""
    console = Console(width=screen.width, file=StringIO(), markup=False, emoji=False, highlight=False)
    return len(console.render_lines(view, pad=False))


def _spaced(sections: list[RenderableType]) -> Iterator[RenderableType]:
    for place, section in enumerate(sections):
        if place:
            yield Text("")
        yield section


def _random_rows(record: Record) -> Iterator[RenderableType]:
    c = record.config
    if c.random is not None:
        shape = [*c.random, c.d_input]
        yield Text(
            f"random input: {c.distribution} numbers {shape}, rows x0 … x{c.random[1] - 1}, seed {c.seed}", style="bold"
        )


# ------------------------------------------------------------------------------------------------------------ shapes


def shape_trace(record: Record, screen: Screen) -> Text:
    """Each site with named and sized axes, and its formula if there is room."""
    rows = [(visible(step.site), axes_text(step.axes, step.shape), visible(step.formula)) for step in record.trace]
    name_width = max((cell_len(name) for name, _, _ in rows), default=0)
    axes_width = max((cell_len(axes) for _, axes, _ in rows), default=0)
    room = screen.width - name_width - axes_width - 4
    trace = Text()
    for number, (name, axes, formula) in enumerate(rows):
        trace.append("\n" if number else "").append(f"{name:<{name_width}}  ", style="bold")
        if room >= _FORMULA_ROOM:
            lines = wrap(formula, room, break_long_words=False, break_on_hyphens=False) or [""]
            trace.append(axes).append(" " * (axes_width - cell_len(axes) + 2), style="dim")
            trace.append(("\n" + " " * (screen.width - room)).join(lines), style="dim")
        else:
            lines = filled(axes.split(_BETWEEN_AXES), screen.width - name_width - 2)
            trace.append(("\n" + " " * (name_width + 2)).join(lines))
    return trace


def groups_table(record: Record) -> Iterator[RenderableType]:
    """The query heads of each kv head, and the saved bytes; empty without shared kv heads."""
    c = record.config
    n_kv_heads, group = c.n_kv_heads or c.n_heads, c.heads_per_kv_head
    if group == 1:
        return
    rows = plain_table()
    rows.add_column("kv head", justify="right")
    rows.add_column("read by query heads")
    for kv_head in range(min(n_kv_heads, MAX_GROUPS)):
        heads = range(kv_head * group, (kv_head + 1) * group)
        listed = ", ".join(map(str, heads)) if group <= 8 else f"{heads[0]} … {heads[-1]}"
        rows.add_row(str(kv_head), listed)
    if n_kv_heads > MAX_GROUPS:
        rows.add_row("⋮", Text(f"{n_kv_heads - MAX_GROUPS} more, {group} query heads each", style="dim"))
    unshared, shared = bytes_text(token_bytes(c, c.n_heads)), bytes_text(token_bytes(c))
    sentence = f"keys and values of one token take {shared} instead of {unshared}"
    yield Group(
        Text("shared keys and values", style="bold"), rows, Text(f"{sentence}: 1/{group} of the cache", style="dim")
    )


def axes_text(axes: tuple[str, ...], shape: tuple[int, ...]) -> str:
    """`batch 1 · head 4 · query 6 · d_head 16`."""
    return visible(_BETWEEN_AXES.join(f"{axis} {size}" for axis, size in zip(axes, shape, strict=False)))


# ------------------------------------------------------------------------------------------------------------- heads


def _heads(
    record: Record, sequences: Selection, heads: Selection, options: ViewOptions, screen: Screen, *, room: int
) -> Iterator[RenderableType]:
    """Every chosen head of every chosen sequence in the chosen view, as many as have room in lines; in training before and after
    dropout."""
    if options.view == "none":
        return
    if "pattern" not in record.arrays:
        yield Text(
            "the pattern is not in this record, so no head is drawn; --keep pattern keeps it, --keep-limit makes room",
            style="yellow",
        )
        return
    groups = [_group(record, index, heads) for index in sequences.shown]
    patterns = [pattern.head for group in groups for pattern in group.patterns]
    options, note = fitting_view(patterns, options, screen)
    n_drawn = len(heads.shown)
    while n_drawn > 1 and not _are_short(groups, options, screen, room):
        n_drawn -= 1
        first = Selection(tuple(range(n_drawn)), record.config.n_heads - n_drawn)
        groups = [_group(record, index, first, gap=n_drawn) for index in sequences.shown]
    patterns = [pattern.head for group in groups for pattern in group.patterns]
    if note is not None:
        yield note
    scale = drawing_scale(patterns, largest_weight(record, "pattern"), options, screen)
    for group in groups:
        yield from drawings(group, scale, options, screen)
    if "dropped" in record.arrays:
        yield _dropout_caption(record, sequences)
    if options.view == "matrix":
        yield matrix_caption(groups, scale.largest, options, screen)
    if options.view == "heatmap":
        yield scale_caption(patterns, scale, screen, options.precision)


def _are_short(groups: Sequence[PatternGroup], options: ViewOptions, screen: Screen, room: int) -> bool:
    """Whether the patterns have room, or all were requested."""
    is_chosen = options.heads is not None or options.everything or options.verbose
    return is_chosen or sum(n_lines(group, options, screen) for group in groups) <= room


def _group(record: Record, sequence: int, heads: Selection, *, gap: int | None = None) -> PatternGroup:
    """The heads of a sequence. The note on hidden ones follows the first `gap` heads."""
    each = [[*_of_head(HeadPattern(record, sequence, head))] for head in heads.shown]
    missing = hidden(heads.hidden, "head", "--all or --head") if heads.hidden else None
    before = sum(map(len, each[: heads.before if gap is None else gap]))
    return PatternGroup([p for patterns in each for p in patterns], before, missing)


def _of_head(head: HeadPattern) -> Iterator[TitledPattern]:
    """The pattern of a head; in training before and after dropout."""
    sites = {"pattern": ", before dropout", "dropped": ", after dropout"}
    if "dropped" not in head.record.arrays:
        sites = {"pattern": ""}
    sequence = f"sequence {head.sequence} · " if len(head.record.sequences) > 1 else ""
    for site, note in sites.items():
        name = f"{sequence}head {head.place}{kv_head_of(head.record, head.place)}{note}"
        yield TitledPattern(Text(name, style="bold"), replace(head, site=site))


def _dropout_caption(record: Record, sequences: Selection) -> Text:
    """Why rows no longer sum to 1 after dropout, and the range of their sums."""
    p = record.config.dropout
    allowed, before, after = (record.arrays[name] for name in ("allowed", "pattern", "dropped"))
    rows = np.concatenate(
        [after[b, :, HeadPattern(record, b, 0, "dropped").queries].sum(axis=-1).ravel() for b in sequences.shown]
    )
    cells = np.broadcast_to(allowed, before.shape) & (before > 0)
    part = float((after[cells] == 0).mean()) if cells.any() else 0.0
    return Text(
        f"dropout {p:g}: every weight became 0 with probability {p:g} (here {100 * part:.0f} % of them did), and the rest "
        f"were multiplied by 1/(1 − {p:g}) = {1 / (1 - p):.4g}, so that a row sums to 1 only on average: over all heads from "
        f"{rows.min():.2f} to {rows.max():.2f}, mean {rows.mean():.2f}. Without --train nothing is dropped.",
        style="dim",
    )


# ------------------------------------------------------------------------------------------------------------ timing


def timing_table(record: Record, screen: Screen) -> Table:
    """Median, spread and percentage of every stage, with the first run separate, and tokens per second in total."""
    total = record.timings.get("total")
    is_wide = screen.width >= _WIDE
    columns = ("first run" if is_wide else "first", "median", "IQR", "of total")
    rows = plain_table(("stage", False), *((name, True) for name in columns), gap=2 if is_wide else 1)
    if total is None:
        return rows
    for site, timing in record.timings.items():
        percentage = (
            "" if site == "total" else f"{100 * timing.median_s / total.median_s:.0f} %" if total.median_s else "–"
        )
        style = "bold" if site == "total" else ""
        times = [seconds_text(s) for s in (timing.first_s, timing.median_s, timing.iqr_s)]
        rows.add_row(visible(site), *times, percentage, style=style)
    n_tokens = sum(len(sequence.tokens) for sequence in record.sequences)
    rate = f"{n_tokens / total.median_s:,.0f} tokens/s " if total.median_s else ""
    caption = [f"{rate}over {count_of(len(total.samples_s), 'run')} after the first", rough_note([total])]
    rows.caption = Text("; ".join(filter(None, caption)), style="dim")
    rows.caption_justify = "left"
    return rows
