"""Tokens of a text: words, characters, bytes and tokenizer files, their places in the text, ids and
vocabularies.
"""

from __future__ import annotations

import json
import random
import re
import string
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import checkpoints
from support.mha import run

SMALL = "--heads 1 --d-model 2 --positions none --keep ids --repeat 1 --json".split()
LETTERS = "aBΣσΑİé́'’\"-.,…。 \t　12漢字🙂ß\u00ad"


def sequences(folder: Path, texts: Sequence[str], *options: str) -> list[dict[str, Any]]:
    """The tokens of each text. They are given as arguments, so that any character can stand in
    them.
    """
    words = [word for text in texts for word in ("--text", text)]
    return list(run(folder, "run", *words, *options, *SMALL).json["sequences"])


def tokens(folder: Path, texts: Sequence[str], *options: str) -> list[list[str]]:
    return [sequence["tokens"] for sequence in sequences(folder, texts, *options)]


WORDS = {
    "Don't panic, (CAT)!": ("don't panic cat", "don't panic , ( cat ) !"),
    "Don’t": ("don’t", "don’t"),
    "rock'n'roll": ("rock'n'roll", "rock'n'roll"),
    "'quoted'": ("quoted", "' quoted '"),
    "‘quoted’": ("quoted", "‘ quoted ’"),
    "the cats' tails": ("the cats tails", "the cats ' tails"),
    "a''b": ("ab", "a ' ' b"),
    "the 80's": ("the 80's", "the 80's"),
    "cafe\u0301's": ("cafe\u0301's", "cafe\u0301's"),
    "E\u0301TE\u0301!": ("e\u0301te\u0301", "e\u0301te\u0301 !"),
    "1,000.5!": ("1,000.5", "1,000.5 !"),
    "3. .5 1..2": ("3 5 12", "3 . . 5 1 . . 2"),
    "v1.b e.g.": ("v1b eg", "v1 . b e . g ."),
    "well-known it's 3.5%.": ("wellknown it's 3.5", "well - known it's 3.5 % ."),
    "yes -- !? no": ("yes no", "yes - - ! ? no"),
    "Привет, МИР!": ("привет мир", "привет , мир !"),
    "你好，世界。": ("你好世界", "你好 ， 世界 。"),
    "مرحبا، بالعالم": ("مرحبا بالعالم", "مرحبا ، بالعالم"),
    "नमस्ते दुनिया।": ("नमस्ते दुनिया", "नमस्ते दुनिया ।"),
    "«Ça va»\u00a0?": ("ça va", "« ça va » ?"),
    "a\u3000b": ("a b", "a b"),
    "ΟΔΟΣ ΣΑΣ ΑΣ-Α ΑΣ'Α": ("οδος σας ασα ασ'α", "οδος σας ας - α ασ'α"),
    "İİ, b": ("i\u0307i\u0307 b", "i\u0307i\u0307 , b"),
}
"""Words of a text, without and with its punctuation."""


@pytest.mark.parametrize("column", [0, 1], ids=["drop", "keep"])
def test_words_are_lower_case_and_keep_marks_inside_them(tmp_path: Path, column: int) -> None:
    by_text = tokens(tmp_path, list(WORDS), "--punctuation", ("drop", "keep")[column])
    assert by_text == [pair[column].split() for pair in WORDS.values()]


def test_words_keep_their_case_where_that_is_chosen(tmp_path: Path) -> None:
    assert tokens(tmp_path, ["The CAT, İ"], "--keep-case") == [["The", "CAT", "İ"]]


def test_a_word_lies_from_its_first_to_its_last_kept_character(tmp_path: Path) -> None:
    texts = ["  (Don't!)", '  "Don\'t," he', "İİ, b", "E\u0301TE\u0301!"]
    places = [sequence["offsets"] for sequence in sequences(tmp_path, texts)]
    assert places == [[[3, 8]], [[3, 8], [11, 13]], [[0, 2], [4, 5]], [[0, 5]]]


def random_texts(seed: int, n: int) -> list[str]:
    """Texts with letters, marks and white space whose rules depend on what stands beside them."""
    dice = random.Random(seed)
    texts = ["".join(dice.choice(LETTERS) for _ in range(dice.randrange(3, 40))) for _ in range(n)]
    return [f"x {text} 1" for text in texts]


def is_mark(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character)[0] == "P"


def inner_marks(text: str) -> set[int]:
    """The places of marks that belong to a word or a number."""
    letter = r"[^\W_]"
    return {
        m.start()
        for m in re.finditer(
            rf"(?<={letter}|[\u0300-\u036f])['\u2019](?={letter})|(?<=\d)[.,](?=\d)", text
        )
    }


