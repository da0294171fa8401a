"""The processes that torchrun started for one model: gathers their results, and raises an error of one on all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed

from mhacli.errors import RANK_FAILED, MhaError
from mhacli.requests.device_map import n_ranks, this_rank

T = TypeVar("T")
_IS_OF_ALL = "is_of_all_ranks"
"""Marks an error that every rank has raised."""


@dataclass(frozen=True)
class Ranks:
    """This process, `rank`, of `n`. All must make the same calls in the same order."""

    rank: int
    n: int

    def gathered(self, make: Callable[[], T]) -> list[T]:
        """The results of `make` on all ranks, in order. An exception on one is raised on all."""
        made: T | None = None
        fault: Exception | None = None
        try:
            made = make()
        except MhaError as error:
            fault = error
        except Exception as error:
            fault = RuntimeError(f"{type(error).__name__}: {error}")  # an exception that other processes can unpickle
        everyone: list[Any] = [None] * self.n
        distributed.all_gather_object(everyone, (made, fault))
        for _, raised in everyone:
            if raised is not None:
                setattr(raised, _IS_OF_ALL, True)
                raise raised
        return [result for result, _ in everyone]

    def together(self, make: Callable[[], T]) -> T:
        """The result of `make` on this rank, after all ranks have finished. An exception on one is raised on all."""
        kept: list[T] = []
        self.gathered(lambda: kept.append(make()))
        return kept[0]

    @contextmanager
    def naming(self) -> Iterator[None]:
        """A context in which errors name this rank, unless all ranks have raised them: other ranks may wait in vain."""
        try:
            yield
        except Exception as fault:
            if getattr(fault, _IS_OF_ALL, False):
                raise
            message = fault.message if isinstance(fault, MhaError) else f"{type(fault).__name__}: {fault}"
            raise MhaError(f"rank {self.rank} of {self.n}: {message}", code=RANK_FAILED) from fault


def join_ranks() -> Ranks:
    """This process among those of torchrun, each with its own CUDA device if there are any. Raises `MhaError`."""
    if not distributed.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", this_rank())))
        try:
            distributed.init_process_group()
        except (ValueError, RuntimeError) as fault:
            raise MhaError(
                f"--device-map tp: the processes cannot reach each other: {fault!s:.300}",
                hint="torchrun --nproc-per-node N -m mhacli … starts them",
                code="no-ranks",
            ) from None
    return Ranks(this_rank(), n_ranks())
