"""The call that a user shows with `--example`: what each of its arguments is, by its shape, its dtype and its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mhacli.errors import MhaError, UsageError
from mhacli.usercode.call.convention import PATTERN_AXES, AxisNames, CallConvention, part_of
from mhacli.usercode.call.signature import ROWS, CallParameter, CallRole, argument_names, signature_of
from mhacli.usercode.call.user_attention import UserAttention
from mhacli.usercode.process import exception_text
from mhacli.usercode.target import find_target
from mhacli.usercode.types import Built, InputSizes, MaskForm, MaskKind

_LENGTHS = (7, 8, 12, 16, 64)
"""The lengths to try, until a call works."""
_UNLIKE = 3
"""A second length is larger by this, and shows which axes are lengths."""


def example_of(text: str, built: Built) -> Callable[..., Any]:
    """An example as a function: a `lambda` in the user's words knows torch and the names of the target's file; else the name of a
    function."""
    if not text.lstrip().startswith("lambda"):
        return find_target(text).thing  # type: ignore[no-any-return]
    module = inspect.getmodule(built.thing)
    names = {**(vars(module) if module is not None else {}), "torch": torch, "nn": nn, "F": functional}
    try:
        return eval(text, names)  # type: ignore[no-any-return]
    except Exception as fault:
        raise UsageError(f"--example cannot be read: {exception_text(fault)}") from fault


def recorded(example: Callable[..., Any], built: Built, *length: int) -> dict[str, Any]:
    """The arguments of the call that an example makes, by name. Raises `MhaError` if it makes none."""
    made: dict[str, Any] = {}

    def record(*positional: Any, **keywords: Any) -> Any:
        if not made:
            names = argument_names(built.call, len(positional))
            made.update(zip(names, positional, strict=True))
            made.update(keywords)
        return built.call(*positional, **keywords)

    try:
        with torch.no_grad():
            example(record, *length)
    except Exception as fault:  # the user's code may raise anything; what it was given is known all the same
        if not made:
            raise MhaError(
                f"--example raises {exception_text(fault)}", code="cannot-examine", path=built.file
            ) from fault
    if not made:
        raise MhaError(f"--example does not call {built.name}", code="cannot-examine", path=built.file)
    return made


def call_with_ids(
    call: Callable[..., Any], example: Callable[..., Any], x: Tensor, given: Mapping[str, Any], name: str | None
) -> Any:
    """What the call of an example returns with the token ids `x` for its argument `name`, else for its first ids, and with the
    values that are `given`."""

    def made(*positional: Any, **keywords: Any) -> Any:
        names = argument_names(call, len(positional))
        arguments = {**dict(zip(names, positional, strict=True)), **keywords}
        ids = [name for name, value in arguments.items() if _is_ids(value)]
        shown = arguments[name if name in ids else ids[0]]
        if takes_one_length and shown.shape[1] != x.shape[1]:
            raise ValueError("the example gives one length")
        others = {**_of_batch(arguments, len(shown), len(x)), **given, (name if name in ids else ids[0]): x}
        places = [others.pop(name, value) for name, value in zip(names, positional, strict=True)]
        return call(*places, **{**keywords, **others})

    takes_one_length = len(inspect.signature(example).parameters) == 1
    return example(made, *[x.shape[1]][: not takes_one_length])


def _of_batch(arguments: Mapping[str, Any], n_shown: int, n: int) -> dict[str, Any]:
    """The tensors of an example that have a part for each text, for another number of texts."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and value.ndim > 1}
    batched = {name: value for name, value in tensors.items() if value.shape[0] == n_shown != value.shape[1]}
    return {name: value[:1].expand(n, *value.shape[1:]) for name, value in batched.items()}


def only_length(example: Callable[..., Any]) -> int | None:
    """The length of the token ids in an example that does not take one; None where it does."""
    if len(inspect.signature(example).parameters) > 1:
        return None
    lengths: list[int] = []

    def note(*positional: Any, **keywords: Any) -> None:
        lengths.extend(value.shape[1] for value in (*positional, *keywords.values()) if _is_ids(value))

    with suppress(Exception):  # what it does with the result is not known
        example(note)
    return lengths[0] if lengths else None


