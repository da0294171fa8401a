"""Probes at the limits: small formats, one token, one sequence, long ones; and what shapes, parameters and patterns say."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from mhacli.adapters.usercode.arguments import stated
from mhacli.adapters.usercode.asker import cast
from mhacli.adapters.usercode.user_attention import Inputs, UserAttention
from mhacli.compute.check.probes.context import Context, Told, bad_numbers, first_line, relative, told
from mhacli.compute.check.probes.masks import ask_under, best_hiding, hidden_cells, under

# ------------------------------------------------------------------------------------------------------ the returned pattern


def row_sums(context: Context) -> Told:
    """The rows of a returned pattern: shares, which sum to one over the keys."""
    name, pattern = "row sums", context.ask(context.square()).pattern
    if pattern is None:
        return told(name, "no pattern is returned")
    shares = pattern.to("cpu", torch.float64)
    sums = shares.sum(-1)
    error = float((sums - 1).abs().where(sums != 0, 0.0).nan_to_num(nan=0.0).max())
    lowest, highest = float(shares.nan_to_num().min()), float(shares.nan_to_num().max())
    tolerance = max(1e-6, 100 * context.tolerance)
    if lowest < -tolerance or highest > 1 + tolerance:
        message = f"the returned numbers go from {lowest:.2g} to {highest:.2g}: they are no shares"
        return told(name, message, error, None, row_sum_error=error)
    is_one = error <= tolerance
    message = "the rows of the returned pattern sum to one"
    if not is_one:
        over_queries = float((shares.sum(-2) - 1).abs().max()) <= tolerance
        message = f"the rows of the returned pattern miss one by up to {error:.2g}"
        message += "; its columns sum to one: the softmax runs over the queries" if over_queries else ""
    return told(name, message, error, is_one, row_sum_error=error)


def forbidden_cells(context: Context) -> Told:
    """The shares of a returned pattern for keys that are hidden: exactly 0."""
    name, facts = "forbidden cells", context.facts
    inputs = context.square()
    length = inputs.queries.shape[-2]
    by = best_hiding(context)
    if facts.visible == "causal":
        pattern = context.ask(inputs).pattern
        hidden = torch.ones(1, length, length, dtype=torch.bool).triu(1)
    elif by is not None:
        hidden = hidden_cells(context, by, length)
        pattern = ask_under(context, under(context, inputs, by, ~hidden), by).pattern
    else:
        return told(name, "nothing is hidden by it")
    if pattern is None:
        return told(name, "no pattern is returned")
    if pattern.shape[-2:] != hidden.shape[-2:]:
        return told(name, f"the returned pattern has shape {list(pattern.shape)}")
    cells = pattern.cpu()[hidden[:, None].expand(pattern.shape)]
    n_bad = int((cells != 0).sum())
    message = f"{n_bad} of {cells.numel()} shares of hidden keys are not exactly 0"
    return told(name, message, n_bad, True if not n_bad else None)  # what moves an output, other probes tell


# ------------------------------------------------------------------------------------------------------------------ formats


def half(context: Context, dtype: torch.dtype, tolerance: float) -> Told:
    """In a format of 16 bits, against the same rounded weights and rows in float64."""
    name = str(dtype).removeprefix("torch.")
    twin, exact = _rounded(context, dtype)
    if twin is None or exact is None:
        return told(name, "it cannot be copied into another format")
    rounded = _cast(context.square(), dtype)
    try:
        found = context.ask(rounded, of=twin).out
    except Exception as fault:
        return told(name, f"raises {first_line(fault)}")
    n_bad = bad_numbers(found)
    if n_bad:
        return _not_finite(context, name, found)
    wide = context.ask(_cast(rounded, torch.float64), of=exact).out
    error = relative(wide, found)
    message = f"differs from float64 by {error:.1g} of the output's size" if error else "the same as float64"
    if error > tolerance:
        message += f", more than the {tolerance:g} that rounding explains"
    return told(name, message, error, True if error <= tolerance else None)


def _not_finite(context: Context, name: str, found: Tensor) -> Told:
    """Some numbers are none; which is not news where they are none with ordinary rows already."""
    n_bad = bad_numbers(found)
    message = f"{n_bad} of {found.numel()} numbers are NaN or infinite"
    is_old = bool(context.facts.nonfinite_queries)
    return told(name, message + (", as with ordinary rows" if is_old else ""), n_bad, None if is_old else False)


def half_float(context: Context) -> Told:
    """float16."""
    return half(context, torch.float16, 2e-2)


def half_brain(context: Context) -> Told:
    """bfloat16."""
    return half(context, torch.bfloat16, 1e-1)


def _rounded(context: Context, dtype: torch.dtype) -> tuple[UserAttention | None, UserAttention | None]:
    """A copy in `dtype`, and one with the same rounded weights in float64."""
    built, small = context.subject.built, context.fresh()
    if built.module is None:
        return context.subject.of(built.call, dtype), context.subject.of(built.call, torch.float64)
    if small is None:
        return None, None
    small = cast(small, dtype)
    wide = cast(copy.deepcopy(small), torch.float64)
    return context.subject.of(small, dtype), context.subject.of(wide, torch.float64)


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return Inputs(*(None if rows is None else rows.to(dtype) for rows in inputs[:3]))  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------------------- sizes


def one_token(context: Context) -> Told:
    """A text of one token, which can see itself alone."""
    try:
        found = context.ask(context.square(1)).out
    except Exception as fault:
        return told("one token", f"raises {first_line(fault)}")
    return _not_finite(context, "one token", found) if bad_numbers(found) else told("one token", "works", 0, True)


def one_key(context: Context) -> Told:
    """With a single key its share is one, whatever the query: another query must not matter."""
    name = "one key"
    if not context.subject.takes_context:
        return told(name, "it attends to its own rows alone")
    inputs = context.oblong(k_len=1)
    try:
        before = context.ask(inputs).out
        change = relative(before, context.ask(inputs._replace(queries=context.oblong(k_len=1).queries)).out)
    except Exception as fault:
        return told(name, f"raises {first_line(fault)}")
    if change <= context.tolerance:
        return told(name, "with one key the query does not matter", change, True)
    message = f"with one key, whose share must be one, another query moves the output by {change:.2g} of its size"
    return told(name, message, change)


def one_sequence(context: Context) -> Told:
    """The first sequence alone: it must answer what it answers among others."""
    name, inputs = "batch of one", context.square()
    if inputs.queries.shape[0] < 2:
        return told(name, "it is asked one sequence at a time")
    alone = Inputs(*(None if rows is None else rows[:1] for rows in inputs[:3]))  # type: ignore[arg-type]
    try:
        found = context.ask(alone).out
    except Exception as fault:
        return told(name, f"raises {first_line(fault)}")
    change = relative(context.ask(inputs).out[:1], found)
    is_same = change <= max(1e-6, 100 * context.tolerance)
    message = "a sequence alone answers what it answers among others"
    if not is_same:
        message = f"a sequence alone answers something else than among others, by {change:.2g} of its size"
    return told(name, message, change, True if is_same else None if context.facts.is_random else False)


_LONG = 300


def long_text(context: Context) -> Told:
    """More tokens than most examples have."""
    name = f"{_LONG} tokens"
    try:
        found = context.ask(context.square(_LONG, batch=1)).out
    except Exception as fault:
        return told(name, f"raises {first_line(fault)}")
    return _not_finite(context, name, found) if bad_numbers(found) else told(name, "works", 0, True)


# --------------------------------------------------------------------------------------------------------------- parameters


def parameter_count(context: Context) -> Told:
    """How many parameters there are, against those of four projections of the named sizes."""
    name, module = "parameters", context.subject.built.module
    if module is None:
        return told(name, "a function has none")
    n_parameters = sum(parameter.numel() for parameter in module.parameters())
    formulas = list(_formulas(context))
    if not formulas:
        return told(name, f"{n_parameters:,}; its arguments name no width and heads to check them by", n_parameters)
    for said, n_expected in formulas:
        if n_parameters == n_expected:
            return told(name, f"{n_parameters:,}, as four projections {said} have", n_parameters, True)
    most = formulas[0][1]
    return told(name, f"{n_parameters:,}; four projections with biases have {most:,}", n_parameters)


def _formulas(context: Context) -> Iterator[tuple[str, int]]:
    """What four projections have, with biases and without, and with biases here and there."""
    arguments, context_width = context.subject.built.arguments, context.subject.sizes.d_context
    width, n_heads = stated(arguments, "d_model"), stated(arguments, "n_heads")
    if not _is_count(width) or not _is_count(n_heads):
        return
    d_head, n_kv_heads = stated(arguments, "d_head"), stated(arguments, "n_kv_heads")
    d_head = d_head if _is_count(d_head) else width // n_heads
    n_kv_heads = n_kv_heads if _is_count(n_kv_heads) else n_heads
    d_v = stated(arguments, "d_v")
    d_v = d_v if _is_count(d_v) else d_head
    q, k, v, o = n_heads * d_head, n_kv_heads * d_head, n_kv_heads * d_v, n_heads * d_v
    matrices = width * q + context_width * (k + v) + o * width
    yield "with biases", matrices + q + k + v + width
    yield "without biases", matrices
    yield "with a bias on the last alone", matrices + width
    yield "with biases on the first three", matrices + q + k + v
    yield "but the last, without biases,", matrices - o * width
    yield "but the last, with biases,", matrices - o * width + q + k + v


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def unused_parameters(context: Context) -> Told:
    """The matrices that no output depends on. Biases are left out: that of the keys moves nothing where all is right."""
    name, twin = "unused parameters", context.fresh()
    matrices = (
        {} if twin is None else {n: p for n, p in twin.named_parameters() if p.ndim > 1 and p.is_floating_point()}
    )
    if twin is None or not matrices or len(matrices) > _MOST_MATRICES:
        return told(name, f"it has {len(matrices) or 'no'} matrices")
    if context.facts.nonfinite_queries:
        return told(name, "outputs that are NaN cannot be compared")
    subject = context.subject.of(twin, context.subject.dtype)
    questions = [context.square()] + ([context.oblong()] if context.subject.takes_context else [])
    unused = set(matrices)
    for inputs in questions:
        before = context.ask(inputs, of=subject).out
        for one in sorted(unused):
            if context.moves(before, _answer_without(context, subject, matrices[one], inputs)):
                unused.remove(one)
    named = tuple(sorted(unused))
    message = (
        f"no output depends on {', '.join(named[:4])}" if named else f"outputs depend on all {len(matrices)} matrices"
    )
    message += f" and {len(named) - 4} more" if len(named) > 4 else ""
    return told(name, message, len(named), not named, unused=named)


_MOST_MATRICES = 40


def _answer_without(context: Context, subject: UserAttention, matrix: Tensor, inputs: Inputs) -> Tensor:
    """The output with the opposite of a matrix in its place, which is put back afterwards."""
    kept = matrix.detach().clone()
    matrix.data.mul_(-1.5).add_(0.1)
    try:
        return context.ask(inputs, of=subject).out
    finally:
        matrix.data.copy_(kept)
