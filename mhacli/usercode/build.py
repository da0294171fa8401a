"""Builds a user's attention from given arguments, constructor defaults, and guesses, which are reported."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from mhacli.errors import MhaError, UsageError
from mhacli.usercode.arguments import (
    EMPTY,
    GuessContext,
    Parameters,
    Role,
    describe_parameters,
    describe_unknown,
    guess_reason,
    guess_values,
    parameters_of,
    parse_value,
    require_known,
    role_of,
)
from mhacli.usercode.call.signature import ROWS, signature_of
from mhacli.usercode.inputs import copied, seeded
from mhacli.usercode.process import exception_text, lacks_cuda, shown_path, user_code_error
from mhacli.usercode.target import Target, TargetRequest, documentation_of, source_file
from mhacli.usercode.types import Built, Guess


class _ConstructorCall(NamedTuple):
    """The arguments of a constructor call, given and guessed. `configs` maps each config parameter to the values given for it;
    `guesses` are those made before the call."""

    values: dict[str, Any]
    configs: dict[str, dict[str, Any]]
    guesses: list[Guess]


def build(target: Target, request: TargetRequest) -> Built:
    """The target in eval mode on its device. A class or a factory function is called; another function or an instance is used
    directly.

    Raises `MhaError` for a missing device, for missing or unknown arguments, for a target that cannot be built, and for an
    exception in its constructor.
    """
    _require_device(request.device)
    thing = target.thing
    given = _given(request)
    if not inspect.isclass(thing) and not is_factory(thing, given):
        return _used_directly(target, request)
    if inspect.isclass(thing) and issubclass(thing, torch.autograd.Function):
        return _function(target, thing.apply, request)
    if inspect.isclass(thing):
        _require_buildable(target)
    try:
        return _built(target, request, given, frozenset(given))
    except (KeyboardInterrupt, MhaError):
        raise
    except BaseException as fault:
        raise _build_error(target, fault, given) from fault


def is_factory(thing: Any, given: Mapping[str, object]) -> bool:
    """Whether a function builds attention: its annotation returns a module, or no parameter takes token vectors. Parameters set
    with `--arg` do not count."""
    if isinstance(thing, nn.Module) or not callable(thing):
        return False
    if _returns_a_module(thing):
        return True
    return all(parameter.name in given for parameter in signature_of(thing, *ROWS, "rest"))


def _returns_a_module(thing: Callable[..., Any]) -> bool:
    """Whether a function's return annotation is a module."""
    try:
        returned = typing.get_type_hints(thing).get("return")
    except Exception:  # evaluating the user's annotations may raise anything
        return False
    return inspect.isclass(returned) and issubclass(returned, nn.Module)


def _given(request: TargetRequest) -> dict[str, object]:
    """The values of `--arg`, by name."""
    given: dict[str, object] = {}
    for name, text in request.arguments:
        if name in given:
            raise UsageError(f"--arg {name} is given twice")
        value = parse_value(text)
        if role_of(name.rpartition(".")[2]) == "dtype" and isinstance(value, str):
            value = getattr(torch, value, value)
        given[name] = value
    return given


def _require_device(name: str) -> None:
    """Raises `MhaError` for a device that torch cannot use."""
    try:
        torch.empty(0, device=name)
    except Exception as fault:  # torch raises a different class for each reason
        raise MhaError(
            f"--device {name}: there is no such device here: {exception_text(fault)}",
            hint="--device cpu works everywhere",
            code="no-device",
        ) from fault


def _require_buildable(target: Target) -> None:
    """Raises `MhaError` for an abstract class and for a class without a call."""
    cls = target.thing
    if inspect.isabstract(cls):
        names = ", ".join(sorted(cls.__abstractmethods__))
        raise MhaError(f"{target.name} is an abstract class: it does not define {names}", code="no-target")
    has_call = any("__call__" in vars(base) for base in cls.__mro__ if base is not nn.Module)
    has_forward = hasattr(cls, "forward") and getattr(cls, "forward", None) is not nn.Module.forward
    if not (has_call or has_forward):
        raise MhaError(f"{target.name} has neither forward nor __call__", code="no-target")


# -------------------------------------------------------------------------------------------------- targets used directly


def _used_directly(target: Target, request: TargetRequest) -> Built:
    thing = target.thing
    if not isinstance(thing, nn.Module):
        return _function(target, thing if callable(thing) else thing.forward, request)
    _require_no_arguments(target, request, "a module that is built already")
    return _unbuilt(target, _on_device(thing, request))


