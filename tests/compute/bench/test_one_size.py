"""Backends at one size, timed in turns on a scripted clock; and a whole run of small sizes."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.benchmarks_made import CEILING, made_row
from torch import Tensor

from mhacli.attention import attend, masks
from mhacli.attention.backends import HeadTensors, Prepared, prepare
from mhacli.attention.fused import only
from mhacli.compute.bench import run as contest
from mhacli.compute.bench import run as study
from mhacli.compute.bench import timing as ceilings
from mhacli.compute.bench.run import BenchOptions, MemoryUse, SizeBenchmark, bench
from mhacli.compute.bench.timing import InterleavedSamples, Timed, WallClock, measure_peak
from mhacli.errors import MhaError
from mhacli.results.bench.result import BenchRow, MachinePeak, read_benchmark
from mhacli.results.bench.workload import Direction, Sweep, Workload, expected_flops


@pytest.fixture(autouse=True)
def _nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are those of the numbers given, however busy the machine is that the tests run on."""
    monkeypatch.setattr(contest, "is_crowded", lambda *args: False)


CPU = torch.device("cpu")
SIZE = Workload(2, 6, 6, 8, 13, 13, "float32", False, "forward")
ON_CPU = ("explicit", "sdpa", "math", "flash", "torch-mha", "torch-mha-weights")
Seconds = Callable[[str, int, int], float]
Maker = Callable[[Workload, HeadTensors], Prepared]


class Stage:
    """Takes the place of `prepare` and of the clock: backends that say when they are called, and take the time given.

    `seconds(backend, n_round, n_call)` is told the round, of which two come before the samples, and whether it is the backend's
    first call in it (0) or its second. `makers` make other backends than the real ones.
    """

    repeats_short_calls = False

    def __init__(self, seconds: Seconds = lambda backend, n_round, n_call: 1.0, **makers: Maker) -> None:
        self.seconds, self.makers = seconds, makers
        self.calls: list[str] = []
        self.rounds: list[list[str]] = []

    def prepare(self, backend: str, work: Workload, heads: HeadTensors, seed: int) -> Prepared:
        if backend in self.makers:
            made = self.makers[backend](work, heads)
        else:
            made = prepare(backend if backend in ON_CPU else "explicit", work, heads, seed)

        def forward() -> Tensor:
            self.calls.append(backend)
            return made.forward()

        return replace(made, forward=forward)

    def round(self, turns: Sequence[tuple[Timed, int]]) -> list[float]:
        names: list[str] = []
        for timed, _ in turns:
            with timed.around():
                if timed.before is not None:
                    timed.before()
                timed.run()
            names.append(self.calls[-1])
        self.rounds.append(names)
        seen: Counter[str] = Counter()
        seconds = []
        for name in names:
            seconds.append(self.seconds(name, len(self.rounds) - 1, seen[name]))
            seen[name] += 1
        return seconds


def held(
    stage: Stage, backends: Sequence[str], monkeypatch: pytest.MonkeyPatch, work: Workload = SIZE, repeat: int = 7
) -> tuple[dict[str, BenchRow], Any]:
    """The rows by backend, and the control."""
    monkeypatch.setattr(contest, "prepare", stage.prepare)
    found = SizeBenchmark(work, CPU, stage, seed=3, most_flops=math.inf, fresh=None)
    for backend in backends:
        found.enter(backend)
    control = found.run(repeat=repeat, budget_s=1.0)
    assert [row.backend for row in found.rows] == list(backends)
    return {row.backend: row for row in found.rows}, control


def constant(times_s: Mapping[str, float]) -> Seconds:
    return lambda backend, n_round, n_call: times_s[backend]


