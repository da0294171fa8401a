"""Runs user code in a child process, because the code may print, hang, crash or exit.

Only the end of the printed output is kept. The child is killed with all its descendants when its
job ends or takes too long, and it does not outlive this process. Nothing here loads torch.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from mhacli.errors import MhaError, lacks_memory, silent_stderr
from mhacli.io.memory import gc_paused

from .door import InternalError, UserRaised
from .faults import (
    exception_text,
    passed_user_code_last,
    source_line_in_dump,
    user_code_error,
)

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
stages run only code of mha. An import, a constructor and the first call, which may import, have
`FIRST_LIMIT_S` at least."""


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
    text = printed[-KEPT_BYTES:].decode("utf-8", "backslashreplace")
    if len(printed) > KEPT_BYTES:
        text = f"…{text}"
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
    message = f"{stage} ended the process with exit status {exit_status}"
    code, advice = "crashed", ""
    if dump.startswith("Timeout"):
        message, code = f"{stage} took longer than {time_limit_s:g} seconds", "too-slow"
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
    hints = filter(None, (line and line.text, advice, last))
    return MhaError(message, hint="; ".join(hints) or None, code=code)


# ------------------------------------------------------------------------------- inside the process


FIRST_LIMIT_S = 60.0
"""Seconds for an import, a constructor, and the first call."""
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
    is_called = False  # since the last import or constructor

    def send(kind: str, content: object) -> None:
        messages.write(json.dumps([kind, content]).encode() + b"\n")
        messages.flush()

    def stage(text: str, *, limited: bool = True) -> None:
        nonlocal begun, began_s, limit_s, is_called
        faulthandler.cancel_dump_traceback_later()
        if begun.startswith("calling"):  # a later call may read more texts than the first
            call_s = time.monotonic() - began_s
            if not is_called:  # which may have imported something
                call_s = min(call_s, sent["time_limit_s"])
            limit_s, is_called = max(limit_s, _TIMES_A_CALL * call_s), True
        if text.startswith(("importing", "building")):
            is_called = False
        begun, began_s = text, time.monotonic()
        allowed_s = limit_s if is_called else max(limit_s, FIRST_LIMIT_S)
        send("stage", [text, allowed_s])
        # a thread ends this process after the limit, even if native code holds the interpreter
        if limited:
            faulthandler.dump_traceback_later(allowed_s, exit=True, file=messages)

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
    is_user = isinstance(caught, UserRaised) or not isinstance(fault, Exception)
    if is_user or (caught is fault and passed_user_code_last(fault)):
        return user_code_error(f"{stage} failed", fault, None, code="raised")
    hint = "this is a bug of mha; MHA_DEBUG=1 shows where it happened"
    return MhaError(f"internal error: {exception_text(fault)}", hint=hint, code="internal")
