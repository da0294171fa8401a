"""The Typer app: which commands there are, and the one place where errors are caught, told and turned into exit codes."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer
import typer.core

import mhacli
from mhacli.cli.aliases import meant_option, suggestion
from mhacli.cli.help import HelpCommand, HelpGroup, examples, help_text
from mhacli.cli.streams import flush, forget_stdout, require_stdout, stderr_lines, write
from mhacli.cli.values import holds_record
from mhacli.errors import RANK_FAILED, MhaError, UsageError
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
    "weights": "List what a checkpoint or a weights file contains, or convert one attention layer of it.",
    "view": "Explore a text, a checkpoint or a saved record in an interactive viewer.",
    "show": "Show a saved record in any view of run. Needs no torch.",
    "explain": "Explain a column, sign, head type, tensor or mistake, with its formula and source.",
    "diff": "Compare two saved records: where they first differ, and what changed in each head. Needs no torch.",
}
"""The commands with their help. `mhacli.cli.commands.NAME` holds each as a function, or a group of commands, of the same name."""


class LazyGroup(HelpGroup):
    """A group that imports the module of a command only when it is the one to run: a list needs names alone."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in our order."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command where it was loaded, else its name and help."""
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
    found = getattr(importlib.import_module(f"mhacli.cli.commands.{name}"), name)
    if isinstance(found, typer.Typer):
        found.info.name, found.info.help = name, COMMANDS[name]
        return typer.main.get_command(found)
    single = typer.Typer(add_completion=False)
    single.command(name, cls=HelpCommand, help=COMMANDS[name])(found)
    return typer.main.get_command(single)


app = typer.Typer(
    name="mha",
    cls=LazyGroup,
    pretty_exceptions_enable=False,
    suggest_commands=False,
)

_DRAW_RECORDS = ("show", "diff")
"""Commands that draw what was computed before."""
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
    """Runs the command line; every way in which it can end is told on stderr where need be, and is an exit code."""
    if "_MHA_COMPLETE" in os.environ:  # the shell asks what could stand at the cursor
        typer.main.get_command(app).main(prog_name="mha")
    if _is_other_rank():  # _tell has the real one
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  the first process says it all
    code = _guarded(_run_app)
    return _guarded(flush) or code  # at the interpreter's own exit a full disk would be told too late


def _run_app() -> int:
    """The command that the arguments name. Typer's own `main` would answer a broken pipe with 1."""
    require_stdout()
    command = typer.main.get_command(app)
    try:
        with command.make_context("mha", sys.argv[1:]) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return 0


def _guarded(step: Callable[[], int]) -> int:
    """Runs one step; its faults become an exit code."""
    try:
        return step()
    except MhaError as fault:
        return _tell(fault)
    except BrokenPipeError:  # the reader has what it wanted
        forget_stdout()
        return 0
    except Exception as fault:
        return _tell(_as_error(fault))


