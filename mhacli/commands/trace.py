"""`mha trace`: every step of attention with its shape, site by site."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from os.path import isdir, isfile
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from mhacli.cli.console import draw, loading_torch, note, read_key, show_activity
from mhacli.cli.help import examples
from mhacli.cli.numbers import MAX_SECONDS, Integer, Real
from mhacli.cli.options import (
    ARG,
    CALL_ARG,
    TIME_LIMIT,
    VERBOSE,
    DeviceOptions,
    LayerOptions,
    SourceOptions,
    TextOptions,
    command,
    number,
    offers,
    option,
    option_group,
)
from mhacli.cli.output import (
    COLOUR,
    PICTURES,
    SAVED,
    Output,
    note_written,
    print_notes,
    print_record,
    print_report,
    require_self_check,
    save_record,
    with_output,
    write_pictures,
)
from mhacli.cli.shared.checkpoint import (
    ComputeRequest,
    ModelOptions,
    ModelTextOptions,
    model_request,
    require_one_layer,
    require_without_model,
)
from mhacli.cli.values import are_literal, pairs, triple
from mhacli.errors import UsageError
from mhacli.io.memory import uncollected
from mhacli.record.heads import HeadsRequest
from mhacli.render.base.options import ViewOptions
from mhacli.requests.checkpoint import ModelRequest

if TYPE_CHECKING:
    from mhacli.record.record import Record
    from mhacli.render.base.options import Screen
    from mhacli.requests.layer import LayerRequest
    from mhacli.usercode.target import TargetRequest

_WALK = "Walkthrough"
_OWN = "Your own attention"
_NAME = re.compile(r"[^\s:]+:[^\W\d][\w.]*")
_JOB = "mhacli.compute.user_trace.trace:trace_request"


@option_group
class WalkOptions:
    """The implementation or cell to trace, and its view."""

    route: Annotated[
        Literal["separate", "fused", "per-head"],
        option(_WALK, "Implementation to trace; all three are compared."),
    ] = "separate"
    values: Annotated[
        bool,
        option(_WALK, "Show the range and distribution of each tensor, and small ones whole.", "--values"),
    ] = False
    cell: Annotated[
        str | None,
        option(
            _WALK,
            "Show only how this attention weight is computed; not for FILE.py:NAME.",
            metavar="HEAD,QUERY,KEY",
            common=True,
        ),
    ] = None
    sequence: Annotated[int, option(_WALK, "Sequence of --cell.", click_type=Integer(0, 10**9), metavar="N")] = 0
    verbose: Annotated[bool, option(_WALK, VERBOSE, "--verbose", common=True)] = False
    mask: Annotated[bool, option(_WALK, "Draw only the mask, with its density.", "--mask", common=True)] = False
    step: Annotated[bool, option(_WALK, "Wait for a key after each step; q quits.", "--step")] = False


@option_group
class UserModuleOptions:
    """How to build and call a user's attention, if TEXT names one."""

    arg: Annotated[
        list[str] | None,
        option(
            _OWN,
            ARG,
            "--arg",
            metavar="NAME=VALUE",
            common=True,
        ),
    ] = None
    call_arg: Annotated[
        list[str] | None,
        option(_OWN, CALL_ARG, "--call-arg", metavar="NAME=VALUE"),
    ] = None
    time_limit: Annotated[
        float | None,
        number(_OWN, Real(high=MAX_SECONDS, above=0), f"{TIME_LIMIT} (default: 5)", metavar="SECONDS"),
    ] = None


_OPTIONS = ViewOptions(figure="walk")
"""The default figure of a trace."""


class _Presentation(NamedTuple):
    """The view and output of a record."""

    walking: WalkOptions
    options: ViewOptions
    output: Output


