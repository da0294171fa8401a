"""One recorded call of a user's attention as a graph, with the site of each operation: q, scores, pattern, z."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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

PRODUCTS = ("matmul", "bmm", "mm", "einsum", "baddbmm")
_PROJECTIONS = ("linear", "addmm", "conv1d", "bilinear", *PRODUCTS)
SOFTMAXES = ("softmax", "log_softmax", "softmax_")
KERNEL = "scaled_dot_product_attention"
RESHAPES = ("view", "reshape", "flatten", "unflatten")
_JOINS = (*RESHAPES, "cat", "permute", "squeeze")
_ROLES = "qkv"


@dataclass
class Graph:
    """A recorded call. `given` has its inputs by name, and `out` is its result.

    `sources[i][j]` is the operation that made input j of operation i, None for a tensor from outside. Those are, by id, the
    inputs in `names` and parameters, buffers and the mask in `constants`. `live` says which operations depend on the inputs. Each
    softmax or kernel has an entry in `attentions`, the operation of each of its sites. `sites` names every operation.
    """

    out: Tensor
    given: dict[str, Tensor]
    operations: list[Operation] = field(default_factory=list)
    sources: list[tuple[int | None, ...]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    constants: dict[int, str] = field(default_factory=dict)
    live: list[bool] = field(default_factory=list)
    readers: dict[int, list[int]] = field(default_factory=dict)
    attentions: list[dict[str, int]] = field(default_factory=list)
    sites: dict[int, str] = field(default_factory=dict)

    def is_live(self, index: int, input_idx: int) -> bool:
        """Whether an input of an operation depends on the inputs of attention."""
        source = self.sources[index][input_idx]
        return id(self.operations[index].inputs[input_idx]) in self.names if source is None else self.live[source]

    def live_sources(self, index: int) -> list[int | None]:
        """What made the inputs that depend on the inputs of attention."""
        return [source for n, source in enumerate(self.sources[index]) if self.is_live(index, n)]

    def projects(self, index: int) -> bool:
        """Whether an operation multiplies vectors by a weight."""
        return self.operations[index].name in _PROJECTIONS and len(self.live_sources(index)) == 1

    def multiplies(self, index: int) -> bool:
        """Whether an operation multiplies two tensors that depend on the inputs."""
        return self.operations[index].name in PRODUCTS and len(self.live_sources(index)) >= 2

    def upstream(self, start: int) -> list[int]:
        """The operation and those before it, back to a projection; for one that no input reaches, all before it."""
        found = [start]
        for index in found:
            if not self.projects(index):
                before = dict.fromkeys(source for source in self.sources[index] if source is not None)
                found += [n for n in before if n not in found and self.live[n] == self.live[start]]
        return found

    def downstream(self, starts: Iterable[int]) -> list[int]:
        """All operations that depend on some."""
        found = list(dict.fromkeys(starts))
        first = len(found)
        for index in found:
            found += [reader for reader in dict.fromkeys(self.readers.get(index, ())) if reader not in found]
        return sorted(found[first:])

    def weights(self, index: int) -> dict[str, Tensor]:
        """The learned tensors that an operation on the inputs reads, directly or through views, by name."""
        if not self.live[index]:
            return {}
        views = [source for source in self.sources[index] if source is not None and not self.live[source]]
        readers = [index, *(n for view in views for n in self.upstream(view))]
        read = [tensor for n in readers for tensor in self.operations[n].inputs if id(tensor) in self.constants]
        return {self.constants[id(tensor)]: tensor for tensor in read if tensor.requires_grad}

    def tensors_at_sites(self) -> dict[str, tuple[SourceLine, list[Tensor]]]:
        """The tensors of each site, one for each softmax or kernel, with the line that makes the first."""
        joined = [index for index, site in self.sites.items() if site == "concat"]
        everywhere = [*self.attentions, *({"concat": index} for index in joined[-1:])]
        indexes = {site: [found[site] for found in everywhere if site in found] for part in everywhere for site in part}
        tensors = {
            site: (self.operations[found[0]].at, [self.operations[n].output for n in dict.fromkeys(found)])
            for site, found in indexes.items()
        }
        return tensors | {"out": (self.operations[-1].at if self.operations else SourceLine(), [self.out])}


# ------------------------------------------------------------------------------------------------------------- recording


def recorded(subject: UserAttention, inputs: Inputs, seed: int, masks: CallMasks) -> Graph:
    """One recorded call. Raises what the call raises."""
    inputs = map_rows(inputs, lambda rows: rows.to(subject.device, subject.dtype))
    file = subject.built.file
    is_torch = file is not None and file.startswith(str(Path(torch.__file__).parent))
    call = partial(subject, inputs, mask=masks.mask, padding=masks.padding, seed=seed)
    output, operations = watch(call, [] if file is None or is_torch else [file])
    names = ("q", "k", "v") if subject.is_function else ("x", "context", "values")
    given = {name: rows for name, rows in zip(names, inputs[:3], strict=True) if rows is not None}
    graph = Graph(output.out, given)
    _connect(graph, operations)
    _name_outside(graph, subject, inputs)
    for index in range(len(graph.operations)):
        graph.live.append(any(graph.is_live(index, n) for n in range(len(graph.sources[index]))))
    _name_sites(graph)
    return graph


def _connect(graph: Graph, operations: Iterable[Operation]) -> None:
    """Adds the operations, but not those that return their input unchanged."""
    makers: dict[int, int | None] = {}
    for operation in operations:
        if _is_identity(operation):
            makers.setdefault(id(operation.output), makers.get(id(operation.inputs[0])))
            continue
        index = len(graph.operations)
        graph.operations.append(operation)
        graph.sources.append(tuple(makers.get(id(tensor)) for tensor in operation.inputs))
        makers[id(operation.output)] = index
        for source in graph.sources[-1]:
            if source is not None:
                graph.readers.setdefault(source, []).append(index)


def _is_identity(operation: Operation) -> bool:
    """Whether an operation returns its input: dropout in eval mode, `contiguous` on a contiguous tensor."""
    if not operation.inputs or operation.name.endswith("_") or operation.name == "setitem":
        return False
    source, output = operation.inputs[0], operation.output
    return output is source or (
        (address_of(output) or id(output)) == (address_of(source) or id(source))
        and output.shape == source.shape
        and output.stride() == source.stride()
        and output.storage_offset() == source.storage_offset()
        and output.dtype == source.dtype
    )


def _name_outside(graph: Graph, subject: UserAttention, inputs: Inputs) -> None:
    """Names the tensors from outside: an input or its copy, a parameter or buffer, the mask."""
    module, call = subject.built.module, subject.built.call
    attributes = vars(call) if hasattr(call, "__dict__") else {}
    held = {name: value for name, value in attributes.items() if isinstance(value, Tensor)}
    if module is not None:
        held |= dict(module.named_buffers()) | dict(module.named_parameters())
    held_names = {address_of(tensor): name for name, tensor in held.items()}
    is_masked = inputs.allowed is not None or inputs.real is not None
    pairs = zip(graph.operations, graph.sources, strict=True)
    outside = [
        tensor
        for operation, sources in pairs
        for tensor, source in zip(operation.inputs, sources, strict=True)
        if source is None
    ]
    lengths, rows = lengths_of(inputs)[1:], dict(graph.given)
    for tensor in outside:
        address, name = address_of(tensor), _name_of_copy(tensor, rows)
        if address and address in held_names:
            graph.constants[id(tensor)] = held_names[address]
        elif name is not None:
            graph.names[id(tensor)] = name
        elif is_masked and tensor.ndim > 1 and tuple(tensor.shape[-2:]) == lengths:
            graph.constants[id(tensor)] = "mask"
            graph.given.setdefault("mask", tensor)


def _name_of_copy(tensor: Tensor, given: Mapping[str, Tensor]) -> str | None:
    """The name of the input that a tensor is, or a copy of it, with the batch first or second."""
    for name, rows in given.items():
        if address_of(rows) == address_of(tensor):
            return name
    for name, rows in given.items():
        if tensor.dtype == rows.dtype and tensor.ndim == rows.ndim and rows.ndim > 1:
            layouts = (rows, rows.transpose(0, 1))
            if any(tensor.shape == other.shape and torch.equal(tensor, other) for other in layouts):
                return name
    return None


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

    def before(index: int) -> Sequence[int]:
        is_other = graph.operations[index].name in SOFTMAXES and index != softmax
        return [] if is_other else [n for n in graph.sources[index] if n is not None and graph.live[n]]

    def after(index: int) -> Sequence[int]:
        return () if graph.projects(index) else graph.readers.get(index, ())

    above, below = _path(graph, softmax, before), _path(graph, softmax, after)
    found: dict[str, int | None] = {"pattern": softmax if not below else below[-2]}
    if above:
        found |= {"qk": above[-1], "scores": above[1]}
        first, second = graph.live_sources(above[-1])[-2:]
        is_swapped = (_letter(graph, first), _letter(graph, second)) == ("k", "q")
        found |= {"q": second, "k": first} if is_swapped else {"q": first, "k": second}
        _name_path(graph, above[1:], "scores")
        _name_masks(graph, above[1:])
    if below:
        first, second = graph.live_sources(below[-1])[-2:]
        found |= {"z": below[-1], "v": second if first == below[-2] else first}
    _name_path(graph, list(reversed(below[:-1])) or [softmax], "pattern")
    graph.sites |= {index: site for site, index in found.items() if site in ("qk", "z") and index is not None}
    key = found.get("k")
    if key is not None and is_transpose(graph.operations[key]):
        graph.sites[key] = "kᵀ"
        found["k"] = graph.sources[key][0]
    return {site: index for site, index in found.items() if index is not None}


def _path(graph: Graph, start: int, neighbours: Callable[[int], Sequence[int]]) -> list[int]:
    """The shortest path from an operation to a product of activations; empty if there is none."""
    paths, visited = [[start]], {start}
    for path in paths:
        for index in dict.fromkeys(neighbours(path[-1])):
            if graph.multiplies(index):
                return [*path, index]
            if index not in visited:
                visited.add(index)
                paths.append([*path, index])
    return []


def _name_path(graph: Graph, path: Sequence[int], site: str) -> None:
    """Names operations that lead to a site, the last one first."""
    graph.sites |= {index: f"{site}.{graph.operations[index].name}" for index in path[1:]} | {path[0]: site}


def _name_masks(graph: Graph, path: Sequence[int]) -> None:
    """Names the operations that compute a mask or bias, independent of the inputs."""
    is_given = "mask" in graph.given
    for mask in (source for index in path for source in graph.sources[index] if source is not None):
        for number, index in enumerate([] if graph.live[mask] else graph.upstream(mask)):
            name = "mask" if number == 0 and not is_given else f"mask.{graph.operations[index].name}"
            graph.sites.setdefault(index, name)


def _letter(graph: Graph, operand: int | None) -> str:
    """The role in the names of the parameters that an operand is made from; empty unless there is exactly one."""
    if operand is None:
        return ""
    names = [name for index in graph.upstream(operand) for name in graph.weights(index)]
    letters = {read_name(name)[0] for name in names} - {""}
    return letters.pop() if len(letters) == 1 else ""


def _name_operands(graph: Graph) -> None:
    """Names the operands of the products, and the operations from the projections to them."""
    roles: dict[int, str] = {}
    for attention in graph.attentions:
        for role in _ROLES:
            operand = attention.get(role)
            if operand is None:
                continue
            if not graph.projects(operand):
                graph.sites.setdefault(operand, role)
            for index in graph.upstream(operand):
                earlier = roles.get(index, "")
                roles[index] = earlier if role in earlier else earlier + role
    for index, letters in roles.items():
        if not graph.projects(index):
            graph.sites.setdefault(index, f"{letters}.{graph.operations[index].name}")
        else:
            graph.sites[index] = letters if letters in ("qkv", "kv", "qv") else f"{letters}_proj"


def _name_outputs(graph: Graph) -> None:
    """Names the operations that join the heads and project them, and what else depends on z or on a pattern."""
    outputs = (attention["z"] for attention in graph.attentions if "z" in attention)
    below = [index for index in graph.downstream(outputs) if index not in graph.sites]
    projection = next((index for index in below if graph.projects(index)), None)
    joined = None
    if projection is not None:
        joined = next(iter(graph.live_sources(projection)))
    elif below and graph.operations[below[-1]].name in _JOINS:
        joined = below[-1]
    for index in below:
        operation, last = graph.operations[index], graph.operations[joined if joined in below else index]
        is_join = joined in below and (operation.name, operation.at) == (last.name, last.at)
        is_after = projection is not None and index > projection
        name = f"{'out' if is_after else 'z'}.{operation.name}"
        graph.sites[index] = "out" if index == projection else "concat" if is_join else name
    for index in graph.downstream(attention["pattern"] for attention in graph.attentions if "pattern" in attention):
        graph.sites.setdefault(index, f"pattern.{graph.operations[index].name}")


# ------------------------------------------------------------------------------------------------------------ transposes


def axis_order(operation: Operation) -> list[int]:
    """The order of the input's axes in the output; unchanged except for a transpose or permutation."""
    n, arguments = operation.output.ndim, operation.arguments
    order = list(range(n))
    if operation.name == "transpose" and n > 1:
        first, second = int(arguments.get("dim0", -1)) % n, int(arguments.get("dim1", -2)) % n
        order[first], order[second] = second, first
    elif operation.name == "permute":
        order = [int(dim) % n for dim in arguments.get("dims", order)]
    return order


def is_transpose(operation: Operation) -> bool:
    """Whether an operation swaps the last two axes."""
    n = operation.output.ndim
    return n > 1 and axis_order(operation) == [*range(n - 2), n - 1, n - 2]
