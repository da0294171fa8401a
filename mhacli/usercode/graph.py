"""One recorded call of a user's attention as a graph, with the site of each operation: q, scores, pattern, z."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mhacli.usercode.call.user_attention import UserAttention
from mhacli.usercode.inputs import Inputs, MaskForm, lengths_of, map_rows
from mhacli.usercode.operations import Operation, address_of, watch
from mhacli.usercode.process import SourceLine
from mhacli.usercode.projections import read_name

SOFTMAXES = ("softmax", "log_softmax", "softmax_")
KERNEL = "scaled_dot_product_attention"
_ROLES = "qkv"
_UNNAMED = "a tensor"


@dataclass
class Graph:
    """A recorded call. `given` has its inputs by name, and `out` is its result. Each softmax or kernel has an entry in
    `attentions`, the operation of each of its sites; `swapped` are the products whose first operand is the keys."""

    out: Tensor
    given: dict[str, Tensor]
    operations: tuple[Operation, ...] = ()
    attentions: list[dict[str, Operation]] = field(default_factory=list)
    swapped: set[Operation] = field(default_factory=set)

    def tensors_at_sites(self) -> dict[str, tuple[SourceLine, list[Tensor]]]:
        """The tensors of each site, one for each softmax or kernel, with the line that makes the first."""
        tensors: dict[str, tuple[SourceLine, list[Tensor]]] = {}
        for attention in self.attentions:
            for site, operation in attention.items():
                _, outputs = tensors.setdefault(site, (operation.at, []))
                outputs.append(operation.output)
        line = self.operations[-1].at if self.operations else SourceLine()
        return tensors | {"out": (line, [self.out])}


def weights_of(operation: Operation) -> dict[str, Tensor]:
    """The learned tensors that an operation on the inputs reads, directly or through views, by name."""
    if not operation.live:
        return {}
    fixed = [source for source in operation.sources if not source.live]
    readers = [operation, *(each for source in fixed for each in source.upstream())]
    read = [source for reader in readers for source in reader.sources]
    return {leaf.site: leaf.output for leaf in read if leaf.output.requires_grad and leaf.site != _UNNAMED}


# ------------------------------------------------------------------------------------------------------------- recording


def recorded(subject: UserAttention, inputs: Inputs, seed: int, **masks: MaskForm | None) -> Graph:
    """One recorded call. Raises what the call raises."""
    inputs = map_rows(inputs, lambda rows: rows.to(subject.device, subject.dtype))
    out, operations = watch(partial(subject, inputs, seed=seed, **masks), subject.built.files)
    names = ("q", "k", "v") if subject.is_function else ("x", "context", "values")
    rows = zip(names, (inputs.queries, inputs.keys, inputs.values), strict=True)
    graph = Graph(out, {name: tensor for name, tensor in rows if tensor is not None}, operations)
    held = _held_tensors(subject)
    for operation in operations:
        for leaf in operation.sources:
            if not leaf.name and not leaf.site:
                _name_leaf(graph, leaf, held, inputs)
        has_their_numbers = re.fullmatch(r"new_\w+|\w+_like", operation.name) is None
        operation.live = has_their_numbers and bool(operation.live_sources)
    _name_sites(graph)
    return graph


def _held_tensors(subject: UserAttention) -> dict[int, str]:
    """The names of the module's parameters, buffers and other tensors, by memory address."""
    module, held = subject.built.module, dict(getattr(subject.built.call, "__dict__", {}))
    if module is not None:
        held |= dict(module.named_buffers()) | dict(module.named_parameters())
    return {address_of(tensor): name for name, tensor in held.items() if isinstance(tensor, Tensor)}


def _name_leaf(graph: Graph, leaf: Operation, held: Mapping[int, str], inputs: Inputs) -> None:
    """Names a tensor from outside: a parameter or buffer, an input in any layout, the mask."""
    tensor, leaf.site = leaf.output, _UNNAMED
    if address_of(tensor) in held:
        leaf.site = held[address_of(tensor)]
        return
    for name, rows in graph.given.items():
        is_like = name != "mask" and (tensor.dtype, tensor.numel()) == (rows.dtype, rows.numel())
        if is_like and torch.equal(tensor.flatten().sort().values, rows.flatten().sort().values):
            leaf.site, leaf.live = name, True
            return
    is_masked = inputs.allowed is not None or inputs.real is not None
    if is_masked and tensor.ndim > 1 and tuple(tensor.shape[-2:]) == lengths_of(inputs)[1:]:
        leaf.site = "mask"
        graph.given.setdefault("mask", tensor)


