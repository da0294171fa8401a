"""The shape walkthrough of a layer or of user code: a block per site, or a single cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import exp, prod
from pathlib import PurePath

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from mhacli.record.record import Argument, Cell, Record, ScorePart, Step, TensorSummary, UserModule
from mhacli.render.base.doc import Column, Table
from mhacli.render.base.format import (
    bytes_text,
    configuration,
    count_of,
    count_text,
    filled,
    flowing,
    is_masked,
    memory_text,
    number_text,
    rough_note,
    seconds_text,
    single_parameters,
    title_rule,
    token_at,
    token_text,
    trace_totals,
    values_text,
)
from mhacli.render.base.options import Screen
from mhacli.render.base.terminal import table
from mhacli.render.checkpoint.header import model_header
from mhacli.render.run.view import Comparison, axes_text, groups_table, self_check_line
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
_ALWAYS = ("content", "position")
_OF_UNWATCHED = Comparison(
    "a call without tracing gives the same result",
    "a call without tracing gives another shape, or NaN or infinity at other positions",
)


def step_blocks(record: Record, screen: Screen) -> Iterator[RenderableType]:
    """The configuration, then a block per site in the order of execution."""
    yield from header(record, screen)
    if record.module is None and record.model is None:
        yield from _variants(record)
    if record.module is None:
        layer = record if record.model is None else record.of_layer(0)
        yield from (Group(Text(""), groups) for groups in groups_table(layer, screen))
    before: Step | None = None
    for number, step in enumerate(record.trace, 1):
        yield _block(number, step, screen, before=before, is_timed=record.module is None)
        before = step


def header(record: Record, screen: Screen) -> Iterator[RenderableType]:
    """The configuration and the environment."""
    if record.module is not None:
        yield module_header(record, record.module, screen)
    elif record.model is None:
        yield configuration(record, screen.width)
    else:
        yield model_header(record, record.model, screen)


def _variants(record: Record) -> Iterator[RenderableType]:
    for name, variant in variants(record.facts).items():
        title = Text(f"\n{name}: ", style="bold").append(visible(variant.explanation), style="not bold")
        body = Group(Text(f"why: {variant.why}", style="italic"), Text(f"source: {variant.source}", style="dim"))
        yield Group(title, Padding(body, (0, 0, 0, _INDENT)))


def closing(record: Record, screen: Screen) -> RenderableType:
    """The end of the walkthrough: totals, the cell, and the self-check."""
    sections: list[RenderableType] = [_totals(record)]
    if record.module is not None:
        return Group(*sections, Text(""), *module_closing(record, record.module))
    if record.cell is not None:
        sections += [Text(""), *_cell_story(record, record.cell, screen)]
    return Group(*sections, Text(""), self_check_line(record.self_check))


def cell_view(record: Record, cell: Cell, screen: Screen) -> RenderableType:
    """The configuration, the cell without the layer's steps, and the self-check."""
    story = _cell_story(record, cell, screen)
    return Group(
        *header(record, screen),
        Text(""),
        *story,
        Text(_MORE, style="dim"),
        Text(""),
        self_check_line(record.self_check),
    )


def _block(number: int, step: Step, screen: Screen, *, before: Step | None, is_timed: bool) -> Group:
    """A step with all its details. Its line of code is omitted if the previous step shows the same line."""
    title = Text(f"{number:2d} {visible(step.site)}", style="bold cyan")
    title.append("  " + axes_text(step.axes, step.shape), style="not cyan bold")
    title.append(repeats_text(step), style="not cyan bold")
    room = screen.width - _INDENT
    code = source_line(step)
    lines = [] if before is not None and code == source_line(before) else code
    lines += [Text(visible(step.formula))]
    lines += [Text(visible(step.meaning), style="italic")] if step.meaning else []
    lines += [Text(f"! {visible(step.remark)}", style="bold yellow")] if step.remark else []
    lines += [Text("\n".join(filled(_measured(step, is_timed=is_timed), room)), style="dim")]
    if step.parameters:
        shown = single_parameters(step)
        weights = ", ".join(f"{visible(p.name)} {list(p.shape)}" for p in shown)
        weights += f" … {len(step.parameters) - len(shown)} more" if len(shown) < len(step.parameters) else ""
        total = sum(prod(p.shape) for p in step.parameters)
        lines.append(Text(f"parameters: {weights} = {total:,} numbers", style="dim"))
    if step.values is not None:
        lines.append(Text(values_text(step, step.values)))
        if step.values.numbers is not None:
            lines.append(_small_tensor(step, step.values, room))
    return Group(Text(""), title, Padding(Group(*lines), (0, 0, 0, _INDENT)))


