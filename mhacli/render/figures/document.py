"""The picture of a record as an SVG document (a head, a grid of heads, the trace, or effects), and
as PNG.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import assert_never

from rich.console import Group

from mhacli.errors import EXIT_CHECK, MhaError, library
from mhacli.record.record import EffectRecord, Record, is_a
from mhacli.render.base.format import provenance
from mhacli.render.base.options import Figure, Screen, ViewOptions
from mhacli.render.base.terminal import bare
from mhacli.render.checkpoint.effect import effect_grids, effect_words, measured_words
from mhacli.render.page.elements import WIDE
from mhacli.render.run.steps import steps_table
from mhacli.render.run.trace import closing, header

from .grids import GridRow, grids, legend
from .heads import heads_figure
from .svg import document, printed

_MOST_STEPS = 64
"""The most steps of a picture."""
_COLUMNS = 160
"""The columns of the terminal whose view a picture shows."""


def figure(record: Record, options: ViewOptions) -> str:
    """Self-contained SVG text, with the same bytes for the same record and options.

    The default picture is effects, the single chosen head, a grid of all heads, or the walkthrough
    of a record without heads. Raises `UsageError` for options that the record or the picture does
    not support, and `MhaError` if the record lacks the data.
    """
    metadata = {"command": [*record.command], **dict(provenance(record))}
    usual: Figure = "grid"
    if options.heads is None and is_a(record, EffectRecord):
        usual = "effects"
    elif record.trace and not record.heads:
        usual = "walk"
    match options.figure or usual:
        case "effects":
            return _effects(record, metadata)
        case "walk":
            return _walk(record, metadata)
        case "head":
            return heads_figure(record, options, metadata, is_of_one=True)
        case "grid":
            return heads_figure(record, options, metadata)
        case never:
            assert_never(never)


def _walk(record: Record, metadata: Mapping[str, object]) -> str:
    """The table of a record's steps as the terminal prints it. Raises `MhaError` if it has none."""
    if not record.trace:
        raise MhaError("the record has no steps to draw", hint="mha trace records them")
    screen = Screen(_COLUMNS, colour=False)
    steps = bare(replace(steps_table(record), most=_MOST_STEPS, has_ends=True), screen.width)
    view = Group(header(record, screen), "", steps, closing(record, screen))
    return document("attention, site by site", [printed(view, screen.width)], metadata)


_SIDE = 720.0
"""The size of the map of heads."""


def _effects(record: Record, metadata: Mapping[str, object]) -> str:
    """The picture of a record's effects. Raises `MhaError` if it has none, or they are not
    proven.
    """
    if not is_a(record, EffectRecord):
        hint = "mha effect … --save makes such a record"
        raise MhaError("the record has no effects, so none can be drawn", hint=hint)
    if not record.effect.verified.ok:
        message = "the effects are not drawn: a second computation gives other numbers"
        raise MhaError(message, code="self-check", exit_code=EXIT_CHECK)
    panels = effect_grids(record)
    body = [grids([GridRow("", [g])], _SIDE) for g in panels]
    if panels:
        body.append(legend(panels, panels[0].meaning))
    title = f"effect on {measured_words(record)}"
    caption = [part.plain for part in effect_words(record, WIDE)]
    return document(title, body, metadata, caption=caption)


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
