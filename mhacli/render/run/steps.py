"""The steps of a layer or of a user's file, one line each: the name, the axes, the formula or the line of code."""

from __future__ import annotations

import re
from pathlib import PurePath

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from mhacli.render.base.format import fitted
from mhacli.render.base.options import Screen
from mhacli.render.run.trace import header, repeats_text
from mhacli.render.run.view import axes_text
from mhacli.results.record.record import Record, Step
from mhacli.spec.variants import variants
from mhacli.text.escape import visible

_LEAST, _GAP = 16, "  "
"""The least room for a formula or a line of code."""
_MORE = "--verbose prints memory, FLOPs, bytes, parameters and time of each step"


def step_lines(record: Record, screen: Screen) -> RenderableType:
    """What was computed, then a line for each step in the order of execution; a warning stands below its step."""
    parts: list[RenderableType] = [*header(record, screen)]
    if record.module is None and record.model is None:
        parts += [
            Text(f"{variant.name}: ", style="bold").append(visible(variant.what(record.facts)), style="not bold")
            for variant in variants(record.facts)
        ]
    heading, *lines = _lines(record, screen.width)
    parts += [Text(""), heading]
    indent = len(str(len(record.trace))) + len(_GAP)
    for step, line in zip(record.trace, lines, strict=True):
        parts.append(line)
        if step.remark:
            parts.append(Padding(Text(f"! {visible(step.remark)}", style="bold yellow"), (0, 0, 0, indent)))
    return Group(*parts, Text(_MORE, style="dim"))


def _lines(record: Record, width: int) -> list[Text]:
    """The heading of the columns, and a line for each step. Columns for which there is no room are left out."""
    is_module, steps = record.module is not None, record.trace
    files = {step.file for step in steps if step.file is not None}
    columns: list[tuple[str, list[str], str]] = [
        ("", [str(number) for number in range(1, len(steps) + 1)], "dim"),
        ("step", [f"{visible(step.site)}{repeats_text(step)}" for step in steps], "bold cyan"),
        ("axes", [_axes(step, has_sizes=not is_module) for step in steps], ""),
    ]
    if is_module:
        columns.append(("line", [_source(step, has_file=len(files) > 1) for step in steps], "green"))
    columns.append(("formula", [_formula(step) for step in steps], "dim"))
    lines = [Text() for _ in range(len(steps) + 1)]
    used = 0
    for place, (name, cells, style) in enumerate(columns):
        room = width - used - (len(_GAP) if place else 0)
        if place > 2 and room < _LEAST:
            break
        widest = min(room, max(map(cell_len, [name, *cells])))
        for line, text, look in zip(lines, [name, *cells], ["dim", *[style] * len(cells)], strict=True):
            shown = fitted(text, widest)
            blanks = " " * (widest - cell_len(shown))
            line.append(_GAP if place else "")
            line.append(blanks + shown if not place else shown + blanks, style=look)
        used += widest + (len(_GAP) if place else 0)
    return lines


def _axes(step: Step, *, has_sizes: bool) -> str:
    """The axes of a step; with their sizes, but without a batch of one sequence, or their names alone."""
    if not has_sizes:
        return visible(" ".join(step.axes))
    begin = int(len(step.axes) > 1 and (step.axes[0], step.shape[0]) == ("batch", 1))
    return axes_text(step.axes[begin:], step.shape[begin:])


def _formula(step: Step) -> str:
    """The formula of a step without the name that stands before it: `columns …` of `q[h] = columns …`."""
    return visible(re.sub(rf"^{re.escape(step.site)}(\[\w+\])? = ", "", step.formula))


def _source(step: Step, *, has_file: bool) -> str:
    """`12: q = self.q(x)`, the line of the user's file; nothing where it was not their code."""
    if step.file is None or step.line is None:
        return ""
    place = f"{visible(PurePath(step.file).name)}:{step.line}" if has_file else str(step.line)
    return f"{place}: {visible(' '.join(step.source.split()))}"
