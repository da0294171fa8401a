"""A benchmark beside an earlier one: what has become slower or faster, and what `--fail-if` says of it."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mhacli.errors import UsageError
from mhacli.results.bench.intervals import CONFIDENCE, Interval, is_known, median_interval
from mhacli.results.bench.result import Benchmark, BenchRow, workload_of
from mhacli.results.bench.workload import Workload

SpeedVerdict = Literal["slower", "faster", "similar"]
FailIfOutcome = Literal["slower", "inconclusive", "passed"]
_SAME = ("device_name", "cpu_name", "n_cpus", "threads", "driver", "torch", "python", "platform", "mha")
_SAME_RATE = 1.1
"""Machines whose matrix products or copies differ by more than this factor are told apart."""

NOT_NOW = ": not measured now"
"""How the line of a row ends that only the baseline has."""

_USELESS = 10
"""A timing that shows only slowdowns by this factor and more shows nothing."""


@dataclass(frozen=True)
class TimeChange(Workload):
    """The time of a row as a ratio to the baseline's, above 1 = slower, between the ends of both medians' intervals. Ratios up to
    `noise_high` are what the machine's own noise makes of 1."""

    backend: str
    baseline_s: float
    median_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    verdict: SpeedVerdict
    noise_high: float = 1.0

    def shows_from(self, limit: float) -> float:
        """The smallest true ratio at which an interval as wide as this one would lie above a limit, and above the noise."""
        return max(limit, self.noise_high if limit >= 1 else 0.0) * self.ratio / self.ratio_low


@dataclass(frozen=True)
class UndecidedRow:
    """A row whose interval holds the limit: it may be slower, and may be not. `shows_from` as of `TimeChange`."""

    backend: str
    name: str
    ratio: float
    ratio_low: float
    ratio_high: float
    shows_from: float


@dataclass(frozen=True)
class FailIfResult:
    """What the rule `slower:LIMIT` says: `slower` where a time is surely above it, `passed` where each is surely at most that,
    else `inconclusive`."""

    limit: float
    outcome: FailIfOutcome
    undecided: tuple[UndecidedRow, ...]


@dataclass(frozen=True)
class BaselineComparison:
    """What changed, what cannot be compared, and what to beware of; and what the rule says, where there is one."""

    baseline: str
    changes: tuple[TimeChange, ...]
    broken: tuple[str, ...]
    unmatched: tuple[str, ...]
    warnings: tuple[str, ...]
    rule: FailIfResult | None = None

    def ruled(self, limit: float) -> BaselineComparison:
        """The same with what the rule `slower:LIMIT` says of it: nothing, where there is nothing to compare."""
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
        """The same, with each change that was measured again replaced by the smaller ratio of the two."""
        seconds = {(change.backend, workload_of(change)): change for change in again.changes}
        both = [(change, seconds.get((change.backend, workload_of(change)), change)) for change in self.changes]
        return dataclasses.replace(self, changes=tuple(min(pair, key=lambda change: change.ratio) for pair in both))

    @property
    def summary(self) -> str:
        """What the rule says in a sentence, or without a rule what has changed."""
        return "; ".join(self.conclusions)

    @property
    def conclusions(self) -> Sequence[str]:
        """The parts of the summary that stand in lines of their own."""
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
        """Which timing is the least certain, what slowdown it would have shown, and why one above the limit decides nothing."""
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
        """How many rows have a time in the baseline and none now; nothing where there is none."""
        n = len(self.broken)
        return [f"{n} row{'s' * (n != 1)} with a time in {self.baseline} could not run now"] if n else []

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self) | {"summary": self.summary}


def _timings(n: int) -> str:
    return f"{n} timing{'s' * (n != 1)}"


def _is(n: int) -> str:
    return "is" if n == 1 else "are"


def _change_text(change: TimeChange | UndecidedRow) -> str:
    return f"{change.ratio:.2f} ({change.ratio_low:.2f} to {change.ratio_high:.2f}) for {change.backend}, {change.name}"


def _shown_text(ratio: float) -> str:
    """What an interval shows at best: a slowdown of `40 %`, or `6.9 ×` from twice the time on; of ten times the time, nothing."""
    if ratio >= _USELESS:
        return "too wide an interval for any conclusion"
    slowdown = f"{(ratio - 1) * 100:.0f} %" if 1 <= ratio < 2 else f"{ratio:.3g} ×"
    return f"which would show a slowdown of {slowdown} or more"


def compare(now: Benchmark, baseline: Benchmark, path: str) -> BaselineComparison:
    """Every row of `now` beside the same row of the baseline.

    The interval runs from the quickest that is likely now by the slowest that was likely then to the reverse. It holds the
    noise within each run; that between them is in the verdict: a change is `similar` where it overlaps what the controls of
    both runs, and the rates of the machine's own matrix product and copy then and now, show to be noise.
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
    """The ratio of `slower:RATIO`. Raises `UsageError` with the form."""
    match = re.fullmatch(r"slower:([0-9]{1,6}(?:\.[0-9]{1,9})?)", word.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--fail-if {word[:40]!r} is no rule: it takes slower:RATIO, such as slower:1.10")
    return float(match[1])


def too_slow(comparison: BaselineComparison, ratio: float) -> tuple[TimeChange, ...]:
    """The changes whose whole interval lies above a ratio, less those that are like the noise where the ratio is not below 1."""
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
    """The median that a file states, with the relative width that its samples have."""
    stated = row.interval
    assert stated is not None  # the caller asked
    if not row.samples_s:
        return stated
    recomputed = median_interval(row.samples_s)
    factor = stated.median / recomputed.median
    return Interval(stated.median, recomputed.low * factor, recomputed.high * factor)


def _noise(row: BenchRow, now: Benchmark, baseline: Benchmark) -> Interval:
    """What a ratio of 1 looks like: in the controls of both runs, and in how the machine's own rates have moved."""
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
    if fewest and not is_known(fewest):
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
        "the machine was busier then, or it is another one; take the baseline again"
        if ratio > 1
        else "the machine is busier now, or it is another one"
    )
    return [f"the machine's own {dtype} {what} runs {ratio:.2f} times as fast as then: {why}"]