def _function(target: Target, call: Callable[..., Any], request: TargetRequest) -> Built:
    _require_no_arguments(target, request, "a function")
    return _unbuilt(target, call)


def _unbuilt(target: Target, call: Callable[..., Any]) -> Built:
    """A target used directly. `rebuild` returns a copy of a module in its original state, or the same function."""
    module = call if isinstance(call, nn.Module) else None
    original = copied(call) if module is not None else call

    def rebuild(changes: Mapping[str, Any]) -> Built:
        if changes:
            raise MhaError(
                f"{target.name} is not a class and cannot be built with {', '.join(changes)}", code="argument"
            )
        fresh = copied(original)
        return built if module is None else _unbuilt(target, fresh)

    built = Built(
        target.name, target.thing, call, module, {}, frozenset(), (), rebuild, target.documentation, target.file
    )
    return built


def _require_no_arguments(target: Target, request: TargetRequest, kind: str) -> None:
    if request.arguments:
        names = ", ".join(name for name, _ in request.arguments)
        raise MhaError(
            f"--arg {names}: {target.name} is {kind}, not a class",
            hint="--call-arg NAME=VALUE is passed to each call",
            code="argument",
        )


# ------------------------------------------------------------------------------------------------- constructors, factories


def _built(
    target: Target,
    request: TargetRequest,
    given: Mapping[str, Any],
    given_names: frozenset[str],
    earlier: tuple[Guess, ...] = (),
) -> Built:
    """The result of calling the target with `given`. `given_names` are the names that the user gave; `earlier` are guesses of
    an earlier build. Raises what the constructor raises."""
    parameters, context = parameters_of(target.thing), GuessContext(request.causal, request.device)
    call = _constructor_call(target.name, parameters, given, context)
    with seeded(request.seed, torch.device("cpu")):
        instance = _call_constructor(target.thing, parameters, call.values)
    original_target, target = target, target if inspect.isclass(target.thing) else _returned_target(target, instance)
    instance = _on_device(instance, request) if isinstance(instance, nn.Module) else instance
    guesses = [*earlier, *call.guesses]
    all_arguments = {p.name: call.values.get(p.name, p.default) for p in parameters.named}
    all_arguments |= {name: value for name, value in call.values.items() if name not in all_arguments}
    for name, config_values in call.configs.items():
        config = call.values[name]
        guesses += config.every_guess() if isinstance(config, GuessedConfig) else []
        all_arguments |= values_in(name, config, config_values)

    def rebuild(changes: Mapping[str, Any]) -> Built:
        guessed = {guess.name: guess.value for guess in guesses}
        remaining = tuple(guess for guess in guesses if guess.name not in changes)
        return _built(original_target, request, {**guessed, **given, **changes}, given_names, remaining)

    return Built(
        name=target.name,
        thing=target.thing,
        call=instance if callable(instance) else instance.forward,
        module=instance if isinstance(instance, nn.Module) else None,
        arguments=all_arguments,
        given=given_names,
        guesses=tuple(guesses),
        rebuild=rebuild,
        documentation=target.documentation,
        file=target.file,
    )


def _returned_target(target: Target, returned: Any) -> Target:
    """The target of a factory function with the object that it returned. Raises `MhaError` for an object that cannot be
    called."""
    if inspect.isclass(returned) or not (callable(returned) or hasattr(returned, "forward")):
        description = (
            f"the class {returned.__name__}"
            if inspect.isclass(returned)
            else f"a value of type {type(returned).__name__}"
        )
        raise MhaError(
            f"{target.name} takes no token vectors and returns {description}, not a module",
            hint="name a class, a function that attends, or one that returns a module",
            code="no-target",
            path=target.file,
        )
    thing = returned if inspect.isroutine(returned) else type(returned)
    documentation = "\n\n".join(filter(None, (documentation_of(thing), target.documentation)))
    return Target(target.name, thing, source_file(thing) or target.file, documentation)


