"""safetensors files from strangers: the header checked entry by entry, without torch, before any tensor is made.

The library checks too, but says less: here every fault names the tensor and the rule. Format: 8 bytes of header length,
a JSON header, then the tensors without gaps. Source: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mhacli import memory
from mhacli.errors import MhaError
from mhacli.files import format_size, read_whole
from mhacli.schema import load_json

METADATA_KEY = "mha"
MAX_HEADER_BYTES = 100_000_000
MAX_NAME_LEN = 1024
MAX_RANK = 64
ITEM_BITS: Mapping[str, int] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_PICKLE_ENDINGS = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")


@dataclass(frozen=True)
class TensorInfo:
    """What the header says of one tensor: its dtype in the format's spelling, its shape, and where its bytes lie."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class TensorFile:
    """A checked file: all its bytes, and its header. `metadata` is the JSON under our key, or None."""

    path: str
    data: bytes
    tensors: Mapping[str, TensorInfo]
    metadata: Any


def read_tensor_file(path: str, limit: int) -> TensorFile:
    """The whole file, checked; at most `limit` bytes, and no more than fit in memory three times.

    Raises `MhaError` naming the rule, and the tensor, that it breaks.
    """
    if path.lower().endswith(_PICKLE_ENDINGS):
        raise _pickled(path, "its name says that it is a pickle")
    data = read_whole(path, int(min(limit, memory.SHARE_OF_AVAILABLE * memory.available_bytes() / 3)))
    header, body_start = _header(path, data)
    metadata = _our_metadata(path, header.pop("__metadata__", {}))
    tensors = {name: _tensor(path, name, entry) for name, entry in header.items()}
    _require_full_cover(path, tensors, len(data) - body_start)
    return TensorFile(path, data, tensors, metadata)


def shown_name(name: str) -> str:
    """A tensor name for a message: quoted, and shortened in the middle when it is long."""
    return repr(name if len(name) <= 80 else f"{name[:40]} … {name[-20:]}")


def _header(path: str, data: bytes) -> tuple[dict[str, Any], int]:
    if data[:2] == b"PK" or (data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")):
        raise _pickled(path, "its first bytes are those of a " + ("zip" if data[:2] == b"PK" else "pickle"))
    if len(data) < 8:
        raise _bad(path, "begin with 8 bytes of header length", f"a file of {len(data)} bytes")
    (length,) = struct.unpack("<Q", data[:8])
    if length > MAX_HEADER_BYTES:
        raise _bad(path, f"have a header of at most {MAX_HEADER_BYTES} bytes", f"a header length of {length}")
    if length > len(data) - 8:
        raise _bad(path, f"hold its whole header of {length} bytes", f"a file of {len(data)} bytes")
    header = load_json(data[8 : 8 + length], f"{path}: header")
    if not isinstance(header, dict):
        raise _bad(path, "have a JSON object as header", type(header).__name__)
    return header, 8 + length


def _our_metadata(path: str, entry: Any) -> Any:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise _bad(path, "have metadata that maps names to strings", f"{entry!r:.80}")
    return load_json(entry[METADATA_KEY], f"{path}: metadata") if METADATA_KEY in entry else None


def _tensor(path: str, name: str, entry: Any) -> TensorInfo:
    subject = f"tensor {shown_name(name)}"
    if not name or len(name) > MAX_NAME_LEN:
        raise _bad(path, f"name its tensors with 1 to {MAX_NAME_LEN} characters", f"{shown_name(name)} of {len(name)}")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _bad(path, f"give dtype, shape and data_offsets for {subject}", f"{entry!r:.80}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise _bad(path, f"give {subject} a dtype of the format", f"{dtype!r:.80}")
    if not _counts(shape) or len(shape) > MAX_RANK:
        raise _bad(path, f"give {subject} a shape of at most {MAX_RANK} counts", f"{shape!r:.80}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise _bad(path, f"give {subject} two offsets, start and end", f"{offsets!r:.80}")
    bits = ITEM_BITS[dtype]
    for size in shape:
        bits *= size
    if bits != 8 * (offsets[1] - offsets[0]):
        raise _bad(path, f"hold {bits // 8} bytes for {subject}", f"{offsets[1] - offsets[0]}")
    return TensorInfo(dtype, tuple(shape), offsets[0], offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _require_full_cover(path: str, tensors: Mapping[str, TensorInfo], body_len: int) -> None:
    """The tensors lie side by side from the first byte to the last: no gap, no overlap, nothing missing, nothing more."""
    position = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != position:
            word = "overlaps" if info.start < position else "leaves a gap to"
            raise _bad(
                path, "hold its tensors side by side", f"tensor {shown_name(name)}, which {word} the one before it"
            )
        if info.end > body_len:
            missing = info.end - body_len
            raise _bad(
                path,
                f"be whole, but it is cut {format_size(missing)} before the end of tensor {shown_name(name)}",
                f"{body_len} bytes",
            )
        position = info.end
    if position != body_len:
        raise _bad(path, "end with its last tensor", f"{body_len - position} bytes more")


def _pickled(path: str, why: str) -> MhaError:
    return MhaError(
        f"{os.path.basename(path)} must be a safetensors file, and {why}: pickles can run code and are never opened",
        hint="where you trust it: torch.load(…, weights_only=True), then safetensors.torch.save_file",
        code="bad-file",
        path=path,
    )


def _bad(path: str, rule: str, got: str) -> MhaError:
    return MhaError(f"{path} must {rule}, got {got}", code="bad-file", path=path)
