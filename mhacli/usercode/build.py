"""Imports and builds a user's attention from given arguments, constructor defaults, and guesses,
which are reported.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import os
import random
import re
import shlex
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mhacli.attention.devices import choose_device
from mhacli.errors import MhaError, UsageError, first_names
from mhacli.record.record import Argument

from .copies import copied, deep_copy
from .door import (
    NO_ANSWER,
    Attempt,
    AttemptsInWords,
    UserRaised,
    call_user,
    first_that_works,
    for_user,
    on_behalf,
    ours,
)
from .faults import is_user_file, shown_path, user_code_error
from .foreign import FunctionMode, change_tensors, uncompiled
from .names import source_of
from .process import Stage, no_stage
from .roles import ROWS, role_of, role_of_last, signature, signature_of
from .target import INTERPRET, TargetRequest, find_target, imports_triton, main_part, source_file

T = TypeVar("T")
_EMPTY = inspect.Parameter.empty
_MOST_LISTED = 40


@dataclass(frozen=True)
class Built:
    """The target, built.

    `thing` is the class or function that the target names. `call` is the callable: an `nn.Module`,
    an instance of another class, or the function itself. `arguments` are all constructor arguments,
    defaults included; `given` names those from the user, and `guesses` those that mha had to guess,
    with the reason of each. `file` is its source file, None if there is none. `stage` reports when
    a call begins and ends, so that only calls have a time limit; `tried` notes what did not work.
    `unset` are the parameters that the constructor gave no numbers.
    """

    name: str
    thing: Any
    call: Callable[..., Any]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    given: frozenset[str] = frozenset()
    guesses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    file: str | None = None
    stage: Stage = no_stage
    tried: AttemptsInWords = dataclasses.field(default_factory=AttemptsInWords)
    unset: tuple[str, ...] = ()

    @property
    def module(self) -> nn.Module | None:
        """What is called, if it is a module."""
        return self.call if isinstance(self.call, nn.Module) else None

    @property
    def parts(self) -> dict[str, nn.Module]:
        """The modules in it by name, itself first; none if it is no module."""
        return {} if self.module is None else dict(self.module.named_modules())

    @property
    def weight_shapes(self) -> list[torch.Size]:
        """The shapes of the weights of at least two axes that it holds, or a module in it."""
        weights = list[Tensor]()
        for part in [self.call, *getattr(self.call, "__dict__", {}).values()]:
            if isinstance(part, nn.Module):
                weights += part.parameters()
            elif isinstance(part, Tensor):
                weights.append(part)
        return [each.shape for each in weights if not is_lazy(each) and each.ndim > 1]

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs its kernels."""
        is_asked = os.environ.get(INTERPRET) == "1"
        return is_asked and self.file is not None and imports_triton(self.file)

    @property
    def kernel_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of kernels. Triton's interpreter takes bfloat16 for whole numbers."""
        narrow = (torch.float16,) if self.is_interpreted else (torch.bfloat16, torch.float16)
        return (torch.float32, *narrow)

    @property
    def n_ids(self) -> int:
        """The fewest ids that an embedding in it knows; 0 without one."""
        tables = (part for part in self.parts.values() if isinstance(part, nn.Embedding))
        sizes = [table.num_embeddings for table in tables]
        return min((size for size in sizes if size > 1), default=0)

    def refusal(self, message: str, hint: str | None = None) -> MhaError:
        """The error for a target that cannot be called."""
        return MhaError(message, hint=hint, code="cannot-examine", path=self.file)


def load_built(
    request: TargetRequest, stage: Stage, takes: Callable[[Built], object] = lambda _: None
) -> Built:
    """The requested code in eval mode on its device, before it is known how to call it. A class or
    a factory function is called; another function or an instance is used directly.

    Raises `MhaError` for a missing device, for missing or unknown arguments, for a target that
    cannot be built, and for an exception in its constructor. What is built with the values that a
    hint gives, `takes` does not refuse.
    """
    try:
        return _loaded(request, stage)
    except NoGuess as unknown:
        raise unknown.with_values(request, takes) from None


def _loaded(request: TargetRequest, stage: Stage) -> Built:
    """The requested code, as `load_built` gives it."""
    stage(f"importing {request.target}")
    thing = _applied(find_target(request.target))
    stage(f"building {request.target}")
    choose_device(request.device)
    given = {name: parse_value(text, thing) for name, text in request.arguments}
    of_main = _sizes_of_main(thing, given)
    given = {name: value for name, value in given.items() if name not in of_main}
    if inspect.isclass(thing) or is_factory(thing, given):
        built = _constructed(thing, request, given)
    elif given:
        message = f"--arg {', '.join(given)}: {request.target} is not a class"
        raise MhaError(
            message, hint="--call-arg NAME=VALUE is passed to each call", code="argument"
        )
    else:
        built = _built(thing, thing, request)
    reasons = dict.fromkeys(of_main, "set below if __name__ == '__main__', or by --arg")
    return replace(
        built,
        stage=stage,
        arguments={**of_main, **built.arguments},
        guesses={**reasons, **built.guesses},
    )


