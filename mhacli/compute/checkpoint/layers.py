"""What is said of one captured attention of a checkpoint: whose tokens, which heads, which mask, and whether it is verified."""

from __future__ import annotations

from collections.abc import Sequence

from mhacli.adapters.hf.calls import Call, ScoredCall
from mhacli.adapters.hf.captured_pattern import Sight
from mhacli.adapters.hf.layer_names import Place
from mhacli.compute.base.head_statistics import Baseline
from mhacli.compute.base.token_axes import Axes
from mhacli.compute.heads.passes import Attention
from mhacli.errors import MhaError
from mhacli.results.record.checkpoint import InspectedLayer, LayerChoice
from mhacli.results.record.measures import SelfCheck
from mhacli.results.record.tiled import Survey


def told_of(call: Call, sight: Sight, *, mask: str, survey: Survey) -> InspectedLayer:
    """What a record says of a layer besides its heads."""
    checks, n_heads = survey.checks, sight.shape[1]
    reasons = [f"the check '{check.name}' differs by {check.error}" for check in checks if not check.ok]
    reasons += [
        f"scores are so large that their rounding alone may move z by {check.rounding:.3g}"
        for check in checks
        if check.rounding
    ]
    reasons += [f"the keyword {name} is not understood" for name in call.unknown]
    z = call.z
    if z is None:
        reasons.append("only the pattern was seen, not the values")
    scored = call if isinstance(call, ScoredCall) else None
    d_v = 1 if z is None else z.shape[3]
    return InspectedLayer(
        layer=call.layer,
        name=call.title,
        kind=call.kind,
        captured_by=call.rung,
        kernel=sight.kernel,
        n_heads=n_heads,
        n_kv_heads=n_heads if scored is None else scored.k.shape[1],
        d_head=d_v if scored is None else scored.q.shape[3],
        d_v=d_v,
        scale=None if scored is None else scored.scale,
        softcap=None if scored is None else scored.softcap,
        mask=mask,
        bias=sight.bias is not None,
        sinks=sight.sink_mass is not None,
        verified=not reasons,
        unverified=tuple(reasons),
        self_check=SelfCheck(checks[-1].error, checks[-1].tolerance, all(check.ok for check in checks)),
        survey=survey,
        call=call.part + 1,
    )


def misfit(call: Call, axes: Axes) -> str | None:
    """Why nothing can be said of an attention: its axes are not the tokens of the text. None where they are."""
    batch, n_queries, n_keys = call.shape[0], *call.shape[-2:]
    if (batch, n_queries, n_keys) == (len(axes.queries), axes.q_len, axes.k_len):
        return None
    return f"attention from {axes.q_len} to {axes.k_len} tokens laid out as {n_queries} × {n_keys}"


def nothing_seen(
    family: str, asked: tuple[LayerChoice, ...] | None, found: Sequence[Place], unfit: Sequence[str]
) -> MhaError:
    """What to say where no attention that is asked for could be shown: some were `found`, others `unfit`."""
    if unfit:
        return MhaError(
            f"the attention of {family} must be laid out by tokens, got {unfit[0]}",
            hint="its queries and keys cannot be named, so nothing true could be said of them",
            code="not-tokens",
        )
    if found and asked is not None:
        numbers = ", ".join(str(n) for n in sorted({layer for _, layer in found}))
        return MhaError(
            f"layer must be one of those with attention, {numbers}, got {', '.join(str(n) for _, n in asked)}",
            code="no-layer",
        )
    return MhaError(
        f"the model must compute attention in a way that can be seen, got none in {family}",
        hint="layers without a matrix of queries × keys, such as state spaces, cannot be inspected",
        code="no-attention",
    )


SMALL_CELLS = 1 << 18
"""Queries × keys up to which one thread is as quick as several."""


def head_ranges(sight: Sight, asked: tuple[int, ...] | None, n_parts: int) -> list[range]:
    """The heads that are looked at: alone where they are chosen, else in parts, none of which cuts a group that shares keys."""
    n_heads = sight.shape[1]
    if asked is not None:
        return [range(head, head + 1) for head in asked]
    group = n_heads // sight.n_kv_heads
    step = group * -(-sight.n_kv_heads // max(1, n_parts))
    return [range(start, min(start + step, n_heads)) for start in range(0, n_heads, step)]


def attention_of_heads(call: Call, sight: Sight, heads: range) -> Attention:
    """Some heads of a captured attention."""
    span = slice(heads.start, heads.stop)
    v, z, inputs = None, sight.lse.new_zeros(*sight.shape[:3], 1)[:, span], []
    if call.v is not None and call.z is not None:
        group = sight.shape[1] // call.v.shape[1]
        v, z = call.v[:, heads.start // group : (heads.stop - 1) // group + 1], call.z[:, span]
        inputs = [v, *((call.q, call.k) if isinstance(call, ScoredCall) else ())]
    return Attention(
        heads,
        sight.of_heads(heads),
        z,
        v,
        sight.lse[:, span],
        sight.kernel,
        None if sight.sink_mass is None else sight.sink_mass[:, span],
        is_finite=all(bool(tensor.isfinite().all()) for tensor in inputs),
    )


def mask_words(baseline: Baseline, axes: Axes) -> str:
    """What queries see, in words, by how many keys each of the first text's sees."""
    n, first = len(axes.queries[0].ids), axes.first_query(0)
    counts = baseline.visible[0, 0, first : first + n].long().tolist()
    most, n_keys = max(counts), len(axes.keys[0].ids)
    if counts == [min(i + 1, most) for i in range(n)]:
        return "causal" if most == n else f"causal, window {most}"
    return "all keys" if counts == [n_keys] * n else f"at most {most} keys"
