"""Reads files up to a size limit and writes files atomically."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from mhacli.errors import MhaError
from mhacli.numbers import shown

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

READ_CHUNK_BYTES = 1 << 20
TEMPORARY = ".tmp"
"""The ending of files that are not whole yet; their names begin with a dot."""
_temporary: list[TemporaryDirectory[str]] = []
"""The temporary folders of the process. They are global so that `remove_temporary_folders` finds
them from another thread."""
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_has_cache = _CACHE in os.environ
"""Whether the user chose the folder of torch's compiler; else torch sets the variable."""


# ------------------------------------------------------------------------------------------ reading


def read_whole(path: str, limit: int) -> bytes:
    """All bytes of a file, read into memory: a memory map would end the process if the file were
    truncated meanwhile.

    Raises `MhaError` if the file cannot be read or has more than `limit` bytes.
    """
    with opened(path) as read:
        data = read_up_to(read, limit + 1)
    if len(data) > limit:
        raise MhaError(
            f"{path} is larger than {shown(limit, 'bytes')}", code="too-large", path=path
        )
    return data


def read_up_to(read: Callable[[int], bytes], n: int) -> bytes:
    """The next `n` bytes of an open input, fewer only at its end. Memory grows with the bytes read,
    not with `n`.
    """
    chunks = []
    while n > 0 and (chunk := read(min(n, READ_CHUNK_BYTES))):
        chunks.append(chunk)
        n -= len(chunk)
    return b"".join(chunks)


def describe(path: str) -> str:
    """The name of an input in messages."""
    return "stdin" if path == "-" else path


@contextmanager
def opened(path: str) -> Iterator[Callable[[int], bytes]]:
    """The `read(n)` of a file, a pipe or (`-`) stdin, open within the context. Faults become
    `MhaError` with the path.

    A device is refused, and so is a pipe that no process writes to: it would block for ever."""
    try:
        if path == "-":
            if sys.stdin is None:
                raise MhaError("stdin is closed, so no text can be read from it", code="unreadable")
            yield sys.stdin.buffer.read
            return
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
                raise MhaError(
                    f"{path} is a device, not a regular file or a pipe",
                    code="unreadable",
                    path=path,
                )
            os.set_blocking(file.fileno(), True)
            if stat.S_ISFIFO(mode) and not file.peek(1):
                raise MhaError(
                    f"{path} is a pipe that no process writes to", code="unreadable", path=path
                )
            yield file.read
    except (
        OSError,
        ValueError,
    ) as fault:  # a ValueError: a NUL in the name, or stdin closed under us
        raise MhaError(
            f"{describe(path)}: {_reason(fault)}", code="unreadable", path=path
        ) from fault


def _reason(fault: OSError | ValueError) -> str:
    return str(getattr(fault, "strerror", None) or fault)


# ------------------------------------------------------------------------------------------ writing


def check_target(path: str, *, force: bool) -> str:
    """The absolute path, with all links resolved, of the file to which `write_whole` writes. Raises
    `MhaError`, before any work, where it could not write.
    """
    mode = None
    try:
        target = os.path.realpath(path)
        with suppress(FileNotFoundError, NotADirectoryError):
            mode = os.stat(target).st_mode
    except (OSError, ValueError) as fault:
        raise _unwritable(path, _reason(fault)) from fault
    folder = os.path.dirname(target)
    if mode is not None and not stat.S_ISREG(mode):
        raise _unwritable(path, "it is a directory, a device or a pipe, not a regular file")
    if mode is not None and not force:
        raise _exists(path)
    if not os.path.isdir(folder):
        raise _unwritable(
            path,
            f"{folder} is no folder" if os.path.exists(folder) else f"there is no folder {folder}",
        )
    if not os.access(folder, os.W_OK):
        raise _unwritable(path, f"the folder {folder} is read-only")
    return target


def require_folder_writable(path: str) -> None:
    """Raises `MhaError` for a folder that cannot be made, or in which no file can be written."""
    whole = Path(path).absolute()
    nearest = next(each for each in (whole, *whole.parents) if os.path.lexists(each))
    if not nearest.is_dir():
        raise _unwritable(path, f"{nearest} is no folder")
    if not os.access(nearest, os.W_OK):
        raise _unwritable(path, f"the folder {nearest} is read-only")


def _unwritable(path: str, reason: str) -> MhaError:
    return MhaError(f"{path} cannot be written: {reason}", code="unwritable", path=path)


def _exists(path: str) -> MhaError:
    return MhaError(
        f"{path} exists",
        hint="--force overwrites it",
        code="exists",
        path=path,
    )


def write_whole(path: str, data: bytes | Iterable[bytes], *, force: bool) -> None:
    """Writes a file atomically: after any failure the path holds either its old content or all of
    `data`, whole or in parts.

    The bytes go to a file of another name in the same folder, are synced, and take the name in one
    step. A symbolic link stays a link, an existing file keeps its mode, and without `force` an
    existing file is never replaced. Raises `MhaError`; a failure leaves no temporary file, but a
    process that is killed leaves it.
    """
    target = check_target(path, force=force)
    folder, name = os.path.split(target)
    temporary = os.path.join(
        folder, f".{name[:100]}.{os.getpid()}.{os.urandom(4).hex()}{TEMPORARY}"
    )
    try:
        with open(temporary, "xb", buffering=0) as file:
            _fill(file.fileno(), data, like=target)
        if force:
            os.replace(temporary, target)
        else:  # unlike a rename, a link never replaces a file that was created meanwhile
            os.link(temporary, target)
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fsync(folder_fd)
        os.close(folder_fd)
    except FileExistsError as fault:
        raise _exists(path) from fault
    except OSError as fault:
        raise _unwritable(path, _reason(fault)) from fault
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def _fill(fd: int, data: bytes | Iterable[bytes], *, like: str) -> None:
    """Writes and syncs `data`, with the mode and owner of the file `like`, which it will
    replace.
    """
    with suppress(FileNotFoundError):
        old = os.stat(like)
        if os.geteuid() == 0:
            os.fchown(fd, old.st_uid, old.st_gid)
        os.fchmod(fd, stat.S_IMODE(old.st_mode))
    for part in [data] if isinstance(data, bytes) else data:
        _write(fd, part)
    os.fsync(fd)


def _write(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view[: 1 << 26]) :]


def append_temporary(file: IO[bytes], data: bytes | memoryview) -> None:
    """Writes all of `data` to a temporary file without a buffer. Raises `MhaError`."""
    from tempfile import gettempdir

    try:
        _write(file.fileno(), data)
    except OSError as fault:
        raise _unwritable(gettempdir(), _reason(fault)) from fault


def temporary_folder() -> TemporaryDirectory[str]:
    """A folder that is removed when the process exits, or after a `with`."""
    from tempfile import TemporaryDirectory

    _temporary.append(TemporaryDirectory(prefix="mha-", ignore_cleanup_errors=True))
    return _temporary[-1]


def remove_temporary_folders() -> None:
    """Removes all temporary folders of the process, and that of torch's compiler, which an import
    makes, if it is empty; an exit that does not unwind the stack calls it itself.
    """
    for folder in _temporary:
        folder.cleanup()
    if not _has_cache:
        with suppress(OSError, KeyError):
            os.rmdir(os.environ[_CACHE])
