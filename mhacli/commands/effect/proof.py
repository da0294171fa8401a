"""Removes the same heads and edges by other methods: edited weights, or a mask that the model itself reads.

Neither uses the capture with which the effects are computed, so an error there shows as a difference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mhacli.commands.effect.parts import AttentionParts
from mhacli.commands.effect.removal import Removal
from mhacli.models.device_map import fetched
from mhacli.models.layer_names import LayerKey


@contextmanager
def removed_otherwise(model: nn.Module, removals: Sequence[Removal], parts: AttentionParts) -> Iterator[bool]:
    """A context in which the model runs with the removals; yields False if one of them has no second method."""
    with ExitStack() as stack:
        contexts = [_other_way(model, removal, parts) for removal in removals]
        for context in contexts:
            if context is not None:
                stack.enter_context(context)
        yield None not in contexts


def _other_way(model: nn.Module, removal: Removal, parts: AttentionParts) -> AbstractContextManager[None] | None:
    if removal.keys is not None:
        module = model.get_submodule(parts.names[removal.layer])
        accepted = inspect.signature(module.forward).parameters
        name = next((name for name in _MASKS if name in accepted), None)
        is_turn = _turn_of(removal.layer, parts.names)
        return None if name is None else _masked(module, name, removal, parts, is_turn)
    projection, z = parts.projections.get(removal.layer), parts.z.get(removal.layer)
    if projection is None or z is None:
        return None
    is_fetched = (
        isinstance(projection.weight, Tensor) and projection.weight.is_meta
    )  # the weights are fetched for each run, so edits are lost
    is_shared = list(parts.projections.values()).count(projection) > 1
    if removal.at is None and not is_fetched and not is_shared:
        return _edited(projection, removal, z)
    return _edited_input(projection, removal, z, _turn_of(removal.layer, parts.projections))


def _turn_of(layer: LayerKey, modules: Mapping[LayerKey, Any]) -> Callable[[], bool]:
    """A function, called once per run of a layer's module, that tells whether the run is for this layer. Layers may share a
    module, which then runs once for each."""
    sharing = [key for key, module in modules.items() if module == modules[layer]]
    runs = count()
    return lambda: len(sharing) == 1 or next(runs) == sharing.index(layer)


def _by_input(projection: nn.Module) -> Float[Tensor, "d_in d_out"]:
    """The weights of a projection, with a row per input."""
    weight: Tensor = fetched(projection)
    return weight if type(projection).__name__ == "Conv1D" else weight.T


@contextmanager
def _edited(projection: nn.Module, removal: Removal, z: Tensor) -> Iterator[None]:
    """A context in which the columns of the heads are zeros and the output of their replacement is added."""
    weight, width = projection.weight, z.shape[3]
    assert isinstance(weight, Tensor)
    saved = weight.detach().clone()
    added = z.new_zeros(_by_input(projection).shape[1])
    with torch.no_grad():
        for head in removal.heads:
            rows = _by_input(projection)[head * width : (head + 1) * width]
            if removal.replace == "mean":
                added += z[0, head].mean(dim=0) @ rows
            rows.zero_()
    handle = projection.register_forward_hook(lambda module, args, output: output + added)
    try:
        yield
    finally:
        handle.remove()
        with torch.no_grad():
            weight.copy_(saved)


@contextmanager
def _edited_input(projection: nn.Module, removal: Removal, z: Tensor, is_turn: Callable[[], bool]) -> Iterator[None]:
    """A context in which the heads' part of the projection's input is replaced, at one position or at all."""
    width, places = z.shape[3], slice(None) if removal.at is None else removal.at

    def edit(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not is_turn():
            return None
        x = args[0].clone()
        for head in removal.heads:
            value = z[0, head].mean(dim=0) if removal.replace == "mean" else 0.0
            x[..., places, head * width : (head + 1) * width] = value
        return (x, *args[1:])

    handle = projection.register_forward_pre_hook(edit)
    try:
        yield
    finally:
        handle.remove()


_MASKS = ("attention_mask", "mask")
"""The names of the mask parameter in attention modules."""


@contextmanager
def _masked(
    module: nn.Module, name: str, removal: Removal, parts: AttentionParts, is_turn: Callable[[], bool]
) -> Iterator[None]:
    """A context in which the mask of an attention module forbids the edges."""
    z, signature = parts.z[removal.layer], inspect.signature(module.forward)

    def forbid(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not is_turn():
            return None
        given = signature.bind(*args, **kwargs)
        mask = given.arguments.get(name)
        if mask is None:
            hidden = ~parts.visible[removal.layer]
            mask = torch.zeros_like(hidden, dtype=z.dtype).masked_fill(hidden, torch.finfo(z.dtype).min)[None, None]
        mask = mask.expand(1, z.shape[1], *mask.shape[2:]).clone()
        heads, queries, keys = (torch.tensor(places) for places in (removal.heads, removal.queries, removal.keys))
        mask[0, heads[:, None, None], queries[:, None], keys] = _forbidding(mask, removal)
        given.arguments[name] = mask
        return given.args, given.kwargs

    handle = module.register_forward_pre_hook(forbid, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _forbidding(mask: Tensor, removal: Removal) -> float | bool:
    """The value of a mask that forbids a cell. Most masks are added to scores; others are 1 for visible keys, or 1 for hidden
    ones. Which one is seen on the diagonal, where keys are visible; with keys of another text, 1 is assumed to mean visible."""
    if bool(((mask != 0) & (mask != 1)).any()):
        return torch.finfo(mask.dtype).min
    is_shown = removal.layer[0] == "cross" or bool(mask[0, 0, -1, -1])
    if mask.dtype == torch.bool:
        return not is_shown
    return 0.0 if is_shown and bool(mask.any()) else torch.finfo(mask.dtype).min
