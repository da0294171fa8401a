"""Rounds and clocks, with fake time and devices: the order of calls, their number, and the end of the rounds."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from mhacli.compute.bench import timing as rounds
from mhacli.compute.bench.timing import EventClock, InterleavedSamples, Timed, WallClock, clock_for, time_in_turns


class Wall:
    """A wall clock that goes on only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float) -> Callable[[], None]:
        """Something to call, which takes so long."""

        def run() -> None:
            self.now += seconds

        return run


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    clock = Wall()
    monkeypatch.setattr(rounds, "perf_counter", clock)
    return clock


class Script:
    """A clock that answers what was written down, and notes every round. `seconds(name, n_round)`."""

    repeats_short_calls = True

    def __init__(self, wall: Wall, seconds: Callable[[str, int], float]) -> None:
        self.wall, self.seconds = wall, seconds
        self.rounds: list[list[tuple[str, int]]] = []

    def round(self, turns: Sequence[tuple[Timed, int]]) -> list[float]:
        """Entries are told apart by what their `run` returns."""
        names = [(str(timed.run()), n_calls) for timed, n_calls in turns]
        taken = [self.seconds(name, len(self.rounds)) for name, _ in names]
        self.rounds.append(names)
        self.wall.now += sum(taken)
        return taken

    @property
    def orders(self) -> list[list[str]]:
        """Who ran in each round after the one that warms up and the estimate."""
        return [[name for name, _ in names] for names in self.rounds[2:]]


def named(*names: str) -> dict[str, Timed]:
    return {name: Timed(lambda name=name: name) for name in names}


def timed(
    script: Script, *names: str, repeat: int | None = None, budget_s: float = 1e9, seed: int = 0
) -> InterleavedSamples:
    return time_in_turns(named(*names), script, repeat=repeat, budget_s=budget_s, seed=seed)


SECONDS = {"a": 3.0, "b": 2.0, "c": 5.0}


def steady(name: str, n_round: int) -> float:
    return SECONDS[name]


def noisy(name: str, n_round: int) -> float:
    return SECONDS[name] * (1.0 + 0.5 * (n_round % 2))


# ------------------------------------------------------------------------------------------------------------- clocks


def test_the_wall_clock_shows_seconds_per_call(wall: Wall) -> None:
    turns = [(Timed(wall.takes(0.5)), 3), (Timed(wall.takes(0.25)), 1)]
    assert WallClock().round(turns) == [0.5, 0.25]