def _is_ids(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32)


def attentions_of_example(like: UserAttention, example: Callable[..., Any]) -> Iterator[UserAttention]:
    """The target, called as the example does, at lengths that may work."""
    built = like.built
    is_resizable = len(inspect.signature(example).parameters) > 1
    if not is_resizable:
        yield _attention(like, example, recorded(example, built), None)
        return
    for length in _LENGTHS:
        arguments = recorded(example, built, length)
        yield _attention(like, example, arguments, recorded(example, built, length + _UNLIKE))


def _attention(
    like: UserAttention, example: Callable[..., Any], made: dict[str, Any], longer: dict[str, Any] | None
) -> UserAttention:
    """The target with the inputs and the masks that the arguments show; `longer` are those of a longer text."""
    built = like.built
    slots = _slots(made, built)
    if not slots:
        hint = (
            "token ids take any length: lambda m, T: m(torch.randint(9, (2, T)))"
            if any(map(_is_ids, made.values()))
            else None
        )
        raise MhaError(f"--example gives {built.name} no vectors", hint=hint, code="cannot-examine", path=built.file)
    parts = {part_of(slot): made[slot.name] for slot in slots}
    has_weights = built.module is not None and any(p.ndim > 1 for p in built.module.parameters())
    is_function = len(parts) == 3 and not has_weights
    axes = _axes(slots[0].name, made, longer, is_function=is_function, states=vars(built.module or object))
    queries = parts.get("queries", made[slots[0].name])
    keys = parts.get("keys", queries)
    sizes = {
        axis: queries.shape[axes.index(axis)] if axis in axes else 1 for axis in ("batch", "row", "width", "column")
    }
    k_len = keys.shape[axes.index("row")] * (keys.shape[axes.index("column")] if "column" in axes else 1)
    n_heads = queries.shape[axes.index("head")] if is_function and "head" in axes else 1
    q_len = sizes["row"] * sizes["column"]
    forms = tuple(_mask_forms(made, slots, q_len, k_len))
    return replace(
        like,
        convention=CallConvention(
            slots, axes, is_function, n_heads=n_heads, example=example, is_resizable=longer is not None
        ),
        sizes=InputSizes(sizes["batch"], q_len, k_len, sizes["width"], keys.shape[axes.index("width")]),
        n_heads=n_heads,
        n_rows=len(parts),
        mask_forms=tuple(form for form in forms if "query" in form.axes),
        padding_forms=tuple(form for form in forms if "query" not in form.axes),
        is_forgetful=True,
    )


def _slots(made: dict[str, Any], built: Built) -> tuple[CallParameter, ...]:
    """The arguments that hold token vectors: by name where names tell, else the floating ones in order."""
    roles = {parameter.name: parameter.role for parameter in signature_of(built.call).parameters}
    vectors = [name for name, value in made.items() if _is_vectors(value)]
    named = [name for name in vectors if roles.get(name) in ROWS]
    unnamed = [name for name in vectors if roles.get(name, "unknown") in ("unknown", "rest")]
    in_order: dict[int, tuple[CallRole, ...]] = {1: ("x",), 2: ("x", "context"), 3: ("query", "key", "value")}
    found = {name: roles[name] for name in named} or dict(
        zip(unnamed, in_order.get(len(unnamed), ("x",)), strict=False)
    )
    return tuple(CallParameter(name, role, True) for name, role in found.items())


