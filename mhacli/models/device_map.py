"""Models on several devices: accelerate places layers on GPUs, CPU and disk, and fetches weights when they are read.

Source: transformers 5, integrations/accelerate.py; accelerate 1, hooks.py.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from mhacli.errors import missing_library
from mhacli.io import memory
from mhacli.io.device_map import DeviceMap
from mhacli.io.files import temporary_folder


def placing(device_map: DeviceMap, *, leaves_out: str) -> dict[str, Any]:
    """The keywords with which transformers loads a model onto the devices of a map. `leaves_out` is the prefix of the names of
    layers in a checkpoint with a head, for a model without one. Raises `MhaError` without accelerate."""
    try:
        utilities = importlib.import_module("accelerate.utils")
    except ImportError:
        raise missing_library("accelerate", "--device-map") from None
    if device_map == "auto":
        free: dict[int | str, int] = utilities.get_max_memory()
        limit = {"cpu": min(free.get("cpu", 0), memory.available_bytes())}
        return {"device_map": "auto", "max_memory": free | limit, "offload_folder": temporary_folder()}
    assert not isinstance(device_map, str)
    inner = {name: device for name, device in device_map.items() if name.startswith(leaves_out)} or device_map
    devices = {name.removeprefix(leaves_out): device for name, device in inner.items()}
    return {"device_map": devices} | ({"offload_folder": temporary_folder()} if "disk" in devices.values() else {})


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's inputs: by the hooks that fetch weights from CPU or disk, otherwise by its weights."""
    for hook in (hook for module in model.modules() for hook in _hooks(module)):
        if getattr(hook, "execution_device", None) is not None:
            return torch.device(hook.execution_device)
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def fetched(module: nn.Module, name: str = "weight") -> Any:
    """A parameter of a module, or None in its place, read from CPU or disk if it is not on the device. Writing to one that was
    read has no effect."""
    tensor = getattr(module, name, None)
    if tensor is None or not tensor.is_meta:
        return tensor
    hook = next(hook for hook in _hooks(module) if getattr(hook, "weights_map", None) is not None)
    return hook.weights_map[name].to(device=hook.execution_device, dtype=tensor.dtype)


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """The hooks of accelerate on a module."""
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))
