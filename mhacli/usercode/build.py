"""Builds a user's attention from given arguments, constructor defaults, and guesses, which are reported."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from mhacli.errors import MhaError, UsageError, first_names
from mhacli.usercode.arguments import Role, parse_value, role_of, usual_values
from mhacli.usercode.call.signature import ROWS, signature_of
from mhacli.usercode.inputs import copied, seeded
from mhacli.usercode.process import exception_text, lacks_cuda, shown_path, user_code_error
from mhacli.usercode.target import TargetRequest, source_file
from mhacli.usercode.types import Built

_EMPTY: Final = inspect.Parameter.empty
_MOST_SHOWN: Final = 40


def build(thing: Any, request: TargetRequest) -> Built:
    """The target in eval mode on its device. A class or a factory function is called; another function or an instance is used
    directly.

    Raises `MhaError` for a missing device, for missing or unknown arguments, for a target that cannot be built, and for an
    exception in its constructor.
    """
    try:
        torch.empty(0, device=request.device)
    except Exception as fault:  # torch raises a different class for each reason
        raise MhaError(
            f"--device {request.device}: there is no such device here: {exception_text(fault)}",
            hint="--device cpu works everywhere",
            code="no-device",
        ) from fault
    given = _given(request)
    if inspect.isclass(thing) and issubclass(thing, torch.autograd.Function):
        return _used_directly(thing.apply, request)
    if inspect.isclass(thing) and not _has_call(thing):
        raise MhaError(f"{request.target} has neither forward nor __call__", code="no-target")
    if inspect.isclass(thing) or is_factory(thing, given):
        return _constructed(thing, request, given)
    return _used_directly(thing, request)


def _has_call(cls: type) -> bool:
    forward = getattr(cls, "forward", nn.Module.forward)
    return forward is not nn.Module.forward or any(
        "__call__" in vars(base) for base in cls.__mro__ if base is not nn.Module
    )


def is_factory(thing: Any, given: Mapping[str, object]) -> bool:
    """Whether a function builds attention: its annotation returns a module, or no parameter takes token vectors. Parameters set
    with `--arg` do not count."""
    if isinstance(thing, nn.Module) or not callable(thing):
        return False
    returned = _signature(thing).return_annotation
    if inspect.isclass(returned) and issubclass(returned, nn.Module):
        return True
    return all(parameter.name in given for parameter in signature_of(thing, *ROWS, "rest"))


def _given(request: TargetRequest) -> dict[str, Any]:
    """The values of `--arg`, by name."""
    given: dict[str, Any] = {}
    for name, text in request.arguments:
        if name in given:
            raise UsageError(f"--arg {name} is given twice")
        value = parse_value(text)
        is_dtype = role_of(name.rpartition(".")[2]) == "dtype" and isinstance(value, str)
        given[name] = getattr(torch, str(value), value) if is_dtype else value
    return given


def _used_directly(thing: Any, request: TargetRequest) -> Built:
    """A function, or an instance. `rebuild` returns a copy of it in its original state."""
    if request.arguments:
        names = ", ".join(name for name, _ in request.arguments)
        raise MhaError(
            f"--arg {names}: {request.target} is not a class",
            hint="--call-arg NAME=VALUE is passed to each call",
            code="argument",
        )
    module = _placed(thing, request) if isinstance(thing, nn.Module) else None
    original = copied(thing)

    def rebuild(changes: Mapping[str, Any]) -> Built:
        if changes:
            raise MhaError(f"{request.target} cannot be built with {', '.join(changes)}", code="argument")
        return _used_directly(copied(original), request)

    call = thing if callable(thing) else thing.forward
    return Built(request.target, thing, call, module, {}, frozenset(), {}, rebuild, source_file(thing))


def _placed(module: nn.Module, request: TargetRequest) -> nn.Module:
    return (module if request.device == "cpu" else module.to(request.device)).eval()


def _constructed(thing: Any, request: TargetRequest, given: Mapping[str, Any]) -> Built:
    """What a class or a factory returns for the given arguments, and for guesses."""
    parameters = parameters_of(thing)
    try:
        values, guesses = _arguments(thing, given, {}, request)
        instance = _called(thing, values, request)
    except (KeyboardInterrupt, MhaError):
        raise
    except BaseException as fault:
        raise _build_error(thing, request, fault) from fault
    arguments = {name: parameter.default for name, parameter in parameters.items()} | values
    for name, config in values.items():
        if name in parameters and _is_config(parameters[name]):
            own = config.guesses if isinstance(config, Config) else {}
            guesses |= {f"{name}.{field}": why for field, why in own.items()}
            for field, value in _fields(config).items():
                path = f"{name}.{field}"
                if path in given or path in guesses or role_of(field) is not None:
                    arguments[path] = value

    def rebuild(changes: Mapping[str, Any]) -> Built:
        return _constructed(thing, request, {name: arguments[name] for name in guesses} | dict(given) | dict(changes))

    shown = thing if inspect.isclass(thing) else instance if inspect.isroutine(instance) else type(instance)
    return Built(
        name=request.target,
        thing=shown,
        call=instance if callable(instance) else instance.forward,
        module=instance if isinstance(instance, nn.Module) else None,
        arguments=arguments,
        given=frozenset(given),
        guesses=guesses,
        rebuild=rebuild,
        file=source_file(shown) or source_file(thing),
    )


def _called(thing: Any, values: Mapping[str, Any], request: TargetRequest) -> Any:
    """The result of a constructor or a factory, on its device. Raises `MhaError` for a result that cannot be called."""
    by_place = [name for name, p in parameters_of(thing).items() if p.kind is p.POSITIONAL_ONLY and name in values]
    by_name = {name: value for name, value in values.items() if name not in by_place}
    with seeded(request.seed, torch.device("cpu")):
        made = thing(*(values[name] for name in by_place), **by_name)
    if isinstance(made, nn.Module):
        return _placed(made, request)
    if inspect.isclass(made) or not (callable(made) or hasattr(made, "forward")):
        raise MhaError(
            f"{request.target} takes no token vectors and returns {made!r:.40}, not a module",
            hint="name a class, a function that attends, or one that returns a module",
            code="no-target",
            path=source_file(thing),
        )
    return made


def _build_error(thing: Any, request: TargetRequest, fault: BaseException) -> MhaError:
    """The error for an exception of a constructor."""
    file = source_file(thing)
    words = ", ".join(f"{name}={text}" for name, text in request.arguments)
    subject = f"{request.target.rpartition(':')[2]}({words})" + (f" of {shown_path(file)}" if file else "")
    if lacks_cuda(exception_text(fault)):
        subject = f"{subject} needs a CUDA device, which this machine does not have"
        return user_code_error(subject, fault, file, code="no-device")
    defaults = {name: parameter.default for name, parameter in parameters_of(thing).items()}
    advice = f"its arguments are {_described(defaults)}" if defaults and not words else None
    return user_code_error(f"{subject} could not be built", fault, file, code="build", advice=advice)


# ------------------------------------------------------------------------------------------ the arguments of a constructor


def parameters_of(thing: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a class or factory function, annotations resolved if possible. For a class that only forwards
    `**kwargs`, those of its base class."""
    named: dict[str, inspect.Parameter] = {}
    for owner in thing.__mro__ if inspect.isclass(thing) else (thing,):
        parameters = _signature(owner).parameters
        kinds = inspect.Parameter
        named = {n: p for n, p in parameters.items() if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)}
        if named or not _takes_any(owner):
            break
    return named


