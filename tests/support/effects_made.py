"""Records with effects, made by hand."""

from __future__ import annotations

from dataclasses import replace

from mhacli.results.record.effect import Effect, EffectSummary, Verification
from mhacli.results.record.record import Record
from mhacli.results.record.tables import EffectTable
from support.layers_made import layered

VERIFIED = Verification(4, 1e-7, 1e-5, True, True)
SUMMARY = EffectSummary("d_logit", 2, "mat", 7, None, None, 3.5, -0.25, 0, 1e-6, 1, VERIFIED)


def head_effect(layer: int, head: int, change: float) -> Effect:
    return Effect(
        layer, "self", head, None, None, "head", "zero", None, change, change / 2, abs(change), 1, abs(change)
    )


def edge_effect(key: int, change: float) -> Effect:
    return Effect(0, "self", 1, 2, key, "edge", "renormalise", None, change, change / 2, abs(change), 1, abs(change))


def with_effects(*effects: Effect, summary: EffectSummary = SUMMARY) -> Record:
    return replace(layered(n_layers=2, n_heads=3), effects=EffectTable(effects), effect=summary)
