"""The parts of a model that a study of effects needs, found in one pass: its attentions with their
output projections, and the blocks before them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mhacli.models.capture import Call, captured
from mhacli.models.foreign import replaced
from mhacli.models.layer_names import LayerKey, is_numbered
from mhacli.usercode.door import ours

from .metric import RowOutputs


class Block(NamedTuple):
    """A block of a model, and its output for one text."""

    module: nn.Module
    output: Any


@dataclass(eq=False)
class Attention:
    """An attention of a model: its `module`, None if it has one for each head, the visible cells
    if no mask shows them, the number of blocks that finished before it, the outputs z of its heads
    for the text, by the number of the call that computes these heads, and its output `projection`.
    """

    module: nn.Module | None
    is_visible: Bool[Tensor, "query key"]
    n_before: int
    z: dict[int, Float[Tensor, "batch head query d_v"]] = field(default_factory=dict)
    projection: nn.Module | None = None

    @property
    def n_heads(self) -> int:
        """The number of its heads."""
        return self.z[0].shape[1]


@dataclass
class Parts:
    """The parts of a model: its `attentions` and `blocks` in the order in which they ran, and the
    `output` of the pass. A model that runs a block twice has none before its attentions.
    """

    attentions: dict[LayerKey, Attention] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    output: RowOutputs = field(init=False)

    def z_of(self, call: Call) -> Tensor | None:
        """The outputs of the heads of a call in the text, None if they were not captured."""
        attention = self.attentions.get(call.place)
        z = None if attention is None else attention.z.get(call.part)
        if z is None or call.first_head is None:
            return z
        return z[:, call.first_head : call.first_head + call.shape[1]]

    @contextmanager
    def skipped(self, layers: set[LayerKey], n_rows: int) -> Iterator[None]:
        """A context in which the blocks before these layers do not run and return `n_rows` copies
        of their outputs.
        """
        n_blocks = min((self.attentions[layer].n_before for layer in layers), default=0)
        with ExitStack() as stack:
            for block in self.blocks[:n_blocks]:
                forward = partial(_repeated_output, block.output, n_rows)
                stack.enter_context(replaced(block.module, forward=forward))
            yield


@ours()
def _repeated_output(output: Any, n_rows: int, *_: Any, **__: Any) -> Any:
    """The output of a block that does not run, whatever its arguments are."""
    return repeated(output, n_rows)


def repeated(output: Any, n_rows: int) -> Any:
    """Tensors of one row, in tuples of any depth, repeated for several rows."""
    if isinstance(output, Tensor):
        is_of_row = output.ndim > 1 and output.shape[0] == 1
        return output.repeat(n_rows, *[1] * (output.ndim - 1)) if is_of_row else output
    if isinstance(output, (tuple, list)):
        return type(output)(repeated(part, n_rows) for part in output)
    return output


def same_heads(call: Call, earlier: Sequence[Call]) -> list[Call] | None:
    """The calls of a module that compute the same heads, up to this one; None if it computes
    others. `earlier` are those up to its last call that is one of them.

    The first call of a module begins anew. A later one has the keys or the values of an earlier one
    in differential attention, and in attention by chunks of queries, not in groups of heads.
    """
    if call.part == 0:
        return [call]
    for other in earlier:
        for x, y in ((call.k, other.k), (call.v, other.v)):
            if x is not None and y is not None and torch.equal(x, y):
                return [*earlier, call]
    return None


def find_parts(model: nn.Module, run_pass: Callable[[], RowOutputs]) -> Parts:
    """The parts of a model, found in one pass in which every z is replaced by itself. An output
    projection is the first module without parts whose input equals z bit for bit.
    """
    modules = dict(model.named_modules())
    parts = Parts()
    with ExitStack() as stack:
        _keep_blocks(modules, parts, stack)
        _keep_projections(modules, parts, stack)
        _keep_attentions(model, modules, parts, stack)
        parts.output = run_pass()
    if len({id(block.module) for block in parts.blocks}) < len(parts.blocks):
        for attention in parts.attentions.values():
            attention.n_before = 0
    return parts


def _keep_blocks(modules: Mapping[str, nn.Module], parts: Parts, stack: ExitStack) -> None:
    """Keeps the outputs of the outermost modules in lists of modules, until the stack is closed."""

    @ours()
    def keep(module: nn.Module, _: Any, output: Any) -> None:
        parts.blocks.append(Block(module, output))

    numbered = [name for name in modules if is_numbered(name)]
    for name in numbered:
        if not any(name.startswith(f"{other}.") for other in numbered):
            stack.callback(modules[name].register_forward_hook(keep).remove)


def _keep_projections(modules: Mapping[str, nn.Module], parts: Parts, stack: ExitStack) -> None:
    """Keeps the output projections, until the stack is closed."""

    @ours()
    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        before = next(reversed(parts.attentions.values()), None)
        if before is None or before.projection is not None:
            return
        if not (args and isinstance(args[0], Tensor)):
            return
        z = before.z[0].transpose(1, 2)
        if args[0].numel() == z.numel() and torch.equal(args[0].reshape(z.shape), z):
            before.projection = module

    for module in modules.values():
        if not any(module.children()):
            stack.callback(module.register_forward_pre_hook(keep).remove)


def _keep_attentions(
    model: nn.Module, modules: Mapping[str, nn.Module], parts: Parts, stack: ExitStack
) -> None:
    """Keeps what a study needs of each attention, until the stack is closed."""
    calls: list[Call] = []
    n_before: dict[LayerKey, int] = {}

    def keep(call: Call) -> Tensor | None:
        nonlocal calls
        n_before.setdefault(call.place, len(parts.blocks))
        same = same_heads(call, calls)
        if same is not None:
            calls = same
        if call.z is None:
            return None
        if call.part == 0 and not call.first_head:
            module = modules.get(call.name, model) if call.first_head is None else None
            every = torch.ones(call.shape[2:], dtype=torch.bool, device=call.z.device)
            is_visible = every.tril() if call.causal else every
            parts.attentions[call.place] = Attention(module, is_visible, n_before[call.place])
        attention = parts.attentions.get(call.place)
        if attention is not None and same is not None:
            if call.part == 0:
                attention.projection = None  # it was that of the heads before alone
            z = attention.z.get(call.part)
            earlier = [z] if z is not None and call.first_head else []
            attention.z[call.part] = torch.cat([*earlier, call.z], dim=1)
        return call.z.clone()

    stack.enter_context(captured(model, keep, heads="apart"))
