"""Runs user code in a child process, because it may print, hang, crash, or end its process; and says what went wrong in it.

What it prints is kept, no more than its end; what lasts too long is ended, with every process that it started. It never outlives
this process, however that ends. Nothing here loads torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
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
"""For loading Python and torch, which took up to half of it from a cold disk."""
KEPT_BYTES: Final = 64 << 10
_MOST_ON_DISK: Final = 1 << 20
_LOADING: Final = "loading torch"
_TICK_S: Final = 0.05
_DUMP_S: Final = 0.3
_LAST_LINES: Final = 3
_ROOT: Final = str(Path(__file__).parents[3])
_PROGRAM: Final = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); import mhacli; sys.path.remove({_ROOT!r}); "
    f"from {__name__} import main; main()"
)
"""What the process runs: this package, and no other of its name, is the one that imports find; its folder does not stay where the
user's imports look."""
_N_THREADS: Final = 2


class ChildResult(NamedTuple):
    """What a job gave, and the end of what the code printed meanwhile, to stdout and stderr alike."""

    result: bytes
    printed: str


class Stage(Protocol):
    """Reports the stage that begins now."""

    def __call__(self, what: str, *, limited: bool = True) -> None:
        """`what` begins a sentence, such as `calling Attention`. Limited is what runs code of theirs: it is ended when it takes
        longer than the time limit, which begins anew with each word. What is ours takes its time."""


Job = Callable[[dict[str, Any], Stage], bytes]
"""What runs in the process: takes the request, and a way to tell its stages. An `MhaError` that it raises is raised here."""


def run_in_child(
    job: str, request: Mapping[str, Any], *, time_limit_s: float, on_stage: Callable[[str], None] | None = None
) -> ChildResult:
    """What the job `module:function` gives for the request, run in a process of its own with torch loaded.

    `request` is what JSON can hold; `on_stage` hears of each stage when it begins. Raises the `MhaError` that the job raises, and
    one that says what was going on for a stage that takes longer than `time_limit_s`, and for a process that ends by itself.
    """
    with _started(json.dumps({"job": job, "request": request}).encode() + b"\n") as child:
        return ChildResult(_result(child, time_limit_s, on_stage or _hears_nothing), child.printed.text())


def _hears_nothing(what: str) -> None:
    """Ignores the stages."""


# ---------------------------------------------------------------------------------------------------------- the process


class _Printed:
    """What a process prints: an unnamed file, of which only the end is kept when it grows."""

    def __init__(self, file: IO[bytes]) -> None:
        self._fd, self._kept, self._is_cut = file.fileno(), b"", False
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_APPEND)  # so that the file can be emptied under its writer

    def bound(self) -> None:
        """Empties the file where it has grown too large."""
        if os.fstat(self._fd).st_size > _MOST_ON_DISK:
            self._kept, self._is_cut = self._end(), True
            os.ftruncate(self._fd, 0)

    def text(self) -> str:
        """The end of it, in whole lines where there are any; an ellipsis stands for what is left out."""
        read = self._kept + self._end()
        written = read[-KEPT_BYTES:]
        if self._is_cut or len(written) < max(len(read), os.fstat(self._fd).st_size):
            written = b"\xe2\x80\xa6\n" + (written.partition(b"\n")[2] or written)
        return written.decode("utf-8", "backslashreplace")

    def last_lines(self) -> str:
        """Its last lines in one."""
        lines = [line.strip() for line in self.text().splitlines() if line.strip()]
        return " / ".join(line[:100] for line in lines[-_LAST_LINES:])

    def _end(self) -> bytes:
        size = os.fstat(self._fd).st_size
        return os.pread(self._fd, KEPT_BYTES, max(0, size - KEPT_BYTES))


class _Child(NamedTuple):
    """The process: `answers` is where it tells its stages and its result, `dump` the file where it leaves its stack."""

    process: subprocess.Popen[bytes]
    answers: int
    printed: _Printed
    dump: IO[bytes]

    def place(self) -> str | None:
        """The line of the user's code that was running when it wrote its stack."""
        place = source_line_in_dump(os.pread(self.dump.fileno(), KEPT_BYTES, 0).decode("utf-8", "replace"))
        return None if place is None else place.text


