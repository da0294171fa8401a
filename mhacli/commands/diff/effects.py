"""Compares the effects of the removals that two records have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mhacli.commands.diff.result import EffectChange, EffectDifference, TextDifference, TokenFamily
from mhacli.record.effect import Effect
from mhacli.record.record import Record


def compared_effects(
    a: Record, b: Record, texts: Sequence[TextDifference], tolerance: float
) -> EffectDifference | None:
    """The effects of B against those of A; None if either has none, or none that are proven.

    Heads match by number, edges by tokens. The tolerance is relative to the largest effect. Effects within the noise of
    either record are no difference.
    """
    if a.effect is None or b.effect is None or not (a.effect.verified.ok and b.effect.verified.ok):
        return None
    metric = a.effect.metric if a.effect.metric == b.effect.metric else "d_output"
    places = {text.family: _places(text) for text in texts if text.sequence == 0}
    effects_a = {_key(effect): effect for effect in a.effects}
    effects_b = {_key(_in_a(effect, places)): effect for effect in b.effects}
    pairs = [(effects_a[key], effects_b[key]) for key in effects_a if key in effects_b]
    changes = [EffectChange(before, after, getattr(after, metric) - getattr(before, metric)) for before, after in pairs]
    largest = max((abs(getattr(effect, metric)) for pair in pairs for effect in pair), default=0.0)
    least = max(tolerance * largest, a.effect.floor + b.effect.floor) if tolerance else 0.0
    changed = (change for change in changes if abs(change.change) > least)
    return EffectDifference(
        metric=metric,
        tolerance=least,
        n_compared=len(pairs),
        changes=tuple(sorted(changed, key=lambda change: -abs(change.change))),
        only_a=tuple(effect for key, effect in effects_a.items() if key not in effects_b),
        only_b=tuple(effect for key, effect in effects_b.items() if key not in effects_a),
    )


def _places(text: TextDifference) -> Mapping[int, int]:
    """The position in A of each token of B that matches."""
    return {match.b + i: match.a + i for match in text.compared for i in range(match.length)}


def _in_a(effect: Effect, places: Mapping[TokenFamily, Mapping[int, int]]) -> Effect:
    """An effect of B with the positions of its edge in A; −1 for tokens that A lacks."""
    if effect.query is None or effect.key is None:
        return effect
    context = places.get("context", places["texts"])
    queries = context if effect.kind == "encoder" else places["texts"]
    keys = context if effect.kind in ("encoder", "cross") else places["texts"]
    return replace(effect, query=queries.get(effect.query, -1), key=keys.get(effect.key, -1 - effect.key))


def _key(effect: Effect) -> tuple[object, ...]:
    """The removed parts, whatever replaces them."""
    return (
        effect.removed,
        effect.kind,
        effect.layer,
        effect.head,
        effect.query,
        effect.key,
        effect.heads,
        effect.kinds,
        effect.spans,
    )
