"""The backends of `mha bench`, each made ready for one size: the same inputs, one call to time, one exact answer.

Names and descriptions stand in `mhacli.commands.bench.workload.BACKENDS`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mhacli.attention import masks
from mhacli.attention.core import attend
from mhacli.attention.fused import KERNELS, fused_attend, only
from mhacli.attention.layer import merge_heads, split_heads
from mhacli.commands.bench.result import BackendStatus
from mhacli.commands.bench.workload import Direction, Workload

_Queries = Float[Tensor, "batch head query d_head"]
_Keys = Float[Tensor, "batch kv_head key d_head"]
HeadTensors = tuple[_Queries, _Keys, _Keys]
"""q, k and v, split into heads."""


class UnsupportedError(Exception):
    """This backend cannot do this work on this device; the text says why."""


@dataclass(frozen=True)
class Prepared:
    """A backend ready to run: `forward` is what is timed, within `around`, and `leaves` are what gradients go to.

    The exact answer is `joined(attention(*heads(*leaves)))`, in float64: `heads` and `joined` are what the backend does
    besides attention, with its own weights. `mask_bytes` is what it keeps because it must be given a mask as a tensor.
    """

    leaves: tuple[Tensor, ...]
    forward: Callable[[], Tensor]
    mask_bytes: int = 0
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    heads: Callable[..., HeadTensors] = lambda q, k, v: (q, k, v)
    joined: Callable[[Tensor], Tensor] = lambda z: z

    @contextmanager
    def running(self, direction: Direction) -> Iterator[None]:
        """What must surround a call: the choice of a kernel, and gradients where the direction wants them."""
        with self.around(), torch.set_grad_enabled(direction != "forward"):
            yield

    def once(self, direction: Direction) -> object:
        """The whole pass: forward, and then backward where the direction has it. What is returned keeps the results alive."""
        with self.running(direction):
            out = self.forward()
            return (
                (out,) if direction == "forward" else (out, torch.autograd.grad(out, self.leaves, torch.ones_like(out)))
            )


def prepare(backend: str, workload: Workload, heads: HeadTensors, seed: int) -> Prepared:
    """The backend ready for this size. Raises `UnsupportedError` where it cannot do this on the heads' device."""
    return _MAKERS[backend](workload, heads, seed)


def draw_heads(workload: Workload, device: torch.device, seed: int) -> HeadTensors:
    """q, k and v for every backend: independent normal numbers in the size's dtype, never zeros, which run too fast."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = ((workload.n_heads, workload.q_len), *[(workload.n_kv_heads, workload.k_len)] * 2)
    q, k, v = (_draw((workload.batch, *size, workload.d_head), workload, generator) for size in sizes)
    return q, k, v


def _draw(shape: tuple[int, ...], workload: Workload, generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, workload.dtype)
    numbers = torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)
    return numbers.requires_grad_(workload.direction != "forward")


def _explicit(workload: Workload, heads: HeadTensors, seed: int) -> Prepared:
    return Prepared(
        heads, partial(attend, *heads, allowed=masks.causal(workload.offset) if workload.is_masked else None)
    )


def _compiled(workload: Workload, heads: HeadTensors, seed: int) -> Prepared:
    call = torch.compile(attend, fullgraph=True, dynamic=False)
    return Prepared(heads, partial(call, *heads, allowed=masks.causal(workload.offset) if workload.is_masked else None))


def _sdpa(workload: Workload, heads: HeadTensors, seed: int, kernel: str | None = None) -> Prepared:
    if workload.is_masked and workload.offset:
        raise UnsupportedError("scaled_dot_product_attention assumes that the first query is the first token")
    around = nullcontext if kernel is None else partial(only, kernel)
    return Prepared(heads, partial(fused_attend, *heads, causal=workload.is_masked), around=around)


def _flex(workload: Workload, heads: HeadTensors, seed: int) -> Prepared:
    device = heads[0].device
    if device.type != "cuda":
        raise UnsupportedError(
            f"FlexAttention is measured on CUDA, where it compiles to one kernel, not on {device.type}"
        )
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask, mask_bytes, offset = None, 0, workload.offset
    if workload.is_masked:
        blocks_of = torch.compile(create_block_mask)  # uncompiled it would ask every cell at once
        mask = blocks_of(
            lambda batch, head, q_idx, k_idx: q_idx + offset >= k_idx,
            None, None, workload.q_len, workload.k_len, device=str(device),
        )  # fmt: skip
        mask_bytes = sum(part.nbytes for part in mask.as_tuple() if isinstance(part, Tensor))
    call = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    shares = workload.n_kv_heads != workload.n_heads
    return Prepared(heads, partial(call, *heads, block_mask=mask, enable_gqa=shares), mask_bytes)


def _torch_mha(workload: Workload, heads: HeadTensors, seed: int, *, weights: bool) -> Prepared:
    """`nn.MultiheadAttention` as a layer: it projects its rows before attention and its result after."""
    if workload.n_kv_heads != workload.n_heads:
        raise UnsupportedError("nn.MultiheadAttention has no shared kv heads")
    if workload.q_len != workload.k_len:
        raise UnsupportedError("nn.MultiheadAttention has no cache to decode with")
    device, n_heads = heads[0].device, workload.n_heads
    generator = torch.Generator(device).manual_seed(seed)
    layer = _new_layer(workload, generator)
    rows = _draw((workload.batch, workload.q_len, layer.embed_dim), workload, generator)
    mask = None
    if workload.is_masked:
        mask = nn.Transformer.generate_square_subsequent_mask(workload.q_len, device, rows.dtype)
    choices = {"need_weights": weights, "average_attn_weights": False, "attn_mask": mask, "is_causal": mask is not None}

    def forward() -> Tensor:
        out: Tensor = layer(rows, rows, rows, **choices)[0]
        return out

    def projected(x: Tensor) -> HeadTensors:
        flat = _project(x, layer.in_proj_weight, layer.in_proj_bias)
        q, k, v = (split_heads(part, n_heads) for part in flat.chunk(3, dim=-1))
        return q, k, v

    def joined(z: Tensor) -> Tensor:
        return _project(merge_heads(z), layer.out_proj.weight, layer.out_proj.bias)

    mask_bytes = 0 if mask is None else mask.nbytes
    return Prepared((rows,), forward, mask_bytes, heads=projected, joined=joined)


def _project(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A projection with fixed weights, in the dtype and on the device of the rows; the device first, which may lack the dtype."""
    fixed = [part.detach().to(rows.device).to(rows.dtype) for part in (weight, bias)]
    return nn.functional.linear(rows, *fixed)


