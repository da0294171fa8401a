"""`mha doctor`: examines this installation, or with `--model` a checkpoint."""

from dataclasses import replace
from typing import Annotated

import typer

from mhacli.cli.console import loading_torch, progress
from mhacli.cli.output import REPORT, Output, print_report, require_writable
from mhacli.cli.parameters import command, layer_or_model, offers
from mhacli.cli.source import local_checkpoint, read_texts, record_command, require_not_blank
from mhacli.errors import EXIT_CHECK
from mhacli.settings import CHECKPOINT, DEVICE, Config, Dtype, ModelSettings, Source, like, setting


@command("mha doctor", "mha doctor --model MiniLM", modes=layer_or_model)
def doctor(
    *,
    output: Annotated[
        Output, offers("json", "force", csv="Print CSV: a line per check.", **REPORT)
    ],
    typed: tuple[str, ...] = setting(
        (),
        "",
        "Texts for the checkpoint to read, preferably of different lengths.",
        argument=True,
        metavar="[TEXT]...",
        default="three sentences",
    ),
    text: tuple[str, ...] = like(Source, "text", CHECKPOINT),
    model: Annotated[ModelSettings, offers("path", "revision")],
    tokenizer: str | None = setting(
        None,
        CHECKPOINT,
        "byte, or the path of a tokenizer.json.",
        metavar="NAME",
        default="its own",
        modes=("model",),
    ),
    device: str = like(Config, "device", DEVICE, default="every device; with --model, the fastest"),
    dtype: Dtype | None = like(
        Config, "dtype", DEVICE, value=None, default="all four; with --model, its own"
    ),
    seed: int = like(Config, "seed", DEVICE, modes=("layer", "model")),
) -> None:
    """Examines the installation or a checkpoint and prints the report; exit code 3 if a check
    failed.
    """
    Config(d_model=1, n_heads=1, device=device).resolved()
    require_writable(output.files, force=output.force)
    texts = read_texts(Source(typed=typed, text=text)) if typed or text else []
    if model.path is not None:
        local_checkpoint(model)
        require_not_blank(texts)
    with loading_torch():
        from .run import doctor as examine
    with progress() as report_progress:
        report = examine(
            model.path,
            tokenizer,
            texts=texts,
            device=device,
            dtype=dtype,
            seed=seed,
            revision=model.revision,
            report_progress=report_progress,
        )
    report = replace(report, command=record_command())
    print_report(
        output,
        view=report.view,
        json=report.to_dict,
        csv=lambda: report.to_dict()["checks"],
    )
    if output.suggests and not report.failed:
        from mhacli.cli.next_steps import NextStep, again, print_steps

        if (words := again("run")) is not None:
            words += () if texts else ("the cat sat on the mat",)
            print_steps([NextStep(words, "shows what every head does with the text")])
    if report.failed:
        raise typer.Exit(EXIT_CHECK)
