"""`mha run`: a text, and what every attention head does with it."""

from __future__ import annotations

from dataclasses import replace

from mhacli.checkpoints.request import ModelRequest
from mhacli.commands.checkpoint import (
    LayerDrawing,
    ModelOptions,
    ModelTextOptions,
    finish,
    model_request,
    require_configured_heads,
    require_without_model,
    row_choice,
)
from mhacli.commands.output import output, require_one_format, require_self_check, tell_notes, view_options
from mhacli.heads import Wanted
from mhacli.layers import kinds_of
from mhacli.options import (
    ColourOptions,
    DeviceOptions,
    DrawingOptions,
    HeadsViewOptions,
    LayerOptions,
    MachineOptions,
    SaveOptions,
    SourceOptions,
    TextOptions,
    command,
)
from mhacli.render.options import ViewOptions, require_choices
from mhacli.render.rows import drawn_texts, require_generated, require_rows
from mhacli.streams import life


@command
def run(
    source: SourceOptions,
    text: TextOptions,
    layer: LayerOptions,
    device: DeviceOptions,
    model: ModelOptions,
    reading: ModelTextOptions,
    drawing: DrawingOptions,
    of_layers: LayerDrawing,
    machine: MachineOptions,
    save: SaveOptions,
    colour: ColourOptions,
) -> None:
    """Options in, the study `inspect` or the look at a checkpoint, the view of a run out."""
    options = view_options(drawing, HeadsViewOptions())
    require_one_format(json=machine.json, csv=machine.csv)
    if model.model is not None:
        rows = row_choice(of_layers.queries)
        require_generated(rows, is_generated=reading.generate is not None)
        wanted = Wanted(allow_nonfinite=layer.allow_nonfinite)
        of_model = model_request(model, reading, source, text, layer, device, save, wanted)
        require_configured_heads(options.heads, of_model)
        shown = replace(options, layers=of_model.layers, rows=rows, words=of_layers.words)
        _of_checkpoint(of_model, shown, machine, save, colour)
        return
    require_without_model(**vars(model), **vars(reading), words=of_layers.words, from_=of_layers.queries)
    from mhacli.commands.sources import make_request, require_memory, save_files, study_options

    request = make_request(source, text, layer, device, save)
    require_memory(request, save)
    require_choices(request.config.n_heads, len(request.encoded.sequences), options)
    with life("loading torch"):
        from mhacli.studies import inspect as study
    with life("computing"):
        record = study.inspect(
            request.encoded,
            request.config,
            source=request.source,
            options=study_options(request, layer, device, save),
        )
        save_files(record, request, save)
    output(record, options, machine, colour)
    require_self_check(record)
    tell_notes(record, request.notes)


def _of_checkpoint(
    request: ModelRequest,
    options: ViewOptions,
    machine: MachineOptions,
    save: SaveOptions,
    colour: ColourOptions,
) -> None:
    """The same of the layers of a checkpoint."""
    with life("loading torch"):
        from mhacli.studies.prepare import prepare_checkpoint
    with life("loading the checkpoint"):
        look, notes = prepare_checkpoint(request)
    kinds = kinds_of(request.layers, is_pair=look.inputs.context is not None)
    require_rows(options.rows, drawn_texts(kinds, look.inputs.sequences, look.inputs.context, options))
    with life("computing"):
        look.run()
    finish(look.record(), notes, options, machine, save, colour)
