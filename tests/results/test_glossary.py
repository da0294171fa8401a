"""Every word on the screens has an explanation, taken from the tables behind the screens."""

from __future__ import annotations

import pytest

from mhacli.results.glossary import GROUPS, meanings, of_group, similar, terms
from mhacli.results.record.head_statistics import HEAD_TYPES, STATISTICS
from mhacli.spec.sites import SITES


def groups_of(word: str) -> list[str]:
    """The groups of the terms that a word names."""
    return [term.group for term in meanings(word)]


@pytest.mark.parametrize(("word", "groups"), [
    ("sink", ["concept", "column", "head type"]),
    ("H", ["column"]),
    ("effective keys", ["column"]),
    ("Effective_Keys", ["column"]),
    ("induction", ["column", "head type"]),
    ("qk", ["site"]),
    ("q", ["concept", "site"]),
    ("scale-missing", ["mistake"]),
    ("previous token", ["head type"]),
    ("previous-token", ["head type"]),
    ("*", ["sign"]),
    ("star", ["sign"]),
    ("≈", ["sign"]),
    ("nats", ["concept"]),
    ("cell", ["concept"]),
    ("row", ["concept"]),
    ("column", ["concept"]),
    ("pos", ["concept", "head type"]),
    ("Σ", ["sign"]),
    (".00", ["sign"]),
    ("0", ["sign"]),
    ("peak", ["bench"]),
    ("share_of_peak", ["bench"]),
    ("speed-up", ["decode"]),
    ("Δlogit", ["effect"]),
    ("KL", ["effect"]),
    ("rank", ["effect"]),
    ("found", ["doctor"]),
    ("differs", ["diff"]),
    ("strongest_key", ["sign"]),
    ("noise", ["concept", "bench"]),
    ("verdict", ["concept"]),
    ("residue", ["concept"]),
    ("map", ["concept"]),
    ("received", ["concept"]),
    ("uniform_profile", ["concept"]),
    ("receives most", ["concept"]),
    ("stands out", ["concept"]),
    ("shade", ["concept"]),
    ("excess", ["column"]),
    ("batch independence", ["probe"]),
    ("first", ["column", "head type", "bench"]),
    ("nothing of the kind", []),
])  # fmt: skip
def test_a_word_names_the_terms_of_these_groups(word: str, groups: list[str]) -> None:
    assert groups_of(word) == groups


def test_every_column_type_and_site_is_a_term_by_all_of_its_names() -> None:
    for row in STATISTICS:
        for word in (row.heading.format(sink_tokens=4) or row.name, row.name, row.field):
            assert "column" in groups_of(word), word
    for kind, head_type in HEAD_TYPES.items():
        assert "head type" in groups_of(kind)
        assert "head type" in groups_of(head_type.name)
    for name in SITES:
        assert "site" in groups_of(name)


@pytest.mark.parametrize(("word", "group"), [("bench", "bench"), ("mistakes", "mistake"), ("head types", "head type")])
def test_a_group_is_named_in_the_singular_or_plural(word: str, group: str) -> None:
    assert of_group(word) == tuple(term for term in terms() if term.group == group)
    assert len(of_group(word)) > 5


def test_a_word_that_is_no_group_has_no_terms() -> None:
    assert of_group("scores") == of_group("nothing of the kind") == ()


def test_explanations_are_sentences_and_names_differ_within_a_group() -> None:
    for term in terms():
        assert term.explanation.endswith("."), term.name
        assert term.explanation[0].isupper() or term.explanation[0] in ".–", term.name
        assert term.group in GROUPS
        assert term.name not in term.also
    names = [(term.group, term.name) for term in terms()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("indcution", "induction"),
        ("uniform atention", "uniform attention"),
        ("scale-mising", "scale-missing"),
        ("atention", "attention weight"),
    ],
)
def test_a_misspelt_word_suggests_the_right_one(word: str, meant: str) -> None:
    assert meant in similar(word)


def test_what_resembles_nothing_suggests_nothing() -> None:
    assert similar("zzzzzzzzzz") == similar("stand by") == ()
