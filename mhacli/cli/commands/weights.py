"""`mha weights`: what a checkpoint or a weights file holds, and one attention out of it or back into its family's names."""

from __future__ import annotations

import sys
from os.path import lexists
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhacli.checkpoints.families import LAYOUTS, TOWERS, layout_named
from mhacli.checkpoints.folder import Checkpoint, read_checkpoint
from mhacli.checkpoints.head_counts import MAX_LAYERS
from mhacli.checkpoints.mha_weights import FORMAT, read_layer_file
from mhacli.cli.help import HelpCommand, HelpGroup, examples, help_text
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
from mhacli.cli.values import integer, whole
from mhacli.errors import UsageError
from mhacli.io.files import check_target, write_whole
from mhacli.spec.config import MAX_HEADS, MAX_WIDTH, Config

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
    """The group of both commands: a path in the place of one is taken for that of `info`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Puts `info` before a path."""
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
    """Formats of what a checkpoint holds."""


@format_options(json=JSON)
class ConvertFormats(Formats):
    """Formats of what was converted."""


@option_group
class InfoOptions:
    """What to look at, and how much of it to print."""

    path: Annotated[str, typer.Argument(help=_PATH_HELP, metavar="PATH", show_default=False)] = ""
    layout: Annotated[str | None, _layout_option(_LAYOUT, "--layout")] = None
    tensors: Annotated[bool, option(OUTPUT, "List every tensor.", "--tensors")] = False
    formats: InfoFormats


