"""User code in a child process: the parent survives whatever the code does, reports it, and leaves nothing behind. Most
children import a fake torch with two functions, because these tests do not need torch."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from support.processes import PATIENCE_S

from mhacli.adapters.usercode.process import KEPT_BYTES, ChildResult, run_in_child
from mhacli.errors import MhaError

SMALL_TORCH = "def get_num_threads(): return 2\ndef set_num_threads(n): pass\n"
HEADER = "import os, re, signal, subprocess, sys, time, warnings\n"
Job = Callable[..., ChildResult]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the jobs of children."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.py").write_text(SMALL_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    return tmp_path


@pytest.fixture
def job(folder: Path) -> Job:
    """`job(source)` runs a job with this body and returns its result. Line 1 is the imports, line 2 the `def`."""

    def run(source: str, request: dict[str, object] | None = None, **how: object) -> ChildResult:
        body = "".join(f"    {line}\n" for line in dedent(source).strip().splitlines())
        (folder / "theirs.py").write_text(f"{HEADER}def job(request, stage):\n{body}")
        return run_in_child("theirs:job", request or {}, **{"time_limit_s": PATIENCE_S, **how})

    return run


def refused(job: Job, source: str, **how: object) -> MhaError:
    with pytest.raises(MhaError) as caught:
        job(source, **how)
    return caught.value


def is_gone(pid: int, within_s: float = PATIENCE_S) -> bool:
    """Whether a process ends in time; a zombie counts as ended."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def children_counted() -> Iterator[None]:
    """Asserts that the block leaves no child processes behind."""
    before = _children()
    yield
    assert _children() <= before


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


# -------------------------------------------------------------------------------------------------- what comes back


def test_the_result_comes_back_with_what_was_printed_to_both_streams(job: Job) -> None:
    found = job(
        """
        print("to stdout é \\ud800")
        print("to stderr", file=sys.stderr)
        os.write(1, b"half a line \\xff")
        return bytes(reversed(request["of"].encode()))
        """,
        {"of": "abc"},
    )
    assert found.result == b"cba"
    assert found.printed == "to stdout é \\ud800\nto stderr\nhalf a line \\xff"


def test_ten_megabytes_come_back_whole(job: Job) -> None:
    found = job("return bytes(range(251)) * 40000")
    assert found.result == bytes(range(251)) * 40000


def test_each_stage_is_reported_once_as_it_begins(job: Job) -> None:
    heard: list[str] = []
    job(
        """
        for _ in range(300): stage("calling A")
        stage("comparing", limited=False)
        return b""
        """,
        on_stage=heard.append,
    )
    assert heard == ["loading torch", "calling A", "comparing"]


def test_the_real_torch_is_loaded_with_two_threads_at_most_and_without_warnings(
    folder: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "torch.py").unlink()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    found = job("import torch\nwarnings.warn('careful')\nreturn f'{torch.get_num_threads()} {torch.ones(2)}'.encode()")
    assert found.result in (b"1 tensor([1., 1.])", b"2 tensor([1., 1.])")
    assert found.printed == ""


