"""Builds a user's attention: from what was given, from the constructor's defaults, and from guesses that are reported."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from mhacli.adapters.usercode.arguments import (
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
from mhacli.adapters.usercode.asker import copied, seeded
from mhacli.adapters.usercode.call.signature import ROWS, signature_of
from mhacli.adapters.usercode.process import exception_text, lacks_cuda, shown_path, user_code_error
from mhacli.adapters.usercode.target import Target, documentation_of, source_file
from mhacli.adapters.usercode.types import Built, Guess
from mhacli.errors import MhaError, UsageError
from mhacli.requests.user_code import TargetRequest


class _ConstructorCall(NamedTuple):
    """What a constructor is called with: what was given and guessed. `configs` are those among them that are configs, each
    with what was given for it, `guesses` what is guessed before it runs."""

    values: dict[str, Any]
    configs: dict[str, dict[str, Any]]
    guesses: list[Guess]


def build(target: Target, request: TargetRequest) -> Built:
    """What is examined, in eval, on its device. A class is called, and a function that builds; any other function, or an
    instance, is taken as it is.

    Raises `MhaError` for a device that is not there, for arguments that are missing or unknown, for what cannot be built, and
    for what its constructor raises.
    """
    _require_device(request.device)
    thing = target.thing
    given = _given(request)
    if not inspect.isclass(thing) and not is_factory(thing, given):
        return _as_it_is(target, request)
    if inspect.isclass(thing) and issubclass(thing, torch.autograd.Function):
        return _function(target, thing.apply, request)
    if inspect.isclass(thing):
        _require_buildable(target)
    try:
        return _built(target, request, given, frozenset(given))
    except (KeyboardInterrupt, MhaError):
        raise
    except BaseException as fault:
        raise _refusal(target, fault, given) from fault


def is_factory(thing: Any, given: Mapping[str, object]) -> bool:
    """Whether a function builds attention and does not attend: its annotation says that a module comes back, or it takes no rows;
    what `--arg` gives is none."""
    if isinstance(thing, nn.Module) or not callable(thing):
        return False
    if _returns_a_module(thing):
        return True
    signature = signature_of(thing)
    rows = [p for p in signature.parameters if p.role in (*ROWS, "rest") and p.name not in given]
    return signature.known and not rows


def _returns_a_module(thing: Callable[..., Any]) -> bool:
    """Whether a function's annotation says that a module comes back."""
    try:
        returned = typing.get_type_hints(thing).get("return")
    except Exception:  # whatever stands in the user's annotations
        return False
    return inspect.isclass(returned) and issubclass(returned, nn.Module)


def _given(request: TargetRequest) -> dict[str, object]:
    """The values of `--arg`, by name."""
    given: dict[str, object] = {}
    for name, word in request.arguments:
        if name in given:
            raise UsageError(f"--arg {name} is given twice")
        value = parse_value(word)
        if role_of(name.rpartition(".")[2]) == "dtype" and isinstance(value, str):
            value = getattr(torch, value, value)
        given[name] = value
    return given


def _require_device(name: str) -> None:
    """Raises `MhaError` for a device that torch cannot put anything on."""
    try:
        torch.empty(0, device=name)
    except Exception as fault:  # torch has a kind of its own for each reason
        raise MhaError(
            f"--device {name}: there is no such device here: {exception_text(fault)}",
            hint="--device cpu works everywhere",
            code="no-device",
        ) from fault


def _require_buildable(target: Target) -> None:
    """Raises `MhaError` for a class of which nothing can be made that could be called."""
    cls = target.thing
    if inspect.isabstract(cls):
        names = ", ".join(sorted(cls.__abstractmethods__))
        raise MhaError(f"{target.name} is an abstract class: it does not define {names}", code="no-target")
    has_call = any("__call__" in vars(base) for base in cls.__mro__ if base is not nn.Module)
    has_forward = hasattr(cls, "forward") and getattr(cls, "forward", None) is not nn.Module.forward
    if not (has_call or has_forward):
        raise MhaError(f"{target.name} has neither forward nor __call__", code="no-target")


