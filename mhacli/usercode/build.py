"""Imports and builds a user's attention from given arguments, constructor defaults, and guesses,
which are reported.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import enum
import inspect
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Final, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mhacli.attention.devices import choose_device
from mhacli.errors import MhaError, UsageError, first_names
from mhacli.record.record import Argument
from mhacli.usercode.door import (
    NO_ANSWER,
    UserRaised,
    call_user,
    for_user,
    on_behalf,
    ours,
    plainly,
)
from mhacli.usercode.faults import shown_path, user_code_error
from mhacli.usercode.names import source_of
from mhacli.usercode.process import Stage, no_stage
from mhacli.usercode.roles import ROWS, role_of, signature, signature_of
from mhacli.usercode.target import TargetRequest, find_target, source_file

T = TypeVar("T")
_EMPTY: Final = inspect.Parameter.empty
_MOST_LISTED: Final = 40


@dataclass(frozen=True)
class Built:
    """The target, built.

    `thing` is the class or function that the target names. `call` is the callable: an `nn.Module`,
    an instance of another class, or the function itself. `arguments` are all constructor arguments,
    defaults included; `given` names those from the user, and `guesses` those that mha had to guess,
    with the reason of each. `file` is its source file, None if there is none. `stage` reports when
    a call begins and ends, so that only calls have a time limit.
    """

    name: str
    thing: Any
    call: Callable[..., Any]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    given: frozenset[str] = frozenset()
    guesses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    file: str | None = None
    stage: Stage = no_stage

    @property
    def module(self) -> nn.Module | None:
        """What is called, if it is a module."""
        return self.call if isinstance(self.call, nn.Module) else None


def load_built(request: TargetRequest, stage: Stage) -> Built:
    """The requested code in eval mode on its device, before it is known how to call it. A class or
    a factory function is called; another function or an instance is used directly.

    Raises `MhaError` for a missing device, for missing or unknown arguments, for a target that
    cannot be built, and for an exception in its constructor.
    """
    stage(f"importing {request.target}")
    thing = find_target(request.target)
    stage(f"building {request.target}")
    choose_device(request.device)
    given = {name: parse_value(text) for name, text in request.arguments}
    if inspect.isclass(thing) or is_factory(thing, given):
        return replace(_constructed(thing, request, given), stage=stage)
    if given:
        message = f"--arg {', '.join(given)}: {request.target} is not a class"
        raise MhaError(
            message, hint="--call-arg NAME=VALUE is passed to each call", code="argument"
        )
    return replace(_built(thing, thing, request), stage=stage)


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


def _built(made: Any, definition: Any, request: TargetRequest) -> Built:
    """What is called, without a word on its arguments; `definition` is the class or the function
    that has its code. Of a compiled module it is the module. Raises `MhaError` for a scripted one,
    which takes no hooks, and for what cannot be called.
    """
    if isinstance(made, torch.jit.ScriptModule):
        message = f"{request.target} is a scripted module, which has no Python code"
        raise MhaError(
            message, hint="give the module before torch.jit.script", code="cannot-examine"
        )
    made = getattr(made, "_orig_mod", made)
    is_callable = callable(made) or hasattr(made, "forward")
    if not is_callable or getattr(type(made), "forward", None) is nn.Module.forward:
        message = (
            f"{request.target} makes a {type(made).__name__}, which has neither forward nor"
            " __call__"
        )
        hint = "name a class, a function that attends, or one that returns a module"
        raise MhaError(message, hint=hint, code="no-target", path=source_file(definition))
    if isinstance(made, nn.Module):
        if request.device != "cpu":
            made = call_user(made.to, request.device)
        made = call_user(made.eval)
    return Built(
        request.target,
        definition,
        made if callable(made) else made.forward,
        file=source_file(definition),
    )


def _constructed(thing: Any, request: TargetRequest, given: Mapping[str, Any]) -> Built:
    """What a class or a factory returns for the given arguments, and for guesses."""
    guesses: dict[str, str] = {}
    file, parameters = source_file(thing), parameters_of(thing)
    try:
        values = _arguments(thing, given, request, guesses)
        with seeded(request.seed, torch.device("cpu")):
            made = call_user(thing, **values)
        definition = (
            thing if inspect.isclass(thing) else made if inspect.isroutine(made) else type(made)
        )
        built = _built(made, definition, request)
    except UserRaised as raised:
        fault = raised.fault
        has_guessed = any(_is_width(name.rpartition(".")[2]) for name in guesses)
        if has_guessed and not request.keeps_sizes:  # perhaps it cannot be built narrower
            return _constructed(thing, replace(request, keeps_sizes=True), given)
        widths = {
            name: _OF_GROUPS for name in guesses if role_of(name.rpartition(".")[2]) == "d_model"
        }
        if widths and "num_groups" in str(fault):
            built = _constructed(thing, request, {**given, **widths})
            reason = "a width that 32 groups divide"
            return replace(
                built,
                given=frozenset(given),
                guesses={**built.guesses, **dict.fromkeys(widths, reason)},
            )
        words = ", ".join(f"{name}={text}" for name, text in request.arguments)
        subject = f"{request.target.rpartition(':')[2]}({words})" + (
            f" of {shown_path(file)}" if file else ""
        )
        advice = None if words else f"its arguments are {_described(parameters)}"
        raise user_code_error(
            f"{subject} could not be built", fault, file, code="build", advice=advice
        ) from fault
    arguments = {name: parameter.default for name, parameter in parameters.items()} | values
    for name in [name for name, parameter in parameters.items() if _is_config(parameter)]:
        for field, value in _fields(arguments.pop(name)).items():
            path = f"{name}.{field}"
            if path in given or path in guesses or role_of(field) is not None:
                arguments[path] = value
    return replace(
        built, arguments=arguments, given=frozenset(given), guesses=guesses, file=built.file or file
    )


# ------------------------------------------------------------------- the arguments of a constructor


def parameters_of(thing: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a class or factory function, annotations resolved if possible. For a
    class that only forwards `**kwargs`, those of its base class.
    """
    for owner in thing.__mro__ if inspect.isclass(thing) else (thing,):
        if (
            getattr(owner, "__init__", None) is nn.Module.__init__
        ):  # accepts any argument, only to reject it
            return {}
        every = signature(owner).parameters.values()
        named = {
            each.name: each
            for each in every
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        }
        if named or not _takes_any(owner):
            return named
    return {}


