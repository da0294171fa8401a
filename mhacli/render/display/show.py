"""How each object shows itself: the HTML of a notebook, the view of a terminal, and the page of a record."""

from __future__ import annotations

from functools import singledispatch

from mhacli.render.base.options import ViewOptions
from mhacli.render.display.record import pattern_html, record_html
from mhacli.render.display.terminal import TerminalView, record_views
from mhacli.results.record.pattern import Pattern
from mhacli.results.record.record import Record


@singledispatch
def html_of(shown: object) -> str:
    """The HTML of an object."""
    raise TypeError(f"{type(shown).__name__} has no HTML")


@singledispatch
def view_of(shown: object) -> TerminalView:
    """What rich prints of an object."""
    raise TypeError(f"{type(shown).__name__} has no view")


html_of.register(Record, record_html)
html_of.register(Pattern, pattern_html)


@view_of.register
def _(record: Record) -> TerminalView:
    return TerminalView(lambda on: record_views(record, ViewOptions(view="auto"), on))


def page_of(record: Record) -> str:
    """The interactive page of a record, as `mha show --html` writes it."""
    from mhacli.render.page.document import page

    return page(record, ViewOptions())
