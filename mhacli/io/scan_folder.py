"""The folder of a scan as other commands see it: a folder with a manifest, whose summary is a record."""

from __future__ import annotations

import os

from mhacli.errors import MhaError

MANIFEST, SUMMARY = "manifest.json", "summary.safetensors"


def is_scan(path: str) -> bool:
    """Whether a path is that of the folder of a scan, finished or not."""
    return "\0" not in path and os.path.isfile(os.path.join(path, MANIFEST))


def summary_of(path: str) -> str:
    """The file of the record of a path: the path itself, or the summary in the folder of a scan. Raises `MhaError` where that is
    not there yet."""
    if not is_scan(path):
        return path
    summary = os.path.join(path, SUMMARY)
    if not os.path.lexists(summary):
        raise MhaError(
            f"{path} has no summary: its scan is not finished",
            hint="the same mha scan command resumes the scan",
            code="unfinished",
            path=path,
        )
    return summary
