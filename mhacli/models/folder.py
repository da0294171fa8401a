"""Reads an untrusted checkpoint folder by its headers. Every file name is checked before the file is opened.

No code of the folder runs and no tensor is read: `config.json`, the index and the headers of safetensors files are
enough. Layout of the folder: https://huggingface.co/docs/transformers (`save_pretrained`); layout of the cache:
https://huggingface.co/docs/huggingface_hub (`snapshots/<revision>/name` → `blobs/<hash>`).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from mhacli.errors import MhaError, first_names
from mhacli.io.files import read_up_to, read_whole
from mhacli.io.json_schema import load_json
from mhacli.io.safetensors import PICKLE_ENDINGS, read_tensor_header, shown_name
from mhacli.models.sizes import check_numbers

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_CONFIG_DEPTH = 20
MAX_INDEX_BYTES = 64 << 20
MAX_TOKENIZER_CONFIG_BYTES = 16 << 20
_SHARD_NAME = re.compile(r"[\w.\-]+\.safetensors", re.ASCII)
_CODE_KEYS = ("auto_map", "trust_remote_code")
_MOST_LISTED = 12
_INTEGERS = frozenset(("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"))
_BUFFERS = "masked_bias", "rotary_emb.inv_freq", "position_ids", "token_type_ids"
_MASKS = "attn.bias", "attention.bias"
"""Masks that older files store beside the weights. A mask is named like a bias, but has more than one axis."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its dtype as the format spells it, its shape, and the range of its bytes in the file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def n_bytes(self) -> int:
        """The size of the tensor in bytes."""
        return self.end - self.start

    @property
    def is_parameter(self) -> bool:
        """Whether the tensor is a weight as in `torch.nn.Module.parameters`.

        Masks, positions and rotary angles, which follow from the config, are not; nor are integers.
        """
        is_mask = len(self.shape) > 1 and self.name.endswith(_MASKS)
        return self.dtype not in _INTEGERS and not is_mask and not self.name.endswith(_BUFFERS)

    @property
    def n_parameters(self) -> int:
        """The number of weights; 0 for a buffer."""
        return prod(self.shape) if self.is_parameter else 0


@dataclass(frozen=True)
class StoredFile:
    """A file with tensors: its name, its real path, and its size."""

    name: str
    path: str
    n_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A checked folder, or one file of it.

    `config` is empty for a single file without a config.json beside it. `metadata` is the entry of mha in the header of
    a single file. `tokenizer` is the path of a `tokenizer.json`. `notes` list what was ignored.
    """

    path: str
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: tuple[StoredFile, ...]
    metadata: Any = None
    tokenizer: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def family(self) -> str | None:
        """The `model_type` of the config."""
        kind = self.config.get("model_type")
        return kind if isinstance(kind, str) and kind else None


def read_checkpoint(path: str) -> Checkpoint:
    """A checkpoint folder, or a single safetensors file with the config.json beside it, read by headers only.

    File names and link targets are checked before a file is opened. Raises `MhaError`.
    """
    folder, is_file = _folder_of(path)
    return _lone_file(path, folder) if is_file else _whole_folder(folder)


def _whole_folder(folder: _Folder) -> Checkpoint:
    if folder.find(CONFIG) is None:
        raise MhaError(
            f"{folder.path} has no {CONFIG}: it holds {_listed(folder.names()) or 'nothing'}",
            hint=_instead(folder),
            code="bad-file",
            path=folder.path,
        )
    config = _config(folder)
    files, named = _weight_files(folder)
    headers = _read_headers(files)
    notes = [] if named is None else _require_named(named, headers, folder.path)
    code = [name for name in folder.names() if name.endswith(".py")]
    notes += [f"{_listed(code)} is not run"] if code else []
    return _checkpoint(folder.path, folder, config, headers._replace(metadata=None), notes)


def _instead(folder: _Folder) -> str:
    """A hint for a folder without a config: a checkpoint or file of weights in it, else what a checkpoint is."""
    paths = [os.path.join(folder.path, name) for name in folder.names()]
    inner = [path for path in paths if os.path.isfile(os.path.join(path, CONFIG))]
    files = [path for path in paths if path.endswith(".safetensors")]
    if inner or len(files) == 1:
        return f"try {(inner or files)[0]}"
    return (
        f"a checkpoint is a folder with {CONFIG} and .safetensors files, as save_pretrained of transformers writes it"
    )


def _lone_file(path: str, folder: _Folder) -> Checkpoint:
    headers = _read_headers({os.path.basename(path): path})
    if (
        isinstance(headers.metadata, dict) and "format" in headers.metadata
    ):  # a weights file of mha needs no config.json
        return Checkpoint(path, {}, headers.tensors, tuple(headers.files), headers.metadata)
    return _checkpoint(path, folder, _config(folder), headers, [])


def _checkpoint(path: str, folder: _Folder, config: dict[str, Any], headers: _Headers, notes: list[str]) -> Checkpoint:
    code = [f"{key} of {CONFIG} is ignored: no code of the checkpoint is run" for key in _CODE_KEYS if key in config]
    tokenizer = None if folder.find(TOKENIZER) is None else os.path.join(folder.path, TOKENIZER)
    all_notes = (*code, *_tokenizer_notes(folder), *notes)
    return Checkpoint(path, config, headers.tensors, tuple(headers.files), headers.metadata, tokenizer, all_notes)


def read_bytes(tensor: StoredTensor) -> bytearray:
    """The bytes of one tensor. Raises `MhaError` if the file was truncated meanwhile."""
    try:
        with open(tensor.file, "rb", opener=_open_nonblocking) as file:
            file.seek(tensor.start)
            data = bytearray(read_up_to(file.read, tensor.n_bytes))
    except OSError as fault:
        raise MhaError(
            f"{tensor.file} cannot be read: {fault.strerror or fault}", code="unreadable", path=tensor.file
        ) from fault
    if len(data) < tensor.n_bytes:
        raise MhaError(
            f"{tensor.file} was truncated while it was read: tensor {shown_name(tensor.name)} has {len(data)} of its "
            f"{tensor.n_bytes} bytes",
            code="bad-file",
            path=tensor.file,
        )
    return data


def _open_nonblocking(path: str, flags: int) -> int:
    """An opener for `open` that never blocks on a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


