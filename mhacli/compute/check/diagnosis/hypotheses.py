"""Which layer, with which mistakes, gives what somebody's attention gave."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.attention.mistakes import Mistake, MistakeVariant
from mhacli.attention.mistakes.stages import RIGHT, ReferenceLayer, Stages, run
from mhacli.compute.check.inputs import Scene


class Made(NamedTuple):
    """A mistake in one of its variants."""

    mistake: Mistake
    variant: MistakeVariant


@dataclass(frozen=True)
class Hypothesis:
    """A layer with no mistake or some; `error` is the largest difference from what was answered, relative to the tolerance
    of each scene: 1 or less is a match."""

    layer: ReferenceLayer
    made: tuple[Made, ...] = ()
    error: float = math.inf

    @property
    def stages(self) -> Stages:
        """The reference with the mistakes in it."""
        return stages_with(self.made)

    @property
    def matches(self) -> bool:
        """Whether the difference is rounding."""
        return self.error <= 1.0


def stages_with(made: Iterable[Made]) -> Stages:
    """The right stages, with those of the mistakes in their place."""
    places: dict[str, Any] = {}
    for one in made:
        places |= {str(one.mistake.stage): one.variant.replacement, **one.variant.besides}
    return replace(RIGHT, **places)


def may_be_nan(made: Iterable[Made]) -> bool:
    """Whether one of the mistakes may leave nothing but NaN."""
    return any(one.mistake.may_be_nan for one in made)


def difference(layer: ReferenceLayer, stages: Stages, scene: Scene, *, may_be_nan: bool = False) -> float:
    """The largest difference from what was answered; infinite where shapes or NaN differ, the mistake cannot be made, or
    nothing but NaN is left, unless it `may_be_nan`.

    Rows that are not counted, and queries that may attend to nothing, are left out: there is no right answer to them.
    """
    try:
        with torch.no_grad():
            out, keep = run(stages, layer, scene.rows)
        if out.shape != scene.answer.shape:
            return math.inf
        counted = _counted(scene, keep, out)
    except Exception:  # a mistake that cannot be made here, or a norm of theirs that wants something else
        return math.inf
    mine, theirs = out[counted], scene.answer[counted]
    if not torch.equal(mine.isnan(), theirs.isnan()) or not mine.numel():
        return math.inf
    gap = (mine - theirs)[~mine.isnan()].abs()
    if gap.numel():
        return gap.max().item()
    return 0.0 if may_be_nan else math.inf


def _counted(scene: Scene, keep: Tensor | None, out: Tensor) -> Tensor:
    """Which rows of the output are compared, `[batch, query]`, or with the heads of a function."""
    counted = torch.ones(out.shape[:-1], dtype=torch.bool)
    if scene.counted is not None:
        counted &= scene.counted if out.ndim == 3 else scene.counted[:, None]
    if keep is not None:
        some = keep.any(dim=-1)  # [batch, head, query]
        counted &= some.all(dim=1) if out.ndim == 3 else some
    return counted


def tried(
    layer: ReferenceLayer, made: tuple[Made, ...], scenes: Sequence[Scene], enough: float = math.inf
) -> Hypothesis:
    """A hypothesis with its error over all scenes; given up when a scene is further off than `enough`."""
    stages, worst = stages_with(made), 0.0
    for scene in scenes:
        worst = max(worst, difference(layer, stages, scene, may_be_nan=may_be_nan(made)) / scene.tolerance)
        if worst > enough:
            break
    return Hypothesis(layer, made, worst)


def variants_of(mistakes: Iterable[Mistake]) -> list[Made]:
    """Every mistake in every variant that changes a stage."""
    return [Made(mistake, variant) for mistake in mistakes if mistake.stage for variant in mistake.variants]


def singles(
    layers: Iterable[ReferenceLayer], pool: Sequence[Made], scenes: Sequence[Scene], base: tuple[Made, ...]
) -> Iterator[Hypothesis]:
    """Each layer with the mistakes of `base` and one more."""
    taken = {one.mistake.stage for one in base}
    for layer in layers:
        for made in pool:
            if made.mistake.stage not in taken:
                yield tried(layer, (*base, made), scenes, enough=1.0)


def pairs(
    layers: Iterable[ReferenceLayer], pool: Sequence[Made], scenes: Sequence[Scene], base: tuple[Made, ...]
) -> Iterator[Hypothesis]:
    """Each layer with the mistakes of `base` and two more, at two stages."""
    taken = {one.mistake.stage for one in base}
    free = [made for made in pool if made.mistake.stage not in taken and not made.variant.is_rare]
    for layer in layers:
        for first, second in combinations(free, 2):
            if first.mistake.stage != second.mistake.stage:
                yield tried(layer, (*base, first, second), scenes, enough=1.0)
