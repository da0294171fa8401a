"""Finds out how to call a user's attention: tries the likely calls in order, then its modes and its masks."""

from __future__ import annotations

import itertools
import re
import shlex
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mhacli.errors import MhaError
from mhacli.usercode.arguments import parse_value
from mhacli.usercode.call.example import arguments_text, attentions_of_example, example_of, working_example
from mhacli.usercode.call.layouts import calls_to_try, forms_of
from mhacli.usercode.call.results import HEAD_AXES, AxisNames, leaves, output_in, path_text
from mhacli.usercode.call.signature import MASKS, CallParameter, never_read, signature_of
from mhacli.usercode.call.user_attention import ROPE_BASE, UserAttention, drawer_of, part_of
from mhacli.usercode.inputs import float64_copy, map_rows, seeded
from mhacli.usercode.process import exception_text, lacks_cuda, shortened, source_line_of
from mhacli.usercode.target import TargetRequest
from mhacli.usercode.types import Built, Inputs, InputSizes, MaskForm

_MOST_CALLS, _MOST_S = 200, 10.0
_MOST_COPIED = 4_000_000
"""The most numbers of a module that is copied for each call that is tried, so that no state passes to the next."""
_INPUT_SCALE = 0.3
"""The scale of random inputs, small enough that a softmax without scaling sees more than one key."""
_LONGEST_ERROR, _LONGEST_SOURCE = 160, 60


def find_user_attention(built: Built, request: TargetRequest) -> UserAttention:
    """The target with the way to call it, with a context if it takes one. Raises MhaError if no call works."""
    found, _ = _with_masks(_first_call(built, request), request.seed)
    return _finished(found, request.seed)


def find_modes(built: Built, request: TargetRequest) -> tuple[UserAttention, ...]:
    """The target with the call and the masks of each mode: self-attention, cross-attention, or both. Raises MhaError if no call
    works."""
    modes = _modes_of(_first_call(built, request), request.seed)
    found = [_with_masks(mode, request.seed) for mode in modes]
    hiding_anywhere = set().union(*(hiding for _, hiding in found))
    finished = []
    for mode, hiding in found:
        others = hiding_anywhere - hiding
        masks = tuple(form for form in mode.mask_forms if form.parameter not in others)
        paddings = tuple(form for form in mode.padding_forms if form.parameter not in others)
        finished.append(_finished(replace(mode, mask_forms=masks, padding_forms=paddings), request.seed))
    return tuple(finished)


# ------------------------------------------------------------------------------------------------------- the first call


def _first_call(built: Built, request: TargetRequest) -> UserAttention:
    """The first call that gives an output."""
    fixed = {name: parse_value(value) for name, value in request.call_arguments}
    tensors = [] if built.module is None else [*built.module.parameters(), *built.module.buffers()]
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())
    is_small = not any(map(nn.parameter.is_lazy, tensors)) and sum(t.numel() for t in tensors) <= _MOST_COPIED
    device, sizes = torch.device(request.device), InputSizes(1, 1, 1, 1, 1)
    like = UserAttention(built, sizes, dtype, device, fixed=fixed, is_forgetful=is_small)
    if request.example is not None:
        candidates: Iterable[UserAttention] = attentions_of_example(like, example_of(request.example, built))
    else:
        _refuse_unknown(built, fixed)
        candidates = calls_to_try(like, causal=request.causal)
    tried: list[tuple[UserAttention, BaseException]] = []
    began = time.perf_counter()
    for candidate in itertools.islice(candidates, _MOST_CALLS):
        try:
            return _with_output(candidate, request.seed)
        except (Exception, SystemExit) as fault:  # the user's code may raise anything
            tried.append((candidate, fault))
        if len(tried) >= 12 and time.perf_counter() - began > _MOST_S:
            break
    raise _call_error(built, request, tried)


def _inputs(attention: UserAttention, seed: int) -> Inputs:
    """Random inputs, the same in each call."""
    rows = drawer_of(attention, seed).inputs(with_context=attention.n_rows > 1)
    return map_rows(rows, lambda tensor: _INPUT_SCALE * tensor)


def _with_output(attention: UserAttention, seed: int) -> UserAttention:
    """The attention with the path of its output. Raises what the call raises, and ValueError without an output."""
    inputs = _inputs(attention, seed)
    with seeded(seed, attention.device):
        result = attention.result(inputs)
    orders = [attention.axes]
    if attention.is_function and "head" in attention.axes:
        orders += [HEAD_AXES, ("batch", "row", "head", "width")]
    output = output_in(result, orders, attention.sizes_of(inputs))
    if output is None:
        shapes = [str(list(tensor.shape)) for _, tensor in leaves(result) if tensor.is_floating_point()]
        sizes = {"batch": attention.sizes.batch, "head": attention.n_heads, "row": attention.sizes.q_len}
        expected = ", ".join(str(sizes.get(axis, "·")) for axis in attention.axes)
        raise ValueError(f"returned {', '.join(shapes[:4]) or type(result).__name__}, where [{expected}] was to come")
    return replace(attention, output=output)


