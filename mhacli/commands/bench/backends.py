"""The backends of `mha bench`: the call to time at one size, the same in float64, and what a call runs and holds.

Names and descriptions stand in `mhacli.commands.bench.workload.BACKENDS`.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.autograd.profiler import profile

from mhacli.attention import masks
from mhacli.attention.core import attend
from mhacli.attention.devices import free_bytes
from mhacli.attention.fused import KERNELS, fused_attend, kernel_among, only
from mhacli.commands.bench.result import BackendStatus, BenchRow
from mhacli.commands.bench.workload import COMPILED, EXPECTED_FUSED, LAYERS, RETURNS_PATTERN, Workload
from mhacli.io import memory

Leaves = tuple[Tensor, ...]
"""The tensors to which gradients go: q, k and v split into heads, or the rows that a layer reads."""
Prepared = tuple[Leaves, Callable[[], Tensor], Callable[[Sequence[Tensor], Tensor], Tensor]]
"""The leaves, the call to time, and from leaves in float64 the exact output at some queries."""


def prepare(backend: str, work: Workload, generator: torch.Generator) -> Prepared:
    """The backend ready for this size, with normal numbers, since zeros would be computed too fast. Raises
    `NotImplementedError` for what it cannot do."""

    def draw(*shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=generator, dtype=getattr(torch, work.dtype), device=generator.device)
        return numbers.requires_grad_(work.direction != "forward")

    if backend in LAYERS:
        return _layer(backend, work, draw(work.batch, work.q_len, work.n_heads * work.d_head), generator)
    q = draw(work.batch, work.n_heads, work.q_len, work.d_head)
    heads = (q, *(draw(work.batch, work.n_kv_heads, work.k_len, work.d_head) for _ in range(2)))
    mask = masks.causal() if work.is_masked else None
    call: Callable[[], Tensor] = partial(fused_attend, *heads, causal=work.is_masked)
    if backend in ("explicit", "compiled"):
        function = attend if backend == "explicit" else torch.compile(attend, fullgraph=True, dynamic=False)
        call = partial(function, *heads, allowed=mask)
    elif backend == "flex":
        call = _flex(work, heads)

    def exact(leaves: Sequence[Tensor], queries: Tensor) -> Tensor:
        q, k, v = leaves
        allowed = None if mask is None else lambda _, k_idx: mask(queries, k_idx)
        return attend(q[..., queries, :], k, v, allowed=allowed)

    return heads, call, exact


def _flex(work: Workload, heads: Leaves) -> Callable[[], Tensor]:
    device = heads[0].device
    if device.type != "cuda":
        raise NotImplementedError(
            f"FlexAttention is measured on CUDA, where it compiles to one kernel, not on {device.type}"
        )
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = None
    if work.is_masked:
        blocks = torch.compile(create_block_mask)(  # uncompiled it would ask every cell at once
            lambda batch, head, q_idx, k_idx: q_idx >= k_idx, None, None, work.q_len, work.k_len, device=str(device)
        )
    call: Any = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return partial(call, *heads, block_mask=blocks, enable_gqa=work.n_kv_heads != work.n_heads)


def _layer(backend: str, work: Workload, rows: Tensor, generator: torch.Generator) -> Prepared:
    """`nn.MultiheadAttention` with weights that keep the size of normal rows."""
    if work.n_kv_heads != work.n_heads:
        raise NotImplementedError("nn.MultiheadAttention has no shared kv heads")
    if work.q_len != work.k_len:
        raise NotImplementedError("nn.MultiheadAttention has no cache to decode with")
    width = rows.shape[-1]
    layer = nn.MultiheadAttention(width, work.n_heads, batch_first=True, device=rows.device, dtype=rows.dtype).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=width**-0.5, generator=generator)
    mask = None
    if work.is_masked:
        mask = nn.Transformer.generate_square_subsequent_mask(work.q_len, rows.device, rows.dtype)
    choices = {"need_weights": backend == RETURNS_PATTERN, "average_attn_weights": False, "is_causal": work.is_masked}

    def exact(leaves: Sequence[Tensor], queries: Tensor) -> Tensor:
        (wide,) = leaves
        visible = None if mask is None else mask.to(wide)[queries]
        in_float64 = copy.deepcopy(layer).to(wide.device).double()
        out: Tensor = in_float64(wide[:, queries], wide, wide, attn_mask=visible, need_weights=False)[0]
        return out

    return (rows,), lambda: layer(rows, rows, rows, attn_mask=mask, **choices)[0], exact


@contextmanager
def running(backend: str, work: Workload) -> Iterator[None]:
    """What surrounds a call: the choice of a kernel, and gradients where the direction needs them."""
    with only(backend) if backend in KERNELS else nullcontext(), torch.set_grad_enabled(work.direction != "forward"):
        yield


def wait(device: torch.device) -> None:
    """Returns when the device has finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# --------------------------------------------------------------------------------------------------------- the first calls


Ready = tuple[Prepared, Tensor]
"""What the rounds need: a backend, and the gradient of its output for backward."""


