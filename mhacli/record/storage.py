"""Reads a record from its file. A changed or damaged file is refused: its JSON and every array have
a checksum.

Files of earlier versions have none, and are read as they are.
"""

import math
import os
import shlex
from dataclasses import replace
from functools import cache, partial

from mhacli.errors import MhaError, UsageError, bad_file
from mhacli.io import memory
from mhacli.io.data import Array, StoredArrays, checksum, decode, json_checksum, with_earlier_config
from mhacli.io.safetensors import DTYPES, TensorFile, read_tensor_header
from mhacli.numbers import shown

from .fits import require_fit
from .record import SCHEMA, Record

MANIFEST, SUMMARY = "manifest.json", "summary.safetensors"
"""The files in the folder of a scan that other commands know; the summary is a record."""
_CHANGED = "was changed or damaged after it was saved"


def load(path: str | os.PathLike[str]) -> Record:
    """The record in a file or in the folder of a scan, with its arrays in memory. Raises `MhaError`
    for a file that is no record, or was changed.
    """
    record = load_late(os.fspath(path))
    return replace(record, arrays=dict(record.arrays))


def load_late(path: str) -> Record:
    """The record in a file or in the folder of a scan. An array is read, and numpy imported, when
    it is used.

    Raises `MhaError` for a file that is no record, or was changed, and so does the use of an array.
    """
    if is_scan(path):
        path, scan = os.path.join(path, SUMMARY), path
        if not os.path.lexists(path):
            hint = "the same mha scan command resumes the scan"
            raise MhaError(
                f"{scan} has no summary: its scan is not finished",
                hint=hint,
                code="unfinished",
                path=scan,
            )
    file = read_tensor_header(path)
    document = file.metadata if isinstance(file.metadata, dict) else {}
    if document.get("schema") != SCHEMA:
        schema = document.get("schema") or document.get("format") or "no schema"
        hint = "mha run TEXT --save FILE writes a record"
        if str(schema).startswith("mha.weights/"):
            hint = f"mha run TEXT --weights {shlex.quote(path)} shows their attention"
        raise bad_file(
            path, f"{path} is not a record of schema {SCHEMA}: it has {schema}", hint=hint
        )
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
        raise bad_file(file.path, f"{file.path}: {fault.typed_message}") from None
    readers = {
        name: cache(partial(load_array, file, name, sums.get(name)))
        for name in sums or file.tensors
    }
    require_fit(record, {name: file.tensors[name] for name in readers}, path)
    return replace(record, arrays=StoredArrays(readers))


def is_scan(path: str) -> bool:
    """Whether `path` is the folder of a scan, finished or not."""
    return "\0" not in path and os.path.isfile(os.path.join(path, MANIFEST))


def load_array(file: TensorFile, name: str, expected: str | None = None) -> Array:
    """An array of the file, which is read and not mapped: a mapped file that is cut ends the
    process. Raises `MhaError` if it is not what was written.
    """
    import numpy as np

    path, info = file.path, file.tensors[name]
    dtype = DTYPES.get(info.dtype)
    if dtype in (None, "bfloat16"):  # which numpy does not have
        raise bad_file(
            path, f"{path}: its array {name} has the dtype {info.dtype}, which no record has"
        )
    if not memory.fits(info.n_bytes, memory.available_bytes()):
        message = f"{path} is too large to read: an array of {shown(info.n_bytes, 'bytes')}"
        raise MhaError(message, code="too-large", path=path)
    try:
        is_same = os.path.getsize(path) == file.n_bytes
        array: Array = np.fromfile(path, dtype, math.prod(info.shape), offset=info.start)
    except OSError as fault:
        raise bad_file(path, f"{path}: an array cannot be read: {fault.strerror}") from None
    if not is_same or array.nbytes < info.n_bytes:
        raise bad_file(path, f"{path}: the file was replaced while it was in use")
    array = array.reshape(info.shape)
    if expected not in (None, checksum(array)):
        raise bad_file(path, f"{path}: its array {name} {_CHANGED}")
    return array
