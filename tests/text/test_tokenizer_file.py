import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from mhacli.errors import MhaError, UsageError
from mhacli.text.tokenizers import FileTokenizer

TEXTS = ["the cat sat", "the naïve café 漢字 🙂", "  two  spaces ", "a\nb", "nothing known here?"]


@pytest.fixture(scope="module")
def word_level(tmp_path_factory):
    """A file with a word-level model, special tokens around each text, and padding and truncation baked in."""
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "cat": 4, "sat": 5, "the": 6}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    made.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]"])
    made.enable_padding(pad_id=3, pad_token="[PAD]", length=64)
    made.enable_truncation(3)
    path = tmp_path_factory.mktemp("word_level") / "tokenizer.json"
    made.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A file with byte-level BPE, trained on a few words."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["the cat sat on the mat"] * 9,
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False),
    )
    path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    made.save(str(path))
    return str(path)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["word_level", "byte_level"])
def test_ids_and_offsets_are_those_of_the_library(kind, text, request):
    path = request.getfixturevalue(kind)
    library = tokenizers.Tokenizer.from_file(path)
    library.no_padding()
    library.no_truncation()
    expected = library.encode(text)
    found = list(FileTokenizer(path).tokens(text))
    assert [token.id for token in found] == expected.ids
    assert [(token.start, token.end) for token in found] == expected.offsets
    assert [token.text for token in found] == expected.tokens


def test_padding_and_truncation_in_the_file_are_off(word_level):
    tokens = [token.text for token in FileTokenizer(word_level).tokens("the cat sat the cat")]
    assert tokens == ["[CLS]", "the", "cat", "sat", "the", "cat", "[SEP]"]


def test_special_tokens_have_an_empty_span(word_level):
    first, *_, last = FileTokenizer(word_level).tokens("the cat")
    assert (first.text, first.start, first.end, first.id) == ("[CLS]", 0, 0, 1)
    assert (last.text, last.start, last.end, last.id) == ("[SEP]", 0, 0, 2)


def test_the_vocabulary_is_that_of_the_file(word_level):
    assert FileTokenizer(word_level).vocabulary.tokens == ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "cat", "sat", "the")


def test_ids_that_no_token_has_are_named_as_unused(word_level, tmp_path):
    document = json.loads(Path(word_level).read_text())
    document["model"]["vocab"]["dog"] = 9
    path = tmp_path / "holes.json"
    path.write_text(json.dumps(document))
    assert FileTokenizer(str(path)).vocabulary.tokens[6:] == ("the", "<unused 7>", "<unused 8>", "dog")


@pytest.mark.parametrize("pieces", [["the cat\nsat the\n"], ["the c", "at\nsat t", "he\n"], ["the cat\n", "sat the"]])
def test_counts_do_not_depend_on_the_cut_and_leave_special_tokens_out(word_level, pieces):
    assert FileTokenizer(word_level).count(pieces) == Counter({"the": 2, "cat": 1, "sat": 1})


@pytest.mark.parametrize("content", ["{", "[1, 2]", "{}", '{"version": "1.0", "model": {"type": "Unheard"}}', "\ud83d"])
def test_a_broken_file_is_refused_by_name(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(MhaError) as caught:
        FileTokenizer(str(path))
    assert caught.value.message.startswith(f"{path}")
    assert caught.value.code == "bad-file"


def test_a_missing_file_is_reported():
    with pytest.raises(MhaError) as caught:
        FileTokenizer("/nowhere/tokenizer.json")
    assert caught.value.message == "/nowhere/tokenizer.json does not exist"


def test_a_word_that_names_no_tokenizer_is_a_usage_error():
    with pytest.raises(UsageError) as caught:
        FileTokenizer("wrod")
    assert caught.value.message == "--tokenizer wrod is not one of word, char, byte or the path of a tokenizer.json"


@pytest.mark.parametrize("fault", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_the_library_works_is_no_fault_of_the_file(word_level, fault):
    def interrupted(*words, **options):
        raise fault

    tokenizer = FileTokenizer(word_level)
    tokenizer.library = SimpleNamespace(encode_batch=interrupted)
    with pytest.raises(fault):
        tokenizer.count(["the cat"])


def test_without_the_library_the_message_says_how_to_get_it(word_level, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MhaError) as caught:
        FileTokenizer(word_level)
    assert caught.value.message == "a tokenizer.json needs the tokenizers library, which is not installed"
    assert caught.value.hint == 'pip install "tokenizers>=0.22" installs it'


@pytest.mark.parametrize(
    "entry",
    [
        {"ids": [1], "tokens": ["[CLS]", "[CLS]"]},
        {"ids": [1, 1], "tokens": ["[CLS]"]},
        {"ids": [], "tokens": ["[CLS]"]},
        {"ids": [1], "tokens": []},
    ],
)
def test_a_special_token_with_more_ids_than_names_or_fewer_is_refused(word_level, entry, tmp_path):
    described = json.loads(Path(word_level).read_text())
    described["post_processor"]["special_tokens"]["[CLS]"] |= entry
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(described))
    with pytest.raises(MhaError) as caught:
        list(FileTokenizer(str(path)).tokens("the cat"))
    assert caught.value.message.startswith(f"{path} cannot be used by the tokenizers library: ")
    n_ids, n_tokens = 3 + len(entry["ids"]), 3 + len(entry["tokens"])
    assert f"{n_ids} ids and {n_tokens} tokens" in caught.value.message


def test_a_special_token_of_two_ids_and_two_names_is_two_tokens(word_level, tmp_path):
    described = json.loads(Path(word_level).read_text())
    described["post_processor"]["special_tokens"]["[CLS]"] |= {"ids": [1, 2], "tokens": ["[CLS]", "[SEP]"]}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(described))
    assert [token.id for token in FileTokenizer(str(path)).tokens("the cat")] == [1, 2, 6, 4, 2]


def test_a_special_token_whose_id_is_not_in_the_vocabulary_is_refused(word_level, tmp_path):
    described = json.loads(Path(word_level).read_text())
    described["post_processor"]["special_tokens"]["[CLS]"]["ids"] = [7]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(described))
    with pytest.raises(MhaError) as caught:
        list(FileTokenizer(str(path)).tokens("the cat"))
    assert caught.value.message == f"{path} gives '[CLS]' the id 7, but has 7 tokens"
