"""What is asked of an effect: what to remove from a checkpoint's attention, and where to measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mhacli.errors import UsageError
from mhacli.requests.checkpoint import ModelRequest
from mhacli.requests.layer import LayerRequest
from mhacli.spec.tokens import AttentionKind

HeadChoice = tuple[AttentionKind | None, int, int]
"""The kind, the layer and the number of a head; None stands for the only kind, or for the decoder of a pair."""


@dataclass(frozen=True)
class EffectRequest:
    """The checkpoint and the text, what is removed, and the output that is compared.

    `heads` None are all heads of the layers that `model` names. With `edges` each weight that the query at the position gives to
    a key is removed instead, in each of `heads`, or in all heads of each layer at once. With `cut` the queries of the second span
    see no key of the first, in all of these layers together. `at` is the one position where a head is replaced, None for all.
    With `replace` resample a head gives what it gives in `other`, another text whose tokens correspond.
    `position` None is the last token, or the masked one. `target` None is what the model predicts; of a target of several tokens
    `target_first` takes the first; a number is an id. `n_verified` removals are computed a second time.
    With `n_screened` so many heads with the largest estimates are removed, and as many others. With `judge` usual pictures of
    attention are compared with the effects. `from_python`: it was asked for by `mhacli.effects`, not by the command.
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
        """What the user calls a parameter."""
        return parameter if self.from_python else option_of(parameter)


_OPTIONS = {"heads": "--head", "layers": "--layer", "other": "--with"}


def option_of(parameter: str) -> str:
    """The option of a parameter: `--with` of `other`."""
    return _OPTIONS.get(parameter, "--" + parameter.replace("_", "-"))


def require_one_removal(named: Callable[[str], str], **given: object) -> None:
    """Raises `UsageError` for parameters that do not go together; None and False are not given. `named` is what the user calls
    one."""
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
"""What a parameter cannot be given with."""


@dataclass(frozen=True)
class LayerEffectRequest:
    """The same of a layer of our own, whose output vector is compared. `heads` are numbers."""

    layer: LayerRequest
    heads: tuple[int, ...] | None = None
    edges: bool = False
    replace: Literal["zero", "mean"] = "zero"
    at: int | None = None
    position: int | None = None
    n_verified: int = 4
