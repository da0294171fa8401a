"""A call as an example, in the user's words or in ours: what each of its arguments is, by its shape, its dtype and its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mhacli.errors import MhaError, UsageError
from mhacli.usercode.call.signature import IN_ORDER, ROWS, CallParameter, signature_of
from mhacli.usercode.call.user_attention import AxisNames, UserAttention, changed, part_of
from mhacli.usercode.process import exception_text
from mhacli.usercode.target import find_target
from mhacli.usercode.types import Built, InputSizes

_LENGTHS = (7, 8, 12, 16, 64)
"""The lengths to try, until a call works."""
_UNLIKE = 3
"""A second length is larger by this, and shows which axes are lengths."""


def refused(built: Built, message: str, hint: str | None = None) -> MhaError:
    """The error for a target that cannot be called."""
    return MhaError(message, hint=hint, code="cannot-examine", path=built.file)


def example_of(text: str, built: Built) -> Callable[..., Any]:
    """An example as a function: a `lambda` in the user's words knows torch and the names of the target's file; else the name of a
    function."""
    if not text.lstrip().startswith("lambda"):
        return find_target(text)  # type: ignore[no-any-return]
    module = inspect.getmodule(built.thing)
    names = {**(vars(module) if module is not None else {}), "torch": torch, "nn": nn, "F": functional}
    try:
        return eval(text, names)  # type: ignore[no-any-return]
    except Exception as fault:
        raise UsageError(f"--example cannot be read: {exception_text(fault)}") from fault


def attentions_of_example(like: UserAttention, example: Callable[..., Any]) -> Iterator[UserAttention]:
    """The target, called as the example does, at lengths that may work."""
    like = replace(like, example=example)
    for length in _LENGTHS if like.is_resizable else (0,):
        made = arguments_of_example(like, length)
        longer = arguments_of_example(like, length + _UNLIKE)
        yield _attention(like, made, longer)


def arguments_of_example(like: UserAttention, length: int) -> dict[str, Any]:
    """The arguments of the call that an example makes, by name. Raises `MhaError` if it makes none."""
    built, made = like.built, list[dict[str, Any]]()

    def note(arguments: dict[str, Any]) -> dict[str, Any]:
        made.append(dict(arguments))
        return arguments

    problem = f"does not call {built.name}"
    try:
        with torch.no_grad():
            assert like.example is not None
            like.example(changed(built.call, note), *[length][: like.is_resizable])
    except Exception as fault:  # the user's code may raise anything; what it was given is known all the same
        problem = f"raises {exception_text(fault)}"
    if not made:
        raise refused(built, f"--example {problem}")
    return made[0]


def _attention(like: UserAttention, made: dict[str, Any], longer: dict[str, Any]) -> UserAttention:
    """The target with the inputs and the masks that the arguments show; `longer` are those of a longer text."""
    built, slots = like.built, _slots(made, like.built)
    if not slots:
        has_ids = any(map(is_ids, made.values()))
        hint = "token ids take any length: lambda m, T: m(torch.randint(9, (2, T)))" if has_ids else None
        raise refused(built, f"--example gives {built.name} no vectors", hint)
    parts = {part_of(slot): made[slot.name] for slot in slots}
    queries = parts.get("queries", made[slots[0].name])
    is_function = len(parts) == 3 and not weights_of(built)
    is_second = vars(built.module or object).get("batch_first", True) is False
    axes = _axes(queries.shape, longer[slots[0].name].shape, is_function=is_function, is_second=is_second)
    shape = dict(zip(axes, queries.shape, strict=True))
    of_keys = dict(zip(axes, parts.get("keys", queries).shape, strict=True))
    q_len, k_len = (each["row"] * each.get("column", 1) for each in (shape, of_keys))
    return replace(
        like,
        slots=slots,
        axes=axes,
        is_function=is_function,
        n_heads=shape.get("head", 1),
        fixed={},
        sizes=InputSizes(shape.get("batch", 1), q_len, k_len, shape["width"], of_keys["width"]),
        is_forgetful=True,
    )


def _slots(made: dict[str, Any], built: Built) -> tuple[CallParameter, ...]:
    """The arguments that hold token vectors: by name where names tell, else the floating ones in order."""
    roles = {parameter.name: parameter.role for parameter in signature_of(built.call)}
    vectors = [name for name, value in made.items() if _is_vectors(value)]
    found = {name: roles[name] for name in vectors if roles.get(name) in ROWS}
    if not found:
        unnamed = [name for name in vectors if roles.get(name, "unknown") in ("unknown", "rest")]
        found = dict(zip(unnamed, IN_ORDER.get(len(unnamed), ("x",)), strict=False))
    return tuple(CallParameter(name, role, True) for name, role in found.items())


def is_ids(value: Any) -> bool:
    """Whether an argument may be token ids `[batch, token]`."""
    return isinstance(value, Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32)


def _is_vectors(value: Any) -> bool:
    """Whether an argument may hold token vectors: floats that are no mask."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
        return False
    return not bool(((value == 0) | (value == 1) | (value < -1e3)).all())


