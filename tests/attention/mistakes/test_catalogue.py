"""The catalogue of mistakes: complete, correct, and with distinguishable mistakes."""

from __future__ import annotations

import functools
import re
from dataclasses import fields, replace
from itertools import combinations
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.mutants import MUTANTS, OrdinaryAttention, Settings

from mhacli.attention.mistakes import BY_CODE, MISTAKES
from mhacli.attention.mistakes.stages import (
    RIGHT,
    Inapplicable,
    Projection,
    Projections,
    ReferenceInputs,
    ReferenceLayer,
    Stages,
    run,
)
from mhacli.compute.check.hypotheses import AppliedMistake, stages_with

NAMED = """split-without-transpose merge-without-transpose softmax-axis scale-missing scale-d-model scale-not-root scale-twice
qk-swapped causal-missing causal-off-by-one causal-transposed causal-top-left mask-inverted mask-multiplied mask-added-as-01
mask-after-softmax mask-sentinel-too-small mask-not-finite fully-masked-row padding-ignored padding-inverted gqa-tiled
heads-averaged heads-summed head-width out-proj-missing out-proj-transposed bias-missing qkv-order rope-pairing dropout-in-eval
dropout-not-rescaled value-not-split state-kept-between-calls"""
"""Codes that programs read: none of them may go."""
PROBED = {
    "head-width",
    "heads-missing",
    "fully-masked-row",
    "dropout-in-eval",
    "dropout-not-rescaled",
    "state-kept-between-calls",
    "cache-position",
    "cache-order",
    "cache-mask",
}
"""Codes without a stage: what a probe sees, not what the reference can be made to do."""
SITES = {"q_proj", "k_proj", "v_proj", "q", "k", "v", "qk", "scaled", "scores", "pattern", "z", "concat", "out"}
WAYS = {f"{entry.code}: {way.description}": (entry, way) for entry in MISTAKES for way in entry.variants}


# ------------------------------------------------------------------------------------------------------------ what it says


def test_an_entry_is_complete_and_uses_the_usual_terms():
    for entry in MISTAKES:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", entry.code)
        for text in (entry.message, entry.effect):
            assert text == text.strip()
            assert text[0].islower() or not text[0].isalpha()
            assert not text.endswith(".")
        assert entry.looks_like.strip()
        assert entry.fix.strip()
        assert entry.fix != entry.looks_like
        for way in entry.variants:
            assert way.description[0].islower() or not way.description[0].isalpha()
            assert not way.description.endswith(".")


def test_an_entry_changes_a_stage_that_exists_or_is_found_by_a_probe():
    for entry in MISTAKES:
        assert entry.site in SITES
        assert all(set(way.sites) <= SITES for way in entry.variants)
        if entry.stage is None:
            assert entry.code in PROBED
            assert entry.variants == ()
        else:
            assert entry.stage in {field.name for field in fields(Stages)}
            assert entry.variants


def test_no_two_variants_have_the_same_description():
    said = [way.description for entry in MISTAKES for way in entry.variants]
    assert sorted(said) == sorted(set(said))


def test_every_code_that_programs_read_is_in_the_catalogue():
    codes = {entry.code for entry in MISTAKES}
    assert set(NAMED.split()) <= codes
    assert len(codes) >= 30
    assert set(BY_CODE) == codes
    assert all(BY_CODE[entry.code] in MISTAKES for entry in MISTAKES)


def test_a_code_stands_for_its_first_entry():
    firsts = {}
    for entry in MISTAKES:
        firsts.setdefault(entry.code, entry)
    assert dict(BY_CODE) == firsts


# ------------------------------------------------------------------------------------------------- layers to make mistakes in


class Asked(NamedTuple):
    """A layer, and what it is asked."""

    layer: ReferenceLayer
    rows: ReferenceInputs


def drawn(*shape, std=1.0):
    return std * torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


GENERATOR = torch.Generator().manual_seed(7)


