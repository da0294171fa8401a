"""One recorded call of a user's attention as a graph, with the site of each operation: q, scores, pattern, z."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mhacli.usercode.call.user_attention import CallMasks, UserAttention
from mhacli.usercode.inputs import lengths_of, map_rows
from mhacli.usercode.operations import address_of, watch
from mhacli.usercode.process import SourceLine
from mhacli.usercode.projections import read_name
from mhacli.usercode.types import Inputs, Operation

_PRODUCTS = ("matmul", "bmm", "mm", "einsum", "baddbmm")
_PROJECTIONS = ("linear", "addmm", "conv1d", "bilinear", *_PRODUCTS)
SOFTMAXES = ("softmax", "log_softmax", "softmax_")
KERNEL = "scaled_dot_product_attention"
_ROLES = "qkv"


@dataclass
class Graph:
    """A recorded call. `given` has its inputs by name, and `out` is its result.

    `sources[i][j]` is the operation that made input j of operation i, None for a tensor from outside. Those are, by id, the
    inputs in `inputs` and parameters, buffers and the mask in `constants`. `live` says which operations depend on the inputs.
    Each softmax or kernel has an entry in `attentions`, the operation of each of its sites; `swapped` are the products whose
    first operand is the keys. `sites` names every operation.
    """

    out: Tensor
    given: dict[str, Tensor]
    operations: list[Operation] = field(default_factory=list)
    sources: list[tuple[int | None, ...]] = field(default_factory=list)
    inputs: dict[int, str] = field(default_factory=dict)
    constants: dict[int, str] = field(default_factory=dict)
    live: list[bool] = field(default_factory=list)
    readers: dict[int, list[int]] = field(default_factory=dict)
    attentions: list[dict[str, int]] = field(default_factory=list)
    swapped: set[int] = field(default_factory=set)
    sites: dict[int, str] = field(default_factory=dict)

    def name_of(self, index: int, input_idx: int) -> str:
        """The name of an input of an operation: the site that made it, else its name from outside."""
        source = self.sources[index][input_idx]
        if source is not None:
            return self.sites[source]
        tensor = id(self.operations[index].inputs[input_idx])
        return self.inputs.get(tensor) or self.constants.get(tensor, "a tensor")

    def live_sources(self, index: int) -> list[int | None]:
        """What made the inputs of an operation that depend on those of attention, None for those themselves."""
        pairs = zip(self.sources[index], self.operations[index].inputs, strict=True)
        return [
            source for source, tensor in pairs if (id(tensor) in self.inputs if source is None else self.live[source])
        ]

    def projects(self, index: int) -> bool:
        """Whether an operation multiplies vectors by a weight."""
        return self.operations[index].name in _PROJECTIONS and len(self.live_sources(index)) == 1

    def upstream(self, start: int) -> list[int]:
        """The operation and those before it, back to a projection; for one that no input reaches, all before it."""
        found = [start]
        for index in found:
            if not self.projects(index):
                sources = dict.fromkeys(self.sources[index])
                found += [n for n in sources if n is not None and n not in found and self.live[n] == self.live[start]]
        return found

    def weights(self, index: int) -> dict[str, Tensor]:
        """The learned tensors that an operation on the inputs reads, directly or through views, by name."""
        readers = [index]
        for source in self.sources[index]:
            if source is not None and not self.live[source]:
                readers += self.upstream(source)
        read = [tensor for reader in readers for tensor in self.operations[reader].inputs if self.live[index]]
        return {
            self.constants[id(tensor)]: tensor
            for tensor in read
            if tensor.requires_grad and id(tensor) in self.constants
        }

    def tensors_at_sites(self) -> dict[str, tuple[SourceLine, list[Tensor]]]:
        """The tensors of each site, one for each softmax or kernel, with the line that makes the first."""
        tensors: dict[str, tuple[SourceLine, list[Tensor]]] = {}
        for attention in self.attentions:
            for site, index in attention.items():
                operation = self.operations[index]
                _, outputs = tensors.setdefault(site, (operation.at, []))
                outputs.append(operation.output)
        line = self.operations[-1].at if self.operations else SourceLine()
        return tensors | {"out": (line, [self.out])}


# ------------------------------------------------------------------------------------------------------------- recording


def recorded(subject: UserAttention, inputs: Inputs, seed: int, masks: CallMasks) -> Graph:
    """One recorded call. Raises what the call raises."""
    inputs = map_rows(inputs, lambda rows: rows.to(subject.device, subject.dtype))
    file = subject.built.file
    is_torch = file is not None and file.startswith(str(Path(torch.__file__).parent))
    call = partial(subject, inputs, mask=masks.mask, padding=masks.padding, seed=seed)
    output, operations = watch(call, [] if file is None or is_torch else [file])
    names = ("q", "k", "v") if subject.is_function else ("x", "context", "values")
    rows = zip(names, (inputs.queries, inputs.keys, inputs.values), strict=True)
    graph = Graph(output.out, {name: tensor for name, tensor in rows if tensor is not None})
    constants = _held_tensors(subject)
    makers: dict[int, int | None] = {}
    for operation in operations:
        if _is_identity(operation):
            makers.setdefault(id(operation.output), makers.get(id(operation.inputs[0])))
            continue
        index = len(graph.operations)
        sources = tuple(makers.get(id(tensor)) for tensor in operation.inputs)
        makers[id(operation.output)] = index
        graph.operations.append(operation)
        graph.sources.append(sources)
        for source, tensor in zip(sources, operation.inputs, strict=True):
            if source is None:
                _name_outside(graph, tensor, constants, inputs)
            else:
                graph.readers.setdefault(source, []).append(index)
        graph.live.append(bool(graph.live_sources(index)))
    _name_sites(graph)
    return graph


def _is_identity(operation: Operation) -> bool:
    """Whether an operation returns its input: dropout in eval mode, `contiguous` on a contiguous tensor."""
    if not operation.inputs or operation.name.endswith("_") or operation.name == "setitem":
        return False
    source, output = operation.inputs[0], operation.output
    return output is source or (output.dtype == source.dtype and output.is_set_to(source))


def _held_tensors(subject: UserAttention) -> dict[int, str]:
    """The names of the module's parameters, buffers and other tensors, by memory address."""
    module, call = subject.built.module, subject.built.call
    held = dict(vars(call)) if hasattr(call, "__dict__") else {}
    if module is not None:
        held |= dict(module.named_buffers()) | dict(module.named_parameters())
    tensors = {name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor) and address_of(tensor)}
    return {address_of(tensor): name for name, tensor in tensors.items()}


