"""Removes the same heads and edges by other methods: in the input of the output projection, or by a mask that the model reads.

Neither uses the capture with which the effects are computed, so an error there shows as a difference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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


@contextmanager
def removed_otherwise(model: nn.Module, removals: Sequence[Removal], parts: Parts) -> Iterator[bool]:
    """A context in which the model runs with the removals; yields False if one of them has no second method."""
    with ExitStack() as stack:
        contexts = [_other_way(model, removal, parts) for removal in removals]
        for context in contexts:
            if context is not None:
                stack.enter_context(context)
        yield None not in contexts


def _other_way(model: nn.Module, removal: Removal, parts: Parts) -> AbstractContextManager[None] | None:
    projection, z = parts.projections.get(removal.layer), parts.z.get(removal.layer)
    if z is None:
        return None
    if removal.keys is None and projection is not None:
        if not isinstance(projection, nn.modules.linear.NonDynamicallyQuantizableLinear):
            return _edited_input(projection, removal, z, _turn_of(removal.layer, parts.projections))
        is_whole = removal.at is None and removal.replace == "zero"
        return _edited_weights(projection, removal, z.shape[3]) if is_whole else None
    module = model.get_submodule(parts.names[removal.layer])
    name = next((name for name in _MASKS if name in inspect.signature(module.forward).parameters), None)
    hides_all = removal.keys is None and name == "allowed" and removal.replace == "zero"
    if name is None or not (hides_all or removal.keys is not None):
        return None
    return _masked(module, name, removal, parts)


def _turn_of(layer: LayerKey, modules: Mapping[LayerKey, Any]) -> Callable[[], bool]:
    """A function, called once per run of a layer's module, that tells whether the run is for this layer. Layers may share a
    module, which then runs once for each."""
    sharing = [key for key, module in modules.items() if module == modules[layer]]
    runs = count()
    return lambda: len(sharing) == 1 or next(runs) == sharing.index(layer)


@contextmanager
def _edited_input(projection: nn.Module, removal: Removal, z: Tensor, is_turn: Callable[[], bool]) -> Iterator[None]:
    """A context in which the heads' part of the projection's input is replaced, at one position or at all."""
    width, places = z.shape[3], slice(None) if removal.at is None else removal.at

    def edit(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not is_turn():
            return None
        x = args[0].clone()
        for head in removal.heads:
            x[..., places, head * width : (head + 1) * width] = stand_in(z[0, head], removal.replace)[0]
        return (x, *args[1:])

    handle = projection.register_forward_pre_hook(edit)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _edited_weights(projection: nn.Linear, removal: Removal, width: int) -> Iterator[None]:
    """A context in which the columns of the heads are zeros in a projection that torch reads without running it."""
    saved = projection.weight.detach().clone()
    with torch.no_grad():
        for head in removal.heads:
            projection.weight[:, head * width : (head + 1) * width] = 0
    try:
        yield
    finally:
        with torch.no_grad():
            projection.weight.copy_(saved)


@contextmanager
def _masked(module: nn.Module, name: str, removal: Removal, parts: Parts) -> Iterator[None]:
    """A context in which the mask of an attention module forbids the edges, or all keys of a removed head."""
    z, signature, is_turn = (
        parts.z[removal.layer],
        inspect.signature(module.forward),
        _turn_of(removal.layer, parts.names),
    )
    n_heads, (n_queries, n_keys) = z.shape[1], parts.visible[removal.layer].shape
    queries = removal.queries or (range(n_queries) if removal.at is None else (removal.at,))
    keys = range(n_keys) if removal.keys is None else removal.keys
    is_cut = torch.zeros(1, n_heads, n_queries, n_keys, dtype=torch.bool, device=z.device)
    is_cut[0, torch.tensor(removal.heads)[:, None, None], torch.tensor([*queries])[:, None], torch.tensor([*keys])] = (
        True
    )

    def forbid(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not is_turn():
            return None
        given = signature.bind(*args, **kwargs)
        mask = given.arguments.get(name)
        if name == "allowed":
            left = masks.from_tensor(~is_cut)
            given.arguments[name] = left if mask is None else masks.both(mask, left)
            return given.args, given.kwargs
        if name == "attn_mask":
            given.arguments[name] = (
                is_cut[0] if mask is None else mask.masked_fill(is_cut[0], mask.dtype == torch.bool or -torch.inf)
            )
            return given.args, given.kwargs
        if mask is None:
            hidden = ~parts.visible[removal.layer]
            mask = torch.zeros_like(hidden, dtype=z.dtype).masked_fill(hidden, torch.finfo(z.dtype).min)[None, None]
        mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)).expand(1, n_heads, -1, -1)
        given.arguments[name] = mask.masked_fill(is_cut, _forbidding(mask, removal))
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