def _as_error(fault: Exception) -> MhaError:
    """An exception of a library, or a bug of ours, in our words."""
    if isinstance(fault, _CLI_ERROR):
        return _usage_error(fault)
    if isinstance(fault, MemoryError) or "can't allocate memory" in str(fault) or "out of memory" in str(fault):
        return MhaError("out of memory", hint="a shorter text or fewer heads need less", code="out-of-memory")
    if isinstance(fault, OSError) and fault.errno in _STDOUT_FAULTS:  # a help text, printed by Typer itself
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
    """What Typer says of an option or argument, in our form."""
    text = fault.format_message().strip().rstrip(".")  # type: ignore[attr-defined]
    first, _, rest = text.partition("\n")
    message = first[:1].lower() + first[1:] + (f" {' '.join(rest.split())}" if rest else "")
    option = getattr(fault, "option_name", None)
    if option and option[1:2].isdigit():
        return UsageError(message, hint=f"put -- before a text that begins with a minus: mha run -- {option!r}")
    context = getattr(fault, "ctx", None)
    path = context.command_path if context is not None else "mha"
    parameters = context.command.get_params(context) if context is not None else []
    if option and message.endswith("requires an argument"):
        value = next((one.make_metavar(ctx=context).strip("<>") for one in parameters if option in one.opts), "VALUE")
        return UsageError(f"{option} needs a value", hint=f"{option} {value}")
    names = [
        name for one in parameters if not getattr(one, "hidden", False) for name in (*one.opts, *one.secondary_opts)
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
    """What to type for an option of a computation behind a command that draws what was computed; None for any other option."""
    if context is None or context.info_name not in _DRAW_RECORDS:
        return None
    options = [name for one in _load("run").get_params(context) for name in (*one.opts, *one.secondary_opts)]
    if word not in options:
        return None
    return f"a saved record stays as it was computed; mha run TEXT {word} computes another, and --save FILE saves it"


def _value_error(fault: Exception, message: str, path: str, options: Sequence[str]) -> MhaError:
    """What Typer says of a value, or of an argument too many, with what was probably meant."""
    extra = re.fullmatch(r"got unexpected extra arguments?(?:\(s\))? \((.*)\)", message)
    if extra is not None:
        message = f"unexpected argument: {extra[1]}"
        is_length = path == "mha bench" and re.fullmatch(r"[0-9k,.]+", extra[1]) is not None
        picture = f"--{extra[1].rpartition('.')[2]}"  # of cat.html --html
        is_picture = picture in ("--html", "--svg", "--png") and picture in options and " " not in extra[1]
        meant = f"--lengths {extra[1]}" if is_length else f"{picture} {extra[1]}" if is_picture else None
    else:
        choices = getattr(getattr(getattr(fault, "param", None), "type", None), "choices", ())
        wrong = re.search(r": '(.*?)' is not one of ", message)
        meant = wrong and suggestion(wrong[1], [str(choice) for choice in choices])
    return UsageError(message, hint=f"did you mean {meant}?" if meant else f"{path} --help shows what there is")


def _meant_command(word: str, path: str, names: Sequence[str]) -> str | None:
    """What to type where no command stands, but a misspelt one, a file, a folder or a text; None for any other word."""
    shown = shlex.quote(word)
    if not os.path.lexists(word):
        if " " in word and path == "mha":
            return f"mha run {shown} shows the attention of a text"
        meant = suggestion(word, names)
        return meant and f"did you mean {path} {meant}?"
    if holds_record(word):
        return f"mha show {shown}"
    return f"mha run TEXT --model {shown}" if os.path.isdir(word) else f"mha run --file {shown}"


_FOR_FIRST_RANK_S = 10.0
"""How long other processes wait for the first to say what is wrong with all, which then ends them. What is wrong with one alone
it says itself."""


def _tell(fault: MhaError) -> int:
    """The error on stderr: lines to read, or with --json one JSON line. Returns its exit code."""
    if sys.stderr is None:
        return fault.exit_code
    if _asked_for_json():
        texts = {"code": fault.code, "message": fault.message, "hint": fault.hint, "path": fault.path}
        error = {name: text and without_surrogates(text) for name, text in texts.items()}
        lines = [json.dumps({"error": error | {"exit": fault.exit_code}})]
    else:
        lines = [stderr_lines(f"mha: error: {message_text(fault.message)}", has_commands=False)] + (
            [stderr_lines(f"hint: {message_text(fault.hint)}")] if fault.hint else []
        )
    try:
        sys.stdout.flush() if sys.stdout is not None else None  # so that what was shown comes before why it is wrong
    except OSError:
        forget_stdout()
    stderr = sys.stderr
    if _is_other_rank():
        if fault.code != RANK_FAILED:
            time.sleep(_FOR_FIRST_RANK_S)
        stderr = sys.__stderr__ or sys.stderr
    try:
        stderr.write("\n".join(lines) + "\n")
        stderr.flush()
    except OSError:
        pass
    return fault.exit_code


def _asked_for_json() -> bool:
    return "--json" in _words_before_literals()


def _is_other_rank() -> bool:
    """Whether this is not the first of the processes that torchrun started for one model."""
    words = _words_before_literals()
    if "--device-map=tp" not in words and ("--device-map", "tp") not in pairwise(words):
        return False
    from mhacli.requests.device_map import this_rank

    return this_rank() > 0


def _words_before_literals() -> list[str]:
    words = sys.argv[1:]
    return words[: words.index("--")] if "--" in words else words
