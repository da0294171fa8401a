"""`mha run`: the attention pattern of every head for a text."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from mhacli.cli.console import loading_torch, show_activity
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
    offers,
)
from mhacli.cli.output import (
    COLOUR,
    PICTURES,
    SAVED,
    Output,
    print_result,
    require_own_steps,
    save_record,
    view_options,
    with_output,
)
from mhacli.cli.shared.checkpoint import (
    ComputeRequest,
    LayerDrawing,
    ModelOptions,
    ModelTextOptions,
    layer_list,
    model_request,
    require_configured_heads,
    require_without_model,
    row_choice,
)
from mhacli.io.memory import uncollected
from mhacli.record.heads import HeadsRequest
from mhacli.record.record import kinds_of
from mhacli.render.base.options import ViewOptions, require_choices
from mhacli.render.base.selection import query_texts, require_generated, require_rows

if TYPE_CHECKING:
    from mhacli.record.record import Record


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
    layer_drawing: LayerDrawing,
    output: Annotated[Output, offers("json", "csv", *SAVED, *PICTURES, *COLOUR)],
) -> None:
    """Inspects a layer of mha or a checkpoint and prints the patterns."""
    options = with_output(view_options(drawing, HeadsViewOptions(), sections), output, keep=output.keep)
    if model.model is None:
        require_without_model(words=layer_drawing.words, from_=layer_drawing.queries)
    else:
        require_own_steps(sections)
        rows = row_choice(layer_drawing.queries)
        require_generated(rows, is_generated=reading.generate is not None)
        options = replace(options, layers=layer_list(model.layer), rows=rows, words=layer_drawing.words)
    compute_request = ComputeRequest(source, text, layer, device, model, reading, output)
    values = ("v",) if output.html is not None else ()
    record, notes = computed(compute_request, options, also=values)
    print_result(record, notes, options=options, output=output)
    if output.on_terminal and not options.brief:
        from mhacli.cli.next_steps import after_run

        after_run(record, options, output)


# --------------------------------------------------------------------------------------------------------- computation


def computed(
    compute_request: ComputeRequest, options: ViewOptions, *, also: tuple[str, ...] = ()
) -> tuple[Record, tuple[str, ...]]:
    """The record of the request, saved if requested, and the notes to print. `options` are checked against the texts; `also`
    names further arrays to keep.

    Raises `MhaError`, before torch is loaded, for options that cannot work.
    """
    if compute_request.model.model is None:
        return _layer_record(compute_request, options, also)
    record, notes = _checkpoint_record(compute_request, options)
    save_record(record, compute_request.save)
    return record, notes


def _layer_record(
    compute_request: ComputeRequest, options: ViewOptions, also: tuple[str, ...]
) -> tuple[Record, tuple[str, ...]]:
    require_without_model(**vars(compute_request.model), **vars(compute_request.reading))
    from mhacli.cli.shared.request import make_request, require_cpu_memory, require_heads, save_files

    request = make_request(
        compute_request.source,
        compute_request.text,
        compute_request.layer,
        compute_request.device,
        compute_request.save,
        also=also,
    )
    require_cpu_memory(request)
    require_heads(options.heads, request, compute_request.layer)
    require_choices(request.config.n_heads, len(request.encoded.sequences), options)
    with loading_torch():
        from mhacli.compute.layer import run as study
    with show_activity("computing"):
        record = study.inspect_layer(request)
        save_files(record, request, compute_request.save)
    return record, request.notes


def _checkpoint_record(compute_request: ComputeRequest, options: ViewOptions) -> tuple[Record, tuple[str, ...]]:
    heads_request = HeadsRequest(allow_nonfinite=compute_request.layer.allow_nonfinite)
    request = model_request(compute_request, heads_request)
    require_configured_heads(options.heads, request)
    with loading_torch():
        from mhacli.compute.checkpoint.prepare import prepare_checkpoint
    with show_activity("loading the checkpoint"), uncollected():
        prepared, notes = prepare_checkpoint(request)
    kinds = kinds_of(request.layers, is_pair=prepared.inputs.context is not None)
    require_rows(options.rows, query_texts(kinds, prepared.inputs.sequences, prepared.inputs.context, options))
    with show_activity("computing"):
        prepared.run()
    return prepared.record(), tuple(notes)
