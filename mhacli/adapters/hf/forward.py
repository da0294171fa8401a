"""A model's own forward pass: what it returns, and whose fault it is where it raises."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from torch import nn

from mhacli.errors import MhaError

T = TypeVar("T")
_OURS = str(Path(__file__).parents[2]) + os.sep
_PASSING = ("__torch_function__", "__torch_dispatch__")
"""Where torch hands over every operator, the model's and ours alike: who asked for it stands further out."""
_NO_MEMORY = ("allocate memory", "out of memory")


def called(function: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """What a function that the model calls returns. What it raises is the model's, though this package calls it in its place."""
    return function(*args, **keywords)


def outputs_of(model: Any, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """What one pass of a model gives, without a cache of keys and values. Raises `MhaError` as `run_model` does."""
    without = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    return dict(run_model(model, lambda: model(**keywords, **without)))


def run_model(model: Any, run: Callable[[], T]) -> T:
    """What `run`, which calls the model, returns.

    Raises `MhaError` for what the model's own code raises, such as for sizes in its config that do not go together: its
    message, and the part that was running. What this package raises while it looks at a pass stays as it is.
    """
    try:
        return run()
    except (MhaError, MemoryError):
        raise
    except Exception as fault:
        frames = [frame for frame, _ in traceback.walk_tb(fault.__traceback__)]
        if any(word in str(fault) for word in _NO_MEMORY) or not _is_of_model(frames, model, run):
            raise
        raise _refused(model, fault, frames) from fault


def _is_of_model(frames: list[FrameType], model: Any, run: Callable[[], Any]) -> bool:
    """Whether the innermost frame that is neither a library's nor torch's is the model's, or one that calls it or for it."""
    files = {os.path.dirname(path) for path in _files(model)}
    for frame in reversed(frames):
        path = frame.f_code.co_filename
        if path.startswith(_OURS):
            if frame.f_code.co_name in _PASSING:
                continue
            return frame.f_code in (getattr(run, "__code__", None), called.__code__)
        if os.path.dirname(path) in files:
            return True
    return False


def _files(model: nn.Module) -> Iterator[str]:
    """The modelling files of the classes that the model is made of, torch's aside."""
    for kind in {type(module) for module in model.modules()}:
        forward = getattr(kind.forward, "__code__", None)
        if forward is not None and not kind.__module__.startswith("torch."):
            yield forward.co_filename


def _refused(model: Any, fault: Exception, frames: list[FrameType]) -> MhaError:
    names = {id(module): name for name, module in model.named_modules() if name}
    running = [frame.f_locals["self"] for frame in frames if id(frame.f_locals.get("self")) in names]
    kind = type(model).__name__
    part = f"{names[id(running[-1])]} ({type(running[-1]).__name__}) of {kind}" if running else kind
    said = next((line for line in str(fault).splitlines() if line.strip()), "no message")
    path = getattr(model, "name_or_path", None) or None
    return MhaError(
        f"the forward pass of the model must run, got {type(fault).__name__} in {part}: {said:.300}",
        hint="the model's own code raised it: sizes in its config.json may not go together, or it needs another input than text",
        code="model-failed",
        path=path,
    )