@examples(
    'mha trace "the cat sat on the mat"',
    'mha trace "the cat sat on the mat" --cell 0,5,2',
    'mha trace "the cat sat on the mat" --model MiniLM --layer 5',
    "mha trace my_attention.py:MultiHeadAttention --arg n_heads=4",
)
@command
def trace(
    source: SourceOptions,
    text: TextOptions,
    layer: LayerOptions,
    device: DeviceOptions,
    model: ModelOptions,
    user_code: UserModuleOptions,
    walking: WalkOptions,
    output: Annotated[Output, offers("json", *SAVED, *PICTURES, *COLOUR)],
) -> None:
    """Traces a layer of mha, a layer of a checkpoint or a user's attention, and prints the steps."""
    cell = triple(walking.cell, "cell")
    has_format = output.format is not None
    if walking.step and (has_format or not (sys.stdout.isatty() and sys.stdin is not None and sys.stdin.isatty())):
        raise UsageError("--step needs a terminal to read keys from", hint="leave out --step")
    presentation = _Presentation(walking, with_output(_OPTIONS, output), output)
    if model.model is not None:
        _require_checkpoint_options(walking, user_code)
        heads_request = HeadsRequest(allow_nonfinite=layer.allow_nonfinite)
        compute_request = ComputeRequest(source, text, layer, device, model, ModelTextOptions(), output)
        _trace_checkpoint(model_request(compute_request, heads_request), cell, presentation)
        return
    require_without_model(**vars(model))
    target = target_in(source, user_code)
    if target is not None:
        if walking.cell is not None:
            raise UsageError(
                f"--cell needs a text, not {target}: a trace of code keeps shapes and ranges, not its numbers",
                hint=f"mha check {shlex.quote(target)} compares its numbers with the reference",
            )
        require_of_target(
            (walking, ("values", "verbose", "step")), (source, ("typed",)), (text, ()), (layer, ("causal", "seed")),
            (device, ("device",)), (output, ("json", "csv", "save", "force", *PICTURES, *COLOUR)),
        )  # fmt: skip
        record = walk_target(target, user_code, layer=layer, device=device, values=walking.values)
        save_record(record, output)
        _present(record, presentation, ())
        if output.on_terminal:
            from mhacli.cli.next_steps import suggest

            arguments = [word for argument in user_code.arg or () for word in ("--arg", argument)]
            suggest(["mha", "check", target, *arguments], "whether it is right, and if not, which mistake it makes")
        return
    _trace_layer(cell, presentation, source=source, text=text, layer=layer, device=device)


def _trace_layer(
    cell: tuple[int, int, int] | None,
    presentation: _Presentation,
    *,
    source: SourceOptions,
    text: TextOptions,
    layer: LayerOptions,
    device: DeviceOptions,
) -> None:
    """Traces a layer of mha and prints the steps, or only its mask."""
    walking, output = presentation.walking, presentation.output
    if walking.mask:
        _require_no_layer(presentation, layer)
    from mhacli.cli.shared.request import make_request, require_cpu_memory, save_files
    from mhacli.requests.layer import CellIndex, require_inside

    request = make_request(source, text, layer, device, output)
    cell_index = None if cell is None else CellIndex(walking.sequence, *cell)
    if cell_index is not None:
        require_inside(cell_index, request)
    if walking.mask:
        _draw_mask(request, presentation.output)
        return
    require_cpu_memory(request)
    with loading_torch():
        from mhacli.compute.layer import trace as walk
    with show_activity("computing"):
        record = walk.walk(request, route=walking.route, values=walking.values, place=cell_index)
        save_files(record, request, output)
    _present(record, presentation, request.notes)
    if output.on_terminal and cell_index is None:
        from mhacli.cli.next_steps import suggest_cell

        suggest_cell(record, ViewOptions())


def _require_checkpoint_options(walking: WalkOptions, user_code: UserModuleOptions) -> None:
    """Raises `UsageError` for options that a checkpoint does not support: other implementations, and only the mask."""
    if walking.route != "separate":
        raise UsageError("--route does not work with --model, which has its own", hint="leave out --route")
    if user_code != UserModuleOptions():
        raise UsageError("--arg, --call-arg and --time-limit are for code of your own and do not work with --model")
    if walking.mask:
        raise UsageError(
            "--mask does not work with --model", hint="mha run TEXT --model DIR names the masks of its layers"
        )


