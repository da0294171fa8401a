"""The installed `mha` as a real process, and what must hold of every such process whatever it is given."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

from support import forks

MHA = str(Path(sys.executable).with_name("mha"))
PATIENCE_S = 120
"""How long a process may take to end, by far: a busy machine must not fail a test, a process that hangs must."""
MEMORY_LIMIT_BYTES = 1_500_000_000
MODULES = "modules"
NO_TORCH = {"torch": "import os\nos._exit(99)\n"}
"""A torch that ends the process with a code that no row allows: the proof that an answer did not need the real one."""
WITH_TORCH: Mapping[str, str] = {}
SHELL = 'exec "$@"'
WITHOUT_ROOT_RIGHTS = 'exec setpriv --bounding-set=-dac_override,-dac_read_search "$@"'
"""For root, whom no permission stops."""

forms = pytest.mark.parametrize("form", [(), ("--json",)], ids=["plain", "json"])
bufferings = pytest.mark.parametrize("buffering", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])


@dataclass(frozen=True)
class Outcome:
    """How a process ended. `form` holds the `--json` that it was given, if any."""

    code: int
    stdout: str
    stderr: str
    peak_bytes: int
    form: Sequence[str]

    @property
    def error(self) -> dict[str, Any]:
        """The error line of `--json`."""
        return dict(json.loads(self.stderr.splitlines()[-1])["error"])

    @property
    def told(self) -> str:
        """Message and hint, however they were written."""
        if not self.form:
            return self.stderr
        return f"{self.error['message']}\n{self.error['hint']}"

    @property
    def tokens(self) -> list[str]:
        """The tokens in the document of `vocab --json`, in its order."""
        return [entry["token"] for entry in json.loads(self.stdout)["tokens"]]


@dataclass(frozen=True)
class Launch:
    """What a process finds around it, beyond its words.

    `modules` are Python files that it imports before any other of the name; `shell` is the script that replaces itself
    by the process, after a redirection or a limit; `terminal` gives columns and rows of a terminal to be stdout. Where a fork of
    a server would do (see `forks`), `is_cold` asks for a process with imports of its own.
    """

    modules: Mapping[str, str] = field(default_factory=lambda: NO_TORCH)
    env: Mapping[str, str | None] = field(default_factory=dict)
    shell: str = SHELL
    stdin: Any = subprocess.DEVNULL
    stdout: Any = None
    terminal: tuple[int, int] | None = None
    is_cold: bool = False


_READ_LATE = {"COLUMNS", "LINES", "OMP_NUM_THREADS", "HOME", "TMPDIR"}
"""The variables that no library reads when it is loaded. The number of threads is that of the server."""


def start(
    folder: Path, words: Sequence[str | bytes], launch: Launch = Launch(), **streams: Any
) -> subprocess.Popen[bytes]:
    """The process, started in `folder`, which is its home and its place for temporary files too."""
    return subprocess.Popen(
        ["sh", "-c", launch.shell, "sh", MHA, *words],
        cwd=folder,
        env=_surroundings(folder, launch),
        **{"stdin": launch.stdin, **streams},
    )


def _surroundings(folder: Path, launch: Launch) -> dict[str, str]:
    """The environment of a process, whose modules are written."""
    modules = folder / MODULES
    modules.mkdir(exist_ok=True)
    for stale in {path.stem for path in modules.glob("*.py")} - launch.modules.keys():
        (modules / f"{stale}.py").unlink()
    for name, code in launch.modules.items():
        (modules / f"{name}.py").write_text(code)
    surroundings = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": str(modules),
        "OMP_NUM_THREADS": "1",
        **launch.env,
    }
    return {name: value for name, value in surroundings.items() if value is not None}


def _server(launch: Launch) -> forks.Server | None:
    """The server whose forks are what a process with this launch would be; None where it must be one of its own."""
    has_streams = launch.stdout is not None or launch.stdin != subprocess.DEVNULL
    if launch.is_cold or forks.IS_COLD or has_streams or launch.shell != SHELL or not launch.env.keys() <= _READ_LATE:
        return None
    if launch.env.get("OMP_NUM_THREADS", "1") != "1":
        return None
    if launch.modules == WITH_TORCH:
        return forks.WITH_TORCH
    return forks.BARE if launch.modules == NO_TORCH else None


def attempt(
    folder: Path,
    *words: str | bytes,
    code: int | Collection[int] = 0,
    form: Sequence[str] = (),
    says: Sequence[str] = (),
    writes: Collection[str] = (),
    colour: bool = False,
    launch: Launch = Launch(),
) -> Outcome:
    """Runs `mha`, and asserts everything that holds for every row, and that the error says what it must.

    `form` follows the command's name. `writes` are the only paths below `folder` that may differ afterwards.
    """
    before = state_of(folder)
    outcome = _run(folder, [words[0], *form, *words[1:]], form, launch)
    require_invariants(outcome, {code} if isinstance(code, int) else code, colour=colour)
    for piece in says:
        assert piece in outcome.told
    after = state_of(folder)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed <= set(writes)
    return outcome


def _run(folder: Path, words: Sequence[str | bytes], form: Sequence[str], launch: Launch) -> Outcome:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        screen = None if launch.terminal is None else _open_terminal(*launch.terminal)
        stdout = screen[1] if screen else launch.stdout or out
        pid, wait = _begun(folder, words, launch, stdout, err)
        watchdog = threading.Timer(PATIENCE_S, os.kill, (pid, signal.SIGKILL))
        watchdog.start()
        shown = _read_terminal(*screen) if screen else b""
        ended = wait()
        watchdog.cancel()
        out.seek(0)
        err.seek(0)
        stdout_text, stderr_text = (shown or out.read()).decode(), err.read().decode()
    return Outcome(shell_code(ended.code), stdout_text, stderr_text, ended.peak_bytes, form)


def _begun(
    folder: Path, words: Sequence[str | bytes], launch: Launch, stdout: Any, stderr: IO[bytes]
) -> tuple[int, Callable[[], forks.Ended]]:
    """The id of the process, and how to wait for it."""
    if server := _server(launch):
        fds = [
            nothing := os.open(os.devnull, os.O_RDONLY),
            stdout if isinstance(stdout, int) else stdout.fileno(),
            stderr.fileno(),
        ]
        call = forks.Call(server.address, words, str(folder), _surroundings(folder, launch), fds)
        os.close(nothing)
        return call.pid, call.wait
    process = start(folder, words, launch, stdout=stdout, stderr=stderr)

    def wait() -> forks.Ended:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return forks.Ended(process.returncode, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime)

    return process.pid, wait


def _open_terminal(columns: int, rows: int) -> tuple[int, int]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return ours, theirs


def _read_terminal(ours: int, theirs: int) -> bytes:
    """All that was written to the terminal until its last user closed it."""
    os.close(theirs)
    pieces = []
    with contextlib.suppress(OSError):  # the way in which Linux says that nobody is left at the other end
        while piece := os.read(ours, 65536):
            pieces.append(piece)
    os.close(ours)
    return b"".join(pieces).replace(b"\r\n", b"\n")


def shell_code(returncode: int) -> int:
    """The exit code as a shell reports it: 128 and the signal for a process that a signal ended."""
    return returncode if returncode >= 0 else 128 - returncode


def require_invariants(outcome: Outcome, codes: Collection[int], *, colour: bool = False) -> None:
    """What holds for every process: how it may end, what it may write, how large it may grow."""
    assert outcome.code in codes, outcome
    own_peak = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )  # a process counts what began it as its own until exec
    assert outcome.peak_bytes < max(MEMORY_LIMIT_BYTES, own_peak + 1)
    for text in (outcome.stdout, outcome.stderr):
        assert not re.search(r"Traceback|panicked at", text), text
        assert not obeyed_or_hidden(text, colour=colour), ascii(text)
    if outcome.form and outcome.stdout:
        json.loads(outcome.stdout)
    is_verdict = outcome.code == 3 and not outcome.stderr  # of check, diff, doctor or bench, which stdout has
    if outcome.code in (1, 2, 3) and not is_verdict:
        _require_error(outcome)
    else:
        assert "error" not in outcome.stderr
    assert outcome.stdout or not is_verdict


def _require_error(outcome: Outcome) -> None:
    lines = outcome.stderr.splitlines()
    if outcome.form:
        assert len(lines) == 1, outcome.stderr
        assert outcome.error.keys() == {"code", "message", "hint", "path", "exit"}
        assert outcome.error["exit"] == outcome.code
        assert outcome.error["message"]
        return
    kinds = [re.match(r"mha: error: (?=.)|hint: (?=.)|mha: (?=.)", line) for line in lines]
    assert all(kinds), outcome.stderr
    begins = [kind[0] for kind in kinds if kind and kind[0] != "mha: "]
    assert begins[0] == "mha: error: ", outcome.stderr
    assert set(begins[1:]) <= {"hint: "}, outcome.stderr


def obeyed_or_hidden(text: str, *, colour: bool = False) -> set[str]:
    """The characters that a terminal would obey or not show: controls, C1, bidi, zero-width, line separators."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text) if colour else text
    return {c for c in plain if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")}


def state_of(folder: Path) -> dict[str, tuple[object, ...]]:
    """Every path below a folder with what must not change: kind and mode, link target, content."""
    found = {}
    for place, folders, files in os.walk(folder):
        if MODULES in folders:
            folders.remove(MODULES)
        for name in folders + files:
            path = Path(place, name)
            found[str(path.relative_to(folder))] = fingerprint(path)
    return found


def fingerprint(path: Path) -> tuple[object, ...]:
    """Kind, mode, and the target of a link or the identity and content of a small file."""
    status = path.lstat()
    if path.is_symlink():
        return status.st_mode, os.readlink(path)
    if not path.is_file():
        return status.st_mode, status.st_rdev
    content = path.read_bytes() if status.st_size < 1 << 20 and os.access(path, os.R_OK) else b""
    return status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns, content


def is_root() -> bool:
    """Whether permissions stop nobody here."""
    return os.geteuid() == 0


def limited_memory(n_bytes: int) -> str:
    """A shell script that lets the process have this much address space."""
    return f"ulimit -v {n_bytes // 1024}; {SHELL}"
