"""Runs user code in a child process, because the code may print, hang, crash or exit; describes
errors of user code.

Only the end of the printed output is kept. The child is killed with all its descendants when its
job ends or takes too long, and it does not outlive this process. Nothing here loads torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import linecache
import os
import re
import resource
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, Final, NamedTuple

from mhacli.errors import MhaError, silent_stderr
from mhacli.io.memory import gc_paused

KEPT_BYTES: Final = 64 << 10
_LOADING: Final = "loading torch"
_LAST_LINES: Final = 3
_ROOT: Final = str(Path(__file__).parents[2])
_PROGRAM: Final = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); import mhacli; sys.path.remove({_ROOT!r}); "
    f"from {__name__} import main; main()"
)
"""The program of the child. It imports mha from this very folder and then removes the folder from
the user's import path."""
_N_THREADS: Final = 2

Stage = Callable[..., None]
"""`stage(text, limited=True)` reports the stage that begins; its text begins a sentence, such as
`calling Attention`. The time limit applies to each limited stage, which runs user code; unlimited
stages run only code of mha."""


def no_stage(stage: str, *, limited: bool = True) -> None:
    """Ignores the stages."""


def run_in_child(
    job: str,
    request: Mapping[str, Any],
    *,
    time_limit_s: float,
    on_stage: Callable[[str], None] | None = None,
) -> tuple[Any, str]:
    """The document of the job `module:function`, run in a child process with torch loaded, and the
    end of its printed output.

    The job gets the request, which must be JSON-serialisable, and a `Stage`; `on_stage` is called
    when a stage begins. Raises the job's `MhaError`, and an `MhaError` that names the stage if it
    exceeds `time_limit_s` or if the child ends early.
    """
    process = _started({"job": job, "request": request, "time_limit_s": time_limit_s})
    printed = bytearray()
    printing = threading.Thread(target=_keep_end, args=(process, printed), daemon=True)
    printing.start()
    stage, dump, kind = _LOADING, "", ""
    content: Any = None
    with process, BufferedReader(process.stdout) as messages:  # type: ignore[type-var]
        try:
            for line in messages:
                if not line.startswith(b'["'):  # of a stack dump
                    dump += line.decode("utf-8", "replace")
                    continue
                kind, content = json.loads(line)
                if kind != "stage":
                    break
                begun, time_limit_s = content
                if begun != stage and on_stage is not None:
                    on_stage(begun)
                stage = begun
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            printing.join(timeout=1)
    text = "…" * (len(printed) > KEPT_BYTES) + printed[-KEPT_BYTES:].decode(
        "utf-8", "backslashreplace"
    )
    if kind == "result":
        return content, text
    if kind != "error":
        raise _early_end(stage, process.returncode, dump, time_limit_s, text)
    if os.environ.get("MHA_DEBUG"):
        raise RuntimeError(content["traceback"])
    raise MhaError(**content["error"])


def _started(sent: Mapping[str, Any]) -> subprocess.Popen[bytes]:
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
            command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError as fault:
        raise MhaError(f"could not start a process to run the code: {fault.strerror}") from fault
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the child has ended, which its messages show
        process.stdin.write(json.dumps(sent).encode() + b"\n")
    return process


def _keep_end(process: subprocess.Popen[bytes], printed: bytearray) -> None:
    """Reads what a process prints, and keeps the end of it: one byte more than is shown, if there
    was more.
    """
    assert process.stderr is not None
    while chunk := process.stderr.read(KEPT_BYTES):
        printed += chunk
        del printed[: -KEPT_BYTES - 1]


def _early_end(
    stage: str, exit_status: int, dump: str, time_limit_s: float, printed: str
) -> MhaError:
    """The error for a child that ended without a result."""
    message, code, advice = (
        f"{stage} ended the process with exit status {exit_status}",
        "crashed",
        "",
    )
    if dump.startswith("Timeout"):
        message, code = f"{stage} took longer than {time_limit_s:g} seconds", "too-slow"
        advice = "--time-limit SECONDS allows more"
    elif exit_status < 0:
        message = (
            f"{stage} ended the process by {signal.strsignal(-exit_status)} (signal {-exit_status})"
        )
        if exit_status == -signal.SIGKILL:
            advice = "the system does this to a process that takes too much memory"
    line, lines = (
        source_line_in_dump(dump),
        [text.strip()[:100] for text in printed.splitlines() if text.strip()],
    )
    last = f"it last printed: {' / '.join(lines[-_LAST_LINES:])}" if lines else ""
    hints = filter(None, (line and line.text, advice, last))
    return MhaError(message, hint="; ".join(hints) or None, code=code)


# ------------------------------------------------------------------------------- inside the process


_TIMES_A_CALL = 10
"""How much longer than another call one may take, whatever the time limit."""


