"""What somebody's attention returns: which tensor of it is the output, which the pattern, and both in our order of axes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor

Axes = tuple[str, ...]
Key = int | str | tuple[str]
"""A step into a result: a place in a tuple or list, a key of a dict, or `(name,)`, an attribute."""
Path = tuple[Key, ...]

ROW_AXES: Axes = ("batch", "row", "width")
HEAD_AXES: Axes = ("batch", "head", "row", "width")
PATTERN_AXES: Axes = ("batch", "head", "query", "key")
MERGED = "head·width"
"""An axis that holds the heads side by side."""
_OUTPUT_NAMES = re.compile(
    r"(attn|attention|self_attn|attention_)?_?(out|outputs?|result|context(_layer|_vec\w*)?|hidden_states?|last_hidden_state|z|y|x)"
)
_PATTERN_NAMES = re.compile(
    r".*(weights?|attn|attention|attentions|pattern|probs|probabilities|probas|scores|att|map|alpha|a|p|w)s?"
)
_DEEPEST = 3
_EVEN = 1e-3
"""How far from one rows of a pattern may sum; of half precision."""


class Sides(NamedTuple):
    """How many of each axis there are in one call."""

    batch: int
    head: int
    q_len: int
    k_len: int

    def of(self, axis: str) -> int | None:
        """How many of an axis there are, None where any number is right."""
        known = {"batch": self.batch, "head": self.head, "row": self.q_len, "query": self.q_len, "key": self.k_len}
        return known.get(axis)


class Place(NamedTuple):
    """Where in a result a tensor is, and which axes it has."""

    path: Path
    axes: Axes


def leaves(result: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor of a result of tuples, lists, dicts and dataclasses, in order, with the path to it."""
    if isinstance(result, Tensor):
        yield path, result
    elif len(path) < _DEEPEST:
        for key, part in _parts(result):
            yield from leaves(part, (*path, key))


def _parts(result: Any) -> Iterator[tuple[Key, Any]]:
    if isinstance(result, Mapping):
        yield from ((key, part) for key, part in result.items() if isinstance(key, str))
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        yield from (((name,), getattr(result, name)) for name in result._fields)
    elif isinstance(result, list | tuple):
        yield from enumerate(result)
    elif is_dataclass(result):
        yield from (((field.name,), getattr(result, field.name)) for field in fields(result))
    elif type(result).__module__ != "builtins" and hasattr(result, "__dict__"):
        yield from (((name,), part) for name, part in vars(result).items() if not name.startswith("_"))


def parts_of(result: Any) -> list[tuple[Path, Any]]:
    """What a result is made of at its top, with the path to each; nothing of a tensor."""
    return [] if isinstance(result, Tensor) else [((key,), part) for key, part in _parts(result)]


def part_at(result: Any, path: Path) -> Any:
    """What stands at a path. Raises ValueError where nothing does."""
    for step in path:
        found = dict(_parts(result))
        if step not in found:
            raise ValueError(f"the result must hold something at {told(path)}")
        result = found[step]
    return result


def at(result: Any, path: Path) -> Tensor | None:
    """The tensor at a path, None where there is none."""
    return next((tensor for found, tensor in leaves(result) if found == path), None)


def told(path: Path) -> str:
    """A path as Python writes it: `[0]`, `["out"]`, `.context`."""
    return "".join(f".{key[0]}" if isinstance(key, tuple) else f"[{key!r}]".replace("'", '"') for key in path)


def fits(shape: Sequence[int], axes: Axes, sides: Sides) -> bool:
    """Whether a tensor of that shape may have those axes; a width may be anything but nothing."""
    if len(shape) != len(axes) or 0 in shape:
        return False
    for size, axis in zip(shape, axes, strict=True):
        if axis == MERGED and size % sides.head:
            return False
        if axis == "batch·head" and (size % sides.batch or size == sides.batch):
            return False
        wanted = 1 if axis == "1" else sides.of(axis)
        if wanted is not None and size != wanted:
            return False
    return True


