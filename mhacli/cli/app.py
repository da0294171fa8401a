"""The Typer app: the list of commands, and the only place that catches errors, prints them and
returns exit codes.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import typer
import typer.core

import mhacli
from mhacli.cli.console import discard_stdout, flush, require_stdout, stderr_line, write
from mhacli.cli.help import HelpCommand, add_help_options, help_text
from mhacli.errors import MhaError, UsageError
from mhacli.io.long_work import raise_received
from mhacli.io.memory import gc_paused
from mhacli.text.escape import message_text, without_surrogates

COMMANDS: Mapping[str, str] = {
    "run": (
        "Show the attention pattern of every head for a text, with a table of what each head does."
    ),
    "heads": (
        "Compute exact statistics of every head for a long text, without storing its attention"
        " matrices."
    ),
    "effect": "Measure what changes when heads or single attention weights are removed.",
    "scan": (
        "Compute the statistics of every head of a checkpoint over a corpus; an interrupted scan"
        " resumes."
    ),
    "trace": (
        "Show every step of attention with its shape and formula, or how one attention weight is"
        " computed."
    ),
    "decode": (
        "Decode token by token with a KV cache, and compare each step with a full computation."
    ),
    "bench": "Measure the time, memory and numerical error of attention backends on this machine.",
    "doctor": (
        "Examine this installation or a checkpoint: what is wrong with it, and how to fix it."
    ),
    "check": (
        "Check attention code: whether it is correct, and if not, which mistake it makes and how to"
        " correct it."
    ),
    "vocab": "Count the tokens of a text of any size, and number them.",
    "weights": "List the tensors, dtypes, heads and sizes of a checkpoint or a weights file.",
    "view": "Explore a text, a checkpoint or a saved record in an interactive viewer.",
    "show": "Show a saved record in any view of run. Needs no torch.",
    "explain": "Explain a column, sign, head type, tensor or mistake, with its formula and source.",
    "diff": "Compare two models, or two saved records: where they first differ, and in which head.",
}
"""The commands with their help. Each is a function named NAME, in the module `mhacli.commands.NAME`
or, of a folder of that name, in its `command`."""


def _application(needed: str | None) -> Any:
    """The group of all commands. Only the module of the `needed` one is imported; the others have a
    name and a help.
    """
    app = typer.Typer(name="mha", pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True, epilog=_EXAMPLES)(_root)
    if needed is not None and needed in COMMANDS:
        with gc_paused():
            module = importlib.import_module(f"mhacli.commands.{needed}")
            if hasattr(module, "__path__"):  # a folder
                module = importlib.import_module(f"mhacli.commands.{needed}.command")
        command: Any = getattr(module, needed)
        app.command(needed, cls=HelpCommand, help=COMMANDS[needed], epilog=command.examples)(
            command
        )
    group: Any = typer.main.get_command(app)
    loaded = group.commands
    group.commands = {
        name: loaded.get(name) or HelpCommand(name, help=text) for name, text in COMMANDS.items()
    }
    return add_help_options(group)


_STDOUT_FAULTS = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT, errno.EBADF)
_GONE = {
    "--compile": "mha bench",
    "--judge": "mha heads TEXT --csv",
    "--with": "--replace mean",
    "--pack": "--max-tokens N",
    "--lengths": "mha bench --decode --lengths",
    "--reducer": "MHA_BLOCK=torch",
    "convert": "mha run TEXT --model DIR --layer N",
}
"""Options and commands that an earlier version had, and what to type in their place."""
_EXAMPLES = (
    'mha run "the cat sat on the mat" --heads 4\n'
    'mha run "the cat sat on the mat" --model MiniLM --layer 5\n'
    "mha check my_attention.py:MultiHeadAttention"
)


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True)
    ] = False,
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
    words, completes, code = sys.argv[1:], "_MHA_COMPLETE" in os.environ, 0
    if (
        completes
    ):  # bash gives the typed words in the first variable, zsh and fish in the second one
        words = (
            os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
        ).split()[1:]
    elif words[:1] == ["help"]:  # `help COMMAND` is `COMMAND --help`
        words = [*(word for word in words[1:] if not word.startswith("-")), "--help"]
    needed = next((word for word in words if not word.startswith("-")), None)
    if completes:
        _application(needed).main(prog_name="mha")
    try:
        require_stdout()
        app = _application(needed)
        try:
            with app.make_context(
                "mha", words
            ) as context:  # app.main would return 1 for a broken pipe
                app.invoke(context)
        except typer.Exit as end:
            code = end.exit_code
        flush()  # the interpreter's flush at exit would report a full disk too late
    except MhaError as fault:
        code = _print_error(fault)
    except BrokenPipeError:  # the reader closed the pipe, such as head
        discard_stdout()
    except Exception as fault:
        code = _print_error(_as_error(fault))
    return code


def _as_error(fault: Exception) -> MhaError:
    """The error to print for an exception of a library or a bug of mha."""
    if isinstance(
        fault, typer.TyperException
    ):  # an option or argument that Typer rejected, in Typer's words
        message = " ".join(fault.format_message().split())
        option, context = getattr(fault, "option_name", ""), getattr(fault, "ctx", None)
        hint = context and f"{context.command_path} --help shows what there is"
        if option[1:2].isdigit():
            hint = f"put -- before a text that begins with a minus: mha run -- {option!r}"
        for old, new in _GONE.items():
            if old == option or f"'{old}'" in message or sys.argv[1:3] == ["weights", old]:
                hint = f"it is gone; {new} takes its place"
        return UsageError(message, hint=hint)
    if (
        isinstance(fault, MemoryError)
        or "can't allocate memory" in str(fault)
        or "out of memory" in str(fault)
    ):
        return MhaError(
            "out of memory", hint="a shorter text or fewer heads need less", code="out-of-memory"
        )
    if (
        isinstance(fault, OSError) and fault.errno in _STDOUT_FAULTS
    ):  # those of files have become errors
        discard_stdout()
        return MhaError(f"stdout cannot be written: {fault.strerror}", code="unwritable")
    if isinstance(fault, OSError):
        return MhaError(
            f"the operating system reports: {fault.strerror or fault}",
            code="system",
            path=fault.filename,
        )
    if os.environ.get("MHA_DEBUG"):
        raise fault
    hint = "this is a bug of mha; MHA_DEBUG=1 shows where it happened"
    return MhaError(f"internal error: {type(fault).__name__}: {fault}", hint=hint, code="internal")


def _print_error(fault: MhaError) -> int:
    """Prints an error on stderr, as text or with --json as one JSON line, and returns its exit
    code. After a signal it is the interrupt, which a library took for a failure.
    """
    raise_received()
    words = sys.argv[1:]
    if "--json" in words[: words.index("--") if "--" in words else None]:
        texts = {
            "code": fault.code,
            "message": fault.message,
            "hint": fault.hint,
            "path": fault.path,
        }
        error = {name: text and without_surrogates(text) for name, text in texts.items()}
        lines = [json.dumps({"error": error | {"exit": fault.exit_code}})]
    else:
        lines = [f"mha: error: {message_text(fault.message)}"]
        lines += [f"hint: {message_text(fault.hint)}"] if fault.hint else []
    try:
        flush()  # output comes before the error
    except OSError:
        discard_stdout()
    with suppress(OSError):
        stderr_line("\n".join(lines))
    return fault.exit_code
