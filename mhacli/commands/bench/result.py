"""The result of `mha bench` as data (`mha.bench/1`) and as a summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from mhacli.commands.bench.workload import TIMING, BenchRow, Sweep
from mhacli.io.data import decode, load_json
from mhacli.io.files import read_whole
from mhacli.record.display import Shown

MAX_FILE_BYTES = 256 << 20


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
        timed = families([row for row in self.rows if row.interval is not None])
        sentences = {family: _sentence(rows) for family, rows in timed}
        if len(sentences) < 2:
            return tuple(sentences.values()) or ("nothing could be timed",)
        return tuple(f"{family}: {sentence}" for family, sentence in sentences.items())

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
    document = load_json(read_whole(path, MAX_FILE_BYTES), path)
    return decode(Benchmark, document, f"{path} is not a benchmark (mha.bench/1)", path=path)


def families(rows: Sequence[BenchRow]) -> list[tuple[str, list[BenchRow]]]:
    """Rows that differ only in batch, length and backend, by their common properties, in the order of measurement."""
    by_family: dict[str, list[BenchRow]] = {}
    for row in rows:
        by_family.setdefault(row.family, []).append(row)
    return list(by_family.items())


def ratio_text(ratio: float) -> str:
    """A ratio in three digits: `0.98`, `3.40`, `24.6`, `1,234`."""
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:,.0f}"


def _sentence(rows: Sequence[BenchRow]) -> str:
    """The fastest backend at the longest size, of those with two timed rows if any, against `explicit`, the plain formula, or
    else against the slowest."""
    from mhacli.render.base.format import seconds_text

    sizes = [[row for row in rows if row.size == size] for size in dict.fromkeys(row.size for row in rows)]
    longest = max(sizes, key=lambda of_size: (len(of_size) > 1, of_size[0].k_len, of_size[0].batch))
    first, *others = sorted(longest, key=lambda row: row.median_s or 0.0)
    time = seconds_text(first.median_s)
    if not others:
        return f"{first.backend} takes {time} at {first.length_text}; no other backend was timed"
    other = next((row for row in others if row.backend == "explicit"), others[-1])
    low, high = other.ratio_low or 0.0, other.ratio_high or 0.0
    is_certain = first.is_sure and low > 1
    faster = f"{ratio_text(other.ratio or 1.0)} × faster than {other.backend} at {first.length_text}"
    evidence = f"{seconds_text(other.median_s)} against {time}, 95 % interval {ratio_text(low)} to {ratio_text(high)} ×"
    return f"{first.backend} {'is' if is_certain else 'was'} {faster} ({evidence}){', which may be chance' * (not is_certain)}"
