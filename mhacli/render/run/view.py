"""The terminal view of a record; of a run patterns, a table of heads, the self-check, on request
tokens, shapes and timings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.numbers import shown
from mhacli.record.heads import HeadsSummary, HeadStatistics, in_order
from mhacli.record.record import (
    CheckpointRecord,
    CodeRecord,
    DecodingRecord,
    EffectRecord,
    Record,
    is_a,
)
from mhacli.render.base.doc import Column, Table
from mhacli.render.base.format import (
    configuration,
    count_of,
    flowing,
    random_line,
    rough_note,
)
from mhacli.render.base.grids import MAX_LINES, MAX_ROWS
from mhacli.render.base.options import Screen, ViewOptions, sequences_to_draw
from mhacli.render.base.selection import DrawableHead, chosen_heads, places_of
from mhacli.render.base.terminal import bare, spaced, table
from mhacli.render.base.tokens import token_tables
from mhacli.render.checkpoint.header import checks_view, texts_read
from mhacli.render.heads.head_map import (
    TitledMap,
    kv_head_of,
    maps_view,
    pattern_map,
    patterns,
    where,
)
from mhacli.render.heads.table import heads_table, sinks_line
from mhacli.render.heads.view import cells_view, strong_places
from mhacli.run import BASE_BYTES
from mhacli.text.escape import visible

from .steps import kv_heads_line, lines_table, self_check_line

MAX_HEADS_DRAWN = 8


def record_views(record: Record, options: ViewOptions, screen: Screen) -> Iterator[RenderableType]:
    """The parts of a record's terminal view in order."""
    if is_a(record, CodeRecord):
        from .trace import walk

        yield from walk(record, screen, in_detail=options.verbose)
    elif options.view == "auto" and options.heads is None and is_a(record, DecodingRecord):
        from .trace import decode_view

        yield decode_view(record, options, screen)
    elif is_a(record, EffectRecord):
        from mhacli.render.checkpoint.effect import effect_view

        yield from effect_view(record, options, screen)
    elif is_a(record, CheckpointRecord):
        from mhacli.render.checkpoint.view import layers_view

        yield layers_view(record, options, screen)
    else:
        yield layer_view(record, options, screen)


def layer_view(record: Record, options: ViewOptions, screen: Screen) -> RenderableType:
    """The output of `mha run`, `mha heads` and `mha show` of a layer. Raises `UsageError` for a
    head or sequence out of range.
    """
    summary = record.survey
    sequences = sequences_to_draw(options, len(record.sequences))
    places_of(record, [*options.maps, *(options.heads or ())])
    heads = in_order(chosen_heads(record, options), options.sort)
    rows = heads_table(record, heads, options)
    if summary is None:
        check = self_check_line(record.self_check)
        if not options.everything and options.heads is None:
            rows = replace(rows, most=MAX_HEADS_DRAWN, has_ends=True)
    else:
        check = checks_view(record, screen, in_detail=options.verbose)
    if options.brief:
        return Group(*random_line(record), bare(rows, screen.width), Text(""), check)
    sections: list[RenderableType] = [configuration(record, screen.width, *texts_read(record))]
    if (options.tokens or options.verbose) and not record.config.random:
        sections += token_tables(record, sequences, options, screen)
    if summary is None:
        sections += _steps_and_patterns(record, sequences.shown, heads, options, screen)
    else:
        sections += _heads_in_detail(record, summary, sequences.shown, heads, options, screen)
    sections += kv_heads_line(record)
    numbers = [*table(rows, screen.width, has_all=options.verbose)]
    if any(head.sink_keys for head in heads):
        numbers.append(sinks_line(record, record.attentions, heads, screen))
    sections.append(Group(*numbers))
    if summary is None and (options.timings or options.verbose):
        sections.append(_timings(record, screen))
    return spaced([*sections, check])


