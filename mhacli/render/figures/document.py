"""The picture of a record as an SVG document (a head, a grid of heads, the trace, or effects), and
as PNG.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rich.console import Group

from mhacli.errors import EXIT_CHECK, MhaError, library
from mhacli.record.record import Record
from mhacli.render.base.format import provenance
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import drawable_heads
from mhacli.render.base.terminal import bare
from mhacli.render.checkpoint.effect import effect_grids, effect_words, measured_words
from mhacli.render.figures.grids import grids, legend
from mhacli.render.figures.heads import heads_figure
from mhacli.render.figures.svg import document, printed
from mhacli.render.page.elements import WIDE
from mhacli.render.run.steps import steps_table
from mhacli.render.run.trace import closing, header, step_table

_MOST, _COLUMNS = 64, 160
"""The most steps of a picture, and the columns of the terminal whose view it shows."""


def figure(record: Record, options: ViewOptions) -> str:
    """Self-contained SVG text, with the same bytes for the same record and options.

    The default picture is effects, the single chosen head, a grid of all heads, or the walkthrough
    of a record without heads. Raises `UsageError` for options that the record or the picture does
    not support, and `MhaError` if the record lacks the data.
    """
    kind, metadata = options.figure, {"command": [*record.command], **dict(provenance(record))}
    if kind == "effects" or (kind is None and record.effect is not None and options.heads is None):
        return _effects(record, metadata)
    if kind == "walk" or (kind is None and record.trace and not record.heads):
        return _walk(record, metadata)
    usual = "head" if len(drawable_heads(record, options)) == 1 else "grid"
    return heads_figure(record, options, kind or usual, metadata)


def _walk(record: Record, metadata: Mapping[str, object]) -> str:
    """The table of a record's steps as the terminal prints it. Raises `MhaError` if it has none."""
    if not record.trace:
        raise MhaError("the record has no steps to draw", hint="mha trace records them")
    screen = Screen(_COLUMNS, colour=False)
    if record.decoding is not None:
        steps = step_table(record.trace, range(len(record.sequences)), _MOST)
        title, parts = "decoding, step by step", [bare(steps, screen.width)]
    else:
        title, steps = (
            "attention, site by site",
            replace(steps_table(record), most=_MOST, has_ends=True),
        )
        parts = [bare(steps, screen.width), closing(record, screen)]
    return document(
        title, [printed(Group(header(record, screen), "", *parts), screen.width)], metadata
    )


_SIDE = 720.0
"""The size of the map of heads."""


def _effects(record: Record, metadata: Mapping[str, object]) -> str:
    """The picture of a record's effects. Raises `MhaError` if it has none, or they are not
    proven.
    """
    summary = record.effect
    if summary is None:
        hint = "mha effect … --save makes such a record"
        raise MhaError("the record has no effects, so none can be drawn", hint=hint)
    if not summary.verified.ok:
        message = "the effects are not drawn: a second computation gives other numbers"
        raise MhaError(message, code="self-check", exit_code=EXIT_CHECK)
    maps, title = effect_grids(record), f"effect on {measured_words(record, summary)}"
    body = [
        *(grids([("", [of])], _SIDE) for of in maps),
        *([legend(maps, maps[0].meaning)] if maps else []),
    ]
    return document(
        title, body, metadata, caption=[part.plain for part in effect_words(record, WIDE)]
    )


# ------------------------------------------------------------------------------------------- as PNG

_ZOOM = 2.0
"""Pixels per unit of the picture, for screens of twice the usual density."""


def require_png() -> None:
    """Raises `MhaError` if PNG is not available: without the library, or without a font, which
    would drop all text.
    """
    library("resvg_py", "--png")
    if png(document("mha", [], {})) == png(document("", [], {})):
        hint = "install one, such as DejaVu Sans Mono, or use --svg"
        raise MhaError("--png needs a font, and none is installed", hint=hint)


def png(svg: str) -> bytes:
    """The picture as PNG, at twice its size."""
    import resvg_py

    rendered: bytes = resvg_py.svg_to_bytes(svg_string=svg, zoom=_ZOOM, background="#ffffff")
    return rendered
