"""`mha` as a user meets it: words and files in; an exit code, two streams and files out.

`run` calls the command line in the test process, which has the descriptors, environment and working
folder of the run meanwhile: the imports are paid for once, and no memory is copied. What needs a
process of its own, a terminal or colours (rich keeps the codes of a style), is run by the entry
point in a fork. A Python program that is started for code of the user is a fork too. With
`cold=True` the installed script is started instead, for what depends on imports: start-up, signals
while modules load, memory, another Python path. Every run must keep the invariants of `_require`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import importlib
import inspect
import io
import json
import multiprocessing.process
import os
import pkgutil
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest

MHA = str(Path(sys.executable).with_name("mha"))
PATIENCE_S = 120
"""Seconds after which a run is killed. It is far more than any takes: a busy machine must not fail
a test."""
PLAIN_SHELL = 'exec "$@"'
WITHOUT_ROOT_RIGHTS = 'exec setpriv --bounding-set=-dac_override,-dac_read_search "$@"'
"""A shell script for root, whom no permission stops."""
NO_TORCH = {"torch": "import os\nos._exit(99)\n"}
"""Modules with which a cold process ends with 99, which no test expects, if it imports torch."""
BELONGS_TO_TEST = "modules"
"""The folder of the Python modules that a cold run finds first. It is not compared."""


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    words: tuple[str, ...]
    code: int
    stdout: str
    stderr: str

    @functools.cached_property
    def json(self) -> Any:
        """The document on stdout."""
        return json.loads(self.stdout)

    @functools.cached_property
    def error(self) -> dict[str, Any]:
        """The error, from its JSON line or from its text: `message`, `hint`, and with `--json`
        `code`, `path` and `exit`.
        """
        if self.stderr.startswith("{"):
            return dict(json.loads(self.stderr.splitlines()[-1])["error"])
        message, _, hint = re.sub(r"\n(?!hint: |mha: )", " ", self.stderr.strip()).partition(
            "\nhint: "
        )
        return {
            "message": message.rpartition("mha: error: ")[2],
            "hint": hint.replace("\nhint: ", "\n") or None,
        }

    @property
    def said(self) -> str:
        """The message and the hint of the error."""
        return f"{self.error['message']}\n{self.error['hint'] or ''}"

    def missing(self, *pieces: str) -> list[str]:
        """The pieces that the error lacks."""
        return [piece for piece in pieces if piece not in self.said]


def run(
    folder: Path,
    *words: str | bytes | Path,
    code: int | Collection[int] = 0,
    stdin: bytes | str | int | None = None,
    stdout: int | None = None,
    env: Mapping[str, str | None] | None = None,
    terminal: tuple[int, int] | None = None,
    colour: bool = False,
    writes: Collection[str] = (),
    cold: bool = False,
    shell: str = PLAIN_SHELL,
    modules: Mapping[str, str] | None = None,
) -> Ended:
    """Runs `mha WORDS` in `folder`, which is its home and its place for temporary files too, and
    asserts how it ends.

    `code` is the exit code, or those that may be. `stdin` is its content, or a descriptor; without
    it stdin is empty. `stdout` is a descriptor to write to. `terminal` gives columns and rows of a
    terminal that is stdout and stderr; what is written to it is `stdout`. `env` sets variables, or
    removes those that are None. `colour` allows codes of colours. Files that no word names may not
    change; `writes` adds to them.

    For cold processes: `shell` is a script that ends in `"$@"`, and `modules` are Python files that
    are found before others.
    """
    texts = tuple(os.fsdecode(word) for word in words)
    before = _state(folder)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, _input(stdin) as source:
        screen = None if terminal is None else _open_terminal(*terminal)
        fds = (
            (source, stdout or out.fileno(), err.fileno())
            if screen is None
            else (source, screen[1], screen[1])
        )
        surroundings = _environment(folder, env or {}, modules or {})
        is_cold = cold or shell != PLAIN_SHELL or bool(modules)
        shown = None
        if not (is_cold or screen or colour):
            result = _call(folder, texts, fds, surroundings)
        else:
            pid = (_start if is_cold else _fork)(folder, texts, fds, surroundings, shell)
            watchdog = threading.Timer(PATIENCE_S, _kill, [pid])
            watchdog.start()
            shown = None if screen is None else _read_terminal(*screen)
            _, status = os.waitpid(pid, 0)
            watchdog.cancel()
            result = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        shown = out.read() if shown is None else shown
        ended = Ended(
            texts, result if result >= 0 else 128 - result, shown.decode(), err.read().decode()
        )
    _require(ended, {code} if isinstance(code, int) else set(code), colour=colour)
    _require_unchanged(before, _state(folder), [*texts, *writes])
    return ended


def run_together(folder: Path, *commands: str) -> list[Ended]:
    """Runs `mha COMMAND` for each command in `folder`, all at the same time: for commands that
    mostly wait. It asserts what holds for every run; exit codes are left to the caller.
    """
    before, surroundings = _state(folder), environment(folder)
    ended = []
    with contextlib.ExitStack() as stack:
        files = [
            [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)] for _ in commands
        ]
        pids = [
            _fork(
                folder,
                tuple(command.split()),
                tuple(file.fileno() for file in streams),
                surroundings,
                PLAIN_SHELL,
            )
            for command, streams in zip(commands, files, strict=True)
        ]
        watchdog = threading.Timer(PATIENCE_S, lambda: [*map(_kill, pids)])
        watchdog.start()
        for command, pid, (_, out, err) in zip(commands, pids, files, strict=True):
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            out.seek(0)
            err.seek(0)
            shown, said = out.read().decode(), err.read().decode()
            ended.append(Ended(tuple(command.split()), code, shown, said))
        watchdog.cancel()
    for one in ended:
        _require(one, {one.code}, colour=False)
    _require_unchanged(before, _state(folder), commands)
    return ended


# -------------------------------------------------------------------------------- what always holds


def _require(ended: Ended, codes: Collection[int], *, colour: bool) -> None:
    """Asserts exit code, no traceback, no character that a terminal obeys or hides, one JSON
    document, and the form of errors: short, and nothing else if nothing was computed.
    """
    assert ended.code in codes, ended
    for text in (ended.stdout, ended.stderr):
        assert not re.search(r"Traceback|panicked at|internal error", text), text
        assert not obeyed_or_hidden(text, colour=colour), ascii(text)
    options = ended.words[: ended.words.index("--")] if "--" in ended.words else ended.words
    is_json = "--json" in options
    if is_json and ended.stdout:
        assert ended.json is not None
    verdicts = (1, 3) if ended.words[:1] == ("check",) else (3,)  # `unknown` ends with 1
    told = r"^(mha: saved|::error|::warning|::notice) .*\n"  # beside a verdict
    said = re.sub(told, "", ended.stderr, flags=re.MULTILINE)
    if ended.code not in (1, 2, 3) or (
        ended.code in verdicts and not said
    ):  # a verdict stands on stdout
        assert "mha: error: " not in ended.stderr
        assert ended.stdout or ended.code not in (1, 3)
    elif is_json:
        assert ended.error.keys() == {"code", "message", "hint", "path", "exit"}
        assert ended.error["exit"] == ended.code
        assert ended.error["message"]
    else:
        assert ended.error["message"] or ended.stdout
        assert re.search(r"^mha: error: .", ended.stderr + ended.stdout, flags=re.MULTILINE), (
            ended.stderr
        )
    if ended.code in (1, 2) and "error" in ended.stderr:
        shows_rows = ended.error.get("code") in (
            "nothing-in-common",
            "nothing-ran",
        )  # of diff, and of bench
        assert not ended.stdout or shows_rows
        assert len(ended.said) < 2000


def obeyed_or_hidden(text: str, *, colour: bool = False) -> set[str]:
    """The characters that a terminal would obey or not show: controls, C1, bidi, zero-width, line
    separators.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text) if colour else text
    return {
        c
        for c in set(plain)
        if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    }


