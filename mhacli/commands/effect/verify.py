"""Removes the same heads and edges by other methods: in the input of the output projection, or by a mask that the model reads.

Neither uses the capture with which the effects are computed, so an error there shows as a difference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from mhacli.attention import masks
from mhacli.commands.effect.parts import Parts
from mhacli.commands.effect.removal import Removal, stand_in
from mhacli.models.layer_names import LayerKey

_MASKS = ("attention_mask", "mask", "allowed", "attn_mask")
"""The names of the mask parameter in attention modules. `allowed` is that of a layer of mha, a predicate; `attn_mask` is that of
torch's own attention, which is True for hidden cells."""
Edit = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, dict[str, Any]]]
"""Changes the arguments of a module."""


@contextmanager
def removed_otherwise(model: nn.Module, removals: Sequence[Removal], parts: Parts) -> Iterator[bool]:
    """A context in which the model runs with the removals; yields False if one of them has no second method."""
    with ExitStack() as stack:
        yield all([_is_removed(model, removal, parts, stack) for removal in removals])


def _is_removed(model: nn.Module, removal: Removal, parts: Parts, stack: ExitStack) -> bool:
    """Removes something until the stack is closed. False if there is no method for it."""
    layer, projection = removal.layer, parts.projections.get(removal.layer)
    if layer not in parts.z:
        return False
    if removal.keys is None and isinstance(projection, nn.modules.linear.NonDynamicallyQuantizableLinear):
        is_whole = removal.replace == "zero" and not removal.queries
        if is_whole:  # torch reads its weights without running it
            weight = projection.weight.data
            stack.callback(weight.copy_, weight.clone())
            weight.unflatten(1, (parts.z[layer].shape[1], -1))[:, removal.heads] = 0
        return is_whole
    if removal.keys is None and projection is not None:
        _edit_inputs(stack, projection, _heads_replaced(removal, parts.z[layer]), layer, parts.projections)
        return True
    module = model.get_submodule(parts.names[layer])
    name = next((name for name in _MASKS if name in inspect.signature(module.forward).parameters), None)
    hides_all = name == "allowed" and removal.replace == "zero"
    if name is None or (removal.keys is None and not hides_all):
        return False
    _edit_inputs(stack, module, _cells_masked(module, name, removal, parts), layer, parts.names)
    return True


def _edit_inputs(
    stack: ExitStack, module: nn.Module, edit: Edit, layer: LayerKey, modules: Mapping[LayerKey, object]
) -> None:
    """Edits the arguments of a module until the stack is closed. Layers may share a module, which then runs once for each."""
    sharing = [key for key, own in modules.items() if own == modules[layer]]
    runs = count()

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        is_turn = len(sharing) == 1 or next(runs) == sharing.index(layer)
        return edit(args, kwargs) if is_turn else None

    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _heads_replaced(removal: Removal, z: Tensor) -> Edit:
    """An edit of the input of an output projection: the part of the heads is replaced, at some positions or at all."""

    def edit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        x = args[0].clone()
        by_head = x.unflatten(-1, (z.shape[1], z.shape[3]))
        for head in removal.heads:
            by_head[..., [*removal.queries] or slice(None), head, :] = stand_in(z[0, head], removal.replace)
        return (x, *args[1:]), kwargs

    return edit


def _cells_masked(module: nn.Module, name: str, removal: Removal, parts: Parts) -> Edit:
    """An edit of the mask of an attention module: it forbids the edges, or all keys of a removed head."""
    z, hidden, signature = parts.z[removal.layer], ~parts.visible[removal.layer], inspect.signature(module.forward)
    is_cut = torch.zeros(1, z.shape[1], *hidden.shape, dtype=torch.bool, device=z.device)
    queries = removal.queries or range(hidden.shape[0])
    keys = range(hidden.shape[1]) if removal.keys is None else removal.keys
    heads, rows, columns = (torch.tensor([*axis]) for axis in (removal.heads, queries, keys))
    is_cut[0, heads[:, None, None], rows[:, None], columns] = True

    def edit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = signature.bind(*args, **kwargs)
        mask = given.arguments.get(name)
        if name == "allowed":
            rest = masks.from_tensor(~is_cut)
            mask = rest if mask is None else masks.both(mask, rest)
        elif name == "attn_mask":
            fill = mask is None or mask.dtype == torch.bool or -torch.inf
            mask = is_cut[0] if mask is None else mask.masked_fill(is_cut[0], fill)
        else:
            if mask is None:
                mask = torch.zeros_like(hidden, dtype=z.dtype).masked_fill(hidden, torch.finfo(z.dtype).min)
            mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)).expand(1, z.shape[1], -1, -1)
            mask = mask.masked_fill(is_cut, _forbidding(mask, removal))
        given.arguments[name] = mask
        return given.args, given.kwargs

    return edit


def _forbidding(mask: Tensor, removal: Removal) -> float | bool:
    """The value of a mask that forbids a cell. Most masks are added to scores; others are 1 for visible keys, or 1 for hidden
    ones. Which one is seen on the diagonal, where keys are visible; with keys of another text, 1 is assumed to mean visible."""
    if bool(((mask != 0) & (mask != 1)).any()):
        return torch.finfo(mask.dtype).min
    is_shown = removal.layer[0] == "cross" or bool(mask[0, 0, -1, -1])
    if mask.dtype == torch.bool:
        return not is_shown
    return 0.0 if is_shown and bool(mask.any()) else torch.finfo(mask.dtype).min