@pytest.mark.parametrize("punctuation", ["drop", "keep"])
@pytest.mark.parametrize("case", ["--keep-case", "--lower-case"])
def test_a_word_is_its_slice_of_the_text(tmp_path: Path, punctuation: str, case: str) -> None:
    for sequence in sequences(tmp_path, random_texts(1, 40), "--punctuation", punctuation, case):
        text, inner = sequence["text"], inner_marks(sequence["text"])
        for token, (start, end) in zip(sequence["tokens"], sequence["offsets"], strict=True):
            kept = "".join(
                c
                for i, c in enumerate(text[start:end], start)
                if punctuation == "keep" or i in inner or not is_mark(c)
            )
            assert token == (kept if case == "--keep-case" else kept.lower())
        if punctuation == "keep":
            assert "".join(text[a:b] for a, b in sequence["offsets"]) == re.sub(r"\s", "", text)


def test_characters_are_tokens_with_white_space(tmp_path: Path) -> None:
    (sequence,) = sequences(tmp_path, ["a 🙂b"], "--tokenizer", "char")
    assert sequence["tokens"] == ["a", " ", "🙂", "b"]
    assert sequence["offsets"] == [[0, 1], [1, 2], [2, 3], [3, 4]]


def test_bytes_spell_the_text_and_lie_at_their_characters(tmp_path: Path) -> None:
    for sequence in sequences(tmp_path, random_texts(2, 12), "--tokenizer", "byte"):
        values = [
            ord(token) if len(token) == 1 else int(token[3:-1], 16) for token in sequence["tokens"]
        ]
        assert bytes(values) == sequence["text"].encode()
        places = [i for i, character in enumerate(sequence["text"]) for _ in character.encode()]
        assert sequence["offsets"] == [[i, i + 1] for i in places]


@pytest.mark.parametrize("tokenizer", ["word", "char", "byte"])
def test_vocab_counts_the_tokens_of_run(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "text.txt").write_text("\n".join(random_texts(3, 30)))
    options = ("--tokenizer", tokenizer, "--file", "text.txt")
    counts = {
        entry["token"]: entry["count"]
        for entry in run(tmp_path, "vocab", *options, "--json").json["tokens"]
    }
    (sequence,) = run(tmp_path, "run", *options, *SMALL).json["sequences"]
    assert counts == {token: sequence["tokens"].count(token) for token in sequence["tokens"]}


# -------------------------------------------------------------------------------- ids, vocabularies


def test_ids_number_the_sorted_tokens_of_all_texts_and_contexts(mha: Any) -> None:
    record = mha(
        "run", "--text", "b c d", "--text", "a", "--context", "e d", "--context", "z", *SMALL
    ).json
    assert record["vocabulary"] == ["a", "b", "c", "d", "e", "z"]
    assert [sequence["ids"] for sequence in record["sequences"]] == [[1, 2, 3], [0]]
    assert [sequence["ids"] for sequence in record["context"]] == [[4, 3], [5]]


def test_one_context_serves_every_text(mha: Any) -> None:
    record = mha(
        "run", "--text", "a", "--text", "b", "--text", "c", "--context", "d e", *SMALL
    ).json
    assert [sequence["tokens"] for sequence in record["context"]] == [["d", "e"]] * 3


@pytest.mark.parametrize(
    ("document", "vocabulary", "ids"),
    [
        (["the", "cat"], ["the", "cat", "<unk>"], [1, 2, 0]),
        ({"cat": 1, "the": 0}, ["the", "cat", "<unk>"], [1, 2, 0]),
        (["<unk>", "cat"], ["<unk>", "cat"], [1, 0, 0]),
    ],
    ids=["list", "map", "with unknown"],
)
def test_a_vocabulary_file_gives_ids_and_an_unknown(
    mha: Any, tmp_path: Path, document: Any, vocabulary: list[str], ids: list[int]
) -> None:
    (tmp_path / "words.json").write_text(json.dumps(document))
    record = mha("run", "cat dog the", "--vocab", "words.json", *SMALL).json
    assert (record["vocabulary"], record["sequences"][0]["ids"]) == (vocabulary, ids)


def test_the_first_tokens_are_taken_where_a_number_is_given(mha: Any) -> None:
    record = mha("run", "--text", "a b c d", "--text", "a", "--max-tokens", "2", *SMALL).json
    assert [sequence["tokens"] for sequence in record["sequences"]] == [["a", "b"], ["a"]]
    assert record["vocabulary"] == ["a", "b"]


def test_a_long_word_is_refused_and_the_longest_that_may_be_is_not(mha: Any) -> None:
    assert (
        mha("run", "four four", "--max-token-len", "4", *SMALL).json["sequences"][0]["tokens"]
        == ["four"] * 2
    )
    for command in (("run", *SMALL), ("vocab", "--json")):
        ended = mha(command[0], "four fifth four", "--max-token-len", "4", *command[1:], code=1)
        assert ended.error["code"] == "too-large"
        assert "5" in ended.error["message"]
        assert "--max-token-len" in ended.said


# ---------------------------------------------------------------------------------- tokenizer files


