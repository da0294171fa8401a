"""What the installed program does when its streams, its files, its terminal or its surroundings fail."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.processes import (
    NO_TORCH,
    PATIENCE_S,
    SHELL,
    WITH_TORCH,
    WITHOUT_ROOT_RIGHTS,
    Launch,
    Outcome,
    attempt,
    bufferings,
    fingerprint,
    forms,
    is_root,
    require_invariants,
    shell_code,
    start,
    state_of,
)

TEXT = "the cat sat on the mat 日本 é"
WORDS = ["the", "cat", "sat", "on", "mat"]
READ_ONLY_RIGHTS = WITHOUT_ROOT_RIGHTS if is_root() else SHELL
Env = dict[str, str | None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record."""
    folder = tmp_path_factory.mktemp("saved")
    attempt(folder, "run", TEXT, "--repeat", "1", "--save", "r", writes={"r"}, launch=Launch(WITH_TORCH))
    return folder / "r"


@pytest.fixture
def folder(tmp_path: Path, saved: Path) -> Path:
    """A folder with a record `r` and a text with many different words."""
    shutil.copy(saved, tmp_path / "r")
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in range(3000)))
    return tmp_path


# -------------------------------------------------------------------------------------------------------------- streams

LONG = [["vocab", "--file", "text.txt", "--all"], ["show", "r", "--all"]]
SHORT = [["vocab", "a b"], ["show", "r", "--view", "none"]]
HELP = [["--version"], ["--help"], ["run", "--help"], ["vocab", "--help"]]


def ended(process: subprocess.Popen[bytes], form: tuple[str, ...]) -> Outcome:
    """How a process ended that was started with its stderr in a pipe."""
    stderr = process.communicate(timeout=PATIENCE_S)[1].decode()
    return Outcome(shell_code(process.returncode), "", stderr, 0, form)


@forms
@bufferings
@pytest.mark.parametrize("words", LONG, ids=["vocab", "show"])
def test_a_reader_that_takes_one_line_of_a_long_output_is_served_in_silence(
    folder: Path, words: list[str], form: tuple[str, ...], buffering: Env
) -> None:
    process = start(
        folder, [words[0], *form, *words[1:]], Launch(env=buffering), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline()
    process.stdout = None
    done = ended(process, form)
    require_invariants(done, {0, 141})
    assert done.stderr == ""


@pytest.mark.sampled(4)
@bufferings
@pytest.mark.parametrize("words", [*SHORT, *([w[0], "--json", *w[1:]] for w in SHORT), *HELP], ids=" ".join)
def test_a_reader_that_takes_nothing_of_a_short_output_is_served_in_silence(
    folder: Path, words: list[str], buffering: Env
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = attempt(folder, *words, code=(0, 141), launch=Launch(env=buffering, stdout=writing))
    os.close(writing)
    assert done.stderr == ""


@pytest.mark.sampled(1)
@bufferings
def test_a_run_whose_reader_left_ends_in_silence(folder: Path, buffering: Env) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = attempt(
        folder, "run", TEXT, "--repeat", "1", code=(0, 141), launch=Launch(WITH_TORCH, buffering, stdout=writing)
    )
    os.close(writing)
    assert done.stderr == ""


@bufferings
@pytest.mark.parametrize(
    ("words", "form"),
    [*((w, f) for w in (*SHORT, LONG[0]) for f in ((), ("--json",))), *((w, ()) for w in HELP)],
    ids=lambda value: " ".join(value) or "plain",
)
def test_a_full_device_as_stdout_is_told(folder: Path, words: list[str], form: tuple[str, ...], buffering: Env) -> None:
    with Path("/dev/full").open("wb") as full:
        launch = Launch(env=buffering, stdout=full.fileno())
        attempt(folder, *words, code=1, form=form, says=["stdout", "No space left"], launch=launch)


@bufferings
@pytest.mark.parametrize(
    ("words", "form"),
    [*((w, f) for w in SHORT for f in ((), ("--json",))), *((w, ()) for w in HELP)],
    ids=lambda value: " ".join(value) or "plain",
)
def test_a_closed_stdout_is_told(folder: Path, words: list[str], form: tuple[str, ...], buffering: Env) -> None:
    launch = Launch(env=buffering, shell=f"{SHELL} >&-")
    attempt(folder, *words, code=1, form=form, says=["stdout", "closed"], launch=launch)


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "buffering"),
    [("run", {}), pytest.param("trace", {"PYTHONUNBUFFERED": "1"}, marks=pytest.mark.full)],
    ids=["run-buffered", "trace-unbuffered"],
)
def test_a_full_device_is_told_after_computing(folder: Path, command: str, buffering: Env) -> None:
    with Path("/dev/full").open("wb") as full:
        launch = Launch(WITH_TORCH, buffering, stdout=full.fileno())
        attempt(folder, command, "a b", "--repeat", "1", code=1, says=["stdout", "No space left"], launch=launch)


