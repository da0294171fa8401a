"""The steps of a layer or of user code as one table, with more columns in pages and figures; and
lines that stand below them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from textwrap import wrap
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from mhacli.numbers import shown
from mhacli.record.checks import SelfCheck
from mhacli.record.record import Record, Step
from mhacli.record.sites import token_bytes
from mhacli.render.base.doc import Column, Table
from mhacli.render.base.format import (
    agreement,
    count_of,
    escaped,
    memory_text,
    self_check_verdict,
    sparkline,
)
from mhacli.text.escape import visible

_LEAST_FORMULA = 16
"""The least width of the column of formulas."""
_NUMBER_WIDTH = 11
"""The columns of a number in a row."""
_PAGE_WIDTH = 60
"""The width of the column of values in a page."""
_NOT_FINITE = "not fin."


def lines_table(record: Record, width: int = 0) -> Table[int]:
    """A row for each step in the order of execution: its number, name, axes and formula. In a
    width, each line of user code stands above its steps, and a warning below its step.
    """
    steps = record.trace
    sources = ["", *sources_of(steps)]
    indent = len(str(len(steps))) + 2

    def above(n: int) -> list[RenderableType]:
        source = sources[n + 1]
        if not width or source in ("", sources[n]):
            return []
        return [Text("\n".join(wrap(source, width, subsequent_indent=" " * 4)), "green")]

    def below(n: int) -> list[RenderableType]:
        if not steps[n].remark:
            return []
        remark = escaped(f"! {steps[n].remark}", "bold yellow")
        return [Padding(remark, (0, 0, 0, indent))]

    def axes(n: int) -> str:
        """The axes with their sizes, except a batch of one; of user code without sizes."""
        if record.module is not None:
            return visible(" ".join(steps[n].axes))
        return axes_text(steps[n]).removeprefix("batch 1 · ")

    def formula(n: int) -> str:
        """The formula of a step without its own name: `columns …` for `q[h] = columns …`."""
        name, _, expression = steps[n].formula.partition(" = ")
        is_named = expression and steps[n].site.endswith(name.partition("[")[0])
        return visible(expression if is_named else steps[n].formula)

    columns: list[Column[int]] = [
        Column("", lambda n: n + 1, unit="id", style=lambda n: "dim"),
        Column("step", lambda n: step_name(steps[n]), style=lambda n: "bold cyan"),
        Column("axes", axes),
        Column(
            "formula",
            formula,
            least=_LEAST_FORMULA,
            wraps=True,
            drop=1,
            style=lambda n: "dim",
        ),
    ]
    return Table(columns, range(len(steps)), above=above, below=below)


def steps_table(record: Record) -> Table[int]:
    """The steps with memory, costs, meaning and numbers. In a narrow picture they go in the order
    from the last.
    """
    steps = record.trace
    lines = lines_table(record)
    sources = sources_of(steps)

    def of_step(heading: str, value: Callable[[Step], object], **more: Any) -> Column[int]:
        return Column(heading, lambda n: value(steps[n]), **more)

    columns: list[Column[int]] = [
        Column("step", lambda n: f"{n + 1} {step_name(steps[n])}"),
        lines.columns[2],
        Column("code", lambda n: sources[n]),
        lines.columns[3],
        of_step("remark", lambda step: visible(step.remark)),
        of_step("memory", memory_text),
        of_step("FLOPs", lambda step: step.flops, unit="count"),
        of_step("size", lambda step: step.bytes, unit="bytes"),
        of_step("dtype", lambda step: visible(step.dtype)),
        of_step("time", lambda step: step.time_s, unit="seconds"),
        of_step("meaning", lambda step: visible(step.meaning), drop=2),
        of_step("weights", lambda step: ", ".join(weights_of(step)), drop=3),
        of_step("values", lambda step: "\n".join(value_lines(step, _PAGE_WIDTH)), drop=4),
    ]
    columns = [
        column for column in columns if any(column.value(n) not in (None, "") for n in lines.rows)
    ]
    return replace(lines, columns=columns, title="steps in the order of execution, a tensor each")


def step_name(step: Step) -> str:
    """The name of a step, with ` × 3` and the reason if it stands for several."""
    reason = f" ({visible(step.repeats_of)})" if step.repeats_of else ""
    return visible(step.site) + (f"  × {step.repeats}{reason}" if step.repeats > 1 else "")


def axes_text(step: Step) -> str:
    """The axes with their sizes: `batch 1 · head 4 · query 6 · d_head 16`."""
    return visible(
        " · ".join(f"{axis} {size}" for axis, size in zip(step.axes, step.shape, strict=False))
    )


def sources_of(steps: Sequence[Step]) -> list[str]:
    """The source line of each step, `line 12: q = self.q(x)`, with the file if there are several;
    empty before user code.
    """
    files = {step.file for step in steps if step.file is not None}
    sources: list[str] = []
    for step in steps:
        if step.file is None or step.line is None:
            sources.append("")
        else:
            place = f"line {step.line}"
            if len(files) > 1:
                place = f"{visible(PurePath(step.file).name)}:{step.line}"
            sources.append(f"{place}: {visible(' '.join(step.source.split()))}")
    return sources


def weights_of(step: Step) -> list[str]:
    """The weights of a step with their shapes: `q_proj.weight [64, 64]`."""
    return [f"{visible(weight.name)} {list(weight.shape)}" for weight in step.parameters]


_MASKED = ("scores", "bias", "masked")
"""The sites where −∞ means a masked cell."""


def value_lines(step: Step, width: int) -> Iterator[str]:
    """Range, distribution, moments and non-finite counts (`-1.5 ▁ █ 2 · mean 0.25 · std 0.5 · 3
    NaN`), and the numbers of a small tensor, a line for each row.
    """
    values = step.values
    if values is None:
        return
    least = shown(values.min, "number")
    largest = shown(values.max, "number")
    parts = [
        f"{least} {sparkline(values.histogram)} {largest}",
        f"mean {shown(values.mean, 'number')}",
        f"std {shown(values.std, 'number')}",
    ]
    if values.n_nan:
        parts.append(f"{values.n_nan} NaN")
    is_masked = step.site in _MASKED
    if values.n_inf:
        parts.append(f"{values.n_inf} × −∞, masked" if is_masked else f"{values.n_inf} Inf")
    yield " · ".join(parts)
    missing = "−∞" if is_masked else _NOT_FINITE
    numbers = values.numbers or ()
    n = step.shape[-1] if step.shape else 1
    for start in range(0, len(numbers), max(1, n)):
        yield number_row(numbers[start : start + n], width, missing)


def number_row(numbers: Sequence[float | None], width: int, missing: str = _NOT_FINITE) -> str:
    """The numbers that fit on a line, in columns, and how many there are more."""
    n_shown = max(2, width // _NUMBER_WIDTH)
    if len(numbers) > n_shown:
        n_shown = max(1, n_shown - 1)
    words = (missing if number is None else shown(number, "number") for number in numbers[:n_shown])
    more = f" … {len(numbers) - n_shown} more" if n_shown < len(numbers) else ""
    return "".join(f" {word:>{_NUMBER_WIDTH - 1}}" for word in words) + more


def self_check_line(check: SelfCheck, compared: str = "the pattern gives the output") -> Text:
    """One line: whether the output follows from the pattern shown, or what was `compared`
    instead.
    """
    has_numbers = check.ok is not None or check.error is not None
    numbers = agreement(check, compared) if has_numbers else check.note
    return self_check_verdict(ok=check.ok, numbers=numbers)


def kv_heads_line(record: Record) -> Iterator[Text]:
    """How many query heads share a kv head, and the bytes that this saves; nothing if none is
    shared.
    """
    c = record.config
    group = c.heads_per_kv_head
    if group > 1:
        yield Text(
            f"{count_of(c.n_heads // group, 'kv head')} for {c.n_heads} query heads, each shared by"
            f" {group}: a token takes {shown(token_bytes(c), 'bytes')} of a cache instead of"
            f" {shown(token_bytes(c, c.n_heads), 'bytes')}"
        )
