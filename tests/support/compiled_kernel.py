"""The Triton kernel without its interpreter and without a GPU: what it would be compiled for, and what the compiler makes of it.

    python compiled_kernel.py signatures DTYPE D_HEAD LENGTH…     how many kernels texts of these lengths need
    python compiled_kernel.py resources CAPABILITY DTYPE D_HEAD LENGTH MASK     what a program takes of a multiprocessor, as JSON

In a process of its own: whether a kernel is interpreted is settled when it is defined.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from mhacli.attention import masks
from mhacli.attention.tiled import kernel_statistics as host
from mhacli.attention.tiled.kernel import reduce_pattern
from mhacli.attention.tiled.scores import Scores, VirtualPattern
from mhacli.attention.tiled.statistics import StatisticsRequest
from mhacli.compute.base.head_statistics import block_of

MASKS = {
    "none": lambda n: None,
    "causal": lambda n: masks.causal(),
    "documents": lambda n: masks.both(masks.causal(), masks.documents(torch.arange(n) // 50)),
    "any": lambda n: lambda q_idx, k_idx: (q_idx[:, None] + k_idx) % 3 > 0,
}


def launches(length: int, dtype: torch.dtype, d_head: int, mask: str = "causal") -> list[tuple[tuple, dict]]:
    """The arguments with which the kernel is started for a text of a length."""
    found: list[tuple[tuple, dict]] = []
    reduce_pattern.run = lambda *given, grid, warmup, **how: found.append((given, how))
    q, k = torch.zeros(1, 2, length, d_head, dtype=dtype), torch.zeros(1, 1, length, d_head, dtype=dtype)
    scores = Scores(q, k, d_head**-0.5, allowed=MASKS[mask](length))
    ids = torch.zeros(1, length, dtype=torch.int64)
    asked = StatisticsRequest(block_of(length), ids, ids, ids, ids == 0, ids == 0)
    host.kernel_statistics(VirtualPattern(scores, torch.zeros(1, 2, length)), asked)
    return found


def specialised(given: tuple, how: dict, target: GPUTarget) -> tuple[Any, ...]:
    """What Triton compiles the kernel for, by its own rules, and the options."""
    backend = make_backend(target)
    bind = create_function_from_signature(reduce_pattern.signature, reduce_pattern.params, backend)
    bound, specialisation, options = bind(*given, **how, debug=False)
    return reduce_pattern._pack_args(backend, how, bound, specialisation, options), str(specialisation) + str(options)


def signatures(dtype: str, d_head: str, *lengths: str) -> int:
    """How many kernels texts of these lengths need."""
    target = GPUTarget("cuda", 90, 32)
    started = [one for length in lengths for one in launches(int(length), getattr(torch, dtype), int(d_head))]
    return len({specialised(*one, target)[1] for one in started})


def resources(capability: str, dtype: str, d_head: str, length: str, mask: str) -> dict[str, int]:
    """What a program takes: bytes of shared memory, registers, and bytes of a thread that have no register."""
    given, how = launches(int(length), getattr(torch, dtype), int(d_head), mask)[0]
    target = GPUTarget("cuda", int(capability), 32)
    (options, signature, constants, attributes), _ = specialised(given, how, target)
    source = triton.compiler.ASTSource(reduce_pattern, signature, constants, attributes)
    made = triton.compile(source, target, options.__dict__)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(made.asm["cubin"])
        used = tool("cuobjdump", "-res-usage", str(cubin))
    registers, spilled = (int(re.findall(rf"\b{word}:(\d+)", used)[-1]) for word in ("REG", "STACK"))
    return {"shared": made.metadata.shared, "registers": registers, "spilled": spilled}


def tool(name: str, *arguments: str) -> str:
    """What a program that comes with Triton prints."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    print(json.dumps({"signatures": signatures, "resources": resources}[sys.argv[1]](*sys.argv[2:])))
