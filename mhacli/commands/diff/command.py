"""`mha diff`: compares two saved records without torch: where they first differ, and what changed in each head."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from mhacli.cli.console import show_activity
from mhacli.cli.help import examples
from mhacli.cli.numbers import Real
from mhacli.cli.options import (
    Everything,
    MapScale,
    Precision,
    command,
    head_list,
    number,
    offers,
    option,
    option_group,
    sequence_list,
)
from mhacli.cli.output import COLOUR, Output, json_document, print_report
from mhacli.cli.shared.checkpoint import LayerChoiceOptions, layer_list
from mhacli.cli.shared.request import record_command
from mhacli.cli.values import index_list
from mhacli.errors import EXIT_CHECK, MhaError, UsageError
from mhacli.record.consistency import require_agreement
from mhacli.render.base.options import ViewOptions

_COMPARISON, _VIEW = "Comparison", "View"


@option_group
class PairOptions:
    """The two files, and the tolerance."""

    a: Annotated[
        str, typer.Argument(help="The reference, a record that --save wrote.", metavar="A", show_default=False)
    ] = ""
    b: Annotated[str, typer.Argument(help="The record to compare with it.", metavar="B", show_default=False)] = ""
    tolerance: Annotated[
        float | None,
        number(
            _COMPARISON,
            Real(0),
            "Largest difference that counts as equal, relative to the largest number of a site; 0 for the same bits. "
            "(default: 1e-12, 1e-5, 5e-3, 2e-2 for float64, float32, float16, bfloat16, by the coarser record)",
            "--tolerance",
            "--atol",
            metavar="X",
        ),
    ] = None


@option_group
class PanelOptions:
    """The heads to draw side by side, and their view."""

    view: Annotated[Literal["heatmap", "none"], option(_VIEW, "How to draw each head.")] = "heatmap"
    head: Annotated[str | None, head_list("those that changed most")] = None
    sequence: Annotated[str | None, sequence_list("where a head changed most")] = None
    map_scale: MapScale = None
    precision: Precision = 2
    all: Everything = False


@examples(
    "mha diff before.safetensors after.safetensors",
    "mha diff before.safetensors after.safetensors --tolerance 1e-3",
)
@command
def diff(
    pair: PairOptions,
    panels: PanelOptions,
    choice: LayerChoiceOptions,
    output: Annotated[Output, offers("json", *COLOUR)],
) -> None:
    """Compares two records and prints their differences; exit code 3 if there are any."""
    options = ViewOptions(
        view=panels.view,
        heads=index_list(panels.head, "head"),
        sequences=index_list(panels.sequence, "sequence"),
        layers=layer_list(choice.layer),
        map_scale=panels.map_scale,
        precision=panels.precision,
        everything=panels.all,
    )
    if not pair.a or not pair.b:
        raise UsageError("mha diff needs two records, files that --save wrote")
    from mhacli.commands.diff.compare import compare
    from mhacli.commands.diff.view import diff_view, require_drawable
    from mhacli.record import storage

    with show_activity("comparing"):
        a, b = storage.load(pair.a), storage.load(pair.b)
        require_drawable((a, b), options)
        differences = compare(a, b, (pair.a, pair.b), tolerance=pair.tolerance)
    print_report(
        output,
        view=lambda on: diff_view(differences, options, on),
        json=lambda: json_document(differences.to_dict(record_command())),
    )
    require_agreement(a, b, names=(pair.a, pair.b))
    if differences.verdict == "nothing":
        raise MhaError(
            "the two records have nothing in common that could be compared",
            hint="compare two records of the same command, both with --model or both without",
            code="nothing-in-common",
        )
    if differences.verdict == "differ":
        raise typer.Exit(EXIT_CHECK)
