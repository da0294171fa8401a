"""Reads safetensors files from untrusted sources. The library checks them; what it does not name,
such as a pickle, is refused before it. Format: 8 bytes of header length, a JSON header, then the
tensors without gaps. Source: https://github.com/huggingface/safetensors (README, "Format").
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from msgspec import Struct
from safetensors import SafetensorError, deserialize, safe_open

from mhacli.errors import MhaError, bad_file, first_names
from mhacli.io import memory
from mhacli.numbers import shown

from .data import load_json
from .files import opened, read_up_to

METADATA_KEY = "mha"
MAX_HEADER_BYTES = 100_000_000
"""The library refuses a longer header."""
_SMALL = 1 << 20
"""Bytes up to which a file is read whole for its header: the library then checks it without numpy,
which takes long to import."""
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The dtypes of files of mha, as the format spells them."""
PICKLE_ENDINGS = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
_ZIP = b"PK\x03\x04"
NUMPY = b"\x93NUMPY"
_MAX_NAME_BYTES = 30 + (1 << 16)
_TEXT = frozenset((*b"\t\n\r", *range(32, 127)))


class TensorInfo(Struct, frozen=True):
    """One tensor's entry in the header: its dtype as the format spells it, its shape, and its bytes
    in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    n_bytes: int


@dataclass(frozen=True)
class TensorFile:
    """A checked file of `n_bytes`. `metadata` is the JSON under the key `mha`, or None; `data` are
    all bytes, empty if only the header was read, and else what the `load` functions of safetensors
    take.
    """

    path: str
    tensors: Mapping[str, TensorInfo]
    metadata: Any
    n_bytes: int
    data: bytes = b""


def read_tensor_header(path: str) -> TensorFile:
    """The checked header of a regular file, without the tensors of a large one. Raises `MhaError`
    with the library's reason.
    """
    with opened(path) as read:
        if not os.path.isfile(path):
            raise bad_file(path, f"{path}: the file is a pipe, not a regular file")
        data, size = _head(path, read), os.path.getsize(path)
        data += read_up_to(read, size - len(data)) if size <= _SMALL else b""
        return _described(path, data, size)


def read_tensor_file(path: str) -> TensorFile:
    """The whole file, read and never mapped: a mapped file that is cut ends the process. It must
    fit into memory three times. Raises `MhaError` with the library's reason.
    """
    room = int(memory.USABLE_FRACTION * memory.available_bytes() / 3)
    with opened(path) as read:
        data, size = _head(path, read), 0 if path == "-" else os.path.getsize(path)
        data += read_up_to(read, room + 1 - len(data)) if size <= room else b""
    if max(size, len(data)) > room:
        raise MhaError(
            f"{path} is too large to read: at most {shown(room, 'bytes')}",
            code="too-large",
            path=path,
        )
    return replace(_described(path, data, len(data)), data=data)


def shown_name(name: str) -> str:
    """A tensor's name for a message: quoted, and shortened in the middle if it is long."""
    return repr(name if len(name) <= 80 else f"{name[:40]} … {name[-20:]}")


_CONVERT = (
    "if you trust it, convert it with torch.load(…, weights_only=True) and"
    " safetensors.torch.save_file"
)


def pickled(path: str, why: str, hint: str = _CONVERT) -> MhaError:
    """The error of weights that are pickles, with the way to convert them."""
    message = f"{path} is not safetensors: {why}, and mha opens no pickles, which can run code"
    return bad_file(path, message, hint=hint)


def _head(path: str, read: Callable[[int], bytes]) -> bytes:
    """The bytes before the first tensor. Raises `MhaError` for a file of another kind."""
    first = read_up_to(read, 9)
    length = int.from_bytes(first[:8], "little")
    if first.startswith(_ZIP):  # no length of a header is so large
        member = _first_member(first, read)
        if member.endswith(".npy"):
            raise _of_numpy(path, "an archive of arrays")
        if not path.lower().endswith(PICKLE_ENDINGS) and not member.endswith(".pkl"):
            raise bad_file(path, f"{path} is a zip archive, not a safetensors file")
    if first.startswith(NUMPY):
        raise _of_numpy(path, "an array")
    is_pickle = first.startswith((_ZIP, *(bytes((0x80, protocol)) for protocol in range(2, 6))))
    if path.lower().endswith(PICKLE_ENDINGS) or (is_pickle and first[8:] != b"{"):
        raise pickled(path, "its name or its first bytes are those of a pickle")
    if first and _TEXT.issuperset(first[:8]):
        hint = "mha run --file FILE reads a text, --model the folder of a checkpoint"
        if first[:1] in (b"{", b"["):
            hint = "--save FILE writes a record; mha diff takes records, models or arrays, not JSON"
        raise bad_file(path, f"{path} is a text file, not a safetensors file", hint=hint)
    return first + (read_up_to(read, length - 1) if length <= MAX_HEADER_BYTES else b"")


def is_of_mha(path: str) -> bool:
    """Whether mha wrote a file of tensors."""
    try:
        return read_tensor_header(path).metadata is not None
    except MhaError:
        return False


def is_of_arrays(path: str) -> bool:
    """Whether a file holds arrays of numpy, or tensors of three axes or more that mha did not
    write.
    """
    try:
        with opened(path) as read:
            first = read_up_to(read, 9)
            if first.startswith(_ZIP):
                return _first_member(first, read).endswith(".npy")
        if first.startswith(NUMPY):
            return True
        header = read_tensor_header(path)
    except MhaError:
        return False
    ranks = {len(tensor.shape) for tensor in header.tensors.values()}
    return header.metadata is None and bool(ranks) and min(ranks) > 2


def _of_numpy(path: str, what: str) -> MhaError:
    """The error of a file of numpy where only safetensors is read."""
    hint = (
        "mha show FILE --axes layer,head,query,key shows attention weights;"
        " safetensors.numpy.save_file writes other arrays"
    )
    return bad_file(path, f"{path} is {what} of numpy, not a safetensors file", hint=hint)


def _first_member(first: bytes, read: Callable[[int], bytes]) -> str:
    """The name of the first file in a zip archive, of which the `first` bytes are read."""
    data = first + read_up_to(read, _MAX_NAME_BYTES)
    return data[30 : 30 + int.from_bytes(data[26:28], "little")].decode(errors="replace")


def _described(path: str, data: bytes, n_bytes: int) -> TensorFile:
    """The entries in the header of a file, of which `data` are all `n_bytes` or those before the
    first tensor. The library checks them first, and compares them with the size of the file.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """The object of a header, in which the library would take the last of two equal names."""
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError(f"a name occurs twice: {first_names(map(shown_name, names))}")
        return dict(pairs)

    length = int.from_bytes(data[:8], "little")
    try:
        if len(data) == n_bytes:
            deserialize(data)  # type: ignore[no-untyped-call]
        else:
            with safe_open(path, "numpy"):
                pass
        entries = json.loads(data[8 : 8 + length], object_pairs_hook=unique)
    except (SafetensorError, ValueError, OSError, MemoryError) as fault:
        raise bad_file(path, f"{path}: {fault!s:.400}") from None
    text = (entries.pop("__metadata__", None) or {}).get(METADATA_KEY)
    tensors = dict[str, TensorInfo]()
    for name, entry in entries.items():
        start, end = entry["data_offsets"]
        tensors[name] = TensorInfo(
            name, entry["dtype"], tuple(entry["shape"]), 8 + length + start, end - start
        )
    metadata = None if text is None else load_json(text, f"{path}: metadata", path=path)
    return TensorFile(path, tensors, metadata, n_bytes)