def _modes_of(attention: UserAttention, seed: int) -> list[UserAttention]:
    """The attention in each mode: self and cross if keys are optional, else one."""
    keys = [slot for slot in attention.slots if part_of(slot) != "queries"]
    if not keys or attention.example is not None or any(slot.required for slot in keys):
        return [attention]
    crossed = replace(attention, slots=tuple(slot._replace(required=True) for slot in attention.slots))
    sizes = replace(attention.sizes, k_len=attention.sizes.q_len, d_context=attention.sizes.d_in)
    alone = replace(attention, sizes=sizes, slots=tuple(slot for slot in attention.slots if slot not in keys))
    try:
        return [replace(_with_output(alone, seed), mode="self"), replace(crossed, mode="cross")]
    except (Exception, SystemExit):  # it needs them
        return [crossed]


# ---------------------------------------------------------------------------------------------------------------- masks


def _with_masks(attention: UserAttention, seed: int) -> tuple[UserAttention, set[str]]:
    """The attention with the mask forms that its call accepts, those that hide a key first, and the names of the masks that
    do."""
    if attention.example is not None:
        return attention, set()
    masks: dict[MaskForm, bool] = {}
    paddings: dict[MaskForm, bool] = {}
    for parameter in signature_of(attention.built.call, *MASKS):
        if parameter.name in attention.fixed:
            continue
        found = _accepted(attention, parameter, seed, padding=False) if parameter.role in ("mask", "bias") else {}
        masks |= found
        paddings |= {} if found else _accepted(attention, parameter, seed, padding=True)
    hides = masks | paddings
    best = sorted(hides, key=lambda form: not hides[form])
    first = {form.parameter: form for form in reversed(best)}
    attention = replace(
        attention,
        idle={name: form and first.get(name, form) for name, form in attention.idle.items()},
        mask_forms=tuple(form for form in best if form in masks),
        padding_forms=tuple(form for form in best if form in paddings),
    )
    return attention, {form.parameter for form in best if hides[form]}


def _accepted(attention: UserAttention, parameter: CallParameter, seed: int, *, padding: bool) -> dict[MaskForm, bool]:
    """The forms of a mask with which the call works, and whether the output shows no key that they hide."""
    found = {}
    for form in forms_of(parameter, padding=padding):
        with suppress(Exception, SystemExit):  # a form that the call does not take
            found[form] = _hides(attention, form, seed, padding=padding)
    return found


