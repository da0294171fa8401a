"""The steps of a layer or of user code as one table, with more columns in pages and figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from textwrap import wrap

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from mhacli.record.record import Record, Step
from mhacli.render.base.doc import Column, Table
from mhacli.render.base.format import is_masked, memory_text, values_text
from mhacli.text.escape import visible

_LEAST = 16
"""The least width of a formula."""


def lines_table(record: Record, width: int = 0) -> Table[int]:
    """A row for each step in the order of execution: its number, name, axes and formula. In a width, each line of user code
    stands above its steps, and a warning below its step."""
    steps, sources = record.trace, sources_of(record.trace)
    has_sizes, indent = record.module is None, len(str(len(record.trace))) + 2

    def above(n: int) -> list[RenderableType]:
        if sources[n] in ("", sources[n - 1] if n else ""):
            return []
        return [Text("\n".join(wrap(sources[n], width, subsequent_indent=" " * 4)), style="green")]

    def below(n: int) -> list[RenderableType]:
        remark = visible(steps[n].remark)
        return [Padding(Text(f"! {remark}", style="bold yellow"), (0, 0, 0, indent))] if remark else []

    columns: list[Column[int]] = [
        Column(heading="", value=lambda n: n + 1, unit="id", style=lambda n: "dim"),
        Column(heading="step", value=lambda n: step_name(steps[n]), style=lambda n: "bold cyan"),
        Column(heading="axes", value=lambda n: _axes(steps[n], has_sizes=has_sizes)),
        Column(
            heading="formula",
            value=lambda n: _formula(steps[n]),
            least=_LEAST,
            wraps=True,
            drop=1,
            style=lambda n: "dim",
        ),
    ]
    return Table(columns=columns, rows=range(len(steps)), above=above, below=below)


def steps_table(record: Record, *, in_brief: bool = False) -> Table[int]:
    """The steps with memory, costs, meaning and numbers. `in_brief` leaves out what a step means and what its numbers are."""
    steps, lines = record.trace, lines_table(record)
    columns: list[Column[int]] = [
        Column(heading="step", value=lambda n: f"{n + 1} {step_name(steps[n])}"),
        *lines.columns[2:],
        Column(heading="memory", value=lambda n: memory_text(steps[n], in_brief=True)),
        Column(heading="FLOPs", value=lambda n: steps[n].flops, unit="count"),
        Column(heading="size", value=lambda n: steps[n].bytes, unit="bytes"),
        Column(heading="dtype", value=lambda n: visible(steps[n].dtype)),
    ]
    if record.module is not None:
        sources = sources_of(steps)
        columns.insert(2, Column(heading="code", value=lambda n: sources[n]))
        columns.insert(4, Column(heading="remark", value=lambda n: visible(steps[n].remark)))
    if any(step.time_s is not None for step in steps):
        columns.append(Column(heading="time", value=lambda n: steps[n].time_s, unit="seconds"))
    if not in_brief:
        columns.append(Column(heading="meaning", value=lambda n: _meaning(steps[n])))
    if not in_brief and any(step.values is not None for step in steps):
        columns.append(Column(heading="values", value=lambda n: _values(steps[n])))
    return replace(lines, columns=columns, title="steps in the order of execution, a tensor each")


def step_name(step: Step) -> str:
    """The name of a step, with ` × 3` and the reason if it stands for several."""
    reason = f" ({visible(step.repeats_of)})" if step.repeats_of else ""
    return visible(step.site) + (f"  × {step.repeats}{reason}" if step.repeats > 1 else "")


def axes_text(step: Step, first: int = 0) -> str:
    """The axes from the first on with their sizes: `batch 1 · head 4 · query 6 · d_head 16`."""
    named = [f"{axis} {size}" for axis, size in zip(step.axes, step.shape, strict=False)]
    return visible(" · ".join(named[first:]))


def _axes(step: Step, *, has_sizes: bool) -> str:
    """The axes of a line: with their sizes, but without a batch of one, or their names alone."""
    if not has_sizes:
        return visible(" ".join(step.axes))
    return axes_text(step, int(len(step.axes) > 1 and (step.axes[0], step.shape[0]) == ("batch", 1)))


def _formula(step: Step) -> str:
    """The formula of a step without its own name: `columns …` for `q[h] = columns …`."""
    return visible(re.sub(rf"^{re.escape(step.site)}(\[\w+\])? = ", "", step.formula))


def sources_of(steps: Sequence[Step]) -> list[str]:
    """The source line of each step, `line 12: q = self.q(x)`, with the file if there are several; empty before user
    code."""
    files = {step.file for step in steps if step.file is not None}
    sources: list[str] = []
    for step in steps:
        if step.file is None or step.line is None:
            sources.append("")
        else:
            place = f"{visible(PurePath(step.file).name)}:{step.line}" if len(files) > 1 else f"line {step.line}"
            sources.append(f"{place}: {visible(' '.join(step.source.split()))}")
    return sources


def _meaning(step: Step) -> str:
    """What a step computes, and its weights."""
    named = ", ".join(f"{visible(weight.name)} {list(weight.shape)}" for weight in step.parameters)
    return " · ".join(filter(None, [visible(step.meaning), f"weights: {named}" if named else ""]))


def _values(step: Step) -> str:
    """Range, distribution and non-finite counts, and the numbers of a small tensor."""
    if step.values is None:
        return ""
    missing = "−∞" if is_masked(step) else "not finite"
    numbers = (missing if number is None else f"{number:.4g}" for number in step.values.numbers or ())
    return " ".join([values_text(step, step.values), *numbers])