def output_in(result: Any, wanted: Sequence[Axes], sides: Sides) -> Place | None:
    """The output: of the floating tensors whose shape fits any of the wanted axes one that is named like an output, or else that
    is not as wide as there are keys, as a pattern is, or else the first; of axes that fit the first."""
    found = [
        (_strangeness(path, tensor, sides.k_len), number, Place(path, axes))
        for path, tensor in leaves(result)
        for number, axes in enumerate(wanted)
        if tensor.is_floating_point() and fits(tensor.shape, axes, sides)
    ]
    return min(found, key=lambda one: one[:2])[2] if found else None


def _strangeness(path: Path, tensor: Tensor, k_len: int) -> tuple[bool, bool]:
    name = _last_name(path)
    named = name is None or _OUTPUT_NAMES.fullmatch(name) is not None
    return not named, tensor.shape[-1] == k_len


def _last_name(path: Path) -> str | None:
    names = [key[0] if isinstance(key, tuple) else key for key in path if not isinstance(key, int)]
    return str(names[-1]).lower() if names else None


def pattern_in(result: Any, output: Path, sides: Sides, *, batched: bool) -> Place | None:
    """The pattern: of the other tensors whose last axes are query × key, the one whose rows sum to one, or else the one that is
    named so, or else the first."""
    wanted: list[Axes] = [PATTERN_AXES, ("batch", "query", "key"), ("batch·head", "query", "key")] if batched else []
    wanted += [("query", "key")] if sides.batch == 1 or not batched else []
    wanted += (
        [("query", "key", "batch", "head")] if batched else [("1", "head", "query", "key"), ("head", "query", "key")]
    )
    any_heads = sides._replace(head=-1)
    found: list[tuple[tuple[bool, bool, int], Place]] = []
    for path, tensor in leaves(result):
        for axes in wanted if path != output and tensor.is_floating_point() else ():
            if _fits_pattern(tensor.shape, axes, any_heads):
                sums = bool((tensor.double().sum(axes.index("key")) - 1).abs().max() < _EVEN)
                name = _last_name(path)
                named = name is not None and _PATTERN_NAMES.fullmatch(name) is not None
                found.append(((not sums, not named, wanted.index(axes)), Place(path, axes)))
                break
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _fits_pattern(shape: Sequence[int], axes: Axes, sides: Sides) -> bool:
    loose = tuple("any" if axis == "head" else axis for axis in axes)
    return fits(shape, loose, sides)


def arranged(tensor: Tensor, have: Axes, want: Axes) -> Tensor:
    """A tensor with its axes in another order: an axis that is not wanted must be of one and goes, one that is missing is made
    of one. Raises ValueError where an axis that goes holds more."""
    for axis in [axis for axis in have if axis not in want]:
        place = have.index(axis)
        if tensor.shape[place] != 1:
            raise ValueError(f"{axis} must be 1 for a call without that axis, got {tensor.shape[place]}")
        tensor, have = tensor.squeeze(place), have[:place] + have[place + 1 :]
    for axis in [axis for axis in want if axis not in have]:
        tensor, have = tensor.unsqueeze(0), (axis, *have)
    return tensor.permute([have.index(axis) for axis in want])


def output_of(tensor: Tensor, axes: Axes, canonical: Axes, n_heads: int) -> Tensor:
    """An output of somebody's axes in ours."""
    if MERGED in axes:
        place = axes.index(MERGED)
        tensor = tensor.unflatten(place, (n_heads, -1))
        axes = (*axes[:place], "head", "width", *axes[place + 1 :])
    return arranged(tensor, axes, canonical)


def pattern_of(tensor: Tensor, axes: Axes, batch: int) -> Tensor:
    """A pattern of somebody's axes as `[batch, head, query, key]`."""
    if axes[0] == "batch·head":
        return tensor.reshape(batch, -1, *tensor.shape[1:])
    if axes[0] == "1":
        return arranged(tensor, ("batch", *axes[1:]), PATTERN_AXES)
    return arranged(tensor, axes, PATTERN_AXES)
