"""Configs: the object from which a constructor reads its sizes, made of what was given and of guesses."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from mhacli.errors import MhaError
from mhacli.adapters.usercode.arguments import Role, role_of
from mhacli.adapters.usercode.build.constructor import EMPTY, describe_unknown, parameters_of, require_known
from mhacli.adapters.usercode.build.sizes import Surroundings, guessed, why
from mhacli.adapters.usercode.user_attention import Guess

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
    """A constructor read a name of a config that nobody gave and whose meaning is unknown."""


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
    around: Surroundings,
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
            values = guessed(roles, known, around)
            if role in values:
                return Guess(asked, values[role], why(role, around))
        if asked == "is_decoder":
            return Guess(asked, around.causal, why("causal", around))
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
    name: str, cls: type, given: Mapping[str, Any], known: Mapping[Role, Any], around: Surroundings
) -> MadeConfig:
    """The config's own class, called with what was given and with guesses for what has no default."""
    parameters = parameters_of(cls)
    names = frozenset(parameter.name for parameter in parameters.named)
    own = [(role_of(key), value) for key, value in given.items()]
    defaults = [(role_of(p.name), p.default) for p in parameters.named if p.default is not EMPTY]
    settled = dict(known) | {role: value for role, value in [*defaults, *own] if role is not None}
    open_parameters = [p for p in parameters.required if p.name not in given]
    roles = {role for p in open_parameters if (role := role_of(p.name)) is not None}
    values = guessed(roles, settled, around)
    unknown = [p.name for p in open_parameters if role_of(p.name) not in values]
    if unknown:
        raise describe_unknown(name, [f"{name}.{one}" for one in unknown])
    guesses = [Guess(f"{name}.{p.name}", values[role], why(role, around))
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
            raise MhaError(f"{name}.{path} must be changeable, got {fault}", code="argument") from fault
    return config


def _held(config: object) -> dict[str, Any]:
    own = getattr(config, "__dict__", {})
    return {**own, **{key: value for key, value in _class_values(config).items() if key not in own}}
