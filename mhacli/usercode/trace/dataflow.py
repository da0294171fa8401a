"""The dataflow of a user's attention: producers and readers, the site of each operation (q, scores, pattern, z), and
formulas."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from mhacli.sites import SITES
from mhacli.usercode.operations import address_of
from mhacli.usercode.types import Operation

PRODUCTS = ("matmul", "bmm", "mm", "einsum", "baddbmm")
PROJECTIONS = ("linear", "addmm", "conv1d", "bilinear", *PRODUCTS)
SOFTMAXES = ("softmax", "log_softmax", "softmax_")
KERNEL = "scaled_dot_product_attention"
_SCALINGS = ("mul", "div", "mul_", "div_")
_MASKINGS = ("masked_fill", "masked_fill_", "where", "setitem", "add", "add_", "sub", "sub_")
_ROLES = "qkv"
_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("q", "query", "queries", "wq"), "q"),
    **dict.fromkeys(("k", "key", "keys", "wk"), "k"),
    **dict.fromkeys(("v", "value", "values", "wv"), "v"),
}
"""Parts of parameter names that identify a projection."""


@dataclass(frozen=True)
class Dataflow:
    """Operations and their inputs. `made_by[i][j]` is the operation that produced input j of operation i, None for a tensor
    from outside. `names` are the names of outside tensors, by id; `parameters` the ids of parameters. `live` marks operations
    that depend on the inputs of attention."""

    operations: tuple[Operation, ...]
    made_by: tuple[tuple[int | None, ...], ...]
    names: Mapping[int, str]
    parameters: frozenset[int]
    live: Sequence[bool] = ()
    readers: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def reads_parameter(self, index: int) -> bool:
        """Whether an operation multiplies vectors by a weight."""
        operation = self.operations[index]
        if operation.name not in PROJECTIONS:
            return False
        live = [self.is_live(index, input_idx) for input_idx in range(len(operation.inputs))]
        return live.count(True) == 1

    def is_live(self, index: int, input_idx: int) -> bool:
        """Whether an input of an operation depends on the inputs of attention."""
        producer = self.made_by[index][input_idx]
        if producer is not None:
            return self.live[producer]
        tensor = self.operations[index].inputs[input_idx]
        return self.names.get(id(tensor), "mask") != "mask" and id(tensor) not in self.parameters

    def name_of(self, index: int, input_idx: int, sites: Mapping[int, str]) -> str:
        """The name of an input: its site, its parameter, or its name from outside."""
        producer = self.made_by[index][input_idx]
        if producer is not None:
            return sites[producer]
        return self.names.get(id(self.operations[index].inputs[input_idx]), "a tensor")


def flow_of(operations: Sequence[Operation], names: Mapping[int, str], parameters: frozenset[int]) -> Dataflow:
    """The dataflow of the operations, without those that return their input unchanged."""
    producers: dict[int, int] = {}
    operations_kept: list[Operation] = []
    made_by: list[tuple[int | None, ...]] = []
    for operation in operations:
        if _is_identity(operation):
            source = operation.inputs[0]
            if id(source) in producers:
                producers[id(operation.output)] = producers[id(source)]
            continue
        made_by.append(tuple(producers.get(id(tensor)) for tensor in operation.inputs))
        producers[id(operation.output)] = len(operations_kept)
        operations_kept.append(operation)
    live: list[bool] = []
    readers: dict[int, list[int]] = {}
    flow = Dataflow(tuple(operations_kept), tuple(made_by), names, parameters, live, readers)
    for index, sources in enumerate(made_by):
        live.append(any(flow.is_live(index, input_idx) for input_idx in range(len(sources))))
        for producer in sources:
            if producer is not None:
                readers.setdefault(producer, []).append(index)
    return flow


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


# --------------------------------------------------------------------------------------------------------------- roles


@dataclass
class Roles:
    """The sites of operations by index, and the attentions among them."""

    sites: dict[int, str] = field(default_factory=dict)
    attentions: list[AttentionOperations] = field(default_factory=list)


@dataclass(frozen=True)
class AttentionOperations:
    """One softmax or fused kernel: the operations that produce qk and z (for a kernel, itself) and the operands q, k and v,
    None for tensors from outside. `pattern` produces the weights of the values, None for a kernel. `is_swapped`: the keys are
    the first operand."""

    softmax: int
    qk: int | None
    z: int | None
    q: int | None = None
    k: int | None = None
    v: int | None = None
    is_swapped: bool = False
    pattern: int | None = None


def roles_of(flow: Dataflow) -> Roles:
    """The sites of operations that can be identified from the dataflow."""
    roles = Roles()
    claims: dict[int, set[str]] = {}
    for index, operation in enumerate(flow.operations):
        if operation.name == KERNEL:
            _add_kernel(flow, index, roles, claims)
        elif operation.name in SOFTMAXES and flow.live[index]:
            _add_softmax(flow, index, roles, claims)
    for index, claimed_roles in claims.items():
        letters = "".join(role for role in _ROLES if role in claimed_roles)
        if flow.reads_parameter(index):
            site = letters if len(letters) > 1 else f"{letters}_proj"
            roles.sites[index] = site if letters != "qk" else "qk_proj"
        else:
            roles.sites.setdefault(index, f"{letters}.{flow.operations[index].name}")
    _name_outputs(flow, roles)
    return roles


def _add_kernel(flow: Dataflow, index: int, roles: Roles, claims: dict[int, set[str]]) -> None:
    q, k, v = (*flow.made_by[index], None, None, None)[:3]
    roles.sites[index] = "z"
    roles.attentions.append(AttentionOperations(index, index, index, q, k, v))
    for role, producer in zip(_ROLES, (q, k, v), strict=True):
        _claim(flow, role, producer, roles, claims)


def _add_softmax(flow: Dataflow, index: int, roles: Roles, claims: dict[int, set[str]]) -> None:
    roles.sites[index] = "pattern"
    above = _path_up(flow, index)
    below = _path_down(flow, index)
    qk, z = (above[-1] if above else None), (below[-1] if below else None)
    q = k = v = None
    pattern: int | None = index
    is_swapped = False
    if qk is not None:
        _name_scores(flow, above, roles)
        first, second = _operands(flow, qk)
        is_swapped = (_hint(flow, first), _hint(flow, second)) == ("k", "q")
        q, k = (second, first) if is_swapped else (first, second)
        for role, producer in (("q", q), ("k", k)):
            _claim(flow, role, producer, roles, claims)
    if z is not None:
        _name_weighting(flow, below, roles)
        first, second = _operands(flow, z)
        pattern, v = (first, second) if first in (*below[:-1], index) else (second, first)
        _claim(flow, "v", v, roles, claims)
    roles.attentions.append(AttentionOperations(index, qk, z, q, k, v, is_swapped, pattern))


def _is_product_of_activations(flow: Dataflow, index: int) -> bool:
    """Whether an operation multiplies two tensors that depend on the inputs."""
    operation = flow.operations[index]
    live = [flow.is_live(index, input_idx) for input_idx in range(len(operation.inputs))]
    return operation.name in PRODUCTS and live.count(True) >= 2


def _path_up(flow: Dataflow, softmax: int) -> list[int]:
    """The path from the input of the softmax up to the product of queries and keys; empty if there is none."""

    def sources(index: int) -> list[int]:
        if flow.operations[index].name in SOFTMAXES:
            return []
        return [producer for producer in flow.made_by[index] if producer is not None and flow.live[producer]]

    return _path_to_product(flow, [producer for producer in flow.made_by[softmax][:1] if producer is not None], sources)


def _path_down(flow: Dataflow, softmax: int) -> list[int]:
    """The path from the readers of the pattern down to its product with the values; empty if there is none."""

    def readers(index: int) -> Sequence[int]:
        return () if flow.reads_parameter(index) else flow.readers.get(index, ())

    return _path_to_product(flow, flow.readers.get(softmax, ()), readers)


def _path_to_product(flow: Dataflow, starts: Sequence[int], neighbours: Callable[[int], Sequence[int]]) -> list[int]:
    """The shortest path to a product of activations; empty if there is none."""
    paths, visited = [[start] for start in starts], set[int]()
    while paths:
        path = paths.pop(0)
        if _is_product_of_activations(flow, path[-1]):
            return path
        following = [index for index in dict.fromkeys(neighbours(path[-1])) if index not in visited]
        visited.update(following)
        paths += [[*path, index] for index in following]
    return []


def _operands(flow: Dataflow, product: int) -> tuple[int | None, int | None]:
    input_idxs = [input_idx for input_idx in range(len(flow.made_by[product])) if flow.is_live(product, input_idx)][-2:]
    first, second = (flow.made_by[product][input_idx] for input_idx in input_idxs)
    return first, second


def _name_scores(flow: Dataflow, path: Sequence[int], roles: Roles) -> None:
    """Names the product, and the operations between it and the softmax."""
    roles.sites[path[-1]] = "qk"
    for index in path[:-1]:
        name = flow.operations[index].name
        kind = "scaled" if name in _SCALINGS else "masked" if name in _MASKINGS else f"scores.{name}"
        roles.sites[index] = kind
    if len(path) > 1:
        roles.sites[path[0]] = "scores"
    for index in path[:-1]:
        _name_mask(flow, index, roles)


def _name_mask(flow: Dataflow, index: int, roles: Roles) -> None:
    """Names the operations that compute a mask or bias, independent of the inputs."""
    pending = [producer for producer in flow.made_by[index] if producer is not None and not flow.live[producer]]
    is_given = "mask" in flow.names.values()
    for producer in pending:
        roles.sites.setdefault(producer, f"mask.{flow.operations[producer].name}" if is_given else "mask")
    while pending:
        for source in flow.made_by[pending.pop()]:
            if source is not None and source not in roles.sites:
                roles.sites[source] = f"mask.{flow.operations[source].name}"
                pending.append(source)


def _name_weighting(flow: Dataflow, path: Sequence[int], roles: Roles) -> None:
    for index in path[:-1]:
        name = flow.operations[index].name
        roles.sites[index] = "dropped" if name == "dropout" else f"pattern.{name}"
    roles.sites[path[-1]] = "z"


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


def _claim(flow: Dataflow, role: str, producer: int | None, roles: Roles, claims: dict[int, set[str]]) -> None:
    """Assigns the operations from a projection to the operand of a product to a role."""
    if producer is None:
        return
    if role == "k" and is_transpose(flow.operations[producer]) and flow.made_by[producer][0] is not None:
        roles.sites[producer] = "kᵀ"
        producer = flow.made_by[producer][0]
    elif role == "k" and is_transpose(flow.operations[producer]):
        roles.sites[producer] = "kᵀ"
        return
    assert producer is not None
    pending, visited = [producer], {producer}
    if not flow.reads_parameter(producer):
        roles.sites.setdefault(producer, role)
    while pending:
        index = pending.pop()
        claims.setdefault(index, set()).add(role)
        if flow.reads_parameter(index):
            continue
        for source in flow.made_by[index]:
            if source is not None and flow.live[source] and source not in visited:
                visited.add(source)
                pending.append(source)


def _hint(flow: Dataflow, producer: int | None) -> str | None:
    """The role in the names of the parameters upstream, None unless there is exactly one."""
    pending, roles, visited = [] if producer is None else [producer], set(), set()
    while pending:
        index = pending.pop()
        for input_idx, source in enumerate(flow.made_by[index]):
            roles |= set(_projections_named(flow.names.get(id(flow.operations[index].inputs[input_idx]), "")))
            if source is not None and source not in visited and not flow.reads_parameter(index):
                visited.add(source)
                pending.append(source)
    return roles.pop() if len(roles) == 1 else None


def _projections_named(name: str) -> Iterator[str]:
    for word in re.split(r"[._\d]+|(?<=[a-z])(?=[A-Z])", name):
        if word.lower() in _WORDS:
            yield _WORDS[word.lower()]


def _name_outputs(flow: Dataflow, roles: Roles) -> None:
    """Names the operations that concatenate and project z."""
    below = _descendants(flow, (attention.z for attention in roles.attentions if attention.z is not None))
    below = [index for index in below if index not in roles.sites]
    projection = next((index for index in below if flow.reads_parameter(index)), None)
    concatenation = None
    if projection is not None:
        roles.sites[projection] = "out"
        producer = next(
            (source for source in flow.made_by[projection] if source is not None and flow.live[source]), None
        )
        concatenation = producer if producer in below else None
    elif below and flow.operations[below[-1]].name in ("view", "reshape", "cat", "flatten", "permute", "squeeze"):
        concatenation = below[-1]
    for index in below:
        is_after = projection is not None and index > projection
        operation = flow.operations[index]
        if concatenation is not None and _key(operation) == _key(flow.operations[concatenation]):
            roles.sites.setdefault(index, "concat")
        roles.sites.setdefault(index, f"{'out' if is_after else 'z'}.{operation.name}")
    for index in _descendants(
        flow, (attention.softmax for attention in roles.attentions if attention.softmax != attention.z)
    ):
        roles.sites.setdefault(index, f"pattern.{flow.operations[index].name}")


def _key(operation: Operation) -> tuple[str, str | None, int | None]:
    return operation.name, operation.file, operation.line if operation.line is not None else id(operation)


def _descendants(flow: Dataflow, starts: Iterable[int]) -> list[int]:
    pending = list(starts)
    readers: set[int] = set()
    while pending:
        for reader in flow.readers.get(pending.pop(), ()):
            if reader not in readers:
                readers.add(reader)
                pending.append(reader)
    return sorted(readers)


# --------------------------------------------------------------------------------------------------------------- formula


_SIGNS: Mapping[str, str] = {
    "add": "+", "sub": "−", "mul": "·", "div": "/", "pow": "^", "matmul": "", "bmm": "", "mm": "",
    "eq": "==", "ne": "≠", "lt": "<", "le": "≤", "gt": ">", "ge": "≥", "logical_and": "and", "logical_or": "or",
}  # fmt: skip
_PER_NUMBER: Mapping[str, int] = {
    "softmax": 5, "log_softmax": 5, "add": 1, "sub": 1, "mul": 1, "div": 1, "exp": 1, "tanh": 1, "neg": 1, "pow": 1,
    "sqrt": 1, "rsqrt": 1, "sigmoid": 1, "cos": 1, "sin": 1, "relu": 1, "gelu": 1, "dropout": 2,
}  # fmt: skip
"""Floating-point operations for each element of the result, counted as for mha's own layer."""
_RESHAPES = ("view", "reshape", "flatten", "unflatten")
_MEANINGS: Mapping[str, str] = {
    "qkv": "one matrix product gives queries, keys and values side by side",
    "kv": "one matrix product gives keys and values side by side",
    "kᵀ": "the keys transposed: a product with them is a dot product for each query and key",
    "scaled": "without scaling, large dot products would leave nearly all weight on one key",
    "masked": "masked keys are hidden from the softmax, or a bias is added",
    "scores": "the input of the softmax: dot products, scaled and masked as above",
    "q": "the queries that attention uses",
    "k": "the keys that attention uses",
    "v": "the values that attention uses",
    "dropped": "dropout in training: some weights become 0, the rest are scaled up",
    "out": "the output of the layer: the output projection mixes the heads",
}
_UNORDERED = ("single", "part")
_KNOWN_SITES = ("q_proj", "k_proj", "v_proj", "qk", "pattern", "z", "concat")
"""Sites with the same meaning as in mha's own layer."""


