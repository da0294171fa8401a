"""Copies of the user's objects, in which functions refer to the copied parts; and what puts an
object back that cannot be copied whole.
"""

import copy
import functools
import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .door import NO_ANSWER, UserRaised, call_user
from .foreign import copying_by, part_being_copied

T = TypeVar("T")
Memo = dict[int, Any]
"""The copies by the ids of the originals, as `copy.deepcopy` keeps them."""


def deep_copy(obj: T) -> T:
    """A deep copy, in which closures, methods and partials refer to the copies of modules and
    tensors. What cannot be copied in it, such as a lock, is the same object in both. Raises
    `UserRaised` if the object itself, or a module in it, cannot be copied.
    """
    shared: Memo = {}
    while True:
        try:
            with copying_by(_COPIERS):
                made: T = call_user(copy.deepcopy, obj, dict(shared))
            return made
        except UserRaised as raised:
            fault = raised.fault
            part = part_being_copied(raised.fault)
            is_whole = part is obj or isinstance(part, nn.Module | nn.Parameter)
            if is_whole or isinstance(fault, RecursionError):
                raise
            shared[id(part)] = part


def copied(obj: T) -> T:
    """A deep copy, or the object itself if it cannot be copied."""
    with suppress(*NO_ANSWER):
        return deep_copy(obj)
    return obj


# ---------------------------------------------------------------------- what functions refer to


def _copied_function(function: FunctionType, memo: Memo) -> FunctionType:
    """A function that refers to the copies of what it refers to: by its globals, its defaults, its
    closure and its attributes. One that reaches no module or tensor is the same in both.
    """
    if not _holds_parts(function):
        return function
    names = function.__globals__
    parts = _global_parts(function)
    made = FunctionType(
        function.__code__,
        {**names, **copy.deepcopy(parts, memo)} if parts else names,
        function.__name__,
        _copied_part(function.__defaults__, memo),
        tuple(copy.deepcopy(cell, memo) for cell in function.__closure__ or ()),
    )
    memo[id(function)] = functools.update_wrapper(made, function, updated=())
    made.__kwdefaults__ = _copied_part(function.__kwdefaults__, memo)
    del vars(made)["__wrapped__"]  # which is the original
    vars(made).update(_copied_part(vars(function), memo))
    return made


def _copied_cell(cell: CellType, memo: Memo) -> CellType:
    """A cell with a copy of what it holds; an empty one of an empty one, as of a name that is not
    assigned yet. What the copy raises is the user's.
    """
    made = memo[id(cell)] = CellType()  # a function may refer to itself
    try:
        contents = cell.cell_contents
    except ValueError:
        return made
    made.cell_contents = _copied_part(contents, memo)
    return made


def _copied_part(value: Any, memo: Memo) -> Any:
    """What a function refers to: a copy of what holds modules or tensors, or other things."""
    is_copied = isinstance(value, dict | list | set) or _holds_parts(value)
    return copy.deepcopy(value, memo) if is_copied else value


def _copied_reference(reference: Any, memo: Memo) -> Any:
    """A weak reference to the copy of its object, if that was copied before."""
    target = memo.get(id(reference()))
    return reference if target is None else weakref.ref(target)


_COPIERS: dict[type, Callable[[Any, Memo], Any]] = {
    FunctionType: _copied_function,
    CellType: _copied_cell,
    MethodType: lambda method, memo: MethodType(
        copy.deepcopy(method.__func__, memo), copy.deepcopy(method.__self__, memo)
    ),
    staticmethod: lambda method, memo: staticmethod(copy.deepcopy(method.__func__, memo)),
    type(functools.cache(len)): lambda function, memo: functools.lru_cache(
        **function.cache_parameters()
    )(copy.deepcopy(function.__wrapped__, memo)),
    weakref.ref: _copied_reference,
}


def _holds_parts(value: Any) -> bool:
    """Whether a module or a tensor is reached from an object."""
    seen = set[int]()
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, nn.Module | Tensor):
            return True
        if id(each) in seen or isinstance(each, type | ModuleType):
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType):
            left += [each.__closure__, each.__defaults__, each.__kwdefaults__]
            left += [vars(each), _global_parts(each)]
        else:
            left += [each()] if isinstance(each, weakref.ref) else gc.get_referents(each)
    return False


def _global_parts(function: FunctionType) -> dict[str, nn.Module]:
    """The global modules of torch that a function names."""
    found = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    return {name: value for name, value in found.items() if isinstance(value, nn.Module)}


# ------------------------------------------------------------------------------ what is put back


@contextmanager
def unchanged(obj: object) -> Iterator[None]:
    """A context after which an object is as before, with its modules, their tensors, hooks and
    other attributes, and so are the generators of random numbers.
    """
    attributes = getattr(obj, "__dict__", {})
    roots = [each for each in (obj, *attributes.values()) if isinstance(each, nn.Module)]
    names = [attributes, *(vars(part) for root in roots for part in root.modules())]
    dicts = [each for held in names for each in (held, *held.values()) if isinstance(each, dict)]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices), ExitStack() as after:
        after.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy.random"):
            after.callback(numpy.set_state, numpy.get_state())
        for held in dicts:
            after.callback(held.update, dict(held))
            after.callback(held.clear)  # what is last here comes first
            for value in held.values():
                if isinstance(value, Tensor) and value.is_leaf:
                    after.callback(_putting_back(value))
        yield


def _putting_back(tensor: Tensor) -> Callable[[], None]:
    """A function that gives a tensor and its gradient back what they have now."""
    data = tensor.data
    numbers = tensor.detach().clone()
    needs_grad = tensor.requires_grad
    gradient = tensor.grad
    put_gradient_back = None if gradient is None else _putting_back(gradient)

    def put_back() -> None:
        tensor.data = data.copy_(numbers)
        tensor.requires_grad_(needs_grad)
        if put_gradient_back is not None:
            put_gradient_back()
        tensor.grad = gradient

    return put_back