def _name_outside(graph: Graph, tensor: Tensor, constants: Mapping[int, str], inputs: Inputs) -> None:
    """Names a tensor from outside: a parameter or buffer, an input in any layout, the mask."""
    if address_of(tensor) in constants:
        graph.constants[id(tensor)] = constants[address_of(tensor)]
        return
    for name, rows in graph.given.items():
        is_like = name != "mask" and (tensor.dtype, tensor.numel()) == (rows.dtype, rows.numel())
        if is_like and torch.equal(tensor.flatten().sort().values, rows.flatten().sort().values):
            graph.inputs.setdefault(id(tensor), name)
    is_masked = inputs.allowed is not None or inputs.real is not None
    if is_masked and tensor.ndim > 1 and tuple(tensor.shape[-2:]) == lengths_of(inputs)[1:]:
        graph.constants[id(tensor)] = "mask"
        graph.given.setdefault("mask", tensor)


# ----------------------------------------------------------------------------------------------------------------- sites


def _name_sites(graph: Graph) -> None:
    """Names the operations: a site such as `q`, what leads to it, such as `q.transpose`, else torch's name."""
    for index, operation in enumerate(graph.operations):
        if operation.name == KERNEL:
            operands = zip(_ROLES, graph.sources[index], strict=False)
            graph.attentions.append({role: source for role, source in operands if source is not None} | {"z": index})
            graph.sites[index] = "z"
        elif operation.name in SOFTMAXES and graph.live[index]:
            graph.attentions.append(_around_softmax(graph, index))
    _name_operands(graph)
    _name_outputs(graph)
    for index, operation in enumerate(graph.operations):
        graph.sites.setdefault(index, operation.name)


