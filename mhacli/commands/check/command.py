"""`mha check`: examines a user's attention in a child process and names its mistakes and their lines."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import typer

from mhacli.cli.console import note, progress
from mhacli.cli.help import examples
from mhacli.cli.numbers import MAX_SECONDS
from mhacli.cli.output import COLOUR, Output, json_document, print_report
from mhacli.cli.parameters import command, offers
from mhacli.cli.source import leave_deleted_folder, record_command
from mhacli.cli.values import pairs
from mhacli.commands.check.result import CheckRequest, Examination
from mhacli.errors import EXIT_CHECK, EXIT_FAILED, UsageError
from mhacli.settings import (
    ARG,
    CALL_ARG,
    CAUSAL,
    DEVICE_WORDS,
    DEVICES,
    MAX_HEADS,
    MAX_SEED,
    N_HEADS,
    QUERY_HEADS,
    SCALE,
    TIME_LIMIT,
    Config,
    setting,
)
from mhacli.usercode.target import DEFAULT_TIME_LIMIT_S, TargetRequest, require_readable

_CODE, _MEANT, _RUN = "Code", "Intended behaviour", "Run"
_TARGET_HELP = (
    "FILE.py:NAME or package.module:NAME: a class, a function that returns a module, or a function of q, k and v. "
    "mha imports and runs it."
)


_AGAINST = "Compare with this implementation instead of the reference."
_AGAINST_ARG = "Argument of the constructor of --against; repeatable."
_AGAINST_ARG += " (default: the values of --arg, under the names that it uses)"
_AGAINST_CALL_ARG = "Argument of every call of --against; repeatable. (default: as --call-arg)"
_ROPE = "Layout of rotary positions: half (GPT-NeoX) or interleaved (GPT-J). (default: either)"


@dataclass(frozen=True, kw_only=True)
class SubjectOptions:
    """The attention to check, and the arguments to build and call it with."""

    target: str = setting("", "", _TARGET_HELP, argument=True, metavar="TARGET")
    arg: tuple[str, ...] = setting((), _CODE, ARG, metavar="NAME=VALUE", many=True)
    call_arg: tuple[str, ...] = setting((), _CODE, CALL_ARG, metavar="NAME=VALUE", many=True)
    against: str | None = setting(None, _CODE, _AGAINST, metavar="TARGET")
    against_arg: tuple[str, ...] = setting((), _CODE, _AGAINST_ARG, metavar="NAME=VALUE", many=True)
    against_call_arg: tuple[str, ...] = setting((), _CODE, _AGAINST_CALL_ARG, metavar="NAME=VALUE", many=True)


@dataclass(frozen=True, kw_only=True)
class MeaningOptions:
    """The author's intentions, where the code does not show them."""

    causal: bool = setting(False, _MEANT, CAUSAL, "--causal", "--is-causal")
    mask_means: Literal["keep", "hide"] | None = setting(None, _MEANT, "What True in a mask means. (default: either)")
    rope: Literal["half", "interleaved"] | None = setting(None, _MEANT, _ROPE)
    scale: float | None = setting(None, _MEANT, SCALE, low=-math.inf, metavar="X")
    heads: int | None = setting(
        None, _MEANT, f"{QUERY_HEADS} (default: from its arguments)", N_HEADS, low=1, high=MAX_HEADS
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Device, seed and time limit."""

    device: str = setting("cpu", _RUN, DEVICES, words=DEVICE_WORDS, default="")
    seed: int = setting(0, _RUN, "Seed of random numbers.", low=0, high=MAX_SEED)
    time_limit: float = setting(DEFAULT_TIME_LIMIT_S, _RUN, TIME_LIMIT, high=MAX_SECONDS, above=0, metavar="SECONDS")


@examples(
    "mha check my_attention.py:MultiHeadAttention",
    "mha check my_attention.py:MultiHeadAttention --arg d_model=64 --arg n_heads=4",
    "mha check my.py:MultiHeadAttention --against torch.nn:MultiheadAttention",
)
@command()
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
        view=lambda on: next(examination.views(on)),
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
            require_readable(target)
    arguments, calls = pairs(subject.arg, "arg"), pairs(subject.call_arg, "call-arg")
    target_request = TargetRequest(subject.target, arguments, calls, meaning.causal, device, running.seed)
    against_arguments = pairs(subject.against_arg, "against-arg")
    against_calls = pairs(subject.against_call_arg, "against-call-arg")
    against = None
    if subject.against is not None:
        against = replace(
            target_request, target=subject.against, arguments=against_arguments, call_arguments=against_calls or calls
        )
    elif against_arguments or against_calls:
        name = "--against-arg" if against_arguments else "--against-call-arg"
        raise UsageError(f"{name} works only with --against", hint="add --against TARGET")
    return CheckRequest(
        target_request, against, meaning.mask_means, meaning.rope, meaning.scale, meaning.heads, running.time_limit
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