def _trace_checkpoint(request: ModelRequest, cell: tuple[int, int, int] | None, presentation: _Presentation) -> None:
    """Traces a layer of a checkpoint, the first by default, and prints the steps."""
    from mhacli.requests.layer import CellIndex

    require_one_layer(request, "mha trace")
    with loading_torch():
        from mhacli.compute.checkpoint.prepare import prepare_checkpoint
        from mhacli.compute.checkpoint.trace import walk_checkpoint
    with show_activity("loading the checkpoint"), uncollected():
        prepared, notes = prepare_checkpoint(request)
    cell_index = None if cell is None else CellIndex(presentation.walking.sequence, *cell)
    with show_activity("computing"):
        record = walk_checkpoint(prepared, values=presentation.walking.values, place=cell_index)
    save_record(record, presentation.output)
    _present(record, presentation, notes)


def _present(record: Record, presentation: _Presentation, notes: Sequence[str]) -> None:
    """Draws the requested pictures, prints the record as JSON or as steps, and checks it. Errors in a user's attention are not
    errors of the trace, so its record is not checked."""
    output = presentation.output
    write_pictures(record, presentation.options, output)
    if output.format is not None:
        print_record(record, presentation.options, output)
    else:
        _print_steps(record, output.screen, presentation.walking)
    if record.module is None:
        require_self_check(record)
    print_notes(record, notes)
    note_written(output)


def _require_no_layer(presentation: _Presentation, layer: LayerOptions) -> None:
    """Raises `UsageError` for options that `--mask` does not use."""
    from mhacli.cli.shared.request import require_alone

    walking, output = presentation.walking, presentation.output
    excluded = {
        "--cell": walking.cell, "--values": walking.values, "--step": walking.step, "--save": output.save,
        "--save-weights": output.save_weights, "--keep": output.keep, "--score-bias": layer.score_bias,
        "--html": output.html, "--svg": output.svg, "--png": output.png,
    }  # fmt: skip
    require_alone("--mask", excluded, "only the mask is drawn, without a layer")


def _draw_mask(request: LayerRequest, output: Output) -> None:
    from mhacli.cli.shared.request import record_command
    from mhacli.render.run.mask import mask_document, mask_view

    with loading_torch():
        from mhacli.compute.layer.trace import summarise_mask
    survey = summarise_mask(request)
    print_report(output, view=lambda on: mask_view(survey, on), json=lambda: [mask_document(survey, record_command())])
    for text in request.notes:
        note(text)


def _print_steps(record: Record, on: Screen, walking: WalkOptions) -> None:
    """Prints a cell, or a line for each step, or with `--verbose`, `--values` or `--step` a block for each step."""
    from mhacli.render.run.steps import step_lines
    from mhacli.render.run.trace import cell_view, closing, step_blocks

    has_blocks = walking.verbose or walking.values or walking.step
    if record.cell is not None and not has_blocks:
        draw(cell_view(record, record.cell, on), on)
        return
    if not has_blocks:
        draw(step_lines(record, on), on)
        draw(closing(record, on), on)
        return
    for n, block in enumerate(step_blocks(record, on)):
        draw(block, on)
        if walking.step and n and read_key("(any key: next site, q: to the end)") in ("q", "Q", "\x1b"):
            break
    draw(closing(record, on), on)


# ----------------------------------------------------------------------------------------- attention of the user's own


