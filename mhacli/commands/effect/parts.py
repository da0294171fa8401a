"""The parts of a model, found in one pass: blocks at which a pass may begin, and the parts of each attention."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mhacli.models.calls import Call
from mhacli.models.capture import captured
from mhacli.models.layer_names import LayerKey, is_numbered

_OUTPUT_PROJECTION = re.compile(r"(^|\.)(o_proj|out_proj|c_proj|dense|out_lin|wo|o|out)$")
"""The usual names of the output projection."""


@dataclass
class Parts:
    """The parts of a model.

    Of each attention: the name of its module, its output projection, the outputs z of its heads, the visible cells if no mask
    shows them, and the number of `blocks` that finished `before` it. `outputs` are those of the blocks for one text; a model
    that runs a block twice has none before its attentions.
    """

    names: dict[LayerKey, str] = field(default_factory=dict)
    projections: dict[LayerKey, nn.Module] = field(default_factory=dict)
    z: dict[LayerKey, Float[Tensor, "batch head query d_v"]] = field(default_factory=dict)
    visible: dict[LayerKey, Bool[Tensor, "query key"]] = field(default_factory=dict)
    before: dict[LayerKey, int] = field(default_factory=dict)
    blocks: list[nn.Module] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def n_skipped(self, layers: set[LayerKey]) -> int:
        """The number of blocks that need not run again for removals in these layers."""
        return min((self.before.get(layer, 0) for layer in layers), default=0)

    @contextmanager
    def skipped(self, n: int, n_rows: int) -> Iterator[None]:
        """A context in which the first `n` blocks do not run and return `n_rows` copies of their outputs."""
        before = [(block, block.__dict__.get("forward")) for block in self.blocks[:n]]
        for block, output in zip(self.blocks[:n], self.outputs, strict=False):
            block.forward = lambda *_, output=output, **__: repeated(output, n_rows)
        try:
            yield
        finally:
            for block, forward in before:
                del block.forward
                if forward is not None:  # accelerate sets one that fetches the weights
                    block.forward = forward


@contextmanager
def finding(model: nn.Module, parts: Parts) -> Iterator[None]:
    """A context in which a pass fills `parts`. Every z is replaced by itself."""

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        parts.blocks.append(module)
        parts.outputs.append(output)

    names = [name for name, _ in model.named_modules() if is_numbered(name)]
    with ExitStack() as stack:
        for name in names:
            if not any(name.startswith(f"{other}.") for other in names):  # not inside another one
                stack.callback(model.get_submodule(name).register_forward_hook(keep).remove)
        stack.enter_context(_finding_attention(model, parts))
        yield
    if len({id(block) for block in parts.blocks}) < len(parts.blocks):
        parts.before = dict.fromkeys(parts.before, 0)


@contextmanager
def _finding_attention(model: nn.Module, parts: Parts) -> Iterator[None]:
    """A context that finds each attention. Its output projection is the module whose input equals z bit for bit, among those
    with a usual name; one that runs as a function is that of torch's own attention."""
    last = dict[LayerKey, Tensor]()

    def take(call: Call) -> Tensor | None:
        key = (call.kind, call.layer)
        parts.before.setdefault(key, len(parts.blocks))
        if call.part == 0 and call.z is not None:
            module = names.get(call.name, model)
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


def repeated(output: Any, n_rows: int) -> Any:
    """Tensors of one row, in tuples and mappings of any depth, repeated for several rows."""
    if isinstance(output, Tensor):
        is_of_row = output.ndim > 1 and output.shape[0] == 1
        return output.repeat(n_rows, *[1] * (output.ndim - 1)) if is_of_row else output
    if isinstance(output, (tuple, list)):
        return type(output)(repeated(part, n_rows) for part in output)
    if isinstance(output, Mapping):
        return {name: repeated(value, n_rows) for name, value in output.items()}
    return output