# ------------------------------------------------------------------------------------------------ what is taken as it is


def _as_it_is(target: Target, request: TargetRequest) -> Built:
    thing = target.thing
    if not isinstance(thing, nn.Module):
        return _function(target, thing if callable(thing) else thing.forward, request)
    _require_no_arguments(target, request, "a module that is built already")
    return _unbuilt(target, _placed(thing, request))


def _function(target: Target, call: Callable[..., Any], request: TargetRequest) -> Built:
    _require_no_arguments(target, request, "a function")
    return _unbuilt(target, call)


def _unbuilt(target: Target, call: Callable[..., Any]) -> Built:
    """What is taken as it is; built anew it is a copy of a module as it was first, and the same function."""
    module = call if isinstance(call, nn.Module) else None
    original = copied(call) if module is not None else call

    def rebuild(changes: Mapping[str, Any]) -> Built:
        if changes:
            raise MhaError(
                f"{target.name} is not a class and cannot be built with {', '.join(changes)}", code="argument"
            )
        again = copied(original)
        return built if module is None else _unbuilt(target, again)

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


# -------------------------------------------------------------------------------------------------------- what is built


def _built(
    target: Target,
    request: TargetRequest,
    given: Mapping[str, Any],
    given_names: frozenset[str],
    earlier: tuple[Guess, ...] = (),
) -> Built:
    """The class called with `given`, of which `given_names` are the user's and `earlier` were guessed before. Raises what the
    constructor raises."""
    parameters, around = parameters_of(target.thing), GuessContext(request.causal, request.device)
    words = _words(target.name, parameters, given, around)
    with seeded(request.seed, torch.device("cpu")):
        made = _called(target.thing, parameters, words.values)
    asked, target = target, target if inspect.isclass(target.thing) else _of_what_came_back(target, made)
    made = _placed(made, request) if isinstance(made, nn.Module) else made
    guesses = [*earlier, *words.guesses]
    arguments = {p.name: words.values.get(p.name, p.default) for p in parameters.named}
    arguments |= {name: value for name, value in words.values.items() if name not in arguments}
    for name, of_config in words.configs.items():
        config = words.values[name]
        guesses += config.every_guess() if isinstance(config, GuessedConfig) else []
        arguments |= values_in(name, config, of_config)

    def rebuild(changes: Mapping[str, Any]) -> Built:
        kept = {guess.name: guess.value for guess in guesses}
        left = tuple(guess for guess in guesses if guess.name not in changes)
        return _built(asked, request, {**kept, **given, **changes}, given_names, left)

    return Built(
        name=target.name,
        thing=target.thing,
        call=made if callable(made) else made.forward,
        module=made if isinstance(made, nn.Module) else None,
        arguments=arguments,
        given=given_names,
        guesses=tuple(guesses),
        rebuild=rebuild,
        documentation=target.documentation,
        file=target.file,
    )


def _of_what_came_back(target: Target, made: Any) -> Target:
    """The target of a function that builds, as what it returned: that is what is examined. Raises `MhaError` for what cannot be
    called."""
    if inspect.isclass(made) or not (callable(made) or hasattr(made, "forward")):
        what = f"the class {made.__name__}" if inspect.isclass(made) else f"a value of type {type(made).__name__}"
        raise MhaError(
            f"{target.name} takes no token vectors, and what it returns is {what}, not a module",
            hint="name a class, a function that attends, or one that returns a module",
            code="no-target",
            path=target.file,
        )
    thing = made if inspect.isroutine(made) else type(made)
    documentation = "\n\n".join(filter(None, (documentation_of(thing), target.documentation)))
    return Target(target.name, thing, source_file(thing) or target.file, documentation)