def test_it_reads_nothing_and_sees_no_words_of_ours_and_no_module_of_the_working_directory(
    folder: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = folder / "away"
    away.mkdir()
    for name in ("json", "mhacli", "faulthandler"):
        (away / f"{name}.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(away)
    found = job("return repr([sys.stdin.read(), sys.argv[1:], os.getcwd(), '' in sys.path]).encode()")
    assert found.result.decode() == repr(["", [], str(away), False])


def test_nothing_is_left_beside_their_files(folder: Path, job: Job) -> None:
    (folder / "sibling.py").write_text("X = 1")
    job("import sibling\nreturn b''")
    assert not [path for path in folder.rglob("*.pyc") if path.name.startswith("sibling")]


# --------------------------------------------------------------------------------------------------- what goes wrong


def test_an_error_of_the_job_comes_back_whole(job: Job) -> None:
    fault = refused(
        job,
        """
        from mhacli.errors import MhaError
        raise MhaError("d must be 3, got 4", hint="--arg d=3", code="odd", exit_code=3, path="a.py")
        """,
    )
    assert (fault.message, fault.hint, fault.code, fault.exit_code, fault.path) == (
        "d must be 3, got 4",
        "--arg d=3",
        "odd",
        3,
        "a.py",
    )


def test_an_endless_stage_is_ended_and_its_line_is_reported(job: Job) -> None:
    with children_counted():
        fault = refused(job, "stage('importing theirs.py')\nwhile True: pass", time_limit_s=0.5)
    assert fault.message == "importing theirs.py took longer than 0.5 seconds"
    assert fault.hint == "theirs.py:4 says: while True: pass; --time-limit SECONDS allows more"
    assert (fault.code, fault.exit_code) == ("too-slow", 1)


def test_what_is_ours_takes_its_time(job: Job) -> None:
    slow = "stage('calling A')\nstage('comparing', limited=False)\ntime.sleep(1)\nreturn b'done'"
    assert job(slow, time_limit_s=0.4).result == b"done"


@pytest.mark.full
def test_the_time_begins_anew_with_every_call(job: Job) -> None:
    assert (
        job("for _ in range(4):\n    stage('calling A'); time.sleep(0.4)\nreturn b'done'", time_limit_s=1.2).result
        == b"done"
    )


def test_native_code_that_holds_the_interpreter_is_ended_too(job: Job) -> None:
    fault = refused(job, "stage('calling A')\nre.match('(a+)+$', 'a' * 50 + 'b')", time_limit_s=0.5)
    assert fault.code == "too-slow"
    assert str(fault.hint).startswith("theirs.py:4 says: re.match(")


@pytest.mark.parametrize(
    ("source", "how", "hint"),
    [
        ("print('a'); print('bye'); os._exit(7)", "with exit status 7", "it last printed: a / bye"),
        ("os._exit(0)", "with exit status 0", None),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "by SIGSEGV",
         "theirs.py:4 says: os.kill(os.getpid(), signal.SIGSEGV)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "by SIGKILL",
         "the system does this to a process that takes too much memory"),
        ("os.abort()", "by SIGABRT", "theirs.py:4 says: os.abort()"),
    ],
)  # fmt: skip
def test_an_early_exit_is_reported_with_its_status_stage_and_printed_lines(
    folder: Path, job: Job, source: str, how: str, hint: str | None
) -> None:
    fault = refused(job, f"stage('calling A')\n{source}")
    assert (fault.message, fault.hint) == (f"calling A ended the process {how}", hint)
    assert (fault.code, fault.exit_code) == ("crashed", 1)
    assert not list(folder.glob("core*"))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("sys.exit(3)", "SystemExit: 3"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("input()", "EOFError: EOF when reading a line"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_an_exception_in_a_call_is_reported_with_its_line(job: Job, source: str, said: str) -> None:
    fault = refused(job, f"stage('calling A')\n{source}")
    assert (fault.message, fault.hint) == (f"calling A failed: {said}", f"theirs.py:4 says: {source}")
    assert fault.code == "raised"


def test_a_call_that_runs_out_of_memory_is_reported(job: Job) -> None:
    fault = refused(job, "stage('calling A')\nraise MemoryError")
    assert (fault.message, fault.code) == ("out of memory while calling A", "out-of-memory")


def test_a_job_that_is_not_there_is_a_bug_of_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MHA_DEBUG", raising=False)
    with pytest.raises(MhaError) as caught:
        run_in_child("mhacli.errors:nothing", {}, time_limit_s=1)
    assert caught.value.code == "internal"
    monkeypatch.setenv("MHA_DEBUG", "1")
    with pytest.raises(RuntimeError, match="in load_job"):
        run_in_child("mhacli.errors:nothing", {}, time_limit_s=1)


def test_endless_printing_is_ended_and_its_last_lines_are_reported(job: Job) -> None:
    fault = refused(job, "stage('calling A')\nn = 0\nwhile True: n += 1; print(f'line {n}', 'x' * 90)", time_limit_s=1)
    assert fault.code == "too-slow"
    last = str(fault.hint).partition("it last printed: ")[2].split(" / ")
    assert len(last) == 3
    assert all(len(line) <= 100 for line in last)


def test_much_printing_does_not_fill_the_disk(job: Job) -> None:
    source = """
    stage("calling A")
    for part in range(3):
        os.write(1, f"part {part}\\n".encode() * 300_000)
        while os.fstat(1).st_size > 100_000: time.sleep(0.01)
    return b"emptied"
    """
    found = job(source)
    assert found.result == b"emptied"
    assert found.printed.startswith("…\npart 2\npart 2\n")


def test_of_a_long_print_the_last_whole_lines_come_back(job: Job) -> None:
    printed = job("for n in range(200000): print(f'line {n:07}')\nreturn b''", time_limit_s=30).printed
    lines = printed.splitlines()
    assert (lines[0], lines[-1]) == ("…", "line 0199999")
    assert lines[1:] == [f"line {n:07}" for n in range(200000 - len(lines) + 1, 200000)]
    assert KEPT_BYTES - 2000 < len(printed.encode()) <= KEPT_BYTES + 4


def test_a_process_that_closes_its_pipe_is_reported(job: Job) -> None:
    fault = refused(job, "os.closerange(3, 64)\ntime.sleep(0.2)\nreturn b''")
    assert (fault.code, fault.message.endswith(" with exit status 1")) == ("crashed", True)


@pytest.mark.parametrize(
    ("first", "written"),
    [("stage('calling A')", "hello\\n"), ("", '{"stage": "calling A", "limited": true}\\nhello\\n')],
    ids=["after a stage", "at once with it"],
)
def test_user_code_that_writes_into_the_pipe_is_reported_with_its_stage(job: Job, first: str, written: str) -> None:
    source = f"""
    {first}
    for fd in range(3, 256):
        try: os.write(fd, b'{written}')
        except OSError: pass
    time.sleep(600)
    """
    fault = refused(job, source)
    assert fault.message == "calling A failed: the code wrote into the pipe through which mha reads its results"


# ------------------------------------------------------------------------------------------------- what must not stay


def test_what_a_job_started_ends_with_it_and_does_not_keep_it(job: Job) -> None:
    pid = int(job("return str(subprocess.Popen(['sleep', '600']).pid).encode()").result)
    assert is_gone(pid)
    pid = int(job("pid = os.fork()\nif not pid: time.sleep(600)\nreturn str(pid).encode()").result)
    assert is_gone(pid)


ASKING = """
import sys
from mhacli.adapters.usercode.process import run_in_child
try:
    run_in_child("theirs:job", {}, time_limit_s=60, on_stage=lambda what: print(what, flush=True))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
@pytest.mark.parametrize("busy", ["time.sleep(600)", "re.match('(a+)+$', 'a' * 60 + 'b')"], ids=["sleeping", "native"])
def test_no_process_outlives_its_parent(folder: Path, number: signal.Signals, busy: str) -> None:
    (folder / "theirs.py").write_text(
        f"{HEADER}def job(request, stage):\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        f"    stage(f'{{os.getpid()}} {{child.pid}}', limited=False)\n    {busy}\n"
    )
    with subprocess.Popen([sys.executable, "-c", ASKING], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == "loading torch\n"
        pids = [int(word) for word in asking.stdout.readline().split()]
        asking.send_signal(number)
        code = asking.wait(PATIENCE_S)
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert len(pids) == 2
    assert all(is_gone(pid) for pid in pids)


def test_asking_loads_no_torch() -> None:
    code = "import sys, mhacli.adapters.usercode.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_process_that_cannot_start_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(folder / "no_python"))
    with pytest.raises(MhaError, match=r"^could not start a process to run the code: No such file or directory$"):
        run_in_child("theirs:job", {}, time_limit_s=1)
