"""Ranks: processes that `torchrun` or `srun` began, each of which computes every so many-th unit into the same folder.

They need nothing of each other: any of them may end, and begin again in another number of processes.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import torch

from mhacli.errors import UsageError
from mhacli.requests.scan import ScanRequest


class Share(NamedTuple):
    """The units of one of several processes: those whose number has the remainder `rank` by `world_size`."""

    rank: int
    world_size: int


def share_here() -> Share | None:
    """The share of this process by RANK and WORLD_SIZE; None where they are not both set. Raises `UsageError` for other words."""
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world_size is None:
        return None
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise UsageError(
            f"RANK={rank} and WORLD_SIZE={world_size} are not a number from 0 and a larger number of processes",
            hint="without these two variables the process computes all units",
        )
    return Share(int(rank), int(world_size))


def on_own_gpu(request: ScanRequest) -> ScanRequest:
    """The request of a rank: where it sees several GPUs, it takes that with the number of LOCAL_RANK."""
    local, n_gpus = os.environ.get("LOCAL_RANK", ""), torch.cuda.device_count()
    if request.device not in ("auto", "cuda") or not local.isdecimal() or n_gpus < 2:
        return request
    return replace(request, device=f"cuda:{int(local) % n_gpus}")
