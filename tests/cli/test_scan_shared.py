"""One scan shared out in every way: by Ray's workers and by ranks, some of them killed. The files have the same bytes in all."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.checkpoints_saved import Checkpoints
from support.processes import MHA
from support.scans import corpus_file, sentences

N_DOCUMENTS, PATIENCE_S = 150, 400
BAD = [5, "", None]


@dataclass(frozen=True)
class Scan:
    """The command without what shares it out, and what one process makes of it."""

    words: tuple[str, ...]
    expected: Mapping[str, str]
    stdout: str

    def begin(self, out: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
        """The command with further words and variables, begun."""
        process = subprocess.Popen(
            [*self.words, "--out", str(out), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        )
        _begun.append(process)
        return process


_begun: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _none_remains() -> Iterator[None]:
    """Ends the processes that a failed test leaves."""
    yield
    while _begun:
        with _begun.pop() as process:
            process.kill()


def ended(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """What it printed."""
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    return stdout, stderr


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Scan:
    folder = tmp_path_factory.mktemp("scan")
    corpus = corpus_file(folder / "corpus.jsonl", [*sentences(N_DOCUMENTS), *BAD])
    words = (MHA, "scan", "--model", Checkpoints(folder).of("llama"), corpus)
    plain = Scan(words, {}, "")
    stdout, _ = ended(plain.begin(folder / "plain.mha"))
    return Scan(words, files_of(folder / "plain.mha"), stdout.replace("plain.mha", "NAME.mha"))


def files_of(out: Path) -> dict[str, str]:
    """The sha256 of the summary and of all rows."""
    paths = [out / "summary.safetensors", *(out / "rows").iterdir()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def await_units(out: Path, n: int, process: subprocess.Popen[str]) -> None:
    """Waits until so many units are done."""
    until = time.monotonic() + PATIENCE_S
    while not (out / "units").is_dir() or len([*(out / "units").glob("*.safetensors")]) < n:
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def descendants(pid: int) -> Iterator[tuple[int, bytes]]:
    """The processes that a process began, and those that they began, with their command lines."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child, Path(f"/proc/{child}/cmdline").read_bytes()
            yield from descendants(child)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    return [pid for pid, command in descendants(process.pid) if b"ray::_Actor" in command]


@pytest.mark.scan
def test_workers_of_which_one_is_killed_give_what_one_process_gives(scan: Scan, tmp_path: Path) -> None:
    out = tmp_path / "NAME.mha"
    process = scan.begin(out, "--workers", "2")
    await_units(out, 1, process)
    family = [pid for pid, _ in descendants(process.pid)]
    os.kill(workers_of(process)[0], signal.SIGKILL)
    stdout, stderr = ended(process)
    assert "worker ended" in stderr
    assert stdout == scan.stdout
    assert files_of(out) == scan.expected
    assert_gone(family)


@pytest.mark.scan
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "terminated"])
def test_a_scan_with_workers_that_is_interrupted_goes_on_without_them(
    scan: Scan, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    out = tmp_path / "NAME.mha"
    process = scan.begin(out, "--workers", "2")
    await_units(out, 1, process)
    family = [pid for pid, _ in descendants(process.pid)]
    process.send_signal(sent)
    _, stderr = ended(process, code)
    assert "the same command resumes the scan" in stderr
    assert not (out / "summary.safetensors").exists()
    assert_gone(family)
    ended(scan.begin(out))
    assert files_of(out) == scan.expected


@pytest.mark.scan
def test_a_scan_that_is_ended_while_ray_starts_leaves_no_process(scan: Scan, tmp_path: Path) -> None:
    process = scan.begin(tmp_path / "NAME.mha", "--workers", "2")
    until = time.monotonic() + PATIENCE_S
    while not (family := {pid for pid, command in descendants(process.pid) if b"gcs_server" in command}):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    process.terminate()
    while process.poll() is None:
        with suppress(FileNotFoundError, ProcessLookupError):  # some end in between
            family |= {pid for pid, _ in descendants(process.pid)}
        time.sleep(0.02)
    _, stderr = ended(process, 143)
    assert "the same command resumes the scan" in stderr
    assert_gone([*family])


@pytest.mark.scan
def test_packed_texts_do_not_depend_on_workers(scan: Scan, tmp_path: Path) -> None:
    packed, alone = ("--pack", "--max-tokens", "24"), tmp_path / "alone.mha"
    ended(scan.begin(alone, *packed))
    ended(scan.begin(tmp_path / "shared.mha", *packed, "--workers", "2"))
    assert files_of(tmp_path / "shared.mha") == files_of(alone) != scan.expected


def assert_gone(pids: list[int]) -> None:
    """Processes end, if not at once."""
    until = time.monotonic() + PATIENCE_S
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.full
def test_ranks_of_torchrun_give_what_one_process_gives(scan: Scan, tmp_path: Path) -> None:
    out = tmp_path / "NAME.mha"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python")
    ended(Scan((*launcher, *scan.words), {}, "").begin(out))
    assert files_of(out) == scan.expected


@pytest.mark.full
def test_ranks_that_are_killed_are_replaced_by_another_number_of_ranks(scan: Scan, tmp_path: Path) -> None:
    out = tmp_path / "NAME.mha"
    first = [scan.begin(out, RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    await_units(out, 2, first[0])
    first[1].kill()
    first[1].communicate()
    ended(first[0])
    if (out / "summary.safetensors").exists():
        pytest.skip("the killed rank had nothing left to do")
    for process in [scan.begin(out, RANK=str(rank), WORLD_SIZE="3") for rank in range(3)]:
        ended(process)
    assert files_of(out) == scan.expected


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["--cpus-per-worker", "2"], {}, "--cpus-per-worker has no effect without --workers or --ray"),
        (
            ["--workers", "2"],
            {"RANK": "0", "WORLD_SIZE": "2"},
            "--workers does not work in a rank (RANK and WORLD_SIZE are set)",
        ),
    ],
    ids=["a worker's processors", "workers of a rank"],
)
@pytest.mark.full
def test_ways_to_share_out_that_cannot_be_are_refused(
    scan: Scan, tmp_path: Path, words: list[str], variables: dict[str, str], message: str
) -> None:
    _, stderr = ended(scan.begin(tmp_path / "NAME.mha", *words, **variables), 2)
    assert stderr.splitlines()[0] == f"mha: error: {message}"
