"""What went wrong in user code: the exception in one line, and the line of their file that raised it."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from pathlib import Path
from typing import Final, NamedTuple

from mhacli.errors import MhaError

_MOST_CHARACTERS: Final = 300
_INSTALLED: Final = ("site-packages", "dist-packages")
_LIBRARY: Final = tuple(os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "platstdlib"))
_FRAME: Final = re.compile(r'^ +File "(.*)", line (\d+) in ', re.MULTILINE)
_OURS: Final = os.path.join(str(Path(__file__).parents[2]), "")


class SourceLine(NamedTuple):
    """A line of a file, and what it says, without its indentation."""

    file: str
    line: int
    source: str

    @property
    def text(self) -> str:
        """Where and what: `my.py:3 says: x = 1 / 0`."""
        return f"{shown_path(self.file)}:{self.line}" + (f" says: {self.source}" if self.source else "")


def shown_path(path: str) -> str:
    """A path as a reader of the working directory would write it, absolute where it leads out of it."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):  # the working directory is gone, or lies on another drive
        return path
    return path if relative.startswith(os.pardir) else relative


def is_user_file(file: str) -> bool:
    """Whether a file is the user's own: not Python's, not ours, and not installed."""
    if not file or file.startswith("<"):
        return False
    path = os.path.abspath(file)
    return not path.startswith((*_LIBRARY, _OURS)) and not any(part in _INSTALLED for part in Path(path).parts)


def exception_text(fault: BaseException) -> str:
    """The exception as its kind and the first line of what it says: `ValueError: 3 is odd`."""
    kind = type(fault).__name__
    try:
        lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    except Exception:  # an exception of theirs that cannot say what it is
        lines = []
    if isinstance(fault, SyntaxError):
        lines = [fault.msg or ""]
    return f"{kind}: {lines[0][:_MOST_CHARACTERS]}" if lines and lines[0] else kind


def source_line_of(fault: BaseException, file: str | None = None) -> SourceLine | None:
    """The innermost line of the user's own code, or of `file`, that an exception passed; None where it passed none."""
    if isinstance(fault, SyntaxError) and fault.filename and fault.lineno and os.path.isfile(fault.filename):
        return source_line(fault.filename, fault.lineno)
    try:
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(fault.__traceback__)]
    except Exception:
        return None
    for name, line in reversed(frames):
        if name == file or is_user_file(name):
            return source_line(name, line)
    return None


def source_line(file: str, line: int) -> SourceLine:
    """A line of a file with what it says."""
    return SourceLine(file, line, linecache.getline(file, line).strip()[:_MOST_CHARACTERS])


def source_line_in_dump(dump: str) -> SourceLine | None:
    """The innermost line of the user's own code in what `faulthandler` writes; None where it names none."""
    for name, line in _FRAME.findall(dump):
        file = name.encode().decode("unicode_escape") if "\\" in name else name  # how it writes what is not ASCII
        if is_user_file(file) and os.path.isfile(file):
            return source_line(file, int(line))
    return None


def shortened(text: str, most: int) -> str:
    """The text, of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


_NO_CUDA: Final = re.compile(
    r"not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device"
    r"|NVIDIA driver on your system|Attempting to deserialize object on a CUDA device but"
)
_TWO_DEVICES: Final = re.compile(r"Expected all tensors to be on the same device.*\bcuda\b", re.S)


def lacks_cuda(text: str) -> bool:
    """Whether an exception says that CUDA was asked for where torch has no device for it."""
    return _NO_CUDA.search(text) is not None


def is_on_cuda(text: str) -> bool:
    """Whether an exception says that some tensors are on a CUDA device, and others are not."""
    return _TWO_DEVICES.search(text) is not None


def user_code_error(
    subject: str, fault: BaseException, file: str | None, *, code: str, advice: str | None = None
) -> MhaError:
    """The error that says what their code raised: `subject` is what must be so, such as `my.py must be importable`."""
    place = source_line_of(fault, file)
    hints = [place.text] if place else []
    hints += [advice] if advice else []
    return MhaError(
        f"{subject}, got {exception_text(fault)}",
        hint="; ".join(hints) or None,
        code=code,
        path=place.file if place else file,
    )
