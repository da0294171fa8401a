"""A recorded call of a user's attention as a graph of torch operations, in order, each with its
source line, its sources and its site: q, scores, pattern, z.

A torch function mode sees each call. A function of `torch.nn.functional` is one operation
(`F.softmax` is `softmax`), except `multi_head_attention_forward`, whose inner operations are
recorded. An output is copied before a later operation overwrites it, so recorded values stay
intact; other outputs are not copied, and views share memory.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import compress, takewhile
from operator import attrgetter
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mhacli.attention.stages import Inputs
from mhacli.errors import MhaError

from .build import as_float64
from .door import on_behalf
from .faults import SourceLine, source_line
from .foreign import FunctionMode, is_transformed, tensors_in, without_compiling
from .masks import MaskForm
from .projections import read_name
from .user_attention import UserAttention

MAX_OPERATIONS = 20_000
"""The limit for one call. Python loops over heads, queries and keys take some thousands."""
_PRODUCTS = ("matmul", "bmm", "mm", "einsum", "baddbmm")
_PROJECTIONS = ("linear", "addmm", "conv1d", "bilinear", *_PRODUCTS)


@dataclass(eq=False)
class Operation:
    """One call of a torch function inside the user's attention.

    `name` is torch's name, such as `softmax`, `matmul`, `linear`, `masked_fill`. `arguments` are
    the arguments that are no tensors, by name or by position ("0", "1", …). `at` is the line of
    user code that made the call, empty for a call from other code; `calls` are it and the lines
    that call its function, the innermost first, each with the place in its compiled code.

    `sources` are the operations that made its tensors, and `readers` those that read the output. A
    tensor from outside has an operation too, without a name. `site` is what the operation makes,
    such as `q`, `live` whether that depends on the inputs.
    """

    name: str
    output: Tensor
    arguments: Mapping[str, Any] = field(default_factory=dict)
    at: SourceLine = field(default_factory=SourceLine)
    sources: tuple[Operation, ...] = ()
    calls: Sequence[tuple[SourceLine, int]] = ()
    readers: list[Operation] = field(default_factory=list)
    site: str = ""
    live: bool = False

    @property
    def live_sources(self) -> list[Operation]:
        """The sources that depend on the inputs."""
        return [source for source in self.sources if source.live]

    @property
    def is_product(self) -> bool:
        """Whether it multiplies two tensors that depend on the inputs."""
        return self.name in _PRODUCTS and len(self.live_sources) >= 2

    @property
    def projects(self) -> bool:
        """Whether it multiplies vectors by a weight."""
        return self.name in _PROJECTIONS and len(self.live_sources) == 1

    def upstream(self) -> list[Operation]:
        """This operation and those before it, back to a projection; if no input reaches it, all
        before it.
        """

        def before(operation: Operation) -> list[Operation]:
            if operation.projects:
                return []
            return [other for other in operation.sources if other.name and other.live == self.live]

        return [*reached(self, before)]

    def weights(self) -> dict[str, Tensor]:
        """The learned tensors that an operation on the inputs reads, directly or through views, by
        name.
        """
        if not self.live:
            return {}
        fixed = [source for source in self.sources if not source.live]
        readers = [self, *(each for source in fixed for each in source.upstream())]
        read = [source for reader in readers for source in reader.sources]
        return {
            leaf.site: leaf.output for leaf in read if not leaf.name and leaf.output.requires_grad
        }

    def transposes(self) -> bool:
        """Whether it swaps the last two axes."""
        before = (self.sources or (self,))[0].output
        after = self.output
        return before.ndim > 1 and is_same_view(after, before.mT)


def reached(
    start: Operation, neighbours: Callable[[Operation], Sequence[Operation]]
) -> Iterator[Operation]:
    """An operation and those that its neighbours lead to, the nearest first."""
    operations = [start]
    for operation in operations:
        yield operation
        operations += [n for n in dict.fromkeys(neighbours(operation)) if n not in operations]


class Watcher(FunctionMode):
    """Records the torch operations that are called, in order, without those that return their
    input.

    `file` is the user's source file; each operation's line is the innermost one in it, empty if
    there is none. An operation with several outputs, such as `chunk`, has an entry for each,
    numbered by the argument `output`. `makers` has the operation that made a tensor, `holders`
    those with an output at an address. Raises `MhaError` for more than `MAX_OPERATIONS`.
    """

    def __init__(self, file: str | None) -> None:
        super().__init__()
        self.file = file
        self.operations: list[Operation] = []
        self.makers: MutableMapping[Tensor, Operation] = WeakTensorKeyDictionary()
        self.holders: dict[int, list[Operation]] = {}

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls and records the function, without the calls inside of it."""
        name, inputs, arguments = _called(func, args, kwargs)
        is_in_place = writes_into_input(name) or kwargs.get("inplace") is True
        overwritten = kwargs.get("out", inputs[0] if is_in_place and inputs else None)
        if isinstance(overwritten, Tensor):
            for holder in self.holders.pop(address_of(overwritten), ()):
                holder.output = holder.output.detach().clone()
        result = on_behalf(func, *args, **kwargs)
        leaves = tensors_in(overwritten if name == "setitem" else result)
        outputs = [leaf for leaf in leaves if not is_transformed(leaf)]
        for number, output in enumerate(outputs):
            numbered = {**arguments, "output": number} if len(outputs) > 1 else arguments
            self._record(name, inputs, numbered, output)
        if len(self.operations) > MAX_OPERATIONS:
            message = f"one call runs more than {MAX_OPERATIONS:,} operations, too many to record"
            hint = "a loop over queries and keys runs fewer operations on a shorter text"
            raise MhaError(message, hint=hint, code="too-large")
        return result

    def _record(
        self, name: str, inputs: Sequence[Tensor], arguments: Mapping[str, Any], output: Tensor
    ) -> None:
        """Records an output of a function, unless it is the first input itself: that of dropout in
        eval mode, or of `contiguous` on a contiguous tensor.
        """
        sources = tuple(self.makers.setdefault(each, Operation("", each)) for each in inputs)
        if inputs and is_same_view(output, inputs[0]) and not writes_into_input(name):
            self.makers[output] = sources[0]
            return
        calls = user_lines(self.file)
        at = calls[0][0] if calls else SourceLine()
        operation = Operation(name, output, arguments, at, sources, calls)
        self.operations.append(operation)
        self.makers[output] = operation
        self.holders.setdefault(address_of(output), []).append(operation)
        for source in dict.fromkeys(sources):
            source.readers.append(operation)


