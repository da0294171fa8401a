"""What a benchmark takes from the inside of torch: the events of its profiler, and the names of the
operators that its kernels run.
"""

import os
from collections.abc import Callable
from itertools import accumulate
from typing import TypeVar

import torch
from torch.autograd.profiler import profile

T = TypeVar("T")
_KERNEL_NAMES = {
    "_flash_attention": "flash",
    "_efficient_attention": "efficient",
    "_cudnn_attention": "cudnn",
    "_attention_math_for_mps": "mps",
    "_attention_math": "math",
    "_fused_attention_overrideable": "overrideable",
}
"""What stands in the name of the operator `aten::_scaled_dot_product…` of each kernel."""


def observed(call: Callable[[], T], device: torch.device) -> tuple[T, frozenset[str], int | None]:
    """What a call gives under torch's profiler, the names of the operators that it runs, and the
    most bytes that torch's allocator held for it at a time, results included; None where the
    allocator does not say.

    Its events have no public form that is as fast to read. Where a version of torch has none of
    them, there are no operators, and on a CPU no memory.
    """
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to stderr
    with profile(use_kineto=False, profile_memory=device.type == "cpu") as profiler:
        results = call()
    kineto = getattr(profiler, "kineto_results", None)
    events = [] if kineto is None else sorted(kineto.events(), key=lambda event: event.start_ns())
    peak = None
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - before
    elif device.type == "cpu" and kineto is not None:
        moved = (event.nbytes() for event in events if event.name() == "[memory]")
        peak = max(accumulate(moved, initial=0))
    return results, frozenset(event.name() for event in events), peak


def kernel_among(operators: frozenset[str]) -> str | None:
    """The kernel of attention that left its name among operators; `unfused` for a softmax outside
    one; None without either.
    """
    for part, kernel in _KERNEL_NAMES.items():
        if any("_scaled_dot_product" in name and part in name for name in operators):
            return kernel
    return "unfused" if any("softmax" in name for name in operators) else None