# ------------------------------------------------------------------------------------------------------ what is found


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_every_backend_has_a_row_in_the_order_of_entering(direction: Direction) -> None:
    found = SizeBenchmark(replace(SIZE, direction=direction), CPU, WallClock(), seed=3, most_flops=math.inf, fresh=None)
    entering = ("flash", "efficient", "explicit", "torch-mha", "flex", "torch-mha-weights", "math", "sdpa")
    for backend in entering:
        found.enter(backend)
    assert [row.backend for row in found.rows] == list(entering)
    control = found.run(repeat=3, budget_s=1.0)
    rows = {row.backend: row for row in found.rows}
    assert list(rows) == list(entering)
    for backend in ON_CPU:
        row = rows[backend]
        assert (row.status, row.reason, len(row.samples_s), row.n_error_queries) == ("ok", None, 3, 13)
        assert row.first_s is not None
        assert row.first_s > 0
        assert row.max_error is not None
        assert 0 <= row.max_error < 1e-5
        assert row.min_s == min(row.samples_s)
        assert row.median_s == sorted(row.samples_s)[1]
        assert row.n_calls >= 1
    assert (rows["efficient"].status, rows["efficient"].reason) == (
        "unsupported", "torch has no efficient kernel for this device and these inputs",
    )  # fmt: skip
    assert (rows["flex"].status, rows["flex"].samples_s, rows["flex"].median_s) == ("unsupported", (), None)
    assert control is not None
    assert rows[control.backend].status == "ok"
    assert asdict(control).items() >= asdict(replace(SIZE, direction=direction)).items()


