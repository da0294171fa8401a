"""Removes heads and edges in a second way, which checks the first: it changes the input of the
output projection or a mask that the model reads. It does not use the capture with which the effects
are computed, so an error there shows as a difference.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor, nn

from mhacli.attention import masks
from mhacli.attention.core import Allowed, four_axes
from mhacli.usercode.door import ours

from .parts import Attention, Parts
from .removal import Removal, stand_in


class Arguments(NamedTuple):
    """The arguments of a module, without and with names."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Edit = Callable[[Arguments], Arguments]


def removed_otherwise(
    removals: Sequence[Removal], parts: Parts
) -> list[AbstractContextManager[None]] | None:
    """The contexts in which, together, the model runs with the removals; None if one of them has no
    second method.
    """
    contexts: list[AbstractContextManager[None]] = []
    for removal in removals:
        context = _edges_masked(removal, parts) if removal.keys else _heads_replaced(removal, parts)
        if context is None:
            return None
        contexts.append(context)
    return contexts


@contextmanager
def _edited(module: nn.Module, attention: Attention, parts: Parts, edit: Edit) -> Iterator[None]:
    """A context in which the arguments of an attention's module are edited. Attentions may share
    it, and then it runs once for each.
    """
    sharing = [
        each for each in parts.attentions.values() if module in (each.module, each.projection)
    ]
    runs = count()

    @ours()
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if len(sharing) > 1 and next(runs) != sharing.index(attention):
            return None
        return edit(Arguments(args, kwargs))

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


# -------------------------------------------------------------------------------------- whole heads


def _heads_replaced(removal: Removal, parts: Parts) -> AbstractContextManager[None] | None:
    """A context in which heads are removed behind z: from the input of the output projection, or,
    where torch reads the weights of its projection without running it, from these weights.
    """
    attention = parts.attentions[removal.layer]
    z = attention.z[0]
    if attention.projection is not None:

        def edit(arguments: Arguments) -> Arguments:
            x = arguments.args[0].clone()
            by_head = x.unflatten(-1, (attention.n_heads, z.shape[3]))
            for head in removal.heads:
                value = stand_in(z[0, head], removal.replace)
                by_head[..., removal.places, head, :] = value
            return Arguments((x, *arguments.args[1:]), arguments.kwargs)

        return _edited(attention.projection, attention, parts, edit)
    module = attention.module
    is_zero_everywhere = removal.replace == "zero" and not removal.queries
    if isinstance(module, nn.MultiheadAttention) and is_zero_everywhere:
        return _zero_weights(module.out_proj.weight.data, removal.heads, attention.n_heads)
    return None


@contextmanager
def _zero_weights(weight: Tensor, heads: Sequence[int], n_heads: int) -> Iterator[None]:
    """A context in which the weights of an output projection that read some heads are zero."""
    before = weight.clone()
    weight.unflatten(1, (n_heads, -1))[:, heads] = 0
    try:
        yield
    finally:
        weight.copy_(before)


# -------------------------------------------------------------------------------------------- edges


class _Cut(NamedTuple):
    """The cells that a removal takes from an attention, and those that it masks anyway. `is_cross`:
    the keys are those of another text.
    """

    is_cut: Bool[Tensor, "1 head query key"]
    is_masked: Bool[Tensor, "query key"]
    dtype: torch.dtype
    is_cross: bool


def _edges_masked(removal: Removal, parts: Parts) -> AbstractContextManager[None] | None:
    """A context in which an attention gets a mask that forbids the edges too; None if it has no
    single module with a parameter for a mask.
    """
    attention = parts.attentions[removal.layer]
    module, z = attention.module, attention.z[0]
    if module is None:
        return None
    signature = inspect.signature(module.forward)
    name = next((name for name in _MASKS if name in signature.parameters), None)
    if name is None:
        return None
    is_masked = ~attention.is_visible
    is_cut = torch.zeros(1, attention.n_heads, *is_masked.shape, dtype=torch.bool, device=z.device)
    is_cut[0][np.ix_(removal.heads or range(attention.n_heads), removal.queries, removal.keys)] = (
        True
    )
    cut = _Cut(is_cut, is_masked, z.dtype, removal.layer[0] == "cross")

    def edit(arguments: Arguments) -> Arguments:
        bound = signature.bind(*arguments.args, **arguments.kwargs)
        bound.arguments[name] = _MASKS[name](bound.arguments.get(name), cut)
        return Arguments(bound.args, bound.kwargs)

    return _edited(module, attention, parts, edit)


def _mask_of_mha(mask: Allowed | None, cut: _Cut) -> masks.Mask:
    """A mask of a layer of mha, a predicate."""
    others = masks.from_tensor(~cut.is_cut)
    return others if mask is None else masks.both(mask, others)


def _mask_of_torch(mask: Tensor | None, cut: _Cut) -> Tensor:
    """A mask of torch's own attention, which is True for hidden cells, or is added to the
    scores.
    """
    if mask is None:
        return cut.is_cut[0]
    fill = True if mask.dtype == torch.bool else -torch.inf
    return mask.masked_fill(cut.is_cut[0], fill)


def _usual_mask(mask: Tensor | None, cut: _Cut) -> Tensor:
    """A mask of an attention of transformers, or of one that is written like these."""
    if mask is None:
        lowest = torch.finfo(cut.dtype).min
        mask = torch.zeros_like(cut.is_masked, dtype=cut.dtype).masked_fill(cut.is_masked, lowest)
    mask = four_axes(mask).expand(1, cut.is_cut.shape[1], -1, -1)
    return mask.masked_fill(cut.is_cut, _forbidding(mask, is_cross=cut.is_cross))


def _forbidding(mask: Tensor, *, is_cross: bool) -> float | bool:
    """The value of a mask that forbids a cell. Most masks are added to scores; others are 1 for
    visible keys, or 1 for hidden ones. Which one is seen on the diagonal, where keys are visible;
    with keys of another text, 1 is assumed to mean visible.
    """
    if bool(((mask != 0) & (mask != 1)).any()):
        return torch.finfo(mask.dtype).min
    is_one_visible = is_cross or bool(mask[0, 0, -1, -1])
    if mask.dtype == torch.bool:
        return not is_one_visible
    return 0.0 if is_one_visible and bool(mask.any()) else torch.finfo(mask.dtype).min


_MASKS: Mapping[str, Callable[[Any, _Cut], Any]] = {
    "attention_mask": _usual_mask,
    "mask": _usual_mask,
    "allowed": _mask_of_mha,
    "attn_mask": _mask_of_torch,
}
"""The names of the mask parameter in attention modules, and how it forbids further cells."""