def _new_layer(workload: Workload, generator: torch.Generator) -> nn.MultiheadAttention:
    """A layer whose projections keep the size of normal rows."""
    width, dtype = workload.n_heads * workload.d_head, getattr(torch, workload.dtype)
    layer = nn.MultiheadAttention(width, workload.n_heads, batch_first=True, device=generator.device, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=width**-0.5, generator=generator)
    return layer.eval()


_MAKERS: Mapping[str, Callable[[Workload, HeadTensors, int], Prepared]] = {
    "explicit": _explicit,
    "compiled": _compiled,
    "sdpa": _sdpa,
    "flex": _flex,
    "torch-mha": partial(_torch_mha, weights=False),
    "torch-mha-weights": partial(_torch_mha, weights=True),
    **{name: partial(_sdpa, kernel=name) for name in KERNELS},
}


# ----------------------------------------------------------------------------------------------------- the exact answer


_BLOCK_BYTES = 64 << 20
"""Of one block's scores in float64."""
_MIN_QUERIES = 16


class Deviation(NamedTuple):
    """Largest and mean absolute difference from the exact numbers, over results and gradients of so many queries.

    NaN where a number is not finite.
    """

    max_error: float
    mean_error: float
    n_queries: int


class Exact(NamedTuple):
    """The exact result at some queries, and the gradients for a `weight` of the result that is 0 at all other queries."""

    queries: Int[Tensor, " n"]
    out: Tensor
    weight: Tensor | None
    gradients: Sequence[Tensor]


def exact_answer(prepared: Prepared, workload: Workload, *, most_flops: float) -> Exact:
    """The answer of backends with these leaves, by `attend` in float64; gradients where the direction has a backward pass.

    Where all of it would take more than `most_flops`, it is that of evenly spread queries only.
    """
    queries = _spread_queries(workload, most_flops).to(prepared.leaves[0].device)
    return _exact(prepared, workload, queries, is_differentiated=workload.direction != "forward")


def deviation(prepared: Prepared, workload: Workload, exact: Exact) -> Deviation:
    """How far one run of the backend is from the exact answer: result (forward), gradients (backward), or both."""
    with prepared.running(workload.direction):
        out = prepared.forward()
    pairs: list[tuple[Tensor, Tensor]] = []
    if workload.direction != "backward":
        pairs.append((out.detach().index_select(-2, exact.queries), exact.out))
    if exact.weight is not None:
        pairs += zip(torch.autograd.grad(out, prepared.leaves, exact.weight), exact.gradients, strict=True)
    return _compare(pairs, len(exact.queries))


def _spread_queries(workload: Workload, most_flops: float) -> Int[Tensor, " n"]:
    """All queries, or as many as the operations allow, the first and last among them."""
    share = min(1.0, most_flops / workload.attention_flops)
    n_queries = min(workload.q_len, max(_MIN_QUERIES, math.floor(workload.q_len * share)))
    # float32 would name some queries twice where the steps are little more than 1
    return torch.linspace(0, workload.q_len - 1, n_queries, dtype=torch.float64).round().long()


