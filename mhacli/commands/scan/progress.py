"""The progress of a scan."""

from __future__ import annotations

from dataclasses import dataclass, field


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
