"""What an examination of somebody's attention found: plain data, schema `mha.check/1`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mhacli.results.record.record import Argument

SCHEMA = "mha.check/1"
Verdict = Literal["right", "wrong", "unknown"]
Mode = Literal["self", "cross"]
"""Whose rows the keys are, of what can be called both ways: its own, or those of a context."""


@dataclass(frozen=True)
class Finding:
    """A mistake. `code` is stable; `message` says it in one sentence, `evidence` in lines of numbers, `effect` what it does to
    the result, `fix` is the corrected expression. `proven`: the reference with this mistake, and those of `together_with`, gives
    the module's output within `tolerance`, `error` being the largest difference. `file`, `line` and `source` say where the
    operation stands, as far as it could be traced. `modes` are those in which it was seen, empty where there is one mode."""

    code: str
    message: str
    evidence: str
    fix: str
    effect: str = ""
    proven: bool = False
    error: float | None = None
    tolerance: float | None = None
    together_with: tuple[str, ...] = ()
    file: str | None = None
    line: int | None = None
    source: str = ""
    modes: tuple[Mode, ...] = ()


@dataclass(frozen=True)
class Choice:
    """Something that another author would have done otherwise, and that is right: `name` is stable, `message` says it."""

    name: str
    message: str


@dataclass(frozen=True)
class ProbeResult:
    """A question that needs no weights, its answer as a number, and whether that is as it must be; None where the question is
    one of choice, or could not be asked, which `message` says."""

    name: str
    message: str
    value: float | None = None
    ok: bool | None = None


@dataclass(frozen=True)
class OutputComparison:
    """The module against the reference with its own weights, over `n_inputs` inputs: the largest difference of the outputs, and
    the tolerance within which they are the same."""

    against: str
    dtype: str
    n_inputs: int
    max_abs_difference: float | None
    tolerance: float


@dataclass(frozen=True)
class ModeReport:
    """What is said of one of two modes: how it was called, the codes of what was found, and what the probes gave."""

    mode: Mode
    verdict: Verdict
    called: str
    findings: tuple[str, ...]
    probes: tuple[ProbeResult, ...]
    comparison: OutputComparison | None
    reason: str | None = None


@dataclass(frozen=True)
class FirstDifference:
    """The first place of the computation that the module does not pass: `site` is what the reference makes there, `last_shared`
    the last site whose numbers were seen in the module too. Of two modules, `other_file`, `other_line` and `other_source` are
    the place of the other's."""

    site: str
    last_shared: str | None
    file: str | None = None
    line: int | None = None
    source: str = ""
    other_file: str | None = None
    other_line: int | None = None
    other_source: str = ""


@dataclass(frozen=True)
class Examination:
    """Everything that is said of somebody's attention. `not_examined` are arguments of its call that were never given another
    value than their default: the verdict does not speak of them. `modes` has a report of each mode where there are two; all else
    is then said of both together: a probe that fails in one of them fails."""

    verdict: Verdict
    target: str
    called: str
    arguments: tuple[Argument, ...]
    findings: tuple[Finding, ...]
    choices: tuple[Choice, ...]
    probes: tuple[ProbeResult, ...]
    comparison: OutputComparison | None
    reason: str | None = None
    closest: str | None = None
    departure: FirstDifference | None = None
    modes: tuple[ModeReport, ...] = ()
    n_parameters: int = 0
    n_hypotheses: int = 0
    printed: str = ""
    against: str | None = None
    time_s: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    command: tuple[str, ...] = ()
    not_examined: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return {"schema": SCHEMA} | asdict(self)
