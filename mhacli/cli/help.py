"""The help of mha and of its commands: a sentence, examples and the common options; with
`--help-all`, every option in its panel.

It is made from the declarations of the settings, and not from what Typer makes of them: Typer has
no public name for its options, and changes their attributes from version to version.
"""

import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, get_args

import typer

from .console import stdout_width, wants_colour
from .parameters import Command, Declaration, choices_of, help_of, option_names

SHORT_LIST = 15
"""The number of options up to which the short help lists all options of a command."""
PROGRAM = "The attention inspector for the terminal: every head, every shape, every number."
EXAMPLES = (
    'mha run "the cat sat on the mat" --heads 4',
    'mha run "the cat sat on the mat" --model MiniLM --layer 5',
    "mha check my_attention.py:MultiHeadAttention",
)
"""The examples of the help of mha itself."""
_NAME_WIDTH = 26
"""Columns of the longest name that has its text beside it, and not below it."""


class HelpRow(NamedTuple):
    """The name of an option, an argument or a command, as it is typed, and what it does."""

    name: str
    text: str


_PROGRAM_OPTIONS = [
    HelpRow("-V, --version", "Print the version."),
    HelpRow("--install-completion", "Install completion for the current shell."),
    HelpRow(
        "--show-completion",
        "Show completion for the current shell, to copy it or customize the installation.",
    ),
]
"""The options of mha itself. Typer adds the last two."""


# ------------------------------------------------------------------------------------------ asking


class Answer(Exception):
    """The text that a command line asks for in place of running a command: a help, the version."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def answering_flag(
    field: str, *names: str, text: str, answer: Callable[[], str]
) -> inspect.Parameter:
    """Typer's parameter of an option that raises `Answer`, before any other option is looked at.
    `text` is its help while words are completed."""

    def show(context: typer.Context, is_given: bool) -> None:
        if is_given and not context.resilient_parsing:  # which is True while words are completed
            raise Answer(answer())

    default = typer.Option(
        False, *names, is_eager=True, expose_value=False, callback=show, help=text
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field, kind, default=default, annotation=bool)


def help_flags(short: Callable[[], str], whole: Callable[[], str]) -> list[inspect.Parameter]:
    """The two options of help, which answer with the short help and with the whole one."""
    show_short = "Show examples and the most common options."
    return [
        answering_flag("show_help", "--help", "-h", text=show_short, answer=short),
        answering_flag("show_help_all", "--help-all", text="List every option.", answer=whole),
    ]


# ----------------------------------------------------------------------------------------- content


def program_help(groups: Mapping[str, Mapping[str, str]]) -> str:
    """The help of mha itself; `groups` are the names of the commands with what they do."""
    tables = {
        title: [HelpRow(name, text) for name, text in commands.items()]
        for title, commands in groups.items()
    }
    tables["Options"] = _PROGRAM_OPTIONS
    end = "mha COMMAND --help shows the examples and options of a command."
    return _drawn("mha", "[OPTIONS] COMMAND [ARGS]...", PROGRAM, EXAMPLES, tables, end)


def command_help(name: str, sentence: str, command: Command, *, everything: bool) -> str:
    """The help of a command, in short or with `everything`."""
    shown = [each for each in command.settings if not each.option.hidden]
    arguments = [each for each in shown if each.option.argument]
    options = [each for each in shown if not each.option.argument]
    is_short = not everything and len(options) > SHORT_LIST
    tables = {"Arguments": [HelpRow(_metavar(each), help_of(each)) for each in arguments]}
    for each in options:
        if each.option.common or not is_short:
            panel = each.option.panel if everything and each.option.panel else "Options"
            tables.setdefault(panel, []).append(_option_row(each))
    end = f"mha {name} --help-all lists all {len(options)} options." if is_short else None
    usage = " ".join(["[OPTIONS]", *map(_usage_word, arguments)])
    return _drawn(f"mha {name}", usage, sentence, command.examples, tables, end)


def _option_row(declared: Declaration) -> HelpRow:
    """The short names and the first long name of an option with its metavar, and its help."""
    names = option_names(declared)
    first, _, off = names[0].partition("/")
    name = ", ".join([*(name for name in names if len(name) == len("-f")), first])
    if off:
        name += f" / {off}"
    if bool not in {declared.hint, *get_args(declared.hint)}:
        name += f" {_metavar(declared)}"
    return HelpRow(name, help_of(declared))


def _usage_word(argument: Declaration) -> str:
    """An argument in the usage line: in braces where it is required, else in brackets."""
    word = _metavar(argument)
    if word.startswith("["):
        return word
    return f"{{{word}}}" if argument.default == "" else f"[{word}]"


def _metavar(declared: Declaration) -> str:
    """What stands for the value: a word, N for a number, or the choices."""
    if declared.option.metavar is not None:
        return declared.option.metavar
    if declared.option.low is not None:
        return "N"
    return "|".join(choices_of(declared.hint)) or "TEXT"


# ----------------------------------------------------------------------------------------- drawing


def _drawn(
    program: str,
    usage: str,
    sentence: str,
    examples: Sequence[str],
    tables: Mapping[str, Sequence[HelpRow]],
    last_line: str | None,
) -> str:
    """A help as wide as stdout, in colour if stdout has colour. `usage` follows the name of the
    program; `tables` are by title.
    """
    width = max(40, min(100, stdout_width()))
    title = "\x1b[1m{}\x1b[0m" if wants_colour("auto", sys.stdout) else "{}"
    before = f"Usage: {program} "
    filled = textwrap.fill(usage, width, initial_indent=before, subsequent_indent=" " * len(before))
    lines = [filled.replace("Usage:", title.format("Usage:"), 1)]
    lines += ["", textwrap.fill(sentence, width)]
    lines += ["", title.format("Examples") + ":", *(f"  {example}" for example in examples)]
    for name, rows in tables.items():
        if rows:
            lines += ["", title.format(name) + ":", *_table_lines(rows, width)]
    if last_line is not None:
        lines += ["", last_line]
    return "\n".join(lines) + "\n"


def _table_lines(rows: Sequence[HelpRow], width: int) -> list[str]:
    """Lines with names in the first column and texts in the second; the text of a long name begins
    on the next line."""
    names_width = min(_NAME_WIDTH, max(len(row.name) for row in rows))
    indent = " " * (2 + names_width + 2)
    lines = []
    for row in rows:
        texts = textwrap.wrap(row.text, width - len(indent)) or [""]
        if len(row.name) > names_width:
            lines.append(f"  {row.name}")
        else:
            lines.append(f"  {row.name:<{names_width}}  {texts.pop(0)}".rstrip())
        lines += [indent + text for text in texts]
    return lines
