"""The progress of a scan on stderr: a bar on a terminal, JSON lines for programs, a line a minute for logs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import monotonic
from typing import TYPE_CHECKING

from mhacli.cli.console import is_interactive, note, progress, stderr_line
from mhacli.render.base.format import seconds_text

if TYPE_CHECKING:
    from mhacli.commands.scan.progress import ScanProgress

_JSON_EVERY_S, _NOTE_EVERY_S = 1.0, 60.0
ShowProgress = Callable[["ScanProgress"], None]


@dataclass
class ScanReport:
    """Shows the progress of a scan at most every `every_s` seconds, and its end exactly once."""

    show: ShowProgress
    every_s: float = 0.0
    _last: float = 0.0
    _is_over: bool = False

    @classmethod
    @contextmanager
    def on_stderr(cls, *, as_json: bool) -> Iterator[ScanReport]:
        """The report that suits stderr."""
        if as_json:
            yield cls(_as_json, _JSON_EVERY_S)
        elif is_interactive():
            with progress(has_time_left=False) as report_progress:
                yield cls(lambda state: report_progress(_fraction(state), progress_text(state)))
        else:
            yield cls(lambda state: note(progress_text(state)), _NOTE_EVERY_S, monotonic())

    def report_progress(self, state: ScanProgress) -> None:
        """Shows the progress if it is time."""
        is_end = state.n_documents == state.of_documents and state.seconds > 0
        if not self._is_over and (is_end or monotonic() - self._last >= self.every_s):
            self._last, self._is_over = monotonic(), is_end
            self.show(state)

    @staticmethod
    def note(message: str) -> None:
        """Prints a message."""
        note(message)

    @staticmethod
    def stopping() -> None:
        """Confirms that Ctrl-C was pressed."""
        note("finishing the documents in progress; press Ctrl-C again to stop at once")


def progress_text(progress: ScanProgress) -> str:
    """`320 of 3,000 documents, 8.1 documents/s, 950 tokens/s, 5 min left, 2 bad, 2 workers with 144 to 176`."""
    total = "" if progress.of_documents is None else f" of {progress.of_documents:,}"
    parts = [f"{progress.n_documents:,}{total} documents"]
    if progress.documents_per_s is not None and progress.tokens_per_s is not None:
        parts += [f"{progress.documents_per_s:.3g} documents/s", f"{progress.tokens_per_s:,.0f} tokens/s"]
    if progress.left_s:
        parts.append(f"{seconds_text(progress.left_s)} left")
    parts += [f"{progress.n_bad:,} bad"] if progress.n_bad else []
    if (n_workers := len(progress.by_worker)) > 1:
        fewest, most = min(progress.by_worker.values()), max(progress.by_worker.values())
        parts.append(f"{n_workers:,} workers with {fewest:,} to {most:,}")
    return ", ".join(parts)


def _fraction(progress: ScanProgress) -> float:
    return progress.n_documents / progress.of_documents if progress.of_documents else 0.0


def _as_json(progress: ScanProgress) -> None:
    rates = {
        "documents_per_s": progress.documents_per_s,
        "tokens_per_s": progress.tokens_per_s,
        "left_s": progress.left_s,
    }
    stderr_line(json.dumps({"progress": asdict(progress) | rates}))
