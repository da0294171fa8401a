"""Runs user code in a child process, because the code may print, hang, crash or exit.

Only the end of the printed output is kept. The child stays between this process and a copy of
itself, which runs the job, and takes in what that copy starts. All of them are killed when the job
ends or takes too long, and none outlives this process: on Linux also those that left the session,
elsewhere those of the process group. Their temporary files are in a folder that is then removed.
Nothing here loads torch.
"""

import ctypes
import faulthandler
import gc
import importlib
import json
import math
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader, FileIO, TextIOWrapper
from pathlib import Path
from typing import IO, Any, NoReturn

from mhacli.errors import MhaError, UsageError, failed_import, lacks_memory, silent_stderr
from mhacli.io.files import temporary_folder
from mhacli.io.memory import gc_paused

from .door import InternalError, UserRaised
from .faults import (
    SourceLine,
    exception_text,
    passed_user_code_last,
    source_line_in_dump,
    user_code_error,
)

KEPT_BYTES = 64 << 10
_MOST_BYTES = 256 << 20
"""Of one message."""
_GRACE_S = 3.0
"""Seconds after a limit in which the alarm of the child may end it, which names the line."""
_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36
"""Options of Linux' `prctl`."""
_LOADING = "loading torch"
_LAST_LINES = 3
_ROOT = str(Path(__file__).parents[2])
_PROGRAM = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); import mhacli; sys.path.remove({_ROOT!r}); "
    f"from {__name__} import main; main()"
)
"""The program of the child. It imports mha from this very folder and then removes the folder from
the user's import path."""
_N_THREADS = 2

Stage = Callable[..., None]
"""`stage(text, limited=True)` reports the stage that begins; its text begins a sentence, such as
`calling Attention`. Its first word also says what runs to what limits time, here and in
`limits.py`: `calling` the user's code, `importing` or `building` it, or `examining`, which puts
things back after a call and is never cut off.

The time limit applies to each limited stage, which runs user code. Others run code of mha, which
may meet methods of the user's objects, and have `_TIMES_OWN` times as long; where `limited` is
None, any time. An import, a constructor, the first call, which may import, and code of mha have
`FIRST_LIMIT_S` at least. With `call` it names what a call is given, and with `report` it leaves a
document that stands for the result if the process ends early."""

_FROM_ELSEWHERE = (signal.SIGKILL, signal.SIGTERM)
"""Signals that no fault of the code raises. The system kills for a lack of memory."""


_is_fork = False
"""Whether this process is a copy that `run_in_fork` has made."""


class EndedEarly(MhaError):
    """A child process that ended without a result: by a fault of its code if it `is_crash`, at a
    `line` if known, after it had begun its last `call`. `report` is the last document that the job
    left, None without one; `printed` is the end of its printed output.
    """

    is_crash, call, line = False, "", SourceLine()
    report: Any = None
    printed = ""


def no_stage(stage: str, **_: object) -> None:
    """Ignores the stages."""


def run_in_child(
    job: str,
    request: Mapping[str, Any],
    *,
    time_limit_s: float,
    on_stage: Callable[[str], None] | None = None,
    folder: str | None = None,
) -> tuple[Any, str]:
    """The document of the job `module:function`, run in a child process with torch loaded, in a
    folder or in the working directory, and the end of its printed output.

    The job gets the request, which must be JSON-serialisable, and a `Stage`; `on_stage` is called
    when a stage begins. Raises the job's `MhaError`, and an `EndedEarly` that names the stage if it
    exceeds `time_limit_s` or if the child ends early.
    """
    sent = {"job": job, "request": request, "time_limit_s": time_limit_s}
    with temporary_folder() as temporary:
        process = _started(sent | {"folder": temporary}, folder)
        assert process.stdout is not None
        assert process.stderr is not None
        with process, BufferedReader(process.stdout) as messages:  # type: ignore[type-var]
            return _result_of(
                process.pid, messages, process.stderr, process.wait, time_limit_s, on_stage
            )