def _signature(thing: Callable[..., Any]) -> inspect.Signature:
    """The signature, annotations resolved if possible; empty if there is none."""
    if getattr(thing, "__init__", None) is nn.Module.__init__:  # accepts any argument, only to reject it
        return inspect.Signature()
    for resolve in (True, False):
        try:
            return inspect.signature(thing, eval_str=resolve)
        except Exception:  # evaluating the user's annotations may raise anything
            continue
    return inspect.Signature()


def _takes_any(thing: Callable[..., Any]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in _signature(thing).parameters.values())


def _arguments(
    thing: Callable[..., Any],
    given: Mapping[str, Any],
    known: Mapping[Role, Any],
    request: TargetRequest,
    prefix: str = "",
) -> tuple[dict[str, Any], dict[str, str]]:
    """The arguments of a constructor, given or guessed, and the reason of each guess. `known` are roles known from outside.

    Raises `MhaError` for an unknown name, and for a required argument that mha cannot guess.
    """
    parameters = parameters_of(thing)
    values, fields = _split(thing, given)
    required = [name for name, p in parameters.items() if p.default is _EMPTY and name not in values]
    configs = dict.fromkeys([*(name for name in required if _is_config(parameters[name])), *fields])
    roles = {name: _role(name, parameters) for name in required if name not in configs}
    known = {**known, **_known_roles(parameters, values, fields)}
    is_grouped = bool(configs) or "n_kv_heads" in (*roles.values(), *known)
    usual = usual_values(known, is_grouped=is_grouped, causal=request.causal, device=request.device)
    unknown = [f"{prefix}{name}" for name, role in roles.items() if role not in usual]
    if unknown:
        raise MhaError(
            f"{request.target} needs a value for {' and '.join(unknown)}, which mha cannot guess from the name",
            hint=f"for example {' '.join(f'--arg {name}=1' for name in unknown)}",
            code="argument",
        )
    guesses = {}
    for name, role in roles.items():
        if role is not None:
            values[name], guesses[name] = usual[role]
            known[role] = values[name]
    for name, parameter in parameters.items():
        if request.causal and parameter.default is False and name not in values and role_of(name) == "causal":
            values[name], guesses[name] = usual["causal"]
    for name in configs:
        values[name], own = _config(parameters[name], fields.get(name, {}), known, usual, request)
        guesses |= own
    return values, guesses


