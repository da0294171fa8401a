"""Records the torch operations inside a user's attention, in order, each with its source line.

A torch function mode sees each call. A function of `torch.nn.functional` is one operation (`F.softmax` is `softmax`), except
`multi_head_attention_forward`, whose inner operations are recorded. A tensor is copied before a later operation overwrites it,
so recorded values stay intact. Other tensors are not copied: an operation's input *is* the output of its producer, and views
share memory.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, get_testing_overrides

from mhacli.errors import MhaError
from mhacli.usercode.process import SourceLine
from mhacli.usercode.types import Operation

MAX_OPERATIONS: Final = 20_000
"""The limit for one call. Python loops over heads, queries and keys take some thousands."""
_SILENT = frozenset(("requires_grad_", "detach_", "retain_grad", "grad", "register_hook", "set_"))
"""Functions that return a tensor without computing."""
_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
_MODULES = os.path.join(_TORCH, "nn", "modules")
_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_WHOLE = ("scaled_dot_product_attention", "softmax")
"""Operations recorded even if code of mha calls them; mha's other operations only prepare the call."""
T = TypeVar("T")


def watch(run: Callable[[], T], files: Sequence[str]) -> tuple[T, tuple[Operation, ...]]:
    """The result of `run()`, and the torch operations that it called, in order.

    `files` are the user's source files; each operation's line is the innermost one in them, and `file` is None if there is
    none. An operation with several outputs, such as `chunk`, has an entry for each, numbered by the argument `output`. Raises
    what `run` raises, and `MhaError` for more than `MAX_OPERATIONS`.
    """
    watcher = _Watcher(frozenset(os.path.realpath(file) for file in files))
    with watcher:
        result = run()
    return result, tuple(watcher.operations)


