"""The parts of a model, found in one pass, and a second method by which they lose heads and edges: in the input of the output
projection, or by a mask that the model reads. It does not use the capture with which the effects are computed, so an error there
shows as a difference."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mhacli.attention import masks
from mhacli.commands.effect.removal import Removal, stand_in
from mhacli.models.calls import Call
from mhacli.models.capture import captured
from mhacli.models.layer_names import LayerKey, is_numbered

_OUTPUT_PROJECTION = re.compile(r"(^|\.)(o_proj|out_proj|c_proj|dense|out_lin|wo|o|out)$", re.IGNORECASE)
"""The usual names of the output projection."""
_MASKS = ("attention_mask", "mask", "allowed", "attn_mask")
"""The names of the mask parameter in attention modules. `allowed` is that of a layer of mha, a predicate; `attn_mask` is that of
torch's own attention, which is True for hidden cells."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a module, without and with names."""
Edit = Callable[[tuple[Any, ...], dict[str, Any]], Arguments]


@dataclass
class Parts:
    """The parts of a model.

    Of each attention: its module, its output projection, the outputs z of its heads, the visible cells if no mask shows them, and
    the number of `blocks` that finished `before` it. `outputs` are those of the blocks for one text; a model that runs a block
    twice has none before its attentions. `reading` is the output of the pass.
    """

    modules: dict[LayerKey, nn.Module] = field(default_factory=dict)
    projections: dict[LayerKey, nn.Module] = field(default_factory=dict)
    z: dict[LayerKey, Float[Tensor, "batch head query d_v"]] = field(default_factory=dict)
    visible: dict[LayerKey, Bool[Tensor, "query key"]] = field(default_factory=dict)
    before: dict[LayerKey, int] = field(default_factory=dict)
    blocks: list[nn.Module] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    reading: Any = None

    @contextmanager
    def skipped(self, layers: set[LayerKey], n_rows: int) -> Iterator[None]:
        """A context in which the blocks before these layers do not run and return `n_rows` copies of their outputs."""
        n = min((self.before.get(layer, 0) for layer in layers), default=0)
        with ExitStack() as stack:
            for block, output in zip(self.blocks[:n], self.outputs, strict=False):
                forward = lambda *_, output=output, **__: repeated(output, n_rows)  # noqa: E731
                stack.enter_context(patch.object(block, "forward", forward))
            yield


@contextmanager
def finding(model: nn.Module, parts: Parts) -> Iterator[None]:
    """A context in which a pass fills `parts`. Every z is replaced by itself. An output projection is the module whose input
    equals z bit for bit, among those with a usual name."""
    modules = dict(model.named_modules())
    numbered = [name for name in modules if is_numbered(name)]
    blocks = [name for name in numbered if not any(name.startswith(f"{other}.") for other in numbered)]

    def take(call: Call) -> Tensor | None:
        key = (call.kind, call.layer)
        parts.before.setdefault(key, len(parts.blocks))
        if call.part == 0 and call.z is not None:
            parts.modules[key], parts.z[key] = modules.get(call.name, model), call.z.clone()
            every = torch.ones(call.shape[2:], dtype=torch.bool, device=call.z.device)
            parts.visible[key] = every.tril() if call.causal else every
        return None if call.z is None else call.z.clone()

    def find_projection(module: nn.Module, args: tuple[Any, ...]) -> None:
        key = next(reversed(parts.z), None)  # of the attention before
        if key is None or key in parts.projections or not (args and isinstance(args[0], Tensor)):
            return
        z = parts.z[key].transpose(1, 2)
        if args[0].numel() == z.numel() and torch.equal(args[0].reshape(z.shape), z):
            parts.projections[key] = module

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        parts.blocks.append(module)
        parts.outputs.append(output)

    with ExitStack() as stack:
        for name, module in modules.items():
            if name in blocks:
                stack.callback(module.register_forward_hook(keep).remove)
            if _OUTPUT_PROJECTION.search(name):
                stack.callback(module.register_forward_pre_hook(find_projection).remove)
        stack.enter_context(captured(model, take, batch=1))
        yield
    if len({id(block) for block in parts.blocks}) < len(parts.blocks):
        parts.before = dict.fromkeys(parts.before, 0)


