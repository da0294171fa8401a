"""`mha samples`: writes the sample texts and the sample code of the manual."""

from __future__ import annotations

import os
from pathlib import Path

import mhacli
from mhacli.cli.console import note, write
from mhacli.cli.parameters import command
from mhacli.errors import MhaError
from mhacli.io.files import write_whole
from mhacli.settings import setting

_FOLDER = "sample_texts"
_DIR = "The folder to write them to. It is made where there is none."


@command("mha samples", "mha samples texts")
def samples(
    *, folder: str = setting(_FOLDER, "", _DIR, argument=True, metavar="[DIR]", default=_FOLDER)
) -> None:
    """Writes the sample files that the folder lacks, and prints their paths. Raises `MhaError`,
    before any is written, where a file of their name has other contents.
    """
    missing = {}
    for sample in sorted(filter(Path.is_file, _folder().iterdir())):  # pip adds compiled code
        path = os.path.join(folder, sample.name)
        if not os.path.lexists(path):
            missing[path] = sample.read_bytes()
        elif not os.path.isfile(path) or Path(path).read_bytes() != sample.read_bytes():
            hint = "mha samples DIR writes the sample files to another folder"
            raise MhaError(f"{path} exists", hint=hint, code="exists", path=path)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as fault:
        message = f"{folder} cannot be made: {fault.strerror}"
        raise MhaError(message, code="unwritable", path=folder) from None
    for path, data in missing.items():
        write_whole(path, data, force=False)
    write("".join(f"{path}\n" for path in missing))
    if not missing:
        note(f"{folder} has all sample files")


def _folder() -> Path:
    """The sample files: within the installed package, in a checkout beside it."""
    package = Path(mhacli.__file__).parent
    installed = package / _FOLDER
    return installed if installed.is_dir() else package.parent / _FOLDER
