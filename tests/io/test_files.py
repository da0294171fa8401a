import errno
import os
import shlex
import stat
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhacli.errors import MhaError, UsageError
from mhacli.io import files
from mhacli.io.files import check_target, format_size, parse_size, read_chunks, read_whole, write_whole


def fault_of(action, *arguments, **options):
    with pytest.raises(MhaError) as caught:
        action(*arguments, **options)
    return caught.value.message, caught.value.hint


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512", 512),
        ("64M", 64 * 1024**2),
        ("1.5GiB", 3 * 2**29),
        ("2kb", 2048),
        (" 1 T ", 2**40),
        ("0.5k", 512),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text, "limit") == size


@pytest.mark.parametrize(
    "text", ["", "0", "0.0001", "-1", "1_0", "1e3", "M", "1 0", "nan", "inf", "9" * 5000, "1P", "٣"]
)
def test_what_is_no_size_is_refused_with_the_forms_that_work(text):
    with pytest.raises(UsageError) as caught:
        parse_size(text, "--limit")
    assert caught.value.message == f"--limit {shlex.quote(text[:40])} is not a size above 0 such as 65536, 64M or 1.5G"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (12.8 * 2**30, "12.8 GiB"),
        (2**40, "1.0 TiB"),
        (2**60, "1048576.0 TiB"),
    ],
)
def test_sizes_are_reported(size, text):
    assert format_size(size) == text


@given(st.integers(1, 2**55))
def test_a_size_that_was_printed_is_read_back_within_rounding(size):
    assert parse_size(format_size(size).replace(" ", ""), "limit") == pytest.approx(size, rel=0.06)


# ---------------------------------------------------------------------------------------------------------------- in


def test_a_file_of_exactly_the_limit_is_read_and_one_byte_more_is_not(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"x" * 2048)
    assert read_whole(str(path), 2048) == b"x" * 2048
    assert fault_of(read_whole, str(path), 2047) == (f"{path} is larger than 2.0 KiB", None)


def test_chunks_stop_at_the_limit_and_name_the_option(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"x" * 2048)
    assert b"".join(read_chunks(str(path), 2048, "--max")) == b"x" * 2048
    expected = (f"{path} is larger than 1.0 KiB", "--max raises the limit")
    assert fault_of(lambda: list(read_chunks(str(path), 1024, "--max"))) == expected


def test_what_cannot_be_read_is_reported_by_its_reason(tmp_path):
    link, loop, broken = tmp_path / "folder", tmp_path / "loop", tmp_path / "broken"
    link.mkdir()
    loop.symlink_to(loop)
    broken.symlink_to("nowhere")
    below = tmp_path / "file" / "below"
    (tmp_path / "file").write_text("")
    reasons = {
        tmp_path / "absent": "does not exist",
        link: "is a directory, not a file",
        loop: "is a loop of symbolic links",
        broken: "is a broken link to nowhere",
        below: "lies below something that is not a folder",
        tmp_path / ("n" * 300): "has too long a name",
        "/dev/null": "is a device, not a regular file or a pipe",
    }
    for path, reason in reasons.items():
        assert fault_of(read_whole, str(path), 9) == (f"{path} {reason}", None)


def test_a_nul_in_a_name_is_reported():
    assert fault_of(read_whole, "a\0b", 9)[0].startswith("a\0b cannot be read: ")


