"""Which code makes the statistics of heads, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mhacli.attention.tiled import reducer
from mhacli.attention.tiled.scores import ComputedPattern, Scores, VirtualPattern
from mhacli.errors import MhaError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _asked_anew():
    reducer.kernel_fault.cache_clear()
    yield
    reducer.kernel_fault.cache_clear()


def test_torch_is_chosen_where_it_is_asked_for():
    assert reducer.choice("torch", GPU, torch.float32) == ("torch", "--reducer torch")


def test_on_a_cpu_torch_makes_the_statistics():
    chosen = reducer.choice("auto", CPU, torch.float32)
    assert chosen.reducer == "torch"
    assert "cpu" in chosen.reason


def test_a_kernel_that_cannot_run_is_an_error_where_it_was_asked_for(monkeypatch):
    monkeypatch.setattr(reducer, "kernel_fault", lambda device, dtype: "it is raining")
    with pytest.raises(MhaError) as caught:
        reducer.choice("triton", GPU, torch.float32)
    assert caught.value.message == "--reducer triton: it is raining"
    assert caught.value.hint == "--reducer torch works everywhere"


def test_a_kernel_that_cannot_run_is_a_reason_where_it_was_not_asked_for(monkeypatch):
    monkeypatch.setattr(reducer, "kernel_fault", lambda device, dtype: "it is raining")
    assert reducer.choice("auto", GPU, torch.float32) == ("torch", "it is raining")


def test_the_kernel_is_taken_on_a_device_where_it_runs(monkeypatch):
    monkeypatch.setattr(reducer, "kernel_fault", lambda device, dtype: None)
    assert reducer.choice("auto", GPU, torch.bfloat16) == ("triton", None)


def test_the_kernel_is_not_for_float64():
    assert "float64" in reducer.kernel_fault(GPU, torch.float64)


def test_on_a_cpu_the_fault_names_the_device(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "cpu" in reducer.kernel_fault(CPU, torch.float32)


def test_without_triton_the_fault_says_so(monkeypatch):
    monkeypatch.setattr(reducer, "find_spec", lambda name: None)
    assert reducer.kernel_fault(GPU, torch.float32) == "Triton is not installed"


def test_a_kernel_that_fails_is_a_fault_with_its_reason(monkeypatch):
    def fails(device, dtype):
        raise RuntimeError("no such\n  instruction")

    monkeypatch.setattr(reducer, "find_spec", lambda name: True)
    monkeypatch.setattr(reducer, "_disagreement", fails)
    assert reducer.kernel_fault(GPU, torch.float32) == "the kernel does not run here: no such instruction"


def pattern(d_head=8, n=3, **choices):
    q = torch.zeros(1, 1, n, d_head)
    return VirtualPattern(Scores(q, q, 1.0, **choices), torch.zeros(1, 1, n))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (pattern(is_wide=True), "float64"),
        (pattern(d_head=257), "257"),
        (pattern(n=0), "nothing"),
        (ComputedPattern(torch.ones(1, 1, 3, 3)), "whole"),
    ],
)
def test_patterns_that_the_kernel_does_not_take_are_left_to_torch_with_the_reason(other, words, monkeypatch):
    monkeypatch.setattr(reducer, "kernel_fault", lambda device, dtype: None)
    assert reducer.choice_for("triton", pattern(d_head=256)) == ("triton", None)
    chosen = reducer.choice_for("triton", other)
    assert chosen.reducer == "torch"
    assert words in chosen.reason


def test_the_kernel_is_asked_for_the_dtype_of_the_queries(monkeypatch):
    asked = []
    monkeypatch.setattr(reducer, "kernel_fault", lambda device, dtype: asked.append(dtype))
    q = torch.zeros(1, 1, 3, 8, dtype=torch.bfloat16)
    reducer.choice_for("triton", replace(pattern(), scores=Scores(q, q, 1.0)))
    assert asked == [torch.bfloat16]
