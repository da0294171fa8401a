"""The shape walkthrough of a layer or of user code: a block per site, or a single cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import exp, inf, nan, prod
from pathlib import PurePath

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from mhacli.record.record import Cell, Record, Step, UserModule
from mhacli.render.base.doc import Column, Table
from mhacli.render.base.format import (
    bytes_text,
    configuration,
    count_of,
    count_text,
    flowing,
    is_masked,
    memory_text,
    number_text,
    rough_note,
    seconds_text,
    title_rule,
    token_at,
    token_text,
    trace_totals,
    values_text,
)
from mhacli.render.base.options import Screen
from mhacli.render.base.terminal import bare
from mhacli.render.checkpoint.header import model_header
from mhacli.render.run.steps import axes_text, lines_table, step_name
from mhacli.render.run.view import groups_table, self_check_line
from mhacli.settings import ROPE
from mhacli.sites import variants
from mhacli.text.escape import visible

_INDENT, _NUMBER_WIDTH = 3, 10
_KINDS = {
    "content": "content",
    "position": "position",
    "both": "content and position",
    "softcap": "softcap",
    "given": "file",
}
"""The origins of a score's parts in words."""
_MORE = "--verbose prints the steps of the whole layer before it"
_MORE_OF_STEPS = "--verbose prints memory, FLOPs, bytes, parameters and time of each step"
_ALWAYS = ("content", "position")
_NOT_FINITE = "not fin."
_LONG_ROW, _LISTED = 16, 11
"""The keys of a row that are all listed, and the number of a longer row's."""


def step_lines(record: Record, screen: Screen) -> RenderableType:
    """The configuration, then a line per step."""
    parts = [header(record, screen), *_variants(record, in_brief=True), Text("")]
    return Group(*parts, bare(lines_table(record, screen.width), screen.width), Text(_MORE_OF_STEPS, style="dim"))


def step_blocks(record: Record, screen: Screen) -> Iterator[RenderableType]:
    """The configuration, then a block per site in the order of execution."""
    yield header(record, screen)
    yield from _variants(record)
    if record.module is None:
        layer = record if record.model is None else record.of_layer(0)
        yield from (Group(Text(""), groups) for groups in groups_table(layer, screen))
    before: Step | None = None
    for number, step in enumerate(record.trace, 1):
        yield _block(number, step, screen, before=before, is_timed=record.module is None)
        before = step


def header(record: Record, screen: Screen) -> RenderableType:
    """The configuration and the environment."""
    if record.module is not None:
        return _module_header(record, record.module, screen)
    if record.model is not None:
        return model_header(record, record.model, screen)
    return configuration(record, screen.width)


def _variants(record: Record, *, in_brief: bool = False) -> Iterator[RenderableType]:
    """What the layer has beside plain attention, and why, with the sources unless `in_brief`."""
    is_own = record.module is None and record.model is None
    for name, variant in variants(record.facts).items() if is_own else ():
        title = Text(f"{name}: ", style="bold").append(visible(variant.explanation), style="not bold")
        if in_brief:
            yield title
            continue
        body = Group(Text(f"why: {variant.why}", style="italic"), Text(f"source: {variant.source}", style="dim"))
        yield Group(Text(""), title, Padding(body, (0, 0, 0, _INDENT)))


def closing(record: Record, screen: Screen) -> RenderableType:
    """The end of the walkthrough: totals, the cell, and the self-check."""
    flops, n_bytes, n_parameters = trace_totals(record.trace)
    words = f"\ntotal {count_text(flops)} FLOPs · {bytes_text(n_bytes)} in new tensors · {n_parameters:,} parameters"
    total = record.timings.get("total")
    if total is not None:
        notes = [f"median of {len(total.samples_s)}", rough_note([total])]
        words += f" · {seconds_text(total.median_s)} ({', '.join(filter(None, notes))})"
    totals = Text(words, style="bold")
    if record.module is not None:
        return Group(totals, Text(""), *_module_closing(record, record.module))
    story = [] if record.cell is None else [Text(""), *_cell_story(record, record.cell, screen)]
    return Group(totals, *story, Text(""), self_check_line(record.self_check))