def _applied(thing: Any) -> Any:
    """A function of torch's autograd, or its `apply`, as a function of what its `forward` takes
    beside the context; any other thing itself.
    """
    owner = getattr(thing, "__self__", thing)
    if not (inspect.isclass(owner) and issubclass(owner, torch.autograd.Function)):
        return thing
    of_forward = signature(owner.forward)
    has_context = owner.setup_context is torch.autograd.Function.setup_context
    parameters = [*of_forward.parameters.values()][1 if has_context else 0 :]
    of_apply = of_forward.replace(parameters=parameters)

    @ours()
    @functools.wraps(owner.forward)
    def apply(*positional: Any, **keywords: Any) -> Any:
        given = on_behalf(of_apply.bind, *positional, **keywords)
        given.apply_defaults()
        return on_behalf(owner.apply, *given.args)

    vars(apply)["__signature__"] = of_apply
    return apply


def is_of_torch(part: object) -> bool:
    """Whether its class is one of torch's."""
    return type(part).__module__.startswith("torch.")


def is_factory(thing: Any, given: Mapping[str, object]) -> bool:
    """Whether a function builds attention: its annotation returns a module, or no parameter takes
    token vectors. Parameters set with `--arg` do not count.
    """
    if isinstance(thing, nn.Module) or not callable(thing):
        return False
    returned = signature(thing).return_annotation
    if inspect.isclass(returned) and issubclass(returned, nn.Module):
        return True
    return all(parameter.name in given for parameter in signature_of(thing, *ROWS, "rest"))


def _built(instance: Any, definition: Any, request: TargetRequest) -> Built:
    """What is called, without a word on its arguments; `definition` is the class or the function
    that has its code. Of a compiled module it is the module. Raises `MhaError` for a scripted one,
    which takes no hooks, and for what cannot be called.
    """
    if isinstance(instance, torch.jit.ScriptModule):
        message = f"{request.target} is a scripted module, which has no Python code"
        raise MhaError(
            message, hint="give the module before torch.jit.script", code="cannot-examine"
        )
    instance = uncompiled(instance)
    file = source_file(definition)
    inherited = source_file(getattr(definition, "forward", None))
    if inherited and is_user_file(inherited):
        file = inherited
    is_callable = callable(instance) or hasattr(instance, "forward")
    if not is_callable or getattr(type(instance), "forward", None) is nn.Module.forward:
        message = (
            f"{request.target} makes a {type(instance).__name__}, which has neither forward nor"
            " __call__"
        )
        hint = "name a class, a function that attends, or one that returns a module"
        raise MhaError(message, hint=hint, code="no-target", path=file)
    if isinstance(instance, nn.Module):
        if any(
            each.is_meta or is_lazy(each) for each in call_user(lambda: [*instance.parameters()])
        ):
            message = f"parameters of {request.target} have no numbers: lazy or meta ones"
            hint = "name a function that gives them numbers and returns the module"
            raise MhaError(message, hint=hint, code="cannot-examine", path=file)
        if request.device != "cpu":
            instance = call_user(instance.to, request.device)
        instance = call_user(instance.eval)
    call = instance if callable(instance) else instance.forward
    return Built(request.target, definition, call, file=file)


def _constructed(thing: Any, request: TargetRequest, given: Mapping[str, Any]) -> Built:
    """What a class or a factory returns for the given arguments, and for guesses."""
    tried = list[Attempt]()

    def build(arguments: _Arguments) -> Built:
        """The thing that the constructor makes with these arguments, and their reasons."""
        values = arguments.values()
        with seeded(request.seed, torch.device("cpu")):
            with _nan_where_unset():
                instance = call_user(thing, **values)
            unset = _set_numbers(instance)
        definition = thing
        if not inspect.isclass(thing):
            definition = instance if inspect.isroutine(instance) else type(instance)
        built = _built(instance, definition, request)
        reasons = arguments.reasons()
        shown = _shown_arguments(thing, values, {*given, *reasons})
        return replace(
            built,
            arguments=shown,
            given=frozenset(given),
            guesses={name: reason for name, reason in reasons.items() if name in shown},
            file=built.file or source_file(thing),
            unset=unset,
        )

    built = first_that_works(_arguments_to_try(thing, request, given, tried), build, tried.append)
    if built is None:
        failure = tried[-1].failure
        if isinstance(failure, UserRaised):
            raise _build_error(thing, request, failure.fault) from failure.fault
        raise failure
    for each in tried:
        built.tried.note(each)
    return built


@contextmanager
def _nan_where_unset() -> Iterator[None]:
    """A context in which memory that nothing sets, as of `torch.empty`, holds NaN, instead of what
    stood there before.
    """
    mode = torch.get_deterministic_debug_mode()
    try:
        torch.set_deterministic_debug_mode("warn")
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def _set_numbers(instance: Any) -> tuple[str, ...]:
    """Sets what a constructor left without numbers: draws parameters, whose names are returned, and
    fills other tensors, such as a cache, with zeros.
    """
    names = list[str]()
    parts = dict[str, nn.Module]()
    if isinstance(instance, nn.Module):  # which torch asks for the hash of each part
        parts = call_user(lambda: dict(instance.named_modules()))
    for path, part in parts.items():
        for name, each in {**vars(part), **part._buffers, **part._parameters}.items():
            is_of_numbers = isinstance(each, Tensor) and each.is_floating_point()
            if not is_of_numbers or each.is_meta or is_lazy(each) or not each.isnan().any():
                continue
            numbers = torch.zeros_like(each)
            if isinstance(each, nn.Parameter):
                numbers.normal_(std=each.shape[-1] ** -0.5 if each.ndim else 1.0)
                names.append(f"{path}.{name}".lstrip("."))
            each.detach().copy_(torch.where(each.isnan(), numbers, each))
    return tuple(names)


