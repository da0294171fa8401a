import io
import json
import os
import shlex
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhacli.errors import MhaError, UsageError
from mhacli.text import corpus
from mhacli.text.corpus import BadDocument, CorpusFormat, Document, documents


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Writes files into the working folder: a name, and bytes or text."""
    monkeypatch.chdir(tmp_path)

    def write(**files):
        for name, content in files.items():
            path = tmp_path / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def read(*sources, **form):
    return list(documents(sources, CorpusFormat(**form)))


def fault_of(*sources, **form):
    with pytest.raises(MhaError) as caught:
        documents(sources, CorpusFormat(**form))
    return caught.value


def reasons(*sources, **form):
    return {one.place: one.reason for one in read(*sources, **form) if isinstance(one, BadDocument)}


# ------------------------------------------------------------------------------------------------------------ sources


def test_a_file_is_a_document_whose_line_ends_become_one_kind(made):
    made(a_txt=b"\xef\xbb\xbfone\r\ntwo\n", b_md="drei ü\r")
    assert read("a.txt", "b.md") == [Document("a.txt", 0, "one\ntwo\n"), Document("b.md", 0, "drei ü\r")]


def test_each_line_that_is_not_blank_is_a_document_with_its_number(made):
    made(a_txt="one \r\n\n \t\nt\x0bw\x85o\n\nthree")
    expected = [Document("a.txt", 1, "one "), Document("a.txt", 4, "t\x0bw\x85o"), Document("a.txt", 6, "three")]
    assert read("a.txt", lines=True) == expected


@pytest.mark.parametrize("name", ["a_jsonl", "a_NDJSON"])
def test_json_lines_are_known_by_their_name(made, name):
    made(**{name: '{"text": "one\\r\\ntwo", "n": 1}\n\n{"n": 2, "text": "\\ud83d\\ude42"}\r\n'})
    file = name.replace("_", ".")
    assert read(file) == [Document(file, 1, "one\ntwo"), Document(file, 3, "🙂")]


def test_a_field_may_lie_within_objects_where_none_has_the_whole_name(made):
    entries = [{"a": {"b": {"c": "in"}}}, {"a.b.c": "top", "a": {}}, {"a": {"b": "c"}}]
    made(a_jsonl="\n".join(map(json.dumps, entries)))
    assert [document[2] for document in read("a.jsonl", field="a.b.c")] == ["in", "top", "no field 'a.b.c'"]


def test_a_field_makes_any_file_json_lines(made):
    made(a_txt='{"body": "one", "text": 5}')
    assert read("a.txt", field="body") == [Document("a.txt", 1, "one")]


def test_lines_of_a_file_named_jsonl_are_texts_where_lines_are_requested(made):
    made(a_jsonl='{"text": "one"}\n')
    assert read("a.jsonl", lines=True) == [Document("a.jsonl", 1, '{"text": "one"}')]


def test_stdin_is_a_source(made, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo")))
    assert read("-", lines=True) == [Document("-", 1, "one"), Document("-", 2, "two")]


def test_a_pipe_is_a_source(made):
    ours, theirs = os.pipe()
    os.write(theirs, b"one\ntwo")
    os.close(theirs)
    pipe = f"/dev/fd/{ours}"
    assert read(pipe, lines=True) == [Document(pipe, 1, "one"), Document(pipe, 2, "two")]
    os.close(ours)


def test_globs_give_sorted_files_and_each_file_once(made):
    made(d__b_txt="b", d__a_txt="a", d__sub__c_txt="c", x_txt="x")
    assert [one.file for one in read("x.txt", "d/*", "d/**/*.txt", "d/a.txt")] == [
        "x.txt",
        "d/a.txt",
        "d/b.txt",
        "d/sub/c.txt",
    ]


def test_a_file_whose_name_looks_like_a_glob_is_a_file(made, tmp_path):
    (tmp_path / "a[1].txt").write_text("one")
    assert read("a[1].txt") == [Document("a[1].txt", 0, "one")]


def test_what_cannot_be_read_is_refused_before_the_first_document(made):
    made(a_txt="a", d__b_txt="b")
    assert fault_of("a.txt", "none.txt").message == "none.txt does not exist"
    assert fault_of("a.txt", "*.md").message == f"no file matches {shlex.quote('*.md')}"
    directory = fault_of("a.txt", "d")
    assert (directory.message, directory.hint) == ("d is a directory, not a file", "'d/*' takes its files")


def test_two_ways_of_reading_exclude_each_other():
    with pytest.raises(UsageError) as caught:
        CorpusFormat(lines=True, field="text")
    assert caught.value.message == "--lines and --field exclude each other: all files are read in the same way"


def test_the_corpus_ends_after_so_many_documents_with_bad_ones_counted(made):
    made(a_txt=b"one\n\xff\nthree\nfour")
    assert [one.place for one in read("a.txt", lines=True, max_docs=3)] == [1, 2, 3]


# ------------------------------------------------------------------------------------------------------ bad documents


def test_each_bad_line_of_json_has_its_reason(made):
    lines = [
        b'{"text": "good"}',
        b'{"text": "\xff"}',
        b"{",
        b'["text"]',
        b'{"other": 1}',
        b'{"text": null}',
        b'{"text": ""}',
        b'{"text": "\\u0000"}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"text": "good"}',
    ]
    made(a_jsonl=b"\n".join(lines))
    assert reasons("a.jsonl") == {
        2: "not UTF-8: the byte \\xff at offset 10",
        3: "not JSON",
        4: "not a JSON object",
        5: "no field 'text'",
        6: "the field 'text' is no text",
        7: "empty",
        8: "not text: it has a NUL character",
        9: "not text: it has half a surrogate pair, \\ud800",
        10: "not JSON",
        11: "not JSON",
    }


def test_files_without_text_are_bad_and_the_others_are_read(made):
    made(a_txt="", b_txt=b"\xef\xbb\xbfab\xe9", c_txt=" \n", d_txt="\xef\xbb\xbf".encode("latin-1"))
    assert read("*.txt") == [
        BadDocument("a.txt", 0, "empty"),
        BadDocument("b.txt", 0, "not UTF-8: the byte \\xe9 at offset 5"),
        Document("c.txt", 0, " \n"),
        BadDocument("d.txt", 0, "empty"),
    ]


def test_what_is_larger_than_the_bound_is_bad_and_what_follows_is_read(made):
    made(a_txt=b"12345\n123456\n" + b"1" * 5000 + b"\n\xc3\xa4234\n", b_txt="123456", c_jsonl='{"text": "12345"}')
    bound = "larger than 5 B"
    assert reasons("a.txt", lines=True, max_bytes=5) == {2: bound, 3: bound}
    assert reasons("b.txt", max_bytes=5) == {0: bound}
    assert reasons("c.jsonl", max_bytes=5) == {1: bound}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1 << 20])
def test_lines_are_the_same_wherever_the_chunks_end(made, monkeypatch, size):
    made(a_txt="eins\n\nzwölf €🙂.\r\n  drei\n123456789abcdef0\nx")
    monkeypatch.setattr(corpus, "READ_CHUNK_BYTES", size)
    assert [(one.place, one[2]) for one in read("a.txt", lines=True, max_bytes=15)] == [
        (1, "eins"),
        (3, "larger than 15 B"),
        (4, "  drei"),
        (5, "larger than 15 B"),
        (6, "x"),
    ]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0\ufeff")), min_size=1))
def test_lines_are_those_of_the_text(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("corpus") / "a.txt"
    path.write_bytes("\n".join(lines).encode())
    expected = [(place, line) for place, line in enumerate(lines, 1) if line.encode().strip()]
    assert [(one.place, one.text) for one in read(str(path), lines=True)] == expected


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), min_size=1), min_size=1))
def test_texts_in_json_lines_come_back(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert read(str(path)) == [Document(str(path), place, text) for place, text in enumerate(texts, 1)]


@pytest.mark.parametrize("line", [b"x" * 999_999 + b"\n", b"x" * 1_000_000], ids=["many lines", "one line"])
def test_memory_holds_no_more_than_a_document_may_have(tmp_path, line):
    path = tmp_path / "a.txt"
    path.write_bytes(line * 64)
    stream = documents([str(path)], CorpusFormat(lines=True, max_bytes=1_000_000))
    tracemalloc.start()
    assert sum(one.file == str(path) for one in stream) == (64 if line.endswith(b"\n") else 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * corpus.READ_CHUNK_BYTES


# ------------------------------------------------------------------------------------------------------------ Parquet


@pytest.fixture
def table(made, tmp_path):
    """Writes a Parquet file of two groups of rows from the columns given."""

    def write(name, **columns):
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / name, row_group_size=2)

    return write


@pytest.mark.scan
@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_rows_of_a_column_are_documents(table, kind):
    import pyarrow

    types = {"string": pyarrow.string(), "large_string": pyarrow.large_string()}
    texts = pyarrow.array(["one", None, "", "zwölf\r\n€", "one"])
    texts = texts.dictionary_encode() if kind == "dictionary" else texts.cast(types[kind])
    table("a.parquet", n=[1, 2, 3, 4, 5], **{"a.b": texts})
    assert read("a.parquet", column="a.b") == [
        Document("a.parquet", 1, "one"),
        BadDocument("a.parquet", 2, "the column 'a.b' is null"),
        BadDocument("a.parquet", 3, "empty"),
        Document("a.parquet", 4, "zwölf\n€"),
        Document("a.parquet", 5, "one"),
    ]


@pytest.mark.scan
def test_parquet_is_known_by_its_name_and_has_its_texts_in_text(table):
    table("a.parquet", text=["one", "two"])
    assert read("a.parquet", max_docs=1) == [Document("a.parquet", 1, "one")]


@pytest.mark.scan
def test_bytes_of_a_column_that_are_no_utf8_are_bad(table):
    import pyarrow

    offsets, data = pyarrow.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0, 5, 0, 0, 0])), pyarrow.py_buffer(b"ab\x61\xffb")
    table("a.parquet", text=pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, data]))
    assert reasons("a.parquet") == {2: "not UTF-8: the byte \\xff at offset 1"}


@pytest.mark.scan
def test_a_column_without_text_is_refused_before_the_first_document(table):
    table("a.parquet", text=["one"], n=[1])
    missing, numbers = fault_of("a.parquet", column="body"), fault_of("a.parquet", column="n")
    assert (missing.message, missing.hint) == ("a.parquet has no column 'body'", "--column takes one of 'text', 'n'")
    assert numbers.message == "a.parquet has no text in the column 'n': its type is int64"
    assert (missing.exit_code, numbers.exit_code) == (2, 2)


@pytest.mark.scan
def test_what_is_no_parquet_file_is_refused_by_name(made):
    made(a_parquet=b"PAR1 and nothing else PAR1")
    assert fault_of("a.parquet").code == "unreadable"


@pytest.mark.scan
def test_a_parquet_file_that_fails_while_it_is_read_is_an_error(table, tmp_path):
    table("a.parquet", text=["one" * 100, "two" * 100, "three" * 100])
    path = tmp_path / "a.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(len(content) // 8) + content[4 + len(content) // 8 :])
    with pytest.raises(MhaError) as caught:
        read("a.parquet")
    assert caught.value.message.startswith("a.parquet is no whole Parquet file: ")


@pytest.mark.scan
def test_a_parquet_file_cannot_come_through_a_pipe(made):
    assert fault_of("-", column="text").message == "stdin is a pipe: a Parquet file must be a regular file"


def test_without_pyarrow_the_error_names_what_installs_it(made, monkeypatch):
    made(a_parquet=b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    fault = fault_of("a.parquet")
    assert (fault.message, fault.code) == ("a.parquet needs pyarrow, which is not installed", "missing-extra")
    assert fault.hint.endswith(" installs it; the extra scan has it too")
