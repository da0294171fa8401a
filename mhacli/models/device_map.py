"""Models on several devices: accelerate places layers on GPUs, CPU and disk.

Source: transformers 5, integrations/accelerate.py; accelerate 1, hooks.py.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mhacli.errors import MhaError, first_names, missing_library
from mhacli.io import memory
from mhacli.io.device_map import DeviceMap
from mhacli.io.files import format_size, temporary_folder
from mhacli.models.folder import Checkpoint

EXTRA = "device-map"
_PART_FOR_WEIGHTS = 0.9
"""The fraction of free memory for weights; the rest is for activations."""


def accelerate() -> Any:
    """The library accelerate. Raises `MhaError` if it is not installed."""
    try:
        return importlib.import_module("accelerate")
    except ImportError:
        raise missing_library("accelerate", "--device-map") from None


def spread(kind: Any, config: Any, checkpoint: Checkpoint, device_map: DeviceMap) -> dict[str, Any]:
    """The keywords with which transformers loads a model of the class `kind` onto the devices of a map.

    Raises `MhaError` for modules that the model does not have or that have no device.
    """
    if device_map == "auto":
        return {"device_map": "auto", "max_memory": _free_memory(), "offload_folder": temporary_folder()}
    assert not isinstance(device_map, str)
    with torch.device("meta"):
        model = kind.from_config(config)
    devices = _of_model(model, device_map, checkpoint)
    uses_disk = "disk" in devices.values()
    return {"device_map": devices} | ({"offload_folder": temporary_folder()} if uses_disk else {})


def _free_memory() -> dict[int | str, int]:
    """The memory that weights may use on each device, on the CPU within the limit of this process."""
    free: dict[int | str, int] = importlib.import_module("accelerate.utils").get_max_memory()
    if "cpu" in free:
        free["cpu"] = min(free["cpu"], memory.available_bytes())
    return {device: int(_PART_FOR_WEIGHTS * n_bytes) for device, n_bytes in free.items()}


def _of_model(model: Any, device_map: Mapping[str, str], checkpoint: Checkpoint) -> dict[str, str]:
    """The map with the module names of the model. A checkpoint may have a language head that this model leaves out, or a prefix
    before the names of its layers. Raises `MhaError`."""
    names = {name for name, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers())}
    prefix = f"{model.base_model_prefix}."
    devices: dict[str, str] = {}
    unknown = []
    for name, device in device_map.items():
        known = next((each for each in (name, name.removeprefix(prefix), prefix + name) if each in names), None)
        if known is not None:
            devices[known] = device
        elif not any(_is_part(tensor, name) for tensor in checkpoint.tensors):
            unknown.append(name)
    if unknown:
        raise _refused(
            f"names modules that {type(model).__name__} does not have: {first_names(unknown)}",
            f"its parts are {', '.join(_parts(model))}",
        )
    tensors = (name for name, _ in (*model.named_parameters(), *model.named_buffers()))
    without = [tensor for tensor in tensors if not any(_is_part(tensor, name) for name in devices)]
    if without:
        raise _refused(
            f"gives no device to {first_names(without)}", f'for example "{without[0].rpartition(".")[0]}": "cpu"'
        )
    return devices


def _parts(model: nn.Module) -> Iterator[str]:
    """The names of a model's parts, with the first and last of each list of layers."""
    for name, child in model.named_children():
        yield f"{name}.0 … {name}.{len(child) - 1}" if isinstance(child, nn.ModuleList) and len(child) else name


def _is_part(tensor: str, name: str) -> bool:
    return not name or tensor == name or tensor.startswith(f"{name}.")


def _refused(message: str, hint: str) -> MhaError:
    return MhaError(f"--device-map {message}", hint=hint, code="bad-device-map")


def where_weights_are(model: nn.Module) -> str | None:
    """A description of how much of a model is on which device; None if all of it is on one."""
    placed: Mapping[str, Any] | None = getattr(model, "hf_device_map", None)
    if placed is None:
        return None
    sizes: Counter[str] = Counter()
    for name, tensor in model.named_parameters():
        part = max((each for each in placed if _is_part(name, each)), key=len)
        device = placed[part]
        sizes[f"cuda:{device}" if isinstance(device, int) else str(device)] += tensor.numel() * tensor.element_size()
    return "weights: " + ", ".join(f"{format_size(size)} on {device}" for device, size in sizes.items())


# ----------------------------------------------------------------------------------------------------- offloaded weights


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's inputs: by the hooks that fetch weights from CPU or disk, otherwise by its weights."""
    for module in model.modules():
        for hook in _hooks(module):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


class _Copied(Mapping[str, Tensor]):
    """The weights that a hook fetches, copied from the mapped file: the alignment in memory decides which kernel multiplies them,
    and so the last bits of the result."""

    def __init__(self, mapped: Mapping[str, Tensor]) -> None:
        self._mapped = mapped

    def __getitem__(self, name: str) -> Tensor:
        return self._mapped[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapped)

    def __len__(self) -> int:
        return len(self._mapped)


def copy_when_fetched(model: nn.Module) -> None:
    """Makes a model fetch copies of its weights, like the copies in a model on one device."""
    for hook in (hook for module in model.modules() for hook in _hooks(module)):
        if getattr(hook, "weights_map", None) is not None:
            hook.weights_map = _Copied(hook.weights_map)


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
