"""An additive score bias in a safetensors file: which tensor it is, and whether it fits, before any tensor is made."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mhacli.checkpoints.mha_weights import DTYPES, MAX_FILE_BYTES
from mhacli.errors import MhaError
from mhacli.io.safetensors import TensorFile, read_tensor_file, shown_name
from mhacli.spec.facts import Facts

DEFAULT_NAME = "bias"


@dataclass(frozen=True)
class BiasFile:
    """A checked file and the name of the tensor to take from it."""

    file: TensorFile
    name: str


def read_bias_file(where: str, facts: Facts) -> BiasFile:
    """The bias at `FILE` or `FILE:TENSOR`: the file's only tensor, or the one called `bias`, or the one named.

    It must broadcast to `[batch, head, query, key]`. Raises `MhaError` naming the rule, the shape and what is there.
    """
    path, name = _split(where)
    file = read_tensor_file(path, MAX_FILE_BYTES)
    if name is None:
        name = next(iter(file.tensors)) if len(file.tensors) == 1 else DEFAULT_NAME
    if name not in file.tensors:
        there = ", ".join(map(shown_name, sorted(file.tensors)[:8])) or "no tensor"
        raise MhaError(
            f"{path} must hold the tensor {shown_name(name)}, got {there}",
            hint=f"--score-bias {path}:{next(iter(sorted(file.tensors)), 'TENSOR')} names the one to take",
            code="bad-file",
            path=path,
        )
    found = file.tensors[name]
    if found.dtype not in DTYPES:
        raise MhaError(
            f"{path}: tensor {shown_name(name)} must be one of {', '.join(DTYPES)}, got {found.dtype}",
            hint="a mask as a bias is 0 where allowed and -inf where not"
            if found.dtype == "BOOL"
            else "save it as float32",
            code="bad-file",
            path=path,
        )
    whole = (facts.batch, facts.config.n_heads, facts.q_len, facts.k_len)
    if len(found.shape) > 4 or any(
        size not in (1, full) for size, full in zip(reversed(found.shape), reversed(whole), strict=False)
    ):
        raise MhaError(
            f"{path}: tensor {shown_name(name)} must broadcast to [batch, head, query, key] = {list(whole)}, "
            f"got {list(found.shape)}",
            hint=f"the shapes {list(whole[2:])} and {list(whole[1:])} work",
            code="bad-file",
            path=path,
        )
    return BiasFile(file, name)


def _split(where: str) -> tuple[str, str | None]:
    """A path, and the tensor after the last colon, where the whole is not itself a file."""
    path, colon, name = where.rpartition(":")
    return (path, name) if colon and path and not os.path.lexists(where) else (where, None)
