"""A cached step of decoding beside computing everything again: one layer, d_model 512, 8 heads, float32, on the CPU.

    python benchmarks/decode.py

`again` is this project's explicit layer over all tokens, `fused` the same projections around torch's fused attention: the
fastest way to compute everything again. Times alternate A B C A B C … in one process with two threads.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import torch
from torch.nn.functional import scaled_dot_product_attention

from mhacli.attention import masks
from mhacli.attention.layer import KvCache, MultiHeadAttention, merge_heads, split_heads

LENGTHS, ROUNDS, D_MODEL, N_HEADS = (64, 256, 1024, 2048), 15, 512, 8


def fused(layer: MultiHeadAttention, x: torch.Tensor) -> torch.Tensor:
    """The last row of the output, through torch's own kernel."""
    q, k, v = (split_heads(proj(x), N_HEADS) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    return layer.o_proj(merge_heads(scaled_dot_product_attention(q, k, v, is_causal=True)))[:, -1:]


def ways(layer: MultiHeadAttention, length: int) -> dict[str, Callable[[], torch.Tensor]]:
    """The last step of a sequence of random rows, computed in each way from the same state."""
    x = torch.randn(1, length, D_MODEL)
    found = {
        "again": lambda: layer(x, allowed=masks.causal())[0][:, -1:],
        "fused": lambda: fused(layer, x),
    }
    for name, room in {"concat": 0, "preallocated": length}.items():
        _, _, past = layer.decode(x[:, :-1], KvCache.empty(layer, 1, room=room), allowed=masks.causal())
        found[name] = lambda past=past: layer.decode(x[:, -1:], past)[0]
    return found


@torch.no_grad()
def compare(length: int) -> None:
    """Prints the medians, and how many times faster the cached steps are; all must agree."""
    layer = MultiHeadAttention(D_MODEL, N_HEADS).eval()
    steps = ways(layer, length)
    truth = steps["again"]()
    assert all(torch.allclose(step(), truth, atol=1e-5) for step in steps.values())
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        seconds = {}
        for name, step in steps.items():
            began = perf_counter()
            step()
            seconds[name] = perf_counter() - began
        rounds.append(seconds)
    medians = {name: statistics.median(row[name] for row in rounds) for name in steps}
    line = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in medians.items())
    ratios = {
        slow: statistics.median(row[slow] / row["preallocated"] for row in rounds)
        for slow in ("again", "fused", "concat")
    }
    print(
        f"T={length:>5}: {line}; preallocated is faster " + ", ".join(f"{r:.1f} × than {n}" for n, r in ratios.items())
    )


if __name__ == "__main__":
    torch.set_num_threads(2)
    torch.manual_seed(0)
    for n in LENGTHS:
        compare(n)