def _arguments_to_try(
    thing: Any, request: TargetRequest, given: Mapping[str, Any], tried: Sequence[Attempt]
) -> Iterator[_Arguments]:
    """The arguments of a class or a factory, with narrow guesses in place of wide defaults; as wide
    as the defaults, because it may not be possible to build it narrower; and with a width that
    suits a norm, if this is what fails. No others help against a refusal by mha.
    """
    arguments = _arguments(thing, given, request)
    yield arguments
    if isinstance(tried[-1].failure, MhaError):
        return
    if any(map(_is_width, arguments.reasons())) and not request.keeps_sizes:
        request = replace(request, keeps_sizes=True)
        arguments = _arguments(thing, given, request)
        yield arguments
    widths = [name for name in arguments.reasons() if role_of_last(name) == "d_model"]
    failure = tried[-1].failure
    if widths and isinstance(failure, UserRaised) and "num_groups" in str(failure.fault):
        wide = _arguments(thing, {**given, **dict.fromkeys(widths, _OF_GROUPS)}, request)
        yield replace(
            wide, reasons_of_values=dict.fromkeys(widths, "a width that 32 groups divide")
        )


def _build_error(thing: Any, request: TargetRequest, fault: BaseException) -> MhaError:
    """The error for an exception in a constructor or a factory."""
    file = source_file(thing)
    name: Any = getattr(fault, "name", None)
    of_main = _set_by_main(inspect.getmodule(thing))
    is_of_main = isinstance(fault, NameError) and name in of_main
    if isinstance(fault, UnknownField) or is_of_main:
        return NoGuess(request.target, {name: _words_for(name, thing)})
    words = ", ".join(f"{name}={text}" for name, text in request.arguments)
    subject = f"{request.target.rpartition(':')[2]}({words})"
    if file:
        subject += f" of {shown_path(file)}"
    described = _described(parameters_of(thing))
    advice = f"its arguments are {described}" if described and not words else None
    return user_code_error(
        f"{subject} could not be built", fault, file, code="build", advice=advice
    )


def _shown_arguments(
    thing: Any, values: Mapping[str, Any], named: Container[str]
) -> dict[str, Any]:
    """The arguments of a constructor by name, defaults included. In place of a config stand those
    of its fields that are `named`, as `config.FIELD`, or that have a role.
    """
    parameters = parameters_of(thing)
    arguments = {name: parameters[name].default for name in parameters}
    arguments.update(values)
    for name in [name for name in parameters if _is_config(parameters[name])]:
        for field, value in _fields(arguments.pop(name)).items():
            path = f"{name}.{field}"
            if path in named or role_of(field) is not None:
                arguments[path] = value
    return arguments


# ------------------------------------------------------------------- the arguments of a constructor


