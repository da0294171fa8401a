"""`mha doctor`: examines this installation, or with `--model` a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os.path import isdir
from shlex import quote
from typing import Annotated

import typer

from mhacli.cli.console import loading_torch, note, progress
from mhacli.cli.help import examples
from mhacli.cli.output import COLOUR, Output, json_document, print_report
from mhacli.cli.parameters import command, offers
from mhacli.cli.source import are_literal, leave_deleted_folder, local_checkpoint, record_command, require_words
from mhacli.commands.doctor.result import DoctorRequest, Report
from mhacli.errors import EXIT_CHECK, MhaError, UsageError
from mhacli.settings import (
    CHECKPOINT,
    DEVICE_WORDS,
    DEVICES,
    LITERAL_TEXT,
    MAX_SEED,
    MODEL,
    NUMBER_FORMAT,
    REVISION,
    Config,
    Dtype,
    ModelSettings,
    setting,
)
from mhacli.text.reading import Decoding, argument_text

_MODEL, _DEVICE = "Checkpoint", "Device"


@dataclass(frozen=True, kw_only=True)
class ExaminedModelOptions:
    """The checkpoint to examine, and its texts."""

    typed: tuple[str, ...] = setting(
        (),
        "",
        "Texts for the checkpoint to read, preferably of different lengths. (default: three sentences)",
        argument=True,
        metavar="[TEXT]...",
    )
    text: tuple[str, ...] = setting((), _MODEL, LITERAL_TEXT)
    model: str | None = setting(None, CHECKPOINT, MODEL, "--model --checkpoint", metavar="DIR", common=True)
    revision: str | None = setting(None, CHECKPOINT, REVISION, metavar="NAME")
    tokenizer: str | None = setting(
        None, _MODEL, "byte, or the path of a tokenizer.json. (default: its own)", metavar="NAME"
    )


@dataclass(frozen=True, kw_only=True)
class DoctorDeviceOptions:
    """Device, dtype, seed and backends of the examination."""

    device: str = setting(
        "auto", _DEVICE, DEVICES + " (default: every device; with --model, the fastest)", words=DEVICE_WORDS, default=""
    )
    dtype: Dtype | None = setting(None, _DEVICE, f"{NUMBER_FORMAT} (default: all four; with --model, its own)")
    compile: bool = setting(False, _DEVICE, "Also try the backends that torch compiles, which may take minutes.")
    seed: int = setting(0, _DEVICE, "Seed of random numbers.", low=0, high=MAX_SEED)


@examples(
    "mha doctor",
    "mha doctor --model MiniLM",
)
@command()
def doctor(
    examined: ExaminedModelOptions,
    device: DoctorDeviceOptions,
    output: Annotated[Output, offers("json", *COLOUR)],
) -> None:
    """Examines the installation or a checkpoint and prints the report; exit code 3 if a check failed."""
    Config(d_model=1, n_heads=1, device=device.device, seed=device.seed).resolved()
    if not examined.model and examined.typed and not are_literal() and isdir(examined.typed[0]):
        folder, *typed = examined.typed
        note(f"{folder} is a checkpoint: examined as with --model {quote(folder)}")
        examined = replace(examined, model=folder, typed=tuple(typed))
    for word in examined.typed:
        require_words(word)
    texts = tuple(argument_text(word, Decoding()) for word in (*(examined.typed), *(examined.text)))
    leave_deleted_folder()
    report = _checkpoint(examined, texts, device) if examined.model else _installation(examined, texts, device)
    print_report(output, view=lambda on: next(report.views(on)), json=lambda: json_document(report.to_dict()))
    if report.failed:
        raise typer.Exit(EXIT_CHECK)


def _installation(examined: ExaminedModelOptions, texts: tuple[str, ...], device: DoctorDeviceOptions) -> Report:
    if texts:
        raise UsageError(f"a text works only with --model: {texts[0]!r:.80}", hint="add --model DIR")
    for name, value in (("--revision", examined.revision), ("--tokenizer", examined.tokenizer)):
        if value is not None:
            raise UsageError(f"{name} needs --model", hint="add --model DIR")
    with loading_torch():
        from mhacli.commands.doctor.installation import examine_installation
    with progress() as report_progress:
        return examine_installation(
            device=device.device, dtype=device.dtype, seed=device.seed, compiles=device.compile,
            command=record_command(), report_progress=report_progress,
        )  # fmt: skip


def _checkpoint(examined: ExaminedModelOptions, texts: tuple[str, ...], device: DoctorDeviceOptions) -> Report:
    if device.compile:
        message = "--compile does not work with --model, which has its own attention"
        raise UsageError(message, hint="leave out --compile")
    empty = next((place for place, text in enumerate(texts) if not text.strip()), None)
    if empty is not None:
        raise MhaError(f"text {empty} is empty or white space", code="no-tokens")
    checkpoint = local_checkpoint(ModelSettings(path=examined.model, revision=examined.revision))
    request = DoctorRequest(
        examined.model or "", checkpoint, texts, examined.revision, examined.tokenizer, device.device, device.dtype,
        device.seed, record_command(),
    )  # fmt: skip
    with loading_torch():
        from mhacli.commands.doctor.checkpoint import examine_checkpoint
    with progress() as report_progress:
        return examine_checkpoint(request, report_progress)
