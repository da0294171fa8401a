"""The progress of a scan, and its lines on stderr: a bar on a terminal, JSON lines for programs, a line a minute for logs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

from mhacli.cli.console import is_interactive, note, progress, stderr_line
from mhacli.io.progress import no_progress
from mhacli.render.base.format import seconds_text


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

    def add(self, n_good: int, n_bad: int, n_tokens: int, worker: str | None, seconds: float) -> None:
        """Counts documents that a worker has finished, `seconds` after the start, or for None an earlier run."""
        self.n_documents += n_good + n_bad
        self.n_bad += n_bad
        self.n_tokens += n_tokens
        if worker is None:
            self.n_left_done += n_good + n_bad
        else:
            self.n_new_tokens += n_tokens
            self.seconds = seconds
            self.by_worker[worker] = self.by_worker.get(worker, 0) + n_good + n_bad

    def to_dict(self) -> dict[str, Any]:
        """The numbers, with the rates of this run and the remaining seconds, None where they cannot be estimated."""
        n_new = self.n_documents - self.n_left_done
        documents_per_s, tokens_per_s = (n / self.seconds if self.seconds else None for n in (n_new, self.n_new_tokens))
        n_left = None if self.of_documents is None else self.of_documents - self.n_documents
        left_s = n_left / documents_per_s if n_left is not None and documents_per_s else None
        return asdict(self) | {"documents_per_s": documents_per_s, "tokens_per_s": tokens_per_s, "left_s": left_s}

    def __str__(self) -> str:
        """`320 of 3,000 documents, 8.1 documents/s, 950 tokens/s, 5 min left, 2 bad`."""
        numbers = self.to_dict()
        total = "" if self.of_documents is None else f" of {self.of_documents:,}"
        text = f"{self.n_documents:,}{total} documents"
        if self.seconds:
            text += f", {numbers['documents_per_s']:.3g} documents/s, {numbers['tokens_per_s']:,.0f} tokens/s"
        if numbers["left_s"]:
            text += f", {seconds_text(numbers['left_s'])} left"
        return text + (f", {self.n_bad:,} bad" if self.n_bad else "")


@contextmanager
def progress_on_stderr(*, as_json: bool) -> Iterator[Callable[[ScanProgress], None]]:
    """A callback that shows the progress from time to time, and the end once, in the form that suits stderr."""
    every_s = 1.0 if as_json else 0.0 if is_interactive() else 60.0
    last, is_over = monotonic() if every_s > 1 else 0.0, False
    with nullcontext(no_progress) if as_json else progress(has_time_left=False) as draw:

        def report(state: ScanProgress) -> None:
            nonlocal last, is_over
            is_end = state.n_documents == state.of_documents and state.seconds > 0
            if is_over or not (is_end or monotonic() - last >= every_s):
                return
            last, is_over = monotonic(), is_end
            if as_json:
                stderr_line(json.dumps({"progress": state.to_dict()}))
            elif every_s:
                note(str(state))
            else:
                draw(state.n_documents / (state.of_documents or 1), str(state))

        yield report
