"""Starts a pass at the layer that changes: the layers before it give what they gave in the untouched pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from mhacli.adapters.hf.capture import Call, captured
from mhacli.adapters.hf.inputs import outputs_of
from mhacli.adapters.hf.layer_names import LayerKey, is_numbered


@dataclass
class Entries:
    """The blocks of a model in the order in which they run, what each gave for one text, and how many are finished before
    each attention."""

    blocks: list[nn.Module] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    before: dict[LayerKey, int] = field(default_factory=dict)

    @contextmanager
    def entered(self, layer: LayerKey, n_rows: int) -> Iterator[None]:
        """Within it the blocks before an attention do not run. They give `n_rows` copies of what they gave."""
        with ExitStack() as stack:
            for block, output in list(zip(self.blocks, self.outputs, strict=True))[: self.before.get(layer, 0)]:
                block.forward = partial(_repeated, output, n_rows)
                stack.callback(delattr, block, "forward")
            yield


def find_entries(model: nn.Module, keywords: Mapping[str, Tensor]) -> Entries:
    """Where a pass may begin. A model that runs a block twice has no entry but the first."""
    entries = Entries()
    names = [name for name, _ in model.named_modules() if is_numbered(name)]
    outer = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]

    def take(call: Call) -> None:
        entries.before.setdefault((call.kind, call.layer), len(entries.blocks))

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        entries.blocks.append(module)
        entries.outputs.append(output)

    with ExitStack() as stack:
        stack.enter_context(captured(model, take, batch=1))
        for name in outer:
            stack.callback(model.get_submodule(name).register_forward_hook(keep).remove)
        outputs_of(model, keywords)
    if len({id(block) for block in entries.blocks}) < len(entries.blocks):
        entries.before.clear()
    return entries


def _repeated(output: Any, n_rows: int, *_: Any, **__: Any) -> Any:
    """An output of one row for several rows, whatever a block is called with."""
    if isinstance(output, Tensor):
        is_of_row = output.ndim > 1 and output.shape[0] == 1
        return output.repeat(n_rows, *[1] * (output.ndim - 1)) if is_of_row else output
    if isinstance(output, (tuple, list)):
        return type(output)(_repeated(part, n_rows) for part in output)
    return output
