"""Removes the same heads and edges in other ways: by edited weights, and by a mask that the model itself reads.

Neither goes through the capture that the effects are computed with, so an error there shows as a difference.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from mhacli.adapters.hf.capture import Call, ScoredCall, captured
from mhacli.adapters.hf.inputs import outputs_of
from mhacli.adapters.hf.layer_names import LayerKey
from mhacli.compute.effect.removal import Removal


@dataclass
class AttentionParts:
    """What `find_parts` learns in one pass of each attention: its module's name, its output projection, the outputs z of its
    heads, and the cells that a query sees where no mask says so."""

    names: dict[LayerKey, str] = field(default_factory=dict)
    projections: dict[LayerKey, nn.Module] = field(default_factory=dict)
    z: dict[LayerKey, Tensor] = field(default_factory=dict)
    visible: dict[LayerKey, Bool[Tensor, "query key"]] = field(default_factory=dict)


def find_parts(model: nn.Module, keywords: Mapping[str, Tensor]) -> AttentionParts:
    """The parts of every attention. An output projection is the matrix whose input has the bits of z."""
    parts, last = AttentionParts(), dict[LayerKey, Tensor]()

    def take(call: Call) -> None:
        if call.part == 0 and call.z is not None:
            key = (call.kind, call.layer)
            parts.names[key] = call.name
            parts.z[key] = call.z.clone()
            every = torch.ones(call.shape[2:], dtype=torch.bool, device=call.z.device)
            parts.visible[key] = every.tril() if isinstance(call, ScoredCall) and call.causal else every
            last.clear()
            last[key] = call.z.transpose(1, 2).flatten(2).clone()

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        for key, z in last.items():
            x = args[0] if args else None
            if isinstance(x, Tensor) and x.numel() == z.numel() and torch.equal(x.reshape(z.shape), z):
                parts.projections.setdefault(key, module)

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(getattr(module, "weight", None), Tensor) and module.weight.ndim == 2:
                stack.callback(module.register_forward_pre_hook(look).remove)
        stack.enter_context(captured(model, take, batch=1))
        outputs_of(model, keywords)
    return parts


@contextmanager
def removed_otherwise(model: nn.Module, removals: Sequence[Removal], parts: AttentionParts) -> Iterator[bool]:
    """Within it the model computes without what the removals name. False where there is no second way to remove one."""
    with ExitStack() as stack:
        ways = [_other_way(model, removal, parts) for removal in removals]
        for way in ways:
            if way is not None:
                stack.enter_context(way)
        yield None not in ways


def _other_way(model: nn.Module, removal: Removal, parts: AttentionParts) -> AbstractContextManager[None] | None:
    if removal.keys is not None:
        module = model.get_submodule(parts.names[removal.layer])
        is_given = "attention_mask" in inspect.signature(module.forward).parameters
        return _masked(module, removal, parts) if is_given else None
    projection, z = parts.projections.get(removal.layer), parts.z.get(removal.layer)
    if projection is None or z is None:
        return None
    return (_edited if removal.at is None else _edited_input)(projection, removal, z)


@contextmanager
def _edited(projection: nn.Module, removal: Removal, z: Tensor) -> Iterator[None]:
    """The columns of the heads are zeros, and their mean goes through the bias."""
    weight, width = projection.weight, z.shape[3]
    assert isinstance(weight, Tensor)
    by_input = weight if type(projection).__name__ == "Conv1D" else weight.T  # rows are inputs
    saved = weight.detach().clone()
    added = torch.zeros_like(by_input[0])
    with torch.no_grad():
        for head in removal.heads:
            rows = by_input[head * width : (head + 1) * width]
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
def _edited_input(projection: nn.Module, removal: Removal, z: Tensor) -> Iterator[None]:
    """The part of the projection's input that comes from the heads is replaced at one position."""
    width = z.shape[3]

    def edit(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0].clone()
        for head in removal.heads:
            value = z[0, head].mean(dim=0) if removal.replace == "mean" else 0.0
            x[..., removal.at, head * width : (head + 1) * width] = value
        return (x, *args[1:])

    handle = projection.register_forward_pre_hook(edit)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _masked(module: nn.Module, removal: Removal, parts: AttentionParts) -> Iterator[None]:
    """The mask that an attention module is given forbids the edges."""
    z = parts.z[removal.layer]

    def forbid(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = kwargs.get("attention_mask")
        if mask is None:
            hidden = ~parts.visible[removal.layer]
            mask = torch.zeros_like(hidden, dtype=z.dtype).masked_fill(hidden, torch.finfo(z.dtype).min)[None, None]
        mask = mask.expand(1, z.shape[1], *mask.shape[2:]).clone()
        heads, queries, keys = (torch.tensor(places) for places in (removal.heads, removal.queries, removal.keys))
        lowest = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        mask[0, heads[:, None, None], queries[:, None], keys] = lowest
        return args, kwargs | {"attention_mask": mask}

    handle = module.register_forward_pre_hook(forbid, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
