"""The placement of a checkpoint's modules on devices: the values of `--device-map`, and its file."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from typing import Literal

from mhacli.errors import UsageError, bad_file, first_names
from mhacli.io.data import decode, load_json
from mhacli.io.files import read_whole

DeviceMap = Literal["auto"] | Mapping[str, str]
"""`auto` fills GPUs, then the CPU, then the disk. A mapping has the device of each named module: `cpu`, `disk`, `mps`, `cuda` or
`cuda:N`; the name "" is the whole model."""

_DEVICE = "cpu|disk|mps|cuda(:[0-9]{1,4})?"
_EXAMPLE = 'a file holds JSON, such as {"model.layers.0": "cuda:0", "model.layers.1": "cpu"}'
_MAX_FILE_BYTES = 1 << 24


def read_device_map(word: str) -> DeviceMap:
    """The device map in `--device-map`. Raises `UsageError` for an unknown keyword, and `MhaError` for an invalid file."""
    if word == "auto":
        return "auto"
    if not os.path.lexists(word):
        raise UsageError(f"--device-map {shlex.quote(word[:200])} is neither auto nor a file", hint=_EXAMPLE)
    numbered = decode(dict[str, str | int], load_json(read_whole(word, _MAX_FILE_BYTES), word), word)
    devices = {name: f"cuda:{device}" if isinstance(device, int) else device for name, device in numbered.items()}
    unknown = [f"{name!r:.80}: {device!r:.80}" for name, device in devices.items() if not re.fullmatch(_DEVICE, device)]
    if unknown:
        message = f"{word}: devices are cpu, disk, mps, cuda, cuda:N or the number of a GPU, not {first_names(unknown)}"
    elif not devices or ("" in devices and len(devices) > 1):
        message = f'{word} names no module, or both the whole model, "", and parts of it'
    else:
        return devices
    raise bad_file(word, message, hint=_EXAMPLE)
