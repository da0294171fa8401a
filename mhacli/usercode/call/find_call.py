"""Finds out how to call a user's attention: tries the likely calls in order, then its modes, its switches and its masks."""

from __future__ import annotations

import functools
import re
import shlex
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mhacli.errors import MhaError
from mhacli.usercode.arguments import parse_value
from mhacli.usercode.call.convention import (
    HEAD_AXES,
    MERGED,
    PATTERN_AXES,
    ArgumentRecipe,
    AxisNames,
    CallConvention,
    CallSetting,
    leaves,
    output_in,
    part_of,
    path_text,
    rotation_text,
    sides_of,
    tensor_at,
)
from mhacli.usercode.call.example import attentions_of_example, example_of, working_example
from mhacli.usercode.call.layouts import calls_to_try
from mhacli.usercode.call.signature import MASKS, CallParameter, CallRole, never_read, signature_of
from mhacli.usercode.call.user_attention import UserAttention, drawer_of, inputs_for
from mhacli.usercode.inputs import float64_copy, map_rows, seeded
from mhacli.usercode.process import exception_text, is_on_cuda, lacks_cuda, shortened, source_line_of
from mhacli.usercode.target import TargetRequest
from mhacli.usercode.types import Built, Inputs, InputSizes, MaskForm, MaskKind

_MOST_CALLS, _MOST_S = 200, 10.0
_INPUT_SCALE = 0.3
"""The scale of random inputs, small enough that a softmax without scaling sees more than one key."""
_NUDGE, _ROUGH = 1e-9, 1e-11
_LONGEST_ERROR, _LONGEST_SOURCE = 160, 60


def find_user_attention(built: Built, request: TargetRequest) -> UserAttention:
    """The target with its call convention, with a context if it takes one. Raises MhaError if no call works."""
    attention = _with_switches(_first_call(built, request), request)
    return _finished(_with_masks(attention, request)[0], request)


