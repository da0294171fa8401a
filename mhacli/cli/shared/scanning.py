"""How far a scan is, on stderr: a bar on a terminal, JSON lines for programs, a line a minute for logs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import monotonic
from typing import TYPE_CHECKING

from mhacli.cli.streams import is_lively, note, progress, stderr_line
from mhacli.render.base.format import seconds_text

if TYPE_CHECKING:
    from mhacli.compute.scan.progress import ScanProgress

_JSON_EVERY_S, _NOTE_EVERY_S = 1.0, 60.0
Shown = Callable[["ScanProgress"], None]


@dataclass
class ScanReport:
    """Says how far a scan is, no more often than every so many seconds, and the end always and once."""

    show: Shown
    every_s: float = 0.0
    _last: float = 0.0
    _is_over: bool = False

    @classmethod
    @contextmanager
    def on_stderr(cls, *, as_json: bool) -> Iterator[ScanReport]:
        """The report for this stderr."""
        if as_json:
            yield cls(_as_json, _JSON_EVERY_S)
        elif is_lively():
            with progress(has_time_left=False) as tell:
                yield cls(lambda done: tell(_share(done), in_words(done)))
        else:
            yield cls(lambda done: note(in_words(done)), _NOTE_EVERY_S, monotonic())

    def tell(self, done: ScanProgress) -> None:
        """How far the scan is."""
        is_end = done.n_documents == done.of_documents and done.seconds > 0
        if not self._is_over and (is_end or monotonic() - self._last >= self.every_s):
            self._last, self._is_over = monotonic(), is_end
            self.show(done)

    @staticmethod
    def note(message: str) -> None:
        """What a reader must know."""
        note(message)

    @staticmethod
    def stopping() -> None:
        """Ctrl-C was pressed."""
        note("finishing the documents in progress; press Ctrl-C again to stop at once")


def in_words(done: ScanProgress) -> str:
    """`320 of 3,000 documents, 8.1 documents/s, 950 tokens/s, 5 min left, 2 bad, 2 workers with 144 to 176`."""
    of = "" if done.of_documents is None else f" of {done.of_documents:,}"
    parts = [f"{done.n_documents:,}{of} documents"]
    if done.documents_per_s is not None and done.tokens_per_s is not None:
        parts += [f"{done.documents_per_s:.3g} documents/s", f"{done.tokens_per_s:,.0f} tokens/s"]
    if done.left_s:
        parts.append(f"{seconds_text(done.left_s)} left")
    parts += [f"{done.n_bad:,} bad"] if done.n_bad else []
    if (n_workers := len(done.by_worker)) > 1:
        least, most = min(done.by_worker.values()), max(done.by_worker.values())
        parts.append(f"{n_workers:,} workers with {least:,} to {most:,}")
    return ", ".join(parts)


def _share(done: ScanProgress) -> float:
    return done.n_documents / done.of_documents if done.of_documents else 0.0


def _as_json(done: ScanProgress) -> None:
    rates = {"documents_per_s": done.documents_per_s, "tokens_per_s": done.tokens_per_s, "left_s": done.left_s}
    stderr_line(json.dumps({"progress": asdict(done) | rates}))
