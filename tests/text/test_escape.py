import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhacli.text.escape import token_label, visible

HIDDEN = (
    "\x1b\x07\x00\x7f\x9b\u061c\u200b\u200d\u200e\u202e\u2028\u2029\u2060\u2066\u2069\ufeff\u00ad\U000e0041\ufe0f\u3164"
)
alphabet = st.characters() | st.sampled_from(HIDDEN + "\\\n\t\u0301\u00a0xu0123abc ")
texts = st.text(alphabet, max_size=12)


@given(texts)
def test_nothing_that_a_terminal_obeys_or_hides_comes_out(text):
    for character in visible(text):
        assert unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
        assert character not in HIDDEN


@given(texts, texts)
def test_different_texts_stay_different(one, other):
    if one != other:
        assert visible(one) != visible(other)


def read_back(shown):
    """The text that an escaped one stands for, by the rules as a reader knows them."""
    shown = shown[1:] if shown[:1] == "◌" and unicodedata.category(shown[1:2] or "x")[0] == "M" else shown
    text, i = "", 0
    while i < len(shown):
        kind = shown[i + 1 : i + 2] if shown[i] == "\\" else ""
        length = {"": 1, "x": 4, "u": 6, "U": 10}.get(kind, 2)
        word = shown[i : i + length]
        text += {"\\n": "\n", "\\r": "\r", "\\t": "\t", "\\\\": "\\"}.get(word) or (
            word if length == 1 else chr(int(word[2:], 16))
        )
        i += length
    return text


@given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(HIDDEN + "\\\n\u0301 "), max_size=12))
def test_what_is_shown_can_be_read_back(text):
    if not text.startswith("◌"):
        assert read_back(visible(text)) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, 100 %!", "plain text, 100 %!"),
        ("", ""),
        ("red\x1b[31m", "red\\x1b[31m"),
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("back\\slash", "back\\\\slash"),
        ("\u202eevil", "\\u202eevil"),
        ("no\u00a0break", "no\\u00a0break"),
        ("\U000e0041", "\\U000e0041"),
        ("café 漢字 🙂", "café 漢字 🙂"),
        ("\u0301", "◌\u0301"),
        ("e\u0301", "e\u0301"),
        (b"\xff".decode("utf-8", "surrogateescape"), "\\xff"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_is_harmless_stays_and_what_is_not_becomes_an_escape(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize(
    "character",
    ["\u034f", "\u115f", "\u1160", "\u17b4", "\u180b", "\u2800", "\u3164", "\ufe00", "\ufe0f", "\uffa0", "\U000e0100"],
)
def test_characters_that_draw_nothing_are_escaped(character):
    assert visible(character).isascii()


def test_a_label_shows_each_space():
    assert token_label(" a  ") == "␣a␣␣"
    assert token_label("\u3000") == "\\u3000"


@given(texts, texts)
def test_no_two_tokens_have_the_same_label(one, other):
    if one != other:
        assert token_label(one) != token_label(other)


@pytest.mark.parametrize(("one", "other"), [(" ", "␣"), ("\u0301", "◌\u0301"), ("\udcff", "\xff"), ("\udc85", "\x85")])
def test_a_sign_of_mha_does_not_look_like_the_character_itself(one, other):
    assert token_label(one) != token_label(other)