def _state(folder: Path) -> dict[str, tuple[object, ...]]:
    """Every path below a folder with its kind and mode, the target of a link, or the content of a
    small file.
    """
    state = {}
    for place, folders, files in os.walk(folder):
        if BELONGS_TO_TEST in folders:
            folders.remove(BELONGS_TO_TEST)
        for name in folders + files:
            path = Path(place, name)
            with contextlib.suppress(FileNotFoundError):
                state[str(path.relative_to(folder))] = fingerprint(path)
    return state


def fingerprint(path: Path) -> tuple[object, ...]:
    """Kind and mode, and the target of a link, or the identity and the content of a small file."""
    status = path.lstat()
    if path.is_symlink():
        return status.st_mode, os.readlink(path)
    if not path.is_file():
        return status.st_mode, status.st_rdev
    content = path.read_bytes() if status.st_size < 1 << 20 and os.access(path, os.R_OK) else b""
    return status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns, content


def _require_unchanged(
    before: Mapping[str, object], after: Mapping[str, object], named: Collection[str]
) -> None:
    """Only files that the words name, and those below folders that they name, may be other than
    before.
    """
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    text = "\n".join(named)
    unnamed = {
        path
        for path in changed
        if not any(str(part) in text for part in (Path(path), *Path(path).parents[:-1]))
    }
    assert not unnamed, unnamed


