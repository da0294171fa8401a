"""`mha doctor`: examines this installation, or with `--model` a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from mhacli.cli.console import loading_torch, progress
from mhacli.cli.help import examples
from mhacli.cli.output import COLOUR, Output, json_document, print_report
from mhacli.cli.parameters import command, layer_or_model, offers
from mhacli.cli.source import leave_deleted_folder, local_checkpoint, record_command, require_words
from mhacli.commands.doctor.result import DoctorRequest
from mhacli.errors import EXIT_CHECK, MhaError, UsageError
from mhacli.settings import Config, ModelSettings


@examples(
    "mha doctor",
    "mha doctor --model MiniLM",
)
@command(layer_or_model)
def doctor(request: DoctorRequest, output: Annotated[Output, offers("json", *COLOUR)]) -> None:
    """Examines the installation or a checkpoint and prints the report; exit code 3 if a check failed."""
    _require_consistent(request)
    leave_deleted_folder()
    request = replace(request, command=record_command())
    with loading_torch():
        if request.path is None:
            from mhacli.commands.doctor.installation import examine_installation as examine
        else:
            from mhacli.commands.doctor.checkpoint import examine_checkpoint as examine
    with progress() as report_progress:
        report = examine(request, report_progress)
    print_report(output, view=lambda on: next(report.views(on)), json=lambda: json_document(report.to_dict()))
    if report.failed:
        raise typer.Exit(EXIT_CHECK)


def _require_consistent(request: DoctorRequest) -> None:
    """Raises `UsageError` and `MhaError` for what can be seen without torch."""
    Config(d_model=1, n_heads=1, device=request.device).resolved()
    for word in request.typed:
        require_words(word)
    texts = request.texts
    if request.path is None:
        if texts:
            raise UsageError(f"a text works only with --model: {texts[0]!r:.80}", hint="add --model DIR")
        return
    empty = next((place for place, text in enumerate(texts) if not text.strip()), None)
    if empty is not None:
        raise MhaError(f"text {empty} is empty or white space", code="no-tokens")
    local_checkpoint(ModelSettings(path=request.path, revision=request.revision))
