"""Finds out how to call a user's attention: tries the likely calls in order, then its modes and its
masks.
"""

import importlib.metadata
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, islice, product
from operator import attrgetter
from textwrap import shorten

import torch
from torch import nn

from mhacli.errors import MhaError

from .accepted import (
    accepted_forms,
    random_inputs,
    with_independent_rows,
    with_output,
    with_own_heads,
)
from .axes import OF_IDS, OF_TEXTS, ROW_AXES, CallSizes, MadeForSizes, leaves
from .build import Built, as_typed, cast_copy, member_of, parameters_of, parse_value, seeded
from .door import NO_ANSWER, Attempt, UserRaised, first_that_works
from .example_call import (
    arguments_of_example,
    attention_of_example,
    example_of,
    working_example,
)
from .faults import user_code_error
from .graph import KERNEL, SOFTMAXES, Watcher
from .limits import OutOfTime
from .masks import MaskForm, forms_of, made_mask
from .roles import MASKS, CallParameter, called_function, signature_of
from .target import TargetRequest
from .user_attention import UserAttention
from .usual_calls import usual_calls

_MOST_CALLS = 60
_MOST_COPIED = 4_000_000
"""The most numbers of a module that is copied for each call that is tried, so that no state passes
to the next."""
_LENGTHS_OF_KERNELS = (64, 128)
_EXAMPLE_LENGTHS = (7, 8, 12, 16, 64)
"""The lengths at which an example is tried, until a call works."""


def find_modes(built: Built, request: TargetRequest) -> tuple[UserAttention, ...]:
    """The target with the call and the masks of each mode: self-attention, cross-attention, or
    both; with one mode if only whole texts have an output in the call of an example. In float64 if
    it can compute in it. Raises MhaError if no call works.
    """
    first = with_own_heads(with_independent_rows(_first_call(built, request)))
    modes = [_with_masks(mode) for mode in _modes_of(first)]
    hiding = {form.parameter for mode in modes for form in mode.forms if form.hides}
    found = []
    for mode in modes:
        # these hide keys in the other mode alone
        elsewhere = hiding - {form.parameter for form in mode.forms if form.hides}
        forms = tuple(form for form in mode.forms if form.parameter not in elsewhere)
        mode = replace(mode, forms=forms, is_copied=False)
        # kernels compute in 32 bits inside, and the interpreter is slow
        found.append(mode if built.is_interpreted else _in_float64(mode))
    return tuple(found)


def _in_float64(attention: UserAttention) -> UserAttention:
    """The attention in float64, or as it is if it cannot be copied, or if something in it has a
    dtype of its own.
    """

    def cast(dtype: torch.dtype) -> UserAttention | None:
        wide = replace(attention.with_call(cast_copy(attention.built.call, dtype)), dtype=dtype)
        out = replace(wide, is_copied=True)(random_inputs(wide), seed=0)
        return wide if out.dtype == dtype else None

    return first_that_works([torch.float64], cast, attention.built.tried.note) or attention


# ----------------------------------------------------------------------------------- the first call


def plain_call(built: Built, request: TargetRequest) -> UserAttention:
    """The target with what is known of its call before one is tried."""
    parameters = parameters_of(called_function(built.call))
    given = {
        name: member
        for name, each in parameters.items()
        if each.default is each.empty and (member := member_of(each)) is not None
    }
    for name, text in request.call_arguments:
        given[name] = member_of(parameters.get(name), parse_value(text, built.thing))
    tensors = [] if built.module is None else [*built.module.parameters(), *built.module.buffers()]
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())
    is_known = not any(map(nn.parameter.is_lazy, tensors))
    return UserAttention(
        built,
        CallSizes(1, 1, 1),
        dtype,
        torch.device(request.device),
        others=given,
        example=None if request.example is None else example_of(request.example, built),
        is_copied=is_known and sum(t.numel() for t in tensors) <= _MOST_COPIED,
    )


