"""A look at a few heads: both passes, the arrays that are kept of them, and the checks that are always on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mhacli.attention.core import visible_cells
from mhacli.attention.fused import Attended
from mhacli.attention.rectangles import indices
from mhacli.attention.scores import Scores, Shares
from mhacli.attention.stats import Asked, Statistics, distances_folded, doubling_steps, in_steps, shares_of, summarise
from mhacli.attention.tiled import attend_lse, pattern_of
from mhacli.errors import MhaError
from mhacli.heads import Check, HeadStatistics, Kept
from mhacli.studies.inspect import TOLERANCE, largest_difference
from mhacli.studies.setup import Setup
from mhacli.studies.statistics import Baseline, Found, finite, has_keys, head_statistics

CHECKED_ROWS, _MOST, _HUGE = 16, 1e-2, 1e4
"""Queries, evenly spread, whose z is computed again from their shares; what no check forgives; and
scores that may be too large to be told apart."""


class Look(NamedTuple):
    """What was found of some neighbouring heads: what is said of them, arrays `[batch, head, …]` on the CPU, and checks."""

    said: tuple[HeadStatistics, ...]
    arrays: Mapping[str, Tensor]
    kernel: str
    checks: tuple[Check, ...]


class Steps(NamedTuple):
    """Who hears how far a look is: that the first pass is done, and of the cells that the second has looked at."""

    first_pass: Callable[[], None]
    cells: Callable[[int], None]


def look(
    setup: Setup,
    scores: Scores,
    v: Float[Tensor, "batch kv_head key d_v"],
    heads: range,
    *,
    asked: Asked,
    sink_share: float,
    baseline: Baseline,
    kept: Kept,
    steps: Steps,
    allow_nonfinite: bool,
) -> Look:
    """Everything about some heads, whose `scores` and values these are; the `baseline` is that of all heads."""
    attended = attend_lse(scores, v)
    steps.first_pass()
    pattern = pattern_of(scores, attended.lse)
    statistics = summarise(pattern, asked, steps.cells)
    seen = has_keys(statistics)
    own_baseline = baseline.of_heads(heads)
    is_huge = ~(attended.lse.abs() < _HUGE)
    is_lost = (own_baseline.visible > 0) & is_huge & ~(seen & attended.lse.isfinite())
    if not allow_nonfinite and bool(is_lost.any()):
        raise _overflow(heads, is_lost, setup)
    found = Found(heads, statistics, torch.where(seen, statistics.peak + attended.lse, -torch.inf), pattern)
    arrays = {
        "lse": torch.where(seen, attended.lse, torch.nan),
        "max_score": torch.where(seen, found.top_score, torch.nan),
        **_arrays(statistics, setup, asked.block),
        **_cells(pattern, kept),
    }
    if kept.z:
        arrays["z"] = attended.z
    return Look(
        head_statistics(found, own_baseline, setup, sink_share=sink_share),
        {name: array.cpu() for name, array in arrays.items()},
        attended.kernel,
        check_statistics(
            found, attended, v, setup, is_finite=all(bool(t.isfinite().all()) for t in (scores.q, scores.k, v))
        ),
    )


def _overflow(heads: range, is_lost: Bool[Tensor, "batch head query"], setup: Setup) -> MhaError:
    """What to say of scores so large that the shares of a query do not add up, and in which heads."""
    of_heads = is_lost.any(dim=-1).any(dim=0).expand(len(heads)).tolist()
    named = ", ".join(str(head) for head, is_bad in zip(heads, of_heads, strict=True) if is_bad)
    return MhaError(
        f"the scores must be small enough for {setup.config.dtype}, got some whose shares do not add up in head {named}",
        hint="--dtype float64 or a smaller --scale may help; --allow-nonfinite looks anyway",
        code="not-finite",
    )


def _arrays(statistics: Statistics, setup: Setup, block: int) -> dict[str, Tensor]:
    """The vectors and the map as records keep them; NaN for queries without keys."""
    seen = has_keys(statistics)
    per_query = {
        "entropy": statistics.entropy,
        "participation": 1 / statistics.squares,
        "distance": statistics.distance,
        "sink": statistics.first,
    }
    return {
        **{name: torch.where(seen, row, torch.nan) for name, row in per_query.items()},
        "received": statistics.received,
        "map": map_of(statistics, block),
        "profile": profile_of(statistics, setup),
    }


def map_of(statistics: Statistics, block: int) -> Float[Tensor, "batch head query_block key_block"]:
    """The mean share that the queries of a block give a block of keys; queries without keys do not count."""
    seen = has_keys(statistics).to(statistics.map.dtype)
    n_seen = torch.nn.functional.pad(seen, (0, -seen.shape[-1] % block)).unflatten(-1, (-1, block)).sum(dim=-1)
    means: Tensor = statistics.map / n_seen.clamp(min=1)[..., None]
    return means


def profile_of(statistics: Statistics, setup: Setup) -> Float[Tensor, "batch head step"]:
    """The share of all mass at each distance, in the bins of `profile_steps`."""
    zero, steps = setup.facts.q_len - 1, profile_steps(setup)
    rows = [in_steps(distances_folded(profile, zero), steps) for profile in statistics.profile]
    masses: Tensor = statistics.mass.double().sum(dim=-1)[..., None].clamp(min=1)
    return torch.stack(rows) / masses


def profile_steps(setup: Setup) -> tuple[int, ...]:
    """The upper ends of the distances in a profile."""
    return doubling_steps(max(setup.facts.q_len, setup.facts.k_len) - 1)


def _cells(pattern: Shares, kept: Kept) -> dict[str, Tensor]:
    """The cells that were asked for, by sequence and head: a corner, and the strongest keys of queries."""
    arrays = {}
    places = [[(b, h) for h in range(pattern.shape[1])] for b in range(pattern.shape[0])]
    if kept.corner is not None:
        c = kept.corner
        spans = (range(c.first_query, c.first_query + c.n_queries), range(c.first_key, c.first_key + c.n_keys))
        shares = torch.stack([torch.stack([shares_of(pattern, p, *spans) for p in row]) for row in places])
        seen = visible_cells(pattern.allowed, *(indices(span, shares) for span in spans))
        arrays["corner"] = shares if seen is None else torch.where(seen, shares, torch.nan)
    if kept.queries:
        tops = [[_top_keys(pattern, p, kept) for p in row] for row in places]
        arrays["top_shares"], arrays["top_keys"] = (
            torch.stack([torch.stack([top[part] for top in row]) for row in tops]) for part in (0, 1)
        )
    return arrays


def _top_keys(pattern: Shares, place: tuple[int, int], kept: Kept) -> tuple[Tensor, Tensor]:
    """The largest shares of each asked query and their keys, −1 where a share is 0."""
    keys = range(pattern.shape[3])
    n_keys = min(kept.top, len(keys))
    tops = [shares_of(pattern, place, range(query, query + 1), keys).topk(n_keys, dim=1) for query in kept.queries]
    shares, found = (torch.cat([top[part] for top in tops]) for part in (0, 1))
    return shares, torch.where(shares > 0, found, -1)


def check_statistics(
    found: Found, attended: Attended, v: Float[Tensor, "batch kv_head key d_v"], setup: Setup, *, is_finite: bool = True
) -> tuple[Check, ...]:
    """What must hold of any statistics: it notices a wrong base of the logarithm, head or mask.

    Every query gives 1 in all, so that what the keys receive and the maps add up to the number of queries; and z of some
    queries, from their shares, is what the kernel says. The tolerance is that of shares whose scores are rounded in the
    dtype of the maths, and for z that of the dtype. Where q, k or v are not finite, what is not finite is passed over.
    """
    statistics, wide = found.statistics, found.statistics.mass.dtype
    seen = has_keys(statistics)
    n_seen = seen.sum(dim=-1).double()
    largest = found.top_score.masked_fill(~seen, 0.0).abs().amax().item()
    rounding = min(_MOST, TOLERANCE[str(wide).removeprefix("torch.")] + 16 * torch.finfo(wide).eps * largest)
    sums = {
        "each query gives 1": (statistics.mass - seen.to(wide)).abs().amax(dim=-1).double(),
        "keys receive one per query": (statistics.received.double().sum(dim=-1) - n_seen).abs() / n_seen.clamp(min=1),
        "maps add up to one per query": (statistics.map.double().sum(dim=(-1, -2)) - n_seen).abs()
        / n_seen.clamp(min=1),
    }
    if not is_finite:
        sums = {name: error.nan_to_num(nan=0.0) for name, error in sums.items()}
    checks = [_check(name, error.max().item(), rounding) for name, error in sums.items()]
    error, magnitude = _z_again(found.pattern, attended.z, v)
    return (
        *checks,
        _check("z of the shares is the kernel's", error, (rounding + TOLERANCE[setup.config.dtype]) * magnitude),
    )


def _check(name: str, error: float, tolerance: float) -> Check:
    return Check(name, finite(error), tolerance, error <= tolerance)


def _z_again(pattern: Shares, z: Tensor, v: Tensor) -> tuple[float, float]:
    """The largest distance of z from the sums of shares and values, over spread queries, and the largest of magnitudes."""
    batch, n_heads, n_queries, n_keys = pattern.shape
    queries = (
        torch.linspace(0, n_queries - 1, min(CHECKED_ROWS, n_queries), dtype=torch.float64).round().long().tolist()
    )
    group, error, magnitude = n_heads // v.shape[1], 0.0, 0.0
    for place in ((b, h) for b in range(batch) for h in range(n_heads)):
        shares = torch.cat([shares_of(pattern, place, range(i, i + 1), range(n_keys)) for i in queries]).double()
        values = v[place[0], place[1] // group].double()
        error = max(error, largest_difference(shares @ values, z[place][queries]))
        magnitude = max(magnitude, (shares @ values.abs()).nan_to_num(nan=0.0, posinf=0.0).amax().item())
    return error, magnitude