def formula_of(flow: Dataflow, index: int, sites: Mapping[int, str], axes: Mapping[int, tuple[str, ...]]) -> str:
    """The operation as a formula of named inputs."""
    operation = flow.operations[index]
    names = [flow.name_of(index, input_idx, sites) for input_idx in range(len(operation.inputs))]
    arguments, bare = operation.arguments, operation.name.rstrip("_")
    if operation.name == "linear":
        return f"{names[0]} Wᵀ" + (" + b" if len(names) > 2 else "")
    if operation.name == "addmm":
        return f"{names[1]} W + b"
    if operation.name == "einsum":
        return f"einsum {arguments.get('equation', '')} of {', '.join(names)}"
    if operation.name in SOFTMAXES:
        return f"{bare}({names[0]}) over {softmax_axis(operation, axes[index])}"
    if operation.name == KERNEL:
        return _kernel_formula(names, arguments)
    if bare == "masked_fill":
        value = arguments["value"] if "value" in arguments else names[-1]
        return f"{names[0]}; {_number(value)} where {names[1]} is True"
    if bare == "where":
        choices = [_number(arguments[key]) if key in arguments else None for key in ("input", "other")]
        remaining_names = iter(names[1:])
        if_true, if_false = (choice or next(remaining_names, "a tensor") for choice in choices)
        return f"{if_true} where {names[0] if names else 'the condition'}, else {if_false}"
    if operation.name in PRODUCTS and flow.reads_parameter(index):
        return f"{names[0]} W" if flow.is_live(index, 0) else f"W {names[-1]}"
    if operation.name in ("bmm", "matmul", "mm", "baddbmm"):
        added = f"{names[0]} + " if operation.name == "baddbmm" else ""
        return added + " ".join(names[-2:])
    if bare in _SIGNS:
        return _with_sign(bare, names, arguments)
    return _shape_formula(operation, names, axes[index])


