"""`mha effect`: what changes when heads or single attention weights are removed."""

from __future__ import annotations

from typing import Annotated

from mhacli.cli.console import loading_torch, progress, show_activity
from mhacli.cli.output import COLOUR, DRAWN, Output, print_result, require_output
from mhacli.cli.parameters import command, layer_or_model, offers
from mhacli.commands.effect.settings import EffectSettings
from mhacli.errors import UsageError
from mhacli.io.memory import gc_paused
from mhacli.render.base.options import ViewOptions
from mhacli.settings import Computation, Reading


@command(
    'mha effect "the cat sat on the mat" --model MiniLM',
    'mha effect "the cat sat on the mat" --model MiniLM --edges --head 5.1',
    'mha effect "the cat sat on the mat" --heads 4 --edges',
    'mha effect "cat on mat" --model MiniLM --span a=/cat/ --span b=/mat/ --cut a:b',
    modes=layer_or_model,
)
def effect(
    effect: EffectSettings,
    what: Computation,
    reading: Annotated[Reading, offers("span", "pair")],
    options: Annotated[ViewOptions, offers("everything")],
    output: Annotated[Output, offers("json", "save", "force", *DRAWN, *COLOUR, csv="Print CSV: a line per removal.")],
) -> None:
    """Computes the effects, saves the record and prints it."""
    from mhacli.cli.source import make_run

    if reading.span and effect.cut is None:
        raise UsageError("--span names parts of the text for --cut", hint="add --cut A:B, or leave --span out")
    require_output(options, output)
    run = make_run(what, reading=reading, keep=())
    with loading_torch():
        from mhacli.commands.effect.study import checkpoint_study, layer_study
    with show_activity("computing" if run.model.path is None else "inspecting the checkpoint"), gc_paused():
        study, notes = (layer_study if run.model.path is None else checkpoint_study)(run, effect)
    with progress() as report_progress:
        record = study.run(report_progress)
    print_result(record, notes, options=options, output=output)