def run_in_fork(job: Callable[[Stage], Any], *, time_limit_s: float) -> tuple[Any, str]:
    """What a job gives in a copy of this process, where torch computes in one thread, and the end
    of its printed output. Raises as `run_in_child`, and `UsageError` in such a copy.
    """
    global _is_fork
    if _is_fork:
        raise UsageError("code that is checked cannot check other code")
    folder = temporary_folder()
    (stdin, alive), (messages, sent), (printed, prints) = (os.pipe() for _ in range(3))
    with warnings.catch_warnings(action="ignore"):  # of threads, which the copy does not have
        pid = os.fork()
    if not pid:
        try:
            _is_fork = True
            os.setsid()
            for number, end in enumerate((stdin, sent, prints)):
                os.dup2(end, number)
            os.close(alive)
            os.close(sent)  # processes that the code forks would keep it open
            sys.stdout, sys.stderr = (
                TextIOWrapper(FileIO(n, "w"), line_buffering=True) for n in (1, 2)
            )
            _serve(job, time_limit_s, folder.name, n_threads=1)
        finally:
            os._exit(1)
    for end in (stdin, sent, prints):
        os.close(end)
    with folder, open(alive, "wb"), open(messages, "rb") as told, open(printed, "rb", 0) as said:
        return _result_of(
            pid, told, said, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), time_limit_s
        )


def _result_of(
    pid: int,
    messages: IO[bytes],
    prints: IO[bytes],
    wait: Callable[[], int],
    time_limit_s: float,
    on_stage: Callable[[str], None] | None = None,
) -> tuple[Any, str]:
    """What a child sends as its result, and the end of what it prints, once it has ended. `wait`
    gives its exit status.

    It reads messages until one ends the job, or until the limit of the last stage is over. What is
    no message is a stack dump, which the alarm or a crash writes into the same pipe. Whatever
    happens, all processes of the child are killed. What follows names the cause, the surest first:
    an end that was told, or that took too long; what the user's code wrote into the pipe; the
    result; an end that nobody told; and an error of the job.
    """
    printed = bytearray()
    printing = threading.Thread(target=_keep_end, args=(prints, printed), daemon=True)
    printing.start()
    stage = _LOADING
    dump = b""
    kind = ""
    content: Any = None
    limit_s = max(time_limit_s, FIRST_LIMIT_S)
    notes = dict[str, Any]()
    deadline_s = time.monotonic() + limit_s + _GRACE_S
    received = bytearray()
    try:
        while not kind and (line := _next_line(messages.fileno(), received, deadline_s)):
            if not line.startswith(b'["'):  # of a stack dump
                dump += line
                if len(dump) > KEPT_BYTES:
                    raise ValueError
                continue
            match json.loads(line):
                case ["stage", [begun, limit_s, more]]:
                    deadline_s = time.monotonic() + limit_s + _GRACE_S
                    notes |= more
                    dump = dump.lstrip()
                    if begun != stage and on_stage is not None:
                        on_stage(begun)
                    stage = begun
                case ["result" | "error" | "ended" as kind, content]:
                    pass
                case _:
                    raise ValueError
    except TimeoutError:
        kind = "ended"
        content = -signal.SIGALRM
    except (ValueError, TypeError, RecursionError):
        kind = "foreign"
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGSTOP)
            _end_below(pid)
            os.killpg(pid, signal.SIGKILL)
        exit_status = wait()
        printing.join(timeout=1)
    if kind == "ended":
        exit_status = content
    elif kind == "foreign" or dump.strip():
        hint = "code may write to 1, to 2, and to files that it opens"
        raise MhaError(f"{stage} wrote into a pipe of mha", hint=hint, code="crashed")
    text = printed[-KEPT_BYTES:].decode("utf-8", "backslashreplace")
    if len(printed) > KEPT_BYTES:
        text = f"…{text}"
    if kind == "result":
        return content, text
    if kind != "error":
        raise _early_end(stage, exit_status, dump.decode("utf-8", "replace"), limit_s, text, notes)
    if os.environ.get("MHA_DEBUG"):
        raise RuntimeError(content["traceback"])
    raise MhaError(**content["error"])


def _next_line(pipe: int, received: bytearray, deadline_s: float) -> bytes:
    """The next line from a pipe, empty at its end; `received` keeps what came after it. Raises
    `TimeoutError` if nothing comes before the deadline, and `ValueError` for a line without end.
    """
    poll = select.poll()
    searched = 0
    poll.register(pipe, select.POLLIN)
    while (end := received.find(b"\n", searched)) < 0:
        searched = len(received)
        left_s = max(0.0, deadline_s - time.monotonic())
        if not poll.poll(min(1000 * left_s, 2**31 - 1)):
            raise TimeoutError
        chunk = os.read(pipe, KEPT_BYTES)
        if not chunk:
            return b""
        if searched > _MOST_BYTES:
            raise ValueError
        received += chunk
    line = bytes(received[: end + 1])
    del received[: end + 1]
    return line