@contextlib.contextmanager
def _started(asked: bytes) -> Iterator[_Child]:
    """The process, with its job sent. It is ended afterwards, with all that it started."""
    with contextlib.ExitStack() as stack:
        output, dump = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        printed = _Printed(output)
        (hears, asks), (answers, tells) = _pipe(stack), _pipe(stack)
        fds = (hears.fileno(), tells.fileno(), dump.fileno())
        flags = ("-P", "-u")  # no module of the working directory is ours; what is printed is in the file at once
        words = [sys.executable, *flags, "-c", _PROGRAM, *map(str, fds)]
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=fds, start_new_session=True
            )
        except OSError as fault:
            reason = fault.strerror or "unknown error"
            raise MhaError(f"could not start a process to run the code: {reason}") from fault
        try:
            hears.close()
            tells.close()
            with contextlib.suppress(BrokenPipeError):  # it has ended already, which is reported later
                _write(asks.fileno(), asked)
            yield _Child(process, answers.fileno(), printed, dump)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _pipe(stack: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
    """Both ends of a pipe, closed in the end: the one to read from, the one to write to."""
    reading, writing = os.pipe()
    return stack.enter_context(FileIO(reading, "r")), stack.enter_context(FileIO(writing, "w"))


def _write(fd: int, message: bytes) -> None:
    view = memoryview(message)
    while view:
        view = view[os.write(fd, view) :]


# ---------------------------------------------------------------------------------------------------------- the answers


class _MessageParser:
    """The answers of a process, parsed as they come: a line of JSON each, and behind it as many bytes as it says.

    `what` is the stage that the process is at."""

    def __init__(self) -> None:
        self.what = _LOADING
        self._bytes, self._line = bytearray(), None

    _line: dict[str, Any] | None

    def fed(self, chunk: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The answers that are complete now. Raises `ValueError` for anything else."""
        self._bytes += chunk
        while True:
            if self._line is None:
                end = self._bytes.find(b"\n")
                if end < 0:
                    return
                self._line = dict(json.loads(bytes(self._bytes[:end])))
                del self._bytes[: end + 1]
            n = int(self._line.get("n_bytes", 0))
            if len(self._bytes) < n:
                return
            line, self._line = self._line, None
            payload = bytes(self._bytes[:n])
            del self._bytes[:n]
            yield line, payload


def _result(child: _Child, time_limit_s: float, on_stage: Callable[[str], None]) -> bytes:
    """Waits for the result. Raises `MhaError` where the process ends in any other way."""
    answers, limit_s = _MessageParser(), LOADING_LIMIT_S
    on_stage(answers.what)
    began = time.monotonic()
    while True:
        ended = child.process.poll()  # before the last answers are read, which may have come until then
        is_ready = bool(select.select([child.answers], [], [], 0 if ended is not None else _TICK_S)[0])
        chunk = os.read(child.answers, 1 << 20) if is_ready else b""
        for line, payload in _understood(answers, chunk):
            if "n_bytes" in line:
                return payload
            if "error" in line:
                raise _passed_on(line)
            if line["stage"] != answers.what:
                on_stage(line["stage"])
            answers.what, limit_s = line["stage"], time_limit_s if line["limited"] else float("inf")
            began = time.monotonic()
        child.printed.bound()
        if ended is not None and not chunk:
            raise _end(child, answers.what, ended)
        if is_ready and not chunk:  # it has closed its end, and goes on
            time.sleep(_TICK_S)
        if time.monotonic() - began > limit_s:
            raise _too_slow(child, answers.what, limit_s)


def _understood(answers: _MessageParser, chunk: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    try:
        yield from answers.fed(chunk)
    except (ValueError, TypeError, RecursionError) as fault:
        raise MhaError(
            f"{answers.what} failed: the code wrote into the pipe through which mha reads its results",
            code="crashed",
        ) from fault


def _passed_on(line: Mapping[str, Any]) -> MhaError:
    if os.environ.get("MHA_DEBUG") and line.get("traceback"):
        raise RuntimeError(line["traceback"])
    return MhaError(**line["error"])


def _end(child: _Child, what: str, ended: int) -> MhaError:
    """The error for a process that ended before it gave a result."""
    if ended < 0:
        how = f"by {_signal_name(-ended)}"
        advice = "the system does this to a process that takes too much memory" if -ended == signal.SIGKILL else None
    else:
        how, advice = f"with exit status {ended}", None
    return MhaError(f"{what} ended the process {how}", hint=_hints(child, advice), code="crashed")


def _too_slow(child: _Child, what: str, limit_s: float) -> MhaError:
    """The error for a stage that lasts too long."""
    if what == _LOADING:
        return MhaError(f"{what} took longer than {limit_s:g} seconds", hint=_hints(child), code="too-slow")
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.process.pid, signal.SIGUSR1)  # it writes its stack
    until = time.monotonic() + _DUMP_S
    while child.place() is None and time.monotonic() < until:
        time.sleep(0.01)
    return MhaError(
        f"{what} took longer than {limit_s:g} seconds",
        hint=_hints(child, "--time-limit SECONDS allows more"),
        code="too-slow",
    )


def _hints(child: _Child, advice: str | None = None) -> str | None:
    """The line that was running, what to do, and the last printed lines."""
    lines = child.printed.last_lines()
    return "; ".join(filter(None, [child.place(), advice, lines and f"it last printed: {lines}"])) or None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --------------------------------------------------------------------------------------------------- inside the process


class StageReporter:
    """Reports stages and the end of the job to the parent process. `what` is the current stage."""

    def __init__(self, answers: int) -> None:
        self._answers, self.what = answers, _LOADING

    def __call__(self, what: str, *, limited: bool = True) -> None:
        """The next stage, as `mhacli.adapters.usercode.process.Stage` says."""
        self.what = what
        _write(self._answers, json.dumps({"stage": what, "limited": limited}).encode() + b"\n")

    def result(self, result: bytes) -> None:
        """Reports the end, with the result."""
        _write(self._answers, json.dumps({"n_bytes": len(result)}).encode() + b"\n" + result)

    def error(self, fault: MhaError, trace: str) -> None:
        """Reports the end, with the error."""
        fields = {name: getattr(fault, name) for name in ("message", "hint", "code", "exit_code", "path")}
        _write(self._answers, json.dumps({"error": fields, "traceback": trace}).encode() + b"\n")


def guard(asked: int) -> None:
    """Starts a process that ends this one, and all that it starts, when the parent process is gone for whatever reason.

    A thread could not: native code of theirs may hold the interpreter for ever. It is no child of ours, so that no code of theirs
    that waits for its own children waits for it.
    """
    between = os.fork()
    if between == 0:
        if os.fork() == 0:
            while os.read(asked, 4096):
                pass
            os.killpg(0, signal.SIGKILL)
        os._exit(0)
    os.waitpid(between, 0)
    os.close(asked)


def load_job(job: str) -> Job:
    """The job, after torch is loaded without its warnings."""
    from mhacli.io.memory import keep_what_is_loaded, uncollected
    from mhacli.text.tokenizers import silent_stderr

    keep_what_is_loaded()
    with silent_stderr(), uncollected():
        import torch
    torch.set_num_threads(min(_N_THREADS, torch.get_num_threads()))
    module, _, name = job.partition(":")
    found: Job = getattr(importlib.import_module(module), name)
    return found


def as_error(fault: BaseException, what: str) -> MhaError:
    """What a job raised as a readable error: the user's where it passed their code, else a bug of mha."""
    if isinstance(fault, MhaError):
        return fault
    if isinstance(fault, MemoryError) or "can't allocate memory" in str(fault) or "out of memory" in str(fault):
        return MhaError(f"out of memory while {what}", code="out-of-memory")
    if source_line_of(fault) is not None or not isinstance(fault, Exception):
        return user_code_error(f"{what} failed", fault, None, code="raised")
    return MhaError(
        f"internal error: {type(fault).__name__}: {fault}",
        hint="this is a bug of mha; MHA_DEBUG=1 shows where it happened",
        code="internal",
    )


def run(asked: dict[str, Any], teller: StageReporter) -> None:
    """Runs the job and reports its result, or its error."""
    try:
        job = load_job(asked["job"])
        sys.dont_write_bytecode = True  # nothing is left beside their files
        teller.result(job(asked["request"], teller))
    except BaseException as fault:
        teller.error(as_error(fault, teller.what), traceback.format_exc())


def main() -> None:
    """Runs the job that the parent process sends, and ends without waiting for threads of the user's code."""
    hears, answers, dump = map(int, sys.argv[1:])
    del sys.argv[1:]
    with open(hears, "rb", closefd=False, buffering=0) as asking:
        asked = json.loads(asking.readline())
    guard(hears)
    for fd in (answers, dump):
        os.set_inheritable(fd, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # no file for a crash
    faulthandler.enable(dump, all_threads=False)
    faulthandler.register(signal.SIGUSR1, dump, all_threads=False)
    warnings.simplefilter("ignore")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    run(asked, StageReporter(answers))
    os._exit(0)


# -------------------------------------------------------------------------------------------------- errors in user code


_MOST_CHARACTERS: Final = 300
_INSTALLED: Final = ("site-packages", "dist-packages")
_LIBRARY: Final = tuple(os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "platstdlib"))
_FRAME: Final = re.compile(r'^ +File "(.*)", line (\d+) in ', re.MULTILINE)
_OURS: Final = os.path.join(str(Path(__file__).parents[2]), "")


class SourceLine(NamedTuple):
    """A line of a file, and what it says, without its indentation; without a file where it is not known."""

    file: str | None = None
    line: int | None = None
    source: str = ""

    @property
    def text(self) -> str:
        """Where and what: `my.py:3 says: x = 1 / 0`."""
        return f"{shown_path(self.file or '')}:{self.line}" + (f" says: {self.source}" if self.source else "")


def shown_path(path: str) -> str:
    """A path as a reader of the working directory would write it, absolute where it leads out of it."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):  # the working directory is gone, or lies on another drive
        return path
    return path if relative.startswith(os.pardir) else relative


def is_user_file(file: str) -> bool:
    """Whether a file is the user's own: not Python's, not ours, and not installed."""
    if not file or file.startswith("<"):
        return False
    path = os.path.abspath(file)
    return not path.startswith((*_LIBRARY, _OURS)) and not any(part in _INSTALLED for part in Path(path).parts)


def exception_text(fault: BaseException) -> str:
    """The exception as its kind and the first line of what it says: `ValueError: 3 is odd`."""
    kind = type(fault).__name__
    try:
        lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    except Exception:  # an exception of theirs that cannot say what it is
        lines = []
    if isinstance(fault, SyntaxError):
        lines = [fault.msg or ""]
    return f"{kind}: {lines[0][:_MOST_CHARACTERS]}" if lines and lines[0] else kind


def source_line_of(fault: BaseException, file: str | None = None) -> SourceLine | None:
    """The innermost line of the user's own code, or of `file`, that an exception passed; None where it passed none."""
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
    """A line of a file with what it says."""
    return SourceLine(file, line, linecache.getline(file, line).strip()[:_MOST_CHARACTERS])


def source_line_in_dump(dump: str) -> SourceLine | None:
    """The innermost line of the user's own code in what `faulthandler` writes; None where it names none."""
    for name, line in _FRAME.findall(dump):
        file = name.encode().decode("unicode_escape") if "\\" in name else name  # how it writes what is not ASCII
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
    """Whether an exception says that CUDA was asked for where torch has no device for it."""
    return _NO_CUDA.search(text) is not None


def is_on_cuda(text: str) -> bool:
    """Whether an exception says that some tensors are on a CUDA device, and others are not."""
    return _TWO_DEVICES.search(text) is not None


def user_code_error(
    subject: str, fault: BaseException, file: str | None, *, code: str, advice: str | None = None
) -> MhaError:
    """The error that says what user code raised: `subject` is what went wrong, such as `my.py could not be imported`."""
    place = source_line_of(fault, file)
    hints = [place.text] if place else []
    hints += [advice] if advice else []
    return MhaError(
        f"{subject}: {exception_text(fault)}",
        hint="; ".join(hints) or None,
        code=code,
        path=place.file if place else file,
    )