def _around_softmax(graph: Graph, softmax: int) -> dict[str, int]:
    """The operations of the sites around a softmax, which are named here except for its operands. Without a product before or
    after the softmax, the sites there are unknown."""
    above = _path_to_product(graph, softmax, graph.live_sources)
    below = _path_to_product(graph, softmax, lambda index: graph.readers.get(index, []))
    found: dict[str, int | None] = {}
    if above:
        qk = above[-1]
        first, second = graph.live_sources(qk)[-2:]
        if (_letter(graph, first), _letter(graph, second)) == ("k", "q"):
            graph.swapped.add(qk)
            first, second = second, first
        if second is not None and is_transpose(graph.operations[second]):
            graph.sites[second] = "kᵀ"
            second = graph.sources[second][0]
        found |= {"q": first, "k": second, "qk": qk, "scores": above[1]}
        _name_path(graph, above[1:], "scores")
        graph.sites[qk] = "qk"
    if above or below:
        found["pattern"] = below[-2] if below else softmax
        _name_path(graph, below[-2::-1] or [softmax], "pattern")
    if below:
        first, second = graph.live_sources(below[-1])[-2:]
        found |= {"v": second if first == below[-2] else first, "z": below[-1]}
        graph.sites[below[-1]] = "z"
    return {site: index for site, index in found.items() if index is not None}


def _path_to_product(graph: Graph, start: int, neighbours: Callable[[int], Sequence[int | None]]) -> list[int]:
    """The shortest path from an operation to a product of activations; empty if there is none."""
    paths, visited = [[start]], {start}
    for path in paths:
        for index in neighbours(path[-1]):
            if index is None or index in visited:
                continue
            if graph.operations[index].name in _PRODUCTS and len(graph.live_sources(index)) >= 2:
                return [*path, index]
            visited.add(index)
            paths.append([*path, index])
    return []


def _name_path(graph: Graph, path: Sequence[int], site: str) -> None:
    """Names operations that lead to a site, the last one first."""
    for index in path[1:]:
        graph.sites[index] = f"{site}.{graph.operations[index].name}"
    graph.sites[path[0]] = site


def _letter(graph: Graph, operand: int | None) -> str:
    """The role in the names of the parameters that an operand is made from; empty unless there is exactly one."""
    names = [] if operand is None else [name for index in graph.upstream(operand) for name in graph.weights(index)]
    letters = {read_name(name)[0] for name in names} - {""}
    return letters.pop() if len(letters) == 1 else ""


def is_transpose(operation: Operation) -> bool:
    """Whether an operation swaps the last two axes."""
    n, arguments = operation.output.ndim, operation.arguments
    if operation.name == "permute":
        dims = arguments.get("dims", arguments.get("dim", ()))
        return [int(dim) % n for dim in dims] == [*range(n - 2), n - 1, n - 2]
    swapped = (arguments.get("dim0", -1), arguments.get("dim1", -2))
    return operation.name == "transpose" and n > 1 and {int(dim) % n for dim in swapped} == {n - 2, n - 1}


def _name_operands(graph: Graph) -> None:
    """Names the operands of the products, and the operations from the projections to them."""
    roles: dict[int, str] = {}
    for attention in graph.attentions:
        for role in set(_ROLES) & set(attention):
            if not graph.projects(attention[role]):
                graph.sites.setdefault(attention[role], role)
            for index in graph.upstream(attention[role]):
                roles[index] = "".join(letter for letter in _ROLES if letter in (role, *roles.get(index, "")))
    for index, letters in roles.items():
        if not graph.projects(index):
            graph.sites.setdefault(index, f"{letters}.{graph.operations[index].name}")
        else:
            graph.sites[index] = letters if letters in ("qkv", "kv", "qv") else f"{letters}_proj"


def _name_outputs(graph: Graph) -> None:
    """Names the operations that join the heads and project them, and the others after z."""
    found = [attention["z"] for attention in graph.attentions if "z" in attention]
    for index in found:
        found += [n for n in dict.fromkeys(graph.readers.get(index, [])) if n not in found and n not in graph.sites]
    below = sorted(index for index in found if index not in graph.sites)
    out = next((index for index in below if graph.projects(index)), None)
    for index in below:
        is_after = out is not None and index > out
        graph.sites[index] = f"{'out' if is_after else 'z'}.{graph.operations[index].name}"
    if out is None:
        return
    graph.sites[out] = "out"
    joined = graph.live_sources(out)[0]
    if joined is not None and joined in below:
        graph.sites[joined] = "concat"
        graph.attentions[-1]["concat"] = joined