def repeated(output: Any, n_rows: int) -> Any:
    """Tensors of one row, in tuples of any depth, repeated for several rows."""
    if isinstance(output, Tensor):
        is_of_row = output.ndim > 1 and output.shape[0] == 1
        return output.repeat(n_rows, *[1] * (output.ndim - 1)) if is_of_row else output
    if isinstance(output, (tuple, list)):
        return type(output)(repeated(part, n_rows) for part in output)
    return output


# ------------------------------------------------------------------------------------------------------- the second method


@contextmanager
def removed_otherwise(removals: Sequence[Removal], parts: Parts) -> Iterator[bool]:
    """A context in which the model runs with the removals; yields False if one of them has no second method."""
    with ExitStack() as stack:
        yield all([_remove(removal, parts, stack) for removal in removals])


def _remove(removal: Removal, parts: Parts, stack: ExitStack) -> bool:
    """Removes something until the stack is closed. False if there is no method for it."""
    layer, z = removal.layer, parts.z[removal.layer]
    module: Any = parts.modules[layer]
    if removal.keys is not None:
        parameters = inspect.signature(module.forward).parameters
        name = next((name for name in _MASKS if name in parameters), None)
        if name is not None:
            _edit(stack, parts.modules, layer, partial(_masked, removal, parts, name))
        return name is not None
    if layer in parts.projections:
        _edit(stack, parts.projections, layer, partial(_replaced, removal, z))
        return True
    is_of_torch = isinstance(module, nn.MultiheadAttention)
    if not is_of_torch or removal.replace != "zero" or removal.queries:
        return False
    weight = module.out_proj.weight.data  # torch reads the weights of its projection without running it
    stack.callback(weight.copy_, weight.clone())
    weight.unflatten(1, (z.shape[1], -1))[:, removal.heads] = 0
    return True


def _edit(stack: ExitStack, modules: Mapping[LayerKey, nn.Module], layer: LayerKey, edited: Edit) -> None:
    """Edits the arguments of a layer's module until the stack is closed. Layers may share it, and then it runs once for each."""
    sharing = [key for key, module in modules.items() if module is modules[layer]]
    runs = count()

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        return edited(args, kwargs) if len(sharing) == 1 or next(runs) == sharing.index(layer) else None

    stack.callback(modules[layer].register_forward_pre_hook(hook, with_kwargs=True).remove)


def _replaced(removal: Removal, z: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The input of an output projection in which the part of the heads is replaced, at some positions or at all."""
    x = args[0].clone()
    by_head = x.unflatten(-1, (z.shape[1], z.shape[3]))
    for head in removal.heads:
        by_head[..., [*removal.queries] or slice(None), head, :] = stand_in(z[0, head], removal.replace)
    return (x, *args[1:]), kwargs


def _masked(removal: Removal, parts: Parts, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of an attention module with a mask that forbids the edges."""
    z, hidden = parts.z[removal.layer], ~parts.visible[removal.layer]
    is_cut = torch.zeros(1, z.shape[1], *hidden.shape, dtype=torch.bool, device=z.device)
    heads, rows, keys = (
        torch.tensor([*axis]) for axis in (removal.heads or range(z.shape[1]), removal.queries, removal.keys or ())
    )
    is_cut[0, heads[:, None, None], rows[:, None], keys] = True
    given = inspect.signature(parts.modules[removal.layer].forward).bind(*args, **kwargs)
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


def _forbidding(mask: Tensor, removal: Removal) -> float | bool:
    """The value of a mask that forbids a cell. Most masks are added to scores; others are 1 for visible keys, or 1 for hidden
    ones. Which one is seen on the diagonal, where keys are visible; with keys of another text, 1 is assumed to mean visible."""
    if bool(((mask != 0) & (mask != 1)).any()):
        return torch.finfo(mask.dtype).min
    is_shown = removal.layer[0] == "cross" or bool(mask[0, 0, -1, -1])
    if mask.dtype == torch.bool:
        return not is_shown
    return 0.0 if is_shown and bool(mask.any()) else torch.finfo(mask.dtype).min
