"""Which code makes the statistics of heads."""

from __future__ import annotations

import pytest
import torch

from mhacli.attention.tiled import reducer
from mhacli.errors import MhaError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _asked_anew():
    reducer.kernel_fault.cache_clear()
    yield
    reducer.kernel_fault.cache_clear()


@pytest.mark.parametrize("asked", ["auto", "torch"])
def test_on_a_cpu_torch_makes_the_statistics_and_says_nothing(asked):
    assert reducer.settled(asked, CPU, torch.float32) == ("torch", ())


def test_a_kernel_that_cannot_run_is_an_error_where_it_was_asked_for(monkeypatch):
    monkeypatch.setattr(reducer, "kernel_fault", lambda device, dtype: "it is raining")
    with pytest.raises(MhaError) as caught:
        reducer.settled("triton", GPU, torch.float32)
    assert caught.value.message == "--reducer triton: it is raining"
    assert caught.value.hint == "--reducer torch works everywhere"


def test_a_kernel_that_cannot_run_is_a_note_where_it_was_not_asked_for(monkeypatch):
    monkeypatch.setattr(reducer, "kernel_fault", lambda device, dtype: "it is raining")
    chosen, notes = reducer.settled("auto", GPU, torch.float32)
    assert chosen == "torch"
    assert notes == ("statistics are made by torch, which takes longer: it is raining",)


def test_the_kernel_is_taken_on_a_device_where_it_runs(monkeypatch):
    monkeypatch.setattr(reducer, "kernel_fault", lambda device, dtype: None)
    assert reducer.settled("auto", GPU, torch.bfloat16) == ("triton", ())


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
