"""The folder of a scan for other commands: a manifest, and a summary that is a record."""

from __future__ import annotations

import os

from mhacli.errors import MhaError

MANIFEST, SUMMARY = "manifest.json", "summary.safetensors"


def is_scan(path: str) -> bool:
    """Whether `path` is the folder of a scan, finished or not."""
    return "\0" not in path and os.path.isfile(os.path.join(path, MANIFEST))


def summary_of(path: str) -> str:
    """The path of a record: `path` itself, or the summary if it is the folder of a scan. Raises `MhaError` if the
    summary is missing."""
    summary = os.path.join(path, SUMMARY)
    if is_scan(path) and not os.path.lexists(summary):
        hint = "the same mha scan command resumes the scan"
        raise MhaError(f"{path} has no summary: its scan is not finished", hint=hint, code="unfinished", path=path)
    return summary if is_scan(path) else path
