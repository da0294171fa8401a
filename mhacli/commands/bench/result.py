"""The result of `mha bench` as data (`mha.bench/1`), and its comparison with an earlier one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from mhacli.commands.bench.workload import SIZE, TIMING, BenchRow, Interval, Sweep
from mhacli.io.data import decode, load_json
from mhacli.io.files import read_whole
from mhacli.record.display import Shown

_SAME = ("device_name", "cpu_name", "n_cpus", "threads", "driver", "torch", "python", "platform", "mha")


@dataclass(frozen=True, repr=False)
class Benchmark(Shown):
    """A complete run of `mha bench`. `environment` is that of a record, with the processor, its number of cores, the driver of
    a GPU, and the load of the machine at the beginning."""

    command: tuple[str, ...]
    seed: int
    environment: Mapping[str, Any]
    sweep: Sweep
    rows: tuple[BenchRow, ...]
    schema: Literal["mha.bench/1"] = "mha.bench/1"

    def views(self, screen: Any) -> Iterator[Any]:
        """What `mha bench` prints on a screen."""
        from mhacli.commands.bench.view import bench_view

        yield bench_view(self, None, screen)

    def __repr__(self) -> str:
        """One line that names the fastest backend."""
        return f"<Benchmark: {'; '.join(self.summary)}>"

    @property
    def summary(self) -> tuple[str, ...]:
        """One sentence per family of sizes: the fastest backend, its margin, and whether that is certain."""
        from mhacli.commands.bench.view import sentences

        return sentences(self)

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON values. All numbers are finite. `ceilings` and `controls` are always empty now."""
        run: dict[str, Any] = msgspec.to_builtins(self)
        for name in TIMING:
            del run["sweep"][name]
        return {"schema": self.schema, "summary": list(self.summary)} | run | {"ceilings": [], "controls": []}

    def to_json(self, **added: object) -> str:
        """The JSON document, with fields added to it."""
        return msgspec.json.encode(self.to_dict() | added).decode() + "\n"


def read_benchmark(path: str) -> Benchmark:
    """The benchmark in a JSON file, which `--save-baseline` writes. Raises `MhaError` for an unreadable file or another
    schema."""
    document = load_json(read_whole(path, 256 << 20), path)
    return decode(Benchmark, document, f"{path} is not a benchmark (mha.bench/1)", path=path)


@dataclass(frozen=True)
class Comparison:
    """Rows that have a time now and had one in the baseline, the rows that cannot be compared, and warnings.

    `rule` is the result of `slower:limit`: its `outcome` is `slower` if a time is surely above the limit or a row could not run,
    `passed` if all times are surely at most the limit. It is None without a rule, or if nothing can be compared.
    """

    baseline: str
    broken: tuple[str, ...]
    unmatched: tuple[str, ...]
    warnings: tuple[str, ...]
    summary: str
    changes: tuple[Mapping[str, Any], ...]
    rule: Mapping[str, Any] | None


def compare(now: Benchmark, baseline: Benchmark, path: str, *, limit: float | None = None) -> Comparison:
    """The comparison of every row of `now` with the same row of the baseline."""
    then = {(row.backend, row.size): row for row in baseline.rows}
    changes, broken, unmatched = [], [], []
    for row in now.rows:
        before = then.pop((row.backend, row.size), None)
        if before is None:
            unmatched.append(f"{row.backend}, {row.title}: not in {path}")
        elif row.interval is not None and before.interval is not None:
            changes.append(_change(row, row.interval, before.interval, limit=limit))
        elif before.interval is not None:
            broken.append(f"{row.backend}, {row.title}: {row.status} now ({row.reason})")
    unmatched += [f"{row.backend}, {row.title}: not measured now" for row in then.values()]
    pairs = {name: (baseline.environment.get(name), now.environment.get(name)) for name in _SAME}
    pairs["seed"] = (baseline.seed, now.seed)
    warnings = [
        f"{name} differs: {before} then, {ours} now" for name, (before, ours) in pairs.items() if before != ours
    ]
    n, verdicts, rule = len(changes), [each["verdict"] for each in changes], None
    summary = f"of {n} timings, {verdicts.count('slower')} slower and {verdicts.count('faster')} faster than in {path}"
    if limit is not None and (changes or broken):
        n_slower, n_above = (sum(each[end] > limit for each in changes) for end in ("ratio_low", "ratio_high"))
        outcome = "slower" if broken or n_slower else "inconclusive" if n_above else "passed"
        undecided = [each for each in changes if each["ratio_low"] <= limit < each["ratio_high"]]
        rule = {"limit": limit, "outcome": outcome, "undecided": undecided}
        summary = f"{outcome}: {n_slower} of {n} timings are more than {limit:g} × that in {path}"
        if outcome == "inconclusive":
            summary = f"{outcome}: {n_above} of {n} timings may be more than {limit:g} × that in {path}"
            summary += "; more rounds (--repeat, --budget) or a quieter machine decide"
    summary += f"; rows with a time in {path} that could not run now: {len(broken)}" if broken else ""
    return Comparison(path, tuple(broken), tuple(unmatched), tuple(warnings), summary, tuple(changes), rule)


def _change(row: BenchRow, now: Interval, then: Interval, *, limit: float | None) -> dict[str, Any]:
    """The ratio of a row's time to the baseline's (above 1 = slower), from the fastest likely time now over the slowest likely
    time then to the reverse: two runs share no rounds. It is similar if this interval contains 1. `shows_from` is the least
    ratio that an interval of this width shows to be above the limit; `noise_high` is always null now."""
    ratio, low, high = now[0] / then[0], now[1] / then[2], now[2] / then[1]
    return {
        **{name: getattr(row, name) for name in SIZE}, "backend": row.backend, "name": row.title,
        "baseline_s": then[0], "median_s": now[0], "ratio": ratio, "ratio_low": low, "ratio_high": high,
        "verdict": "slower" if low > 1 else "faster" if high < 1 else "similar",
        "shows_from": None if limit is None else limit * ratio / low, "noise_high": None,
    }  # fmt: skip
