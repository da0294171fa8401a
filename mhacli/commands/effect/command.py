"""`mha effect`: what changes when heads or single attention weights are removed."""

from typing import Annotated

from mhacli.cli.console import loading_torch, progress, show_activity
from mhacli.cli.output import OF_RECORDS, Output, print_result, require_output
from mhacli.cli.parameters import command, layer_or_model, offers
from mhacli.errors import UsageError
from mhacli.io.memory import gc_paused
from mhacli.render.base.options import ViewOptions
from mhacli.settings import Computation, Reading

from .settings import EffectSettings


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
    output: Annotated[
        Output, offers(*OF_RECORDS, "save", "force", csv="Print CSV: a line per removal.")
    ],
) -> None:
    """Computes the effects, saves the record and prints it."""
    from mhacli.cli.source import make_run, recorded, require_in_config

    if reading.span and effect.cut is None:
        raise UsageError(
            "--span names parts of the text for --cut", hint="add --cut A:B, or leave --span out"
        )
    require_output(options, output)
    if what.model.path is not None:
        for choice in effect.heads or ():
            kind, layer, head = choice
            layers = () if layer is None else (layer,)
            named = f"--head {'.'.join(str(part) for part in choice if part is not None)}"
            require_in_config(what.model, f"{named}: layer", layers, size="n_layers", kind=kind)
            require_in_config(what.model, f"{named}: head", (head,), kind=kind)
    run, texts = make_run(what, reading=reading, keep=())
    of_layer = run.model.path is None
    n_texts = run.dims.batch if of_layer else len(run.texts)
    if n_texts > 1:
        raise UsageError(
            f"mha effect takes one text, and {n_texts} are given",
            hint="mha heads --effect takes several texts, and mha scan --effect a corpus",
        )
    with loading_torch():
        from .study import checkpoint_study, layer_study
    with show_activity("computing" if of_layer else "inspecting the checkpoint"), gc_paused():
        study, notes = (
            layer_study(run, texts, effect) if of_layer else checkpoint_study(run, effect)
        )
    with progress() as report_progress:
        record = study.run(report_progress)
    print_result(recorded(record), notes, options=options, output=output)
