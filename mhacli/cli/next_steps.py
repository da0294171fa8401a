"""Commands to type next: this command line with other words, such as the cell to trace or the page to write."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection
from textwrap import wrap
from typing import TYPE_CHECKING

from mhacli.cli.console import stdout_width, write
from mhacli.render.base.options import ViewOptions
from mhacli.text.escape import visible

if TYPE_CHECKING:
    from mhacli.cli.output import Output
    from mhacli.record.record import Record

_PAGE = ("--html", "attention.html")
_MOST = 160
"""The number of characters of the longest command that is suggested."""
_COMPUTED = ("Text", "Attention", "Positions", "Mask and scores", "Device", "Checkpoint", "Measurement")
"""The panels of options that decide what is computed; others choose what is shown or written."""
_LABEL, _GOES_ON, _BLANK = "next: ", " \\\n", "\0"


def suggest(words: list[str], about: str = "") -> None:
    """Prints a command to type next, broken between its options where the terminal is narrow, and a line about it. Prints nothing
    for a long command, and for one that a terminal would not show exactly."""
    text = " ".join(map(_quoted, words))
    if not words or visible(text) != text or len(text) > _MOST:
        return
    text = " ".join(_quoted(word).replace(" ", _BLANK) for word in words)
    text = re.sub("(--[^ ]*) (?!--)", rf"\1{_BLANK}", text)  # an option and its value stay on a line
    indent = " " * len(_LABEL)
    width = stdout_width() - 2
    lines = wrap(
        text, width, initial_indent=_LABEL, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    write(_GOES_ON.join(lines).replace(_BLANK, " ") + "\n" + (f"{indent}{about}\n" if about else ""))


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
    """Suggests to trace the strongest cell of what is shown, and to write a page of the record."""
    if record.model is None and not options.verbose:
        write("more: --tokens, --shapes, --timings, or --verbose for all\n")
    suggest_cell(record, options)
    if output.html is None:
        suggest(again("run", *_PAGE) if output.save is None else ["mha", "show", output.save, *_PAGE])


def after_heads(record: Record, options: ViewOptions, output: Output) -> None:
    """Suggests a map of the most pronounced head, and to open the record or to write a page."""
    from mhacli.record.heads import UNTYPED
    from mhacli.render.base.format import type_text

    head = max(record.heads, key=lambda head: 0.0 if head.kind in UNTYPED else head.certainty or 0.0)
    kinds = [layer.kind for layer in record.layers if layer.name == head.attention]
    layer = f"{kinds[0]}.{head.layer}" if kinds and kinds[0] != "self" else str(head.layer)
    where, chosen = (f"layer {layer}, ", ("--layer", layer)) if kinds else ("", ())
    if not options.maps:
        about = f"{where}head {head.head}: {type_text(head)}"
        suggest(again("heads", *chosen, "--map", str(head.head), without=chosen[:1]), about)
    suggest(["mha", "view", output.save] if output.save is not None else again("heads", *_PAGE))


def after_effect(record: Record, options: ViewOptions, output: Output) -> None:
    """Suggests the edges of the head with the largest effect."""
    single_heads = [effect for effect in record.effects if effect.removed == "head" and effect.kind != "encoder"]
    if record.effect is None or not single_heads or record.model is None:
        return
    largest = max(single_heads, key=lambda effect: abs(record.effect.change_of(effect) or 0.0))  # type: ignore[union-attr]
    name = f"{largest.layer}.{largest.head}"
    head = name if largest.kind == "self" else f"{largest.kind}.{name}"
    suggest(again("effect", "--edges", "--head", head, without=("--span",)))


def suggest_cell(record: Record, options: ViewOptions) -> None:
    """Suggests to trace the largest of the weights between tokens that stand out, and says where it is on the screen. The first
    token of a checkpoint's text is often a sink."""
    from mhacli.render.base.format import token_at, token_text, weight_text

    kinds = {layer.name: layer.kind for layer in record.layers}
    cells = [
        (cell, head)
        for head in record.heads
        if kinds.get(head.attention, "self") == "self" and (options.heads is None or head.head in options.heads)
        for cell in head.largest
        if (options.sequences is None or cell.sequence in options.sequences)
        and (record.context is not None or cell.key != cell.query)
        and (record.model is None or cell.key > 0)
    ]
    if not cells:
        return
    cell, head = max(cells, key=lambda each: each[0].share)
    keys = record.sequences if record.context is None else record.context
    layer = [] if record.model is None else ["--layer", str(head.layer)]
    sequence = ["--sequence", str(cell.sequence)] if len(record.sequences) > 1 else []
    where = [f"{pair[0].removeprefix('--')} {pair[1]}" for pair in (layer, sequence) if pair]
    query = token_at(token_text(record.sequences[cell.sequence], cell.query), cell.query)
    key = token_at(token_text(keys[cell.sequence], cell.key), cell.key)
    about = ", ".join(
        [*where, f"head {head.head}, query {query}, key {key}: weight {weight_text(cell.share, options.precision)}"]
    )
    words = [*layer, "--cell", f"{head.head},{cell.query},{cell.key}", *sequence]
    suggest(again("trace", *words, without=("--layer", "--span")), about)
