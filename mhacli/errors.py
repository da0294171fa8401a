"""The one kind of error that a user can fix, and the command that installs a missing library.

A message says in plain words what is wrong, in lower case, with the value and with the option as it
is typed, and what would be valid; the hint is a line of its own that says what to type. Anything
that is not an `MhaError` is a bug of ours.
"""

import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

EXIT_FAILED = 1
"""The exit code of an error of the run."""
EXIT_USAGE = 2
"""The exit code of an option or argument that cannot mean anything."""
EXIT_CHECK = 3
"""The exit code of a run whose check says no."""


_COMMAND = re.compile(
    r"\bmha (bench|check|decode|diff|doctor|effect|explain|heads|run|samples|scan|show|trace|view"
    r"|vocab|weights)\b"
)
_NAMES = {
    "direction": "directions",
    "head": "heads",
    "heads": "n_heads",
    "kv-heads": "n_kv_heads",
    "layer": "layers",
    "sink-window": "sink",
    "verify": "n_verified",
}
_OF_SCREENS = (
    (r" \(--(all|tolerance|verbose)\b[^()]*\)", ""),
    ("with --json", "in its table"),
    ("--keep pattern", 'keep=["pattern"]'),
    ("--keep-limit", "keep_limit="),
    ("--layer N --head H draws", "record.pattern(layer=…, head=…) draws"),
)
_OF_ARGUMENTS = (
    (r"\b(compare|with) mha trace ", r"\1 "),
    (r"--(\S*)arg (')?([\w.]+)=((?(2)[^']*|[^\s;,]+))(?(2)')", r'--\1arg={"\3": \4}'),
    (r"} --\S*arg={", ", "),
    (r"--(\S*)arg\b", r"--\1arguments"),
    (r"--(budget|call-limit|max-time|time-limit)\b", r"--\1-s"),
    (r"--(force|raw)\b", r"--\1=True"),
)


def screen_in_python(words: str) -> str:
    """What a screen says of its options, for Python; data such as tokens stay as they are."""
    for typed, spelled in _OF_SCREENS:
        words = re.sub(typed, spelled, words)
    return words


def in_python(words: str) -> str:
    """What is said of options, with the names that parameters of Python have; what a command would
    do is left out behind a semicolon.

    >>> in_python("--kv-heads 3 does not divide the 4 query heads")
    'n_kv_heads=3 does not divide the 4 query heads'
    """
    words = screen_in_python(words)
    for typed, spelled in _OF_ARGUMENTS:
        words = re.sub(typed, spelled, words)
    clauses = words.split("; ")
    words = "; ".join(clause for clause in clauses if not _COMMAND.search(clause)) or words
    return re.sub(r"(?<![\w-])--(no-)?([a-z][a-z-]*)( (?=[-./\d'\"]|[A-Z]{2}))?", _parameter, words)


def _parameter(option: re.Match[str]) -> str:
    """The name of the parameter for an option, joined to a value that stands behind it."""
    no, name, has_value = option.groups()
    name = _NAMES.get(name, name.replace("-", "_"))
    return f"{name}=False" if no else name + ("=" if has_value else "")


