"""`mha bench`: time, error and memory of attention backends, timed in turns."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from mhacli.cli.console import loading_torch, progress
from mhacli.cli.output import Output, print_report, require_writable
from mhacli.cli.parameters import command, offers
from mhacli.cli.source import record_command
from mhacli.errors import MhaError

from .result import Sweep


@command(
    "mha bench --lengths 512,1k,2k",
    "mha bench --decode --lengths 1k..8k --heads 32 --kv-heads 8",
    "mha bench --lengths 1k --direction both",
)
def bench(
    given: Annotated[Mapping[str, Any], Sweep],
    output: Annotated[
        Output,
        offers(
            "json",
            "force",
            csv="Print CSV: a line per row, without samples.",
            svg="Write what is printed and plots of time and rate as an SVG picture.",
            html="Write what is printed and the plots as an HTML page.",
        ),
    ],
) -> None:
    """Times the backends and prints the report."""
    sweep = Sweep(**given).checked()
    require_writable(output.files, force=output.force)
    with loading_torch():
        from .measure import measure
    with progress() as report_progress:
        benchmark = replace(measure(sweep, report_progress), command=record_command())
    from .view import plots

    print_report(
        output,
        view=benchmark.view,
        json=benchmark.to_dict,
        csv=benchmark.without_samples,
        figures=lambda: plots(benchmark),
    )
    if output.suggests and not sweep.decode and sweep.directions == ("forward",):
        from mhacli.cli.next_steps import NextStep, again, print_steps

        words = again("bench", takes=[Sweep], inputs=[Sweep], without=["directions"])
        if words is not None:
            print_steps([NextStep((*words, "--direction", "both"), "times the backward pass too")])
    if not any(row.status == "ok" for row in benchmark.rows):
        reasons = dict.fromkeys(
            f"{row.backend} {row.status}: {row.reason}" for row in benchmark.rows
        )
        raise MhaError(f"no backend could run: {'; '.join(reasons)}", code="nothing-ran")
