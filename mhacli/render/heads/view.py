"""The terminal view of many heads: an overview with a row each, and what was asked besides, cell by cell."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.render.base.format import (
    bytes_text,
    configuration,
    count_of,
    filled,
    number_text,
    percent_text,
    seconds_text,
)
from mhacli.render.base.options import Screen, ViewOptions, chosen
from mhacli.render.base.selection import places_of, survey_of
from mhacli.render.heads.cells import corner_view, key_name, strong_places, strongest_keys
from mhacli.render.heads.heatmap import pooled_map
from mhacli.render.heads.table import legend, overview
from mhacli.requests.layer import BASE_BYTES
from mhacli.results.record.heads import SINK_LIFT, HeadStatistics, Survey, in_order
from mhacli.results.record.record import Record
from mhacli.text.escape import visible

MAX_SEQUENCES = 4


def heads_view(record: Record, options: ViewOptions, screen: Screen) -> RenderableType:
    """Everything that `mha heads` prints of a record. Raises `UsageError` for a head or sequence that does not exist."""
    survey = survey_of(record)
    listed = in_order(record.heads, options.sort)
    if options.heads is not None:
        places_of(record, options.heads)
        listed = tuple(head for head in listed if head.head in options.heads)
    sequences = chosen(options.sequences, len(record.sequences), MAX_SEQUENCES, options.everything, "sequence").shown
    sections: list[RenderableType] = [
        Group(configuration(record, screen.width), _summary(record, survey, screen)),
        Group(
            overview(record, listed, options, screen),
            *legend(record, listed, options, screen),
            _sinks(record, listed, screen),
        ),
        strong_places(record, listed, options, screen),
        *(
            pooled_map(record, place, b, options, screen)
            for place in places_of(record, options.maps)
            for b in sequences
        ),
    ]
    if survey.kept.corner is not None:
        corners = ((place, b) for place in places_of(record, [head.head for head in listed]) for b in sequences)
        sections += [corner_view(record, survey.kept.corner, place, b, options, screen) for place, b in corners]
    if survey.kept.queries:
        sections += [strongest_keys(record, listed, b, options, screen) for b in sequences]
    sections.append(_checks(record, survey, screen))
    spaced = [part for section in sections for part in (Text(""), section)]
    return Group(*spaced[1:])


# ---------------------------------------------------------------------------------------------------------- overview


def _summary(record: Record, survey: Survey, screen: Screen) -> Text:
    """What was looked at, how, in which time, and what it would have taken otherwise."""
    lengths = sorted({len(sequence.tokens) for sequence in record.sequences})
    tokens = (
        count_of(lengths[-1], "token", grouped=True)
        if len(lengths) == 1
        else f"{lengths[0]:,} to {lengths[-1]:,} tokens"
    )
    total = record.timings.get("total")
    parts = [
        f"{count_of(len(record.sequences), 'sequence')} of {tokens}",
        f"z and log-sum-exp: {visible(survey.kernel)}",
        *([] if total is None else [f"took {seconds_text(total.median_s)}"]),
        f"memory: about {bytes_text(max(0, survey.peak_bytes - BASE_BYTES))} beyond torch's own; full matrices "
        f"{bytes_text(survey.full_bytes)}",
    ]
    return Text("\n".join(filled(parts, screen.width)), style="dim")


def sinks_are(least: float) -> str:
    """What a sink is, in words; `least` is the share of all attention that it must get."""
    return f"sinks, keys with {percent_text(least)} of all attention or more, {SINK_LIFT:g} × uniform and from most queries"


def _sinks(record: Record, listed: Sequence[HeadStatistics], screen: Screen) -> Text:
    """Every sink, head by head, with its share of all attention beside its uniform share."""
    survey = survey_of(record)
    told = [
        f"head {head.head}: "
        + ", ".join(
            f"{key_name(record, s.sequence, s.key)} {percent_text(s.share)} (uniform {percent_text(s.uniform)})"
            for s in head.sink_keys
        )
        for head in listed
        if head.sink_keys
    ]
    what = f"{sinks_are(survey.sink_share)}: "
    lines = filled([what + (told[0] if told else "none"), *told[1:]], screen.width)
    return Text("\n".join(lines), style="magenta" if told else "dim")


def _checks(record: Record, survey: Survey, screen: Screen) -> Text:
    """Whether the statistics hold together, each check with its number."""
    ok = record.self_check.ok
    verdict = Text("self-check ok: " if ok else "self-check FAILED: ", style="bold green" if ok else "bold red")
    parts = [
        f"{visible(check.name)} within {number_text(check.error)} (tolerance {number_text(check.tolerance)})"
        for check in survey.checks
    ]
    lines = "\n".join(filled(parts, screen.width, "; "))
    return verdict.append(f"\n{lines}", style="not bold default")
