"""A device that is not there: its tensors hold their numbers on the CPU, say that they are on
`meta`, and what runs on them is counted as a GPU would be asked for it.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE, SECOND = torch.device("meta"), torch.device("meta", 1)
_OPERATORS = torch.ops.aten
_MOVES = (_OPERATORS._to_copy.default, _OPERATORS.copy_.default)
_READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "item")
_FREE = ("detach", "alias", "empty", "new_empty", "empty_like", "empty_strided", "lift_fresh")
"""Operators that start no kernel, besides views."""


class OnDevice(Tensor):
    """A tensor on the device; `held` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device = DEVICE) -> "OnDevice":
        made: OnDevice = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, operator: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operator, args, kwargs or {})


class Asked:
    """What was asked of the device and of the CPU, by who asked: the `model`, `reduce_heads` or
    the `rest` of mha.
    """

    def __init__(self) -> None:
        self.kernels, self.waits, self.on_cpu = Counter[str](), Counter[str](), Counter[str]()

    def synchronize(self) -> None:
        """What a backend's module does to wait for its device."""
        self.waits["rest"] += 1


_counting = [Asked()]


class _Watch(TorchDispatchMode):
    """Runs what makes tensors on the device, and counts what runs on the CPU."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_device(kwargs.get("device")) or any(issubclass(kind, OnDevice) for kind in types):
            return _run(operator, args, kwargs)
        _counting[-1].on_cpu[_who()] += 1
        return operator(*args, **kwargs)


def _is_device(value: Any) -> bool:
    return value is not None and torch.device(value).type == DEVICE.type


def _who() -> str:
    """Who asks for an operator: the nearest of both libraries."""
    frame, is_of_mha = sys._getframe(2), False
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("transformers.") and not is_of_mha:
            return "model"
        is_of_mha |= module.startswith("mhacli.")
        if module.startswith("mhacli.") and frame.f_code.co_name == "reduce_heads":
            return "reduce_heads"
        frame = frame.f_back  # type: ignore[assignment]
    return "rest" if is_of_mha else "model"


def _run(operator: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operator on the numbers that tensors hold, and counts it."""
    held_args, held = tree_map_only(Tensor, _held, (args, kwargs))
    target = kwargs.get("device")
    if target is not None:
        held["device"] = torch.device("cpu")
    result = operator(*held_args, **held)
    is_move_away = target is not None and not _is_device(target)
    if operator is _MOVES[0] and target is not None and isinstance(result, Tensor):
        result = result.clone()  # a move copies
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    sides = {isinstance(each, OnDevice) for each in tensors}
    devices = [each.device for each in tensors if isinstance(each, OnDevice)]
    assert operator in _MOVES or len(set(devices)) < 2, "an operator reads tensors of two devices"
    stays = not is_move_away and (operator is not _MOVES[1] or isinstance(args[0], OnDevice))
    moves = operator in _MOVES and (
        len(sides) == 2 or (target is not None and sides != {_is_device(target)})
    )
    _count(operator, args, kwargs, moves=moves)
    if not stays:
        return args[0] if operator is _MOVES[1] else result
    device = torch.device(target) if _is_device(target) else devices[0]
    wrapped = tree_map_only(Tensor, lambda each: OnDevice(each, device), result)
    return return_and_correct_aliasing(operator, args, kwargs, wrapped)


def _held(tensor: Tensor) -> Tensor:
    """The numbers of a tensor; torch itself makes those without any, as a cache begins with."""
    if isinstance(tensor, OnDevice):
        return tensor.held
    is_empty = tensor.is_meta and not tensor.numel()
    return torch.empty_like(tensor, device="cpu") if is_empty else tensor


def _count(operator: Any, args: Any, kwargs: Any, *, moves: bool) -> None:
    name, who, asked = operator.name().partition("::")[2].partition(".")[0], _who(), _counting[-1]
    returns = operator._schema.returns
    alias = returns[0].alias_info if returns else None
    if name in _FREE or (alias is not None and not alias.is_write):
        return
    asked.kernels[who] += 1
    is_index = name in ("index", "index_put", "index_put_")
    by = [each for each in tree_leaves(args[1]) if isinstance(each, Tensor)] if is_index else []
    reads = name in _READS or any(
        each.dtype == torch.bool or not isinstance(each, OnDevice) for each in by
    )
    is_async = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
    if reads or (moves and not is_async):
        asked.waits[who] += 1


def on_device(tensor: Tensor, device: torch.device = DEVICE) -> Tensor:
    """A copy of a tensor on the device."""
    return OnDevice(tensor.detach().clone(), device)


def move(model: nn.Module, device: torch.device = DEVICE) -> None:
    """Moves a model to the device."""
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(on_device(parameter, device), requires_grad=False))
        for name, buffer in [*module.named_buffers(recurse=False)]:
            module._buffers[name] = on_device(buffer, device)


@contextmanager
def asked(monkeypatch: Any) -> Iterator[Asked]:
    """A context that counts what is asked of the device, which mha takes for one with numbers."""
    counts = Asked()
    backend = "mhacli.attention.devices.backend_of"
    monkeypatch.setattr(backend, lambda device: counts if _is_device(device) else None)
    _counting.append(counts)
    try:
        with _Watch():
            yield counts
    finally:
        _counting.remove(counts)
