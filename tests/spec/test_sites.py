"""SITES, the table behind the walkthrough, the shape check and the documentation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mhacli.spec.config import Config
from mhacli.spec.facts import Facts
from mhacli.spec.sites import SITES

AXIS_WORDS = {"batch", "head", "kv_head", "query", "key", "d_head", "d_v", "d_model", "d_input"}
CONFIG = Config(d_model=10, n_heads=9, n_kv_heads=3, d_head=5, d_v=2).resolved()
SELF = Facts(CONFIG, batch=2, q_len=7, k_len=7)
CROSS = Facts(CONFIG, batch=2, q_len=7, k_len=11, cross=True)

FORMULAS = {
    "ids": "ids = position of each token in the vocabulary",
    "random": "random = N(0, 1) from the seed",
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
    "q_rot": "q_rot[i] = columns j and j + 3 of q[i], rotated by i · 10000^(−2j/d_head)",
    "k_rot": "k_rot[i] = columns j and j + 3 of k[i], rotated by i · 10000^(−2j/d_head)",
    "alibi": "alibi[h, i, j] = −m[h] · |i − j|, m = 0.5, 0.25, 0.125, 0.0625, …",
    "bias": "bias = b.safetensors",
    "qk": "qk = q kᵀ",
    "scores": "scores = 0.447214 · qk; −∞ where masked",
    "pattern": "pattern = softmax(scores) over the keys",
    "dropped": "dropped = pattern · keep / (1 − 0)",
    "z": "z = pattern v",
    "concat": "concat = z[0] … z[n_heads − 1] side by side",
    "head_out": "head_out[h] = z[h] W_o[h]ᵀ",
    "out": "out = concat W_oᵀ + b_o",
    "out_sum": "out = Σ_h head_out[h] + b_o",
}

ONLY_WITH = {
    "random": {"random": (2, 7)}, "q_rot": {"positions": "rope", "d_head": 6},
    "k_rot": {"positions": "rope", "d_head": 6}, "alibi": {"positions": "alibi"}, "bias": {"score_bias": "b.safetensors"},
}  # fmt: skip
"""The choices without which a run does not pass a site."""

SHAPES = {
    "ids": (2, 7), "random": (2, 7, 10), "embed": (2, 7, 10), "positions": (7, 10), "x": (2, 7, 10), "context": (2, 11, 10),
    "qkv": (2, 7, 45 + 15 + 6), "kv": (2, 11, 15 + 6),
    "q_proj": (2, 7, 45), "k_proj": (2, 11, 15), "v_proj": (2, 11, 6),
    "q_per_head": (2, 9, 7, 5), "k_per_head": (2, 3, 11, 5), "v_per_head": (2, 3, 11, 2),
    "q": (2, 9, 7, 5), "k": (2, 3, 11, 5), "v": (2, 3, 11, 2),
    "q_rot": (2, 9, 7, 5), "k_rot": (2, 3, 11, 5), "alibi": (9, 7, 11), "bias": (2, 9, 7, 11),
    "qk": (2, 9, 7, 11), "scores": (2, 9, 7, 11), "pattern": (2, 9, 7, 11), "dropped": (2, 9, 7, 11),
    "z": (2, 9, 7, 2), "concat": (2, 7, 18), "head_out": (2, 9, 7, 10), "out": (2, 7, 10), "out_sum": (2, 7, 10),
}  # fmt: skip


def with_config(facts, **choices):
    config = Config(**{"d_model": 10, "n_heads": 9, "d_head": 5, **choices}).resolved()
    return Facts(config, facts.batch, facts.q_len, facts.k_len)


def reached(name):
    """Facts of a run that passes the site."""
    return with_config(SELF, **ONLY_WITH[name]) if name in ONLY_WITH else SELF


def test_every_site_says_how_it_is_made_from_the_sites_before_it():
    assert {name: site.formula_for(reached(name)) for name, site in SITES.items()} == FORMULAS


def test_every_formula_begins_with_the_name_of_its_site():
    own_sign = {"positions": "p[i, 2j]", "context": "c", "out_sum": "out"}
    for name, site in SITES.items():
        left = site.formula_for(reached(name)).partition(" = ")[0]
        indexed = left.removesuffix("[h]").removesuffix("[i]").removesuffix("[h, i, j]")
        assert (left if name in own_sign else indexed) == own_sign.get(name, name.removesuffix("_per_head"))


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
        ({"scale": 0.25}, "scores", "scores = 0.25 · qk; −∞ where masked"),
        ({"scale": 2.0, "softcap": 30.0}, "scores", "scores = 30 · tanh(2 · qk / 30); −∞ where masked"),
        ({"dropout": 0.25, "train": True}, "dropped", "dropped = pattern · keep / (1 − 0.25)"),
        ({"dropout": 0.25, "train": True}, "z", "z = dropped v"),
        ({"dropout": 0.25}, "z", "z = pattern v"),
        ({"random": (2, 7)}, "x", "x = random + positions"),
        ({"random": (2, 7), "positions": "rope", "d_head": 6}, "x", "x = random"),
        ({"random": (2, 7), "distribution": "uniform"}, "random", "random = U(0, 1) from the seed"),
        ({"positions": "learned"}, "positions", "p[i] = P[i]"),
        ({"positions": "learned"}, "x", "x = embed + positions"),
        ({"positions": "learned"}, "context", "c = E[context ids] + positions"),
        ({"positions": "rope", "d_head": 6}, "x", "x = embed"),
        ({"positions": "alibi"}, "context", "c = E[context ids]"),
        ({"d_input": 7}, "positions", "p[i, 2j] = sin(i / 10000^(2j/d_input)), p[i, 2j+1] = cos(same)"),
        ({"positions": "rope", "d_head": 6}, "qk", "qk = q_rot k_rotᵀ"),
        ({"positions": "rope-interleaved", "d_head": 6}, "qk", "qk = q_rot k_rotᵀ"),
        ({"positions": "alibi"}, "qk", "qk = q kᵀ"),
        (
            {"positions": "rope-interleaved", "d_head": 6, "rope_theta": 500000.0},
            "k_rot",
            "k_rot[i] = columns 2j and 2j + 1 of k[i], rotated by i · 500000^(−2j/d_head)",
        ),
        ({"positions": "alibi", "n_heads": 2}, "alibi", "alibi[h, i, j] = −m[h] · |i − j|, m = 0.0625, 0.003906"),
        ({"positions": "alibi"}, "scores", "scores = 0.447214 · qk + alibi; −∞ where masked"),
        ({"score_bias": "b"}, "scores", "scores = 0.447214 · qk + bias; −∞ where masked"),
        (
            {"positions": "alibi", "score_bias": "b", "scale": 2.0, "softcap": 30.0},
            "scores",
            "scores = 30 · tanh(2 · qk / 30) + alibi + bias; −∞ where masked",
        ),
    ],
)
def test_formulas_follow_the_config(choices, site, formula):
    assert SITES[site].formula_for(with_config(SELF, **choices)) == formula


def test_axes_are_words_of_the_house():
    for site in SITES:
        for axis in SITES[site].axes_for(SELF):
            for word in axis.replace("+", "·").split("·"):
                assert word in AXIS_WORDS


def test_the_shape_of_a_site_is_the_sizes_of_its_axes():
    for site in SITES:
        assert SITES[site].shape_for(CROSS) == SHAPES[site]


INPUT_ROWS = ("random", "embed", "positions", "x", "context")


def test_rows_are_of_the_width_of_the_input_where_that_is_its_own():
    facts = replace(CROSS, config=replace(CONFIG, d_input=4))
    for name in INPUT_ROWS:
        assert SITES[name].axes_for(facts)[-1] == "d_input"
        assert SITES[name].shape_for(facts) == (*SHAPES[name][:-1], 4)
        assert SITES[name].axes_for(CROSS)[-1] == "d_model"
    for name, site in SITES.items():
        if name not in INPUT_ROWS:
            assert site.axes_for(facts) == site.axes_for(CROSS)


@pytest.mark.parametrize(
    ("facts", "is_own"),
    [
        (SELF, False),
        (replace(SELF, packed=True), True),
        (replace(SELF, padded=True), False),
        (replace(SELF, config=replace(CONFIG, padding="left")), False),
        (replace(SELF, padded=True, config=replace(CONFIG, padding="left")), True),
    ],
)
def test_sequences_that_do_not_begin_together_count_their_own_places(facts, is_own):
    assert facts.has_separate_positions == is_own
    assert SITES["positions"].shape_for(facts) == ((2, 7, 10) if is_own else (7, 10))
    assert SITES["alibi"].shape_for(facts) == ((2, 9, 7, 7) if is_own else (9, 7, 7))
    place = "place of i" if is_own else "i"
    assert (
        SITES["positions"].formula_for(facts) == f"p[i, 2j] = sin({place} / 10000^(2j/d_model)), p[i, 2j+1] = cos(same)"
    )
    assert ("positions count from the first token of each text" in SITES["positions"].meaning_for(facts)) == is_own
    learned = replace(facts, config=replace(facts.config, positions="learned"))
    assert SITES["positions"].formula_for(learned) == f"p[i] = P[{place}]"


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
    assert SITES["scores"].meaning_for(SELF) == start + "every key is visible"
    single = Facts(Config(d_model=10, n_heads=2, causal=True, window=(3, 1)).resolved(), 1, 7, 7)
    assert SITES["scores"].meaning_for(single) == (
        start + "no token sees a later one, keys from 3 left to 1 right of the query"
    )
    assert SITES["scores"].meaning_for(Facts(CONFIG, 1, 7, 7)) == start + "every key is visible"
    for choices, rules in (
        ({"prefix": 1}, "no token sees a later one, except that all see the first token"),
        ({"prefix": 3, "causal": True}, "no token sees a later one, except that all see the first 3 tokens"),
        ({"window": (4, 0), "sink": 2}, "keys from 4 left to 0 right of the query, and the first 2 tokens"),
        (
            {"window": (4, 0), "sink": 1, "prefix": 2},
            "no token sees a later one, keys from 4 left to 0 right of the query, and the first token, "
            "except that all see the first 2 tokens",
        ),
    ):
        assert SITES["scores"].meaning_for(with_config(SELF, **choices)) == start + rules
    packed = replace(SELF, packed=True, padded=True, config=replace(CONFIG, padding="left"))
    assert SITES["scores"].meaning_for(packed) == start + "no token sees another document, padding is never seen"


def test_sources_and_parameters_are_names_that_exist():
    for name, site in SITES.items():
        assert site.name == name
        assert set(site.sources) <= SITES.keys()
        assert set(site.parameters) <= {"embed", "embed_positions", "q_proj", "k_proj", "v_proj", "o_proj"}
        assert list(SITES).index(name) > max((list(SITES).index(source) for source in site.sources), default=-1)


def test_every_site_explains_itself_in_one_line():
    for facts in (SELF, CROSS):
        meanings = [site.meaning_for(facts) for site in SITES.values()]
        assert all(meaning and "\n" not in meaning for meaning in meanings)
        assert len(set(meanings)) == len(meanings)
