"""What a command asks of somebody's attention: which one, built and called how, and what its author meant it to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DEFAULT_TIME_LIMIT_S = 5.0
"""For one call, and for importing: half of the ten seconds in which a command must have refused bad input."""


@dataclass(frozen=True)
class TargetRequest:
    """One class or function, `FILE.py:NAME` or `package.module:NAME`, and how to build and call it.

    `arguments` and `call_arguments` are `(name, value as typed)` for the constructor and for each call.
    """

    target: str
    arguments: tuple[tuple[str, str], ...] = ()
    call_arguments: tuple[tuple[str, str], ...] = ()
    causal: bool = False
    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True)
class CheckRequest:
    """An examination of `of`, against the reference or `against` another. The rest is what the author meant, where it can be
    told from nothing else: what True in a mask stands for, how rotary positions pair columns, the scale, the number of heads.
    `time_limit_s` is for each call; pairs of mistakes are tried in proportion to it."""

    of: TargetRequest
    against: TargetRequest | None = None
    mask_means: Literal["keep", "hide"] | None = None
    rope: Literal["half", "interleaved"] | None = None
    scale: float | None = None
    n_heads: int | None = None
    time_limit_s: float = DEFAULT_TIME_LIMIT_S
