"""Reads files up to a size limit and writes files atomically."""

from __future__ import annotations

import errno
import os
import re
import select
import shlex
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mhacli.errors import MhaError, UsageError

READ_CHUNK_BYTES = 1 << 20
TEMPORARY = ".tmp"
"""The ending of files that have no name of their own yet; their names begin with a dot."""
_UNNAMED = getattr(os, "O_TMPFILE", os.O_DIRECTORY)
"""Opens a file without a name on Linux. Elsewhere `open` fails as on a file system that has no unnamed files."""
_temporary: set[str] = set()
"""The temporary folders in use. They are global so that `remove_temporary_folders` finds them from another thread."""
_SIZE_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str, name: str) -> int:
    """The number of bytes in `512`, `64M` or `1.5GiB` (powers of 1024). Raises `UsageError` with the accepted forms."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([kmgt]?)(?:i?b)?", text.strip(), re.IGNORECASE | re.ASCII)
    size = int(float(match[1]) * _SIZE_UNITS[match[2].lower()]) if match else 0
    if size < 1:
        raise UsageError(f"{name} {shlex.quote(text[:40])} is not a size above 0 such as 65536, 64M or 1.5G")
    return size


def format_size(n_bytes: float) -> str:
    """A size in readable form: `0 B`, `1.5 KiB`, `12.8 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < (1023.5 if unit == "B" else 1023.95):
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


# ----------------------------------------------------------------------------------------------------------- reading


def read_whole(path: str, limit: int) -> bytes:
    """All bytes of a regular file, read into memory: a memory map would crash if the file were truncated meanwhile.

    Raises `MhaError` if the file cannot be read or has more than `limit` bytes.
    """
    chunks, total = [], 0
    with opened(path) as read:
        while chunk := read(READ_CHUNK_BYTES):
            chunks.append(chunk)
            total += len(chunk)
            if total > limit:
                raise MhaError(f"{path} is larger than {format_size(limit)}", code="too-large", path=path)
    return b"".join(chunks)


def read_up_to(read: Callable[[int], bytes], n: int) -> bytes:
    """The next `n` bytes of an open input, fewer only at its end. Memory grows with the bytes read, not with `n`."""
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
    """The `read(n)` of a file, a pipe or (`-`) stdin, open within the context. Faults become `MhaError` with the path."""
    try:
        if path == "-":
            if sys.stdin is None:
                raise MhaError("stdin is closed, so no text can be read from it", code="unreadable")
            yield sys.stdin.buffer.read
        else:
            fd, first = _descriptor(path)
            with open(fd, "rb") as file:
                yield _read_after(first, file.read)
    except OSError as fault:
        raise MhaError(f"{describe(path)} {_reason(fault)}", code="unreadable", path=path) from fault
    except ValueError as fault:  # a NUL in the name, or stdin closed under us
        raise MhaError(f"{describe(path)} cannot be read: {fault}", code="unreadable", path=path) from fault


def _read_after(first: bytes, read: Callable[[int], bytes]) -> Callable[[int], bytes]:
    pieces = [first] if first else []
    return lambda n: pieces.pop() if pieces else read(n)


def _descriptor(path: str) -> tuple[int, bytes]:
    """An open regular file or pipe, and the bytes already read from it. Refuses everything that could block."""
    fd, first = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), b""
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISFIFO(mode):
            first = _first_byte(fd, path)
        elif stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "is a directory")
        elif not stat.S_ISREG(mode):
            raise MhaError(f"{path} is a device, not a regular file or a pipe", code="unreadable", path=path)
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd, first


def _first_byte(fd: int, path: str) -> bytes:
    """The first byte of a pipe if one arrives without waiting, else nothing.

    Only `read` distinguishes a pipe whose writer is slow (try again) from a pipe that never had a writer (end of file).
    """
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    if waiting.poll(0):  # data, or a writer that has come and gone
        return b""
    try:
        byte = os.read(fd, 1)
    except BlockingIOError:
        return b""
    if not byte:
        raise MhaError(f"{path} is a FIFO that no process writes to", code="unreadable", path=path)
    return byte


_REASONS = {
    errno.ENOENT: "does not exist",
    errno.EISDIR: "is a directory, not a file",
    errno.EACCES: "cannot be opened: permission denied",
    errno.EPERM: "cannot be opened: permission denied",
    errno.ELOOP: "is a loop of symbolic links",
    errno.ENAMETOOLONG: "has too long a name",
    errno.ENOTDIR: "lies below something that is not a folder",
    errno.ENXIO: "is a socket or an absent device, not a regular file or a pipe",
}


def _reason(fault: OSError) -> str:
    if fault.errno == errno.ENOENT and isinstance(fault.filename, str) and os.path.islink(fault.filename):
        return f"is a broken link to {os.readlink(fault.filename)}"
    return _REASONS.get(fault.errno or 0, f"failed: {fault.strerror or fault}")


# ----------------------------------------------------------------------------------------------------------- writing


def _followed(path: str) -> str:
    """The absolute path with all links resolved. Raises `MhaError` if the working directory was deleted."""
    try:
        return os.path.realpath(path)
    except FileNotFoundError as fault:
        raise MhaError(
            f"{path} cannot be written: the working directory was deleted", code="unwritable", path=path
        ) from fault


def check_target(path: str, *, force: bool) -> None:
    """Raises `MhaError`, before any work, for a path to which `write_whole` could not write."""
    if not path:
        raise MhaError("the name of the file to save to is empty", code="unwritable")
    target = _followed(path)
    try:
        status = os.stat(target)
    except FileNotFoundError:
        folder = os.path.dirname(target)
        if not os.path.isdir(folder):
            raise MhaError(
                f"{path} cannot be written: there is no folder {folder}", code="unwritable", path=path
            ) from None
        if not os.access(folder, os.W_OK):
            raise _read_only(path, folder) from None
        return
    except (OSError, ValueError) as fault:
        reason = _reason(fault) if isinstance(fault, OSError) else f"cannot be written: {fault}"
        raise MhaError(f"{path} {reason}", code="unwritable", path=path) from fault
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a device, pipe or socket"
        raise MhaError(f"{path} is {kind}, not a regular file", code="unwritable", path=path)
    if not force:
        raise _exists(path)
    if not os.access(os.path.dirname(target), os.W_OK):
        raise _read_only(path, os.path.dirname(target))


def _exists(path: str) -> MhaError:
    return MhaError(f"{path} exists", hint="--force overwrites it", code="exists", path=path)


def _read_only(path: str, folder: str) -> MhaError:
    return MhaError(f"{path} cannot be written: the folder {folder} is read-only", code="unwritable", path=path)


def write_whole(path: str, data: bytes, *, force: bool) -> None:
    """Writes a file atomically: after any failure the path holds either its old content or all of `data`.

    The bytes go to an unnamed file in the same folder (a named one where the file system has no unnamed files), are
    synced, and take the name in one step. A symbolic link stays a link, an existing file keeps its mode, and without
    `force` an existing file is never replaced. Raises `MhaError`; a failure leaves no temporary file.
    """
    check_target(path, force=force)
    target = _followed(path)
    try:
        folder = os.open(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _write_then_name(folder, os.path.basename(target), data, force=force)
            os.fsync(folder)
        finally:
            os.close(folder)
    except FileExistsError as fault:
        raise _exists(path) from fault
    except OSError as fault:
        raise MhaError(f"{path} cannot be written: {fault.strerror or fault}", code="unwritable", path=path) from fault


def _write_then_name(folder: int, name: str, data: bytes, *, force: bool) -> None:
    temporary = f".{name[:100]}.{os.getpid()}.{os.urandom(4).hex()}{TEMPORARY}"
    try:
        fd = os.open(".", _UNNAMED | os.O_RDWR | os.O_CLOEXEC, 0o666, dir_fd=folder)
        named = False
    except OSError as fault:
        if fault.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666, dir_fd=folder)
        named = True
    try:
        _fill(fd, data, like=name, folder=folder)
        source = temporary if named else f"/proc/self/fd/{fd}"
        if not (named and force):
            try:  # leaves no second name if killed, and unlike a rename never replaces a file that was created meanwhile
                os.link(source, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=not named)
                return
            except FileExistsError:
                if not force:
                    raise
        if not named:
            os.link(source, temporary, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(fd)
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)


def _fill(fd: int, data: bytes, *, like: str, folder: int) -> None:
    """Writes and syncs `data`, with the mode and owner of the file `like`, which it will replace."""
    with suppress(FileNotFoundError):
        old = os.stat(like, dir_fd=folder)
        if os.geteuid() == 0:
            os.fchown(fd, old.st_uid, old.st_gid)
        os.fchmod(fd, stat.S_IMODE(old.st_mode))
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view[: 1 << 26]) :]
    os.fsync(fd)


@contextmanager
def temporary_folder() -> Iterator[str]:
    """A folder that is removed when the context ends, or by `remove_temporary_folders` if the process ends first."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="mha-", ignore_cleanup_errors=True) as folder:
        _temporary.add(folder)
        try:
            yield folder
        finally:
            _temporary.discard(folder)


def lasting_temporary_folder() -> str:
    """A folder that is removed when the process exits."""
    import atexit
    from tempfile import mkdtemp

    folder = mkdtemp(prefix="mha-")
    _temporary.add(folder)
    atexit.register(remove_temporary_folders)
    return folder


def remove_temporary_folders() -> None:
    """Removes all temporary folders of the process, for an exit that does not unwind the stack."""
    from shutil import rmtree

    for folder in tuple(_temporary):
        rmtree(folder, ignore_errors=True)
