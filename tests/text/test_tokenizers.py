import re
import string
import unicodedata
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhacli.errors import MhaError
from mhacli.spec.config import Config
from mhacli.text.encode import make_tokenizer
from mhacli.text.tokenizers import ByteTokenizer, CharTokenizer, WordTokenizer

OPTIONS = [(keep_case, punctuation) for keep_case in (False, True) for punctuation in ("drop", "keep")]
# words, marks, white space and letters whose lower case depends on what stands around them or is longer than they are
texts = st.text(
    st.sampled_from("aBΣσΑİé́'\u2019\"-.,…。 \t\n\u300012漢字🙂ß\u00ad")
    | st.characters(codec="utf-8", exclude_categories=("Cs", "Mn", "Mc", "Me")),
    max_size=60,
)


LETTERS = r"[^\W_]"
COMBINED = "".join(c for c in map(chr, range(0x300, 0x370)) if unicodedata.category(c) == "Mn")
INNER = re.compile(rf"(?<={LETTERS}|[{COMBINED}])['\u2019](?={LETTERS})|(?<=\d)[.,](?=\d)")
"""The marks inside words and numbers, for the combining marks of Latin alone."""


def words(text, **options):
    return [token.text for token in WordTokenizer(**options).tokens(text)]


def spans(text, **options):
    return [text[token.start : token.end] for token in WordTokenizer(**options).tokens(text)]


def is_mark(character):
    return character in string.punctuation or unicodedata.category(character)[0] == "P"


def test_words_are_lower_case_and_lose_their_marks():
    assert words("Don't panic, (CAT)!") == ["don't", "panic", "cat"]


@pytest.mark.parametrize(
    ("text", "dropped", "kept"),
    [
        ("don't", ["don't"], ["don't"]),
        ("Don\u2019t", ["don\u2019t"], ["don\u2019t"]),
        ("rock'n'roll", ["rock'n'roll"], ["rock'n'roll"]),
        ("'quoted'", ["quoted"], ["'", "quoted", "'"]),
        ("\u2018quoted\u2019", ["quoted"], ["\u2018", "quoted", "\u2019"]),
        ("the cats' tails", ["the", "cats", "tails"], ["the", "cats", "'", "tails"]),
        ("'tis", ["tis"], ["'", "tis"]),
        ("a''b", ["ab"], ["a", "'", "'", "b"]),
        ("the 80's", ["the", "80's"], ["the", "80's"]),
        ("e\u0301t\u00e9's", ["e\u0301t\u00e9's"], ["e\u0301t\u00e9's"]),
        ("cafe\u0301's", ["cafe\u0301's"], ["cafe\u0301's"]),
        ("3.14", ["3.14"], ["3.14"]),
        ("1,000.5!", ["1,000.5"], ["1,000.5", "!"]),
        ("3.", ["3"], ["3", "."]),
        (".5", ["5"], [".", "5"]),
        ("v1.b", ["v1b"], ["v1", ".", "b"]),
        ("e.g.", ["eg"], ["e", ".", "g", "."]),
        ("well-known", ["wellknown"], ["well", "-", "known"]),
        ("it's 3.5%.", ["it's", "3.5"], ["it's", "3.5", "%", "."]),
        ("1..2", ["12"], ["1", ".", ".", "2"]),
    ],
)
def test_a_mark_inside_a_word_or_number_is_part_of_it(text, dropped, kept):
    assert words(text) == dropped
    assert words(text, punctuation="keep") == kept
    assert spans(text, punctuation="keep", keep_case=True) == words(text, punctuation="keep", keep_case=True)


def test_the_span_of_a_word_with_marks_inside_covers_them():
    (token,) = WordTokenizer().tokens("  (Don't!)")
    assert token == ("don't", 3, 8, None)


def test_without_inner_marks_they_are_marks_like_any_other():
    assert words("Don't pay 3.14!", inner_marks=False) == ["dont", "pay", "314"]
    assert words("3.14", inner_marks=False, punctuation="keep") == ["3", ".", "14"]


def test_keep_case_leaves_letters_as_they_are():
    assert words("The CAT", keep_case=True) == ["The", "CAT"]


def test_kept_marks_are_tokens_of_their_own():
    assert words("Don't -- ok.", punctuation="keep") == ["don't", "-", "-", "ok", "."]


def test_a_run_of_marks_is_no_word_when_marks_are_dropped():
    assert words("yes -- !? no") == ["yes", "no"]


@pytest.mark.parametrize("text", ["", " ", "\n\t ", "...", "—"])
def test_a_text_without_words_has_no_tokens(text):
    assert words(text) == []


def test_spans_point_from_the_first_to_the_last_kept_character():
    assert spans('  "Don\'t," he') == ["Don't", "he"]
    assert spans("(a)b", punctuation="keep") == ["(", "a", ")", "b"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Привет, МИР!", ["привет", "мир"]),
        ("你好，世界。", ["你好世界"]),
        ("مرحبا، بالعالم", ["مرحبا", "بالعالم"]),
        ("नमस्ते दुनिया।", ["नमस्ते", "दुनिया"]),
        ("«Ça va»\u00a0?", ["ça", "va"]),
        ("a\u3000b", ["a", "b"]),
    ],
)
def test_marks_and_white_space_of_other_scripts_are_known(text, expected):
    assert words(text) == expected