def layer_of(n_heads=4, n_kv_heads=4, d_head=2, d_in=8, **told):
    """A layer with square projections and biases."""

    def projection(width, read):
        return Projection(drawn(width, read, std=1.5 * read**-0.5), drawn(width, std=0.5))

    weights = Projections(
        projection(n_heads * d_head, d_in),
        projection(n_kv_heads * d_head, d_in),
        projection(n_kv_heads * d_head, d_in),
        projection(d_in, n_heads * d_head),
    )
    return ReferenceLayer(n_heads, n_kv_heads, weights=weights, **told)


def with_output(layer, width):
    """The layer with an output projection of this input width."""
    return replace(layer, weights=layer.weights._replace(out=Projection(drawn(8, width))))


def without_output(layer):
    """The layer without an output projection."""
    return replace(layer, weights=layer.weights._replace(out=None))


def rows_of(q_len=5, k_len=5, *, is_self=True, d_in=8, std=1.0):
    """Inputs with three sequences, so that mistakes along the batch show."""
    queries = drawn(3, q_len, d_in, std=std)
    keys = queries if is_self else drawn(3, k_len, d_in, std=std)
    return ReferenceInputs(queries, keys, keys)


def square_mask(length=5):
    """A mask that is neither symmetric nor triangular, differs between sequences, and leaves every query a key."""
    keep = torch.rand(3, 1, length, length, generator=GENERATOR) < 0.6
    keep[..., torch.arange(length), torch.arange(length).flip(0)] = True
    return keep


def padded(length=5, lengths=(3, 5, 2)):
    return torch.arange(length)[None] < torch.tensor(lengths)[:, None]


def heads_of(n_heads=3, q_len=5, k_len=5):
    """Inputs of a function with d_head 2 and separate keys."""
    return ReferenceInputs(drawn(3, n_heads, q_len, 2), drawn(3, n_heads, k_len, 2), drawn(3, n_heads, k_len, 2))


def everything_that_can_go_wrong():
    ordinary, grouped = layer_of(), layer_of(n_kv_heads=2)
    causal = replace(ordinary, causal=True)
    cross = rows_of(4, 7, is_self=False)
    large = rows_of(std=1000.0)
    one_each = torch.eye(5, dtype=torch.bool)[None, None]  # all that is allowed may have low scores
    cases = {
        "ordinary": Asked(ordinary, rows_of()),
        "three axes of the same size": Asked(layer_of(3, 3, 3, 9), ReferenceInputs(*[drawn(3, 3, 9)] * 3)),
        "a scale of its own": Asked(replace(ordinary, scale=0.3), rows_of()),
        "grouped": Asked(grouped, rows_of()),
        "grouped, causal": Asked(replace(grouped, causal=True), rows_of()),
        "another text": Asked(ordinary, cross),
        "another text as long": Asked(ordinary, rows_of(is_self=False)),
        "other rows for each argument": Asked(
            ordinary, ReferenceInputs(drawn(3, 4, 8), drawn(3, 7, 8), drawn(3, 7, 8))
        ),
        "as many other rows for each argument": Asked(ordinary, ReferenceInputs(*(drawn(3, 5, 8) for _ in "qkv"))),
        "causal": Asked(causal, rows_of()),
        "causal, last queries": Asked(causal, cross),
        "mask": Asked(ordinary, rows_of()._replace(allowed=square_mask())),
        "padding": Asked(ordinary, rows_of()._replace(real=padded())),
        "causal and mask": Asked(causal, rows_of()._replace(allowed=square_mask())),
        "causal and padding": Asked(causal, rows_of()._replace(real=padded())),
        "mask and padding": Asked(ordinary, rows_of()._replace(allowed=square_mask(), real=padded())),
        "half": Asked(replace(ordinary, pairing="half", theta=100.0), rows_of()),
        "interleaved": Asked(layer_of(2, 2, 4, 8, pairing="interleaved", theta=100.0), rows_of()),
        "half, wide heads": Asked(layer_of(2, 2, 4, 8, pairing="half", theta=100.0), rows_of()),
        "softcap": Asked(replace(ordinary, softcap=0.8, causal=True), rows_of()),
        "narrow output": Asked(with_output(ordinary, 2), rows_of()),
        "wide output": Asked(with_output(ordinary, 32), rows_of()),
        "no output": Asked(without_output(ordinary), rows_of()),
        "large": Asked(ordinary, large),
        "large and mask": Asked(ordinary, large._replace(allowed=one_each)),
        "a function": Asked(ReferenceLayer(3, 3), heads_of()),
    }
    bias = drawn(1, 4, 5, 5)
    cases["a bias"] = Asked(replace(ordinary, bias=lambda rows: bias), rows_of())
    cases["sinks"] = Asked(replace(ordinary, sinks=drawn(4)), rows_of())
    windows = square_mask()[:2].repeat(2, 1, 1, 1)
    norms = [lambda rows, gain=gain: F.normalize(rows, dim=-1) * gain for gain in drawn(2, 2)]
    normed = replace(ordinary, q_norm=norms[0], k_norm=norms[1])
    cases["normed"] = Asked(normed, rows_of())
    cases["masks of windows"] = Asked(ordinary, ReferenceInputs(*[drawn(4, 5, 8)] * 3, allowed=windows))
    return cases


