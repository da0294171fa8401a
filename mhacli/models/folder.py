"""Reads an untrusted checkpoint folder by its headers. Every file name is checked before the file is opened.

No code of the folder runs and no tensor is read: `config.json`, the index and the headers of safetensors files are
enough. Layout of the folder: https://huggingface.co/docs/transformers (`save_pretrained`); layout of the cache:
https://huggingface.co/docs/huggingface_hub (`snapshots/<revision>/name` → `blobs/<hash>`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import msgspec

from mhacli.errors import MhaError, first_names
from mhacli.io.files import read_whole
from mhacli.io.safetensors import PICKLE_ENDINGS, pickled, read_tensor_header, shown_name
from mhacli.models.sizes import check_sizes

T = TypeVar("T")
CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
MAX_CONFIG_BYTES, MAX_TOKENIZER_CONFIG_BYTES, MAX_INDEX_BYTES = 1 << 20, 16 << 20, 64 << 20
_SHARD_NAME = re.compile(r"[\w.\-]+\.safetensors", re.ASCII)
_CODE_KEYS = ("auto_map", "trust_remote_code")
_MOST_LISTED = 12
_INTEGERS = frozenset(("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"))
_BUFFERS = "masked_bias", "rotary_emb.inv_freq", "position_ids", "token_type_ids"
_MASKS = "attn.bias", "attention.bias"
"""Masks that older files store beside the weights. A mask is named like a bias, but has more than one axis."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the file of this name: its dtype as the format spells it, its shape and its size."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int

    @property
    def n_parameters(self) -> int:
        """The number of weights, as in `torch.nn.Module.parameters`; 0 for a buffer.

        Masks, positions and rotary angles, which follow from the config, are buffers; so are integers.
        """
        is_mask = len(self.shape) > 1 and self.name.endswith(_MASKS)
        return 0 if self.dtype in _INTEGERS or is_mask or self.name.endswith(_BUFFERS) else prod(self.shape)


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


class _Index(msgspec.Struct):
    """The index of a checkpoint in several files: the name of the file of each tensor."""

    weight_map: dict[str, str]


def read_checkpoint(path: str) -> Checkpoint:
    """A checkpoint folder, read by headers only. File names and link targets are checked before a file is opened. Raises
    `MhaError`."""
    if not os.path.isdir(path):
        _require_safetensors(path)
        hint = f"try --model {os.path.dirname(path) or '.'}"
        raise _bad(path, f"{path} is a file of weights: --model takes the folder with its {CONFIG}", hint)
    folder = _Folder(path, os.path.realpath(path))
    if folder.find(CONFIG) is None:
        raise _no_config(folder)
    config, tokenizer, notes = _settings(folder)
    paths, named = _weight_files(folder)
    tensors, stored, _ = _read_headers(paths)
    if named:
        notes += _require_named(named, tensors, path)
    code = [name for name in folder.names() if name.endswith(".py")]
    notes += (f"{_listed(code)} is not run",) if code else ()
    return Checkpoint(path, config, tensors, stored, None, tokenizer, notes)


def read_weights(path: str) -> Checkpoint:
    """A checkpoint folder, or one safetensors file with the config.json beside it, read by headers only. Raises `MhaError`."""
    if os.path.isdir(path):
        return read_checkpoint(path)
    _require_safetensors(path)
    tensors, stored, metadata = _read_headers({os.path.basename(path): path})
    if isinstance(metadata, dict) and "format" in metadata:  # a weights file of mha needs no config.json
        return Checkpoint(path, {}, tensors, stored, metadata)
    folder = os.path.dirname(path) or "."
    config, tokenizer, notes = _settings(_Folder(folder, os.path.realpath(folder)))
    return Checkpoint(path, config, tensors, stored, metadata, tokenizer, notes)