def _constructor_call(
    owner: str, parameters: Parameters, given: Mapping[str, Any], context: GuessContext
) -> _ConstructorCall:
    """The arguments of the constructor call. Raises `MhaError` for unknown names, and for required parameters that mha cannot
    guess."""
    named = {p.name: p for p in parameters.named}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in _flattened(given, named).items():
        first, dot, rest = name.partition(".")
        if first not in named and not (parameters.takes_any and not dot):
            _require_known(name, named)
        if dot:
            inner.setdefault(first, {})[rest] = value
    values = {name: value for name, value in given.items() if "." not in name and name not in inner}
    known = _known_roles(named, values, inner)
    required = [p for p in parameters.required if p.name not in values]
    configs = [p.name for p in required if _is_config(p)] + [n for n in inner if n not in values]
    missing = [p for p in required if p.name not in configs]
    names = frozenset(named)
    roles = {p.name: role for p in missing if (role := _role(p, names)) is not None}
    extra: set[Role] = {"n_kv_heads"} if configs else set()
    guess = guess_values({*roles.values(), *extra}, known, context)
    unknown = [p.name for p in missing if roles.get(p.name) not in guess]
    if unknown:
        raise describe_unknown(owner, unknown)
    guesses = [Guess(name, guess[role], guess_reason(role, context)) for name, role in roles.items()]
    guesses += _causal_switches(parameters, values, context)
    values |= {guessed.name: guessed.value for guessed in guesses}
    settled_roles = {**known, **{role: guess[role] for role in roles.values()}}
    for name in dict.fromkeys(configs):
        p = named[name]
        config = make_config(name, p.annotation, p.default, inner.get(name, {}), settled_roles, context)
        values[name] = config.config
        guesses += config.guesses
    return _ConstructorCall(values, {name: inner.get(name, {}) for name in dict.fromkeys(configs)}, guesses)