def first_calls(row: BenchRow, exact: dict[bool, list[Tensor]], generator: torch.Generator) -> tuple[BenchRow, Ready]:
    """The row with the time of the first call, with any compilation, the kernel, the memory and the error; and what the rounds
    need. `exact` are the answers in float64 of heads and of layers, as far as they are known."""
    work, name, device, is_layer = row.size, row.backend, generator.device, row.backend in LAYERS
    with running(name, work):
        leaves, call, _ = prepared = prepare(name, work, generator)

        def whole() -> tuple[Tensor, ...]:
            out = call()
            return (out.detach(), *(() if work.direction == "forward" else grad(out, leaves, torch.ones_like(out))))

        wait(device)
        began = perf_counter()
        out = whole()[0]
        wait(device)
        row = replace(row, first_s=perf_counter() - began)
        operators, peak = _watched(whole, device)
        ran = _what_ran(name, operators)
        row = replace(row, ran=ran, is_fallback=name in EXPECTED_FUSED and ran in ("math", "unfused"), extra_bytes=peak)
        ready = prepared, out.normal_(generator=generator)
        room = 3 * _EXACT_BYTES + 24 * sum(leaf.numel() for leaf in leaves)
        if not memory.fits(room, free_bytes(str(device))):
            return replace(row, reason="not enough memory to measure the error"), ready
        ours, exact[is_layer], n_queries = _answers(prepared, work, exact.get(is_layer))
    pairs = zip(ours, exact[is_layer], strict=True)
    errors = torch.cat([(a.detach().to(b.device).double() - b).abs().flatten() for a, b in pairs])
    row, largest, mean = replace(row, n_error_queries=n_queries), float(errors.max()), float(errors.mean())
    if not math.isfinite(mean):
        return replace(row, reason="results are not finite"), ready
    return replace(row, max_error=largest, mean_error=mean), ready


_EXACT_BYTES = 256 << 20
"""In the exact answer: the scores of the queries. Of more, some are compared."""


def _answers(prepared: Prepared, work: Workload, known: list[Tensor] | None) -> tuple[list[Tensor], list[Tensor], int]:
    """Output (unless only backward is measured) and gradients of a call, those in float64 if they are not known, and the
    number of evenly spread queries for which they hold."""
    leaves, call, exact = prepared
    n = max(1, min(work.q_len, _EXACT_BYTES // (8 * work.batch * work.n_heads * work.k_len)))
    queries = torch.linspace(0, work.q_len - 1, n, dtype=torch.float64).round().long()

    def answer(out: Tensor, of: Sequence[Tensor]) -> list[Tensor]:
        if work.direction == "forward":
            return [out]
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(leaves[0].dtype).to(out)
        gradients = grad(out, of, weights)
        return [*gradients] if work.direction == "backward" else [out.detach(), *gradients]

    if known is None:
        home = "cpu" if leaves[0].device.type == "mps" else leaves[0].device  # MPS has no float64
        wide = [leaf.detach().to(home).double().requires_grad_(leaf.requires_grad) for leaf in leaves]
        known = answer(exact(wide, queries.to(home)), wide)
    return answer(call().index_select(-2, queries.to(leaves[0].device)), leaves), known, n


def _watched(call: Callable[[], object], device: torch.device) -> tuple[frozenset[str], int | None]:
    """The operators that a call runs, and the most bytes that torch's allocator held for it at a time, results included;
    None where the allocator does not say."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to stderr
    with profile(use_kineto=False, profile_memory=device.type == "cpu") as seen:
        kept = call()
    assert seen.kineto_results is not None  # it has been stopped
    events = seen.kineto_results.events()
    operators = frozenset(event.name() for event in events)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return operators, torch.cuda.max_memory_allocated(device) - before
    del kept
    held = peak = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda e: int(e.start_ns())):
        held += event.nbytes()
        peak = max(peak, held)
    return operators, peak if device.type == "cpu" else None


def _what_ran(backend: str, operators: frozenset[str]) -> str:
    """The name of the kernel that left these operators."""
    kernel = kernel_among(operators)
    if backend in COMPILED and any(name.startswith("Torch-Compiled Region") for name in operators):
        return backend if kernel is None else f"{backend}, {kernel}"
    return "explicit" if backend == "explicit" and kernel == "unfused" else kernel or "unknown"


def outcome_of(backend: str, fault: Exception, warned: Sequence[str] = ()) -> tuple[BackendStatus, str]:
    """The status of a backend that raised this, and why. torch gives the reasons for refusing a kernel as warnings."""
    reason = " ".join(str(fault).split())[:300] or type(fault).__name__
    if isinstance(fault, MemoryError | torch.OutOfMemoryError) or re.search("can't allocate|out of memory", reason):
        return "out-of-memory", reason
    if re.search("No available kernel|No viable backend", reason):
        refused = f"torch has no {backend} kernel for this device and these inputs"
        return "unsupported", ": ".join([refused, " ".join(warned)] if warned else [refused])
    cannot = re.search("not implemented for|No working C.. compiler|Cannot find a working triton", reason)
    return "unsupported" if cannot or isinstance(fault, NotImplementedError) else "failed", reason
