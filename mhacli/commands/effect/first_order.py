"""First-order estimates of removals, from the gradient of the metric at each z in one backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mhacli.commands.effect.metric import Target, compared, read_position
from mhacli.commands.effect.parts import AttentionParts
from mhacli.commands.effect.removal import Removal, stand_in
from mhacli.models.layer_names import LayerKey


def z_gradients(
    model: nn.Module, attention: AttentionParts, keywords: Mapping[str, Tensor], position: int, target: Target
) -> dict[LayerKey, Float[Tensor, "head query d_v"]]:
    """The gradient of the metric at `position` by z, for attentions whose output projection is known.

    Source: Nanda 2023, Attribution Patching.
    """
    added = dict[LayerKey, Tensor]()
    waiting = dict[int, list[LayerKey]]()  # layers may share a projection, which then runs once for each

    def add(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not waiting[id(module)]:
            return None
        key = waiting[id(module)].pop(0)
        added[key] = torch.zeros_like(args[0], requires_grad=True)
        return (args[0] + added[key], *args[1:])

    with ExitStack() as stack:
        for key, projection in attention.projections.items():
            if id(projection) not in waiting:
                stack.callback(projection.register_forward_pre_hook(add).remove)
            waiting.setdefault(id(projection), []).append(key)
        stack.enter_context(torch.enable_grad())
        reading = read_position(model, keywords, position)
        assert reading.logits is not None
        metric = compared(reading.logits, target)[0]
        gradients = torch.autograd.grad(metric, list(added.values()), allow_unused=True)
    return {
        key: _by_head(gradient, attention.z[key])
        for key, gradient in zip(added, gradients, strict=True)
        if gradient is not None
    }


def _by_head(gradient: Tensor, z: Float[Tensor, "batch head query d_v"]) -> Float[Tensor, "head query d_v"]:
    """The gradient of the projection's input, with the axes of z."""
    return gradient.reshape(z.shape[2], z.shape[1], z.shape[3]).transpose(0, 1).double()


def first_order(
    removals: Sequence[Removal], gradients: Mapping[LayerKey, Tensor], z: Mapping[LayerKey, Tensor]
) -> float | None:
    """The estimated change of the metric by removing heads with the outputs `z`, None if the gradient is not known."""
    total = 0.0
    for removal in removals:
        if removal.layer not in gradients:
            return None
        places = slice(None) if removal.at is None else slice(removal.at, removal.at + 1)
        for head in removal.heads:
            change = (stand_in(removal, z, head).double() - z[removal.layer][0, head].double())[places]
            total += float((change * gradients[removal.layer][head, places]).sum())
    return total
