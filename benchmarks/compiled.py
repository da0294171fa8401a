"""What compilers make of the kernels of the statistics, without a GPU: the registers of each form
in the table of tiles, its spilled bytes and shared memory, and whether it adds atomically.

    python benchmarks/compiled.py [--few] [WIDTH ...]

It needs triton, whose package brings `ptxas` and `cuobjdump`. The product calls the kernels, with
tensors of the CPU; a driver that only names a GPU stands for CUDA, and nothing is launched. A line
of JSON for each form, and the exit code 1 where one spills, adds atomically, or needs more shared
memory than the smallest GPU of its kind has. `--few` are the plainest forms.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from mhacli.attention import kernels, masks, on_device
from mhacli.attention.axes import Axes, Axis, make_statistics_request
from mhacli.attention.scores import ScoredAttention, tensor_bias

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
MOST_SHARED = 99 << 10
"""Bytes for a program on GPUs of compute capability 8.6 and 8.9; those of 8.0 and 9.0 have more."""
DTYPES = {2: torch.bfloat16, 4: torch.float32}
N = 600
ALSO = ("", "a small map", "bias and softcap", "mask and sinks", "a window", "one query")
"""What the attention of a form has."""


class NamedGpu:
    """A driver that only says which GPU kernels are compiled for."""

    def __init__(self) -> None:
        self.target = 80

    def get_current_device(self) -> int:
        """A number for each target, for which triton keeps what it compiled."""
        return self.target

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What kernels are compiled for."""
        return GPUTarget("cuda", self.target, 32)


@dataclass(frozen=True)
class Compiled:
    """A kernel in place of its launch: it is only compiled, and seen."""

    kernel: Any
    seen: list[Any]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_for(*arguments: Any, **options: Any) -> None:
            self.seen.append(self.kernel.run(*arguments, grid=grid, warmup=True, **options))

        return compile_for


class Form(NamedTuple):
    """An attention for which kernels are compiled."""

    target: int
    item_bytes: int
    width: int
    also: str


def forms(widths: list[int], *, few: bool) -> Iterator[Form]:
    """The forms of these widths."""
    for (target, item_bytes, most), width in product(on_device.TILES, widths):
        if most == next(tiled for tiled in on_device.WIDTHS if tiled >= width):
            for also in ALSO[:1] if few else ALSO:
                yield Form(target, item_bytes, width, also)


def call_kernels(form: Form) -> None:
    """Computes the statistics of an attention of the form, as the product does on a GPU."""
    n_q, dtype = 1 if form.also == "one query" else N, DTYPES[form.item_bytes]
    q, k = (torch.zeros(1, h, n, form.width, dtype=dtype) for h, n in ((2, n_q), (1, N)))
    queries, keys = (
        Axis((tuple(range(n)),), ((),), n, "right", torch.device("cpu")) for n in (n_q, N)
    )
    request = make_statistics_request(Axes(queries, keys, n_q == N, lambda word: -1, "float32"))
    if form.also != "a small map":  # as long texts have
        request = replace(request, block=64)
    attention = ScoredAttention(q=q, k=k, scale=0.125, allowed=masks.causal(N - n_q))
    match form.also:
        case "bias and softcap":
            attention = replace(attention, softcap=30.0, bias=tensor_bias(torch.zeros(2, n_q, N)))
        case "mask and sinks":
            cells = masks.from_tensor(torch.ones(1, 1, n_q, N, dtype=torch.bool))
            attention = replace(attention, allowed=cells, sink_logits=torch.zeros(1, 2, 1))
        case "a window":
            attention = replace(attention, allowed=masks.window(100, 1))
    on_device.kernel_sums(attention, request, range(2))


def measured(form: Form, gpu: NamedGpu) -> Iterator[dict[str, Any]]:
    """What compilers make of the kernels of a form."""
    began, seen = time.perf_counter(), list[Any]()
    gpu.target = form.target
    usual = kernels.rows, kernels.diagonals, on_device._tiles
    kernels.rows, kernels.diagonals = (Compiled(kernel, seen) for kernel in usual[:2])
    widest = next(tiled for tiled in on_device.WIDTHS if tiled >= form.width)
    on_device._tiles = lambda q: on_device.TILES[form.target, form.item_bytes, widest]
    try:
        call_kernels(form)
    finally:
        kernels.rows, kernels.diagonals, on_device._tiles = usual
    for kernel in seen:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            words = [str(CUOBJDUMP), "-res-usage", file.name]
            usage = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        registers, spilled = (
            int(number)
            for name in ("REG", "STACK")
            for number in re.findall(name + r":(\d+)", usage)
        )
        yield {
            "kernel": kernel.metadata.name,
            **form._asdict(),
            "registers": registers,
            "spilled": spilled,
            "shared": kernel.metadata.shared,
            "atomic": bool(re.search(r"\b(atom|red)\b", kernel.asm["ptx"])),
            "s": round(time.perf_counter() - began, 1),
        }


def main() -> None:
    """Compiles the chosen forms."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--few", action="store_true")
    parser.add_argument("widths", nargs="*", type=int)
    chosen = parser.parse_args()
    gpu, n_bad = NamedGpu(), 0
    triton.runtime.driver.set_active(gpu)
    for form in forms(chosen.widths or [64, 128, 256], few=chosen.few):
        for line in measured(form, gpu):
            n_bad += line["spilled"] > 0 or line["shared"] > MOST_SHARED or line["atomic"]
            print(json.dumps(line), flush=True)
    sys.exit(1 if n_bad else 0)


if __name__ == "__main__":
    main()
