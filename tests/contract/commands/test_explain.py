"""`mha explain` knows every word that it lists, by each of its names, and suggests the nearest for
others.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.mha import Ended, run

Mha = Callable[..., Ended]
Term = dict[str, Any]


@pytest.fixture(scope="module")
def terms(tmp_path_factory: pytest.TempPathFactory) -> list[Term]:
    """All terms."""
    ended = run(tmp_path_factory.mktemp("terms"), "explain", "--json")
    assert ended.json["schema"] == "mha.explain/1"
    return list(ended.json["terms"])


def names(terms: list[Term]) -> list[tuple[str, str]]:
    return [(term["group"], term["name"]) for term in terms]


def test_terms_differ_and_each_is_explained_in_sentences(terms: list[Term]) -> None:
    assert len(terms) > 150
    assert len(set(names(terms))) == len(terms)
    for term in terms:
        assert term["explanation"].endswith("."), term["name"]
        assert term["name"] not in term["also"]
        assert not term["formula"] or term["group"] != "mistake"


def test_failures_are_explained_with_their_effect_and_what_to_look_at(terms: list[Term]) -> None:
    longer = ("sees-the-future", "sees-unstated", "padding-leak", "cache-differs")
    longer += ("documents-leak", "differs-beyond", "gradient-differs", "gradient-cut")
    sentences = {term["name"]: term["explanation"].count(". ") + 1 for term in terms}
    assert all(sentences[name] >= 3 for name in longer)


def test_every_term_is_found_by_each_of_its_names(mha: Mha, terms: list[Term]) -> None:
    """Words without blanks can be asked for together."""
    words = {
        word: term for term in terms for word in (term["name"], *term["also"]) if " " not in word
    }
    words = {word: term for word, term in words.items() if not word.startswith("-")}
    printed = names(mha("explain", "--json", "--", *words).json["terms"])
    for word, term in words.items():
        assert (term["group"], term["name"]) in printed, word
    longer = {term["group"]: term["name"] for term in terms if " " in term["name"]}
    assert len(longer) > 5
    for group, name in longer.items():
        assert (group, name) in names(mha("explain", *name.split(), "--json").json["terms"])


def test_the_list_and_the_groups_name_every_term(mha: Mha, terms: list[Term]) -> None:
    text = " ".join(mha("explain", env={"COLUMNS": "200"}).stdout.split())
    for group in ("sites", "probes", "mistakes"):
        text += " " + " ".join(mha("explain", group, env={"COLUMNS": "200"}).stdout.split())
    for term in terms:
        assert term["name"] in text


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("sink", {("concept", "sink"), ("column", "first"), ("head type", "first token")}),
        ("Effective_Keys", {("column", "eff.keys")}),
        ("previous-token", {("head type", "previous token")}),
        ("|i-j|", {("column", "|i−j|")}),
        ("≈", {("sign", "≈")}),
        ("KL", {("effect", "KL")}),
        ("sinusoidal", {("concept", "positional encoding")}),
        ("masks", {("concept", "mask")}),
        ("not tried", {("concept", "behaves")}),
        ("autocast", {("concept", "autocast")}),
    ],
)
def test_a_word_means_every_term_of_that_name_however_it_is_spelt(
    mha: Mha, word: str, expected: set[tuple[str, str]]
) -> None:
    assert set(names(mha("explain", word, "--json").json["terms"])) == expected


@pytest.mark.parametrize("group", ["bench", "decode", "effect", "diff", "mistakes", "head types"])
def test_the_terms_of_a_group_are_those_of_its_name(
    mha: Mha, terms: list[Term], group: str
) -> None:
    printed = names(mha("explain", group, "--json").json["terms"])
    assert set(printed) == {
        pair for pair in names(terms) if pair[0] in (group, group.removesuffix("s"))
    }
    assert len(printed) > 5


def test_every_column_of_heads_and_every_site_is_a_term(mha: Mha, terms: list[Term]) -> None:
    known = {word for term in terms for word in (term["name"], *term["also"])}
    ran = mha("run", "the cat sat on the cat", "--json").json
    fields = {name for name, value in ran["heads"][0].items() if isinstance(value, float)}
    spelt = {word.replace(" ", "_").replace("-", "_") for word in known}
    assert {step["site"] for step in ran["trace"]} <= known
    assert fields <= spelt, fields - spelt


def test_text_has_formula_and_source_and_fits_80_columns(mha: Mha, terms: list[Term]) -> None:
    (entropy,) = [term for term in terms if (term["group"], term["name"]) == ("column", "H")]
    done = mha("explain", "entropy")
    text = " ".join(done.stdout.split())
    for field in ("explanation", "formula", "source"):
        assert entropy[field] in text
    for words in ((), ("mistakes",), ("sites",)):
        assert max(map(len, mha("explain", *words).stdout.splitlines())) <= 80


def test_an_unknown_word_is_a_usage_error_that_names_the_nearest(mha: Mha) -> None:
    for words, nearest in (
        (["indcution"], "induction"),
        (["atention"], "attention"),
        (["zzzzzz"], "explain"),
    ):
        done = mha("explain", *words, "--json", code=2)
        assert words[0] in done.error["message"]
        assert nearest in done.error["hint"]
    mha("explain", "H/max", "nothing-of-that-name", code=2)


WORDS = (
    "padding, scaling, √d, sqrt, temperature, softmax, attention, self-attention, cross-attention,"
    " multi-head, causal, mask, sliding window, kv cache, residual, embedding, position, logits,"
    " head, token, query, key, value, scores, attention weights, transformers, encoder, decoder,"
    " encoder-decoder, projections, dot product, dot-products, layernorm, layer normalisation,"
    " feed-forward, FFN, look-ahead mask, sdpa, scaled dot-product attention, positional encodings,"
    " vocabulary, hidden states, language model, logit, perplexity, flash attention, W_q,"
    " output projection, autoregressive, greedy, parameters, context window, additive attention"
)


@pytest.mark.parametrize("word", WORDS.split(", "))
def test_the_words_of_a_first_course_are_known(word: str, mha: Mha) -> None:
    assert mha("explain", *word.split(), "--json").json["terms"][0]["group"] == "concept"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The names of the options that the help of each command lists."""
    place = tmp_path_factory.mktemp("options")
    listed = re.findall(r"^  ([a-z]+)  ", run(place, "--help").stdout, flags=re.MULTILINE)
    assert len(listed) == 16
    return {
        command: re.findall(
            r"^  (?:-\w, )?(--[\w-]+)", run(place, command, "--help-all").stdout, flags=re.MULTILINE
        )
        for command in listed
    }


