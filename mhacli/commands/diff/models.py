"""Compares two models over the same inputs: runs each, measures rounding, and says where the two part."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor, nn

from mhacli.commands.diff.result import ModelDiff, model_diff
from mhacli.errors import UsageError
from mhacli.models.compare import coarser, compare, compute, measure_rounding
from mhacli.models.inputs import run_model
from mhacli.models.load import device_of
from mhacli.models.passes import require_open
from mhacli.models.places import Forward


def diff_modules(a: nn.Module, b: nn.Module, inputs: Any) -> ModelDiff:
    """The differences of two models in memory over `inputs`: keywords, positional arguments, or one tensor."""
    for model in (a, b):
        require_open(model, "mhacli.diff")
    runs = forward_of(a, inputs), forward_of(b, inputs)
    names = type(a).__name__, type(b).__name__
    with TemporaryFile() as file_a, TemporaryFile() as file_b:
        of_a, of_b = compute(a, runs[0], names[0], file_a), compute(b, runs[1], names[1], file_b)
        rounds = coarser(of_a, of_b)
        measure_rounding(*((a, runs[0]) if rounds is of_a else (b, runs[1])), rounds)
        return model_diff(compare(of_a, of_b), names)


def forward_of(model: nn.Module, inputs: Any) -> Forward:
    """A call of a model with inputs, on its device, without a cache. Keywords that it does not take are those of another library:
    then it gets the ids alone. Raises `UsageError` if it cannot take them."""
    device, taken = device_of(model), inspect.signature(model.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    args = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    given: dict[str, Any] = dict(inputs) if isinstance(inputs, Mapping) else {}
    if not (takes_any or given.keys() <= taken.keys()):
        others = [name for name, value in given.items() if name != "input_ids" and _matters(name, value)]
        if "input_ids" not in given or others:
            names = ", ".join(others or sorted(given.keys() - taken.keys()))
            raise UsageError(f"{type(model).__name__} does not take {names}", hint=f"it takes {', '.join(taken)}")
        args, given = (given["input_ids"],), {}
    if "use_cache" in taken and hasattr(getattr(model, "config", None), "use_cache"):
        given.setdefault("use_cache", False)

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    def forward() -> Any:
        with torch.no_grad():
            return run_model(model, lambda: model(*map(moved, args), **{n: moved(v) for n, v in given.items()}))

    return forward


def _matters(name: str, value: Any) -> bool:
    """Whether a keyword changes what is computed: not a mask without padding, nor a choice of what is returned."""
    if isinstance(value, Tensor):
        return not (name == "attention_mask" and bool(value.all()))
    return name not in ("use_cache", "return_dict") and value is not None
