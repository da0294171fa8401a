"""A digest of a checkpoint: two checkpoints with the same digest compute the same."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache

from mhacli.errors import MhaError
from mhacli.models.folder import CONFIG, TOKENIZER, Checkpoint

_BESIDE = (
    CONFIG, TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model",
)  # fmt: skip
"""The files other than weights that affect tokens or numbers."""


def checkpoint_digest(checkpoint: Checkpoint, tokenizer: str | None = None) -> str:
    """The sha256 of a checkpoint's weights, config and tokenizer, or of another `tokenizer`, named as in `--tokenizer`.

    Each file is read whole, once per process unless it changes. Raises `MhaError` for an unreadable file.
    """
    paths = {name: os.path.join(checkpoint.path, name) for name in _BESIDE}
    paths = dict(checkpoint.files) | {name: path for name, path in paths.items() if os.path.isfile(path)}
    is_file = tokenizer is not None and os.path.isfile(tokenizer)
    words = [f"tokenizer {_digest(tokenizer) if is_file and tokenizer else tokenizer}"]
    words += [f"{name} {_digest(path)}" for name, path in sorted(paths.items())]
    return hashlib.sha256("\n".join(words).encode("utf-8", "surrogatepass")).hexdigest()


def _digest(path: str) -> str:
    try:
        status = os.stat(path)
        return _digest_of(path, status.st_size, status.st_mtime_ns)
    except OSError as fault:
        raise MhaError(f"{path}: {fault.strerror or fault}", code="unreadable", path=path) from fault


@lru_cache
def _digest_of(path: str, n_bytes: int, changed_ns: int) -> str:
    """The digest of a file. The size and the time of change are keys of the cache."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