def target_in(source: SourceOptions, user_code: UserModuleOptions) -> str | None:
    """The target that the first word names, None if the words are texts. Raises `UsageError` for options that need a target, for
    a text after a target, and for a Python file without `:NAME`, listing its classes."""
    words = [] if are_literal() else source.typed or []
    if len(words) == 1 and words[0].endswith(".py") and isfile(words[0]):
        from mhacli.usercode.target import split_target

        split_target(words[0])
    target_options = {"--arg": user_code.arg, "--call-arg": user_code.call_arg, "--time-limit": user_code.time_limit}
    option_given = next((option for option, value in target_options.items() if value is not None), None)
    if words and (names_target(words[0]) or (option_given is not None and _NAME.fullmatch(words[0]))):
        if len(words) > 1:
            hint = f"if {shlex.quote(words[0])} is a text, put -- before the texts"
            raise UsageError(
                f"{words[0]} names code to trace, which takes no text, but {words[1][:80]!r} follows", hint=hint
            )
        return words[0]
    if option_given is not None:
        raise UsageError(
            f"{option_given} needs code to trace, FILE.py:NAME or package.module:NAME",
            hint="try mha trace my.py:Attention --arg d_model=64",
        )
    return None


def names_target(word: str) -> bool:
    """Whether a word is `FILE.py:NAME` or `package.module:NAME` and not a text.

    After the colon comes an identifier. The word has no blanks, unless the file exists; a module without a dot must exist.

    >>> [names_target(word) for word in ("my.py:Attention", "torch.nn:Linear", "Re:Zero", "12:30", "so it is: good")]
    [True, True, False, False, False]
    """
    module, _, name = word.rpartition(":")
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    if module.endswith(".py"):
        return not any(character.isspace() for character in word) or isfile(module)
    parts = module.split(".")
    return all(part.isidentifier() for part in parts) and (len(parts) > 1 or _is_found(module))


def _is_found(module: str) -> bool:
    """Whether a module of that name exists in this folder or is installed. Nothing is imported."""
    return isfile(f"{module}.py") or isdir(module) or importlib.util.find_spec(module) is not None


def require_of_target(*groups: tuple[object, tuple[str, ...]]) -> None:
    """Raises `UsageError` for options that do not apply to a target. Each group comes with its fields that do."""
    for group, applicable in groups:
        for field in fields(group):  # type: ignore[arg-type]
            if field.name not in applicable and getattr(group, field.name) != field.default:
                raise UsageError(
                    f"--{field.name.replace('_', '-')} does not work with your own code, which sets this itself",
                    hint="--arg NAME=VALUE sets an argument of its constructor, --call-arg NAME=VALUE one of its call",
                )


def walk_target(
    target: str, user_code: UserModuleOptions, *, layer: LayerOptions, device: DeviceOptions, values: bool
) -> Record:
    """The record of the trace, made in a child process. Raises `MhaError` for a target that cannot be imported or called."""
    from mhacli.cli.shared.request import record_command
    from mhacli.io.data import decode, load_json
    from mhacli.record.record import Record
    from mhacli.usercode.process import run_in_child
    from mhacli.usercode.target import DEFAULT_TIME_LIMIT_S, require_readable

    require_readable(target)
    target_request = _request(target, user_code, layer=layer, device=device)
    job: dict[str, Any] = {"of": asdict(target_request), "values": values, "command": list(record_command())}
    limit_s = DEFAULT_TIME_LIMIT_S if user_code.time_limit is None else user_code.time_limit
    with show_activity(f"walking {target}"):
        outcome = run_in_child(_JOB, job, time_limit_s=limit_s)
    record = decode(Record, load_json(outcome.result, target), target)
    module = record.module
    return replace(record, module=None if module is None else replace(module, printed=outcome.printed))


def _request(target: str, user_code: UserModuleOptions, *, layer: LayerOptions, device: DeviceOptions) -> TargetRequest:
    from mhacli.usercode.target import TargetRequest

    return TargetRequest(
        target=target,
        arguments=pairs(user_code.arg, "arg"),
        call_arguments=pairs(user_code.call_arg, "call-arg"),
        causal=bool(layer.causal),
        device=_device(device.device),
        seed=layer.seed or 0,
    )


def _device(name: str | None) -> str:
    return "cpu" if name in (None, "auto") else str(name)
