"""The steps of a layer or of user code, one per line: name, axes and formula."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from textwrap import wrap

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from mhacli.record.record import Record, Step
from mhacli.render.base.doc import Column, Table
from mhacli.render.base.format import fitted, is_masked, memory_text, values_text
from mhacli.render.base.options import Screen
from mhacli.render.run.trace import header, repeats_text
from mhacli.render.run.view import axes_text
from mhacli.sites import variants
from mhacli.text.escape import visible

_LEAST, _GAP = 16, "  "
"""The least width of a formula, and the gap before it."""
_ELSEWHERE = "outside of your code:"
_MORE = "--verbose prints memory, FLOPs, bytes, parameters and time of each step"


def step_lines(record: Record, screen: Screen) -> RenderableType:
    """The configuration, then a line per step in the order of execution.

    A warning follows its step, and a line of user code precedes its steps.
    """
    parts: list[RenderableType] = [*header(record, screen)]
    if record.module is None and record.model is None:
        parts += [
            Text(f"{name}: ", style="bold").append(visible(variant.explanation), style="not bold")
            for name, variant in variants(record.facts).items()
        ]
    heading, *lines = _lines(record, screen.width)
    parts += [Text(""), heading]
    indent = len(str(len(record.trace))) + len(_GAP)
    code = ""
    for step, line, source in zip(record.trace, lines, _sources(record.trace), strict=True):
        if source != code:
            parts.append(_hanging(source, screen.width))
            code = source
        parts.append(line)
        if step.remark:
            parts.append(Padding(Text(f"! {visible(step.remark)}", style="bold yellow"), (0, 0, 0, indent)))
    return Group(*parts, Text(_MORE, style="dim"))


def _lines(record: Record, width: int) -> list[Text]:
    """The column headings, and a line per step. Long formulas wrap, and are left out if there is no room."""
    steps = record.trace
    columns: list[tuple[str, list[str], str]] = [
        ("", [str(number) for number in range(1, len(steps) + 1)], "dim"),
        ("step", [f"{visible(step.site)}{repeats_text(step)}" for step in steps], "bold cyan"),
        ("axes", [_axes(step, has_sizes=record.module is None) for step in steps], ""),
    ]
    lines = [Text() for _ in range(len(steps) + 1)]
    used = 0
    for place, (name, cells, style) in enumerate(columns):
        widest = min(width - used, max(map(cell_len, [name, *cells])))
        for line, text, look in zip(lines, [name, *cells], ["dim", *[style] * len(cells)], strict=True):
            shown = fitted(text, widest)
            blanks = " " * (widest - cell_len(shown))
            line.append(blanks + shown if not place else shown + blanks, style=look)
            line.append(_GAP)
        used += widest + len(_GAP)
    for line, text in zip(lines, ["formula", *map(_formula, steps)], strict=True):
        if width - used >= _LEAST:
            line.append(("\n" + " " * used).join(wrap(text, width - used)), style="dim")
        line.rstrip()
    return lines


def _axes(step: Step, *, has_sizes: bool) -> str:
    """The axes of a step, with their sizes on request, but without a batch of one."""
    if not has_sizes:
        return visible(" ".join(step.axes))
    begin = int(len(step.axes) > 1 and (step.axes[0], step.shape[0]) == ("batch", 1))
    return axes_text(step.axes[begin:], step.shape[begin:])


def _formula(step: Step) -> str:
    """The formula of a step without its own name: `columns …` for `q[h] = columns …`."""
    return visible(re.sub(rf"^{re.escape(step.site)}(\[\w+\])? = ", "", step.formula))


def _sources(steps: Sequence[Step]) -> list[str]:
    """The source line of each step, `line 12: q = self.q(x)`, with the file if there are several; empty before user
    code."""
    files = {step.file for step in steps if step.file is not None}
    sources: list[str] = []
    for step in steps:
        if step.file is None or step.line is None:
            sources.append(_ELSEWHERE if any(sources) else "")
        else:
            place = f"{visible(PurePath(step.file).name)}:{step.line}" if len(files) > 1 else f"line {step.line}"
            sources.append(f"{place}: {visible(' '.join(step.source.split()))}")
    return sources


def _hanging(source: str, width: int) -> Text:
    return Text("\n".join(wrap(source, width, subsequent_indent=" " * 4)), style="green")


# ---------------------------------------------------------------------------------------------- in pages and figures


def steps_table(record: Record, *, in_brief: bool = False) -> Table[int]:
    """A row for each step. `in_brief` leaves out what the step means and what its numbers are."""
    steps = record.trace
    columns: list[Column[int]] = [
        Column(heading="step", value=lambda n: f"{n + 1} {visible(steps[n].site)}"),
        Column(heading="axes", value=lambda n: axes_text(steps[n].axes, steps[n].shape) + repeats_text(steps[n])),
        Column(heading="formula", value=lambda n: _formula(steps[n])),
        Column(heading="memory", value=lambda n: memory_text(steps[n], in_brief=True)),
        Column(heading="FLOPs", value=lambda n: steps[n].flops, unit="count"),
        Column(heading="size", value=lambda n: steps[n].bytes, unit="bytes"),
        Column(heading="dtype", value=lambda n: visible(steps[n].dtype)),
    ]
    if record.module is not None:
        columns.insert(2, Column(heading="code", value=lambda n: _sources(steps)[n]))
        columns.insert(4, Column(heading="remark", value=lambda n: visible(steps[n].remark)))
    if any(step.time_s is not None for step in steps):
        columns.append(Column(heading="time", value=lambda n: steps[n].time_s, unit="seconds"))
    if not in_brief:
        columns.append(Column(heading="meaning", value=lambda n: _meaning(steps[n])))
    if not in_brief and any(step.values is not None for step in steps):
        columns.append(Column(heading="values", value=lambda n: _values(steps[n])))
    return Table(columns=columns, rows=range(len(steps)), title="steps in the order of execution, a tensor each")


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
