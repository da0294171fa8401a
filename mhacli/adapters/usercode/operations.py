"""The torch operations that run inside a user's attention: every call of a torch function, in order, with its line.

A mode of torch sees each call. A function of `torch.nn.functional` is one operation (`F.softmax` is `softmax`), except for
`multi_head_attention_forward`, all of `nn.MultiheadAttention`, whose own operations are watched. What a later operation
overwrites is copied before, so that every operation keeps the numbers that it was given and gave. All else is kept as it is:
an operation's input *is* the output of the one that made it, and views share their memory.
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

from mhacli.adapters.usercode.process import SourceLine
from mhacli.adapters.usercode.types import Operation
from mhacli.errors import MhaError

MAX_OPERATIONS: Final = 20_000
"""In one call: a loop over heads, queries and keys in Python has some thousands."""
_SILENT = frozenset(("requires_grad_", "detach_", "retain_grad", "grad", "register_hook", "set_"))
"""Functions that return a tensor and compute nothing."""
_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
_OURS = str(Path(__file__).resolve().parents[2]) + os.sep
_WHOLE = ("scaled_dot_product_attention", "softmax")
"""Operations that only attention calls; other operations from our own code belong to the calling."""
T = TypeVar("T")


def watch(ask: Callable[[], T], files: Sequence[str]) -> tuple[T, tuple[Operation, ...]]:
    """What `ask()` gives, and the operations that torch was asked for meanwhile, in order.

    `files` hold the author's code: an operation's line is the innermost one in them. Without any, `file` is None. Operations
    with several outputs, such as `chunk`, come once for each, numbered by the argument `output`. Raises what `ask` raises, and
    `MhaError` where there are more than `MAX_OPERATIONS`.
    """
    watcher = _Watcher(frozenset(os.path.realpath(file) for file in files))
    with watcher:
        given = ask()
    return given, tuple(watcher.seen)


class _Watcher(TorchFunctionMode):
    """Records every call. `holders` are the operations that hold a tensor in a piece of memory, by its address."""

    def __init__(self, files: frozenset[str]) -> None:
        super().__init__()
        self.files = files
        self.seen: list[Operation] = []
        self.holders: dict[int, list[Operation]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function's result, recorded. Torch switches the mode off meanwhile, so inner calls are not recorded."""
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with _entered(), self:
                return func(*args, **kwargs)
        name = name_of(func)
        inputs, arguments = arguments_of(name, func, args, kwargs)
        changed = _overwritten(name, inputs, kwargs)
        inputs = self._kept(inputs, changed)
        answer = func(*args, **kwargs)
        outputs = [changed] if name == "setitem" and changed is not None else list(_tensors_of(answer))
        if outputs and name not in _SILENT:
            self._note(name, inputs, outputs, arguments, is_one=not isinstance(answer, (tuple, list)))
        return answer

    def _note(
        self, name: str, inputs: list[Tensor], outputs: list[Tensor], arguments: Mapping[str, Any], *, is_one: bool
    ) -> None:
        place = _author_line(self.files)
        if place is None and name not in _WHOLE:
            return
        if len(self.seen) + len(outputs) > MAX_OPERATIONS:
            raise MhaError(
                f"one call runs more than {MAX_OPERATIONS:,} operations, which is too many to watch",
                hint="a loop over queries and keys runs fewer operations on a shorter text",
                code="too-large",
            )
        for number, output in enumerate(outputs):
            which = {} if is_one else {"output": number}
            seen = Operation(name, tuple(inputs), output, {**arguments, **which}, *(place or SourceLine()))
            self.seen.append(seen)
            for address in {address_of(tensor) for tensor in (*inputs, output)} - {0}:
                self.holders.setdefault(address, []).append(seen)

    def _kept(self, inputs: Sequence[Tensor], changed: Tensor | None) -> list[Tensor]:
        """The inputs of an operation that writes into the memory of `changed`, as they are before; and so for all operations
        that hold a tensor there."""
        address = 0 if changed is None else address_of(changed)
        if not address:
            return list(inputs)
        copies: dict[int, Tensor] = {}

        def kept(tensor: Tensor) -> Tensor:
            if address_of(tensor) != address:
                return tensor
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().clone()
            return copies[id(tensor)]

        for seen in self.holders.pop(address, ()):
            seen.inputs, seen.output = tuple(kept(tensor) for tensor in seen.inputs), kept(seen.output)
        return [kept(tensor) for tensor in inputs]


def _overwritten(name: str, inputs: Sequence[Tensor], keywords: Mapping[str, Any]) -> Tensor | None:
    """The tensor whose memory a call writes into, None where it makes new memory."""
    out = keywords.get("out")
    if isinstance(out, Tensor):
        return out
    is_named_so = name == "setitem" or (name.endswith("_") and not name.startswith("__"))
    is_in_place = is_named_so or keywords.get("inplace") is True
    return inputs[0] if is_in_place and inputs else None


