"""Runs user code in a child process, because the code may print, hang, crash or exit; describes errors of user code.

Only the end of the printed output is kept. After a timeout the child is killed with all its descendants, and it never outlives
this process. Nothing here loads torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import json
import linecache
import os
import re
import resource
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Protocol

from mhacli.errors import MhaError

LOADING_LIMIT_S: Final = 120.0
"""The limit for loading Python and torch; a cold disk took half of it."""
KEPT_BYTES: Final = 64 << 10
_MOST_ON_DISK: Final = 1 << 20
_LOADING: Final = "loading torch"
_TICK_S: Final = 0.05
_DUMP_S: Final = 0.3
_LAST_LINES: Final = 3
_ROOT: Final = str(Path(__file__).parents[2])
_PROGRAM: Final = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); import mhacli; sys.path.remove({_ROOT!r}); "
    f"from {__name__} import main; main()"
)
"""The program of the child. It imports mha from this very folder and then removes the folder from the user's import path."""
_N_THREADS: Final = 2


class ChildResult(NamedTuple):
    """The result of a job, and the end of its printed output, stdout and stderr together."""

    result: bytes
    printed: str


class Stage(Protocol):
    """Reports the stage that begins."""

    def __call__(self, stage: str, *, limited: bool = True) -> None:
        """`stage` begins a sentence, such as `calling Attention`. The time limit applies to each limited stage, which runs user
        code; unlimited stages run only code of mha."""


Job = Callable[[dict[str, Any], Stage], bytes]
"""The function run in the child, with the request and a stage reporter. Its `MhaError` is raised in the parent."""


def run_in_child(
    job: str, request: Mapping[str, Any], *, time_limit_s: float, on_stage: Callable[[str], None] | None = None
) -> ChildResult:
    """The result of the job `module:function`, run in a child process with torch loaded.

    `request` must be JSON-serialisable; `on_stage` is called when a stage begins. Raises the job's `MhaError`, and an
    `MhaError` that names the stage if it exceeds `time_limit_s` or if the child ends early.
    """
    with _started(json.dumps({"job": job, "request": request}).encode() + b"\n") as child:
        return ChildResult(_result(child, time_limit_s, on_stage or _ignore_stage), child.printed.text())


def _ignore_stage(stage: str) -> None:
    """Ignores the stages."""


# ---------------------------------------------------------------------------------------------------------- the process


class _PrintedOutput:
    """The output of a process in an unnamed file. Only its end is kept once it grows."""

    def __init__(self, file: IO[bytes]) -> None:
        self._fd, self._kept, self._is_cut = file.fileno(), b"", False
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_APPEND)  # the file is truncated while the child writes

    def bound(self) -> None:
        """Truncates the file once it is too large."""
        if os.fstat(self._fd).st_size > _MOST_ON_DISK:
            self._kept, self._is_cut = self._end(), True
            os.ftruncate(self._fd, 0)

    def text(self) -> str:
        """The last output in whole lines where possible; an ellipsis marks a cut."""
        read = self._kept + self._end()
        written = read[-KEPT_BYTES:]
        if self._is_cut or len(written) < max(len(read), os.fstat(self._fd).st_size):
            written = b"\xe2\x80\xa6\n" + (written.partition(b"\n")[2] or written)
        return written.decode("utf-8", "backslashreplace")

    def last_lines(self) -> str:
        """The last lines, joined into one."""
        lines = [line.strip() for line in self.text().splitlines() if line.strip()]
        return " / ".join(line[:100] for line in lines[-_LAST_LINES:])

    def _end(self) -> bytes:
        size = os.fstat(self._fd).st_size
        return os.pread(self._fd, KEPT_BYTES, max(0, size - KEPT_BYTES))


class _Child(NamedTuple):
    """The child process, the pipe with its messages, its output, and the file for its stack dump."""

    process: subprocess.Popen[bytes]
    messages: int
    printed: _PrintedOutput
    dump: IO[bytes]

    def running_line(self) -> str | None:
        """The line of user code in the stack dump."""
        line = source_line_in_dump(os.pread(self.dump.fileno(), KEPT_BYTES, 0).decode("utf-8", "replace"))
        return None if line is None else line.text


