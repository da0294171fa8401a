"""The documents of a corpus: text files, JSON lines and Parquet files in order."""

from __future__ import annotations

import glob
import json
import os
import shlex
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from mhacli.errors import MhaError, UsageError, installing
from mhacli.io.files import READ_CHUNK_BYTES, describe, format_size, opened, read_up_to
from mhacli.settings import DEFAULT_MAX_BYTES

if TYPE_CHECKING:
    import pyarrow

DEFAULT_FIELD = "text"
"""The default for the field of JSON lines and the column of Parquet files that hold the text."""
_JSON_SUFFIXES, _PARQUET_SUFFIX = (".jsonl", ".ndjson"), ".parquet"
_ROWS_AT_ONCE = 64


class Document(NamedTuple):
    """The text of one document and its source.

    `place` is the line or row of `file`, counted from 1, or 0 for a whole file. CRLF in `text` has become LF.
    """

    file: str
    place: int
    text: str


class BadDocument(NamedTuple):
    """A document without usable text. `reason` is a phrase such as `empty`; `file` and `place` are as in `Document`."""

    file: str
    place: int
    reason: str


@dataclass(frozen=True)
class CorpusFormat:
    """How files are split into documents.

    `lines`: each non-blank line is a document. `field`: each line is a JSON object with the text in this field;
    `a.b` may also be the field b of the object a.
    `column`: the files are Parquet files with the texts in this column. If none is set, the file name decides: `.jsonl`
    and `.ndjson` are JSON lines, `.parquet` is Parquet, and any other file is one document. `max_docs` limits the
    number of documents, bad ones included. A document or line of more than `max_bytes` is bad.
    """

    field: str | None = None
    column: str | None = None
    lines: bool = False
    max_docs: int | None = None
    max_bytes: int = DEFAULT_MAX_BYTES

    def __post_init__(self) -> None:
        """Raises `UsageError` for options that exclude each other."""
        options = {"--lines": self.lines, "--field": self.field is not None, "--column": self.column is not None}
        names = [name for name, is_set in options.items() if is_set]
        if len(names) > 1:
            raise UsageError(f"{names[0]} and {names[1]} exclude each other: all files are read in the same way")


def documents(sources: Sequence[str], form: CorpusFormat) -> Iterator[Document | BadDocument]:
    """The documents of files, globs and (`-`) stdin, in the given order. Globs are sorted, and each file is read once.

    Files are read as UTF-8. Memory grows with the largest document, not with the corpus. Before the first document,
    raises `MhaError` if a source does not exist or cannot be read, a glob has no match, a Parquet file lacks the column
    or has numbers in it, or pyarrow is missing. Raises `MhaError` later if reading a file fails.
    """
    files = dict.fromkeys(file for source in sources for file in _matched(source))
    for file in files:
        _require_readable(file, form)
    return islice((document for file in files for document in _documents_of(file, form)), form.max_docs)


def _matched(source: str) -> list[str]:
    """The files that a source names. An existing file whose name looks like a glob is a file."""
    if source == "-" or os.path.lexists(source) or not glob.has_magic(source):
        return [source]
    files = sorted(file for file in glob.iglob(source, recursive=True) if not os.path.isdir(file))
    if not files:
        raise MhaError(f"no file matches {shlex.quote(source)}", code="unreadable", path=source)
    return files


def _require_readable(file: str, form: CorpusFormat) -> None:
    """Raises `MhaError` unless the file can be read. A pipe is not opened, because it can be read only once."""
    if os.path.isdir(file):
        hint = f"{shlex.quote(os.path.join(file, '*'))} takes its files"
        raise MhaError(f"{file} is a directory, not a file", hint=hint, code="unreadable", path=file)
    if file == "-" or (os.path.exists(file) and stat.S_ISFIFO(os.stat(file).st_mode)):
        if _is_parquet(file, form):
            raise UsageError(f"{describe(file)} is a pipe: a Parquet file must be a regular file", path=file)
        return
    with opened(file):
        pass
    if _is_parquet(file, form):
        with _parquet_faults(file):
            _require_text_column(file, form.column or DEFAULT_FIELD)


def _is_parquet(file: str, form: CorpusFormat) -> bool:
    by_name = not form.lines and form.field is None and file.lower().endswith(_PARQUET_SUFFIX)
    return form.column is not None or by_name


def _documents_of(file: str, form: CorpusFormat) -> Iterator[Document | BadDocument]:
    if _is_parquet(file, form):
        return _rows(file, form)
    if form.lines:
        return _from_lines(file, form, lambda raw: _decoded(raw, form).removesuffix("\r"))
    if form.field is not None or file.lower().endswith(_JSON_SUFFIXES):
        return _from_lines(file, form, lambda raw: _field_of(_decoded(raw, form), form.field or DEFAULT_FIELD))
    return _whole(file, form)


class _Bad(Exception):
    """The reason why a document has no usable text."""


def _document(file: str, place: int, form: CorpusFormat, text: Callable[[], str]) -> Document | BadDocument:
    """The document with the result of `text()`, or a `BadDocument` if the call raises `_Bad`."""
    try:
        return Document(file, place, _checked(text(), form))
    except _Bad as fault:
        return BadDocument(file, place, str(fault))