def _tensors_of(answer: Any) -> Iterator[Tensor]:
    """The tensors that an operation gave, those without memory of their own, as inside of vmap, left out."""
    for one in answer if isinstance(answer, (tuple, list)) else (answer,):
        if isinstance(one, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(one):
            yield one


def address_of(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; 0 where it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _author_line(files: frozenset[str]) -> SourceLine | None:
    """The innermost line of the author's code that is being run; None where no code but our own asked for it."""
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
def _entered() -> Iterator[None]:
    """Lets `multi_head_attention_forward` run its own lines under a mode, to which it would hand itself over as a whole."""
    functions: Any = F
    real, its_own = functions.has_torch_function, F.multi_head_attention_forward.__code__

    def answer(tensors: Any) -> bool:
        return False if sys._getframe(1).f_code is its_own else bool(real(tensors))

    functions.has_torch_function = answer
    try:
        yield
    finally:
        functions.has_torch_function = real


# -------------------------------------------------------------------------------------------------- names and arguments


_SAME: Mapping[str, str] = {
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
"""Other names in torch and Python for the same function. On tensors of bool `~`, `&` and `|` are the logical ones."""
_REVERSED = ("__rmatmul__", "__rsub__", "__rdiv__", "__rtruediv__", "__rpow__", "__rfloordiv__")
"""Operators whose left side is the second argument."""
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
"""The parameters of a function, in order, where its author may leave their names out."""
_OF_SHAPES: Mapping[str, str] = {
    "view": "shape", "reshape": "shape", "expand": "shape", "repeat": "repeats", "permute": "dims", "ones": "size",
    "zeros": "size", "full": "size", "empty": "size", "tile": "dims",
}  # fmt: skip
"""Functions that take numbers one by one or as one list, and what that is called."""
_OLD_WORDS = {"axis": "dim", "axes": "dims", "keepdims": "keepdim", "axis0": "dim0", "axis1": "dim1", "self": "input",
              "x": "input"}  # fmt: skip
"""Other words that torch takes for its own."""


def name_of(func: Any) -> str:
    """What a torch function is called, whichever way it was asked for: `@`, `torch.matmul` and `x.matmul` are `matmul`; in
    place, an underscore follows; `x[…] = y` is `setitem`; `x.T`, `x.mT` and `x.t()` are `transpose`; `bmm`, `mm`, `einsum`,
    `linear` and `scaled_dot_product_attention` are what they say."""
    name = str(getattr(func, "__name__", func))
    if name == "__get__":  # a property, such as x.T
        name = str(getattr(getattr(func, "__self__", None), "__name__", name))
    return _SAME.get(name, name)


def arguments_of(
    name: str, func: Any, args: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors of a call in the order of the function's parameters, and everything else by name.

    An argument whose name is not known is called by its place, "0" for the first. Of operators with a number on the left, such
    as `1 - x`, that number is `input`. `None` is kept; what stands in lists of tensors is taken out of them.
    """
    given = {_OLD_WORDS.get(key, key): value for key, value in keywords.items() if key != "_stacklevel"}
    named: dict[str, Any] = {}
    if name in _OF_SHAPES:
        rest = args[1:] if args and isinstance(args[0], Tensor) else args
        named |= {"input": args[0]} if rest is not args else {}
        named |= _shape(_OF_SHAPES[name], rest)
    else:
        for place, value in enumerate(_in_order(name, func, args)):
            names = _PARAMETERS.get(name, "").split()
            named[names[place] if place < len(names) else str(place)] = value
    named |= given
    order = _PARAMETERS.get(name, "input").split()
    values = sorted(named.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    inputs = [tensor for key, value in values if key != "out" for tensor in _tensors_in(value)]
    properties = _of_property(name, getattr(func, "__self__", None))
    return inputs, properties | {key: value for key, value in values if not list(_tensors_in(value)) and key != "out"}


def _in_order(name: str, func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments as the function of that name takes them: operators from the left, `x.where(c, y)` as `where(c, x, y)`."""
    if getattr(func, "__name__", "") in _REVERSED and len(args) == 2:
        return args[::-1]
    if name == "where" and func is torch.Tensor.where and len(args) > 1:
        return (args[1], args[0], *args[2:])
    if name == "einsum" and args and isinstance(args[0], Tensor):  # operands and their axes in turns
        return ("", *args)
    return args


def _shape(word: str, rest: Sequence[Any]) -> dict[str, Any]:
    """Numbers that were given one by one, or as one list, as a tuple; what is no number stays what it is."""
    if not rest:
        return {}
    first = rest[0]
    if isinstance(first, (tuple, list)):
        return {word: tuple(first)} | {str(place): value for place, value in enumerate(rest[1:], 2)}
    return {word: first if isinstance(first, (Tensor, torch.dtype)) else tuple(rest)}


def _of_property(name: str, owner: Any) -> dict[str, Any]:
    """The axes that `x.T` and `x.mT` exchange, which no argument names."""
    is_property = name == "transpose" and getattr(owner, "__name__", "") in ("T", "mT", "H", "mH")
    return {"dim0": -2, "dim1": -1} if is_property else {}


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors that an argument holds: itself, or those of a list; the tensors of an index are no inputs of their own."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors_in(one)