def _takes_any(thing: Callable[..., Any]) -> bool:
    return any(
        parameter.kind is parameter.VAR_KEYWORD
        for parameter in signature(thing).parameters.values()
    )


def _arguments(
    thing: Callable[..., Any],
    given: Mapping[str, Any],
    request: TargetRequest,
    guesses: dict[str, str],
    path: str = "",
) -> dict[str, Any]:
    """The arguments of a constructor, given or guessed; `config.n_head=4`, or `config={"n_head":
    4}`, is a field of its `config`. The reason of each guess is put into `guesses`, by `path` and
    name.

    Raises `MhaError` for an unknown name, and for a required argument that mha cannot guess.
    """
    parameters, values, fields = parameters_of(thing), dict[str, Any](), dict[str, dict[str, Any]]()
    for name, value in given.items():
        first, dot, rest = name.partition(".")
        if first not in parameters and (dot or not _takes_any(thing)):
            raise _no_argument(name, _described(parameters))
        if dot or (type(value) is dict and first in parameters and _is_config(parameters[first])):
            fields.setdefault(first, {}).update({rest: value} if dot else value)
        else:
            values[name] = member_of(parameters.get(name), value)
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    required = [
        name for name, default in defaults.items() if default is _EMPTY and name not in values
    ]
    configs = dict.fromkeys([*(name for name in required if _is_config(parameters[name])), *fields])
    roles = {name: role_of(name) for name in required if name not in configs}
    widths = {
        name: value for name, value in defaults.items() if type(value) is int and _is_width(name)
    }
    are_free = not request.keeps_sizes and not any(map(_is_width, values))
    large = widths if are_free and max(widths.values(), default=0) >= _WIDE else {}
    usual_sizes = {name: default for name, default in defaults.items() if name not in large}
    stated = [item for group in (values, *fields.values(), usual_sizes) for item in group.items()]
    known = {role_of(name): value for name, value in reversed(stated) if isinstance(value, int)}
    is_grouped = bool(configs) or "n_kv_heads" in (*roles.values(), *known)
    usual = usual_values(known, is_grouped=is_grouped, causal=request.causal, device=request.device)
    unknown = [
        name
        for name, role in roles.items()
        if role not in usual and member_of(parameters[name]) is None
    ]
    if unknown:
        names = " and ".join(f"{path}{name}" for name in unknown)
        of_tensors = {name for name in unknown if parameters[name].annotation is Tensor}
        values_of = dict.fromkeys(unknown, "1")
        values_of |= {
            name: "'(4, 4)'" for name in unknown if re.search(rf"\b{name}\[", source_of(thing))
        }
        values_of |= dict.fromkeys(of_tensors, "'torch.ones(8)'")
        hint = (
            "for example"
            f" {' '.join(f'--arg {path}{name}={value}' for name, value in values_of.items())}"
        )
        hint += "; or name a function without arguments that builds it" if of_tensors else ""
        message = (
            f"{request.target} needs a value for {names}, which mha cannot guess from the name"
        )
        raise MhaError(message, hint=hint, code="argument")
    for name, default in defaults.items():
        if request.causal and default is False and name not in values and role_of(name) == "causal":
            roles[name] = "causal"
    for name, role in roles.items():
        member = member_of(parameters[name])
        values[name], guesses[f"{path}{name}"] = (
            usual[role] if member is None else (member, "the first of its kind")
        )
    for name, width in large.items():
        values[name], guesses[f"{path}{name}"] = (
            usual[role_of(name)][0],
            f"narrower than {width}, its default",
        )
    for name in configs:
        values[name] = _config(parameters[name], fields.get(name, {}), usual, request, guesses)
    return values