# ------------------------------------------------------------------------------------ how it is run


@functools.cache
def _entry() -> Callable[[], Any]:
    """The entry point of `mha`, with what its commands import, and what a first record makes of its
    types, there already.
    """
    import mhacli

    gc.disable()
    with contextlib.suppress(ImportError):
        import transformers

        for name in ("AutoConfig", "AutoModel", "AutoTokenizer", "AttentionInterface"):
            getattr(transformers, name)
    for module in pkgutil.walk_packages(mhacli.__path__, "mhacli.", onerror=lambda name: None):
        if not module.name.rpartition(".")[2].startswith(("__main__", "child")):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    (entry,) = entry_points(group="console_scripts", name="mha")
    loaded: Callable[[], Any] = entry.load()
    _keep_parsers()
    with tempfile.TemporaryDirectory() as folder:
        mhacli.inspect("a b", mhacli.Config(n_heads=2, d_model=8)).save(f"{folder}/record")
        mhacli.load(f"{folder}/record")._repr_html_()
    gc.freeze()
    gc.enable()
    return loaded


def _keep_parsers() -> None:
    """What Typer makes of a command is made once, and not for every run: a test that changes the
    options of a command needs a process of its own.
    """
    import typer.main

    app = importlib.import_module("mhacli.cli.app")
    made = functools.cache(app._typer_app)
    app._typer_app = lambda names, **how: made(frozenset(names), **how)  # type: ignore[attr-defined]
    typer.main.get_command = functools.cache(typer.main.get_command)


def _call(
    folder: Path, words: tuple[str, ...], fds: tuple[int, ...], env: Mapping[str, str]
) -> int:
    """The exit code of the command line, called in this process."""
    _entry()
    app, files = (importlib.import_module(f"mhacli.{name}") for name in ("cli.app", "io.files"))
    with _as_before():
        _become(folder, words, fds, env)
        try:
            code = int(app.main())
        except SystemExit as leaving:  # of a script for completion
            code = int(leaving.code or 0)
        files.remove_temporary_folders()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
    return code


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """After the block this process is as it was before. The block is interrupted if it takes too
    long.
    """
    import torch

    streams = sys.stdin, sys.stdout, sys.stderr
    others = tempfile.tempdir, subprocess.Popen, sys.argv[:]
    place, variables, n_threads = os.getcwd(), dict(os.environ), torch.get_num_threads()
    sys.stdout.flush()
    sys.stderr.flush()
    copies = [os.dup(fd) for fd in range(3)]
    handler = signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(PATIENCE_S)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        _connect(copies)
        sys.stdin, sys.stdout, sys.stderr = streams
        tempfile.tempdir, subprocess.Popen, sys.argv[:] = others  # type: ignore[misc]
        os.chdir(place)
        os.environ.clear()
        os.environ.update(variables)
        torch.set_num_threads(n_threads)


def _give_up(number: int, frame: object) -> NoReturn:
    raise AssertionError(f"no end after {PATIENCE_S} s")