@pytest.mark.parametrize(
    ("backend", "change", "ran", "is_fallback"),
    [
        ("explicit", {}, "explicit", False),
        ("sdpa", {}, "flash", False),
        ("flash", {"causal": True}, "flash", False),
        ("math", {}, "math", False),
        ("torch-mha", {}, "unfused", True),
        ("torch-mha", {"causal": True}, "flash", False),
        ("torch-mha-weights", {}, "unfused", False),
        ("explicit", {"direction": "both"}, "explicit", False),
        ("sdpa", {"direction": "backward"}, "flash", False),
    ],
)
def test_a_row_says_which_kernel_ran_and_whether_a_fused_one_was_hoped_for(
    backend: str, change: dict[str, Any], ran: str, is_fallback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = held(Stage(), [backend], monkeypatch, replace(SIZE, **change))
    assert (rows[backend].ran, rows[backend].is_fallback) == (ran, is_fallback)


def test_what_ran_the_unfused_kernel_where_torch_could_choose_is_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def unfused(work: Workload, heads: HeadTensors) -> Prepared:
        return replace(prepare("sdpa", work, heads, 3), around=partial(only, "math"))

    def eager(work: Workload, heads: HeadTensors) -> Prepared:
        return prepare("explicit", work, heads, 3)

    def nothing(work: Workload, heads: HeadTensors) -> Prepared:
        return Prepared(heads, lambda: heads[2] + 0)

    rows, _ = held(Stage(sdpa=unfused, compiled=eager, flash=nothing), ["sdpa", "compiled", "flash"], monkeypatch)
    assert (rows["sdpa"].ran, rows["sdpa"].is_fallback) == ("math", True)
    assert (rows["compiled"].ran, rows["compiled"].is_fallback) == ("unfused", True)
    assert (rows["flash"].ran, rows["flash"].is_fallback) == ("unknown", False)


def test_a_wrong_backend_is_seen_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(work: Workload, heads: HeadTensors) -> Prepared:
        return Prepared(heads, lambda: attend(*heads))  # causality dropped

    rows, _ = held(Stage(sdpa=wrong), ["explicit", "sdpa"], monkeypatch, replace(SIZE, causal=True))
    assert (rows["explicit"].max_error or 0) < 1e-5
    assert (rows["sdpa"].max_error or 0) > 0.1
    assert (rows["sdpa"].mean_error or 0) > 0.01


def test_results_that_are_not_finite_are_reported_and_timed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(work: Workload, heads: HeadTensors) -> Prepared:
        return Prepared(heads, lambda: attend(*heads) * math.nan)

    rows, _ = held(Stage(sdpa=broken), ["sdpa"], monkeypatch)
    row = rows["sdpa"]
    assert (row.status, row.reason, row.max_error, row.mean_error) == ("ok", "results are not finite", None, None)
    assert (row.n_error_queries, row.median_s) == (13, 1.0)


def test_without_room_for_the_exact_answer_a_backend_is_timed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **how: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(contest, "exact_answer", full)
    rows, _ = held(Stage(), ["explicit"], monkeypatch)
    row = rows["explicit"]
    assert (row.status, row.reason, row.max_error) == ("ok", "not enough memory to measure the error", None)
    assert row.median_s == 1.0


def test_what_fits_by_no_reckoning_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads, two tokens, width 1: q, k and v have 48 bytes, and explicit needs two matrices of 32 besides."""
    work = Workload(1, 2, 2, 1, 2, 2, "float32", False, "forward")
    stage = Stage()
    monkeypatch.setattr(contest, "free_bytes", lambda name: 139)
    rows, control = held(stage, ["explicit"], monkeypatch, work)
    row = rows["explicit"]
    assert (row.status, row.predicted_bytes) == ("too-large", 64)
    assert row.reason == "needs 112 B, and 139 B is available"
    assert (stage.calls, control) == ([], None)
    monkeypatch.setattr(contest, "free_bytes", lambda name: 140)
    assert held(stage, ["explicit"], monkeypatch, work)[0]["explicit"].status == "ok"


def test_what_would_take_too_long_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "prepare", Stage().prepare)
    for most, status in ((SIZE.attention_flops, "ok"), (SIZE.attention_flops / 2.5, "too-slow")):
        found = SizeBenchmark(SIZE, CPU, Stage(), seed=3, most_flops=most, fresh=None)
        found.enter("explicit")
        assert found.rows[0].status == status
    assert found.rows[0].reason == "a call would take 2.5 × --call-limit or more, at the best rate of this run"
    assert found.run(repeat=1, budget_s=1.0) is None


class Fresh:
    """Takes the place of fresh processes."""

    def __init__(self, **found: MemoryUse) -> None:
        self.found = found

    def memory_use(self, backend: str, workload: Workload, seed: int) -> MemoryUse:
        return self.found[backend]


def test_a_footprint_stands_in_the_row_and_a_bad_one_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stage: Any = Stage()
    monkeypatch.setattr(contest, "prepare", stage.prepare)
    fresh: Any = Fresh(
        explicit=MemoryUse("ok", 12345), sdpa=MemoryUse("out-of-memory", None, "it was killed"), math=MemoryUse("ok", None)
    )  # fmt: skip
    found = SizeBenchmark(SIZE, CPU, stage, seed=3, most_flops=math.inf, fresh=fresh)
    for backend in ("explicit", "sdpa", "math"):
        found.enter(backend)
    found.run(repeat=1, budget_s=1.0)
    assert [(row.status, row.extra_bytes, row.reason) for row in found.rows] == [
        ("ok", 12345, None), ("out-of-memory", None, "it was killed"), ("ok", None, None),
    ]  # fmt: skip
    assert "sdpa" not in stage.calls


# ------------------------------------------------------------------------------------------------------------- faults


def breaking(fault: Exception, at_call: int, *, is_in_backward: bool = False) -> Maker:
    """A backend that raises at its n-th call (from 1), or in the backward pass of that."""
    calls = [0]

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            return z.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if calls[0] >= at_call:
                raise fault
            return gradient

    def make(work: Workload, heads: HeadTensors) -> Prepared:
        def forward() -> Tensor:
            calls[0] += 1
            if calls[0] >= at_call and not is_in_backward:
                raise fault
            z = attend(*heads, allowed=masks.causal() if work.is_masked else None)
            return Breaks.apply(z) if is_in_backward else z

        return Prepared(heads, forward)

    return make


def test_a_backend_that_breaks_at_its_first_call_is_out_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(flash=breaking(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n2 GiB"), 1))
    rows, control = held(stage, ["explicit", "flash", "math"], monkeypatch)
    row = rows["flash"]
    assert (row.status, row.reason, row.samples_s) == (
        "out-of-memory",
        "CUDA out of memory. Tried to allocate 2 GiB",
        (),
    )
    assert (row.median_s, row.first_s, row.is_fastest) == (None, None, False)
    assert {name: len(row.samples_s) for name, row in rows.items()} == {"explicit": 7, "flash": 0, "math": 7}
    assert control.backend in ("explicit", "math")


@pytest.mark.parametrize(
    ("direction", "is_in_backward", "n_calls_before_rounds"),
    [("forward", False, 3), ("backward", False, 3), ("backward", True, 3), ("both", False, 3), ("both", True, 3)],
)
def test_a_backend_that_breaks_in_the_third_round_is_out_and_the_others_are_measured_again(
    direction: Direction, is_in_backward: bool, n_calls_before_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = RuntimeError("it fell over")
    times = {"explicit": 2.0, "flash": 5.0, "math": 3.0}
    # one to warm up, the estimate and two rounds pass, then comes the third
    maker = breaking(fault, n_calls_before_rounds + 2 + 3, is_in_backward=is_in_backward)
    stage = Stage(lambda name, n_round, n_call: times[name] * (1 + n_round), flash=maker)
    work = replace(SIZE, direction=direction)
    rows, control = held(stage, ["explicit", "flash", "math"], monkeypatch, work)
    assert (rows["flash"].status, rows["flash"].reason) == ("failed", "it fell over")
    assert (rows["flash"].samples_s, rows["flash"].median_s) == ((), None)
    assert rows["flash"].first_s is not None  # it did run once
    first = [names for names in stage.rounds if "flash" in names]
    assert [len(names) for names in first] == [3, 3, 4, 4]
    again = stage.rounds[len(first) :]
    assert [len(names) for names in again] == 2 * [2] + 7 * [3]
    n_before = len(first) + 2  # the first two are no samples
    assert rows["explicit"].samples_s == tuple(2.0 * (1 + n) for n in range(n_before, n_before + 7))
    assert control.backend == "explicit"


def test_when_all_break_there_is_no_control(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(sdpa=breaking(RuntimeError("one"), 5), flash=breaking(MemoryError("other"), 6))
    rows, control = held(stage, ["sdpa", "flash"], monkeypatch)
    assert control is None
    assert [(row.status, row.reason) for row in rows.values()] == [("failed", "one"), ("out-of-memory", "other")]


def test_an_interrupt_is_no_fault_and_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    fault: Any = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        held(Stage(sdpa=breaking(fault, 6)), ["explicit", "sdpa"], monkeypatch)


# ------------------------------------------------------------------------------------------------------------ ranking


def test_by_hand_times_ratios_and_the_control(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(name: str, n_round: int, n_call: int) -> float:
        drift = 1 if n_round < 6 else 4  # both grow four times as slow in the middle
        return drift * {"explicit": 3.0, "flash": 2.0}[name]

    rows, control = held(Stage(seconds), ["explicit", "flash"], monkeypatch)
    explicit, flash = rows["explicit"], rows["flash"]
    assert explicit.samples_s == (3.0,) * 4 + (12.0,) * 3
    assert (explicit.median_s, explicit.median_low_s, explicit.median_high_s) == (3.0, 3.0, 12.0)
    assert (explicit.p25_s, explicit.p75_s, explicit.min_s) == (3.0, 12.0, 3.0)
    assert (explicit.ratio, explicit.ratio_low, explicit.ratio_high) == (1.5, 1.5, 1.5)
    assert (flash.ratio, flash.ratio_low, flash.ratio_high) == (1.0, 1.0, 1.0)
    assert (control.backend, control.ratio, control.samples_s) == ("flash", 1.0, flash.samples_s)
    assert (flash.is_fastest, explicit.is_fastest) == (True, False)
    assert (flash.is_similar, explicit.is_similar) == (False, False)


def test_where_others_are_on_the_same_cpus_nothing_is_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "is_crowded", lambda *args: True)
    rows, _ = held(Stage(constant({"explicit": 3.0, "flash": 1.0})), ["explicit", "flash"], monkeypatch)
    assert [(row.is_sure, row.is_fastest) for row in rows.values()] == [(False, False)] * 2
    assert rows["explicit"].ratio == 3.0


@pytest.mark.parametrize(("repeat", "is_sure"), [(5, False), (6, True)])
def test_fewer_than_six_rounds_rank_nothing(repeat: int, is_sure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    times = constant({"explicit": 3.0, "flash": 1.0})
    rows, _ = held(Stage(times), ["explicit", "flash"], monkeypatch, repeat=repeat)
    assert (rows["flash"].is_sure, rows["flash"].is_fastest) == (is_sure, is_sure)


def noisy_control(of: str, amount: float, times_s: Mapping[str, float]) -> Seconds:
    """The second time in a round, the reference takes up to so much more or less, by turns."""

    def seconds(name: str, n_round: int, n_call: int) -> float:
        if name == of and n_call:
            return times_s[name] * (1 + amount * (-1) ** n_round)
        return times_s[name]

    return seconds


@pytest.mark.parametrize(("amount", "is_similar"), [(0.01, False), (0.04, False), (0.06, True), (0.3, True)])
def test_a_backend_is_similar_where_its_ratio_lies_within_the_noise_of_the_control(
    amount: float, is_similar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"flash": 2.0, "explicit": 2.1}
    # which of the two turns is the control is drawn anew for each round, so its ratio and the inverse both occur
    rows, control = held(Stage(noisy_control("flash", amount, times)), list(times), monkeypatch, repeat=40)
    assert control.backend == "flash"
    assert control.ratio_high > 1 + amount / 2
    assert rows["explicit"].is_similar is is_similar
    assert rows["flash"].is_similar is False
    assert rows["flash"].ratio == 1.0
    assert rows["flash"].is_fastest is not is_similar


@pytest.mark.parametrize("again", [1.4, 1 / 1.4])
def test_whichever_of_the_two_timings_was_slower_the_noise_is_the_same(
    again: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = InterleavedSamples(
        {"flash": (1.0,) * 8, "math": (1.3,) * 8, "explicit": (1.5,) * 8},
        "flash",
        (again,) * 8,
        {"flash": 1, "math": 1, "explicit": 1},
    )
    monkeypatch.setattr(contest, "time_in_turns", lambda *args, **how: rounds)
    rows, control = held(Stage(), list(rounds.samples), monkeypatch)
    assert control.noise == pytest.approx(1.4)
    assert {name: row.is_similar for name, row in rows.items()} == {"flash": False, "math": True, "explicit": False}


def test_noise_of_the_control_hides_a_rival_of_the_fastest_and_not_of_the_control_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control's backend was quickest in the warm-up alone: 0.5 and 1.4 of it are 2.8 apart, and its noise is 1.6."""

    def seconds(name: str, n_round: int, n_call: int) -> float:
        if name == "flash":
            return 0.1 if n_round < 2 else 1.6 if n_call else 1.0
        return {"sdpa": 0.5, "explicit": 1.4}[name]

    rows, control = held(Stage(seconds), ["flash", "sdpa", "explicit"], monkeypatch, repeat=20)
    assert control.backend == "flash"
    assert {name: row.is_similar for name, row in rows.items()}["explicit"] is False
    assert rows["sdpa"].is_fastest


def test_where_two_kernels_are_as_fast_none_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"explicit": 1.0, "flash": 1.0, "math": 3.0}
    rows, _ = held(Stage(constant(times)), list(times), monkeypatch)
    assert not any(row.is_fastest for row in rows.values())