def test_sigma_is_final_at_the_end_of_a_word_and_only_there():
    assert words("ΟΔΟΣ ΣΑΣ") == ["οδος", "σας"]
    assert words("ΑΣ-Α") == ["ασα"]
    assert words("ΑΣ-Α", punctuation="keep") == ["ας", "-", "α"]
    assert words("ΑΣ'Α") == ["ασ'α"]


def test_combining_marks_stay_with_their_letter():
    (token,) = WordTokenizer().tokens("E\u0301TE\u0301!")
    assert (token.text, token.start, token.end) == ("e\u0301te\u0301", 0, 5)


def test_a_letter_whose_lower_case_is_longer_does_not_shift_spans():
    assert spans("İİ, b") == ["İİ", "b"]
    assert words("İİ, b") == ["i\u0307i\u0307", "b"]


def test_characters_are_tokens_with_white_space():
    assert list(CharTokenizer().tokens("a 🙂")) == [("a", 0, 1, None), (" ", 1, 2, None), ("🙂", 2, 3, None)]


def test_bytes_of_one_character_share_its_span():
    assert list(ByteTokenizer().tokens("aé€")) == [
        ("a", 0, 1, None),
        ("<0xC3>", 1, 2, None),
        ("<0xA9>", 1, 2, None),
        ("<0xE2>", 2, 3, None),
        ("<0x82>", 2, 3, None),
        ("<0xAC>", 2, 3, None),
    ]


@given(texts)
def test_byte_tokens_spell_the_utf8_of_the_text(text):
    def value(name):
        return ord(name) if len(name) == 1 else int(name[3:-1], 16)

    assert bytes(value(token.text) for token in ByteTokenizer().tokens(text)) == text.encode()


@st.composite
def cut_texts(draw):
    text = draw(texts)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return text, [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(
    "tokenizer",
    [CharTokenizer(), ByteTokenizer(), *(WordTokenizer(keep_case=case, punctuation=marks) for case, marks in OPTIONS)],
    ids=lambda tokenizer: type(tokenizer).__name__,
)
@given(cut=cut_texts())
def test_counting_pieces_counts_the_tokens_of_the_whole(tokenizer, cut):
    text, pieces = cut
    assert tokenizer.count(pieces) == Counter(token.text for token in tokenizer.tokens(text))


@pytest.mark.parametrize(("keep_case", "punctuation"), OPTIONS)
@pytest.mark.parametrize("inner_marks", [False, True])
@given(text=texts)
def test_a_word_is_its_source_slice_normalised(inner_marks, keep_case, punctuation, text):
    inner = {match.start() for match in INNER.finditer(text)} if inner_marks else set()
    for token in WordTokenizer(keep_case=keep_case, punctuation=punctuation, inner_marks=inner_marks).tokens(text):
        source = text[token.start : token.end]
        places = range(token.start, token.end)
        kept = (
            source if punctuation == "keep" else "".join(text[i] for i in places if i in inner or not is_mark(text[i]))
        )
        assert token.text == (kept if keep_case else kept.lower())
        assert kept


@given(texts)
def test_kept_marks_and_words_cover_everything_but_white_space(text):
    tokens = list(WordTokenizer(punctuation="keep").tokens(text))
    assert "".join(text[t.start : t.end] for t in tokens) == re.sub(r"\s", "", text)


LONG = (
    "a word has {} characters or more, above the limit of 4",
    "--max-token-len 40 raises the limit; --tokenizer char needs no spaces",
)


def test_a_word_beyond_the_limit_is_refused_with_an_alternative():
    assert words("four four", max_token_len=4) == ["four", "four"]
    with pytest.raises(MhaError) as caught:
        words("four fifth", max_token_len=4)
    assert (caught.value.message, caught.value.hint) == (LONG[0].format(5), LONG[1])


@pytest.mark.parametrize(
    "pieces", [["ab fifth ab"], ["ab fi", "fth ab"], ["f", "i", "f", "t", "h"], ["fifth"], [" ", "fifth"]]
)
def test_counting_refuses_a_long_word_however_the_text_is_cut(pieces):
    with pytest.raises(MhaError) as caught:
        WordTokenizer(max_token_len=4).count(pieces)
    assert (caught.value.message, caught.value.hint) == (LONG[0].format(5), LONG[1])


@given(cut=cut_texts(), limit=st.integers(1, 9))
def test_counting_refuses_exactly_what_tokens_refuse(cut, limit):
    text, pieces = cut
    too_long = any(len(run) > limit for run in text.split())
    for action in (lambda: WordTokenizer(max_token_len=limit).count(pieces), lambda: words(text, max_token_len=limit)):
        if too_long:
            with pytest.raises(MhaError):
                action()
        else:
            action()


@pytest.mark.parametrize(("name", "kind"), [("word", WordTokenizer), ("char", CharTokenizer), ("byte", ByteTokenizer)])
def test_a_config_names_its_tokenizer(name, kind):
    assert type(make_tokenizer(Config(tokenizer=name))) is kind


def test_the_config_says_how_words_are_made():
    config = Config(keep_case=True, punctuation="keep")
    assert [token.text for token in make_tokenizer(config).tokens("A b!")] == ["A", "b", "!"]
    with pytest.raises(MhaError):
        list(make_tokenizer(config, 3).tokens("four"))