_OF_GROUPS: Final = 64
"""A width that the usual 32 groups of a norm divide."""
_WIDE: Final = 1024
"""The least default width in whose place a narrow one is used, because calls would be slow."""


def _is_width(name: str) -> bool:
    return role_of(name) in ("d_model", "d_head", "d_v", "d_out")


def member_of(parameter: inspect.Parameter | None, value: Any = None) -> Any:
    """A value as the member, by its name or value, of the enumeration that a parameter takes by its
    annotation, or its first member for None; any other value as it is.
    """
    types = () if parameter is None else (parameter.annotation, *get_args(parameter.annotation))
    members = [
        member
        for each in types
        if inspect.isclass(each) and issubclass(each, enum.Enum)
        for member in each
    ]
    text = str(value).rpartition(".")[2]
    return next(
        (member for member in members if value is None or text in (member.name, str(member.value))),
        value,
    )


def _no_argument(name: str, described: str) -> MhaError:
    """The error for a name that no parameter has."""
    found = (
        f"there is no such argument, only {described}"
        if described
        else "the constructor takes no arguments"
    )
    return MhaError(f"--arg {name}: {found}", code="argument")


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


_UNLIKE_CONFIGS: Final = (
    "builtins",
    "inspect",
    "typing",
    "collections",
    "torch",
    "enum",
    "pathlib",
    "omegaconf",
)


UsualValues = Mapping[str | None, tuple[Any, str]]
"""The usual value of each role, with its meaning."""


class UnknownField(AttributeError, KeyError):
    """A field of an unusual name, which is read as attribute or item."""


class GuessedConfig(dict[str, Any]):
    """A config whose fields of usual names have usual values: each is stored, and its reason put
    into `guesses`, when the constructor first reads it, as attribute or item.
    """

    def __init__(self, usual: UsualValues, guesses: dict[str, str], path: str) -> None:
        super().__init__()
        vars(self)["_known"] = usual, guesses, path

    @ours()
    def __missing__(self, name: str) -> Any:
        """A usual value."""
        usual, guesses, path = vars(self).get(
            "_known", ({}, {}, "")
        )  # a copy has none while it is made
        if role_of(name) not in usual:
            raise for_user(UnknownField(f"mha cannot guess it: --arg {path}{name}=VALUE"))
        self[name], guesses[f"{path}{name}"] = usual[role_of(name)]
        return self[name]

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


