"""The kernels of the statistics as compilers make them, without a GPU: for every form in the table
of tiles the registers, the spilled bytes and the shared memory, and whether an atomic is in it.

    python benchmarks/compiled.py [--part I/N] [--few]

It needs triton, whose package brings `ptxas` and `cuobjdump`. A line of JSON for each form, and the
exit code 1 where one spills, needs more shared memory than the smallest of these GPUs has, or adds
atomically. `--few` are the forms of one dtype and width of each, which tests compile.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mhacli.attention import kernels
from mhacli.attention.on_device import TILES, Tiles

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TARGETS = (80, 90)
MOST_SHARED = 99 << 10
"""Bytes of a block on GPUs of compute capability 8.6 and 8.9; those of 8.0 and 9.0 have more."""
NONE = "constexpr"
POINTERS = {
    "marks": "*u8",
    "sums": "*fp32",
    "references": "*fp32",
    "logs": "*fp32",
    "tokens": ("*i32", "*i32", "*i32"),
    "of_rows": "*fp32",
    "profile": "*fp32",
    "copies": "*fp32",
}
TRITON_NAMES = {2: "bf16", 4: "fp32"}


class Form(NamedTuple):
    """A kernel for a GPU: its numbers and width, and what it has besides queries and keys."""

    kernel: str
    target: int
    item_bytes: int
    width: int
    also: tuple[str, ...] = ()

    @property
    def tiles(self) -> Tiles:
        """Its row of the table."""
        return TILES[self.target, self.item_bytes, self.width]


ALSO = {
    "rows": ((), ("bias", "softcap"), ("mask", "sinks")),
    "diagonals": ((), ("bias", "softcap"), ("mask", "small map")),
}
"""What a kernel may have besides."""


def forms(*, few: bool) -> Iterator[Form]:
    """All forms."""
    for target, item_bytes, width in TILES:
        for kernel, sets in ALSO.items():
            for also in sets:
                if not few or (width == 64 and not also):
                    yield Form(kernel, target, item_bytes, width, also)


def signature_of(form: Form) -> Mapping[str, Any]:
    """The types of the arguments of a kernel that are no constants."""
    number = f"*{TRITON_NAMES[form.item_bytes]}"
    added = {"bias": "*fp32", "mask": "*bf16"}
    return POINTERS | {
        "q": number,
        "k": number,
        "sinks": "*fp32" if "sinks" in form.also else NONE,
        "rule": (
            *("fp32", "i32", "i32", "fp32" if "softcap" in form.also else NONE),
            *(next((added[name] for name in form.also if name in added), NONE), "i32"),
        ),
    }


def constants_of(form: Form) -> Mapping[str, Any]:
    """The constants of a kernel."""
    return {
        "WIDTH": form.width,
        "N": form.tiles.side,
        "GROUP": 8 if "small map" in form.also else form.tiles.side,
        "IS_SELF": True,
        "PRECISION": "tf32x3",
    }


def compiled(form: Form) -> Any:
    """The kernel for a GPU, with the alignment that torch's tensors have."""
    function = getattr(kernels, form.kernel)
    types, constants = signature_of(form), constants_of(form)
    signature: dict[str, Any] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}

    def fix_none(place: tuple[int, ...], kind: Any) -> None:
        if isinstance(kind, tuple):
            for i, part in enumerate(kind):
                fix_none((*place, i), part)
        elif kind == NONE:
            fixed[place] = None
        elif kind.startswith("*"):
            aligned[place] = [["tt.divisibility", 16]]

    for place, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], fixed[place,] = NONE, constants[name]
        else:
            signature[name] = types.get(name, "i32")
            fix_none((place,), signature[name])
    options = {
        "num_warps": form.tiles.warps,
        "num_stages": form.tiles.stages,
        "enable_fp_fusion": True,
    }
    source = ASTSource(fn=function, signature=signature, constexprs=fixed, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", form.target, 32), options=options)


def measured(form: Form) -> dict[str, Any]:
    """What the compiler made of a form."""
    began = time.perf_counter()
    made = compiled(form)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        words = [str(CUOBJDUMP), "-res-usage", file.name]
        usage = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    registers, stack = (
        int(re.search(name + r":(\d+)", usage)[1])  # type: ignore[index]
        for name in ("REG", "STACK")
    )
    return {
        **form._asdict(),
        "registers": registers,
        "spilled": stack,
        "shared": made.metadata.shared,
        "atomic": bool(re.search(r"\b(atom|red)\b", made.asm["ptx"])),
        "seconds": round(time.perf_counter() - began, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--few", action="store_true")
    chosen = parser.parse_args()
    part, n_parts = map(int, chosen.part.split("/"))
    bad = 0
    for each in [*forms(few=chosen.few)][part::n_parts]:
        line = measured(each)
        bad += line["spilled"] > 0 or line["shared"] > MOST_SHARED or line["atomic"]
        print(json.dumps(line), flush=True)
    sys.exit(1 if bad else 0)
