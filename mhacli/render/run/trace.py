"""The shape walkthrough of a layer or of user code: a block per site, or a single cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, nan
from operator import itemgetter
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from mhacli.record.record import Cell, Record, ScorePart, Step, UserModule
from mhacli.render.base.doc import Column, Table
from mhacli.render.base.format import (
    configuration,
    count_of,
    flowing,
    is_masked,
    memory_text,
    rough_note,
    title_rule,
    token_at,
    token_text,
    trace_totals,
    values_text,
)
from mhacli.render.base.options import Screen
from mhacli.render.base.terminal import bare
from mhacli.render.checkpoint.header import model_header
from mhacli.render.run.steps import axes_text, lines_table, sources_of, step_name
from mhacli.render.run.view import groups_table, self_check_line
from mhacli.settings import ROPE
from mhacli.sites import variants
from mhacli.text.escape import visible
from mhacli.text.numbers import shown

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
    sources = ["", *sources_of(record.trace)]
    for number, step in enumerate(record.trace, 1):
        title = Text(f"{number:2d} {step_name(step)}", style="bold cyan").append(
            f"  {axes_text(step)}", style="not cyan"
        )
        code = [Text(sources[number], style="green")] if sources[number] not in ("", sources[number - 1]) else []
        yield Group(Text(""), title, Padding(Group(*code, *_details(step, screen.width - _INDENT)), (0, 0, 0, _INDENT)))


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
    words = f"\ntotal {shown(flops, 'count')} FLOPs · {shown(n_bytes, 'bytes')} in new tensors · {n_parameters:,} parameters"
    total = record.timings.get("total")
    if total is not None:
        notes = [f"median of {len(total.samples_s)}", rough_note([total])]
        words += f" · {shown(total.median_s, 'seconds')} ({', '.join(filter(None, notes))})"
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


def _details(step: Step, room: int) -> Iterator[Text]:
    """The formula and meaning of a step, its costs and weights, and its numbers."""
    yield Text(visible(step.formula))
    if step.meaning:
        yield Text(visible(step.meaning), style="italic")
    if step.remark:
        yield Text(f"! {visible(step.remark)}", style="bold yellow")
    measured = [
        memory_text(step),
        f"strides ({', '.join(map(str, step.strides))})",
        f"{shown(step.flops, 'count')} FLOPs",
    ]
    measured += [f"{shown(step.bytes, 'bytes')} {visible(step.dtype)}"]
    measured += [] if step.time_s is None else [shown(step.time_s, "seconds")]
    measured += [f"{visible(weight.name)} {list(weight.shape)}" for weight in step.parameters]
    yield flowing([Text(part, style="dim") for part in measured], room)
    if step.values is not None:
        yield Text(values_text(step, step.values))
        numbers, width = step.values.numbers or (), max(1, step.shape[-1] if step.shape else 1)
        missing = "−∞" if is_masked(step) else _NOT_FINITE
        for start in range(0, len(numbers), width):
            yield Text(_numbers(numbers[start : start + width], room, missing), style="dim")


def _numbers(numbers: Sequence[float | None], room: int, missing: str) -> str:
    """Numbers in columns, as many as fit."""
    fit = max(2, room // _NUMBER_WIDTH)
    if len(numbers) > fit:
        fit = max(1, fit - 2)
    more = f" … {len(numbers) - fit} more" if len(numbers) > fit else ""
    return "".join(f"{missing if x is None else shown(x, 'number'):>{_NUMBER_WIDTH}}" for x in numbers[:fit]) + more


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
    terms = " + ".join(f"({_text(x)})" if x < 0 else _text(x) for x in products[:4])
    more = f" + … {len(products) - 4} more" if len(products) > 4 else ""
    yield Text(f"q · k = {terms}{more} = {_text(cell.qk)}")
    yield from _score(cell, screen)
    yield _row_table(record, cell, key, screen)
    yield vector(f"v[{cell.key}]", cell.v)
    weight, before = cell.share, cell.pattern_row[cell.key]
    dropped = "" if cell.share == before else f" (after dropout; before it {_text(before)})"
    term = f"{_text(cell.share)}{dropped} × v[{cell.key}]"
    yield Text(f"z[{cell.query}] = Σ attention weight × v over the keys; {key} adds {term}:")
    yield vector("added", [None if x is None or weight is None else weight * x for x in cell.v])
    yield vector(f"z[{cell.query}]", cell.z)


def _score(cell: Cell, screen: Screen) -> Iterator[RenderableType]:
    """The score in a sentence, and its parts by content and position."""
    is_masked_by_bias = any(part.kind == "given" and part.value is None for part in cell.parts)
    if cell.allowed:
        scaled = f"score = {_text(cell.qk)} × scale {_text(cell.scale)}"
        capped = "" if cell.softcap is None else f", then {cell.softcap:g} · tanh(score / {cell.softcap:g})"
        added = "".join(f", plus {visible(p.name)} = {_text(p.value)}" for p in cell.parts if p.added)
        yield Text(f"{scaled}{capped}{added} = {_text(cell.score)}, not masked")
    else:
        why = ": the score bias is −∞ here" if is_masked_by_bias else ""
        yield Text(f"this cell is masked{why}; its score is −∞, its attention weight exactly 0")
    if len(cell.parts) > 1:
        columns: list[Column[ScorePart]] = [
            Column(heading="of the score", value=lambda part: visible(part.name), wraps=True),
            Column(heading="comes from", value=lambda part: _KINDS[part.kind]),
            Column(heading="", value=_part_text, unit="id"),
        ]
        yield bare(Table(columns=columns, rows=cell.parts), screen.width)


def _text(number: float | None) -> str:
    """A number of the record, in which null is not a number."""
    return "nan" if number is None else shown(number, "number")


def _part_text(part: ScorePart) -> str:
    return "−∞" if part.value is None and part.kind == "given" else _text(part.value)


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
    left = [key for key in order if key not in listed]

    def row(name: str, keys: Sequence[int], score: str = "") -> tuple[str, str, str, float, float]:
        mark = "→" if name == own else ""
        return mark, name, score, sum(exps[key] for key in keys), sum(weights[key] for key in keys)

    rows = []
    for key in listed:  # a score is masked, or no number, and then its weight is none either
        is_masked_cell = scores[key] is None and weights[key] == 0
        score = "−∞" if is_masked_cell else _text(scores[key])
        rows.append(row(token_at(token_text(record.keys[cell.sequence], key), key), [key], score))
    sums = [row(f"⋮ {len(left)} more", left)] if left else []
    look: dict[str, Any] = {"style": lambda row: "bold" if row[0] else ""}
    columns: list[Column[tuple[str, str, str, float, float]]] = [
        Column(heading="", value=itemgetter(0), **look),
        Column(heading="key", value=itemgetter(1), least=1, **look),
        Column(heading="score", value=itemgetter(2), unit="id", **look),
        Column(heading="exp(score − max)", value=itemgetter(3), unit="number", **look),
        Column(heading="pattern", value=itemgetter(4), unit="number", **look),
    ]
    return bare(Table(columns=columns, rows=rows, foot=[*sums, row("sum", order)]), screen.width)


# ------------------------------------------------------------------------------------------------------------ user code

_MAX_PRINTED = 3


def _module_header(record: Record, module: UserModule, screen: Screen) -> RenderableType:
    """The target, its arguments with guesses marked, the call, the sizes of the trace, and the first lines that were printed."""
    environment, names = record.environment, [argument.name for argument in module.arguments]
    lines: list[RenderableType] = [Text(visible(module.target), style="bold")]

    def line(label: str, parts: Sequence[str], style: str = "", between: str = " · ") -> None:
        if parts:
            first, *others = [Text(visible(part), style) for part in parts]
            lines.append(flowing([Text(label).append_text(first), *others], screen.width, between))

    for label, origin in (("given", "given"), ("by default", "default"), ("guessed", "guessed")):
        whole = [a for a in module.arguments if not any(name.startswith(f"{a.name}.") for name in names)]
        arguments = [a for a in whole if a.origin == origin]
        line(f"{label}: ", [f"{a.name}={a.value}{f' ({a.why})' * bool(a.why)}" for a in arguments], between=", ")
    line("called: ", [module.called])
    line("sizes: ", [f"{word} {size}" for word, size in module.sizes], "bold")
    how = f"axes are named by comparing {count_of(module.n_runs, 'run')} with different sizes"
    if module.n_runs == 1:
        how = "one run: axes are named by their sizes alone, and a|b is one of the two"
    line("", [how], "dim")
    ran = [f"mha {environment.mha}", f"torch {environment.torch}", record.config.dtype, environment.device]
    line("", [*ran, "in eval"], "dim")
    printed = [text.strip() for text in module.printed.splitlines() if text.strip()]
    more = f" … {len(printed) - _MAX_PRINTED} more" if len(printed) > _MAX_PRINTED else ""
    if printed:
        line("", [f"it printed: {' / '.join(printed[:_MAX_PRINTED])}{more}"], "dim")
    return Group(*lines)


def _module_closing(record: Record, module: UserModule) -> Sequence[RenderableType]:
    """Whether the result has the shape of attention's output, and whether observation changed it."""
    axes = ["batch", *(["head"] if len(module.expected) == 4 else []), "query", "width"]
    shape_text = f"[{', '.join(axes)}]"
    if module.result == module.expected:
        line = Text(f"result: {list(module.result)} = {shape_text}, the shape that attention gives", style="bold")
    else:
        line = Text(f"! result: {list(module.result)}, where attention gives {list(module.expected)} = {shape_text}")
        line.stylize("bold yellow")
    return [line, self_check_line(record.self_check, "a call without tracing gives the same result")]
