"""`mha trace`: the shape walkthrough, site by site."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from mhacli.cli.options import (
    ColourOptions,
    DeviceOptions,
    LayerOptions,
    SourceOptions,
    TextOptions,
    command,
    option_group,
)
from mhacli.cli.shared.checkpoint import (
    ModelOptions,
    ModelTextOptions,
    model_request,
    require_one_layer,
    require_without_model,
)
from mhacli.cli.shared.output import (
    StepsOutput,
    print_record,
    print_report,
    require_self_check,
    save_record,
    tell_notes,
    with_output,
    write_pictures,
)
from mhacli.cli.shared.user_code import OwnOptions, require_of_target, target_in, walk_target
from mhacli.cli.streams import draw, life, loading_torch, note, read_key, screen
from mhacli.cli.values import triple, whole
from mhacli.errors import UsageError
from mhacli.io.memory import uncollected
from mhacli.render.base.options import ViewOptions
from mhacli.requests.checkpoint import ModelRequest
from mhacli.results.record.heads import Wanted

if TYPE_CHECKING:
    from mhacli.requests.layer import LayerRequest
    from mhacli.results.record.record import Record

_WALK = "Walkthrough"


@option_group
class WalkOptions:
    """What to walk, and how."""

    route: Annotated[
        Literal["separate", "fused", "per-head"],
        typer.Option(
            help="Which of the three ways to write it is walked; all three are compared.", rich_help_panel=_WALK
        ),
    ] = "separate"
    values: Annotated[
        bool,
        typer.Option(
            "--values",
            help="Each tensor's extremes, distribution and moments; small ones whole.",
            rich_help_panel=_WALK,
        ),
    ] = False
    cell: Annotated[
        str | None, typer.Option(metavar="HEAD,QUERY,KEY", help="Follow one number all the way.", rich_help_panel=_WALK)
    ] = None
    sequence: Annotated[
        int,
        typer.Option(
            parser=whole("sequence", 0, 10**9), metavar="N", help="The sequence of the cell.", rich_help_panel=_WALK
        ),
    ] = 0
    mask: Annotated[
        bool,
        typer.Option("--mask", help="Draw the mask alone, with its density; no layer is made.", rich_help_panel=_WALK),
    ] = False
    step: Annotated[
        bool, typer.Option("--step", help="Stop at each site until a key is pressed; q ends.", rich_help_panel=_WALK)
    ] = False


_OPTIONS = ViewOptions(figure="walk")
"""What pictures of a walk show, unless another figure is asked for."""


class _Telling(NamedTuple):
    """How a record is told, and where it goes."""

    walking: WalkOptions
    options: ViewOptions
    output: StepsOutput


@command
def trace(
    source: SourceOptions,
    text: TextOptions,
    layer: LayerOptions,
    device: DeviceOptions,
    model: ModelOptions,
    own: OwnOptions,
    walking: WalkOptions,
    output: StepsOutput,
) -> None:
    """Options in, the study `walk`, that of a checkpoint's layer or of somebody's attention, the walkthrough out."""
    cell = triple(walking.cell, "cell")
    save, has_format = output.save, output.formats.chosen() is not None
    if walking.step and (has_format or not (sys.stdout.isatty() and sys.stdin is not None and sys.stdin.isatty())):
        raise UsageError("step must have a terminal to read keys from, got none", hint="leave --step out")
    telling = _Telling(walking, with_output(_OPTIONS, output, others=save.files), output)
    if model.model is not None:
        _require_of_checkpoint(walking, own)
        wanted = Wanted(allow_nonfinite=layer.allow_nonfinite)
        of_model = model_request(model, ModelTextOptions(), source, text, layer, device, save, wanted)
        _walk_checkpoint(of_model, cell, telling)
        return
    require_without_model(**vars(model))
    target = target_in(source, own)
    if target is not None:
        require_of_target(
            (walking, ("values", "step")), (source, ("typed",)), (text, ()), (layer, ("causal", "seed")),
            (device, ("device",)), (save, ("save", "force")),
        )  # fmt: skip
        record = walk_target(target, own, layer=layer, device=device, values=walking.values)
        save_record(record, save)
        _tell(record, telling, ())
        return
    _walk_ours(cell, telling, source=source, text=text, layer=layer, device=device)


def _walk_ours(
    cell: tuple[int, int, int] | None,
    telling: _Telling,
    *,
    source: SourceOptions,
    text: TextOptions,
    layer: LayerOptions,
    device: DeviceOptions,
) -> None:
    """Texts, and a layer of our own: its walkthrough, or its mask alone."""
    walking, save = telling.walking, telling.output.save
    if walking.mask:
        _require_no_layer(telling, layer)
    from mhacli.cli.shared.request import make_request, require_memory, save_files
    from mhacli.requests.layer import CellIndex, require_inside

    request = make_request(source, text, layer, device, save)
    place = None if cell is None else CellIndex(walking.sequence, *cell)
    if place is not None:
        require_inside(place, request)
    if walking.mask:
        _draw_mask(request, telling.output)
        return
    require_memory(request)
    with loading_torch():
        from mhacli.compute.layer import trace as walk
    with life("computing"):
        record = walk.walk(request, route=walking.route, values=walking.values, place=place)
        save_files(record, request, save)
    _tell(record, telling, request.notes)


def _require_of_checkpoint(walking: WalkOptions, own: OwnOptions) -> None:
    """Raises `UsageError` for what is only there for a layer of our own: other ways to write it, and its mask alone."""
    if walking.route != "separate":
        raise UsageError("route must be left out with --model, whose own way is walked", hint="leave --route out")
    if own != OwnOptions():
        raise UsageError("arg, call-arg and time-limit must be of an attention of your own, got a model")
    if walking.mask:
        raise UsageError("mask must be of a layer of our own, got a model", hint="mha run --model tells its masks")


def _walk_checkpoint(request: ModelRequest, cell: tuple[int, int, int] | None, telling: _Telling) -> None:
    """The same of a layer of a checkpoint, the first where none is chosen."""
    from mhacli.requests.layer import CellIndex

    require_one_layer(request, "a walk")
    with loading_torch():
        from mhacli.compute.checkpoint.prepare import prepare_checkpoint
        from mhacli.compute.checkpoint.trace import walk_checkpoint
    with life("loading the checkpoint"), uncollected():
        look, notes = prepare_checkpoint(request)
    place = None if cell is None else CellIndex(telling.walking.sequence, *cell)
    with life("computing"):
        record = walk_checkpoint(look, values=telling.walking.values, place=place)
    save_record(record, telling.output.save)
    _tell(record, telling, notes)


def _tell(record: Record, telling: _Telling, notes: Sequence[str]) -> None:
    """The record in the pictures that were asked for, and on stdout, as JSON or as a walkthrough; and whether it holds together.
    What is odd about somebody's own attention is no fault of the walk."""
    output, name = telling.output, telling.output.formats.chosen()
    drawn = write_pictures(record, telling.options, output)
    if name is not None:
        print_record(record, telling.options, name, output.colour)
    else:
        _walk_through(record, output.colour, step=telling.walking.step)
    if record.module is None:
        require_self_check(record)
    tell_notes(record, (*notes, *drawn))


