"""`mha` at the price of its own work: a server has imported the libraries once, and forks for each call.

The child gets the words, folder, environment, umask and three descriptors of the call, and runs the real entry point. It shares
with a process from the shell all but the imports, so what depends on them (start-up, variables that libraries read when they are
loaded, signals while they load) needs a process of its own. `mha bench` takes its peak rates from
smaller products and copies. `tests/cli/test_forks.py` proves that both ways agree.
"""

from __future__ import annotations

import atexit
import functools
import marshal
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

MHA = os.path.join(os.path.dirname(sys.executable), "mha")
IS_COLD = bool(os.environ.get("MHA_TESTS_COLD"))
"""Whether every process is to be started anew, with imports of its own."""


# ------------------------------------------------------------------------------------------------------------- the client


class Ended(NamedTuple):
    """How a process ended: the exit code, negative for a signal, the most memory that it held, and what it computed for."""

    code: int
    peak_bytes: int
    cpu_s: float


class Call:
    """A process of `mha` that a server has forked. `pid` is its id."""

    def __init__(
        self, address: str, words: Sequence[str | bytes], folder: str, env: Mapping[str, str], fds: Sequence[int]
    ):
        umask = os.umask(0)
        os.umask(umask)
        request = ([os.fsencode(word) for word in words], os.fsencode(folder), dict(env), umask)
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        socket.send_fds(self._connection, [b"f"], fds)
        _send(self._connection, request)
        self.pid: int = _receive(self._connection)

    def wait(self) -> Ended:
        """Waits for its end."""
        try:
            return Ended(*_receive(self._connection))
        finally:
            self._connection.close()


def _send(connection: socket.socket, value: Any) -> None:
    message = marshal.dumps(value)
    connection.sendall(len(message).to_bytes(8, "little") + message)


def _receive(connection: socket.socket) -> Any:
    return marshal.loads(_read(connection, int.from_bytes(_read(connection, 8), "little")))


def _read(connection: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        piece = connection.recv(size - len(read))
        if not piece:
            raise EOFError("the server has gone")
        read += piece
    return read


class Server:
    """A server of forks, started when its address is first asked for. With `torch` it has loaded that and transformers too."""

    def __init__(self, *, torch: bool) -> None:
        self._has_torch, self._address = torch, ""

    @property
    def address(self) -> str:
        """The socket at which it listens."""
        if not self._address:
            self._address = self._started()
        return self._address

    def _started(self) -> str:
        import subprocess
        import tempfile

        home = tempfile.TemporaryDirectory(prefix="mha-")
        path = os.path.join(home.name, "socket")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(64)
        env = {"PATH": os.environ["PATH"], "HOME": home.name, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno()), str(int(self._has_torch))],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )
        listener.close()

        def end() -> None:
            assert process.stdin is not None
            process.stdin.close()  # it ends when its stdin does
            process.wait()
            home.cleanup()

        atexit.register(end)
        return path


BARE, WITH_TORCH = Server(torch=False), Server(torch=True)


def program() -> str:
    """The path of an `mha` to start: one that forks, or where every process is to be cold the installed one."""
    return MHA if IS_COLD else os.path.join(stand_in_folder(), "mha")


@functools.cache
def stand_in_folder() -> str:
    """A folder with an executable `mha` that behaves like the installed one, and lets the server do its work."""
    import tempfile

    folder = tempfile.TemporaryDirectory(prefix="mha-")
    atexit.register(folder.cleanup)
    support = os.path.dirname(os.path.abspath(__file__))
    lines = [f"#!{sys.executable} -ISE", "import sys", f"sys.path.insert(0, {support!r})", "import forks"]
    path = os.path.join(folder.name, "mha")
    with open(path, "w") as file:
        file.write("\n".join([*lines, f"forks.stand_in({WITH_TORCH.address!r})\n"]))
    os.chmod(path, 0o755)
    return folder.name


def stand_in(address: str) -> NoReturn:
    """Runs the words of this process in a fork of the server, and ends as that does."""
    import signal

    call = Call(address, sys.argv[1:], os.getcwd(), os.environ, (0, 1, 2))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os.kill(call.pid, number))
    code = call.wait().code
    os._exit(code if code >= 0 else 128 - code)


# ------------------------------------------------------------------------------------------------------------- the server


def _serve(listener: socket.socket) -> None:
    """Answers each call in a process of its own, until stdin is closed."""
    import select
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        readable, _, _ = select.select([listener, 0], [], [])
        if 0 in readable:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _answer(connection)
            os._exit(0)
        connection.close()


def _answer(connection: socket.socket) -> None:
    _, fds, _, _ = socket.recv_fds(connection, 1, 3)
    words, folder, env, umask = _receive(connection)
    pid = os.fork()
    if pid == 0:
        connection.close()
        try:
            _become(words, folder, env, umask, fds)
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(1)
    for fd in fds:
        os.close(fd)
    _send(connection, pid)
    _, status, usage = os.wait4(pid, 0)
    _send(connection, (os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime))


def _become(words: list[bytes], folder: bytes, env: dict[str, str], umask: int, fds: list[int]) -> None:
    """Makes of this process the one that the shell would have started, and runs it."""
    import importlib

    for place, fd in enumerate(fds):
        os.dup2(fd, place)
        os.close(fd)
    os.chdir(folder)
    os.umask(umask)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = [MHA, *map(os.fsdecode, words)]
    given = env.get("PYTHONPATH", "")
    sys.path[:] = [os.path.dirname(MHA), *filter(None, given.split(os.pathsep)), *sys.path]
    importlib.invalidate_caches()
    sys.stdin = open(0, errors="surrogateescape")  # noqa: SIM115 (they stay open to the end)
    sys.stdout = open(1, "w", errors="surrogateescape", newline="\n")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", newline="\n")  # noqa: SIM115

    from mhacli.__main__ import main

    main()


def _load(*, torch: bool) -> None:
    """Imports what commands import: all of ours but the viewer, without torch only what does not need it."""
    import contextlib
    import gc
    import importlib
    import pkgutil

    import mhacli

    if torch:
        import transformers

        for name in ("AutoConfig", "AutoModel", "AutoTokenizer", "AttentionInterface"):
            getattr(transformers, name)
    else:
        sys.modules["torch"] = None  # type: ignore[assignment]
    for module in pkgutil.walk_packages(mhacli.__path__, "mhacli.", onerror=lambda name: None):
        if not module.name.startswith(("mhacli.viewer", "mhacli.__main__", "mhacli.adapters.usercode.child")):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    if torch:
        _measure_peaks_quickly()
    else:
        del sys.modules["torch"]
    gc.collect()
    gc.freeze()


def _measure_peaks_quickly() -> None:
    """The rates that `mha bench` divides by come from small products and copies: with the usual ones it computes for seconds."""
    from mhacli.compute.bench import timing

    timing._COPY_BYTES, timing._LONG_ENOUGH_S, timing._SAMPLES = 1 << 20, 1e-3, 2


if __name__ == "__main__":
    del sys.path[0]
    _load(torch=bool(int(sys.argv[2])))
    _serve(socket.socket(fileno=int(sys.argv[1])))
