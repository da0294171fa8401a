"""Records the torch operations inside a user's attention, in order, each with its source line.

A torch function mode sees each call. A function of `torch.nn.functional` is one operation (`F.softmax` is `softmax`), except
`multi_head_attention_forward`, whose inner operations are recorded. A tensor is copied before a later operation overwrites it,
so recorded values stay intact. Other tensors are not copied: an operation's input *is* the output of its producer, and views
share memory.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mhacli.errors import MhaError
from mhacli.usercode.process import SourceLine
from mhacli.usercode.types import Operation

MAX_OPERATIONS: Final = 20_000
"""The limit for one call. Python loops over heads, queries and keys take some thousands."""
_SILENT = frozenset(("requires_grad_", "detach_", "retain_grad", "grad", "register_hook", "set_"))
"""Functions that return a tensor without computing."""
_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
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
            with _entering_multi_head_attention(), self:
                return func(*args, **kwargs)
        name = name_of(func)
        inputs, arguments = arguments_of(name, func, args, kwargs)
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
    frames = list(_outwards(frame))
    for frame, file in frames:
        if file in files:
            return SourceLine(file, frame.f_lineno, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip())
    for _, file in frames:
        if file.startswith(os.path.join(_TORCH, "nn", "modules")):
            return SourceLine()
        if not file.startswith(_TORCH) and file != __file__:
            return None if file.startswith(_OURS) else SourceLine()
    return SourceLine()


def _outwards(frame: FrameType | None) -> Iterable[tuple[FrameType, str]]:
    while frame is not None:
        yield frame, _real(frame.f_code.co_filename)
        frame = frame.f_back


@lru_cache(maxsize=4096)
def _real(file: str) -> str:
    return os.path.realpath(file)


@contextmanager
def _entering_multi_head_attention() -> Iterator[None]:
    """Lets `multi_head_attention_forward` run its own body under the mode, instead of passing the whole call to the mode."""
    functions: Any = F
    original, forward_code = functions.has_torch_function, F.multi_head_attention_forward.__code__

    def has_torch_function(tensors: Any) -> bool:
        return False if sys._getframe(1).f_code is forward_code else bool(original(tensors))

    functions.has_torch_function = has_torch_function
    try:
        yield
    finally:
        functions.has_torch_function = original


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
_PARAMETERS: Mapping[str, str] = {
    "softmax": "input dim dtype", "log_softmax": "input dim dtype", "linear": "input weight bias",
    "scaled_dot_product_attention": "query key value attn_mask dropout_p is_causal",
    "masked_fill": "input mask value", "masked_fill_": "input mask value", "where": "condition input other",
    "dropout": "input p training inplace", "transpose": "input dim0 dim1", "transpose_": "input dim0 dim1",
    "cat": "tensors dim", "stack": "tensors dim", "chunk": "input chunks dim", "split": "input split_size dim",
    "tensor_split": "input sections dim", "unbind": "input dim", "tril": "input diagonal", "triu": "input diagonal",
    "sum": "input dim keepdim", "mean": "input dim keepdim", "amax": "input dim keepdim", "max": "input dim keepdim",
    "matmul": "input other", "bmm": "input mat2", "mm": "input mat2", "baddbmm": "input batch1 batch2",
    "addmm": "input mat1 mat2", "add": "input other", "sub": "input other", "mul": "input other",
    "div": "input other", "add_": "input other", "sub_": "input other", "mul_": "input other",
    "div_": "input other", "pow": "input exponent", "unsqueeze": "input dim", "squeeze": "input dim",
    "flatten": "input start_dim end_dim", "unflatten": "input dim sizes", "repeat_interleave": "input repeats dim",
    "narrow": "input dim start length", "select": "input dim index", "getitem": "input index",
    "setitem": "input index value", "movedim": "input source destination", "exp": "input", "sqrt": "input",
    "rsqrt": "input", "einsum": "equation", "layer_norm": "input normalized_shape weight bias eps",
    "clamp": "input min max", "roll": "input shifts dims", "index_select": "input dim index",
    "gather": "input dim index", "eq": "input other", "ne": "input other", "lt": "input other", "le": "input other",
    "gt": "input other", "ge": "input other",
}  # fmt: skip
"""The parameters of each function, in order, for positional arguments."""
_SHAPE_PARAMETERS: Mapping[str, str] = {
    "view": "shape", "reshape": "shape", "expand": "shape", "repeat": "repeats", "permute": "dims", "ones": "size",
    "zeros": "size", "full": "size", "empty": "size", "tile": "dims",
}  # fmt: skip
"""Functions that take separate numbers or one list, with the name of that parameter."""
_KEYWORD_ALIASES = {"axis": "dim", "axes": "dims", "keepdims": "keepdim", "axis0": "dim0", "axis1": "dim1", "self": "input",
              "x": "input"}  # fmt: skip
"""Alternative keywords that torch accepts."""


def name_of(func: Any) -> str:
    """The canonical name of a torch function. `@`, `torch.matmul` and `x.matmul` are `matmul`; in-place variants end with an
    underscore; `x[…] = y` is `setitem`; `x.T`, `x.mT` and `x.t()` are `transpose`. `bmm`, `mm`, `einsum`, `linear` and
    `scaled_dot_product_attention` keep their names."""
    name = str(getattr(func, "__name__", func))
    if name == "__get__":  # a property, such as x.T
        name = str(getattr(getattr(func, "__self__", None), "__name__", name))
    return _ALIASES.get(name, name)


def arguments_of(
    name: str, func: Any, args: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensor arguments in parameter order, and the other arguments by name.

    An argument of unknown name is named by its position, "0" for the first. For operators with a number on the left, such as `1
    - x`, the number is `input`. `None` is kept; lists of tensors are flattened into the tensors.
    """
    keyword_arguments = {
        _KEYWORD_ALIASES.get(key, key): value for key, value in keywords.items() if key != "_stacklevel"
    }
    named: dict[str, Any] = {}
    if name in _SHAPE_PARAMETERS:
        rest = args[1:] if args and isinstance(args[0], Tensor) else args
        named |= {"input": args[0]} if rest is not args else {}
        named |= _shape(_SHAPE_PARAMETERS[name], rest)
    else:
        for position, value in enumerate(_in_order(name, func, args)):
            names = _PARAMETERS.get(name, "").split()
            named[names[position] if position < len(names) else str(position)] = value
    named |= keyword_arguments
    order = _PARAMETERS.get(name, "input").split()
    values = sorted(named.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    inputs = [tensor for key, value in values if key != "out" for tensor in _tensors_in(value)]
    properties = _of_property(name, getattr(func, "__self__", None))
    return inputs, properties | {key: value for key, value in values if not list(_tensors_in(value)) and key != "out"}


def _in_order(name: str, func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments in the order of the named function: operands from the left, `x.where(c, y)` as `where(c, x, y)`."""
    if getattr(func, "__name__", "") in _REVERSED and len(args) == 2:
        return args[::-1]
    if name == "where" and func is torch.Tensor.where and len(args) > 1:
        return (args[1], args[0], *args[2:])
    if name == "einsum" and args and isinstance(args[0], Tensor):  # operands and axes alternate
        return ("", *args)
    return args


def _shape(parameter: str, rest: Sequence[Any]) -> dict[str, Any]:
    """Separate numbers, or one list, as a tuple. Tensors and dtypes are left unchanged."""
    if not rest:
        return {}
    first = rest[0]
    if isinstance(first, (tuple, list)):
        return {parameter: tuple(first)} | {str(position): value for position, value in enumerate(rest[1:], 2)}
    return {parameter: first if isinstance(first, (Tensor, torch.dtype)) else tuple(rest)}


def _of_property(name: str, owner: Any) -> dict[str, Any]:
    """The axes that `x.T` and `x.mT` exchange."""
    is_property = name == "transpose" and getattr(owner, "__name__", "") in ("T", "mT", "H", "mH")
    return {"dim0": -2, "dim1": -1} if is_property else {}


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensor or tensors in an argument; those inside an index are left out."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)