def test_a_tokenizer_file_brings_ids_places_and_vocabulary(mha: Any, tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "the": 1, "cat": 2}, "unk_token": "[UNK]"}
    document = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": model,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    record = mha("run", "the cat the dog", "--tokenizer", "tokenizer.json", *SMALL).json
    assert record["vocabulary"] == ["[UNK]", "the", "cat"]
    assert record["sequences"][0]["ids"] == [1, 2, 1, 0]
    assert record["sequences"][0]["offsets"] == [[0, 3], [4, 7], [8, 11], [12, 15]]
    (tmp_path / "words.json").write_text('["the"]')
    mha("run", "the", "--tokenizer", "tokenizer.json", "--vocab", "words.json", "--json", code=2)


def saved_bpe(path: Path, *, prefix_space: bool, special: Sequence[str] = ()) -> Any:
    """A byte-level BPE as GPT-2's that never saw other scripts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=prefix_space),
        decoders.ByteLevel(),
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(special),
        show_progress=False,
    )
    library.train_from_iterator(
        ["the cat sat on the mat, don't you see", " Eiffel Tower in 2024"] * 9, trainer
    )
    library.save(str(path))
    return library


def test_byte_level_tokens_have_the_ids_and_characters_of_the_library(
    mha: Any, tmp_path: Path
) -> None:
    library = saved_bpe(tmp_path / "t.json", prefix_space=False, special=["<|im_start|>"])
    for text in ("the cat, don't! see 日é🙂 x", "<|im_start|>the mat", "  two  spaces "):
        (sequence,) = mha("run", text, "--tokenizer", "t.json", *SMALL).json["sequences"]
        encoded = library.encode(text)
        assert sequence["ids"] == encoded.ids
        characters = [text[start:end].strip() for start, end in sequence["offsets"]]
        assert characters == [text[start:end].strip() for start, end in encoded.offsets]


def test_the_pieces_of_a_character_are_distinct_and_lie_at_it(mha: Any) -> None:
    words = ("--model", str(checkpoints.folder("gpt2")), "--keep", "pattern", "--json")
    (sequence,) = mha("run", "a日b", *words).json["sequences"]
    first, *pieces, last = sequence["tokens"]
    assert (first, last) == ("a", "b")
    assert len(set(pieces)) == len(pieces) == len("日".encode())
    assert sequence["offsets"] == [[0, 1], *[[1, 2]] * 3, [2, 3]]


# -------------------------------------------------------------------------------------------- spans


def test_a_span_holds_the_tokens_that_share_a_character_with_it(mha: Any) -> None:
    text = "The Eiffel Tower is in Paris."
    spans = ["subject=4:16", "i=/i/", "either=/Eiffel|Paris/", "end=23:", "case=/(?i)the|paris/"]
    ranges = [
        [(4, 16)],
        [(m.start(), m.end()) for m in re.finditer("i", text)],
        [(4, 10), (23, 28)],
        [(23, 29)],
        [(0, 3), (23, 28)],
    ]
    words = [word for span in spans for word in ("--span", span)]
    model = ("--model", str(checkpoints.folder("gpt2")))
    record = mha("run", text, *model, *words, "--json", "--keep", "pattern").json
    offsets = record["sequences"][0]["offsets"]
    for span, characters in zip(record["spans"], ranges, strict=True):
        inside = {i for start, end in characters for i in range(start, end)}
        expected = [i for i, (start, end) in enumerate(offsets) if inside & set(range(start, end))]
        assert span["tokens"] == [expected], span


@pytest.mark.parametrize(
    ("span", "code"),
    [
        ("a=5:30", "usage"),
        ("a=29:", "usage"),
        ("a=5:5", "usage"),
        ("a=6:5", "usage"),
        ("a=-1:5", "usage"),
        ("a=", "usage"),
        ("a=/x", "usage"),
        ("1a=0:5", "usage"),
        (f"{'a' * 41}=0:5", "usage"),
        ("user", "usage"),
        ("a=/(/", "usage"),
        ("a=/" + "x" * 501 + "/", "usage"),
        ("a=/London/", "no-span"),
        ("a=/x*/", "no-span"),
    ],
)
def test_what_names_no_span_is_refused(mha: Any, span: str, code: str) -> None:
    text = "The Eiffel Tower is in Paris."
    ended = mha(
        "run", text, "--model", str(checkpoints.folder("gpt2")), "--span", span, "--json", code=2
    )
    assert ended.error["code"] == code
    assert span.partition("=")[0][:40] in ended.error["message"]


@pytest.mark.real
def test_an_expression_that_takes_too_long_is_stopped(mha: Any) -> None:
    model = ("--model", str(checkpoints.folder("gpt2")))
    words = (*model, "--span", "a=/(a|aa)+$/", "--max-tokens", "9", "--json")
    assert mha("run", "a" * 3000 + "!", *words, code=1).error["code"] == "too-slow"