@pytest.mark.sampled(2)
@forms
@pytest.mark.parametrize("shell", [f"{SHELL} 2>&-", f"{SHELL} 2>/dev/full"], ids=["closed", "full"])
def test_an_error_that_cannot_be_told_keeps_its_exit_code(folder: Path, shell: str, form: tuple[str, ...]) -> None:
    process = start(folder, ["run", *form, "a", "--heads", "0"], Launch(shell=shell), stdout=subprocess.PIPE)
    assert process.communicate(timeout=PATIENCE_S)[0] == b""
    assert process.returncode == 2


# -------------------------------------------------------------------------------------------------------------- signals

PAUSE = "from pathlib import Path\nimport time\nPath('modules/reached').touch()\ntime.sleep(600)\n"
SLOW_SAVE = {
    **NO_TORCH,
    "sitecustomize": "import os\nreal = os.fsync\n"
    "def slow(fd):\n    real(fd)\n    " + PAUSE.replace("\n", "\n    ") + "\nos.fsync = slow\n",
}
SIGNALS = pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)


def when(condition: Callable[[], bool]) -> None:
    """Returns as soon as the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def interrupted(
    folder: Path, words: list[str], launch: Launch, number: int, ready: Callable[[int], bool]
) -> tuple[int, bytes, bytes]:
    """Exit code, stdout and stderr of a process that got a signal once it was `ready`. It must end before its pause does."""
    process = start(folder, words, launch, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    when(lambda: ready(process.pid))
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    return shell_code(process.returncode), stdout, stderr


def reached(folder: Path) -> Callable[[int], bool]:
    return lambda _: (folder / "modules" / "reached").exists()


@pytest.mark.sampled(2)
@SIGNALS
@pytest.mark.parametrize("module", ["typer", "torch"])
def test_a_signal_during_an_import_ends_the_process_at_once(
    tmp_path: Path, module: str, number: int, code: int
) -> None:
    launch = Launch({module: PAUSE})
    answer = interrupted(tmp_path, ["run", "a"], launch, number, reached(tmp_path))
    assert answer == (code, b"", b"")


@pytest.mark.sampled(1)
@SIGNALS
def test_a_signal_while_the_real_torch_is_loaded_ends_the_process_at_once(
    tmp_path: Path, number: int, code: int
) -> None:
    def loading(pid: int) -> bool:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()

    answer = interrupted(tmp_path, ["run", "a"], Launch(WITH_TORCH), number, loading)
    assert answer == (code, b"", b"")


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [("run", signal.SIGINT, 130), pytest.param("trace", signal.SIGTERM, 143, marks=pytest.mark.full)],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_in_the_middle_of_a_matrix_ends_the_process_at_once(
    tmp_path: Path, command: str, number: int, code: int
) -> None:
    def computing(pid: int) -> bool:
        resident_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return resident_pages * os.sysconf("SC_PAGE_SIZE") > 700_000_000

    (tmp_path / "text.txt").write_text("the cat sat on " * 800)
    before = state_of(tmp_path)
    words = [command, "--file", "text.txt", "--heads", "8", "--save", "new", "--device", "cpu"]
    answer = interrupted(tmp_path, words, Launch(WITH_TORCH), number, computing)
    assert answer == (code, b"", b"")
    assert state_of(tmp_path) == before


@SIGNALS
@pytest.mark.parametrize("target", ["old", "new"])
def test_a_signal_during_a_save_leaves_the_files_as_they_were(
    tmp_path: Path, target: str, number: int, code: int
) -> None:
    (tmp_path / "old").write_text("old")
    before = state_of(tmp_path)
    words = ["vocab", "a b", "--save", target, "--force", "--json"]
    answer = interrupted(tmp_path, words, Launch(SLOW_SAVE), number, reached(tmp_path))
    assert answer == (code, b"", b"")
    assert state_of(tmp_path) == before


# ---------------------------------------------------------------------------------------------------- saves that are cut

KILLING = """
import os, random, signal, sys, time
from mhacli.io.files import write_whole
path, rounds, size = sys.argv[1], 200, 1 << 20
random.seed(20)
first = lambda: open(path, "rb").read(1)[0]
write_whole(path, bytes([0]) * size, force=True)
for number in range(1, rounds + 1):
    before, new = first(), number % 256
    is_after = number % 2 == 1  # the kill falls after a save, in the midst of further ones; or before the first has the name
    pid = os.fork()
    if not pid:
        if not is_after:
            os.replace = lambda *paths, **options: time.sleep(600)
        while True:
            write_whole(path, bytes([new]) * size, force=True)
    while is_after and first() != new:
        time.sleep(0.0005)
    time.sleep(random.uniform(0, 0.012))
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    content = open(path, "rb").read()
    assert content == bytes([new if is_after else before]) * size, number
