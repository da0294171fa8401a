"""`mha effect`: what changes when heads or single attention weights are removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mhacli.cli.console import loading_torch, note, progress, show_activity
from mhacli.cli.next_steps import after_effect
from mhacli.cli.output import COLOUR, DRAWN, Output, print_result, require_output
from mhacli.cli.parameters import command, layer_or_model, offers
from mhacli.commands.effect.settings import EffectSettings
from mhacli.errors import UsageError
from mhacli.io.files import format_size
from mhacli.io.memory import uncollected
from mhacli.render.base.format import count_of, seconds_text
from mhacli.render.base.options import ViewOptions
from mhacli.settings import Computation, Reading

if TYPE_CHECKING:
    from mhacli.record.record import Record
    from mhacli.run import Run

_ANNOUNCED_S = 2.0
"""The predicted time from which it is printed."""


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
    reading: Annotated[Reading, offers("span")],
    options: Annotated[ViewOptions, offers("everything")],
    output: Annotated[Output, offers("json", "save", "force", *DRAWN, *COLOUR, csv="Print CSV: a line per removal.")],
) -> None:
    """Computes the effects, saves the record and prints it."""
    from mhacli.cli.source import make_run

    if reading.span and effect.cut is None:
        raise UsageError("--span names parts of the text for --cut", hint="add --cut A:B, or leave --span out")
    require_output(options, output, figure="effects")
    run = make_run(what, reading=reading, keep=())
    record, notes = _of_layer(run, effect) if run.model.path is None else _of_checkpoint(run, effect)
    print_result(record, notes, options=options, output=output, after=after_effect)


def _of_layer(run: Run, effect: EffectSettings) -> tuple[Record, tuple[str, ...]]:
    from mhacli.attention.memory import require_memory
    from mhacli.cli.source import require_heads

    if any(layer is not None for _, layer, _ in effect.heads or ()):
        raise UsageError("--head LAYER.HEAD needs --model: a layer has heads such as 0,2", hint="add --model DIR")
    require_memory(run)
    require_heads([head for _, _, head in effect.heads or ()], run)
    with loading_torch():
        from mhacli.commands.effect.layer import layer_effects
    with show_activity("computing"):
        return layer_effects(run, effect), run.notes


def _of_checkpoint(run: Run, effect: EffectSettings) -> tuple[Record, tuple[str, ...]]:
    for _, layer, head in effect.heads or ():
        if layer is None:
            raise UsageError(
                f"--head {head} is not LAYER.HEAD, such as 5.1",
                hint="of an encoder-decoder: encoder.5.1, decoder.5.1 or cross.5.1",
            )
    with loading_torch():
        from mhacli.commands.effect.study import prepare_effect, study_of
    with show_activity("loading the checkpoint"), uncollected():
        checkpoint, inspected, notes = prepare_effect(run)
    with show_activity("inspecting the layers"):
        inspected.run()
        study = study_of(checkpoint, inspected, run, effect)
        n_removals, seconds, n_bytes = study.foresee()
    if seconds > _ANNOUNCED_S:
        note(
            f"{count_of(n_removals, 'removal', grouped=True)}: about {seconds_text(seconds)}, "
            f"and at most {format_size(n_bytes)} in addition to the weights"
        )
    with progress() as report_progress:
        study.effects.run(report_progress)
    return study.added_to(inspected.record()), notes
