"""The calls that attention usually takes: its inputs, their axes, lengths and widths, and the
values of the other arguments.
"""

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, product, zip_longest
from operator import attrgetter
from typing import Any, Literal, NamedTuple, assert_never, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mhacli.attention.layer import rates

from .axes import (
    HEAD_AXES,
    MAP_AXES,
    ROW_AXES,
    TEXT_AXES,
    AxisNames,
    CallSizes,
    MadeForSizes,
    without,
)
from .build import Built
from .door import NO_ANSWER, call_user
from .masks import forms_of, made_mask
from .names import never_read
from .roles import MASKS, PACKED, ROWS, CallParameter, signature_of, stated
from .user_attention import UserAttention

PositionShape = Literal["batched", "plain", "expanded", "again"]
"""The shape of the positions of a call: `[1, query]`, `[query]`, or `[batch, query]`, the last also
beside a further form of rotations."""
SHAPES: tuple[PositionShape, ...] = get_args(PositionShape)
AXES_OF_HEADS: tuple[AxisNames, ...] = (HEAD_AXES, ("batch", "row", "head", "width"), ROW_AXES)
"""The axes of the inputs of a function of q, k and v, the likeliest first."""
_HEADS = 4
"""The heads of a target that states no number of them, such as a plain function."""
_HEAD_WIDTH = 8
"""The width of a head where none is stated."""
_MOST_WIDTHS = 4
"""The most widths of a token that are tried: each comes with every other variant."""


class LayerSizes(NamedTuple):
    """The sizes of a layer that a call may ask for; `d_rope` of the columns of a head carry rotary
    positions.
    """

    n_heads: int = 1
    d_head: int = 1
    d_model: int = 1
    d_rope: int = 1


def usual_calls(template: UserAttention, *, causal: bool) -> Iterator[UserAttention]:
    """The calls to try, the likeliest first, with all token vectors, then only with the required
    ones; `template` has what they have in common, such as the device. Raises `MhaError` if it takes
    none.
    """
    free = [p for p in template.parameters() if p.name not in template.others]
    has_places = any(p.required and p.role in ("rope", "positions", "offset") for p in free)
    shapes = SHAPES if has_places else ("batched",)
    for slots in _slots_to_try(template.built, free):
        sizes = _StatedSizes(template, slots)
        if sizes.is_packed and not sizes.is_function:
            continue
        variants = product(sizes.widths(), _layouts(sizes), shapes, _open_masks(free))
        for (d_in, d_context), layout, shape, masks in variants:
            usual = usual_arguments(free, sizes.layer(d_in), shape, causal=causal)
            n_split = 0
            if sizes.is_function:
                n_split = sizes.n_heads if "head" in layout.axes else 1
                scaled = (p.name for p in free if p.role == "scale" and p.name in usual)
                usual |= dict.fromkeys(scaled, MadeForSizes(lambda call: call.d_in**-0.5))
            call = replace(
                template,
                slots=slots,
                axes=layout.axes,
                others={**template.others, **usual, **masks},
                sizes=layout.sizes._replace(d_in=d_in, d_context=d_context, n_heads=n_split),
            )
            own = _own_tables(template.built, free, sizes.layer(d_in).d_rope)
            yield from (replace(call, others={**call.others, **tables}) for tables in own)
            yield call


_OF_TABLES = re.compile(
    "(?<![a-z])(freqs?|rope|rotary|rotations?|tables?|cos|sin|angles?)(?![a-z])"
)
"""Words in the name of a function that makes tables of rotations."""


def _own_tables(
    built: Built, free: Sequence[CallParameter], width: int
) -> Iterator[dict[str, MadeForSizes]]:
    """The tables of rotations that functions of the target's file make for heads of a width, by
    the parameters that need them: each takes its part of what a function makes.
    """
    needing = [p.name for p in free if p.required and p.role == "rope"]
    names = getattr(inspect.getmodule(built.thing), "__dict__", {}) if needing else {}
    for name in filter(_OF_TABLES.search, names):
        function = names[name]
        parameters = signature_of(function) if callable(function) else ()
        n_sizes = len([p for p in parameters if p.required])
        code = f"{name}({', '.join((str(width), 'T')[:n_sizes])})"
        made = None
        texts = [f"{code}[{n}][:T]" for n in range(len(needing))]
        if n_sizes in (1, 2):
            with suppress(*NO_ANSWER):
                made = _evaluated(names, code, CallSizes(1, 1, 1))
        if len(needing) == 1:
            is_one = isinstance(made, Tensor)
            texts = [f"{code}[:T]" if is_one else f"[table[:T] for table in {code}]"]
        if isinstance(made, Tensor | tuple | list):
            each = [MadeForSizes(partial(_evaluated, names, text), text=text) for text in texts]
            yield dict(zip(needing, each, strict=True))


