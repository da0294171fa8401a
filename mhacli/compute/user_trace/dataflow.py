"""Which operation of somebody's attention reads which, and what each is: q, scores, pattern, z, by where it stands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mhacli.adapters.usercode.operations import address_of
from mhacli.adapters.usercode.user_attention import Operation

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
"""Parts of names that say which projection a parameter belongs to."""


@dataclass(frozen=True)
class Flow:
    """Operations and what they read: `made_by[i][j]` is the operation that made input j of operation i, None where it came
    from outside. `names` are those of tensors from outside, by identity; of parameters in `parameters`. `live` tells whether
    the rows that attention was asked about take part."""

    operations: tuple[Operation, ...]
    made_by: tuple[tuple[int | None, ...], ...]
    names: Mapping[int, str]
    parameters: frozenset[int]
    live: Sequence[bool] = ()
    readers: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def reads_parameter(self, index: int) -> bool:
        """Whether an operation multiplies rows by a weight."""
        operation = self.operations[index]
        if operation.name not in PROJECTIONS:
            return False
        live = [self.is_live(index, place) for place in range(len(operation.inputs))]
        return live.count(True) == 1

    def is_live(self, index: int, place: int) -> bool:
        """Whether an input depends on the rows that attention was asked about."""
        made = self.made_by[index][place]
        if made is not None:
            return self.live[made]
        tensor = self.operations[index].inputs[place]
        return self.names.get(id(tensor), "mask") != "mask" and id(tensor) not in self.parameters

    def name_of(self, index: int, place: int, sites: Mapping[int, str]) -> str:
        """What an input is called: the site that made it, a parameter, or a tensor from outside."""
        made = self.made_by[index][place]
        if made is not None:
            return sites[made]
        return self.names.get(id(self.operations[index].inputs[place]), "a tensor")


def flow_of(operations: Sequence[Operation], names: Mapping[int, str], parameters: frozenset[int]) -> Flow:
    """The flow of the operations that make something; what gives its input back unchanged is left out."""
    makers: dict[int, int] = {}
    kept: list[Operation] = []
    made_by: list[tuple[int | None, ...]] = []
    for operation in operations:
        if _is_nothing(operation):
            source = operation.inputs[0]
            if id(source) in makers:
                makers[id(operation.output)] = makers[id(source)]
            continue
        made_by.append(tuple(makers.get(id(tensor)) for tensor in operation.inputs))
        makers[id(operation.output)] = len(kept)
        kept.append(operation)
    live: list[bool] = []
    readers: dict[int, list[int]] = {}
    flow = Flow(tuple(kept), tuple(made_by), names, parameters, live, readers)
    for index, sources in enumerate(made_by):
        live.append(any(flow.is_live(index, place) for place in range(len(sources))))
        for maker in sources:
            if maker is not None:
                readers.setdefault(maker, []).append(index)
    return flow


def _is_nothing(operation: Operation) -> bool:
    """Whether an operation gives back what it was given: dropout in evaluation, `contiguous` of what is so already."""
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
    """The sites of operations by their places in the flow, and the attentions among them."""

    sites: dict[int, str] = field(default_factory=dict)
    attentions: list[Attention] = field(default_factory=list)


@dataclass(frozen=True)
class Attention:
    """One softmax, or one call of a kernel: the products before and behind it (those of a kernel are itself), and the
    operations that made their operands, None where they came from outside. `pattern` is what the product with the values
    reads, None of a kernel. `is_swapped`: the first operand is the keys."""

    softmax: int
    qk: int | None
    z: int | None
    q: int | None = None
    k: int | None = None
    v: int | None = None
    is_swapped: bool = False
    pattern: int | None = None


def roles_of(flow: Flow) -> Roles:
    """What can be told of the operations from how they follow each other; what cannot is left out."""
    roles = Roles()
    claims: dict[int, set[str]] = {}
    for index, operation in enumerate(flow.operations):
        if operation.name == KERNEL:
            _take_kernel(flow, index, roles, claims)
        elif operation.name in SOFTMAXES and flow.live[index]:
            _take_softmax(flow, index, roles, claims)
    for index, of in claims.items():
        letters = "".join(role for role in _ROLES if role in of)
        if flow.reads_parameter(index):
            own = letters if len(letters) > 1 else f"{letters}_proj"
            roles.sites[index] = own if letters != "qk" else "qk_proj"
        else:
            roles.sites.setdefault(index, f"{letters}.{flow.operations[index].name}")
    _take_result(flow, roles)
    return roles


def _take_kernel(flow: Flow, index: int, roles: Roles, claims: dict[int, set[str]]) -> None:
    q, k, v = (*flow.made_by[index], None, None, None)[:3]
    roles.sites[index] = "z"
    roles.attentions.append(Attention(index, index, index, q, k, v))
    for role, made in zip(_ROLES, (q, k, v), strict=True):
        _claim(flow, role, made, roles, claims)


def _take_softmax(flow: Flow, index: int, roles: Roles, claims: dict[int, set[str]]) -> None:
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
        for role, made in (("q", q), ("k", k)):
            _claim(flow, role, made, roles, claims)
    if z is not None:
        _name_below(flow, below, roles)
        first, second = _operands(flow, z)
        pattern, v = (first, second) if first in (*below[:-1], index) else (second, first)
        _claim(flow, "v", v, roles, claims)
    roles.attentions.append(Attention(index, qk, z, q, k, v, is_swapped, pattern))


def _is_product(flow: Flow, index: int) -> bool:
    """Whether an operation multiplies rows with rows, no weight among them."""
    operation = flow.operations[index]
    live = [flow.is_live(index, place) for place in range(len(operation.inputs))]
    return operation.name in PRODUCTS and live.count(True) >= 2


def _path_up(flow: Flow, softmax: int) -> list[int]:
    """From what the softmax reads up to the product of queries and keys; empty where there is none."""
    paths: list[list[int]] = [[made] for made in flow.made_by[softmax][:1] if made is not None]
    seen: set[int] = set()
    while paths:
        path = paths.pop(0)
        if _is_product(flow, path[-1]):
            return path
        if flow.operations[path[-1]].name in SOFTMAXES:
            continue
        for made in flow.made_by[path[-1]]:
            if made is not None and flow.live[made] and made not in seen:
                seen.add(made)
                paths.append([*path, made])
    return []


def _path_down(flow: Flow, softmax: int) -> list[int]:
    """From what reads the pattern down to its product with the values; empty where there is none."""
    paths: list[list[int]] = [[reader] for reader in flow.readers.get(softmax, ())]
    seen: set[int] = set()
    while paths:
        path = paths.pop(0)
        if _is_product(flow, path[-1]):
            return path
        for reader in flow.readers.get(path[-1], ()):
            if reader not in seen and not flow.reads_parameter(path[-1]):
                seen.add(reader)
                paths.append([*path, reader])
    return []


def _operands(flow: Flow, product: int) -> tuple[int | None, int | None]:
    places = [place for place in range(len(flow.made_by[product])) if flow.is_live(product, place)][-2:]
    first, second = (flow.made_by[product][place] for place in places)
    return first, second


def _name_scores(flow: Flow, path: Sequence[int], roles: Roles) -> None:
    """The product, and what becomes of it until the softmax reads it."""
    roles.sites[path[-1]] = "qk"
    for index in path[:-1]:
        name = flow.operations[index].name
        kind = "scaled" if name in _SCALINGS else "masked" if name in _MASKINGS else f"scores.{name}"
        roles.sites[index] = kind
    if len(path) > 1:
        roles.sites[path[0]] = "scores"
    for index in path[:-1]:
        _name_mask(flow, index, roles)


def _name_mask(flow: Flow, index: int, roles: Roles) -> None:
    """What a score is compared or added with, where it does not come from the rows themselves."""
    waiting = [made for made in flow.made_by[index] if made is not None and not flow.live[made]]
    is_given = "mask" in flow.names.values()
    for made in waiting:
        roles.sites.setdefault(made, f"mask.{flow.operations[made].name}" if is_given else "mask")
    while waiting:
        for source in flow.made_by[waiting.pop()]:
            if source is not None and source not in roles.sites:
                roles.sites[source] = f"mask.{flow.operations[source].name}"
                waiting.append(source)


def _name_below(flow: Flow, path: Sequence[int], roles: Roles) -> None:
    for index in path[:-1]:
        name = flow.operations[index].name
        roles.sites[index] = "dropped" if name == "dropout" else f"pattern.{name}"
    roles.sites[path[-1]] = "z"


def is_exchange(operation: Operation) -> bool:
    """Whether an operation exchanges the last two axes."""
    n = operation.output.ndim
    said = operation.arguments
    if operation.name == "transpose":
        dims = {int(said.get("dim0", -1)) % n, int(said.get("dim1", -2)) % n} if n > 1 else set()
        return dims == {n - 1, n - 2}
    if operation.name == "permute":
        dims_given = [int(one) % n for one in said.get("dims", ())]
        return dims_given == [*range(n - 2), n - 1, n - 2]
    return False


def _claim(flow: Flow, role: str, made: int | None, roles: Roles, claims: dict[int, set[str]]) -> None:
    """Everything on the way from a projection to the operand of a product belongs to its role."""
    if made is None:
        return
    if role == "k" and is_exchange(flow.operations[made]) and flow.made_by[made][0] is not None:
        roles.sites[made] = "kᵀ"
        made = flow.made_by[made][0]
    elif role == "k" and is_exchange(flow.operations[made]):
        roles.sites[made] = "kᵀ"
        return
    assert made is not None
    waiting, seen = [made], {made}
    if not flow.reads_parameter(made):
        roles.sites.setdefault(made, role)
    while waiting:
        index = waiting.pop()
        claims.setdefault(index, set()).add(role)
        if flow.reads_parameter(index):
            continue
        for source in flow.made_by[index]:
            if source is not None and flow.live[source] and source not in seen:
                seen.add(source)
                waiting.append(source)


def _hint(flow: Flow, made: int | None) -> str | None:
    """Which projection the names of parameters on the way up speak of, where they speak of one alone."""
    waiting, found, seen = [] if made is None else [made], set(), set()
    while waiting:
        index = waiting.pop()
        for place, source in enumerate(flow.made_by[index]):
            found |= set(_spoken(flow.names.get(id(flow.operations[index].inputs[place]), "")))
            if source is not None and source not in seen and not flow.reads_parameter(index):
                seen.add(source)
                waiting.append(source)
    return found.pop() if len(found) == 1 else None


def _spoken(name: str) -> Iterator[str]:
    for word in re.split(r"[._\d]+|(?<=[a-z])(?=[A-Z])", name):
        if word.lower() in _WORDS:
            yield _WORDS[word.lower()]


def _take_result(flow: Flow, roles: Roles) -> None:
    """What becomes of z: put side by side, and projected."""
    below = _descendants(flow, (one.z for one in roles.attentions if one.z is not None))
    below = [index for index in below if index not in roles.sites]
    projection = next((index for index in below if flow.reads_parameter(index)), None)
    joined = None
    if projection is not None:
        roles.sites[projection] = "out"
        made = next((m for m in flow.made_by[projection] if m is not None and flow.live[m]), None)
        joined = made if made in below else None
    elif below and flow.operations[below[-1]].name in ("view", "reshape", "cat", "flatten", "permute", "squeeze"):
        joined = below[-1]
    for index in below:
        is_behind = projection is not None and index > projection
        operation = flow.operations[index]
        if joined is not None and _key(operation) == _key(flow.operations[joined]):
            roles.sites.setdefault(index, "concat")
        roles.sites.setdefault(index, f"{'out' if is_behind else 'z'}.{operation.name}")
    for index in _descendants(flow, (one.softmax for one in roles.attentions if one.softmax != one.z)):
        roles.sites.setdefault(index, f"pattern.{flow.operations[index].name}")


def _key(operation: Operation) -> tuple[str, str | None, int | None]:
    return operation.name, operation.file, operation.line if operation.line is not None else id(operation)


def _descendants(flow: Flow, of: Iterable[int]) -> list[int]:
    waiting = list(of)
    found: set[int] = set()
    while waiting:
        for reader in flow.readers.get(waiting.pop(), ()):
            if reader not in found:
                found.add(reader)
                waiting.append(reader)
    return sorted(found)
