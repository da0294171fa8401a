"""The Typer app: the list of commands, and the only place that catches errors, prints them and
returns exit codes.
"""

import errno
import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import typer

import mhacli
from mhacli.errors import MhaError, UsageError, failed_import, lacks_memory
from mhacli.io.memory import gc_paused

from .console import discard_stdout, flush, print_error, require_stdout, write
from .help import Answer, answering_flag, command_help, help_flags, program_help
from .parameters import Command, read_by_typer, typed_names, with_signature

GROUPS: Mapping[str, Mapping[str, str]] = {
    "Show attention": {
        "run": (
            "Show the attention pattern of every head for a text, with a table of what each head"
            " does."
        ),
        "heads": (
            "Compute exact statistics of every head for a long text, without storing its"
            " attention matrices."
        ),
        "trace": (
            "Show every step of attention with its shape and formula, or how one attention"
            " weight is computed."
        ),
        "decode": (
            "Decode token by token with a KV cache, and compare each step with a full computation."
        ),
        "view": "Explore a text, a checkpoint or a saved record in an interactive viewer.",
        "show": "Show a saved record in any view of run. Needs no torch.",
        "diff": (
            "Compare two models, or two saved records: where they first differ, and in which head."
        ),
    },
    "Examine and measure": {
        "check": (
            "Check attention code: whether it is correct, and if not, which mistake it makes and"
            " how to correct it."
        ),
        "effect": "Measure what changes when heads or single attention weights are removed.",
        "scan": (
            "Compute the statistics of every head of a checkpoint over a corpus; an interrupted"
            " scan resumes."
        ),
        "bench": (
            "Measure the time, memory and numerical error of attention backends on this machine."
        ),
        "doctor": (
            "Examine this installation or a checkpoint: what is wrong with it, and how to fix it."
        ),
    },
    "Words and files": {
        "explain": (
            "Explain a column, sign, head type, tensor, mistake or option, with its formula and"
            " source."
        ),
        "samples": "Write the sample texts and the sample code of the manual to a folder.",
        "vocab": "Count the tokens of a text of any size, and number them.",
        "weights": "List the tensors, dtypes, heads and sizes of a checkpoint or a weights file.",
    },
}
"""The commands with their help, in groups. Each is a function named NAME, in the module
`mhacli.commands.NAME` or, of a folder of that name, in its `command`."""
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}


_STDOUT_FAULTS = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT, errno.EBADF)
_GONE = {
    "bench --save-baseline": "--json",
    **{
        f"bench {option}": (
            "--json of both runs, with the interval median_low_s to median_high_s of each row,"
        )
        for option in ("--compare", "--fail-if", "--strict")
    },
    **{
        f"{command} {option}": "--html"
        for command in ("check", "doctor", "diff")
        for option in ("--svg", "--png")
    },
    **{
        f"diff {option}": "mha show FILE, which draws the heads of a record,"
        for option in ("--view", "--head", "--sequence", "--precision", "--decimals", "--map-scale")
    },
    **{
        f"decode {option}": "--save FILE, with mha show FILE --view matrix,"
        for option in (
            *("--verbose", "--head", "--precision", "--html", "--svg", "--png", "--figure"),
            *("--decimals", "--map-scale", "--hide-sinks", "--full"),
        )
    },
}
"""Options that a command had in the version before, and what to type in their place."""
_MOST_COMMANDS = 3
"""The most commands that are named for an option that another one lacks."""
_COMPLETION = "_MHA_COMPLETE"
"""The variable with which the scripts that Typer installs ask for the words that fit."""


def main() -> int:
    """Runs the command line and returns its exit code. Errors are printed on stderr."""
    if _COMPLETION in os.environ:
        _typer_app(COMMANDS, with_other_names=False)(prog_name="mha")  # ends the process
    # messages say which numbers are not finite; other warnings of this kind are for the user
    of_numpy = ".* encountered in |Mean of empty slice|Degrees of freedom|All-NaN"
    warnings.filterwarnings("ignore", of_numpy, category=RuntimeWarning, module="mhacli|numpy")
    words, code = sys.argv[1:], 0
    if words in ([], ["--"]):
        words = ["--help"]
    elif words[:1] == ["help"]:  # `help COMMAND` is `COMMAND --help`
        words = [*(word for word in words[1:] if not word.startswith("-")), "--help"]
    try:
        require_stdout()
        code = _run(words)
        flush()  # the interpreter's flush at exit would report a full disk too late
    except MhaError as fault:
        code = print_error(fault)
    except BrokenPipeError:  # the reader closed the pipe, such as head
        discard_stdout()
    except Exception as fault:
        code = print_error(_as_error(fault, words))
    return code


