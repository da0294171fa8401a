"""Reads safetensors files from untrusted sources: checks every entry of the header, without torch, before any tensor.

The safetensors library checks too, but its errors say less: here each error names the tensor and the rule. Format: 8
bytes of header length, a JSON header, then the tensors without gaps. Source: https://github.com/huggingface/safetensors
(README, "Format").
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from mhacli.errors import MhaError
from mhacli.io import memory
from mhacli.io.files import format_size, opened, read_up_to
from mhacli.io.json_schema import load_json

T = TypeVar("T")
METADATA_KEY = "mha"
MAX_HEADER_BYTES = 100_000_000
MAX_NAME_LEN = 1024
MAX_RANK = 64
ITEM_BITS: Mapping[str, int] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_TEXT = frozenset((*b"\t\n\r", *range(32, 127)))
"""Bytes of plain text. Read as a header's length, eight of them give a number larger than any file."""
PICKLE_ENDINGS = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's entry in the header: its dtype as the format spells it, its shape, and its first and last byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class TensorFile:
    """A checked file with all its bytes. `metadata` is the JSON under the key `mha`, or None."""

    path: str
    data: bytes
    tensors: Mapping[str, TensorInfo]
    metadata: Any


@dataclass(frozen=True)
class TensorHeader:
    """A checked header without its tensors, whose bytes begin at `body_start` of a file of `n_bytes`."""

    path: str
    tensors: Mapping[str, TensorInfo]
    metadata: Any
    body_start: int
    n_bytes: int


def read_tensor_header(path: str) -> TensorHeader:
    """The checked header of a regular file, without reading any tensor.

    The offsets are checked against the size of the file. Raises `MhaError` that names the broken rule.
    """
    with _open_tensors(path) as read:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise _bad(path, "the file is a pipe, not a regular file")
        head, tensors, metadata = _checked(path, read)
    _require_whole(path, status.st_size - len(head), _ends(path, tensors))
    return TensorHeader(path, tensors, metadata, len(head), status.st_size)


def read_tensor_file(path: str, limit: int) -> TensorFile:
    """The whole file, checked. It may have at most `limit` bytes and must fit into memory three times.

    The header is checked before any tensor is read, so a damaged file costs no memory. Raises `MhaError` that names the
    broken rule and the tensor.
    """
    with _open_tensors(path) as read:
        head, tensors, metadata = _checked(path, read)
        end_of = _ends(path, tensors)
        _require_room(path, len(head), end_of, limit)
        data = head + read_up_to(read, max(end_of.values(), default=0) + 1)
    _require_whole(path, len(data) - len(head), end_of)
    return TensorFile(path, data, tensors, metadata)


def read_tensors_of(header: TensorHeader, limit: int) -> TensorFile:
    """The whole file of a header that was read before.

    Raises `MhaError` as `read_tensor_file` does, and if the file was replaced meanwhile.
    """
    file = read_tensor_file(header.path, limit)
    if (file.tensors, file.metadata) != (header.tensors, header.metadata):
        raise _bad(header.path, "the file was replaced while it was read")
    return file


def tensors_of(file: TensorFile, load: Callable[[bytes], Mapping[str, T]]) -> Mapping[str, T]:
    """The tensors of a checked file, made by a `load` function of safetensors. Raises `MhaError` if the library refuses
    them."""
    from safetensors import SafetensorError

    try:
        return load(file.data)
    except (SafetensorError, ValueError) as fault:
        raise _bad(file.path, f"safetensors cannot read the file: {fault!s:.200}") from None


def _open_tensors(path: str) -> AbstractContextManager[Callable[[int], bytes]]:
    if path.lower().endswith(PICKLE_ENDINGS):
        raise _pickled(path, "its name is that of a pickle")
    return opened(path)


def _checked(path: str, read: Callable[[int], bytes]) -> tuple[bytes, dict[str, TensorInfo], Any]:
    """The bytes before the first tensor, the entries of all tensors, and the metadata of mha."""
    head, header = _header(path, read)
    metadata = _mha_metadata(path, header.pop("__metadata__", {}))
    return head, {name: _tensor(path, name, entry) for name, entry in header.items()}, metadata


def shown_name(name: str) -> str:
    """A tensor's name for a message: quoted, and shortened in the middle if it is long."""
    return repr(name if len(name) <= 80 else f"{name[:40]} … {name[-20:]}")


