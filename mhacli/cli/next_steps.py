"""Commands to type next: this command line with other words, such as the cell to trace or the page to write."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mhacli.cli.console import stdout_width, write
from mhacli.render.base.format import token_at, token_text, type_text, weight_text
from mhacli.render.base.options import ViewOptions
from mhacli.render.base.selection import chosen_layers
from mhacli.text.escape import visible

if TYPE_CHECKING:
    from mhacli.cli.output import Output
    from mhacli.record.record import Record

_PAGE = ("--html", "attention.html")
_MOST = 160
"""The number of characters of the longest command that is suggested."""
_COMPUTED = ("Text", "Attention", "Positions", "Mask and scores", "Device", "Checkpoint", "Measurement")
"""The panels of options that decide what is computed; others choose what is shown or written."""
_LABEL, _GOES_ON = "next: ", " \\"


def suggest(words: list[str], about: str = "") -> None:
    """Prints a command to type next, broken between its options where the terminal is narrow, and a line about it. Prints nothing
    for a long command, and for one that a terminal would not show exactly."""
    text = " ".join(map(_quoted, words))
    if not words or visible(text) != text or len(text) > _MOST:
        return
    from rich.cells import cell_len

    parts = [" ".join(words[:2])]
    for before, word in pairwise(words[1:]):
        if before.startswith("--") and not word.startswith("--"):
            parts[-1] += f" {_quoted(word)}"
        else:
            parts.append(_quoted(word))
    lines = [_LABEL + parts[0]]
    for part in parts[1:]:
        if cell_len(f"{lines[-1]} {part}{_GOES_ON}") <= stdout_width():
            lines[-1] += f" {part}"
        else:
            lines.append(" " * len(_LABEL) + part)
    write(f"{_GOES_ON}\n".join(lines) + "\n" + (f"{' ' * len(_LABEL)}{about}\n" if about else ""))


def _quoted(word: str) -> str:
    """A word quoted for a shell: plain, in double quotes, or, if these would change it, quoted by `shlex`."""
    plain = shlex.quote(word)
    return plain if plain == word or any(sign in word for sign in '"$`\\!') else f'"{word}"'


def again(command: str, *added: str, without: Collection[str] = ()) -> list[str]:
    """This command line for `command`: its texts and the options of the computation, except those `without`, and `added` words.
    Empty where it read stdin or a chat or generated tokens, and so cannot be repeated."""
    from typer._click.globals import get_current_context

    context = get_current_context()
    options = {name: option for option in context.command.params for name in (*option.opts, *option.secondary_opts)}
    words = iter(sys.argv[sys.argv.index(str(context.info_name)) + 1 :])
    kept: list[str] = []
    for word in words:
        if word == "--":
            return ["mha", command, *kept, *added, "--", *words]
        option = options.get(word.partition("=")[0]) if word.startswith("-") else None
        is_pair = option is not None and "=" not in word and not getattr(option, "is_flag", False)
        pair = [word, next(words)] if is_pair else [word]
        if "-" in pair or (option is not None and option.opts[0] in ("--chat", "--generate")):
            return []
        if option is None or (getattr(option, "rich_help_panel", None) in _COMPUTED and option.opts[0] not in without):
            kept += pair
    return ["mha", command, *kept, *added]


# ------------------------------------------------------------------------------------------- what follows each command


def after_run(record: Record, options: ViewOptions, output: Output) -> None:
    """Suggests to trace the strongest cell of what is shown, and to write a page of the record or to open it."""
    if record.model is None and not options.verbose:
        write("more: --tokens, --shapes, --timings, or --verbose for all\n")
    suggest_cell(record, options)
    if output.save is not None:
        suggest(["mha", "view", output.save] if output.html else ["mha", "show", output.save, *_PAGE])
    else:
        suggest(again("view") if output.html else again("run", *_PAGE))


def after_heads(record: Record, options: ViewOptions, output: Output) -> None:
    """Suggests a map of the most pronounced head, and to open the record or to write a page."""
    from mhacli.record.heads import UNTYPED

    typed = [head for head in record.heads if head.kind not in UNTYPED]
    head = max(typed, key=lambda head: head.certainty or 0.0) if typed else record.heads[0]
    kinds = [layer.kind for layer in record.layers if layer.name == head.attention]
    layer = f"{kinds[0]}.{head.layer}" if kinds and kinds[0] != "self" else str(head.layer)
    where, chosen = (f"layer {layer}, ", ("--layer", layer)) if kinds else ("", ())
    if not options.maps:
        about = f"{where}head {head.head}: {type_text(head)}"
        suggest(again("heads", *chosen, "--map", str(head.head), without=chosen[:1]), about)
    suggest(["mha", "view", output.save] if output.save is not None else again("heads", *_PAGE))


def after_effect(record: Record, options: ViewOptions, output: Output) -> None:
    """Suggests the edges of the head with the largest effect, and to open the record."""
    single_heads = [effect for effect in record.effects if effect.removed == "head" and effect.kind != "encoder"]
    if record.effect is None or not single_heads or record.model is None:
        return
    largest = max(single_heads, key=lambda effect: abs(record.effect.change_of(effect) or 0.0))  # type: ignore[union-attr]
    name = f"{largest.layer}.{largest.head}"
    head = name if largest.kind == "self" else f"{largest.kind}.{name}"
    suggest(again("effect", "--edges", "--head", head, without=("--span",)))
    if output.save is not None:
        suggest(["mha", "view", output.save])


def suggest_cell(record: Record, options: ViewOptions) -> None:
    """Suggests to trace the cell of the largest attention weight, and says where it is on the screen."""
    import numpy as np

    best, words, about = 0.0, list[str](), ""
    for number, layer in _layers(record, options):
        for b in range(len(layer.sequences)) if options.sequences is None else options.sequences:
            weights = _weights_between_tokens(layer, b, options, in_checkpoint=record.model is not None)
            head_idx, row, column = (int(n) for n in np.unravel_index(int(weights.argmax()), weights.shape))
            if weights[head_idx, row, column] <= best:
                continue
            best, head = float(weights[head_idx, row, column]), layer.heads[head_idx].head
            query, key = row - layer.first_query(b), column - layer.first_key(b)
            words = [] if record.model is None else ["--layer", str(number)]
            words += ["--cell", f"{head},{query},{key}", *(["--sequence", str(b)] if b else [])]
            names = [] if record.model is None else [f"layer {number}"]
            names += [f"sequence {b}"] if len(record.sequences) > 1 else []
            names += [f"head {head}", f"query {token_at(token_text(layer.sequences[b], query), query)}"]
            names += [f"key {token_at(token_text(layer.keys[b], key), key)}"]
            about = f"{', '.join(names)}: weight {weight_text(best, options.precision)}"
    if words:
        suggest(again("trace", *words, without=("--layer", "--span")), about)


def _layers(record: Record, options: ViewOptions) -> Iterator[tuple[int, Record]]:
    """The drawn layers whose cells can be traced, each with its number."""
    if record.model is None:
        yield from [(0, record)] if "pattern" in record.arrays else []
        return
    for layer in chosen_layers(record, options):
        if layer.has_pattern and layer.inspected.kind in ("self", "decoder"):
            yield layer.inspected.layer, layer.record


def _weights_between_tokens(layer: Record, b: int, options: ViewOptions, *, in_checkpoint: bool) -> Any:
    """The attention weights of a sequence, 0 for a token on itself, for queries that see one key, and for heads that are not
    drawn. In a checkpoint, the first token, which is often a sink, counts only if no other key has weight."""
    import numpy as np

    pattern, allowed = layer.arrays["pattern"][b], layer.arrays["allowed"][b]
    weights = np.where(allowed & (allowed.sum(axis=-1, keepdims=True) > 1), np.nan_to_num(pattern), 0.0)
    first_key = layer.first_key(b)
    if layer.context is None:
        weights[:, np.eye(weights.shape[1], dtype=bool)] = 0.0
    if in_checkpoint and weights[:, :, first_key + 1 :].any():
        weights[:, :, first_key] = 0.0
    if options.heads is not None:
        weights[[i for i, head in enumerate(layer.heads) if head.head not in options.heads]] = 0.0
    return weights
