"""The help of a command: a sentence, examples and the common options; with `--help-all`, every option in its panel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import typer
import typer.core

from mhacli.cli.console import stdout_width, wants_colour, write

SHORT_LIST = 15
"""The number of options up to which the short help lists all options of a command."""
_MIN_WIDTH, _MAX_WIDTH, _NAME_WIDTH = 40, 100, 26


def _help_option(*names: str, text: str, everything: bool = False) -> typer.core.TyperOption:
    def show(context: Any, option: Any, is_given: bool) -> None:
        if is_given and not context.resilient_parsing:
            write(help_text(context, everything=everything))
            raise typer.Exit

    return typer.core.TyperOption(
        param_decls=[*names], is_flag=True, is_eager=True, expose_value=False, callback=show, default=False, help=text
    )


_HELP_OPTIONS = (
    _help_option("--help", "-h", text="Show examples and the most common options."),
    _help_option("--help-all", text="List every option.", everything=True),
)


def add_help_options(command: Any) -> Any:
    """The command or group, with the two options of help in it and in its subcommands."""
    command.params += _HELP_OPTIONS
    command.add_help_option = False
    for subcommand in getattr(command, "commands", {}).values():
        add_help_options(subcommand)
    return command


class HelpCommand(typer.core.TyperCommand):
    """A command with this help. The first long name of an option is in the help; others work as well."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The words that fit, without other names of options."""
        others = {name for p in self.params for name in (*p.opts[1:], *p.secondary_opts[1:]) if name.startswith("--")}
        return [word for word in super().shell_complete(ctx, incomplete) if word.value not in others]


def help_text(context: Any, *, everything: bool = False) -> str:
    """The help of a context's command, as wide as stdout, in colour if stdout has colour."""
    command = context.command
    bold = "\x1b[1m{}\x1b[0m" if wants_colour("auto", sys.stdout) else "{}"
    page = context.formatter_class(width=max(_MIN_WIDTH, min(_MAX_WIDTH, stdout_width())))
    usage = " ".join(command.collect_usage_pieces(context))
    page.write_usage(context.command_path, usage, bold.format("Usage:") + " ")
    page.write_paragraph()
    page.write_text(command.help)
    with page.section(bold.format("Examples")):
        page.write("".join(f"  {line}\n" for line in command.epilog.split("\n")))
    for title, rows in _sections(context, everything=everything):
        with page.section(bold.format(title)):
            page.write_dl(rows, col_max=_NAME_WIDTH)
    n_options = len(_options(command))
    if isinstance(command, typer.core.TyperGroup):
        page.write(f"\n{context.command_path} COMMAND --help shows the examples and options of a command.\n")
    elif not everything and n_options > SHORT_LIST:
        page.write(f"\n{context.command_path} --help-all lists all {n_options} options.\n")
    return str(page.getvalue())


def _sections(context: Any, *, everything: bool) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The sections of a help text: titles, and rows of names and what they do."""
    command = context.command
    if isinstance(command, typer.core.TyperGroup):
        yield "Commands", [(name, stub.help or "") for name, stub in command.commands.items()]
    arguments = [parameter for parameter in command.params if isinstance(parameter, typer.core.TyperArgument)]
    if arguments:
        yield "Arguments", [(argument.make_metavar(ctx=context), argument.help or "") for argument in arguments]
    options = _options(command)
    if not everything and len(options) > SHORT_LIST:
        options = [option for option in options if option.name in getattr(command.callback, "common_options", ())]
    panels = [(everything and option.rich_help_panel) or "Options" for option in options]
    for title in dict.fromkeys(panels):
        yield title, [_row(option, context) for option, panel in zip(options, panels, strict=True) if panel == title]


def _options(command: Any) -> list[typer.core.TyperOption]:
    """The options but those of help."""
    options = [p for p in command.params if isinstance(p, typer.core.TyperOption)]
    return [option for option in options if not option.hidden and option not in _HELP_OPTIONS]


def _row(option: typer.core.TyperOption, context: Any) -> tuple[str, str]:
    """The short and the first long name of an option with its metavar, and its help."""
    names = ", ".join([name for name in option.opts if len(name) == 2] + option.opts[:1])
    if option.secondary_opts:
        names += f" / {option.secondary_opts[0]}"
    if not option.is_flag:
        value = option.make_metavar(ctx=context).strip("<>")
        names += f" {'TEXT' if value == 'str' else value}"
    return names, option.help or ""