CASES = everything_that_can_go_wrong()


@functools.cache
def answer(name, case):
    """The output with a mistake, or of the right layer if the mistake does not apply; None if it cannot be computed."""
    entry, way = WAYS[name]
    layer, rows = CASES[case]
    try:
        return run(stages_with([AppliedMistake(entry, way)]), layer, rows).out
    except Inapplicable:
        return right_answer(case)
    except (RuntimeError, ValueError, IndexError):
        return None


def differ(a, b):
    if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return True
    gap = (a - b)[~a.isnan()].abs()
    return bool(gap.numel()) and gap.max().item() > 1e-6 * a[~a.isnan()].abs().max().item()


@functools.cache
def right_answer(case):
    """The right output; None if the layer only fits together with a mistake."""
    try:
        return run(RIGHT, *CASES[case]).out
    except RuntimeError:
        return None


@functools.cache
def shows(name, case):
    """Whether a mistake changes the output."""
    given, right = answer(name, case), right_answer(case)
    return given is not None and (right is None or differ(given, right))


@pytest.mark.parametrize("name", WAYS)
def test_a_way_changes_what_a_layer_answers(name):
    assert any(shows(name, case) for case in CASES)


SELF = (
    "ordinary", "grouped", "causal", "mask", "padding", "causal and mask", "causal and padding", "softcap", "half",
    "interleaved", "narrow output", "wide output", "no output",
)  # fmt: skip
"""Rows that attend to themselves, with the usual scale: what most people's layers are."""
SAME = {
    ("qk-swapped: the scores are k qᵀ instead of q kᵀ", "qkv-order: what is named q, k, v is used as k, q, v"): (
        "of rows that attend to themselves, W_k x (W_q x)ᵀ is both"
    ),
    ("scale-not-root: the scores are divided by d_head", "scale-twice: the scores are scaled twice"): (
        "(1/√d_head)² is 1/d_head"
    ),
    (
        "mask-after-softmax: masked weights become −∞ after the softmax",
        "mask-sign: masked scores are set to +∞",
    ): "both leave NaN alone where anything is forbidden",
}
"""Mistakes that nobody can tell apart by numbers, as long as rows attend to themselves and the scale is the usual one."""
SAME_ALWAYS = {
    (
        "mask-multiplied: masked scores become 0 before the softmax",
        "mask-sentinel-too-small: masked scores are set to 0, or next to it such as 1e-9",
    ): "a score times 0 is 0",
}
"""Those that the source alone tells apart."""


def alike(cases):
    """Pairs of variants of different codes with equal, wrong outputs in all these layers."""
    seen = {name: {case for case in cases if shows(name, case)} for name in WAYS}
    given = {name: {case for case in cases if answer(name, case) is not None} for name in WAYS}
    pairs = set()
    for one, other in combinations([name for name in WAYS if seen[name]], 2):
        both = given[one] & given[other]
        if WAYS[one][0].code == WAYS[other][0].code or seen[one] & both != seen[other] & both:
            continue
        shown = seen[one] & seen[other]
        if shown and not any(differ(answer(one, case), answer(other, case)) for case in shown):
            pairs.add((one, other))
    return pairs


