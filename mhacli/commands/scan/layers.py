"""The layers of a model over many documents, with the worst result of each check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mhacli.record.heads import worst_check
from mhacli.record.record import InspectedLayer, SelfCheck

Layers = tuple[InspectedLayer, ...]


def worst_layers(longest: Layers, others: Sequence[Layers]) -> Layers:
    """The layers of the longest document with the worst check results among `others`, which include its own."""
    return tuple(_worst(layer, same) for layer, *same in zip(longest, *others, strict=True))


def _worst(layer: InspectedLayer, same: Sequence[InspectedLayer]) -> InspectedLayer:
    checks = tuple(worst_check(of_name) for of_name in zip(*(other.survey.checks for other in same), strict=True))
    reasons = tuple(dict.fromkeys(reason for other in same for reason in other.unverified))
    return replace(
        layer,
        verified=all(other.verified for other in same),
        unverified=reasons,
        self_check=SelfCheck.of(checks),
        survey=replace(layer.survey, checks=checks),
    )
