"""The steps of a trace, or of decoding, as a figure: the table of the page between the words of the terminal."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console, RenderableType

from mhacli.errors import MhaError
from mhacli.record.record import Record
from mhacli.render.base.options import Screen
from mhacli.render.figures.svg import Sheet, paragraph, table
from mhacli.render.run.decode import step_table
from mhacli.render.run.steps import steps_table
from mhacli.render.run.trace import closing, header
from mhacli.text.escape import visible

_MOST, _SCREEN, _WIDTH = 64, Screen(100, colour=False), 640.0
"""The most steps of the table, the screen whose words are drawn, and their width."""


def trace_figure(record: Record) -> Sheet:
    """The picture of a record's steps. Raises `MhaError` if it has none."""
    if not record.trace:
        raise MhaError("the record has no steps to draw", hint="mha trace records them")
    caches = [step.cache for step in record.trace if step.cache is not None]
    if caches:
        body = [table(step_table(caches, range(len(record.sequences)), _MOST))]
    else:
        steps = table(replace(steps_table(record, in_brief=True), most=_MOST))
        body = [steps, paragraph(_words(closing(record, _SCREEN)), _WIDTH)]
    return Sheet(
        title="attention, site by site" if record.decoding is None else "decoding, step by step",
        about=[_words(header(record, _SCREEN))],
        body=body,
        drawn=[visible(step.site) for step in record.trace],
    )


def _words(view: RenderableType) -> str:
    console = Console(width=_SCREEN.width, file=StringIO(), color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(view)
    return captured.get().strip("\n")
