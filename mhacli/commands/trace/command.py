"""`mha trace`: every step of attention with its shape, site by site."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from os.path import isdir, isfile
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mhacli.cli.console import draw, flush, loading_torch, note, progress, replace_line
from mhacli.cli.output import (
    DRAWING,
    DRAWN,
    SAVED,
    Output,
    print_report,
    print_result,
    require_output,
)
from mhacli.cli.parameters import are_literal, command, layer_or_model, offers
from mhacli.cli.source import (
    make_run,
    record_command,
    recorded,
    require_in_config,
    require_one_layer,
    start,
)
from mhacli.errors import UsageError
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.run import Run, require_inside
from mhacli.settings import Computation, OwnCode, like, numbers, pairs, setting
from mhacli.text.tokens import Texts

if TYPE_CHECKING:
    from mhacli.record.record import Record

_WALK = "Walkthrough"
_OURS = ("layer", "model")
_PLACE = "HEAD,QUERY,KEY"
_OF_A_LAYER = (
    "cell",
    "values",
    "step",
    "save",
    "save_weights",
    "keep",
    "score_bias",
    "html",
    "svg",
    "png",
)


@dataclass(frozen=True, kw_only=True)
class Walk:
    """The implementation or cell to trace, and its view."""

    route: Literal["separate", "fused", "per-head"] = setting(
        "separate", _WALK, "Formulation to trace; all three give the same output.", modes=("layer",)
    )
    values: bool = setting(
        False, _WALK, "Show the range and distribution of each tensor, and small ones whole."
    )
    cell: tuple[int, int, int] | None = setting(
        None,
        _WALK,
        "Show only how this attention weight is computed; not for FILE.py:NAME.",
        parse=numbers(_PLACE, "0,5,1 (head 0, query 5 and key 1, counted from 0)"),
        metavar=_PLACE,
        common=True,
        modes=_OURS,
    )
    sequence: int = setting(0, _WALK, "Sequence of --cell.", low=0, high=10**9, modes=_OURS)
    verbose: bool = like(ViewOptions, "verbose", _WALK, common=True)
    mask: bool = setting(
        False,
        _WALK,
        "Draw only the mask, with its density.",
        common=True,
        modes=("layer",),
        excludes=_OF_A_LAYER,
    )
    step: bool = setting(False, _WALK, "Wait for a key after each step; q quits.")


def _target(given: Mapping[str, Any]) -> str | None:
    """The code that the first of the typed words names, None if they are texts. Raises `UsageError`
    for a text after it.
    """
    typed = given.get("typed")
    if given.get("path") is not None or not typed or are_literal() or not _names_code(typed[0]):
        return None
    if len(typed) > 1:
        message = (
            f"{typed[0]} names code to trace, which takes no text, but {typed[1][:80]!r} follows"
        )
        raise UsageError(message, hint="-- stands before texts")
    return str(typed[0])


def _names_code(word: str) -> bool:
    """Whether a word is `FILE.py`, `FILE.py:NAME` or `package.module:NAME` and not a text. A file
    has no blanks in its name, unless it exists; a module without a dot must exist.

    >>> [_names_code(word) for word in ("my.py:Attention", "torch.nn:Linear", "Re:Zero", "12:30")]
    [True, True, False, False]
    >>> _names_code("so it is: good")
    False
    """
    place, _, name = word.rpartition(":")
    if word.endswith(".py"):
        return isfile(word)
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    if place.endswith(".py"):
        return isfile(place) or " " not in place
    is_module = all(part.isidentifier() for part in place.split("."))
    return is_module and (
        "." in place or isfile(f"{place}.py") or isdir(place) or find_spec(place) is not None
    )  # imports nothing


@command(
    'mha trace "the cat sat on the mat"',
    'mha trace "the cat sat on the mat" --cell 0,5,2',
    'mha trace "the cat sat on the mat" --model MiniLM --layer 5',
    "mha trace my_attention.py:MultiHeadAttention --arg n_heads=4",
    modes=lambda given: "code" if _target(given) is not None else layer_or_model(given),
)
def trace(
    what: Computation,
    code: OwnCode,
    walk: Walk,
    options: Annotated[ViewOptions, offers(*DRAWING)],
    output: Annotated[Output, offers("json", *SAVED, *DRAWN)],
) -> None:
    """Traces a layer of mha, a layer of a checkpoint or a user's attention, and prints the
    steps.
    """
    has_keys = sys.stdout.isatty() and sys.stdin is not None and sys.stdin.isatty()
    if walk.step and (output.format is not None or not has_keys):
        raise UsageError("--step needs a terminal to read keys from")
    options = replace(options, figure=options.figure or "walk")
    require_output(options, output)
    run: Run | None = None
    notes: tuple[str, ...] = ()
    target = _target({"typed": what.typed, "path": what.model.path})
    if target is not None:
        record = _walk_code(target, code, what.given, has_values=walk.values)
    else:
        require_one_layer(what.model, "mha trace")
        if walk.cell is not None:
            words = f"--cell {','.join(map(str, walk.cell))}: head"
            require_in_config(what.model, words, walk.cell[:1])
        run, texts = make_run(what, keep=output.keep, keep_limit=output.keep_limit)
        if walk.mask:
            _print_mask(run, texts, output)
            return
        place = None if walk.cell is None else (walk.sequence, *walk.cell)
        if place is not None and run.model.path is None:
            queries = [text.ids for text in texts.sequences]
            keys = [text.ids for text in texts.context or texts.sequences]
            require_inside(place, run.config.n_heads, queries, keys)
        if (
            run.checkpoint is not None
            and run.checkpoint.is_random
            and not walk.values
            and place is None
        ):
            run = replace(run, model=replace(run.model, device="meta"), keep=())
        prepared, notes = start(run, ViewOptions())
        with progress("computing"):
            if prepared is None:
                from mhacli.layer import steps as of_layer

                record = of_layer.walk(
                    run, texts, route=walk.route, values=walk.values, place=place
                )
            else:
                from mhacli.models.steps import walk_checkpoint

                record = walk_checkpoint(prepared, values=walk.values, place=place)
        record = recorded(record)
    view = partial(_print_steps, record, output.screen, walk)
    print_result(record, notes, options=options, output=output, run=run, view=view)


def _print_mask(run: Run, texts: Texts, output: Output) -> None:
    """Prints the mask of a run."""
    from mhacli.render.run.trace import mask_document, mask_view

    with loading_torch():
        from mhacli.layer.steps import masks_of
    masks = masks_of(run, texts)
    document = partial(mask_document, run.dims, texts, masks, record_command())
    print_report(output, view=partial(mask_view, run.dims, texts, masks), json=document)
    for text in run.notes:
        note(text)


def _print_steps(record: Record, screen: Screen, walk: Walk) -> None:
    """Prints a cell, or a line for each step, or with `--verbose`, `--values` or `--step` a block
    for each step.
    """
    from mhacli.render.run import trace

    in_detail = walk.verbose or walk.values or walk.step
    first, *steps, end = trace.walk(record, screen, in_detail=in_detail)
    draw(first, screen)
    for step in steps:
        draw(step, screen)
        if walk.step:
            flush()
            replace_line("(any key: next step, q: to the end) …")
            key = typer.getchar()
            replace_line("")
            if key in ("q", "Q", "\x1b"):
                break
    draw(end, screen)


def _walk_code(target: str, code: OwnCode, given: Mapping[str, Any], *, has_values: bool) -> Record:
    """The record of code of the user's own, made in a child process. Raises `MhaError` for code
    that cannot be imported or called.
    """
    from mhacli.io.data import decode
    from mhacli.record.record import Record
    from mhacli.usercode.process import run_in_child
    from mhacli.usercode.target import TargetRequest, require_readable

    require_readable(target)
    request = TargetRequest(
        target,
        pairs(code.arg, "arg"),
        pairs(code.call_arg, "call-arg"),
        example=code.example,
        **given,
    )
    if request.device == "auto":
        request = replace(request, device="cpu")
    job: dict[str, Any] = {
        "target": asdict(request),
        "values": has_values,
        "command": list(record_command()),
    }
    with progress(f"walking {target}") as report_progress:
        document, printed = run_in_child(
            "mhacli.commands.trace.user_code:trace_request",
            job,
            time_limit_s=code.time_limit,
            on_stage=report_progress,
        )
    document["module"]["printed"] = printed
    return decode(Record, document, target)
