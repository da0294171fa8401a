import codecs
import io
import shlex
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhacli.errors import MhaError, UsageError
from mhacli.io import files
from mhacli.text.encode import Decoding, argument_text, lines_of, read_text, stream_text


@pytest.fixture
def file(tmp_path):
    """Writes bytes to a file. The result is its path."""

    def write(content):
        path = tmp_path / "text"
        path.write_bytes(content)
        return str(path)

    return write


def fault_of(action, *arguments):
    with pytest.raises(MhaError) as caught:
        action(*arguments)
    return caught.value.message, caught.value.hint


def in_chunks(monkeypatch, size):
    monkeypatch.setattr(files, "READ_CHUNK_BYTES", size)


def test_a_byte_order_mark_is_dropped_once(file):
    assert read_text(file(codecs.BOM_UTF8 * 2 + b"a"), Decoding()) == "\ufeffa"


@pytest.mark.parametrize("size", range(1, 9))
def test_line_ends_become_one_kind_wherever_the_chunks_end(file, monkeypatch, size):
    in_chunks(monkeypatch, size)
    assert read_text(file(b"a\r\nb\r\r\nc\rd\n\r"), Decoding()) == "a\nb\r\nc\rd\n\r"


@pytest.mark.parametrize("size", range(1, 7))
def test_characters_that_chunks_cut_are_whole_again(file, monkeypatch, size):
    in_chunks(monkeypatch, size)
    text = "aé€🙂\ufeffz"
    assert read_text(file(codecs.BOM_UTF8 + text.encode()), Decoding()) == text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_other_encodings_are_read_where_they_are_named(file, monkeypatch, encoding, size):
    in_chunks(monkeypatch, size)
    assert read_text(file("née\r\nà".encode(encoding)), Decoding(encoding)) == "née\nà"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("size", [1, 2, 1 << 20])
def test_utf16_read_as_utf8_is_named(file, monkeypatch, encoding, size):
    in_chunks(monkeypatch, size)
    path = file(("\ufeff" + "hi").encode(encoding))
    assert fault_of(read_text, path, Decoding()) == (f"{path} is UTF-16, not UTF-8", "--encoding utf-16 reads it")


BAD_BYTES = "--encoding NAME reads another encoding; --errors replace or --errors escape reads it anyway"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 1 << 20])
@pytest.mark.parametrize(
    ("content", "byte", "offset"),
    [(b"abc\xffd", "ff", 3), (b"ab\xe2\x82z", "e2", 2), (b"abcd\xf0\x9f", "f0", 4), (b"\xc3\xa9\x80", "80", 2)],
)
def test_a_bad_byte_is_reported_with_its_offset_wherever_the_chunks_end(file, monkeypatch, size, content, byte, offset):
    in_chunks(monkeypatch, size)
    path = file(content)
    message = f"{path} is not UTF-8: it has the byte \\x{byte} at offset {offset}"
    assert fault_of(read_text, path, Decoding()) == (message, BAD_BYTES)


@given(good=st.text(max_size=9), bad=st.sampled_from([b"\xff", b"\xc0", b"\x80"]), size=st.integers(1, 9))
def test_the_offset_of_a_bad_byte_counts_bytes(tmp_path_factory, good, bad, size):
    good = good.replace("\0", "").removeprefix("\ufeff")
    path = tmp_path_factory.mktemp("bad") / "text"
    path.write_bytes(good.encode() + bad + b"z")
    with pytest.MonkeyPatch.context() as patch:
        in_chunks(patch, size)
        message, _ = fault_of(read_text, str(path), Decoding())
    assert message.endswith(f" at offset {len(good.encode())}")


@pytest.mark.parametrize(("errors", "expected"), [("replace", "a\ufffdb\ufffd"), ("escape", "a\\xffb\\xe2\\x82")])
@pytest.mark.parametrize("size", [1, 2, 1 << 20])
def test_bad_bytes_can_be_replaced_or_escaped(file, monkeypatch, errors, expected, size):
    in_chunks(monkeypatch, size)
    assert read_text(file(b"a\xffb\xe2\x82"), Decoding(errors=errors)) == expected


def test_a_nul_is_refused_as_binary(file):
    path = file(b"MZ\0\1")
    message = f"{path} is not text: it has a NUL character and looks binary"
    assert fault_of(read_text, path, Decoding()) == (
        message,
        "if it is UTF-16 or UTF-32, --encoding utf-16 or --encoding utf-32 reads it",
    )


@pytest.mark.parametrize("content", [b"", codecs.BOM_UTF8])
def test_an_empty_file_is_refused(file, content):
    path = file(content)
    assert fault_of(read_text, path, Decoding()) == (f"{path} is empty", None)


def test_a_file_of_exactly_the_limit_is_read_and_one_byte_more_is_not(file):
    assert read_text(file(b"x" * 2048), Decoding(max_bytes=2048)) == "x" * 2048
    path = file(b"x" * 2049)
    assert fault_of(read_text, path, Decoding(max_bytes=2048)) == (
        f"{path} is larger than 2.0 KiB",
        "--max-bytes raises the limit",
    )


def test_text_comes_in_pieces_as_it_is_read(file, monkeypatch):
    in_chunks(monkeypatch, 4)
    pieces = stream_text(file(b"abcdefgh"), Decoding())
    assert (next(pieces), next(pieces)) == ("abcd", "efgh")


def test_stdin_is_read_and_named(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"cat\r\n")))
    assert read_text("-", Decoding()) == "cat\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert fault_of(read_text, "-", Decoding())[0].startswith("stdin ")


def test_a_closed_stdin_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert fault_of(read_text, "-", Decoding()) == ("stdin is closed, so no text can be read from it", None)


def test_an_argument_is_text_with_one_kind_of_line_end():
    assert argument_text("a\r\nb\rc", Decoding()) == "a\nb\rc"
    assert fault_of(argument_text, "", Decoding()) == (
        "the text is empty",
        'try "the cat sat on the mat"',
    )


def test_bytes_of_an_argument_obey_the_rule_for_bad_bytes():
    argument = b"a\xff".decode("utf-8", "surrogateescape")
    assert argument_text(argument, Decoding(errors="escape")) == "a\\xff"
    message, _ = fault_of(argument_text, argument, Decoding())
    assert message.startswith("the text argument ")


@pytest.mark.parametrize("name", ["nope", "", "base64", "utf\0-8"])
def test_an_encoding_that_is_none_is_a_usage_error(name):
    with pytest.raises(UsageError) as caught:
        Decoding(name)
    assert caught.value.message == (
        f"--encoding {shlex.quote(name)} is not a text encoding of Python such as utf-8, utf-16 or latin-1"
    )


def test_an_unknown_rule_for_bad_bytes_is_a_usage_error():
    with pytest.raises(UsageError) as caught:
        Decoding(errors="ignore")
    assert caught.value.message == "--errors ignore is not one of strict, replace, escape"


def test_lines_are_ended_by_line_feeds_and_empty_ones_are_left_out():
    assert lines_of("a\n\n \t\nb\u2028c\rd\n") == ["a", "b\u2028c\rd"]
