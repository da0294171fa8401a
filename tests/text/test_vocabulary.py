import json
from collections import Counter

import pytest

from mhacli.errors import MhaError
from mhacli.text import vocabulary as vocabularies
from mhacli.text.vocabulary import Entry, Vocabulary


@pytest.fixture
def file(tmp_path):
    """Writes a document to a file. The result is its path."""

    def write(document):
        path = tmp_path / "vocab.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return str(path)

    return write


def test_a_built_vocabulary_is_sorted_and_holds_each_token_once():
    assert vocabularies.build(["the", "cat", "the", "Ä"]).tokens == ("cat", "the", "Ä")


def test_the_position_of_a_token_is_its_id():
    assert vocabularies.build(["the", "cat", "sat"]).ids(["the", "cat", "the"], "here") == (2, 0, 2)


def test_a_token_that_is_missing_is_refused_where_there_is_no_unknown():
    with pytest.raises(MhaError) as caught:
        Vocabulary(("cat", "the")).ids(["the", "dog"], "words.json")
    assert caught.value.code == "unknown-token"


def test_a_given_vocabulary_gets_an_unknown_as_its_last_id():
    known = vocabularies.with_unknown(["the", "cat"])
    assert known.tokens == ("the", "cat", "<unk>")
    assert known.ids(["dog", "cat"], "here") == (2, 1)


def test_a_vocabulary_with_an_unknown_keeps_it_where_it_is():
    known = vocabularies.with_unknown(["<unk>", "cat"])
    assert known.tokens == ("<unk>", "cat")
    assert known.ids(["dog", "cat"], "here") == (0, 1)


@pytest.mark.parametrize(("tokens", "unknown_id"), [(["cat", "<unk>"], 1), (["cat"], None)])
def test_a_stored_vocabulary_is_taken_as_it_is(tokens, unknown_id):
    assert vocabularies.as_stored(tokens) == Vocabulary(tuple(tokens), unknown_id)


def test_entries_show_id_count_and_bytes_in_the_order_of_the_ids():
    rows = vocabularies.entries(Counter({"the": 2, "é": 1, "漢": 3}))
    assert rows == [Entry("the", 0, 2, 3), Entry("é", 1, 1, 2), Entry("漢", 2, 3, 3)]


def test_entries_take_the_ids_of_a_given_vocabulary():
    rows = vocabularies.entries(Counter({"a": 1, "b": 5}), Vocabulary(("b", "x", "a")))
    assert rows == [Entry("b", 0, 5, 1), Entry("a", 2, 1, 1)]


def test_the_document_is_json_of_the_schema():
    document = json.loads(vocabularies.to_json([Entry("é", 0, 4, 2)], "char"))
    assert document == {
        "schema": "mha.vocab/1",
        "tokenizer": "char",
        "inner_marks": True,
        "tokens": [{"token": "é", "id": 0, "count": 4, "bytes": 2}],
    }


def test_what_was_written_is_read_back(file):
    rows = vocabularies.entries(Counter(["the", "cat", "the", '"\\\n']))
    assert vocabularies.load(file(vocabularies.to_json(rows, "word"))).tokens == ('"\\\n', "cat", "the", "<unk>")


def test_a_vocabulary_says_whether_its_words_have_marks_inside_them(file):
    document = json.loads(vocabularies.to_json([Entry("don't", 0, 1, 5)], "word"))
    assert vocabularies.load(file(document)).inner_marks is True
    del document["inner_marks"]  # as an earlier version wrote it
    assert vocabularies.load(file(document)).inner_marks is False
    assert vocabularies.load(file(["don't"])).inner_marks is None


@pytest.mark.parametrize("document", [["b", "a"], {"a": 1, "b": 0}])
def test_a_list_or_a_map_of_tokens_is_read(file, document):
    assert vocabularies.load(file(document)).tokens == ("b", "a", "<unk>")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"schema": "mha.vocab/9"}, "has the schema 'mha.vocab/9', not mha.vocab/1"),
        (7, "holds 7, not a list of tokens or a map from token to id"),
        ([], "has 0 tokens: at least 1, at most 2000000"),
        (["a", 3], "maps 3 to 1, not a string to a whole number"),
        ({"a": True}, "maps 'a' to True, not a string to a whole number"),
        ({"a": 0, "b": 0.5}, "maps 'b' to 0.5, not a string to a whole number"),
        ({"a": 0, "b": 2}, "gives 'b' the id 2, but the ids of 2 tokens are 0 to 1, each once"),
        ({"a": -1, "b": 0}, "gives 'a' the id -1, but the ids of 2 tokens are 0 to 1, each once"),
        (["a", "b", "a"], "has the token 'a' twice"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_refused_with_the_rule(file, document, message):
    path = file(document)
    with pytest.raises(MhaError) as caught:
        vocabularies.load(path)
    assert caught.value.message == f"{path} {message}"


def test_a_token_without_its_fields_is_refused_by_its_place(file):
    path = file({"schema": "mha.vocab/1", "tokens": [{"token": "a", "count": 1, "bytes": 1}]})
    with pytest.raises(MhaError) as caught:
        vocabularies.load(path)
    assert caught.value.message.startswith(f"{path}.tokens[0] ")