# ---------------------------------------------------------------------------------------------------------- the folder


@dataclass(frozen=True)
class _Folder:
    """A folder by the user's path and by its real path."""

    path: str
    real: str

    def find(self, name: str) -> str | None:
        """The real path of a file in the folder, or None. Raises `MhaError` for a link that leaves the folder."""
        path = os.path.join(self.path, name)
        if not os.path.lexists(path):
            return None
        real = os.path.realpath(path)
        if os.path.dirname(real) != self.real and os.path.dirname(real) not in self._blobs():
            raise MhaError(
                f"{path} leads out of its folder, to {real}",
                hint="links may lead to the blobs of the same Hugging Face cache only",
                code="bad-file",
                path=path,
            )
        return real

    def names(self) -> list[str]:
        """The names in the folder, sorted."""
        try:
            return sorted(os.listdir(self.real))
        except OSError as fault:
            raise MhaError(
                f"{self.path} cannot be listed: {fault.strerror or fault}", code="unreadable", path=self.path
            ) from fault

    def _blobs(self) -> tuple[str, ...]:
        """The target folder of links in a Hugging Face cache: `models--x/snapshots/<revision>` → `models--x/blobs`."""
        above, _ = os.path.split(self.real)
        if os.path.basename(above) != "snapshots":
            return ()
        return (os.path.join(os.path.dirname(above), "blobs"),)


def _folder_of(path: str) -> tuple[_Folder, bool]:
    """The folder to read, and whether `path` names a single file in it."""
    try:
        is_folder, exists = stat.S_ISDIR(os.stat(path).st_mode), True
    except (FileNotFoundError, NotADirectoryError, ValueError):
        is_folder = exists = False
    except OSError as fault:
        raise MhaError(f"{path} cannot be opened: {fault.strerror or fault}", code="unreadable", path=path) from fault
    if path.lower().endswith(PICKLE_ENDINGS) and not is_folder:
        raise _pickled(path, [os.path.basename(path)])
    if exists and not is_folder and not path.endswith(".safetensors"):
        raise MhaError(
            f"{path} is neither a folder with {CONFIG} nor a .safetensors file",
            code="bad-file",
            path=path,
        )
    if not exists and not os.path.islink(path):
        raise MhaError(f"{path} does not exist", hint=_NO_NETWORK, code="unreadable", path=path)
    folder = path if is_folder else os.path.dirname(path) or "."
    return _Folder(folder, os.path.realpath(folder)), not is_folder


_NO_NETWORK = "a checkpoint is read from this machine; nothing is downloaded"


def _config(folder: _Folder) -> dict[str, Any]:
    """The config with checked sizes; empty if a single file has none beside it."""
    path = folder.find(CONFIG)
    if path is None:
        return {}
    config = _json_object(path, MAX_CONFIG_BYTES, os.path.join(folder.path, CONFIG))
    check_numbers(config, os.path.join(folder.path, CONFIG))
    return config


def _json_object(path: str, limit: int, shown: str) -> dict[str, Any]:
    """A JSON object within limits of size and depth."""
    document = load_json(read_whole(path, limit), shown)
    if not isinstance(document, dict):
        raise MhaError(f"{shown} is not a JSON object but {document!r:.80}", code="bad-file", path=shown)
    level: list[Any] = [document]
    for _ in range(MAX_CONFIG_DEPTH):
        level = [
            item
            for parent in level
            for item in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(item, (dict, list))
        ]
    if level:
        raise MhaError(f"{shown} is nested more than {MAX_CONFIG_DEPTH} deep", code="bad-file", path=shown)
    return document