def writes_into_input(name: str) -> bool:
    """Whether an operation of this name writes into its first input."""
    return name == "setitem" or name.endswith("_")


def is_same_view(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same memory; False for those that have none,
    such as sparse ones.
    """
    if tensor.dtype != other.dtype:
        return False
    try:
        return tensor.is_set_to(other)
    except (RuntimeError, NotImplementedError):
        return False


def address_of(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 without storage."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def user_lines(file: str | None) -> list[tuple[SourceLine, int]]:
    """The running lines of the user's file, the innermost first, each with the place in its
    compiled code; none in the code of a library.
    """
    user_file = None if file is None else _real(file)
    return [
        (source_line(user_file, number), frame.f_lasti)
        for frame, number in walk_stack(sys._getframe(2))
        if user_file is not None and _real(frame.f_code.co_filename) == user_file
    ]


_real = lru_cache(maxsize=4096)(os.path.realpath)


_OPERATORS = "add|sub|mul|matmul|truediv|floordiv|div|mod|pow|and|or|xor|lshift|rshift"
_OPERATOR = re.compile(rf"(?:__(?:([ri])(?=(?:{_OPERATORS})__))?)?(.+?)(?:__)?")
"""A name in torch, or that of a Python operator: `__rsub__` is `sub` with swapped operands,
`__isub__` writes into the first. `__rshift__` and `__index__` are neither."""
_NAMES: Mapping[str, str] = {
    "truediv": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "concat": "cat",
    "concatenate": "cat",
}


def _called(
    func: Any, args: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[str, list[Tensor], dict[str, Any]]:
    """The name of a called function, its tensors, and its other arguments by name or position.

    `@`, `torch.matmul` and `x.matmul` are `matmul`; in-place variants end with an underscore; `x[…]
    = y` is `setitem`, and a property such as `x.T` has its own name.
    """
    name = str(getattr(func, "__name__", func))
    if name == "__get__":
        name = func.__self__.__name__
    kind, name = _OPERATOR.fullmatch(name).groups()  # type: ignore[union-attr]
    name = _NAMES.get(name, name)
    if kind == "r" and name not in ("add", "mul"):  # those two do not depend on the order
        args = args[::-1]
    elif kind == "i":
        name += "_"
    arguments = {**{str(n): value for n, value in enumerate(args)}, **keywords}
    arguments.pop("out", None)
    inputs = tensors_in(list(arguments.values()))
    others = {key: value for key, value in arguments.items() if not tensors_in(value)}
    return name, inputs, others


# ---------------------------------------------------------------------------------------- the graph

SOFTMAXES = ("softmax", "log_softmax", "softmax_")
KERNEL = "scaled_dot_product_attention"
_ROLES = "qkv"
HIDDEN = -500.0
"""Scores, or terms added to them, below this number hide a key, whichever number stands for −∞."""
NO_NUMBER = 1e30
"""What stands for hidden scores, infinity and NaN where numbers are compared."""


class AtSite(NamedTuple):
    """The tensors of a site, one for each softmax or kernel, and the line that makes the first."""

    line: SourceLine
    tensors: list[Tensor]


@dataclass(eq=False)
class RecordedCall:
    """A recorded call, its `inputs` and its result. `given` has the inputs by name. Each softmax or
    kernel has an entry in `attentions`, the operation of each of its sites. There are no operations
    if the call cannot be recorded.
    """

    out: Tensor
    inputs: Inputs
    given: dict[str, Tensor] = field(default_factory=dict)
    operations: Sequence[Operation] = ()
    attentions: list[dict[str, Operation]] = field(default_factory=list)
    _producers: dict[bytes, list[Operation]] = field(default_factory=dict)
    _made_by_size: dict[int, tuple[list[Operation], Tensor]] = field(default_factory=dict)

    def tensors_at_sites(self) -> dict[str, AtSite]:
        """What is made at each site, and the output as `out`, by its last operation."""
        sites = dict[str, AtSite]()
        for attention in self.attentions:
            for site, operation in attention.items():
                sites.setdefault(site, AtSite(operation.at, [])).tensors.append(operation.output)
        line = self.operations[-1].at if self.operations else SourceLine()
        return sites | {"out": AtSite(line, [self.out])}

    def combined(self, *names: str) -> Iterator[tuple[Operation, Operation]]:
        """The operations of these names that combine what depends on the inputs with one tensor
        that does not, and its source.
        """
        for operation in self.operations:
            fixed = [source for source in operation.sources if not source.live]
            if operation.name.rstrip("_") in names and operation.live and len(fixed) == 1:
                yield operation, fixed[0]

    @property
    def outside(self) -> list[Operation]:
        """The tensors from outside that its operations read, each once."""
        sources = (source for operation in self.operations for source in operation.sources)
        return [*dict.fromkeys(source for source in sources if not source.name)]

    @property
    def behind(self) -> Sequence[Operation]:
        """The operations after the first weighted values."""
        z = next(iter(self.attentions), {}).get("z")
        return [] if z is None else self.operations[self.operations.index(z) + 1 :]

    def path(self, role: str) -> list[Operation]:
        """The operations from a projection to the queries or keys of the first product; `role` is q
        or k.
        """
        first = next(iter(self.attentions), {})
        path = first[role].upstream() if role in first else []
        return [operation for operation in self.operations if operation in path]

    def vectors(self, role: str) -> Iterator[tuple[Operation, Tensor]]:
        """What is made on the way to the queries or keys, `[batch, head, length, d]` or without
        heads, and by which operation.
        """
        for operation in self.path(role):
            tensor = operation.output
            axes = [
                axis
                for axis in range(tensor.ndim - 1)
                if tensor.shape[axis] in self.inputs.lengths[1:]
            ]
            if tensor.is_floating_point() and tensor.ndim in (3, 4) and axes:
                yield operation, as_float64(tensor).movedim(axes[-1], -2)

    def as_scores(self, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """A tensor broadcast to scores as `[batch, head, query, key]`; None if the shape does not
        fit scores.
        """
        batch, *lengths = self.inputs.lengths
        is_divisible = math.prod(shape) % math.prod(self.inputs.lengths) == 0
        if [*shape[-2:]] != lengths or tensor.ndim > len(shape) or not is_divisible:
            return None
        return as_float64(tensor).expand(shape).reshape(batch, -1, *lengths)

    def numbers_below(self, bound: float) -> list[float]:
        """Distinct finite numbers up to a bound in operations, such as the value for masked
        scores.
        """
        values = [value for op in self.operations for value in op.arguments.values()]
        numbers = [value for value in values if isinstance(value, int | float)]
        tensors = [source.output for op in self.operations for source in op.sources]
        numbers += [x.item() for x in tensors if x.numel() == 1 and x.is_floating_point()]
        return list(dict.fromkeys(float(value) for value in numbers if -1e7 < value <= bound))

    def _made(self, size: int) -> tuple[list[Operation], Tensor]:
        """The operations whose output has so many numbers, with the sorted numbers of each,
        `[operation, number]`. Other outputs are not sorted: a cache may have millions.
        """
        if size not in self._made_by_size:
            operations = [
                op
                for op in self.operations
                if op.output.numel() == size and op.output.is_floating_point()
            ]
            rows = [sorted_numbers(op.output)[:, 0] for op in operations]
            made = torch.stack(rows) if rows else torch.empty(0, size)
            self._made_by_size[size] = operations, made
        return self._made_by_size[size]

    def producers_of(self, numbers: Tensor) -> list[Operation]:
        """The operations that produce these numbers, in any order. They are kept, for hypotheses
        have most numbers in common.
        """
        key = blake2b(numbers.detach().numpy().tobytes()).digest()
        if key not in self._producers:
            operations, made = self._made(numbers.numel())
            right = sorted_numbers(numbers)[:, 0]
            largest = right.abs().masked_fill(right.abs() >= NO_NUMBER, 0.0).max()
            is_close = ((made - right).abs() <= 1e-5 * largest).all(dim=1).tolist()
            self._producers[key] = list(compress(operations, is_close))
        return self._producers[key]


def sorted_numbers(tensor: Tensor, width: int = 1) -> Tensor:
    """The numbers of a tensor, sorted in each column of rows of this width."""
    rows = as_float64(tensor).reshape(-1, width)
    rows = rows.masked_fill(rows < HIDDEN, -NO_NUMBER).nan_to_num(NO_NUMBER, NO_NUMBER)
    return rows.sort(dim=0).values


# ---------------------------------------------------------------------------------------- recording


def recorded(
    subject: UserAttention,
    inputs: Inputs,
    seed: int,
    mask: MaskForm | None = None,
    *,
    training: bool = False,
) -> RecordedCall:
    """One recorded call. Raises `UserRaised`, and `MhaError` if it cannot be recorded."""
    call_inputs = inputs.map(lambda rows: rows.to(subject.device, subject.dtype))
    watcher = Watcher(subject.built.file)
    with without_compiling():
        out = subject(call_inputs, seed=seed, mask=mask, training=training, within=watcher)
    names = ("q", "k", "v") if subject.is_function else ("x", "context", "values")
    rows = zip(names, call_inputs[:3], strict=True)
    given = {name: tensor for name, tensor in rows if tensor is not None}
    if subject.has_own_queries:  # which are the same for all texts, if it learned them
        given["x"] = inputs.queries[:1]
    call = RecordedCall(out, inputs, given, watcher.operations)
    _name_outside(call, _names_by_address(subject.built.call))
    for operation in call.operations:
        operation.live = _is_live(operation)
    call.attentions += _attentions(call.operations)
    _name_before(call.attentions)
    _name_after(call)
    for operation in call.operations:
        operation.site = operation.site or operation.name
    return call


def _names_by_address(call: object) -> dict[int, str]:
    """The names of the tensors that a module or another object holds, by address."""
    held = dict(getattr(call, "__dict__", {}))
    if isinstance(call, nn.Module):
        held |= dict(call.named_buffers()) | dict(call.named_parameters())
    return {address_of(value): name for name, value in held.items() if isinstance(value, Tensor)}


def _name_outside(call: RecordedCall, names: Mapping[int, str]) -> None:
    """Names the tensors from outside: those with a name by their address, an input, also in another
    order, by its own, and one with the shape of a mask where keys are hidden as the mask.
    """
    given = {**call.given}
    inputs = call.inputs
    hides_keys = inputs.allowed is not None or inputs.real is not None
    for leaf in call.outside:
        tensor = leaf.output
        equal = [name for name, rows in given.items() if _has_same_numbers(rows, tensor)]
        leaf.site = names.get(address_of(tensor)) or next(iter(equal), "a tensor")
        leaf.live = leaf.site in equal
        has_its_shape = tensor.ndim > 1 and tensor.shape[-2:] == inputs.lengths[1:]
        if leaf.site == "a tensor" and hides_keys and has_its_shape:
            leaf.site = "mask"
            call.given.setdefault("mask", tensor)


def _has_same_numbers(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same numbers, in any order."""
    if (tensor.dtype, tensor.numel()) != (other.dtype, other.numel()):
        return False
    return torch.equal(sorted_numbers(tensor), sorted_numbers(other))


def _is_live(operation: Operation) -> bool:
    """Whether the numbers of the output depend on the inputs. A tensor that only states a shape or
    a dtype has no part in them.
    """
    sources = operation.sources
    if re.fullmatch(r"to|\w+_as", operation.name):
        sources = sources[:1]
    elif re.fullmatch(r"new_\w+|\w+_like", operation.name):
        return False
    return any(source.live for source in sources)


# -------------------------------------------------------------------------------------------- sites


def _attentions(operations: Sequence[Operation]) -> list[dict[str, Operation]]:
    """The operation of each site around each kernel and each softmax."""
    attentions = []
    for operation in operations:
        sites: dict[str, Operation] = {}
        if operation.name == KERNEL:
            operands = zip(_ROLES, operation.sources, strict=False)
            sites = {role: source for role, source in operands if source.name} | {"z": operation}
        elif operation.name in SOFTMAXES and operation.live:
            sites = _around_softmax(operation)
        if sites:
            attentions.append(sites)
    return attentions


def _name_before(attentions: Sequence[Mapping[str, Operation]]) -> None:
    """Names the operations of sites, such as `q`, and those before them: what leads to a site, such
    as `q.transpose`, and the projections.
    """
    leads: dict[Operation, dict[str, None]] = {}
    for attention in attentions:
        for site, operation in attention.items():
            if site not in _ROLES or not operation.projects:
                operation.site = operation.site or site
            for earlier in operation.upstream():
                leads.setdefault(earlier, {})[site] = None
    for operation, sites in leads.items():
        letters = "".join(role for role in _ROLES if role in sites)
        if operation.projects:
            operation.site = letters if letters in ("qkv", "kv", "qv") else f"{letters}_proj"
        elif not operation.site:
            operation.site = f"{letters or next(iter(sites))}.{operation.name}"


def _name_after(call: RecordedCall) -> None:
    """Names what follows the last weighted values: what joins the heads and projects them, and the
    others, such as `z.transpose`.
    """
    ends = [call.operations.index(attention["z"]) for attention in call.attentions]
    site = "z"
    start = max(ends, default=len(call.operations)) + 1
    for operation in call.operations[start:]:
        if operation.projects and site == "z":
            operation.site = site = "out"
            joined = operation.live_sources[0]
            if joined.site.startswith("z."):
                joined.site = "concat"
                call.attentions[-1]["concat"] = joined
        elif operation.live and not operation.site:
            operation.site = f"{site}.{operation.name}"


def _around_softmax(softmax: Operation) -> dict[str, Operation]:
    """The operations of the sites around a softmax; none unless there is a product before it and
    another after it. Which operand is which follows from names, of q and k, and from what the
    softmax leads to, of the pattern; else from their order. A transposed operand of the first
    product gets the site kᵀ here, and what it is made from stands for k.
    """
    qk = _first_product(softmax, attrgetter("live_sources"))
    z = _first_product(softmax, attrgetter("readers"))
    if qk is None or z is None:
        return {}
    q, k = qk.live_sources[-2:]
    if (_letter(q), _letter(k)) == ("k", "q"):
        q, k = k, q
    if k.transposes():
        k.site = "kᵀ"
        k = k.sources[0]
    pattern, v = z.live_sources[-2:]
    after = takewhile(lambda operation: operation is not z, reached(softmax, attrgetter("readers")))
    if pattern not in after:
        pattern, v = v, pattern
    sites = {
        "q": q,
        "k": k,
        "qk": qk,
        "scores": softmax.live_sources[0],
        "pattern": pattern,
        "v": v,
        "z": z,
    }
    return {site: operation for site, operation in sites.items() if operation.name}


def _first_product(
    start: Operation, neighbours: Callable[[Operation], Sequence[Operation]]
) -> Operation | None:
    """The nearest product that the neighbours of an operation lead to."""
    return next((other for other in reached(start, neighbours) if other.is_product), None)


def _letter(operand: Operation) -> str:
    """The role in the names of the parameters that an operand is made from; empty unless there is
    exactly one.
    """
    names = [name for operation in operand.upstream() for name in operation.weights()]
    letters = {read_name(name)[0] for name in names} - {""}
    return letters.pop() if len(letters) == 1 else ""
