"""The views of each result: HTML for notebooks, a terminal view, and the page of a record."""

from __future__ import annotations

from functools import singledispatch

from mhacli.record.display import Shown
from mhacli.record.pattern import Pattern
from mhacli.record.record import Record
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.display.fragment import COLUMNS, fragment, terminal_part
from mhacli.render.display.record import pattern_html, record_html
from mhacli.render.display.terminal import TerminalView, record_views


@singledispatch
def html_of(result: object) -> str:
    """The HTML of a result."""
    raise TypeError(f"{type(result).__name__} has no HTML")


@singledispatch
def view_of(result: object) -> TerminalView:
    """The terminal view of a result."""
    raise TypeError(f"{type(result).__name__} has no view")


html_of.register(Record, record_html)
html_of.register(Pattern, pattern_html)


@html_of.register
def _(result: Shown) -> str:
    return fragment([("the report", terminal_part(result.views(Screen(COLUMNS, False))))])


@view_of.register
def _(record: Record) -> TerminalView:
    return TerminalView(lambda on: record_views(record, ViewOptions(view="auto"), on))


@view_of.register
def _(result: Shown) -> TerminalView:
    return TerminalView(result.views)


def page_of(record: Record) -> str:
    """The interactive page of a record, as `mha show --html` writes it."""
    from mhacli.render.page.document import page

    return page(record, ViewOptions())
