"""Single-threaded jobs in parallel: the order of results, exceptions, and torch's restored threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from support.model_families import ids_of, loaded_of, made, sequence_of

from mhacli.adapters.hf.inputs import make_inputs
from mhacli.compute import heads
from mhacli.compute.base.devices import one_thread, shared_out
from mhacli.compute.checkpoint import layers
from mhacli.compute.checkpoint.layers import CheckpointRunRequest
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.compute.heads import prepare_heads
from mhacli.requests.layer import layer_request
from mhacli.results.record.head_statistics import HeadsRequest
from mhacli.spec.config import Config
from mhacli.text.encode import encode


@pytest.fixture(params=[1, 2, 3])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """So many threads of torch while a test runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def counts() -> set[int]:
    """How many threads torch has here, and in a thread that begins now."""
    found = [torch.get_num_threads()]
    fresh = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    fresh.start()
    fresh.join()
    return set(found)


def test_results_come_in_the_order_of_the_jobs_whichever_is_done_first(n_threads: int) -> None:
    def job(number: int) -> Any:
        def work() -> int:
            time.sleep(0.02 if number == 0 else 0.0)
            return number

        return work

    assert shared_out([job(number) for number in range(7)]) == list(range(7))
    assert shared_out([job(5)]) == [5]
    assert counts() == {n_threads}


def test_as_many_jobs_run_at_once_as_torch_has_threads(n_threads: int) -> None:
    """Each job waits until so many have begun; more would wait for ever."""
    barrier = threading.Barrier(n_threads)

    def work() -> str:
        barrier.wait(timeout=120)
        return threading.current_thread().name

    names = shared_out([work] * n_threads)
    assert len(set(names)) == n_threads
    assert (threading.current_thread().name in names) == (n_threads == 1)


def test_each_thread_computes_alone_and_without_gradients(n_threads: int) -> None:
    rows = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        found = shared_out([lambda: (torch.get_num_threads(), (rows * 2).requires_grad)] * 4)
    assert found == [(1, False)] * 4
    assert counts() == {n_threads}


def test_a_fault_of_a_job_comes_through_and_threads_are_as_before(n_threads: int) -> None:
    done = []

    def broken() -> None:
        raise ArithmeticError("no such number")

    with pytest.raises(ArithmeticError, match=r"^no such number$"):
        shared_out([lambda: done.append(1), broken, lambda: done.append(2)])
    assert 1 in done
    assert counts() == {n_threads}


def test_an_interrupt_of_a_job_is_no_fault_to_be_swallowed(n_threads: int) -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shared_out([stopped, lambda: None])
    assert counts() == {n_threads}


@pytest.mark.parametrize("is_broken", [False, True])
def test_one_thread_is_for_a_while_only(is_broken: bool, n_threads: int) -> None:
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
            if is_broken:
                raise ArithmeticError
    except ArithmeticError:
        assert is_broken
    assert counts() == {n_threads}


def looked_at(threads: int, n_tokens: int, heads: tuple[int, ...] | None) -> tuple[CheckpointRun, Any]:
    """A look at a checkpoint with so many threads."""
    grouped = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
               "intermediate_size": 32, "vocab_size": 99, "head_dim": 8}  # fmt: skip
    model = made("llama", grouped)
    inputs = make_inputs(model, [sequence_of(ids_of(1, n_tokens)[0].tolist())], None, "right", 0)
    wanted = CheckpointRunRequest(HeadsRequest(heads=heads), keep=())
    run = CheckpointRun(loaded_of(model), inputs, wanted)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run.run()
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    return run, run.record()


@pytest.mark.parametrize("heads", [None, (1, 4)])
def test_a_layer_is_reported_to_be_the_same_by_one_thread_and_by_two(
    heads: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_jobs: list[int] = []

    def counted(jobs: Any) -> Any:
        n_jobs.append(len(jobs))
        return shared_out(jobs)

    monkeypatch.setattr(layers, "SMALL_CELLS", 100)
    monkeypatch.setattr(layers, "shared_out", counted)
    _, alone = looked_at(1, 90, heads)
    _, shared = looked_at(2, 90, heads)
    assert n_jobs == ([1, 1, 2, 2] if heads is None else [2, 2, 2, 2])
    assert [(h.layer, h.head) for h in shared.heads] == [(i, h) for i in range(2) for h in heads or range(6)]
    for one, other in zip(alone.heads, shared.heads, strict=True):
        assert flat(asdict(one)) == pytest.approx(flat(asdict(other)), abs=1e-5)
    assert alone.arrays.keys() == shared.arrays.keys()
    for name, array in alone.arrays.items():
        assert array == pytest.approx(shared.arrays[name], abs=1e-5, nan_ok=True)


def test_the_heads_of_a_text_are_the_same_by_one_thread_and_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    n_jobs: list[int] = []

    def counted(jobs: Any) -> Any:
        n_jobs.append(len(jobs))
        return shared_out(jobs)

    monkeypatch.setattr(heads, "SMALL_CELLS", 100)
    monkeypatch.setattr(heads, "shared_out", counted)
    config = Config(d_model=40, n_heads=5, causal=True, device="cpu").resolved()
    request = layer_request(encode(["a b c d e f a b c d a a"], config), config)
    records = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        run = prepare_heads(request, HeadsRequest())
        run.run()
        records.append(run.record())
    torch.set_num_threads(before)
    assert n_jobs == [2]
    alone, shared = records
    assert [head.head for head in shared.heads] == list(range(5))
    for one, other in zip(alone.heads, shared.heads, strict=True):
        assert flat(asdict(one)) == pytest.approx(flat(asdict(other)), abs=1e-5)
    for name, array in alone.arrays.items():
        assert array == pytest.approx(shared.arrays[name], abs=1e-5, nan_ok=True)


def flat(value: Any, name: str = "") -> dict[str, float]:
    """Every number of a document by its place."""
    if isinstance(value, dict):
        return {k: v for key, one in value.items() for k, v in flat(one, f"{name}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, one in enumerate(value) for k, v in flat(one, f"{name}.{i}").items()}
    return {name: float(value)} if isinstance(value, (int, float)) else {name + repr(value): 0.0}


def test_little_work_is_done_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(jobs: Any) -> Any:
        seen.append(torch.get_num_threads())
        return shared_out(jobs)

    monkeypatch.setattr(layers, "shared_out", counted)
    looked_at(2, 12, None)
    assert seen == [1, 1]
    monkeypatch.setattr(layers, "SMALL_CELLS", 12 * 12 - 1)
    looked_at(2, 12, None)
    assert seen == [1, 1, 2, 2]