def _evaluated(names: Mapping[str, Any], code: str, sizes: CallSizes) -> Any:
    """What an expression gives for the tokens of a call, T of them with those before it."""
    made = call_user(eval, code, {**names, "T": sizes.start + sizes.q_len})
    return tree_map_only(Tensor, lambda table: table[sizes.start :], made)


def _slots_to_try(built: Built, free: Sequence[CallParameter]) -> list[tuple[CallParameter, ...]]:
    """The parameters for token vectors, those that show most first: all, packed where a name such
    as `qkv` says so, then all, then the required ones with the queries. `*args` are three where
    nothing else takes vectors, and an optional parameter that the code never reads is none. Raises
    `MhaError` if there is none.
    """
    unread = never_read(built.call)
    more = [p.name for p in free if p.required and p.role in (*ROWS, "unknown")]
    if len(more) == 2:  # a second one that it needs may be a context, of another length
        free = [
            p._replace(role="context") if p.role == "unknown" and p.name in more else p
            for p in free
        ]
    rows = tuple(p for p in free if p.role in ROWS and (p.required or p.name not in unread))
    if not rows and any(parameter.role == "rest" for parameter in free):
        rows = tuple(
            CallParameter(f"args[{n}]", role, n == 0, True) for n, role in enumerate(ROWS[1:4])
        )
    packed = tuple(p._replace(role=next(filter(p.name.count, PACKED), p.role)) for p in rows)
    needed = tuple(slot for slot in rows if slot.required or slot.part == "q")
    if not needed:
        message = "has no parameter for token vectors, such as x, or query, key and value"
        hint = "name a class or function that computes attention, or give --example"
        raise built.refusal(f"{built.name} {message}", hint)
    return [*dict.fromkeys((packed, rows, needed))]


