"""`mha diff`: compares two saved records without torch: where they first differ, and what changed in each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import typer

from mhacli.cli.console import show_activity
from mhacli.cli.output import (
    COLOUR,
    REPORT,
    Output,
    csv_document,
    json_document,
    print_report,
    require_writable,
    write_report,
)
from mhacli.cli.parameters import command, offers
from mhacli.cli.source import record_command
from mhacli.errors import EXIT_CHECK, MhaError
from mhacli.record.storage import require_agreement
from mhacli.render.base.options import HEADS_SHOWN, SEQUENCES_SHOWN, ViewOptions
from mhacli.settings import VIEW, setting

_TOLERANCE = (
    "Largest difference that counts as equal, relative to the largest number of a site; 0 for the same bits. "
    "(default: 1e-12, 1e-5, 5e-3, 2e-2 for float64, float32, float16, bfloat16, by the coarser record)"
)
_CSV = "Print CSV: a line per site, and per statistic of a head."
_HEADS = f"{HEADS_SHOWN} (default: those that changed most)"
_SEQUENCES = f"{SEQUENCES_SHOWN} (default: where a head changed most)"


@command(
    "mha diff before.safetensors after.safetensors",
    "mha diff before.safetensors after.safetensors --tolerance 1e-3",
)
def diff(
    a: str = setting("", "", "The reference, a record that --save wrote.", argument=True, metavar="A"),
    b: str = setting("", "", "The record to compare with it.", argument=True, metavar="B"),
    tolerance: float | None = setting(None, "Comparison", _TOLERANCE, "--tolerance --atol", low=0, metavar="X"),
    view: Literal["heatmap", "none"] = setting("heatmap", VIEW, "How to draw each head."),
    *,
    options: Annotated[
        ViewOptions,
        offers("precision", "everything", "layers", "map_scale", heads=_HEADS, sequences=_SEQUENCES),
    ],
    output: Annotated[Output, offers("json", "png", "force", *COLOUR, csv=_CSV, **REPORT)],
) -> None:
    """Compares two records and prints their differences; exit code 3 if there are any."""
    from mhacli.commands.diff.compare import diff as compare
    from mhacli.commands.diff.view import diff_view, require_drawable

    options = replace(options, view=view)
    require_writable(output.files, force=output.force)
    with show_activity("comparing"):
        found = compare(a, b, tolerance=tolerance)
    require_drawable((found.a, found.b), options)
    print_report(
        output,
        view=lambda on: diff_view(found, options, on),
        json=lambda: json_document(found.to_dict(record_command())),
        csv=lambda: csv_document(found.rows()),
    )
    write_report(output, "mha diff", lambda on: diff_view(found, options, on), record_command())
    require_agreement(found.a, a)
    require_agreement(found.b, b)
    if found.verdict == "nothing":
        message = "the two records have nothing in common that could be compared"
        hint = "compare two records of the same command, both with --model or both without"
        raise MhaError(message, hint=hint, code="nothing-in-common")
    if found.verdict == "differ":
        raise typer.Exit(EXIT_CHECK)
