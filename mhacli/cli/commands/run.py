"""`mha run`: a text, and what every attention head does with it."""

from __future__ import annotations

from dataclasses import replace

from mhacli.cli.options import (
    DeviceOptions,
    DrawingOptions,
    HeadsViewOptions,
    LayerOptions,
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
from mhacli.cli.shared.compute import ComputeRequest, computed
from mhacli.cli.shared.output import RecordOutput, print_result, view_options, with_output
from mhacli.render.base.selection import require_generated


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
    output: RecordOutput,
) -> None:
    """Options in, the study `inspect` or that of a checkpoint, the view of a run out."""
    save = output.save
    options = with_output(view_options(drawing, HeadsViewOptions()), output, others=save.files, keep=save.keep)
    if model.model is None:
        require_without_model(words=of_layers.words, from_=of_layers.queries)
    else:
        rows = row_choice(of_layers.queries)
        require_generated(rows, is_generated=reading.generate is not None)
        options = replace(options, layers=layer_list(model.layer), rows=rows, words=of_layers.words)
    record, notes = computed(ComputeRequest(source, text, layer, device, model, reading, save), options)
    print_result(record, notes, options=options, output=output)
