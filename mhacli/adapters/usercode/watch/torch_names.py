"""Calls of torch functions under one name each, whichever way they were written, with their arguments by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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
"""What torch, or Python, calls otherwise. On tensors of bool `~`, `&` and `|` are the logical ones."""
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
    said = {_OLD_WORDS.get(key, key): value for key, value in keywords.items() if key != "_stacklevel"}
    named: dict[str, Any] = {}
    if name in _OF_SHAPES:
        rest = args[1:] if args and isinstance(args[0], Tensor) else args
        named |= {"input": args[0]} if rest is not args else {}
        named |= _shape(_OF_SHAPES[name], rest)
    else:
        for place, value in enumerate(_in_order(name, func, args)):
            names = _PARAMETERS.get(name, "").split()
            named[names[place] if place < len(names) else str(place)] = value
    named |= said
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
    """The axes that `x.T` and `x.mT` exchange, which nobody wrote."""
    is_property = name == "transpose" and getattr(owner, "__name__", "") in ("T", "mT", "H", "mH")
    return {"dim0": -2, "dim1": -1} if is_property else {}


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors that an argument holds: itself, or those of a list; the tensors of an index are no inputs of their own."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors_in(one)
