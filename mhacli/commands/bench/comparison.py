"""Compares a benchmark with an earlier one: slower and faster rows, and the result of `--fail-if`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec

from mhacli.commands.bench.result import Benchmark
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
    """The changes, the rows that cannot be compared, and warnings. `outcome` is the result of the rule `slower:limit`: `slower`
    if a time is surely above the limit or a row could not run, `passed` if all times are surely at most the limit. It is None
    without a rule, or if nothing can be compared."""

    baseline: str
    changes: tuple[TimeChange, ...]
    broken: tuple[str, ...]
    unmatched: tuple[str, ...]
    warnings: tuple[str, ...]
    limit: float | None = None

    @property
    def slower(self) -> list[TimeChange]:
        """The changes that are surely above the limit."""
        return [change for change in self.changes if self.limit is not None and change.ratio_low > self.limit]

    @property
    def undecided(self) -> list[TimeChange]:
        """The changes that may be above the limit or not."""
        return [c for c in self.changes if self.limit is not None and c.ratio_low <= self.limit < c.ratio_high]

    @property
    def outcome(self) -> FailIfOutcome | None:
        """The result of the rule."""
        if self.limit is None or not (self.changes or self.broken):
            return None
        return "slower" if self.broken or self.slower else "inconclusive" if self.undecided else "passed"

    @property
    def summary(self) -> str:
        """The result of the rule in a sentence; without one, what has changed."""
        timings = f"of {len(self.changes)} timing{'s' * (len(self.changes) != 1)}"
        if self.outcome is None:
            n = Counter(change.verdict for change in self.changes)
            parts = [f"{timings}, {n['slower']} slower and {n['faster']} faster than in {self.baseline}"]
        elif self.outcome == "inconclusive":
            above = f"may be more than {self.limit:g} × that in {self.baseline}"
            parts = [f"inconclusive: {len(self.undecided)} {timings} {above}"]
            parts.append("more rounds (--repeat, --budget) or a quieter machine decide")
        else:
            parts = [
                f"{self.outcome}: {len(self.slower)} {timings} are more than {self.limit:g} × that in {self.baseline}"
            ]
        if self.broken:
            parts.append(f"rows with a time in {self.baseline} that could not run now: {len(self.broken)}")
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        undecided = msgspec.to_builtins(self.undecided)
        rule = {"limit": fields.pop("limit"), "outcome": self.outcome, "undecided": undecided}
        return fields | {"rule": None if self.outcome is None else rule, "summary": self.summary}


def compare(now: Benchmark, baseline: Benchmark, path: str, *, limit: float | None = None) -> BaselineComparison:
    """The comparison of every row of `now` with the same row of the baseline. The interval of a change runs from the fastest
    likely time now over the slowest likely time then to the reverse."""
    then = {(row.backend, row.size): row for row in baseline.rows}
    changes, broken, unmatched = [], [], []
    for row in now.rows:
        before = then.pop((row.backend, row.size), None)
        if before is None:
            unmatched.append(f"{row.backend}, {row.title}: not in {path}")
        elif row.interval is not None and before.interval is not None:
            (median, low, high), (old, old_low, old_high) = row.interval, before.interval
            ratio, low, high = median / old, low / old_high, high / old_low
            changes.append(TimeChange(
                **asdict(row.size), backend=row.backend, name=row.title, baseline_s=old, median_s=median,
                ratio=ratio, ratio_low=low, ratio_high=high,
                verdict="slower" if low > 1 else "faster" if high < 1 else "similar",
                shows_from=None if limit is None else limit * ratio / low,
            ))  # fmt: skip
        elif before.interval is not None:
            broken.append(f"{row.backend}, {row.title}: {row.status} now ({row.reason})")
    unmatched += [f"{row.backend}, {row.title}{NOT_NOW}" for row in then.values()]
    pairs = [(name, baseline.environment.get(name), now.environment.get(name)) for name in _SAME]
    pairs.append(("seed", baseline.seed, now.seed))
    warnings = [f"{name} differs: {before} then, {ours} now" for name, before, ours in pairs if before != ours]
    return BaselineComparison(path, tuple(changes), tuple(broken), tuple(unmatched), tuple(warnings), limit)


def parse_rule(word: str) -> float:
    """The ratio in `slower:RATIO`. Raises `UsageError` with the expected form."""
    match = re.fullmatch(r"slower:([0-9]{1,6}(?:\.[0-9]{1,9})?)", word.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--fail-if {word[:40]!r} is no rule: it takes slower:RATIO, such as slower:1.10")
    return float(match[1])
