"""A site of the walkthrough as a box: its number and name, its axes, its formula, what it takes and whose memory it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import PurePath

from mhacli.render.base.format import bytes_text, count_text, filled
from mhacli.render.base.steps import memory_text, own_parameters, values_text
from mhacli.render.figures.svg.elements import (
    ALARM,
    INK,
    LINE,
    MONO_EM,
    SOFT,
    Piece,
    characters,
    element,
    rectangle,
    wrapped,
    written,
)
from mhacli.render.run.user_code import repeats_text
from mhacli.render.run.view import axes_text
from mhacli.results.record.record import Step
from mhacli.text.escape import visible

SIZE, INSET = 10.0, 9.0
_WIDE = 90
"""Cells from which on what was measured stands at the right of the name."""
_MADE, _WITH_WEIGHTS, _SEEN = "#f6f8fb", "#e3edf9", "#ffffff"
_EDGE, _LINES_OF_THEIRS = "#44607c", "#1b6b3a"
_DASHES = "4 3"


@dataclass(frozen=True)
class _Line:
    """A line of a box, and how it looks."""

    text: str
    fill: str = INK
    weight: str | None = None


def box(number: int, step: Step, width: float) -> Piece:
    """The box of a step, as wide as asked for: dashed where it is a view, tinted darker where weights are used."""
    cells = int((width - 2 * INSET) / (MONO_EM * SIZE))
    lines = [*_name(number, step, cells)]
    for line in _lines(step, is_wide=cells >= _WIDE):
        lines += [_Line(part, line.fill, line.weight) for part in wrapped(line.text, cells)]
    height = len(lines) * LINE * SIZE + 2 * INSET - 3
    is_view = step.layout == "view"
    fill = _SEEN if is_view else _WITH_WEIGHTS if step.parameters else _MADE
    said = [element("title", characters(visible(step.meaning)))] if step.meaning else []
    outline = rectangle(
        0, 0, width, height, fill, rx=5.0, stroke=_EDGE, stroke_width=1.0, stroke_dasharray=_DASHES if is_view else None
    )
    texts = "".join(
        written(INSET, INSET + (place + 0.78) * LINE * SIZE, line.text, SIZE, fill=line.fill, font_weight=line.weight)
        for place, line in enumerate(lines)
    )
    if cells >= _WIDE:
        y = INSET + 0.78 * LINE * SIZE
        texts += written(width - INSET, y, _measured(step), SIZE, fill=SOFT, text_anchor="end")
    return Piece(element("g", *said, outline, texts), width, height)


def legend() -> Piece:
    """What the looks of boxes mean."""
    content, x = "", 0.0
    for fill, dashes, said in (
        (_WITH_WEIGHTS, None, "made with weights"),
        (_MADE, None, "a new tensor"),
        (_SEEN, _DASHES, "a view: memory that is there already"),
    ):
        content += rectangle(x, 0, 22, 12, fill, rx=3.0, stroke=_EDGE, stroke_width=1.0, stroke_dasharray=dashes)
        content += written(x + 28, 10, said, SIZE, fill=SOFT)
        x += 28 + (len(said) + 3) * MONO_EM * SIZE
    return Piece(content, x, 14)


def _name(number: int, step: Step, cells: int) -> Iterator[_Line]:
    """The name, then the axes beside it where there is room, else below."""
    name, axes = f"{number} {visible(step.site)}", axes_text(step.axes, step.shape) + repeats_text(step)
    yield _Line(name, INK, "bold")
    yield from (_Line(line, _EDGE) for line in filled(axes.split(" · "), cells))


def _lines(step: Step, *, is_wide: bool) -> Iterator[_Line]:
    if step.file is not None and step.line is not None:
        place = f"{visible(PurePath(step.file).name)}:{step.line}"
        yield _Line(f"{place}  {visible(step.source)}", _LINES_OF_THEIRS)
    yield _Line(visible(step.formula))
    if step.remark:
        yield _Line(f"! {visible(step.remark)}", ALARM, "bold")
    if not is_wide:
        yield _Line(_measured(step), SOFT)
    if step.parameters:
        yield _Line(_parameters(step), SOFT)
    if step.values is not None:
        yield _Line(values_text(step, step.values, in_brief=True), SOFT)


def _measured(step: Step) -> str:
    flops = f" · {count_text(step.flops)} FLOPs" if step.flops else ""
    return f"{memory_text(step, in_brief=True)} · {bytes_text(step.bytes)} {visible(step.dtype)}{flops}"


def _parameters(step: Step) -> str:
    shown = own_parameters(step)
    more = f" and {len(step.parameters) - len(shown)} more" if len(shown) < len(step.parameters) else ""
    total = sum(prod(parameter.shape) for parameter in step.parameters)
    named = ", ".join(f"{visible(parameter.name)} {list(parameter.shape)}" for parameter in shown)
    return f"weights {named}{more}: {total:,} numbers"
