"""What the walkthrough of somebody's own attention says besides its steps: what was walked, their lines, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.render.base.format import count_of, flowing
from mhacli.render.base.options import Screen
from mhacli.render.run.view import self_check_line
from mhacli.results.record.record import Argument, OwnModule, Record, Step
from mhacli.text.escape import visible

_MAX_PRINTED = 3


def module_header(record: Record, module: OwnModule, screen: Screen) -> RenderableType:
    """The target, what it was built with and what of that was guessed, how it is called, and the sizes of the walk."""
    environment, names = record.environment, [one.name for one in module.arguments]
    arguments = [one for one in module.arguments if not any(name.startswith(f"{one.name}.") for name in names)]
    lines: list[RenderableType] = [Text(visible(module.target), style="bold")]
    for said, origin in (("given", "given"), ("by default", "default"), ("guessed", "guessed")):
        parts = [_argument(one) for one in arguments if one.origin == origin]
        if parts:
            lines.append(flowing([Text(f"{said}: {parts[0]}"), *map(Text, parts[1:])], screen.width, ", "))
    lines.append(Text(f"called: {visible(module.called)}"))
    sizes = [Text(f"{visible(word)} {size}", style="bold") for word, size in module.sizes]
    lines.append(flowing([Text("sizes:").append(" ").append_text(sizes[0]), *sizes[1:]], screen.width))
    lines.append(Text(_how(module), style="dim"))
    ran = [f"mha {environment.mha}", f"torch {environment.torch}", record.config.dtype, environment.device]
    lines.append(flowing([Text(visible(part), style="dim") for part in [*ran, "in eval"]], screen.width))
    return Group(*lines, *_printed(module))


def _argument(one: Argument) -> str:
    why = f" ({visible(one.why)})" if one.why else ""
    return f"{visible(one.name)}={visible(one.value)}{why}"


def _how(module: OwnModule) -> str:
    if module.n_runs == 1:
        return "one run: axes are named by their sizes alone, and a|b is one of the two"
    return f"axes are named by how they follow these sizes in {count_of(module.n_runs, 'run')} with different ones"


def _printed(module: OwnModule) -> Iterator[Text]:
    """What the author's code printed meanwhile, its first lines."""
    printed = [line for line in module.printed.splitlines() if line.strip()]
    if printed:
        more = f" … {len(printed) - _MAX_PRINTED} more" if len(printed) > _MAX_PRINTED else ""
        shown = " / ".join(visible(line.strip()) for line in printed[:_MAX_PRINTED])
        yield Text(f"it printed: {shown}{more}", style="dim")


def source_line(step: Step) -> list[Text]:
    """The line of theirs that asked for a step, with its place; nothing where it was not their code."""
    if step.file is None or step.line is None:
        return []
    place = Text(f"{visible(PurePath(step.file).name)}:{step.line}  ", style="dim")
    return [place.append(visible(step.source), style="not dim green")]


def repeats_text(step: Step) -> str:
    """` × 3`, and what for, of a step that stands for several."""
    if step.repeats == 1:
        return ""
    return f"  × {step.repeats}" + (f" ({visible(step.repeats_of)})" if step.repeats_of else "")


def module_closing(record: Record, module: OwnModule, screen: Screen) -> Sequence[RenderableType]:
    """Whether the result has the shape that attention gives; and whether watching left it as it is."""
    axes = ["batch", *(["head"] if len(module.expected) == 4 else []), "query", "width"]
    told = f"[{', '.join(axes)}]"
    if module.result == module.expected:
        line = Text(f"result: {list(module.result)} = {told}, the shape that attention gives", style="bold")
    else:
        line = Text(f"! result: {list(module.result)}, where attention gives {list(module.expected)} = {told}")
        line.stylize("bold yellow")
    odd = [f"{number} {visible(step.site)}" for number, step in enumerate(record.trace, 1) if step.remark]
    remarks = [Text(f"! look at {', '.join(odd)}", style="bold yellow")] if odd else []
    check = self_check_line(record.self_check, "the same call without being watched differs")
    return [line, *remarks, check]