class _Watcher(TorchFunctionMode):
    """Records every torch call. `holders` maps a storage address to the operations with a tensor there."""

    def __init__(self, files: frozenset[str]) -> None:
        super().__init__()
        self.files = files
        self.operations: list[Operation] = []
        self.holders: dict[int, list[Operation]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls and records the function. Torch disables the mode meanwhile, so inner calls are not recorded."""
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return _ENTERED(*args, **kwargs)
        name = name_of(func)
        inputs, arguments = arguments_of(func, args, kwargs)
        overwritten = _overwritten(name, inputs, kwargs)
        inputs = self._preserved(inputs, overwritten)
        result = func(*args, **kwargs)
        outputs = [overwritten] if name == "setitem" and overwritten is not None else list(_tensors_of(result))
        if outputs and name not in _SILENT:
            self._note(name, inputs, outputs, arguments, is_one=not isinstance(result, (tuple, list)))
        return result

    def _note(
        self, name: str, inputs: list[Tensor], outputs: list[Tensor], arguments: Mapping[str, Any], *, is_one: bool
    ) -> None:
        line = _user_line(self.files)
        if line is None and name not in _WHOLE:
            return
        if len(self.operations) + len(outputs) > MAX_OPERATIONS:
            raise MhaError(
                f"one call runs more than {MAX_OPERATIONS:,} operations, too many to record",
                hint="a loop over queries and keys runs fewer operations on a shorter text",
                code="too-large",
            )
        for number, output in enumerate(outputs):
            output_index = {} if is_one else {"output": number}
            operation = Operation(name, tuple(inputs), output, {**arguments, **output_index}, *(line or SourceLine()))
            self.operations.append(operation)
            for address in {address_of(tensor) for tensor in (*inputs, output)} - {0}:
                self.holders.setdefault(address, []).append(operation)

    def _preserved(self, inputs: Sequence[Tensor], overwritten: Tensor | None) -> list[Tensor]:
        """The inputs with copies of tensors in the memory of `overwritten`. Recorded operations that hold such tensors get the
        copies too."""
        address = 0 if overwritten is None else address_of(overwritten)
        if not address:
            return list(inputs)
        copies: dict[int, Tensor] = {}

        def preserved(tensor: Tensor) -> Tensor:
            if address_of(tensor) != address:
                return tensor
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().clone()
            return copies[id(tensor)]

        for operation in self.holders.pop(address, ()):
            operation.inputs, operation.output = (
                tuple(preserved(tensor) for tensor in operation.inputs),
                preserved(operation.output),
            )
        return [preserved(tensor) for tensor in inputs]


def _overwritten(name: str, inputs: Sequence[Tensor], keywords: Mapping[str, Any]) -> Tensor | None:
    """The tensor that a call overwrites in place, None if it allocates its output."""
    out = keywords.get("out")
    if isinstance(out, Tensor):
        return out
    is_named_so = name == "setitem" or (name.endswith("_") and not name.startswith("__"))
    is_in_place = is_named_so or keywords.get("inplace") is True
    return inputs[0] if is_in_place and inputs else None


def _tensors_of(result: Any) -> Iterator[Tensor]:
    """The output tensors of an operation, without tensors that have no memory, such as those inside vmap."""
    for tensor in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(tensor, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            yield tensor


def address_of(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 without storage."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _user_line(files: frozenset[str]) -> SourceLine | None:
    """The innermost running line of user code; None if mha itself made the call."""
    frame: FrameType | None = sys._getframe(2)
    caller = ""  # the innermost file outside torch
    while frame is not None:
        file = _real(frame.f_code.co_filename)
        if file in files:
            return SourceLine(file, frame.f_lineno, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip())
        is_outside = file.startswith(_MODULES) or not file.startswith((_TORCH, __file__))
        caller = caller or (file if is_outside else "")
        frame = frame.f_back
    return None if caller.startswith(_OURS) else SourceLine()


@lru_cache(maxsize=4096)
def _real(file: str) -> str:
    return os.path.realpath(file)


_FORWARD: Any = F.multi_head_attention_forward
_ENTERED: Final = FunctionType(
    _FORWARD.__code__, {**vars(F), "has_torch_function": lambda tensors: False}, "forward", _FORWARD.__defaults__
)
"""`multi_head_attention_forward` that always runs its own body, instead of passing the whole call to the mode."""


# -------------------------------------------------------------------------------------------------- names and arguments


_ALIASES: Mapping[str, str] = {
    "__matmul__": "matmul", "__rmatmul__": "matmul", "__getitem__": "getitem", "__setitem__": "setitem",
    "__add__": "add", "__radd__": "add", "__iadd__": "add_", "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul_",
    "__sub__": "sub", "__rsub__": "sub", "__isub__": "sub_", "__truediv__": "div", "__rdiv__": "div",
    "__rtruediv__": "div", "__itruediv__": "div_", "__idiv__": "div_", "__pow__": "pow", "__rpow__": "pow",
    "__ipow__": "pow_", "__neg__": "neg", "__floordiv__": "floor_divide", "__rfloordiv__": "floor_divide",
    "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
    "__invert__": "logical_not", "bitwise_not": "logical_not", "__and__": "logical_and", "bitwise_and": "logical_and",
    "__or__": "logical_or", "bitwise_or": "logical_or", "multiply": "mul", "divide": "div", "true_divide": "div",
    "subtract": "sub", "negative": "neg", "swapaxes": "transpose", "swapdims": "transpose", "concat": "cat",
    "concatenate": "cat", "moveaxis": "movedim", "T": "transpose", "mT": "transpose", "H": "transpose",
    "mH": "transpose", "t": "transpose", "view_as": "view", "reshape_as": "reshape", "expand_as": "expand",
    "data": "detach", "absolute": "abs",
}  # fmt: skip
"""Aliases in torch and Python. On bool tensors `~`, `&` and `|` are logical operators."""
_REVERSED = ("__rmatmul__", "__rsub__", "__rdiv__", "__rtruediv__", "__rpow__", "__rfloordiv__")
"""Operators with swapped arguments."""


@lru_cache(maxsize=4096)
def _parameters(function: Any) -> tuple[str, ...]:
    """The names of a torch function's parameters, which torch lists for functions without a signature; empty if unknown."""
    try:
        signature = inspect.signature(get_testing_overrides().get(function, function))
    except (TypeError, ValueError):
        return ()
    return tuple("input" if name == "self" else name for name in signature.parameters if name != "out")


def name_of(func: Any) -> str:
    """The canonical name of a torch function. `@`, `torch.matmul` and `x.matmul` are `matmul`; in-place variants end with an
    underscore; `x[…] = y` is `setitem`; `x.T`, `x.mT` and `x.t()` are `transpose`. `bmm`, `mm`, `einsum`, `linear` and
    `scaled_dot_product_attention` keep their names."""
    name = str(getattr(func, "__name__", func))
    if name == "__get__":  # a property, such as x.T
        name = str(getattr(getattr(func, "__self__", None), "__name__", name))
    return _ALIASES.get(name, name)


def arguments_of(func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensor arguments in parameter order, and the other arguments by name.

    An argument of unknown name is named by its position, "0" for the first. For operators with a number on the left, such as `1
    - x`, the number is `input`. `None` is kept; lists of tensors are flattened into the tensors.
    """
    names = _parameters(func)
    n_single = len(names) - 1
    if getattr(func, "__name__", "") in _REVERSED:
        args = args[::-1]
    elif func is torch.Tensor.where and len(args) > 1:
        args = (args[1], args[0], *args[2:])
    if len(args) > len(names) > 1 and all(type(number) is int for number in args[n_single:]):
        args = (*args[:n_single], tuple(args[n_single:]))  # a shape as separate numbers
    named = {names[n] if n < len(names) else str(n): value for n, value in enumerate(args)}
    named |= {"dim" if key == "axis" else key: value for key, value in keywords.items()}
    inputs: list[Tensor] = []
    others: dict[str, Any] = {}
    for key in sorted(named, key=lambda key: names.index(key) if key in names else len(names)):
        tensors = list(_tensors_in(named[key]))
        if key in ("out", "_stacklevel"):
            continue
        if tensors:
            inputs += tensors
        else:
            others[key] = named[key]
    if getattr(getattr(func, "__self__", None), "__name__", "") in ("T", "mT", "H", "mH"):
        others |= {"dim0": -2, "dim1": -1}
    return inputs, others


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensor or tensors in an argument; those inside an index are left out."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)
