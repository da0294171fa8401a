"""`mha show`: draws a saved record in any view of `run`, without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from mhacli.cli.help import examples
from mhacli.cli.options import DrawingOptions, HeadsViewOptions, SectionOptions, command, offers, option_group
from mhacli.cli.output import (
    COLOUR,
    PICTURES,
    Output,
    note_written,
    print_notes,
    print_record,
    require_own_steps,
    view_options,
    with_output,
    write_pictures,
)
from mhacli.cli.shared.checkpoint import LayerChoiceOptions, LayerDrawing, layer_list, row_choice
from mhacli.errors import UsageError
from mhacli.record.consistency import require_agreement
from mhacli.render.base.options import ViewOptions, require_choices
from mhacli.render.base.selection import query_texts, require_generated, require_rows

if TYPE_CHECKING:
    from mhacli.record.record import Record


@option_group
class RecordOptions:
    """The file to show."""

    record: Annotated[str, typer.Argument(help="A record that --save wrote.", metavar="RECORD", show_default=False)] = (
        ""
    )


@examples(
    "mha show cat.safetensors",
    "mha show cat.safetensors --view heatmap --head 0",
    "mha show cat.safetensors --html cat.html",
)
@command
def show(
    file: RecordOptions,
    drawing: DrawingOptions,
    sections: SectionOptions,
    ranking: HeadsViewOptions,
    choice: LayerChoiceOptions,
    of_layers: LayerDrawing,
    output: Annotated[Output, offers("json", "csv", "force", *PICTURES, *COLOUR)],
) -> None:
    """Reads a record and prints it in the chosen view."""
    options = replace(
        view_options(drawing, ranking, sections),
        layers=layer_list(choice.layer),
        rows=row_choice(of_layers.queries),
        words=of_layers.words,
    )
    options = with_output(options, output, read=file.record, has_maps=bool(options.maps))
    if not file.record:
        raise UsageError("mha show needs a record, a file that --save wrote")

    from mhacli.record import storage

    record = storage.load(file.record)
    if record.survey is None and record.model is None and (options.maps or options.sort != "head"):
        raise UsageError(
            f"--map and --sort need a record of mha heads, which {file.record} is not",
            hint="leave out --map and --sort",
        )
    if record.model is None and (options.layers or options.words or of_layers.queries):
        raise UsageError(
            f"--layer, --words and --from need a record of a checkpoint, which {file.record} is not",
            hint="leave out --layer, --words and --from",
        )
    if record.model is not None or record.survey is not None:
        require_own_steps(sections)
    require_choices(record.config.n_heads, len(record.sequences), options)
    _require_rows(record, options)
    write_pictures(record, options, output)
    print_record(record, options, output)
    print_notes(record, ())
    note_written(output)
    require_agreement(record)


def _require_rows(record: Record, options: ViewOptions) -> None:
    """Raises `UsageError` for rows that no text in the view has."""
    if options.rows is None or record.model is None:
        return
    from mhacli.render.base.selection import chosen_layers

    require_generated(options.rows, is_generated=record.model.generated is not None)
    kinds = [layer.inspected.kind for layer in chosen_layers(record, options)]
    require_rows(options.rows, query_texts(kinds, record.sequences, record.context, options))
