"""Memory beyond the inputs, measured in fresh processes, against the predicted bytes; and processes that crash."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mhacli.attention import attend
from mhacli.attention.backends import Prepared
from mhacli.compute.bench import run as footprint
from mhacli.compute.bench.run import FreshProcesses, MemoryUse, fresh_processes
from mhacli.results.bench.workload import Direction, Workload, expected_extra_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process its high-water mark")

LARGE = Workload(1, 6, 6, 16, 1021, 1021, "float32", False, "forward")
"""A matrix of scores for every head has 25 MB, and a row of heads 0.4 MB."""
SMALL = replace(LARGE, q_len=13, k_len=13)
KERNEL_BUFFERS = 3 << 20
"""What a kernel may keep for itself, beyond the formulas."""


@pytest.fixture(scope="module")
def fresh() -> Iterator[FreshProcesses]:
    with fresh_processes() as processes:
        yield processes


def is_at_work(pid: int) -> bool:
    """Whether a process is there and no mere entry that nobody has asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


Begin = Callable[[str], None]


@pytest.fixture
def begin_with(monkeypatch: pytest.MonkeyPatch) -> Begin:
    """`begin_with(code)`: processes made from now on run this first."""
    start = subprocess.Popen

    def begin(code: str) -> None:
        def started(words: list[str], **how: Any) -> Any:
            first = f"import os, time\nfrom mhacli.compute.bench import run as footprint\n{code}\n"
            return start([words[0], "-c", first + words[2]], **how)

        monkeypatch.setattr(footprint.subprocess, "Popen", started)

    return begin


