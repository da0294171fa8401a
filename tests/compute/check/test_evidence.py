"""The evidence for a mistake: its source line, and the smallest input that shows it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from support.attention_zoo import WRONG
from torch import Tensor

from mhacli.adapters.usercode.types import AttentionOutput, Inputs, InputSizes, MaskForm, Operation
from mhacli.attention.mistakes import BY_CODE, MISTAKES
from mhacli.attention.mistakes.scores import unpacks_in_order
from mhacli.attention.mistakes.stages import RIGHT, Projection, Projections, ReferenceInputs, ReferenceLayer, run
from mhacli.compute.base.user_module import load_user_attention
from mhacli.compute.check.candidates import candidates, intended_layer
from mhacli.compute.check.hypotheses import (
    AppliedMistake,
    SourceLocator,
    difference,
    line_in_source,
    observe,
    singles,
    smallest,
    stages_with,
    variants_of,
)
from mhacli.compute.check.inputs import InputCase, core_cases, make_case, mask_cases, padding_cases, randomised
from mhacli.requests.user_code import CheckRequest, TargetRequest

# ---------------------------------------------------------------------------------------------------------- lines of a file

LINES = (
    "PaperAttention", "TranslationAttention", "MelodyAttention", "PoemAttention", "GroupedAttention", "MapAttention",
    "ChessAttention", "EpisodeAttention", "GraphAttention", "BasketAttention",
)  # fmt: skip


class Found(NamedTuple):
    """A wrong attention, the intended layer, its mistake, and an input that shows it."""

    subject: object
    layer: ReferenceLayer
    made: AppliedMistake
    scene: InputCase


@functools.cache
def found(name) -> Found:
    case = next(case for case in WRONG if case.name == name)
    arguments = tuple(tuple(pair.split("=")) for pair in case.arguments.split())
    request = CheckRequest(TargetRequest(case.target, arguments, causal=case.causal))
    subject = load_user_attention(request.of, lambda *stage, **how: None)
    module = randomised(subject.built.module, 0).to(torch.float64)
    subject = subject.of(module, torch.float64)
    meant = intended_layer(subject.built, module, request, ("causal" in case.sees.split(),))
    layers = [one.layer for one in candidates(subject, module, {}, meant, request)][:20]
    pool = variants_of(one for one in MISTAKES if one.code == case.code)
    for scene in (
        *core_cases(subject, 0),
        *mask_cases(subject, 0, subject.mask_forms),
        *padding_cases(subject, 0, subject.padding_forms),
    ):
        for hypothesis in (one for layer in layers for one in singles(layer, pool, [scene], ())):
            if hypothesis.matches and difference(hypothesis.layer, RIGHT, scene) > scene.tolerance:
                return Found(subject, hypothesis.layer, hypothesis.mistakes[0], scene)
    raise LookupError(name)


@pytest.mark.parametrize("name", LINES)
def test_a_mistake_is_found_at_its_line(name):
    case = next(case for case in WRONG if case.name == name)
    subject, layer, made, scene = found(name)
    observed = observe(subject, layer, stages_with((made,)), scene)
    sites = made.variant.sites or (made.mistake.site,)
    line = observed.lines_for(made.mistake, sites, subject.built)[0]
    assert line.file == str(case.path)
    assert abs(line.line - case.line) <= 2
    assert line.source == case.path.read_text().splitlines()[line.line - 1].strip()


@pytest.mark.parametrize(
    ("name", "site", "shared"),
    [
        ("TranslationAttention", "pattern", "scores"),
        ("MelodyAttention", "scores", "qk"),
        ("MapAttention", "out", "concat"),
    ],
)
def test_the_first_site_that_the_author_does_not_pass_is_where_the_mistake_stands(name, site, shared):
    case = next(case for case in WRONG if case.name == name)
    subject, layer, _, scene = found(name)
    departure = observe(subject, layer, RIGHT, scene).departure()
    assert (departure.site, departure.last_shared) == (site, shared)
    assert departure.file == str(case.path)
    assert case.lines[0] < departure.line <= case.lines[1]


def test_nothing_departs_where_the_mistake_is_in_the_reference_too():
    subject, layer, made, scene = found("TranslationAttention")
    departure = observe(subject, layer, stages_with((made,)), scene).departure()
    assert (departure.site, departure.last_shared) == ("out", "out")


def test_without_operations_there_is_one_line_and_it_is_unknown():
    subject, _, made, _ = found("TranslationAttention")
    (line,) = SourceLocator((), {}).lines_for(made.mistake, (made.mistake.site,), subject.built)
    assert (line.file, line.line, line.source) == (None, None, "")


def test_a_mistake_that_is_made_in_several_lines_has_each_once():
    subject = found("TranslationAttention").subject
    q, k = (torch.randn(2, 3, 4, 5, dtype=torch.float64) for _ in "qk")
    made = (operation("view", q, 7, "q = …"), operation("view", k, 9, "k = …"))
    observed = SourceLocator(made, {"q": q, "k": k})
    lines = observed.lines_for(BY_CODE["split-without-transpose"], ("q", "k", "q"), subject.built)
    assert [line.line for line in lines] == [7, 9]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("EpisodeAttention", "causal-transposed"),
        ("GraphAttention", "mask-inverted"),
        ("ChessAttention", "causal-off-by-one"),
    ],
)
def test_a_line_can_be_found_in_the_source_alone(name, code):
    case = next(case for case in WRONG if case.name == name)
    line = line_in_source(found(name).subject.built, BY_CODE[code])
    assert abs(line.line - case.line) <= 2
    assert line.source in case.source


def test_comments_and_other_codes_have_no_line_in_the_source():
    subject = found("EpisodeAttention").subject
    assert line_in_source(subject.built, BY_CODE["scale-missing"]).line is None


# ----------------------------------------------------------------------------------------------------------- operations alone


def operation(name, output, line, source=""):
    return Operation(name, (), output, {}, "mine.py", line, source)


def test_a_site_is_made_by_the_first_operation_with_its_numbers_in_any_layout():
    scores = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    observed = SourceLocator(
        (
            operation("matmul", torch.randn(2, 3, 4, 5), 10),
            operation("div", scores.permute(1, 0, 3, 2), 11),
            operation("masked_fill", scores, 12),
        ),
        {"scaled": scores},
    )
    assert observed.line_of("scaled").line == 11


def test_a_site_of_which_the_author_makes_one_head_at_a_time_is_made_by_the_first_head():
    scores = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    observed = SourceLocator(
        (operation("bmm", scores[:, 0].float(), 7), operation("bmm", scores[:, 1], 8)), {"qk": scores}
    )
    assert observed.line_of("qk").line == 7


def test_a_site_that_the_author_does_not_make_has_the_line_of_a_later_one():
    z = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    observed = SourceLocator(
        (operation("scaled_dot_product_attention", z, 9),), {"qk": torch.randn(2, 3, 4, 4), "z": z}
    )
    assert observed.line_of("qk").line == 9


def test_the_lowest_finite_numbers_are_taken_for_infinity():
    scores = torch.randn(1, 1, 3, 3, dtype=torch.float64).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    observed = SourceLocator((operation("masked_fill", scores.clamp(min=-1e9), 5),), {"scores": scores})
    assert observed.line_of("scores").line == 5


# ------------------------------------------------------------------------------------------------------------------- order

UNPACKINGS = {
    "q, k, v = self.qkv(x).chunk(3, dim=-1)": True,
    "q, k, v = qkv[0], qkv[1], qkv[2]": True,
    "query, key, value = self.c_attn(x).split(self.n_embd, dim=2)": True,
    "xq, xk, xv = torch.split(self.wqkv(x), sizes, -1)": True,
    "Q, K, V = qkv.unbind(0)": True,
    "k, q, v = self.qkv(x).chunk(3, dim=-1)": False,
    "q, v, k = self.qkv(x).chunk(3, dim=-1)": False,
    "keys, queries, values = qkv.unbind(0)": False,
    "a, b, c = self.qkv(x).chunk(3, dim=-1)": None,
    "qkv = self.qkv(x).chunk(3, dim=-1)": None,
    "q, k = self.qk(x).chunk(2, dim=-1)": None,
    "q, k, v = (": None,
}


@pytest.mark.parametrize("source", UNPACKINGS)
def test_the_line_that_splits_a_fused_projection_shows_its_order(source):
    assert unpacks_in_order((operation("chunk", torch.zeros(1), 3, source),), "qkv") is UNPACKINGS[source]


def test_the_order_is_that_of_the_name():
    line = "k, q, v = self.kqv(x).chunk(3, dim=-1)"
    assert unpacks_in_order((operation("chunk", torch.zeros(1), 3, line),), "kqv") is True


def test_lines_that_do_not_split_show_no_order():
    assert unpacks_in_order((operation("linear", torch.zeros(1), 3, "k, q, v = f(x)"),), "qkv") is None
    assert unpacks_in_order((), "qkv") is None


# ------------------------------------------------------------------------------------------------------- the smallest input

SQUARE = MaskForm("mask", ("query", "key"), "bool")
PADDING = MaskForm("padding", ("batch", "key"), "bool")


SIZES, CPU = InputSizes(3, 5, 7, 6, 6), torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(4)


def drawn(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


@dataclass(frozen=True)
class Mistaken:
    """An attention that makes one mistake; `least` tokens are the fewest that it takes."""

    layer: ReferenceLayer
    made: tuple[AppliedMistake, ...]
    least: int = 1
    is_function: bool = False
    takes_context: bool = True
    n_rows: int = 2
    n_heads: int = 3
    sizes: InputSizes = SIZES
    dtype: torch.dtype = torch.float64
    device: torch.device = CPU

    def __call__(self, inputs: Inputs, *, mask=None, padding=None, training=False) -> AttentionOutput:
        if inputs.queries.shape[1] < self.least:
            raise ValueError("too short")
        keys: Tensor = inputs.queries if inputs.keys is None else inputs.keys
        rows = ReferenceInputs(inputs.queries, keys, keys, inputs.allowed, inputs.real)
        return AttentionOutput(run(stages_with(self.made), self.layer, rows).out)


def mistaken(said, *, causal=False, **more):
    made = next(one for one in variants_of(MISTAKES) if one.variant.description == said)
    biases = (Projection(drawn(6, 6), drawn(6)) for _ in range(3))
    layer = ReferenceLayer(3, 3, weights=Projections(*biases, Projection(drawn(6, 6), drawn(6))), causal=causal)
    return Mistaken(layer, (made,), **more)


def shown(subject, *, other=False, form=None, padding=None):
    """The sizes of the smallest example."""
    rows = Inputs(drawn(3, 5, 6), drawn(3, 7, 6) if other else None)
    k_len = 7 if other else 5
    if form is not None:
        rows = rows._replace(allowed=torch.ones(1, 1, 5, k_len, dtype=torch.bool).tril())
    if padding is not None:
        rows = rows._replace(real=torch.arange(k_len)[None] < torch.tensor([[3], [4], [k_len]]))
    like = make_case("core", "so", subject, rows, form, padding)
    small = smallest(subject, subject.layer, RIGHT, like, 0)
    return small if small is None else tuple(small[:3])


@pytest.mark.parametrize(
    ("said", "sizes"),
    [
        ("every token sees every other", (1, 2, 2)),
        ("a token also sees the next one", (1, 2, 2)),
        ("a token does not see itself, only earlier ones", (1, 1, 1)),
        ("the scores are not scaled at all", (1, 2, 2)),
        ("the scores are k qᵀ instead of q kᵀ", (1, 2, 2)),
        ("the heads side by side are returned as they are", (1, 1, 1)),
        ("the bias of v is left out", (1, 1, 1)),
        ("the softmax runs over heads instead of keys", (1, 1, 1)),
        ("the softmax runs over the sequences of the batch instead of keys", (1, 2, 2)),
        ("[batch, head, query, d_v] is reshaped to [batch, query, head·d_v] without a transpose", (1, 2, 2)),
    ],
)
def test_the_smallest_input_has_two_tokens_where_two_suffice_and_one_where_one_does(said, sizes):
    is_causal = said.startswith(("every token sees", "a token"))
    assert shown(mistaken(said, causal=is_causal)) == sizes


def test_an_input_that_the_module_does_not_take_does_not_count():
    assert shown(mistaken("the heads side by side are returned as they are", least=3)) == (1, 3, 3)


def test_the_smallest_of_another_text_may_have_one_query():
    said = "the triangle begins at the first key when queries are fewer than keys"
    assert shown(mistaken(said, causal=True), other=True) == (1, 1, 2)
    assert shown(mistaken(said, causal=True)) is None


def test_the_smallest_input_with_a_mask_or_padding_has_one():
    assert shown(mistaken("the mask is not read"), form=SQUARE) == (1, 2, 2)
    assert shown(mistaken("padding is seen like any token"), padding=PADDING) == (1, 2, 2)


def test_what_is_right_differs_nowhere():
    right = replace(mistaken("the mask is not read"), made=())
    assert shown(right) is None
    assert shown(right, other=True) is None


def test_the_difference_and_the_largest_number_are_those_of_the_smallest_input():
    subject = mistaken("the heads side by side are returned as they are")
    like = make_case("core", "so", subject, Inputs(drawn(3, 5, 6)))
    small = smallest(subject, subject.layer, RIGHT, like, 3)
    row = torch.randn(1, 1, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wrong = subject(Inputs(row)).out
    right = replace(subject, made=())(Inputs(row)).out
    assert small.difference == pytest.approx((wrong - right).abs().max().item())
    assert small.largest == pytest.approx(wrong.abs().max().item())


@pytest.mark.parametrize(
    ("said", "n_tokens"),
    [("every token sees every other", 2), ("the scores are not scaled at all", 2), ("softmax twice", 2)],
)
def test_nothing_smaller_shows_a_mistake_that_needs_two_tokens(said, n_tokens):
    said = "the softmax is applied to its own result" if said == "softmax twice" else said
    subject = mistaken(said, causal=said.startswith("every"))
    right = replace(subject, made=())
    for batch in (1, 2, 3):
        row = Inputs(drawn(batch, n_tokens - 1, 6))
        assert torch.allclose(subject(row).out, right(row).out, rtol=0, atol=1e-12)
    row = Inputs(drawn(1, n_tokens, 6))
    assert not torch.allclose(subject(row).out, right(row).out, rtol=0, atol=1e-3)


def test_beside_other_mistakes_only_what_one_of_them_does_is_shown():
    """The reference may make the others too: without a scale and without a bias, one token shows the bias alone."""
    scale = mistaken("the scores are not scaled at all")
    both = replace(scale, made=(*scale.made, *mistaken("the bias of the output projection is left out").made))
    like = make_case("core", "so", both, Inputs(drawn(3, 5, 6)))
    assert smallest(both, both.layer, stages_with(both.made[:1]), like, 0)[:3] == (1, 1, 1)
    assert smallest(both, both.layer, stages_with(both.made[1:]), like, 0)[:3] == (1, 2, 2)
    assert smallest(both, both.layer, stages_with(both.made), like, 0) is None
