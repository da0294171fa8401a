"""SITES: the table that the walkthrough, the shape check and the documentation are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mhacli.config import Config
from mhacli.trace import SITES, Facts

AXIS_WORDS = {"batch", "head", "kv_head", "query", "key", "d_head", "d_v", "d_model"}
CONFIG = Config(d_model=10, n_heads=9, n_kv_heads=3, d_head=5, d_v=2).resolved()
SELF = Facts(CONFIG, batch=2, q_len=7, k_len=7)
CROSS = Facts(CONFIG, batch=2, q_len=7, k_len=11, cross=True)

FORMULAS = {
    "ids": "ids = position of each token in the vocabulary",
    "embed": "embed = E[ids]",
    "positions": "p[i, 2j] = sin(i / 10000^(2j/d_model)), p[i, 2j+1] = cos(same)",
    "x": "x = embed + positions",
    "context": "c = E[context ids] + positions",
    "qkv": "qkv = x W_qkvᵀ + b_qkv",
    "q_proj": "q_proj = x W_qᵀ + b_q",
    "q_per_head": "q[h] = x W_q[h]ᵀ + b_q[h]",
    "kv": "kv = c W_kvᵀ + b_kv",
    "q": "q[h] = columns h·d_head … (h+1)·d_head",
    "k_proj": "k_proj = x W_kᵀ + b_k",
    "k_per_head": "k[h] = x W_k[h]ᵀ + b_k[h]",
    "k": "k[h] = columns h·d_head … (h+1)·d_head",
    "v_proj": "v_proj = x W_vᵀ + b_v",
    "v_per_head": "v[h] = x W_v[h]ᵀ + b_v[h]",
    "v": "v[h] = columns h·d_v … (h+1)·d_v",
    "qk": "qk = q kᵀ",
    "scores": "scores = 0.447214 · qk; −∞ where not allowed",
    "pattern": "pattern = softmax(scores) over the keys",
    "dropped": "dropped = pattern · keep / (1 − 0)",
    "z": "z = pattern v",
    "concat": "concat = z[0] … z[n_heads − 1] side by side",
    "head_out": "head_out[h] = z[h] W_o[h]ᵀ",
    "out": "out = concat W_oᵀ + b_o",
    "out_sum": "out = Σ_h head_out[h] + b_o",
}

SHAPES = {
    "ids": (2, 7), "embed": (2, 7, 10), "positions": (7, 10), "x": (2, 7, 10), "context": (2, 11, 10),
    "qkv": (2, 7, 45 + 15 + 6), "kv": (2, 11, 15 + 6),
    "q_proj": (2, 7, 45), "k_proj": (2, 11, 15), "v_proj": (2, 11, 6),
    "q_per_head": (2, 9, 7, 5), "k_per_head": (2, 3, 11, 5), "v_per_head": (2, 3, 11, 2),
    "q": (2, 9, 7, 5), "k": (2, 3, 11, 5), "v": (2, 3, 11, 2),
    "qk": (2, 9, 7, 11), "scores": (2, 9, 7, 11), "pattern": (2, 9, 7, 11), "dropped": (2, 9, 7, 11),
    "z": (2, 9, 7, 2), "concat": (2, 7, 18), "head_out": (2, 9, 7, 10), "out": (2, 7, 10), "out_sum": (2, 7, 10),
}  # fmt: skip


def with_config(facts, **choices):
    return Facts(Config(d_model=10, n_heads=9, d_head=5, **choices).resolved(), facts.batch, facts.q_len, facts.k_len)


def test_every_site_says_how_it_is_made_from_the_sites_before_it():
    assert {name: site.formula_for(SELF) for name, site in SITES.items()} == FORMULAS


def test_every_formula_begins_with_the_name_of_its_site():
    own_sign = {"positions": "p[i, 2j]", "context": "c", "out_sum": "out"}
    for name, site in SITES.items():
        left = site.formula_for(SELF).partition(" = ")[0]
        assert left.removesuffix("[h]") == own_sign.get(name, name.removesuffix("_per_head"))


def test_keys_and_values_are_made_from_the_context_where_there_is_one():
    assert {name: SITES[name].formula_for(CROSS) for name in ("q_proj", "k_proj", "v_proj", "k_per_head", "kv")} == {
        "q_proj": "q_proj = x W_qᵀ + b_q",
        "k_proj": "k_proj = c W_kᵀ + b_k",
        "v_proj": "v_proj = c W_vᵀ + b_v",
        "k_per_head": "k[h] = c W_k[h]ᵀ + b_k[h]",
        "kv": "kv = c W_kvᵀ + b_kv",
    }


@pytest.mark.parametrize(
    ("choices", "site", "formula"),
    [
        ({"bias": False}, "q_proj", "q_proj = x W_qᵀ"),
        ({"bias": False}, "out", "out = concat W_oᵀ"),
        ({"bias": False}, "out_sum", "out = Σ_h head_out[h]"),
        ({"out_proj": False}, "out", "out = concat"),
        ({"positions": "none"}, "x", "x = embed"),
        ({"positions": "none"}, "context", "c = E[context ids]"),
        ({"scale": 0.25}, "scores", "scores = 0.25 · qk; −∞ where not allowed"),
        ({"scale": 2.0, "softcap": 30.0}, "scores", "scores = 30 · tanh(2 · qk / 30); −∞ where not allowed"),
        ({"dropout": 0.25, "train": True}, "dropped", "dropped = pattern · keep / (1 − 0.25)"),
        ({"dropout": 0.25, "train": True}, "z", "z = dropped v"),
        ({"dropout": 0.25}, "z", "z = pattern v"),
    ],
)
def test_formulas_follow_the_config(choices, site, formula):
    assert SITES[site].formula_for(with_config(SELF, **choices)) == formula


@pytest.mark.parametrize("site", SITES)
def test_axes_are_words_of_the_house(site):
    for axis in SITES[site].axes_for(SELF):
        for word in axis.replace("+", "·").split("·"):
            assert word in AXIS_WORDS


@pytest.mark.parametrize("site", SITES)
def test_the_shape_of_a_site_is_the_sizes_of_its_axes(site):
    assert SITES[site].shape_for(CROSS) == SHAPES[site]


def test_without_an_output_projection_the_output_is_as_wide_as_the_heads():
    facts = with_config(SELF, out_proj=False, d_v=2)
    assert SITES["out"].axes_for(facts) == ("batch", "query", "head·d_v")
    assert SITES["out"].shape_for(facts) == (2, 7, 18)


def test_an_axis_joins_products_and_sums_of_words():
    assert CROSS.size("key") == 11
    assert CROSS.size("head·d_head") == 45
    assert CROSS.size("kv_head·d_head+kv_head·d_v") == 21
    assert CROSS.cells() == 2 * 9 * 7 * 11


def test_the_meaning_of_the_scores_names_the_rules_of_the_mask():
    start = "scaled so that the softmax does not saturate, then masked: "
    assert SITES["scores"].meaning_for(replace(SELF, padded=True)) == start + "padding is never seen"
    assert SITES["scores"].meaning_for(SELF) == start + "every key is allowed"
    single = Facts(Config(d_model=10, n_heads=2, causal=True, window=(3, 1)).resolved(), 1, 7, 7)
    assert SITES["scores"].meaning_for(single) == (
        start + "no token sees a later one, keys from 3 left to 1 right of the query"
    )
    assert SITES["scores"].meaning_for(Facts(CONFIG, 1, 7, 7)) == start + "every key is allowed"


def test_sources_and_parameters_are_names_that_exist():
    for name, site in SITES.items():
        assert site.name == name
        assert set(site.sources) <= SITES.keys()
        assert set(site.parameters) <= {"embed", "q_proj", "k_proj", "v_proj", "o_proj"}
        assert list(SITES).index(name) > max((list(SITES).index(source) for source in site.sources), default=-1)


def test_every_site_explains_itself_in_one_line():
    for facts in (SELF, CROSS):
        meanings = [site.meaning_for(facts) for site in SITES.values()]
        assert all(meaning and "\n" not in meaning for meaning in meanings)
        assert len(set(meanings)) == len(meanings)
