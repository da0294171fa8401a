"""The output of attention in what a call returns, found by its shape, and the order of its axes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

AxisNames = tuple[str, ...]
Path = tuple[int | str | tuple[str], ...]
"""Steps into a result: the index in a tuple or list, the key of a dict, or `(name,)` for an attribute."""

OF_IDS: AxisNames = ("batch", "row")
ROW_AXES: AxisNames = ("batch", "row", "width")
HEAD_AXES: AxisNames = ("batch", "head", "row", "width")
PATTERN_AXES: AxisNames = ("batch", "head", "query", "key")
_OF_TOKENS: tuple[AxisNames, ...] = (ROW_AXES, OF_IDS, ("batch", "row", "part", "width"))
_OUTPUT_NAMES = re.compile(
    r"(attn|attention|self_attn|attention_)?_?"
    r"(out|outputs?|result|context(_layer|_vec\w*)?|hidden_states?|last_hidden_state|logits|z|y|x)"
)
_DEEPEST = 3


class CallSizes(NamedTuple):
    """The sizes of one call, the position of its first token, and whether it is one of training."""

    batch: int
    n_heads: int
    q_len: int
    k_len: int
    start: int = 0
    training: bool = False


def leaves(result: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in nested tuples, lists, dicts and dataclasses, in order, with its path."""
    if isinstance(result, Tensor):
        yield path, result
        return
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(result, Mapping):
        parts = [(name, part) for name, part in result.items() if isinstance(name, str)]
    elif isinstance(result, tuple | list) and not hasattr(result, "_fields"):
        parts = enumerate(result)
    else:
        named = result._asdict() if hasattr(result, "_fields") else getattr(result, "__dict__", {})
        parts = [((name,), part) for name, part in named.items() if not name.startswith("_")]
    for step, part in parts if len(path) < _DEEPEST else ():
        yield from leaves(part, (*path, step))


def path_text(path: Path) -> str:
    """A path in Python syntax: `[0]`, `["out"]`, `.context`."""
    return "".join(f".{key[0]}" if isinstance(key, tuple) else f"[{key!r}]".replace("'", '"') for key in path)


def output_in(result: Any, orders: Sequence[AxisNames], sizes: CallSizes) -> tuple[Path, AxisNames] | None:
    """The path and the axes of the output: a tensor of floats with one of the orders of axes. Names of outputs are preferred,
    then tensors not as wide as a pattern, then earlier orders."""
    found = []
    for path, tensor in leaves(result):
        names = [key[0] if isinstance(key, tuple) else key for key in path if not isinstance(key, int)]
        is_unnamed = bool(names) and _OUTPUT_NAMES.fullmatch(names[-1].lower()) is None
        for number, axes in enumerate(orders):
            if tensor.is_floating_point() and _fits(tensor.shape, axes, sizes):
                rank = (is_unnamed, tensor.shape[-1] == sizes.k_len, number)
                found.append((rank, path, axes))
    best = min(found, key=lambda each: each[0], default=None)
    return best and best[1:]


def outputs_in(result: Any, shape: Sequence[int]) -> Tensor | None:
    """The output `[batch, token, …]` for each token of a batch."""
    found = output_in(result, _OF_TOKENS, CallSizes(shape[0], 1, shape[1], 0))
    return None if found is None else dict(leaves(result))[found[0]]


def _fits(shape: Sequence[int], axes: AxisNames, sizes: CallSizes) -> bool:
    """Whether a tensor of this shape may have these axes. A width may have any size but 0."""
    height, width = _grid(sizes.q_len) if "column" in axes else (sizes.q_len, 1)
    expected = {"batch": sizes.batch, "head": sizes.n_heads, "row": height, "column": width}
    if len(shape) != len(axes) or 0 in shape:
        return False
    return all(expected.get(axis, size) == size for size, axis in zip(shape, axes, strict=True))


def _grid(length: int) -> tuple[int, int]:
    """The height and the width of a map of so many cells, as square as possible."""
    height = next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)
    return height, length // height


def rearranged(tensor: Tensor, have: AxisNames, want: AxisNames) -> Tensor:
    """The tensor with its axes in another order. Extra axes are squeezed, missing ones are added with size 1; the rows lie on a
    map where a `column` is required. Raises ValueError for an extra axis of another size."""
    if "column" in want and "column" not in have:
        dim = have.index("row")
        tensor = tensor.unflatten(dim, _grid(tensor.shape[dim]))
        have = (*have[: dim + 1], "column", *have[dim + 1 :])
    if "column" in have and "column" not in want:
        dim = have.index("row")
        tensor = tensor.flatten(dim, dim + 1)
        have = (*have[: dim + 1], *have[dim + 2 :])
    if any(tensor.shape[dim] != 1 for dim, axis in enumerate(have) if axis not in want):
        raise ValueError(f"{', '.join(have)} cannot be {', '.join(want)}, got {list(tensor.shape)}")
    kept = [axis for axis in have if axis in want]
    tensor = tensor.reshape([size for size, axis in zip(tensor.shape, have, strict=True) if axis in want])
    tensor = tensor[(..., *[None] * (len(want) - len(kept)))]
    names = [*kept, *(axis for axis in want if axis not in kept)]
    return tensor.permute([names.index(axis) for axis in want])
