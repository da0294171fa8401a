"""What a call accepts: whether it gives an output, in which order of axes, and which masks."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from mhacli.attention.stages import Inputs

from .axes import (
    OF_IDS,
    OF_TEXTS,
    ROW_AXES,
    AxisNames,
    CallSizes,
    leaves,
    output_in,
    without,
)
from .build import seeded
from .door import Unreadable, first_that_works, those_that_work
from .masks import MARKS, MaskForm
from .names import are_marks_stated, source_of
from .roles import MASKS
from .user_attention import UserAttention
from .usual_calls import AXES_OF_HEADS

_BATCH = r"(?:b|n|bs\w*|batch\w*)"
_LENGTH = r"(?:t|l|s|n?_?seq\w*|\w*len\w*|time|steps|n?_?tokens?)"
_BATCH_FIRST = (
    rf"\b{_BATCH}, *{_LENGTH}\b|^ *\(?(?:b|bs\w*|batch\w*), *\w[\w, ]*\)? *=.*\.(?:shape|size)\b"
)
_BATCH_SECOND = rf"^ *\(?{_LENGTH}, *{_BATCH}\b[\w, ]*\)? *=.*\.(?:shape|size)\b"
"""Code that names a batch before a length, as in `B, T, C = x.shape`, and a length before a
batch."""
_INPUT_SCALE = 0.3
"""The scale of random inputs, small enough that a softmax without scaling sees more than one
key."""


def random_inputs(attention: UserAttention) -> Inputs:
    """Random inputs, the same in each call."""
    rows = attention.drawer(0).inputs(with_context=attention.n_rows > 1)
    return rows if attention.ids is not None else rows.map(lambda tensor: _INPUT_SCALE * tensor)


def with_output(attention: UserAttention) -> UserAttention:
    """The attention with the path of its output for each token, or else, if an example shows the
    call, of the first for each text. Raises `UserRaised`, and `Unreadable` without an output.
    """
    inputs = random_inputs(attention)
    with seeded(0, attention.device):
        result = attention.result(inputs)
    orders = [without(attention.axes, "part")]
    if attention.ids is not None:
        orders.insert(0, (*attention.axes, "width"))
    if attention.is_function and "head" in attention.axes:
        orders += AXES_OF_HEADS[:2]
    output = None
    if attention.end is None:  # else an answer for each text may stand beside states of its tokens
        output = output_in(result, orders, attention.sizes_of(inputs))
    floats = [(path, tensor) for path, tensor in leaves(result) if tensor.is_floating_point()]
    is_shown = attention.example is not None and attention.ids is None
    if output is None and (attention.is_pooled or is_shown):
        batch = len(inputs.queries)
        of_texts = [
            path
            for path, out in floats
            if out.ndim > 1
            and len(out) == batch
            and (is_shown or attention.sizes.q_len not in out.shape)
        ]
        output = (of_texts[0], OF_TEXTS) if of_texts else None
    if output is None:
        shapes = ", ".join(str(list(tensor.shape)) for _, tensor in floats[:4])
        missing = f"no output [{', '.join(attention.axes)}] for inputs {list(inputs.queries.shape)}"
        raise Unreadable(f"{missing}, but {shapes or type(result).__name__}")
    return replace(attention, output=output)


def with_independent_rows(attention: UserAttention) -> UserAttention:
    """The call, or the same with the length before the batch where a text is the same alone and
    among others only then, as in torch's own layers, and the code does not state the batch first
    alone.
    """
    built = attention.built
    code = source_of(built.thing if built.module is None else type(built.module))
    says_first = re.search(_BATCH_FIRST, code, re.I | re.M)
    says_second = re.search(_BATCH_SECOND, code, re.I | re.M)
    is_known = (says_first and not says_second) or attention.example is not None
    if is_known or attention.is_pooled or attention.axes not in (ROW_AXES, OF_IDS):
        return attention
    second = replace(attention, axes=("row", "batch", *attention.axes[2:]))

    def with_rows(candidate: UserAttention) -> UserAttention | None:
        if candidate.axes != attention.axes:  # its output is known along the first ones alone
            candidate = with_output(candidate)
        return candidate if _is_independent(candidate) else None

    return first_that_works((attention, second), with_rows, built.tried.note) or attention


def _is_independent(attention: UserAttention) -> bool:
    """Whether the second of several texts has the outputs that it has alone."""
    inputs = random_inputs(attention)
    in_batch = attention(inputs, seed=0)
    alone = attention(inputs.map(lambda rows: rows[1:2]), seed=0)
    atol = 1e-5 * float(in_batch.nan_to_num(posinf=0, neginf=0).abs().max())
    same = in_batch[1:2]
    return same.shape == alone.shape and torch.allclose(same, alone, atol=atol, equal_nan=True)


def with_own_heads(attention: UserAttention) -> UserAttention:
    """The call of a function, or the same with rows and heads exchanged, or with as many keys as
    queries, where a head reads its own keys alone, and all of them, only then: kernels take any
    shape.
    """
    if not {"row", "head"} <= {*attention.axes}:
        return attention
    sizes = attention.sizes._replace(k_len=attention.sizes.q_len)
    exchanged = tuple({"row": "head", "head": "row"}.get(axis, axis) for axis in attention.axes)
    calls = product((attention.sizes, sizes), (attention.axes, exchanged))

    def by_head(call: tuple[CallSizes, AxisNames]) -> UserAttention | None:
        """The call with these sizes and axes, None unless its last head alone gives what it gives
        beside the others, and all keys are read.
        """
        candidate = with_output(replace(attention, sizes=call[0], axes=call[1]))
        inputs = random_inputs(candidate)
        drawer = candidate.drawer(1)
        out = candidate(inputs, seed=0)
        alone = candidate(inputs.map(lambda rows: rows[:, -1:]), seed=0)
        same, last = (candidate(drawer.replaced(inputs, n - 1), seed=0) for n in inputs.lengths[1:])
        # masked from the top left, the first queries see no later keys
        reads_all = not _equals(last, out) or _equals(same[..., 0, :], out[..., 0, :])
        is_own = alone.shape == out[:, -1:].shape and _equals(alone, out[:, -1:])
        return candidate if is_own and reads_all else None

    return first_that_works(calls, by_head, attention.built.tried.note) or attention


# -------------------------------------------------------------------------------------------- masks


def accepted_forms(attention: UserAttention, forms: Iterable[MaskForm]) -> Iterator[MaskForm]:
    """The forms that the call takes, each with whether it hides a key. None is of −∞ where
    its words state marks.
    """
    built = attention.built
    thing = built.thing if built.module is None else type(built.module)
    is_only = len(attention.parameters(*MASKS)) == 1
    every = [*forms]
    for name in {form.parameter for form in every if form.kind in MARKS}:
        if are_marks_stated(thing, name, is_only_mask=is_only):
            every = [form for form in every if (form.parameter, form.kind) != (name, "additive")]
    return those_that_work(
        every, lambda form: form._replace(hides=hides(attention, form)), built.tried.note
    )


def hides(attention: UserAttention, form: MaskForm | None) -> bool:
    """Whether texts that differ in a key, which a mask hides, or in the last one without a mask,
    have the same outputs, and queries that differ have others (unlike where all keys are hidden).
    Raises `UserRaised`, and `Unreadable` where there is no other key, or no output of each token.
    """
    alike = random_inputs(attention).map(lambda rows: rows[:1].expand_as(rows))
    batch, q_len, k_len = alike.lengths
    if k_len < 2:
        raise Unreadable("a text of one token has no key to hide")
    hidden = k_len - 1 if form is None or form.kind == "lengths" else 1
    inputs = attention.drawer(0).replaced(alike, hidden)
    keep = torch.arange(k_len) != hidden
    if form is not None and form.is_padding:
        inputs = inputs._replace(real=keep.expand(batch, k_len))
    elif form is not None:
        inputs = inputs._replace(allowed=keep.expand(1, 1, q_len, k_len))
    out = attention(inputs, mask=form, seed=0)
    if inputs.keys is None and not attention.is_pooled:  # the query of this key changes too
        if out.shape[-2] != k_len:
            raise Unreadable(f"texts of {k_len} tokens have {out.shape[-2]} outputs")
        out = out[..., keep, :]
    if not out.isfinite().all() or not _equals(out, out[:1]):
        return False
    return out.shape[-2] == 1 or not _equals(out, out[..., :1, :])


def reads_others(attention: UserAttention) -> bool:
    """Whether another first token changes the outputs of others, as behind an embedding none
    does.
    """
    inputs = random_inputs(attention)
    other = attention.drawer(1).replaced(inputs, 0)
    before, after = (attention(each, seed=0)[:, 1:] for each in (inputs, other))
    return not _equals(after, before)


def _equals(out: Tensor, part: Tensor) -> bool:
    """Whether each part of an output is the same as one."""
    return torch.allclose(out, part.expand_as(out), rtol=1e-4, atol=1e-6)