"""


def python(folder: Path, code: str, *words: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.full
def test_200_kills_during_a_save_leave_the_old_or_the_new_file_whole(tmp_path: Path) -> None:
    python(tmp_path, KILLING, str(tmp_path / "file"))


FAULTS = """
import errno, itertools, json, os, sys
from mhacli.errors import MhaError
from mhacli.io.files import write_whole

CALLS = ("write", "fsync", "link", "replace")
real = {name: getattr(os, name) for name in (*CALLS, "open")}
OLD, NEW = b"old" * 100, b"new" * 5000

def failing(name, n):
    calls = itertools.count(1)
    def call(*words, **options):
        if next(calls) == n:
            raise OSError(errno.EIO, "injected")
        if name == "write":
            words = (words[0], words[1][:1000])
        return real[name](*words, **options)
    return call

def without_unnamed_files(path, flags, *words, **options):
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, "no unnamed files")
    return real["open"](path, flags, *words, **options)

def attempt(name, n, existing):
    if existing:
        with open("file", "wb") as file:
            file.write(OLD)
        os.chmod("file", 0o640)
    setattr(os, name, failing(name, n))
    try:
        write_whole("file", NEW, force=existing)
        told = None
    except MhaError as fault:
        told = (fault.message, fault.exit_code)
    finally:
        setattr(os, name, real[name])
    names = os.listdir(".")
    content = open("file", "rb").read() if "file" in names else None
    mode = os.stat("file").st_mode & 0o777 if "file" in names else None
    for found in names:
        os.unlink(found)
    return told, names, content, mode

failures = {}
for unnamed, existing, name in itertools.product((True, False), (True, False), CALLS):
    os.open = real["open"] if unnamed else without_unnamed_files
    for n in itertools.count(1):
        told, names, content, mode = attempt(name, n, existing)
        assert names in ([], ["file"]), names
        assert content in (NEW, OLD if existing else None), (name, n, content)
        assert not existing or mode == 0o640, mode
        if told is None:
            assert content == NEW
            break
        assert told == ("file cannot be written: injected", 1), told
        key = f"{'un' * unnamed}named {'over' * existing} {name}"
        failures[key] = n
