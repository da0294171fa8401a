"""What a constructor asks for, or a function that builds, and the errors that say what it was not given or does not know."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch import nn

from mhacli.errors import MhaError

EMPTY: Final = inspect.Parameter.empty
_MOST_SHOWN: Final = 40


class Parameters(NamedTuple):
    """The parameters of a constructor that have names, with their annotations as classes where those can be found;
    `takes_any`: it takes others too, by name."""

    named: tuple[inspect.Parameter, ...]
    takes_any: bool

    @property
    def required(self) -> list[inspect.Parameter]:
        """Those that have no default."""
        return [parameter for parameter in self.named if parameter.default is EMPTY]


def parameters_of(cls: Callable[..., Any]) -> Parameters:
    """What the class, or the function that builds, asks for when it is called. A class that hands everything on is asked for what
    its base asks for."""
    found = _parameters(cls)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in found)
    named = _named(found)
    for base in cls.__mro__[1:] if takes_any and not named and inspect.isclass(cls) else ():
        if "__init__" in vars(base) and base not in (object, nn.Module):
            named = _named(_parameters(base))
            if named:
                break
    return Parameters(tuple(named), takes_any)


def _parameters(cls: Callable[..., Any]) -> list[inspect.Parameter]:
    if getattr(cls, "__init__", None) is nn.Module.__init__:  # which takes anything in order to refuse it
        return []
    try:
        parameters = list(inspect.signature(cls).parameters.values())
    except (TypeError, ValueError):
        return []
    hints = _hints(cls)
    return [parameter.replace(annotation=hints.get(parameter.name, parameter.annotation)) for parameter in parameters]


def _named(parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    return [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _hints(cls: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the constructor as they evaluate, without `None`; none where one of them names what is not there."""
    try:
        hints = typing.get_type_hints(cls.__init__ if inspect.isclass(cls) else cls)
    except Exception:  # whatever stands in somebody's annotations
        return {}
    return {name: _without_none(hint) for name, hint in hints.items()}


def _without_none(hint: Any) -> Any:
    inner = [one for one in typing.get_args(hint) if one is not type(None)]
    return inner[0] if len(inner) == 1 and type(None) in typing.get_args(hint) else hint


def described(parameters: Mapping[str, Any]) -> str:
    """Parameters to read, with their defaults: `d_model, n_heads=8`."""
    shown = [name if default is EMPTY else f"{name}={_short(default)}" for name, default in parameters.items()]
    return ", ".join(shown[:_MOST_SHOWN]) + (
        f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    )


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # a repr of theirs
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:59]}…"


def require_known(name: str, parameters: Mapping[str, Any]) -> None:
    """Raises `MhaError` unless there is a parameter of that name; it lists those that there are, with their defaults."""
    if name in parameters:
        return
    by_end = {one.rpartition(".")[2]: one for one in parameters}
    near = difflib.get_close_matches(name.rpartition(".")[2], list(by_end), n=1, cutoff=0.5)
    raise MhaError(
        f"argument {name} must be one of {described(parameters)}, got {name}"
        if parameters
        else f"argument {name} must be left out, got it for a constructor without arguments",
        hint=f"did you mean --arg {by_end[near[0]]}=VALUE?" if near else None,
        code="argument",
    )


def describe_unknown(owner: str, names: Sequence[str]) -> MhaError:
    """The error for parameters that have no default, were not given, and mean nothing that could be guessed."""
    return MhaError(
        f"{owner} must be given {' and '.join(names)}, got nothing and no usual name to guess from",
        hint=" ".join(f"--arg {name}=VALUE" for name in names),
        code="argument",
    )
