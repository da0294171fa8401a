"""Compares a benchmark with an earlier one: slower and faster rows, and the result of `--fail-if`."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec

from mhacli.commands.bench.intervals import Interval
from mhacli.commands.bench.result import Benchmark, BenchRow
from mhacli.commands.bench.workload import Workload
from mhacli.errors import UsageError

FailIfOutcome = Literal["slower", "inconclusive", "passed"]
_SAME = ("device_name", "cpu_name", "n_cpus", "threads", "driver", "torch", "python", "platform", "mha")

NOT_NOW = ": not measured now"
"""The end of the line for a row that only the baseline has."""


@dataclass(frozen=True)
class TimeChange(Workload):
    """The ratio of a row's time to the baseline's (above 1 = slower), with the ends of both medians' intervals.

    `similar`: the interval contains 1. `shows_from` is the least ratio that an interval of this width shows to be above the
    limit of the rule. `noise_high` is always None now.
    """

    backend: str
    name: str
    baseline_s: float
    median_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    verdict: Literal["slower", "faster", "similar"]
    shows_from: float | None
    noise_high: float | None = None


@dataclass(frozen=True)
class BaselineComparison:
    """The changes, the rows that cannot be compared, and warnings; `limit` is that of the rule `slower:LIMIT`."""

    baseline: str
    changes: tuple[TimeChange, ...]
    broken: tuple[str, ...]
    unmatched: tuple[str, ...]
    warnings: tuple[str, ...]
    limit: float | None = None

    def may_exceed(self, ratio: Literal["ratio_low", "ratio_high"]) -> list[TimeChange]:
        """The changes of which this end of the interval is above the limit."""
        return [change for change in self.changes if getattr(change, ratio) > (self.limit or math.inf)]

    @property
    def outcome(self) -> FailIfOutcome | None:
        """The result of the rule: `slower` if a time is surely above the limit, or a row could not run; `passed` if all times
        are surely at most the limit. None without a rule, or if nothing can be compared."""
        if self.limit is None or not (self.changes or self.broken):
            return None
        if self.broken or self.may_exceed("ratio_low"):
            return "slower"
        return "inconclusive" if self.may_exceed("ratio_high") else "passed"

    @property
    def summary(self) -> str:
        """The result of the rule in a sentence; without one, what has changed."""
        timings = f"of {len(self.changes)} timing{'s' * (len(self.changes) != 1)}"
        if self.outcome is None:
            n = Counter(change.verdict for change in self.changes)
            parts = [f"{timings}, {n['slower']} slower and {n['faster']} faster than in {self.baseline}"]
        else:
            is_open = self.outcome == "inconclusive"
            n_above = len(self.may_exceed("ratio_high" if is_open else "ratio_low"))
            above = f"{'may be' if is_open else 'are'} more than {self.limit:g} × that in {self.baseline}"
            parts = [f"{self.outcome}: {n_above} {timings} {above}"]
            parts += ["more rounds (--repeat, --budget) or a quieter machine decide"] if is_open else []
        if self.broken:
            parts.append(f"rows with a time in {self.baseline} that could not run now: {len(self.broken)}")
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        limit = fields.pop("limit")
        undecided = [change for change in self.may_exceed("ratio_high") if change.ratio_low <= limit]
        rule = {"limit": limit, "outcome": self.outcome, "undecided": msgspec.to_builtins(undecided)}
        return fields | {"rule": None if self.outcome is None else rule, "summary": self.summary}


def compare(now: Benchmark, baseline: Benchmark, path: str, *, limit: float | None = None) -> BaselineComparison:
    """The comparison of every row of `now` with the same row of the baseline, and the result of the rule `slower:limit`."""
    then = {(row.backend, row.size): row for row in baseline.rows}
    changes, broken, unmatched = [], [], []
    for row in now.rows:
        before = then.pop((row.backend, row.size), None)
        if before is None:
            unmatched.append(f"{row.backend}, {row.title}: not in {path}")
        elif row.interval is not None and before.interval is not None:
            changes.append(_change(row, row.interval, before.interval, limit))
        elif before.interval is not None:
            broken.append(f"{row.backend}, {row.title}: {row.status} now ({row.reason})")
    unmatched += [f"{row.backend}, {row.title}{NOT_NOW}" for row in then.values()]
    return BaselineComparison(
        path, tuple(changes), tuple(broken), tuple(unmatched), tuple(_warnings(now, baseline)), limit
    )


def parse_rule(word: str) -> float:
    """The ratio in `slower:RATIO`. Raises `UsageError` with the expected form."""
    match = re.fullmatch(r"slower:([0-9]{1,6}(?:\.[0-9]{1,9})?)", word.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--fail-if {word[:40]!r} is no rule: it takes slower:RATIO, such as slower:1.10")
    return float(match[1])


def _change(row: BenchRow, now: Interval, then: Interval, limit: float | None) -> TimeChange:
    """The change of a row. Its interval runs from the fastest likely time now over the slowest likely time then to the
    reverse."""
    ratio, low, high = now.median / then.median, now.low / then.high, now.high / then.low
    return TimeChange(
        **asdict(row.size), backend=row.backend, name=row.title, baseline_s=then.median, median_s=now.median, ratio=ratio,
        ratio_low=low, ratio_high=high, verdict="slower" if low > 1 else "faster" if high < 1 else "similar",
        shows_from=None if limit is None else limit * ratio / low,
    )  # fmt: skip


def _warnings(now: Benchmark, baseline: Benchmark) -> list[str]:
    pairs = [(name, baseline.environment.get(name), now.environment.get(name)) for name in _SAME]
    pairs.append(("seed", baseline.seed, now.seed))
    return [f"{name} differs: {then} then, {ours} now" for name, then, ours in pairs if then != ours]