# ----------------------------------------------------------------------------------------------------------------- sites


def _name_sites(graph: Graph) -> None:
    """Names the operations: a site such as `q`, what leads to it, such as `q.transpose`, else torch's name."""
    for operation in graph.operations:
        if operation.name == KERNEL:
            operands = zip(_ROLES, operation.sources, strict=False)
            graph.attentions.append({role: source for role, source in operands if source.name} | {"z": operation})
        elif operation.name in SOFTMAXES and operation.live:
            graph.attentions.append(_around_softmax(graph, operation))
    _name_operands(graph)
    for attention in graph.attentions:
        sites = [site for site in ("scores", "qk", "pattern", "z") if site in attention]
        for site in sites:
            attention[site].site = site
        for site in sites:
            _name_before(attention[site], site)
    _name_outputs(graph)
    for operation in graph.operations:
        operation.site = operation.site or operation.name


def _around_softmax(graph: Graph, softmax: Operation) -> dict[str, Operation]:
    """The operations of the sites around a softmax. Without a product before or after it, the sites there are unknown."""
    _, qk = _up_to_product(softmax, lambda operation: operation.live_sources)
    after, z = _up_to_product(softmax, lambda operation: operation.readers)
    found: dict[str, Operation] = {}
    if qk is not None:
        q, k = qk.live_sources[-2:]
        if (_letter(q), _letter(k)) == ("k", "q"):
            graph.swapped.add(qk)
            q, k = k, q
        if is_transpose(k):
            k.site = "kᵀ"
            k = k.sources[0]
        found |= {"q": q, "k": k, "qk": qk, "scores": softmax.live_sources[0]}
    if z is not None:
        pattern, v = z.live_sources[-2:]
        if pattern not in after:
            pattern, v = v, pattern
        found |= {"pattern": pattern, "v": v, "z": z}
    elif qk is not None:
        found["pattern"] = softmax
    return {site: operation for site, operation in found.items() if operation.name}


def _up_to_product(
    start: Operation, neighbours: Callable[[Operation], Sequence[Operation]]
) -> tuple[list[Operation], Operation | None]:
    """The operations from one on in a direction, the nearest first, up to a product, and this product if there is one."""
    reached = [start]
    for operation in reached:
        for other in neighbours(operation):
            if other.is_product:
                return reached, other
            if other not in reached:
                reached.append(other)
    return reached, None


def _letter(operand: Operation) -> str:
    """The role in the names of the parameters that an operand is made from; empty unless there is exactly one."""
    names = [name for operation in operand.upstream() for name in weights_of(operation)]
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
    roles: dict[Operation, str] = {}
    for attention in graph.attentions:
        for role in set(_ROLES) & set(attention):
            if not attention[role].projects:
                attention[role].site = attention[role].site or role
            for operation in attention[role].upstream():
                roles[operation] = "".join(letter for letter in _ROLES if letter in (role, *roles.get(operation, "")))
    for operation, letters in roles.items():
        if operation.projects:
            operation.site = letters if letters in ("qkv", "kv", "qv") else f"{letters}_proj"
        elif not operation.site:
            operation.site = f"{letters}.{operation.name}"


def _name_before(operation: Operation, site: str) -> None:
    """Names what leads to a site, back to what has a name."""
    for source in operation.live_sources:
        if not source.site:
            source.site = f"{site}.{source.name}"
            _name_before(source, site)


def _name_outputs(graph: Graph) -> None:
    """Names the operations that join the heads and project them, and the others after z."""
    found = [attention["z"] for attention in graph.attentions if "z" in attention]
    for operation in found:
        found += [reader for reader in operation.readers if reader not in found and not reader.site]
    below = [operation for operation in graph.operations if operation in found and not operation.site]
    out = next((operation for operation in below if operation.projects), None)
    for operation in below:
        is_after = out is not None and below.index(operation) > below.index(out)
        operation.site = f"{'out' if is_after else 'z'}.{operation.name}"
    if out is None:
        return
    out.site = "out"
    joined = out.live_sources[0]
    if joined in below:
        joined.site = "concat"
        graph.attentions[-1]["concat"] = joined