@option_group
class ConvertOptions:
    """Which attention to take out of what, and into which file."""

    path: Annotated[str, typer.Argument(help=_PATH_HELP, metavar="PATH", show_default=False)] = ""
    layer: Annotated[
        int | None, number(_TENSORS, whole("layer", 0, MAX_LAYERS), "Layer to convert. (default: 0)", "--layer")
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
        int | None, number(_HEADS, integer("n_heads", 1, MAX_HEADS), f"{QUERY_HEADS} (default: from config.json)")
    ] = None
    kv_heads: Annotated[
        int | None, number(_HEADS, integer("n_kv_heads", 1, MAX_HEADS), f"{KV_HEADS} (default: from config.json)")
    ] = None
    d_head: Annotated[
        int | None, number(_HEADS, integer("d_head", 1, MAX_WIDTH), f"{HEAD_WIDTH} (default: from config.json)")
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
def contents(wanted: InfoOptions, colour: ColourOptions) -> None:
    """A path in, what its headers say out. Needs no torch."""
    from mhacli.checkpoints.contents import contents_of, to_json

    checkpoint_contents = contents_of(_checkpoint(wanted.path), layout=wanted.layout)

    def view(on: Screen) -> RenderableType:
        from mhacli.render.reports.weights import contents_view

        return contents_view(checkpoint_contents, on, with_tensors=wanted.tensors)

    formats = {"json": lambda: [to_json(checkpoint_contents, with_tensors=wanted.tensors)]}
    print_report(wanted.formats.chosen(), colour, formats=formats, view=view)
    for text in checkpoint_contents.notes:
        note(text)
    if sys.stdout.isatty() and wanted.formats.chosen() is None:
        from mhacli.cli.shared.next_steps import suggest_after_contents

        suggest_after_contents(checkpoint_contents)


@weights.command("convert", cls=HelpCommand, help=_CONVERT_HELP)
@examples(*_EXAMPLES[1:], 'mha run "the cat sat on the mat" --weights layer.safetensors')
@command
def convert(wanted: ConvertOptions, colour: ColourOptions) -> None:
    """A path in, a file with one layer out, and how far it is from its source."""
    if not wanted.output:
        raise UsageError("no file to write is given", hint="add -o layer.safetensors")
    for name in (wanted.layout, wanted.to):
        if name is not None:
            layout_named(name)
    check_target(wanted.output, force=wanted.force)
    checkpoint = _checkpoint(wanted.path)
    is_ours = isinstance(checkpoint.metadata, dict) and checkpoint.metadata.get("format") == FORMAT
    if is_ours and wanted.to is None:
        raise UsageError(
            f"{wanted.path} is a weights file of mha already", hint="--to LAYOUT converts it to a checkpoint's layout"
        )
    document = _back(wanted) if wanted.to is not None else _forth(checkpoint, wanted)

    def view(on: Screen) -> RenderableType:
        from mhacli.render.reports.weights import converted_view

        return converted_view(document)

    print_report(wanted.formats.chosen(), colour, formats={"json": lambda: json_document(document)}, view=view)
    for text in document["notes"]:
        note(text)


def _checkpoint(path: str) -> Checkpoint:
    if not path:
        raise UsageError(
            "no checkpoint is given", hint="try mha weights info DIR, a folder with config.json, or a .safetensors file"
        )
    with show_activity("reading headers"):
        return read_checkpoint(path)


def _forth(checkpoint: Checkpoint, wanted: ConvertOptions) -> dict[str, Any]:
    """One layer of a checkpoint as a file of ours."""
    from mhacli.checkpoints.conversion import plan_conversion

    plan = plan_conversion(checkpoint, _conversion(wanted))
    with loading_torch():
        from mhacli.attention.convert import to_layer_file
    with show_activity("converting"):
        made = to_layer_file(plan)
    where = {"source": checkpoint.path, "layout": plan.layout.name, "stack": plan.stack, "layer": plan.layer}
    words = None if plan.embedding is None else {"rows": plan.n_tokens, "vocabulary": len(plan.vocabulary)}
    return _written(wanted, where, plan.config, made, words, plan.found.prefix, plan.notes)


def _back(wanted: ConvertOptions) -> dict[str, Any]:
    """A file of ours under the names of a family."""
    from mhacli.checkpoints.conversion import home_prefix

    for name in ("layout", "no_embedding"):
        if getattr(wanted, name):
            raise UsageError(f"--{name.replace('_', '-')} does not work with --to, which names the layout to write")
    given = {"n_heads": wanted.heads, "n_kv_heads": wanted.kv_heads, "d_head": wanted.d_head}
    source = read_layer_file(wanted.path, {name: value for name, value in given.items() if value is not None})
    layout, layer = layout_named(wanted.to or ""), wanted.layer or 0
    prefix = home_prefix(layout, wanted.stack, layer) if wanted.prefix is None else wanted.prefix
    with loading_torch():
        from mhacli.attention.convert import to_family_file
    with show_activity("converting"):
        made = to_family_file(source, layout, prefix)
    where = {
        "source": wanted.path,
        "layout": layout.name,
        "stack": wanted.stack or next(iter(layout.stacks)),
        "layer": layer,
    }
    notes = (
        "embedding, vocabulary, positions and mask are not part of the layout: the layer's tensors alone are written",
    )
    return _written(wanted, where, source.config, made, None, prefix, notes)


def _conversion(wanted: ConvertOptions) -> ConversionRequest:
    from mhacli.checkpoints.conversion import ConversionRequest

    given = {"n_heads": wanted.heads, "n_kv_heads": wanted.kv_heads, "d_head": wanted.d_head}
    return ConversionRequest(
        wanted.layer or 0, wanted.stack, wanted.layout, wanted.prefix,
        {name: value for name, value in given.items() if value is not None}, not wanted.no_embedding,
    )  # fmt: skip


def _written(
    wanted: ConvertOptions, where: dict[str, Any], config: Config, made: Converted, words: Any, prefix: str,
    notes: tuple[str, ...],
) -> dict[str, Any]:  # fmt: skip
    """Writes the file, and says what is in it."""
    path = wanted.output or ""
    write_whole(path, made.content, force=wanted.force)
    names = (
        "d_model", "n_heads", "n_kv_heads", "d_head", "d_v", "bias", "positions", "rope_theta", "max_positions", "causal",
        "window", "scale", "softcap", "dtype", "tokenizer",
    )  # fmt: skip
    check = made.agreement
    return {
        "schema": CONVERT_SCHEMA,
        **where,
        "prefix": prefix,
        "to": "mha" if wanted.to is None else wanted.to,
        "output": path,
        "n_bytes": len(made.content),
        "config": {name: getattr(config, name) for name in names},
        "embedding": words,
        "check": {"max_abs_error": check.max_abs_error, "tolerance": check.tolerance, "ok": check.ok},
        "notes": list(notes),
    }