def test_where_one_kernel_is_as_fast_under_two_names_both_are_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"sdpa": 1.0, "flash": 1.0, "math": 3.0}
    rows, _ = held(Stage(constant(times)), list(times), monkeypatch)
    assert {name: row.is_fastest for name, row in rows.items()} == {"sdpa": True, "flash": True, "math": False}
    assert rows["flash"].is_similar is True


@pytest.mark.parametrize("names", [["flash"], ["flash", "sdpa"]])
def test_what_nothing_else_was_slower_than_is_not_the_fastest(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = held(Stage(), names, monkeypatch)
    assert not any(row.is_fastest for row in rows.values())


def test_a_withdrawn_backend_is_no_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = held(Stage(), ["flash", "efficient"], monkeypatch)
    assert not any(row.is_fastest for row in rows.values())


# ------------------------------------------------------------------------------------------------------- a whole run


@pytest.fixture
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that were made up: the second measurement has the better copy."""
    rates = iter([MachinePeak("float32", 0.5, 10.0), MachinePeak("float32", 0.25, 20.0)])
    monkeypatch.setattr(study, "measure_peak", lambda *_: next(rates))


@pytest.mark.full
@pytest.mark.usefixtures("quick_ceilings")
def test_a_whole_run_of_small_sizes_comes_back_from_its_file(tmp_path: Path) -> None:
    sweep = Sweep(
        ("flash", "explicit", "efficient", "torch-mha"), (2,), (6,), (6, 3), (8,), (5, 13), causal=True,
        directions=("forward",),
    )  # fmt: skip
    told: list[tuple[float, str]] = []
    announced: list[tuple[float, int]] = []
    options = BenchOptions(repeat=2, seed=7, command=("mha", "bench", "--x"))
    before = dict(os.environ)
    found = bench(
        sweep, "cpu", options, lambda share, doing: told.append((share, doing)), lambda *of: announced.append(of)
    )
    assert dict(os.environ) == before
    assert [n_sizes for _, n_sizes in announced] == [4]
    assert [(row.backend, row.n_kv_heads, row.q_len) for row in found.rows] == [
        (backend, kv_heads, length) for kv_heads in (6, 3) for length in (5, 13) for backend in sweep.backends
    ]
    assert {row.status for row in found.rows if row.backend in ("flash", "explicit")} == {"ok"}
    assert [row.status for row in found.rows if row.backend == "torch-mha"] == [
        "ok",
        "ok",
        "unsupported",
        "unsupported",
    ]
    assert len(found.controls) == 4
    assert all(found.control(row) is not None for row in found.rows)
    assert found.ceilings == (MachinePeak("float32", 0.5, 20.0),)
    for row in found.rows:
        if row.status == "ok":
            assert row.median_s is not None
            floor_s, limit = found.ceilings[0].floor_s(row.flops, row.moved_bytes)
            assert (row.limit, row.share_of_peak) == (limit, floor_s / row.median_s)
    assert (found.seed, found.command) == (7, ("mha", "bench", "--x"))
    assert found.sweep == sweep.on("cpu")
    assert (found.environment.device, found.environment.device_asked, found.environment.driver) == ("cpu", "cpu", None)
    assert found.environment.n_cpus >= 1
    path = tmp_path / "run.json"
    path.write_text(found.to_json())
    assert read_benchmark(str(path)) == found
    json.loads(found.to_json())
    weights = [share for share, _ in told]
    assert weights[0] == 0.0
    assert weights == sorted(weights)
    assert 0.85 < weights[-1] <= 1.0
    assert len(told) >= 4 * (4 + 1)


def test_a_product_that_a_busy_moment_slowed_is_measured_again_before_a_backend_is_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = iter([1e-12, 0.5, 0.5])
    monkeypatch.setattr(study, "measure_peak", lambda *_: MachinePeak("float32", next(rates), 10.0))
    monkeypatch.setattr(study, "_fresh_processes_on", lambda device: study.nullcontext())
    (row,) = bench(Sweep(backends=("explicit",), lengths=(5,)), "cpu", BenchOptions(repeat=1)).rows
    assert row.status == "ok"


def test_by_hand_how_long_a_size_will_take() -> None:
    work = replace(SIZE, q_len=16, k_len=16)
    second = MachinePeak("float32", expected_flops("explicit", work) / 1e12, 1.0)  # a second, and 2.5 of a backend
    two = ("explicit", "sdpa")
    assert study.expected_s(work, two, second, BenchOptions()) == pytest.approx(2 * (0.3 + 6 * 2.5) + 6 * 3 * 2.5)
    assert study.expected_s(work, two, second, BenchOptions(repeat=2)) == pytest.approx(
        2 * (0.3 + 6 * 2.5) + 2 * 3 * 2.5
    )
    assert study.expected_s(work, two, second, BenchOptions(call_limit_s=0.5)) == 0.0
    quick = replace(second, matmul_tflops=second.matmul_tflops * 1e6)
    assert study.expected_s(work, two, quick, BenchOptions(budget_s=4.0)) == pytest.approx(2 * 0.3 + 4.0, abs=1e-3)


def test_the_rate_that_a_backend_reached_counts_where_the_product_was_slower() -> None:
    row = made_row("flash", [0.5])
    assert study._best_rate([row], replace(CEILING, matmul_tflops=1e-12)) == row.flops / 0.5
    assert study._best_rate([row], CEILING) == CEILING.matmul_tflops * 1e12
    assert study._best_rate([row], replace(CEILING, dtype="bfloat16", matmul_tflops=1e-12)) == 1.0


@pytest.mark.usefixtures("quick_ceilings")
@pytest.mark.parametrize("was", [None, "/somewhere"])
def test_the_surroundings_are_as_before_after_a_fault_too(was: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TORCHINDUCTOR_CACHE_DIR", "KINETO_LOG_LEVEL")
    for name in names:
        if was is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, was)
    seen: list[str] = []

    def broken(*arguments: Any, **how: Any) -> Any:
        seen.extend(os.environ[name] for name in names)
        raise ZeroDivisionError

    monkeypatch.setattr(study, "SizeBenchmark", broken)
    monkeypatch.setattr(study, "_fresh_processes_on", lambda device: study.nullcontext())
    with pytest.raises(ZeroDivisionError):
        bench(Sweep(backends=("explicit",), lengths=(5,)), "cpu", BenchOptions())
    assert [os.environ.get(name) for name in names] == [was] * 2
    assert seen[1:] == ["99"]
    assert seen[0] != was
    assert not Path(seen[0]).exists()


def test_a_device_that_is_not_there_is_reported_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(MhaError) as caught:
        bench(Sweep(), "cuda", BenchOptions())
    assert caught.value.code == "no-device"


class Faster:
    """A clock on which a call in the n-th round takes 1/n s: the best is the last. `slow` calls take a thousand times that."""

    repeats_short_calls = True

    def __init__(self, slow: torch.dtype | None = None) -> None:
        self.slow, self.n_rounds = slow, 0

    def round(self, turns: Sequence[tuple[Timed, int]]) -> list[float]:
        ((timed, n_calls),) = turns
        assert n_calls == 1
        result: Any = timed.run()
        self.n_rounds += 1
        return [(1000 if result.dtype == self.slow else 1) / self.n_rounds]


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_COPY_BYTES", 1000)
    monkeypatch.setattr(ceilings, "_SAMPLES", 5)


@pytest.mark.usefixtures("few_samples")
def test_by_hand_the_rates_of_a_matrix_product_and_a_copy() -> None:
    found = measure_peak("float32", CPU, Faster(), 3)
    n_matmul = 3 + 6  # two after one that warms up, and five after another
    assert found.dtype == "float32"
    assert found.matmul_tflops == pytest.approx(2 * 256**3 * n_matmul / 1e12)
    assert found.copy_gb_per_s == pytest.approx(2 * 1000 * (n_matmul + 6) / 1e9)


@pytest.mark.usefixtures("few_samples")
def test_where_a_product_of_sixteen_bits_is_slow_the_rate_is_that_of_wider_numbers() -> None:
    found = measure_peak("bfloat16", CPU, Faster(slow=torch.bfloat16), 3)
    assert found.dtype == "bfloat16"
    assert found.matmul_tflops == pytest.approx(2 * 256**3 * (9 + 9) / 1e12)
    assert found.copy_gb_per_s == pytest.approx(2 * 1000 * (9 + 9 + 6) / 1000 / 1e9)
