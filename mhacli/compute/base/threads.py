"""Work on a CPU shared out among threads that each compute alone: none waits for the others after every small step.

torch lets all its threads meet behind each operation. Where another process takes a core, they wait for its time slice, which
is many times as long as an operation on a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def shared_out(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """The results of the jobs in their order, each computed by a thread of its own, as many at once as torch has threads."""
    n_threads = torch.get_num_threads()
    if len(jobs) == 1 or n_threads == 1:
        return [job() for job in jobs]
    try:
        with ThreadPoolExecutor(min(n_threads, len(jobs)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(_without_gradients, jobs))
    finally:
        torch.set_num_threads(n_threads)


def _without_gradients(job: Callable[[], T]) -> T:
    with torch.no_grad():
        return job()


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it torch computes with one thread: as quick as several for little work."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)
