"""Effects of removals as a picture: a row of heads per layer, and the texts that queries read, on one scale."""

from __future__ import annotations

from mhacli.errors import EXIT_CHECK, MhaError
from mhacli.record.record import Record
from mhacli.render.base.options import Screen
from mhacli.render.checkpoint.effect import effect_grids, effect_words, measured_words
from mhacli.render.figures.grids import grids, legend
from mhacli.render.figures.svg import Sheet

_SIDE = 720.0
"""The size of the map of heads."""


def effects_sheet(record: Record) -> Sheet:
    """The picture of a record's effects. Raises `MhaError` if it has none, or they are not proven."""
    summary = record.effect
    if summary is None:
        raise MhaError(
            "the record has no effects, so none can be drawn", hint="mha effect … --save makes such a record"
        )
    if not summary.verified.ok:
        raise MhaError(
            "the effects are not drawn: a second computation gives other numbers",
            code="self-check",
            exit_code=EXIT_CHECK,
        )
    maps = effect_grids(record)
    return Sheet(
        title=f"effect on {measured_words(record, summary)}",
        body=[*(grids([("", [of])], _SIDE) for of in maps), *([legend(maps, maps[0].meaning)] if maps else [])],
        caption=[part.plain for part in effect_words(record, Screen(10_000, False))],
    )
