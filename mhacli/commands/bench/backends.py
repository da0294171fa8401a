"""The backends of `mha bench`: the call of each at one size, its answers beside those in float64, and what a call runs and holds.

Names and descriptions stand in `mhacli.commands.bench.workload.BACKENDS`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.autograd.profiler import profile

from mhacli.attention import masks
from mhacli.attention.core import attend
from mhacli.attention.fused import fused_attend, kernel_among
from mhacli.commands.bench.workload import LAYERS, RETURNS_PATTERN, BackendStatus, BenchRow, Direction

Leaves = tuple[Tensor, ...]
"""The tensors to which gradients go: q, k and v split into heads, or the rows that a layer reads."""
Problem = tuple[Leaves, Tensor, list[Tensor]]
"""The leaves, some queries, and the answers in float64 at these."""
COMPILED = ("flex", "compiled")
_CAUSAL = masks.causal()
_EXACT_BYTES = 256 << 20
"""The most bytes of scores in float64. Of more queries, evenly spread ones are compared."""


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, dynamic=False)


@lru_cache(maxsize=1)
def _causal_blocks(q_len: int, k_len: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    create: Any = torch.compile(create_block_mask)  # uncompiled it would ask every cell at once
    return create(lambda batch, head, q_idx, k_idx: q_idx >= k_idx, None, None, q_len, k_len, device=device)


def _explicit(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return attend(q, k, v, allowed=_CAUSAL if causal else None)


def _compiled_attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    z: Tensor = _compiled(attend)(q, k, v, allowed=_CAUSAL if causal else None)
    return z


def _flex(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    if q.device.type != "cuda":
        where = f"where it compiles to one kernel, not on {q.device.type}"
        raise NotImplementedError(f"FlexAttention is measured on CUDA, {where}")
    from torch.nn.attention.flex_attention import flex_attention

    blocks = _causal_blocks(q.shape[2], k.shape[2], str(q.device)) if causal else None
    z: Tensor = _compiled(flex_attention)(q, k, v, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])
    return z


_CALLS: Mapping[str, Callable[..., Tensor]] = {"explicit": _explicit, "compiled": _compiled_attend, "flex": _flex}
"""What is called with q, k and v; for other names torch's fused attention, and of these most choose its kernel."""


def _layer(row: BenchRow, x: Tensor, seed: int) -> tuple[nn.Module, Tensor | None]:
    """`nn.MultiheadAttention` for rows like x, with weights that keep the size of normal rows, and its mask."""
    if row.n_kv_heads != row.n_heads:
        raise NotImplementedError("nn.MultiheadAttention has no shared kv heads")
    if row.q_len != row.k_len:
        raise NotImplementedError("nn.MultiheadAttention has no cache to decode with")
    width, generator = x.shape[-1], torch.Generator().manual_seed(seed)
    layer = nn.MultiheadAttention(width, row.n_heads, batch_first=True, device="cpu", dtype=torch.float32).eval()
    for parameter in layer.parameters():
        parameter.data.normal_(std=width**-0.5, generator=generator)
    mask = nn.Transformer.generate_square_subsequent_mask(row.q_len, x.device, x.dtype) if row.is_masked else None
    return layer.to(getattr(torch, row.dtype)).to(x), mask


def call_of(row: BenchRow, leaves: Leaves, seed: int) -> Callable[[], Tensor]:
    """The call to time."""
    if row.backend not in LAYERS:
        return partial(_CALLS.get(row.backend, fused_attend), *leaves, causal=row.is_masked)
    (x,), (layer, mask) = leaves, _layer(row, leaves[0], seed)
    how = {"need_weights": row.backend == RETURNS_PATTERN, "average_attn_weights": False, "is_causal": row.is_masked}
    return lambda: layer(x, x, x, attn_mask=mask, **how)[0]


