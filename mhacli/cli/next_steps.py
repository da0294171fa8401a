"""Commands to type next: this command line with other words, such as the cell to trace or the page to write."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection
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


def suggest(words: list[str], about: str = "") -> None:
    """Prints a command to type next, and a line about it. Prints nothing for a long command, and for one that a terminal would
    not show exactly."""
    text = shlex.join(words)
    if words and visible(text) == text and len(text) <= _MOST:
        _write_words(["next:", *map(shlex.quote, words)], end=" \\")
        _write_words([" " * len("next:"), *about.split()] if about else [])


def _write_words(words: list[str], *, end: str = "") -> None:
    """Prints words in lines as wide as stdout, each but the last with an `end`, and all but the first indented."""
    lines: list[str] = []
    for word in words:
        if lines and len(f"{lines[-1]} {word}{end}") <= stdout_width():
            lines[-1] += f" {word}"
        else:
            lines.append(f"      {word}" if lines else word)
    write(f"{end}\n".join(lines) + "\n" * bool(lines))


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
        _write_words(["more:", "--tokens,", "--shapes,", "--timings,", "or", "--verbose", "for", "all"])
    suggest_cell(record, options)
    if output.html is None:
        suggest(again("run", *_PAGE) if output.save is None else ["mha", "show", output.save, *_PAGE])


def after_heads(record: Record, options: ViewOptions, output: Output) -> None:
    """Suggests to open the record, or to write a page."""
    suggest(["mha", "view", output.save] if output.save is not None else again("heads", *_PAGE))


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
    query = token_at(token_text(record.sequences[cell.sequence], cell.query), cell.query)
    key = token_at(token_text(record.keys[cell.sequence], cell.key), cell.key)
    about = f"head {head.head}, query {query}, key {key}: weight {weight_text(cell.share, options.precision)}"
    words = [] if record.model is None else ["--layer", str(head.layer)]
    words += ["--cell", f"{head.head},{cell.query},{cell.key}"]
    words += ["--sequence", str(cell.sequence)] if len(record.sequences) > 1 else []
    suggest(again("trace", *words, without=("--layer", "--span")), about)
