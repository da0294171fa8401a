"""The views of each result: HTML for notebooks, a terminal view, and the page of a record."""

from __future__ import annotations

import json
from functools import singledispatch
from typing import Any

from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.display.fragment import COLUMNS, fragment, terminal_part
from mhacli.render.display.record import pattern_html, record_html
from mhacli.render.display.terminal import TerminalView, record_views
from mhacli.results.bench.result import Benchmark
from mhacli.results.check import Examination
from mhacli.results.diff.records import RecordDiff
from mhacli.results.doctor import Report
from mhacli.results.record.pattern import Pattern
from mhacli.results.record.record import Record


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


@html_of.register(Examination)
@html_of.register(Report)
@html_of.register(Benchmark)
@html_of.register(RecordDiff)
def _(result: object) -> str:
    return fragment([("the report", terminal_part(view_of(result).views(Screen(COLUMNS, False))))])


@view_of.register
def _(record: Record) -> TerminalView:
    return TerminalView(lambda on: record_views(record, ViewOptions(view="auto"), on))


@view_of.register
def _(examination: Examination) -> TerminalView:
    from mhacli.render.reports.check import check_view

    return TerminalView(lambda on: iter([check_view(examination, on)]))


@view_of.register
def _(report: Report) -> TerminalView:
    from mhacli.render.reports.doctor import doctor_view

    return TerminalView(lambda on: iter([doctor_view(report, on)]))


@view_of.register
def _(benchmark: Benchmark) -> TerminalView:
    from mhacli.render.reports.bench import bench_view

    return TerminalView(lambda on: iter([bench_view(benchmark, None, on)]))


@view_of.register
def _(compared: RecordDiff) -> TerminalView:
    from mhacli.render.diff.view import diff_view

    options = ViewOptions(view="heatmap")
    return TerminalView(
        lambda on: iter([diff_view(compared.differences, compared.records, compared.names, options=options, screen=on)])
    )


def page_of(record: Record) -> str:
    """The interactive page of a record, as `mha show --html` writes it."""
    from mhacli.render.page.document import page

    return page(record, ViewOptions())


def document_of(compared: RecordDiff) -> dict[str, Any]:
    """The JSON document of a comparison."""
    from mhacli.render.diff.json import diff_document

    document = diff_document(compared.differences, compared.records, compared.names)
    plain: dict[str, Any] = json.loads(json.dumps(document, allow_nan=False))
    return plain
