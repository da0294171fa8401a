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
PLANE = ("i64", "i64", "i64", "i64")
NONE = "constexpr"
POINTERS = {
    "marks": "*u8",
    "sums": "*fp32",
    "tokens": ("*i32", "*i32", "*i32"),
    "of_rows": "*fp32",
    "profile": "*fp32",
    "copies": "*fp32",
    "heads": ("i32", "i32", "i32", "i32"),
}
TRITON_NAMES = {2: "bf16", 4: "fp32"}


class Form(NamedTuple):
    """A kernel for a GPU: its numbers and width, and what it has besides queries and keys."""

    kernel: str
    target: int
    item_bytes: int
    width: int
    has_values: bool
    has_all: bool

    @property
    def tiles(self) -> Tiles:
        """Its row of the table."""
        return TILES[self.item_bytes, self.width]


def forms(*, few: bool) -> Iterator[Form]:
    """All forms: plain, with values, and with everything that scores may have."""
    for item_bytes, width in TILES:
        for target in TARGETS:
            if few and (width != 64 or target != (80 if item_bytes == 2 else 90)):
                continue
            for kernel, has_values, has_all in (
                ("rows", False, False),
                ("rows", True, False),
                ("rows", True, True),
                ("diagonals", False, False),
                ("diagonals", False, True),
            ):
                if not few or not has_all:
                    yield Form(kernel, target, item_bytes, width, has_values, has_all)


def signature_of(form: Form) -> Mapping[str, Any]:
    """The types of the arguments of a kernel that are no constants."""
    number = f"*{TRITON_NAMES[form.item_bytes]}"
    bias, cells = (("*fp32", *PLANE), ("*u8", *PLANE)) if form.has_all else (NONE, NONE)
    values = number if form.has_values else NONE
    return POINTERS | {
        "q": number,
        "k": number,
        "v": values,
        "z": values,
        "sinks": ("*fp32", *PLANE) if form.has_all else NONE,
        "rule": ("fp32", "i32", "i32", "fp32" if form.has_all else NONE, bias, cells),
    }


def constants_of(form: Form) -> Mapping[str, Any]:
    """The constants of a kernel."""
    (m, n), side = form.tiles.rows, form.tiles.side
    return {
        "D": form.width,
        "WIDTH": form.width,
        "D_V": form.width if form.has_values else 0,
        "WIDTH_V": form.width if form.has_values else 16,
        "M": m,
        "N": n if form.kernel == "rows" else side,
        "GROUP": side // 8 if form.has_all else side,
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
    number = 0 if form.kernel == "rows" else 1
    options = {
        "num_warps": form.tiles.warps[number],
        "num_stages": form.tiles.stages[number],
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
