"""`mha check`: examines a user's attention in a child process and names its mistakes and their lines."""

from __future__ import annotations

from dataclasses import replace
from os.path import isdir, isfile
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mhacli.cli.console import note, progress
from mhacli.cli.help import examples
from mhacli.cli.numbers import MAX_SECONDS, Integer, Real
from mhacli.cli.options import (
    ARG,
    CALL_ARG,
    HEADS,
    MASKED_LATER,
    QUERY_HEADS,
    SCALE,
    TIME_LIMIT,
    command,
    device_option,
    number,
    offers,
    option,
    option_group,
    seed_option,
)
from mhacli.cli.output import COLOUR, Output, json_document, print_report
from mhacli.cli.shared.request import leave_deleted_folder, record_command
from mhacli.cli.values import pairs
from mhacli.commands.check.result import CheckRequest, Examination
from mhacli.errors import EXIT_CHECK, EXIT_FAILED, UsageError
from mhacli.settings import MAX_HEADS, Config
from mhacli.usercode.target import DEFAULT_TIME_LIMIT_S, TargetRequest, require_readable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mhacli.render.base.options import Screen

_CODE, _MEANT, _RUN = "Code", "Intended behaviour", "Run"
_TARGET_HELP = (
    "FILE.py:NAME or package.module:NAME: a class, a function that returns a module, or a function of q, k and v. "
    "mha imports and runs it."
)


@option_group
class SubjectOptions:
    """The attention to check, and the arguments to build and call it with."""

    target: Annotated[str, typer.Argument(help=_TARGET_HELP, metavar="TARGET", show_default=False)] = ""
    arg: Annotated[
        list[str] | None,
        option(
            _CODE,
            ARG,
            metavar="NAME=VALUE",
        ),
    ] = None
    call_arg: Annotated[
        list[str] | None,
        option(_CODE, CALL_ARG, metavar="NAME=VALUE"),
    ] = None
    against: Annotated[
        str | None,
        option(_CODE, "Compare with this implementation instead of the reference.", metavar="TARGET"),
    ] = None
    against_arg: Annotated[
        list[str] | None,
        option(
            _CODE,
            "Argument of the constructor of --against; repeatable. (default: the values of --arg, under the names that it uses)",
            metavar="NAME=VALUE",
        ),
    ] = None
    against_call_arg: Annotated[
        list[str] | None,
        option(
            _CODE, "Argument of every call of --against; repeatable. (default: as --call-arg)", metavar="NAME=VALUE"
        ),
    ] = None


@option_group
class MeaningOptions:
    """The author's intentions, where the code does not show them."""

    causal: Annotated[bool, option(_MEANT, MASKED_LATER, "--causal", "--is-causal")] = False
    mask_means: Annotated[
        Literal["keep", "hide"] | None, option(_MEANT, "What True in a mask means. (default: either)")
    ] = None
    rope: Annotated[
        Literal["half", "interleaved"] | None,
        option(_MEANT, "Layout of rotary positions: half (GPT-NeoX) or interleaved (GPT-J). (default: either)"),
    ] = None
    scale: Annotated[
        float | None,
        number(_MEANT, Real(), SCALE, metavar="X"),
    ] = None
    heads: Annotated[
        int | None,
        number(_MEANT, Integer(1, MAX_HEADS), f"{QUERY_HEADS} (default: from its arguments)", *HEADS),
    ] = None


@option_group
class RunOptions:
    """Device, seed and time limit."""

    device: Annotated[str, device_option(_RUN)] = "cpu"
    seed: Annotated[int, seed_option(_RUN)] = 0
    time_limit: Annotated[
        float,
        number(
            _RUN,
            Real(high=MAX_SECONDS, above=0),
            TIME_LIMIT,
            metavar="SECONDS",
        ),
    ] = DEFAULT_TIME_LIMIT_S


