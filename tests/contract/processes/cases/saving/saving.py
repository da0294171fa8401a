"""What the programs beside this one use: two records, and calls of the system that can fail.

It works in a new folder `place`, beside the records `old` and `new`.
"""

import errno
import itertools
import os
from pathlib import Path

import mhacli

CALLS = ("open", "write", "fsync", "fdatasync", "fchmod", "chmod", "link", "rename", "replace")
MODE = 0o640
records = {name: mhacli.load(name) for name in ("old", "new")}
contents = {Path(name).read_bytes(): name for name in records}
old_content = Path("old").read_bytes()
os.mkdir("place")
os.chdir("place")
plain = {name: getattr(os, name) for name in CALLS}


def require_unnamed(path, flags, *words, **options):
    """The `open` of a file system without unnamed files."""
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, "no unnamed files")
    return plain["open"](path, flags, *words, **options)


def counted(call, n, then):
    """The function that does `then` before its n-th call, and writes at most 5000 bytes at once."""
    calls = itertools.count(1)

    def counting(*words, **options):
        if next(calls) == n:
            then()
        if call is plain["write"]:
            words = (words[0], words[1][:5000])
        return call(*words, **options)

    return counting


def patch(name, n, then, has_unnamed):
    os.open = plain["open"] if has_unnamed else require_unnamed
    setattr(os, name, counted(getattr(os, name), n, then))


def prepare(exists):
    for name in os.listdir("."):
        os.unlink(name)
    if exists:
        Path("file").write_bytes(old_content)
        os.chmod("file", MODE)


def kept(exists):
    """Which of the files is there, whole and with its mode."""
    if not exists and not os.path.exists("file"):
        return None
    name = contents[Path("file").read_bytes()]
    assert exists or name == "new"
    assert not exists or os.stat("file").st_mode & 0o777 == MODE
    return name
