"""The intended layer: scales, rotations and heads from documentation, arguments and names."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mhacli.adapters.usercode.types import Built, InputSizes
from mhacli.compute.check.candidates import (
    candidates,
    documented_pairing,
    documented_scales,
    head_counts,
    intended_layer,
    stated_heads,
)
from mhacli.requests.user_code import CheckRequest, TargetRequest

REQUEST = CheckRequest(TargetRequest("mine.py:Attention"))


def built(documentation="", module=None, thing=None, **arguments):
    return Built(
        name="Attention",
        thing=thing or object(),
        call=lambda *given: None,
        module=module,
        arguments=arguments,
        given=frozenset(arguments),
        guesses=(),
        rebuild=lambda changes: built(),
        documentation=documentation,
    )


# ------------------------------------------------------------------------------------------------------------ documentation

UNSCALED = """The scores are unscaled, as in T5
Unscaled dot-product attention
Attention is not scaled here
The scores are not divided by sqrt(d_k)
attention without scaling
without dividing by sqrt(d_k)
no scaling is applied
There is no scale.
no 1/√d scaling
the scores are never scaled
scale: 1
the scale is 1.0 by design""".splitlines()

GIVEN = {
    "scores are scaled by 0.125": 0.125,
    "scores are scaled by 0.125, not by 1/√d": 0.125,
    "a scale of 0.05": 0.05,
    "scale = 0.25": 0.25,
    "scale: 0.1": 0.1,
    "a scaling factor of 0.5": 0.5,
    "scaling factor: 2": 2.0,
    "a softmax scale of 0.11 is used": 0.11,
    "Scaled by 3e-2 throughout": 0.03,
    "the scale is 8": 8.0,
    "Scores are scaled by 0.125.": 0.125,
    "scores are scaled by 1/8": 0.125,
    "scores are divided by 8": 0.125,
    "The scale is 1.": 1.0,
    "scale=1.0.": 1.0,
    "scale 0.5": 0.5,
}

NOTHING = """Scaled dot-product attention.
scores / sqrt(d_head)
Multi-head attention with scale 1/sqrt(d)
scores are scaled by 1/√d_head
The scale is 1/√d.
scale: float = None
scores are divided by the root of d_head
scaled by the square root of 64
An upscaled picture is cut into patches.
The pattern is rescaled by 1 / (1 - p).
Scale by sqrt(d_k).
scores are scaled by 1 / sqrt(d_k)
scores are scaled by 64^-0.5
scores are scaled by 64 ** -0.5
Padding is not scaled
no scaling of the learning rate
This does not scale to long texts.
16 heads of 64 columns, dropout 0.1""".splitlines()


@pytest.mark.parametrize("sentence", UNSCALED)
def test_documentation_may_state_that_there_is_no_scale(sentence):
    assert {value for value, _ in documented_scales(sentence)} == {1.0}
    assert all(words.lower() in sentence.lower() for _, words in documented_scales(sentence))


@pytest.mark.parametrize("sentence", GIVEN)
def test_a_documentation_names_a_scale(sentence):
    assert [value for value, _ in documented_scales(sentence)] == [GIVEN[sentence]]


@pytest.mark.parametrize("sentence", NOTHING)
def test_a_documentation_names_no_scale_but_the_usual_one(sentence):
    assert list(documented_scales(sentence)) == []


PAIRINGS = {
    "half": """rotary positions with rotate_half
        RoPE as in GPT-NeoX
        RoPE by rotate-half
        rotary embedding, rotated by halves
        NeoX-style rotary positions
        rotary, first half with second half
        RoPE on two halves""",
    "interleaved": """interleaved RoPE
        rotary: neighbouring columns are paired
        Neighbors are rotated together
        RoPE of adjacent pairs
        RoPE as in GPT-J
        RoPE, GPTJ style
        rotary, every two columns
        RoPE on even and odd columns
        rotary positions for consecutive pairs""",
    "nothing": """RoPE
        rotary embedding
        interleaved heads
        GPT-NeoX
        attention over adjacent tokens
        RoPE, interleaved or by rotate_half, as you like
        RoPE on a quarter of the columns""",
}


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_documentation_may_state_the_pairing_of_columns(pairing):
    for sentence in PAIRINGS[pairing].splitlines():
        assert documented_pairing(sentence) == (None if pairing == "nothing" else pairing), sentence


# -------------------------------------------------------------------------------------------------------------------- heads


class ProbeReply(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    "name", ["n_heads", "num_heads", "heads", "h", "nhead", "n_head", "num_attention_heads", "config.n_head"]
)
def test_the_number_of_heads_comes_from_an_argument(name):
    assert stated_heads(built(**{name: 6, "d_model": 24}), None, REQUEST) == [6]


def test_the_number_of_heads_comes_from_an_attribute_of_the_module_or_a_child():
    inner = ProbeReply(num_heads=4)
    assert stated_heads(built(), ProbeReply(inner=inner), REQUEST) == [4]
    assert stated_heads(built(n_heads=2), ProbeReply(num_heads=4), REQUEST) == [2, 4]


def test_the_heads_option_has_priority():
    request = CheckRequest(TargetRequest("mine.py:Attention"), n_heads=5)
    assert stated_heads(built(n_heads=2), ProbeReply(num_heads=4), request) == [5]


@pytest.mark.parametrize("value", [True, 0, -2, 2.0, "4", 5000, None])
def test_a_value_that_is_no_count_is_no_number_of_heads(value):
    assert stated_heads(built(n_heads=value), None, REQUEST) == []


def test_stated_heads_come_first_then_one_head_and_as_many_as_their_columns():
    assert head_counts(built(n_heads=3), None, REQUEST, parts_width=24) == [(3, None), (1, None), (8, None)]
    assert head_counts(built(n_heads=6, n_kv_heads=2), None, REQUEST, parts_width=24) == [(6, 2), (1, None), (4, 2)]


def test_groups_of_norms_and_convolutions_are_no_heads():
    module = ProbeReply(norm=nn.GroupNorm(4, 12), qkv=nn.Conv1d(12, 36, 1), proj=nn.Conv1d(12, 12, 1))
    assert head_counts(built(n_heads=3), module, REQUEST, parts_width=36)[0] == (3, None)
    assert {one.layer.n_kv_heads for one in listed(module, n_heads=3) if one.layer.n_heads == 3} == {3}


def test_unstated_heads_are_all_divisors_of_the_width():
    counts = head_counts(built(), None, REQUEST, parts_width=12)
    assert counts == [(n, None) for n in (1, 2, 3, 4, 6, 12)]


# ------------------------------------------------------------------------------------------------------------ what is meant


def scales(documentation="", module=None, request=REQUEST, **arguments):
    return [value for value, _ in intended_layer(built(documentation, **arguments), module, request, (False,)).scales]


def test_the_usual_scale_comes_first_and_those_that_are_stated_after_it():
    assert scales() == [None]
    assert scales("scores are scaled by 0.125 here") == [None, 0.125]
    assert scales("unscaled attention") == [None, 1.0]
    assert scales(scale=0.2) == [None, 0.2]
    assert scales(softmax_scale=0.3, bias=True) == [None, 0.3]


def test_a_scale_that_is_an_option_is_the_only_one():
    request = CheckRequest(TargetRequest("mine.py:Attention"), scale=0.7)
    meant = intended_layer(built("unscaled attention", scale=0.2), None, request, (False,))
    assert [value for value, _ in meant.scales] == [0.7]
    assert meant.scales[0][1].message == "the scale is 0.7, from --scale"


def test_a_scale_that_is_learned_is_read_as_it_is_as_its_exponential_and_as_its_inverse():
    module = nn.Module()
    module.temperature = nn.Parameter(torch.tensor(2.0))
    assert scales(module=module) == pytest.approx([None, 2.0, math.exp(2), 0.5])


def test_every_unusual_scale_is_a_choice():
    for value, choice in intended_layer(built("unscaled", scale=0.2), None, REQUEST, (False,)).scales:
        assert (choice is None) == (value is None)
        assert choice is None or choice.name == "scale"


def test_rotations_are_candidates_only_with_a_mention_of_rotary():
    assert intended_layer(built("plain attention"), None, REQUEST, (False,)).pairings == (None,)
    open_one = intended_layer(built("attention with rotary positions"), None, REQUEST, (False,))
    assert (open_one.pairings, open_one.is_pairing_known) == ((None, "half", "interleaved"), False)
    known = intended_layer(built("RoPE as in GPT-J"), None, REQUEST, (False,))
    assert (known.pairings, known.is_pairing_known) == (("interleaved",), True)


def test_the_rope_option_has_priority_over_the_documentation():
    request = CheckRequest(TargetRequest("mine.py:Attention"), rope="half")
    known = intended_layer(built("RoPE as in GPT-J"), None, request, (False,))
    assert (known.pairings, known.is_pairing_known) == (("half",), True)


def rotates(t, angle):
    """Nothing but its code says so."""
    return t * angle.cos() + t * angle.sin()


def test_a_rotation_is_seen_in_the_source():
    assert intended_layer(built(thing=rotates), None, REQUEST, (False,)).pairings == (None, "half", "interleaved")


def test_bases_and_caps_are_arguments():
    meant = intended_layer(built(rope_theta=500, softcap=30.0), None, REQUEST, (True, False))
    assert meant.thetas == (500.0, 10000.0)
    assert meant.softcap == 30.0
    assert meant.causal == (True, False)
    assert intended_layer(built(), None, REQUEST, (True,)).softcap is None


# -------------------------------------------------------------------------------------------------------------- candidates


class Asked:
    """As much of a subject as tells what it may be."""

    def __init__(self, module, is_function=False, **arguments):
        self.built, self.is_function, self.n_heads = built(module=module, **arguments), is_function, 3
        self.sizes = InputSizes(3, 5, 5, 12, 12)


class Layers(nn.Module):
    def __init__(self, **more):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(12, 12))
        for name, child in more.items():
            setattr(self, name, child)


def listed(module, documentation="", **arguments):
    subject = Asked(module, **arguments)
    meant = intended_layer(built(documentation, **arguments), module, REQUEST, (False,))
    return candidates(subject, module, {}, meant, REQUEST)


def test_the_layer_without_any_choice_comes_first():
    first = listed(Layers(), n_heads=3)[0]
    assert first.choices == ()
    assert (first.layer.n_heads, first.layer.n_kv_heads, first.layer.scale, first.layer.pairing) == (3, 3, None, None)
    assert not first.layer.interleaved_split
    assert not first.layer.interleaved_merge


def test_choices_grow_along_the_list():
    counts = [len(one.choices) for one in listed(Layers(norm=nn.LayerNorm(12)), "RoPE, unscaled", n_heads=3)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_norms_around_a_layer_are_choices():
    found = listed(Layers(norm=nn.LayerNorm(12), q_norm=nn.LayerNorm(4)), n_heads=3)
    names = {tuple(choice.name for choice in one.choices if choice.name != "interleaved-heads") for one in found}
    assert names == {
        ("qk-norm",), ("qk-norm", "pre-norm"), ("qk-norm", "pre-norm", "residual"), ("qk-norm", "post-norm", "residual"),
        ("qk-norm", "post-norm"), ("qk-norm", "residual"),
    }  # fmt: skip
    assert all(one.layer.q_norm is not None and one.layer.k_norm is None for one in found)


def test_each_norm_does_what_its_choices_state():
    norm, x, out = nn.LayerNorm(12), torch.randn(2, 12), torch.randn(2, 12)
    for one in listed(Layers(norm=norm), n_heads=3):
        names = {choice.name for choice in one.choices}
        wanted = out + x if "residual" in names else out
        wanted = norm(wanted) if "post-norm" in names else wanted
        given = out if one.layer.after is None else one.layer.after(out, x)
        assert torch.equal(given, wanted)
        assert (one.layer.before is norm) == ("pre-norm" in names)


def test_heads_other_than_stated_may_keep_the_scale_of_the_stated_ones():
    scales_of = {one.layer.n_heads: set() for one in listed(Layers(), n_heads=3)}
    for one in listed(Layers(), n_heads=3):
        scales_of[one.layer.n_heads].add(one.layer.scale)
    assert scales_of == {3: {None}, 1: {None, 0.5}, 4: {None, 0.5}}  # 12 columns in 3 heads: 1/√4


def test_a_function_is_one_layer_without_weights():
    (only,) = candidates(
        Asked(None, is_function=True), None, {}, intended_layer(built(), None, REQUEST, (False,)), REQUEST
    )
    assert only.layer.weights is None
    assert only.reading is None
    assert (only.layer.n_heads, only.layer.n_kv_heads) == (3, 3)


def test_unidentified_projections_give_no_candidate():
    assert listed(nn.Linear(12, 10), n_heads=3) == []
