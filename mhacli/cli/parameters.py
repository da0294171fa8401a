"""From declared settings to the options of a command, and back.

A command takes groups of settings as parameters: dataclasses whose fields `mhacli.settings.setting`
declares. `command` collects their fields, `read_by_typer` makes of them the signature that Typer
reads, and what was typed fills the groups. A parameter annotated with
`Annotated[Mapping[str, Any], Group]` receives only the settings that the command line gives.
A parameter whose default is a `setting` is an option of this command alone.
"""

import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from functools import partial
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import typer

from mhacli.errors import UsageError
from mhacli.settings import OUTPUT, PICTURES, VIEW, Mode, Option

from .console import note

LAST_PANELS = (VIEW, OUTPUT, PICTURES)
"""The panels that end the help of every command, in this order; others stand in the order of the
groups."""
_Caller = Callable[[Mapping[str, Any]], Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_OBSTACLES: Mapping[Mode, str] = {
    "model": "--model, which has its own sizes, weights, mask and tokens",
    "record": "a record, which is already computed",
    "code": "code of your own, whose arguments --arg and --call-arg set",
}
"""By mode, why it lacks an option."""
_REAL = r"[+-]?([0-9]{1,20}\.?[0-9]{0,20}|\.[0-9]{1,20})([eE][+-]?[0-9]{1,3})?"


class Declaration(NamedTuple):
    """A setting as a command declares it: the name of its field, and the type and the default of
    its value."""

    field: str
    option: Option
    hint: Any
    default: Any

    @property
    def is_switch(self) -> bool:
        """Whether it is typed without a value."""
        return bool in {self.hint, *get_args(self.hint)}


@dataclass(frozen=True)
class Command:
    """A command: the lines of its help that can be typed as they are, its settings in the order of
    its help, and a function that performs it with the settings that the command line gives."""

    examples: tuple[str, ...]
    settings: tuple[Declaration, ...]
    perform: Callable[[Mapping[str, Any]], None]


_running = list[Command]()


def running_command() -> Command:
    """The command that was called last."""
    return _running[-1]


def declarations(group: type) -> list[Declaration]:
    """The settings of a group, and of the groups that it takes."""
    declared: list[Declaration] = []
    _spread(group, declared)
    return declared


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
) -> Callable[[Callable[..., None]], Command]:
    """A decorator that makes a function a command: its settings, and the fields of its groups, are
    its options. Options that the command line gives and that do not fit each other are refused;
    with `modes`, which tells what the command inspects, also those that this mode does not have.
    `examples` are the lines of its help that can be typed as they are."""

    def spread(function: Callable[..., None]) -> Command:
        declared: list[Declaration] = []
        call = _spread(function, declared)
        options = {each.field: each.option for each in declared}

        def perform(given: Mapping[str, Any]) -> None:
            require_fitting(given, options, None if modes is None else modes(given))
            _running[:] = [made]
            call(given)

        made = Command(examples, tuple(sorted(declared, key=_place_of_panel)), perform)
        return made

    return spread


def _place_of_panel(declared: Declaration) -> int:
    """The place of a setting's panel among those that end the help, and 0 for others."""
    panel = declared.option.panel
    return LAST_PANELS.index(panel) + 1 if panel in LAST_PANELS else 0


def _spread(annotation: Any, declared: list[Declaration]) -> _Caller:
    """Adds the settings of a function or a group, and of the groups that it takes, to `declared`.
    Returns what calls it with the settings that are given: others have their defaults, or are left
    out of a mapping.

    A group is annotated as `Group`, `Annotated[Group, offers(…)]` or `Annotated[Mapping[str, Any],
    Group, offers(…)]`.
    """
    taker, *extras = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    offered: Mapping[str, str | None] = next(
        (extra for extra in extras if isinstance(extra, dict)), {}
    )
    is_mapping = get_origin(taker) is Mapping
    if is_mapping:
        taker = extras[0]
    settings = _settings_of(taker)
    defaults: dict[str, Any] = {}
    groups: dict[str, _Caller] = {}
    for name, hint in get_type_hints(taker, include_extras=True).items():
        setting = settings.get(name)
        if setting is None:
            if is_dataclass(hint) or get_origin(hint) is Annotated:
                groups[name] = _spread(hint, declared)
        elif not offered or name in offered:
            option: Option = setting.metadata["option"]
            text = offered.get(name)
            if text is not None:
                option = replace(option, help=text, default="")
            declared.append(Declaration(name, option, hint, setting.default))
            defaults[name] = setting.default

    def call(given: Mapping[str, Any]) -> Any:
        known = {name: given[name] for name in defaults if name in given}
        arguments = known if is_mapping else defaults | known
        arguments |= {name: fill(given) for name, fill in groups.items()}
        return arguments if is_mapping else taker(**arguments)

    return call


def _settings_of(taker: Any) -> dict[str, Field[Any]]:
    """The settings among the fields of a group, or among the defaults of a function."""
    if is_dataclass(taker):
        members: dict[str, Any] = {field.name: field for field in fields(taker)}
    else:
        parameters = inspect.signature(taker).parameters
        members = {name: parameter.default for name, parameter in parameters.items()}
    return {
        name: member
        for name, member in members.items()
        if isinstance(member, Field) and "option" in member.metadata
    }


# -------------------------------------------------------------------------------------------- rules