def _require_safetensors(path: str) -> None:
    """Raises `MhaError` for what is neither a folder nor a safetensors file."""
    if path.lower().endswith(PICKLE_ENDINGS):
        raise pickled(path, "its name is that of a pickle")
    if not os.path.lexists(path):
        hint = "a checkpoint is read from this machine; nothing is downloaded"
        raise MhaError(f"{path} does not exist", hint=hint, code="unreadable", path=path)
    if not path.endswith(".safetensors"):
        raise _bad(path, f"{path} is neither a folder with {CONFIG} nor a .safetensors file")


# ---------------------------------------------------------------------------------------------------------- the folder


@dataclass(frozen=True)
class _Folder:
    """A folder by the user's path and by its real path."""

    path: str
    real: str

    def find(self, name: str) -> str | None:
        """The real path of a file in the folder, or None. Raises `MhaError` for a link that leaves the folder.

        In a Hugging Face cache links lead from `models--x/snapshots/<revision>` to `models--x/blobs`."""
        path, (above, _) = os.path.join(self.path, name), os.path.split(self.real)
        if not os.path.lexists(path):
            return None
        real, allowed = os.path.realpath(path), [self.real]
        if os.path.basename(above) == "snapshots":
            allowed.append(os.path.join(os.path.dirname(above), "blobs"))
        if os.path.dirname(real) not in allowed:
            hint = "links may lead to the blobs of the same Hugging Face cache only"
            raise _bad(path, f"{path} leads out of its folder, to {real}", hint)
        return real

    def names(self) -> list[str]:
        """The names in the folder, sorted."""
        try:
            return sorted(os.listdir(self.real))
        except OSError as fault:
            message = f"{self.path} cannot be listed: {fault.strerror or fault}"
            raise MhaError(message, code="unreadable", path=self.path) from fault

    def json(self, name: str, limit: int, kind: type[T]) -> T | None:
        """The JSON of a file in the folder, None without the file. Raises `MhaError` with the reason of msgspec."""
        real, path = self.find(name), os.path.join(self.path, name)
        try:
            return None if real is None else msgspec.json.decode(read_whole(real, limit), type=kind)
        except (ValueError, RecursionError) as fault:
            raise _bad(path, f"{path}: {fault}") from None


def _no_config(folder: _Folder) -> MhaError:
    """The error for a folder without a config. The hint names a checkpoint or file of weights in it, if there is one."""
    names = folder.names()
    inner = [name for name in names if os.path.isfile(os.path.join(folder.path, name, CONFIG))]
    files = [name for name in names if name.endswith(".safetensors")]
    hint = (
        f"a checkpoint is a folder with {CONFIG} and .safetensors files, as save_pretrained of transformers writes it"
    )
    if any(name.endswith(".gguf") for name in names):
        hint = "GGUF files of llama.cpp cannot be read: the checkpoint from which they were made can"
    elif inner or len(files) == 1:
        hint = f"try {os.path.join(folder.path, (inner or files)[0])}"
    return _bad(folder.path, f"{folder.path} has no {CONFIG}: it holds {_listed(names) or 'nothing'}", hint)


def _settings(folder: _Folder) -> tuple[dict[str, Any], str | None, tuple[str, ...]]:
    """The config with checked sizes, the path of `tokenizer.json`, and notes on what of both configs is ignored."""
    config = folder.json(CONFIG, MAX_CONFIG_BYTES, dict[str, Any]) or {}
    check_sizes(config, os.path.join(folder.path, CONFIG))
    entries, notes = dict[str, Any](), list[str]()
    try:
        entries = folder.json(TOKENIZER_CONFIG, MAX_TOKENIZER_CONFIG_BYTES, dict[str, Any]) or {}
    except MhaError as fault:  # headers can be read without it
        notes.append(f"{TOKENIZER_CONFIG} is ignored: {fault.message}")
    code = [
        (key, name)
        for name, found in ((CONFIG, config), (TOKENIZER_CONFIG, entries))
        for key in _CODE_KEYS
        if key in found
    ]
    notes += [f"{key} of {name} is ignored: no code of the checkpoint is run" for key, name in code]
    tokenizer = None if folder.find(TOKENIZER) is None else os.path.join(folder.path, TOKENIZER)
    return config, tokenizer, tuple(notes)