def _end_below(root: int) -> None:
    """Kills all processes below one, which starts no others, where the system has `/proc`."""
    ended = {root}
    while found := _children(ended) - ended:
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        ended |= found


def _children(parents: set[int]) -> set[int]:
    """The processes whose parents these are."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_bytes().rpartition(b")")[2].split()[1]) in parents:
                found.add(int(path.parent.name))
    return found


def _started(sent: Mapping[str, Any], folder: str | None) -> subprocess.Popen[bytes]:
    """The child process, with its request sent. Its stdin stays open as long as this process lives;
    its stdout has its messages, and its stderr all that the code prints.
    """
    command = [
        sys.executable,
        "-P",
        "-u",
        "-c",
        _PROGRAM,
    ]  # the working directory is not on its path
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            cwd=folder,
        )
    except OSError as fault:
        raise MhaError(f"could not start a process to run the code: {fault.strerror}") from fault
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the child has ended, which its messages show
        process.stdin.write(json.dumps(sent).encode() + b"\n")
    return process


def _keep_end(prints: IO[bytes], printed: bytearray) -> None:
    """Reads what a process prints, and keeps the end of it: one byte more than is shown, if there
    was more.
    """
    while chunk := prints.read(KEPT_BYTES):
        printed += chunk
        del printed[: -KEPT_BYTES - 1]


def _early_end(
    stage: str,
    exit_status: int,
    dump: str,
    time_limit_s: float,
    printed: str,
    notes: Mapping[str, Any],
) -> EndedEarly:
    """The error for a child that ended without a result."""
    message = f"{stage} ended the process with exit status {exit_status}"
    code = "crashed"
    advice = ""
    if exit_status == -signal.SIGALRM and time_limit_s < math.inf:
        message = f"{stage} took longer than {time_limit_s:g} seconds"
        code = "too-slow"
        advice = "--time-limit SECONDS allows more"
    elif exit_status < 0:
        message = (
            f"{stage} ended the process by {signal.strsignal(-exit_status)} (signal {-exit_status})"
        )
        if exit_status == -signal.SIGKILL:
            advice = "the system does this to a process that takes too much memory"
    line = source_line_in_dump(dump)
    lines = [text.strip()[:100] for text in printed.splitlines() if text.strip()]
    last = f"it last printed: {' / '.join(lines[-_LAST_LINES:])}" if lines else ""
    call = notes.get("call") and f"its last call: {notes['call']}"
    hints = filter(None, (line and line.text, call, advice, last))
    end = EndedEarly(message, hint="; ".join(hints) or None, code=code)
    end.is_crash = code == "crashed" and -exit_status not in _FROM_ELSEWHERE
    vars(end).update(notes, line=line or SourceLine(), printed=printed)
    return end


# ------------------------------------------------------------------------------- inside the process


FIRST_LIMIT_S = 60.0
"""Seconds for an import, a constructor, and the first call."""
_TIMES_A_CALL = 10
"""How much longer than another call one may take, whatever the time limit."""
_TIMES_OWN = 20
"""How much longer than a call code of mha may take."""


def main() -> None:
    """Runs the job that the parent sends, then exits."""
    sent = json.loads(sys.stdin.buffer.readline())

    def job(stage: Stage) -> Any:
        module, _, name = sent["job"].partition(":")
        run = getattr(importlib.import_module(module), name)
        sys.dont_write_bytecode = True  # leaves no files beside the user's
        return run(sent["request"], stage)

    _serve(job, sent["time_limit_s"], sent["folder"], n_threads=_N_THREADS)


def _serve(
    job: Callable[[Stage], Any], time_limit_s: float, folder: str, *, n_threads: int
) -> NoReturn:
    """Runs a job in this process, whose messages go to stdout and whose temporary files are in
    `folder`, then exits without waiting for threads of the user's code.

    First it makes the process safe: stdout and stdin are out of the user's reach, and an alarm ends
    it in any code.
    """
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    _stay_above(folder)
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=messages.close)  # only this process sends
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    )  # no core dump
    faulthandler.enable(messages, all_threads=False)
    # the alarm ends this process after the limit, even if native code holds the interpreter; the
    # timer of faulthandler waits forever for its thread where a process with one was copied
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, messages, all_threads=False, chain=True)
    warnings.simplefilter("ignore")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    stages = _Stages(messages, time_limit_s)
    try:
        gc.freeze()
        with silent_stderr(), gc_paused():
            import torch
        torch.set_num_threads(min(n_threads, torch.get_num_threads()))
        stages.send("result", job(stages.begin))
    except BaseException as fault:
        stages.begin(stages.begun)  # the text of the exception is made by the user's code
        error = _as_error(fault, stages.begun)
        shown = traceback.format_exc() if os.environ.get("MHA_DEBUG") else ""
        stages.send("error", {"error": error.typed(), "traceback": shown})
    finally:
        os._exit(1)


@dataclass
class _Stages:
    """Tells the parent which stage begins, and sets the alarm that ends this process after its
    limit. Calls may take the time limit, or longer where an earlier one took long, because a later
    call may read more texts. The first one since an import or a constructor may itself import
    something: it has more time, and only the time limit of it counts for later ones.
    """

    messages: IO[bytes]
    time_limit_s: float
    begun: str = _LOADING
    began_s: float = 0.0
    longest_s: float = 0.0
    is_called: bool = False

    def send(self, kind: str, content: object) -> None:
        """Sends a message to the parent."""
        self.messages.write(_message(kind, content))
        self.messages.flush()

    def begin(self, text: str, *, limited: bool | None = True, **notes: Any) -> None:
        """Ends the stage that runs, and begins another one; it is a `Stage`."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.begun.startswith("calling"):
            call_s = time.monotonic() - self.began_s
            if not self.is_called:
                call_s = min(call_s, self.time_limit_s)
            self.longest_s = max(self.longest_s, call_s)
            self.is_called = True
        if text.startswith(("importing", "building")):
            self.is_called = False
        self.begun = text
        self.began_s = time.monotonic()
        limit_s = max(self.time_limit_s, _TIMES_A_CALL * self.longest_s)
        allowed_s = limit_s if limited else _TIMES_OWN * limit_s
        if not (limited and self.is_called):
            allowed_s = max(allowed_s, FIRST_LIMIT_S)
        self.send("stage", [text, math.inf if limited is None else allowed_s, notes])
        if limited is not None:
            signal.setitimer(signal.ITIMER_REAL, allowed_s)


