"""From declared settings to the options of a command, and back.

A command takes groups of settings as parameters: dataclasses whose fields `mhacli.settings.setting`
declares. `command` spreads their fields into the signature that Typer reads, and fills the groups
with what was typed. A parameter annotated with `Annotated[Mapping[str, Any], Group]` receives only
the settings that the command line gives. A parameter whose default is a `setting` is an option of
this command alone.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import Field, fields, is_dataclass, replace
from functools import partial, wraps
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from mhacli.errors import UsageError
from mhacli.settings import OUTPUT, PICTURES, VIEW, Mode, Option

LAST_PANELS = (VIEW, OUTPUT, PICTURES)
"""The panels that end the help of every command, in this order; others stand in the order of the
groups."""
_Parameter = tuple[Option, inspect.Parameter]
_Caller = Callable[[Mapping[str, Any]], Any]
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


def are_literal() -> bool:
    """Whether `--` is on the command line, so that words are always texts and never paths."""
    return "--" in sys.argv[1:]


def offers(*names: str, **texts: str) -> dict[str, str | None]:
    """The part of a group that a command has, as names of its fields, with the two that every
    command has; those with a text have it as help: `Annotated[Group, offers("save", csv="Print
    …")]`.
    """
    return dict.fromkeys(("color", "width", *names)) | texts


def command(
    *examples: str, modes: Callable[[Mapping[str, Any]], Mode] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that makes the settings of a function, and the fields of its groups, its options.
    Options that the command line gives and that do not fit each other are refused; with `modes`,
    which tells what the command inspects, also those that this mode does not have. `examples` are
    the lines of its help that can be typed as they are.
    """

    def spread(function: Callable[..., None]) -> Callable[..., None]:
        declared: list[_Parameter] = []
        call = _spread(function, declared)
        options = {parameter.name: option for option, parameter in declared}

        @wraps(function)
        def run(click_context: typer.Context, **values: Any) -> None:
            given = {}
            for name, value in values.items():
                source = click_context.get_parameter_source(name)
                if source is not None and source.name == "COMMANDLINE":
                    given[name] = tuple(value) if isinstance(value, list) else value
            _require_fitting(given, options, None if modes is None else modes(given))
            call(given)

        declared.sort(
            key=lambda each: (
                LAST_PANELS.index(each[0].panel) + 1 if each[0].panel in LAST_PANELS else 0
            )
        )
        context = inspect.Parameter(
            "click_context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
        )
        parameters = [context, *(parameter for _, parameter in declared)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.examples = "\n".join(examples)  # type: ignore[attr-defined]
        common = [name for name, option in options.items() if option.common]
        run.common_options = common  # type: ignore[attr-defined]
        return run

    return spread


def _spread(of: Any, declared: list[_Parameter]) -> _Caller:
    """Adds the settings of a function or a group, and of the groups that it takes, to `declared`.
    Returns what calls it with the settings that are given: others have their defaults, or are left
    out of a mapping.
    """
    kind, *extras = get_args(of) if get_origin(of) is Annotated else (of,)
    is_mapping = bool(extras) and is_dataclass(extras[0])
    if is_mapping:
        kind = extras[0]
    offered = next((extra for extra in extras if isinstance(extra, dict)), None)
    members: dict[str, Any] = {
        name: each.default for name, each in inspect.signature(kind).parameters.items()
    }
    if is_dataclass(kind):
        members = {field.name: field for field in fields(kind)}
    defaults: dict[str, Any] = {}
    groups: dict[str, _Caller] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        setting: Any = members.get(name)
        option = setting.metadata.get("option") if isinstance(setting, Field) else None
        if option is None:
            if is_dataclass(hint) or get_origin(hint) is Annotated:
                groups[name] = _spread(hint, declared)
        elif offered is None or name in offered:
            text = offered and offered[name]
            changed = option if text is None else replace(option, help=text, default="")
            declared.append(_setting(name, changed, hint, setting.default))
            defaults[name] = setting.default

    def call(given: Mapping[str, Any]) -> Any:
        args = {
            name: given.get(name, default)
            for name, default in defaults.items()
            if name in given or not is_mapping
        }
        args |= {name: fill(given) for name, fill in groups.items()}
        return args if is_mapping else kind(**args)

    return call


# -------------------------------------------------------------------------------------------- rules


def _require_fitting(
    given: Mapping[str, Any], options: Mapping[str, Option], mode: Mode | None
) -> None:
    """Raises `UsageError` for an option that is empty, that the mode does not have, that excludes
    another, or that needs one.
    """
    for field_name, value in given.items():
        option, name = (
            options[field_name],
            options[field_name].name(field_name, is_off=value is False),
        )
        if field_name != "typed" and "" in (value if option.many else (value,)):
            raise UsageError(f"{name} is empty")
        if mode is not None and mode not in option.modes:
            if mode in _OBSTACLES:
                raise UsageError(f"{name} does not work with {_OBSTACLES[mode]}")
            needed = (
                "--model"
                if "model" in option.modes
                else "code of your own, such as my.py:Attention"
            )
            raise UsageError(f"{name} needs {needed}")
        for other in option.excludes:
            if other in given:
                partner = options[other].name(other, is_off=given[other] is False)
                raise UsageError(f"{name} and {partner} exclude each other")
        partners = [options[other].name(other) for other in option.needs if other in options]
        if partners and given.keys().isdisjoint(option.needs):
            raise UsageError(
                f"{name} changes nothing without {' or '.join(partners)}", hint=f"add {partners[0]}"
            )


# ------------------------------------------------------------------------------- Typer's parameters


def _setting(name: str, option: Option, hint: Any, default: Any) -> _Parameter:
    """A setting and its parameter; `default` is for the help. None is always possible: it is "not
    given".
    """
    shown = option.default
    if shown is None:
        shown = "" if default in (None, ()) or default is False else str(default)
    text = option.help + (f" (default: {shown})" if shown else "")
    metavar = "N" if option.metavar is None and option.low is not None else option.metavar
    how: dict[str, Any] = {
        "help": text,
        "metavar": metavar,
        "hidden": option.hidden,
        "show_default": False,
    }
    kinds, annotation = {hint, *get_args(hint)}, hint | None
    if option.is_number or option.parse is not None:
        annotation = str | None
        parse = option.parse or partial(_number, option, is_real=float in kinds)

        def parsed(word: str) -> Any:
            try:
                return parse(word)
            except ValueError as fault:
                raise UsageError(f"{option.name(name)} {fault}") from None

        how["parser"] = parsed
    if option.many:
        annotation = list[str] | None
    if option.words:
        how["autocompletion"] = lambda: list(option.words)
    if option.argument:
        declared = typer.Argument(... if default == "" else None, **how)
    else:
        names = option.names or ((option.name(name),) if bool in kinds else ())
        declared = typer.Option(None, *names, rich_help_panel=option.panel, **how)
    return option, inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=declared, annotation=annotation
    )


def _number(option: Option, word: str, *, is_real: bool) -> float:
    """A number in the range, of digits alone: `1_0`, digits of other scripts and NaN are none.
    Raises `ValueError`.
    """
    form, kind = (_REAL, "number") if is_real else (r"[+-]?[0-9]{1,20}", "whole number")
    value: float = (float if is_real else int)(word) if re.fullmatch(form, word) else math.nan
    if not option.contains(value):
        raise ValueError(f"{word[:80]!r} is not a {kind} in the range {option.range_text}")
    return value
