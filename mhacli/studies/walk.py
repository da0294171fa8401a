"""The walkthrough study: one layer observed site by site, by one of three routes, and a cell followed all the way."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mhacli.attention.core import per_query_head
from mhacli.attention.routes import ROUTES
from mhacli.config import Config
from mhacli.layerfile import LayerFile
from mhacli.plan import Place, require_inside
from mhacli.record import Cell, Record, RouteCheck
from mhacli.studies.inspect import Observed, Options, finite, largest_difference, prepare, record_run
from mhacli.studies.setup import Setup
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
        record, observed = record_run(setup, plan, options, route=route, values=values, also=("scores", "z"))
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


def follow(setup: Setup, observed: Observed, place: Place) -> Cell:
    """The numbers behind one cell, taken from the tensors of the observed run."""
    b, h, i, j = place.sequence, place.head, place.query, place.key
    n_heads = setup.config.n_heads
    k, v = (per_query_head(observed.tensor(name), n_heads) for name in ("k", "v"))
    n_keys = len((setup.encoded.context or setup.encoded.sequences)[b].tokens)
    allowed = observed.visible[b, 0, i].tolist()
    scores = observed.tensors["scores"][b, h, i].tolist()
    return Cell(
        sequence=b,
        head=h,
        query=i,
        key=j,
        q=_numbers(observed.tensor("q")[b, h, i]),
        k=_numbers(k[b, h, j]),
        v=_numbers(v[b, h, j]),
        qk=observed.tensors["qk"][b, h, i, j].item(),
        scale=setup.config.scale or 0.0,
        softcap=setup.config.softcap,
        allowed=allowed[j],
        score=scores[j] if allowed[j] else None,
        scores_row=tuple(score if ok else None for score, ok in zip(scores[:n_keys], allowed, strict=False)),
        pattern_row=_numbers(observed.tensor("pattern")[b, h, i, :n_keys]),
        share=observed.tensor("shares")[b, h, i, j].item(),
        z=_numbers(observed.tensors["z"][b, h, i]),
    )


def _numbers(tensor: Tensor) -> tuple[float, ...]:
    return tuple(tensor.double().tolist())