print(json.dumps(failures))
"""


def test_whichever_call_of_a_save_fails_the_old_or_the_new_file_is_there_whole(tmp_path: Path) -> None:
    failures = json.loads(python(tmp_path, FAULTS))
    assert failures == {
        **{f"{kind} {over} write": 15 for kind in ("named", "unnamed") for over in ("", "over")},
        **{f"{kind} {over} fsync": 2 for kind in ("named", "unnamed") for over in ("", "over")},
        **dict.fromkeys(["unnamed  link", "named  link", "unnamed over replace", "named over replace"], 1),
        "unnamed over link": 2,
    }


@forms
@pytest.mark.parametrize("target", ["old", "new"])
@pytest.mark.parametrize("call", ["write", "fsync", "link"])
def test_a_save_that_fails_is_told(tmp_path: Path, call: str, target: str, form: tuple[str, ...]) -> None:
    (tmp_path / "old").write_text("old")
    failing = f"import os\ndef fail(*_, **__):\n    raise OSError(5, 'injected')\nos.{call} = fail\n"
    launch = Launch({**NO_TORCH, "sitecustomize": failing})
    words = ["vocab", "a b", "--save", target, "--force"]
    attempt(tmp_path, *words, code=1, form=form, says=[target, "cannot be written", "injected"], launch=launch)


@forms
@pytest.mark.parametrize("target", ["old", "new"])
def test_a_file_size_limit_during_a_save_is_told(folder: Path, target: str, form: tuple[str, ...]) -> None:
    (folder / "old").write_text("old")
    words = ["vocab", "--file", "text.txt", "--save", target, "--force"]
    launch = Launch(shell=f"ulimit -f 100; {SHELL}")
    attempt(folder, *words, code=1, form=form, says=[target, "cannot be written", "too large"], launch=launch)


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


@forms
@pytest.mark.parametrize("target", ["old", "new"])
def test_a_full_disk_during_a_save_is_told(folder: Path, small_disk: Path, target: str, form: tuple[str, ...]) -> None:
    (small_disk / "old").write_text("old")
    words = ["vocab", "--file", "text.txt", "--save", f"disk/{target}", "--force"]
    attempt(folder, *words, code=1, form=form, says=[f"disk/{target}", "cannot be written", "No space left"])


# -------------------------------------------------------------------------------------------------------------- targets


@forms
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664])
def test_a_save_keeps_the_link_and_the_mode_of_its_target(tmp_path: Path, mode: int, form: tuple[str, ...]) -> None:
    target, twin, link = tmp_path / "target", tmp_path / "twin", tmp_path / "link"
    target.write_text("old")
    target.chmod(mode)
    twin.hardlink_to(target)
    link.symlink_to("target")
    words = ["vocab", "b a", "--save", "link", "--force"]
    attempt(tmp_path, *words, form=form, writes={"target"}, launch=Launch(shell=f"umask 077; {SHELL}"))
    assert [entry["token"] for entry in json.loads(target.read_text())["tokens"]] == ["a", "b"]
    assert stat.S_IMODE(target.stat().st_mode) == mode
    assert twin.read_text() == "old"


def test_new_files_obey_the_umask(tmp_path: Path) -> None:
    launch = Launch(WITH_TORCH, shell=f"umask 027; {SHELL}")
    words = ["run", "a", "--repeat", "1", "--save", "r", "--save-weights", "w"]
    attempt(tmp_path, *words, writes={"r", "w"}, launch=launch)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("r", "w")} == {0o640}


SAVERS = pytest.mark.parametrize(
    ("words", "form"),
    [
        (["vocab", "a", "--save"], ()),
        (["run", "a", "--save"], ("--json",)),
        (["trace", "a", "--save-weights"], ()),
    ],
    ids=["vocab-plain", "run-json", "trace-plain"],
)


@SAVERS
@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("fifo", "a device, pipe or socket"),
        ("folder", "a directory"),
        ("folder/", "a directory"),
        ("to-fifo", "a device, pipe or socket"),
        ("loop", "loop of symbolic links"),
        ("missing/new", "no folder"),
        ("file/new", "not a folder"),
        ("file", "--force"),
        ("n" * 300, "too long a name"),
    ],
    ids=["fifo", "directory", "directory-slash", "link-to-fifo", "loop", "missing-folder", "below-a-file", "exists", "long-name"],
)  # fmt: skip
def test_a_target_that_cannot_be_a_file_is_refused_at_once(
    tmp_path: Path, words: list[str], target: str, why: str, form: tuple[str, ...]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    (tmp_path / "to-fifo").symlink_to("fifo")
    (tmp_path / "loop").symlink_to("loop")
    force = [] if target == "file" else ["--force"]
    attempt(tmp_path, *words, target, *force, code=1, form=form, says=[target, why])


@SAVERS
def test_a_device_is_refused_and_stays_what_it_was(tmp_path: Path, words: list[str], form: tuple[str, ...]) -> None:
    node = tmp_path / "null"
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("needs the right to make a device node")
    before = fingerprint(node)
    attempt(tmp_path, *words, "null", "--force", code=1, form=form, says=["null", "a device"])
    assert fingerprint(node) == before


@SAVERS
@pytest.mark.parametrize("target", ["new", "old"])
def test_a_folder_that_cannot_be_written_is_told(
    tmp_path: Path, words: list[str], target: str, form: tuple[str, ...]
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    (locked / "old").write_text("old")
    locked.chmod(0o555)
    launch = Launch(shell=READ_ONLY_RIGHTS)
    says = [f"locked/{target}"]
    attempt(tmp_path, *words, f"locked/{target}", "--force", code=1, form=form, says=says, launch=launch)


def test_a_save_over_the_file_that_was_read_gives_the_new_file_whole(tmp_path: Path) -> None:
    words = ["run", "a b", "--repeat", "1", "--view", "none", "--save-weights", "w"]
    attempt(tmp_path, *words, writes={"w"}, launch=Launch(WITH_TORCH))
    before = (tmp_path / "w").read_bytes()
    attempt(tmp_path, *words, "--weights", "w", "--force", writes={"w"}, launch=Launch(WITH_TORCH))
    assert (tmp_path / "w").read_bytes() == before
    (tmp_path / "t").write_text("b a")
    done = attempt(tmp_path, "vocab", "--file", "t", "--save", "t", "--force", form=["--json"], writes={"t"})
    assert (tmp_path / "t").read_text() == done.stdout


@pytest.mark.full
def test_writers_on_one_path_leave_one_whole_file(tmp_path: Path) -> None:
    texts = {str(i): " ".join(f"writer{i}word{j}" for j in range(2000)) for i in range(4)}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    whole = [attempt(tmp_path, "vocab", "--file", name, form=["--json"]).stdout for name in texts]
    for force, codes in (([], {0, 1}), (["--force"], {0})):
        words = [["vocab", "--file", name, "--save", "one", *force] for name in texts]
        writers = [start(tmp_path, w, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for w in words]
        ends = [writer.wait(PATIENCE_S) for writer in writers]
        assert set(ends) == codes
        assert force or ends.count(0) == 1
        assert (tmp_path / "one").read_text() in whole
    assert set(state_of(tmp_path)) == {*texts, "one"}


# ------------------------------------------------------------------------------------------------------------- terminals

WIDE_TERMINAL = (80, 24)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("env", "terminal", "piped"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": None}, False, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
        ({"CI": "true", "GITHUB_ACTIONS": "true"}, True, False),
    ],
    ids=["bare", "NO_COLOR", "NO_COLOR-empty", "FORCE_COLOR", "both", "dumb", "no-TERM", "dumb-FORCE_COLOR", "CI"],
)  # fmt: skip
def test_colour_obeys_the_environment_and_never_reaches_json(
    folder: Path, env: Env, terminal: bool, piped: bool
) -> None:
    def coloured(*more: str, on: tuple[int, int] | None, allowed: bool = True) -> bool:
        launch = Launch(env={"TERM": "xterm-256color", **env}, terminal=on)
        return "\x1b[" in attempt(folder, "show", "r", *more, colour=allowed, launch=launch).stdout

    assert coloured(on=WIDE_TERMINAL, allowed=terminal) == terminal
    assert coloured(on=None, allowed=piped) == piped
    assert not coloured("--json", on=WIDE_TERMINAL, allowed=False)


@pytest.mark.parametrize(
    "env", [{"FORCE_COLOR": "1"}, {"NO_COLOR": "1", "TERM": "dumb"}], ids=["FORCE_COLOR", "NO_COLOR"]
)
def test_the_colour_option_overrules_the_environment(folder: Path, env: Env) -> None:
    never = Launch(env=env, terminal=WIDE_TERMINAL)
    assert "\x1b[" not in attempt(folder, "show", "r", "--color", "never", launch=never).stdout
    always = Launch(env=env)
    assert "\x1b[" in attempt(folder, "show", "r", "--color", "always", colour=True, launch=always).stdout


@pytest.mark.parametrize(
    "env", [{}, {"CI": "true", "GITHUB_ACTIONS": "true"}, {"NO_COLOR": "1", "CI": "true", "GITHUB_ACTIONS": "true"}],
    ids=["bare", "CI", "CI-NO_COLOR"],
)  # fmt: skip
@pytest.mark.parametrize("words", [["--help"], ["run", "--help"]], ids=" ".join)
def test_help_in_a_pipe_is_plain(tmp_path: Path, words: list[str], env: Env) -> None:
    assert "Usage" in attempt(tmp_path, *words, launch=Launch(env=env)).stdout


@pytest.mark.parametrize("env", [{}, {"FORCE_COLOR": "1"}], ids=["tty", "FORCE_COLOR"])
@pytest.mark.parametrize("words", [["run", "a", "--heads", "0"], ["show", "missing"]], ids=["usage", "file"])
@forms
def test_errors_are_never_coloured(tmp_path: Path, words: list[str], env: Env, form: tuple[str, ...]) -> None:
    launch = Launch(env={"TERM": "xterm-256color", **env}, terminal=WIDE_TERMINAL)
    attempt(tmp_path, *words, code=(1, 2), form=form, launch=launch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("columns", ["0", "-5", "abc", "1", "100000"])
def test_any_width_keeps_the_tokens_readable(folder: Path, columns: str) -> None:
    launch = Launch(env={"COLUMNS": columns})
    for words in (
        ["vocab", TEXT],
        *(["show", "r", "--tokens", "--view", view] for view in ("matrix", "heatmap", "top")),
    ):
        shown = attempt(folder, *words, launch=launch).stdout
        assert set(WORDS) <= set(shown.replace("\n", " ").split())
        assert max(map(len, shown.splitlines())) <= 500
    for words in (["--help"], ["run", "--help"]):
        attempt(folder, *words, launch=launch)


@pytest.mark.full
def test_a_tiny_terminal_keeps_the_tokens_readable(folder: Path) -> None:
    launch = Launch(env={"TERM": "dumb"}, terminal=(10, 3))
    for words in (
        ["vocab", TEXT],
        ["show", "r", "--tokens"],
        ["show", "r", "--view", "heatmap", "--tokens"],
        ["show", "r", "--view", "top"],
    ):
        assert set(WORDS) <= set(re.findall(r"\w+", attempt(folder, *words, launch=launch).stdout))


ASCII: Env = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "env", [ASCII, {**ASCII, "PYTHONIOENCODING": None}, {"LC_ALL": "C"}], ids=["ascii", "C-strict", "C"]
)
def test_a_poor_encoding_keeps_the_tokens_readable(folder: Path, env: Env) -> None:
    (folder / "wide.txt").write_text(TEXT)
    for words in (
        ["vocab", "--file", "wide.txt"],
        *(["show", "r", "--view", view] for view in ("matrix", "heatmap", "top")),
    ):
        shown = attempt(folder, *words, launch=Launch(env=env)).stdout
        assert set(WORDS) <= set(re.findall(r"\w+", shown))
        assert shown.isascii() == (env["LC_ALL"] == "C" and len(env) > 1)
        assert "日本" in shown or r"\u65e5\u672c" in shown
    attempt(folder, "vocab", "--file", "missing-é", code=1, says=["missing-"], launch=Launch(env=env))
    attempt(folder, "run", "--help", launch=Launch(env=env))


@pytest.mark.full
@pytest.mark.parametrize("env", [{"COLUMNS": "1"}, ASCII], ids=["narrow", "ascii"])
def test_a_walkthrough_on_a_poor_screen_keeps_the_tokens_readable(folder: Path, env: Env) -> None:
    words = ["trace", TEXT, "--values", "--cell", "0,1,2", "--repeat", "1"]
    shown = attempt(folder, *words, launch=Launch(WITH_TORCH, env=env)).stdout
    for word in ("cat", "sat"):
        assert word in shown


# ---------------------------------------------------------------------------------------------------------- surroundings


@pytest.mark.full
def test_a_home_that_is_unset_or_read_only_does_not_matter(folder: Path) -> None:
    locked = folder / "locked"
    locked.mkdir(0o555)
    cache = {"HOME": "locked", "XDG_CACHE_HOME": "locked", "TMPDIR": "locked"}
    commands = (["vocab", "a"], ["show", "r"], ["--help"], ["show", "r"])
    for env, words in zip(({"HOME": None}, {"HOME": ""}, {"HOME": "/no/such/home"}, cache), commands, strict=True):
        attempt(folder, *words, launch=Launch(env=env, shell=READ_ONLY_RIGHTS))
    launch = Launch(WITH_TORCH, {**cache, "USER": None}, READ_ONLY_RIGHTS)
    attempt(folder, "run", "a", "--repeat", "1", launch=launch)


DELETED = f"mkdir gone; cd gone; rmdir ../gone; {SHELL}"


@pytest.mark.sampled(1)
@forms
def test_a_deleted_working_directory_does_not_matter_to_what_is_elsewhere(folder: Path, form: tuple[str, ...]) -> None:
    launch = Launch(shell=DELETED)
    attempt(folder, "vocab", "a b", form=form, launch=launch)
    attempt(folder, "show", str(folder / "r"), form=form, launch=launch)
    attempt(folder, "vocab", "a b", "--save", str(folder / "v"), form=form, writes={"v"}, launch=launch)
    attempt(folder, "run", "a", "--weights", "w", code=1, form=form, says=["w", "does not exist"], launch=launch)


@pytest.mark.sampled(1)
@forms
def test_a_file_in_a_deleted_working_directory_is_told(folder: Path, form: tuple[str, ...]) -> None:
    for words in (["vocab", "a", "--save", "v"], ["run", "a", "--save-weights", "v"], ["run", "a", "--html", "v"]):
        attempt(folder, *words, code=1, form=form, says=["v ", "deleted"], launch=Launch(shell=DELETED))


@pytest.mark.sampled(1)
@forms
def test_computing_in_a_deleted_working_directory_works_or_is_told(folder: Path, form: tuple[str, ...]) -> None:
    attempt(folder, "run", "a", "--repeat", "1", code=(0, 1), form=form, launch=Launch(WITH_TORCH, shell=DELETED))