class _StatedSizes:
    """The sizes that a target states: `numbers` that it, its constructor or its call holds by name,
    and the shapes of its weights. A `d_head` or a `d_model` of 0 is not stated. The inputs are one
    or a pair of sequences, or those of a function of q, k and v in heads, several of them in one
    tensor where it `is_packed`.
    """

    def __init__(self, template: UserAttention, slots: Sequence[CallParameter]) -> None:
        self.built = template.built
        parameters = template.parameters()
        defaults = {p.name: p.default for p in parameters}
        stored = {} if self.built.module is None else vars(self.built.module)
        held = {**stored, **self.built.arguments, **defaults, **template.others}
        self.numbers = {name: number for name, number in held.items() if isinstance(number, int)}
        self.weights = self.built.weight_shapes
        self.d_model = self._stated("d_model")
        self.d_head = self._stated("d_head")
        self.n_heads = self._stated("n_heads") or _HEADS
        if not self._stated("n_heads") and self.d_model and self.d_head:
            self.n_heads = self.d_model // self.d_head
        projects = self.weights or any(p.role in ("weight", "n_heads") for p in parameters)
        n_starts = len([p for p in parameters if p.required and p.role == "starts"])
        self.has_texts = n_starts > 0
        self.is_pair = len(slots) > 1 and n_starts != 1
        self.is_guessed = not replace(template, slots=tuple(slots)).is_named
        letters = "".join(slot.part for slot in slots)
        self.is_function = not projects and {*letters} == {*"qkv"}
        self.is_packed = len(letters) > len(slots)

    def _stated(self, role: str) -> int:
        """The number of a role, 0 where none is stated."""
        return stated(self.numbers, role) or 0

    def widths(self) -> list[tuple[int, int]]:
        """The widths to try of queries and of keys: for a function those of a head, else a stated
        one, then those that a weight has.
        """
        if self.is_function:
            widths = [self.d_head or self.d_model // self.n_heads or _HEAD_WIDTH]
        else:
            known = [stated(self.built.arguments, "d_model") or 0]
            known += [shape[1] for shape in self.weights]
            known += [shape[0] for shape in self.weights]
            widths = [*dict.fromkeys(width for width in known if width > 1)][:_MOST_WIDTHS]
            widths = widths or [self.d_model or self.n_heads * _HEAD_WIDTH]
        if self.is_pair:
            return [*product(widths, widths)]
        return [(width, width) for width in widths]

    def layer(self, d_in: int) -> LayerSizes:
        """The sizes of the layer for inputs of a width."""
        if self.is_function:
            return LayerSizes(self.n_heads, d_in, self.n_heads * d_in, d_in)
        d_head = self.d_head or max(1, d_in // self.n_heads)
        turned = [
            n for name, n in self.numbers.items() if re.search(r"rope\w*dim|rotary\w*dim", name)
        ]
        return LayerSizes(self.n_heads, d_head, d_in, next(iter(turned), d_head))

    def text_lengths(self, usual: int) -> list[int]:
        """The lengths that a text may need: two windows, the longest text, or that of a table;
        beside them a usual one. None where keys must differ in number.
        """
        if self.is_guessed:
            return []
        lengths = [2 * size for name, size in self.numbers.items() if "window" in name]
        lengths += [usual, stated(self.built.arguments, "context_length") or usual]
        buffers = [] if self.built.module is None else [*self.built.module.buffers()]
        tables = [table.shape for table in buffers if table.ndim > 1]
        lengths += [shape[-1] for shape in tables if shape[-1] == shape[-2]]
        return [length for length in dict.fromkeys(lengths) if 1 < length <= _LONGEST]


# -------------------------------------------------------------------------------------- the layouts


_LENGTHS = ((3, 4, 6, 9, 15), (5, 7, 9, 6, 15), (7, 5, 9, 6, 15), (11, 13, 10, 9, 15))
"""The numbers to choose from of texts, of queries, of queries that are keys too, and of keys."""
_LONGEST = 4096
"""The longest text that is tried."""
_MAP_CELLS = 12
"""The cells of a map, 3 by 4: its height differs from its width."""


class _Layout(NamedTuple):
    """The axes of the inputs, and their lengths."""

    axes: AxisNames
    sizes: CallSizes


def _layouts(sizes: _StatedSizes) -> list[_Layout]:
    """The layouts to try: lengths that differ come first, because only the right axes take them. No
    length equals another size where that can be, so that a wrong order of axes raises an error. For
    each length come the orders of axes, the likeliest first, and behind all others a map, which
    only a module takes.
    """
    taken = {*sizes.numbers.values(), *chain(*sizes.weights)}
    if sizes.is_packed:
        taken |= {3, sizes.n_heads}
    batch, q_len, same, k_len = (next(n for n in numbers if n not in taken) for numbers in _LENGTHS)
    lengths = []
    if sizes.is_pair:
        lengths.append(CallSizes(batch, q_len, k_len))
    for length in sizes.text_lengths(same):
        n_texts = batch + 1 if batch == length else batch
        lengths.append(CallSizes(n_texts, length, length))
    orders: tuple[AxisNames, ...] = (ROW_AXES,)
    if any(len(shape) == 3 for shape in sizes.weights):  # a convolution takes channels first
        orders = (ROW_AXES, ("batch", "width", "row"))
    if sizes.is_function:
        orders = (TEXT_AXES,) if sizes.has_texts else AXES_OF_HEADS
        if sizes.is_packed:
            orders = _with_parts(orders)
    elif sizes.has_texts:
        orders = (without(TEXT_AXES, "head"),)
    elif sizes.numbers.get("batch_first", True) is False:
        orders = (("row", "batch", "width"), ROW_AXES)
    layouts = [_Layout(axes, each) for each in lengths for axes in orders]
    if not (sizes.is_function or sizes.is_guessed):
        layouts.append(_Layout(MAP_AXES, CallSizes(batch, _MAP_CELLS, _MAP_CELLS)))
    return layouts


def _with_parts(orders: Sequence[AxisNames]) -> tuple[AxisNames, ...]:
    """The orders of axes with one more axis, of packed inputs: rows before heads come first."""
    of_heads = [axes for axes in reversed(orders) if "head" in axes]
    return tuple((*axes[:n], "part", *axes[n:]) for axes in of_heads for n in range(len(axes)))


# ------------------------------------------------------------------------------ the other arguments


_WINDOW = 16
"""The tokens of a window that a call must name."""


def usual_arguments(
    parameters: Sequence[CallParameter], layer: LayerSizes, shape: PositionShape, *, causal: bool
) -> dict[str, Any]:
    """The values of the required parameters besides inputs and masks, of the switches for training
    and, if it is asked for, of those for a causal mask; positions have a shape.
    """
    values: dict[str, Any] = {
        **layer._asdict(),
        "scale": 1 / math.sqrt(layer.d_head),
        "dropout": 0.0,
        "causal": causal,
        "off": False,
        "result": False,
        "training": MadeForSizes(attrgetter("training")),
        # made for each call, because a number may be of a width
        "window": MadeForSizes(lambda _: _WINDOW),
        **{
            role: made_place(role, shape)
            for role in ("offset", "positions", "segments", "documents")
        },
    }
    others = dict[str, Any]()
    for name, role, required, _, _ in parameters:
        is_switch = role == "training" or (role == "causal" and causal)
        if role in (*ROWS, *MASKS, "unknown") or not (required or is_switch):
            continue
        if role == "rope":
            others[name] = MadeForSizes(partial(_rotation, name, layer.d_rope, shape))
        elif role in ("starts", "longest"):
            others[name] = MadeForSizes(partial(_of_texts, name, role))
        elif role in ("weight", "weight bias"):
            weight = _weight(name, layer.d_model, seed=len(others) + 1)
            others[name] = weight[:, 0] if role == "weight bias" else weight
        else:
            others[name] = values.get(role)
    return others


def made_place(role: str, shape: PositionShape) -> MadeForSizes:
    """Where the tokens of a call stand, by a role: the number of tokens before it, or the segment,
    the document or the position of each.
    """

    def make(sizes: CallSizes) -> Any:
        """The places of the tokens of a call of these sizes, in the shape that was chosen."""
        if role == "offset":
            return sizes.start if shape == "batched" else torch.tensor(sizes.start)
        if role in ("segments", "documents"):
            number = int(role == "documents")  # of documents, 0 may stand for padding
            return torch.full((sizes.batch, sizes.q_len), number)
        q_idx = torch.arange(sizes.start, sizes.start + sizes.q_len)
        match shape:
            case "batched":
                return q_idx[None]
            case "plain":
                return q_idx
            case "expanded" | "again":
                return q_idx.expand(sizes.batch, -1)
            case _:
                assert_never(shape)

    return MadeForSizes(make)


def _of_texts(name: str, role: str, sizes: CallSizes) -> Any:
    """Where texts start that stand one behind another, and the last of them ends, or the longest
    length, of queries or of keys.
    """
    is_of_keys = name.rpartition("_")[2].startswith("k")
    length = sizes.k_len if is_of_keys else sizes.q_len
    if role == "longest":
        return length
    ends = range(1, 2 + length * sizes.batch, length)
    return torch.tensor([0, *ends], dtype=torch.int32)


def _rotation(name: str, d_head: int, shape: PositionShape, sizes: CallSizes) -> Any:
    """A table of rotations: complex, or cosines and sines of all columns, or in pairs. A form of it
    goes with each shape of positions, so that a call with both is tried in few variants; the
    likeliest form by the name goes with the likeliest shape.
    """
    frequencies = rates(d_head, 10_000.0, torch.device("cpu"))
    q_idx = made_place("positions", "plain").make(sizes)
    angle = torch.outer(q_idx.double(), frequencies)
    turns = torch.polar(torch.ones_like(angle), angle)
    whole = torch.cat([turns, turns], -1)
    pair = (whole[None].real, whole[None].imag)
    of_pairs = torch.view_as_real(turns)
    further = [of_pairs, (whole.real, whole.imag)]
    lower = name.lower()
    if "cos" in lower:
        forms: list[Any] = [whole.real, whole[None].real, turns.real]
    elif "sin" in lower:
        forms = [whole.imag, whole[None].imag, turns.imag]
    elif "emb" in lower:
        forms = [pair, turns, *further]
    else:
        forms = [turns, pair, *further]
    return forms[SHAPES.index(shape) % len(forms)]


def _weight(name: str, d_model: int, seed: int) -> Tensor:
    """A random weight `[d_out, d_model]` of one, two or three projections, as its name says."""
    n_projections = 1
    if "qkv" in name or "in" in name.split("_"):
        n_projections = 3
    elif "kv" in name:
        n_projections = 2
    generator = torch.Generator().manual_seed(seed)
    shape = (n_projections * d_model, d_model)
    return torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(d_model)


def _open_masks(free: Sequence[CallParameter]) -> list[dict[str, Any]]:
    """Values for the required masks, by name: None, then masks that hide nothing, in each form for
    all of them.
    """
    needed = [
        p
        for p in free
        if p.role in MASKS
        and (p.required or (isinstance(p.default, Tensor) and p.default.numel() == 0))
    ]
    values: list[dict[str, Any]] = [dict.fromkeys(p.name for p in needed)]
    for row in zip_longest(*map(forms_of, needed)):
        made = {form.parameter: made_mask(form) for form in row if form is not None}
        values.append(values[-1] | made)
    return values