def test_a_pipe_is_read_to_its_end(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    waiting = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # so that the writer need not wait for a reader
    writing = os.open(path, os.O_WRONLY)
    content = b"x" * 100_000  # more than a pipe holds: the writer is there until the reader is

    def write():
        with open(writing, "wb") as file:
            file.write(content)

    writer = threading.Thread(target=write)
    writer.start()
    assert b"".join(read_chunks(str(path), 1 << 20, "--max")) == content
    os.close(waiting)
    writer.join()


def test_a_pipe_without_a_writer_is_refused_at_once(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert fault_of(read_whole, str(path), 9) == (f"{path} is a FIFO that no process writes to", None)


# --------------------------------------------------------------------------------------------------------------- out


@pytest.fixture(params=["unnamed", "named"])
def way(request, monkeypatch):
    """Both ways of writing: through an unnamed file, or through a named one if the file system has no unnamed files."""
    if request.param == "named":
        real = os.open

        def refusing(path, flags, *arguments, **options):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "not supported")
            return real(path, flags, *arguments, **options)

        monkeypatch.setattr(os, "open", refusing)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_never_has_a_second_name_that_a_kill_could_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", None)
    write_whole(str(tmp_path / "new"), b"new", force=True)
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.usefixtures("way")
class TestWriteWhole:
    def test_a_new_file_holds_all_bytes_and_nothing_else_is_left(self, tmp_path):
        path = tmp_path / "new"
        write_whole(str(path), b"x" * 1_000_000, force=False)
        assert path.read_bytes() == b"x" * 1_000_000
        assert os.listdir(tmp_path) == ["new"]

    def test_a_new_file_is_replaced_with_force(self, tmp_path):
        write_whole(str(tmp_path / "new"), b"new", force=True)
        write_whole(str(tmp_path / "new"), b"newer", force=True)
        assert (tmp_path / "new").read_bytes() == b"newer"
        assert os.listdir(tmp_path) == ["new"]

    def test_the_mode_of_a_new_file_follows_the_umask(self, tmp_path):
        before = os.umask(0o027)
        try:
            write_whole(str(tmp_path / "new"), b"", force=False)
        finally:
            os.umask(before)
        assert mode_of(tmp_path / "new") == 0o640

    def test_the_mode_of_an_old_file_stays(self, tmp_path):
        path = tmp_path / "old"
        path.write_bytes(b"old")
        path.chmod(0o604)
        write_whole(str(path), b"new", force=True)
        assert (path.read_bytes(), mode_of(path)) == (b"new", 0o604)
        assert os.listdir(tmp_path) == ["old"]

    @pytest.mark.parametrize("exists", [True, False])
    def test_a_symbolic_link_stays_a_link(self, tmp_path, exists):
        (tmp_path / "there").mkdir()
        target, link = tmp_path / "there" / "target", tmp_path / "link"
        if exists:
            target.write_bytes(b"old")
        link.symlink_to("there/target")
        write_whole(str(link), b"new", force=exists)
        assert link.is_symlink()
        assert target.read_bytes() == b"new"

    def test_an_existing_file_is_kept_without_force(self, tmp_path):
        path = tmp_path / "old"
        path.write_bytes(b"old")
        expected = (f"{path} exists", "--force overwrites it")
        assert fault_of(write_whole, str(path), b"new", force=False) == expected
        assert path.read_bytes() == b"old"

    def test_a_file_that_comes_meanwhile_is_kept_without_force(self, tmp_path, monkeypatch):
        path = tmp_path / "raced"
        real = os.fsync

        def meanwhile(fd):
            path.write_bytes(b"theirs")
            real(fd)

        monkeypatch.setattr(os, "fsync", meanwhile)
        expected = (f"{path} exists", "--force overwrites it")
        assert fault_of(write_whole, str(path), b"ours", force=False) == expected
        assert path.read_bytes() == b"theirs"
        assert os.listdir(tmp_path) == ["raced"]

    @pytest.mark.parametrize("force", [True, False])
    def test_a_failure_in_the_middle_leaves_the_old_file_and_no_other(self, tmp_path, monkeypatch, force):
        path = tmp_path / "file"
        if force:
            path.write_bytes(b"old")

        def full(fd, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        message = f"{path} cannot be written: No space left on device"
        assert fault_of(write_whole, str(path), b"new", force=force) == (message, None)
        assert os.listdir(tmp_path) == (["file"] if force else [])
        assert not force or path.read_bytes() == b"old"

    def test_an_interrupt_leaves_no_other_file(self, tmp_path, monkeypatch):
        def interrupted(fd):
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_whole(str(tmp_path / "new"), b"x", force=False)
        assert os.listdir(tmp_path) == []

    def test_short_writes_are_continued(self, tmp_path, monkeypatch):
        real = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
        write_whole(str(tmp_path / "new"), b"0123456789", force=False)
        assert (tmp_path / "new").read_bytes() == b"0123456789"

    def test_a_long_name_can_be_written(self, tmp_path):
        path = tmp_path / ("n" * 255)
        write_whole(str(path), b"x", force=False)
        write_whole(str(path), b"y", force=True)
        assert path.read_bytes() == b"y"


@pytest.mark.parametrize("action", [check_target, lambda path, force: write_whole(path, b"", force=force)])
@pytest.mark.parametrize("force", [True, False])
def test_what_is_no_regular_file_is_never_a_target(tmp_path, action, force):
    os.mkfifo(tmp_path / "pipe")
    reasons = {
        tmp_path: "is a directory, not a regular file",
        tmp_path / "pipe": "is a device, pipe or socket, not a regular file",
        "/dev/null": "is a device, pipe or socket, not a regular file",
        tmp_path / "absent" / "file": f"cannot be written: there is no folder {tmp_path / 'absent'}",
    }
    for path, reason in reasons.items():
        assert fault_of(action, str(path), force=force) == (f"{path} {reason}", None)


def test_a_target_is_refused_before_any_work(tmp_path):
    (tmp_path / "old").write_text("")
    check_target(str(tmp_path / "new"), force=False)
    check_target(str(tmp_path / "old"), force=True)
    expected = (f"{tmp_path / 'old'} exists", "--force overwrites it")
    assert fault_of(check_target, str(tmp_path / "old"), force=False) == expected
    assert os.listdir(tmp_path) == ["old"]


def test_the_chunks_of_a_file_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "READ_CHUNK_BYTES", 7)
    (tmp_path / "data").write_bytes(b"x" * 20)
    assert [len(chunk) for chunk in read_chunks(str(tmp_path / "data"), 20, "--max")] == [7, 7, 6]
