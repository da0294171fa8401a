"""The views of each result: HTML for notebooks, a terminal view, and the page of a record."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from mhacli.record.exports import Pattern, Shown
from mhacli.record.record import Record
from mhacli.render.base.options import Screen, ViewOptions


def html_of(result: Shown | Pattern) -> str:
    """The HTML of a result."""
    from mhacli.render.notebook import COLUMNS, fragment, pattern_html, record_html, terminal_part

    if isinstance(result, Pattern):
        return pattern_html(result)
    if isinstance(result, Record):
        return record_html(result)
    return fragment([("the report", terminal_part(result.views(Screen(COLUMNS, False))))])


def views_of(result: Shown, width: int, *, colour: bool) -> Iterator[RenderableType]:
    """The parts of the terminal view of a result."""
    screen = Screen(width, colour)
    if isinstance(result, Record):
        return record_views(result, ViewOptions(view="auto"), screen)
    return result.views(screen)


def page_of(record: Record) -> str:
    """The interactive page of a record, as `mha show --html` writes it."""
    from mhacli.render.page.document import page

    return page(record, ViewOptions())


def record_views(record: Record, options: ViewOptions, on: Screen) -> Iterator[RenderableType]:
    """The parts of a record's terminal view in order."""
    if record.module is not None:
        from mhacli.render.run.trace import walk

        yield from walk(record, on, in_detail=options.verbose)
    elif record.decoding is not None and options.view in ("auto", "matrix"):
        from mhacli.render.run.decode import decode_view

        yield decode_view(record, options, on)
    elif record.effect is not None:
        from mhacli.render.checkpoint.effect import effect_view

        yield from effect_view(record, options, on)
    elif record.model is not None:
        from mhacli.render.checkpoint.view import layers_view

        yield layers_view(record, options, on)
    elif record.survey is not None:
        from mhacli.render.heads.view import heads_view

        yield heads_view(record, options, on)
    else:
        from mhacli.render.run.view import run_view

        yield run_view(record, options, on)