def _words(owner: str, parameters: Parameters, given: Mapping[str, Any], around: GuessContext) -> _ConstructorCall:
    """What the constructor is called with. Raises `MhaError` for names that it does not know, and for what has no usual name."""
    named = {p.name: p for p in parameters.named}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in _spread(given, named).items():
        first, dot, rest = name.partition(".")
        if first not in named and not (parameters.takes_any and not dot):
            _require_known(name, named)
        if dot:
            inner.setdefault(first, {})[rest] = value
    values = {name: value for name, value in given.items() if "." not in name and name not in inner}
    known = _known_roles(named, values, inner)
    required = [p for p in parameters.required if p.name not in values]
    configs = [p.name for p in required if _is_config(p)] + [n for n in inner if n not in values]
    open_parameters = [p for p in required if p.name not in configs]
    names = frozenset(named)
    roles = {p.name: role for p in open_parameters if (role := _role(p, names)) is not None}
    extra: set[Role] = {"n_kv_heads"} if configs else set()
    guess = guess_values({*roles.values(), *extra}, known, around)
    unknown = [p.name for p in open_parameters if roles.get(p.name) not in guess]
    if unknown:
        raise describe_unknown(owner, unknown)
    guesses = [Guess(name, guess[role], guess_reason(role, around)) for name, role in roles.items()]
    guesses += _made_causal(parameters, values, around)
    values |= {one.name: one.value for one in guesses}
    settled = {**known, **{role: guess[role] for role in roles.values()}}
    for name in dict.fromkeys(configs):
        p = named[name]
        config = make_config(name, p.annotation, p.default, inner.get(name, {}), settled, around)
        values[name] = config.config
        guesses += config.guesses
    return _ConstructorCall(values, {name: inner.get(name, {}) for name in dict.fromkeys(configs)}, guesses)