def _connect(copies: Iterable[int]) -> None:
    """Makes these descriptors, which are closed, the first ones."""
    for place, fd in enumerate(copies):
        os.dup2(fd, place)
        os.close(fd)


def _fork(
    folder: Path, words: tuple[str, ...], fds: tuple[int, ...], env: Mapping[str, str], shell: str
) -> int:
    """The id of a child of this process that runs the entry point."""
    entry = _entry()
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fork() or _run_in_fork(entry, folder, words, fds, env)


def forked(
    folder: Path, *words: str, env: Mapping[str, str], fds: tuple[int, int, int]
) -> multiprocessing.process.BaseProcess:
    """A fork with these descriptors as its streams that runs the entry point, to be signalled or
    fed while it runs.
    """
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_run_in_fork, args=(_entry(), folder, words, fds, env))
    process.start()
    return process


def _run_in_fork(
    entry: Callable[[], Any],
    folder: Path,
    words: tuple[str, ...],
    fds: tuple[int, ...],
    env: Mapping[str, str],
) -> NoReturn:
    end: Any = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _become(folder, words, fds, env)
        os.closerange(3, 4096)
        _make_threads_anew()
        end = entry()
    except SystemExit as leaving:
        end = leaving.code
    except BaseException:
        traceback.print_exc()
    try:
        sys.stdout.flush()
    except OSError:
        end = 120
    os._exit(end if isinstance(end, int) else int(end is not None))


