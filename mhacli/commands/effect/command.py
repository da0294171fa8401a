"""`mha effect`: what changes when heads or single attention weights are removed, and its settings:
what is taken out of the attention, and where the effect is measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from mhacli.cli.console import loading_torch, progress, show_activity
from mhacli.cli.output import DRAWN, Output, print_result, require_output
from mhacli.cli.parameters import command, layer_or_model, offers
from mhacli.errors import UsageError
from mhacli.io.memory import gc_paused
from mhacli.render.base.options import ViewOptions
from mhacli.settings import MAX_LENGTH, Computation, Reading, index_list, options_of, setting
from mhacli.text.tokens import AttentionKind

HeadChoice = tuple[AttentionKind | None, int | None, int]
"""The kind, layer and number of a head. The kind None means the only kind, or the decoder of an
encoder-decoder model; the layer is None in a layer of mha."""

_OF_HEADS = ("at", "replace", "screen")
_OF_ALL = ("edges", "heads", *_OF_HEADS)
"""What is said of removed heads, and of any removal but a cut."""
_LIST = "LIST"
REMOVAL, MEASUREMENT = "Removal", "Measurement"
_HEAD = (
    "Remove these heads, each and all together, such as 5.1,6.3, or 0,2 without --model. (default:"
    " each)"
)
_EDGES = (
    "Remove single attention weights instead, of the query at --position, in each --head or layer."
)
_CUT = (
    "Hide span A from span B: no token of B sees a token of A, in all chosen layers at once. --span"
    " names the spans."
)
_REPLACE = (
    "Replace the output of a removed head by zeros, or by its mean over the text. (default: zero)"
)
_SCREEN = (
    "Estimate all heads by one backward pass, then remove only the K with the largest estimates and"
    " K random others. (default: remove all)"
)
_AT = "Remove heads only at this position. (default: at all positions)"
_TARGET = "Measure the logit of this token. (default: the one that the model predicts)"
_VERSUS = "Measure the logit of the target minus that of this token."
_POSITION = "Measure at this token. (default: the first [MASK], else the last token)"


def head_choices(word: str) -> tuple[HeadChoice, ...]:
    """Heads from `5.1,6.3`, `cross.0.2`, or `0,2-3` in a layer of mha. Raises `ValueError` with the
    form.
    """
    choices: list[HeadChoice] = []
    for part in word.split(","):
        match = re.fullmatch(
            r"(?:(?:(encoder|decoder|cross)\.)?(\d{1,6})\.)?([0-9-]+)", part.strip()
        )
        if match is None:
            form = "LAYER.HEAD, such as 5.1 or 5.1,cross.6.3, or of heads, such as 0,2"
            raise ValueError(f"{word[:80]!r} is not a list of {form}")
        kind: Any = match[1]
        choices += [
            (kind, None if match[2] is None else int(match[2]), head)
            for head in index_list(match[3])
        ]
    return tuple(choices)


def _spans(word: str) -> tuple[str, str]:
    first, _, second = word.partition(":")
    if not (first and second):
        raise ValueError(f"{word[:80]!r} is not two spans, such as doc:question")
    return first, second


@dataclass(frozen=True, kw_only=True)
class EffectSettings:
    """What is removed, and where the effect is measured.

    `heads` None means all heads of the inspected layers. With `edges`, each attention weight of the
    query at the position is removed instead: in each of `heads`, or in all heads of a layer at
    once. With `cut`, the queries of the second span cannot see the keys of the first, in all of
    these layers together. `at` is the only position at which a head is replaced; None means all
    positions. `position` None is the last token, or the masked one. `target` None is the model's
    prediction; a number is an id; `target_first` takes the first token of a target of several
    tokens. `verify` removals are computed a second time. With `screen`, that many heads with the
    largest estimates are removed, and as many others. `from_python`: the caller is
    `mhacli.effects`, not the command.
    """

    heads: tuple[HeadChoice, ...] | None = setting(
        None, REMOVAL, _HEAD, "--head", parse=head_choices, metavar=_LIST, common=True
    )
    edges: bool = setting(False, REMOVAL, _EDGES, common=True, excludes=_OF_HEADS)
    cut: tuple[str, str] | None = setting(
        None, REMOVAL, _CUT, parse=_spans, metavar="A:B", modes=("model",), excludes=_OF_ALL
    )
    replace: Literal["zero", "mean"] | None = setting(None, REMOVAL, _REPLACE, common=True)
    screen: int | None = setting(
        None,
        REMOVAL,
        _SCREEN,
        low=1,
        high=100_000,
        metavar="K",
        modes=("model",),
        excludes=("heads",),
    )
    at: int | None = setting(None, REMOVAL, _AT, low=0, high=MAX_LENGTH)
    target: str | int | None = setting(
        None, MEASUREMENT, _TARGET, parse=str, metavar="TOKEN", common=True, modes=("model",)
    )
    versus: str | int | None = setting(
        None, MEASUREMENT, _VERSUS, parse=str, metavar="TOKEN", modes=("model",)
    )
    position: int | None = setting(
        None, MEASUREMENT, _POSITION, low=-MAX_LENGTH, high=MAX_LENGTH, common=True
    )
    target_first: bool = setting(
        False, MEASUREMENT, "If the target has several tokens, take the first.", modes=("model",)
    )
    verify: int = setting(
        4,
        MEASUREMENT,
        "Number of removals to verify by a second, different computation.",
        low=1,
        high=10_000,
    )

    from_python: bool = False

    def name_of(self, parameter: str) -> str:
        """The user's name for a parameter."""
        if self.from_python:
            return "n_verified" if parameter == "verify" else parameter
        return (
            "--layer"
            if parameter == "layers"
            else dict(options_of(EffectSettings))[parameter].name(parameter)
        )


# ------------------------------------------------------------------------------------------ command


@command(
    'mha effect "the cat sat on the mat" --model MiniLM',
    'mha effect "the cat sat on the mat" --model MiniLM --edges --head 5.1',
    'mha effect "the cat sat on the mat" --heads 4 --edges',
    'mha effect "cat on mat" --model MiniLM --span a=/cat/ --span b=/mat/ --cut a:b',
    modes=layer_or_model,
)
def effect(
    effect: EffectSettings,
    what: Computation,
    reading: Annotated[Reading, offers("span", "pair")],
    options: Annotated[ViewOptions, offers("everything")],
    output: Annotated[
        Output, offers("json", "save", "force", *DRAWN, csv="Print CSV: a line per removal.")
    ],
) -> None:
    """Computes the effects, saves the record and prints it."""
    from mhacli.cli.source import make_run, recorded

    if reading.span and effect.cut is None:
        raise UsageError(
            "--span names parts of the text for --cut", hint="add --cut A:B, or leave --span out"
        )
    require_output(options, output)
    run, texts = make_run(what, reading=reading, keep=())
    of_layer = run.model.path is None
    n_texts = run.dims.batch if of_layer else len(run.texts)
    if n_texts > 1:
        message = f"mha effect takes one text, and {n_texts} are given"
        raise UsageError(message, hint="give each text in a run of its own")
    with loading_torch():
        from mhacli.commands.effect.study import checkpoint_study, layer_study
    with show_activity("computing" if of_layer else "inspecting the checkpoint"), gc_paused():
        study, notes = (
            layer_study(run, texts, effect) if of_layer else checkpoint_study(run, effect)
        )
    with progress() as report_progress:
        record = study.run(report_progress)
    print_result(recorded(record), notes, options=options, output=output)