def _kernel_formula(names: Sequence[str], arguments: Mapping[str, Any]) -> str:
    scale = arguments.get("scale")
    scaled = "/ √d_head" if scale is None else f"· {_number(scale)}"
    mask = " + causal mask" if arguments.get("is_causal") else f" + {names[3]}" if len(names) > 3 else ""
    return f"softmax({names[0]} {names[1]}ᵀ {scaled}{mask}) {names[2]}, in one kernel"


def _with_sign(bare: str, names: Sequence[str], arguments: Mapping[str, Any]) -> str:
    """A binary operator with its operands, one of which may be a number."""
    if len(names) >= 2:
        return f"{names[0]} {_SIGNS[bare]} {names[1]}"
    name = names[0] if names else "a number"
    if "input" in arguments:  # the number is on the left
        return f"{_number(arguments['input'])} {_SIGNS[bare]} {name}"
    number = next((arguments[key] for key in ("other", "exponent", "1") if key in arguments), "")
    return f"{name} {_SIGNS[bare]} {_number(number)}"


def _shape_formula(operation: Operation, names: Sequence[str], axes: Sequence[str]) -> str:
    arguments, name = operation.arguments, operation.name
    source = ", ".join(names[:3]) + (f", … {len(names) - 3} more" if len(names) > 3 else "")
    if name == "transpose" and len(axes) > 1:
        swapped = [_axis(arguments.get(key, default_dim), axes) for key, default_dim in (("dim0", -2), ("dim1", -1))]
        return f"{source}, {' ↔ '.join(swapped)} exchanged"
    if name in ("permute", "movedim", *_RESHAPES, "expand", "squeeze", "unsqueeze"):
        return f"{source} as [{', '.join(axes)}]"
    if name == "contiguous":
        return f"{source}, copied into the order of its axes"
    if name in ("cat", "stack"):
        return f"{name} of {len(names)} tensors along {_axis(arguments.get('dim', 0), axes)}"
    if name in ("chunk", "split", "unbind", "tensor_split"):
        return f"part {int(arguments.get('output', 0)) + 1} of {source}, by {name}"
    if name == "getitem":
        return f"{source}[{_index(arguments.get('index', '…'))}]"
    if name == "setitem":
        value = _number(arguments["value"]) if "value" in arguments else names[-1]
        return f"{names[0]}[{_index(arguments.get('index', '…'))}] = {value}"
    settings = {
        key: _number(value) for key, value in arguments.items() if key not in ("output", "dtype") and value is not None
    }
    numbers = [value if key.isdigit() else f"{key} {value}" for key, value in settings.items()]
    return f"{name}({', '.join([*names[:3], *numbers[:3]])})"


