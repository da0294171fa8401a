"""`mha check`: examines a user's attention in a child process and names its mistakes and their
lines; without a target, those of the table in the nearest pyproject.toml.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhacli.cli.console import progress, require_folder
from mhacli.cli.output import REPORT, Output, print_report, require_writable
from mhacli.cli.parameters import command, offers
from mhacli.cli.source import local_checkpoint, record_command
from mhacli.errors import MhaError, UsageError
from mhacli.render.base.options import ViewOptions
from mhacli.settings import Config, options_of
from mhacli.usercode.target import require_readable

from .annotations import annotations, print_annotations
from .result import RUN, CheckRequest, Examination, Examinations

if TYPE_CHECKING:
    from mhacli.render.figures.svg import Piece

_VERBOSE = "Print why things were not tried, and scripts of differences."
_CSV = "Print CSV: a line per finding, behaviour and probe."


@command(
    "mha check my_attention.py:MultiHeadAttention",
    "mha check my_attention.py:MultiHeadAttention --arg d_model=64 --arg n_heads=4",
    "mha check model.py:GPT --arg vocab_size=65 --causal",
    "mha check model.py:GPT --sees 'q >= k and q - k < 8'",
    "mha check --model MiniLM",
    "mha check my.py:MultiHeadAttention --against torch.nn:MultiheadAttention",
)
def check(
    given: Annotated[Mapping[str, Any], CheckRequest],
    output: Annotated[Output, offers("json", "force", "no_annotations", csv=_CSV, **REPORT)],
    options: Annotated[ViewOptions, offers(verbose=_VERBOSE)],
) -> None:
    """Examines a target, or those of a table, and prints the report; the exit code is the
    verdict.
    """
    require_writable(output.files, force=output.force)
    report: Examination | Examinations | None = None
    if given.keys().isdisjoint(("target", "model")):
        report = _of_table(given)
    report = report or _of_target(CheckRequest(**given), output)

    def figures() -> "Sequence[Piece]":
        from .pictures import pictures

        return [piece for each in report.reports for piece in pictures(each)]

    print_report(
        output,
        view=lambda on: report.view(replace(on, verbose=options.verbose)),
        json=report.to_dict,
        csv=report.rows,
        figures=figures,
    )
    findings = [found for each in report.reports for found in each.findings if not found.accepted]
    if findings and output.suggests:
        from mhacli.cli.next_steps import NextStep, print_steps

        about = "shows what it means, and what to look at"
        print_steps([NextStep(("explain", findings[0].code), about)])
    if not output.no_annotations:
        print_annotations(line for each in report.reports for line in annotations(each))
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _of_target(request: CheckRequest, output: Output) -> Examination:
    """The report on a target. Raises `MhaError` if it cannot be examined, which is annotated."""
    from .run import refused

    try:
        return _examined(request)
    except MhaError as refusal:
        if not output.no_annotations:
            print_annotations(annotations(refused(request, refusal)))
        raise


def _examined(request: CheckRequest) -> Examination:
    _require_device(request)
    for target in request.targets:
        require_readable(target.target)
    if request.model is not None:
        local_checkpoint(request.model_settings)
    _ = request.condition, request.acceptances  # which raise where they cannot be read
    require_folder()
    from .run import examine_in_child

    with progress() as on_stage:
        return replace(examine_in_child(request, on_stage=on_stage), command=record_command())


def _of_table(given: Mapping[str, Any]) -> Examinations | None:
    """The reports on the targets of the nearest table; None without one. The options of a run that
    are given replace its own. Raises `UsageError` for others, and for a table that cannot be read.
    """
    require_folder()
    from .run import examined_or_refused
    from .table import nearest_table, requests_of

    path = nearest_table(Path.cwd())
    if path is None:
        return None
    for field, option in options_of(CheckRequest):
        if field in given and option.panel != RUN:
            message = f"{option.name(field)} needs a target on the command line"
            raise UsageError(message, hint=f"add FILE.py:NAME, or state it in {path}")
    requests = [replace(request, **given) for request in requests_of(path)]
    for request in requests:
        _require_device(request)
    every = []
    with progress() as report_progress:
        for n, request in enumerate(requests):

            def on_stage(stage: str, n: int = n) -> None:
                part = f"target {n + 1} of {len(requests)}: {stage}"
                report_progress(part, n / len(requests))

            report = examined_or_refused(request, on_stage=on_stage)
            every.append(replace(report, command=record_command()))
    return Examinations(str(path), tuple(every))


def _require_device(request: CheckRequest) -> None:
    Config(d_model=1, n_heads=1, device=request.device).resolved()
