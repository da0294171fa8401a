"""The result of examining user code, as plain data with schema `mha.check/1`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mhacli.io.data import plain
from mhacli.record.display import Shown
from mhacli.record.record import Argument
from mhacli.usercode.process import shown_path
from mhacli.usercode.target import DEFAULT_TIME_LIMIT_S, Choice, Mode, TargetRequest

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
            return f"wrong: {'; '.join(self._mistakes()) or 'a probe fails'}"
        if self.verdict == "unknown":
            return f"not decided: {self.reason or 'what was measured does not suffice'}"
        n = sum(probe.ok is True for probe in self.probes)
        text = f"{n} probe{'s' * (n != 1)} pass{'es' * (n == 1)}"
        if self.against is not None:
            text = f"it gives the same output as {self.against} with the same weights"
        elif self.comparison is not None:
            n = self.comparison.n_inputs
            same = "it gives the same output as the reference with the same weights"
            text = f"on {n} input{'s' * (n != 1)} {same}; {text}"
        missing = [f"not examined: {self.not_examined_text}"] if self.not_examined else []
        return f"right: {'; '.join([text, *missing, *(f'note: {note}' for note in self.notes)])}"

    @property
    def not_examined_text(self) -> str:
        """The unexamined arguments, each with its kind if the name shows it: `past_kv (cache), rel`."""
        return ", ".join(f"{name} ({kind})" if (kind := _kind_of(name)) else name for name in self.not_examined)

    def _mistakes(self) -> Iterator[str]:
        """The mistakes with their lines and fixes; of three or more the first, and the number of the others."""
        shown = self.findings if len(self.findings) < 3 else self.findings[:1]
        for number, finding in enumerate(shown):
            at = "" if finding.file is None else f" ({place(finding.file, finding.line)})"
            yield f"{'and ' * (number > 0)}{finding.message}{at}"
            if number == 0 and self.against is not None and self.departure is not None:
                lines = (
                    (self.departure.file, self.departure.line),
                    (self.departure.other_file, self.departure.other_line),
                )
                targets = zip((self.target, self.against), lines, strict=True)
                first, second = (
                    f"library code of {target}" if file is None else place(file, line)
                    for target, (file, line) in targets
                )
                yield f"the first difference is in {self.departure.site}: compare {first} with {second}"
            else:
                yield from (f"fix: {line}" for line in finding.fix.strip().splitlines()[:1])
        if len(shown) < len(self.findings):
            yield f"{len(self.findings) - 1} more mistakes"

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `--json`."""
        fields: dict[str, Any] = plain(self)
        return {"schema": "mha.check/1", "summary": self.summary} | fields


def place(file: str, line: int | None) -> str:
    """A line of a file, by its path from the working directory."""
    return shown_path(file) if line is None else f"{shown_path(file)}:{line}"


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
