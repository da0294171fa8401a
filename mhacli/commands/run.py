"""`mha run`: a text, and what every attention head does with it."""

from __future__ import annotations

from mhacli.commands.output import output, require_one_format, require_self_check, tell_notes, view_options
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
from mhacli.render.options import require_choices
from mhacli.streams import life


@command
def run(
    source: SourceOptions,
    text: TextOptions,
    layer: LayerOptions,
    device: DeviceOptions,
    drawing: DrawingOptions,
    machine: MachineOptions,
    save: SaveOptions,
    colour: ColourOptions,
) -> None:
    """Options in, the study `inspect`, the view of a run out."""
    options = view_options(drawing, HeadsViewOptions())
    require_one_format(json=machine.json, csv=machine.csv)
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
