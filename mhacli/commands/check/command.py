"""`mha check`: examines a user's attention in a child process and names its mistakes and their
lines.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from mhacli.cli.console import require_folder, show_activity
from mhacli.cli.output import REPORT, Output, print_report, require_writable
from mhacli.cli.parameters import command, offers
from mhacli.cli.source import local_checkpoint, record_command
from mhacli.errors import EXIT_CHECK, EXIT_FAILED
from mhacli.render.base.options import ViewOptions
from mhacli.settings import Config, ModelSettings
from mhacli.usercode.target import require_readable

from .annotations import annotations, print_annotations
from .result import CheckRequest

if TYPE_CHECKING:
    from mhacli.render.figures.svg import Piece

_VERBOSE = "Print a script that shows each difference, where there is one."
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
    request: CheckRequest,
    output: Annotated[Output, offers("json", "force", "no_annotations", csv=_CSV, **REPORT)],
    options: Annotated[ViewOptions, offers(verbose=_VERBOSE)],
) -> None:
    """Examines a target and prints the report; the exit code is the verdict."""
    Config(d_model=1, n_heads=1, device=request.device).resolved()
    require_writable(output.files, force=output.force)
    for target in (request.target_request, request.against) if request.model is None else ():
        if target is not None:
            require_readable(target.target)
    if request.model is not None:
        local_checkpoint(ModelSettings(path=request.model))
    _ = request.condition  # which raises where it cannot be read
    require_folder()
    from .run import examine_in_child

    with show_activity() as on_stage:
        examination = replace(
            examine_in_child(request, on_stage=on_stage), command=record_command()
        )

    def figures() -> "Sequence[Piece]":
        from .pictures import pictures

        return pictures(examination)

    print_report(
        output,
        view=lambda on: examination.view(replace(on, verbose=options.verbose)),
        json=examination.to_dict,
        csv=examination.rows,
        figures=figures,
    )
    if not output.no_annotations:
        print_annotations(annotations(examination))
    if not examination.ok:
        raise typer.Exit(EXIT_CHECK if examination.verdict == "wrong" else EXIT_FAILED)
