"""Compares a benchmark with an earlier one: slower and faster rows, and the result of `--fail-if`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mhacli.commands.bench.result import Benchmark
from mhacli.commands.bench.workload import SIZE, BenchRow, Interval

FailIfOutcome = Literal["slower", "inconclusive", "passed"]
_SAME = ("device_name", "cpu_name", "n_cpus", "threads", "driver", "torch", "python", "platform", "mha")

NOT_NOW = ": not measured now"
"""The end of the line for a row that only the baseline has."""


def change(now: BenchRow, then: BenchRow) -> Interval:
    """The ratio of a row's time to the baseline's (above 1 = slower), from the fastest likely time now over the slowest likely
    time then to the reverse: two runs share no rounds."""
    assert now.interval is not None
    assert then.interval is not None
    (median, low, high), (old, old_low, old_high) = now.interval, then.interval
    return median / old, low / old_high, high / old_low


def verdict(now: BenchRow, then: BenchRow) -> Literal["slower", "faster", "similar"]:
    """What is certain of a change: it is similar if its interval contains 1."""
    _, low, high = change(now, then)
    return "slower" if low > 1 else "faster" if high < 1 else "similar"


@dataclass(frozen=True)
class Comparison:
    """Rows that have a time now and had one in the baseline, the rows that cannot be compared, and warnings.

    `outcome` is the result of the rule `slower:limit`: `slower` if a time is surely above the limit or a row could not run,
    `passed` if all times are surely at most the limit. It is None without a rule, or if nothing can be compared.
    """

    baseline: str
    pairs: tuple[tuple[BenchRow, BenchRow], ...]
    broken: tuple[str, ...]
    unmatched: tuple[str, ...]
    warnings: tuple[str, ...]
    limit: float | None
    outcome: FailIfOutcome | None
    summary: str

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON values. `shows_from` is the least ratio that an interval of this width shows to be above the
        limit; `noise_high` is always null now."""
        changes, undecided = [], []
        for now, then in self.pairs:
            ratio, low, high = change(now, then)
            changes.append({
                **{name: getattr(now, name) for name in SIZE}, "backend": now.backend, "name": now.title,
                "baseline_s": then.median_s, "median_s": now.median_s, "ratio": ratio, "ratio_low": low,
                "ratio_high": high, "verdict": verdict(now, then),
                "shows_from": None if self.limit is None else self.limit * ratio / low, "noise_high": None,
            })  # fmt: skip
            if self.limit is not None and low <= self.limit < high:
                undecided.append(changes[-1])
        rule = {"limit": self.limit, "outcome": self.outcome, "undecided": undecided}
        return {
            "baseline": self.baseline, "changes": changes, "broken": self.broken, "unmatched": self.unmatched,
            "warnings": self.warnings, "rule": None if self.outcome is None else rule, "summary": self.summary,
        }  # fmt: skip


def compare(now: Benchmark, baseline: Benchmark, path: str, *, limit: float | None = None) -> Comparison:
    """The comparison of every row of `now` with the same row of the baseline."""
    then = {(row.backend, row.size): row for row in baseline.rows}
    pairs, broken, unmatched = [], [], []
    for row in now.rows:
        before = then.pop((row.backend, row.size), None)
        if before is None:
            unmatched.append(f"{row.backend}, {row.title}: not in {path}")
        elif row.interval is not None and before.interval is not None:
            pairs.append((row, before))
        elif before.interval is not None:
            broken.append(f"{row.backend}, {row.title}: {row.status} now ({row.reason})")
    unmatched += [f"{row.backend}, {row.title}{NOT_NOW}" for row in then.values()]
    differing = [(name, baseline.environment.get(name), now.environment.get(name)) for name in _SAME]
    differing.append(("seed", baseline.seed, now.seed))
    warnings = [f"{name} differs: {before} then, {ours} now" for name, before, ours in differing if before != ours]
    outcome: FailIfOutcome | None = None
    timings = f"of {len(pairs)} timing{'s' * (len(pairs) != 1)}"
    verdicts = [verdict(*pair) for pair in pairs]
    summary = f"{timings}, {verdicts.count('slower')} slower and {verdicts.count('faster')} faster than in {path}"
    if limit is not None and (pairs or broken):
        n_slower = sum(change(*pair)[1] > limit for pair in pairs)
        n_above = sum(change(*pair)[2] > limit for pair in pairs)
        outcome = "slower" if broken or n_slower else "inconclusive" if n_above else "passed"
        summary = f"{outcome}: {n_slower} {timings} are more than {limit:g} × that in {path}"
        if outcome == "inconclusive":
            summary = f"{outcome}: {n_above} {timings} may be more than {limit:g} × that in {path}"
            summary += "; more rounds (--repeat, --budget) or a quieter machine decide"
    if broken:
        summary += f"; rows with a time in {path} that could not run now: {len(broken)}"
    return Comparison(path, tuple(pairs), tuple(broken), tuple(unmatched), tuple(warnings), limit, outcome, summary)