def _config(
    parameter: inspect.Parameter,
    fields: Mapping[str, Any],
    usual: UsualValues,
    request: TargetRequest,
    guesses: dict[str, str],
) -> Any:
    """A config with the given fields: the changed default, an instance of its annotation, or one of
    usual values.
    """
    path, cls = f"{parameter.name}.", _config_class(parameter)
    config: Any = GuessedConfig(usual, guesses, path)
    if parameter.default is not None and parameter.default is not _EMPTY:
        config = call_user(copy.deepcopy, parameter.default)
    elif cls is not None:
        own = {
            field: value
            for field, value in fields.items()
            if field.partition(".")[0] in parameters_of(cls)
        }
        config = call_user(cls, **_arguments(cls, own, request, guesses, path))
        fields = {field: value for field, value in fields.items() if field not in own}
    for field, value in fields.items():
        if isinstance(config, dict):
            config[field] = value
        elif call_user(hasattr, config, field):
            call_user(setattr, config, field, value)
        else:
            raise _no_argument(
                f"{path}{field}", first_names(f"{path}{name}" for name in _fields(config))
            )
    return config


def _fields(config: object) -> Mapping[str, Any]:
    """The fields of a config: its items, or its attributes."""
    return config if isinstance(config, Mapping) else getattr(config, "__dict__", {})


def arguments_of(built: Built) -> tuple[Argument, ...]:
    """The arguments with which the code was built, and the origin of each."""
    arguments = []
    for name, value in built.arguments.items():
        origin = (
            "guessed" if name in built.guesses else "given" if name in built.given else "default"
        )
        guess = built.guesses.get(name, "")
        arguments.append(
            Argument(name, f"{value!r:.80}", origin, guess)  # type: ignore[arg-type]
        )
    return tuple(arguments)


# ------------------------------------------------------------------------------------- typed values


_VALUES: Final[Mapping[str, object]] = {"true": True, "false": False, "none": None, "null": None}


def parse_value(text: str) -> object:
    """The value of a command-line word: a Python literal, `true`, `none`, `torch.float32`,
    `torch.ones(8)`, `nn.ReLU`, else the string itself. Raises `UsageError` for a word of torch that
    means nothing.

    >>> parse_value("64"), parse_value("true"), parse_value("(2, 3)"), parse_value("'8'"),
    parse_value("relu") (64, True, (2, 3), '8', 'relu')
    """
    word = text.strip()
    if word.lower() in _VALUES:
        return _VALUES[word.lower()]
    if word.startswith(("torch.", "nn.")):
        try:
            return call_user(eval, word, {"torch": torch, "nn": nn})
        except UserRaised as raised:
            raise UsageError(f"{word:.80} cannot be computed: {raised}") from raised.fault
    for read in (ast.literal_eval, float):  # inf and nan are no literals
        with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return read(word)
    return text


# ------------------------------------------------------------------------------------- usual values


_D_HEAD: Final = 8
"""Even for rotary positions, and large enough to distinguish their column pairings."""
_HEADS: Final = (5, 7, 3, 15, 9, 11, 13, 21, 25, 6, 12, 10, 20, 4, 8, 16, 14, 18, 24, 32, 2, 1)
"""Numbers of heads, those first that differ from other sizes."""


