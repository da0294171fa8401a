"""`mha show`: draws a saved record in any view of `run`, without torch."""

from dataclasses import replace
from typing import Annotated

from mhacli.cli.output import (
    DRAWING,
    OF_RECORDS,
    PATTERNS,
    TABLES,
    Output,
    print_result,
    require_output,
)
from mhacli.cli.parameters import command, offers
from mhacli.cli.source import read_record
from mhacli.errors import UsageError
from mhacli.record.record import Record
from mhacli.render.base.options import ViewOptions, require_choices
from mhacli.render.base.selection import chosen_layers, require_generated, require_rows
from mhacli.settings import ARRAYS, AXES, setting

_PATH = "A record that --save wrote, or weights in a file of numpy or safetensors."
_LABELS = "Tokens of the weights: one a line, or a JSON list."


@command(
    "mha show cat.safetensors",
    "mha show cat.safetensors --view heatmap --head 0",
    "mha show cat.safetensors --html cat.html",
    "mha show weights.npz --axes layer,head,query,key --labels tokens.txt",
)
def show(
    options: Annotated[
        ViewOptions, offers(*PATTERNS, *TABLES, "maps", "sort", "layers", "words", "rows", *DRAWING)
    ],
    output: Annotated[Output, offers(*OF_RECORDS, "force")],
    *,
    path: str = setting("", "", _PATH, metavar="RECORD", argument=True),
    axes: str | None = setting(None, ARRAYS, AXES, metavar="LIST"),
    labels: str | None = setting(None, ARRAYS, _LABELS, metavar="FILE"),
    raw: bool = setting(False, ARRAYS, "Show numbers that are no weights as they are."),
) -> None:
    """Reads a record, or weights of another program, and prints them in the chosen view."""
    require_output(options, output, read=path)
    record = read_record(path, axes, labels, is_raw=raw)
    model = record.model
    if record.survey is None and model is None and options.maps:
        raise UsageError(f"--map needs a record of mha heads, which {path} is not")
    if model is None and (options.layers or options.words or options.rows):
        raise UsageError(
            f"--layer, --words and --from need a record of a checkpoint, which {path} is not"
        )
    for name in ("shapes", "timings"):
        if getattr(options, name) and (model is not None or record.survey is not None):
            raise UsageError(
                f"--{name} is for runs of mha's own layer, whose steps {path} does not have"
            )
    if options.is_mean and model is None:
        raise UsageError(f"--head mean needs a record of a checkpoint, which {path} is not")
    record = record.mean_of_heads() if options.is_mean else record
    known = replace(options, heads=None) if options.is_mean else options
    require_choices(record.config.n_heads, len(record.sequences), known)
    if model is not None and options.rows is not None:
        require_generated(options.rows, is_generated=model.generated is not None)
        kinds = [layer.inspected.kind for layer in chosen_layers(record, options)]
        require_rows(options, kinds, record.sequences, record.context)
    print_result(record, (), options=_in_blocks(record, options), output=output, is_saved=True)


def _in_blocks(record: Record, options: ViewOptions) -> ViewOptions:
    """The options with a map of the chosen heads where the record has no pattern of them."""
    views = chosen_layers(record, options) if record.layers else record.attentions
    has_blocks = all(view.is_drawable and not view.has_pattern for view in views)
    if has_blocks and options.heads and not options.maps and options.view != "none":
        return replace(options, maps=options.heads)
    return options
