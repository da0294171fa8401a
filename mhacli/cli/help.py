"""The help of a command: a sentence, examples and the common options; with `--help-all`, every option in its panel."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import typer
import typer.core

from mhacli.cli.aliases import expanded
from mhacli.cli.streams import stdout_width, wants_colour, write

F = TypeVar("F", bound=Callable[..., None])
_USAGE_ERROR: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
SHORT_LIST = 15
"""The number of options up to which the short help lists all options of a command."""
_MIN_WIDTH, _MAX_WIDTH, _NAME_WIDTH, _INDENT = 40, 100, 26, "  "


# ------------------------------------------------------------------------------------------------ what has such a help


def _help_option(name: str, *names: str, everything: bool) -> typer.core.TyperOption:
    def show(context: Any, option: Any, is_given: bool) -> None:
        if is_given and not context.resilient_parsing:
            write(help_text(context, everything=everything))
            raise typer.Exit

    return typer.core.TyperOption(
        param_decls=[name, *names], is_flag=True, is_eager=True, expose_value=False, callback=show, default=False,
        help="List every option." if everything else "Show examples and the most common options.",
    )  # fmt: skip


_HELP_OPTIONS = (_help_option("--help", "-h", everything=False), _help_option("--help-all", everything=True))


class HelpCommand(typer.core.TyperCommand):
    """A command with this help, which also accepts aliases of its options."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its own parameters, then the two options of help."""
        return [*self.params, *_HELP_OPTIONS]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the words after replacing aliases of options."""
        options = (option for option in self.get_params(ctx) if isinstance(option, typer.core.TyperOption))
        takes_value = {
            name: not option.is_flag for option in options for name in (*option.opts, *option.secondary_opts)
        }
        try:
            return super().parse_args(ctx, list(expanded(args, takes_value, self.name or "")))
        except _USAGE_ERROR as fault:
            fault.ctx = ctx  # type: ignore[attr-defined]  # left out where an option lacks its value
            raise


class HelpGroup(typer.core.TyperGroup):
    """A group of commands with this help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its own parameters, then the two options of help."""
        return [*self.params, *_HELP_OPTIONS]


# ------------------------------------------------------------------------------------------------------------ the text


def examples(*lines: str) -> Callable[[F], F]:
    """A decorator that attaches the example lines of a command's help to its function. Each line can be typed as it is."""

    def with_examples(function: F) -> F:
        function.examples = lines  # type: ignore[attr-defined]
        return function

    return with_examples


def help_text(context: Any, *, everything: bool = False) -> str:
    """The help of a context's command, as wide as stdout, in colour if stdout has colour."""
    width = max(_MIN_WIDTH, min(_MAX_WIDTH, stdout_width()))
    head = _heading if wants_colour("auto", sys.stdout) else _plain
    command = context.command
    blocks = [head("Usage:") + f" {context.command_path} {' '.join(command.collect_usage_pieces(context))}"]
    blocks.append("\n".join(textwrap.wrap(command.help or "", width)))
    examples = _attached(command, "examples")
    if examples:
        blocks.append("\n".join([head("Examples:"), *(_INDENT + line for line in examples)]))
    for title, rows in _sections(context, everything=everything):
        blocks.append("\n".join([head(f"{title}:"), *_table(rows, width)]))
    blocks.append("\n".join(textwrap.wrap(_footer(context, everything=everything), width)))
    return "\n\n".join(filter(None, blocks)) + "\n"


def _plain(text: str) -> str:
    return text


def _heading(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m"


Row = tuple[str, str]
"""The names of an option, argument or command, and what it does."""


def _sections(context: Any, *, everything: bool) -> Iterator[tuple[str, list[Row]]]:
    """The sections of a help text: titles and their rows."""
    command = context.command
    if isinstance(command, typer.core.TyperGroup):
        names = command.list_commands(context)
        commands = [(name, command.get_command(context, name)) for name in names]
        yield "Commands", [(name, found.help or "") for name, found in commands if found is not None]
    arguments = [parameter for parameter in command.params if isinstance(parameter, typer.core.TyperArgument)]
    if arguments:
        yield "Arguments", [(argument.make_metavar(ctx=context), argument.help or "") for argument in arguments]
    options = _options(command)
    if not everything:
        common = [option for option in options if option.name in _attached(command, "common_options")]
        rows = [_row(option, context) for option in (options if len(options) <= SHORT_LIST else common)]
        if rows:
            yield "Options", rows
        return
    for panel in dict.fromkeys(option.rich_help_panel or "Options" for option in options):
        yield panel, [_row(option, context) for option in options if (option.rich_help_panel or "Options") == panel]


def _options(command: Any) -> list[typer.core.TyperOption]:
    options = (parameter for parameter in command.params if isinstance(parameter, typer.core.TyperOption))
    return [option for option in options if not option.hidden]


def _attached(command: Any, name: str) -> Collection[str]:
    """The attribute that a decorator attached to the function of a command: lines of `examples`, or the names of common options
    of `mhacli.cli.options.command`."""
    return getattr(command.callback, name, ())


def _row(option: typer.core.TyperOption, context: Any) -> Row:
    """The names of an option with its metavar, and its help with its default."""
    names = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        names += " / " + ", ".join(option.secondary_opts)
    if not option.is_flag:
        value = option.make_metavar(ctx=context).strip("<>")
        names += f" {'TEXT' if value == 'str' else value}"
    default = option.default
    if not option.show_default or default is None or default is False:
        return names, option.help or ""
    return names, f"{option.help} (default: {f'{default:g}' if isinstance(default, float) else default})"


def _table(rows: Sequence[Row], width: int) -> Iterator[str]:
    """The rows in two columns. Below names that are too long for the first column, the description begins on the next line."""
    column = min(_NAME_WIDTH, max(len(names) for names, _ in rows)) + len(_INDENT) + 2
    for names, description in rows:
        lines = textwrap.wrap(description, max(20, width - column)) or [""]
        first = _INDENT + names
        if len(first) + 2 > column:
            yield first
            first = ""
        yield (first.ljust(column) + lines[0]).rstrip()
        yield from (" " * column + line for line in lines[1:])


def _footer(context: Any, *, everything: bool) -> str:
    """The last line: how to get more help."""
    command = context.command
    if isinstance(command, typer.core.TyperGroup):
        return f"{context.command_path} COMMAND --help shows the examples and options of a command."
    count = len(_options(command))
    if everything or count <= SHORT_LIST:
        return ""
    return f"{context.command_path} --help-all lists all {count} options."
