"""`mha run`: a text, and what every attention head does with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mhacli.commands.checkpoint import (
    LayerDrawing,
    ModelOptions,
    ModelTextOptions,
    layer_list,
    model_request,
    require_configured_heads,
    require_without_model,
    row_choice,
)
from mhacli.commands.output import require_one_format, save_record, view_options
from mhacli.commands.pictures import PictureOptions, tell, with_pictures
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

if TYPE_CHECKING:
    from mhacli.record import Record


@dataclass(frozen=True)
class Asked:
    """What is computed: the option groups that `run` and `view` share."""

    source: SourceOptions
    text: TextOptions
    layer: LayerOptions
    device: DeviceOptions
    model: ModelOptions
    reading: ModelTextOptions
    save: SaveOptions


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
    pictures: PictureOptions,
    colour: ColourOptions,
) -> None:
    """Options in, the study `inspect` or the look at a checkpoint, the view of a run out."""
    require_one_format(json=machine.json, csv=machine.csv)
    options = with_pictures(
        view_options(drawing, HeadsViewOptions()), pictures, others=save.files, force=save.force, keep=save.keep
    )
    asked = Asked(source, text, layer, device, model, reading, save)
    if model.model is not None:
        rows = row_choice(of_layers.queries)
        require_generated(rows, is_generated=reading.generate is not None)
        shown = replace(options, layers=layer_list(model.layer), rows=rows, words=of_layers.words)
        record, notes = computed_of_checkpoint(asked, shown)
        save_record(record, save)
        tell(record, notes, options=shown, machine=machine, save=save, pictures=pictures, colour=colour)
        return
    require_without_model(words=of_layers.words, from_=of_layers.queries)
    record, notes = computed(asked, options)
    tell(record, notes, options=options, machine=machine, save=save, pictures=pictures, colour=colour)


def computed(asked: Asked, options: ViewOptions) -> tuple[Record, tuple[str, ...]]:
    """The record of a layer of our own, saved where that was asked for, and what is to be told of it. Raises `MhaError`, before
    torch is loaded, for what cannot work."""
    require_without_model(**vars(asked.model), **vars(asked.reading))
    from mhacli.commands.sources import make_request, require_memory, save_files, study_options

    request = make_request(asked.source, asked.text, asked.layer, asked.device, asked.save)
    require_memory(request, asked.save)
    require_choices(request.config.n_heads, len(request.encoded.sequences), options)
    with life("loading torch"):
        from mhacli.studies import inspect as study
    with life("computing"):
        record = study.inspect(
            request.encoded,
            request.config,
            source=request.source,
            options=study_options(request, asked.layer, asked.device, asked.save),
        )
        save_files(record, request, asked.save)
    return record, request.notes


def computed_of_checkpoint(asked: Asked, options: ViewOptions) -> tuple[Record, tuple[str, ...]]:
    """The record of the layers of a checkpoint, and what is to be told of it; `options` are checked against the texts that these
    layers read. Raises `MhaError`, before torch is loaded, for what cannot work."""
    wanted = Wanted(allow_nonfinite=asked.layer.allow_nonfinite)
    request = model_request(
        asked.model, asked.reading, asked.source, asked.text, asked.layer, asked.device, asked.save, wanted
    )
    require_configured_heads(options.heads, request)
    with life("loading torch"):
        from mhacli.studies.prepare import prepare_checkpoint
    with life("loading the checkpoint"):
        look, notes = prepare_checkpoint(request)
    kinds = kinds_of(request.layers, is_pair=look.inputs.context is not None)
    require_rows(options.rows, drawn_texts(kinds, look.inputs.sequences, look.inputs.context, options))
    with life("computing"):
        look.run()
    return look.record(), tuple(notes)
