"""The result of examining user code, as plain data with schema `mha.check/1`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mhacli.record.display import Shown
from mhacli.record.record import Argument
from mhacli.usercode.target import DEFAULT_TIME_LIMIT_S, Choice, Mode, TargetRequest

SCHEMA = "mha.check/1"
Verdict = Literal["right", "wrong", "unknown"]


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


@dataclass(frozen=True)
class Finding:
    """A mistake. `code` is stable; `message` is one sentence, `evidence` lines of numbers, `effect` the consequence, `fix` the
    corrected expression. `proven`: the reference with this mistake and those of `together_with` gives the module's output
    within `tolerance`; `error` is the largest difference. `file`, `line` and `source` locate the operation if known. `modes`
    are the affected modes, empty for attention with one mode."""

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
class ProbeResult:
    """The result of a probe: a measured `value`, and whether the probe passes. `ok` is None if the result is a matter of choice
    or the probe did not run; the message says which."""

    name: str
    message: str
    value: float | None = None
    ok: bool | None = None


@dataclass(frozen=True)
class OutputComparison:
    """The largest difference between the outputs of module and reference with the same weights, over `n_inputs` inputs."""

    against: str
    dtype: str
    n_inputs: int
    max_abs_difference: float | None
    tolerance: float


@dataclass(frozen=True)
class ModeReport:
    """The report on one of two modes: its call, the codes of its findings, and its probes."""

    mode: Mode
    verdict: Verdict
    called: str
    findings: tuple[str, ...]
    probes: tuple[ProbeResult, ...]
    comparison: OutputComparison | None
    reason: str | None = None


@dataclass(frozen=True)
class FirstDifference:
    """The first difference from the reference: `site` is the first site that differs, `last_shared` the last equal site before
    it. For two implementations, `other_file`, `other_line` and `other_source` locate the site in the other one."""

    site: str
    last_shared: str | None
    file: str | None = None
    line: int | None = None
    source: str = ""
    other_file: str | None = None
    other_line: int | None = None
    other_source: str = ""


@dataclass(frozen=True, repr=False)
class Examination(Shown):
    """The examination of an attention in user code. `not_examined` are arguments that always kept their defaults, so that the
    verdict does not cover them. `notes` are facts that may surprise a caller but are no mistakes, such as arguments without
    effect. `next_steps` are suggestions for an undecided verdict. `modes` has a report for each mode if there are two; the
    other fields then combine both, and a probe fails if it fails in one mode."""

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
    notes: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()

    def views(self, screen: Any) -> Iterator[Any]:
        """What `mha check` prints on a screen."""
        from mhacli.commands.check.view import check_view

        yield check_view(self, screen)

    def __repr__(self) -> str:
        """The target, and the summary in one line."""
        return f"<Examination of {self.target}: {' '.join(self.summary.split())}>"

    @property
    def summary(self) -> str:
        """The verdict in a sentence, with the mistakes and fixes, or with the agreement and unexamined arguments."""
        if self.verdict == "wrong":
            return f"wrong: {self._mistakes()}"
        if self.verdict == "unknown":
            return f"not decided: {self.reason or 'what was measured does not suffice'}"
        missing = f"; not examined: {self.not_examined_text}" if self.not_examined else ""
        return f"right: {self._agreement()}{missing}" + "".join(f"; note: {note}" for note in self.notes)

    @property
    def not_examined_text(self) -> str:
        """The unexamined arguments, each with its kind if the name shows it: `past_kv (cache), rel`."""
        return ", ".join(f"{name} ({kind})" if (kind := _kind_of(name)) else name for name in self.not_examined)

    def _mistakes(self) -> str:
        """The first mistake with line and fix, and the number of further ones."""
        if not self.findings:
            return "a probe fails"
        (first, *others), n_more = self.findings, len(self.findings) - 1
        lines = [_with_place(first)]
        lines += self._lines_that_differ() or _first_fix(first)
        if n_more > 1:
            lines.append(f"{n_more} more mistakes")
        else:
            lines += [line for finding in others for line in (f"and {_with_place(finding)}", *_first_fix(finding))]
        return "; ".join(lines)

    def _lines_that_differ(self) -> list[str]:
        """The first difference between two implementations, with both lines."""
        difference = self.departure
        if self.against is None or difference is None:
            return []
        first_line, second_line = (
            f"library code of {target}" if file is None else file if line is None else f"{file}:{line}"
            for target, file, line in (
                (self.target, difference.file, difference.line),
                (self.against, difference.other_file, difference.other_line),
            )
        )
        return [f"the first difference is in {difference.site}: compare {first_line} with {second_line}"]

    def _agreement(self) -> str:
        """The agreement with the reference, and the number of passed probes."""
        n_passed = sum(probe.ok is True for probe in self.probes)
        passed = f"{n_passed} probe{'s' * (n_passed != 1)} pass{'es' * (n_passed == 1)}"
        if self.against is not None:
            return f"it gives the same output as {self.against} with the same weights"
        if self.comparison is None:
            return passed
        n = self.comparison.n_inputs
        return f"on {n} input{'s' * (n != 1)} it gives the same output as the reference with the same weights; {passed}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `--json`."""
        return {"schema": SCHEMA, "summary": self.summary} | asdict(self)


def _with_place(finding: Finding) -> str:
    """The message with its location."""
    if finding.file is None:
        return finding.message
    return f"{finding.message} ({finding.file if finding.line is None else f'{finding.file}:{finding.line}'})"


def _first_fix(finding: Finding) -> list[str]:
    """The first line of the fix, empty if there is none."""
    return [f"fix: {line}" for line in finding.fix.strip().splitlines()[:1]]


_KINDS = {
    "cache": re.compile(r"cache|past|kv_state"),
    "mask": re.compile(r"mask|padding|lens\b|lengths"),
    "score bias": re.compile(r"bias|alibi|^rel"),
    "positions": re.compile(r"pos|rope|rotary|freqs|^cos|^sin"),
}


def _kind_of(name: str) -> str | None:
    """The kind of an argument by its name; None if unknown or if it repeats the name."""
    kind = next((kind for kind, pattern in _KINDS.items() if pattern.search(name.lower())), None)
    return None if kind == name.lower().replace("_", " ") else kind
