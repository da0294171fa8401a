"""`mha run`: a text, and what every attention head does with it."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from mhacli.cli.help import examples
from mhacli.cli.options import (
    DeviceOptions,
    DrawingOptions,
    HeadsViewOptions,
    LayerOptions,
    SectionOptions,
    SourceOptions,
    TextOptions,
    command,
)
from mhacli.cli.shared.checkpoint import (
    ComputeRequest,
    LayerDrawing,
    ModelOptions,
    ModelTextOptions,
    layer_list,
    leave_to_first_rank,
    model_request,
    require_configured_heads,
    require_without_model,
    row_choice,
)
from mhacli.cli.shared.output import (
    RecordOutput,
    print_result,
    require_own_steps,
    save_record,
    view_options,
    with_output,
)
from mhacli.cli.streams import loading_torch, show_activity
from mhacli.io.memory import uncollected
from mhacli.render.base.options import ViewOptions, require_choices
from mhacli.render.base.selection import query_texts, require_generated, require_rows
from mhacli.results.record.head_statistics import HeadsRequest
from mhacli.results.record.record import kinds_of

if TYPE_CHECKING:
    from mhacli.results.record.record import Record


@examples(
    'mha run "the cat sat on the mat" --heads 4',
    "mha run --file poem.txt --view heatmap",
    'mha run "the cat sat on the mat" --causal --save cat.safetensors',
    'mha run "the cat sat on the mat" --model MiniLM --layer 5',
)
@command
def run(
    source: SourceOptions,
    text: TextOptions,
    layer: LayerOptions,
    device: DeviceOptions,
    model: ModelOptions,
    reading: ModelTextOptions,
    drawing: DrawingOptions,
    sections: SectionOptions,
    of_layers: LayerDrawing,
    output: RecordOutput,
) -> None:
    """Options in, the study `inspect` or that of a checkpoint, the view of a run out."""
    save = output.save
    options = with_output(
        view_options(drawing, HeadsViewOptions(), sections), output, others=save.files, keep=save.keep
    )
    if model.model is None:
        require_without_model(words=of_layers.words, from_=of_layers.queries)
    else:
        require_own_steps(sections)
        rows = row_choice(of_layers.queries)
        require_generated(rows, is_generated=reading.generate is not None)
        options = replace(options, layers=layer_list(model.layer), rows=rows, words=of_layers.words)
    given = ComputeRequest(source, text, layer, device, model, reading, save)
    values = ("v",) if output.pictures.html is not None else ()
    record, notes = computed(given, options, may_split=True, also=values)
    print_result(record, notes, options=options, output=output)
    if sys.stdout.isatty() and model.device_map != "tp":  # no command that could be typed has its processes
        from mhacli.cli.shared.next_steps import suggest_next

        suggest_next(record, given, options, output)


# --------------------------------------------------------------------------------------------------------- computation


def computed(
    given: ComputeRequest, options: ViewOptions, *, may_split: bool = False, also: tuple[str, ...] = ()
) -> tuple[Record, tuple[str, ...]]:
    """The record of the request, saved where that was asked for, and what is to be told of it. `options` are checked against
    the texts. Raises `MhaError`, before torch is loaded, for what cannot work, and ends the command in processes that leave the
    record to the first of them, which they may where `may_split`."""
    if given.model.model is None:
        return _of_own_layer(given, options, also)
    record, notes = _of_checkpoint(given, options, may_split=may_split)
    save_record(record, given.save)
    return record, notes


def _of_own_layer(given: ComputeRequest, options: ViewOptions, also: tuple[str, ...]) -> tuple[Record, tuple[str, ...]]:
    require_without_model(**vars(given.model), **vars(given.reading))
    from mhacli.cli.shared.request import make_request, require_cpu_memory, require_heads, save_files

    request = make_request(given.source, given.text, given.layer, given.device, given.save, also=also)
    require_cpu_memory(request)
    require_heads(options.heads, request, given.layer)
    require_choices(request.config.n_heads, len(request.encoded.sequences), options)
    with loading_torch():
        from mhacli.compute.layer import run as study
    with show_activity("computing"):
        record = study.inspect_layer(request)
        save_files(record, request, given.save)
    return record, request.notes


def _of_checkpoint(given: ComputeRequest, options: ViewOptions, *, may_split: bool) -> tuple[Record, tuple[str, ...]]:
    wanted = HeadsRequest(allow_nonfinite=given.layer.allow_nonfinite)
    request = model_request(
        given.model,
        given.reading,
        given.source,
        given.text,
        given.layer,
        given.device,
        given.save,
        wanted,
        may_split=may_split,
    )
    require_configured_heads(options.heads, request)
    with loading_torch():
        from mhacli.compute.checkpoint.prepare import prepare_checkpoint
    with show_activity("loading the checkpoint"), uncollected():
        prepared, notes = prepare_checkpoint(request)
    kinds = kinds_of(request.layers, is_pair=prepared.inputs.context is not None)
    require_rows(options.rows, query_texts(kinds, prepared.inputs.sequences, prepared.inputs.context, options))
    with show_activity("computing"):
        prepared.run()
    leave_to_first_rank(request.device_map)
    return prepared.record(), tuple(notes)