def _axes(shape: torch.Size, longer: torch.Size, *, is_function: bool, is_second: bool) -> AxisNames:
    """The axes of the inputs: a length is what differs in a longer text, else it stands where it usually does."""
    changing = [dim for dim, (size, other) in enumerate(zip(shape, longer, strict=True)) if size != other]
    if len(shape) == 4 and (len(changing) == 2 or (not changing and not is_function)):
        return ("batch", "width", "row", "column")
    usual = 0 if len(shape) == 3 and is_second else len(shape) - 2
    axes = {2: ["width"], 3: ["batch", "width"], 4: ["batch", "head", "width"]}[len(shape)]
    axes.insert(changing[0] if changing else usual, "row")
    return tuple(axes)


def weights_of(built: Built) -> list[tuple[str, Tensor]]:
    """The weights of at least two axes that the target holds, or a module in it, by name."""
    if built.module is not None:
        named: list[tuple[str, Tensor]] = list(built.module.named_parameters())
    else:
        held = getattr(built.call, "__dict__", {})
        named = [(name, part) for name, part in held.items() if isinstance(part, Tensor)]
        for part in held.values():
            named += part.named_parameters() if isinstance(part, nn.Module) else ()
    return [(name, weight) for name, weight in named if not nn.parameter.is_lazy(weight) and weight.ndim > 1]


# ----------------------------------------------------------------------------------------------------------- as an example


def call_text(attention: UserAttention, rows: Sequence[str], masks: Sequence[str] = ()) -> str:
    """The arguments of a call behind those for token vectors, with `…` for what takes more than a word."""
    texts: dict[str, str] = {}
    for name in (parameter.name for parameter in signature_of(attention.built.call)):
        if name in attention.made or isinstance(attention.fixed.get(name), Tensor):
            texts[name] = "…"
        elif name in attention.fixed:
            texts[name] = repr(attention.fixed[name])
    texts |= dict.fromkeys(masks, "…")
    return ", ".join([*rows, *(f"{name}={text}" for name, text in texts.items())])


def example_text(attention: UserAttention) -> str:
    """The call as an `--example`."""
    first, rows = signature_of(attention.built.call)[0].name, list[str]()
    for slot in attention.slots:
        width = attention.sizes.d_in if part_of(slot) == "queries" else attention.sizes.d_context
        words = {"batch": 2, "head": attention.n_heads, "width": width}
        vectors = f"torch.randn({', '.join(str(words.get(axis, 'T')) for axis in attention.axes)})"
        is_first = slot.name == first and not rows
        rows.append(vectors if slot.by_place or is_first else f"{slot.name}={vectors}")
    return f"lambda m, T: m({call_text(attention, rows)})"


def working_example(attention: UserAttention) -> str:
    """An example with another shape of the inputs that works, if there is one; else the call that was tried."""
    for shape in ("torch.randn(T, {})", "torch.randn(2, {}, T)", "torch.randn(2, 1, T, {})", "torch.randn({}, T)"):
        vectors = shape.format(attention.sizes.d_in)
        other = f"lambda m, T: m({', '.join([vectors] * len(attention.slots))})"
        try:
            with torch.no_grad():
                example_of(other, attention.built)(attention.built.call, _LENGTHS[0])
        except (Exception, SystemExit):  # nor does this one
            continue
        return other
    return example_text(attention)