def cell_view(record: Record, cell: Cell, screen: Screen) -> RenderableType:
    """The configuration, the cell without the layer's steps, and the self-check."""
    more = Text(_MORE, style="dim")
    story = [*_cell_story(record, cell, screen), more, Text(""), self_check_line(record.self_check)]
    return Group(header(record, screen), Text(""), *story)


def _block(number: int, step: Step, screen: Screen, *, before: Step | None, is_timed: bool) -> Group:
    """A step with all its details. Its line of code is omitted if the previous step shows the same line."""
    title = Text(f"{number:2d} {step_name(step)}", style="bold cyan")
    title.append("  " + axes_text(step), style="not cyan bold")
    room = screen.width - _INDENT
    code = source_line(step)
    lines = [] if before is not None and code == source_line(before) else code
    lines += [Text(visible(step.formula))]
    lines += [Text(visible(step.meaning), style="italic")] if step.meaning else []
    lines += [Text(f"! {visible(step.remark)}", style="bold yellow")] if step.remark else []
    measured = [memory_text(step), f"strides ({', '.join(map(str, step.strides))})", f"{count_text(step.flops)} FLOPs"]
    measured.append(f"{bytes_text(step.bytes)} {visible(step.dtype)}")
    measured += [seconds_text(step.time_s)] if is_timed else []
    lines.append(flowing([Text(part, style="dim") for part in measured], room))
    if step.parameters:
        shown = step.parameters[: len(step.parameters) // step.repeats or 1]
        weights = ", ".join(f"{visible(p.name)} {list(p.shape)}" for p in shown)
        weights += f" … {len(step.parameters) - len(shown)} more" if len(shown) < len(step.parameters) else ""
        total = sum(prod(p.shape) for p in step.parameters)
        lines.append(Text(f"parameters: {weights} = {total:,} numbers", style="dim"))
    if step.values is not None:
        lines.append(Text(values_text(step, step.values)))
        numbers, width = step.values.numbers or (), max(1, step.shape[-1] if step.shape else 1)
        rows = (numbers[start : start + width] for start in range(0, len(numbers), width))
        missing = "−∞" if is_masked(step) else _NOT_FINITE
        lines += [Text(_numbers(row, room, missing), style="dim") for row in rows]
    return Group(Text(""), title, Padding(Group(*lines), (0, 0, 0, _INDENT)))


def _numbers(numbers: Sequence[float | None], room: int, missing: str) -> str:
    """Numbers in columns, as many as fit."""
    fit = max(2, room // _NUMBER_WIDTH)
    if len(numbers) > fit:
        fit = max(1, fit - 2)
    more = f" … {len(numbers) - fit} more" if len(numbers) > fit else ""
    return "".join(f"{missing if x is None else number_text(x):>{_NUMBER_WIDTH}}" for x in numbers[:fit]) + more


# -------------------------------------------------------------------------------------------------------------- cell


def _cell_story(record: Record, cell: Cell, screen: Screen) -> Iterator[RenderableType]:
    """The computation of one attention weight, number by number."""
    record = record if record.model is None else record.of_layer(0)
    query = token_at(token_text(record.sequences[cell.sequence], cell.query), cell.query)
    key = token_at(token_text(record.keys[cell.sequence], cell.key), cell.key)

    def vector(name: str, numbers: Sequence[float | None]) -> Text:
        return Text(f"{name:<8}{_numbers(numbers, screen.width - 8, _NOT_FINITE)}")

    yield title_rule(f"cell: head {cell.head}, query {query}, key {key}")
    suffix = "_rot" if record.config.positions in ROPE and record.model is None else ""
    yield vector(f"q{suffix}[{cell.query}]", cell.q)
    yield vector(f"k{suffix}[{cell.key}]", cell.k)
    products = [a * b for a, b in zip(cell.q, cell.k, strict=False) if a is not None and b is not None]
    shown = " + ".join(f"({number_text(x)})" if x < 0 else number_text(x) for x in products[:4])
    more = f" + … {len(products) - 4} more" if len(products) > 4 else ""
    yield Text(f"q · k = {shown}{more} = {number_text(cell.qk)}")
    yield from _score(cell, screen)
    yield _row_table(record, cell, key, screen)
    yield vector(f"v[{cell.key}]", cell.v)
    weight, before = cell.share, cell.pattern_row[cell.key]
    dropped = "" if cell.share == before else f" (after dropout; before it {number_text(before)})"
    term = f"{number_text(cell.share)}{dropped} × v[{cell.key}]"
    yield Text(f"z[{cell.query}] = Σ attention weight × v over the keys; {key} adds {term}:")
    yield vector("added", [None if x is None or weight is None else weight * x for x in cell.v])
    yield vector(f"z[{cell.query}]", cell.z)


def _score(cell: Cell, screen: Screen) -> Iterator[RenderableType]:
    """The score in a sentence, and its parts by content and position."""
    is_masked_by_bias = any(part.kind == "given" and part.value is None for part in cell.parts)
    if cell.allowed:
        scaled = f"score = {number_text(cell.qk)} × scale {number_text(cell.scale)}"
        capped = "" if cell.softcap is None else f", then {cell.softcap:g} · tanh(score / {cell.softcap:g})"
        added = "".join(f", plus {visible(p.name)} = {number_text(p.value)}" for p in cell.parts if p.added)
        yield Text(f"{scaled}{capped}{added} = {number_text(cell.score)}, not masked")
    else:
        why = ": the score bias is −∞ here" if is_masked_by_bias else ""
        yield Text(f"this cell is masked{why}; its score is −∞, its attention weight exactly 0")
    if len(cell.parts) < 2:
        return
    rows = [
        (visible(part.name), _KINDS[part.kind], -inf if part.kind == "given" and part.value is None else part.value)
        for part in cell.parts
    ]
    values = {kind: sum(nan if p.value is None else p.value for p in cell.parts if p.kind == kind) for kind in _KINDS}
    total = -inf if is_masked_by_bias else sum(values.values())
    columns: list[Column[tuple[str, str, float | None]]] = [
        Column(heading="of the score", value=lambda part: part[0], wraps=True),
        Column(heading="comes from", value=lambda part: part[1]),
        Column(heading="", value=lambda part: "−∞" if part[2] == -inf else number_text(part[2]), unit="id"),
    ]
    yield bare(Table(columns=columns, rows=rows, foot=[("sum", "", total)]), screen.width)
    if is_masked_by_bias:
        del values["given"]
    words = [f"{_KINDS[kind]} {number_text(value)}" for kind, value in values.items() if value or kind in _ALWAYS]
    masked = "" if cell.allowed or is_masked_by_bias else " (before the mask, which makes the score −∞)"
    yield Text(f"in all: {', '.join(words)}{masked}", style="italic")


def _row_table(record: Record, cell: Cell, own: str, screen: Screen) -> RenderableType:
    """The softmax over the query's row: exp of each score minus the largest, divided by their sum. A row has the name of its
    keys, and the cell's `own` is marked. Of a long row the top keys are listed."""
    scores, weights = cell.scores_row, [nan if weight is None else weight for weight in cell.pattern_row]
    largest = max((score for score in scores if score is not None), default=0.0)
    exps = [
        0.0 * weight if score is None else exp(score - largest) for score, weight in zip(scores, weights, strict=True)
    ]
    order = sorted(range(len(weights)), key=lambda key: -(cell.pattern_row[key] or 0.0))
    listed = sorted(order if len(order) <= _LONG_ROW else {cell.key, *order[:_LISTED]})
    rows = [(token_at(token_text(record.keys[cell.sequence], key), key), [key]) for key in listed]
    left = [key for key in order if key not in listed]
    sums = [(f"⋮ {len(left)} more", left)] if left else []
    sums.append(("sum", order))

    def score(row: tuple[str, list[int]]) -> str:
        if row in sums:
            return ""
        number = scores[row[1][0]]
        if number is None:  # masked, or no number, and then its weight is none either
            return "−∞" if weights[row[1][0]] == 0 else number_text(None)
        return number_text(number)

    columns: list[Column[tuple[str, list[int]]]] = [
        Column(heading="", value=lambda row: "→" if row[0] == own else ""),
        Column(heading="key", value=lambda row: row[0], least=1),
        Column(heading="score", value=score, unit="id"),
        Column(heading="exp(score − max)", value=lambda row: sum(exps[key] for key in row[1]), unit="number"),
        Column(heading="pattern", value=lambda row: sum(weights[key] for key in row[1]), unit="number"),
    ]
    bold = [replace(column, style=lambda row: "bold" if row[0] == own else "") for column in columns]
    return bare(Table(columns=bold, rows=rows, foot=sums), screen.width)


# ------------------------------------------------------------------------------------------------------------ user code

_MAX_PRINTED = 3


def _module_header(record: Record, module: UserModule, screen: Screen) -> RenderableType:
    """The target, its arguments with guesses marked, the call, the sizes of the trace, and the first lines that were printed."""
    environment, names = record.environment, [argument.name for argument in module.arguments]
    lines: list[RenderableType] = [Text(visible(module.target), style="bold")]
    for label, origin in (("given", "given"), ("by default", "default"), ("guessed", "guessed")):
        parts = []
        for argument in module.arguments:
            has_parts = any(name.startswith(f"{argument.name}.") for name in names)
            if argument.origin == origin and not has_parts:
                why = f" ({visible(argument.why)})" if argument.why else ""
                parts.append(Text(f"{visible(argument.name)}={visible(argument.value)}{why}"))
        if parts:
            lines.append(flowing([Text(f"{label}: ").append_text(parts[0]), *parts[1:]], screen.width, ", "))
    lines.append(Text(f"called: {visible(module.called)}"))
    sizes = [Text(f"{visible(word)} {size}", style="bold") for word, size in module.sizes]
    lines.append(flowing([Text("sizes:").append(" ").append_text(sizes[0]), *sizes[1:]], screen.width))
    how = f"axes are named by comparing {count_of(module.n_runs, 'run')} with different sizes"
    if module.n_runs == 1:
        how = "one run: axes are named by their sizes alone, and a|b is one of the two"
    lines.append(Text(how, style="dim"))
    ran = [f"mha {environment.mha}", f"torch {environment.torch}", record.config.dtype, environment.device]
    lines.append(flowing([Text(visible(part), style="dim") for part in [*ran, "in eval"]], screen.width))
    printed = [visible(line.strip()) for line in module.printed.splitlines() if line.strip()]
    if printed:
        more = f" … {len(printed) - _MAX_PRINTED} more" if len(printed) > _MAX_PRINTED else ""
        lines.append(Text(f"it printed: {' / '.join(printed[:_MAX_PRINTED])}{more}", style="dim"))
    return Group(*lines)


def source_line(step: Step) -> list[Text]:
    """The line of user code behind a step with its location; empty for other steps."""
    if step.file is None or step.line is None:
        return []
    place = Text(f"{visible(PurePath(step.file).name)}:{step.line}  ", style="dim")
    return [place.append(visible(step.source), style="not dim green")]


def _module_closing(record: Record, module: UserModule) -> Sequence[RenderableType]:
    """Whether the result has the shape of attention's output, and whether observation changed it."""
    axes = ["batch", *(["head"] if len(module.expected) == 4 else []), "query", "width"]
    shape_text = f"[{', '.join(axes)}]"
    if module.result == module.expected:
        line = Text(f"result: {list(module.result)} = {shape_text}, the shape that attention gives", style="bold")
    else:
        line = Text(f"! result: {list(module.result)}, where attention gives {list(module.expected)} = {shape_text}")
        line.stylize("bold yellow")
    odd = [f"{number} {visible(step.site)}" for number, step in enumerate(record.trace, 1) if step.remark]
    remarks = [Text(f"! warning at step {', '.join(odd)}", style="bold yellow")] if odd else []
    check = self_check_line(record.self_check, "a call without tracing gives the same result")
    return [line, *remarks, check]