def _exact(prepared: Prepared, workload: Workload, queries: Int[Tensor, " n"], *, is_differentiated: bool) -> Exact:
    home = "cpu" if queries.device.type == "mps" else queries.device  # MPS has no float64
    leaves = [leaf.detach().to(home).to(torch.float64).requires_grad_(is_differentiated) for leaf in prepared.leaves]
    places = queries.to(home)
    q, k, v = prepared.heads(*leaves)
    blocks = places.split(max(1, _BLOCK_BYTES // (8 * q.shape[0] * q.shape[1] * k.shape[2])))
    fixed = (q.detach(), k.detach(), v.detach())
    z = torch.cat([_attend_at(fixed, block, workload) for block in blocks], dim=-2).requires_grad_(is_differentiated)
    out = prepared.joined(z)
    if not is_differentiated:
        return Exact(queries, out, None, ())
    weight = _weight(workload, out, prepared.leaves[0], places)
    (of_z,) = torch.autograd.grad(out, z, weight.to(out).index_select(-2, places))
    of_heads = [torch.zeros_like(heads) for heads in fixed]
    for block, of_block in zip(blocks, of_z.split([len(block) for block in blocks], dim=-2), strict=True):
        own = _leaves(fixed)
        parts = torch.autograd.grad(_attend_at(own, block, workload), own, of_block)
        of_heads = [total + part for total, part in zip(of_heads, parts, strict=True)]
    return Exact(queries, out.detach(), weight.to(queries.device), torch.autograd.grad((q, k, v), leaves, of_heads))


def _weight(workload: Workload, out: Tensor, leaf: Tensor, places: Int[Tensor, " n"]) -> Tensor:
    """A gradient of the whole result, in the leaf's dtype: normal numbers at these queries, 0 at others."""
    generator = torch.Generator(out.device).manual_seed(0)
    numbers = torch.randn(out.shape, generator=generator, dtype=leaf.dtype, device=out.device)
    whole = numbers.new_zeros((*out.shape[:-2], workload.q_len, out.shape[-1]))
    return whole.index_copy(-2, places, numbers)


def _attend_at(heads: HeadTensors, queries: Int[Tensor, " n"], workload: Workload) -> Tensor:
    """`attend` for some of the queries, which keep their places under the mask."""
    q, k, v = heads
    causal = masks.causal(workload.offset)
    allowed = (lambda q_idx, k_idx: causal(queries, k_idx)) if workload.is_masked else None
    return attend(q.index_select(-2, queries), k, v, allowed=allowed)


def _leaves(heads: HeadTensors) -> HeadTensors:
    q, k, v = (t.clone().requires_grad_() for t in heads)
    return q, k, v


def _compare(pairs: Sequence[tuple[Tensor, Tensor]], n_queries: int) -> Deviation:
    differences = [(ours.to(exact.device).to(torch.float64) - exact).abs() for ours, exact in pairs]
    largest = torch.stack([difference.max() for difference in differences]).max()
    total = torch.stack([difference.sum() for difference in differences]).sum()
    return Deviation(float(largest), float(total) / sum(map(torch.numel, differences)), n_queries)


# --------------------------------------------------------------------------------- what became of a backend that raised


_NO_KERNEL = ("No available kernel", "No viable backend")
_CANNOT = ("not implemented for", "No working C++ compiler", "Cannot find a working triton")
_NO_MEMORY = ("can't allocate memory", "out of memory")
_LONGEST_REASON = 300


@contextmanager
def explained(backend: str) -> Iterator[None]:
    """Within it, torch's refusal of a kernel becomes an `UnsupportedError` with the reasons that torch gives as warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as fault:
            if not any(words in str(fault) for words in _NO_KERNEL):
                raise
            reasons = [str(warning.message).partition(" (Triggered")[0] for warning in said]
            refused = f"torch has no {backend} kernel for this device and these inputs"
            raise UnsupportedError(": ".join([refused, " ".join(reasons)] if reasons else [refused])) from fault


def is_out_of_memory(fault: Exception) -> bool:
    """Whether memory ran out, as Python, or torch for any device, says it."""
    return isinstance(fault, (MemoryError, torch.OutOfMemoryError)) or any(words in str(fault) for words in _NO_MEMORY)


def outcome_of(fault: Exception) -> tuple[BackendStatus, str]:
    """What became of the backend that raised this, and why."""
    reason = " ".join(str(fault).split())[:_LONGEST_REASON] or type(fault).__name__
    if is_out_of_memory(fault):
        return "out-of-memory", reason
    is_unsupported = isinstance(fault, (UnsupportedError, NotImplementedError)) or any(
        words in reason for words in _CANNOT
    )
    return "unsupported" if is_unsupported else "failed", reason