def _spread(given: Mapping[str, Any], named: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """What was given, a dictionary given for a config as what it says: `config={"n_head": 4}` as `config.n_head=4`."""
    spread: dict[str, Any] = {}
    for name, value in given.items():
        if name in named and _is_config(named[name]) and type(value) is dict:
            spread |= {f"{name}.{key}": held for key, held in value.items()}
        else:
            spread[name] = value
    return spread


def _require_known(name: str, named: Mapping[str, inspect.Parameter]) -> None:
    """Raises `MhaError` for a name that the constructor does not have, with the way to name what a config has."""
    config = next((p.name for p in named.values() if p.default is EMPTY and _is_config(p)), None)
    asked = name.rpartition(".")[2]
    if config is not None and role_of(asked) is not None:
        raise MhaError(
            f"--arg {name}: there is no such argument, only {describe_parameters({n: p.default for n, p in named.items()})}",
            hint=f"--arg {config}.{asked}=VALUE sets it in the config",
            code="argument",
        )
    require_known(name, {n: p.default for n, p in named.items()})


def _is_config(parameter: inspect.Parameter) -> bool:
    return role_of(parameter.name) == "config" or is_config_class(parameter.annotation, parameter.name)


def _role(parameter: inspect.Parameter, names: frozenset[str]) -> Role | None:
    """What a parameter stands for, where its annotation does not say that it is something else."""
    role = role_of(parameter.name, names)
    if parameter.annotation is bool and role not in ("bias", "causal", "batch_first"):
        return None
    if parameter.annotation not in (bool, EMPTY, "bool") and parameter.name == "mask":
        return None
    return role


def _known_roles(
    named: Mapping[str, inspect.Parameter], values: Mapping[str, Any], inner: Mapping[str, Mapping[str, Any]]
) -> dict[Role, Any]:
    """What is settled of each role: by what was given, else by a default."""
    names = frozenset(named)
    stated: dict[str, Any] = {p.name: p.default for p in named.values() if p.default is not EMPTY}
    stated |= dict(values) | {path: value for given in inner.values() for path, value in given.items()}
    known: dict[Role, Any] = {}
    for name, value in stated.items():
        role = role_of(name.rpartition(".")[2], names)
        if role is not None and value is not None and (role not in known or name in values):
            known[role] = value
    return known


def _made_causal(parameters: Parameters, values: Mapping[str, Any], around: GuessContext) -> list[Guess]:
    """Parameters that make it causal, which are off by default, and `--causal` says so."""
    return [
        Guess(p.name, True, "--causal")
        for p in parameters.named
        if around.causal and p.default is False and p.name not in values and role_of(p.name) == "causal"
    ]


def _called(cls: Callable[..., Any], parameters: Parameters, values: Mapping[str, Any]) -> Any:
    """What is built. Raises what the constructor raises."""
    in_place = [p.name for p in parameters.named if p.kind is p.POSITIONAL_ONLY and p.name in values]
    by_name = {name: value for name, value in values.items() if name not in in_place}
    return cls(*(values[name] for name in in_place), **by_name)


def _placed(module: nn.Module, request: TargetRequest) -> nn.Module:
    """The module in eval, on its device."""
    if request.device != "cpu":
        module = module.to(request.device)
    return module.eval()


def _refusal(target: Target, fault: BaseException, given: Mapping[str, Any]) -> MhaError:
    """The error for what a constructor raised."""
    if isinstance(fault, UnknownAttribute | UnknownItem):
        name = fault.name if isinstance(fault, UnknownAttribute) else fault.args[0]
        config = next((p.name for p in parameters_of(target.thing).named if _is_config(p)), "config")
        return describe_unknown(target.name, [f"{config}.{name}"])
    where = "" if target.file is None else f" of {shown_path(target.file)}"
    words = ", ".join(f"{name}={value!r:.40}" for name, value in given.items())
    subject = f"{target.name.rpartition(':')[2]}({words}){where}"
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
"""Further names that configs have everywhere, with what leaves attention as it is."""


class UnknownAttribute(AttributeError):
    """A constructor read a name of a config that was not given and whose meaning is unknown."""


class UnknownItem(KeyError):
    """The same, read as an item."""


class GuessedConfig(dict[str, Any]):
    """A config of what was given; a name that it lacks is guessed when it is first read, by attribute or by item, and kept.

    A name that is no usual one raises `AttributeError` or `KeyError`, so that `hasattr`, `getattr(config, name, default)` and
    `config.get(name, default)` do what their author expects. `guesses` are the names that were guessed, with their values.
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
        """What was given or guessed; raises `UnknownAttribute`."""
        if not self._can_tell(name):
            raise UnknownAttribute(f"{vars(self).get('_name', 'config')} has no {name!r}", name=name)
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Keeps what its reader puts there."""
        self[name] = value

    def __missing__(self, name: str) -> Any:
        """A guess; raises `UnknownItem`."""
        if not self._can_tell(name):
            raise UnknownItem(name)
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        """What was given or guessed before; else the default, else a guess."""
        return self[name] if name in self or (default is None and self._can_tell(name)) else default

    def every_guess(self) -> list[Guess]:
        """All guesses, those of configs within it too, by their dotted names."""
        inner = [guess for value in self.values() if isinstance(value, GuessedConfig) for guess in value.every_guess()]
        return [*self.guesses, *inner]

    def _can_tell(self, name: str) -> bool:
        """Whether the name has a value, which may have to be guessed for it."""
        if name not in self:
            guess = self._guess(name) if "_guess" in vars(self) else None
            if guess is None:
                return False
            self[name] = guess.value
            self.guesses.append(guess._replace(name=f"{self._name}.{name}"))
        return True


class MadeConfig(NamedTuple):
    """A config, the values in it that a reader may want to know, by dotted name, and what in it was guessed so far."""

    config: Any
    guesses: tuple[Guess, ...]


def is_config_class(annotation: object, name: str) -> bool:
    """Whether a parameter's annotation is a class to make a config of: a dataclass, or any class for a parameter of that name
    that is no mapping and no class of the language or of torch."""
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
    around: GuessContext,
) -> MadeConfig:
    """The config for the parameter `name`: its default changed, its class called, or one of guesses.

    `given` are the values given for it, by name without the parameter's own.
    """
    if default is not None and default is not EMPTY:
        return MadeConfig(_changed(copy.deepcopy(default), name, given), ())
    if inspect.isclass(annotation) and is_config_class(annotation, name):
        return _instance(name, annotation, given, known, around)

    def guess(asked: str) -> Guess | None:
        role = role_of(asked)
        if role is not None and role != "config":
            roles: set[Role] = {role, "n_kv_heads"}  # which other names are still to be read is not known
            values = guess_values(roles, known, around)
            if role in values:
                return Guess(asked, values[role], guess_reason(role, around))
        if asked == "is_decoder":
            return Guess(asked, around.causal, guess_reason("causal", around))
        return Guess(asked, _SETTINGS[asked], "the usual setting") if asked in _SETTINGS else None

    return MadeConfig(GuessedConfig(name, given, guess), ())


