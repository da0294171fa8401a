"""The steps of a run or of decoding as tables, and the end of the walkthrough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mhacli.record.record import Record
from mhacli.render.base.format import (
    bytes_text,
    count_text,
    seconds_text,
    trace_totals,
)
from mhacli.render.base.options import Screen
from mhacli.render.page.elements import Html, preformatted, table, tag, text
from mhacli.render.run.decode import step_table
from mhacli.render.run.steps import steps_table
from mhacli.render.run.trace import closing
from mhacli.render.run.view import self_check_line

_STORY = Screen(width=100, colour=False)


def walkthrough(record: Record) -> Html:
    """A section with the steps of a run or of decoding, in the order of execution; empty without steps."""
    if not record.trace:
        return Html("")
    if record.decoding is not None:
        body = [_decoding(record)]
    else:
        body = [table(steps_table(record)), *_closing(record)]
    return tag("section", tag("h2", text("shapes, step by step")), *body, id="walk")


def _closing(record: Record) -> Iterator[Html]:
    """The end of the walkthrough; for head statistics, which keep no tensors, their cost."""
    if record.survey is None:
        yield preformatted(closing(record, _STORY), _STORY.width)
        return
    flops, n_bytes, _ = trace_totals(record.trace)
    cost = f"{count_text(flops)} FLOPs, {bytes_text(n_bytes)} in new tensors"
    yield tag("p", text(f"these steps alone: {cost}"), class_="bold")
    left_out = "attention itself and what follows are not counted: mha heads computes them part by part"
    total = record.timings.get("total")
    timed = "" if total is None else f". All of it, attention too, took {seconds_text(total.median_s)}"
    yield tag("p", text(left_out + timed))
    yield preformatted(self_check_line(record.self_check), _STORY.width)


def _decoding(record: Record) -> Html:
    caches = [step.cache for step in record.trace if step.cache is not None]
    return table(replace(step_table(caches, range(len(record.sequences))), title="one token at a time, with a cache"))