def _first_call(built: Built, request: TargetRequest) -> UserAttention:
    """The first call that gives an output."""
    template = plain_call(built, request)
    tried = list[Attempt]()
    found = _call_that_works(template, request, tried)
    if found is None:
        raise _kernel_error(built, tried[0]) or _call_error(template, request, tried)
    for each in tried:
        built.tried.note(each)
    return found


def _call_that_works(
    template: UserAttention, request: TargetRequest, tried: list[Attempt]
) -> UserAttention | None:
    """The first call that gives an output; None without one."""
    candidates: Iterable[UserAttention] = usual_calls(template, causal=request.causal)
    if template.example is not None:
        lengths = _EXAMPLE_LENGTHS if template.is_resizable else (0,)
        ways = product(lengths, (True, False))
        candidates = (
            attention_of_example(template, length, may_be_context=may_be_context)
            for length, may_be_context in ways
        )
    found = first_that_works(islice(candidates, _MOST_CALLS), with_output, tried.append)
    found = found or first_that_works(_of_kernels(tried), with_output, tried.append)
    if found is None:  # one answer for a text, or a few
        single = [each.candidate for each in tried if len(each.candidate.slots) == 1]
        pooled = [replace(each, output=("", OF_TEXTS)) for each in single]
        found = first_that_works(pooled, with_output)
    return found


def require_call(built: Built, request: TargetRequest) -> None:
    """Raises `UserRaised` or `MhaError` if no usual call works."""
    tried = list[Attempt]()
    if _call_that_works(plain_call(built, request), request, tried) is None:
        raise tried[0].failure


_WORDS = ("None", "1", "0.5", "torch.ones(1)", "torch.ones(8)", "torch.ones(64)")
"""What an argument of a call may need."""


def _values_that_work(built: Built, request: TargetRequest, names: Sequence[str]) -> str | None:
    """Values for arguments of a call with which one works, as they are typed."""

    def typed(values: Sequence[str]) -> str:
        given = tuple(zip(names, values, strict=True))
        require_call(built, replace(request, call_arguments=request.call_arguments + given))
        return as_typed("--call-arg", given)

    values = islice(product(_WORDS, repeat=len(names)), _MOST_CALLS)
    return first_that_works(values, typed)


def _hint_of_values(built: Built, request: TargetRequest, names: Sequence[str]) -> str:
    """What to give for arguments of a call: values with which one works, or a whole call."""
    given = _values_that_work(built, request, names)
    whole = "a whole call with --example"
    return f"give {whole if given is None else f'{given} or {whole}'}"


def _of_kernels(tried: Sequence[Attempt]) -> Iterator[UserAttention]:
    """The calls of a function that failed, in lengths and widths that kernels take, and in 16 bits;
    not those with numbers, such as a scale, that were made for another width.
    """
    functions = [each.candidate for each in tried if each.candidate.is_function]
    plain = [each for each in functions if not any(type(n) is float for n in each.others.values())]
    for attention in plain[:2]:
        dtypes = attention.built.kernel_dtypes
        for dtype, length in product(dtypes, _LENGTHS_OF_KERNELS):
            sizes = attention.sizes._replace(
                batch=2, q_len=length, k_len=length, d_in=64, d_context=64
            )
            yield replace(attention, sizes=sizes, dtype=dtype)


def _modes_of(attention: UserAttention) -> list[UserAttention]:
    """The attention in each mode: self and cross if keys are optional, else one."""
    keys = [slot for slot in attention.slots if slot.part != "q"]
    is_fixed = attention.example is not None or attention.is_pooled
    if is_fixed or not keys or any(slot.required for slot in keys):
        return [attention]
    crossed = replace(
        attention, slots=tuple(slot._replace(required=True) for slot in attention.slots)
    )
    sizes = attention.sizes._replace(k_len=attention.sizes.q_len, d_context=attention.sizes.d_in)
    queries = tuple(slot for slot in attention.slots if slot not in keys)
    alone = first_that_works(
        [replace(attention, sizes=sizes, slots=queries)], with_output, attention.built.tried.note
    )
    if alone is None:  # it needs them
        return [crossed]
    return [replace(alone, mode="self"), replace(crossed, mode="cross")]


