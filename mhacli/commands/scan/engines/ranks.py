"""Ranks: processes started by `torchrun` or `srun` that compute different units into the same folder.

They do not communicate: any of them may end, and the scan may resume with another number of processes.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import torch

from mhacli.commands.scan.request import ScanRequest
from mhacli.errors import UsageError


class Share(NamedTuple):
    """The units that this process computes: every `n_ranks`-th, from number `rank` on."""

    rank: int = 0
    n_ranks: int = 1

    def has(self, number: int) -> bool:
        """Whether this process computes the unit of this number."""
        return number % self.n_ranks == self.rank


def share_here() -> Share | None:
    """The share of this process by RANK and WORLD_SIZE; None unless both are set. Raises `UsageError` for impossible values."""
    rank, n_ranks = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or n_ranks is None:
        return None
    if not (rank.isdecimal() and n_ranks.isdecimal() and int(rank) < int(n_ranks)):
        raise UsageError(
            f"RANK={rank} and WORLD_SIZE={n_ranks} are not a number from 0 and a larger number of processes",
            hint="without these two variables the process computes all units",
        )
    return Share(int(rank), int(n_ranks))


def on_own_gpu(request: ScanRequest) -> ScanRequest:
    """The request of a rank on its own GPU: if several are visible, the one with the number LOCAL_RANK."""
    local, n_gpus = os.environ.get("LOCAL_RANK", ""), torch.cuda.device_count()
    if request.run.model.device not in ("auto", "cuda") or not local.isdecimal() or n_gpus < 2:
        return request
    return replace(request, given={**request.given, "device": f"cuda:{int(local) % n_gpus}"})
