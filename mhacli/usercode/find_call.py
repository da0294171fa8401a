"""Finds out how to call a user's attention: tries the likely calls in order, then its modes and its
masks.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mhacli.attention.layer import rates
from mhacli.attention.stages import Inputs
from mhacli.errors import MhaError, UsageError
from mhacli.usercode.build import Built, cast_copy, member_of, parameters_of, parse_value, seeded
from mhacli.usercode.door import (
    NO_ANSWER,
    Attempt,
    Unreadable,
    UserRaised,
    call_user,
    first_that_works,
    for_user,
)
from mhacli.usercode.faults import user_code_error
from mhacli.usercode.limits import OutOfTime
from mhacli.usercode.names import never_read, source_of
from mhacli.usercode.roles import (
    IN_ORDER,
    MASKS,
    ROWS,
    CallParameter,
    called_function,
    signature_of,
    stated,
)
from mhacli.usercode.target import TargetRequest, find_target
from mhacli.usercode.user_attention import (
    HEAD_AXES,
    OF_IDS,
    OF_TEXTS,
    ROW_AXES,
    AxisNames,
    CallSizes,
    Changed,
    MaskForm,
    UserAttention,
    for_each_text,
    forms_of,
    leaves,
    mask_of,
    output_in,
)

_MOST_CALLS = 60
_MOST_COPIED = 4_000_000
"""The most numbers of a module that is copied for each call that is tried, so that no state passes
to the next."""
_BATCH, _LENGTH = (
    r"(?:b|n|bs\w*|batch\w*)",
    r"(?:t|l|s|n?_?seq\w*|\w*len\w*|time|steps|n?_?tokens?)",
)
_BATCH_FIRST = (
    rf"\b{_BATCH}, *{_LENGTH}\b|^ *\(?(?:b|bs\w*|batch\w*), *\w[\w, ]*\)? *=.*\.(?:shape|size)\b"
)
_BATCH_SECOND = rf"^ *\(?{_LENGTH}, *{_BATCH}\b[\w, ]*\)? *=.*\.(?:shape|size)\b"
"""Code that names a batch before a length, as in `B, T, C = x.shape`, and a length before a
batch."""
_INPUT_SCALE = 0.3
"""The scale of random inputs, small enough that a softmax without scaling sees more than one
key."""


def find_modes(built: Built, request: TargetRequest) -> tuple[UserAttention, ...]:
    """The target with the call and the masks of each mode: self-attention, cross-attention, or
    both; with one mode if only whole texts have an output in the call of an example. In float64 if
    it can compute in it. Raises MhaError if no call works.
    """
    first = with_independent_rows(_first_call(built, request))
    modes = [_with_masks(mode) for mode in _modes_of(first)]
    hiding = [{form.parameter for form in mode.forms if form.hides} for mode in modes]
    for n, mode in enumerate(modes):
        elsewhere = set().union(*hiding) - hiding[n]  # they hide keys in the other mode alone
        forms = tuple(form for form in mode.forms if form.parameter not in elsewhere)
        modes[n] = replace(mode, forms=forms, is_copied=False)
        # it cannot be copied, or something in it has a dtype of its own
        with suppress(*NO_ANSWER):
            wide = replace(
                modes[n].with_call(cast_copy(built.call, torch.float64)), dtype=torch.float64
            )
            out = replace(wide, is_copied=True)(_inputs(wide), seed=0)
            modes[n] = wide if out.dtype == torch.float64 else modes[n]
    return tuple(modes)


# ----------------------------------------------------------------------------------- the first call


def plain_call(built: Built, request: TargetRequest) -> UserAttention:
    """The target with what is known of its call before one is tried."""
    parameters = parameters_of(called_function(built.call))
    given = {
        name: member_of(each)
        for name, each in parameters.items()
        if each.default is inspect.Parameter.empty
    }
    given = {name: member for name, member in given.items() if member is not None}
    given |= {
        name: member_of(parameters.get(name), parse_value(value))
        for name, value in request.call_arguments
    }
    tensors = [] if built.module is None else [*built.module.parameters(), *built.module.buffers()]
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.get_default_dtype())
    is_small = (
        not any(map(nn.parameter.is_lazy, tensors))
        and sum(t.numel() for t in tensors) <= _MOST_COPIED
    )
    device, example = torch.device(request.device), request.example
    template = UserAttention(
        built, CallSizes(1, 1, 1), dtype, device, others=given, is_copied=is_small
    )
    return template if example is None else replace(template, example=example_of(example, built))


def _first_call(built: Built, request: TargetRequest) -> UserAttention:
    """The first call that gives an output."""
    template = plain_call(built, request)
    if template.example is not None:
        lengths = _EXAMPLE_LENGTHS if template.is_resizable else (0,)
        candidates: Iterable[UserAttention] = (
            attention_of_example(template, length) for length in lengths
        )
    else:
        candidates = _usual_calls(template, causal=request.causal)
    tried = list[Attempt]()
    found = first_that_works(itertools.islice(candidates, _MOST_CALLS), with_output, tried)
    if found is None:
        raise _call_error(built, request, tried)
    return found


def _inputs(attention: UserAttention) -> Inputs:
    """Random inputs, the same in each call."""
    rows = attention.drawer(0).inputs(with_context=attention.n_rows > 1)
    return rows if attention.ids is not None else rows.map(lambda tensor: _INPUT_SCALE * tensor)


def with_output(attention: UserAttention) -> UserAttention:
    """The attention with the path of its output for each token, or else, if an example shows the
    call, of the first for each text. Raises `UserRaised`, and `Unreadable` without an output.
    """
    inputs = _inputs(attention)
    with seeded(0, attention.device):
        result = attention.result(inputs)
    orders = (
        [attention.axes] if attention.ids is None else [(*attention.axes, "width"), attention.axes]
    )
    if attention.is_function and "head" in attention.axes:
        orders += _OF_HEADS[:2]
    output = output_in(result, orders, attention.sizes_of(inputs))
    floats = [(path, tensor) for path, tensor in leaves(result) if tensor.is_floating_point()]
    if output is None and (
        attention.is_pooled or (attention.example is not None and attention.ids is None)
    ):
        batch = len(inputs.queries)
        output = next(
            ((path, OF_TEXTS) for path, out in floats if out.ndim > 1 and len(out) == batch), None
        )
    if output is None:
        returned = (
            ", ".join(str(list(tensor.shape)) for _, tensor in floats[:4]) or type(result).__name__
        )
        missing = f"no output [{', '.join(attention.axes)}] for inputs {list(inputs.queries.shape)}"
        raise Unreadable(f"{missing}, but {returned}")
    return replace(attention, output=output)


def with_independent_rows(attention: UserAttention) -> UserAttention:
    """The call, or the same with the length before the batch where a text is the same alone and
    among others only then, as in torch's own layers, and the code does not state the batch first
    alone.
    """
    code = source_of(
        attention.built.thing if attention.built.module is None else type(attention.built.module)
    )
    says_first, says_second = (
        re.search(order, code, re.I | re.M) for order in (_BATCH_FIRST, _BATCH_SECOND)
    )
    is_known = (says_first and not says_second) or attention.example is not None
    if is_known or attention.is_pooled or attention.axes not in (ROW_AXES, OF_IDS):
        return attention

    def with_rows(axes: AxisNames) -> UserAttention | None:
        candidate = attention
        if axes != attention.axes:
            candidate = with_output(replace(attention, axes=axes))
        inputs = _inputs(candidate)
        in_batch = candidate(inputs, seed=0)
        alone = candidate(inputs.map(lambda rows: rows[1:2]), seed=0)
        largest = float(in_batch.abs().max())
        is_same = in_batch[1:2].shape == alone.shape and torch.allclose(
            in_batch[1:2], alone, atol=1e-5 * largest
        )
        return candidate if is_same else None

    orders = (attention.axes, ("row", "batch", *attention.axes[2:]))
    return first_that_works(orders, with_rows, []) or attention


def _modes_of(attention: UserAttention) -> list[UserAttention]:
    """The attention in each mode: self and cross if keys are optional, else one."""
    keys = [slot for slot in attention.slots if slot.part != "q"]
    if (
        not keys
        or attention.example is not None
        or attention.is_pooled
        or any(slot.required for slot in keys)
    ):
        return [attention]
    crossed = replace(
        attention, slots=tuple(slot._replace(required=True) for slot in attention.slots)
    )
    sizes = attention.sizes._replace(k_len=attention.sizes.q_len, d_context=attention.sizes.d_in)
    alone = replace(
        attention, sizes=sizes, slots=tuple(slot for slot in attention.slots if slot not in keys)
    )
    try:
        return [replace(with_output(alone), mode="self"), replace(crossed, mode="cross")]
    except NO_ANSWER:  # it needs them
        return [crossed]


# ---------------------------------------------------------------------------------- the usual calls


_HEADS, _HEAD_WIDTH = 4, 8
"""The sizes for a target without sizes of its own, such as a plain function."""
_LENGTHS = ((3, 4, 6, 9, 15), (5, 7, 9, 6, 15), (7, 5, 9, 6, 15), (11, 13, 10, 9, 15))
"""The numbers to choose from of texts, of queries, of queries that are keys too, and of keys."""
_LONGEST, _MAP_CELLS = 4096, 12
_MAP: AxisNames = ("batch", "width", "row", "column")
_OF_HEADS: tuple[AxisNames, ...] = (HEAD_AXES, ("batch", "row", "head", "width"), ROW_AXES)


def _usual_calls(template: UserAttention, *, causal: bool) -> Iterator[UserAttention]:
    """The calls to try, the likeliest first, with all token vectors, then only with the required
    ones; `template` has what they have in common, such as the device. Raises `MhaError` if it takes
    none.
    """
    built, signature = template.built, signature_of(template.built.call)
    free = [parameter for parameter in signature if parameter.name not in template.others]
    defaults = {parameter.name: parameter.default for parameter in signature}
    held = {**vars(built.module or object), **built.arguments, **defaults, **template.others}
    states = {name: number for name, number in held.items() if isinstance(number, int)}
    n_heads, width, d_head = (
        stated(states, role) or 0 for role in ("n_heads", "d_model", "d_head")
    )
    if n_heads == 0:
        n_heads = width // d_head if width and d_head else _HEADS
    shapes = _shapes_of(built)
    sizes = [
        stated(built.arguments, "d_model") or 0,
        *(shape[1] for shape in shapes),
        *(shape[0] for shape in shapes),
    ]
    known = list(dict.fromkeys(size for size in sizes if size > 1))[:4] or [
        width or n_heads * _HEAD_WIDTH
    ]
    is_projecting = bool(shapes) or any(p.role in ("weight", "n_heads") for p in signature)
    has_places = any(p.required and p.role in ("rope", "positions", "offset") for p in free)
    variants = range(
        3 if has_places else 1
    )  # the shapes in which rotations and positions are tried
    unread = never_read(built.call)
    rows = tuple(p for p in free if p.role in ROWS and (p.required or p.name not in unread))
    if not rows and any(parameter.role == "rest" for parameter in free):
        rows = tuple(
            CallParameter(f"args[{n}]", role, n == 0, True) for n, role in enumerate(ROWS[1:4])
        )
    needed = tuple(slot for slot in rows if slot.required or slot.part == "q")
    if not needed:
        message = (
            f"{built.name} has no parameter for token vectors, such as x, or query, key and value"
        )
        raise _refused(
            built, message, "name a class or function that computes attention, or give --example"
        )
    for slots in [rows] if rows == needed else [rows, needed]:
        is_function = len({slot.part for slot in slots}) == 3 and not is_projecting
        widths = [d_head or width // n_heads or _HEAD_WIDTH] if is_function else known
        pairs = (
            itertools.product(widths, widths)
            if len(slots) > 1
            else zip(widths, widths, strict=True)
        )
        layouts = _layouts(built, states, shapes, is_pair=len(slots) > 1, is_function=is_function)
        for (d_in, d_context), layout, variant, masks in itertools.product(
            pairs, layouts, variants, _open_masks(free)
        ):
            of_head = d_in if is_function else d_head or max(1, d_in // n_heads)
            axes, batch, q_len, k_len = layout
            numbers = {
                "n_heads": n_heads,
                "d_head": of_head,
                "d_model": n_heads * d_in if is_function else d_in,
            }
            n_split = (n_heads if "head" in axes else 1) if is_function else 0
            yield replace(
                template,
                slots=slots,
                axes=axes,
                others={
                    **template.others,
                    **usual_arguments(free, numbers, variant, causal=causal),
                    **masks,
                },
                sizes=CallSizes(batch, q_len, k_len, d_in, d_context, n_split),
            )


def _shapes_of(built: Built) -> list[torch.Size]:
    """The shapes of the weights of at least two axes that the target holds, or a module in it."""
    weights = list[Tensor]()
    for part in [built.call, *getattr(built.call, "__dict__", {}).values()]:
        weights += (
            part.parameters()
            if isinstance(part, nn.Module)
            else [part]
            if isinstance(part, Tensor)
            else ()
        )
    return [
        weight.shape for weight in weights if not nn.parameter.is_lazy(weight) and weight.ndim > 1
    ]


def _layouts(
    built: Built,
    states: Mapping[str, int],
    shapes: Sequence[torch.Size],
    *,
    is_pair: bool,
    is_function: bool,
) -> list[tuple[AxisNames, int, int, int]]:
    """The axes of the inputs with their lengths (batch, queries, keys): lengths that differ come
    first, because only the right axes take them. No length equals another size where that can be.
    """
    taken = {*states.values(), *itertools.chain(*shapes)}
    batch, q_len, same, k_len = (next(n for n in numbers if n not in taken) for numbers in _LENGTHS)
    tables = (
        []
        if built.module is None
        else [table.shape for table in built.module.buffers() if table.ndim > 1]
    )
    equal = [2 * size for name, size in states.items() if "window" in name]
    equal += [same, stated(built.arguments, "context_length") or same]
    equal += [shape[-1] for shape in tables if shape[-1] == shape[-2]]
    lengths = [(batch, q_len, k_len)] if is_pair else []
    for length in dict.fromkeys(n for n in equal if 1 < n <= _LONGEST):
        lengths.append((batch + 1 if batch == length else batch, length, length))
    orders: tuple[AxisNames, ...] = _OF_HEADS if is_function else (ROW_AXES,)
    if not is_function and states.get("batch_first", True) is False:
        orders = (("row", "batch", "width"), ROW_AXES)
    layouts = [(axes, *each) for each in lengths for axes in orders]
    return layouts if is_function else [*layouts, (_MAP, batch, _MAP_CELLS, _MAP_CELLS)]


def usual_arguments(
    free: Sequence[CallParameter], numbers: Mapping[str, int], shape: int, *, causal: bool
) -> dict[str, Any]:
    """The arguments besides inputs and masks, or what makes each: the required ones, and the
    switches for training and, if it is asked for, for a causal mask.
    """
    d_head, d_model, others = numbers["d_head"], numbers["d_model"], dict[str, Any]()
    values: dict[str, Any] = {
        **numbers,
        "scale": 1 / math.sqrt(d_head),
        "dropout": 0.0,
        "causal": causal,
        **dict.fromkeys(("off", "result"), False),
        **{
            role: partial(in_call, role, shape)
            for role in ("training", "offset", "positions", "segments")
        },
    }
    for name, role, required, _, _ in free:
        is_switch = role == "training" or (role == "causal" and causal)
        if role in (*ROWS, *MASKS, "unknown") or not (required or is_switch):
            continue
        others[name] = values.get(role)
        if role == "rope":
            others[name] = partial(_rotation, name, d_head, shape)
        elif role in ("weight", "weight bias"):
            d_out = d_model * (
                3 if "qkv" in name or "in" in name.split("_") else 2 if "kv" in name else 1
            )
            generator = torch.Generator().manual_seed(len(others))
            weight = torch.randn(
                d_out, d_model, generator=generator, dtype=torch.float64
            ) / math.sqrt(d_model)
            others[name] = weight[:, 0] if role == "weight bias" else weight
    return others


def in_call(role: str, shape: int, sizes: CallSizes) -> Any:
    """The positions of the tokens of a call in one of three shapes, the segment of each, the first,
    the number of tokens before it, or whether it is of training.
    """
    if role == "training":
        return sizes.training
    if role == "offset":
        return torch.tensor(sizes.start) if shape else sizes.start
    if role == "segments":
        return torch.zeros(sizes.batch, sizes.q_len, dtype=torch.long)
    q_idx = torch.arange(sizes.start, sizes.start + sizes.q_len)
    return (q_idx[None], q_idx, q_idx.expand(sizes.batch, -1))[shape]


def _rotation(name: str, d_head: int, shape: int, sizes: CallSizes) -> Any:
    """A table of rotations: complex, or cosines and sines of all columns, or in pairs."""
    angle = torch.outer(
        in_call("positions", 1, sizes).double(), rates(d_head, 10_000.0, torch.device("cpu"))
    )
    turns = torch.polar(torch.ones_like(angle), angle)
    whole = torch.cat([turns, turns], -1)
    if "cos" in name.lower() or "sin" in name.lower():
        shaped = (whole, whole[None], turns)[shape]
        return shaped.real if "cos" in name.lower() else shaped.imag
    tables = [turns, (whole[None].real, whole[None].imag), torch.view_as_real(turns)]
    return tables[(1, 0, 2)[shape] if "emb" in name.lower() else shape]


# --------------------------------------------------------------------------- the call of an example


_EXAMPLE_LENGTHS = (7, 8, 12, 16, 64)
"""The lengths to try, until a call works."""
_SHAPES = (
    "torch.randn(2, T, {})",
    "torch.randn(T, {})",
    "torch.randn(2, {}, T)",
    "torch.randn(2, T, T, {})",
    "torch.randn(2, 4, 4, {})",
    "torch.randn(2, 1, T, {})",
    "torch.randn({}, T)",
    "torch.randn(2, 3, 224, 224)",
    "torch.randn(2, 3, 32, 32)",
    "torch.randn(2, 3, 28, 28)",
)
"""The vectors or images of an example that a refusal gives, the first that works."""
_OTHERS = (
    "torch.ones(2, dtype=torch.long)",
    "torch.randn(2, {})",
    "torch.randn(2, 9, {})",
    "None",
    "1",
    "",
)
"""What it gives for other arguments: a number or a vector for each text, a memory, nothing, a
number, or what it gives first."""
_UNUSUAL_LENGTH = 11
"""The length at which it is tried, which is no other size."""
_MOST_EXAMPLES = 200
"""The most of them that are tried: no clock decides which is found."""
_LENGTHENING = 3
"""A second length is larger by this, and shows which axes are lengths."""


def example_of(text: str, built: Built) -> Callable[..., Any]:
    """An example as a function: a `lambda` in the user's words knows torch and the names of the
    target's file; else the name of a function.
    """
    if not text.lstrip().startswith("lambda"):
        return find_target(text)  # type: ignore[no-any-return]
    module = inspect.getmodule(built.thing)
    names = {
        **(vars(module) if module is not None else {}),
        "torch": torch,
        "nn": nn,
        "F": functional,
    }
    try:
        return call_user(eval, text, names)  # type: ignore[no-any-return]
    except UserRaised as raised:
        raise UsageError(f"--example cannot be read: {raised}") from raised.fault


def arguments_of_example(template: UserAttention, length: int) -> dict[str, Any]:
    """The arguments of the call that an example makes, by name. Raises `MhaError` if it makes
    none.
    """
    built, made = template.built, list[dict[str, Any]]()

    def note(arguments: dict[str, Any]) -> dict[str, Any]:
        made.append(arguments)
        raise for_user(StopIteration())  # the call itself is not needed

    problem = f"does not call {built.name}"
    try:
        with torch.no_grad():
            assert template.example is not None
            lengths = (length,) if template.is_resizable else ()
            call_user(template.example, Changed(built.call, note), *lengths)
    except UserRaised as raised:
        problem = f"raises {raised}"
    if not made:
        raise _refused(built, f"--example {problem}")
    return made[0]


def attention_of_example(template: UserAttention, length: int) -> UserAttention:
    """The target with the inputs that its example shows at a length: vectors, by name where names
    tell, else in order, or token ids, those of its decoder if it has one. Random arguments of
    another kind are the same at each length. Raises `MhaError` without any.
    """
    made, again, longer = (
        arguments_of_example(template, n) for n in (length, length, length + _LENGTHENING)
    )
    built, roles = (
        template.built,
        {parameter.name: parameter.role for parameter in signature_of(template.built.call)},
    )
    if not _are_alike(made, again, longer):
        raise Unreadable(f"--example gives {built.name} arguments of another kind in another call")
    tensors = {
        name: value for name, value in made.items() if isinstance(value, Tensor) and value.ndim > 1
    }
    random = [
        name
        for name, value in made.items()
        if isinstance(value, Tensor) and not torch.equal(value, again[name])
    ]
    floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
    # the numbers of a mask hide or show
    vectors = [
        name
        for name, value in floats.items()
        if not ((value == 0) | (value == 1) | (value < -1e3)).all()
    ]
    ids = [
        name
        for name, value in tensors.items()
        if value.ndim == 2 and value.dtype in (torch.int64, torch.int32)
    ]
    ids = [
        name for name in ids if name in random or not vectors
    ]  # others may be the numbers of the vectors
    found = {name: roles[name] for name in vectors if roles.get(name) in ROWS}
    found = found or dict(zip(vectors, IN_ORDER.get(len(vectors), ("x",)), strict=False))
    if template.ids is not None:
        found = dict.fromkeys(
            [slot.name for slot in template.slots if slot.name in ids] or ids[:1], "x"
        )
    slots = tuple(CallParameter(name, role, True) for name, role in found.items())
    if not slots:
        hint = "token ids take any length: lambda m, T: m(torch.randint(9, (2, T)))"
        message = f"--example gives {built.name} no vectors"
        if ids and template.is_resizable:
            message = f"{built.name} gives no output for each token id of --example"
            hint = "give ids [text, token], or [token, text]"
        raise _refused(built, message, hint if ids else None)
    parts = {slot.part: made[slot.name] for slot in slots}
    queries = parts.get("q", made[slots[0].name])
    is_function = len(parts) == 3 and not _shapes_of(built)
    is_second = vars(built.module or object).get("batch_first", True) is False
    rows = [
        each if template.ids is None else each[..., None]
        for each in (queries, longer[slots[0].name])
    ]
    axes = _axes(*(each.shape for each in rows), is_function=is_function, is_second=is_second)
    keys = parts.get("k", rows[0])
    if keys.ndim != len(axes):
        both = f"{list(rows[0].shape)} and {list(keys.shape)}"
        raise Unreadable(f"--example gives {built.name} vectors with other axes: {both}")
    shape, of_keys = (dict(zip(axes, each.shape, strict=True)) for each in (rows[0], keys))
    q_len, k_len = (each["row"] * each.get("column", 1) for each in (shape, of_keys))
    n_heads, n_texts = shape.get("head", 1) if is_function else 0, shape.get("batch", 1)
    random = [
        name
        for name in random
        if name not in found and template.is_resizable and "column" not in shape
    ]
    most = made
    for longest in (_LONGEST // 64, _LONGEST // 16, _LONGEST) if random else ():
        with suppress(MhaError):  # a table in the example may be shorter
            most = arguments_of_example(template, longest)
    shapes = {name: [*zip(made[name].shape, longer[name].shape, strict=True)] for name in random}
    return replace(
        template,
        slots=slots,
        axes=axes[: queries.ndim],
        others={
            name: partial(_beginning, most[name], shapes[name], q_len, n_texts) for name in random
        },
        sizes=CallSizes(
            n_texts, q_len, k_len, shape.get("width", 1), of_keys.get("width", 1), n_heads
        ),
        is_copied=template.ids is None,
    )


def _are_alike(made: Mapping[str, Any], *others: Mapping[str, Any]) -> bool:
    """Whether calls have the same arguments: tensors of as many axes under the same names."""
    axes = [
        {name: value.ndim if isinstance(value, Tensor) else -1 for name, value in call.items()}
        for call in (made, *others)
    ]
    return all(each == axes[0] for each in axes)


def _beginning(
    most: Tensor, shapes: Sequence[tuple[int, int]], length: int, n_texts: int, sizes: CallSizes
) -> Tensor:
    """A random argument of an example at the length of a call, the same for each text: the
    beginning of that of the longest text, by its shapes at a length and at a longer one. Raises
    `Unreadable` for a longer text than that.
    """
    for dim, (size, longer) in enumerate(shapes):
        needed = size + (longer - size) * (sizes.q_len - length) // _LENGTHENING
        if not 0 <= needed <= most.shape[dim]:
            raise Unreadable(f"--example gives nothing for a text of {sizes.q_len} tokens")
        most = most.narrow(dim, 0, needed)
    return for_each_text(most, n_texts, sizes)


def _axes(
    shape: torch.Size, longer: torch.Size, *, is_function: bool, is_second: bool
) -> AxisNames:
    """The axes of the inputs: a length is what differs in a longer text, else it stands where it
    usually does; of a map, the channels stand before it or, as two equal axes show, behind it.
    Raises `Unreadable` for more axes.
    """
    if not 2 <= len(shape) <= 4:
        raise Unreadable(f"--example gives vectors {list(shape)}, of {len(shape)} axes")
    changing = [
        dim for dim, (size, other) in enumerate(zip(shape, longer, strict=True)) if size != other
    ]
    if len(shape) == 4 and (len(changing) == 2 or (not changing and not is_function)):
        is_behind = changing == [1, 2] or (not changing and shape[1] == shape[2] != shape[3])
        return ("batch", "row", "column", "width") if is_behind else _MAP
    usual = 0 if len(shape) == 3 and is_second else len(shape) - 2
    axes = {2: ["width"], 3: ["batch", "width"], 4: ["batch", "head", "width"]}[len(shape)]
    axes.insert(changing[0] if changing else usual, "row")
    return tuple(axes)


# -------------------------------------------------------------------------------------------- masks


def accepted_forms(attention: UserAttention, forms: Iterable[MaskForm]) -> Iterator[MaskForm]:
    """The forms that the call takes, each with whether it hides a key."""
    for form in forms:
        with suppress(*NO_ANSWER):
            yield form._replace(hides=hides(attention, form))


def _open_masks(free: Sequence[CallParameter]) -> list[dict[str, Any]]:
    """Values for the required masks, by name: None, then masks that hide nothing, in each form for
    all of them.
    """
    empty = [p.name for p in free if isinstance(p.default, Tensor) and p.default.numel() == 0]
    needed = [p for p in free if p.role in MASKS and (p.required or p.name in empty)]
    masks: list[dict[str, Any]] = [dict.fromkeys(p.name for p in needed)]
    for row in itertools.zip_longest(*map(forms_of, needed)):
        made = {
            form.parameter: partial(mask_of, form, causal=False) for form in row if form is not None
        }
        masks.append(masks[-1] | made)
    return masks


def _with_masks(attention: UserAttention) -> UserAttention:
    """The attention with the mask forms that its call accepts, those that hide a key first."""
    given = attention.others
    if attention.example is not None:
        given = arguments_of_example(attention, attention.sizes.q_len)
    found: list[MaskForm] = []
    for parameter in signature_of(attention.built.call, *MASKS):
        is_given = given.get(parameter.name) is not None and not isinstance(
            given[parameter.name], partial
        )
        if is_given is (attention.example is None):
            continue
        kinds = itertools.groupby(forms_of(parameter), attrgetter("is_padding"))
        found += next(filter(None, ([*accepted_forms(attention, forms)] for _, forms in kinds)), [])
    found.sort(key=lambda form: not form.hides)
    likeliest = {form.parameter: partial(mask_of, form, causal=False) for form in reversed(found)}
    likeliest = {
        name: made
        for name, made in likeliest.items()
        if isinstance(attention.others.get(name), partial)
    }
    return replace(attention, others={**attention.others, **likeliest}, forms=tuple(found))


def hides(attention: UserAttention, form: MaskForm | None) -> bool:
    """Whether texts that differ in a key, which a mask hides, or in the last one without a mask,
    have the same outputs, and queries that differ have others (unlike where all keys are hidden).
    Raises `UserRaised`, and `Unreadable` where there is no other key, or no output of each token.
    """
    alike = _inputs(attention).map(lambda rows: rows[:1].expand_as(rows))
    batch, q_len, k_len = alike.lengths
    if k_len < 2:
        raise Unreadable("a text of one token has no key to hide")
    hidden = k_len - 1 if form is None or form.kind == "lengths" else 1
    inputs, keep = attention.drawer(0).replaced(alike, hidden), torch.arange(k_len) != hidden
    if form is not None and form.is_padding:
        inputs = inputs._replace(real=keep.expand(batch, k_len))
    elif form is not None:
        inputs = inputs._replace(allowed=keep.expand(1, 1, q_len, k_len))
    out = attention(inputs, mask=form, seed=0)
    if inputs.keys is None and not attention.is_pooled:  # the query of this key changes too
        if out.shape[-2] != k_len:
            raise Unreadable(f"texts of {k_len} tokens have {out.shape[-2]} outputs")
        out = out[..., keep, :]
    of_first, of_one_query = out[:1].expand_as(out), out[..., :1, :].expand_as(out)
    are_alike, is_constant = (
        torch.allclose(out, one, rtol=1e-4, atol=1e-6) for one in (of_first, of_one_query)
    )
    return bool(out.isfinite().all()) and are_alike and (attention.is_pooled or not is_constant)


# ----------------------------------------------------------------------------------------- refusals


def _refused(built: Built, message: str, hint: str | None = None) -> MhaError:
    """The error for a target that cannot be called."""
    return MhaError(message, hint=hint, code="cannot-examine", path=built.file)


def _call_error(built: Built, request: TargetRequest, tried: Sequence[Attempt]) -> MhaError:
    """The error if no call works: the exception of the first one, its line, and an example to
    give.
    """
    (attention, fault), tables = tried[0], tables_of(built)
    if tables and "'indices'" in str(
        fault
    ):  # it takes token ids, and how it fails for them tells more
        attention = replace(attention, axes=OF_IDS, ids=torch.arange(min(tables)))
        try:
            with_output(attention)
        except NO_ANSWER as of_ids:
            fault = of_ids
    line, text = None, str(fault)
    if isinstance(fault, UserRaised):
        line = fault.line(built.file)
    place = f" (line {line.line}: {shorten(line.source, 80, placeholder=' …')})" if line else ""
    message = shorten(text, 160, placeholder=" …") + place
    if isinstance(fault, UserRaised):
        error = user_code_error(
            f"{built.name} could not be called", fault.fault, built.file, code=""
        )
        if error.code:
            return error  # no code of the call would mend it
    if request.example is not None:
        return _refused(built, f"{built.name} could not be called by --example: {message}")
    unknown = [
        p.name
        for p in signature_of(built.call, "unknown")
        if p.required and p.name not in attention.others
    ]
    works = None
    with suppress(OutOfTime):  # the hint shows no call then
        widths = list(dict.fromkeys(each.sizes.d_in for each, _ in tried))
        works = _working_example(built, request, widths)
    hint = f"give a call that works with --example; {attention.example_text} was tried"
    hint = hint if works is None else f"give a call that works: --example {shlex.quote(works)}"
    if unknown:
        needed = (
            f"{built.name} needs a value for {' and '.join(unknown)}, which mha cannot guess from"
            " the name"
        )
        given = " ".join(f"--call-arg {name}=VALUE" for name in unknown)
        return _refused(
            built,
            needed,
            hint if works is not None else f"give {given}, or a whole call with --example",
        )
    calls = f"any of {len(tried)} usual calls" if len(tried) > 1 else "the usual call"
    if request.call_arguments:
        hint += f"; given was --call-arg {', '.join(name for name, _ in request.call_arguments)}"
    if built.guesses:
        guessed = [f"--arg {name}={built.arguments[name]!r:.20}" for name in built.guesses]
        hint += f"; mha guessed {' '.join(guessed[:4])}"
    return _refused(built, f"{built.name} could not be called by {calls}: {message}", hint)


def tables_of(built: Built) -> list[int]:
    """The number of ids that each embedding of a module knows."""
    parts = [] if built.module is None else built.module.modules()
    return [part.num_embeddings for part in parts if isinstance(part, nn.Embedding)]


def _working_example(built: Built, request: TargetRequest, widths: Sequence[int]) -> str | None:
    """The first call that works, written for `--example`: each argument is what a layer of the
    module itself takes, first with several widths, or an input of one of the widths stands beside
    others that are alike.
    """
    required, n_ids = (
        [p for p in signature_of(built.call) if p.required],
        min(tables_of(built), default=0),
    )
    layers = [] if built.module is None else [*built.module.children()]
    firsts = [f"torch.randint({n_ids}, (2, {length}))" for length in ("T", 256, 64, 16)]
    firsts += [shape.format(width) for width in widths for shape in _SHAPES]
    others = [other.format(widths[0]) for other in (_OTHERS if len(required) > 1 else [""])]
    of_layers = [
        f"torch.randn(2, T, {part.in_features})" for part in layers if isinstance(part, nn.Linear)
    ]
    of_layers += [
        f"torch.randint({part.num_embeddings}, (2, T))"
        for part in layers
        if isinstance(part, nn.Embedding)
    ]
    alike = (
        [first] + [other or first] * (len(required) - 1)
        for other, first in itertools.product(others, firsts)
    )
    unlike = (
        [*itertools.islice(itertools.permutations(of_layers, len(required)), _MOST_CALLS)]
        if required
        else []
    )
    of_widths = [call for call in unlike if len({word for word in call if "randn" in word}) > 1]
    template = plain_call(built, request)
    every = itertools.chain(of_widths, alike, unlike)

    def working(arguments: Sequence[str]) -> str:
        first, *rest = arguments
        words = [
            "None" if p.role in MASKS else word for p, word in zip(required[1:], rest, strict=True)
        ]
        parameters = "m, T" if "T" in first else "m"
        text = f"lambda {parameters}: m({', '.join([first, *words])})"
        ids = torch.arange(n_ids) if "randint" in first else None
        example = replace(template, example=example_of(text, built), ids=ids)
        attention = attention_of_example(example, _UNUSUAL_LENGTH)
        with_output(replace(attention, is_inside=ids is not None))
        return text

    return first_that_works(itertools.islice(every, _MOST_EXAMPLES), working, [])