@examples(
    "mha check my_attention.py:MultiHeadAttention",
    "mha check my_attention.py:MultiHeadAttention --arg d_model=64 --arg n_heads=4",
    "mha check my.py:MultiHeadAttention --against torch.nn:MultiheadAttention",
)
@command
def check(
    subject: SubjectOptions,
    meaning: MeaningOptions,
    running: RunOptions,
    output: Annotated[Output, offers("json", *COLOUR)],
) -> None:
    """Examines a target and prints the report; the exit code is the verdict."""
    request = _request(subject, meaning, running)
    leave_deleted_folder()
    examination = _examined(request)
    print_report(
        output,
        view=lambda on: _view(_with_short_paths(examination), on),
        json=lambda: json_document(examination.to_dict()),
    )
    if examination.verdict != "right":
        raise typer.Exit(EXIT_CHECK if examination.verdict == "wrong" else EXIT_FAILED)
    for argument in examination.arguments:
        if argument.origin == "guessed" and output.json:
            why = f": {argument.why}" if argument.why else ""
            note(f"{argument.name}={argument.value} is guessed{why}; --arg {argument.name}=… sets it")


def _request(subject: SubjectOptions, meaning: MeaningOptions, running: RunOptions) -> CheckRequest:
    """The request that the options describe, checked as far as possible without running code."""
    if not subject.target:
        raise UsageError(
            "name what to check: FILE.py:NAME or package.module:NAME", hint="try mha check my.py:Attention"
        )
    Config(d_model=1, n_heads=1, device=running.device, seed=running.seed).resolved()
    device = "cpu" if running.device == "auto" else running.device
    for target in (subject.target, subject.against):
        if target is not None:
            _require_code(target)
            require_readable(target)
    arguments, call_arguments = pairs(subject.arg, "arg"), pairs(subject.call_arg, "call-arg")
    target_request = TargetRequest(subject.target, arguments, call_arguments, meaning.causal, device, running.seed)
    against = _against(subject, target_request)
    return CheckRequest(
        target_request, against, meaning.mask_means, meaning.rope, meaning.scale, meaning.heads, running.time_limit
    )


def _require_code(target: str) -> None:
    """Raises `UsageError` for a folder, or a file that is not Python, with the command to use instead."""
    valid_targets = "FILE.py:NAME or package.module:NAME is a class or a function"
    if isdir(target):
        hint = f"mha doctor --model {quote(target)} examines a checkpoint; {valid_targets}"
        raise UsageError(f"{target!r} is a folder, not a class or function", hint=hint, path=target)
    if isfile(target) and not target.endswith(".py"):
        raise UsageError(f"{target!r} is not a Python file", hint=valid_targets, path=target)


def _against(subject: SubjectOptions, target_request: TargetRequest) -> TargetRequest | None:
    """The target of `--against`, with its own arguments. Raises `UsageError` for such arguments without the target."""
    arguments_given = {"--against-arg": subject.against_arg, "--against-call-arg": subject.against_call_arg}
    if subject.against is None:
        for name, value in arguments_given.items():
            if value:
                raise UsageError(f"{name} works only with --against", hint="add --against TARGET")
        return None
    calls = pairs(subject.against_call_arg, "against-call-arg") or target_request.call_arguments
    return replace(
        target_request,
        target=subject.against,
        arguments=pairs(subject.against_arg, "against-arg"),
        call_arguments=calls,
    )


def _examined(request: CheckRequest) -> Examination:
    """The examination, made in a child process."""
    from mhacli.commands.check.run import examine_in_child

    with progress() as report_progress:
        stages: list[str] = []

        def on_stage(stage: str) -> None:
            stages.append(stage)
            report_progress(len(stages) / (len(stages) + _USUAL_STAGES), stage)

        examination = examine_in_child(request, on_stage=on_stage)
    return replace(examination, command=record_command())


_USUAL_STAGES = 12


def _view(examination: Examination, on: Screen) -> RenderableType:
    from mhacli.commands.check.view import check_view

    return check_view(examination, on)


def _with_short_paths(examination: Examination) -> Examination:
    """The examination with paths relative to the working directory."""
    from mhacli.usercode.process import shown_path

    findings = tuple(
        replace(finding, file=None if finding.file is None else shown_path(finding.file))
        for finding in examination.findings
    )
    departure = examination.departure
    if departure is not None:
        file, other_file = (
            None if file is None else shown_path(file) for file in (departure.file, departure.other_file)
        )
        departure = replace(departure, file=file, other_file=other_file)
    return replace(examination, findings=findings, departure=departure)