def with_own_queries(attention: UserAttention) -> UserAttention | None:
    """A module of vectors that answers for whole texts, and attends once, as attention that makes
    its queries itself, as many as there are rows in an answer; None for any other.
    """
    path, _ = attention.output
    slot, *others = attention.slots
    if others or attention.ids is not None:
        return None
    watcher = Watcher(None)
    alone = replace(attention, is_copied=True)  # so that this call leaves nothing in it
    with seeded(0, attention.device):
        out = dict(leaves(alone.result(random_inputs(alone), within=watcher)))[path]
    names = [operation.name for operation in watcher.operations]
    if out.ndim > 3 or sum(map(names.count, (KERNEL, *SOFTMAXES))) != 1:
        return None
    slots = (CallParameter("", "query", False), slot._replace(role="key", required=True))
    # one row for each text, or several
    n, axes = (1, ("batch", "width")) if out.ndim == 2 else (out.shape[1], ROW_AXES)
    sizes = attention.sizes._replace(q_len=n)
    own = replace(alone, slots=slots, sizes=sizes, output=(path, axes), mode="cross")
    own = own if n == 1 else _with_masks(own)  # a mask of one query is one of padding
    return replace(own, is_copied=attention.is_copied)


def _with_masks(attention: UserAttention) -> UserAttention:
    """The attention with the mask forms that its call accepts, those that hide a key first. A mask
    that the user gives to each call is kept; of an example, those that it gives are replaced.
    """
    given = attention.others
    if attention.example is not None:
        given = arguments_of_example(attention, attention.sizes.q_len)
    found: list[MaskForm] = []
    for parameter in attention.parameters(*MASKS):
        value = given.get(parameter.name)
        is_given = value is not None and not isinstance(value, MadeForSizes)
        if is_given == (attention.example is not None):
            forms = forms_of(parameter)
            if isinstance(value, torch.Tensor) and _holds_marks(value):
                forms = [form for form in forms if form.kind != "additive"]
            kinds = groupby(forms, attrgetter("is_padding"))
            accepted = ([*accepted_forms(attention, each)] for _, each in kinds)
            found += next(filter(None, accepted), [])
    found.sort(key=lambda form: not form.hides)
    others = dict(attention.others)
    for form in reversed(found):  # the likeliest form of a mask counts
        if isinstance(others.get(form.parameter), MadeForSizes):
            others[form.parameter] = made_mask(form)
    return replace(attention, others=others, forms=tuple(found))


def _holds_marks(mask: torch.Tensor) -> bool:
    """Whether a mask marks tokens, and is not added to scores."""
    is_of_ones = bool(mask.any()) and bool(((mask == 0) | (mask == 1)).all())
    return is_of_ones or not mask.is_floating_point()


# ----------------------------------------------------------------------------------------- refusals


def _kernel_error(built: Built, attempt: Attempt) -> MhaError | None:
    """The error if triton cannot run a kernel; None if something else is wrong."""
    problem = str(attempt.failure)
    if "lock pointers" in problem:
        lacking = f"block pointers, which triton {importlib.metadata.version('triton')} lacks"
        return built.refusal(f"{built.name} uses {lacking}", "an older triton may have them")
    if re.search("active drivers|cpu tensor", problem):
        hint = (
            "add --device cuda; where there is no GPU, set TRITON_INTERPRET=1 before triton loads"
        )
        return built.refusal(f"{built.name} needs a GPU, or Triton's interpreter: {problem}", hint)
    return None


def _n_operations(tried: Attempt) -> int:
    """How many operations a call runs before it fails."""
    watcher = Watcher(None)
    with suppress(OutOfTime, *NO_ANSWER):
        tried.candidate.result(random_inputs(tried.candidate), within=watcher)
    return len(watcher.operations)