@contextlib.contextmanager
def _started(request: bytes) -> Iterator[_Child]:
    """The child process, with its job sent. On exit, it is killed with all its descendants."""
    with contextlib.ExitStack() as stack:
        output, dump = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        printed = _PrintedOutput(output)
        (request_in, request_out), (messages_in, messages_out) = _pipe(stack), _pipe(stack)
        fds = (request_in.fileno(), messages_out.fileno(), dump.fileno())
        flags = ("-P", "-u")  # no imports from the working directory; unbuffered output
        command = [sys.executable, *flags, "-c", _PROGRAM, *map(str, fds)]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=fds, start_new_session=True
            )
        except OSError as fault:
            reason = fault.strerror or "unknown error"
            raise MhaError(f"could not start a process to run the code: {reason}") from fault
        try:
            request_in.close()
            messages_out.close()
            with contextlib.suppress(BrokenPipeError):  # the child has ended, which `_result` reports
                _write(request_out.fileno(), request)
            yield _Child(process, messages_in.fileno(), printed, dump)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _pipe(stack: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
    """The reading end and the writing end of a pipe, closed with the stack."""
    reading, writing = os.pipe()
    return stack.enter_context(FileIO(reading, "r")), stack.enter_context(FileIO(writing, "w"))


def _write(fd: int, message: bytes) -> None:
    view = memoryview(message)
    while view:
        view = view[os.write(fd, view) :]


# --------------------------------------------------------------------------------------------------------- the messages


class _MessageParser:
    """Parses the messages of the child: a JSON line each, followed by `n_bytes` of payload. `stage` is the current stage."""

    def __init__(self) -> None:
        self.stage = _LOADING
        self._bytes, self._line = bytearray(), None

    _line: dict[str, Any] | None

    def fed(self, chunk: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The messages that are complete now. Raises `ValueError` for malformed ones."""
        self._bytes += chunk
        while True:
            if self._line is None:
                end = self._bytes.find(b"\n")
                if end < 0:
                    return
                self._line = dict(json.loads(bytes(self._bytes[:end])))
                del self._bytes[: end + 1]
            n_bytes = int(self._line.get("n_bytes", 0))
            if len(self._bytes) < n_bytes:
                return
            line, self._line = self._line, None
            payload = bytes(self._bytes[:n_bytes])
            del self._bytes[:n_bytes]
            yield line, payload


def _result(child: _Child, time_limit_s: float, on_stage: Callable[[str], None]) -> bytes:
    """Waits for the result. Raises `MhaError` if the child ends in any other way."""
    parser, limit_s = _MessageParser(), LOADING_LIMIT_S
    on_stage(parser.stage)
    began = time.monotonic()
    while True:
        exit_status = child.process.poll()  # polled before the pipe is read, so that no last message is missed
        has_data = bool(select.select([child.messages], [], [], 0 if exit_status is not None else _TICK_S)[0])
        chunk = os.read(child.messages, 1 << 20) if has_data else b""
        for line, payload in _parsed(parser, chunk):
            if "n_bytes" in line:
                return payload
            if "error" in line:
                raise _error_of(line)
            if line["stage"] != parser.stage:
                on_stage(line["stage"])
            parser.stage, limit_s = line["stage"], time_limit_s if line["limited"] else float("inf")
            began = time.monotonic()
        child.printed.bound()
        if exit_status is not None and not chunk:
            raise _end(child, parser.stage, exit_status)
        if has_data and not chunk:  # the child closed its end and still runs
            time.sleep(_TICK_S)
        if time.monotonic() - began > limit_s:
            raise _too_slow(child, parser.stage, limit_s)


def _parsed(parser: _MessageParser, chunk: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    try:
        yield from parser.fed(chunk)
    except (ValueError, TypeError, RecursionError) as fault:
        raise MhaError(
            f"{parser.stage} failed: the code wrote into the pipe through which mha reads its results",
            code="crashed",
        ) from fault


def _error_of(line: Mapping[str, Any]) -> MhaError:
    if os.environ.get("MHA_DEBUG") and line.get("traceback"):
        raise RuntimeError(line["traceback"])
    return MhaError(**line["error"])


def _end(child: _Child, stage: str, exit_status: int) -> MhaError:
    """The error for a child that ended without a result."""
    if exit_status < 0:
        cause = f"by {_signal_name(-exit_status)}"
        advice = (
            "the system does this to a process that takes too much memory" if -exit_status == signal.SIGKILL else None
        )
    else:
        cause, advice = f"with exit status {exit_status}", None
    return MhaError(f"{stage} ended the process {cause}", hint=_hints(child, advice), code="crashed")


def _too_slow(child: _Child, stage: str, limit_s: float) -> MhaError:
    """The error for a stage that exceeds its time limit."""
    if stage == _LOADING:
        return MhaError(f"{stage} took longer than {limit_s:g} seconds", hint=_hints(child), code="too-slow")
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.process.pid, signal.SIGUSR1)  # faulthandler dumps the stack
    until = time.monotonic() + _DUMP_S
    while child.running_line() is None and time.monotonic() < until:
        time.sleep(0.01)
    return MhaError(
        f"{stage} took longer than {limit_s:g} seconds",
        hint=_hints(child, "--time-limit SECONDS allows more"),
        code="too-slow",
    )


def _hints(child: _Child, advice: str | None = None) -> str | None:
    lines = child.printed.last_lines()
    return "; ".join(filter(None, [child.running_line(), advice, lines and f"it last printed: {lines}"])) or None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --------------------------------------------------------------------------------------------------- inside the process


class StageReporter:
    """Sends stages and the end of the job to the parent process. `stage` is the current stage."""

    def __init__(self, messages: int) -> None:
        self._messages, self.stage = messages, _LOADING

    def __call__(self, stage: str, *, limited: bool = True) -> None:
        """Sends the next stage; see `mhacli.usercode.process.Stage`."""
        self.stage = stage
        _write(self._messages, json.dumps({"stage": stage, "limited": limited}).encode() + b"\n")

    def result(self, result: bytes) -> None:
        """Sends the result and ends the job."""
        _write(self._messages, json.dumps({"n_bytes": len(result)}).encode() + b"\n" + result)

    def error(self, fault: MhaError, trace: str) -> None:
        """Sends the error and ends the job."""
        fields = {name: getattr(fault, name) for name in ("message", "hint", "code", "exit_code", "path")}
        _write(self._messages, json.dumps({"error": fields, "traceback": trace}).encode() + b"\n")


def guard(request_in: int) -> None:
    """Starts a guard process that kills this process group when the parent dies.

    A thread could not: native code may hold the interpreter for ever. A double fork keeps the guard out of this process's
    children, so that user code that waits for its children does not wait for the guard.
    """
    middle = os.fork()
    if middle == 0:
        if os.fork() == 0:
            while os.read(request_in, 4096):
                pass
            os.killpg(0, signal.SIGKILL)
        os._exit(0)
    os.waitpid(middle, 0)
    os.close(request_in)


def load_job(job: str) -> Job:
    """The job's function. Torch is loaded first, without its warnings."""
    from mhacli.io.libraries import silent_stderr
    from mhacli.io.memory import uncollected

    gc.freeze()
    with silent_stderr(), uncollected():
        import torch
    torch.set_num_threads(min(_N_THREADS, torch.get_num_threads()))
    module, _, name = job.partition(":")
    function: Job = getattr(importlib.import_module(module), name)
    return function


def as_error(fault: BaseException, stage: str) -> MhaError:
    """An exception of a job as an `MhaError`: the user's error if it passed user code, else a bug of mha."""
    if isinstance(fault, MhaError):
        return fault
    if isinstance(fault, MemoryError) or "can't allocate memory" in str(fault) or "out of memory" in str(fault):
        return MhaError(f"out of memory while {stage}", code="out-of-memory")
    if source_line_of(fault) is not None or not isinstance(fault, Exception):
        return user_code_error(f"{stage} failed", fault, None, code="raised")
    return MhaError(
        f"internal error: {type(fault).__name__}: {fault}",
        hint="this is a bug of mha; MHA_DEBUG=1 shows where it happened",
        code="internal",
    )


def run(request: dict[str, Any], report: StageReporter) -> None:
    """Runs the job and sends its result or error."""
    try:
        job = load_job(request["job"])
        sys.dont_write_bytecode = True  # leaves no files beside the user's
        report.result(job(request["request"], report))
    except BaseException as fault:
        report.error(as_error(fault, report.stage), traceback.format_exc())


def main() -> None:
    """Runs the job that the parent sends, then exits without waiting for threads of the user's code."""
    request_in, messages_out, dump = map(int, sys.argv[1:])
    del sys.argv[1:]
    with open(request_in, "rb", closefd=False, buffering=0) as request_file:
        request = json.loads(request_file.readline())
    guard(request_in)
    for fd in (messages_out, dump):
        os.set_inheritable(fd, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # no core dump
    faulthandler.enable(dump, all_threads=False)
    faulthandler.register(signal.SIGUSR1, dump, all_threads=False)
    warnings.simplefilter("ignore")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    run(request, StageReporter(messages_out))
    os._exit(0)


# -------------------------------------------------------------------------------------------------- errors in user code


_MOST_CHARACTERS: Final = 300
_INSTALLED: Final = ("site-packages", "dist-packages")
_LIBRARY: Final = tuple(os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "platstdlib"))
_FRAME: Final = re.compile(r'^ +File "(.*)", line (\d+) in ', re.MULTILINE)
_OURS: Final = os.path.join(str(Path(__file__).parents[1]), "")


class SourceLine(NamedTuple):
    """A line of a file without its indentation; `file` is None if unknown."""

    file: str | None = None
    line: int | None = None
    source: str = ""

    @property
    def text(self) -> str:
        """The location and the line: `my.py:3 says: x = 1 / 0`."""
        return f"{shown_path(self.file or '')}:{self.line}" + (f" says: {self.source}" if self.source else "")


def shown_path(path: str) -> str:
    """The path relative to the working directory, absolute if outside it."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):  # the working directory is deleted, or on another drive
        return path
    return path if relative.startswith(os.pardir) else relative


def is_user_file(file: str) -> bool:
    """Whether a file belongs to the user: not to Python, mha or an installed package."""
    if not file or file.startswith("<"):
        return False
    path = os.path.abspath(file)
    return not path.startswith((*_LIBRARY, _OURS)) and not any(part in _INSTALLED for part in Path(path).parts)


def exception_text(fault: BaseException) -> str:
    """The class and the first line of an exception: `ValueError: 3 is odd`."""
    kind = type(fault).__name__
    try:
        lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    except Exception:  # a user's __str__ may raise
        lines = []
    if isinstance(fault, SyntaxError):
        lines = [fault.msg or ""]
    return f"{kind}: {lines[0][:_MOST_CHARACTERS]}" if lines and lines[0] else kind


def source_line_of(fault: BaseException, file: str | None = None) -> SourceLine | None:
    """The innermost line of user code, or of `file`, in the traceback; None if there is none."""
    if isinstance(fault, SyntaxError) and fault.filename and fault.lineno and os.path.isfile(fault.filename):
        return source_line(fault.filename, fault.lineno)
    try:
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(fault.__traceback__)]
    except Exception:
        return None
    for name, line in reversed(frames):
        if name == file or is_user_file(name):
            return source_line(name, line)
    return None


def source_line(file: str, line: int) -> SourceLine:
    """A line of a file, with its text."""
    return SourceLine(file, line, linecache.getline(file, line).strip()[:_MOST_CHARACTERS])


def source_line_in_dump(dump: str) -> SourceLine | None:
    """The innermost line of user code in a `faulthandler` dump; None if there is none."""
    for name, line in _FRAME.findall(dump):
        file = name.encode().decode("unicode_escape") if "\\" in name else name  # non-ASCII characters are escaped
        if is_user_file(file) and os.path.isfile(file):
            return source_line(file, int(line))
    return None


def shortened(text: str, most: int) -> str:
    """The text, cut to at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


_NO_CUDA: Final = re.compile(
    r"not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device"
    r"|NVIDIA driver on your system|Attempting to deserialize object on a CUDA device but"
)
_TWO_DEVICES: Final = re.compile(r"Expected all tensors to be on the same device.*\bcuda\b", re.S)


def lacks_cuda(text: str) -> bool:
    """Whether an exception says that torch has no CUDA device."""
    return _NO_CUDA.search(text) is not None


def is_on_cuda(text: str) -> bool:
    """Whether an exception says that only some tensors are on a CUDA device."""
    return _TWO_DEVICES.search(text) is not None


def user_code_error(
    subject: str, fault: BaseException, file: str | None, *, code: str, advice: str | None = None
) -> MhaError:
    """The error for an exception in user code. `subject` names the failure, such as `my.py could not be imported`."""
    line = source_line_of(fault, file)
    hints = [line.text] if line else []
    hints += [advice] if advice else []
    return MhaError(
        f"{subject}: {exception_text(fault)}",
        hint="; ".join(hints) or None,
        code=code,
        path=line.file if line else file,
    )
