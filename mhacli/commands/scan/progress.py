"""The progress of a scan, and its lines on stderr: a bar on a terminal, JSON lines for programs, a line a minute for logs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import monotonic

from mhacli.cli.console import is_interactive, note, progress, stderr_line
from mhacli.render.base.format import seconds_text

_JSON_EVERY_S, _NOTE_EVERY_S = 1.0, 60.0


@dataclass
class ScanProgress:
    """The number of finished documents, including bad ones, and their total `of_documents` if it is known.

    `n_left_done` of them were finished by earlier runs; this run took `seconds` for the others, with `n_new_tokens`. `by_worker`
    has the number of documents of each worker in this run.
    """

    n_documents: int = 0
    n_bad: int = 0
    n_tokens: int = 0
    of_documents: int | None = None
    n_left_done: int = 0
    n_new_tokens: int = 0
    seconds: float = 0.0
    by_worker: dict[str, int] = field(default_factory=dict)

    def leave(self, n_good: int, n_bad: int, n_tokens: int) -> None:
        """Counts documents finished by an earlier run."""
        self._count(n_good, n_bad, n_tokens)
        self.n_left_done += n_good + n_bad

    def add(self, worker: str, n_good: int, n_bad: int, n_tokens: int, *, seconds: float) -> None:
        """Counts documents that a worker has finished, `seconds` after the start."""
        self._count(n_good, n_bad, n_tokens)
        self.n_new_tokens += n_tokens
        self.seconds = seconds
        self.by_worker[worker] = self.by_worker.get(worker, 0) + n_good + n_bad

    def _count(self, n_good: int, n_bad: int, n_tokens: int) -> None:
        self.n_documents += n_good + n_bad
        self.n_bad += n_bad
        self.n_tokens += n_tokens

    @property
    def documents_per_s(self) -> float | None:
        """The rate of this run, None before the first unit is finished."""
        return (self.n_documents - self.n_left_done) / self.seconds if self.seconds else None

    @property
    def tokens_per_s(self) -> float | None:
        """The rate in tokens, None before the first unit is finished."""
        return self.n_new_tokens / self.seconds if self.seconds else None

    @property
    def left_s(self) -> float | None:
        """The remaining seconds, None if they cannot be estimated."""
        if self.of_documents is None or not self.documents_per_s:
            return None
        return (self.of_documents - self.n_documents) / self.documents_per_s

    def __str__(self) -> str:
        """`320 of 3,000 documents, 8.1 documents/s, 950 tokens/s, 5 min left, 2 bad, 2 workers with 144 to 176`."""
        total = "" if self.of_documents is None else f" of {self.of_documents:,}"
        parts = [f"{self.n_documents:,}{total} documents"]
        if self.documents_per_s is not None and self.tokens_per_s is not None:
            parts += [f"{self.documents_per_s:.3g} documents/s", f"{self.tokens_per_s:,.0f} tokens/s"]
        parts += [f"{seconds_text(self.left_s)} left"] if self.left_s else []
        parts += [f"{self.n_bad:,} bad"] if self.n_bad else []
        if (n_workers := len(self.by_worker)) > 1:
            fewest, most = min(self.by_worker.values()), max(self.by_worker.values())
            parts.append(f"{n_workers:,} workers with {fewest:,} to {most:,}")
        return ", ".join(parts)

    def to_json(self) -> str:
        """The numbers and rates as a line of JSON."""
        rates = {"documents_per_s": self.documents_per_s, "tokens_per_s": self.tokens_per_s, "left_s": self.left_s}
        return json.dumps({"progress": asdict(self) | rates})


ReportScan = Callable[[ScanProgress], None]


@contextmanager
def progress_on_stderr(*, as_json: bool) -> Iterator[ReportScan]:
    """A callback that shows the progress from time to time, and the end exactly once, in the form that suits stderr."""
    if as_json:
        yield _every(_JSON_EVERY_S, lambda state: stderr_line(state.to_json()), last=0.0)
    elif is_interactive():
        with progress(has_time_left=False) as draw:
            yield _every(0.0, lambda state: draw(state.n_documents / (state.of_documents or 1), str(state)), last=0.0)
    else:
        yield _every(_NOTE_EVERY_S, lambda state: note(str(state)), last=monotonic())


def _every(seconds: float, show: ReportScan, *, last: float) -> ReportScan:
    is_over = False

    def report(state: ScanProgress) -> None:
        nonlocal last, is_over
        is_end = state.n_documents == state.of_documents and state.seconds > 0
        if not is_over and (is_end or monotonic() - last >= seconds):
            last, is_over = monotonic(), is_end
            show(state)

    return report