def _flattened(given: Mapping[str, Any], named: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """The given values with each config dict flattened: `config={"n_head": 4}` as `config.n_head=4`."""
    flat: dict[str, Any] = {}
    for name, value in given.items():
        if name in named and _is_config(named[name]) and type(value) is dict:
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            flat[name] = value
    return flat


def _require_known(name: str, named: Mapping[str, inspect.Parameter]) -> None:
    """Raises `MhaError` for an unknown name, with a hint if a config could have it."""
    config = next((p.name for p in named.values() if p.default is EMPTY and _is_config(p)), None)
    field = name.rpartition(".")[2]
    if config is not None and role_of(field) is not None:
        raise MhaError(
            f"--arg {name}: there is no such argument, only {describe_parameters({n: p.default for n, p in named.items()})}",
            hint=f"--arg {config}.{field}=VALUE sets it in the config",
            code="argument",
        )
    require_known(name, {n: p.default for n, p in named.items()})


def _is_config(parameter: inspect.Parameter) -> bool:
    return role_of(parameter.name) == "config" or is_config_class(parameter.annotation, parameter.name)


def _role(parameter: inspect.Parameter, names: frozenset[str]) -> Role | None:
    """The role of a parameter, None if its annotation rules that role out."""
    role = role_of(parameter.name, names)
    if parameter.annotation is bool and role not in ("bias", "causal", "batch_first"):
        return None
    if parameter.annotation not in (bool, EMPTY, "bool") and parameter.name == "mask":
        return None
    return role


def _known_roles(
    named: Mapping[str, inspect.Parameter], values: Mapping[str, Any], inner: Mapping[str, Mapping[str, Any]]
) -> dict[Role, Any]:
    """The value of each role, from given values and then from defaults."""
    names = frozenset(named)
    stated: dict[str, Any] = {p.name: p.default for p in named.values() if p.default is not EMPTY}
    stated |= dict(values) | {path: value for config_values in inner.values() for path, value in config_values.items()}
    known: dict[Role, Any] = {}
    for name, value in stated.items():
        role = role_of(name.rpartition(".")[2], names)
        if role is not None and value is not None and (role not in known or name in values):
            known[role] = value
    return known


def _causal_switches(parameters: Parameters, values: Mapping[str, Any], context: GuessContext) -> list[Guess]:
    """Parameters that make the attention causal, with default False, under `--causal`."""
    return [
        Guess(p.name, True, "--causal")
        for p in parameters.named
        if context.causal and p.default is False and p.name not in values and role_of(p.name) == "causal"
    ]


def _call_constructor(cls: Callable[..., Any], parameters: Parameters, values: Mapping[str, Any]) -> Any:
    positional = [p.name for p in parameters.named if p.kind is p.POSITIONAL_ONLY and p.name in values]
    by_name = {name: value for name, value in values.items() if name not in positional}
    return cls(*(values[name] for name in positional), **by_name)


def _on_device(module: nn.Module, request: TargetRequest) -> nn.Module:
    if request.device != "cpu":
        module = module.to(request.device)
    return module.eval()


def _build_error(target: Target, fault: BaseException, given: Mapping[str, Any]) -> MhaError:
    """The error for an exception of a constructor."""
    if isinstance(fault, UnknownAttribute | UnknownItem):
        name = fault.name if isinstance(fault, UnknownAttribute) else fault.args[0]
        config = next((p.name for p in parameters_of(target.thing).named if _is_config(p)), "config")
        return describe_unknown(target.name, [f"{config}.{name}"])
    where = "" if target.file is None else f" of {shown_path(target.file)}"
    arguments = ", ".join(f"{name}={value!r:.40}" for name, value in given.items())
    subject = f"{target.name.rpartition(':')[2]}({arguments}){where}"
    if lacks_cuda(exception_text(fault)):
        subject = f"{subject} needs a CUDA device, which this machine does not have"
        return user_code_error(subject, fault, target.file, code="no-device")
    named = {} if given else {p.name: p.default for p in parameters_of(target.thing).named}
    advice = f"its arguments are {describe_parameters(named)}" if named else None
    return user_code_error(f"{subject} could not be built", fault, target.file, code="build", advice=advice)


# -------------------------------------------------------------------------------------------------------------- configs


_UNLIKE_CONFIGS: Final = ("builtins", "typing", "collections", "torch", "enum", "pathlib", "omegaconf")
_SETTINGS: Final[Mapping[str, Any]] = {
    "_attn_implementation": "eager",
    "attn_implementation": "eager",
    "attn_logit_softcapping": None,
    "initializer_range": 0.02,
    "output_attentions": False,
    "rope_scaling": None,
    "sliding_window": None,
    "use_cache": False,
    "vocab_size": 101,
}
"""Common config fields, with the values that leave attention unchanged."""


class UnknownAttribute(AttributeError):
    """A constructor read a config field that was not given and whose role is unknown."""


class UnknownItem(KeyError):
    """As `UnknownAttribute`, for a field read as an item."""


class GuessedConfig(dict[str, Any]):
    """A config with the given values. A missing field is guessed when the constructor first reads it, as attribute or item, and
    stored.

    An unusual name raises `AttributeError` or `KeyError`, so that `hasattr`, `getattr(config, name, default)` and
    `config.get(name, default)` work as usual. `guesses` are the guessed fields with their values.
    """

    def __init__(self, name: str, given: Mapping[str, Any], guess: Callable[[str], Guess | None]) -> None:
        nested: dict[str, dict[str, Any]] = {}
        plain = {}
        for path, value in given.items():
            first, dot, rest = path.partition(".")
            if dot:
                nested.setdefault(first, {})[rest] = value
            else:
                plain[first] = value
        super().__init__(plain)
        vars(self).update(_name=name, _guess=guess, guesses=[])
        for first, inner in nested.items():
            self[first] = GuessedConfig(f"{name}.{first}", inner, guess)

    def __getattr__(self, name: str) -> Any:
        """A given or guessed value; raises `UnknownAttribute`."""
        if not self._has_value(name):
            raise UnknownAttribute(f"{vars(self).get('_name', 'config')} has no {name!r}", name=name)
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Stores a value set by the constructor."""
        self[name] = value

    def __missing__(self, name: str) -> Any:
        """A guessed value; raises `UnknownItem`."""
        if not self._has_value(name):
            raise UnknownItem(name)
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        """A stored value, else the default, else a guess."""
        return self[name] if name in self or (default is None and self._has_value(name)) else default

    def every_guess(self) -> list[Guess]:
        """All guesses by dotted name, nested configs included."""
        inner = [guess for value in self.values() if isinstance(value, GuessedConfig) for guess in value.every_guess()]
        return [*self.guesses, *inner]

    def _has_value(self, name: str) -> bool:
        """Whether the field has a value. A missing one is guessed and stored if possible."""
        if name not in self:
            guess = self._guess(name) if "_guess" in vars(self) else None
            if guess is None:
                return False
            self[name] = guess.value
            self.guesses.append(guess._replace(name=f"{self._name}.{name}"))
        return True


class ConfigWithGuesses(NamedTuple):
    """A config, and the guesses made for it so far."""

    config: Any
    guesses: tuple[Guess, ...]


def is_config_class(annotation: object, name: str) -> bool:
    """Whether mha can build a config of this annotation: a dataclass, or another class for a parameter named as a config.
    Mappings and classes of Python or torch are excluded."""
    if (
        annotation is EMPTY
        or not inspect.isclass(annotation)
        or annotation.__module__.partition(".")[0] in _UNLIKE_CONFIGS
    ):
        return False
    if issubclass(annotation, Mapping) or inspect.isabstract(annotation) or getattr(annotation, "_is_protocol", False):
        return False
    return dataclasses.is_dataclass(annotation) or role_of(name) == "config"


def make_config(
    name: str,
    annotation: object,
    default: object,
    given: Mapping[str, Any],
    known: Mapping[Role, Any],
    context: GuessContext,
) -> ConfigWithGuesses:
    """The config for the parameter `name`: its changed default, an instance of its annotation, or a `GuessedConfig`.

    `given` are the values for it, without the prefix `name`.
    """
    if default is not None and default is not EMPTY:
        return ConfigWithGuesses(_changed(copy.deepcopy(default), name, given), ())
    if inspect.isclass(annotation) and is_config_class(annotation, name):
        return _instance(name, annotation, given, known, context)

    def guess(field: str) -> Guess | None:
        role = role_of(field)
        if role is not None and role != "config":
            roles: set[Role] = {role, "n_kv_heads"}  # the constructor may read n_kv_heads later
            values = guess_values(roles, known, context)
            if role in values:
                return Guess(field, values[role], guess_reason(role, context))
        if field == "is_decoder":
            return Guess(field, context.causal, guess_reason("causal", context))
        return Guess(field, _SETTINGS[field], "the usual setting") if field in _SETTINGS else None

    return ConfigWithGuesses(GuessedConfig(name, given, guess), ())


def values_in(name: str, config: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """The config's values of known roles, and the values given for it, by dotted name."""
    attributes = config if isinstance(config, Mapping) else _attributes(config)
    return {
        f"{name}.{key}": value for key, value in attributes.items() if key in given or role_of(str(key)) is not None
    }


def _class_values(config: object) -> dict[str, Any]:
    """The public numbers among the class attributes of an object."""
    return {key: value for base in reversed(type(config).__mro__[:-1]) for key, value in vars(base).items()
            if isinstance(value, int | float) and not key.startswith("_")}  # fmt: skip


def _instance(
    name: str, cls: type, given: Mapping[str, Any], known: Mapping[Role, Any], context: GuessContext
) -> ConfigWithGuesses:
    """The annotated class, called with the given values and with guesses for required fields."""
    parameters = parameters_of(cls)
    names = frozenset(parameter.name for parameter in parameters.named)
    given_roles = [(role_of(key), value) for key, value in given.items()]
    defaults = [(role_of(p.name), p.default) for p in parameters.named if p.default is not EMPTY]
    known_roles = dict(known) | {role: value for role, value in [*defaults, *given_roles] if role is not None}
    missing = [p for p in parameters.required if p.name not in given]
    roles = {role for p in missing if (role := role_of(p.name)) is not None}
    values = guess_values(roles, known_roles, context)
    unknown = [p.name for p in missing if role_of(p.name) not in values]
    if unknown:
        raise describe_unknown(name, [f"{name}.{field}" for field in unknown])
    guesses = [Guess(f"{name}.{p.name}", values[role], guess_reason(role, context))
               for p in missing if (role := role_of(p.name)) is not None]  # fmt: skip
    guesses += [
        Guess(f"{name}.{p.name}", True, "--causal")
        for p in parameters.named
        if context.causal and p.default is False and p.name not in given and role_of(p.name) == "causal"
    ]
    arguments = {guess.name.partition(".")[2]: guess.value for guess in guesses}
    arguments |= {key: value for key, value in given.items() if key in names}
    config = cls(**arguments)
    unset = {key: value for key, value in given.items() if getattr(config, key, None) != value}
    return ConfigWithGuesses(_changed(config, name, unset), tuple(guesses))


def _changed(config: Any, name: str, given: Mapping[str, Any]) -> Any:
    """The config with changed values for existing fields. Raises `MhaError` for other fields."""
    for path, value in given.items():
        *outer, last = path.split(".")
        owner = config
        for part in outer:
            owner = getattr(owner, part)
        if isinstance(owner, dict):
            owner[last] = value
            continue
        if not hasattr(owner, last):
            require_known(f"{name}.{path}", {f"{name}.{key}": current for key, current in _attributes(owner).items()})
        try:
            setattr(owner, last, value)
        except AttributeError as fault:
            raise MhaError(f"--arg {name}.{path} cannot be set: {fault}", code="argument") from fault
    return config


def _attributes(config: object) -> dict[str, Any]:
    instance_values = getattr(config, "__dict__", {})
    return {
        **instance_values,
        **{key: value for key, value in _class_values(config).items() if key not in instance_values},
    }
