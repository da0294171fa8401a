"""What an entry of the catalogue of mistakes is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Way:
    """One way to make a mistake: the function in the stage's place. `said` ends the sentence "matches exactly if …". `sites` are
    those that it spoils, where that is not the one of the mistake; `besides` are functions in the places of further stages.
    `is_rare`: not tried together with another mistake."""

    said: str
    replacement: Callable[..., Any]
    sites: tuple[str, ...] = ()
    besides: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    is_rare: bool = False


@dataclass(frozen=True)
class Mistake:
    """A mistake with its stable `code`.

    `stage` is the one of `mhacli.attention.mistakes.stages.Stages` that it changes, None where a probe finds it; `site` what
    is made there, whose line is looked for. `looks_like` is how it stands in people's code, `effect` what it does to the
    result, `fix` the corrected expression; `fix_in_torch` the same where torch's own fused function computes the stage.
    """

    code: str
    message: str
    looks_like: str
    effect: str
    fix: str
    stage: str | None = None
    site: str | None = None
    ways: tuple[Way, ...] = ()
    fix_in_torch: str = ""