def require_fitting(
    given: Mapping[str, Any], options: Mapping[str, Option], mode: Mode | None
) -> None:
    """Raises `UsageError` for an option that is empty, that the mode does not have, that excludes
    another, or that needs one.
    """
    for field_name, value in given.items():
        option = options[field_name]
        name = option.name(field_name, is_off=value is False)
        if field_name != "typed" and "" in (value if option.many else (value,)):
            raise UsageError(f"{name} is empty")
        if mode is not None and mode not in option.modes:
            if mode in _OBSTACLES:
                raise UsageError(f"{name} does not work with {_OBSTACLES[mode]}")
            needed = "code of your own, such as my.py:Attention"
            if "model" in option.modes:
                needed = "--model"
            raise UsageError(f"{name} needs {needed}")
        for other in option.excludes:
            if other in given:
                partner = options[other].name(other, is_off=given[other] is False)
                raise UsageError(f"{name} and {partner} exclude each other")
        if partners := _unmet(option.needs, given, options):
            raise UsageError(
                f"{name} changes nothing without {' or '.join(partners)}", hint=f"add {partners[0]}"
            )
        if partners := _unmet(option.idle, given, options):
            note(f"{name} changes nothing without {' or '.join(partners)}")


def _unmet(
    conditions: Sequence[str], given: Mapping[str, Any], options: Mapping[str, Option]
) -> list[str]:
    """The options of the command that meet conditions `field` or `field=value`, as one types them;
    nothing if one of them is met.
    """
    typed = []
    for condition in conditions:
        field_name, _, value = condition.partition("=")
        if field_name in given and value in ("", str(given[field_name])):
            return []
        if field_name in options:
            typed.append(f"{options[field_name].name(field_name)} {value}".strip())
    return typed


# ------------------------------------------------------------------------------- Typer's parameters


def read_by_typer(
    command: Command, before: Sequence[inspect.Parameter], *, with_other_names: bool
) -> Callable[..., Callable[[], None]]:
    """A function whose signature Typer reads: first the parameters `before`, which are not given to
    the command. It returns what performs the command with the settings that were typed."""

    def read(**values: Any) -> Callable[[], None]:
        given = {}
        for declared in command.settings:
            value = values[declared.field]
            if value is not None:  # every default is None
                given[declared.field] = tuple(value) if isinstance(value, list) else value
        return partial(command.perform, given)

    settings = (_parameter(each, with_other_names=with_other_names) for each in command.settings)
    return with_signature(read, [*before, *settings])


def with_signature(function: _Function, parameters: Sequence[inspect.Parameter]) -> _Function:
    """The function with a signature that Typer reads."""
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def option_names(declared: Declaration) -> tuple[str, ...]:
    """All names of an option; one of a switch also switches it off: `--bias/--no-bias`."""
    return declared.option.names or (declared.option.name(declared.field),)


def typed_names(declared: Declaration) -> list[str]:
    """All names of an option as they are typed, also those that switch it off: `--no-bias`."""
    return "/".join(option_names(declared)).split("/")


def help_of(declared: Declaration) -> str:
    """The help of a setting with its default."""
    default, shown = declared.default, declared.option.default
    if shown is None:
        shown = "" if default in (None, ()) or default is False else str(default)
    return declared.option.help + (f" (default: {shown})" if shown else "")


def choices_of(hint: Any) -> tuple[str, ...]:
    """The words of a `Literal`, also of one that may be None; nothing for other types."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return next(filter(None, map(choices_of, get_args(hint))), ())


def _parameter(declared: Declaration, *, with_other_names: bool) -> inspect.Parameter:
    """Typer's parameter of a setting. Its default is None, which means that it is not given."""
    option = declared.option
    how: dict[str, Any] = {
        "help": help_of(declared),
        "metavar": option.metavar,
        "hidden": option.hidden,
    }
    annotation: Any = bool | None if declared.is_switch else str | None
    if option.many:
        annotation = list[str] | None
    choices = choices_of(declared.hint)
    if option.is_number or option.parse is not None:
        parse = option.parse or partial(
            _number, option, is_real=float in {declared.hint, *get_args(declared.hint)}
        )
        how["parser"] = partial(_parsed, option.name(declared.field), parse)
    elif choices:
        how["parser"] = partial(_choice, choices)
    if option.words or choices:
        how["autocompletion"] = lambda: list(option.words or choices)
    if option.argument:
        default = typer.Argument(... if declared.default == "" else None, **how)
    else:
        names = option_names(declared)
        if not with_other_names:
            names = tuple(name for name in names if name == names[0] or len(name) == len("-f"))
        default = typer.Option(None, *names, **how)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(declared.field, kind, default=default, annotation=annotation)


def _parsed(name: str, parse: Callable[[str], Any], word: str) -> Any:
    """The value of a word for the option of this name. Raises `UsageError` with what is wrong."""
    try:
        return parse(word)
    except ValueError as fault:
        raise UsageError(f"{name} {fault}") from None


def _choice(choices: Sequence[str], word: str) -> str:
    """The choice that a word names, in letters of any case. Typer adds the name of the option to
    the error.
    """
    if word.lower() not in choices:
        raise typer.BadParameter(f"{word!r} is not one of {', '.join(map(repr, choices))}.")
    return word.lower()


def _number(option: Option, word: str, *, is_real: bool) -> float:
    """A number in the range, of digits alone: `1_0`, digits of other scripts and NaN are none.
    Raises `ValueError`.
    """
    form, kind = (_REAL, "number") if is_real else (r"[+-]?[0-9]{1,20}", "whole number")
    value: float = (float if is_real else int)(word) if re.fullmatch(form, word) else math.nan
    if not option.contains(value):
        raise ValueError(f"{word[:80]!r} is not a {kind} in the range {option.range_text}")
    return value
