"""What this room takes from the inside of torch, transformers, accelerate and huggingface_hub.

A name that a library does not document can go with any release. Each function here reads one such
name, and has an answer where the library lacks it. `tests/unit/test_foreign_models.py` says with
which releases they were tried, and fails if a name is gone.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdRef

_MISSING: Any = object()


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """A context in which attributes of an object, a class or a module have other values.

    What the owner only inherits is inherited again afterwards.
    """
    before = {name: vars(owner).get(name, _MISSING) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


# -------------------------------------------------------------------------------------------- torch


WRAPPER_PREFIX = re.compile(r"((_orig_mod|module)\.)+")
"""What torch.compile and DistributedDataParallel put before the name of every tensor of a model
that they wrap."""


def sdpa_kernel(query: Any, key: Any, value: Any, attn_mask: Any = None, **arguments: Any) -> str:
    """The name of the kernel that torch chooses for a call of `scaled_dot_product_attention`:
    flash, efficient, cudnn or math; `sdpa` where torch does not say it.
    """
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None or query.device.type not in ("cpu", "cuda"):
        return "sdpa"
    backend = SDPBackend(choose(query, key, value, attn_mask, **arguments))
    return backend.name.removesuffix("_ATTENTION").lower()


def is_in_backward() -> bool:
    """Whether a backward pass is running, which computes layers again with activation
    checkpointing.
    """
    task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
    return task_id() != -1


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def version_of(tensor: Tensor) -> object:
    """The number of writes in place to a tensor. Where they are not counted, as in inference mode,
    an object that equals no other.
    """
    if tensor.is_inference() or not hasattr(tensor, "_version"):
        return object()
    return tensor._version


class _Affirming(TorchDispatchMode):
    """Answers reads of the device meta, as `affirming` says."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What an operation returns."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def affirming() -> AbstractContextManager[Any]:
    """A context in which code that reads a number of the device meta, which has none, goes on with
    1 or True: models ask of a mask whether all of it is set, and of positions whether they are in
    order.
    """
    mode: AbstractContextManager[Any] = _Affirming()  # type: ignore[no-untyped-call]
    return mode


def state_of(value: object) -> object:
    """What stands for a tensor and its numbers: a reference that does not keep it alive, and the
    number of writes in place. None for anything else.
    """
    return (WeakIdRef(value), version_of(value)) if isinstance(value, Tensor) else None


# ------------------------------------------------------------------------------------- transformers


AttentionFunction = Callable[..., Any]
Origin = Literal["registry", "module"]
"""Where a function of attention is from: the table of transformers, or the modelling file."""


def attention_functions(
    wrap: Callable[[Origin, AttentionFunction], AttentionFunction],
) -> AbstractContextManager[None]:
    """A context in which every function of attention that transformers hands to a model goes
    through `wrap`, in the whole process. Nothing is wrapped before transformers is imported.
    """
    models = sys.modules.get("transformers.modeling_utils")
    interface: Any = getattr(models, "AttentionInterface", None)
    if interface is None:
        return nullcontext()
    of_table = interface.__getitem__
    functions: dict[str, Any] = {
        "__getitem__": lambda table, name: wrap("registry", of_table(table, name))
    }
    if hasattr(interface, "get_interface"):
        choose = interface.get_interface

        def get_interface(table: Any, name: Any, usual: Any) -> Any:
            chosen = choose(table, name, usual)
            is_of_file = usual is not None and choose(table, name, None) is None
            return wrap("module", chosen) if is_of_file else chosen

        functions["get_interface"] = get_interface
    return replaced(interface, **functions)


def uses_attention_functions(file: str) -> bool:
    """Whether a modelling file, by the name of its module, takes its functions of attention from
    the table of transformers.
    """
    return hasattr(sys.modules.get(file), "ALL_ATTENTION_FUNCTIONS")


def attn_implementation(config: Any) -> str | None:
    """The implementation of attention that a config chose, such as `sdpa`; None without one."""
    return getattr(config, "_attn_implementation", None)


def first_layer_idx(model: nn.Module) -> int | None:
    """The number under which the first attention of a model finds its keys in a cache."""
    numbers = (getattr(module, "layer_idx", None) for module in model.modules())
    return next((number for number in numbers if isinstance(number, int)), None)


def computed_weights(model: Any) -> tuple[str, ...]:
    """Regular expressions for the names of weights that a model computes, and that are in no
    file.
    """
    return tuple(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())


def tied_weights(model: Any) -> Mapping[str, str]:
    """The names of each two weights of a model that are one tensor."""
    return getattr(model, "all_tied_weights_keys", {})


def offline() -> AbstractContextManager[None]:
    """A context in which no hub is contacted. Needs huggingface_hub."""
    from huggingface_hub import constants

    return replaced(constants, HF_HUB_OFFLINE=True)


# --------------------------------------------------------------------------------------- accelerate


def placed_devices(model: Any) -> set[str]:
    """The devices to which a device map moved the weights of a model; empty without a map."""
    return {str(device) for device in getattr(model, "hf_device_map", {}).values()}


def execution_device(model: nn.Module) -> torch.device | None:
    """The device to which hooks move the inputs of a model, before it computes with weights that
    they fetch from CPU or disk. None without such hooks.
    """
    for module in model.modules():
        for hook in _hooks(module):
            if getattr(hook, "execution_device", None) is not None:
                return torch.device(hook.execution_device)
    return None


def stored_parameter(module: nn.Module, name: str) -> Tensor:
    """A parameter of a module with its numbers, which stay on CPU or disk, until a hook fetches
    them, if the parameter is on the device meta.
    """
    parameter: Tensor = getattr(module, name)
    if not parameter.is_meta:
        return parameter
    maps = (getattr(hook, "weights_map", None) for hook in _hooks(module))
    weights = next(weights for weights in maps if weights is not None)
    stored: Tensor = weights[name]
    return stored.to(parameter.dtype)


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """The hooks of accelerate on a module, one by one."""
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))
