"""What comparing two models costs, beside one plain pass of each.

    python benchmarks/diff.py [LENGTH] [ROUNDS]

Two models of GPT-2-small's shape with random weights, of which one differs, float32; passes and
comparisons in turns.
"""

from __future__ import annotations

import resource
import statistics
import sys
from time import perf_counter

import torch
from models import small, tokens

import mhacli


def main() -> None:
    length, rounds = (int(word) for word in [*sys.argv[1:], *("2048", "3")[len(sys.argv) - 1 :]])
    first, second, ids, ratios = small(), small(), tokens(length), list[float]()
    second.h[6].attn.c_proj.weight.data[0, 0] += 0.1
    for _ in range(rounds):
        started = perf_counter()
        with torch.no_grad():
            first(ids, use_cache=False), second(ids, use_cache=False)
        passed = perf_counter()
        mhacli.diff(first, second, {"input_ids": ids, "use_cache": False})
        ratios.append((perf_counter() - passed) / (passed - started))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"median {statistics.median(ratios):.2f} times; the largest memory of this process is"
        f" {peak:.0f} MiB"
    )


if __name__ == "__main__":
    main()
