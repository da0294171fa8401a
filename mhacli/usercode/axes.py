"""The axes and the sizes of what a call of attention takes and returns."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path

from .door import Unreadable

AxisNames = tuple[str, ...]
OF_IDS: AxisNames = ("batch", "row")
ROW_AXES: AxisNames = ("batch", "row", "width")
HEAD_AXES: AxisNames = ("batch", "head", "row", "width")
OF_TEXTS: AxisNames = ("batch",)
"""The axes of an output that is of a whole text, whatever else it has."""
MAP_AXES: AxisNames = ("batch", "width", "row", "column")
PATTERN_AXES: AxisNames = ("batch", "head", "query", "key")
TEXT_AXES: AxisNames = ("token", "head", "width")
"""The axes where texts stand one behind another, the first of them a single token."""


class CallSizes(NamedTuple):
    """The sizes of a call, the position of its first token, and whether it is one of training.
    `n_heads` is 0 for inputs `[batch, length, width]`; for a function of q, k and v inputs are
    `[batch, head, length, width]`.
    """

    batch: int
    q_len: int
    k_len: int
    d_in: int = 1
    d_context: int = 1
    n_heads: int = 0
    start: int = 0
    training: bool = False


@dataclass(frozen=True)
class MadeForSizes:
    """An argument that is made for the sizes of each call. `hides_nothing`: it is a mask that lets
    every query see every key. `text` is code that makes it for a length T, if it is known.
    """

    make: Callable[[CallSizes], Any]
    hides_nothing: bool = False
    text: str = ""


def at_sizes(value: Any, sizes: CallSizes) -> Any:
    """The value of an argument in a call of these sizes."""
    return value.make(sizes) if isinstance(value, MadeForSizes) else value


def for_each_text(tensor: Tensor, n_texts: int, sizes: CallSizes) -> Tensor:
    """An argument of a call of these sizes, of which the first part serves for each text if it has
    one for each of `n_texts`.
    """
    has_parts = tensor.ndim > 0 and len(tensor) == n_texts and tensor.shape[1:2] != tensor.shape[:1]
    return tensor[:1].expand(sizes.batch, *tensor.shape[1:]) if has_parts else tensor


# ------------------------------------------------------------------------ the output in a result


def leaves(result: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in tuples, lists and dicts, or in the fields of an object, in order, with its
    path as in Python, such as `[0]`, `["z"]` or `.z`; only those with rows of numbers, unlike
    torch's nested and sparse tensors and those without data.
    """
    parts = {"": result}
    if hasattr(result, "__dict__") and not isinstance(result, Tensor | tuple | list | Mapping):
        parts = {f".{name}": part for name, part in vars(result).items()}
    for start, part in parts.items():
        for path, leaf in tree_leaves_with_path(part):
            is_plain = isinstance(leaf, Tensor) and not (leaf.is_nested or leaf.is_meta)
            if is_plain and leaf.layout == torch.strided:
                yield start + keystr(path), leaf


def output_in(
    result: Any, orders: Sequence[AxisNames], sizes: CallSizes
) -> tuple[str, AxisNames] | None:
    """The path and the axes of the output: the first tensor of floats with one of the orders of
    axes. Tensors not as wide as a pattern are preferred, then earlier orders.
    """
    found = [
        (tensor.shape[-1] == sizes.k_len, path, axes)
        for axes, (path, tensor) in product(orders, leaves(result))
        if tensor.is_floating_point() and fits(tensor.shape, axes, sizes)
    ]
    best = min(found, key=lambda each: each[0], default=None)
    return None if best is None else best[1:]


def fits(shape: Sequence[int], axes: AxisNames, sizes: CallSizes) -> bool:
    """Whether a tensor of this shape may have these axes. A width may have any size but 0."""
    height, width = _grid(sizes.q_len) if "column" in axes else (sizes.q_len, 1)
    expected = {"batch": sizes.batch, "head": sizes.n_heads, "row": height, "column": width}
    expected["token"] = 1 + sizes.batch * sizes.q_len
    if len(shape) != len(axes) or 0 in shape:
        return False
    return all(expected.get(axis, size) == size for size, axis in zip(shape, axes, strict=True))


def _grid(length: int) -> tuple[int, int]:
    """The height and the width of a map of so many cells, as square as possible."""
    height = next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)
    return height, length // height


def rearranged(tensor: Tensor, have: AxisNames, want: AxisNames) -> Tensor:
    """The tensor with its axes in another order. Extra axes are squeezed, missing ones are added
    with size 1; the rows lie on a map where a `column` is required. Raises `Unreadable` for a
    tensor of other axes, and for an extra axis of another size.
    """
    if tensor.ndim != len(have):
        raise Unreadable(f"{list(tensor.shape)} has not the axes {', '.join(have)}")
    if "column" in want and "column" not in have:
        dim = have.index("row")
        tensor = tensor.unflatten(dim, _grid(tensor.shape[dim]))
        have = (*have[: dim + 1], "column", *have[dim + 1 :])
    if "column" in have and "column" not in want:
        dim = have.index("row")
        tensor = tensor.flatten(dim, dim + 1)
        have = (*have[: dim + 1], *have[dim + 2 :])
    if any(tensor.shape[dim] != 1 for dim, axis in enumerate(have) if axis not in want):
        raise Unreadable(f"{', '.join(have)} cannot be {', '.join(want)}, got {list(tensor.shape)}")
    missing = [axis for axis in want if axis not in have]
    extra = [axis for axis in have if axis not in want]
    tensor = tensor[(..., *[None] * len(missing))]
    have = (*have, *missing)
    return tensor.permute([have.index(axis) for axis in (*want, *extra)]).flatten(len(want) - 1)


def strided(tensor: Tensor) -> Tensor:
    """The tensor as a view of a larger one, and so is its gradient: rows lie beside others, and
    heads in the row of their token, as a projection of several parts gives them.
    """
    rows = tensor.transpose(1, 2) if tensor.ndim > 3 else tensor
    view = torch.cat([rows, torch.zeros_like(rows)], dim=-1)[..., : tensor.shape[-1]]
    return view.transpose(1, 2) if tensor.ndim > 3 else view


def laid_out(parts: Sequence[Tensor], have: AxisNames, want: AxisNames) -> Tensor:
    """The inputs of one argument with its axes: several of one shape along `part`, and texts along
    `token`, behind the first token alone.
    """
    want = axes_for(parts, want)
    tensor = torch.stack([*parts], -1)
    have = (*have, "part")
    if "token" not in want:
        return rearranged(tensor, have, want)
    dim = want.index("token")
    axes = (*want[:dim], "batch", "row", *want[dim + 1 :])
    texts = rearranged(tensor, have, axes).flatten(dim, dim + 1)
    return torch.cat([texts.narrow(dim, 0, 1).detach(), texts], dim)


def axes_for(parts: Sequence[object], axes: AxisNames) -> AxisNames:
    """The axes of an argument in a packed call that takes these parts."""
    return axes if len(parts) > 1 else without(axes, "part")


def without(axes: AxisNames, name: str) -> AxisNames:
    """The axes but one."""
    return tuple(axis for axis in axes if axis != name)


def axis_words(axes: AxisNames) -> str:
    """The axes as a reader names them."""
    words = {"row": "seq", "width": "d", "token": "total"}
    if "column" in axes:
        words = {"width": "d", "row": "height", "column": "width"}
    return ", ".join(words.get(axis, axis) for axis in axes)
