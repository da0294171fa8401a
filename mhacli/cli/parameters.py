"""From declared settings to the options of a command, and back.

A command takes groups of settings as parameters: dataclasses whose fields `mhacli.settings.setting` declares. `command` spreads
their fields into the signature that Typer reads, and fills the groups with what was typed. A parameter annotated with
`Annotated[Mapping[str, Any], Group]` receives only the settings that the command line gives. A parameter whose default is a
`setting` is an option of this command alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, fields, is_dataclass, replace
from functools import cache, wraps
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from mhacli.errors import UsageError
from mhacli.settings import OUTPUT, PICTURES, VIEW, Mode, Option

LAST_PANELS = (VIEW, OUTPUT, PICTURES)
"""The panels that end the help of every command, in this order; others stand in the order of the groups."""
_Parameter = tuple[Option, inspect.Parameter]
_Filler = Callable[[Mapping[str, Any]], Any]
_OBSTACLES: Mapping[Mode, str] = {
    "model": "--model, which brings its own",
    "record": "a record, which is already computed",
    "code": "code of your own, of which --arg and --call-arg set the arguments",
}
"""By mode, why it lacks an option."""
_REAL = r"[+-]?([0-9]{1,20}\.?[0-9]{0,20}|\.[0-9]{1,20})([eE][+-]?[0-9]{1,3})?"


def layer_or_model(given: Mapping[str, Any]) -> Mode:
    """A checkpoint with `--model`, else a layer of mha."""
    return "model" if given.get("path") is not None else "layer"


def offers(*names: str, **texts: str) -> dict[str, str | None]:
    """The part of a group that a command has, as names of its fields; those with a text have it as help:
    `Annotated[Group, offers("save", csv="Print …")]`."""
    return dict.fromkeys(names) | texts


def command(
    *examples: str, modes: Callable[[Mapping[str, Any]], Mode] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that makes the settings of a function, and the fields of its groups, its options. Options that the command
    line gives and that do not fit each other are refused; with `modes`, which tells what the command inspects, also those
    that this mode does not have. `examples` are the lines of its help that can be typed as they are."""

    def spread(function: Callable[..., None]) -> Callable[..., None]:
        groups: dict[str, _Filler] = {}
        own: dict[str, Any] = {}
        declared: list[_Parameter] = []
        for name, parameter in inspect.signature(function).parameters.items():
            hint, default = _hints(function)[name], parameter.default
            if isinstance(default, Field):
                own[name] = default.default
                declared.append(_setting(name, default.metadata["option"], hint, default.default))
            else:
                groups[name] = _spread(hint, declared)
        options = {parameter.name: option for option, parameter in declared}

        @wraps(function)
        def run(click_context: typer.Context, **values: Any) -> None:
            given = {}
            for name, value in values.items():
                source = click_context.get_parameter_source(name)
                if source is not None and source.name == "COMMANDLINE":
                    given[name] = tuple(value) if isinstance(value, list) else value
            _require_fitting(given, options, None if modes is None else modes(given))
            filled = {name: fill(given) for name, fill in groups.items()}
            function(**filled, **{name: given.get(name, default) for name, default in own.items()})

        declared.sort(key=lambda each: LAST_PANELS.index(each[0].panel) + 1 if each[0].panel in LAST_PANELS else 0)
        context = inspect.Parameter("click_context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        parameters = [context, *(parameter for _, parameter in declared)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.examples = "\n".join(examples)  # type: ignore[attr-defined]
        run.common_options = [name for name, option in options.items() if option.common]  # type: ignore[attr-defined]
        return run

    return spread


# -------------------------------------------------------------------------------------------------------------- groups


@cache
def _hints(of: Any) -> dict[str, Any]:
    return get_type_hints(of, include_extras=True)


def _spread(hint: Any, declared: list[_Parameter]) -> _Filler:
    """Adds the settings of a group, and of the groups in it, to `declared`. Returns what makes the group of the settings that
    are given: others have their defaults, or are left out of a mapping."""
    kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    make = kind
    if extras and is_dataclass(extras[0]):
        kind, make = extras[0], dict
    offered = next((extra for extra in extras if isinstance(extra, dict)), None)
    own: list[str] = []
    groups: dict[str, _Filler] = {}
    for field in fields(kind):
        option, hint = field.metadata.get("option"), _hints(kind)[field.name]
        if option is None:
            if is_dataclass(hint) or get_origin(hint) is Annotated:
                groups[field.name] = _spread(hint, declared)
        elif offered is None or field.name in offered:
            text = offered and offered[field.name]
            own.append(field.name)
            changed = option if text is None else replace(option, help=text, default="")
            declared.append(_setting(field.name, changed, hint, field.default))

    def fill(given: Mapping[str, Any]) -> Any:
        return make(
            **{name: given[name] for name in own if name in given},
            **{name: fill_group(given) for name, fill_group in groups.items()},
        )

    return fill


# --------------------------------------------------------------------------------------------------------------- rules


def _require_fitting(given: Mapping[str, Any], options: Mapping[str, Option], mode: Mode | None) -> None:
    """Raises `UsageError` for an option that is empty, that the mode does not have, that excludes another, or that needs one."""
    for field_name, value in given.items():
        option, name = options[field_name], options[field_name].name(field_name, value)
        if value == "" and not option.argument:
            raise UsageError(f"{name} is empty")
        if mode is not None and mode not in option.modes:
            if mode in _OBSTACLES:
                raise UsageError(f"{name} does not work with {_OBSTACLES[mode]}")
            needed = "--model" if "model" in option.modes else "code of your own, such as my.py:Attention"
            raise UsageError(f"{name} needs {needed}")
        for other in option.excludes:
            if other in given:
                partner = options[other].name(other, given[other])
                raise UsageError(f"{name} and {partner} exclude each other")
        partners = [options[other].name(other) for other in option.needs if other in options]
        if partners and given.keys().isdisjoint(option.needs):
            raise UsageError(f"{name} changes nothing without {' or '.join(partners)}", hint=f"add {partners[0]}")


# -------------------------------------------------------------------------------------------------- Typer's parameters


def _setting(name: str, option: Option, hint: Any, default: Any) -> _Parameter:
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
    elif option.parse is not None or option.is_number:
        annotation = str | None
    if option.is_number:
        how["parser"] = _number(option, is_real=float in kinds)
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


def _number(option: Option, *, is_real: bool) -> Callable[[str], Any]:
    """A parser of Typer for the numbers in a range, of digits alone: `1_0`, digits of other scripts and NaN are none."""
    form = _REAL if is_real else r"[+-]?[0-9]{1,20}"
    noun = "number" if is_real else "whole number"

    def parsed(word: str) -> Any:
        if not re.fullmatch(form, word):
            raise typer.BadParameter(f"{word[:80]!r} is not a valid {noun} in the range {option.range_text}.")
        value = float(word) if is_real else int(word)
        if not option.contains(value):
            raise typer.BadParameter(f"{word} is not in the range {option.range_text}.")
        return value

    return parsed
