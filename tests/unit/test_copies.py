"""Copies of modules whose functions refer to their parts, and the object that is left as it was."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import types
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from support import user_code
from torch import Tensor, nn

import mhacli
from mhacli.commands.check import examine
from mhacli.usercode.copies import deep_copy
from mhacli.usercode.door import UserRaised

Call = Callable[[Tensor], Tensor]
OTHER = nn.Linear(4, 4)


def through_itself(part: nn.Module) -> Call:
    def twice(x: Tensor, again: bool = True) -> Tensor:
        return twice(part(x), again=False) if again else part(x)

    return twice


def through_a_keyword(part: nn.Module) -> Call:
    def call(x: Tensor, *, within: nn.Module = part) -> Tensor:
        return within(x)

    return call


def wrapped(call: Call) -> Call:
    @functools.wraps(call)
    def outer(x: Tensor) -> Tensor:
        return call(x)

    return outer


class Part(nn.Module):
    """Holds a function that reaches its parts in one way."""

    def __init__(self, hold: Callable[[Any], Any]) -> None:
        super().__init__()
        self.part, self.other = nn.Linear(4, 4), OTHER
        self.held = hold(self)

    def first(self, x: Tensor) -> Tensor:
        return self.part(x)


WAYS: dict[str, Callable[[Any], Any]] = {
    "closure": lambda m: (lambda part: lambda x: part(x))(m.part),
    "list in a closure": lambda m: (lambda parts: lambda x: parts[0](x))([m.part]),
    "weight in a closure": lambda m: (lambda w: lambda x: x @ w)(m.part.weight),
    "closure that refers to itself": lambda m: through_itself(m.part),
    "default": lambda m: lambda x, part=m.part: part(x),
    "keyword default": lambda m: through_a_keyword(m.part),
    "partial": lambda m: functools.partial(lambda part, x: part(x), m.part),
    "method": lambda m: m.first,
    "method of a closure": lambda m: types.MethodType(
        (lambda part: lambda self, x: part(x))(m.part), m
    ),
    "static method": lambda m: staticmethod((lambda part: lambda x: part(x))(m.part)),
    "cached method": lambda m: functools.lru_cache(m.first),
    "decorated method": lambda m: wrapped(m.first),
    "compiled method": lambda m: torch.compile(m.first, backend="eager"),
    "weak reference": lambda m: (lambda to: lambda x: to().part(x))(weakref.ref(m)),
    "global module": lambda m: lambda x: OTHER(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_functions_of_a_copy_refer_to_its_parts(way: str) -> None:
    module, x = Part(WAYS[way]), torch.randn(2, 4)
    made = deep_copy(module)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert not made.held(x).any()
    assert module.held(x).any()


def test_what_refers_to_no_part_stays_the_same_object() -> None:
    lock, generator = threading.Lock(), (n for n in ())
    kept = (lock, generator, torch.nn.functional, nn.functional.relu, nn.Sequential.forward)
    module = Part(lambda _: [*kept])
    assert all(a is b for a, b in zip(deep_copy(module).held, kept, strict=True))


class Model(nn.Module):
    """Does all that a call can change, and then what `end` does."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self.words, self.norm, self.end = nn.Embedding(50, 8), nn.BatchNorm1d(8), end
        self.norm.register_forward_hook(lambda _, __, output: output)
        self.register_buffer("calls", torch.zeros(1))
        self.words.weight.grad = torch.ones(50, 8)
        self.norm.weight.requires_grad_(False)
        self.norm.double().float().eval()

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        self.last = ids
        self.norm.bias.requires_grad_(False)
        self.words.weight.grad += 1
        self.norm._forward_hooks.clear()
        with torch.no_grad():
            self.words.weight[0] += 1
        random.random(), np.random.rand(), torch.rand(1)
        if self.calls > 3:
            self.end()
        return self.norm(self.words(ids).transpose(1, 2)).transpose(1, 2)


class Uncopyable(Model):
    def __deepcopy__(self, memo: object) -> Model:
        raise NotImplementedError


def fail() -> None:
    raise ValueError("no more")


def interrupt() -> None:
    raise KeyboardInterrupt


def state(model: nn.Module) -> list[object]:
    """All that an examination may not change."""
    found: list[object] = []
    for part in model.modules():
        attributes = {name: dict(v) if isinstance(v, dict) else v for name, v in vars(part).items()}
        found.append(str(attributes))  # with the hooks, the mode, and all numbers
        for tensor in [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
            gradient = None if tensor.grad is None else tensor.grad.tolist()
            found += [id(tensor), tensor.data_ptr(), tensor.tolist(), tensor.dtype, tensor.device]
            found += [tensor.requires_grad, gradient]
    generators = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    return [*found, *generators]  # the first text of a tensor draws a number


@pytest.mark.parametrize("end", [lambda: None, fail, interrupt], ids=["success", "error", "ctrl-c"])
@pytest.mark.parametrize("kind", [Model, Uncopyable])
@pytest.mark.parametrize("is_fork", [True, False])
def test_an_object_is_left_as_it_was(
    kind: type[Model],
    end: Callable[[], None],
    is_fork: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if end is interrupt and is_fork:
        parent = os.getpid()

        def end() -> None:
            os.kill(parent, signal.SIGINT)
            signal.pause()  # or the next call sends a second one, which nothing here awaits

    if not is_fork:
        monkeypatch.setattr(examine, "suits_a_fork", lambda *_: False)
    model = kind(end)
    before = state(model)
    with suppress(mhacli.MhaError, ValueError, KeyboardInterrupt):
        user_code.check(model, length=8)
    assert state(model) == before


def test_what_a_copy_raises_within_a_closure_is_raised() -> None:
    class Refuses(nn.Module):
        def __deepcopy__(self, memo: dict[int, Any]) -> Refuses:
            raise ValueError("not twice")

    part = Refuses()
    with pytest.raises(UserRaised, match="not twice"):
        deep_copy(lambda: part)


def test_an_empty_cell_of_a_closure_stays_empty() -> None:
    part = nn.Linear(4, 4)

    def call(x: Tensor) -> Tensor:
        return part(x) if x.any() else later

    copy = deep_copy(call)
    assert torch.equal(copy(torch.ones(4)), part(torch.ones(4)))
    with pytest.raises(NameError):
        copy(torch.zeros(4))
    later = torch.ones(4)
