"""Compares a benchmark with an earlier one: slower and faster rows, and the result of `--fail-if`."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mhacli.commands.bench.result import Benchmark, BenchRow, workload_of
from mhacli.commands.bench.workload import Workload
from mhacli.errors import UsageError
from mhacli.record.intervals import CONFIDENCE, Interval, is_sufficient, median_interval

SpeedVerdict = Literal["slower", "faster", "similar"]
FailIfOutcome = Literal["slower", "inconclusive", "passed"]
_SAME = ("device_name", "cpu_name", "n_cpus", "threads", "driver", "torch", "python", "platform", "mha")
_SAME_RATE = 1.1
"""Machines whose matrix products or copies differ by more than this factor count as different."""

NOT_NOW = ": not measured now"
"""The end of the line for a row that only the baseline has."""

_USELESS = 10
"""A timing that could only show slowdowns by at least this factor proves nothing."""


@dataclass(frozen=True)
class TimeChange(Workload):
    """The ratio of a row's time to the baseline's (above 1 = slower), with the ends of both medians' intervals.

    Ratios up to `noise_high` are within the machine's noise.
    """

    backend: str
    baseline_s: float
    median_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    verdict: SpeedVerdict
    noise_high: float = 1.0

    def shows_from(self, limit: float) -> float:
        """The smallest true ratio that an interval of this width would place above a limit, and above the noise."""
        return max(limit, self.noise_high if limit >= 1 else 0.0) * self.ratio / self.ratio_low


@dataclass(frozen=True)
class UndecidedRow:
    """A row whose interval contains the limit. `shows_from` is that of `TimeChange`."""

    backend: str
    name: str
    ratio: float
    ratio_low: float
    ratio_high: float
    shows_from: float


@dataclass(frozen=True)
class FailIfResult:
    """The result of the rule `slower:LIMIT`.

    `slower` if a time is surely above the limit, `passed` if all times are surely at most the limit, else
    `inconclusive`.
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

    def ruled(self, limit: float) -> BaselineComparison:
        """The comparison with the result of the rule `slower:LIMIT`, or unchanged if there is nothing to compare."""
        if not (self.changes or self.broken):
            return self
        slow = too_slow(self, limit)
        undecided = tuple(
            UndecidedRow(c.backend, c.name, c.ratio, c.ratio_low, c.ratio_high, c.shows_from(limit))
            for c in self.changes
            if c not in slow and c.ratio_high > limit
        )
        outcome: FailIfOutcome = "slower" if slow or self.broken else "inconclusive" if undecided else "passed"
        return dataclasses.replace(self, rule=FailIfResult(limit, outcome, undecided))

    def milder(self, again: BaselineComparison) -> BaselineComparison:
        """The comparison where each change that was measured again has the smaller of both ratios."""
        seconds = {(change.backend, workload_of(change)): change for change in again.changes}
        both = [(change, seconds.get((change.backend, workload_of(change)), change)) for change in self.changes]
        return dataclasses.replace(self, changes=tuple(min(pair, key=lambda change: change.ratio) for pair in both))

    @property
    def summary(self) -> str:
        """The result of the rule in a sentence; without a rule, what has changed."""
        return "; ".join(self.conclusions)

    @property
    def conclusions(self) -> Sequence[str]:
        """The parts of the summary, one per line."""
        if self.rule is None:
            return [self._changes_summary()]
        return self._undecided(self.rule) if self.rule.outcome == "inconclusive" else [self._rule_summary(self.rule)]

    def _changes_summary(self) -> str:
        if not self.changes:
            return "; ".join(self._broken_text()) or f"no row of {self.baseline} was measured now"
        of_verdict = Counter(change.verdict for change in self.changes)
        counts = [f"{of_verdict[v]} {_is(of_verdict[v])} {v}" for v in ("slower", "faster") if of_verdict[v]]
        changes = " and ".join(counts) or "none is slower or faster"
        parts = [f"of {_timings(len(self.changes))}, {changes} than in {self.baseline}, beyond noise"]
        if of_verdict["slower"]:
            worst = max(self.changes, key=lambda change: (change.verdict == "slower", change.ratio))
            parts.append(f"the largest ratio is {_change_text(worst)}")
        return "; ".join([*parts, *self._broken_text()])

    def _rule_summary(self, rule: FailIfResult) -> str:
        limit, n_timings = f"{rule.limit:g} × that in {self.baseline}", _timings(len(self.changes))
        if rule.outcome == "passed":
            return f"passed: none of {n_timings} is more than {limit}"
        slow = too_slow(self, rule.limit)
        if not slow:
            return f"slower: {'; '.join(self._broken_text())}"
        worst = max(slow, key=lambda change: change.ratio)
        above = f"{len(slow)} of {n_timings} {_is(len(slow))} more than {limit}, beyond noise"
        return "; ".join([f"slower: {above}", f"the largest ratio is {_change_text(worst)}", *self._broken_text()])

    def _undecided(self, rule: FailIfResult) -> Sequence[str]:
        """The least certain timing, the slowdown that it could have shown, and why one above the limit is inconclusive."""
        widest = max(rule.undecided, key=lambda row: row.shows_from)
        count = f"{len(rule.undecided)} of {_timings(len(self.changes))}"
        parts = [
            f"inconclusive: {count} may be more than {rule.limit:g} × that in {self.baseline}, none certainly is",
            f"widest: {_change_text(widest)}, {_shown_text(widest.shows_from)}",
        ]
        above = [change for change in self.changes if change.ratio_low > rule.limit]
        if above:
            noise = max(change.noise_high for change in above)
            parts.append(
                f"{len(above)} {'lies' if len(above) == 1 else 'lie'} wholly above the limit, but within the noise: one backend "
                f"against itself, or the machine's own speed then and now, differed by up to {noise:.3g} ×"
            )
        return [*parts, "a quieter machine or more rounds (--repeat, --budget) narrow it"]

    def _broken_text(self) -> list[str]:
        """The number of rows that have a time in the baseline and none now, if any."""
        n = len(self.broken)
        return [f"{n} row{'s' * (n != 1)} with a time in {self.baseline} could not run now"] if n else []

    def document(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return dataclasses.asdict(self) | {"summary": self.summary}


def _timings(n: int) -> str:
    return f"{n} timing{'s' * (n != 1)}"


def _is(n: int) -> str:
    return "is" if n == 1 else "are"


def _change_text(change: TimeChange | UndecidedRow) -> str:
    return f"{change.ratio:.2f} ({change.ratio_low:.2f} to {change.ratio_high:.2f}) for {change.backend}, {change.name}"


def _shown_text(ratio: float) -> str:
    """The smallest slowdown that an interval could show: `40 %`, or `6.9 ×` from twice the time on. None from ten times
    on."""
    if ratio >= _USELESS:
        return "too wide an interval for any conclusion"
    slowdown = f"{(ratio - 1) * 100:.0f} %" if 1 <= ratio < 2 else f"{ratio:.3g} ×"
    return f"which would show a slowdown of {slowdown} or more"


def compare(now: Benchmark, baseline: Benchmark, path: str) -> BaselineComparison:
    """The comparison of every row of `now` with the same row of the baseline.

    The interval of a ratio runs from the fastest likely time now over the slowest likely time then to the reverse. It
    covers the noise within each run. The verdict also covers the noise between them: a change is `similar` if it
    overlaps the noise shown by the controls of both runs and by the machine's matrix products and copies.
    """
    then = {row.key: row for row in baseline.rows}
    changes, broken, unmatched = [], [], []
    for row in now.rows:
        before = then.pop(row.key, None)
        if before is None:
            unmatched.append(f"{row.backend}, {row.name}: not in {path}")
        elif row.interval is not None and before.interval is not None:
            changes.append(_change(row, row.interval, _timed(before), _noise(row, now, baseline)))
        elif before.interval is not None:
            broken.append(f"{row.backend}, {row.name}: {row.status} now ({row.reason})")
    unmatched += [f"{row.backend}, {row.name}{NOT_NOW}" for row in then.values()]
    return BaselineComparison(path, tuple(changes), tuple(broken), tuple(unmatched), tuple(_warnings(now, baseline)))


def parse_rule(word: str) -> float:
    """The ratio in `slower:RATIO`. Raises `UsageError` with the expected form."""
    match = re.fullmatch(r"slower:([0-9]{1,6}(?:\.[0-9]{1,9})?)", word.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--fail-if {word[:40]!r} is no rule: it takes slower:RATIO, such as slower:1.10")
    return float(match[1])


def too_slow(comparison: BaselineComparison, ratio: float) -> tuple[TimeChange, ...]:
    """The changes whose whole interval lies above the ratio; for a ratio of at least 1, without those within the noise."""
    above = (change for change in comparison.changes if change.ratio_low > ratio)
    return tuple(change for change in above if ratio < 1 or change.verdict == "slower")


def _change(row: BenchRow, now: Interval, then: Interval, noise: Interval) -> TimeChange:
    ratio = Interval(now.median / then.median, now.low / then.high, now.high / then.low)
    verdict: SpeedVerdict = "similar" if ratio.overlaps(noise) else "slower" if ratio.median > 1 else "faster"
    return TimeChange(
        **dataclasses.asdict(workload_of(row)), backend=row.backend, baseline_s=then.median, median_s=now.median,
        ratio=ratio.median, ratio_low=ratio.low, ratio_high=ratio.high, verdict=verdict,
        noise_high=noise.high,
    )  # fmt: skip


def _timed(row: BenchRow) -> Interval:
    """The median stated in a file, with the relative width of its samples' interval."""
    stated = row.interval
    assert stated is not None  # checked by the caller
    if not row.samples_s:
        return stated
    recomputed = median_interval(row.samples_s)
    factor = stated.median / recomputed.median
    return Interval(stated.median, recomputed.low * factor, recomputed.high * factor)


def _noise(row: BenchRow, now: Benchmark, baseline: Benchmark) -> Interval:
    """The ratios that look like 1: those of the controls of both runs, and of the changes in the machine's own rates."""
    controls = [control for control in (now.control(row), baseline.control(row)) if control is not None]
    noise = max((control.noise for control in controls), default=1.0)
    ratios = [1 / noise, noise]
    ours, theirs = ({c.dtype: c for c in run.ceilings}.get(row.dtype) for run in (now, baseline))
    if ours is not None and theirs is not None:
        ratios += [theirs.matmul_tflops / ours.matmul_tflops, theirs.copy_gb_per_s / ours.copy_gb_per_s]
    return Interval(1.0, min(ratios), max(ratios))


def _warnings(now: Benchmark, baseline: Benchmark) -> list[str]:
    warnings = []
    for name in _SAME:
        ours, theirs = getattr(now.environment, name), getattr(baseline.environment, name)
        if ours != theirs:
            warnings.append(f"{name} differs: {theirs} then, {ours} now")
    if now.seed != baseline.seed:
        warnings.append(f"seed differs: {baseline.seed} then, {now.seed} now")
    fewest = min((len(row.samples_s) for run in (now, baseline) for row in run.rows if row.samples_s), default=0)
    if fewest and not is_sufficient(fewest):
        warnings.append(
            f"intervals of {CONFIDENCE * 100:.0f} % need more than {fewest} rounds: these are the whole range"
        )
    then = {ceiling.dtype: ceiling for ceiling in baseline.ceilings}
    for ceiling in now.ceilings:
        if ceiling.dtype in then:
            other = then[ceiling.dtype]
            warnings += _rate("matrix product", ceiling.matmul_tflops / other.matmul_tflops, ceiling.dtype)
            warnings += _rate("copy", ceiling.copy_gb_per_s / other.copy_gb_per_s, ceiling.dtype)
    return warnings


def _rate(what: str, ratio: float, dtype: str) -> list[str]:
    if 1 / _SAME_RATE <= ratio <= _SAME_RATE:
        return []
    why = (
        "the machine was busier then, or it is a different machine; measure the baseline again"
        if ratio > 1
        else "the machine is busier now, or it is a different machine"
    )
    return [f"the machine's own {dtype} {what} runs {ratio:.2f} times as fast as in the baseline: {why}"]
