"""Which of several mistakes it is that give the same numbers: asked again with other sizes, and told by the source."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from mhacli.adapters.usercode.arguments import role_of
from mhacli.adapters.usercode.call.find_call import find_modes
from mhacli.adapters.usercode.process import Stage
from mhacli.adapters.usercode.user_attention import Built, UserAttention
from mhacli.attention.mistakes import BY_CODE
from mhacli.attention.mistakes.stages import Written
from mhacli.compute.base.user_module import limited
from mhacli.compute.check.diagnosis.candidates import candidates, meant_by
from mhacli.compute.check.diagnosis.hypotheses import Made, tried
from mhacli.compute.check.inputs import core_scenes
from mhacli.compute.check.prepare import with_own_weights
from mhacli.compute.check.probes.catalogue import Probed
from mhacli.compute.check.traits.traits import traits_of
from mhacli.requests.user_code import CheckRequest


def by_other_sizes(
    alike: Sequence[Made],
    asked: UserAttention,
    probed: Probed,
    causal: tuple[bool, ...],
    request: CheckRequest,
    stage: Stage,
) -> list[Made]:
    """Those of some mistakes that still give what is answered when it is built with another number of heads: √d_model and d_head
    are both 8 at 64 columns and 8 heads. All of them where it cannot be built so."""
    built = asked.built
    for changes in _other_heads(built):
        try:
            stage(f"building {built.name} with {', '.join(f'{name}={n}' for name, n in changes.items())}")
            modes = find_modes(limited(built.rebuild(changes), stage), request.of)
            subject = next((one for one in modes if one.mode == asked.mode), modes[0])
            examined = with_own_weights(subject, probed, request.of.seed)
            traits = traits_of(examined.subject, request.of.seed)
            meant = meant_by(subject.built, examined.module, request, causal, traits)
            layers = [
                c.layer for c in candidates(examined.subject, examined.module, examined.tensors, meant, request)[:8]
            ]
            scenes = list(core_scenes(examined.subject, request.of.seed))
        except Exception:  # sizes that its author did not think of
            continue
        left = [made for made in alike if any(tried(layer, (made,), scenes).matches for layer in layers)]
        if left:
            return left
    return list(alike)


def _other_heads(built: Built) -> Iterator[dict[str, int]]:
    """Arguments that give it another number of heads."""
    for name, value in built.arguments.items():
        if role_of(str(name).rpartition(".")[2]) == "n_heads" and isinstance(value, int) and value > 0:
            yield from ({name: n} for n in (value // 2, value * 2, value // 3) if n > 1)
            return


def by_source(alike: Sequence[Made], written: Written) -> Made:
    """The one that the author's lines show: the entries of the catalogue tell two of them from each other."""
    codes = {made.mistake.code: made for made in alike}
    rivals = [made for made in codes.values() if _rules(made, codes)]
    chosen, *others = rivals or alike[:1]
    for other in others:
        chosen = _preferred(chosen, other, written)
    return chosen


def _rules(made: Made, codes: Collection[str]) -> bool:
    """Whether an entry tells a mistake from another of these codes."""
    others = (BY_CODE[code] for code in codes if code != made.mistake.code)
    return any(made.mistake.code in other.rather_than or other.code in made.mistake.rather_than for other in others)


def _preferred(one: Made, other: Made, written: Written) -> Made:
    """Which of two mistakes the lines show; the first where nothing tells them apart."""
    for first, second in ((one, other), (other, one)):
        is_first = first.mistake.rather_than.get(second.mistake.code)
        if is_first is not None:
            return first if is_first(written) else second
    return one