def main() -> None:
    """Runs the job that the parent sends, then exits without waiting for threads of the user's
    code.
    """
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.register_at_fork(
        after_in_child=messages.close
    )  # the parent reads on until this process ends
    sent = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, args=(os.dup(0),), daemon=True).start()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    )  # no core dump
    faulthandler.enable(messages, all_threads=False)
    warnings.simplefilter("ignore")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    begun, began_s, limit_s = _LOADING, 0.0, sent["time_limit_s"]

    def send(kind: str, content: object) -> None:
        messages.write(json.dumps([kind, content]).encode() + b"\n")
        messages.flush()

    def stage(text: str, *, limited: bool = True) -> None:
        nonlocal begun, began_s, limit_s
        faulthandler.cancel_dump_traceback_later()
        if begun.startswith("calling"):  # a later call may read more texts than the first
            limit_s = max(limit_s, _TIMES_A_CALL * (time.monotonic() - began_s))
        begun, began_s = text, time.monotonic()
        send("stage", [text, limit_s])
        if (
            limited
        ):  # a thread ends this process after the limit, even if native code holds the interpreter
            faulthandler.dump_traceback_later(limit_s, exit=True, file=messages)

    try:
        gc.freeze()
        with silent_stderr(), gc_paused():
            import torch
        torch.set_num_threads(min(_N_THREADS, torch.get_num_threads()))
        module, _, name = sent["job"].partition(":")
        job = getattr(importlib.import_module(module), name)
        sys.dont_write_bytecode = True  # leaves no files beside the user's
        send("result", job(sent["request"], stage))
    except BaseException as fault:
        error = _as_error(fault, begun)
        fields = {
            name: getattr(error, name) for name in ("message", "hint", "code", "exit_code", "path")
        }
        send("error", {"error": fields, "traceback": traceback.format_exc()})
    os._exit(0)


def _end_with_parent(stdin: int) -> None:
    """Kills this process and its descendants when the parent ends."""
    os.read(stdin, 1)
    os.killpg(0, signal.SIGKILL)


def _as_error(fault: BaseException, stage: str) -> MhaError:
    """An exception of a job as an `MhaError`: the user's error if it passed user code, else a bug
    of mha.
    """
    if isinstance(fault, MhaError):
        return fault
    text = exception_text(fault)
    if isinstance(fault, MemoryError) or "can't allocate memory" in text or "out of memory" in text:
        return MhaError(f"out of memory while {stage}", code="out-of-memory")
    if source_line_of(fault) is not None or not isinstance(fault, Exception):
        return user_code_error(f"{stage} failed", fault, None, code="raised")
    hint = "this is a bug of mha; MHA_DEBUG=1 shows where it happened"
    return MhaError(f"internal error: {text}", hint=hint, code="internal")


# ------------------------------------------------------------------------------ errors in user code


_MOST_CHARACTERS: Final = 300
_INSTALLED: Final = ("site-packages", "dist-packages")
_LIBRARY: Final = tuple(
    os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "platstdlib")
)
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
        return f"{shown_path(self.file or '')}:{self.line}" + (
            f" says: {self.source}" if self.source else ""
        )


def shown_path(path: str) -> str:
    """The path relative to the working directory, absolute if outside it."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):  # the working directory is deleted, or on another drive
        return path
    return path if relative.startswith(os.pardir) else relative


def _is_user_file(file: str) -> bool:
    """Whether a file belongs to the user: not to Python, mha or an installed package."""
    if not file or file.startswith("<"):
        return False
    path = os.path.abspath(file)
    return not path.startswith((*_LIBRARY, _OURS)) and not any(
        part in _INSTALLED for part in Path(path).parts
    )


def exception_text(fault: BaseException) -> str:
    """The class and the first line of an exception, as Python prints them: `ValueError: 3 is
    odd`.
    """
    lines = [line for line in traceback.format_exception_only(fault) if not line.startswith(" ")]
    return lines[0].splitlines()[0][:_MOST_CHARACTERS]


def source_line_of(fault: BaseException, file: str | None = None) -> SourceLine | None:
    """The innermost line of user code, or of `file`, in the traceback; None if there is none."""
    if (
        isinstance(fault, SyntaxError)
        and fault.filename
        and fault.lineno
        and os.path.isfile(fault.filename)
    ):
        return source_line(fault.filename, fault.lineno)
    frames = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(fault.__traceback__)
    ]
    return next(
        (
            source_line(*each)
            for each in reversed(frames)
            if each[0] == file or _is_user_file(each[0])
        ),
        None,
    )


def source_line(file: str, line: int) -> SourceLine:
    """A line of a file, with its text."""
    return SourceLine(file, line, linecache.getline(file, line).strip()[:_MOST_CHARACTERS])


def source_line_in_dump(dump: str) -> SourceLine | None:
    """The innermost line of user code in the last thread of a `faulthandler` dump; None if there is
    none.
    """
    for name, line in _FRAME.findall(dump.rpartition("hread 0x")[2]):
        file = (
            name.encode().decode("unicode_escape") if "\\" in name else name
        )  # non-ASCII characters are escaped
        if _is_user_file(file) and os.path.isfile(file):
            return source_line(file, int(line))
    return None


_NO_CUDA: Final = (
    "not compiled with CUDA|NVIDIA driver|No CUDA GPUs|no CUDA-capable device|object on a CUDA"
    " device but"
)


def user_code_error(
    subject: str, fault: BaseException, file: str | None, *, code: str, advice: str | None = None
) -> MhaError:
    """The error for an exception in user code. `subject` names the failure, such as `my.py could
    not be imported`.
    """
    line, text = source_line_of(fault, file), exception_text(fault)
    if re.search(_NO_CUDA, text):
        subject, code = (
            f"{subject}: it needs a CUDA device, which this machine does not have",
            "no-device",
        )
    hints = filter(None, (line and line.text, advice))
    return MhaError(
        f"{subject}: {text}",
        hint="; ".join(hints) or None,
        code=code,
        path=line.file if line else file,
    )