def _run(words: Sequence[str]) -> int:
    """Does what the words ask for, and returns the exit code.

    Typer only reads the words and returns what performs the command: in its own call it would end
    the process itself for a closed pipe, and take the end of stdin for an interrupt.
    """
    needed = next((word for word in words if not word.startswith("-")), "")
    app = _typer_app({needed}, with_completion=words[:1] != [needed])
    try:
        perform = app(args=words, prog_name="mha", standalone_mode=False)
        if isinstance(perform, int):  # Typer has caught an interrupt
            return perform
        perform()
    except Answer as answer:
        write(answer.text)
    except typer.Exit as end:
        return end.exit_code
    return 0


# ------------------------------------------------------------------------------------------- Typer


def _typer_app(
    loaded: Collection[str], *, with_completion: bool = True, with_other_names: bool = True
) -> typer.Typer:
    """The Typer app of all commands. Only the modules of those that are `loaded` are imported; the
    others have a name alone. While words are completed, options have no other names.

    A command cannot follow the options that install completion, so a line that begins with a
    command does without them. It is answered sooner: Typer 0.29 imports pydantic for each option
    that is not typed, unless its default is False, but only after it has refused a wrong option.
    """
    app = typer.Typer(add_completion=with_completion, pretty_exceptions_enable=False)
    app.callback(add_help_option=False)(_program())
    for name, text in COMMANDS.items():
        function = _not_loaded
        if name in loaded:
            with gc_paused():
                function = _function(name, with_other_names=with_other_names)
        reads_options = {"ignore_unknown_options": name == "explain"}  # which it explains
        app.command(name, help=text, add_help_option=False, context_settings=reads_options)(
            function
        )
    return app


def _program() -> Callable[..., None]:
    """The function that Typer calls with the options of mha itself."""

    def program(**_: Any) -> None:
        """Does nothing: its options have raised an answer, or a command follows."""

    def version() -> str:
        return f"mha {mhacli.__version__}\n"

    text = partial(program_help, GROUPS)
    parameters = [
        answering_flag("version", "--version", "-V", text="Print the version.", answer=version),
        *help_flags(short=text, whole=text),
    ]
    return with_signature(program, parameters)


def _function(name: str, *, with_other_names: bool) -> Callable[..., Callable[[], None]]:
    """The function that Typer calls with the options of a command, whose module is imported."""
    command = _command(name)
    text = partial(command_help, name, COMMANDS[name], command)
    flags = help_flags(short=partial(text, everything=False), whole=partial(text, everything=True))
    return read_by_typer(command, flags, with_other_names=with_other_names)


def _command(name: str) -> Command:
    """A command, whose module is imported."""
    module = importlib.import_module(f"mhacli.commands.{name}")
    if hasattr(module, "__path__"):  # a folder
        module = importlib.import_module(f"mhacli.commands.{name}.command")
    command: Command = getattr(module, name)
    return command


def _not_loaded() -> Callable[[], None]:
    raise AssertionError("a command is loaded before Typer calls it")


# ------------------------------------------------------------------------------------------ errors


def _as_error(fault: Exception, words: Sequence[str]) -> MhaError:
    """The error to print for an exception of a library or a bug of mha."""
    if isinstance(fault, typer.TyperException):
        return _usage_error(" ".join(fault.format_message().split()), words)
    if lacks_memory(fault):
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
    if broken := failed_import(fault):
        return broken
    hint = "this is a bug of mha; MHA_DEBUG=1 shows where it happened"
    return MhaError(f"internal error: {type(fault).__name__}: {fault}", hint=hint, code="internal")


def _usage_error(message: str, words: Sequence[str]) -> UsageError:
    """The error for an option or argument that Typer rejected, in Typer's words, with what to type
    in its place."""
    match = re.search(r"option[^-]*(-[\w-]+)", message, flags=re.IGNORECASE)
    option = match[1] if match else ""
    program = f"mha {words[0]}" if words and words[0] in COMMANDS else "mha"
    hint = f"{program} --help shows what there is"
    others = [*_commands_with(option)] if option else []
    if others and program not in others:
        names = ", ".join(others[:_MOST_COMMANDS])
        hint = f"{names} {'has' if len(others) == 1 else 'have'} {option}; {hint}"
    if option[1:2].isdigit():
        hint = f"put -- before a text that begins with a minus: mha run -- {option!r}"
    if replacement := _GONE.get(f"{words[0]} {option}" if words else ""):
        hint = f"it is gone; {replacement} takes its place"
    if program != "mha":
        message = re.sub(r"(?<=Possible options: )[^)]+", partial(_of_help, words[0]), message)
    return UsageError(message, hint=hint)


def _commands_with(option: str) -> Iterator[str]:
    """The commands that have an option, none for one that is misspelt."""
    for name in COMMANDS:
        for declared in _command(name).settings:
            if option in typed_names(declared) and not declared.option.hidden:
                yield f"mha {name}"


def _of_help(name: str, options: re.Match[str]) -> str:
    """The options that Typer suggests, by the names in the help of their command."""
    first_of = dict[str, str]()
    for names in map(typed_names, _command(name).settings):
        first_of |= dict.fromkeys(names, names[0])
    return ", ".join(dict.fromkeys(first_of.get(word, word) for word in options[0].split(", ")))
