"""What `run`, `trace`, `decode` and `show` share after the record: the format asked for, the notes, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mhacli.cli.options import ColourOptions, DrawingOptions, HeadsViewOptions, MachineOptions, SaveOptions
from mhacli.cli.streams import draw, note, screen, write_pieces
from mhacli.cli.values import index_list
from mhacli.errors import EXIT_CHECK, MhaError, UsageError
from mhacli.render.base.options import ViewOptions
from mhacli.results.record.heads import require_order

if TYPE_CHECKING:
    from mhacli.results.record.record import Record


def view_options(drawing: DrawingOptions, ranking: HeadsViewOptions) -> ViewOptions:
    """The drawing options as a renderer takes them. Raises `UsageError` for a list that is none, and for no order."""
    require_order(ranking.sort)
    return ViewOptions(
        view=drawing.view,
        heads=index_list(drawing.head, "head"),
        sequences=index_list(drawing.sequence, "sequence"),
        top=drawing.top,
        precision=drawing.precision,
        everything=drawing.all,
        maps=index_list(ranking.map, "map") or (),
        sort=ranking.sort,
    )


def require_one_format(*, json: bool, csv: bool) -> None:
    """Raises `UsageError` when two formats are asked for on one stdout."""
    if json and csv:
        raise UsageError("json and csv must not be given together: stdout holds one of them")


def output(record: Record, options: ViewOptions, machine: MachineOptions, colour: ColourOptions) -> None:
    """The record on stdout, in the format asked for. Raises `UsageError` for a table of a record that has no shares."""
    if record.module is not None and machine.csv:
        raise UsageError("csv must be of a record with shares, got a walk of somebody's attention", hint="try --json")
    if machine.json:
        from mhacli.render import json

        write_pieces(json.pieces(record))
    elif machine.csv:
        from mhacli.render import csv

        write_pieces(csv.pieces(record))
    elif record.module is not None:
        from mhacli.render.run.trace import closing, step_blocks

        on = screen(colour.color)
        for block in (*step_blocks(record, on), closing(record, on)):
            draw(block, on)
    else:
        from mhacli.render.checkpoint.view import layers_view
        from mhacli.render.heads.view import heads_view
        from mhacli.render.run.decode import decode_view
        from mhacli.render.run.view import run_view

        on = screen(colour.color)
        if record.decoding is not None and options.view == "matrix":
            view = decode_view
        elif record.model is not None:
            view = layers_view
        else:
            view = run_view if record.survey is None else heads_view
        draw(view(record, options, on), on)


def save_record(record: Record, save: SaveOptions) -> None:
    """The record in the file that was asked for, if any. Raises `MhaError` when it cannot be written."""
    if save.save is not None:
        record.save(save.save, force=save.force)


def tell_notes(record: Record, notes: Sequence[str]) -> None:
    """What a reader should know of a run that worked, on stderr: after the output, so that an error stands alone."""
    from mhacli.render.json import nonfinite
    from mhacli.results.record.record import NOT_SEEN

    for said in notes:
        note(said)
    for name, n_bad in nonfinite(record).items():
        note(f"{n_bad} numbers of {name} are NaN or Inf; the self-check compares the others")
    unseen = [name.removesuffix(NOT_SEEN) for name in record.not_kept if name.endswith(NOT_SEEN)]
    beyond = [name for name in record.not_kept if not name.endswith(NOT_SEEN)]
    if beyond:
        note(f"not kept, to stay within --keep-limit: {', '.join(beyond)}")
    if unseen:
        note(f"not kept, for the model does not show it: {', '.join(unseen)}")


def _difference(found: float | None) -> str:
    return "numbers that are not finite" if found is None else f"a difference of {found:.3g}"


def require_self_check(record: Record) -> None:
    """Raises `MhaError` with exit code 3 when the output does not follow from the pattern shown, or routes disagree."""
    for one in () if record.survey is None else record.survey.checks:
        if not one.ok:
            raise MhaError(
                f"the check '{one.name}' must hold within {one.tolerance:.3g}, got {_difference(one.error)}",
                code="self-check",
                exit_code=EXIT_CHECK,
            )
    if record.model is not None and record.model.identical_outputs is False:
        raise MhaError(
            "the model's outputs must be the same bits with and without inspection, got others",
            hint="a model whose outputs differ from pass to pass cannot be compared",
            code="self-check",
            exit_code=EXIT_CHECK,
        )
    check = record.self_check
    if not check.ok:
        rule = (
            "follow from the pattern shown"
            if record.decoding is None
            else "follow from the pattern shown and be that of a full recomputation"
        )
        raise MhaError(
            f"the output must {rule} within {check.tolerance:.3g}, got {_difference(check.max_abs_error)}",
            code="self-check",
            exit_code=EXIT_CHECK,
        )
    for route in record.routes:
        if not route.ok:
            raise MhaError(
                f"the route {route.route} must agree with the separate one within {route.tolerance:.3g}, got "
                f"{_difference(route.max_abs_difference)}",
                code="self-check",
                exit_code=EXIT_CHECK,
            )
