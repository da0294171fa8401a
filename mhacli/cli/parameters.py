"""From declared settings to the options of a command, and back.

A command takes groups of settings as parameters: dataclasses whose fields `mhacli.settings.setting` declares. `command` spreads
their fields into the signature that Typer reads, and fills the groups with what was typed. A parameter annotated with
`Annotated[Mapping[str, Any], Group]` receives only the settings that the command line gives. A parameter whose default is a
`setting` is an option of this command alone.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass, replace
from functools import cache, wraps
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer
from typer._click.types import FloatRange, IntRange

from mhacli.errors import UsageError
from mhacli.settings import OUTPUT, PICTURES, VIEW, Mode, Option

LAST_PANELS = (VIEW, OUTPUT, PICTURES)
"""The panels that end the help of every command, in this order; others stand in the order of the groups."""
Modes = Callable[[Mapping[str, Any]], Mode]
"""What a command inspects, from the options that are given."""


def layer_or_model(given: Mapping[str, Any]) -> Mode:
    """A checkpoint with `--model`, else a layer of mha."""
    return "model" if given.get("path") is not None else "layer"


class Offers(dict[str, str | None]):
    """The settings of a group that a command has, by the names of their fields; those with a text have it as help."""


def offers(*names: str, **texts: str) -> Offers:
    """The part of a group that a command has: `Annotated[Group, offers("save", csv="Print …")]`."""
    return Offers(dict.fromkeys(names) | texts)


class _Group(NamedTuple):
    """A class that declares settings, whether those that are given come as a mapping, and which the command has (None: all)."""

    kind: Any
    is_mapping: bool = False
    offered: Offers | None = None


def command(modes: Modes | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that makes the settings of a function, and the fields of its groups, its options. Options that the command
    line gives and that do not fit each other are refused; with `modes`, also those that the mode of the command line does not
    have."""

    def spread(function: Callable[..., None]) -> Callable[..., None]:
        groups: dict[str, _Group] = {}
        own: dict[str, Any] = {}
        declared: list[tuple[Option, inspect.Parameter]] = []
        for name, parameter in inspect.signature(function).parameters.items():
            hint, default = _hints(function)[name], parameter.default
            if isinstance(default, Field):
                own[name] = default.default
                declared.append(_setting(name, default.metadata["option"], hint, default.default))
            elif (group := _group(hint)) is not None:
                groups[name] = group
                declared += _settings(group)
        options = {parameter.name: option for option, parameter in declared}

        @wraps(function)
        def run(click_context: typer.Context, **values: Any) -> None:
            given = {}
            for name, value in values.items():
                source = click_context.get_parameter_source(name)
                if source is not None and source.name == "COMMANDLINE":
                    given[name] = tuple(value) if isinstance(value, list) else value
            _require_fitting(given, options, None if modes is None else modes(given))
            filled = {name: _filled(group, given) for name, group in groups.items()}
            function(**filled, **{name: given.get(name, default) for name, default in own.items()})

        declared.sort(key=lambda each: LAST_PANELS.index(each[0].panel) + 1 if each[0].panel in LAST_PANELS else 0)
        context = inspect.Parameter("click_context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        parameters = [context, *(parameter for _, parameter in declared)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.common_options = [name for name, option in options.items() if option.common]  # type: ignore[attr-defined]
        return run

    return spread


# -------------------------------------------------------------------------------------------------------------- groups


@cache
def _hints(of: Any) -> dict[str, Any]:
    return get_type_hints(of, include_extras=True)


def _group(hint: Any) -> _Group | None:
    """The group of a parameter or a field; None for a setting."""
    if is_dataclass(hint):
        return _Group(hint)
    if get_origin(hint) is not Annotated:
        return None
    kind, *extras = get_args(hint)
    offered = next((extra for extra in extras if isinstance(extra, Offers)), None)
    is_mapping = is_dataclass(extras[0])
    return _Group(extras[0] if is_mapping else kind, is_mapping, offered)


def _settings(group: _Group) -> Iterator[tuple[Option, inspect.Parameter]]:
    """The settings of a group and of the groups in it, in the order of their declaration."""
    for field in fields(group.kind):
        option, hint = field.metadata.get("option"), _hints(group.kind)[field.name]
        inner = None if option is not None else _group(hint)
        if inner is not None:
            yield from _settings(inner)
        elif option is not None and (group.offered is None or field.name in group.offered):
            text = None if group.offered is None else group.offered[field.name]
            yield _setting(
                field.name, option if text is None else replace(option, help=text, default=""), hint, field.default
            )


def _filled(group: _Group, given: Mapping[str, Any]) -> Any:
    """The group with its part of what is given. Other fields have their defaults, or are left out of a mapping."""
    filled = {}
    for field in fields(group.kind):
        inner = None if "option" in field.metadata else _group(_hints(group.kind)[field.name])
        if inner is not None:
            filled[field.name] = _filled(inner, given)
        elif (
            "option" in field.metadata
            and field.name in given
            and (group.offered is None or field.name in group.offered)
        ):
            filled[field.name] = given[field.name]
    return filled if group.is_mapping else group.kind(**filled)


# --------------------------------------------------------------------------------------------------------------- rules


def _require_fitting(given: Mapping[str, Any], options: Mapping[str, Option], mode: Mode | None) -> None:
    """Raises `UsageError` for an option that the mode does not have, that excludes another, or that needs another."""
    for field_name, value in given.items():
        option, name = options[field_name], options[field_name].name(field_name, value)
        if mode is not None and mode not in option.modes:
            raise _not_in_mode(mode, option, name)
        for other in option.excludes:
            if other in given:
                partner = options[other].name(other, given[other])
                raise UsageError(f"{name} and {partner} exclude each other", hint=f"leave out {name} or {partner}")
        needed = [options[other].name(other) for other in option.needs if other in options]
        if needed and given.keys().isdisjoint(option.needs):
            raise UsageError(f"{name} changes nothing without {' or '.join(needed)}", hint=f"add {needed[0]}")


def _not_in_mode(mode: Mode, option: Option, name: str) -> UsageError:
    """The error for an option that the mode does not have."""
    if mode == "model":
        return UsageError(f"{name} does not work with --model, which brings its own", hint=f"leave out {name}")
    if mode == "record":
        return UsageError(f"{name} does not work with a record, which is already computed", hint=f"leave out {name}")
    if mode == "code":
        return UsageError(
            f"{name} does not work with code of your own, which sets this itself",
            hint="--arg NAME=VALUE sets an argument of its constructor, --call-arg NAME=VALUE one of its call",
        )
    if "model" in option.modes:
        return UsageError(f"{name} needs --model", hint="add --model DIR")
    return UsageError(
        f"{name} needs code of your own, FILE.py:NAME or package.module:NAME",
        hint="try mha trace my.py:Attention --arg d_model=64",
    )


# -------------------------------------------------------------------------------------------------- Typer's parameters


def _setting(name: str, option: Option, hint: Any, default: Any) -> tuple[Option, inspect.Parameter]:
    """A setting and its parameter; `default` is for the help. None is always possible: it is "not given"."""
    kinds = {hint, *get_args(hint)}
    shown = option.default
    if shown is None:
        shown = "" if default in (None, ()) or default is False else str(default)
    text = option.help + (f" (default: {shown})" if shown else "")
    metavar = "N" if option.metavar is None and option.low is not None else option.metavar
    how: dict[str, Any] = {"help": text, "metavar": metavar, "hidden": option.hidden, "show_default": False}
    annotation: Any = hint if type(None) in kinds else hint | None
    if option.many:
        annotation = list[str] | None
    elif option.parse is not None:
        annotation = str | None
    if option.is_number:
        how["click_type"] = _number(option, FloatRange if float in kinds else IntRange)
    elif option.parse is not None:
        how["parser"] = _parser(option.name(name), option.parse)
    if option.words:
        how["autocompletion"] = lambda: list(option.words)
    if option.argument:
        declared = typer.Argument(None, **how)
    else:
        names = option.names or ((option.name(name),) if bool in kinds else ())
        declared = typer.Option(None, *names, rich_help_panel=option.panel, **how)
    return option, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=declared, annotation=annotation)