def test_every_option_of_every_command_is_explained(
    mha: Mha, options: dict[str, list[str]]
) -> None:
    own = {*options["explain"]}
    every = {name for names in options.values() for name in names}
    assert len(every) > 100
    found = mha("explain", "--json", *sorted(every - own)).json["terms"]
    explained = {term["name"]: term["explanation"] for term in found if term["group"] == "option"}
    assert every - own <= {*explained}
    for command, names in options.items():
        for name in {*names} - own:
            texts = [term["explanation"] for term in found if term["name"] == name]
            assert any(f"mha {command}" in text for text in texts), (command, name)
    for name in own:
        assert mha("explain", name.removeprefix("--"), "--json").json["terms"]


def test_the_choices_of_an_option_are_words(mha: Mha) -> None:
    for choice, option in {"preallocated": "--cache", "interleaved": "--rope"}.items():
        assert option in [term["name"] for term in mha("explain", choice, "--json").json["terms"]]


def test_an_option_that_there_is_not_gets_the_nearest(mha: Mha) -> None:
    assert "--max-time" in mha("explain", "--max-tme", code=2).said


COLUMNS = tomllib.loads(files("mhacli").joinpath("record/columns.toml").read_text("utf-8"))
FIRST_TOKENS = "4"
"""What stands in a heading in place of the number of first tokens."""
HEADINGS = {
    (table, name): word["heading"].format(sink_tokens=FIRST_TOKENS)
    for table, words in COLUMNS.items()
    for name, word in words.items()
    if word.get("heading")
}