def usual_values(
    known: Mapping[str | None, Any], *, is_grouped: bool, causal: bool, device: str
) -> UsualValues:
    """A value for each role that can be guessed, with its meaning. They agree with the known
    values: unless given, `d_model = n_heads · d_head`, and `n_kv_heads` divides `n_heads` where
    heads are grouped.
    """
    sizes = {role: value for role, value in known.items() if type(value) is int and value > 0}
    width, d_head = sizes.get("d_out", sizes.get("d_model")), sizes.get("d_head")
    n_heads = sizes.get("n_heads") or _n_heads(width, d_head, sizes.get("n_kv_heads"), is_grouped)
    if d_head is None:
        d_head = (
            width // n_heads
            if width and width >= n_heads
            else _D_HEAD
            if n_heads != _D_HEAD
            else _D_HEAD + 4
        )
    d_model = sizes.get("d_model") or width or n_heads * d_head
    inner = [n for n in range(2, n_heads) if n_heads % n == 0]
    usual: dict[str | None, tuple[Any, str]] = {
        "d_model": (d_model, "the width of a token"),
        "d_out": (
            d_model if d_model % n_heads == 0 else n_heads * d_head,
            "the width of the output",
        ),
        "n_heads": (n_heads, "the number of heads"),
        "n_kv_heads": (
            min(inner, key=lambda n: n * n == n_heads, default=1),
            "the number of kv heads",
        ),
        "d_head": (d_head, "the width of a head"),
        "d_v": (d_head, "the width of a head's values"),
        "d_ff": (2 * d_model, "the width between two layers"),
        "context_length": (64 if 64 not in (d_model, n_heads * d_head) else 96, "the longest text"),
        "dropout": (0.1, "dropout, which eval turns off"),
        "bias": (True, "with biases"),
        "causal": (causal, "--causal" if causal else "no --causal"),
        "batch_first": (True, "the batch stands first"),
        "layer": (0, "the first layer"),
        "n_layers": (2, "the number of layers"),
        "n_tokens": (101, "the number of different tokens"),
        "device": (device, "--device"),
        "dtype": (torch.float32, "the usual one"),
        "eps": (1e-5, "a small number"),
        "theta": (10000.0, "the usual base of rotary positions"),
        "scale": (d_head**-0.5, "1/√d_head"),
        "temperature": (d_head**0.5, "√d_head"),
    }
    return usual | {role: (size, usual[role][1]) for role, size in sizes.items() if role in usual}


def _n_heads(
    width: int | None, d_head: int | None, n_kv_heads: int | None, is_grouped: bool
) -> int:
    """A number of heads: if possible at least three, odd, different from the head width, and with a
    divisor for kv heads where heads are grouped.
    """
    if width and d_head and width >= d_head:
        return width // d_head
    heads = [n for n in _HEADS if n % (n_kv_heads or 1) == 0 and (width or n) % n == 0] or [
        3 * (n_kv_heads or 1)
    ]

    def faults(n: int) -> tuple[bool, bool, bool, bool]:
        d, is_prime = (
            width // n if width else d_head or _D_HEAD,
            all(n % divisor for divisor in range(2, n)),
        )
        return d < 4 or n < 3, is_grouped and is_prime, n in (d, n_kv_heads), d % 2 != 0

    return min(heads, key=faults)


# ------------------------------------------------------------------------ seeds, dropout and copies


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds the generators of torch and Python inside the block and restores their state
    afterwards.
    """
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []), contextlib.ExitStack() as after:
        after.callback(random.setstate, random.getstate())
        (torch.manual_seed if is_cuda else torch.default_generator.manual_seed)(
            seed
        )  # the latter is ten times as fast
        random.seed(seed)
        yield


_FORWARD: Any = F.multi_head_attention_forward
ATTENTION_OF_TORCH: Final = FunctionType(
    _FORWARD.__code__,
    {**vars(F), "has_torch_function": lambda tensors: False},
    "forward",
    _FORWARD.__defaults__,
)
"""`multi_head_attention_forward` that always runs its own body, instead of passing the whole call
to a mode."""


class WithoutDropout(TorchFunctionMode):
    """Lets torch's functions of dropout return their input."""

    @ours(instead=plainly)
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What a function returns where nothing is dropped."""
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return on_behalf(ATTENTION_OF_TORCH, *args, **kwargs)
        if "dropout" in getattr(func, "__name__", "") and (args or "input" in kwargs):
            kept = args[0] if args else kwargs["input"]
            return (
                (kept, torch.ones_like(kept, dtype=torch.bool))
                if func is torch.native_dropout
                else kept
            )
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], *(0.0 for _ in args[4:5]), *args[5:])
            kwargs = {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}
        return on_behalf(func, *args, **kwargs)


def copied(obj: T) -> T:
    """A deep copy, or the object itself if it cannot be copied."""
    with contextlib.suppress(*NO_ANSWER):
        copied_object: T = call_user(copy.deepcopy, obj)
        return copied_object
    return obj


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
    modules = [call_user(root._apply, change) for root in roots if isinstance(root, nn.Module)]
    parts = itertools.chain([call], *(module.modules() for module in modules))
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
    copied_call: T = call_user(copy.deepcopy, call)
    return cast(copied_call, dtype, device)
