"""`mha run`: the attention pattern of every head for a text."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from mhacli.cli.console import progress
from mhacli.cli.output import (
    DRAWING,
    OF_RECORDS,
    PATTERNS,
    SAVED,
    TABLES,
    Output,
    print_result,
    require_output,
)
from mhacli.cli.parameters import command, layer_or_model, offers
from mhacli.errors import UsageError
from mhacli.render.base.options import ViewOptions
from mhacli.settings import Computation, Reading

if TYPE_CHECKING:
    from mhacli.record.record import Record
    from mhacli.run import Run
    from mhacli.text.tokens import Texts


@command(
    'mha run "the cat sat on the mat" --heads 4',
    "mha run --file poem.txt --view heatmap",
    'mha run "the cat sat on the mat" --causal --save cat.safetensors',
    'mha run "the cat sat on the mat" --model MiniLM --layer 5',
    modes=layer_or_model,
)
def run(
    what: Computation,
    reading: Reading,
    options: Annotated[ViewOptions, offers(*PATTERNS, *TABLES, "sort", "words", "rows", *DRAWING)],
    output: Annotated[Output, offers(*OF_RECORDS, *SAVED)],
) -> None:
    """Inspects a layer of mha or a checkpoint and prints the patterns."""
    from mhacli.cli.source import make_run, require_in_config
    from mhacli.render.base.selection import require_generated

    require_output(options, output, has_effects=False)
    require_generated(options.rows, is_generated=reading.generate is not None)
    options = replace(options, layers=what.model.layers)
    if any(n < 0 for _, n in options.layers or ()):  # all are inspected, and then chosen
        what = replace(what, model=replace(what.model, layers=None))
    require_in_config(what.model, "--head", options.heads)
    if options.is_mean and what.model.path is None:
        raise UsageError("--head mean needs --model")
    if options.is_mean and output.save is not None:
        raise UsageError(
            "--head mean has no heads to save", hint="mha show RECORD --head mean draws it later"
        )
    also = ("v",) if output.html is not None else ()
    run, texts = make_run(what, reading, keep=output.keep, keep_limit=output.keep_limit, also=also)
    record, notes = inspected(run, texts, options)
    if options.is_mean:
        record = record.mean_of_heads()
    print_result(record, notes, options=options, output=output, run=run)


def inspected(run: Run, texts: Texts, options: ViewOptions) -> tuple[Record, tuple[str, ...]]:
    """The record of a run, and the notes to print. `options` are checked against the texts."""
    from mhacli.cli.source import recorded, start
    from mhacli.record.record import kinds_of
    from mhacli.render.base.selection import require_rows

    prepared, notes = start(run, options)
    with progress("computing") as report_progress:
        if prepared is None:
            from mhacli.layer.steps import walk

            return recorded(walk(run, texts)), notes
        inputs = prepared.inputs
        kinds = kinds_of(run.model.layers, is_pair=inputs.context is not None)
        require_rows(options, kinds, inputs.sequences, inputs.context)
        return recorded(prepared.run(report_progress)), notes