class MhaError(Exception):
    """An error that the user can fix.

    `message` and `hint` name parameters of Python, `typed_message` and `typed_hint` the options of
    the command line. `code` is a stable word for programs, `exit_code` the exit code of the process
    (1 failed, 2 usage, 3 a check says no), `path` the file concerned. All texts may hold untrusted
    characters: the code that prints them escapes them.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        code: str = "failed",
        exit_code: int = EXIT_FAILED,
        path: str | None = None,
    ) -> None:
        super().__init__(in_python(message))
        self.typed_message, self.typed_hint = message, hint
        self.code, self.exit_code, self.path = code, exit_code, path
        if self.hint:
            self.add_note(f"hint: {self.hint}")  # shown in a traceback

    @property
    def message(self) -> str:
        """What is wrong."""
        return in_python(self.typed_message)

    @property
    def hint(self) -> str | None:
        """How to mend it; None where only a command of mha would."""
        words = in_python(self.typed_hint or "")
        return None if _COMMAND.search(words) else words or None

    def typed(self) -> dict[str, Any]:
        """The arguments of an equal error."""
        return {
            "message": self.typed_message,
            "hint": self.typed_hint,
            "code": self.code,
            "exit_code": self.exit_code,
            "path": self.path,
        }


def lacks_memory(fault: BaseException) -> bool:
    """Whether memory is missing; torch says so in words."""
    words = ("allocate memory", "out of memory")
    text = "".join(traceback.format_exception_only(fault))  # `str` of a user's may raise
    return isinstance(fault, MemoryError) or any(word in text for word in words)


class UsageError(MhaError):
    """An option or argument that cannot mean anything: decided before any work, exit code 2."""

    def __init__(self, message: str, *, hint: str | None = None, path: str | None = None) -> None:
        super().__init__(message, hint=hint, code="usage", exit_code=EXIT_USAGE, path=path)


def bad_file(path: str, message: str, *, hint: str | None = None) -> MhaError:
    """The error of a file whose content is wrong."""
    return MhaError(message, hint=hint, code="bad-file", path=path)


def library(module: str, user: str) -> Any:
    """A module of a library that `user` needs. Raises `MhaError`, with the command that installs
    it, if it is missing.
    """
    try:
        return import_module(module)
    except ImportError as fault:
        name = (fault.name or module).partition(".")[0].replace("_", "-")
        hint, message = (
            f"{installing(name)} installs it",
            f"{user} needs {name}, which is not installed",
        )
        raise MhaError(message, hint=hint, code="missing-extra") from None


def out_of_range(subject: str, index: int, count: int) -> str:
    """What is wrong with an index where there are `count` things.

    >>> out_of_range("--head", 7, 4)
    '--head 7 is out of range: 0 to 3'
    """
    return f"{subject} {index} is out of range: " + (
        f"0 to {count - 1}" if count > 1 else "only 0 exists"
    )


def first_names(names: Iterable[str], most: int = 8) -> str:
    """Names as a message lists them: no more than `most`, and how many others there are.

    >>> first_names("abcd", 2)
    'a, b and 2 more'
    """
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


# ----------------------------------------------------------------------- libraries that are missing


def needed_ranges() -> dict[str, str]:
    """The range that mha's own metadata names for each library; nothing where it is run without
    being installed."""
    ranges: dict[str, str] = {}
    for name, needed, _ in _requirements():
        if needed:
            ranges.setdefault(name, needed)
    return ranges


def missing_library(fault: ModuleNotFoundError) -> MhaError | None:
    """The error for a library that every installation of mha needs, with the command that installs
    all of those that are missing; None for any other module."""
    name = (fault.name or "").partition(".")[0]
    needed = [library for library, _, extra in _requirements() if not extra]
    if name not in needed:
        return None
    missing = [library for library in needed if library == name or find_spec(library) is None]
    return MhaError(
        f"mha needs {name}, which is not installed",
        hint=f"{installing(*missing)} installs what is missing",
        code="missing-library",
    )


def failed_import(fault: BaseException) -> MhaError | None:
    """The error for a library that mha needs which is missing, or whose own import raised `fault`,
    as torch's does for a wrong TORCH_LOGS; None for any other exception.
    """
    if isinstance(fault, ModuleNotFoundError) and (missing := missing_library(fault)):
        return missing
    modules = [
        str(frame.f_globals.get("__name__")).partition(".")[0]
        for frame, _ in traceback.walk_tb(fault.__traceback__)
        if frame.f_code.co_name == "<module>"
    ]
    needed = [library for library, _, _ in _requirements()]
    if not modules or modules[-1] not in needed:
        return None
    reason = " ".join(f"{type(fault).__name__}: {fault}".replace("\\n", " ").split())
    return MhaError(
        f"{modules[-1]} cannot be imported: {reason:.150}",
        hint=f"python -c 'import {modules[-1]}' shows the whole error",
        code="broken-library",
    )


class _Requirement(NamedTuple):
    """A library that mha's metadata names, its range, and whether only an extra needs it."""

    library: str
    range: str
    is_extra: bool


def _requirements() -> Iterator[_Requirement]:
    """What mha's metadata names. It is read without `packaging`, which may be what is missing."""
    from importlib import metadata  # only for an error

    try:
        lines = metadata.requires("mhacli") or []
    except metadata.PackageNotFoundError:
        return
    for line in lines:
        requirement, _, condition = line.partition(";")
        match = re.fullmatch(r"([\w.-]+)(?:\[[^]]*])? *(.*)", requirement.strip())
        if match:
            yield _Requirement(match[1].lower(), match[2], "extra" in condition)


def installing(*libraries: str) -> str:
    """The command that installs libraries in the ranges that mha needs, or brings them there. It
    names the libraries and not an extra of mha, for it must work wherever mha was installed from.
    """
    ranges = needed_ranges()
    return " ".join(["pip install", *(f'"{name}{ranges.get(name, "")}"' for name in libraries)])


# ------------------------------------------------------------------------------- calls of libraries

T = TypeVar("T")


def guarded(what: str, path: str, call: Callable[[], T]) -> T:
    """The result of a call of a library that uses `what` of a file or folder.

    Its exceptions, also panics of native code, which are no `Exception` and write to stderr, become
    an `MhaError` of one line.
    """
    try:
        with silent_stderr():
            return call()
    except (MemoryError, MhaError):
        raise
    except BaseException as fault:
        if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":
            raise  # an interrupt is not a fault of the file
        reason = " ".join(f"{type(fault).__name__}: {fault}".split())
        raise bad_file(path, f"{what} of {path} cannot be used: {reason:.300}") from None


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Discards everything written to stderr within the context, even by native code."""
    saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