def _split(thing: Callable[..., Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The given arguments, and the given fields of each config: `config.n_head=4` as `config={"n_head": 4}`. Raises
    `MhaError` for an unknown name."""
    parameters = parameters_of(thing)
    values: dict[str, Any] = {}
    fields: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        first, dot, rest = name.partition(".")
        if first not in parameters and (dot or not _takes_any(thing)):
            config = next((other for other, p in parameters.items() if p.default is _EMPTY and _is_config(p)), None)
            is_field = config is not None and role_of(name.rpartition(".")[2]) is not None
            hint = f"--arg {config}.{name.rpartition('.')[2]}=VALUE sets it in the config" if is_field else None
            raise _no_argument(name, {other: p.default for other, p in parameters.items()}, hint)
        if dot:
            fields.setdefault(first, {})[rest] = value
        elif type(value) is dict and name in parameters and _is_config(parameters[name]):
            fields.setdefault(name, {}).update(value)
        else:
            values[name] = value
    return values, fields


def _known_roles(
    parameters: Mapping[str, inspect.Parameter], values: Mapping[str, Any], fields: Mapping[str, Mapping[str, Any]]
) -> dict[Role, Any]:
    """The value of each role: given, in a config or not, or else by default."""
    defaults = {name: p.default for name, p in parameters.items() if p.default is not _EMPTY and name not in values}
    known: dict[Role, Any] = {}
    for arguments in (values, *fields.values(), defaults):
        for name, value in arguments.items():
            role = role_of(name.rpartition(".")[2], frozenset(parameters))
            if role is not None and value is not None:
                known.setdefault(role, value)
    return known


def _role(name: str, parameters: Mapping[str, inspect.Parameter]) -> Role | None:
    """The role of a parameter, None if its annotation rules that role out."""
    role, annotation = role_of(name, frozenset(parameters)), parameters[name].annotation
    if annotation is bool and role not in ("bias", "causal", "batch_first"):
        return None
    return None if name == "mask" and annotation not in (bool, _EMPTY, "bool") else role


def _no_argument(name: str, defaults: Mapping[str, Any], hint: str | None = None) -> MhaError:
    """The error for a name that no parameter has. The message lists the parameters with their defaults."""
    found = (
        f"there is no such argument, only {_described(defaults)}" if defaults else "the constructor takes no arguments"
    )
    return MhaError(f"--arg {name}: {found}", hint=hint, code="argument")


def _described(defaults: Mapping[str, Any]) -> str:
    """Parameters with their defaults, as text: `d_model, n_heads=8`."""
    words = [name if default is _EMPTY else f"{name}={default!r:.60}" for name, default in defaults.items()]
    return first_names(words, _MOST_SHOWN)


# -------------------------------------------------------------------------------------------------------------- configs


_UNLIKE_CONFIGS: Final = ("builtins", "inspect", "typing", "collections", "torch", "enum", "pathlib", "omegaconf")
_N_TOKENS: Final = (101, "the number of different tokens")
Usual = Mapping[Role, tuple[Any, str]]
"""The usual value of each role, with its meaning."""


class Config(dict[str, Any]):
    """A config whose fields of usual names have usual values: each is stored, and its reason kept in `guesses`, when the
    constructor first reads it, as attribute or item. An unusual name raises `AttributeError` or `KeyError`."""

    def __init__(self, usual: Usual) -> None:
        super().__init__()
        vars(self).update(usual=usual, guesses={})

    def __missing__(self, name: str) -> Any:
        """A usual value."""
        role, usual = role_of(name), vars(self).get("usual", {})  # a copy in the making has no attributes
        if role not in usual and name != "vocab_size":
            raise KeyError(f"mha cannot guess {name}; --arg with the name of the config and .{name}=VALUE sets it")
        self[name], self.guesses[name] = usual.get(role, _N_TOKENS)
        return self[name]

    def __getattr__(self, name: str) -> Any:
        """A field, given or usual."""
        try:
            return self[name]
        except KeyError as fault:
            raise AttributeError(*fault.args) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Stores a value set by the constructor."""
        self[name] = value

    def get(self, name: str, default: Any = None) -> Any:
        """A stored value, else the default, else a usual value."""
        if name in self or default is not None:
            return super().get(name, default)
        return getattr(self, name, None)


def _config_class(parameter: inspect.Parameter) -> type | None:
    """The class of a config: a dataclass, or another class for a parameter named as a config."""
    cls = parameter.annotation
    if not inspect.isclass(cls) or cls.__module__.partition(".")[0] in _UNLIKE_CONFIGS or issubclass(cls, Mapping):
        return None
    return cls if dataclasses.is_dataclass(cls) or role_of(parameter.name) == "config" else None


def _is_config(parameter: inspect.Parameter) -> bool:
    return role_of(parameter.name) == "config" or _config_class(parameter) is not None


def _config(
    parameter: inspect.Parameter, fields: Mapping[str, Any], known: Mapping[Role, Any], usual: Usual,
    request: TargetRequest,
) -> tuple[Any, dict[str, str]]:  # fmt: skip
    """A config with the given fields: the changed default, an instance of its annotation, or a `Config`; and the reasons of
    the guesses made for its class."""
    name, cls, guesses = parameter.name, _config_class(parameter), {}
    config: Any = Config(usual)
    if parameter.default is not None and parameter.default is not _EMPTY:
        config = copy.deepcopy(parameter.default)
    elif cls is not None:
        given = {path: value for path, value in fields.items() if path.partition(".")[0] in parameters_of(cls)}
        values, reasons = _arguments(cls, given, known, request, prefix=f"{name}.")
        config, guesses = cls(**values), {f"{name}.{field}": why for field, why in reasons.items()}
        fields = {path: value for path, value in fields.items() if path not in given}
    for path, value in fields.items():
        *outer, last = path.split(".")
        owner = config
        for part in outer:
            owner = owner.setdefault(part, Config({})) if isinstance(owner, dict) else getattr(owner, part)
        if isinstance(owner, dict):
            owner[last] = value
        elif hasattr(owner, last):
            setattr(owner, last, value)
        else:
            raise _no_argument(f"{name}.{path}", {f"{name}.{field}": now for field, now in _fields(owner).items()})
    return config, guesses


def _fields(config: object) -> dict[str, Any]:
    """The fields of a config: its items, or its attributes and the numbers of its class."""
    if isinstance(config, Mapping):
        return dict(config)
    inherited = [item for base in reversed(type(config).__mro__[:-1]) for item in vars(base).items()]
    numbers = {name: value for name, value in inherited if isinstance(value, int | float) and not name.startswith("_")}
    own = getattr(config, "__dict__", {})
    return own | numbers | own