def parameters_of(thing: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a class or factory function, annotations resolved if possible. For a
    class that only forwards `**kwargs`, those of its base class.
    """
    for owner in thing.__mro__ if inspect.isclass(thing) else (thing,):
        if getattr(owner, "__init__", None) is nn.Module.__init__:
            return {}  # it accepts any argument, only to reject it
        parameters = signature(owner).parameters
        named = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        if named or not _takes_any(owner):
            return named
    return {}


def _takes_any(thing: Callable[..., Any]) -> bool:
    return any(
        parameter.kind is parameter.VAR_KEYWORD
        for parameter in signature(thing).parameters.values()
    )


class Guess(NamedTuple):
    """A value that mha chooses itself, and why."""

    value: Any
    reason: str


UsualValues = Mapping[str | None, Guess]
"""The usual value of each role."""


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a constructor by name: values from the user, guesses, and configs, which are
    made when the values are read. `reasons_of_values`: of those that are guesses too.
    """

    given: Mapping[str, Any]
    guesses: Mapping[str, Guess]
    configs: Mapping[str, _Config]
    reasons_of_values: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def described(self) -> str:
        """The guesses in words."""
        words = [f"{name}={guess.value!r:.40}" for name, guess in self.guesses.items()]
        return f"constructor with {', '.join(words)}"

    def values(self) -> dict[str, Any]:
        """The value of each. Raises `UserRaised` for what the class of a config raises."""
        guessed = {name: guess.value for name, guess in self.guesses.items()}
        configs = {name: config.build() for name, config in self.configs.items()}
        return {**self.given, **guessed, **configs}

    def reasons(self) -> dict[str, str]:
        """The reason of each guess, also of those for the fields of a config, `config.FIELD`, that
        were read so far.
        """
        reasons = {name: guess.reason for name, guess in self.guesses.items()}
        for name, config in self.configs.items():
            reasons |= {f"{name}.{field}": reason for field, reason in config.reasons().items()}
        return {**reasons, **self.reasons_of_values}


def _arguments(
    thing: Callable[..., Any], given: Mapping[str, Any], request: TargetRequest, path: str = ""
) -> _Arguments:
    """The arguments of a constructor, given or guessed; `config.n_head=4`, or `config={"n_head":
    4}`, is a field of its `config`. In errors, `path` stands before a name.

    Raises `MhaError` for an unknown name, and for a required argument that mha cannot guess.
    """
    parameters = parameters_of(thing)
    values, fields = _by_parameter(thing, given)
    missing = [parameters[name] for name in parameters if name not in {*values, *fields}]
    wide = _wide_defaults(missing)
    if request.keeps_sizes or any(map(_is_width, values)):
        wide = {}
    defaults = {name: each.default for name, each in parameters.items() if name not in wide}
    known = _known_numbers((values, *fields.values(), defaults))
    required = [parameter.name for parameter in missing if parameter.default is _EMPTY]
    is_grouped = bool(fields) or "n_kv_heads" in {*known, *map(role_of, required)}
    usual = usual_values(known, request, is_grouped=is_grouped)
    guesses = {
        parameter.name: guess
        for parameter in sorted(missing, key=lambda parameter: parameter.name in wide)
        if (guess := _guess_of(parameter, usual, wide, causal=request.causal)) is not None
    }
    for name in required:
        part = None if name in guesses else _part_for(parameters[name], thing, request, usual, path)
        if part is not None:
            guesses[name] = part
    unknown = [name for name in required if name not in guesses]
    if unknown:
        words = {
            f"{path}{name}": _words_for(name, thing, parameters[name].annotation)
            for name in unknown
        }
        raise NoGuess(request.target, words)
    configs = {name: _config(parameters[name], fields[name], usual, request) for name in fields}
    return _Arguments(values, guesses, configs)


def _by_parameter(
    thing: Callable[..., Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The given values of parameters, and the given fields of each config that is to be made.
    Raises `MhaError` for a name that a constructor does not take.
    """
    parameters = parameters_of(thing)
    values: dict[str, Any] = {}
    fields: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        first, dot, field = name.partition(".")
        parameter = parameters.get(first)
        if parameter is None and (dot or not _takes_any(thing)):
            noun = "constructor" if inspect.isclass(thing) else "function"
            raise _no_argument(name, _described(parameters), noun)
        if dot:
            fields.setdefault(first, {})[field] = value
        elif type(value) is dict and parameter is not None and _is_config(parameter):
            fields.setdefault(first, {}).update(value)
        else:
            values[name] = member_of(parameter, value)
    for name, parameter in parameters.items():
        if parameter.default is _EMPTY and name not in values and _is_config(parameter):
            fields.setdefault(name, {})
    return values, fields


def _known_numbers(groups: Iterable[Mapping[str, Any]]) -> dict[str | None, int]:
    """The whole number of each role in groups of arguments: the first one counts."""
    stated = [item for group in groups for item in group.items()]
    return {role_of(name): value for name, value in reversed(stated) if isinstance(value, int)}


def _wide_defaults(parameters: Sequence[inspect.Parameter]) -> dict[str, int]:
    """The default widths, if one of them is wide, and the numbers of texts and of tokens that a
    cache has room for, if they are large.
    """
    numbers = {each.name: each.default for each in parameters if type(each.default) is int}
    widths = {name: number for name, number in numbers.items() if _is_width(name)}
    room = {name: number for name, number in numbers.items() if role_of(name) in _ROOM}
    is_cache = any(role_of(name) == "n_texts" for name in room)
    room = {name: n for name, n in room.items() if is_cache and n > _ROOM[role_of(name)].value}
    return room | (widths if max(widths.values(), default=0) >= _WIDE else {})


def _guess_of(
    parameter: inspect.Parameter, usual: UsualValues, wide: Mapping[str, int], *, causal: bool
) -> Guess | None:
    """A value where one is required, where the default is a wide one, and in place of False for
    what makes attention causal; None for no guess.
    """
    role = role_of(parameter.name)
    if parameter.default is _EMPTY:
        member = member_of(parameter)
        return usual.get(role) if member is None else Guess(member, "the first of its kind")
    if parameter.name in wide:
        less = _ROOM[role] if role in _ROOM else usual[role]._replace(reason="narrower")
        return less._replace(reason=f"{less.reason} than {parameter.default}, its default")
    return usual[role] if causal and role == "causal" and parameter.default is False else None


class NoGuess(MhaError):
    """The error for arguments that need a value, with `words` for each that may be typed."""

    def __init__(self, target: str, words: Mapping[str, Sequence[str]]) -> None:
        names = " and ".join(words)
        message = f"{target} needs a value for {names}, which mha cannot guess from the name"
        hint = "name a function without arguments that builds it"
        super().__init__(message, hint=hint, code="argument")
        self.target = target
        self.words = words

    def with_values(self, request: TargetRequest, takes: Callable[[Built], object]) -> MhaError:
        """The error with values in its hint, with which the code is built and not refused by
        `takes`.
        """

        def typed(values: Sequence[str]) -> str:
            given = tuple(zip(self.words, values, strict=True))
            takes(_loaded(replace(request, arguments=request.arguments + given), no_stage))
            return as_typed("--arg", given)

        tried = list[Attempt]()
        values = [*islice(product(*self.words.values()), _MOST_VALUES**2)]
        values.sort(key=lambda each: len({*each}), reverse=True)  # a width is no number of heads
        found = first_that_works(values[:_MOST_VALUES], typed, tried.append)
        if found is not None:
            hint = f"for example {found}; or {self.hint}"
            return MhaError(self.message, hint=hint, code=self.code)
        more = (each.failure.words for each in tried if isinstance(each.failure, NoGuess))
        words = {**self.words, **next(more, {})}
        is_same = words.keys() == self.words.keys()
        return self if is_same else NoGuess(self.target, words).with_values(request, takes)


_MOST_VALUES = 60
_SIZES = ("64", "4", "0.1", "True", "relu", "(4, 4)")
_TENSORS = ("torch.ones(8)", "torch.ones(64)", "torch.ones(64, 64)")


def as_typed(option: str, given: Iterable[tuple[str, str]]) -> str:
    """Arguments as they are typed."""
    return " ".join(f"{option} {shlex.quote('='.join(pair))}" for pair in given)


def _words_for(name: str, thing: Any, annotation: object = None) -> list[str]:
    """What may be typed for an argument, the likeliest first by how the code uses it."""
    source = source_of(thing)
    called = _called(name, source)
    words = [*_SIZES, *_TENSORS, "nn.LayerNorm", "nn.LayerNorm(64)", "nn.GELU()"]
    if annotation is Tensor:
        words.sort(key=lambda word: word not in _TENSORS)
    elif called:
        made = "" if name in called else "()"
        named, others = (
            [f"{cls.__name__}{made}" for cls in parts] for parts in _parts_beside(thing, name)
        )
        words = [*named, *reversed(words), *others]
    elif re.search(rf"\b{name}\[", source):
        words.sort(key=lambda word: not word.startswith("("))
    elif re.search("head|group|layer|n_|num", name):
        words.sort(key=lambda word: word != "4")
    elif re.search("drop|prob|rate|eps", name):
        words.sort(key=lambda word: word != "0.1")
    return words


def _called(name: str, source: str) -> set[str]:
    """What the code calls of an argument and of the attributes that keep it."""
    nodes = [*ast.walk(ast.parse(source))]
    kept = {name}
    for node in nodes:
        if isinstance(node, ast.Assign):
            to = node.targets[0]
            value = node.value
            pairs = [(to, value)]
            if isinstance(to, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = [*zip(to.elts, value.elts, strict=False)]
            kept |= {ast.unparse(to) for to, value in pairs if ast.unparse(value) == name}
    return kept & {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}


def _parts_beside(thing: Any, name: str) -> tuple[list[type[nn.Module]], list[type[nn.Module]]]:
    """The other classes of modules that its file defines: those whose names begin a word as that of
    an argument does, and the rest.
    """
    words = [word[:4] for word in name.replace("attn", "attention").split("_") if len(word) > 2]
    named = list[type[nn.Module]]()
    rest = list[type[nn.Module]]()
    for cls in names_beside(thing).values():
        is_part = inspect.isclass(cls) and issubclass(cls, nn.Module) and cls is not thing
        if is_part and cls.__module__ == thing.__module__:
            is_named = any(word in cls.__name__.lower() for word in words)
            (named if is_named else rest).append(cls)
    return named, rest


def _part_for(
    parameter: inspect.Parameter,
    thing: Any,
    request: TargetRequest,
    usual: UsualValues,
    path: str,
) -> Guess | None:
    """A part for an argument that the code calls, of a class of the same file: the first of a like
    name, or the only one.
    """
    name = parameter.name
    called = _called(name, source_of(thing))
    named, rest = _parts_beside(thing, name)
    parts = named or rest
    is_clear = named or (len(rest) == 1 and not re.search("norm|act|drop", name))
    if not called or not is_clear or path.count(".") > _DEEPEST:
        return None
    cls = parts[0]
    reason = f"a class of the file; --arg '{name}={cls.__name__}(…)' states another"
    if name in called:
        return Guess(cls, reason)
    own = {
        key: usual[role].value
        for key, each in parameters_of(cls).items()
        if each.default is _EMPTY and (role := role_of(key)) in usual
    }
    with suppress(*NO_ANSWER):
        arguments = _arguments(cls, own, request, f"{path}{name}.")
        return Guess(call_user(call_user(cls, **arguments.values()).eval), reason)
    return None


_DEEPEST = 2
"""Parts in parts that are made."""


_OF_GROUPS = 64
"""A width that the usual 32 groups of a norm divide."""
_WIDE = 1024
"""The least default width in whose place a narrow one is used, because calls would be slow."""
_ROOM: Mapping[str | None, Guess] = {
    "n_texts": Guess(8, "fewer"),
    "context_length": Guess(512, "shorter"),
}
"""The most texts and tokens that a cache needs room for: copies of it take time."""


def _is_width(name: str) -> bool:
    return role_of_last(name) in ("d_model", "d_head", "d_v", "d_out")


def member_of(parameter: inspect.Parameter | None, value: Any = None) -> Any:
    """A value as the member, by its name or value, of the enumeration that a parameter takes by its
    annotation, or its first member for None; any other value as it is.
    """
    types = () if parameter is None else (parameter.annotation, *get_args(parameter.annotation))
    enums = [cls for cls in types if inspect.isclass(cls) and issubclass(cls, enum.Enum)]
    members = [member for cls in enums for member in cls]
    text = str(value).rpartition(".")[2]
    return next(
        (member for member in members if value is None or text in (member.name, str(member.value))),
        value,
    )


def _no_argument(name: str, described: str, noun: str = "config") -> MhaError:
    """The error for a name that no parameter has of a constructor, a function or a config."""
    words = f"the {noun} takes no arguments"
    if described:
        words = f"there is no such argument, only {described}"
    return MhaError(f"--arg {name}: {words}", code="argument")


def _described(parameters: Mapping[str, inspect.Parameter]) -> str:
    """Parameters with their defaults, as text: `d_model, n_heads=8, config.FIELD`."""
    words = []
    for name, parameter in parameters.items():
        required = f"{name}.FIELD" if _is_config(parameter) else name
        words.append(
            required if parameter.default is _EMPTY else f"{name}={parameter.default!r:.60}"
        )
    return first_names(words, _MOST_LISTED)


# ------------------------------------------------------------------------------------------ configs


_UNLIKE_CONFIGS = (
    "builtins",
    "inspect",
    "typing",
    "collections",
    "torch",
    "enum",
    "pathlib",
    "omegaconf",
)
"""The modules whose classes are no configs."""


class UnknownField(AttributeError, KeyError):
    """A field of an unusual name, which is read as attribute or item."""


class GuessedConfig(dict[str, Any]):
    """A config whose fields of usual names have usual values: each is stored, and its reason kept,
    when the constructor first reads it, as attribute or item. It begins with the `given` fields. In
    errors, `path` stands before its name.
    """

    def __init__(self, usual: UsualValues, path: str, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        vars(self).update(_usual=usual, _path=path, _reasons={})

    @ours()
    def __missing__(self, name: str) -> Any:
        """A usual value."""
        own = vars(self)  # a copy has nothing in it while it is made
        guess = own.get("_usual", {}).get(role_of(name))
        if guess is None:
            path = own.get("_path", "")
            field = f"{path}{name}"
            raise for_user(UnknownField(f"mha cannot guess {field}", name=field))
        self[name] = guess.value
        own["_reasons"][name] = guess.reason
        return guess.value

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def _config_class(parameter: inspect.Parameter) -> type | None:
    """The class of a config: a dataclass, or another class for a parameter named as a config."""
    cls = parameter.annotation
    if (
        not inspect.isclass(cls)
        or cls.__module__.partition(".")[0] in _UNLIKE_CONFIGS
        or issubclass(cls, Mapping)
    ):
        return None
    return cls if dataclasses.is_dataclass(cls) or role_of(parameter.name) == "config" else None


def _is_config(parameter: inspect.Parameter) -> bool:
    return role_of(parameter.name) == "config" or _config_class(parameter) is not None


@dataclass(frozen=True)
class _Config:
    """A config with given fields: an instance of its class with `arguments`, the changed default of
    its parameter, or, where it has neither, `guessed`, one of usual values. That is one object, so
    that what a constructor reads of it is known.
    """

    parameter: inspect.Parameter
    fields: Mapping[str, Any]
    arguments: _Arguments | None
    guessed: GuessedConfig

    def reasons(self) -> dict[str, str]:
        """The reason of each guess for a field that was read so far."""
        if self.arguments is not None:
            return self.arguments.reasons()
        return {**vars(self.guessed)["_reasons"]}

    def build(self) -> Any:
        """The config. Raises `MhaError` for a field that it lacks, and `UserRaised`."""
        default = self.parameter.default
        if self.arguments is not None:
            config = call_user(self.parameter.annotation, **self.arguments.values())
        elif default is None or default is _EMPTY:
            return self.guessed
        else:
            config = deep_copy(default)
        for field, value in self.fields.items():
            if isinstance(config, dict):
                config[field] = value
            elif call_user(hasattr, config, field):
                call_user(setattr, config, field, value)
            else:
                name = self.parameter.name
                names = first_names(f"{name}.{other}" for other in _fields(config))
                raise _no_argument(f"{name}.{field}", names)
        return config


def _config(
    parameter: inspect.Parameter,
    fields: Mapping[str, Any],
    usual: UsualValues,
    request: TargetRequest,
) -> _Config:
    """How the config of a parameter is built with the given fields."""
    path = f"{parameter.name}."
    cls = _config_class(parameter)
    arguments = None
    if cls is not None and (parameter.default is None or parameter.default is _EMPTY):
        names = parameters_of(cls)
        own = {name: fields[name] for name in fields if name.partition(".")[0] in names}
        arguments = _arguments(cls, own, request, path)
        fields = {name: fields[name] for name in fields if name not in own}
    return _Config(parameter, fields, arguments, GuessedConfig(usual, path, fields))


def _fields(config: object) -> Mapping[str, Any]:
    """The fields of a config: its items, or its attributes."""
    return config if isinstance(config, Mapping) else getattr(config, "__dict__", {})


def arguments_of(built: Built) -> tuple[Argument, ...]:
    """The arguments with which the code was built, and the origin of each."""
    arguments = []
    for name, value in built.arguments.items():
        origin: Literal["given", "guessed", "default"] = "default"
        if name in built.guesses:
            origin = "guessed"
        elif name in built.given:
            origin = "given"
        is_part = isinstance(value, nn.Module)  # its repr is code of the user's
        shown = f"{type(value).__name__}(…)" if is_part else f"{value!r:.80}"
        arguments.append(Argument(name, shown, origin, built.guesses.get(name, "")))
    return tuple(arguments)


# ------------------------------------------------------------------------------------- typed values


_VALUES: Mapping[str, object] = {"true": True, "false": False, "none": None, "null": None}


def parse_value(text: str, thing: object = None) -> object:
    """The value of a command-line word: a Python literal, `true`, `none`, `torch.float32`,
    `torch.ones(8)`, `nn.ReLU`, or code with the names of the file of a class or function,
    `Core(False)`; else the string itself. Raises `UsageError` for code that cannot be computed.

    >>> parse_value("64"), parse_value("true"), parse_value("(2, 3)"), parse_value("'8'"),
    parse_value("relu") (64, True, (2, 3), '8', 'relu')
    """
    word = text.strip()
    if word.lower() in _VALUES:
        return _VALUES[word.lower()]
    for read in (ast.literal_eval, float):  # inf and nan are no literals
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return read(word)
    names = names_beside(thing)
    if word.startswith(("torch.", "nn.")) or _is_code(word, names):
        try:
            return call_user(eval, word, names)
        except UserRaised as raised:
            raise UsageError(f"{word:.80} cannot be computed: {raised}") from raised.fault
    return text


def names_beside(thing: object) -> dict[str, Any]:
    """The names that code of the user's has on a command line: torch, and those of the file of a
    class or function.
    """
    return {**getattr(inspect.getmodule(thing), "__dict__", {}), "torch": torch, "nn": nn, "F": F}


def _is_code(word: str, names: Mapping[str, Any]) -> bool:
    """Whether a word is code that reads these names alone. The name of an imported function, such
    as `relu`, is a word.
    """
    try:
        tree = ast.parse(word, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    if isinstance(tree, ast.Name):
        thing = names.get(word)
        is_imported = getattr(thing, "__module__", None) != names.get("__name__")
        return thing is not None and not (inspect.isroutine(thing) and is_imported)
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return isinstance(tree, ast.Lambda) or (bool(read) and read <= names.keys())


@functools.cache
def _set_by_main(module: ModuleType | None) -> frozenset[str]:
    """The names that the code of a script reads, and that only its main part sets."""
    of_main, others = main_part(getattr(module, "__file__", None) or "")
    read = {name.id for name in _names_in(others)}
    is_set = {name.id for name in _names_in(of_main) if isinstance(name.ctx, ast.Store)}
    return frozenset((is_set & read).difference(getattr(module, "__dict__", ())))


def _names_in(statements: Iterable[ast.stmt]) -> list[ast.Name]:
    nodes = chain.from_iterable(map(ast.walk, statements))
    return [node for node in nodes if isinstance(node, ast.Name)]


def _sizes_of_main(thing: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """What only the main part of a script sets, as it is given or as its lines without calls have
    it. The module has it from now on.
    """
    module = inspect.getmodule(thing)
    found = dict[str, Any]()
    names = _set_by_main(module)
    if module is None or not names:
        return {}
    for statement in main_part(module.__file__ or "")[0]:
        calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
        if isinstance(statement, ast.Assign) and not any(calls):
            with suppress(UserRaised):
                call_user(exec, ast.unparse(statement), vars(module), found)
        found |= {name: given[name] for name in names if name in given}
    sizes = {name: value for name, value in found.items() if name in names}
    vars(module).update(sizes)
    return sizes


# ------------------------------------------------------------------------------------- usual values


_D_HEAD = 8
"""Even for rotary positions, and large enough to distinguish their column pairings."""
_HEADS = (5, 7, 3, 15, 9, 11, 13, 21, 25, 6, 12, 10, 20, 4, 8, 16, 14, 18, 24, 32, 2, 1)
"""Numbers of heads, those first that differ from other sizes."""


def usual_values(
    known: Mapping[str | None, Any], request: TargetRequest, *, is_grouped: bool
) -> UsualValues:
    """A value for each role that can be guessed, with its meaning. They agree with the known
    values: unless given, `d_model = n_heads · d_head`, and `n_kv_heads` divides `n_heads` where
    heads are grouped.
    """
    sizes = {role: value for role, value in known.items() if type(value) is int and value > 0}
    width = sizes.get("d_out", sizes.get("d_model"))
    n_heads = sizes.get("n_heads") or _n_heads(
        width, sizes.get("d_head"), sizes.get("n_kv_heads"), is_grouped
    )
    d_head = sizes.get("d_head") or _d_head(width, n_heads)
    d_model = sizes.get("d_model") or width or n_heads * d_head
    inner = [n for n in range(2, n_heads) if n_heads % n == 0]
    usual: dict[str | None, Guess] = {
        "d_model": Guess(d_model, "the width of a token"),
        "d_out": Guess(
            d_model if d_model % n_heads == 0 else n_heads * d_head,
            "the width of the output",
        ),
        "n_heads": Guess(n_heads, "the number of heads"),
        "n_kv_heads": Guess(
            min(inner, key=lambda n: n * n == n_heads, default=1),
            "the number of kv heads",
        ),
        "d_head": Guess(d_head, "the width of a head"),
        "d_v": Guess(d_head, "the width of a head's values"),
        "d_ff": Guess(2 * d_model, "the width between two layers"),
        "context_length": Guess(
            64 if 64 not in (d_model, n_heads * d_head) else 96, "the longest text"
        ),
        "dropout": Guess(0.1, "dropout, which eval turns off"),
        "bias": Guess(True, "with biases"),
        "causal": Guess(request.causal, "--causal" if request.causal else "no --causal"),
        "n_texts": Guess(_ROOM["n_texts"].value, "the most texts of a call"),
        "batch_first": Guess(True, "the batch stands first"),
        "layer": Guess(0, "the first layer"),
        "n_layers": Guess(2, "the number of layers"),
        "n_tokens": Guess(101, "the number of different tokens"),
        "device": Guess(request.device, "--device"),
        "dtype": Guess(torch.float32, "the usual one"),
        "eps": Guess(1e-5, "a small number"),
        "theta": Guess(10000.0, "the usual base of rotary positions"),
        "scale": Guess(d_head**-0.5, "1/√d_head"),
        "temperature": Guess(d_head**0.5, "√d_head"),
    }
    return usual | {
        role: usual[role]._replace(value=size) for role, size in sizes.items() if role in usual
    }


def _d_head(width: int | None, n_heads: int) -> int:
    """A head width: the part of each head, or a width unlike the number of heads."""
    if width and width >= n_heads:
        return width // n_heads
    return _D_HEAD if n_heads != _D_HEAD else _D_HEAD + 4


def _n_heads(
    width: int | None, d_head: int | None, n_kv_heads: int | None, is_grouped: bool
) -> int:
    """A number of heads: if possible at least three, odd, different from the head width, and with a
    divisor for kv heads where heads are grouped.
    """
    if width and d_head and width >= d_head:
        return width // d_head
    n_groups = n_kv_heads or 1
    heads = [n for n in _HEADS if n % n_groups == 0 and (width or n) % n == 0] or [3 * n_groups]

    def faults(n: int) -> tuple[bool, ...]:
        """What speaks against a number of heads, the worst first."""
        d = width // n if width else d_head or _D_HEAD
        is_small = d < 4 or n < 3
        has_no_groups = is_grouped and all(n % divisor for divisor in range(2, n))
        is_like_another = n in (d, n_kv_heads)
        return is_small, has_no_groups, is_like_another, d % 2 != 0

    return min(heads, key=faults)


# ------------------------------------------------------------------------ seeds, dropout and copies


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds the generators of torch and Python inside the block and restores their state
    afterwards.
    """
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []), ExitStack() as after:
        after.callback(random.setstate, random.getstate())
        if is_cuda:
            torch.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)  # ten times as fast
        random.seed(seed)
        yield


class WithoutDropout(FunctionMode):
    """Lets torch's functions of dropout return their input."""

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function returns where nothing is dropped."""
        if "dropout" in getattr(func, "__name__", "") and (args or "input" in kwargs):
            tensor = args[0] if args else kwargs["input"]
            if func is torch.native_dropout:
                return tensor, torch.ones_like(tensor, dtype=torch.bool)
            return tensor
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return on_behalf(func, *args, **kwargs)


def cast(call: T, dtype: torch.dtype, device: torch.device | str | None = None) -> T:
    """Casts the floating tensors of a module or instance in place to `dtype`, unregistered ones
    included, moves them to `device` if given, and returns it.

    Complex tensors get the same precision, complex64 at least, because few operations support
    narrower ones. Integers and bools keep their dtype. `nn.Module.to` would drop imaginary parts,
    and with them the angles of a rotary table.
    """

    @ours(instead=lambda tensor: tensor)
    def change(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=cast_dtype(tensor, dtype))

    roots = [call, *getattr(call, "__dict__", {}).values()]
    modules = [root for root in roots if isinstance(root, nn.Module)]
    for module in modules:
        call_user(change_tensors, module, change)
    parts = chain([call], *(module.modules() for module in modules))
    for part in {id(part): part for part in parts}.values():
        for name, value in list(getattr(part, "__dict__", {}).items()):
            if isinstance(value, Tensor):
                part.__dict__[name] = change(value)
    return call


def as_float64(tensor: Tensor) -> Tensor:
    """The numbers of a tensor in float64 on the CPU."""
    return tensor.detach().to("cpu", torch.float64)


def cast_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor after its module is cast to `dtype`."""
    if tensor.is_complex():
        return torch.promote_types(dtype, torch.float32).to_complex()
    return dtype if tensor.is_floating_point() else tensor.dtype


def cast_copy(call: T, dtype: torch.dtype, device: torch.device | str | None = None) -> T:
    """A cast copy of a module or instance. A function is returned unchanged. Raises `UserRaised` if
    it cannot be copied or cast.
    """
    if inspect.isroutine(call):
        return call
    return cast(deep_copy(call), dtype, device)


def with_zeros_drawn(module: nn.Module, seed: int, *, in_place: bool = False) -> nn.Module:
    """The module, or a copy unless `in_place`, in which weights that are all zero or tiny, such as
    fresh output layers and gates, are small random numbers, or larger: what they hide would not be
    seen.
    """
    largest = {
        name: weight.norm(torch.inf)
        for name, weight in module.named_parameters()
        if weight.is_floating_point()
        and weight.itemsize > 1
        and weight.numel()
        and not name.endswith("bias")
    }
    tiny = [name for name, number in largest.items() if number < 1e-3]
    drawn = copied(module) if tiny and not in_place else module
    with torch.no_grad(), seeded(seed, torch.device("cpu")):
        for name in tiny:
            weight = drawn.get_parameter(name)
            if largest[name]:
                weight.mul_(0.02 / largest[name])
            else:
                weight.normal_(std=0.02)
    return drawn
