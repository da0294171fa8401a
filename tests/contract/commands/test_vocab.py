"""`mha vocab` counts the tokens of texts of any size and numbers them; the saved vocabulary gives
the same ids to a run.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.mha import Ended

Mha = Callable[..., Ended]
STORY = Path(__file__).parents[3] / "sample_texts" / "story.txt"
MIB = 1 << 20


def counts(ended: Ended) -> dict[str, int]:
    return {entry["token"]: entry["count"] for entry in ended.json["tokens"]}


def require_numbered(tokens: list[dict[str, Any]]) -> None:
    """Tokens in the order of their code points, ids from 0, and the bytes of each in UTF-8."""
    assert [entry["token"] for entry in tokens] == sorted({entry["token"] for entry in tokens})
    assert [entry["id"] for entry in tokens] == list(range(len(tokens)))
    assert all(entry["bytes"] == len(entry["token"].encode()) for entry in tokens)


def test_words_are_counted_and_numbered(mha: Mha) -> None:
    text = "The cat sat on the mat Ä cat 日本"
    ended = mha("vocab", text, "--json")
    assert (ended.json["schema"], ended.json["tokenizer"]) == ("mha.vocab/1", "word")
    assert counts(ended) == Counter(text.lower().split())
    require_numbered(ended.json["tokens"])


@pytest.mark.parametrize("tokenizer", ["char", "byte"])
def test_characters_and_bytes_are_counted_as_they_stand(
    mha: Mha, tmp_path: Path, tokenizer: str
) -> None:
    """A character keeps its case and its normal form; a byte that is no ASCII is written as its
    number.
    """
    text = "Don’t e\u0301 é ß\n日本 ﬁ"
    (tmp_path / "text.txt").write_text(text)
    ended = mha("vocab", "--file", "text.txt", "--tokenizer", tokenizer, "--json")
    expected = Counter(
        text
        if tokenizer == "char"
        else [chr(b) if b < 128 else f"<0x{b:02X}>" for b in text.encode()]
    )
    assert counts(ended) == expected
    assert all(entry["bytes"] == 1 for entry in ended.json["tokens"] if tokenizer == "byte")


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from(["a", "Ab", "aB", "XYZ", "ß", "äX", "Äx", "cc"]), min_size=1, max_size=30
    ),
    st.booleans(),
)
def test_counts_are_those_of_a_counter(mha: Mha, words: list[str], keeps_case: bool) -> None:
    options = ["--keep-case"] if keeps_case else []
    ended = mha("vocab", "-", *options, "--json", stdin=" \n".join(words))
    assert counts(ended) == Counter(word if keeps_case else word.lower() for word in words)
    require_numbered(ended.json["tokens"])


def test_case_and_punctuation_are_kept_where_they_are_requested(mha: Mha) -> None:
    text = "Stop! The end, the end."
    assert counts(mha("vocab", text, "--keep-case", "--json")) == {
        "Stop": 1,
        "The": 1,
        "the": 1,
        "end": 2,
    }
    marks = counts(mha("vocab", text, "--punctuation", "keep", "--json"))
    assert marks == {"stop": 1, "!": 1, "the": 2, "end": 2, ",": 1, ".": 1}


def test_a_text_longer_than_a_block_of_a_file_is_counted_whole(mha: Mha, tmp_path: Path) -> None:
    """Words and letters of several bytes lie across every border of a block, whatever its size."""
    text = "größe naïve 日本語 " * 90_000
    (tmp_path / "long.txt").write_text(text)
    assert len(text.encode()) > 2 * MIB
    expected = {unicodedata.normalize("NFC", word): 90_000 for word in text.split()[:3]}
    assert counts(mha("vocab", "--file", "long.txt", "--json")) == expected
    assert counts(mha("vocab", "--file", "-", "--json", stdin=text)) == expected


def test_several_texts_and_files_are_counted_together(mha: Mha, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("the cat\n")
    (tmp_path / "two.txt").write_text("the dog")
    ended = mha("vocab", "--file", "one.txt", "--file", "two.txt", "--json")
    assert counts(ended) == {"the": 2, "cat": 1, "dog": 1}
    assert counts(mha("vocab", "the cat", "the dog", "--json")) == counts(ended)


def test_the_story_has_the_statistics_of_its_words(mha: Mha) -> None:
    """The numbers above the table are those of the document, and the most frequent words come
    first.
    """
    ended = counts(mha("vocab", "--file", STORY, "--json"))
    n_tokens, n_distinct = sum(ended.values()), len(ended)
    head, _, *rows = mha("vocab", "--file", STORY, "--top", "5").stdout.splitlines()
    assert [word.replace(",", "") for word in head.split() if word[0].isdigit()] == [
        str(n_tokens),
        str(n_distinct),
    ]
    top = Counter(ended).most_common(5)
    shown = [(row.split()[1], int(row.split()[2].replace(",", ""))) for row in rows[:5]]
    assert [count for _, count in shown] == [count for _, count in top]
    assert all(ended[token] == count for token, count in shown)


def test_a_saved_vocabulary_gives_its_ids_to_a_run_and_the_last_to_unknown_words(
    mha: Mha, tmp_path: Path
) -> None:
    printed = mha("vocab", "the cat sat on the mat", "--save", "v.json", "--json")
    assert (tmp_path / "v.json").read_text() == printed.stdout
    ids = {entry["token"]: entry["id"] for entry in printed.json["tokens"]}
    ran = mha("run", "mat dog the", "--vocab", "v.json", "--json").json
    assert ran["sequences"][0]["ids"] == [ids["mat"], len(ids), ids["the"]]
    assert ran["vocabulary"][:-1] == list(ids)


@pytest.mark.parametrize(
    ("document", "mentions"),
    [
        ({"schema": "mha.vocab/9", "tokens": []}, "mha.vocab/9"),
        (7, "7"),
        ([], "0"),
        (["a", 3], "3"),
        ({"a": True}, "True"),
        ({"a": 0, "b": 0.5}, "0.5"),
        ({"a": 0, "b": 2}, "'b'"),
        ({"a": -1, "b": 0}, "-1"),
        (["a", "b", "a"], "'a'"),
        ({"schema": "mha.vocab/1", "tokens": [{"token": "a", "count": 1}]}, "tokens[0]"),
        ("{", "v.json"),
    ],
    ids=str,
)
def test_a_file_that_is_no_vocabulary_is_refused(
    mha: Mha, tmp_path: Path, document: Any, mentions: str
) -> None:
    (tmp_path / "v.json").write_text(
        document if isinstance(document, str) else json.dumps(document)
    )
    done = mha("run", "a", "--vocab", "v.json", "--json", code=1)
    assert done.missing("v.json", mentions) == []