def _is_vectors(value: Any) -> bool:
    """Whether an argument may hold token vectors: floats that are no mask."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
        return False
    return not bool(((value == 0) | (value == 1) | (value < -1e3)).all())


def _axes(
    name: str, made: dict[str, Any], longer: dict[str, Any] | None, *, is_function: bool, states: Mapping[str, Any]
) -> AxisNames:
    """The axes of the inputs: a length is what differs in a longer text, else it stands where it usually does."""
    ndim = made[name].ndim
    usual = 0 if ndim == 3 and states.get("batch_first", True) is False else -2
    changing = [usual % ndim]
    if longer is not None:
        changing = [dim for dim in range(ndim) if made[name].shape[dim] != longer[name].shape[dim]] or changing
    if ndim == 4 and (len(changing) == 2 or (longer is None and not is_function)):
        return ("batch", "width", "row", "column")
    others = {2: ["width"], 3: ["batch", "width"], 4: ["batch", "head", "width"]}[ndim]
    return (*others[: changing[0]], "row", *others[changing[0] :])


def _mask_forms(made: dict[str, Any], slots: tuple[CallParameter, ...], q_len: int, k_len: int) -> Iterator[MaskForm]:
    """The forms of the masks among the arguments, with both meanings of True."""
    for name, value in made.items():
        if (
            not isinstance(value, Tensor)
            or value.ndim == 0
            or name in [slot.name for slot in slots]
            or value.is_complex()
        ):
            continue
        if value.shape[-1] != k_len or value.ndim > 4 or (value.is_floating_point() and _is_vectors(value)):
            continue
        is_wide = value.ndim > 1 and value.shape[-2] == q_len
        axes = (
            PATTERN_AXES[-value.ndim :] if is_wide or value.ndim > 2 else (("key",), ("batch", "key"))[value.ndim - 1]
        )
        axes = ("batch", *axes[1:]) if len(axes) == 3 else axes
        kind: MaskKind = "bool" if value.dtype == torch.bool else "whole"
        if value.is_floating_point():
            kind = "additive" if bool((value < 0).any()) else "01"
        for meaning in ("keep", "hide")[: 1 if kind == "additive" else 2]:
            yield MaskForm(name, axes, kind, meaning)  # type: ignore[arg-type]


def example_text(attention: UserAttention) -> str:
    """The call as an `--example`, with `…` for what takes more than a word."""
    convention, sizes = attention.convention, attention.sizes
    arguments: list[str] = []
    for slot in convention.slots:
        width = sizes.d_in if part_of(slot) == "queries" else sizes.d_context
        words = {"batch": 2, "head": attention.n_heads, "row": "T", "column": "T", "width": width}
        vectors = f"torch.randn({', '.join(str(words[axis]) for axis in convention.axes)})"
        arguments.append(vectors if slot.by_place or not arguments else f"{slot.name}={vectors}")
    if convention.slots and signature_of(attention.built.call).parameters[0].name != convention.slots[0].name:
        arguments[0] = f"{convention.slots[0].name}={arguments[0]}"
    arguments += [f"{name}={'None' if form is None else '…'}" for name, form in convention.idle]
    arguments += [f"{name}={value!r}" for name, value in convention.fixed.items()]
    for recipe in convention.extras:
        value = {"offset": "0", "batch": "2", "q_len": "T", "k_len": "T"}.get(recipe.kind, "…")
        arguments.append(f"{recipe.parameter}={value if recipe.value is None else repr(recipe.value)}")
    return f"lambda m, T: m({', '.join(arguments)})"


_OTHER_SHAPES = ("torch.randn(T, {})", "torch.randn(2, {}, T)", "torch.randn(2, 1, T, {})", "torch.randn({}, T)")


def working_example(attention: UserAttention) -> str:
    """An example with another shape of the inputs that works, if there is one; else the call that was tried."""
    tried = example_text(attention)
    slots = attention.convention.slots
    for shape in _OTHER_SHAPES:
        vectors = shape.format(attention.sizes.d_in)
        other = f"lambda m, T: m({', '.join([vectors] * len(slots))})"
        try:
            with torch.no_grad():
                example_of(other, attention.built)(attention.built.call, _LENGTHS[0])
        except (Exception, SystemExit):  # nor does this one
            continue
        return other
    return tried