# --------------------------------------------------------------------------------------------------------- the weights


def _weight_files(folder: _Folder) -> tuple[dict[str, str], dict[str, str]]:
    """The real path of each file with tensors by its name, and the index's map from tensor to file, if there is one."""
    names = folder.names()
    others = [name for name in names if name.endswith(".safetensors")]
    for only in [WHOLE] if WHOLE in names else others if len(others) == 1 and INDEX not in names else []:
        return {only: folder.find(only) or ""}, {}
    index = folder.json(INDEX, MAX_INDEX_BYTES, _Index)
    if index is not None:
        return _shards(folder, sorted(set(index.weight_map.values()))), index.weight_map
    pickles = [name for name in names if name.lower().endswith(PICKLE_ENDINGS)]
    if pickles and not others:
        hint = "if you trust it, from_pretrained and save_pretrained of transformers write it as safetensors"
        raise pickled(folder.path, f"its weights are pickles ({_listed(pickles)})", hint)
    raise _bad(
        folder.path,
        f"{folder.path} has neither {WHOLE} nor {INDEX} nor one other .safetensors file: it holds {_listed(others or names)}",
        "name the one to read" if others else None,
    )


def _shards(folder: _Folder, names: list[str]) -> dict[str, str]:
    """The shards that an index names. All names and link targets are checked before any shard is opened."""
    index = os.path.join(folder.path, INDEX)
    if not names:
        raise _bad(index, f"{index} names no file")
    for name in names:
        if not _SHARD_NAME.fullmatch(name):
            hint = "a shard is a file in the folder of its index, such as model-00001-of-00002.safetensors"
            raise _bad(
                index, f"{index} names the shard {shown_name(name)}, which is not a file in its own folder", hint
            )
    paths = {name: folder.find(name) or "" for name in names}
    missing = [name for name, real in paths.items() if not os.path.exists(real)]
    if missing:
        message = (
            f"{folder.path} lacks {len(missing)} of the {len(names)} shards that {INDEX} names: {_listed(missing)}"
        )
        raise _bad(folder.path, message, "the download may be incomplete")
    return paths


def _read_headers(paths: Mapping[str, str]) -> tuple[dict[str, StoredTensor], tuple[StoredFile, ...], Any]:
    """The tensors of all files, the files, and the metadata of the last one."""
    tensors, files, metadata = dict[str, StoredTensor](), list[StoredFile](), None
    for file, path in paths.items():
        header = read_tensor_header(path)
        files.append(StoredFile(file, path, header.n_bytes))
        metadata = header.metadata
        for name, info in header.tensors.items():
            if name in tensors:
                raise _bad(path, f"tensor {shown_name(name)} is in two files, {tensors[name].file} and {file}")
            tensors[name] = StoredTensor(name, file, info.dtype, info.shape, info.n_bytes)
    return tensors, tuple(files), metadata


def _require_named(named: Mapping[str, str], tensors: Mapping[str, StoredTensor], path: str) -> tuple[str, ...]:
    """Notes on tensors that the index does not name. Raises `MhaError` unless the others lie where it says."""
    missing = [f"{name} in {file}" for name, file in named.items() if name not in tensors or tensors[name].file != file]
    if missing:
        raise _bad(
            path,
            f"{path} lacks {len(missing)} of the {len(named)} tensors in the shards that {INDEX} names: {_listed(missing)}",
        )
    extra = sorted(tensors.keys() - named.keys())
    return (f"{INDEX} does not name {_listed(extra)}",) if extra else ()


def _listed(names: Iterable[str]) -> str:
    return first_names(map(shown_name, names), _MOST_LISTED)


def _bad(path: str, message: str, hint: str | None = None) -> MhaError:
    return MhaError(message, hint=hint, code="bad-file", path=path)