@pytest.mark.sampled(1)
@pytest.mark.parametrize("direction", ["forward", "both"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("backend", ["explicit", "math"])
def test_a_backend_that_builds_the_pattern_needs_what_is_foreseen(
    fresh: FreshProcesses, backend: str, causal: bool, direction: Direction
) -> None:
    work = replace(LARGE, causal=causal, direction=direction)
    found = fresh.memory_use(backend, work, 3)
    assert (found.status, found.reason) == ("ok", None)
    assert found.extra_bytes == pytest.approx(expected_extra_bytes(backend, work, "cpu"), rel=0.15)


@pytest.mark.parametrize(
    ("backend", "change"),
    [
        ("explicit", {"n_kv_heads": 3, "dtype": "bfloat16"}),
        ("math", {"n_kv_heads": 2}),
        ("torch-mha", {}),
        ("torch-mha-weights", {"causal": True}),
        ("torch-mha-weights", {"n_heads": 5, "n_kv_heads": 5}),
        ("torch-mha-weights", {}),
    ],
)
def test_shared_heads_sixteen_bits_and_layers_need_what_is_foreseen(
    fresh: FreshProcesses, backend: str, change: dict[str, Any]
) -> None:
    work = replace(LARGE, **change)
    found = fresh.memory_use(backend, work, 3).extra_bytes
    assert found == pytest.approx(expected_extra_bytes(backend, work, "cpu"), rel=0.15)


@pytest.mark.parametrize(
    ("backend", "change"),
    [
        ("sdpa", {}),
        ("flash", {"causal": True}),
        ("sdpa", {"direction": "both"}),
        ("torch-mha", {"n_heads": 5, "n_kv_heads": 5}),
    ],
)
def test_a_fused_backend_needs_far_less_than_one_matrix(
    fresh: FreshProcesses, backend: str, change: dict[str, Any]
) -> None:
    work = replace(LARGE, **change)
    foreseen, found = expected_extra_bytes(backend, work, "cpu"), fresh.memory_use(backend, work, 3).extra_bytes
    matrix = work.n_heads * work.q_len * work.k_len * 4
    assert found is not None
    assert 0.8 * foreseen <= found <= foreseen + KERNEL_BUFFERS < matrix / 2


def test_a_small_size_after_a_large_one_needs_little_for_each_has_its_own_process(fresh: FreshProcesses) -> None:
    fresh.memory_use("explicit", LARGE, 3)
    found = fresh.memory_use("explicit", SMALL, 3)
    assert found.extra_bytes is not None
    assert found.extra_bytes < 1 << 20


@pytest.mark.parametrize(
    ("backend", "change", "reason"),
    [
        ("efficient", {}, "torch has no efficient kernel for this device and these inputs"),
        ("torch-mha", {"n_kv_heads": 3}, "nn.MultiheadAttention has no shared kv heads"),
        ("flex", {}, "FlexAttention is measured on CUDA, where it compiles to one kernel, not on cpu"),
    ],
)
def test_what_a_backend_cannot_do_comes_back_as_the_reason(
    fresh: FreshProcesses, backend: str, change: dict[str, Any], reason: str
) -> None:
    assert fresh.memory_use(backend, replace(SMALL, **change), 3) == MemoryUse("unsupported", None, reason)


def test_more_than_there_is_comes_back_as_out_of_memory(fresh: FreshProcesses) -> None:
    found = fresh.memory_use("explicit", replace(LARGE, batch=10**9, d_head=10**4), 3)
    assert (found.status, found.extra_bytes) == ("out-of-memory", None)
    assert "can't allocate memory" in str(found.reason)
    assert fresh.memory_use("explicit", SMALL, 3).status == "ok"


TROUBLED = """
real = footprint.prepare
def prepare(name, *more):
    if name == "math":
        os.kill(os.getpid(), 9)
    if name == "flash":
        os._exit(7)
    if name == "sdpa":
        os.kill(os.getpid(), 15)
    os.write(1, b"[1, 2]\\n")
    print("noise", flush=True)
    return real(name, *more)
footprint.prepare = prepare
"""


@pytest.mark.full
def test_of_each_copy_its_end_is_reported_and_the_next_one_runs_whatever_a_library_prints(begin_with: Begin) -> None:
    begin_with(TROUBLED)
    with fresh_processes() as processes:
        backends = ("math", "explicit", "flash", "sdpa", "explicit")
        killed, first, left, ended, second = (processes.memory_use(backend, SMALL, 3) for backend in backends)
    assert killed == MemoryUse("out-of-memory", None, "its own process ended with 9")
    assert left == MemoryUse("failed", None, f"its own process ended with {7 << 8}")
    assert ended == MemoryUse("failed", None, "its own process ended with 15")
    assert (first.status, second.status) == ("ok", "ok")


@pytest.mark.full
def test_when_the_process_that_is_copied_has_ended_backends_run_all_the_same_unmeasured(begin_with: Begin) -> None:
    begin_with("os._exit(3)")
    with fresh_processes() as processes:
        for _ in range(3):
            assert processes.memory_use("explicit", SMALL, 3) == MemoryUse(
                "ok", None, "the process to measure memory in has ended"
            )


def test_a_question_that_was_never_read_does_not_spoil_the_end() -> None:
    with fresh_processes() as processes:
        processes._parent.kill()
        processes._parent.wait()
        assert processes.memory_use("explicit", SMALL, 3).extra_bytes is None
    assert not is_at_work(processes._parent.pid)


@pytest.mark.full
def test_when_it_ends_in_the_middle_of_an_answer_nothing_waits_for_it(begin_with: Begin) -> None:
    begin_with("footprint.prepare = lambda *more: (os.kill(os.getppid(), 9), time.sleep(600))")
    with fresh_processes() as processes:
        found = processes.memory_use("explicit", SMALL, 3)
    assert found == MemoryUse("ok", None, "the process to measure memory in has ended")


@pytest.mark.full
def test_no_process_outlives_the_context_not_even_one_at_work(begin_with: Begin, tmp_path: Path) -> None:
    mark = tmp_path / "pids"
    begin_with(
        f"def prepare(*more):\n"
        f"    open({str(mark)!r} + '.new', 'w').write(f'{{os.getppid()}} {{os.getpid()}}')\n"
        f"    os.rename({str(mark)!r} + '.new', {str(mark)!r})\n"
        f"    time.sleep(600)\n"
        f"    os.rename({str(mark)!r}, {str(mark)!r} + '.late')\n"
        f"footprint.prepare = prepare"
    )
    answers: list[MemoryUse] = []
    with fresh_processes() as processes:
        asking = threading.Thread(
            daemon=True, target=lambda: answers.append(processes.memory_use("explicit", SMALL, 3))
        )
        asking.start()
        while not mark.exists():
            time.sleep(0.01)
        parent, copy = map(int, mark.read_text().split())
        assert is_at_work(parent)
        assert is_at_work(copy)
    asking.join(timeout=120)
    assert [answer.extra_bytes for answer in answers] == [None]
    ends_by = time.monotonic() + 120  # the system tells it of its parent's end, and it takes a moment to go
    while is_at_work(copy) and time.monotonic() < ends_by:
        time.sleep(0.01)
    assert mark.exists()  # the copy would have taken it away
    assert not is_at_work(copy)
    assert not is_at_work(parent)


def test_the_process_ends_with_the_context_after_a_fault_too() -> None:
    def ask() -> None:
        with fresh_processes() as processes:
            pids.append(processes._parent.pid)
            raise ZeroDivisionError

    pids: list[int] = []
    with pytest.raises(ZeroDivisionError):
        ask()
    assert not is_at_work(pids[0])


def test_a_mask_that_must_be_a_tensor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(backend: str, work: Workload, heads: Any, seed: int) -> Prepared:
        return Prepared(heads, lambda: attend(*heads), mask_bytes=10**12 if backend == "with a mask" else 0)

    monkeypatch.setattr(footprint, "prepare", prepared)
    monkeypatch.setattr(footprint, "_reset_mark", lambda: 1000)
    monkeypatch.setattr(footprint, "_status_bytes", lambda name: 1700)
    threads = torch.get_num_threads()
    assert footprint._measured("without", SMALL, 3, threads) == MemoryUse("ok", 700)
    assert footprint._measured("with a mask", SMALL, 3, threads) == MemoryUse("ok", 10**12 + 700)
    monkeypatch.setattr(footprint, "_reset_mark", lambda: None)
    assert footprint._measured("without", SMALL, 3, threads) == MemoryUse("ok", None)


def test_the_mark_is_set_back_to_what_is_resident_now() -> None:
    before = footprint._reset_mark()
    block = bytearray(b"x" * (64 << 20))
    high = footprint._status_bytes("VmHWM")
    del block
    after = footprint._reset_mark()
    assert before is not None
    assert high is not None
    assert after is not None
    assert high - before >= 60 << 20
    assert after <= high - (60 << 20)
    assert footprint._status_bytes("VmNothing") is None