def _axis(dim: object, axes: Sequence[str]) -> str:
    return axes[dim] if isinstance(dim, int) and -len(axes) <= dim < len(axes) else str(dim)


def _index(index: object) -> str:
    parts = index if isinstance(index, tuple) else (index,)
    return ", ".join(_index_item(item) for item in parts)


def _index_item(part: object) -> str:
    if isinstance(part, slice):
        return ":".join("" if end is None else str(end) for end in (part.start, part.stop))
    return "…" if part is Ellipsis else str(part)[:40]


def _number(value: object) -> str:
    if isinstance(value, float):
        return {float("inf"): "∞", float("-inf"): "−∞"}.get(value, f"{value:.6g}".replace("-", "−"))
    return str(value)[:40]


def softmax_axis(operation: Operation, axes: Sequence[str]) -> str:
    """The axis of a softmax."""
    dim = operation.arguments.get("dim")
    if dim is None:  # torch's legacy default
        dim = 0 if operation.output.ndim in (0, 1, 3) else 1
    return _axis(dim, axes)


# ------------------------------------------------------------------------------------------------------ meaning and cost


def meaning_of(site: str, axes: Sequence[str]) -> str:
    """The purpose of a site in one sentence; empty for an unknown site."""
    if site in ("q_proj", "k_proj", "v_proj") and not any("head·" in axis for axis in axes):
        site = f"{site[0]}_per_head"
    if site in _MEANINGS:
        return _MEANINGS[site]
    return SITES[site].words.explanation if site in _KNOWN_SITES or site.endswith("_per_head") else ""


