"""Options of the workers of a scan: this process, workers of Ray, or one of several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mhacli.cli.console import note
from mhacli.cli.numbers import Integer
from mhacli.cli.options import number, option, option_group
from mhacli.errors import UsageError

if TYPE_CHECKING:
    from mhacli.commands.scan.engines.ranks import Share
    from mhacli.commands.scan.engines.single import Engine

_WORKERS, _MOST_WORKERS = "Workers", 100_000


@option_group
class EngineOptions:
    """The workers that the documents are distributed to. The result does not depend on them."""

    workers: Annotated[
        int | None,
        number(
            _WORKERS,
            Integer(1, _MOST_WORKERS),
            "Number of workers, each with the model in its memory (needs the extra scan). "
            "(default: this process alone; with --ray, as many as there is room for)",
            show_default=False,
            common=True,
        ),
    ] = None
    ray: Annotated[
        str | None,
        option(
            _WORKERS,
            "Compute on the Ray cluster at this address; auto: the cluster that this machine belongs to; local: a "
            "new one on this machine.",
            metavar="ADDRESS",
        ),
    ] = None
    cpus_per_worker: Annotated[
        int | None,
        number(
            _WORKERS,
            Integer(1, _MOST_WORKERS),
            "CPUs that Ray reserves for each worker. (default: as many as --threads)",
            show_default=False,
        ),
    ] = None

    def engine(self, n_threads: int) -> Engine:
        """The engine that distributes the units. Imports torch. Raises `UsageError` for options without effect."""
        if self.ray is None and self.workers is None:
            if self.cpus_per_worker is not None:
                raise UsageError("--cpus-per-worker has no effect without --workers or --ray")
            from mhacli.commands.scan.engines.single import SingleEngine

            return SingleEngine()
        from mhacli.commands.scan.engines.ray import RayEngine

        return RayEngine(self.ray or "local", self.workers, self.cpus_per_worker or n_threads, note)

    def share(self) -> Share:
        """The part of the scan that this process computes. Imports torch. Raises `UsageError` for workers in a rank."""
        from mhacli.commands.scan.engines.ranks import Share, share_here

        share = share_here()
        if share is not None and (self.ray is not None or self.workers is not None):
            raise UsageError(
                f"{'--ray' if self.ray is not None else '--workers'} does not work in a rank (RANK and WORLD_SIZE are set)",
                hint="one process with --ray uses all nodes of a Ray cluster",
            )
        return share or Share(0, 1)
