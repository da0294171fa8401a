"""The placement of a checkpoint's modules on devices: the values of `--device-map`, and its file."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from typing import Literal

from mhacli.errors import MhaError, UsageError
from mhacli.io.data import load_json
from mhacli.io.files import read_whole

DeviceMap = Literal["auto"] | Mapping[str, str]
"""`auto` fills GPUs, then the CPU, then the disk. A mapping has the device of each named module: `cpu`, `disk`, `mps`, `cuda` or
`cuda:N`; the name "" is the whole model."""

_DEVICE = re.compile(r"cpu|disk|mps|cuda(:\d{1,4})?", re.ASCII)
_MAX_FILE_BYTES = 1 << 24


def read_device_map(word: str) -> DeviceMap:
    """The device map in `--device-map`. Raises `UsageError` for an unknown keyword, and `MhaError` for an invalid file."""
    if word == "auto":
        return "auto"
    if word == "tp":
        raise UsageError("--device-map tp is gone; --device-map auto spreads whole layers over the devices")
    if not os.path.lexists(word):
        raise UsageError(
            f"--device-map {shlex.quote(word[:200])} is neither auto nor a file",
            hint='a file holds JSON, such as {"model.layers.0": "cuda:0", "model.layers.1": "cpu"}',
        )
    document = load_json(read_whole(word, _MAX_FILE_BYTES), word)
    if not isinstance(document, dict) or not document:
        raise _bad(f"{word} holds no JSON object of modules and devices", word)
    if "" in document and len(document) > 1:
        raise _bad(f'{word} names the whole model, "", and parts of it', word)
    return {name: _device(name, device, word) for name, device in document.items()}


def _device(name: str, device: object, path: str) -> str:
    """The device of a module. A number means a CUDA device."""
    if isinstance(device, int) and not isinstance(device, bool) and 0 <= device < 10_000:
        return f"cuda:{device}"
    if isinstance(device, str) and _DEVICE.fullmatch(device):
        return device
    raise _bad(
        f"{path}: the device of {name!r:.200} is {device!r:.80}, not cpu, disk, mps, cuda, cuda:N or a number", path
    )


def _bad(message: str, path: str) -> MhaError:
    return MhaError(
        message, hint='such as {"model.layers.0": "cuda:0", "model.layers.1": "cpu"}', code="bad-file", path=path
    )