def _message(kind: str, content: object) -> bytes:
    """A message to the parent, on a line of its own."""
    return f"\n{json.dumps([kind, content])}\n".encode()


def _stay_above(folder: str) -> None:
    """Returns in a copy of this process. This process takes in what the copy starts and leaves,
    tells how the copy ends, and kills all of them and removes the `folder` of their temporary files
    when its parent ends.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
    prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    copy = os.fork()
    if not copy:
        prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        return
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    while (ended := os.wait())[0] != copy:
        pass
    with suppress(BrokenPipeError):  # the parent may have ended, and that ends the copy
        os.write(1, _message("ended", os.waitstatus_to_exitcode(ended[1])))
    while True:
        signal.pause()


def _end_with_parent(folder: str) -> None:
    """Kills this process and all below it, and removes the `folder` of their temporary files, when
    the parent ends.
    """
    os.read(0, 1)
    _end_below(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _as_error(fault: BaseException, stage: str) -> MhaError:
    """An exception of a job as an `MhaError`: the user's error if the user's code raised it, or if
    mha ran that code outside of the door, such as a `__repr__`; else a bug of mha.
    """
    if isinstance(fault, MhaError):
        return fault
    caught = fault
    if isinstance(fault, UserRaised | InternalError):
        fault = fault.fault
    if lacks_memory(fault):
        return MhaError(f"out of memory while {stage}", code="out-of-memory")
    if stage == _LOADING and (broken := failed_import(fault)):
        return broken
    is_user = isinstance(caught, UserRaised) or not isinstance(fault, Exception)
    if is_user or (caught is fault and passed_user_code_last(fault)):
        return user_code_error(f"{stage} failed", fault, None, code="raised")
    hint = "this is a bug of mha; MHA_DEBUG=1 shows where it happened"
    return MhaError(f"internal error: {exception_text(fault)}", hint=hint, code="internal")
