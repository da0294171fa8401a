"""A benchmark beside an earlier one: how each row's time has changed, and whether the machines can be compared at all."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal

from mhacli.errors import UsageError
from mhacli.results.bench.result import CONFIDENCE, Benchmark, Interval, Row, is_known, median_interval, workload_of
from mhacli.results.bench.workload import Workload

Verdict = Literal["slower", "faster", "similar"]
Outcome = Literal["slower", "inconclusive", "passed"]
_SAME = ("device_name", "cpu_name", "n_cpus", "threads", "driver", "torch", "python", "platform", "mha")
_SAME_RATE = 1.1
"""Machines whose matrix products or copies differ by more than this factor are told apart."""


@dataclass(frozen=True)
class Change(Workload):
    """The time of a row as a ratio to the baseline's, above 1 = slower, between the ends of both medians' intervals. Ratios up to
    `noise_high` are what the machine's own noise makes of 1."""

    backend: str
    baseline_s: float
    median_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    verdict: Verdict
    noise_high: float = 1.0

    def shows_from(self, limit: float) -> float:
        """The smallest true ratio at which an interval as wide as this one would lie above a limit, and above the noise."""
        return max(limit, self.noise_high if limit >= 1 else 0.0) * self.ratio / self.ratio_low


@dataclass(frozen=True)
class Undecided:
    """A row whose interval holds the limit: it may be slower, and may be not. `shows_from` as of `Change`."""

    backend: str
    name: str
    ratio: float
    ratio_low: float
    ratio_high: float
    shows_from: float


@dataclass(frozen=True)
class Ruling:
    """What the rule `slower:LIMIT` says: `slower` where a time is surely above it, `passed` where each is surely at most that,
    else `inconclusive`."""

    limit: float
    outcome: Outcome
    undecided: tuple[Undecided, ...]


@dataclass(frozen=True)
class Comparison:
    """What changed, what cannot be compared, and what to beware of; and what the rule says, where there is one."""

    baseline: str
    changes: tuple[Change, ...]
    broken: tuple[str, ...]
    unmatched: tuple[str, ...]
    warnings: tuple[str, ...]
    rule: Ruling | None = None

    def ruled(self, limit: float) -> Comparison:
        """The same with what the rule `slower:LIMIT` says of it."""
        slow = too_slow(self, limit)
        undecided = tuple(
            Undecided(c.backend, c.name, c.ratio, c.ratio_low, c.ratio_high, c.shows_from(limit))
            for c in self.changes
            if c not in slow and c.ratio_high > limit
        )
        outcome: Outcome = "slower" if slow or self.broken else "inconclusive" if undecided else "passed"
        return dataclasses.replace(self, rule=Ruling(limit, outcome, undecided))

    def milder(self, again: Comparison) -> Comparison:
        """The same, with each change that was measured again replaced by the smaller ratio of the two."""
        seconds = {(change.backend, workload_of(change)): change for change in again.changes}
        both = [(change, seconds.get((change.backend, workload_of(change)), change)) for change in self.changes]
        return dataclasses.replace(self, changes=tuple(min(pair, key=lambda change: change.ratio) for pair in both))

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)


def compare(now: Benchmark, baseline: Benchmark, path: str) -> Comparison:
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
    unmatched += [f"{row.backend}, {row.name}: not measured now" for row in then.values()]
    return Comparison(path, tuple(changes), tuple(broken), tuple(unmatched), tuple(_warnings(now, baseline)))


def parse_rule(word: str) -> float:
    """The ratio of `slower:RATIO`. Raises `UsageError` with the form."""
    match = re.fullmatch(r"slower:([0-9]{1,6}(?:\.[0-9]{1,9})?)", word.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"fail-if must be slower:RATIO such as slower:1.10, got {word[:40]!r}")
    return float(match[1])


def too_slow(comparison: Comparison, ratio: float) -> tuple[Change, ...]:
    """The changes whose whole interval lies above a ratio, less those that are like the noise where the ratio is not below 1."""
    above = (change for change in comparison.changes if change.ratio_low > ratio)
    return tuple(change for change in above if ratio < 1 or change.verdict == "slower")


def _change(row: Row, now: Interval, then: Interval, noise: Interval) -> Change:
    ratio = Interval(now.median / then.median, now.low / then.high, now.high / then.low)
    verdict: Verdict = "similar" if ratio.overlaps(noise) else "slower" if ratio.median > 1 else "faster"
    return Change(
        **dataclasses.asdict(workload_of(row)), backend=row.backend, baseline_s=then.median, median_s=now.median,
        ratio=ratio.median, ratio_low=ratio.low, ratio_high=ratio.high, verdict=verdict,
        noise_high=noise.high,
    )  # fmt: skip


def _timed(row: Row) -> Interval:
    """The median that a file states, with the relative width that its samples have."""
    stated = row.interval
    assert stated is not None  # the caller asked
    if not row.samples_s:
        return stated
    found = median_interval(row.samples_s)
    factor = stated.median / found.median
    return Interval(stated.median, found.low * factor, found.high * factor)


def _noise(row: Row, now: Benchmark, baseline: Benchmark) -> Interval:
    """What a ratio of 1 looks like: in the controls of both runs, and in how the machine's own rates have moved."""
    seen = [1.0]
    for control in (now.control(row), baseline.control(row)):
        seen += [] if control is None else [control.interval.low, control.interval.high]
    ours, theirs = ({c.dtype: c for c in run.ceilings}.get(row.dtype) for run in (now, baseline))
    if ours is not None and theirs is not None:
        seen += [theirs.matmul_tflops / ours.matmul_tflops, theirs.copy_gb_per_s / ours.copy_gb_per_s]
    return Interval(1.0, min(seen), max(seen))


def _warnings(now: Benchmark, baseline: Benchmark) -> list[str]:
    said = []
    for name in _SAME:
        ours, theirs = getattr(now.environment, name), getattr(baseline.environment, name)
        if ours != theirs:
            said.append(f"{name} differs: {theirs} then, {ours} now")
    if now.seed != baseline.seed:
        said.append(f"seed differs: {baseline.seed} then, {now.seed} now")
    fewest = min((len(row.samples_s) for run in (now, baseline) for row in run.rows if row.samples_s), default=0)
    if fewest and not is_known(fewest):
        said.append(f"intervals of {CONFIDENCE * 100:.0f} % need more than {fewest} rounds: these are the whole range")
    then = {ceiling.dtype: ceiling for ceiling in baseline.ceilings}
    for ceiling in now.ceilings:
        if ceiling.dtype in then:
            other = then[ceiling.dtype]
            said += _rate("matrix product", ceiling.matmul_tflops / other.matmul_tflops, ceiling.dtype)
            said += _rate("copy", ceiling.copy_gb_per_s / other.copy_gb_per_s, ceiling.dtype)
    return said


def _rate(what: str, ratio: float, dtype: str) -> list[str]:
    if 1 / _SAME_RATE <= ratio <= _SAME_RATE:
        return []
    return [f"the machine's own {dtype} {what} runs {ratio:.2f} times as fast as then: a busier or other machine"]
