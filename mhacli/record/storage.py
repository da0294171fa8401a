"""Reads a record from its file. A changed or damaged file is refused: its JSON and every array have a checksum.

Files of earlier versions have none, and are read as they are.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from mhacli.errors import MhaError, UsageError, bad_file
from mhacli.io.data import checksum, decode, json_checksum, with_earlier_config
from mhacli.io.safetensors import read_tensor_file, read_tensor_header
from mhacli.record.record import SCHEMA, Record

MANIFEST, SUMMARY = "manifest.json", "summary.safetensors"
"""The files in the folder of a scan that other commands know; the summary is a record."""
_CHANGED = "was changed or damaged after it was saved"
_DTYPES = ("F64", "F32", "F16", "I64", "I32", "BOOL")


def load(path: str | os.PathLike[str]) -> Record:
    """The record in a file or in the folder of a scan, with its arrays in memory. Raises `MhaError` for a file that is
    no record, or was changed."""
    path = os.fspath(path)
    if is_scan(path):
        path, scan = os.path.join(path, SUMMARY), path
        if not os.path.lexists(path):
            hint = "the same mha scan command resumes the scan"
            raise MhaError(f"{scan} has no summary: its scan is not finished", hint=hint, code="unfinished", path=scan)
    file = read_tensor_header(path)
    document = file.metadata if isinstance(file.metadata, dict) else {}
    if document.get("schema") != SCHEMA:
        found = document.get("schema") or document.get("format") or "no schema"
        hint = "mha run TEXT --save FILE writes a record"
        raise bad_file(path, f"{path} is not a record of schema {SCHEMA}: it has {found}", hint=hint)
    written = {name: value for name, value in document.items() if name != "checksum"}
    if document.get("checksum") not in (None, json_checksum(written)):
        raise bad_file(path, f"{path}: its JSON {_CHANGED}")
    sums = decode(dict[str, str], document.get("array_checksums", {}), path)
    for name in sums:
        if name not in file.tensors:
            raise bad_file(path, f"{path}: it lacks the array {name}")
    record = decode(Record, with_earlier_config(file.metadata), file.path)
    try:
        record = replace(record, config=record.config.resolved())
    except UsageError as fault:
        raise bad_file(file.path, f"{file.path}: {fault.message}") from None
    for name, info in file.tensors.items():
        if info.dtype not in _DTYPES:
            raise bad_file(
                path, f"{path}: its array {name} has the dtype {info.dtype}, not one of {', '.join(_DTYPES)}"
            )
    from safetensors.numpy import load as arrays_of  # it imports numpy

    arrays = arrays_of(read_tensor_file(path, sys.maxsize).data)
    for name, expected in sums.items():
        if checksum(arrays[name]) != expected:
            raise bad_file(path, f"{path}: its array {name} {_CHANGED}")
    return replace(record, arrays={name: arrays[name] for name in sums or arrays})


def is_scan(path: str) -> bool:
    """Whether `path` is the folder of a scan, finished or not."""
    return "\0" not in path and os.path.isfile(os.path.join(path, MANIFEST))
