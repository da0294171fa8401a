"""How far a scan is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .folder import Totals


@dataclass
class Progress:
    """The number of finished documents, including bad ones, and their total `of_documents` if it is
    known.

    Earlier runs have finished `n_left_done` of them, and each worker in this run those `by_worker`,
    with `n_new_tokens` in `seconds`. The rates are those of this run; `left_s` are the remaining
    seconds, None where they cannot be estimated.
    """

    n_documents: int = 0
    n_bad: int = 0
    n_tokens: int = 0
    of_documents: int | None = None
    n_left_done: int = 0
    n_new_tokens: int = 0
    seconds: float = 0.0
    by_worker: dict[str, int] = field(default_factory=dict)
    documents_per_s: float | None = None
    tokens_per_s: float | None = None
    left_s: float | None = None

    def add(self, unit: Totals, worker: str | None = None) -> None:
        """Counts the documents of a unit that a worker, or for None an earlier run, has
        finished.
        """
        n_documents = unit.n_documents + unit.n_bad
        self.n_documents += n_documents
        self.n_bad += unit.n_bad
        self.n_tokens += unit.n_tokens
        if worker is None:
            self.n_left_done += n_documents
            return
        self.n_new_tokens += unit.n_tokens
        self.by_worker[worker] = self.by_worker.get(worker, 0) + n_documents
        self.documents_per_s = (self.n_documents - self.n_left_done) / self.seconds
        self.tokens_per_s = self.n_new_tokens / self.seconds
        if self.of_documents is not None:
            self.left_s = (self.of_documents - self.n_documents) / self.documents_per_s

    def __str__(self) -> str:
        """`320 of 3,000 documents, 8.1 documents/s`."""
        total = "" if self.of_documents is None else f" of {self.of_documents:,}"
        text = f"{self.n_documents:,}{total} documents"
        return text + (f", {self.documents_per_s:.3g} documents/s" if self.documents_per_s else "")