def _tokenizer_notes(folder: _Folder) -> list[str]:
    """Notes on code that a tokenizer's config names, or on why the config is ignored. Reading headers does not need it."""
    try:
        path = folder.find(TOKENIZER_CONFIG)
        entries = {} if path is None else _json_object(path, MAX_TOKENIZER_CONFIG_BYTES, TOKENIZER_CONFIG)
    except MhaError as fault:
        return [f"{TOKENIZER_CONFIG} is ignored: {fault.message}"]
    return [
        f"{key} of {TOKENIZER_CONFIG} is ignored: no code of the checkpoint is run"
        for key in _CODE_KEYS
        if key in entries
    ]


# --------------------------------------------------------------------------------------------------------- the weights


class _Headers(NamedTuple):
    """The contents of all headers, and the file in which each tensor lies."""

    tensors: dict[str, StoredTensor]
    file_of: dict[str, str]
    files: list[StoredFile]
    metadata: Any


def _weight_files(folder: _Folder) -> tuple[dict[str, str], dict[str, str] | None]:
    """The real path of each file with tensors by its name, and the index's map from tensor to file, if there is an
    index."""
    whole, index = folder.find(WHOLE), folder.find(INDEX)
    if whole is not None:
        return {WHOLE: whole}, None
    if index is not None:
        named = _weight_map(index, os.path.join(folder.path, INDEX))
        return _shards(folder, sorted(set(named.values()))), named
    names = folder.names()
    others = [name for name in names if name.endswith(".safetensors")]
    if len(others) == 1:
        real = folder.find(others[0])
        return {others[0]: real or ""}, None
    pickles = [name for name in names if name.lower().endswith(PICKLE_ENDINGS)]
    if not others and pickles:
        raise _pickled(folder.path, pickles)
    hint = "name the one to read" if others else None
    raise MhaError(
        f"{folder.path} has neither {WHOLE} nor {INDEX} nor one other .safetensors file: it holds {_listed(others or names)}",
        hint=hint,
        code="bad-file",
        path=folder.path,
    )


def _weight_map(path: str, shown: str) -> dict[str, str]:
    document = load_json(read_whole(path, MAX_INDEX_BYTES), shown)
    named = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise MhaError(f"{shown}: weight_map does not map tensors to files: {named!r:.80}", code="bad-file", path=shown)
    return named


def _shards(folder: _Folder, names: list[str]) -> dict[str, str]:
    """The shards that an index names. All names and link targets are checked before any shard is opened."""
    for name in names:
        if not _SHARD_NAME.fullmatch(name):
            raise MhaError(
                f"{os.path.join(folder.path, INDEX)} names the shard {shown_name(name)}, which is not a file in its own folder "
                "such as model-00001-of-00002.safetensors",
                code="bad-file",
                path=folder.path,
            )
    paths = {name: folder.find(name) for name in names}
    missing = [name for name, real in paths.items() if real is None or not os.path.exists(real)]
    if missing:
        raise MhaError(
            f"{folder.path} lacks {len(missing)} of the {len(names)} shards that {INDEX} names: {_listed(missing)}",
            hint="the download may be incomplete",
            code="bad-file",
            path=folder.path,
        )
    return {name: real for name, real in paths.items() if real is not None}


def _read_headers(files: Mapping[str, str]) -> _Headers:
    headers = _Headers({}, {}, [], None)
    for name, path in files.items():
        header = read_tensor_header(path)
        headers.files.append(StoredFile(name, path, header.n_bytes))
        for key, entry in header.tensors.items():
            if key in headers.tensors:
                raise MhaError(
                    f"tensor {shown_name(key)} is in two files, {headers.file_of[key]} and {name}",
                    code="bad-file",
                    path=path,
                )
            begin = header.body_start
            headers.file_of[key] = name
            headers.tensors[key] = StoredTensor(
                key, path, entry.dtype, entry.shape, begin + entry.start, begin + entry.end
            )
        headers = headers._replace(metadata=header.metadata)
    return headers


def _require_named(named: Mapping[str, str], headers: _Headers, path: str) -> list[str]:
    """Raises `MhaError` unless every tensor lies in the shard that the index names. Notes tensors missing from the
    index."""
    missing = [f"{name} in {file}" for name, file in named.items() if headers.file_of.get(name) != file]
    if missing:
        raise MhaError(
            f"{path} lacks {len(missing)} of the {len(named)} tensors in the shards that {INDEX} names: {_listed(missing)}",
            code="bad-file",
            path=path,
        )
    extra = sorted(headers.tensors.keys() - named.keys())
    return [f"{INDEX} does not name {_listed(extra)}"] if extra else []


def _pickled(path: str, names: list[str]) -> MhaError:
    return MhaError(
        f"{path} has its weights as pickles ({_listed(names)}), not as safetensors, and mha opens no pickles, which can run code",
        hint="if you trust it, convert it with torch.load(…, weights_only=True) and safetensors.torch.save_file",
        code="bad-file",
        path=path,
    )


def _listed(names: Iterable[str]) -> str:
    return first_names(map(shown_name, names), _MOST_LISTED)