def problem_of(row: BenchRow, device: torch.device, seed: int) -> Problem:
    """Normal numbers for this size, since zeros would be computed too fast, and what float64 makes of them."""
    shapes: list[tuple[int, ...]] = [(row.batch, row.q_len, row.n_heads * row.d_head)]
    if row.backend not in LAYERS:
        of_keys = (row.batch, row.n_kv_heads, row.k_len, row.d_head)
        shapes = [(row.batch, row.n_heads, row.q_len, row.d_head), of_keys, of_keys]
    kind: Any = {"generator": torch.Generator(device).manual_seed(seed), "dtype": getattr(torch, row.dtype)}
    has_gradient, home = row.direction != "forward", "cpu" if device.type == "mps" else device  # MPS has no float64
    leaves = tuple(torch.randn(shape, device=device, **kind).requires_grad_(has_gradient) for shape in shapes)
    wide = tuple(leaf.detach().to(home).double().requires_grad_(has_gradient) for leaf in leaves)
    n = max(1, min(row.q_len, _EXACT_BYTES // (8 * row.batch * row.n_heads * row.k_len)))
    queries = torch.linspace(0, row.q_len - 1, n, dtype=torch.float64).round().long().to(home)
    some = wide[0].index_select(-2, queries)
    if row.backend in LAYERS:
        layer, mask = _layer(row, wide[0], seed)
        visible = None if mask is None else mask[queries]
        out = layer(some, wide[0], wide[0], attn_mask=visible, need_weights=False)[0]
    else:
        out = attend(some, *wide[1:], allowed=(lambda _, k_idx: _CAUSAL(queries, k_idx)) if row.is_masked else None)
    return leaves, queries.to(device), answers(out, wide, row.direction)


def answers(out: Tensor, leaves: Leaves, direction: Direction) -> list[Tensor]:
    """The output, unless only backward is measured, and the gradients."""
    if direction == "forward":
        return [out]
    signs = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).sign().to(out)
    gradients = grad(out, leaves, signs)
    return [*gradients] if direction == "backward" else [out.detach(), *gradients]


def watched(row: BenchRow, call: Callable[[], object], device: torch.device) -> tuple[str, int | None]:
    """The kernel that a call runs, and the most bytes that torch's allocator held for it at a time, results included;
    None where the allocator does not say."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to stderr
    with profile(use_kineto=False, profile_memory=device.type == "cpu") as seen:
        call()
    assert seen.kineto_results is not None  # it has been stopped
    events = sorted(seen.kineto_results.events(), key=lambda event: int(event.start_ns()))
    operators = frozenset(event.name() for event in events)
    kernel = kernel_among(operators) or "unknown"
    if row.backend in COMPILED and any(name.startswith("Torch-Compiled Region") for name in operators):
        kernel = row.backend
    elif row.backend == "explicit" and kernel == "unfused":
        kernel = "explicit"
    if device.type == "cuda":
        return kernel, torch.cuda.max_memory_allocated(device) - before
    held = accumulate((event.nbytes() for event in events if event.name() == "[memory]"), initial=0)
    return kernel, max(held) if device.type == "cpu" else None


def outcome_of(backend: str, fault: Exception, warned: Sequence[str]) -> tuple[BackendStatus, str]:
    """The status of a backend that raised this, and why. torch gives the reasons for refusing a kernel as warnings."""
    reason = " ".join(str(fault).split())[:300] or type(fault).__name__
    if isinstance(fault, MemoryError | torch.OutOfMemoryError) or re.search("can't allocate|out of memory", reason):
        return "out-of-memory", reason
    if re.search("No available kernel|No viable backend", reason):
        refused = f"torch has no {backend} kernel for this device and these inputs"
        return "unsupported", ": ".join([refused, " ".join(warned)] if warned else [refused])
    cannot = re.search("not implemented for|No working C.. compiler|Cannot find a working triton", reason)
    return "unsupported" if cannot or isinstance(fault, NotImplementedError) else "failed", reason
