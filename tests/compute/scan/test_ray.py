"""Units with Ray: on one node and two, with workers and a node that end in the middle. All give what one process gives."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints_saved import Checkpoints
from support.scans import corpus_file, sentences, start_of, units_of

from mhacli.compute.scan.engines import ray as engines
from mhacli.compute.scan.engines.ray import IN_FLIGHT, MOST_ATTEMPTS, RayEngine
from mhacli.compute.scan.engines.single import SingleEngine
from mhacli.errors import MhaError
from mhacli.requests.scan import ScanRequest
from mhacli.results.scan.unit import Unit, UnitFiles, units
from mhacli.text.corpus import Document

pytestmark = [pytest.mark.scan, pytest.mark.filterwarnings("default")]  # Ray leaves sockets open

Result = dict[int, UnitFiles]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes, one with room for one worker, and one for two."""
    import ray
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.second = made.add_node(num_cpus=2)
    ray.init(made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> tuple[ScanRequest, list[Unit], Result]:
    """A scan of a tiny checkpoint, its units, and what one process makes of them."""
    request = ScanRequest(Checkpoints(tmp_path_factory.mktemp("checkpoints")).of("llama"))
    file = corpus_file(tmp_path_factory.mktemp("corpus") / "c.jsonl", [*sentences(37), 5, ""])
    made = [*units_of(file, request)]
    return request, made, computed(SingleEngine(), start_of(request), made)


def computed(engine: Any, start: Any, made: Sequence[Unit], on_done: Callable[[int], object] = id) -> Result:
    """The files of every unit. `on_done` hears how many are done."""
    done: Result = {}

    def take(unit: Unit, files: UnitFiles, worker: str) -> None:
        assert unit.number not in done
        done[unit.number] = files
        on_done(len(done))

    engine.run(iter(made), start, take)
    return done


def workers_here() -> list[int]:
    """The processes of workers among those that this one began."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        try:
            is_worker = b"ray::_Actor" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if is_worker and os.getpid() in ancestors(pid):
            found.append(pid)
    return found


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def after(n: int, action: Callable[[], object]) -> Callable[[int], object]:
    """Does something once, when so many units are done."""
    return lambda n_done: action() if n_done == n else None


# ------------------------------------------------------------------------------------------------------ a real model


@pytest.mark.parametrize("n_workers", [1, 3])
def test_any_number_of_workers_gives_the_bytes_of_one_process(cluster: Any, scan: Any, n_workers: int) -> None:
    request, made, expected = scan
    engine = RayEngine("auto", n_workers)
    assert engine.settings(request) == SingleEngine().settings(request)
    assert computed(engine, start_of(request), made) == expected


def test_a_worker_that_is_killed_loses_no_unit_and_changes_no_byte(cluster: Any, scan: Any) -> None:
    request, made, expected = scan
    said: list[str] = []
    engine = RayEngine("auto", 2, note=said.append)
    kill = after(2, lambda: os.kill(workers_here()[0], signal.SIGKILL))
    assert computed(engine, start_of(request), made, kill) == expected
    assert [words.partition(" (")[0] for words in said] == ["a worker ended"]


def test_a_worker_with_other_versions_is_refused(cluster: Any, scan: Any) -> None:
    request, made, _ = scan
    start = start_of(request)
    with pytest.raises(MhaError) as caught:
        computed(RayEngine("auto", 1), replace(start, settings=replace(start.settings, torch="1.0")), made)
    assert caught.value.code == "other-worker"


# ------------------------------------------------------------------------------------------------------- the hand-out


@dataclass(frozen=True)
class Start:
    """In place of a model: a worker that answers with the number of the unit, and does what the first document says."""

    request: ScanRequest = field(default_factory=lambda: ScanRequest(""))

    def load(self) -> Start:
        return self

    def compute(self, unit: Unit) -> UnitFiles:
        action, _, argument = unit.documents[0][2].partition(" ")
        if action == "sleep":
            time.sleep(float(argument))
        if action == "die":
            os._exit(1)
        if action == "fail":
            raise MhaError("no good", hint="another", code="bad", exit_code=3)
        return UnitFiles(b"%d" % unit.number, b"", b"", 1, 0, 1)


def actions(*words: str) -> list[Unit]:
    return [*units((Document("c", place, word) for place, word in enumerate(words, 1)), "", 1)]


def test_units_are_taken_from_the_corpus_only_when_a_worker_can_have_them(cluster: Any) -> None:
    made, n_taken, n_done, most = actions(*["sleep 0.01"] * 60), 0, 0, 0

    def taken() -> Iterator[Unit]:
        nonlocal n_taken, most
        for unit in made:
            n_taken += 1
            most = max(most, n_taken - n_done)
            yield unit

    def done(unit: Unit, files: UnitFiles, where: str) -> None:
        nonlocal n_done
        n_done += 1

    RayEngine("auto", 2).run(taken(), Start(), done)
    assert (n_taken, n_done) == (60, 60)
    assert most <= 2 * IN_FLIGHT


def test_a_unit_over_which_workers_end_is_named(cluster: Any) -> None:
    said: list[str] = []
    with pytest.raises(MhaError) as caught:
        computed(RayEngine("auto", 2, note=said.append), Start(), actions("", "", "die", ""))
    assert "unit 2 (c:3 to c:3)" in caught.value.message
    notes = [note for note in said if "unit 2 (c:3 to c:3)" in note]  # a result of unit 1 may be lost with its worker
    assert len(notes) == MOST_ATTEMPTS - 1


def test_ray_is_ended_where_an_interruption_waited_for_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    calls: list[str] = []

    def begin(*address: str, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        calls.append("begun")

    monkeypatch.setattr(ray, "init", begin)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("ended"))
    engine = RayEngine("local", 1)
    with pytest.raises(KeyboardInterrupt):
        engine.settings(ScanRequest("model"))
    engine.end()
    assert calls == ["begun", "ended"]


def test_an_error_of_a_worker_keeps_its_hint_and_code(cluster: Any) -> None:
    with pytest.raises(MhaError) as caught:
        computed(RayEngine("auto", 2), Start(), actions("", "fail"))
    fault = caught.value
    assert (fault.message, fault.hint, fault.code, fault.exit_code) == ("no good", "another", "bad", 3)


def test_a_unit_that_takes_long_is_named_once(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "SLOW_S", 1.0)
    monkeypatch.setattr(engines, "CHECK_S", 0.2)
    said: list[str] = []
    made = actions(*["sleep 0.01"] * 20, "sleep 4")
    assert len(computed(RayEngine("auto", 1, note=said.append), Start(), made)) == 21
    assert [words for words in said if words.startswith("unit 20 (c:21 to c:21) is not done after ")]
    assert sum("unit" in words for words in said) == 1


def test_a_worker_for_which_no_node_has_room_is_refused(cluster: Any) -> None:
    with pytest.raises(MhaError) as caught:
        computed(RayEngine("auto", cpus_per_worker=3), Start(), actions(""))
    assert caught.value.message == "no node of the Ray cluster has 3 processors for a worker"


def test_nothing_is_begun_where_there_is_no_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_ray", lambda: pytest.fail("Ray was asked for"))
    assert computed(RayEngine("auto", 2), Start(), []) == {}


def test_a_node_that_goes_takes_no_unit_with_it(cluster: Any) -> None:
    """The last of the module: the node does not come back."""
    leave = after(6, lambda: cluster.remove_node(cluster.second, allow_graceful=False))
    done = computed(RayEngine("auto"), Start(), actions(*["sleep 0.2"] * 30), leave)
    assert {number: files.rows for number, files in done.items()} == {n: b"%d" % n for n in range(30)}
