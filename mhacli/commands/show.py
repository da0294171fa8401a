"""`mha show`: draws a saved record in any view of `run`, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from mhacli.cli.help import examples
from mhacli.cli.output import (
    COLOUR,
    DRAWING,
    DRAWN,
    PATTERNS,
    TABLES,
    Output,
    note_written,
    print_notes,
    print_record,
    require_output,
    require_sections,
    write_pictures,
)
from mhacli.cli.parameters import command, offers
from mhacli.errors import UsageError
from mhacli.record.consistency import require_agreement
from mhacli.render.base.options import ViewOptions, require_choices
from mhacli.render.base.selection import query_texts, require_generated, require_rows
from mhacli.settings import setting

if TYPE_CHECKING:
    from mhacli.record.record import Record


@dataclass(frozen=True, kw_only=True)
class SavedRecord:
    """The file to show."""

    record: str = setting("", "", "A record that --save wrote.", metavar="RECORD", argument=True)


@examples(
    "mha show cat.safetensors",
    "mha show cat.safetensors --view heatmap --head 0",
    "mha show cat.safetensors --html cat.html",
)
@command()
def show(
    file: SavedRecord,
    options: Annotated[ViewOptions, offers(*PATTERNS, *TABLES, "maps", "sort", "layers", "words", "rows", *DRAWING)],
    output: Annotated[Output, offers("json", "csv", "force", *DRAWN, *COLOUR)],
) -> None:
    """Reads a record and prints it in the chosen view."""
    require_sections(options)
    require_output(options, output, read=file.record)
    if not file.record:
        raise UsageError("mha show needs a record, a file that --save wrote")

    from mhacli.record import storage

    record = storage.load(file.record)
    if record.survey is None and record.model is None and (options.maps or options.sort != "head"):
        raise UsageError(
            f"--map and --sort need a record of mha heads, which {file.record} is not",
            hint="leave out --map and --sort",
        )
    if record.model is None and (options.layers or options.words or options.rows):
        raise UsageError(
            f"--layer, --words and --from need a record of a checkpoint, which {file.record} is not",
            hint="leave out --layer, --words and --from",
        )
    require_sections(options, record)
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
