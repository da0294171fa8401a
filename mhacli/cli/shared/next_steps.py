"""Suggested commands on a terminal: tracing a cell with `mha trace`, and the page or the viewer."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_type_hints

from mhacli.cli.console import stdout_width, write
from mhacli.cli.values import are_literal
from mhacli.record.heads import UNTYPED
from mhacli.render.base.format import token_at, token_text, type_text, weight_text
from mhacli.render.base.options import ViewOptions
from mhacli.render.base.selection import chosen_layers
from mhacli.text.escape import visible

if TYPE_CHECKING:
    from mhacli.cli.output import Output
    from mhacli.cli.shared.checkpoint import ComputeRequest
    from mhacli.commands.weights import Contents
    from mhacli.record.record import Record

LayerCell = tuple[int, int, tuple[int, int, int]]
"""A layer, a sequence, and (head, query, key)."""
PAGE = "attention.html"
_MOST = 160
"""The number of characters of the longest command that is suggested."""
_SENTENCE = "the cat sat on the mat"
_LABEL, _GOES_ON = "next: ", " \\"


def suggest_next(record: Record, request: ComputeRequest, options: ViewOptions, output: Output) -> None:
    """Prints commands to type next, unless the output is a format or brief."""
    if output.format is not None or options.brief:
        return
    lines = [*_suggested(next_commands(record, request, options, output))]
    if not (options.verbose or record.model is not None):
        lines.insert(0, "more: --tokens, --shapes, --timings, or --verbose for all\n")
    if lines:
        write("".join(lines))


def suggest_after_effects(record: Record, groups: tuple[object, ...], *, saved: str | None) -> None:
    """Prints commands to type after the effects of heads: the edges of the head with the largest effect, and the viewer.
    `groups` are the options to repeat."""
    summary = record.effect
    single_heads = [effect for effect in record.effects if effect.removed == "head" and effect.kind != "encoder"]
    if summary is None or not single_heads or record.model is None:
        return
    largest = max(single_heads, key=lambda effect: abs(summary.change_of(effect) or 0.0))
    name = f"{largest.layer}.{largest.head}"
    head = name if largest.kind == "self" else f"{largest.kind}.{name}"
    commands = [["mha", "effect", *_retyped(groups, ["--edges", "--head", head])]]
    commands += [["mha", "view", saved]] if saved is not None else []
    write("".join(_suggested((words, "") for words in commands)))


def suggest_after_trace(record: Record, groups: tuple[object, ...]) -> None:
    """Prints, after the steps of a layer, how to trace its largest attention weight. `groups` are the options to repeat."""
    cell = strongest_cell(record, ViewOptions())
    if cell is not None:
        words = ["mha", "trace", *_retyped(groups, _cell_words(cell))]
        write("".join(_suggested([(words, cell_text(record, cell, ViewOptions()))])))


def suggest_after_code(target: str, arguments: list[str]) -> None:
    """Prints, after the steps of user code, the command that checks it."""
    words = ["mha", "check", target, *(word for argument in arguments for word in ("--arg", argument))]
    write("".join(_suggested([(words, "whether it is right, and if not, which mistake it makes")])))


def suggest_after_heads(record: Record, request: ComputeRequest, options: ViewOptions) -> None:
    """Prints commands to type after the statistics of heads: the map of the most pronounced head, and the viewer or the page."""
    saved = request.save.save
    commands = [(["mha", "view", saved], "")] if saved is not None else []
    if can_repeat(request):
        groups = (request.source, request.text, request.layer, request.device, request.reading)
        typed = [head for head in record.heads if head.kind not in UNTYPED]
        head = max(typed, key=lambda head: head.certainty or 0.0) if typed else record.heads[0]
        kinds = [layer.kind for layer in record.layers if layer.name == head.attention]
        layer = f"{kinds[0]}.{head.layer}" if kinds and kinds[0] != "self" else str(head.layer)
        chosen = replace(request.model, layer=layer) if kinds else request.model
        name = (f"layer {layer}, " if kinds else "") + f"head {head.head}: {type_text(head)}"
        commands = commands or [(["mha", "heads", *_retyped((*groups, request.model), ["--html", PAGE])], "")]
        if not options.maps:
            words = ["mha", "heads", *_retyped((*groups, chosen), ["--map", str(head.head)])]
            commands.insert(0, (words, name))
    write("".join(_suggested(commands)))


def suggest_after_contents(contents: Contents) -> None:
    """Prints the run that shows the attention of a checkpoint or a weights file, if it has an attention that mha knows."""
    if contents.attentions:
        option = "--weights" if contents.kind == "layer" else "--model"
        write("".join(_suggested([(["mha", "run", _SENTENCE, option, contents.path], "")])))


def _suggested(commands: Iterable[tuple[list[str], str]]) -> Iterator[str]:
    """The lines of each command that can be typed, and its description."""
    for words, about in commands:
        if typed_words(words):
            yield f"{_LABEL}{_folded(words)}\n" + (f"{' ' * len(_LABEL)}{about}\n" if about else "")


def _folded(words: list[str]) -> str:
    """A command wrapped to the terminal with backslashes, broken before options or texts."""
    from rich.cells import cell_len

    width, one_line = stdout_width() - len(_LABEL), typed_words(words)
    if cell_len(one_line) <= width:
        return one_line
    groups = [" ".join(words[:2])]
    for before, word in pairwise(words[1:]):
        if before.startswith("--") and not word.startswith("--"):
            groups[-1] += f" {_quoted(word)}"
        else:
            groups.append(_quoted(word))
    lines = groups[:1]
    for group in groups[1:]:
        if cell_len(f"{lines[-1]} {group}{_GOES_ON}") <= width:
            lines[-1] += f" {group}"
        else:
            lines.append(group)
    return f"{_GOES_ON}\n{' ' * len(_LABEL)}".join(lines)


def can_repeat(request: ComputeRequest) -> bool:
    """Whether the command can be repeated: it read no stdin or chat and generated no tokens."""
    sources = [*(request.source.typed or ()), *(request.source.file or ())]
    return "-" not in sources and request.reading.generate is None and request.reading.chat is None


def typed_words(command: list[str]) -> str:
    """A command quoted for a shell; empty if it is long or a terminal would not show it exactly."""
    text = " ".join(map(_quoted, command))
    return text if visible(text) == text and len(text) <= _MOST else ""


def _quoted(word: str) -> str:
    """A word quoted for a shell: plain, in double quotes, or, if these would change it, quoted by `shlex`."""
    plain = shlex.quote(word)
    return plain if plain == word or any(sign in word for sign in '"$`\\!') else f'"{word}"'


def next_commands(
    record: Record, request: ComputeRequest, options: ViewOptions, output: Output
) -> Iterator[tuple[list[str], str]]:
    """The commands that trace a cell, with its description, and that write a page of the record or open it."""
    cell = strongest_cell(record, options)
    if can_repeat(request) and cell is not None:
        layer, chosen = cell[0], _cell_words(cell)
        layer_groups = (request.source, request.text, request.layer, request.device)
        if request.model.model is not None:
            chosen = ["--model", request.model.model, "--layer", str(layer), *chosen]
            chosen += ["--revision", request.model.revision] if request.model.revision else []
            chosen += ["--device-map", request.model.device_map] if request.model.device_map else []
        yield ["mha", "trace", *_retyped(layer_groups, chosen)], cell_text(record, cell, options)
    saved = request.save.save
    if output.html is None and saved is not None:
        yield ["mha", "show", saved, "--html", PAGE], ""
    elif saved is not None:
        yield ["mha", "view", saved], ""
    elif can_repeat(request):
        all_groups = (request.source, request.text, request.layer, request.device, request.model, request.reading)
        page = output.html is None
        yield ["mha", "run" if page else "view", *_retyped(all_groups, ["--html", PAGE] if page else [])], ""


def _cell_words(cell: LayerCell) -> list[str]:
    _, sequence, head_query_key = cell
    return ["--cell", ",".join(map(str, head_query_key)), *(["--sequence", str(sequence)] if sequence else [])]


def cell_text(record: Record, cell: LayerCell, options: ViewOptions) -> str:
    """`layer 2, head 1, query dog 1, key a 0: weight .77`, to find the cell on the screen."""
    layer, sequence, (head, query, key) = cell
    view = dict(_views(record, options))[layer]
    head_idx = [statistics.head for statistics in view.heads].index(head)
    index = sequence, head_idx, query + view.first_query(sequence), key + view.first_key(sequence)
    names = [f"layer {layer}"] if record.model is not None else []
    names += [f"sequence {sequence}"] if len(record.sequences) > 1 else []
    names += [f"head {head}", f"query {token_at(token_text(view.sequences[sequence], query), query)}"]
    names += [f"key {token_at(token_text(view.keys[sequence], key), key)}"]
    return f"{', '.join(names)}: weight {weight_text(float(view.arrays['pattern'][index]), options.precision)}"


def strongest_cell(record: Record, options: ViewOptions) -> LayerCell | None:
    """The cell of the largest attention weight between different tokens, among queries that see several keys. In a checkpoint,
    the first token, which is often a sink, counts only if no other key has weight."""
    import numpy as np

    best, strongest = 0.0, None
    for number, view in _views(record, options):
        pattern, allowed = view.arrays["pattern"], view.arrays["allowed"]
        weights = np.where(allowed & (allowed.sum(axis=-1, keepdims=True) > 1), np.nan_to_num(pattern), 0.0)
        heads = [head.head for head in view.heads]
        for b in range(len(view.sequences)) if options.sequences is None else options.sequences:
            cells = weights[b]
            first_query, first_key = view.first_query(b), view.first_key(b)
            if view.context is None:
                cells[:, np.eye(cells.shape[1], dtype=bool)] = 0.0
            if record.model is not None and cells[:, :, first_key + 1 :].any():
                cells[:, :, first_key] = 0.0
            if options.heads is not None:
                cells[[head_idx for head_idx, head in enumerate(heads) if head not in options.heads]] = 0.0
            head_idx, query, key = (int(n) for n in np.unravel_index(int(cells.argmax()), cells.shape))
            if cells[head_idx, query, key] > best:
                best = float(cells[head_idx, query, key])
                strongest = number, b, (heads[head_idx], query - first_query, key - first_key)
    return strongest


def _views(record: Record, options: ViewOptions) -> Iterator[tuple[int, Record]]:
    """The drawn layers whose cells can be traced, each with its number."""
    if record.model is None:
        yield from [(0, record)] if "pattern" in record.arrays else []
        return
    for layer in chosen_layers(record, options):
        if layer.has_pattern and layer.inspected.kind in ("self", "decoder"):
            yield layer.inspected.layer, layer.record


def _retyped(groups: tuple[object, ...], chosen: list[str]) -> list[str]:
    """The words of the texts and options in the groups, followed by the words in `chosen`."""
    texts: list[str] = []
    options: list[str] = []
    for group in groups:
        hints = get_type_hints(type(group), include_extras=True)
        for f in fields(group):  # type: ignore[arg-type]
            value = getattr(group, f.name)
            if value == f.default or value is None:
                continue
            if f.name == "typed":
                texts = list(value)
                continue
            options += _option_words(f.name, hints[f.name].__metadata__[0], value)
    if are_literal() or any(text.startswith("-") for text in texts):
        return [*options, *chosen, "--", *texts]
    return [*texts, *options, *chosen]


def _option_words(name: str, declared: Any, value: Any) -> list[str]:
    """The words of an option and its value: `--heads 4`, `--no-causal`; a list gives one option per element."""
    names = [word for word in (declared.default, *declared.param_decls) if str(word).startswith("--")]
    on, _, off = (names or [f"--{name.replace('_', '-')}"])[0].partition("/")
    if isinstance(value, bool):
        return [on if value else off]
    return [word for element in (value if isinstance(value, list) else [value]) for word in (on, str(element))]