def _hides(attention: UserAttention, form: MaskForm, seed: int, *, padding: bool) -> bool:
    """Whether two texts that differ in a key, which a mask hides, have the same outputs. Raises what the call raises."""
    inputs = map_rows(_inputs(attention, seed), lambda rows: rows[:1].expand_as(rows).clone())
    keys = inputs.queries if inputs.keys is None else inputs.keys
    q_len, k_len = inputs.queries.shape[-2], keys.shape[-2]
    hidden = k_len - 1 if form.kind == "lengths" else 1
    for rows in (keys, inputs.values):
        if rows is not None:
            rows[1, ..., hidden, :] *= -2
    real = torch.ones(len(keys), k_len, dtype=torch.bool)
    real[:, hidden] = False
    allowed = real[:1, None, None, :].expand(1, 1, q_len, k_len)
    if padding:
        out = attention(inputs._replace(real=real), padding=form, seed=seed).out
    else:
        out = attention(inputs._replace(allowed=allowed), mask=form, seed=seed).out
    same = [n for n in range(q_len) if n != hidden or inputs.keys is not None]
    first, second = out[0, ..., same, :], out[1, ..., same, :]
    return bool(first.isfinite().all()) and torch.allclose(first, second, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- finished


_WITHOUT_EFFECT = (
    "rest", "any", "training", "pattern", "mean", "batch", "q_len", "k_len", "heads", "d_head", "d_model",
)  # fmt: skip
_RESULT_SWITCH = re.compile(
    r"(return|output|use_return|need|get|ret)_.*|(use|with)_(kv_?)?cache|return|verbose|debug|is_?debug|logger"
)
"""Switches that change the returned or printed results, not the computation."""


def _finished(attention: UserAttention, seed: int) -> UserAttention:
    """The attention in float64 if it can compute in it, with the description of its call."""
    recipes = {recipe.parameter: recipe for recipe in attention.extras}
    forms = (*attention.mask_forms, *attention.padding_forms)
    used = {slot.name for slot in attention.slots} | {form.parameter for form in forms} | set(attention.fixed)
    never, unread, untried = never_read(attention.built.call), [], []
    for name, role, _, _, default in signature_of(attention.built.call):
        if role in _WITHOUT_EFFECT or _RESULT_SWITCH.fullmatch(name.lower()):
            continue
        unread += [name] if name in never else []
        is_of_past = role in ("offset", "cache", "other mask")  # 0 or None in a call without a past
        is_default = name not in recipes or recipes[name].value is default is not None
        untried += [name] if name not in used and (is_of_past or is_default) else []
    if attention.example is not None:
        untried = []
    exact = _in_float64(replace(attention, is_forgetful=False), seed)
    return replace(exact, described=_described(exact), untried=tuple(untried), unread=tuple(unread))


def _in_float64(attention: UserAttention, seed: int) -> UserAttention:
    """A float64 copy, if its output is in float64; else itself."""
    try:
        exact = attention.of(float64_copy(attention.built.call), torch.float64)
        out = exact(_inputs(exact, seed), seed=seed).out
    except (Exception, SystemExit):  # it cannot be copied, or something in it has a dtype of its own
        return attention
    return exact if out.dtype == torch.float64 else attention


def _described(attention: UserAttention) -> str:
    """The call as one line of Python, with a comment on layouts."""
    built, sizes = attention.built, attention.sizes_of(_inputs(attention, 0))
    rows = [part_of(slot) if slot.name.startswith("args[") else slot.name for slot in attention.slots]
    masks = {form.parameter: form for form in (*attention.mask_forms, *attention.padding_forms)}
    arguments = arguments_text(replace(attention, idle={**attention.idle, **masks}), rows)
    path, axes = attention.output
    notes = [] if attention.axes == attention.canonical else [f"rows [{_words(attention.axes)}]"]
    for recipe in attention.extras:
        if recipe.kind == "rope":
            table = attention.argument(recipe, sizes)
            first = table[0] if isinstance(table, tuple) else table
            kind = "complex" if first.is_complex() else "table" if first is table else "(cos, sin)"
            notes.append(f"{recipe.parameter}: {kind} {list(first.shape)}, base {ROPE_BASE:g}")
    notes += [] if attention.is_resizable else [f"only at length {attention.sizes.q_len}"]
    notes += [] if axes == attention.axes else [f"result [{_words(axes)}]"]
    name = "forward" if built.module is not None else getattr(built.call, "__name__", "__call__")
    comment = f"  # {'; '.join(notes)}" if notes else ""
    return f"{name}({arguments}){path_text(path)}{comment}"


def _words(axes: AxisNames) -> str:
    of_map = {"width": "d", "row": "height", "column": "width"} if "column" in axes else {"row": "seq", "width": "d"}
    return ", ".join(of_map.get(axis, axis) for axis in axes)


# --------------------------------------------------------------------------------------------------------------- errors


def _refuse_unknown(built: Built, fixed: Mapping[str, Any]) -> None:
    """Raises MhaError for required parameters of unknown role, and for a given parameter that does not exist."""
    signature = signature_of(built.call)
    names = [parameter.name for parameter in signature if parameter.role != "any"]
    for name in fixed:
        if name not in names and len(names) == len(signature):
            text, hint = (
                f"--call-arg {name}: {built.name} has no such parameter",
                f"it has {', '.join(names) or 'none'}",
            )
            raise MhaError(text, hint=hint, code="cannot-examine", path=built.file)
    unknown = [p.name for p in signature if p.role == "unknown" and p.required and p.name not in fixed]
    if unknown:
        text = f"{built.name} needs a value for {' and '.join(unknown)}, which mha cannot guess from the name"
        given = " ".join(f"--call-arg {name}=1" for name in unknown)
        hint = f"give {given}, or a whole call with --example"
        raise MhaError(text, hint=hint, code="cannot-examine", path=built.file)


def _call_error(built: Built, request: TargetRequest, tried: list[tuple[UserAttention, BaseException]]) -> MhaError:
    """The error if no call works: the exception of the first one, its line, and an example to give."""
    attention, fault = tried[0]
    line = source_line_of(fault, built.file)
    where = f" (line {line.line}: {shortened(line.source, _LONGEST_SOURCE)})" if line else ""
    message = f"{shortened(exception_text(fault), _LONGEST_ERROR)}{where}"
    if lacks_cuda(exception_text(fault)):
        text = f"{built.name} needs a CUDA device, which this machine does not have: {message}"
        return MhaError(text, code="no-device", path=built.file)
    what, hint = "--example", None
    if request.example is None:
        what = f"any of {len(tried)} usual ways" if len(tried) > 1 else "the usual way"
        hint = f"give a call that works: --example {shlex.quote(working_example(attention))}"
    if built.guesses and hint:
        guessed = [f"--arg {name}={built.arguments[name]!r:.20}" for name in built.guesses]
        hint += f"; mha guessed {' '.join(guessed[:4])}"
    return MhaError(
        f"{built.name} could not be called by {what}: {message}", hint=hint, code="cannot-examine", path=built.file
    )