def _require_no_layer(telling: _Telling, layer: LayerOptions) -> None:
    """Raises `UsageError` for options of a walk, which drawing the mask alone does not take."""
    from mhacli.cli.shared.request import require_alone

    walking, save, pictures = telling.walking, telling.output.save, telling.output.pictures
    given = {
        "--cell": walking.cell, "--values": walking.values, "--step": walking.step, "--save": save.save,
        "--save-weights": save.save_weights, "--keep": save.keep, "--score-bias": layer.score_bias,
        "--html": pictures.html, "--svg": pictures.svg, "--png": pictures.png,
    }  # fmt: skip
    require_alone("mask must be drawn alone", given, "no layer is made")


def _draw_mask(request: LayerRequest, output: StepsOutput) -> None:
    from mhacli.cli.shared.request import record_command
    from mhacli.render.run.view import mask_document, mask_view

    with loading_torch():
        from mhacli.compute.layer.mask import survey_mask
    survey = survey_mask(request)
    print_report(
        output.formats.chosen(),
        output.colour,
        formats={"json": lambda: [mask_document(survey, record_command())]},
        view=lambda on: mask_view(survey, on),
    )
    for said in request.notes:
        note(said)


def _walk_through(record: Record, colour: ColourOptions, *, step: bool) -> None:
    from mhacli.render.run.trace import closing, step_blocks

    on = screen(colour.color)
    for number, block in enumerate(step_blocks(record, on)):
        draw(block, on)
        if step and number and read_key("(any key: next site, q: to the end)") in ("q", "Q", "\x1b"):
            break
    draw(closing(record, on), on)
