"""The requests for user code: the class or function, how to build and call it, and what its author intended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DEFAULT_TIME_LIMIT_S = 5.0
"""Seconds for one call, and for importing: half of the ten seconds within which a command must refuse bad input."""


Mode = Literal["self", "cross"]
"""Self-attention or cross-attention, for attention with an optional context."""


@dataclass(frozen=True)
class Choice:
    """A valid design choice; `name` is stable."""

    name: str
    message: str


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
    """The check of `of` against the reference or another attention (`against`).

    The other fields are intentions that nothing else reveals: whether True in a mask keeps or hides, how rotary
    positions pair columns, the scale, and the number of heads. `time_limit_s` is per call; trying pairs of mistakes is
    limited in proportion.
    """

    of: TargetRequest
    against: TargetRequest | None = None
    mask_means: Literal["keep", "hide"] | None = None
    rope: Literal["half", "interleaved"] | None = None
    scale: float | None = None
    n_heads: int | None = None
    time_limit_s: float = DEFAULT_TIME_LIMIT_S
