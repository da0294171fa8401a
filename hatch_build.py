"""Compiles `mhacli/attention/block.c` when the package is built, and makes its readme. Without a
compiler the package works all the same.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.tags import platform_tags

FLAGS = (
    "-O2",
    "-ftree-vectorize",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-s",
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
            tag = platform_tag(folder / "libblock.so")
            build_data["tag"] = f"py3-none-{tag}"


def platform_tag(library: Path) -> str:
    """The tag of the oldest platform on which a library is loaded: of Linux, that of the oldest C
    library with all its symbols. An index of packages accepts no tag without one. Source: PEP 600.
    """
    tags = [*platform_tags()]
    needed = max(map(int, re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())), default=0)
    with_symbols = [
        tag
        for tag in tags
        if (found := re.match(r"manylinux_2_(\d+)_", tag)) and int(found[1]) >= needed
    ]
    if with_symbols:
        return with_symbols[-1]  # the newest stand first
    return next((tag for tag in tags if not tag.startswith("linux_")), tags[0])


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


class ReadmeBuilder(MetadataHookInterface):
    """The README as an index of packages shows it, where no picture and no other file is."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Leaves out pictures, and the links to files of this folder, whose words stay."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"^!\[[^]]*\]\([^)]*\)\n\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"\[([^]]*)\]\((?!\w+://)[^)]*\)", r"\1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
