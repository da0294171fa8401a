"""`mha run`: a text, and what every attention head does with it."""

from __future__ import annotations

from dataclasses import replace

from mhacli.cli.options import (
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
from mhacli.cli.shared.checkpoint import (
    LayerDrawing,
    ModelOptions,
    ModelTextOptions,
    layer_list,
    require_without_model,
    row_choice,
)
from mhacli.cli.shared.compute import Asked, computed
from mhacli.cli.shared.output import require_one_format, view_options
from mhacli.cli.shared.pictures import PictureOptions, tell, with_pictures
from mhacli.render.base.rows import require_generated


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
    if model.model is None:
        require_without_model(words=of_layers.words, from_=of_layers.queries)
    else:
        rows = row_choice(of_layers.queries)
        require_generated(rows, is_generated=reading.generate is not None)
        options = replace(options, layers=layer_list(model.layer), rows=rows, words=of_layers.words)
    record, notes = computed(Asked(source, text, layer, device, model, reading, save), options)
    tell(record, notes, options=options, machine=machine, save=save, pictures=pictures, colour=colour)