def remark_of(operation: Operation, before: Sequence[str], axes: Sequence[str], *, is_attention: bool) -> str:
    """A remark on a likely error: a softmax over another axis than the keys, or a view that mixes axes."""
    if is_attention and operation.name in SOFTMAXES:
        axis = softmax_axis(operation, axes)
        remark = f"the softmax runs over {axis}, not over key: the weights of a query do not sum to 1"
        return "" if "key" in axis.replace("kv_head", "") else remark
    if operation.name in _RESHAPES and before:
        moved = _moved(_spelled(before), _spelled(axes))
        if moved is not None:
            n, words = operation.name, " and ".join(moved)
            return f"a {n} keeps the numbers in their order, and cannot exchange {words}: they are mixed"
    return ""


def _spelled(axes: Sequence[str]) -> list[set[str]]:
    """The words of each axis, without axes of size 1 and the q, k, v axis."""
    parts = [set(axis.split("·")) for axis in axes if axis not in _UNORDERED]
    plain = [{word for word in part if not word.isdigit()} for part in parts]
    return [({"head", "d_head"} | part - {"d_model"}) if "d_model" in part else part for part in plain]


def _moved(old: list[set[str]], new: list[set[str]]) -> tuple[str, str] | None:
    """Two words that would have to swap in memory, None if the view is valid. The order within a merged axis is unknown."""
    if sorted(word for part in old for word in part) != sorted(word for part in new for word in part):
        return None
    before, after = iter(old), iter(new)
    old_words: set[str] = set()
    new_words: set[str] = set()
    while True:
        old_words, new_words = old_words or next(before, set()), new_words or next(after, set())
        if not old_words or not new_words:
            return None
        shared = old_words & new_words
        if not shared or (old_words - shared and new_words - shared):
            return min(old_words - shared), min(new_words - shared)
        old_words, new_words = old_words - shared, new_words - shared


