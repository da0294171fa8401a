"""Compares a benchmark with an earlier one: slower and faster rows, and the result of `--fail-if`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec

from mhacli.commands.bench.result import Benchmark, BenchRow
from mhacli.commands.bench.workload import Workload
from mhacli.errors import UsageError
from mhacli.record.intervals import CONFIDENCE, Interval, is_sufficient

SpeedVerdict = Literal["slower", "faster", "similar"]
FailIfOutcome = Literal["slower", "inconclusive", "passed"]
_SAME = ("device_name", "cpu_name", "n_cpus", "threads", "driver", "torch", "python", "platform", "mha")

NOT_NOW = ": not measured now"
"""The end of the line for a row that only the baseline has."""


@dataclass(frozen=True)
class TimeChange(Workload):
    """The ratio of a row's time to the baseline's (above 1 = slower), with the ends of both medians' intervals.

    `similar`: the interval contains 1. `noise_high` is always None now.
    """

    backend: str
    baseline_s: float
    median_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    verdict: SpeedVerdict
    noise_high: float | None = None


@dataclass(frozen=True)
class UndecidedRow:
    """A row whose interval contains the limit. An interval of this width shows ratios from `shows_from` on."""

    backend: str
    name: str
    ratio: float
    ratio_low: float
    ratio_high: float
    shows_from: float


@dataclass(frozen=True)
class FailIfResult:
    """The result of the rule `slower:LIMIT`.

    `slower` if a time is surely above the limit, or a row could not run; `passed` if all times are surely at most the
    limit; else `inconclusive`.
    """

    limit: float
    outcome: FailIfOutcome
    undecided: tuple[UndecidedRow, ...]


@dataclass(frozen=True)
class BaselineComparison:
    """The changes, the rows that cannot be compared, and warnings; with a rule, also its result."""

    baseline: str
    changes: tuple[TimeChange, ...]
    broken: tuple[str, ...]
    unmatched: tuple[str, ...]
    warnings: tuple[str, ...]
    rule: FailIfResult | None = None

    @property
    def summary(self) -> str:
        """The result of the rule in a sentence; without a rule, what has changed."""
        return "; ".join(self.conclusions)

    @property
    def conclusions(self) -> Sequence[str]:
        """The parts of the summary, one per line."""
        rule, timings = self.rule, f"{len(self.changes)} timing{'s' * (len(self.changes) != 1)}"
        n = len(self.broken)
        broken = [f"{n} row{'s' * (n != 1)} with a time in {self.baseline} could not run now"] if n else []
        if rule is None:
            slower, faster = (sum(c.verdict == verdict for c in self.changes) for verdict in ("slower", "faster"))
            return [f"of {timings}, {slower} slower and {faster} faster than in {self.baseline}", *broken]
        if rule.outcome == "passed":
            return [f"passed: none of {timings} is more than {rule.limit:g} × that in {self.baseline}"]
        if rule.outcome == "inconclusive":
            widest = max(rule.undecided, key=lambda row: row.shows_from)
            return [
                f"inconclusive: {len(rule.undecided)} of {timings} may be more than {rule.limit:g} × that in {self.baseline}",
                f"the widest interval, {_ratio(widest)}, shows ratios from {widest.shows_from:.3g} on",
                "more rounds (--repeat, --budget) or a quieter machine narrow it",
            ]
        slow = sorted(above(self.changes, rule.limit), key=lambda change: -change.ratio)
        parts = [f"{len(slow)} of {timings} more than {rule.limit:g} × that in {self.baseline}"] if slow else []
        worst = [f"the largest ratio is {_ratio(slow[0])}"] if slow else []
        return [f"slower: {'; '.join([*parts, *worst, *broken])}"]

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields | {"summary": self.summary}


def compare(now: Benchmark, baseline: Benchmark, path: str, *, limit: float | None = None) -> BaselineComparison:
    """The comparison of every row of `now` with the same row of the baseline, and the result of the rule `slower:limit`.

    The interval of a ratio runs from the fastest likely time now over the slowest likely time then to the reverse.
    """
    then = {(row.backend, row.size): row for row in baseline.rows}
    changes, broken, unmatched = [], [], []
    for row in now.rows:
        before = then.pop((row.backend, row.size), None)
        if before is None:
            unmatched.append(f"{row.backend}, {row.name}: not in {path}")
        elif row.interval is not None and before.interval is not None:
            changes.append(_change(row, row.interval, before.interval))
        elif before.interval is not None:
            broken.append(f"{row.backend}, {row.name}: {row.status} now ({row.reason})")
    unmatched += [f"{row.backend}, {row.name}{NOT_NOW}" for row in then.values()]
    rule = _rule(limit, changes, is_broken=bool(broken)) if limit is not None and (changes or broken) else None
    warnings = tuple(_warnings(now, baseline))
    return BaselineComparison(path, tuple(changes), tuple(broken), tuple(unmatched), warnings, rule)


def parse_rule(word: str) -> float:
    """The ratio in `slower:RATIO`. Raises `UsageError` with the expected form."""
    match = re.fullmatch(r"slower:([0-9]{1,6}(?:\.[0-9]{1,9})?)", word.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--fail-if {word[:40]!r} is no rule: it takes slower:RATIO, such as slower:1.10")
    return float(match[1])


def above(changes: Sequence[TimeChange], limit: float) -> list[TimeChange]:
    """The changes whose whole interval lies above the limit."""
    return [change for change in changes if change.ratio_low > limit]


def _rule(limit: float, changes: Sequence[TimeChange], *, is_broken: bool) -> FailIfResult:
    undecided = tuple(
        UndecidedRow(c.backend, c.name, c.ratio, c.ratio_low, c.ratio_high, limit * c.ratio / c.ratio_low)
        for c in changes
        if c.ratio_low <= limit < c.ratio_high
    )
    is_slower = is_broken or bool(above(changes, limit))
    return FailIfResult(limit, "slower" if is_slower else "inconclusive" if undecided else "passed", undecided)


def _change(row: BenchRow, now: Interval, then: Interval) -> TimeChange:
    low, high = now.low / then.high, now.high / then.low
    verdict: SpeedVerdict = "slower" if low > 1 else "faster" if high < 1 else "similar"
    return TimeChange(
        **asdict(row.size), backend=row.backend, baseline_s=then.median, median_s=now.median,
        ratio=now.median / then.median, ratio_low=low, ratio_high=high, verdict=verdict,
    )  # fmt: skip


def _ratio(change: TimeChange | UndecidedRow) -> str:
    return f"{change.ratio:.2f} ({change.ratio_low:.2f} to {change.ratio_high:.2f}) for {change.backend}, {change.name}"


def _warnings(now: Benchmark, baseline: Benchmark) -> list[str]:
    pairs = [(name, getattr(baseline.environment, name), getattr(now.environment, name)) for name in _SAME]
    pairs.append(("seed", baseline.seed, now.seed))
    warnings = [f"{name} differs: {then} then, {ours} now" for name, then, ours in pairs if then != ours]
    fewest = min((len(row.samples_s) for run in (now, baseline) for row in run.rows if row.samples_s), default=0)
    if fewest and not is_sufficient(fewest):
        warnings.append(
            f"intervals of {CONFIDENCE * 100:.0f} % need more than {fewest} rounds: these are the whole range"
        )
    return warnings