def run_pytest(
    folder: Path, *words: str, cold: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`pytest WORDS` in a folder, in a fork of this process, or as a new one."""
    env = environment(folder, COLUMNS="200", **variables)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, _input(None) as source:
        fds = (source, out.fileno(), err.fileno())
        if cold:
            command = [sys.executable, "-m", "pytest", *words]
            process = subprocess.Popen(
                command, cwd=folder, env=env, stdin=source, stdout=out, stderr=err
            )
            pid, process.returncode = process.pid, 0
        else:
            _entry()
            sys.stdout.flush()
            entry = functools.partial(pytest.main, list(words))
            pid = os.fork() or _run_in_fork(entry, folder, words, fds, env)
        watchdog = threading.Timer(PATIENCE_S, _kill, [pid])
        watchdog.start()
        _, status = os.waitpid(pid, 0)
        watchdog.cancel()
        out.seek(0)
        err.seek(0)
        code = os.waitstatus_to_exitcode(status)
        return subprocess.CompletedProcess(words, code, out.read().decode(), err.read().decode())


def _become(
    folder: Path, words: tuple[str, ...], fds: tuple[int, ...], env: Mapping[str, str]
) -> None:
    """Makes of this process the one that a shell would have started."""
    _connect([os.dup(fd) for fd in fds])
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    gc.get_freeze_count = lambda: 0  # it would walk through all objects of the test process
    subprocess.Popen = _Forking
    sys.argv[:] = [MHA, *words]
    # They stay open to the end.
    sys.stdin = open(0, errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", errors="surrogateescape", newline="\n", closefd=False)  # noqa: SIM115
    sys.stderr = open(  # noqa: SIM115
        2, "w", buffering=1, errors="backslashreplace", newline="\n", closefd=False
    )


def _make_threads_anew() -> None:
    """Makes the pool of torch, which a fork does not have; two threads at once would break it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(torch.get_num_threads())


class _Forking(subprocess.Popen[bytes]):
    """`python … -c PROGRAM WORDS` is run in a fork, with what is imported already; all else is
    started as ever.
    """

    def _execute_child(self, args: Any, *others: Any) -> None:
        if not isinstance(args, list) or args[0] != sys.executable or "-c" not in args:
            super()._execute_child(args, *others)
            return
        names = list(inspect.signature(super()._execute_child).parameters)
        given = dict(zip(names[1:], others, strict=True))
        pipes = [
            given[name]
            for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        ]
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            os.chdir(given["cwd"] or ".")
            _run_program(
                args[args.index("-c") + 1 :], (pipes[0], pipes[3], pipes[5]), given["pass_fds"]
            )
        self._child_created = True
        self._close_pipe_fds(*pipes)


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """In the block, a Python program that examines code of the user is a fork of this process."""
    _entry()  # what the program imports, once
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", _Forking)
        yield


def _run_program(words: list[str], fds: tuple[int, int, int], kept: Collection[int]) -> NoReturn:
    """Runs a program with its arguments, these descriptors as its streams, which are not buffered,
    and the kept ones.
    """
    for place, fd in enumerate(fds):
        if fd >= 0:
            os.dup2(fd, place)
    for begin, end in pairwise((2, *sorted(kept), 4096)):
        os.closerange(begin + 1, end)
    sys.argv[:] = ["-c", *words[1:]]
    _earlier = sys.stdin, sys.stdout, sys.stderr  # they would close their descriptors
    sys.stdin, sys.stdout, sys.stderr = (
        io.TextIOWrapper(open(fd, mode, buffering), write_through=mode == "wb")  # noqa: SIM115
        for fd, mode, buffering in ((0, "rb", -1), (1, "wb", 0), (2, "wb", 0))
    )
    try:
        _make_threads_anew()
        exec(words[0], {"__name__": "__main__"})
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def run_python(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """`python -c PROGRAM` in a folder, as a fork of this process."""
    with _Forking(
        [sys.executable, "-c", program], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess(
        process.args, process.returncode, stdout.decode(), stderr.decode()
    )


def _start(
    folder: Path, words: tuple[str, ...], fds: tuple[int, ...], env: Mapping[str, str], shell: str
) -> int:
    """The id of a new process of the installed script."""
    process = start(
        folder, *words, env=env, shell=shell, stdin=fds[0], stdout=fds[1], stderr=fds[2]
    )
    process.returncode = 0  # `run` waits for it
    return process.pid


def start(
    folder: Path, *words: str, env: Mapping[str, str], shell: str = PLAIN_SHELL, **streams: Any
) -> subprocess.Popen[bytes]:
    """The installed script as a new process, to be signalled or fed while it runs. `env` is all of
    its environment.
    """
    command = ["sh", "-c", shell, "sh", MHA, *map(os.fsencode, words)]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=dict(env),
        start_new_session=True,
        preexec_fn=_interruptible,
        **streams,
    )


def _interruptible() -> None:
    """A shell that runs the tests in the background ignores SIGINT, and its children would inherit
    that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def environment(folder: Path, **variables: str | None) -> dict[str, str]:
    """The environment of a run, for `start`."""
    return _environment(folder, variables, {})


def _environment(
    folder: Path, env: Mapping[str, str | None], modules: Mapping[str, str]
) -> dict[str, str]:
    place = folder / BELONGS_TO_TEST
    for name, code in modules.items():
        place.mkdir(exist_ok=True)
        (place / f"{name}.py").write_text(code)
    variables: dict[str, str | None] = {
        "PATH": f"{Path(MHA).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LC_ALL": "C.UTF-8",
        "COLUMNS": "80",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TERM": "xterm-256color",
        "MHA_PROGRESS_AFTER": "inf",
        "CUDA_CACHE_DISABLE": "1",
        "USE_PYTORCH_KERNEL_CACHE": "0",
        "MHA_BLOCK": os.environ.get("MHA_BLOCK"),
        "PYTHONPATH": str(place) if modules else None,
        **env,
    }
    return {name: value for name, value in variables.items() if value is not None}


@contextlib.contextmanager
def _input(stdin: bytes | str | int | None) -> Any:
    """A descriptor with this content."""
    if isinstance(stdin, int):
        yield stdin
        return
    with tempfile.TemporaryFile() as file:
        file.write(stdin.encode() if isinstance(stdin, str) else stdin or b"")
        file.flush()
        file.seek(0)
        yield file.fileno()


def _open_terminal(columns: int, rows: int) -> tuple[int, int]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return ours, theirs


def _read_terminal(ours: int, theirs: int) -> bytes:
    """All that was written to the terminal until its last user closed it."""
    os.close(theirs)
    pieces = []
    try:
        while piece := os.read(ours, 65536):
            pieces.append(piece)
    except OSError as end:
        if end.errno != errno.EIO:  # EIO: nobody is left at the other end
            raise
    os.close(ours)
    return b"".join(pieces).replace(b"\r\n", b"\n")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
