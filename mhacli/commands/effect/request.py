"""The requests for effects: what to remove from attention, and where to measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mhacli.errors import UsageError
from mhacli.requests.checkpoint import ModelRequest
from mhacli.requests.layer import LayerRequest
from mhacli.text.tokens import AttentionKind

HeadChoice = tuple[AttentionKind | None, int, int]
"""The kind, layer and number of a head. None means the only kind, or the decoder of an encoder-decoder model."""


@dataclass(frozen=True)
class EffectRequest:
    """The checkpoint and the text, the removals, and the output to compare.

    `heads` None means all heads of the layers in `model`. With `edges`, each attention weight of the query at the
    position is removed instead: in each of `heads`, or in all heads of a layer at once. With `cut`, the queries of the
    second span cannot see the keys of the first, in all of these layers together. `at` is the only position at which a
    head is replaced; None means all positions. With `replace` resample, a head's output comes from `other`, a text
    whose tokens correspond. `position` None is the last token, or the masked one. `target` None is the model's
    prediction; a number is an id; `target_first` takes the first token of a target of several tokens. `n_verified`
    removals are computed a second time. With `n_screened`, that many heads with the largest estimates are removed, and
    as many others. With `judge`, common visualisations of attention are compared with the effects. `from_python`: the
    caller is `mhacli.effects`, not the command.
    """

    model: ModelRequest
    heads: tuple[HeadChoice, ...] | None = None
    edges: bool = False
    cut: tuple[str, str] | None = None
    replace: Literal["zero", "mean", "resample"] = "zero"
    other: str | None = None
    at: int | None = None
    position: int | None = None
    target: str | int | None = None
    versus: str | int | None = None
    target_first: bool = False
    n_verified: int = 4
    n_screened: int | None = None
    judge: bool = False
    from_python: bool = False

    def name_of(self, parameter: str) -> str:
        """The user's name for a parameter."""
        return parameter if self.from_python else option_of(parameter)


_OPTIONS = {"heads": "--head", "layers": "--layer", "other": "--with"}


def option_of(parameter: str) -> str:
    """The option for a parameter: `--with` for `other`."""
    return _OPTIONS.get(parameter, "--" + parameter.replace("_", "-"))


def require_one_removal(named: Callable[[str], str], **given: object) -> None:
    """Raises `UsageError` for parameters that exclude each other; None and False count as not given. `named` gives the
    user's name for a parameter."""
    chosen = {name for name, value in given.items() if value is not None and value is not False}
    for first, others in _EXCLUDED.items():
        both = [other for other in others if first in chosen and other in chosen]
        if both:
            message = f"{named(first)} and {named(both[0])} exclude each other"
            raise UsageError(message, hint=f"leave {named(both[0])} out")
    if (given["replace"] == "resample") != ("other" in chosen):
        needed = [f"{named('replace')} resample", named("other")]
        if "other" in chosen:
            needed.reverse()
        raise UsageError(f"{needed[0]} needs {needed[1]}", hint=f"{named('other')} is another text")


_OF_HEADS = ("at", "replace", "screen")
_EXCLUDED = {
    "cut": ("edges", "heads", "judge", *_OF_HEADS),
    "edges": _OF_HEADS,
    "screen": ("heads",),
}
"""The parameters that exclude a parameter."""


@dataclass(frozen=True)
class LayerEffectRequest:
    """The request for effects in mha's own layer, whose output vectors are compared. `heads` are numbers."""

    layer: LayerRequest
    heads: tuple[int, ...] | None = None
    edges: bool = False
    replace: Literal["zero", "mean"] = "zero"
    at: int | None = None
    position: int | None = None
    n_verified: int = 4
