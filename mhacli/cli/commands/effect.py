"""`mha effect`: what changes when heads or single attention weights of a checkpoint are removed."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Annotated, Literal

from mhacli.cli.help import examples
from mhacli.cli.options import (
    HTML,
    ColourOptions,
    ContextTexts,
    DeviceOptions,
    Everything,
    Force,
    LayerOptions,
    MaxTokens,
    SaveOptions,
    SaveRecord,
    SourceOptions,
    TextOptions,
    command,
    number,
    option,
    option_group,
)
from mhacli.cli.shared.checkpoint import ModelOptions, ModelTextOptions, Spans, model_request, require_without_model
from mhacli.cli.shared.output import (
    JSON,
    Formats,
    PictureOptions,
    format_options,
    print_result,
    save_record,
    with_output,
)
from mhacli.cli.streams import loading_torch, show_activity, watch
from mhacli.cli.values import whole
from mhacli.errors import UsageError
from mhacli.io.memory import uncollected
from mhacli.render.base.options import ViewOptions
from mhacli.results.record.head_statistics import HeadsRequest
from mhacli.spec.config import MAX_LENGTH

if TYPE_CHECKING:
    from mhacli.requests.effect import HeadChoice

_REMOVED, _MEASURED = "Removal", "Measurement"


@option_group
class RemovalOptions:
    """What is removed."""

    head: Annotated[
        str | None,
        option(
            _REMOVED,
            "Remove these heads, as LAYER.HEAD: each alone, and all together. (default: every head, each alone)",
            metavar="LIST",
            common=True,
        ),
    ] = None
    edges: Annotated[
        bool,
        option(
            _REMOVED,
            "Remove the weights from the query at --position to each key, one by one, of each --head or layer.",
            "--edges",
            common=True,
        ),
    ] = False
    cut: Annotated[
        str | None,
        option(
            _REMOVED,
            "Let no token of the second --span see one of the first, in all layers of --layer together.",
            metavar="A:B",
            common=True,
        ),
    ] = None
    replace: Annotated[
        Literal["zero", "mean"] | None,
        option(
            _REMOVED,
            "What a removed head gives instead: zeros, or its mean over the text. (default: zero)",
            common=True,
        ),
    ] = None
    at: Annotated[
        int | None, number(_REMOVED, whole("at", 0, MAX_LENGTH), "Remove heads at this position alone. (default: all)")
    ] = None


@option_group
class MeasurementOptions:
    """What is measured, and where."""

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
        option(_MEASURED, "Measure the logit of the target minus that of this token.", metavar="TOKEN", common=True),
    ] = None
    position: Annotated[
        int | None,
        number(
            _MEASURED,
            whole("position", -MAX_LENGTH, MAX_LENGTH),
            "Measure at this token. (default: the first [MASK], else the last token)",
            common=True,
        ),
    ] = None
    target_first: Annotated[
        bool, option(_MEASURED, "Of a target of several tokens take the first.", "--target-first")
    ] = False
    verify: Annotated[
        int, number(_MEASURED, whole("verify", 1, 10_000), "Compute so many removals a second time, in another way.")
    ] = 4


@option_group
class EffectText:
    """What a checkpoint reads besides a text, and its parts for `--cut`."""

    context: ContextTexts = None
    max_tokens: MaxTokens = None
    span: Spans = None


@format_options(json=JSON, csv="Print CSV: a line per removal.")
class EffectFormats(Formats):
    """Formats of effects."""


@option_group
class EffectOutput:
    """Where the record goes."""

    save: SaveRecord = None
    force: Force = False
    all: Everything = False
    html: Annotated[str | None, option("Output", HTML, metavar="FILE")] = None
    formats: EffectFormats
    colour: ColourOptions

    @property
    def pictures(self) -> PictureOptions:
        """The page, if it is asked for."""
        return PictureOptions(html=self.html)

    @property
    def overwrites(self) -> bool:
        """Whether files that exist may be replaced."""
        return self.force

    @property
    def written(self) -> tuple[str | None, ...]:
        """The files that are written, None for one that was not asked for."""
        return self.save, self.html


@examples(
    'mha effect "the cat sat on the mat" --model MiniLM',
    'mha effect "the cat sat on the mat" --model MiniLM --head 5.1,4.3',
    'mha effect "the cat sat on the mat" --model MiniLM --edges --head 5.1',
    'mha effect "a cat on a mat" --model MiniLM --span a=/cat/ --span b=/mat/ --cut a:b',
)
@command
def effect(
    source: SourceOptions,
    text: EffectText,
    removal: RemovalOptions,
    measurement: MeasurementOptions,
    model: ModelOptions,
    device: DeviceOptions,
    output: EffectOutput,
) -> None:
    """Options in, the study of effects, its record out."""
    _require_one_removal(removal)
    if model.model is None:
        require_without_model(**vars(model))
        raise UsageError("mha effect needs a checkpoint", hint="add --model DIR")
    saving = SaveOptions(save=output.save, force=output.force, keep="")
    options = with_output(ViewOptions(everything=output.all), output, others=saving.files)
    from mhacli.requests.effect import EffectRequest

    request = EffectRequest(
        model_request(
            model,
            ModelTextOptions(span=text.span),
            source,
            TextOptions(context=text.context, max_tokens=text.max_tokens),
            LayerOptions(),
            device,
            saving,
            HeadsRequest(),
        ),
        heads=head_choices(removal.head),
        edges=removal.edges,
        cut=cut_names(removal.cut),
        replace=removal.replace or "zero",
        at=removal.at,
        position=measurement.position,
        target=measurement.target,
        versus=measurement.versus,
        target_first=measurement.target_first,
        n_verified=measurement.verify,
    )
    with loading_torch():
        from mhacli.compute.effect.study import prepare_effect
    with show_activity("loading the checkpoint"), uncollected():
        study, notes = prepare_effect(request)
    watch(study)
    record = study.record()
    save_record(record, saving)
    print_result(record, notes, options=options, output=output)


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
    """The two spans of `--cut`. Raises `UsageError` for another form."""
    if word is None:
        return None
    first, colon, second = word.partition(":")
    if not (first and colon and second):
        raise UsageError(f"--cut {shlex.quote(word[:80])} is not two spans, such as doc:question")
    return first, second


def _require_one_removal(removal: RemovalOptions) -> None:
    """Raises `UsageError` for options of heads beside `--edges` or `--cut`, and for both of these."""
    of_heads: dict[str, object] = {"--at": removal.at, "--replace": removal.replace}
    excluded: dict[str, dict[str, object]] = {
        "--cut": {"--edges": removal.edges or None, "--head": removal.head, **of_heads},
        "--edges": of_heads,
    }
    chosen = "--cut" if removal.cut is not None else "--edges" if removal.edges else None
    for name, value in excluded.get(chosen or "", {}).items():
        if value is not None:
            raise UsageError(f"{chosen} and {name} exclude each other", hint=f"leave {name} out")
