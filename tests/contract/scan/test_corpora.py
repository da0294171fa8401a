"""What `mha scan` reads: files, lines, JSON lines, Parquet and stdin; bad documents are left out,
counted and listed.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import checkpoints
from support.scans import has, rows_of

needs_pyarrow = pytest.mark.skipif(not has("pyarrow"), reason="needs pyarrow")


class Read(NamedTuple):
    """The documents that were read, `(file, line or row, bytes)`, and the bad entries, `(file, line
    or row)` with the reason.
    """

    documents: list[tuple[str, int, int]]
    bad: dict[tuple[str, int], str]


@pytest.fixture
def read(mha: Any, tmp_path: Path) -> Any:
    """Scans sources. Tokens are bytes, so that their number tells the text."""
    (tmp_path / "llama").symlink_to(checkpoints.folder("llama", max_position_embeddings=4096))

    def scan(*words: str, stdin: bytes | None = None) -> Read:
        words = (
            *"scan --model llama --tokenizer byte --layer 0 --out out --json".split(),
            *words,
        )
        corpus = mha(*words, stdin=stdin, env={"COLUMNS": "200"}).json["corpus"]
        rows = {
            (row["file"], row["place"], row["n_tokens"]): None for row in rows_of(tmp_path / "out")
        }
        return Read([*rows], {(bad["file"], bad["place"]): bad["reason"] for bad in corpus["bad"]})

    return scan


def write(folder: Path, **files: bytes | str) -> None:
    """Writes files; `__` in a name is a slash, and `_` a dot."""
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.real
def test_each_file_is_a_document_and_those_of_a_glob_are_sorted(read: Any, tmp_path: Path) -> None:
    write(
        tmp_path,
        x_txt="x",
        d__b_txt=b"\xef\xbb\xbfone\r\ntwo\n",
        d__a_txt="drei ü\r",
        d__e_txt="",
        d__i_txt=b"ab\xe9",
    )
    (tmp_path / "a[1].txt").write_text("12345")
    result = read("x.txt", "d/*", "d/a.txt", "a[1].txt")
    assert result.documents == [
        ("x.txt", 0, 1),
        ("d/a.txt", 0, 8),
        ("d/b.txt", 0, 8),
        ("a[1].txt", 0, 5),
    ]
    assert [*result.bad] == [("d/e.txt", 0), ("d/i.txt", 0)]
    assert "\\xe9" in result.bad["d/i.txt", 0]
    assert "2" in result.bad["d/i.txt", 0], "the offset"


def test_each_line_that_is_not_blank_is_a_document_with_its_number(
    read: Any, tmp_path: Path
) -> None:
    write(tmp_path, a_txt="one \r\n\n \t\nt\x0bw\x85o\n\nthree", b_jsonl='{"text": "one"}\n')
    expected = [("a.txt", 1, 4), ("a.txt", 4, 6), ("a.txt", 6, 5), ("b.jsonl", 1, 15)]
    assert read("a.txt", "b.jsonl", "--lines") == (expected, {})


@pytest.mark.parametrize("size", [1 << 16, pytest.param(1 << 20, marks=pytest.mark.real)])
def test_lines_are_whole_wherever_they_stand_in_a_long_file(
    read: Any, tmp_path: Path, size: int
) -> None:
    (tmp_path / "a.txt").write_bytes(b"\n" * (size - 4) + "zwölf €🙂.\n  ende".encode())
    assert read("a.txt", "--lines").documents == [("a.txt", size - 3, 15), ("a.txt", size - 2, 6)]


def test_json_lines_are_known_by_their_name_and_bad_ones_have_a_reason(
    read: Any, tmp_path: Path
) -> None:
    reasons = {
        b'{"text": "\xff"}': "UTF-8",
        b"{": "JSON",
        b'["text"]': "object",
        b'{"other": 1}': "text",
        b'{"text": null}': "text",
        b'{"text": ""}': "empty",
        b'{"text": " "}': "white",
        b'{"text": "\\u0000"}': "NUL",
        b'{"text": "\\ud800"}': "surrogate",
        b"[" * 100_000: "JSON",
        b'{"n": ' + b"9" * 5000 + b"}": "",
    }
    write(
        tmp_path,
        a_jsonl=b"\n".join(
            [b'{"text": "one\\r\\ntwo", "n": 1}', *reasons, b"", b'{"text": "\\ud83d\\ude42"}\r\n']
        ),
    )
    write(tmp_path, b_NDJSON='{"n": 2, "text": "drei"}')
    result = read("a.jsonl", "b.NDJSON")
    assert result.documents == [("a.jsonl", 1, 7), ("a.jsonl", 14, 4), ("b.NDJSON", 1, 4)]
    assert [*result.bad] == [("a.jsonl", place) for place in range(2, 13)]
    assert all(
        word in reason for word, reason in zip(reasons.values(), result.bad.values(), strict=True)
    )


def test_a_field_makes_any_file_json_lines_and_may_lie_within_objects(
    read: Any, tmp_path: Path
) -> None:
    entries = [{"a": {"b": {"c": "in"}}}, {"a.b.c": "top", "a": {}}, {"a": {"b": "c"}}]
    write(tmp_path, a_txt="\n".join(map(json.dumps, entries)))
    result = read("a.txt", "--field", "a.b.c")
    assert result.documents == [("a.txt", 1, 2), ("a.txt", 2, 3)]
    assert "a.b.c" in result.bad["a.txt", 3]


def test_rows_of_csv_and_tsv_are_documents(read: Any, tmp_path: Path) -> None:
    table = b'\xef\xbb\xbfid,text\n1,"one, ""two""\nthree"\n2,\n3,dr\xc3\xa9i\n4,a\xffb\n5\n'
    write(tmp_path, a_csv=table, b_TSV="text\tbody\none, two\tno\n")
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(b"text\nfour\n"))
    result = read("a.csv", "b.TSV", "c.csv.gz")
    assert result.documents == [
        ("a.csv", 1, 16),
        ("a.csv", 3, 5),
        ("b.TSV", 1, 8),
        ("c.csv.gz", 1, 4),
    ]
    assert [*result.bad] == [("a.csv", 2), ("a.csv", 4), ("a.csv", 5)]
    assert "\\xff" in result.bad["a.csv", 4]


def test_a_column_names_the_text_of_a_csv(read: Any, tmp_path: Path) -> None:
    write(tmp_path, a_csv="id,text\n123,one\n")
    assert read("a.csv", "--column", "id").documents == [("a.csv", 1, 3)]


def test_gzip_is_read_as_what_it_holds(read: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(b'{"text": "one"}\n') + gzip.compress(b'{"text": "four"}')
    )
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"one\ntwo"))
    assert read("a.jsonl.gz", "b.txt.gz").documents == [
        ("a.jsonl.gz", 1, 3),
        ("a.jsonl.gz", 2, 4),
        ("b.txt.gz", 0, 7),
    ]


def test_stdin_is_a_source(read: Any) -> None:
    assert read("-", "--lines", stdin=b"one\nfour").documents == [("-", 1, 3), ("-", 2, 4)]


def test_the_corpus_ends_after_so_many_documents_with_bad_ones_counted(
    read: Any, tmp_path: Path
) -> None:
    write(tmp_path, a_txt=b"one\n\xff\nthree\nfour")
    result = read("a.txt", "--lines", "--max-docs", "3")
    assert (result.documents, [*result.bad]) == ([("a.txt", 1, 3), ("a.txt", 3, 5)], [("a.txt", 2)])


def test_what_is_larger_than_the_bound_is_left_out_and_what_follows_is_read(
    read: Any, tmp_path: Path
) -> None:
    write(tmp_path, a_txt=b"12345\n123456\n" + b"1" * 5000 + b"\n\xc3\xa4234\n1")
    result = read("a.txt", "--lines", "--max-bytes", "5")
    assert result.documents == [("a.txt", 1, 5), ("a.txt", 4, 5), ("a.txt", 5, 1)]
    assert [*result.bad] == [("a.txt", 2), ("a.txt", 3)]
    assert "5" in result.bad["a.txt", 3]


def test_documents_that_are_too_long_for_the_model_are_left_out(mha: Any, tmp_path: Path) -> None:
    write(tmp_path, a_txt="the cat sat\n" + "the cat " * 60 + "\non the mat")
    words = ["a.txt", "--lines", "--layer", "0", "--out", "out", "--json"]
    corpus = mha("scan", "--model", checkpoints.folder("bert"), *words).json["corpus"]
    ((place, reason),) = [(bad["place"], bad["reason"]) for bad in corpus["bad"]]
    assert (corpus["n_documents"], place) == (2, 2)
    assert "64" in reason


# ------------------------------------------------------------------------------------------ Parquet


def write_table(path: Path, **columns: Any) -> None:
    """A Parquet file with groups of two rows."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)


