"""The terminal view of many heads: an overview with a row each, and what was asked besides, cell by cell."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.errors import UsageError
from mhacli.heads import NEAR, Survey, in_order
from mhacli.record import Record
from mhacli.render.cells import corner_view, places_of, strong_places, strongest_keys
from mhacli.render.options import Screen, ViewOptions, chosen
from mhacli.render.overview import overview
from mhacli.render.pooled import pooled_map
from mhacli.render.words import (
    bytes_text,
    configuration,
    count_of,
    filled,
    number_text,
    seconds_text,
)
from mhacli.text.escape import visible

MAX_SEQUENCES = 4


def heads_view(record: Record, options: ViewOptions, screen: Screen) -> RenderableType:
    """Everything that `mha heads` prints of a record. Raises `UsageError` for a head or sequence that does not exist."""
    survey = _survey(record)
    listed = in_order(record.heads, options.sort)
    if options.heads is not None:
        listed = tuple(head for head in listed if head.head in options.heads)
    sequences = chosen(options.sequences, len(record.sequences), MAX_SEQUENCES, options.everything, "sequence").shown
    sections: list[RenderableType] = [
        Group(configuration(record, screen.width), _summary(record, survey, screen)),
        Group(overview(record, listed, options, screen), *_legend(survey, screen)),
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


def _survey(record: Record) -> Survey:
    if record.survey is None:
        raise UsageError("the record must be one of mha heads to be drawn so, got another")
    return record.survey


# ---------------------------------------------------------------------------------------------------------- overview


def _summary(record: Record, survey: Survey, screen: Screen) -> Text:
    """What was looked at, how, in which time, and what it would have taken otherwise."""
    lengths = sorted({len(sequence.tokens) for sequence in record.sequences})
    tokens = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
    total = record.timings.get("total")
    parts = [
        f"{count_of(len(record.sequences), 'sequence')} of {tokens} tokens",
        f"z and log-sum-exp: {visible(survey.kernel)}",
        *([] if total is None else [f"took {seconds_text(total.median_s)}"]),
        f"memory: about {bytes_text(survey.peak_bytes)}; full matrices {bytes_text(survey.full_bytes)}",
    ]
    return Text("\n".join(filled(parts, screen.width)), style="dim")


def _legend(survey: Survey, screen: Screen) -> Iterator[Text]:
    """What the headings mean, in words."""
    parts = [
        "H entropy in nats, H/max of the log of the visible keys",
        "keys: exp H",
        "|i−j| mean distance in tokens, 50 90 99% of the mass lie within",
        f"mass on: sink the first token, ≤{survey.sink_tokens} the first {survey.sink_tokens}, diag itself, prev the token "
        f"before, dup the same token, ind the token after one like it, ±{NEAR} near tokens",
        *(f"p{index + 1} {visible(pattern)}" for index, pattern in enumerate(survey.patterns)),
        "max: the largest score",
        f"distance → 0 1 2 4 … {survey.steps[-1]:,}",
        "kind: by how much it exceeds uniform attention, from 0 to 1",
    ]
    for line in filled(parts, screen.width):
        yield Text(line, style="dim")


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
