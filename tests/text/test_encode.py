import json
from pathlib import Path

import pytest

from mhacli.errors import MhaError, UsageError
from mhacli.spec.config import Config
from mhacli.spec.tokens import TokenSequence
from mhacli.text import encode as module
from mhacli.text.encode import Limits, encode
from mhacli.text.vocabulary import Vocabulary, with_unknown

WORDS = Config()


def fault_of(*arguments, **options):
    with pytest.raises(MhaError) as caught:
        encode(*arguments, **options)
    return type(caught.value), caught.value.message, caught.value.hint


def test_a_text_becomes_tokens_ids_and_offsets():
    encoded = encode(["The cat, the mat"], WORDS)
    assert encoded.sequences == (
        TokenSequence(
            "The cat, the mat", ("the", "cat", "the", "mat"), (2, 0, 2, 1), ((0, 3), (4, 7), (9, 12), (13, 16))
        ),
    )
    assert encoded.vocabulary.tokens == ("cat", "mat", "the")
    assert (encoded.context, encoded.notes, encoded.q_len, encoded.k_len) == (None, (), 4, 4)


def test_a_batch_shares_one_vocabulary_and_is_as_long_as_its_longest():
    encoded = encode(["b c d", "a"], WORDS)
    assert [sequence.ids for sequence in encoded.sequences] == [(1, 2, 3), (0,)]
    assert (encoded.q_len, encoded.k_len) == (3, 3)


def test_one_context_serves_every_text():
    encoded = encode(["a", "b", "c"], WORDS, context=["d e"])
    assert [sequence.tokens for sequence in encoded.context] == [("d", "e")] * 3
    assert (encoded.q_len, encoded.k_len) == (1, 2)
    assert encoded.vocabulary.tokens == ("a", "b", "c", "d", "e")


def test_contexts_can_be_given_one_for_each_text():
    encoded = encode(["a", "b"], WORDS, context=["c", "d e f"])
    assert [sequence.tokens for sequence in encoded.context] == [("c",), ("d", "e", "f")]
    assert encoded.k_len == 3


def test_unknown_words_of_a_given_vocabulary_are_counted():
    encoded = encode(["cat dog dog"], WORDS, context=["bird"], vocabulary=with_unknown(["cat"]))
    assert encoded.sequences[0].ids == (0, 1, 1)
    assert encoded.notes == ("3 of 4 tokens are not in the vocabulary and became <unk>",)


def test_a_vocabulary_without_unknown_refuses_other_words():
    assert fault_of(["cat dog"], WORDS, vocabulary=Vocabulary(("cat",)), vocabulary_source="w.safetensors") == (
        MhaError,
        "'dog' is not among the 1 tokens of w.safetensors",
        "with --vocab FILE words that the vocabulary lacks become <unk>",
    )


def test_no_text_is_a_usage_error():
    assert fault_of([], WORDS) == (
        UsageError,
        "no text is given",
        'try mha run "the cat sat on the mat", --file PATH, or - for stdin',
    )


def test_contexts_that_do_not_match_are_a_usage_error():
    message = "--context is given 2 times for 3 texts: give it once, or once for each"
    assert fault_of(["a", "b", "c"], WORDS, context=["d", "e"]) == (UsageError, message, None)


def test_causal_attention_has_no_context():
    assert fault_of(["a"], Config(causal=True), context=["b"]) == (
        UsageError,
        "--causal does not work with --context: a context has no order relative to the text",
        "leave out --causal or --context",
    )


@pytest.mark.parametrize(
    ("texts", "context", "message", "hint"),
    [
        ([" \n"], [], "the text has no tokens: it is only white space", None),
        (
            ["a", "?!"],
            [],
            "text 1 has no tokens: it is only punctuation",
            "--punctuation keep makes every mark a token",
        ),
        (["a"], ["\t"], "the context has no tokens: it is only white space", None),
    ],
)
def test_a_text_without_tokens_is_refused_by_name_and_reason(texts, context, message, hint):
    assert fault_of(texts, WORDS, context=context) == (MhaError, message, hint)


def test_max_tokens_takes_the_first_and_says_so():
    encoded = encode(["a b c d", "a"], WORDS, limits=Limits(max_tokens=2))
    assert [sequence.tokens for sequence in encoded.sequences] == [("a", "b"), ("a",)]
    assert encoded.notes == ("only the first 2 tokens of text 0 are used (--max-tokens)",)
    assert encoded.vocabulary.tokens == ("a", "b")


def test_a_text_of_exactly_the_limit_is_not_cut():
    encoded = encode(["a b"], WORDS, limits=Limits(max_tokens=2))
    assert (encoded.sequences[0].tokens, encoded.notes) == (("a", "b"), ())


def test_too_many_tokens_are_refused_where_no_number_was_requested(monkeypatch):
    monkeypatch.setattr(module, "DEFAULT_MAX_TOKENS", 3)
    assert fault_of(["a b c d"], WORDS) == (
        MhaError,
        "the text has more than 3 tokens",
        "--max-tokens 3 takes the first 3; a larger number raises the limit",
    )
    assert encode(["a b c"], WORDS).q_len == 3


def test_the_limit_on_word_length_is_passed_on():
    with pytest.raises(MhaError) as caught:
        encode(["abcd"], WORDS, limits=Limits(max_token_len=3))
    assert caught.value.code == "too-large"


@pytest.fixture
def tokenizer_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "the": 1, "cat": 2}, "unk_token": "[UNK]"}
    path.write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model})
    )
    return str(path)


def test_a_tokenizer_file_brings_ids_and_vocabulary(tokenizer_file):
    encoded = encode(["the cat the dog"], Config(tokenizer=tokenizer_file))
    assert encoded.sequences[0].ids == (1, 2, 1, 0)
    assert encoded.sequences[0].offsets == ((0, 3), (4, 7), (8, 11), (12, 15))
    assert encoded.vocabulary.tokens == ("[UNK]", "the", "cat")


def test_a_tokenizer_file_takes_no_other_vocabulary(tokenizer_file):
    message = f"--vocab contradicts {tokenizer_file}, which has its own vocabulary"
    kind, said, _ = fault_of(["a"], Config(tokenizer=tokenizer_file), vocabulary=with_unknown(["a"]))
    assert (kind, said) == (UsageError, message)


def test_a_tokenizer_file_that_gives_nothing_is_not_blamed_on_punctuation(tokenizer_file):
    document = json.loads(Path(tokenizer_file).read_text())
    document["normalizer"] = {"type": "Replace", "pattern": {"String": "x"}, "content": ""}
    Path(tokenizer_file).write_text(json.dumps(document))
    assert fault_of(["xx"], Config(tokenizer=tokenizer_file)) == (
        MhaError,
        "the text has no tokens: the tokenizer makes none of it",
        None,
    )
