"""The parts of a model, found in one pass: blocks at which a pass may begin, and the parts of each attention."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mhacli.commands.effect.metric import language_head
from mhacli.models.calls import Call
from mhacli.models.capture import captured
from mhacli.models.layer_names import LayerKey, is_numbered

_OUTPUT_PROJECTION = re.compile(r"(^|\.)(o_proj|out_proj|c_proj|dense|out_lin|wo|o|out)$")
"""The usual names of the output projection."""


@dataclass
class Parts:
    """The parts of a model, and what a pass runs of it.

    Of each attention: the name of its module, its output projection, the outputs z of its heads, the visible cells if no mask
    shows them, and the number of `blocks` that finished `before` it. `outputs` are those of the blocks for one text; a model
    that runs a block twice has none before its attentions. `behind` are modules that run token by token after all attentions;
    the modules `alone` run at the measured position only. A pass begins at token `start`, after the keys and values in `past`.
    """

    names: dict[LayerKey, str] = field(default_factory=dict)
    projections: dict[LayerKey, nn.Module] = field(default_factory=dict)
    z: dict[LayerKey, Float[Tensor, "batch head query d_v"]] = field(default_factory=dict)
    visible: dict[LayerKey, Bool[Tensor, "query key"]] = field(default_factory=dict)
    before: dict[LayerKey, int] = field(default_factory=dict)
    blocks: list[nn.Module] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    behind: Sequence[nn.Module] = ()
    alone: Sequence[nn.Module] = ()
    start: int = 0
    past: Any = None

    def n_skipped(self, layers: set[LayerKey]) -> int:
        """The number of blocks that need not run again for removals in these layers."""
        return min((self.before.get(layer, 0) for layer in layers), default=0)

    @contextmanager
    def entered(self, n_skipped: int, n_rows: int, position: int) -> Iterator[None]:
        """A context in which the first blocks do not run and return `n_rows` copies of their outputs, and the modules `alone`
        run at one position and return its output at all."""
        with ExitStack() as stack:
            for block, output in list(zip(self.blocks, self.outputs, strict=True))[:n_skipped]:
                stack.enter_context(_runs_as(block, partial(_repeated, output, n_rows)))
            for module in self.alone:
                stack.enter_context(_runs_as(module, partial(_one_position, module.forward, position)))
            yield


@contextmanager
def finding(model: nn.Module, parts: Parts, position: int) -> Iterator[None]:
    """A context in which a pass fills `parts`. Every z is replaced by itself."""
    with (
        _finding_behind(model, parts, position),
        blocks_seen(model, parts),
        _finding_attention(model, parts),
    ):
        yield
    if len({id(block) for block in parts.blocks}) < len(parts.blocks):
        parts.before = dict.fromkeys(parts.before, 0)
        parts.behind = ()


@contextmanager
def blocks_seen(model: nn.Module, parts: Parts) -> Iterator[None]:
    """A context in which blocks that run, and their outputs, are added to `parts`."""

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        parts.blocks.append(module)
        parts.outputs.append(output)

    names = [name for name, _ in model.named_modules() if is_numbered(name)]
    with ExitStack() as stack:
        for name in names:
            if not any(name.startswith(f"{other}.") for other in names):  # not inside another one
                stack.callback(model.get_submodule(name).register_forward_hook(keep).remove)
        yield


@contextmanager
def _finding_attention(model: nn.Module, parts: Parts) -> Iterator[None]:
    """A context that finds each attention. Its output projection is the module whose input equals z bit for bit, among those
    with a usual name; one that runs as a function is that of torch's own attention."""
    last = dict[LayerKey, Tensor]()

    def take(call: Call) -> Tensor | None:
        key = (call.kind, call.layer)
        parts.before.setdefault(key, len(parts.blocks))
        if call.part == 0 and call.z is not None:
            module = model.get_submodule(call.name) if call.name in names else model
            parts.names[key], parts.z[key] = call.name, call.z.clone()
            every = torch.ones(call.shape[2:], dtype=torch.bool, device=call.z.device)
            parts.visible[key] = every.tril() if call.causal else every
            if isinstance(module, nn.MultiheadAttention):
                parts.projections[key] = module.out_proj
            last.clear()
            last[key] = call.z.transpose(1, 2).flatten(2).clone()
        return None if call.z is None else call.z.clone()

    def find_projection(module: nn.Module, args: tuple[Any, ...]) -> None:
        for key, z in last.items():
            x = args[0] if args else None
            if isinstance(x, Tensor) and x.numel() == z.numel() and torch.equal(x.reshape(z.shape), z):
                parts.projections.setdefault(key, module)

    names = dict(model.named_modules())
    with ExitStack() as stack:
        for name, module in names.items():
            if _OUTPUT_PROJECTION.search(name):
                stack.callback(module.register_forward_pre_hook(find_projection).remove)
        stack.enter_context(captured(model, take, batch=1))
        yield


@contextmanager
def _finding_behind(model: Any, parts: Parts, position: int) -> Iterator[None]:
    """A context that finds the largest modules that run once, after all attentions, and map one tensor to one with a row for
    each token up to the position at least. Modules that contain the language head are left out, because its input is measured."""
    head, began, found = language_head(model), dict[str, int](), dict[str, nn.Module | None]()

    def begin(name: str) -> None:
        began[name] = len(parts.before)

    def end(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensors = (*args, *kwargs.values(), output)
        has_rows = len(tensors) == 2 and all(isinstance(x, Tensor) and x.ndim == 3 for x in tensors)
        is_alike = has_rows and tensors[0].shape[:2] == output.shape[:2] and output.shape[1] > position
        found[name] = module if is_alike and name not in found else None

    with ExitStack() as stack:
        for name, module in model.named_modules():
            holds_head = module is not head and any(part is head for part in module.modules())
            if not holds_head and any(parameter.ndim > 1 for parameter in module.parameters()):
                stack.callback(module.register_forward_pre_hook(lambda *_, name=name: begin(name)).remove)
                stack.callback(module.register_forward_hook(partial(end, name), with_kwargs=True).remove)
        yield
    last = {name: module for name, module in found.items() if module is not None and began[name] == len(parts.before)}
    parts.behind = [module for name, module in last.items() if not any(name.startswith(f"{n}.") for n in last)]


def _repeated(output: Any, n_rows: int, *_: Any, **__: Any) -> Any:
    """An output of one row repeated for several rows, whatever the arguments of the block."""
    if isinstance(output, Tensor):
        is_of_row = output.ndim > 1 and output.shape[0] == 1
        return output.repeat(n_rows, *[1] * (output.ndim - 1)) if is_of_row else output
    if isinstance(output, (tuple, list)):
        return type(output)(_repeated(part, n_rows) for part in output)
    return output


def _one_position(forward: Callable[[Tensor], Tensor], position: int, x: Tensor) -> Tensor:
    """The output of a module at one position, repeated at all positions."""
    return forward(x[:, position : position + 1]).expand(-1, x.shape[1], -1)


@contextmanager
def _runs_as(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """A context in which a module runs `forward` instead of its method."""
    before = module.__dict__.get("forward")  # accelerate sets one that fetches the weights
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def repeated(inputs: Mapping[str, Any], n_rows: int) -> dict[str, Any]:
    """The inputs of `n_rows` copies of one text."""
    return {name: _repeated(value, n_rows) for name, value in inputs.items()}
