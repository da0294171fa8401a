"""The walkthrough study: one layer observed site by site, by one of three routes, and a cell followed all the way."""

from __future__ import annotations

from dataclasses import replace

import torch

from mhacli.attention.routes import ROUTES
from mhacli.checkpoints.mha_weights import LayerFile
from mhacli.compute.base.head_statistics import finite
from mhacli.compute.base.setup import Setup
from mhacli.compute.layer.cell import NEEDED, follow
from mhacli.compute.layer.run import Options, largest_difference, prepare, record_run
from mhacli.requests.plan import Place, require_inside
from mhacli.results.record.record import Record
from mhacli.results.record.sections import RouteCheck
from mhacli.spec.config import Config
from mhacli.text.encode import Encoded


def walk(
    encoded: Encoded,
    config: Config,
    *,
    route: str = "separate",
    values: bool = False,
    place: Place | None = None,
    source: LayerFile | None = None,
    options: Options = Options(),
) -> Record:
    """A record whose trace is that of `route`, checked against the other routes; with `values`, each tensor's numbers.

    `place` adds the cell's whole story. Raises `MhaError` as `inspect` does, and `UsageError` for a place outside.
    """
    resolved = config.resolved() if source is None else source.config
    if place is not None:
        require_inside(place, encoded, resolved)
    setup, plan = prepare(encoded, resolved, source, options)
    with torch.no_grad():
        record, observed = record_run(setup, plan, options, route=route, values=values, also=NEEDED if place else ())
        return replace(
            record,
            routes=compare_routes(setup, tolerance=2 * record.self_check.tolerance),
            cell=None if place is None else follow(setup, observed, place),
        )


def compare_routes(setup: Setup, *, tolerance: float) -> tuple[RouteCheck, ...]:
    """Every route's output against that of the separate projections, with the sites that it passes.

    `tolerance` is twice that of one output, since both may err.
    """
    reference = setup.run()
    checks = []
    for name in ROUTES:
        sites: list[str] = []
        out = setup.run(lambda site, tensor, passed=sites, **_: passed.append(site), name)
        difference = largest_difference(out, reference)
        checks.append(RouteCheck(name, tuple(sites), finite(difference), tolerance, difference <= tolerance))
    return tuple(checks)