def values_in(name: str, config: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a config says of the roles that attention knows, and what was given for it, by dotted names."""
    held = config if isinstance(config, Mapping) else _held(config)
    return {f"{name}.{key}": value for key, value in held.items() if key in given or role_of(str(key)) is not None}


def _class_values(config: object) -> dict[str, Any]:
    """What the classes of an object say, where they are no machinery of a library."""
    return {key: value for base in reversed(type(config).__mro__[:-1]) for key, value in vars(base).items()
            if isinstance(value, int | float) and not key.startswith("_")}  # fmt: skip


def _instance(
    name: str, cls: type, given: Mapping[str, Any], known: Mapping[Role, Any], around: GuessContext
) -> MadeConfig:
    """The config's own class, called with what was given and with guesses for what has no default."""
    parameters = parameters_of(cls)
    names = frozenset(parameter.name for parameter in parameters.named)
    own = [(role_of(key), value) for key, value in given.items()]
    defaults = [(role_of(p.name), p.default) for p in parameters.named if p.default is not EMPTY]
    settled = dict(known) | {role: value for role, value in [*defaults, *own] if role is not None}
    open_parameters = [p for p in parameters.required if p.name not in given]
    roles = {role for p in open_parameters if (role := role_of(p.name)) is not None}
    values = guess_values(roles, settled, around)
    unknown = [p.name for p in open_parameters if role_of(p.name) not in values]
    if unknown:
        raise describe_unknown(name, [f"{name}.{one}" for one in unknown])
    guesses = [Guess(f"{name}.{p.name}", values[role], guess_reason(role, around))
               for p in open_parameters if (role := role_of(p.name)) is not None]  # fmt: skip
    guesses += [
        Guess(f"{name}.{p.name}", True, "--causal")
        for p in parameters.named
        if around.causal and p.default is False and p.name not in given and role_of(p.name) == "causal"
    ]
    words = {guess.name.partition(".")[2]: guess.value for guess in guesses}
    words |= {key: value for key, value in given.items() if key in names}
    made = cls(**words)
    rest = {key: value for key, value in given.items() if getattr(made, key, None) != value}  # it may have set its own
    return MadeConfig(_changed(made, name, rest), tuple(guesses))


def _changed(config: Any, name: str, given: Mapping[str, Any]) -> Any:
    """The config with other values for names that it has. Raises `MhaError` for others."""
    for path, value in given.items():
        *outer, last = path.split(".")
        owner = config
        for part in outer:
            owner = getattr(owner, part)
        if isinstance(owner, dict):
            owner[last] = value
            continue
        if not hasattr(owner, last):
            require_known(f"{name}.{path}", {f"{name}.{key}": held for key, held in _held(owner).items()})
        try:
            setattr(owner, last, value)
        except AttributeError as fault:
            raise MhaError(f"--arg {name}.{path} cannot be set: {fault}", code="argument") from fault
    return config


def _held(config: object) -> dict[str, Any]:
    own = getattr(config, "__dict__", {})
    return {**own, **{key: value for key, value in _class_values(config).items() if key not in own}}