def test_what_comes_before_a_call_is_off_the_wall_clock_and_waited_for(wall: Wall) -> None:
    said: list[str] = []
    pending: list[float] = []

    def told(word: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            said.append(word)
            pending.append(seconds)

        return run

    def wait() -> None:
        said.append("wait")
        wall.now += sum(pending)
        pending.clear()

    @contextmanager
    def around() -> Iterator[None]:
        said.append("enter")
        yield
        said.append("leave")

    turn = Timed(told("run", 0.5), around, told("before", 8.0))
    assert WallClock(wait).round([(turn, 2)]) == [0.5]
    assert said == ["enter", "before", "wait", "run", "run", "wait", "leave"]


class Event:
    """An event that notes when it was recorded, in milliseconds of a device that works off its queue."""

    def __init__(self, said: list[str], device: Wall) -> None:
        self._said, self._device, self.at = said, device, 0.0

    def record(self) -> None:
        self._said.append("record")
        self.at = self._device.now

    def elapsed_time(self, other: Event) -> float:
        assert self._said[-1] == "synchronize"
        return 1e3 * (other.at - self.at)


def test_the_event_clock_clears_the_cache_before_each_call_and_waits_once_at_the_end(wall: Wall) -> None:
    said: list[str] = []
    device = Wall()

    def told(word: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            said.append(word)
            device.now += seconds

        return run

    clock = EventClock(lambda: Event(said, device), told("synchronize", 0.0), told("flush", 7.0))
    turns = [(Timed(told("a", 0.25), before=told("before a", 3.0)), 1), (Timed(told("b", 0.5)), 1)]
    assert clock.round(turns) == [0.25, 0.5]
    expected = "before a,flush,record,a,record,flush,record,b,record,synchronize"
    assert said == expected.split(",")
    assert wall.now == 100.0


def test_the_event_clock_calls_each_within_what_stands_around_it() -> None:
    inside: list[bool] = []
    entered = [False]

    @contextmanager
    def around() -> Iterator[None]:
        entered[0] = True
        yield
        entered[0] = False

    clock = EventClock(lambda: Event(["synchronize"], Wall()), lambda: None, lambda: None)
    clock_said = Timed(lambda: inside.append(entered[0]), around)
    with pytest.raises(AssertionError):  # the fake event wants to be waited for
        clock.round([(clock_said, 1)])
    assert inside == [True]


def test_a_cpu_has_the_wall_and_nothing_to_wait_for() -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, WallClock)
    assert clock.repeats_short_calls
    assert not EventClock.repeats_short_calls


# ------------------------------------------------------------------------------------------------------------- rounds


def test_each_round_holds_every_entry_once_and_the_quickest_twice(wall: Wall) -> None:
    script = Script(wall, steady)
    found = timed(script, "a", "b", "c", repeat=11)
    assert found.reference == "b"
    for names in script.rounds[:2]:  # to warm up, and the estimate
        assert names == [("a", 1), ("b", 1), ("c", 1)]
    assert len(script.orders) == 11
    assert all(Counter(order) == {"a": 1, "b": 2, "c": 1} for order in script.orders)
    assert {name: len(samples) for name, samples in found.samples.items()} == {"a": 11, "b": 11, "c": 11}
    assert len(found.control) == 11


def test_one_entry_alone_has_a_control_too(wall: Wall) -> None:
    found = timed(Script(wall, steady), "c", repeat=3)
    assert (found.reference, found.samples, found.control) == ("c", {"c": (5.0,) * 3}, (5.0,) * 3)


def test_the_round_that_warms_up_counts_for_nothing_not_even_the_estimate(wall: Wall) -> None:
    def seconds(name: str, n_round: int) -> float:
        return {"a": 1000.0, "b": 2.0}[name] if n_round == 0 else {"a": 1e-3, "b": 2.0}[name]

    found = timed(Script(wall, seconds), "a", "b", budget_s=20.0)
    assert found.reference == "a"
    assert found.n_calls == {"a": 2, "b": 1}
    assert max(found.samples["a"]) == 1e-3
    assert len(found.control) == 6


def test_orders_differ_between_rounds_and_come_from_the_seed(wall: Wall) -> None:
    scripts = [Script(wall, steady) for _ in range(3)]
    for script, seed in zip(scripts, (1, 1, 2), strict=True):
        timed(script, "a", "b", "c", repeat=40, seed=seed)
    same, again, other = (script.orders for script in scripts)
    assert same == again != other
    assert len({tuple(order) for order in same}) > 8  # of 12
    for place in range(4):
        assert {order[place] for order in same} == {"a", "b", "c"}


def test_samples_go_to_those_who_took_them_round_by_round(wall: Wall) -> None:
    counts: Counter[tuple[str, int]] = Counter()

    def seconds(name: str, n_round: int) -> float:
        counts[name, n_round] += 1
        return 100 * "bac".index(name) + n_round + counts[name, n_round] / 10

    script = Script(wall, seconds)
    found = timed(script, "a", "b", "c", repeat=5)
    assert found.samples["a"] == tuple(100 + n + 0.1 for n in range(2, 7))
    assert found.samples["c"] == tuple(200 + n + 0.1 for n in range(2, 7))
    both = list(zip(found.samples["b"], found.control, strict=True))
    assert [sorted(pair) for pair in both] == [[n + 0.1, n + 0.2] for n in range(2, 7)]


def test_the_control_stands_now_before_the_reference_and_now_behind_it(wall: Wall) -> None:
    counts: Counter[int] = Counter()

    def seconds(name: str, n_round: int) -> float:
        counts[n_round] += 1
        return float(counts[n_round])

    found = timed(Script(wall, seconds), "b", repeat=40)
    pairs = set(zip(found.samples["b"], found.control, strict=True))
    assert pairs == {(1.0, 2.0), (2.0, 1.0)}


@pytest.mark.parametrize("repeat", [1, 3, 500])
def test_so_many_rounds_as_were_requested_are_enough_whatever_they_show(wall: Wall, repeat: int) -> None:
    found = timed(Script(wall, noisy), "a", "b", repeat=repeat, budget_s=0.0)
    assert len(found.control) == repeat


def test_six_rounds_are_enough_where_nothing_differs(wall: Wall) -> None:
    assert len(timed(Script(wall, steady), "a", "b", "c").control) == 6


def test_a_single_noisy_entry_keeps_all_going_until_the_last_round(wall: Wall) -> None:
    def seconds(name: str, n_round: int) -> float:
        return noisy(name, n_round) if name == "c" else steady(name, n_round)

    assert len(timed(Script(wall, seconds), "a", "b", "c").control) == rounds.MAX_ROUNDS == 384


def test_rounds_go_on_until_the_interval_is_within_a_hundredth_of_the_median(wall: Wall) -> None:
    def seconds(name: str, n_round: int) -> float:
        return 2.0 if n_round in (2, 5) else 1.0

    # two of n samples are twice as long: the interval leaves out two at each end from twelve samples on
    assert len(timed(Script(wall, seconds), "a").control) == 12


def test_the_budget_ends_what_would_go_on_but_not_before_six_rounds(wall: Wall) -> None:
    # a round takes 3 + 2 + 2 s, or 1.5 times that, by turns
    assert len(timed(Script(wall, noisy), "a", "b", budget_s=100.0).control) == 12
    assert len(timed(Script(wall, noisy), "a", "b", budget_s=12.0).control) == 6
    assert len(timed(Script(wall, noisy), "a", "b", budget_s=0.0).control) == 6


def test_whether_rounds_are_enough_is_checked_only_where_their_number_has_doubled(wall: Wall) -> None:
    """Whoever looks after each round stops at a lucky moment."""

    def seconds(n_bad: int) -> Callable[[str, int], float]:
        return lambda name, n_round: 2.0 if n_round < 2 + n_bad else 1.0

    n_rounds = {n_bad: len(timed(Script(wall, seconds(n_bad)), "a").control) for n_bad in (0, 1, 2, 3, 5)}
    assert n_rounds == {0: 6, 1: 12, 2: 12, 3: 24, 5: 24}


def test_short_calls_are_repeated_until_a_sample_is_two_milliseconds_long(wall: Wall) -> None:
    lengths = {"a": 3e-4, "b": 1e-9, "c": 2e-3, "d": 0.0}
    script = Script(wall, lambda name, n_round: lengths[name])
    found = timed(script, *lengths, repeat=1)
    assert found.n_calls == {"a": 7, "b": 1000, "c": 1, "d": 1000}
    assert all(n_calls == 1 for names in script.rounds[:2] for _, n_calls in names)
    assert dict(script.rounds[2]) == found.n_calls


def test_a_call_that_needs_something_before_it_is_never_repeated(wall: Wall) -> None:
    script = Script(wall, lambda name, n_round: 1e-5)
    entries = {"a": Timed(lambda: "a", before=lambda: None), "b": Timed(lambda: "b")}
    assert time_in_turns(entries, script, repeat=1, budget_s=1.0, seed=0).n_calls == {"a": 1, "b": 200}


def test_a_device_s_own_clock_needs_no_repeated_calls(wall: Wall) -> None:
    script = Script(wall, lambda name, n_round: 1e-5)
    script.repeats_short_calls = False
    assert timed(script, "a", repeat=1).n_calls == {"a": 1}


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_is_not_collected_meanwhile_and_then_as_before(wall: Wall, was_on: bool) -> None:
    seen: list[bool] = []

    def seconds(name: str, n_round: int) -> float:
        seen.append(gc.isenabled())
        return 1.0

    (gc.enable if was_on else gc.disable)()
    try:
        timed(Script(wall, seconds), "a", repeat=2)
        assert gc.isenabled() is was_on
    finally:
        gc.enable()
    assert seen == [False] * 6


def test_garbage_is_collected_again_after_a_fault(wall: Wall) -> None:
    def seconds(name: str, n_round: int) -> float:
        raise RuntimeError("it broke")

    assert gc.isenabled()
    with pytest.raises(RuntimeError, match=r"^it broke$"):
        timed(Script(wall, seconds), "a")
    assert gc.isenabled()


def test_with_the_real_clock_every_sample_is_a_time_above_zero() -> None:
    entries = {"a": Timed(lambda: sum(range(100))), "b": Timed(lambda: sum(range(2000)))}
    found = time_in_turns(entries, WallClock(), repeat=4, budget_s=0.1, seed=0)
    assert all(sample > 0 for column in (*found.samples.values(), found.control) for sample in column)
