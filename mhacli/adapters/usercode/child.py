"""The process in which somebody's code runs; started by its path, by `mhacli.adapters.usercode.process`, which ends it too.

Its arguments are three open files. From the first a line of JSON comes, `{"job": "module:function", "request"}`; it ends when
whoever asked has gone. Into the second it answers, a line of JSON for each stage, and for the result or the error in the end. In
the third it leaves its stack when it crashes, or when a signal asks for it.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import resource
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mhacli.adapters.usercode.process import Job
    from mhacli.errors import MhaError

N_THREADS = 2


class Teller:
    """Tells its stages, and its end, to whoever asked. `what` is the stage that it is at."""

    def __init__(self, answers: int) -> None:
        self._answers, self.what = answers, "loading torch"

    def __call__(self, what: str, *, limited: bool = True) -> None:
        """The next stage, as `mhacli.adapters.usercode.process.Stage` says."""
        self.what = what
        self._write(json.dumps({"stage": what, "limited": limited}).encode() + b"\n")

    def result(self, result: bytes) -> None:
        """The end, with what was asked for."""
        self._write(json.dumps({"n_bytes": len(result)}).encode() + b"\n" + result)

    def error(self, fault: MhaError, trace: str) -> None:
        """The end, with why there is no result."""
        fields = {name: getattr(fault, name) for name in ("message", "hint", "code", "exit_code", "path")}
        self._write(json.dumps({"error": fields, "traceback": trace}).encode() + b"\n")

    def _write(self, message: bytes) -> None:
        view = memoryview(message)
        while view:
            view = view[os.write(self._answers, view) :]


def guard(asked: int) -> None:
    """Leaves a process that ends this one, and all that it starts, when whoever asked has gone, however that went.

    A thread could not: native code of theirs may hold the interpreter for ever. It is nobody's child, so that no code of theirs
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


def find_ours() -> None:
    """Makes this package, and no other of its name, the one that imports find; its folder does not stay where they look."""
    root = str(Path(__file__).parents[3])
    sys.path.insert(0, root)
    importlib.import_module("mhacli")
    sys.path.remove(root)


def load_job(job: str) -> Job:
    """The job, after torch, whose own complaints are nobody's."""
    from mhacli.io.memory import keep_what_is_loaded, uncollected
    from mhacli.text.tokenizers.file import silent_stderr

    keep_what_is_loaded()
    with silent_stderr(), uncollected():
        import torch
    torch.set_num_threads(min(N_THREADS, torch.get_num_threads()))
    module, _, name = job.partition(":")
    found: Job = getattr(importlib.import_module(module), name)
    return found


def as_error(fault: BaseException, what: str) -> MhaError:
    """Whatever a job raises as an error that the user can read: theirs where it passed their code, else a bug of ours."""
    from mhacli.adapters.usercode.errors import place_of, their_error
    from mhacli.errors import MhaError

    if isinstance(fault, MhaError):
        return fault
    if isinstance(fault, MemoryError) or "can't allocate memory" in str(fault) or "out of memory" in str(fault):
        return MhaError(f"memory must suffice for {what}, got none left", code="out-of-memory")
    if place_of(fault) is not None or not isinstance(fault, Exception):
        return their_error(f"{what} must not raise", fault, None, code="raised")
    return MhaError(
        f"internal error: {type(fault).__name__}: {fault}",
        hint="this is a bug of mha; MHA_DEBUG=1 shows where it happened",
        code="internal",
    )


def run(asked: dict[str, Any], teller: Teller) -> None:
    """Runs the job and tells its result, or its error."""
    try:
        job = load_job(asked["job"])
        sys.dont_write_bytecode = True  # nothing is left beside their files
        teller.result(job(asked["request"], teller))
    except BaseException as fault:
        teller.error(as_error(fault, teller.what), traceback.format_exc())


def main() -> None:
    """Does what it is asked, and ends without waiting for what their code may have left running."""
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
    find_ours()
    run(asked, Teller(answers))
    os._exit(0)


if __name__ == "__main__":
    main()