def _line_of(failure: Exception, built: Built) -> int | None:
    """The line of the user's file that a failure comes from."""
    line = failure.line(built.file) if isinstance(failure, UserRaised) else None
    return None if line is None else line.line


def _with_line(failure: Exception, built: Built) -> str:
    """A failure in words, with the line of the user's file that it comes from."""
    message = shorten(str(failure), 200, placeholder=" …")
    line = failure.line(built.file) if isinstance(failure, UserRaised) else None
    if line is None:
        return message
    return f"{message} (line {line.line}: {shorten(line.source, 80, placeholder=' …')})"


def _mending(failure: Exception, built: Built) -> str:
    """The line to mend for an error that no call mends: a name that is not defined, or an attribute
    that a module lacks; empty for any other.
    """
    fault = failure.fault if isinstance(failure, UserRaised) else None
    of_module = isinstance(fault, AttributeError) and isinstance(fault.obj, nn.Module)
    line = _line_of(failure, built)
    # a name of a function, which a branch of it may set, depends on the call
    if line is None or not (of_module or type(fault) is NameError):
        return ""
    return f"mend line {line}, whatever the call is"


def _call_error(
    template: UserAttention, request: TargetRequest, tried: Sequence[Attempt]
) -> MhaError:
    """The error if no call works: the exception of the one that comes furthest, its line, and what
    the user can give. The first of these that holds says it: an error that no call mends, such as
    lack of memory; an example of the user's that fails; arguments of unknown names; or else the
    call itself, with what was given and guessed for it.
    """
    built = template.built
    attention, failure = max(tried, key=_n_operations)
    if built.n_ids and "'indices'" in str(failure):
        # it takes token ids, and how it fails for them tells more
        attention = replace(attention, axes=OF_IDS, ids=torch.arange(built.n_ids))
        of_ids = [Attempt(attention, failure)]
        first_that_works([attention], with_output, of_ids.append)
        failure = of_ids[-1].failure
    if isinstance(failure, UserRaised):
        error = user_code_error(
            f"{built.name} could not be called", failure.fault, built.file, code=""
        )
        if error.code:
            return error  # no code of the call would mend it
    message = _with_line(failure, built)
    if request.example is not None:
        return built.refusal(f"{built.name} could not be called by --example: {message}")
    calls = f"any of {len(tried)} usual calls" if len(tried) > 1 else "the usual call"
    refused = f"{built.name} could not be called by {calls}: {message}"
    if hint := _mending(failure, built):
        return built.refusal(refused, hint)
    works = None
    with suppress(OutOfTime):  # the hint shows no call then
        widths = [*dict.fromkeys(each.candidate.sizes.d_in for each in tried)]
        works = working_example(template, widths)
    hint = f"give a call that works with --example; {attention.example_text} was tried"
    if line := _line_of(failure, built):
        hint = f"if line {line} is right, {hint}"
    if works is not None:
        hint = f"give a call that works: --example {shlex.quote(works)}"
    parameters = signature_of(built.call, "unknown")
    unknown = [p.name for p in parameters if p.required and p.name not in attention.others]
    if unknown:
        needed = f"{built.name} needs a value for {' and '.join(unknown)}"
        needed += ", which mha cannot guess from the name"
        if not attention.is_named:  # the call read an unknown argument as a context
            needed += f"; as a context: {message}"
        if works is None:
            hint = _hint_of_values(built, request, unknown)
        return built.refusal(needed, hint)
    return built.refusal(refused, hint + _given_and_guessed(built, request))


def _given_and_guessed(built: Built, request: TargetRequest) -> str:
    """The arguments that were given and guessed, as the end of a hint."""
    text = ""
    if request.call_arguments:
        text += f"; given was --call-arg {', '.join(name for name, _ in request.call_arguments)}"
    if built.guesses:
        values = {name: built.arguments[name] for name in built.guesses}
        guessed = [f"--arg {n}={v!r:.20}" for n, v in values.items() if not callable(v)]
        text += f"; mha guessed {' '.join(guessed[:4])}"
    return text
