"""`mha weights`: lists the contents of a checkpoint or weights file, and converts one attention layer."""

from __future__ import annotations

import sys
from os.path import lexists
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhacli.attention.weights_file import FORMAT, read_layer_file
from mhacli.checkpoints.families import LAYOUTS, TOWERS, layout_named
from mhacli.cli.help import HelpCommand, HelpGroup, examples, help_text
from mhacli.cli.numbers import Integer
from mhacli.cli.options import (
    HEAD_WIDTH,
    KV_HEADS,
    OUTPUT,
    QUERY_HEADS,
    ColourOptions,
    Force,
    command,
    number,
    option,
    option_group,
)
from mhacli.cli.shared.output import JSON, Formats, format_options, json_document, print_report
from mhacli.cli.streams import loading_torch, note, show_activity, write
from mhacli.errors import UsageError
from mhacli.io.files import check_target, write_whole
from mhacli.models.folder import Checkpoint, read_checkpoint
from mhacli.models.sizes import MAX_LAYERS
from mhacli.settings import MAX_HEADS, MAX_WIDTH, Config

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mhacli.attention.convert import Converted
    from mhacli.checkpoints.conversion import ConversionRequest
    from mhacli.render.base.options import Screen

CONVERT_SCHEMA = "mha.weights-convert/1"
_TENSORS, _HEADS = "Tensors", "Heads"
_LAYOUT = "Naming of the tensors. (default: from config.json)"
_PATH_HELP = "A folder with config.json and safetensors, or a .safetensors file."

_EXAMPLES = "mha weights info MiniLM", "mha weights convert MiniLM --layer 5 -o layer.safetensors"


class _Weights(HelpGroup):
    """The group of both commands; a path in place of a command means `info`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolves the command after putting `info` before a path."""
        if args[0] not in self.commands and lexists(args[0]):
            note(f"showing mha weights info {quote(args[0])}")
            args = ["info", *args]
        return super().resolve_command(ctx, args)


weights = typer.Typer(cls=_Weights, add_completion=False, suggest_commands=False)
"""The group of both commands."""


def _layout_option(text: str, *names: str) -> Any:
    return option(_TENSORS, text, *names, metavar="NAME", autocompletion=lambda: list(LAYOUTS))


@format_options(json=JSON)
class InfoFormats(Formats):
    """Formats of the contents of a checkpoint."""


@format_options(json=JSON)
class ConvertFormats(Formats):
    """Formats of the report of a conversion."""


@option_group
class InfoOptions:
    """The checkpoint, and whether to list its tensors."""

    path: Annotated[str, typer.Argument(help=_PATH_HELP, metavar="PATH", show_default=False)] = ""
    layout: Annotated[str | None, _layout_option(_LAYOUT, "--layout")] = None
    tensors: Annotated[bool, option(OUTPUT, "List every tensor.", "--tensors")] = False
    formats: InfoFormats


@option_group
class ConvertOptions:
    """The attention layer to convert, its sizes, and the file to write."""

    path: Annotated[str, typer.Argument(help=_PATH_HELP, metavar="PATH", show_default=False)] = ""
    layer: Annotated[
        int | None, number(_TENSORS, Integer(0, MAX_LAYERS), "Layer to convert. (default: 0)", "--layer")
    ] = None
    stack: Annotated[
        str | None,
        option(
            _TENSORS,
            "Which attention, if the model has several: encoder, decoder, cross, text or vision.",
            metavar="NAME",
            autocompletion=lambda: list(TOWERS),
        ),
    ] = None
    prefix: Annotated[
        str | None, option(_TENSORS, "Prefix of the tensor names, such as model.layers.3.self_attn.", metavar="TEXT")
    ] = None
    layout: Annotated[str | None, _layout_option(_LAYOUT, "--layout")] = None
    to: Annotated[
        str | None, _layout_option("Convert a weights file of mha back, to the tensor names of this layout.", "--to")
    ] = None
    no_embedding: Annotated[
        bool, option(_TENSORS, "Leave out embedding, vocabulary and learned positions.", "--no-embedding")
    ] = False
    heads: Annotated[
        int | None, number(_HEADS, Integer(1, MAX_HEADS), f"{QUERY_HEADS} (default: from config.json)")
    ] = None
    kv_heads: Annotated[
        int | None, number(_HEADS, Integer(1, MAX_HEADS), f"{KV_HEADS} (default: from config.json)")
    ] = None
    d_head: Annotated[
        int | None, number(_HEADS, Integer(1, MAX_WIDTH), f"{HEAD_WIDTH} (default: from config.json)")
    ] = None
    output: Annotated[str | None, option(OUTPUT, "File to write.", "--output", "-o", metavar="FILE")] = None
    force: Force = False
    formats: ConvertFormats