@needs_pyarrow
@pytest.mark.parametrize(
    "kind", ["string", *(pytest.param(kind, marks=pytest.mark.real) for kind in ("dictionary",))]
)
def test_rows_of_a_column_are_documents(read: Any, tmp_path: Path, kind: str) -> None:
    import pyarrow

    texts = pyarrow.array(["one", None, "", "zwölf\r\n€", "fives"])
    texts = (
        texts.dictionary_encode() if kind == "dictionary" else texts.cast(getattr(pyarrow, kind)())
    )
    write_table(tmp_path / "a.parquet", n=[1, 2, 3, 4, 5], **{"a.b": texts})
    result = read("a.parquet", "--column", "a.b")
    assert result.documents == [("a.parquet", 1, 3), ("a.parquet", 4, 10), ("a.parquet", 5, 5)]
    assert [*result.bad] == [("a.parquet", 2), ("a.parquet", 3)]


@needs_pyarrow
def test_parquet_is_known_by_its_name_and_bytes_that_are_no_text_are_bad(
    read: Any, tmp_path: Path
) -> None:
    import pyarrow

    offsets, data = (
        pyarrow.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0, 5, 0, 0, 0])),
        pyarrow.py_buffer(b"ab\x61\xffb"),
    )
    write_table(
        tmp_path / "a.parquet",
        text=pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, data]),
    )
    result = read("a.parquet")
    assert result.documents == [("a.parquet", 1, 2)]
    assert "\\xff" in result.bad["a.parquet", 2]


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "code", "mentions"),
    [
        ("a.txt none.txt", 1, "none.txt"),
        ("a.txt *.md", 1, "*.md"),
        ("a.txt d", 1, "d/*"),
        ("a.txt --lines --field text", 2, "--field"),
        ("a.json", 2, "a.json"),
        ("a.jsonl.zst --field text", 2, "a.jsonl.zst"),
        ("a.txt.gz", 1, "a.txt.gz"),
        ("t.csv --column body", 2, "body"),
        pytest.param("broken.parquet", 1, "broken.parquet", marks=needs_pyarrow),
        pytest.param("t.parquet --column body", 2, "body", marks=needs_pyarrow),
        pytest.param("t.parquet --column n", 2, "n", marks=needs_pyarrow),
        pytest.param("- --column text", (1, 2), "stdin", marks=needs_pyarrow),
    ],
)
def test_sources_that_cannot_be_read_are_refused_before_anything_is_computed(
    mha: Any, tmp_path: Path, words: str, code: Any, mentions: str
) -> None:
    write(tmp_path, a_txt="a", d__b_txt="b", broken_parquet=b"PAR1 and nothing else PAR1")
    write(
        tmp_path, a_json='[{"text": "a"}]', a_jsonl_zst=b"x", a_txt_gz="a", t_csv="n,text\n1,one\n"
    )
    if "t.parquet" in words:
        write_table(tmp_path / "t.parquet", text=["one"], n=[1])
    model = ("--model", checkpoints.folder("gpt2"))
    ended = mha("scan", *model, *words.split(), "--out", "out", "--json", code=code)
    assert mentions in ended.said
    assert not (tmp_path / "out").exists()


def test_a_gzip_file_that_is_cut_is_an_error(mha: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one two three")[:-9])
    ended = mha(
        "scan", "--model", checkpoints.folder("gpt2"), "a.txt.gz", "--out", "out", "--json", code=1
    )
    assert "a.txt.gz" in ended.said


@pytest.mark.real
@needs_pyarrow
def test_a_parquet_file_that_fails_while_it_is_read_is_an_error(mha: Any, tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", text=["one" * 100, "two" * 100, "three" * 100])
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(
        content[:4] + bytes(len(content) // 8) + content[4 + len(content) // 8 :]
    )
    ended = mha(
        "scan", "--model", checkpoints.folder("gpt2"), "a.parquet", "--out", "out", "--json", code=1
    )
    assert "a.parquet" in ended.said
