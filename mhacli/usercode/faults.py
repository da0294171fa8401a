"""What goes wrong in foreign code, in words: the exception, its line, and the errors that name
them. Nothing here loads torch.
"""

import linecache
import os
import re
import sysconfig
import traceback
from pathlib import Path
from typing import NamedTuple

from mhacli.errors import MhaError

_MOST_CHARACTERS = 300
_INSTALLED = ("site-packages", "dist-packages")
_LIBRARY = tuple(os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "platstdlib"))
_FRAME = re.compile(r'^ +File "(.*)", line (\d+) in ', re.MULTILINE)
_OURS = os.path.join(str(Path(__file__).parents[1]), "")


class SourceLine(NamedTuple):
    """A line of a file without its indentation; `file` is None if unknown."""

    file: str | None = None
    line: int | None = None
    source: str = ""

    @property
    def text(self) -> str:
        """The location and the line: `my.py:3 says: x = 1 / 0`."""
        return f"{shown_path(self.file or '')}:{self.line}" + (
            f" says: {self.source}" if self.source else ""
        )


def shown_path(path: str) -> str:
    """The path relative to the working directory, absolute if outside it."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):  # the working directory is deleted, or on another drive
        return path
    return path if relative.startswith(os.pardir) else relative


def is_user_file(file: str) -> bool:
    """Whether a file belongs to the user: not to Python, mha or an installed package."""
    if not file or file.startswith("<"):
        return False
    path = os.path.abspath(file)
    return not path.startswith((*_LIBRARY, _OURS)) and not any(
        part in _INSTALLED for part in Path(path).parts
    )


def exception_text(fault: BaseException) -> str:
    """The class and the first line of an exception, as Python prints them: `ValueError: 3 is
    odd`.
    """
    lines = [line for line in traceback.format_exception_only(fault) if not line.startswith(" ")]
    return lines[0][:_MOST_CHARACTERS].splitlines()[0]


def source_line_of(fault: BaseException, file: str | None = None) -> SourceLine | None:
    """The innermost line of user code, or of `file`, in the traceback; None if there is none."""
    if (
        isinstance(fault, SyntaxError)
        and fault.filename
        and fault.lineno
        and os.path.isfile(fault.filename)
    ):
        return source_line(fault.filename, fault.lineno)
    frames = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(fault.__traceback__)
    ]
    return next(
        (
            source_line(*each)
            for each in reversed(frames)
            if each[0] == file or is_user_file(each[0])
        ),
        None,
    )


def passed_user_code_last(fault: BaseException) -> bool:
    """Whether code of the user, and not of mha, is the innermost of both in the traceback."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(fault.__traceback__)]
    last = next((f for f in reversed(files) if f.startswith(_OURS) or is_user_file(f)), "")
    return last != "" and not last.startswith(_OURS)


def source_line(file: str, line: int) -> SourceLine:
    """A line of a file, with its text."""
    return SourceLine(file, line, linecache.getline(file, line).strip()[:_MOST_CHARACTERS])


def source_line_in_dump(dump: str) -> SourceLine | None:
    """The innermost line of user code in the last thread of a `faulthandler` dump; None if there is
    none.
    """
    for name, line in _FRAME.findall(dump.rpartition("hread 0x")[2]):
        file = (
            name.encode().decode("unicode_escape") if "\\" in name else name
        )  # non-ASCII characters are escaped
        if is_user_file(file) and os.path.isfile(file):
            return source_line(file, int(line))
    return None


_NO_CUDA = (
    "not compiled with CUDA|NVIDIA driver|No CUDA GPUs|no CUDA-capable device|object on a CUDA"
    " device but"
)


def user_code_error(
    subject: str, fault: BaseException, file: str | None, *, code: str, advice: str | None = None
) -> MhaError:
    """The error for an exception in user code. `subject` names the failure, such as `my.py could
    not be imported`.
    """
    line = source_line_of(fault, file)
    text = exception_text(fault)
    if re.search(_NO_CUDA, text):
        subject += ": it needs a CUDA device, which this machine does not have"
        code = "no-device"
    hints = filter(None, (line and line.text, advice))
    return MhaError(
        f"{subject}: {text}",
        hint="; ".join(hints) or None,
        code=code,
        path=line.file if line else file,
    )
