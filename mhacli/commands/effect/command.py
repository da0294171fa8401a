"""`mha effect`: what changes when heads or single attention weights are removed."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from mhacli.cli.console import flush, loading_torch, note, progress, show_activity
from mhacli.cli.help import examples
from mhacli.cli.numbers import Integer
from mhacli.cli.options import (
    DeviceOptions,
    Everything,
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
    Output,
    print_record,
    print_result,
    save_record,
    with_output,
)
from mhacli.cli.shared.checkpoint import (
    ComputeRequest,
    ModelOptions,
    ModelTextOptions,
    Spans,
    model_request,
    require_without_model,
)
from mhacli.cli.values import index_list
from mhacli.errors import UsageError
from mhacli.io.files import format_size
from mhacli.io.interrupts import more_time
from mhacli.io.memory import uncollected
from mhacli.record.heads import HeadsRequest
from mhacli.render.base.format import count_of, seconds_text
from mhacli.render.base.options import ViewOptions
from mhacli.settings import MAX_LENGTH

if TYPE_CHECKING:
    from mhacli.commands.effect.request import HeadChoice
    from mhacli.commands.effect.run import Cost
    from mhacli.commands.effect.study import EffectStudy
    from mhacli.record.record import Record

_REMOVED, _MEASURED = "Removal", "Measurement"
_ANNOUNCED_S, _PRINTING_S = 2.0, 5.0
"""The predicted time from which it is printed, and the time for printing the finished part of an interrupted run."""


@option_group
class RemovalOptions:
    """The heads or attention weights to remove."""

    head: Annotated[
        str | None,
        option(
            _REMOVED,
            "Remove these heads, one at a time and all together, such as 5.1,6.3 (LAYER.HEAD); without --model, such "
            "as 0,2. (default: every head, one at a time)",
            metavar="LIST",
            common=True,
        ),
    ] = None
    edges: Annotated[
        bool,
        option(
            _REMOVED,
            "Remove single attention weights instead: those of the query at --position, one key at a time, in each "
            "--head or layer.",
            "--edges",
            common=True,
        ),
    ] = False
    cut: Annotated[
        str | None,
        option(
            _REMOVED,
            "Hide span A from span B: no token of B sees a token of A, in all chosen layers at once. --span names the spans.",
            metavar="A:B",
        ),
    ] = None
    replace: Annotated[
        Literal["zero", "mean", "resample"] | None,
        option(
            _REMOVED,
            "Replace the output of a removed head by zeros, its mean over the text, or its output for --with. (default: zero)",
            common=True,
        ),
    ] = None
    screen: Annotated[
        int | None,
        number(
            _REMOVED,
            Integer(1, 100_000),
            "Estimate all heads by one backward pass, then remove only the K with the largest estimates and K random "
            "others. (default: remove all)",
            metavar="K",
        ),
    ] = None
    other: Annotated[
        str | None,
        option(
            _REMOVED,
            "Text for --replace resample; its tokens must correspond to those of TEXT.",
            "--with",
            metavar="TEXT",
        ),
    ] = None
    at: Annotated[
        int | None,
        number(_REMOVED, Integer(0, MAX_LENGTH), "Remove heads only at this position. (default: at all positions)"),
    ] = None


@option_group
class MeasurementOptions:
    """The logit to measure, its position, and the checks of the effects."""

    target: Annotated[
        str | None,
        option(
            _MEASURED,
            "Measure the logit of this token. (default: the one that the model predicts)",
            metavar="TOKEN",
            common=True,
        ),
    ] = None
    versus: Annotated[
        str | None,
        option(_MEASURED, "Measure the logit of the target minus that of this token.", metavar="TOKEN"),
    ] = None
    position: Annotated[
        int | None,
        number(
            _MEASURED,
            Integer(-MAX_LENGTH, MAX_LENGTH),
            "Measure at this token. (default: the first [MASK], else the last token)",
            common=True,
        ),
    ] = None
    target_first: Annotated[
        bool, option(_MEASURED, "If the target has several tokens, take the first.", "--target-first")
    ] = False
    judge: Annotated[
        bool,
        option(_MEASURED, "Measure how well attention weights and other common scores rank the effects.", "--judge"),
    ] = False
    verify: Annotated[
        int,
        number(_MEASURED, Integer(1, 10_000), "Number of removals to verify by a second, different computation."),
    ] = 4


@option_group
class EffectText(TextOptions):
    """The options of texts, and the spans for `--cut`."""

    span: Spans = None


@option_group
class EffectOutput(Output):
    """The files, format and colour of the record."""

    all: Everything = False


@examples(
    'mha effect "the cat sat on the mat" --model MiniLM',
    'mha effect "the cat sat on the mat" --model MiniLM --edges --head 5.1',
    'mha effect "the cat sat on the mat" --heads 4 --edges',
    'mha effect "cat on mat" --model MiniLM --span a=/cat/ --span b=/mat/ --cut a:b',
)
@command
def effect(
    source: SourceOptions,
    text: EffectText,
    removal: RemovalOptions,
    measurement: MeasurementOptions,
    layer: LayerOptions,
    model: ModelOptions,
    device: DeviceOptions,
    output: Annotated[
        EffectOutput,
        offers("json", "save", "force", "all", "html", "svg", "png", *COLOUR, csv="Print CSV: a line per removal."),
    ],
) -> None:
    """Computes the effects, saves the record and prints it."""
    from mhacli.commands.effect.request import option_of, require_one_removal

    require_one_removal(option_of, **vars(removal) | {"heads": removal.head, "judge": measurement.judge})
    if text.span and removal.cut is None:
        raise UsageError("--span names parts of the text for --cut", hint="add --cut A:B, or leave --span out")
    saving = replace(output, keep="")
    options = with_output(ViewOptions(everything=output.all), output)
    effect_options = _EffectOptions(source, text, removal, measurement, layer, model, device, saving, output)
    record, notes = _layer_effects(effect_options) if model.model is None else _checkpoint_effects(effect_options)
    save_record(record, output)
    print_result(record, notes, options=options, output=output)
    if output.on_terminal:
        from mhacli.cli.next_steps import after_effect

        after_effect(record, output)


class _EffectOptions(NamedTuple):
    """The option groups of the computation."""

    source: SourceOptions
    text: EffectText
    removal: RemovalOptions
    measurement: MeasurementOptions
    layer: LayerOptions
    model: ModelOptions
    device: DeviceOptions
    saving: Output
    output: EffectOutput


def _layer_effects(options: _EffectOptions) -> tuple[Record, tuple[str, ...]]:
    removal, measurement = options.removal, options.measurement
    only: dict[str, object] = {
        "target": measurement.target,
        "versus": measurement.versus,
        "target_first": measurement.target_first,
    }
    only |= {"screen": removal.screen, "judge": measurement.judge, "with_": removal.other}
    require_without_model(**vars(options.model), **only, cut=removal.cut, span=options.text.span)
    heads = index_list(removal.head, "head")
    from mhacli.cli.shared.request import make_request, require_cpu_memory, require_heads
    from mhacli.commands.effect.request import LayerEffectRequest

    request = make_request(options.source, options.text, options.layer, options.device, options.saving)
    require_cpu_memory(request)
    require_heads(heads, request, options.layer)
    effect_request = LayerEffectRequest(
        request,
        heads=heads,
        edges=removal.edges,
        replace="mean" if removal.replace == "mean" else "zero",
        at=removal.at,
        position=measurement.position,
        n_verified=measurement.verify,
    )
    with loading_torch():
        from mhacli.commands.effect.layer import layer_effects
    with show_activity("computing"):
        return layer_effects(effect_request), request.notes


def _checkpoint_effects(options: _EffectOptions) -> tuple[Record, tuple[str, ...]]:
    from mhacli.commands.effect.request import EffectRequest

    removal, measurement = options.removal, options.measurement
    request = EffectRequest(
        model_request(
            ComputeRequest(
                options.source,
                options.text,
                options.layer,
                options.device,
                options.model,
                ModelTextOptions(span=options.text.span),
                options.saving,
            ),
            HeadsRequest(),
        ),
        heads=head_choices(removal.head),
        edges=removal.edges,
        cut=cut_names(removal.cut),
        replace=removal.replace or "zero",
        other=removal.other,
        at=removal.at,
        position=measurement.position,
        target=measurement.target,
        versus=measurement.versus,
        target_first=measurement.target_first,
        n_verified=measurement.verify,
        n_screened=removal.screen,
        judge=measurement.judge,
    )
    with loading_torch():
        from mhacli.commands.effect.study import prepare_effect
    with show_activity("loading the checkpoint"), uncollected():
        study, notes = prepare_effect(request)
    with show_activity("inspecting the layers"):
        cost = study.inspect()
    _announce(cost)
    try:
        with progress() as report_progress:
            study.run(report_progress)
    except KeyboardInterrupt:
        _print_finished(options, study)
        raise
    return study.record(), notes


def _announce(cost: Cost) -> None:
    """Prints the predicted time and memory of many removals."""
    if cost.seconds > _ANNOUNCED_S:
        note(
            f"{count_of(cost.n_removals, 'removal', grouped=True)}: about {seconds_text(cost.seconds)}, "
            f"and at most {format_size(cost.peak_bytes)} in addition to the weights"
        )


def _print_finished(options: _EffectOptions, study: EffectStudy) -> None:
    """Prints the finished effects of an interrupted run; nothing is saved."""
    n_finished = len(study.effects.results)
    if n_finished and options.output.format is None:
        more_time(_PRINTING_S)
        print_record(study.record(), ViewOptions(everything=options.output.all), options.output)
        flush()
    note(f"interrupted: {n_finished} of {len(study.effects.plan)} removals are finished, and nothing was saved")


def head_choices(word: str | None) -> tuple[HeadChoice, ...] | None:
    """Heads from `5.1,6.3` or `cross.0.2`. Raises `UsageError` with the form."""
    if word is None:
        return None
    choices: list[HeadChoice] = []
    for part in word.split(","):
        match = re.fullmatch(r"(?:(encoder|decoder|cross)\.)?(\d{1,6})\.(\d{1,6})", part.strip())
        if match is None:
            raise UsageError(
                f"--head {shlex.quote(word[:80])} is not a list of LAYER.HEAD, such as 5.1 or 5.1,6.3",
                hint="of an encoder-decoder: encoder.5.1, decoder.5.1 or cross.5.1",
            )
        choices.append((match[1], int(match[2]), int(match[3])))  # type: ignore[arg-type]
    return tuple(choices)


def cut_names(word: str | None) -> tuple[str, str] | None:
    """The two spans of `--cut`. Raises `UsageError` for any other form."""
    if word is None:
        return None
    first, colon, second = word.partition(":")
    if not (first and colon and second):
        raise UsageError(f"--cut {shlex.quote(word[:80])} is not two spans, such as doc:question")
    return first, second
