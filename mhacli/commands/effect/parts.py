"""The parts of a model, found in one pass: blocks at which a pass may begin, and the parts of each attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mhacli.commands.effect.metric import language_head, read_position
from mhacli.models.calls import Call
from mhacli.models.capture import captured
from mhacli.models.layer_names import LayerKey, is_numbered


class TokenWise(NamedTuple):
    """A module with one output row per token, and the number of attentions that finished before it."""

    module: nn.Module
    n_before: int


@dataclass
class Entries:
    """The blocks of a model in the order in which they run, their outputs for one text, and the number of blocks finished before
    each attention. `between` are the largest modules that run between attentions, once in a pass."""

    blocks: list[nn.Module] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    before: dict[LayerKey, int] = field(default_factory=dict)
    between: list[TokenWise] = field(default_factory=list)

    @contextmanager
    def entered(self, layer: LayerKey, n_rows: int) -> Iterator[None]:
        """A context in which the blocks before an attention do not run and return `n_rows` copies of their outputs. Other modules
        before it run for the first row and return copies of its output."""
        n_skipped, attentions = self.before.get(layer, 0), [*self.before]
        n_before = attentions.index(layer) if layer in attentions else -1
        with ExitStack() as stack:
            for block, output in list(zip(self.blocks, self.outputs, strict=True))[:n_skipped]:
                stack.enter_context(_runs_as(block, partial(_repeated, output, n_rows)))
            for module in (each.module for each in self.between if each.n_before <= n_before):
                stack.enter_context(_runs_as(module, partial(_first_row, module.forward)))
            yield

    @property
    def behind_attention(self) -> list[nn.Module]:
        """The modules that run after all attentions."""
        return [each.module for each in self.between if each.n_before == len(self.before)]


@contextmanager
def run_at(modules: Sequence[nn.Module], position: int) -> Iterator[None]:
    """A context in which modules run at one position only and return its output at all positions."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_runs_as(module, partial(_one_position, module.forward, position)))
        yield


@dataclass
class AttentionParts:
    """For each attention, the name of its module, its output projection, the outputs z of its heads, and the visible cells if no
    mask shows them."""

    names: dict[LayerKey, str] = field(default_factory=dict)
    projections: dict[LayerKey, nn.Module] = field(default_factory=dict)
    z: dict[LayerKey, Float[Tensor, "batch head query d_v"]] = field(default_factory=dict)
    visible: dict[LayerKey, Bool[Tensor, "query key"]] = field(default_factory=dict)


@dataclass
class ModelParts:
    """The result of `find_parts`. `hidden` is the output of the pass, in which every z was replaced by itself."""

    hidden: Float[Tensor, "1 d_model"]
    entries: Entries = field(default_factory=Entries)
    attention: AttentionParts = field(default_factory=AttentionParts)


def find_parts(model: nn.Module, keywords: Mapping[str, Tensor], position: int) -> ModelParts:
    """The parts of a model, found in one pass. A model that runs a block twice can be entered only at its first block."""
    model_parts = ModelParts(torch.empty(1, 0))
    with ExitStack() as stack:
        stack.enter_context(_finding_attention(model, model_parts))
        stack.enter_context(blocks_seen(model, model_parts.entries))
        stack.enter_context(_finding_between(model, model_parts.entries, position))
        model_parts.hidden = read_position(model, keywords, position).hidden
    if len({id(block) for block in model_parts.entries.blocks}) < len(model_parts.entries.blocks):
        model_parts.entries.before.clear()
        model_parts.entries.between.clear()
    return model_parts


@contextmanager
def blocks_seen(model: nn.Module, entries: Entries) -> Iterator[None]:
    """A context in which blocks that run, and their outputs, are added to `entries`."""

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        entries.blocks.append(module)
        entries.outputs.append(output)

    names = [name for name, _ in model.named_modules() if is_numbered(name)]
    with ExitStack() as stack:
        for name in names:
            if any(name.startswith(f"{other}.") for other in names):  # inside another one
                continue
            stack.callback(model.get_submodule(name).register_forward_hook(keep).remove)
        yield


@contextmanager
def _finding_attention(model: nn.Module, model_parts: ModelParts) -> Iterator[None]:
    """A context that finds each attention. Its output projection is the module whose input equals z bit for bit."""
    parts, last = model_parts.attention, dict[LayerKey, Tensor]()

    def take(call: Call) -> Tensor | None:
        key = (call.kind, call.layer)
        model_parts.entries.before.setdefault(key, len(model_parts.entries.blocks))
        if call.part == 0 and call.z is not None:
            parts.names[key] = call.name
            parts.z[key] = call.z.clone()
            every = torch.ones(call.shape[2:], dtype=torch.bool, device=call.z.device)
            parts.visible[key] = every.tril() if call.causal else every
            last.clear()
            last[key] = call.z.transpose(1, 2).flatten(2).clone()
        return None if call.z is None else call.z.clone()

    def find_projection(module: nn.Module, args: tuple[Any, ...]) -> None:
        for key, z in last.items():
            x = args[0] if args else None
            if isinstance(x, Tensor) and x.numel() == z.numel() and torch.equal(x.reshape(z.shape), z):
                parts.projections.setdefault(key, module)

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(getattr(module, "weight", None), Tensor) and module.weight.ndim == 2:
                stack.callback(module.register_forward_pre_hook(find_projection).remove)
        stack.enter_context(captured(model, take, batch=1))
        yield


@contextmanager
def _finding_between(model: Any, entries: Entries, position: int) -> Iterator[None]:
    """A context that finds modules without attention that map one tensor to one, with a row for each token up to the position
    at least. Modules that contain the language head are left out, because its input is measured."""
    head = language_head(model)
    began, runs = dict[str, int](), dict[str, list[TokenWise | None]]()

    def begin(name: str) -> None:
        began[name] = len(entries.before)

    def end(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensors = (*args, *kwargs.values(), output)
        has_rows = len(tensors) == 2 and all(isinstance(x, Tensor) and x.ndim == 3 for x in tensors)
        is_alike = has_rows and tensors[0].shape[:2] == output.shape[:2] and output.shape[1] > position
        is_between = is_alike and began[name] == len(entries.before)
        runs.setdefault(name, []).append(TokenWise(module, began[name]) if is_between else None)

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if head is not None and module is not head and any(part is head for part in module.modules()):
                continue
            if any(parameter.ndim > 1 for parameter in module.parameters()):
                stack.callback(module.register_forward_pre_hook(lambda *_, name=name: begin(name)).remove)
                stack.callback(module.register_forward_hook(partial(end, name), with_kwargs=True).remove)
        yield
    once = {name: each for name, (each, *more) in runs.items() if each is not None and not more}
    entries.between += [each for name, each in once.items() if not any(name.startswith(f"{other}.") for other in once)]


def _repeated(output: Any, n_rows: int, *_: Any, **__: Any) -> Any:
    """An output of one row repeated for several rows, whatever the arguments of the block."""
    if isinstance(output, Tensor):
        is_of_row = output.ndim > 1 and output.shape[0] == 1
        return output.repeat(n_rows, *[1] * (output.ndim - 1)) if is_of_row else output
    if isinstance(output, (tuple, list)):
        return type(output)(_repeated(part, n_rows) for part in output)
    return output


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


def _first_row(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The output of a module for equal rows, computed for one of them."""
    return forward(x[:1]).repeat(x.shape[0], 1, 1)


def _one_position(forward: Callable[[Tensor], Tensor], position: int, x: Tensor) -> Tensor:
    """The output of a module at one position, repeated at all positions."""
    return forward(x[:, position : position + 1]).expand(-1, x.shape[1], -1)
