"""Two attentions with the same weights, run on the same rows: the first site at which they depart, and the lines of both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mhacli.adapters.usercode.user_attention import Inputs, MaskForm, Operation, UserAttention
from mhacli.compute.check.inputs import HIDDEN, TOLERANCE, inputs_for
from mhacli.compute.user_trace.dataflow import Flow
from mhacli.compute.user_trace.trace import Pass, watched
from mhacli.results.check import Departure

Site = Literal["q", "k", "v", "qk", "scores", "pattern", "z", "concat", "out"]
_SCORING: tuple[Site, ...] = ("q", "k", "qk", "scores")
_BEFORE: tuple[Site, ...] = ("q", "k", "v", "qk", "scores", "pattern", "z")
_BEHIND: tuple[Site, ...] = ("concat", "out")


class Forms(NamedTuple):
    """How one of the two writes the mask and the padding of the inputs."""

    mask: MaskForm | None = None
    padding: MaskForm | None = None


@dataclass(frozen=True)
class _Made:
    """What one of the two makes at a site: a tensor for each loop over heads, and the operations that led to the first of them,
    the last one first."""

    tensors: tuple[Tensor, ...]
    history: tuple[Operation, ...]


def departure(
    one: UserAttention, other: UserAttention, inputs: Inputs, forms: tuple[Forms, Forms], seed: int
) -> Departure | None:
    """The first site, in the order of execution, from which on the two differ; None where their sites cannot be told. Raises
    what either raises.

    A difference that a later site takes back is none, such as queries that are scaled in place of scores; and of scores
    that are a multiple of the other's, the site is that at which the factor came in.
    """
    mine, theirs = (
        _sites(watched(subject, inputs_for(subject, inputs), seed, mask=form.mask, padding=form.padding))
        for subject, form in zip((one, other), forms, strict=True)
    )
    factors = {site: factor_of(mine[site].tensors, theirs[site].tensors) for site in mine if site in theirs}
    site = first_apart(factors)
    if site is None:
        return None
    before = [name for name in list(factors)[: list(factors).index(site)] if factors[name] == 1.0]
    here, there = _makers(mine[site], theirs[site])
    own = (None, None, "") if here is None else (here.file, here.line, here.source)
    others = (None, None, "") if there is None else (there.file, there.line, there.source)
    return Departure(site, before[-1] if before else None, *own, *others)


def _makers(mine: _Made, theirs: _Made) -> tuple[Operation | None, Operation | None]:
    """The operations that make a site; where both stand at one line, such as of a helper that both call, those before it."""
    for here, there in zip(mine.history, theirs.history, strict=False):
        if (here.file, here.line) != (there.file, there.line):
            return here, there
    return next(iter(mine.history), None), next(iter(theirs.history), None)


def first_apart(factors: Mapping[Site, float | None]) -> Site | None:
    """The site at which two computations part, from how their sites compare: 1 where they are the same, another number where
    one is that multiple of the other, None where they differ. What one of the two does not make is absent.

    >>> first_apart({"q": 0.5, "qk": 0.5, "scores": 1.0, "pattern": None, "z": None, "out": None})
    'pattern'
    """

    def differs(site: Site) -> bool:
        return site in factors and factors[site] != 1.0

    if factors.get("z") == 1.0:
        return next((site for site in _BEHIND if differs(site)), None)
    for site in _BEFORE:
        if _is_taken_on(site, factors) if site in _SCORING else differs(site):
            return site
    return next((site for site in _BEHIND if differs(site)), None)


def _is_taken_on(site: Site, factors: Mapping[Site, float | None]) -> bool:
    """Whether a difference before the softmax is still there in what the softmax reads: as it is, or as the same factor."""
    if factors.get(site, 1.0) == 1.0 or factors.get("pattern") == 1.0:
        return False
    end = factors.get("scores", factors.get("qk", math.nan))
    own = factors[site]
    if own is None or end is None:
        return own is None and end != 1.0
    return math.isclose(own, end, rel_tol=1e-3) if not math.isnan(end) else False


# -------------------------------------------------------------------------------------------------------------- the sites


def _sites(one: Pass) -> dict[Site, _Made]:
    """What was made at each site that can be told, in the order of execution."""
    flow, found = one.flow, one.roles.attentions
    joined: list[int | None] = [index for index, site in one.roles.sites.items() if site == "concat"]
    places: dict[Site, list[int | None]] = {
        "q": [a.q for a in found],
        "k": [a.k for a in found],
        "v": [a.v for a in found],
        "qk": [a.qk for a in found if a.softmax != a.z],
        "scores": [flow.made_by[a.softmax][0] for a in found if a.softmax != a.z],
        "pattern": [a.pattern for a in found],
        "z": [a.z for a in found],
        "concat": joined[-1:],
    }
    made: dict[Site, _Made] = {}
    for site, indexes in places.items():
        known = [index for index in dict.fromkeys(indexes) if index is not None]
        if known:
            made[site] = _Made(tuple(flow.operations[index].output for index in known), _history(flow, known[0]))
    made["out"] = _Made((one.answer.out,), _history(flow, len(flow.operations) - 1))
    return made


def _history(flow: Flow, index: int | None) -> tuple[Operation, ...]:
    """The operation, that which made the first of its inputs that depends on the rows, and so on."""
    found: list[Operation] = []
    while index is not None and index >= 0:
        found.append(flow.operations[index])
        index = next((made for made in flow.made_by[index] if made is not None and flow.live[made]), None)
    return tuple(found)


# ----------------------------------------------------------------------------------------------------------- the numbers


def factor_of(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float | None:
    """The factor between what two computations make at a site, 1 where that is the same; None where there is none.

    Axes may be in another order. Where heads are folded, looped over or repeated, only the numbers are compared, in any order.
    """
    if len(mine) == len(theirs) == 1 and sorted(_shape(mine[0])) == sorted(_shape(theirs[0])):
        factors = [_factor(_plain(mine[0]), turned) for turned in _turned(_plain(theirs[0]), _shape(mine[0]))]
        return 1.0 if 1.0 in factors else next((one for one in factors if one is not None), None)
    a, b = (torch.cat([_plain(tensor).flatten() for tensor in some]).sort().values for some in (mine, theirs))
    few, many = sorted((a.numel(), b.numel()))
    if not few or many % few:
        return None
    a, b = (numbers.repeat_interleave(many // numbers.numel()) for numbers in (a, b))
    return _factor(a, b)


def _plain(tensor: Tensor) -> Tensor:
    """In float64 on the CPU without axes of size 1, masked numbers as −∞."""
    numbers = tensor.detach().to("cpu", torch.float64).squeeze()
    return numbers.masked_fill(numbers < HIDDEN, -math.inf)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.squeeze().shape)


def _turned(tensor: Tensor, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """The tensor with its axes in every order that gives a shape."""
    for order in itertools.permutations(range(tensor.ndim)):
        if tuple(tensor.shape[axis] for axis in order) == shape:
            yield tensor.permute(order)


def _factor(mine: Tensor, theirs: Tensor) -> float | None:
    if not torch.equal(mine.isfinite(), theirs.isfinite()):
        return None
    a, b = mine[mine.isfinite()], theirs[theirs.isfinite()]
    largest = max((t.abs().max().item() for t in (a, b) if t.numel()), default=0.0)
    if largest == 0.0 or (a - b).abs().max().item() <= TOLERANCE * largest:
        return 1.0
    factor = ((a * b).sum() / b.square().sum().clamp(min=1e-300)).item()
    return factor if factor and (a - factor * b).abs().max().item() <= TOLERANCE * a.abs().max().item() else None
