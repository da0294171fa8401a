"""The call that a user shows with `--example`: what each of its arguments is, by its shape, its dtype and its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mhacli.errors import MhaError, UsageError
from mhacli.usercode.call.layouts import weights_of
from mhacli.usercode.call.results import OF_IDS, PATTERN_AXES, AxisNames
from mhacli.usercode.call.signature import IN_ORDER, ROWS, CallParameter, signature_of
from mhacli.usercode.call.user_attention import UserAttention, changed, part_of
from mhacli.usercode.process import exception_text
from mhacli.usercode.target import find_target
from mhacli.usercode.types import Built, InputSizes, MaskForm

_LENGTHS = (7, 8, 12, 16, 64)
"""The lengths to try, until a call works."""
_UNLIKE = 3
"""A second length is larger by this, and shows which axes are lengths."""


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
    if len(inspect.signature(example).parameters) == 1:
        made = _recorded(example, like.built)
        yield from _attention(replace(like, example=example), made, made)
        return
    for length in _LENGTHS:
        made, longer = (_recorded(example, like.built, n) for n in (length, length + _UNLIKE))
        yield from _attention(replace(like, example=example), made, longer)


def _recorded(example: Callable[..., Any], built: Built, *length: int) -> dict[str, Any]:
    """The arguments of the call that an example makes, by name. Raises `MhaError` if it makes none."""
    made: list[dict[str, Any]] = []

    def note(arguments: dict[str, Any]) -> dict[str, Any]:
        made.append(dict(arguments))
        return arguments

    problem = f"does not call {built.name}"
    try:
        with torch.no_grad():
            example(changed(built.call, note), *length)
    except Exception as fault:  # the user's code may raise anything; what it was given is known all the same
        problem = f"raises {exception_text(fault)}"
    if not made:
        raise MhaError(f"--example {problem}", code="cannot-examine", path=built.file)
    return made[0]


def _attention(like: UserAttention, made: dict[str, Any], longer: dict[str, Any]) -> Iterator[UserAttention]:
    """The target with the inputs and the masks that the arguments show; `longer` are those of a longer text."""
    built, ids = like.built, [name for name, value in made.items() if _is_ids(value)]
    if like.axes == OF_IDS:
        ids.sort(key=lambda name: name not in {slot.name for slot in like.slots if part_of(slot) == "queries"})
        if ids:
            batch, length = made[ids[0]].shape
            sizes = InputSizes(batch, length, length, 1, 1)
            yield replace(like, slots=(CallParameter(ids[0], "x", True),), fixed={}, sizes=sizes)
        return
    slots = _slots(made, built)
    if not slots:
        hint = "token ids take any length: lambda m, T: m(torch.randint(9, (2, T)))" if ids else None
        raise MhaError(f"--example gives {built.name} no vectors", hint=hint, code="cannot-examine", path=built.file)
    parts = {part_of(slot): made[slot.name] for slot in slots}
    queries = parts.get("queries", made[slots[0].name])
    is_function = len(parts) == 3 and not weights_of(built)
    is_second = vars(built.module or object).get("batch_first", True) is False
    axes = _axes(queries.shape, longer[slots[0].name].shape, is_function=is_function, is_second=is_second)
    shape = dict(zip(axes, queries.shape, strict=True))
    of_keys = dict(zip(axes, parts.get("keys", queries).shape, strict=True))
    q_len, k_len = (each["row"] * each.get("column", 1) for each in (shape, of_keys))
    forms = list(_mask_forms(made, slots, q_len, k_len))
    yield replace(
        like,
        slots=slots,
        axes=axes,
        is_function=is_function,
        n_heads=shape.get("head", 1),
        fixed={},
        sizes=InputSizes(shape.get("batch", 1), q_len, k_len, shape["width"], of_keys["width"]),
        mask_forms=tuple(form for form in forms if "query" in form.axes),
        padding_forms=tuple(form for form in forms if "query" not in form.axes),
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


def _is_ids(value: Any) -> bool:
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


def _mask_forms(
    made: Mapping[str, Any], slots: tuple[CallParameter, ...], q_len: int, k_len: int
) -> Iterator[MaskForm]:
    """The forms of the masks among the arguments, with both meanings of True."""
    for name, value in made.items():
        if not isinstance(value, Tensor) or name in {slot.name for slot in slots} or _is_vectors(value):
            continue
        if value.is_complex() or not 0 < value.ndim <= 4 or value.shape[-1] != k_len:
            continue
        is_wide = value.ndim > 2 or value.shape[:-1] == (q_len,)
        axes = PATTERN_AXES[-value.ndim :] if is_wide else ("batch", "key")[-value.ndim :]
        axes = ("batch", *axes[1:]) if value.ndim == 3 else axes
        if value.is_floating_point() and bool((value < 0).any()):
            yield MaskForm(name, axes, "additive")
            continue
        kind = {torch.bool: "bool"}.get(value.dtype, "01" if value.is_floating_point() else "whole")
        yield MaskForm(name, axes, kind)  # type: ignore[arg-type]
        yield MaskForm(name, axes, kind, "hide")  # type: ignore[arg-type]


_TYPED = {
    "batch": "2",
    "q_len": "T",
    "k_len": "T",
    "offset": "0",
    **dict.fromkeys(("rope", "positions", "weight", "training"), "…"),
}
"""Arguments that are made for each call, as text."""


def arguments_text(attention: UserAttention, rows: Sequence[str]) -> str:
    """The arguments of a call behind those for token vectors, with `…` for what takes more than a word."""
    texts = {name: repr(value) for name, value in attention.fixed.items()}
    for name, kind, value, _ in attention.extras:
        texts[name] = _TYPED.get(kind, repr(value))
    texts |= {name: "None" if form is None else "…" for name, form in attention.idle.items()}
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
    return f"lambda m, T: m({arguments_text(attention, rows)})"


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