def _measured(step: Step, *, is_timed: bool) -> list[str]:
    return [
        memory_text(step),
        f"strides ({', '.join(map(str, step.strides))})",
        f"{count_text(step.flops)} FLOPs",
        bytes_text(step.bytes) + f" {visible(step.dtype)}",
        *([seconds_text(step.time_s)] if is_timed else []),
    ]


def _small_tensor(step: Step, values: TensorSummary, room: int) -> Text:
    """The numbers of a small tensor, with rows of the last axis as lines, as far as columns fit."""
    width = max(1, step.shape[-1] if step.shape else 1)
    fit = max(1, room // _NUMBER_WIDTH)
    numbers, missing = values.numbers or (), "−∞" if is_masked(step) else "not fin."
    lines = []
    for start in range(0, len(numbers), width):
        row = numbers[start : start + width]
        shown = row if len(row) <= fit else row[: max(1, fit - 2)]
        more = f" … {len(row) - len(shown)} more" if len(shown) < len(row) else ""
        lines.append("".join(f"{missing if x is None else number_text(x):>{_NUMBER_WIDTH}}" for x in shown) + more)
    return Text("\n".join(lines), style="dim")


def _totals(record: Record) -> Text:
    total = record.timings.get("total")
    flops, n_bytes, n_parameters = trace_totals(record.trace)
    line = Text(
        f"\ntotal {count_text(flops)} FLOPs · {bytes_text(n_bytes)} in new tensors · {n_parameters:,} parameters",
        style="bold",
    )
    if total is None:
        return line
    notes = [f"median of {len(total.samples_s)}", rough_note([total])]
    return line.append(f" · {seconds_text(total.median_s)} ({', '.join(filter(None, notes))})")


# -------------------------------------------------------------------------------------------------------------- cell


def _cell_story(record: Record, cell: Cell, screen: Screen) -> Iterator[RenderableType]:
    """The computation of one attention weight, number by number."""
    record = record if record.model is None else record.of_layer(0)
    query = token_at(token_text(record.sequences[cell.sequence], cell.query), cell.query)
    key = token_at(token_text(record.keys[cell.sequence], cell.key), cell.key)
    yield title_rule(f"cell: head {cell.head}, query {query}, key {key}")
    suffix = "_rot" if record.config.positions in ROPE and record.model is None else ""
    yield _vector(f"q{suffix}[{cell.query}]", cell.q, screen)
    yield _vector(f"k{suffix}[{cell.key}]", cell.k, screen)
    products = [a * b for a, b in zip(cell.q, cell.k, strict=False) if a is not None and b is not None]
    shown = " + ".join(f"({number_text(x)})" if x < 0 else number_text(x) for x in products[:4])
    more = f" + … {len(products) - 4} more" if len(products) > 4 else ""
    yield Text(f"q · k = {shown}{more} = {number_text(cell.qk)}")
    yield Text(_score_line(cell))
    if len(cell.parts) > 1:
        yield _parts_table(cell, screen)
    yield _row_table(record, cell, screen)
    yield _vector(f"v[{cell.key}]", cell.v, screen)
    yield from _part_of_z(cell, key, screen)


def _score_line(cell: Cell) -> str:
    if not cell.allowed:
        why = ": the score bias is −∞ here" if _is_masked_by_bias(cell) else ""
        return f"this cell is masked{why}; its score is −∞, its attention weight exactly 0"
    scaled = f"score = {number_text(cell.qk)} × scale {number_text(cell.scale)}"
    capped = "" if cell.softcap is None else f", then {cell.softcap:g} · tanh(score / {cell.softcap:g})"
    added = "".join(f", plus {visible(p.name)} = {number_text(p.value)}" for p in cell.parts if p.added)
    return f"{scaled}{capped}{added} = {number_text(cell.score)}, not masked"


def _is_masked_by_bias(cell: Cell) -> bool:
    return any(part.kind == "given" and part.value is None for part in cell.parts)


def _parts_table(cell: Cell, screen: Screen) -> RenderableType:
    """The parts of the score by content and position."""
    is_masked_by_bias = _is_masked_by_bias(cell)
    total = sum(part.value or 0.0 for part in cell.parts)

    def value(part: ScorePart | None) -> str:
        is_masked = is_masked_by_bias if part is None else part.kind == "given" and part.value is None
        return "−∞" if is_masked else number_text(total if part is None else part.value)

    parts: Table[ScorePart | None] = Table(
        columns=[
            Column(
                heading="of the score", value=lambda part: "sum" if part is None else visible(part.name), wraps=True
            ),
            Column(heading="comes from", value=lambda part: "" if part is None else _KINDS[part.kind]),
            Column(heading="", value=value, unit="id"),
        ],
        rows=cell.parts,
        foot=[None],
    )
    totals = {kind: sum(p.value or 0.0 for p in cell.parts if p.kind == kind) for kind in _KINDS}
    words = [f"{_KINDS[kind]} {number_text(total)}" for kind, total in totals.items() if total or kind in _ALWAYS]
    masked = "" if cell.allowed or is_masked_by_bias else " (before the mask, which makes the score −∞)"
    return Group(*table(parts, screen.width), Text(f"in all: {', '.join(words)}{masked}", style="italic"))


def _row_table(record: Record, cell: Cell, screen: Screen) -> RenderableType:
    """The softmax over the query's row: exp of each score minus the largest, divided by their sum. The cell's key is
    marked."""
    largest = max((score for score in cell.scores_row if score is not None), default=0.0)
    listed, everywhere = _nearby(cell), range(len(cell.scores_row))
    hidden = sorted(set(everywhere) - set(listed))
    rows = {j: _softmax_step(cell, j, largest) for j in listed}
    sums = {f"⋮ {len(hidden)} more": ("", *_sums(cell, hidden, largest))} if hidden else {}
    sums["sum"] = ("", *_sums(cell, everywhere, largest))

    def key(row: int | str) -> str:
        return row if isinstance(row, str) else token_at(token_text(record.keys[cell.sequence], row), row)

    def number(place: int) -> Callable[[int | str], str]:
        return lambda row: sums[row][place] if isinstance(row, str) else rows[row][place]

    columns: list[Column[int | str]] = [
        Column(heading="", value=lambda row: "→" if row == cell.key else "", unit="id"),
        Column(heading="key", value=key, least=1),
        *(
            Column(heading=heading, value=number(place), unit="id")
            for place, heading in enumerate(("score", "exp(score − max)", "pattern"))
        ),
    ]
    bold = [replace(column, style=lambda row: "bold" if row == cell.key else "") for column in columns]
    return Group(*table(Table(columns=bold, rows=[*rows], foot=[*sums]), screen.width))


def _softmax_step(cell: Cell, key: int, largest: float) -> tuple[str, str, str]:
    score, weight = cell.scores_row[key], number_text(cell.pattern_row[key])
    return ("−∞", "0", weight) if score is None else (number_text(score), number_text(exp(score - largest)), weight)


def _sums(cell: Cell, keys: Iterable[int], largest: float) -> tuple[str, str]:
    """Sums over some keys of the exponentials and of the pattern."""
    scores = [(cell.scores_row[j], cell.pattern_row[j] or 0.0) for j in keys]
    return number_text(sum(exp(x - largest) for x, _ in scores if x is not None)), number_text(
        sum(p for _, p in scores)
    )


def _nearby(cell: Cell) -> list[int]:
    """The keys to list: all of a short row, otherwise the cell's own and the top keys."""
    order = sorted(range(len(cell.pattern_row)), key=lambda j: (-(cell.pattern_row[j] or 0.0), j))
    return list(range(len(order))) if len(order) <= 16 else sorted({cell.key, *order[:11]})


def _part_of_z(cell: Cell, key: str, screen: Screen) -> Iterator[RenderableType]:
    weight = cell.share or 0.0
    dropped = (
        ""
        if cell.share == cell.pattern_row[cell.key]
        else f" (after dropout; before it {number_text(cell.pattern_row[cell.key])})"
    )
    term = f"{number_text(cell.share)}{dropped} × v[{cell.key}]"
    yield Text(f"z[{cell.query}] = Σ attention weight × v over the keys; {key} adds {term}:")
    yield _vector("added", tuple(None if x is None else weight * x for x in cell.v), screen)
    yield _vector(f"z[{cell.query}]", cell.z, screen)


def _vector(name: str, numbers: tuple[float | None, ...], screen: Screen) -> Text:
    fit = max(2, (screen.width - 24) // _NUMBER_WIDTH)
    shown = "".join(f"{'not fin.' if x is None else number_text(x):>{_NUMBER_WIDTH}}" for x in numbers[:fit])
    more = f"  … {len(numbers) - fit} more" if len(numbers) > fit else ""
    return Text(f"{name:<8}{shown}{more}")


# ------------------------------------------------------------------------------------------------------------ user code

_MAX_PRINTED = 3


def module_header(record: Record, module: UserModule, screen: Screen) -> RenderableType:
    """The target, its arguments with guesses marked, the call, and the sizes of the trace."""
    environment, names = record.environment, [argument.name for argument in module.arguments]
    arguments = [
        argument for argument in module.arguments if not any(name.startswith(f"{argument.name}.") for name in names)
    ]
    lines: list[RenderableType] = [Text(visible(module.target), style="bold")]
    for label, origin in (("given", "given"), ("by default", "default"), ("guessed", "guessed")):
        parts = [_argument(argument) for argument in arguments if argument.origin == origin]
        if parts:
            lines.append(flowing([Text(f"{label}: {parts[0]}"), *map(Text, parts[1:])], screen.width, ", "))
    lines.append(Text(f"called: {visible(module.called)}"))
    sizes = [Text(f"{visible(word)} {size}", style="bold") for word, size in module.sizes]
    lines.append(flowing([Text("sizes:").append(" ").append_text(sizes[0]), *sizes[1:]], screen.width))
    lines.append(Text(_how(module), style="dim"))
    ran = [f"mha {environment.mha}", f"torch {environment.torch}", record.config.dtype, environment.device]
    lines.append(flowing([Text(visible(part), style="dim") for part in [*ran, "in eval"]], screen.width))
    return Group(*lines, *_printed(module))


def _argument(argument: Argument) -> str:
    why = f" ({visible(argument.why)})" if argument.why else ""
    return f"{visible(argument.name)}={visible(argument.value)}{why}"


def _how(module: UserModule) -> str:
    if module.n_runs == 1:
        return "one run: axes are named by their sizes alone, and a|b is one of the two"
    return f"axes are named by comparing {count_of(module.n_runs, 'run')} with different sizes"


def _printed(module: UserModule) -> Iterator[Text]:
    """The first lines printed by user code."""
    printed = [line for line in module.printed.splitlines() if line.strip()]
    if printed:
        more = f" … {len(printed) - _MAX_PRINTED} more" if len(printed) > _MAX_PRINTED else ""
        shown = " / ".join(visible(line.strip()) for line in printed[:_MAX_PRINTED])
        yield Text(f"it printed: {shown}{more}", style="dim")


def source_line(step: Step) -> list[Text]:
    """The line of user code behind a step with its location; empty for other steps."""
    if step.file is None or step.line is None:
        return []
    place = Text(f"{visible(PurePath(step.file).name)}:{step.line}  ", style="dim")
    return [place.append(visible(step.source), style="not dim green")]


def repeats_text(step: Step) -> str:
    """` × 3` and the reason, for a step that stands for several."""
    if step.repeats == 1:
        return ""
    return f"  × {step.repeats}" + (f" ({visible(step.repeats_of)})" if step.repeats_of else "")


def module_closing(record: Record, module: UserModule) -> Sequence[RenderableType]:
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
    check = self_check_line(record.self_check, _OF_UNWATCHED)
    return [line, *remarks, check]