def flops_of(flow: Dataflow, index: int) -> int:
    """Floating-point operations, 2 for a multiply-add, 1 otherwise; 0 if unknown."""
    operation = flow.operations[index]
    n_out, bare = operation.output.numel(), operation.name.rstrip("_")
    if operation.name == "linear":
        return n_out * (2 * operation.inputs[1].shape[-1] + (len(operation.inputs) > 2))
    if operation.name == "einsum":
        letters = einsum_letters(operation.arguments.get("equation"), [t.ndim for t in operation.inputs])
        sizes = {x: n for term, t in zip(letters or (), operation.inputs, strict=False)
                 for x, n in zip(term, t.shape, strict=True)}  # fmt: skip
        return 2 * prod(sizes.values()) if letters else 0
    if operation.name in ("matmul", "bmm", "mm"):
        return 2 * n_out * operation.inputs[0].shape[-1]
    if operation.name in ("addmm", "baddbmm"):
        return n_out * (2 * operation.inputs[1].shape[-1] + 1)
    if operation.name == KERNEL:
        queries, keys, values = operation.inputs[:3]
        n_cells = queries.numel() // max(1, queries.shape[-1]) * keys.shape[-2]
        return n_cells * (2 * queries.shape[-1] + 6 + 2 * values.shape[-1])
    return _PER_NUMBER.get(bare, 0) * n_out


def einsum_letters(equation: object, n_axes: Sequence[int]) -> tuple[str, ...] | None:
    """The letters of each operand and of the result, with ellipses expanded; None for other equations."""
    if not isinstance(equation, str) or "->" not in equation:
        return None
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    if len(terms) != len(n_axes):
        return None
    missing = max((n - len(term.replace("...", "")) for term, n in zip(terms, n_axes, strict=True)), default=0)
    spare = "".join(chr(0x3B1 + number) for number in range(missing))  # Greek letters, unused in equations
    spelled = []
    for term, n in zip(terms, n_axes, strict=True):
        n_spare = n - len(term.replace("...", ""))
        spelled.append(term.replace("...", spare[missing - n_spare :]))
        if len(spelled[-1]) != n:
            return None
    return (*spelled, right.replace("...", spare))
