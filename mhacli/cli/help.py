"""The help of a command: a sentence, examples and the common options; with `--help-all`, every
option in its panel.
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from mhacli.cli.console import stdout_width, wants_colour, write

SHORT_LIST = 15
"""The number of options up to which the short help lists all options of a command."""
_MIN_WIDTH, _MAX_WIDTH, _NAME_WIDTH = 40, 100, 26


def _help_option(*names: str, text: str, everything: bool = False) -> TyperOption:
    def show(context: Any, option: Any, is_given: bool) -> None:
        if is_given and not context.resilient_parsing:
            write(help_text(context, everything=everything))
            raise typer.Exit

    return TyperOption(
        param_decls=[*names],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        default=False,
        help=text,
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


class HelpCommand(TyperCommand):
    """A command with this help. The first long name of an option is in the help; others work as
    well.
    """

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The words that fit, without other names of options."""
        others = {
            name
            for p in self.params
            for name in (*p.opts[1:], *p.secondary_opts[1:])
            if name.startswith("--")
        }
        return [
            word for word in super().shell_complete(ctx, incomplete) if word.value not in others
        ]


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
    options = [each for each in command.params if isinstance(each, TyperOption) and not each.hidden]
    options = [option for option in options if option not in _HELP_OPTIONS]
    is_short = not everything and len(options) > SHORT_LIST
    common = (
        getattr(command.callback, "common_options", ())
        if is_short
        else {option.name for option in options}
    )
    commands = getattr(command, "commands", {})
    rows = {
        "Commands": [(name, each.help or "") for name, each in commands.items()],
        "Arguments": [],
    }
    for each in command.params:
        if isinstance(each, TyperArgument):
            rows["Arguments"].append((each.make_metavar(ctx=context), each.help or ""))
        elif each in options and each.name in common:
            panel = (everything and each.rich_help_panel) or "Options"
            rows.setdefault(panel, []).append(_row(each, context))
    for title in filter(rows.get, rows):
        with page.section(bold.format(title)):
            page.write_dl(rows[title], col_max=_NAME_WIDTH)
    if commands:
        page.write(
            f"\n{context.command_path} COMMAND --help shows the examples and options of a"
            " command.\n"
        )
    elif is_short:
        page.write(f"\n{context.command_path} --help-all lists all {len(options)} options.\n")
    return str(page.getvalue())


def _row(option: TyperOption, context: Any) -> tuple[str, str]:
    """The short and the first long name of an option with its metavar, and its help."""
    names = ", ".join([name for name in option.opts if len(name) == 2] + option.opts[:1])
    if option.secondary_opts:
        names += f" / {option.secondary_opts[0]}"
    if not option.is_flag:
        value = option.make_metavar(ctx=context).strip("<>")
        names += f" {'TEXT' if value == 'str' else value}"
    return names, option.help or ""
