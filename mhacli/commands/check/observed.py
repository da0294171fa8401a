"""What a test of a behaviour observes: what must agree, what differs, and what was not tried."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from mhacli.errors import MhaError
from mhacli.io.data import finite
from mhacli.usercode.door import UserRaised
from mhacli.usercode.limits import OutOfTime

from .passes import PassDifference, Passes, largest_of
from .result import NOT_TRIED, AttentionInside, Behaviour, Place, Tried
from .sees import Seeing


class Intent(NamedTuple):
    """What is known of a model: whether outputs may depend on earlier tokens alone, as stated or
    claimed, None where nothing says it; whether, then, its attention hides later tokens; and
    whether it is stated that rows hold several documents.
    """

    is_causal: bool | None
    hides_later: bool = False
    packed: bool = False


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What a test of a behaviour observed: the fields of a `Behaviour`, and `differences`, those of
    the passes that must agree and do not. `is_bidirectional`: tokens see later ones, and are
    meant to. `evidence` is that of a failure without a difference. `caution` says what to do beside
    a note. `inside` are the attentions that were compared, `seeing` what is seen beside what is
    stated. `over`: its time was.
    """

    ok: bool | None
    reason: str
    tolerance: float
    largest: float | None = None
    tried: Tried | None = None
    at: Place | None = None
    differences: tuple[PassDifference, ...] = ()
    is_bidirectional: bool = False
    evidence: str = ""
    caution: str = ""
    inside: tuple[AttentionInside, ...] = ()
    seeing: Seeing | None = None
    over: OutOfTime | None = None

    def as_note(self) -> "Observed":
        """The same, where a failure is no matter of right and wrong."""
        if self.ok is not False:
            return self
        return replace(self, ok=None, at=None, differences=())

    def named(self, name: str) -> Behaviour:
        """The answer for the behaviour of this name."""
        return Behaviour(
            name=name,
            ok=self.ok,
            reason=self.reason,
            largest=self.largest,
            at=self.at,
            tolerance=self.tolerance,
            tried=self.tried,
        )


Answers = Mapping[str, Behaviour]
"""The behaviours that were tested before, by name."""
Test = Callable[[Passes, Intent, Answers], Observed]


def seen(
    passes: Passes,
    ok: bool | None,
    reason: str,
    largest: float | None = None,
    *,
    draws: int = 1,
    **fields: Any,
) -> Observed:
    """What was seen in texts; `ok` is None where it is no matter of right and wrong."""
    fields = {
        "tolerance": passes.tolerance,
        "tried": Tried(passes.length, draws) if draws else None,
        **fields,
    }
    return Observed(ok=ok, reason=reason, largest=finite(largest), **fields)


def not_tried(passes: Passes, reason: str, **fields: Any) -> Observed:
    """A behaviour that was not tried, for a reason; `fields` are others of what was observed."""
    return seen(passes, None, f"{NOT_TRIED}{reason}", draws=0, **fields)


def compared(
    passes: Passes,
    differences: Sequence[PassDifference],
    agrees: str,
    differs: str,
    cut: int | None = None,
) -> Observed:
    """The answer for outputs that must agree; where they differ, with the differences."""
    largest = largest_of(differences)
    if largest > passes.tolerance:
        differing = tuple(each for each in differences if each.largest > passes.tolerance)
        return seen(passes, False, differs, largest, at=Place(cut), differences=differing)
    if largest > 0 and passes.too_coarse:
        return seen(passes, None, passes.too_coarse, largest, draws=0)
    return seen(passes, True, agrees, largest, draws=len(differences))


def reason_of(failure: UserRaised | MhaError) -> str:
    """Why a failure left something untried; one for lack of memory is raised again."""
    if isinstance(failure, MhaError):
        if failure.code == "out-of-memory":
            raise failure
        return failure.message
    if isinstance(failure.fault, MemoryError | torch.OutOfMemoryError):
        raise failure
    return f"the code raised {failure!s:.200}"