def _header(path: str, read: Callable[[int], bytes]) -> tuple[bytes, dict[str, Any]]:
    """The bytes before the first tensor, and the header parsed from them."""
    first = read_up_to(read, 8)
    if first[:2] == b"PK" or (first[:1] == b"\x80" and first[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")):
        raise _pickled(path, "its first bytes are those of a " + ("zip" if first[:2] == b"PK" else "pickle"))
    if len(first) < 8:
        raise _bad(path, f"the file has {len(first)} bytes, less than the 8 of a safetensors file without tensors")
    if all(byte in _TEXT for byte in first):
        raise MhaError(
            f"{path} is a text file, not a safetensors file",
            hint="--weights takes a .safetensors file, --model the folder of a checkpoint",
            code="bad-file",
            path=path,
        )
    (length,) = struct.unpack("<Q", first)
    if length > MAX_HEADER_BYTES:
        raise _bad(path, f"the header has {length} bytes by its first 8 bytes, more than {MAX_HEADER_BYTES}")
    text = read_up_to(read, length)
    if len(text) < length:
        raise _bad(path, f"the file of {8 + len(text)} bytes is cut off within its header of {length} bytes")
    header = load_json(text, f"{path}: header")
    if not isinstance(header, dict):
        raise _bad(path, f"the header is not a JSON object but {str(header)[:80]}")
    if not text.startswith(b"{"):  # the format allows neither a byte order mark nor spaces before it
        raise _bad(path, f"the header begins with {text[:8]!r}, not with {{")
    return first + text, header


def _mha_metadata(path: str, entry: Any) -> Any:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise _bad(path, f"__metadata__ must map names to strings, got {entry!r:.80}")
    return load_json(entry[METADATA_KEY], f"{path}: metadata") if METADATA_KEY in entry else None


def _tensor(path: str, name: str, entry: Any) -> TensorInfo:
    subject = f"tensor {shown_name(name)}"
    if not name or len(name) > MAX_NAME_LEN:
        raise _bad(path, f"{subject} has a name of {len(name)} characters: at least 1, at most {MAX_NAME_LEN}")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _bad(path, f"{subject} lacks dtype, shape or data_offsets: {entry!r:.80}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise _bad(path, f"{subject} has dtype {dtype!r:.80}, which is not one of {', '.join(ITEM_BITS)}")
    if not _counts(shape) or len(shape) > MAX_RANK:
        raise _bad(path, f"{subject} has shape {shape!r:.80}, which is not a list of at most {MAX_RANK} counts")
    if not _counts(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise _bad(path, f"{subject} has data_offsets {offsets!r:.80}, which are not a start and an end")
    bits = ITEM_BITS[dtype]
    for size in shape:
        bits *= size
    if bits != 8 * (offsets[1] - offsets[0]):
        raise _bad(
            path, f"{subject} has {offsets[1] - offsets[0]} bytes by its offsets, {bits // 8} by its shape and dtype"
        )
    return TensorInfo(dtype, tuple(shape), offsets[0], offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _ends(path: str, tensors: Mapping[str, TensorInfo]) -> Mapping[str, int]:
    """The end of each tensor, in file order. Raises `MhaError` unless tensors lie side by side, without gap or overlap."""
    end_of: dict[str, int] = {}
    position = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != position:
            where = "overlaps" if info.start < position else "leaves a gap after"
            raise _bad(path, f"tensor {shown_name(name)} {where} the tensor before it")
        position = end_of[name] = info.end
    return end_of


def _require_room(path: str, head_len: int, end_of: Mapping[str, int], limit: int) -> None:
    room = int(min(limit, memory.USABLE_FRACTION * memory.available_bytes() / 3))
    for name, end in end_of.items():
        if head_len + end > room:
            raise MhaError(
                f"{path} is too large to read: {format_size(head_len + end)} up to the end of tensor {shown_name(name)}, at "
                f"most {format_size(room)}",
                code="too-large",
                path=path,
            )


def _require_whole(path: str, body_len: int, end_of: Mapping[str, int]) -> None:
    """Raises `MhaError` unless the file ends with its last tensor."""
    for name, end in end_of.items():
        if end > body_len:
            raise _bad(
                path, f"the file is cut off {format_size(end - body_len)} before the end of tensor {shown_name(name)}"
            )
    if body_len > max(end_of.values(), default=0):
        last = f"its last tensor, {shown_name(list(end_of)[-1])}" if end_of else "its header"
        raise _bad(path, f"the file has bytes after {last}")


def _pickled(path: str, why: str) -> MhaError:
    return MhaError(
        f"{os.path.basename(path)} is not a safetensors file: {why}, and mha opens no pickles, which can run code",
        hint="if you trust it, convert it with torch.load(…, weights_only=True) and safetensors.torch.save_file",
        code="bad-file",
        path=path,
    )


def _bad(path: str, fault: str) -> MhaError:
    return MhaError(f"{path}: {fault}", code="bad-file", path=path)