def _whole(file: str, form: CorpusFormat) -> Iterator[Document | BadDocument]:
    with opened(file) as read:
        raw = read_up_to(read, form.max_bytes + 1)
    yield _document(file, 0, form, partial(_decoded, raw, form))


def _from_lines(file: str, form: CorpusFormat, text_of: Callable[[bytes], str]) -> Iterator[Document | BadDocument]:
    for place, raw in _raw_lines(file, form):
        yield _document(file, place, form, partial(text_of, raw))


def _raw_lines(file: str, form: CorpusFormat) -> Iterator[tuple[int, bytes]]:
    """Each non-blank line with its number, truncated just above the size limit. Only LF ends a line."""
    most, place, line = form.max_bytes + 1, 1, b""
    with opened(file) as read:
        while chunk := read(READ_CHUNK_BYTES):
            rest, *begun = chunk.split(b"\n")
            line += rest[: most - len(line)]
            for begins in begun:
                if line.strip():
                    yield place, line
                place, line = place + 1, begins[:most]
    if line.strip():
        yield place, line


def _decoded(raw: bytes, form: CorpusFormat) -> str:
    if len(raw) > form.max_bytes:
        raise _too_long(form)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        offset = fault.start + len(raw) - len(fault.object)  # `fault.object` lacks the byte order mark
        raise _Bad(f"not UTF-8: the byte \\x{fault.object[fault.start]:02x} at offset {offset}") from None


def _checked(text: str, form: CorpusFormat) -> str:
    """The text with LF line ends. Raises `_Bad` for text that is empty, binary or too long."""
    text = text.replace("\r\n", "\n")
    if not text:
        raise _Bad("empty")
    if "\0" in text:
        raise _Bad("not text: it has a NUL character")
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as fault:
        raise _Bad(f"not text: it has half a surrogate pair, \\u{ord(text[fault.start]):04x}") from None
    if size > form.max_bytes:
        raise _too_long(form)
    return text


def _too_long(form: CorpusFormat) -> _Bad:
    return _Bad(f"larger than {format_size(form.max_bytes)}")


def _field_of(line: str, field: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise _Bad("not JSON") from None
    if not isinstance(entry, dict):
        raise _Bad("not a JSON object")
    value = _at(entry, field)
    if value is _MISSING:
        raise _Bad(f"no field {field!r}")
    if not isinstance(value, str):
        raise _Bad(f"the field {field!r} is no text")
    return value


_MISSING = object()


def _at(entry: dict[str, Any], field: str) -> Any:
    """The value of a field, or, where the object has none of that name, of `a.b` the field b of the object a."""
    if field in entry:
        return entry[field]
    name, _, rest = field.partition(".")
    inner = entry.get(name)
    return _at(inner, rest) if rest and isinstance(inner, dict) else _MISSING


# ------------------------------------------------------------------------------------------------------------ Parquet


def _rows(file: str, form: CorpusFormat) -> Iterator[Document | BadDocument]:
    column, place = form.column or DEFAULT_FIELD, 0
    with _parquet_faults(file), _parquet_file(file) as opened_file:
        for batch in opened_file.iter_batches(_ROWS_AT_ONCE, columns=[column]):
            for value in batch.column(column):
                place += 1
                yield _document(file, place, form, partial(_text_of, value, column))


def _text_of(value: pyarrow.Scalar, column: str) -> str:
    try:
        text = value.as_py()
    except UnicodeDecodeError as fault:
        raise _Bad(f"not UTF-8: the byte \\x{fault.object[fault.start]:02x} at offset {fault.start}") from None
    if text is None:
        raise _Bad(f"the column {column!r} is null")
    return str(text)


def _require_text_column(file: str, column: str) -> None:
    import pyarrow.types

    with _parquet_file(file) as opened_file:
        schema = opened_file.schema_arrow
    if schema.names.count(column) != 1:
        names = ", ".join(map(repr, schema.names[:20]))
        raise UsageError(f"{file} has no column {column!r}", hint=f"--column takes one of {names}", path=file)
    kind = schema.field(column).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not any(is_text(kind) for is_text in _text_kinds()):
        raise UsageError(f"{file} has no text in the column {column!r}: its type is {kind}", path=file)


def _text_kinds() -> Sequence[Callable[[pyarrow.DataType], bool]]:
    from pyarrow import types

    return types.is_string, types.is_large_string, types.is_string_view


def _parquet_file(file: str) -> pyarrow.parquet.ParquetFile:
    """The file, read page by page, because a row group may be larger than memory."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(file, buffer_size=READ_CHUNK_BYTES, pre_buffer=False)


@contextmanager
def _parquet_faults(file: str) -> Iterator[None]:
    """Turns pyarrow's errors, and a missing pyarrow, into `MhaError`."""
    try:
        from pyarrow import ArrowException
    except ModuleNotFoundError:
        hint = f"{installing('pyarrow')} installs it; the extra scan has it too"
        raise MhaError(
            f"{file} needs pyarrow, which is not installed", hint=hint, code="missing-extra", path=file
        ) from None
    try:
        yield
    except (ArrowException, OSError) as fault:
        raise MhaError(f"{file} is no whole Parquet file: {fault}", code="unreadable", path=file) from fault
