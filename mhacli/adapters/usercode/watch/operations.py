"""What torch is asked for while somebody's attention runs: every call of a torch function, in order, with its line.

A mode of torch hears of each call. A function of `torch.nn.functional` is one operation (`F.softmax` is `softmax`), but for
`multi_head_attention_forward`, all of `nn.MultiheadAttention`, which is entered. What a later operation overwrites is copied
before, so that every operation keeps the numbers that it was given and gave; all else is kept as it is, so that an operation's
input *is* the output of the one that made it, and views share their memory.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mhacli.adapters.usercode.user_attention import Operation
from mhacli.adapters.usercode.watch.torch_names import arguments_of, name_of
from mhacli.errors import MhaError

MAX_OPERATIONS: Final = 20_000
"""In one call: a loop over heads, queries and keys in Python has some thousands."""
_SILENT = frozenset(("requires_grad_", "detach_", "retain_grad", "grad", "register_hook", "set_"))
"""What answers with a tensor and computes none."""
_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
_OURS = str(Path(__file__).resolve().parents[3]) + os.sep
_WHOLE = ("scaled_dot_product_attention", "softmax")
"""What only an attention asks torch for; all else that is asked from our own code is the way it is called."""
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
    return given, tuple(seen.operation() for seen in watcher.seen)


@dataclass(eq=False)
class _Seen:
    """An operation as far as it is known; its tensors are exchanged for copies before they are overwritten."""

    name: str
    inputs: list[Tensor]
    output: Tensor
    arguments: Mapping[str, Any]
    place: _Place

    def operation(self) -> Operation:
        """As it is told."""
        return Operation(self.name, tuple(self.inputs), self.output, self.arguments, *self.place)


class _Place(NamedTuple):
    """Where an operation was asked for, in code of the author."""

    file: str | None = None
    line: int | None = None
    source: str = ""


class _Watcher(TorchFunctionMode):
    """Hears of every call. `holders` are the operations that hold a tensor in a piece of memory, by its address."""

    def __init__(self, files: frozenset[str]) -> None:
        super().__init__()
        self.files = files
        self.seen: list[_Seen] = []
        self.holders: dict[int, list[_Seen]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The answer of the function, noted. Torch switches the mode off meanwhile: what it calls inside is its own matter."""
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
        place = _place(self.files)
        if place is None and name not in _WHOLE:
            return
        if len(self.seen) + len(outputs) > MAX_OPERATIONS:
            raise MhaError(
                f"operations of one call must be at most {MAX_OPERATIONS:,}, got more",
                hint="a loop over queries and keys is watched better with fewer of them",
                code="too-large",
            )
        for number, output in enumerate(outputs):
            which = {} if is_one else {"output": number}
            seen = _Seen(name, list(inputs), output, {**arguments, **which}, place or _Place())
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
            seen.inputs, seen.output = [kept(tensor) for tensor in seen.inputs], kept(seen.output)
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
    """Where the memory of a tensor begins; 0 where it has none that could be asked."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _place(files: frozenset[str]) -> _Place | None:
    """The innermost line of the author's code that is being run; None where no code but our own asked for it."""
    frame: FrameType | None = sys._getframe(2)
    frames = list(_outwards(frame))
    for frame, file in frames:
        if file in files:
            return _Place(file, frame.f_lineno, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip())
    for _, file in frames:
        if file.startswith(os.path.join(_TORCH, "nn", "modules")):
            return _Place()
        if not file.startswith(_TORCH) and file != __file__:
            return None if file.startswith(_OURS) else _Place()
    return _Place()


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
