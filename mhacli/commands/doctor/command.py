"""`mha doctor`: examines this installation, or with `--model` a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from mhacli.cli.console import loading_torch, progress
from mhacli.cli.output import COLOUR, Output, json_document, print_report
from mhacli.cli.parameters import command, layer_or_model, offers
from mhacli.cli.source import argument_texts, local_checkpoint, record_command
from mhacli.errors import EXIT_CHECK, MhaError, UsageError
from mhacli.settings import CHECKPOINT, DEVICE, Config, Dtype, ModelSettings, Source, like, setting
from mhacli.text.reading import argument_text

_TYPED = "Texts for the checkpoint to read, preferably of different lengths."
_TOKENIZER = "byte, or the path of a tokenizer.json."


@command(
    "mha doctor",
    "mha doctor --model MiniLM",
    modes=layer_or_model,
)
def doctor(
    output: Annotated[Output, offers("json", *COLOUR)],
    typed: tuple[str, ...] = setting((), "", _TYPED, argument=True, metavar="[TEXT]...", default="three sentences"),
    text: tuple[str, ...] = like(Source, "text", CHECKPOINT),
    path: str | None = like(ModelSettings, "path", CHECKPOINT),
    revision: str | None = like(ModelSettings, "revision", CHECKPOINT),
    tokenizer: str | None = setting(None, CHECKPOINT, _TOKENIZER, metavar="NAME", default="its own", modes=("model",)),
    device: str = like(Config, "device", DEVICE, default="every device; with --model, the fastest"),
    dtype: Dtype | None = like(Config, "dtype", DEVICE, value=None, default="all four; with --model, its own"),
    seed: int = like(Config, "seed", DEVICE, modes=("layer", "model")),
) -> None:
    """Examines the installation or a checkpoint and prints the report; exit code 3 if a check failed."""
    Config(d_model=1, n_heads=1, device=device).resolved()
    texts = (*argument_texts(typed, Source()), *(argument_text(word, Source()) for word in text))
    settings = ModelSettings(path=path, revision=revision, tokenizer=tokenizer, device=device, dtype=dtype)
    if path is None and texts:
        raise UsageError(f"a text works only with --model: {texts[0]!r:.80}", hint="add --model DIR")
    if path is not None:
        empty = next((place for place, text in enumerate(texts) if not text.strip()), None)
        if empty is not None:
            raise MhaError(f"text {empty} is empty or white space", code="no-tokens")
        local_checkpoint(settings)
    with loading_torch():
        from mhacli.commands.doctor.run import examine
    with progress() as report_progress:
        report = examine(settings, texts, seed=seed, report_progress=report_progress)
    report = replace(report, command=record_command())
    print_report(output, view=lambda on: next(report.views(on)), json=lambda: json_document(report.to_dict()))
    if report.failed:
        raise typer.Exit(EXIT_CHECK)
