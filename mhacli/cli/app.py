"""The Typer app: the list of commands, and the only place that catches errors, prints them and returns exit codes."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
import typer.core

import mhacli
from mhacli.cli.aliases import meant_option, suggestion
from mhacli.cli.help import HelpCommand, HelpGroup, examples, help_text
from mhacli.cli.streams import flush, forget_stdout, require_stdout, stderr_lines, write
from mhacli.cli.values import holds_record
from mhacli.errors import MhaError, UsageError
from mhacli.io.memory import uncollected
from mhacli.text.escape import message_text, without_surrogates

COMMANDS: Mapping[str, str] = {
    "run": "Show the attention pattern of every head for a text, with a table of what each head does.",
    "heads": "Compute exact statistics of every head for a long text, without storing its attention matrices.",
    "effect": "Measure what changes when heads or single attention weights are removed.",
    "scan": "Compute the statistics of every head of a checkpoint over a corpus; an interrupted scan resumes.",
    "trace": "Show every step of attention with its shape and formula, or how one attention weight is computed.",
    "decode": "Decode token by token with a KV cache, and compare each step with a full computation.",
    "bench": "Measure the time, memory and numerical error of attention backends on this machine.",
    "doctor": "Examine this installation or a checkpoint: what is wrong with it, and how to fix it.",
    "check": "Check attention code: whether it is correct, and if not, which mistake it makes and how to correct it.",
    "vocab": "Count the tokens of a text of any size, and number them.",
    "weights": "List what a checkpoint or a weights file contains.",
    "view": "Explore a text, a checkpoint or a saved record in an interactive viewer.",
    "show": "Show a saved record in any view of run. Needs no torch.",
    "explain": "Explain a column, sign, head type, tensor or mistake, with its formula and source.",
    "diff": "Compare two saved records: where they first differ, and what changed in each head. Needs no torch.",
}
"""The commands with their help. Each is a function or Typer group named NAME, in the module `mhacli.commands.NAME` or, of a
folder of that name, in its `command`."""


class LazyGroup(HelpGroup):
    """A group that imports only the module of the command that runs; listing commands needs only their names."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command if it is loaded, otherwise a stub with its name and help."""
        loaded = self.commands.get(cmd_name)
        return loaded or (typer.core.TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Loads the command that the arguments name; `help COMMAND` is `COMMAND --help`."""
        if args[0] == "help":
            args = [*(word for word in args[1:] if not word.startswith("-")), "--help"]
        if args == ["--help"]:
            write(help_text(ctx))
            raise typer.Exit
        if args[0] in COMMANDS:
            with uncollected():
                self.commands[args[0]] = _load(args[0])
        return super().resolve_command(ctx, args)


def _load(name: str) -> Any:
    module = f"mhacli.commands.{name}"
    found = importlib.util.find_spec(module)
    is_folder = found is not None and found.submodule_search_locations is not None
    command = getattr(importlib.import_module(f"{module}.command" if is_folder else module), name)
    if isinstance(command, typer.Typer):
        command.info.name, command.info.help = name, COMMANDS[name]
        return typer.main.get_command(command)
    single = typer.Typer(add_completion=False)
    single.command(name, cls=HelpCommand, help=COMMANDS[name])(command)
    return typer.main.get_command(single)


app = typer.Typer(
    name="mha",
    cls=LazyGroup,
    pretty_exceptions_enable=False,
    suggest_commands=False,
)

_DRAW_RECORDS = ("show", "diff")
"""Commands that show saved records and compute nothing."""
_STDOUT_FAULTS = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT)
_CLI_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


@app.callback(invoke_without_command=True)
@examples(
    'mha run "the cat sat on the mat" --heads 4',
    'mha run "the cat sat on the mat" --model MiniLM --layer 5',
    "mha check my_attention.py:MultiHeadAttention",
)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    """The attention inspector for the terminal: every head, every shape, every number."""
    if version:
        print(f"mha {mhacli.__version__}")
    elif context.invoked_subcommand is None:
        write(help_text(context))
    else:
        return
    raise typer.Exit


def main() -> int:
    """Runs the command line and returns its exit code. Errors are printed on stderr."""
    if "_MHA_COMPLETE" in os.environ:  # the shell requests completions
        typer.main.get_command(app).main(prog_name="mha")
    code = _guarded(_run_app)
    return _guarded(flush) or code  # the interpreter's flush at exit would report a full disk too late


def _run_app() -> int:
    """Runs the command that the arguments name. Typer's own `main` would return 1 for a broken pipe."""
    require_stdout()
    command = typer.main.get_command(app)
    try:
        with command.make_context("mha", sys.argv[1:]) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return 0


def _guarded(step: Callable[[], int]) -> int:
    """The exit code of a step; exceptions are printed and become an exit code."""
    try:
        return step()
    except MhaError as fault:
        return _print_error(fault)
    except BrokenPipeError:  # the reader closed the pipe, such as head
        forget_stdout()
        return 0
    except Exception as fault:
        return _print_error(_as_error(fault))


def _as_error(fault: Exception) -> MhaError:
    """The error to print for an exception of a library or a bug of mha."""
    if isinstance(fault, _CLI_ERROR):
        return _usage_error(fault)
    if isinstance(fault, MemoryError) or "can't allocate memory" in str(fault) or "out of memory" in str(fault):
        return MhaError("out of memory", hint="a shorter text or fewer heads need less", code="out-of-memory")
    if isinstance(fault, OSError) and fault.errno in _STDOUT_FAULTS:  # Typer itself prints some help texts
        forget_stdout()
        return MhaError(f"stdout cannot be written: {fault.strerror}", code="unwritable")
    if isinstance(fault, OSError):
        return MhaError(f"the operating system reports: {fault.strerror or fault}", code="system", path=fault.filename)
    if os.environ.get("MHA_DEBUG"):
        raise fault
    return MhaError(
        f"internal error: {type(fault).__name__}: {fault}",
        hint="this is a bug of mha; MHA_DEBUG=1 shows where it happened",
        code="internal",
    )


def _usage_error(fault: Exception) -> MhaError:
    """The error for an option or argument that Typer rejected."""
    text = fault.format_message().strip().rstrip(".")  # type: ignore[attr-defined]
    first, _, details = text.partition("\n")
    message = first[:1].lower() + first[1:] + (f" {' '.join(details.split())}" if details else "")
    option = getattr(fault, "option_name", None)
    if option and option[1:2].isdigit():
        return UsageError(message, hint=f"put -- before a text that begins with a minus: mha run -- {option!r}")
    context = getattr(fault, "ctx", None)
    path = context.command_path if context is not None else "mha"
    parameters = context.command.get_params(context) if context is not None else []
    if option and message.endswith("requires an argument"):
        value = next(
            (parameter.make_metavar(ctx=context).strip("<>") for parameter in parameters if option in parameter.opts),
            "VALUE",
        )
        return UsageError(f"{option} needs a value", hint=f"{option} {value}")
    names = [
        name
        for parameter in parameters
        if not getattr(parameter, "hidden", False)
        for name in (*parameter.opts, *parameter.secondary_opts)
    ]
    unknown = re.match(r"no such (command|option):? '?(.*?)'?( \(Possible.*)?$", message)
    if unknown is None:
        return _value_error(fault, message, path, names)
    kind, word, _ = unknown.groups()
    if kind == "command":
        commands = context.command.list_commands(context) if context is not None else []
        return UsageError(
            f"no such command: {word}", hint=_meant_command(word, path, commands) or f"{path} --help lists the commands"
        )
    hint = meant_option(word, names) or _option_of_run(word, context) or f"{path} --help-all lists the options"
    return UsageError(f"no such option: {word}", hint=hint)


def _option_of_run(word: str, context: Any) -> str | None:
    """The hint for an option of `mha run` given to a command that shows a saved record; None for any other option."""
    if context is None or context.info_name not in _DRAW_RECORDS:
        return None
    options = [
        name for parameter in _load("run").get_params(context) for name in (*parameter.opts, *parameter.secondary_opts)
    ]
    if word not in options:
        return None
    return f"a saved record stays as it was computed; mha run TEXT {word} computes another, and --save FILE saves it"


def _value_error(fault: Exception, message: str, path: str, options: Sequence[str]) -> MhaError:
    """The error for a rejected value or an extra argument, with a suggestion if there is one."""
    extra = re.fullmatch(r"got unexpected extra arguments?(?:\(s\))? \((.*)\)", message)
    if extra is not None:
        message = f"unexpected argument: {extra[1]}"
        is_length = path == "mha bench" and re.fullmatch(r"[0-9k,.]+", extra[1]) is not None
        picture = f"--{extra[1].rpartition('.')[2]}"  # of cat.html --html
        is_picture = picture in ("--html", "--svg", "--png") and picture in options and " " not in extra[1]
        suggested = f"--lengths {extra[1]}" if is_length else f"{picture} {extra[1]}" if is_picture else None
    else:
        choices = getattr(getattr(getattr(fault, "param", None), "type", None), "choices", ())
        wrong = re.search(r": '(.*?)' is not one of ", message)
        suggested = wrong and suggestion(wrong[1], [str(choice) for choice in choices])
    return UsageError(message, hint=f"did you mean {suggested}?" if suggested else f"{path} --help shows what there is")


def _meant_command(word: str, path: str, names: Sequence[str]) -> str | None:
    """The hint for an unknown command that is misspelt, or is a file, a folder or a text; None for any other word."""
    quoted = shlex.quote(word)
    if not os.path.lexists(word):
        if " " in word and path == "mha":
            return f"mha run {quoted} shows the attention of a text"
        suggested = suggestion(word, names)
        return suggested and f"did you mean {path} {suggested}?"
    if holds_record(word):
        return f"mha show {quoted}"
    return f"mha run TEXT --model {quoted}" if os.path.isdir(word) else f"mha run --file {quoted}"


def _print_error(fault: MhaError) -> int:
    """Prints an error on stderr, as text or with --json as one JSON line, and returns its exit code."""
    if sys.stderr is None:
        return fault.exit_code
    if _wants_json():
        texts = {"code": fault.code, "message": fault.message, "hint": fault.hint, "path": fault.path}
        error = {name: text and without_surrogates(text) for name, text in texts.items()}
        lines = [json.dumps({"error": error | {"exit": fault.exit_code}})]
    else:
        lines = [stderr_lines(f"mha: error: {message_text(fault.message)}", has_commands=False)] + (
            [stderr_lines(f"hint: {message_text(fault.hint)}")] if fault.hint else []
        )
    try:
        sys.stdout.flush() if sys.stdout is not None else None  # output comes before the error
    except OSError:
        forget_stdout()
    try:
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
    except OSError:
        pass
    return fault.exit_code


def _wants_json() -> bool:
    return "--json" in _words_before_literals()


def _words_before_literals() -> list[str]:
    words = sys.argv[1:]
    return words[: words.index("--")] if "--" in words else words
