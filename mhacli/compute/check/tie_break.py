"""Which of several mistakes it is that give the same numbers: asked again with other sizes, and told by the source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mhacli.adapters.usercode.arguments import role_of
from mhacli.adapters.usercode.call.find_call import find_modes
from mhacli.adapters.usercode.process import Stage
from mhacli.adapters.usercode.user_attention import Built, UserAttention
from mhacli.compute.base.user_module import limited
from mhacli.compute.check.diagnosis.candidates import candidates, meant_by
from mhacli.compute.check.diagnosis.evidence import MASKING, Observed, unpacks_in_order
from mhacli.compute.check.diagnosis.hypotheses import Made, tried
from mhacli.compute.check.inputs import core_scenes
from mhacli.compute.check.prepare import with_own_weights
from mhacli.compute.check.probes.catalogue import Probed
from mhacli.compute.check.traits.traits import traits_of
from mhacli.requests.user_code import CheckRequest

_BY_SOURCE = ("scale-not-root", "scale-twice", "scale-d-model")


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


def by_source(alike: Sequence[Made], observed: Observed, order: str | None) -> Made:
    """The one that the author's lines show."""
    codes = {made.mistake.code: made for made in alike}
    if {"qk-swapped", "qkv-order"} <= codes.keys():
        in_order = unpacks_in_order(observed.operations, order or "qkv")
        is_named_apart = in_order is None and order is None
        return codes["qk-swapped" if in_order or is_named_apart else "qkv-order"]
    if {"mask-sign", "mask-after-softmax"} <= codes.keys():  # what is left of both is NaN
        is_raised = any(op.output.isposinf().any() for op in observed.operations if op.name.rstrip("_") in MASKING)
        return codes["mask-sign" if is_raised else "mask-after-softmax"]
    if {"mask-multiplied", "mask-sentinel-too-small"} <= codes.keys():
        is_filled = any(op.name.rstrip("_") in ("masked_fill", "where") for op in observed.operations)
        return codes["mask-sentinel-too-small" if is_filled else "mask-multiplied"]
    if len(codes.keys() & set(_BY_SOURCE)) > 1:
        return _scale_that_is_written(alike, observed)
    return alike[0]


def _scale_that_is_written(alike: Sequence[Made], observed: Observed) -> Made:
    """By how often products are scaled on their way to the softmax, and by the words in those lines."""
    by_code = {made.mistake.code: made for made in alike}
    scalings = [
        op
        for op in observed.operations
        if op.name in ("mul", "div", "mul_", "div_", "scaled_dot_product_attention") and _is_by_number(op.inputs)
    ]
    if len(scalings) > 1 and "scale-twice" in by_code:
        return by_code["scale-twice"]
    text = " ".join(op.source for op in scalings)
    is_of_model = (
        any(word in text for word in ("d_model", "embed", "n_embd", "hidden", "emb", "dim")) and "head" not in text
    )
    return by_code.get("scale-d-model" if is_of_model else "scale-not-root", alike[0])


def _is_by_number(inputs: tuple[object, ...]) -> bool:
    """Whether an operation is by a number, or fused attention, not of two tables."""
    return len([t for t in inputs if getattr(t, "numel", lambda: 1)() > 1]) != 2
