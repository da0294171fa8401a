"""The private names of torch that `mhacli.usercode.foreign` reads exist and do what it expects.

Tried with torch 2.13.0. Where a newer release fails here, `mhacli/usercode/foreign.py` is the one
file to change.
"""

from __future__ import annotations

import copy
import threading
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from mhacli.usercode import foreign

TORCH = f"torch {torch.__version__}: see mhacli/usercode/foreign.py"


class Names(TorchFunctionMode):
    """The functions of torch that are called, by name; those inside attention one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward:
            return foreign.attention_within(self, *args, **(kwargs or {}))
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_torch_has_the_names() -> None:
    assert isinstance(F.multi_head_attention_forward, FunctionType), TORCH
    assert "has_torch_function" in F.multi_head_attention_forward.__code__.co_names, TORCH
    assert hasattr(nn.Module, "_apply"), TORCH
    assert hasattr(torch._C._functorch, "is_functorch_wrapped_tensor"), TORCH
    assert hasattr(torch.utils._pytree, "tree_leaves"), TORCH


@pytest.mark.parametrize("has_code", [True, False])
def test_a_mode_sees_the_functions_inside_attention(
    has_code: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_code:
        monkeypatch.setattr(foreign, "_attention_body", lambda: None)
    layer = nn.MultiheadAttention(8, 2)
    x = torch.randn(3, 1, 8)
    expected, _ = layer(x, x, x)
    with Names() as seen:
        result, _ = layer(x, x, x)
    torch.testing.assert_close(result, expected)
    assert ("softmax" in seen.names) == has_code, TORCH


def test_a_compiled_module_is_unwrapped() -> None:
    module = nn.Linear(2, 2)
    assert foreign.uncompiled(torch.compile(module, backend="eager")) is module, TORCH
    assert foreign.uncompiled(module) is module
    owner = nn.Module()
    owner.method = MethodType(lambda self: self, owner)
    owner.compiled = torch.compile(owner.method, backend="eager")
    assert foreign.uncompiled(owner).compiled is owner.method, TORCH


def test_copies_are_made_as_is_said_and_name_what_failed() -> None:
    tables = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    with foreign.copying_by({FunctionType: lambda _, memo: memo["made"]}):
        assert copy.deepcopy([print, len, foreign.uncompiled], {"made": 3}) == [print, len, 3]
    assert copy._deepcopy_dispatch is tables  # type: ignore[attr-defined]
    lock = threading.Lock()
    with pytest.raises(TypeError) as raised:
        copy.deepcopy({"a": [lock]})
    assert foreign.part_being_copied(raised.value) is lock


@pytest.mark.parametrize("has_name", [True, False])
def test_parameters_and_buffers_change_in_place(
    has_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Sequential(nn.BatchNorm1d(3))
    if not has_name:
        monkeypatch.setattr(nn.Module, "_apply", None)
    foreign.change_tensors(module, lambda tensor: tensor + 5)
    tensors = module.state_dict()
    assert tensors["0.weight"].tolist() == [6, 6, 6], TORCH
    assert tensors["0.running_mean"].tolist() == [5, 5, 5], TORCH


def test_a_transform_of_torch_func_is_noticed() -> None:
    noticed = []

    def note(x: torch.Tensor) -> torch.Tensor:
        noticed.append(foreign.is_transformed(x))
        return x * 2

    torch.func.vmap(note)(torch.ones(2, 3))
    note(torch.ones(3))
    assert noticed == [True, False], TORCH


@pytest.mark.parametrize("has_name", [True, False])
def test_tensors_in_nested_containers_are_in_order(
    has_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_name:
        monkeypatch.delattr(torch.utils._pytree, "tree_leaves")
    tensors = [torch.tensor(n) for n in range(4)]
    nested = [tensors[0], {"a": (tensors[1], 7), "b": [None, tensors[2]]}, "word", tensors[3]]
    assert [int(tensor) for tensor in foreign.tensors_in(nested)] == [0, 1, 2, 3], TORCH