def _steps_and_patterns(
    record: Record,
    sequences: Sequence[int],
    heads: Sequence[HeadStatistics],
    options: ViewOptions,
    screen: Screen,
) -> Iterator[RenderableType]:
    """The steps of a run on request; and the chosen heads of the chosen sequences, as many as have
    room, in training before and after dropout.
    """
    if options.shapes or options.verbose:
        yield bare(lines_table(record), screen.width)
    if options.view == "none":
        return
    if "pattern" not in record.arrays:
        yield Text(
            "the pattern is not in this record, so no head is drawn; --keep pattern keeps it,"
            " --keep-limit makes room",
            "yellow",
        )
        return
    limit = len(heads)
    most = None
    if options.heads is None and not (options.everything or options.verbose):
        limit = MAX_HEADS_DRAWN
        most = MAX_LINES if record.dims.q_len > MAX_ROWS else MAX_ROWS
    (layer,) = record.attentions
    maps = [
        titled
        for b in sequences
        for head in heads[:limit]
        for titled in maps_of_head(DrawableHead(layer, head.head), b)
    ]
    n_more = max(0, len(heads) - limit) * len(sequences)
    parts = [*patterns(maps, options, screen, most=most, n_more=n_more)]
    if "dropped" in record.arrays:
        p = record.config.dropout
        words = (
            f"dropout {p:g}: each weight becomes 0 with probability {p:g}, and the rest are"
            f" multiplied by 1/(1 − {p:g}) = {1 / (1 - p):.4g}, so that a row sums to 1 only on"
            " average"
        )
        parts.append(Text(words, "dim"))
    if parts:
        yield Group(*parts)


def _heads_in_detail(
    record: Record,
    summary: HeadsSummary,
    sequences: Sequence[int],
    heads: Sequence[HeadStatistics],
    options: ViewOptions,
    screen: Screen,
) -> Iterator[RenderableType]:
    """What a record of head statistics shows of single heads."""
    if options.verbose:
        yield _costs(record, summary, screen)
    if options.maps:
        for sequence in sequences:
            yield maps_view(record.attentions, sequence, options, screen)
    yield from cells_view(record.attentions[0], heads, options, screen)
    yield strong_places(record, heads, options, screen)


def _costs(record: Record, summary: HeadsSummary, screen: Screen) -> Text:
    """The method, the time, and the memory that it took and that whole matrices would have
    taken.
    """
    memory = shown(max(0, summary.peak_bytes - BASE_BYTES), "bytes")
    parts = [
        f"kernel {visible(summary.kernel)}",
        f"memory about {memory} in addition to torch's own",
        f"full attention matrices would take {shown(summary.full_bytes, 'bytes')}",
    ]
    total = record.timings.get("total")
    if total is not None:
        parts.append(f"took {shown(total.median_s, 'seconds')}")
    return flowing(parts, screen.width, style="dim")


def _timings(record: Record, screen: Screen) -> RenderableType:
    """Median, spread and percentage of every stage, with the first run separate, and tokens per
    second in total.
    """
    timings = record.timings
    total = timings.get("total")
    if total is None:
        return Text("no times were measured", "dim")

    def part(site: str) -> float | None:
        median = timings[site].median_s
        return median / total.median_s if median and total.median_s else None

    columns: list[Column[str]] = [
        Column("stage", visible),
        Column("first run", lambda site: timings[site].first_s, unit="seconds", drop=2),
        Column("median", lambda site: timings[site].median_s, unit="seconds"),
        Column("IQR", lambda site: timings[site].iqr_s, unit="seconds", drop=1),
        Column("of total", part, unit="percent", digits=0),
    ]
    n_tokens = sum(len(sequence.tokens) for sequence in record.sequences)
    rate = f"{n_tokens / total.median_s:,.0f} tokens/s " if total.median_s else ""
    notes = [
        f"{rate}over {count_of(len(total.samples_s), 'run')} after the first",
        rough_note([total]),
    ]
    return Group(*table(Table(columns, [*timings]), screen.width, *filter(None, notes)))


# ----------------------------------------------------------------------------------------- patterns


def maps_of_head(head: DrawableHead, sequence: int) -> Iterator[TitledMap]:
    """The pattern of a head with its title; in training before and after dropout."""
    sites = {"pattern": ""}
    if "dropped" in head.record.arrays:
        sites = {"pattern": ", before dropout", "dropped": ", after dropout"}
    for site, note in sites.items():
        title = where(head.record, sequence, "", head.label + kv_head_of(head) + note)
        yield TitledMap(title, pattern_map(head, sequence, site=site))
