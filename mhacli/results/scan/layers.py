"""The layers of a model over many documents: their checks, each where it came nearest to its tolerance or passed it most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mhacli.results.record.head_statistics import worst_check
from mhacli.results.record.record import InspectedLayer, SelfCheck

Layers = tuple[InspectedLayer, ...]


def worst_layers(longest: Layers, others: Sequence[Layers]) -> Layers:
    """The layers of the longest document with the worst of the checks of all, its own among `others`."""
    return tuple(_worst(layer, same) for layer, *same in zip(longest, *others, strict=True))


def _worst(layer: InspectedLayer, same: Sequence[InspectedLayer]) -> InspectedLayer:
    checks = tuple(worst_check(of_name) for of_name in zip(*(own.survey.checks for own in same), strict=True))
    reasons = tuple(dict.fromkeys(reason for own in same for reason in own.unverified))
    return replace(
        layer,
        verified=all(own.verified for own in same),
        unverified=reasons,
        self_check=SelfCheck.of(checks),
        survey=replace(layer.survey, checks=checks),
    )
