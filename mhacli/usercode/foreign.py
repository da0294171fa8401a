"""What this room takes from the inside of torch, and of Python's `copy`.

A name that they do not document can go with any release. Each function here reads one such
name, and has an answer where it is missing. `tests/unit/test_foreign_usercode.py` says with which
release they were tried, and fails if a name is gone.
"""

import copy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .door import on_behalf, ours, plainly


class FunctionMode(TorchFunctionMode):
    """A mode of mha's that takes the place of torch's functions, also of those inside of
    `F.multi_head_attention_forward`: `called` gives what each returns.
    """

    @ours(instead=plainly)
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What a function returns. Torch disables the mode meanwhile."""
        if func is F.multi_head_attention_forward:
            return on_behalf(attention_within, self, *args, **(kwargs or {}))
        return self.called(func, args, kwargs or {})

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function returns for its arguments."""
        raise NotImplementedError


def attention_within(mode: TorchFunctionMode, *args: Any, **kwargs: Any) -> Any:
    """What `F.multi_head_attention_forward` returns. The mode sees each function inside of it, and
    none if torch has no Python code for it.
    """
    body = _attention_body()
    if body is None:
        return F.multi_head_attention_forward(*args, **kwargs)
    with mode:
        return body(*args, **kwargs)


@cache
def _attention_body() -> Callable[..., Any] | None:
    """`F.multi_head_attention_forward` that always runs its own code, instead of passing the whole
    call to a mode.
    """
    function: Any = F.multi_head_attention_forward
    if not isinstance(function, FunctionType):
        return None
    names = {**vars(F), "has_torch_function": lambda tensors: False}
    return FunctionType(function.__code__, names, "forward", function.__defaults__)


def uncompiled(module: Any) -> Any:
    """The module that a compiled one wraps; any other object itself. In both, methods that torch
    compiled are again as they are written.
    """
    module = getattr(module, "_orig_mod", module)
    for part in module.modules() if isinstance(module, nn.Module) else ():
        for name, value in vars(part).items():
            if isinstance(value, FunctionType):
                written = vars(value).get("_torchdynamo_orig_callable")
                vars(part)[name] = written if isinstance(written, MethodType) else value
    return module


def change_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replaces the parameters and buffers of a module and of its parts by what a function makes of
    them.
    """
    apply = getattr(module, "_apply", None)
    if apply is not None:
        apply(change)
        return
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = change(tensor.data)


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor is one of a transform of torch.func, whose numbers cannot be read."""
    functorch = getattr(torch._C, "_functorch", None)
    is_wrapped = getattr(functorch, "is_functorch_wrapped_tensor", lambda _: False)
    return bool(is_wrapped(tensor))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples, dicts and what else torch knows as a container, in
    order.
    """
    pytree = getattr(torch.utils, "_pytree", None)
    leaves = getattr(pytree, "tree_leaves", _leaves)(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _leaves(value: Any) -> list[Any]:
    """What nested lists, tuples and dicts hold, in order."""
    parts = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(parts, list | tuple):
        return [parts]
    return [leaf for part in parts for leaf in _leaves(part)]


def without_compiling() -> AbstractContextManager[Any]:
    """A context in which what torch compiled runs as it is written, so that it can be watched."""
    is_loaded = "torch._dynamo" in sys.modules  # loading it takes a second
    return torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()


@contextmanager
def copying_by(copiers: Mapping[type, Callable[[Any, Any], Any]]) -> Iterator[None]:
    """A context in which `copy.deepcopy` copies objects of these classes by these functions."""
    names = vars(copy)
    tables = ("_deepcopy_dispatch", "_atomic_types")
    before = {name: names[name] for name in tables if name in names}
    for name, table in before.items():
        is_dispatch = isinstance(table, dict)
        names[name] = {**table, **copiers} if is_dispatch else {*table} - copiers.keys()
    try:
        yield
    finally:
        names.update(before)


def part_being_copied(fault: BaseException) -> Any:
    """The object that `copy.deepcopy` was copying when it, or code of the object, raised."""
    frames = [frame for frame, _ in traceback.walk_tb(fault.__traceback__)]
    return [each.f_locals["x"] for each in frames if each.f_code is copy.deepcopy.__code__][-1]