def test_every_heading_of_a_table_is_explained(mha: Mha) -> None:
    for heading in set(HEADINGS.values()):
        known = {
            word
            for term in mha("explain", heading, "--json").json["terms"]
            for word in (term["name"], *term["also"])
        }
        assert heading in known


def test_heads_are_sorted_by_what_their_columns_are_called_on_the_screen(
    mha: Mha, tmp_path: Path
) -> None:
    run(tmp_path, "run", "the cat sat on the cat", "--heads", "4", "--save", "r")

    def in_order(key: str) -> str:
        ended = mha("show", "r", "--view", "none", "--sort", key, code=range(3))
        assert ended.code == 0 or "no head here has" in ended.said  # such as a learned sink
        return ended.stdout

    orders = set()
    for name, word in COLUMNS["statistic"].items():
        if heading := HEADINGS.get(("statistic", name)):
            orders.add(by_field := in_order(name))
            assert in_order(heading) == in_order(word["name"]) == by_field
    assert len(orders) > 2
    assert in_order("type") == in_order("kind")
    assert in_order("H:up") == in_order("entropy:up") != in_order("entropy")


@pytest.mark.parametrize(
    ("typed", "near"), [("entrpy", "entropy"), ("eff.kys", "eff.keys"), ("|i-k|", "|i−j|")]
)
def test_a_near_name_of_a_column_is_answered_with_the_name(mha: Mha, typed: str, near: str) -> None:
    for words in (["run", "the cat", "--sort", typed], ["explain", typed]):
        assert f"did you mean {near}" in mha(*words, "--json", code=2).error["hint"]


def test_the_scale_is_explained_by_computed_variances(mha: Mha) -> None:
    """A sum of d_head products of independent numbers of variance 1 has the variance d_head."""
    (term,) = mha("explain", "scaling", "--json").json["terms"]
    found = re.findall(
        r"d_head (\d+): ([\d.]+) \(.*? (\.\d+)\) unscaled, ([\d.]+) \(.*? (\.\d+)\) scaled",
        term["example"],
    )
    assert [row[0] for row in found] == ["8", "64"]
    for d_head, raw, most_raw, scaled, most_scaled in (map(float, row) for row in found):
        assert raw == pytest.approx(d_head, rel=0.1)
        assert scaled == pytest.approx(1, rel=0.1)
        assert most_scaled < most_raw
    text = " ".join(mha("explain", "sqrt").stdout.split())
    assert " ".join(term["example"].split()) in text


def test_the_commands_that_explain_padding_show_what_it_takes_unmasked(mha: Mha) -> None:
    (term,) = mha("explain", "padding mask", "--json").json["terms"]
    commands = re.findall(r'mha run ("[a-z ]+") ("[a-z ]+")', term["explanation"])
    masked, unmasked = (
        mha("run", *(text.strip('"') for text in texts), "--json").json for texts in commands
    )
    assert [sequence["tokens"] for sequence in masked["sequences"]] == [
        ["cat", "sat", "pad"],
        ["cat"],
    ]
    for with_mask, without in zip(masked["pattern"][1], unmasked["pattern"][1], strict=True):
        assert with_mask[0] == [1, 0, 0]
        assert sum(without[0]) == pytest.approx(1)
        assert 0 < without[0][0] < 1
    first = zip(masked["pattern"][0], unmasked["pattern"][0], strict=True)
    for one, other in first:  # the same layer and embedding
        assert one == pytest.approx(np.array(other))


def test_every_column_of_a_table_is_explained(mha: Mha) -> None:
    words = ("the cat sat on it", "--d-model", "8", "--heads", "2", "--csv")
    columns = {
        name
        for command in ("run", "heads", "effect")
        for name in mha(command, *words).stdout.partition("\n")[0].split(",")
    }
    assert len(columns) > 30
    for name in columns | {"file", "place", "n_documents", "n_tokens"}:  # rows of a scan
        assert mha("explain", name, "--json").json["terms"], name