def _parser(name: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of Typer for an option of that name; a `ValueError` becomes the sentence of an error."""

    def parsed(word: str) -> Any:
        try:
            return parse(word)
        except ValueError as fault:
            raise UsageError(f"{name} {fault}") from None

    return parsed


def _number(option: Option, kind: type[FloatRange] | type[IntRange]) -> FloatRange | IntRange:
    """Typer's type of the numbers in a range, for digits alone: `1_0`, digits of other scripts, NaN and infinity are none."""
    low = option.low if option.above is None else option.above
    number = kind(
        None if low == -math.inf else low,
        option.high if option.below is None else option.below,
        min_open=option.above is not None,
        max_open=option.below is not None,
    )
    number._number_class = _whole if kind is IntRange else _finite  # type: ignore[misc,assignment]
    noun = "whole number" if kind is IntRange else "number"
    is_bounded = number.min is not None or number.max is not None
    number.name = f"{noun} in the range {number._describe_range()}" if is_bounded else "finite number"
    return number


def _whole(value: object) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,20}", str(value)):
        raise ValueError
    return int(str(value))


def _finite(value: object) -> float:
    if not re.fullmatch(r"[+-]?([0-9]{1,20}\.?[0-9]{0,20}|\.[0-9]{1,20})([eE][+-]?[0-9]{1,3})?", str(value)):
        raise ValueError
    number = float(str(value))
    if math.isinf(number):
        raise ValueError
    return number