@pytest.mark.full
def test_mistakes_that_give_the_same_numbers_are_those_that_are_the_same_in_principle():
    assert alike(SELF) == set(SAME) | set(SAME_ALWAYS)


@pytest.mark.full
def test_another_text_and_another_scale_distinguish_all_other_mistakes():
    assert alike(tuple(CASES)) == set(SAME_ALWAYS)


# ---------------------------------------------------------------------------------------------------- where there is nothing


BARE = replace(layer_of(), weights=Projections(*(p._replace(bias=None) for p in layer_of().weights)))
NOTHING_TO_DO = {
    "one head cannot be cut wrongly": (Asked(layer_of(1, 1, 8), rows_of()), {
        "split-without-transpose", "merge-without-transpose", "value-not-split", "heads-averaged", "heads-summed",
        "gqa-tiled", "kv-head-shared-by-all", "mask-head-order", "scale-d-model",
    }),
    "each head has its own keys": (Asked(layer_of(), rows_of()), {"gqa-tiled"}),
    "there is no bias": (Asked(BARE, rows_of()), {"bias-missing"}),
    "there is no output projection": (
        Asked(replace(layer_of(), weights=layer_of().weights._replace(out=None)), rows_of()),
        {"out-proj-missing", "out-proj-transposed"},
    ),
    "nothing is turned": (Asked(layer_of(), rows_of()), {
        "rope-pairing", "rope-of-queries-only", "rope-of-keys-only", "rope-sign", "rope-offset", "rope-axis", "rope-rates",
    }),
    "nothing is normed": (Asked(layer_of(), rows_of()), {"qk-norm-shared", "qk-norm-of-one"}),
    "nothing is capped": (
        Asked(layer_of(), rows_of()), {"softcap-after-mask", "softcap-not-scaled-back", "softcap-missing"}
    ),
    "the scale is 1 already": (Asked(layer_of(scale=1.0), rows_of()), {"scale-missing", "scale-twice"}),
    "no other mask is given": (Asked(layer_of(causal=True), rows_of()), {"causal-lost"}),
    "the layer has no mask of its own": (Asked(layer_of(), rows_of()._replace(real=padded())), {"causal-lost"}),
    "one mask serves the whole batch": (
        Asked(layer_of(), rows_of()._replace(allowed=square_mask()[:1])), {"mask-head-order", "mask-window-order"}
    ),
    "each sequence has a mask of its own": (
        Asked(layer_of(), rows_of()._replace(allowed=square_mask())), {"mask-window-order"}
    ),
    "a mask that is not square cannot be transposed": (
        Asked(layer_of(), rows_of(4, 7, is_self=False)._replace(allowed=torch.ones(1, 1, 4, 7, dtype=torch.bool))),
        {"mask-transposed"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", NOTHING_TO_DO)
def test_an_impossible_mistake_raises_inapplicable(why):
    asked, codes = NOTHING_TO_DO[why]
    ways = [way for way in WAYS.values() if way[0].code in codes and way[0].stage]
    assert {entry.code for entry, _ in ways} == codes
    reached = 0
    for entry, way in ways:
        if why == "one head cannot be cut wrongly" and entry.stage == "mask":
            continue
        with pytest.raises(Inapplicable):
            run(stages_with([AppliedMistake(entry, way)]), *asked)
        reached += 1
    assert reached


def test_a_bias_of_one_projection_is_missed_only_where_it_has_one():
    weights = layer_of().weights
    layer = replace(layer_of(), weights=weights._replace(q=weights.q._replace(bias=None)))
    for name, (entry, way) in WAYS.items():
        if entry.code == "bias-missing" and entry.stage == "project":
            stages = replace(RIGHT, project=way.replacement)
            if "q" in re.search(r"the bias of (.*) is left out", name)[1].split(" and "):
                with pytest.raises(Inapplicable):
                    run(stages, layer, rows_of())
            else:
                assert run(stages, layer, rows_of()).out.isfinite().all()


# ------------------------------------------------------------------------------------------------------ beside other mutants


class Plain(OrdinaryAttention):
    """Without its care for NaN in what nobody may see."""

    def weighted_sum(self, shares, v, rules):
        return shares @ v


class Twin(NamedTuple):
    """The same mistake in a layer that shares no code with mhacli, and how both are asked."""

    mutant: str
    way: str
    asked: str = "self"


TWINS = (
    Twin("softmax-over-queries", "the softmax runs over queries instead of keys"),
    Twin("softmax-over-heads", "the softmax runs over heads instead of keys"),
    Twin("softmax-over-batch", "the softmax runs over the sequences of the batch instead of keys"),
    Twin("split-without-transpose", "q, k and v are split into heads by a reshape alone"),
    Twin(
        "merge-without-transpose",
        "[batch, head, query, d_v] is reshaped to [batch, query, head·d_v] without a transpose",
    ),
    Twin("heads-averaged", "the heads are averaged instead of joined"),
    Twin("heads-summed", "the heads are added up instead of joined"),
    Twin("kv-heads-tiled", "kv heads are tiled, head h reading kv head h mod n_kv_heads", "grouped"),
    Twin("first-kv-head-for-all", "every query head reads kv head 0", "grouped"),
    Twin("queries-and-keys-swapped", "the scores are k qᵀ instead of q kᵀ"),
    Twin("scale-missing", "the scores are not scaled at all"),
    Twin("scale-by-model-width", "the scores are divided by √d_model"),
    Twin("scale-without-root", "the scores are divided by d_head"),
    Twin("scale-multiplied", "the scores are multiplied by √d_head"),
    Twin("scale-applied-twice", "the scores are scaled twice"),
    Twin("scale-after-softmax", "the softmax is over unscaled scores, and its result is scaled"),
    Twin("scale-after-softmax", "the softmax is over unscaled scores, and its result is scaled", "causal"),
    Twin("softcap-ignored", "the scores are not capped", "softcap"),
    Twin("softcap-not-scaled-back", "tanh(score / c) stands without the factor c", "softcap"),
    Twin("softcap-after-mask", "masked scores are capped like the others", "softcap"),
    Twin("causal-hides-self", "a token does not see itself, only earlier ones", "last"),
    Twin("causal-shows-next", "a token also sees the next one", "last"),
    Twin("causal-transposed", "a token sees itself and later ones only", "last"),
    Twin("causal-from-top-left", "the triangle begins at the first key when queries are fewer than keys", "last"),
    Twin("causal-lost-with-padding", "a mask that is given takes the place of the causal one", "causal padding"),
    Twin("mask-inverted", "the causal triangle is read the other way round", "causal"),
    Twin("mask-inverted", "real tokens are hidden and padding is seen", "padding"),
    Twin("mask-multiplied-before-softmax", "masked scores become 0 before the softmax", "causal"),
    Twin("mask-multiplied-before-softmax", "masked scores become 0 before the softmax", "padding"),
    Twin("mask-added-as-zeros-and-ones", "1 is added to visible scores and nothing to the others", "causal padding"),
    Twin("mask-times-infinity", "mask · −∞ is added to the scores", "causal"),
    Twin(
        "mask-after-softmax",
        "masked weights are set to 0 after the softmax, and the rest is not renormalised",
        "causal",
    ),
    Twin("sentinel-too-small", "masked scores are set to -10000", "large"),
    Twin(
        "mask-repeated-in-another-order",
        "the mask is repeated for the heads in the other order than the scores",
        "padding",
    ),
    Twin("padding-ignored", "padding is seen like any token", "causal padding"),
    Twin("padding-inverted", "real tokens are hidden and padding is seen", "padding"),
    Twin("padding-of-queries", "padding hides queries instead of keys", "padding"),
    Twin("padding-of-the-first-sequence", "every sequence is taken to be padded like the first", "padding"),
    Twin("fused-weights-cut-as-kqv", "what is named q, k, v is used as k, q, v"),
    Twin("values-from-the-projection-of-keys", "the values are made by the projection of the keys", "grouped"),
    Twin("values-of-the-queries-rows", "the values come from the rows of the queries", "another text"),
    Twin("query-bias-dropped", "the bias of q is left out"),
    Twin("key-bias-dropped", "the bias of k is left out", "half"),
    Twin("value-bias-dropped", "the bias of v is left out"),
    Twin("output-bias-dropped", "the bias of the output projection is left out"),
    Twin("output-projection-missing", "the heads side by side are returned as they are"),
    Twin("output-projection-transposed", "the output projection's weight is applied transposed"),
    Twin("rope-pairs-neighbours-for-halves", "columns are paired in the other of the two ways", "half"),
    Twin("rope-pairs-halves-for-neighbours", "columns are paired in the other of the two ways", "interleaved"),
    Twin("rope-of-queries-only", "the keys are not rotated", "half"),
)


def twins_asked(asked):
    """The layer and its inputs for mhacli, and the same for `mutants.py`."""
    told = {"pairing": asked} if asked in ("half", "interleaved") else {}
    told |= {"softcap": 0.8} if asked == "softcap" else {}
    layer = layer_of(
        6,
        2 if asked == "grouped" else 6,
        4,
        24,
        causal=asked in ("causal", "causal padding", "softcap", "last"),
        **told,
    )
    rows = rows_of(4, 7, is_self=False, d_in=24) if asked == "last" else rows_of(d_in=24)
    if asked == "another text":
        rows = rows_of(5, 5, is_self=False, d_in=24)
    if asked == "large":
        rows = rows_of(d_in=24, std=100.0)
    lengths = torch.tensor([3, 5, 2]) if "padding" in asked or asked == "large" else None
    if lengths is not None:
        rows = rows._replace(real=torch.arange(5)[None] < lengths[:, None])
    positions = {"half": "rope", "interleaved": "rope-interleaved"}.get(asked, "none")
    settings = Settings(24, layer.n_heads, layer.n_kv_heads, 4, 4, positions, softcap=layer.softcap)
    names = zip(("q_proj", "k_proj", "v_proj", "o_proj"), layer.weights, strict=True)
    weights = {f"{name}.{kind}": getattr(one, kind) for name, one in names for kind in ("weight", "bias")}
    context = None if rows.keys is rows.queries else rows.keys
    return Asked(layer, rows), (settings, weights), {"context": context, "causal": layer.causal, "lengths": lengths}


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: f"{twin.mutant} ({twin.asked})")
def test_a_mistake_is_the_one_that_an_ordinary_layer_makes_with_the_same_stage_mistaken(twin):
    (layer, rows), made_of, asked = twins_asked(twin.asked)
    mutant = next(mutant for mutant in MUTANTS if mutant.name == twin.mutant)
    mistaken = type(mutant.name, (Plain,), {mutant.stage: mutant.replacement})
    entry, way = next(one for one in WAYS.values() if one[1].description == twin.way)
    right = Plain(*made_of)(rows.queries, **asked)[0]
    wrong = mistaken(*made_of)(rows.queries, **asked)[0]
    ours = run(replace(RIGHT, **{entry.stage: way.replacement}), layer, rows).out
    assert not differ(run(RIGHT, layer, rows).out, right)
    assert differ(wrong, right)
    assert not differ(ours, wrong)


def test_exponentials_without_the_largest_score_taken_off_overflow():
    entry, way = next(one for one in WAYS.values() if one[0].code == "softmax-overflow")
    layer, rows = CASES["large"]
    assert run(replace(RIGHT, softmax=way.replacement), layer, rows).out.isnan().any()
    assert not differ(run(replace(RIGHT, softmax=way.replacement), *CASES["ordinary"]).out, right_answer("ordinary"))
    assert entry.stage == "softmax"
