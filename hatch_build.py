"""Compiles `mhacli/attention/block.c` when the package is built. Without a compiler the package
works all the same.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
FOR_OLDER_COMPILERS = (
    ("-fopenmp-simd",),
    ("-fopenmp-simd", "-DMHA_NO_CLONES"),
    ("-DMHA_NO_CLONES",),
)
"""What to add, in this order, until one compiles: not every compiler knows the clones for several
processors."""


class BlockBuilder(BuildHookInterface[Any]):
    """The build hook of the package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles beside the source, for an editable install too, and marks the wheel as one for
        this platform.
        """
        folder = Path(self.root, "mhacli", "attention")
        if self.target_name == "wheel" and compiled(folder / "block.c", folder / "libblock.so"):
            build_data["artifacts"].append("mhacli/attention/libblock.so")
            build_data["pure_python"] = False
            tags = list(
                platform_tags()
            )  # of Linux the tag with the C library's version, which an index of packages accepts
            tag = next((tag for tag in tags if not tag.startswith("linux_")), tags[0])
            build_data["tag"] = f"py3-none-{tag}"


def compiled(source: Path, library: Path) -> bool:
    """Whether the library was made from the source, by the compiler that `CC` names, or else
    `cc`.
    """
    new = library.with_name(f"{library.stem}-{os.getpid()}.so")
    compiler, reason = shlex.split(os.environ.get("CC", "cc")), ""
    for more in FOR_OLDER_COMPILERS:
        command = [*compiler, *FLAGS, *more, str(source), "-o", str(new), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.SubprocessError) as fault:
            reason = getattr(fault, "stderr", None) or str(fault)
            new.unlink(missing_ok=True)
        else:
            new.replace(library)  # a process that imports it meanwhile finds the old one or the new
            return True
    library.unlink(missing_ok=True)
    print(f"block.c is not compiled, torch does its work: {reason}", file=sys.stderr)
    return False