@weights.callback(invoke_without_command=True)
@examples(*_EXAMPLES)
def _group(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        write(help_text(context))


_INFO_HELP = "List the tensors, dtypes, heads and sizes of a checkpoint or a weights file. Reads headers only."
_CONVERT_HELP = (
    "Write one attention layer of a checkpoint as a weights file for --weights, or convert such a file back with --to."
)


@weights.command("info", cls=HelpCommand, help=_INFO_HELP)
@examples(*_EXAMPLES[:1], "mha weights info MiniLM --tensors")
@command
def contents(options: InfoOptions, colour: ColourOptions) -> None:
    """Prints the contents of a checkpoint by its headers, without torch."""
    from mhacli.commands.weights.contents import contents_of, to_json

    checkpoint_contents = contents_of(_checkpoint(options.path), layout=options.layout)

    def view(on: Screen) -> RenderableType:
        from mhacli.commands.weights.view import contents_view

        return contents_view(checkpoint_contents, on, with_tensors=options.tensors)

    formats = {"json": lambda: [to_json(checkpoint_contents, with_tensors=options.tensors)]}
    print_report(options.formats.chosen(), colour, formats=formats, view=view)
    for text in checkpoint_contents.notes:
        note(text)
    if sys.stdout.isatty() and options.formats.chosen() is None:
        from mhacli.cli.shared.next_steps import suggest_after_contents

        suggest_after_contents(checkpoint_contents)


@weights.command("convert", cls=HelpCommand, help=_CONVERT_HELP)
@examples(*_EXAMPLES[1:], 'mha run "the cat sat on the mat" --weights layer.safetensors')
@command
def convert(options: ConvertOptions, colour: ColourOptions) -> None:
    """Writes a file with one layer and prints how much its output differs from that of the source."""
    if not options.output:
        raise UsageError("no file to write is given", hint="add -o layer.safetensors")
    for name in (options.layout, options.to):
        if name is not None:
            layout_named(name)
    check_target(options.output, force=options.force)
    checkpoint = _checkpoint(options.path)
    is_ours = isinstance(checkpoint.metadata, dict) and checkpoint.metadata.get("format") == FORMAT
    if is_ours and options.to is None:
        raise UsageError(
            f"{options.path} is a weights file of mha already", hint="--to LAYOUT converts it to a checkpoint's layout"
        )
    document = _to_layout(options) if options.to is not None else _to_layer_file(checkpoint, options)

    def view(on: Screen) -> RenderableType:
        from mhacli.commands.weights.view import converted_view

        return converted_view(document)

    print_report(options.formats.chosen(), colour, formats={"json": lambda: json_document(document)}, view=view)
    for text in document["notes"]:
        note(text)


def _checkpoint(path: str) -> Checkpoint:
    if not path:
        raise UsageError(
            "no checkpoint is given", hint="try mha weights info DIR, a folder with config.json, or a .safetensors file"
        )
    with show_activity("reading headers"):
        return read_checkpoint(path)


def _to_layer_file(checkpoint: Checkpoint, options: ConvertOptions) -> dict[str, Any]:
    """Converts one layer of a checkpoint to a weights file of mha; the report as a document."""
    from mhacli.checkpoints.conversion import plan_conversion

    plan = plan_conversion(checkpoint, _conversion(options))
    with loading_torch():
        from mhacli.attention.convert import to_layer_file
    with show_activity("converting"):
        converted = to_layer_file(plan)
    origin = {"source": checkpoint.path, "layout": plan.layout.name, "stack": plan.stack, "layer": plan.layer}
    embedding = None if plan.embedding is None else {"rows": plan.n_tokens, "vocabulary": len(plan.vocabulary)}
    return _written(options, origin, plan.config, converted, embedding, plan.found.prefix, plan.notes)


def _to_layout(options: ConvertOptions) -> dict[str, Any]:
    """Converts a weights file of mha to the tensor names of a layout; the report as a document."""
    from mhacli.checkpoints.conversion import home_prefix

    for name in ("layout", "no_embedding"):
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} does not work with --to, which names the layout to write")
    sizes = {"n_heads": options.heads, "n_kv_heads": options.kv_heads, "d_head": options.d_head}
    source = read_layer_file(options.path, {name: value for name, value in sizes.items() if value is not None})
    layout, layer = layout_named(options.to or ""), options.layer or 0
    prefix = home_prefix(layout, options.stack, layer) if options.prefix is None else options.prefix
    with loading_torch():
        from mhacli.attention.convert import to_family_file
    with show_activity("converting"):
        converted = to_family_file(source, layout, prefix)
    origin = {
        "source": options.path,
        "layout": layout.name,
        "stack": options.stack or next(iter(layout.stacks)),
        "layer": layer,
    }
    notes = (
        "embedding, vocabulary, positions and mask are not part of the layout: the layer's tensors alone are written",
    )
    return _written(options, origin, source.config, converted, None, prefix, notes)


def _conversion(options: ConvertOptions) -> ConversionRequest:
    from mhacli.checkpoints.conversion import ConversionRequest

    sizes = {"n_heads": options.heads, "n_kv_heads": options.kv_heads, "d_head": options.d_head}
    return ConversionRequest(
        options.layer or 0, options.stack, options.layout, options.prefix,
        {name: value for name, value in sizes.items() if value is not None}, not options.no_embedding,
    )  # fmt: skip


def _written(
    options: ConvertOptions, origin: dict[str, Any], config: Config, converted: Converted, embedding: Any, prefix: str,
    notes: tuple[str, ...],
) -> dict[str, Any]:  # fmt: skip
    """Writes the file and returns the report as a document."""
    path = options.output or ""
    write_whole(path, converted.content, force=options.force)
    names = (
        "d_model", "n_heads", "n_kv_heads", "d_head", "d_v", "bias", "positions", "rope_theta", "max_positions", "causal",
        "window", "scale", "softcap", "dtype", "tokenizer",
    )  # fmt: skip
    check = converted.agreement
    return {
        "schema": CONVERT_SCHEMA,
        **origin,
        "prefix": prefix,
        "to": "mha" if options.to is None else options.to,
        "output": path,
        "n_bytes": len(converted.content),
        "config": {name: getattr(config, name) for name in names},
        "embedding": embedding,
        "check": {"max_abs_error": check.max_abs_error, "tolerance": check.tolerance, "ok": check.ok},
        "notes": list(notes),
    }
