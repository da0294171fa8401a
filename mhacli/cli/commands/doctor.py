"""`mha doctor`: this installation examined, or with `--model` a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from mhacli.cli.help import examples
from mhacli.cli.options import (
    LITERAL_TEXT,
    NUMBER_FORMAT,
    ColourOptions,
    ModelPath,
    Revision,
    command,
    device_option,
    option,
    option_group,
    seed_option,
)
from mhacli.cli.shared.checkpoint import ModelOptions, local_checkpoint, require_without_model
from mhacli.cli.shared.output import JSON, Formats, format_options, json_document, print_report
from mhacli.cli.shared.request import leave_deleted_folder, record_command
from mhacli.cli.streams import loading_torch, note, progress
from mhacli.cli.values import are_literal, is_checkpoint, require_words
from mhacli.errors import EXIT_CHECK, MhaError, UsageError
from mhacli.results.doctor import DoctorRequest
from mhacli.spec.config import Config, Dtype
from mhacli.text.encode import Decoding, argument_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mhacli.render.base.options import Screen
    from mhacli.results.doctor import Report

_MODEL, _DEVICE = "Checkpoint", "Device"


@option_group
class ExaminedModelOptions:
    """The checkpoint to examine, and what it reads."""

    typed: Annotated[
        list[str] | None,
        typer.Argument(
            help="Texts for the checkpoint to read, preferably of different lengths. (default: three sentences)",
            metavar="[TEXT]...",
            show_default=False,
        ),
    ] = None
    text: Annotated[
        list[str] | None,
        option(_MODEL, LITERAL_TEXT, "--text"),
    ] = None
    model: ModelPath = None
    revision: Revision = None
    tokenizer: Annotated[
        str | None,
        option(_MODEL, "byte, or the path of a tokenizer.json. (default: its own)", metavar="NAME"),
    ] = None


@option_group
class DoctorDeviceOptions:
    """Where it is examined, and what is tried."""

    device: Annotated[
        str,
        device_option(
            _DEVICE,
            " (default: every device; with --model, the fastest)",
            show_default=False,
        ),
    ] = "auto"
    dtype: Annotated[
        Dtype | None,
        option(_DEVICE, f"{NUMBER_FORMAT} (default: all four; with --model, its own)"),
    ] = None
    compile: Annotated[
        bool, option(_DEVICE, "Also try the backends that torch compiles, which may take minutes.", "--compile")
    ] = False
    seed: Annotated[int, seed_option(_DEVICE)] = 0


@format_options(json=JSON)
class DoctorFormats(Formats):
    """Formats of a report."""


@examples(
    "mha doctor",
    "mha doctor --model MiniLM",
)
@command
def doctor(
    patient: ExaminedModelOptions, place: DoctorDeviceOptions, formats: DoctorFormats, colour: ColourOptions
) -> None:
    """Options in, a report out; exit code 3 where a check failed."""
    Config(d_model=1, n_heads=1, device=place.device, seed=place.seed).resolved()
    patient = _with_typed_folder(patient)
    report = _installation(patient, place) if patient.model is None else _checkpoint(patient, place)
    print_report(
        formats.chosen(),
        colour,
        formats={"json": lambda: json_document(report.to_dict())},
        view=lambda on: _view(report, on),
    )
    if report.failed:
        raise typer.Exit(EXIT_CHECK)


def _with_typed_folder(patient: ExaminedModelOptions) -> ExaminedModelOptions:
    """The folder of a checkpoint that stands first among the texts as that of `--model`, for it can mean nothing else."""
    if patient.model is not None or not patient.typed or are_literal() or not is_checkpoint(patient.typed[0]):
        return patient
    folder, *texts = patient.typed
    note(f"{folder} is a checkpoint: examined as with --model {quote(folder)}")
    return replace(patient, model=folder, typed=texts or None)


def _view(report: Report, on: Screen) -> RenderableType:
    from mhacli.render.reports.doctor import doctor_view

    return doctor_view(report, on)


def _installation(patient: ExaminedModelOptions, place: DoctorDeviceOptions) -> Report:
    texts = _texts(patient)
    if texts:
        raise UsageError(f"a text works only with --model: {texts[0]!r:.80}", hint="add --model DIR")
    require_without_model(revision=patient.revision, tokenizer=patient.tokenizer)
    leave_deleted_folder()
    with loading_torch():
        from mhacli.compute.doctor.installation import examine_installation
    with progress() as tell:
        return examine_installation(
            device=place.device,
            dtype=place.dtype,
            seed=place.seed,
            compiles=place.compile,
            command=record_command(),
            tell=tell,
        )


def _checkpoint(patient: ExaminedModelOptions, place: DoctorDeviceOptions) -> Report:
    if place.compile:
        raise UsageError(
            "--compile does not work with --model, which has its own attention", hint="leave out --compile"
        )
    texts = _texts(patient)
    for number_of, text in enumerate(texts):
        if not text.strip():
            raise MhaError(f"text {number_of} is empty or white space", code="no-tokens")
    request = DoctorRequest(
        source=patient.model or "",
        checkpoint=local_checkpoint(ModelOptions(model=patient.model, revision=patient.revision)),
        texts=texts,
        revision=patient.revision,
        tokenizer=patient.tokenizer,
        device=place.device,
        dtype=place.dtype,
        seed=place.seed,
        command=record_command(),
    )
    leave_deleted_folder()
    with loading_torch():
        from mhacli.compute.doctor.checkpoint import examine_checkpoint
    with progress() as tell:
        return examine_checkpoint(request, tell)


def _texts(patient: ExaminedModelOptions) -> tuple[str, ...]:
    """The texts for a checkpoint to read. Raises `UsageError` for one that is the path of something."""
    for word in patient.typed or ():
        require_words(word, has_file=False)
    return tuple(argument_text(word, Decoding()) for word in (*(patient.typed or ()), *(patient.text or ())))
