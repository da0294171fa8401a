"""The calls that attention usually takes: its inputs, their axes, lengths and widths, and the
values of the other arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from mhacli.usercode.axes import HEAD_AXES, MAP_AXES, ROW_AXES, AxisNames, CallSizes
from mhacli.usercode.build import Built
from mhacli.usercode.masks import forms_of, made_mask
from mhacli.usercode.names import never_read
from mhacli.usercode.roles import MASKS, ROWS, CallParameter, signature_of, stated
from mhacli.usercode.user_attention import UserAttention
from mhacli.usercode.usual_arguments import SHAPES, LayerSizes, usual_arguments

AXES_OF_HEADS: tuple[AxisNames, ...] = (HEAD_AXES, ("batch", "row", "head", "width"), ROW_AXES)
"""The axes of the inputs of a function of q, k and v, the likeliest first."""
_HEADS = 4
"""The heads of a target that states no number of them, such as a plain function."""
_HEAD_WIDTH = 8
"""The width of a head where none is stated."""
_MOST_WIDTHS = 4
"""The most widths of a token that are tried: each comes with every other variant."""


def usual_calls(template: UserAttention, *, causal: bool) -> Iterator[UserAttention]:
    """The calls to try, the likeliest first, with all token vectors, then only with the required
    ones; `template` has what they have in common, such as the device. Raises `MhaError` if it takes
    none.
    """
    sizes, parameters = _StatedSizes(template), signature_of(template.built.call)
    free = [parameter for parameter in parameters if parameter.name not in template.others]
    projects = bool(sizes.weights) or any(p.role in ("weight", "n_heads") for p in parameters)
    has_places = any(p.required and p.role in ("rope", "positions", "offset") for p in free)
    shapes = SHAPES if has_places else SHAPES[:1]
    for slots in _slots_to_try(template.built, free):
        is_function = len({slot.part for slot in slots}) == 3 and not projects
        kind = _InputKind(is_pair=len(slots) > 1, is_function=is_function)
        variants = itertools.product(
            sizes.widths(kind), _layouts(sizes, kind), shapes, _open_masks(free)
        )
        for (d_in, d_context), layout, shape, masks in variants:
            usual = usual_arguments(free, sizes.layer(d_in, kind), shape, causal=causal)
            n_split = 0
            if is_function:
                n_split = sizes.n_heads if "head" in layout.axes else 1
            yield replace(
                template,
                slots=slots,
                axes=layout.axes,
                others={**template.others, **usual, **masks},
                sizes=layout.sizes._replace(d_in=d_in, d_context=d_context, n_heads=n_split),
            )


def _slots_to_try(built: Built, free: Sequence[CallParameter]) -> list[tuple[CallParameter, ...]]:
    """The parameters for token vectors: all, then the required ones. Raises `MhaError` if there is
    none.
    """
    unread = never_read(built.call)
    rows = tuple(p for p in free if p.role in ROWS and (p.required or p.name not in unread))
    if not rows and any(parameter.role == "rest" for parameter in free):
        names = enumerate(ROWS[1:4])
        rows = tuple(CallParameter(f"args[{n}]", role, n == 0, True) for n, role in names)
    needed = tuple(slot for slot in rows if slot.required or slot.part == "q")
    if not needed:
        message = "has no parameter for token vectors, such as x, or query, key and value"
        hint = "name a class or function that computes attention, or give --example"
        raise built.refusal(f"{built.name} {message}", hint)
    return [rows] if rows == needed else [rows, needed]


class _InputKind(NamedTuple):
    """Whether there are several inputs, and whether they are q, k and v in heads."""

    is_pair: bool
    is_function: bool


class _StatedSizes:
    """The sizes that a target states: `numbers` that it, its constructor or its call holds by name,
    and the shapes of its weights. A `d_head` or a `d_model` of 0 is not stated.
    """

    def __init__(self, template: UserAttention) -> None:
        self.built = template.built
        defaults = {p.name: p.default for p in signature_of(self.built.call)}
        stored = {} if self.built.module is None else vars(self.built.module)
        held = {**stored, **self.built.arguments, **defaults, **template.others}
        self.numbers = {name: number for name, number in held.items() if isinstance(number, int)}
        self.weights = self.built.weight_shapes
        self.d_model, self.d_head = self._stated("d_model"), self._stated("d_head")
        self.n_heads = self._stated("n_heads") or _HEADS
        if not self._stated("n_heads") and self.d_model and self.d_head:
            self.n_heads = self.d_model // self.d_head

    def _stated(self, role: str) -> int:
        return stated(self.numbers, role) or 0

    def widths(self, kind: _InputKind) -> list[tuple[int, int]]:
        """The widths to try of queries and of keys: for a function those of a head, else a stated
        one, then those that a weight has.
        """
        if kind.is_function:
            widths = [self.d_head or self.d_model // self.n_heads or _HEAD_WIDTH]
        else:
            known = [stated(self.built.arguments, "d_model") or 0]
            known += [shape[1] for shape in self.weights]
            known += [shape[0] for shape in self.weights]
            widths = [*dict.fromkeys(width for width in known if width > 1)][:_MOST_WIDTHS]
            widths = widths or [self.d_model or self.n_heads * _HEAD_WIDTH]
        if kind.is_pair:
            return [*itertools.product(widths, widths)]
        return [(width, width) for width in widths]

    def layer(self, d_in: int, kind: _InputKind) -> LayerSizes:
        """The sizes of the layer for inputs of a width."""
        if kind.is_function:
            return LayerSizes(self.n_heads, d_in, self.n_heads * d_in)
        return LayerSizes(self.n_heads, self.d_head or max(1, d_in // self.n_heads), d_in)

    def text_lengths(self, usual: int) -> list[int]:
        """The lengths that a text may need: two windows, the longest text, or that of a table;
        beside them a usual one.
        """
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


def _layouts(sizes: _StatedSizes, kind: _InputKind) -> list[_Layout]:
    """The layouts to try: lengths that differ come first, because only the right axes take them. No
    length equals another size where that can be.
    """
    taken = {*sizes.numbers.values(), *itertools.chain(*sizes.weights)}
    batch, q_len, same, k_len = (next(n for n in numbers if n not in taken) for numbers in _LENGTHS)
    lengths = []
    if kind.is_pair:
        lengths.append(CallSizes(batch, q_len, k_len))
    for length in sizes.text_lengths(same):
        n_texts = batch + 1 if batch == length else batch
        lengths.append(CallSizes(n_texts, length, length))
    orders: tuple[AxisNames, ...] = (ROW_AXES,)
    if kind.is_function:
        orders = AXES_OF_HEADS
    elif sizes.numbers.get("batch_first", True) is False:
        orders = (("row", "batch", "width"), ROW_AXES)
    layouts = [_Layout(axes, each) for each in lengths for axes in orders]
    if not kind.is_function:
        layouts.append(_Layout(MAP_AXES, CallSizes(batch, _MAP_CELLS, _MAP_CELLS)))
    return layouts


def _open_masks(free: Sequence[CallParameter]) -> list[dict[str, Any]]:
    """Values for the required masks, by name: None, then masks that hide nothing, in each form for
    all of them.
    """
    empty = [p.name for p in free if isinstance(p.default, Tensor) and p.default.numel() == 0]
    needed = [p for p in free if p.role in MASKS and (p.required or p.name in empty)]
    masks: list[dict[str, Any]] = [dict.fromkeys(p.name for p in needed)]
    for row in itertools.zip_longest(*map(forms_of, needed)):
        made = {form.parameter: made_mask(form) for form in row if form is not None}
        masks.append(masks[-1] | made)
    return masks
