"""From declared settings to the options of a command, and back.

A command takes groups of settings as parameters: dataclasses whose fields `mhacli.settings.setting` declares. `command` spreads
their fields into the signature that Typer reads, and fills the groups with what was typed. A parameter annotated with
`Annotated[Mapping[str, Any], Group]` receives only the settings that the command line gives. A parameter whose default is a
`setting` is an option of this command alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass, make_dataclass, replace
from functools import wraps
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer

from mhacli.cli.numbers import Integer, Real
from mhacli.errors import UsageError
from mhacli.settings import OUTPUT, PICTURES, VIEW, Mode, Option

LAST_PANELS = (VIEW, OUTPUT, PICTURES)
"""The panels that end the help of every command, in this order; others stand in the order of the groups."""
Modes = Callable[[Mapping[str, Any]], Mode]
"""What a command inspects, from the values of its options."""


def layer_or_model(values: Mapping[str, Any]) -> Mode:
    """A checkpoint with `--model`, else a layer of mha."""
    return "model" if values.get("path") is not None else "layer"


class Offers(dict[str, str | None]):
    """The settings of a group that a command has, by the names of their fields; those with a text have it as help."""


def offers(*names: str, **texts: str) -> Offers:
    """The part of a group that a command has: `Annotated[Group, offers("save", csv="Print …")]`."""
    return Offers(dict.fromkeys(names) | texts)


class _Group(NamedTuple):
    """A class that declares settings, whether its values are a mapping of those that are given, and which it offers."""

    kind: type
    is_mapping: bool = False
    offered: Offers | None = None

    def has(self, name: str) -> bool:
        """Whether the command has this setting."""
        return self.offered is None or name in self.offered


def command(modes: Modes | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that makes the settings of a function, and the fields of its groups, its options. With `modes`, an option that
    the mode of the command line does not have is refused."""

    def spread(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
        own = {
            name: make_dataclass(name, [(name, hints[name], f)]) for name, f in defaults.items() if isinstance(f, Field)
        }
        groups = {name: group for name, hint in (hints | own).items() if (group := _group(hint)) is not None}
        settings = {setting.name: setting for group in groups.values() for setting in _settings(group)}

        @wraps(function)
        def run(click_context: typer.Context, **values: Any) -> None:
            given = {name for name in settings if _is_given(click_context, name)}
            if modes is not None:
                _require_mode(modes(values), [(settings[name], values[name]) for name in settings if name in given])
            filled = {name: _filled(group, values, given) for name, group in groups.items()}
            function(**{name: getattr(value, name) if name in own else value for name, value in filled.items()})

        parameters = [setting.parameter for setting in sorted(settings.values(), key=_order)]
        context = inspect.Parameter("click_context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        run.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in (context, *parameters)}
        common = (name for name, setting in settings.items() if setting.option.common)
        run.common_options = frozenset(common)  # type: ignore[attr-defined]
        return run

    return spread


def _group(hint: Any) -> _Group | None:
    """The group of a parameter or a field; None for a setting."""
    if is_dataclass(hint):
        return _Group(hint)  # type: ignore[arg-type]
    if get_origin(hint) is not Annotated:
        return None
    kind, *extras = get_args(hint)
    offered = next((extra for extra in extras if isinstance(extra, Offers)), None)
    is_mapping = is_dataclass(extras[0])
    return _Group(extras[0] if is_mapping else kind, is_mapping, offered)


class _Setting(NamedTuple):
    """A setting of a group and its parameter for Typer."""

    name: str
    option: Option
    parameter: inspect.Parameter


def _settings(group: _Group) -> Iterator[_Setting]:
    """The settings of a group and of the groups in it, in the order of their declaration."""
    hints = get_type_hints(group.kind, include_extras=True)
    for f in fields(group.kind):
        option, inner = f.metadata.get("option"), _group(hints[f.name])
        if option is not None and group.has(f.name):
            text = None if group.offered is None else group.offered[f.name]
            option = option if text is None else replace(option, help=text, default="")
            default = None if group.is_mapping else f.default
            yield _Setting(f.name, option, _parameter(f.name, option, hints[f.name], f.default, value=default))
        elif inner is not None:
            yield from _settings(inner)


def _order(setting: _Setting) -> int:
    """The place of a setting in the help: those of `LAST_PANELS` come last."""
    panel = setting.option.panel
    return LAST_PANELS.index(panel) + 1 if panel in LAST_PANELS else 0


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _filled(group: _Group, values: Mapping[str, Any], given: Collection[str]) -> Any:
    """The group with its values."""
    hints, filled = get_type_hints(group.kind, include_extras=True), {}
    for f in fields(group.kind):
        inner = _group(hints[f.name])
        if "option" in f.metadata:
            if group.has(f.name) and (f.name in given or not group.is_mapping):
                value = values[f.name]
                is_default = value is None and not group.is_mapping
                filled[f.name] = f.default if is_default else tuple(value) if isinstance(value, list) else value
        elif inner is not None:
            filled[f.name] = _filled(inner, values, given)
    return filled if group.is_mapping else group.kind(**filled)


def _require_mode(mode: Mode, given: Iterable[tuple[_Setting, Any]]) -> None:
    """Raises `UsageError` for a given option that the mode does not have."""
    for (field_name, option, _), value in given:
        if mode in option.modes:
            continue
        name = option.name(field_name, value)
        if mode == "model":
            raise UsageError(f"{name} does not work with --model, which brings its own", hint=f"leave out {name}")
        if mode == "code":
            raise UsageError(
                f"{name} does not work with code of your own, which sets this itself",
                hint="--arg NAME=VALUE sets an argument of its constructor, --call-arg NAME=VALUE one of its call",
            )
        if mode == "record":
            raise UsageError(f"{name} does not work with a record, which is already computed", hint=f"leave out {name}")
        if "model" in option.modes:
            raise UsageError(f"{name} needs --model", hint="add --model DIR")
        raise UsageError(
            f"{name} needs code of your own, FILE.py:NAME or package.module:NAME",
            hint="try mha trace my.py:Attention --arg d_model=64",
        )


# -------------------------------------------------------------------------------------------------- Typer's parameters


def _parameter(name: str, option: Option, hint: Any, default: Any, *, value: Any) -> inspect.Parameter:
    """The parameter of a setting; `value` is its default for Typer, `default` the one that the help shows."""
    declared = _declared(name, option, hint, default, value=None if default == () else value)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=declared, annotation=_annotation(option, hint))


def _annotation(option: Option, hint: Any) -> Any:
    """The type that Typer reads. None is always possible: it is "not given"."""
    if option.many:
        return list[str] | None
    if option.parse is not None:
        return str | None
    optional: Any = hint if type(None) in get_args(hint) else hint | None
    return optional


def _declared(name: str, option: Option, hint: Any, default: Any, *, value: Any) -> Any:
    text = option.help + _default_text(option, default)
    if option.argument:
        return typer.Argument(value, help=text, metavar=option.metavar, show_default=False)
    is_flag = bool in (hint, *get_args(hint))
    names = option.names or (("--" + name.replace("_", "-"),) if is_flag else ())
    how: dict[str, Any] = {}
    if option.is_number:
        how["click_type"] = _number(option, is_real=float in (hint, *get_args(hint)))
    elif option.parse is not None:
        how["parser"] = parser_of(option.name(name), option.parse)
    if option.words:
        how["autocompletion"] = lambda: list(option.words)
    return typer.Option(
        value,
        *names,
        help=text,
        rich_help_panel=option.panel,
        metavar=option.metavar,
        hidden=option.hidden,
        show_default=False,
        **how,
    )


def _default_text(option: Option, default: Any) -> str:
    shown = (
        option.default
        if option.default is not None
        else ""
        if default in (None, ()) or default is False
        else str(default)
    )
    return f" (default: {shown})" if shown else ""


def _number(option: Option, *, is_real: bool) -> Any:
    if not is_real:
        return Integer(int(option.low or 0), int(option.high or 0))
    low = None if option.low in (None, float("-inf")) else option.low
    return Real(low, option.high, above=option.above, below=option.below)


def parser_of(name: str, parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A parser of Typer for an option of that name, from a function that raises `ValueError` with the form."""

    def parsed(word: Any) -> Any:
        if not isinstance(word, str):  # the default
            return word
        try:
            return parse(word)
        except ValueError as fault:
            raise UsageError(f"{name} {fault}") from None

    return parsed