def find_modes(built: Built, request: TargetRequest) -> tuple[UserAttention, ...]:
    """The target with the convention and the masks of each mode: self-attention, cross-attention, or both. Raises MhaError if
    no call works."""
    first = _first_call(built, request)
    attentions = [_with_switches(attention, request) for attention in _modes_of(first, request)]
    found = [_with_masks(attention, request) for attention in attentions]
    if len(found) == 1:
        return (_finished(found[0][0], request),)
    acting = [names for _, names in found]
    return tuple(
        _finished(_with_own_masks(attention, names, set().union(*acting)), request)
        for attention, names in found
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- the first call


def _first_call(built: Built, request: TargetRequest) -> UserAttention:
    """The first call that gives an output."""
    fixed = {name: parse_value(value) for name, value in request.call_arguments}
    device = torch.device(request.device)
    dtypes = [] if built.module is None else [p.dtype for p in built.module.parameters() if p.is_floating_point()]
    dtype = next(iter(dtypes), torch.get_default_dtype())
    like = UserAttention(built, CallConvention((), (), False), InputSizes(1, 1, 1, 1, 1), 1, 1, dtype, device)
    if request.example is not None:
        candidates: Iterable[UserAttention] = attentions_of_example(like, example_of(request.example, built))
    else:
        _refuse_unknown(built, fixed)
        candidates = calls_to_try(built, fixed, like, causal=request.causal)
    tried: list[tuple[UserAttention, BaseException]] = []
    mixed: UserAttention | None = None
    began = time.perf_counter()
    for n, candidate in enumerate(candidates):
        if n >= _MOST_CALLS or (n >= 12 and time.perf_counter() - began > _MOST_S):
            break
        try:
            found = _with_output(candidate, request.seed)
        except (Exception, SystemExit) as fault:  # the user's code may raise anything
            tried.append((candidate, fault))
            continue
        if not candidate.is_function or candidate.takes_context or _keeps_heads_apart(found, request.seed):
            return _without_idle_context(found, request.seed)
        mixed = mixed or found
    if mixed is not None:
        return mixed
    raise _call_error(built, device, tried, given=request.example is not None)


def _inputs(attention: UserAttention, seed: int) -> Inputs:
    """Random inputs, the same in each call."""
    rows = drawer_of(attention, seed).inputs(with_context=attention.n_rows > 1)
    return inputs_for(attention, map_rows(rows, lambda tensor: _INPUT_SCALE * tensor))


def _with_output(attention: UserAttention, seed: int) -> UserAttention:
    """The attention with the path of its output. Raises what the call raises, and ValueError without an output."""
    convention, inputs = attention.convention, _inputs(attention, seed)
    with seeded(seed, attention.device):
        result = attention.result(inputs)
    orders = [convention.axes]
    if convention.is_function and "head" in convention.axes:
        orders += [HEAD_AXES, ("batch", "row", "head", "width"), ("batch", "row", MERGED)]
    output = output_in(result, list(dict.fromkeys(orders)), sides_of(inputs, convention))
    if output is None:
        shapes = [str(list(tensor.shape)) for _, tensor in leaves(result) if tensor.is_floating_point()]
        sizes = {"batch": attention.sizes.batch, "head": attention.n_heads, "row": attention.sizes.q_len}
        expected = ", ".join(str(sizes.get(axis, "·")) for axis in convention.axes)
        raise ValueError(f"returned {', '.join(shapes[:4]) or type(result).__name__}, where [{expected}] was to come")
    return replace(attention, convention=replace(convention, output=output))


def _output(
    attention: UserAttention,
    inputs: Inputs,
    seed: int,
    *,
    mask: MaskForm | None = None,
    padding: MaskForm | None = None,
) -> Tensor | None:
    """The output in float64, None if the call raises."""
    try:
        with seeded(seed, attention.device):
            return attention(inputs, mask=mask, padding=padding).out.double().cpu()
    except (Exception, SystemExit):  # the user's code may raise anything
        return None


def _close(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether two outputs are equal within float32 rounding; NaN equals NaN."""
    if left is None or right is None or left.shape != right.shape:
        return False
    return bool(torch.allclose(left, right, rtol=1e-4, atol=1e-6, equal_nan=True))


def _changed(rows: Tensor) -> Tensor:
    """Other vectors of about the same size."""
    return rows.flip(-1) + 0.5


def _keeps_heads_apart(attention: UserAttention, seed: int) -> bool:
    """Whether a key moves several queries of its own head, and no other head: so it is if the axes are the right ones."""
    inputs = _inputs(attention, seed)
    assert inputs.keys is not None
    keys = inputs.keys.clone()
    keys[0, 0, 0] = _changed(keys[0, 0, 0])
    before, after = (_output(attention, each, seed) for each in (inputs, inputs._replace(keys=keys)))
    if before is None or after is None:
        return False
    moved = ~torch.isclose(before, after, rtol=1e-4, atol=1e-6, equal_nan=True).all(-1)
    own = int(moved[0, 0].sum())
    return own == int(moved.sum()) and own >= min(2, moved.shape[-1])


def _without_idle_context(attention: UserAttention, seed: int) -> UserAttention:
    """The attention without optional keys that have no influence."""
    inputs = _inputs(attention, seed)
    if inputs.keys is None or any(slot.required for slot in _key_slots(attention)):
        return attention
    values = None if inputs.values is None else _changed(inputs.values)
    other = inputs._replace(keys=_changed(inputs.keys), values=values)
    if not _close(_output(attention, inputs, seed), _output(attention, other, seed)):
        return attention
    return _over_itself(attention, seed) or attention


# ------------------------------------------------------------------------------------------------- modes and switches


def _key_slots(attention: UserAttention) -> list[CallParameter]:
    return [slot for slot in attention.convention.slots if part_of(slot) != "queries"]


def _over_itself(attention: UserAttention, seed: int) -> UserAttention | None:
    """The attention without its optional keys; None if the call then raises."""
    keys = _key_slots(attention)
    slots = tuple(slot for slot in attention.convention.slots if slot not in keys)
    sizes = replace(attention.sizes, k_len=attention.sizes.q_len, d_context=attention.sizes.d_in)
    return _if_it_works(replace(attention, sizes=sizes, n_rows=1), seed, slots=slots)


def _if_it_works(attention: UserAttention, seed: int, **changes: Any) -> UserAttention | None:
    """The attention with changes of its convention; None if the call then raises."""
    try:
        return _with_output(replace(attention, convention=replace(attention.convention, **changes)), seed)
    except (Exception, SystemExit):  # it needs something else
        return None


def _modes_of(attention: UserAttention, request: TargetRequest) -> list[UserAttention]:
    """The attention in each mode: self and cross if keys are optional, else one."""
    keys = _key_slots(attention)
    if not keys or attention.convention.example is not None or any(slot.required for slot in keys):
        return [attention]
    slots = tuple(slot._replace(required=True) for slot in attention.convention.slots)
    crossed = replace(attention, convention=replace(attention.convention, slots=slots))
    alone = _over_itself(attention, request.seed)
    if alone is None:
        return [crossed]
    return [replace(alone, mode="self"), replace(crossed, mode="cross")]


def _with_switches(attention: UserAttention, request: TargetRequest) -> UserAttention:
    """The attention with its causal switch on, if requested, and with switches that return the pattern, so that it is computed,
    if the output stays the same."""
    if attention.convention.example is not None:
        return attention
    for parameter in _free(attention, "causal") if request.causal else ():
        extras = _with_values(attention.convention, {parameter.name: True})
        switched = _if_it_works(attention, request.seed, extras=extras, causal_by=parameter.name)
        if switched is not None:
            attention = switched
            break
    values = {p.name: p.role == "pattern" for p in _free(attention, "pattern", "mean")}
    extras = _with_values(attention.convention, values)
    with_pattern = _if_it_works(attention, request.seed, extras=extras) if values else None
    inputs = _inputs(attention, request.seed)
    if with_pattern and _close(_output(attention, inputs, request.seed), _output(with_pattern, inputs, request.seed)):
        return with_pattern
    return attention


def _with_values(convention: CallConvention, values: dict[str, bool]) -> tuple[ArgumentRecipe, ...]:
    """The extra arguments with other values for some."""
    kept = [recipe for recipe in convention.extras if recipe.parameter not in values]
    return (*kept, *(ArgumentRecipe(name, "given", value) for name, value in values.items()))


def _free(attention: UserAttention, *roles: CallRole) -> list[CallParameter]:
    """The parameters with these roles that have no value from the user."""
    of_roles = signature_of(attention.built.call).of_role(*roles)
    return [parameter for parameter in of_roles if parameter.name not in attention.convention.fixed]


# ---------------------------------------------------------------------------------------------------------------- masks


_OF_MASKS: tuple[AxisNames, ...] = (PATTERN_AXES, ("batch", "query", "key"), ("query", "key"))
_OF_PADDING: tuple[AxisNames, ...] = (("batch", "key"), PATTERN_AXES, ("batch", "query", "key"))
_KINDS: tuple[MaskKind, ...] = ("bool", "01", "whole", "additive")
_HIDDEN, _SEEN = 1, 0


def _with_masks(attention: UserAttention, request: TargetRequest) -> tuple[UserAttention, set[str]]:
    """The attention with the mask forms that its call accepts, the likeliest first, and the masks that change its output."""
    if attention.convention.example is not None:
        return attention, {form.parameter for form in attention.mask_forms}
    acting: set[str] = set()
    masks: list[MaskForm] = []
    paddings: list[MaskForm] = []
    is_flat = attention.is_function and "head" not in attention.convention.axes
    for parameter in sorted(_free(attention, *MASKS), key=lambda parameter: parameter.role == "bias"):
        kinds: tuple[MaskKind, ...] = ("additive",) if parameter.role == "bias" else _KINDS
        found: list[MaskForm] = []
        if parameter.role in ("mask", "bias"):
            choices = product(_OF_MASKS[is_flat:], kinds)
            found = _accepted(attention, parameter, choices, acting, request.seed, padding=False)
            masks += found
        if parameter.role == "lengths":
            found = _accepted(attention, parameter, [(("batch",), "lengths")], acting, request.seed, padding=True)
            paddings += found
        if not found and parameter.role != "bias":
            choices = product(_OF_PADDING, kinds)
            paddings += _accepted(attention, parameter, choices, acting, request.seed, padding=True)
    first = {form.parameter: form for form in reversed([*masks, *paddings])}
    first |= {form.parameter: form for form in reversed(masks)}
    idle = tuple((name, form and first.get(name, form)) for name, form in attention.convention.idle)
    convention = replace(attention.convention, idle=idle)
    return replace(attention, convention=convention, mask_forms=tuple(masks), padding_forms=tuple(paddings)), acting


def _accepted(
    attention: UserAttention,
    parameter: CallParameter,
    choices: Iterable[tuple[AxisNames, MaskKind]],
    acting: set[str],
    seed: int,
    *,
    padding: bool,
) -> list[MaskForm]:
    """The forms of a mask with which the call works: those that hide a key first, then in order."""
    hides: dict[MaskForm, bool] = {}
    name = parameter.name.lower()
    is_hiding = ("pad" in name and "non" not in name and parameter.role == "padding") or "ignore" in name
    for axes, kind in choices:
        meanings = ("keep",) if kind in ("additive", "lengths") else ("hide", "keep") if is_hiding else ("keep", "hide")
        for meaning in meanings:
            form = MaskForm(parameter.name, axes, kind, meaning)  # type: ignore[arg-type]
            inputs = _with_hidden_key(attention, form, seed, padding=padding)
            forms = {"padding": form} if padding else {"mask": form}
            out = _output(attention, inputs, seed, **forms)
            if out is None:
                break
            hides[form] = _hides(attention, inputs, out)
            if parameter.name not in acting:
                unmasked = _output(attention, inputs._replace(allowed=None, real=None), seed)
                acting |= set() if _close(out, unmasked) else {parameter.name}
    kinds = {form.kind for form, is_hidden in hides.items() if is_hidden}
    axes_order = list(dict.fromkeys(form.axes for form in hides))
    return sorted(
        hides,
        key=lambda form: (
            (form.kind not in kinds, axes_order.index(form.axes), _KINDS.index(form.kind), not hides[form])
            if form.kind != "lengths"
            else (False, 0, 0, False)
        ),
    )


def _with_hidden_key(attention: UserAttention, form: MaskForm, seed: int, *, padding: bool) -> Inputs:
    """Equal sequences with a mask that hides one key, or the last ones, which differs in the second sequence; in the third
    another key differs."""
    inputs = map_rows(_inputs(attention, seed), lambda rows: rows[:1].expand_as(rows).clone())
    keys = inputs.queries if inputs.keys is None else inputs.keys
    k_len = keys.shape[-2]
    hidden = k_len - 2 if form.kind == "lengths" else _HIDDEN
    for rows in (keys, inputs.values):
        for sequence, key in ((1, hidden), (2, _SEEN)) if rows is not None and len(rows) > 2 else ():
            rows[sequence, ..., key, :] = _changed(rows[sequence, ..., key, :])  # type: ignore[index]
    real = torch.ones(len(keys), k_len, dtype=torch.bool)
    real[:, hidden : k_len if form.kind == "lengths" else hidden + 1] = False
    if padding:
        return inputs._replace(real=real)
    return inputs._replace(allowed=real[:1, None, None, :].expand(1, 1, inputs.queries.shape[-2], k_len))


def _hides(attention: UserAttention, inputs: Inputs, out: Tensor) -> bool:
    """Whether the output shows the key that differs in the third sequence, and not that in the second, which is hidden."""
    changed = () if attention.n_rows > 1 else (_HIDDEN, _SEEN, out.shape[-2] - 2)
    rows = out[..., [n for n in range(out.shape[-2]) if n not in changed], :]
    if len(rows) < 3 or not bool(torch.isfinite(rows).all()):
        return False
    return _close(rows[0], rows[1]) and not _close(rows[0], rows[2])


_OF_CONTEXT = re.compile(r"context|ctx|enc|mem|cross|source|src|xa|cond|kv", re.I)


def _with_own_masks(attention: UserAttention, acting: set[str], acting_anywhere: set[str]) -> UserAttention:
    """The attention in one mode with the masks that act in it, and with those that act in none and belong to it by name."""

    def is_own(form: MaskForm) -> bool:
        if form.parameter in acting_anywhere:
            return form.parameter in acting
        return (_OF_CONTEXT.search(form.parameter) is not None) == (attention.mode == "cross")

    masks, paddings = (tuple(filter(is_own, forms)) for forms in (attention.mask_forms, attention.padding_forms))
    return replace(attention, mask_forms=masks, padding_forms=paddings)


# ------------------------------------------------------------------------------------------------------------- finished


_WITHOUT_EFFECT = ("rest", "training", "pattern", "mean", "batch", "q_len", "k_len", "heads", "d_head", "d_model")
_RESULT_SWITCH = re.compile(
    r"(return|output|use_return|need|get|ret)_.*|(use|with)_(kv_?)?cache|return|verbose|debug|is_?debug|logger"
)
"""Switches that change the returned or printed results, not the computation."""
_EMPTY_WITHOUT_PAST = ("offset", "cache", "other mask")
"""Arguments that are 0 or None in a call without a past."""


def _finished(attention: UserAttention, request: TargetRequest) -> UserAttention:
    """The attention in float64 if it can compute in it, with the description of its call."""
    convention = attention.convention
    forms = (*attention.mask_forms, *attention.padding_forms)
    used = {slot.name for slot in convention.slots} | {form.parameter for form in forms} | set(convention.fixed)
    recipes = {recipe.parameter: recipe for recipe in convention.extras}
    parameters = [
        parameter for parameter in signature_of(attention.built.call).parameters
        if parameter.role not in _WITHOUT_EFFECT and not _RESULT_SWITCH.fullmatch(parameter.name.lower())
    ]  # fmt: skip
    unread = never_read(attention.built.call)
    untried = [p.name for p in parameters if p.name not in used and _is_default(p, recipes.get(p.name))]
    if convention.example is not None:
        untried = []
    exact = _in_float64(replace(attention, is_forgetful=False), request.seed)
    return replace(
        exact,
        described=_described(exact),
        untried=tuple(untried),
        unread=tuple(p.name for p in parameters if p.name in unread),
    )


def _is_default(parameter: CallParameter, recipe: ArgumentRecipe | None) -> bool:
    """Whether a call leaves an argument at its default, or gives it a value that means none."""
    return recipe is None or parameter.role in _EMPTY_WITHOUT_PAST or recipe.value is parameter.default is not None


def _in_float64(attention: UserAttention, seed: int) -> UserAttention:
    """A float64 copy, if it computes in float64 throughout; else itself."""
    try:
        call = float64_copy(attention.built.call)
    except Exception:  # user objects may raise anything
        return attention
    exact = attention.of(call, torch.float64)
    inputs = _inputs(exact, seed)
    try:
        with seeded(seed, exact.device):
            out = tensor_at(exact.result(inputs), exact.convention.output.path)
    except (Exception, SystemExit):  # something in it has a dtype of its own
        return attention
    is_float64 = out is not None and out.dtype == torch.float64
    return exact if is_float64 and not _rounds_inside(exact, inputs, seed) else attention


def _rounds_inside(attention: UserAttention, inputs: Inputs, seed: int) -> bool:
    """Whether the output is rounded somewhere inside, such as to float32. If not, a perturbation twice as large changes it
    twice as much."""
    nudged = [map_rows(inputs, functools.partial(torch.mul, 1 + n * _NUDGE)) for n in range(3)]
    base, once, twice = (_output(attention, each, seed) for each in nudged)
    if base is None or once is None or twice is None:
        return False
    deviation = (twice - 2 * once + base).nan_to_num().abs().max()
    return bool(deviation > _ROUGH * base.nan_to_num().abs().max())


_AXIS_WORDS = {"row": "seq", "width": "d", "column": "seq"}


def _described(attention: UserAttention) -> str:
    """The call as one line of Python, with a comment on layouts."""
    convention, built = attention.convention, attention.built
    inputs = _inputs(attention, 0)
    setting = CallSetting(sides_of(inputs, convention), attention.dtype, attention.device, False, attention.tensors)
    arguments = [slot.name if not slot.name.startswith("args[") else part_of(slot) for slot in convention.slots]
    arguments += [f"{name}={value!r}" for name, value in convention.fixed.items()]
    for recipe in convention.extras:
        is_stated = recipe.kind in ("given", "heads", "d_head", "d_model", "scale", "dropout", "causal")
        arguments.append(f"{recipe.parameter}={recipe.value!r}" if is_stated else f"{recipe.parameter}=…")
    masked = [form.parameter for form in (*attention.mask_forms, *attention.padding_forms)]
    arguments += [f"{name}=…" for name in dict.fromkeys([*(name for name, _ in convention.idle), *masked])]
    notes = [rotation_text(recipe, setting) for recipe in convention.extras if recipe.kind == "rope"]
    if convention.axes != convention.canonical and "column" in convention.axes:
        notes.insert(0, "rows [batch, d, height, width]")
    elif convention.axes != convention.canonical:
        words = ", ".join(_AXIS_WORDS.get(axis, axis) for axis in convention.axes)
        notes.insert(0, f"rows [{words}]")
    if not convention.is_resizable:
        notes.append(f"only at length {attention.sizes.q_len}")
    if convention.output.axes != convention.axes:
        notes.append(f"result [{', '.join(_AXIS_WORDS.get(axis, axis) for axis in convention.output.axes)}]")
    name = "forward" if built.module is not None else getattr(built.call, "__name__", "__call__")
    comment = f"  # {'; '.join(notes)}" if notes else ""
    return f"{name}({', '.join(arguments)}){path_text(convention.output.path)}{comment}"


# --------------------------------------------------------------------------------------------------------------- errors


def _refuse_unknown(built: Built, fixed: dict[str, Any]) -> None:
    """Raises MhaError for required parameters of unknown role, and for a given parameter that does not exist."""
    signature = signature_of(built.call)
    names = [parameter.name for parameter in signature.parameters]
    for name in fixed:
        if name not in names and not signature.takes_any and signature.known:
            raise MhaError(
                f"--call-arg {name}: {built.name} has no such parameter",
                hint=f"it has {', '.join(names) or 'none'}", code="cannot-examine", path=built.file,
            )  # fmt: skip
    unknown = [p.name for p in signature.of_role("unknown") if p.required and p.name not in fixed]
    if unknown:
        given = " ".join(f"--call-arg {name}=1" for name in unknown)
        raise MhaError(
            f"{built.name} needs a value for {' and '.join(unknown)}, which mha cannot guess from the name",
            hint=f"give {given}, or a whole call with --example", code="cannot-examine", path=built.file,
        )  # fmt: skip


def _call_error(
    built: Built, device: torch.device, tried: list[tuple[UserAttention, BaseException]], *, given: bool
) -> MhaError:
    """The error if no call works: the exception of the first one, its line, and an example to give."""
    attention, fault = tried[0]
    line = source_line_of(fault, built.file)
    where = f" (line {line.line}: {shortened(line.source, _LONGEST_SOURCE)})" if line else ""
    message = f"{shortened(exception_text(fault), _LONGEST_ERROR)}{where}"
    if any(lacks_cuda(exception_text(each)) for _, each in tried):
        text = f"{built.name} needs a CUDA device, which this machine does not have: {message}"
        return MhaError(text, code="no-device", path=built.file)
    hint = None if given else f"give a call that works: --example {shlex.quote(working_example(attention))}"
    if device.type == "cpu" and is_on_cuda(exception_text(fault)):
        hint = "--device cuda"
    if built.guesses and not given:
        guessed = " ".join(f"--arg {guess.name}={guess.value!r:.20}" for guess in built.guesses[:4])
        hint = f"{hint}; mha guessed {guessed}"
    what = "--example" if given else f"any of {len(tried)} usual ways" if len(tried) > 1 else "the usual way"
    return MhaError(
        f"{built.name} could not be called by {what}: {message}", hint=hint, code="cannot-examine", path=built.file
    )
