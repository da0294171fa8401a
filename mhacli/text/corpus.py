"""The documents of a corpus: text files, JSON lines and tables in order."""

from __future__ import annotations

import csv
import glob
import gzip
import json
import os
import re
import shlex
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from mhacli.errors import MhaError, UsageError, missing_library
from mhacli.io.files import READ_CHUNK_BYTES, describe, opened, read_up_to
from mhacli.settings import DEFAULT_MAX_BYTES, Source, parse_bytes, setting
from mhacli.text.reading import decoded

CORPUS = "Corpus"
_FIELD = "Read JSON lines, and take the text from this field; a.b is b in a. (default: text)"
_COLUMN = "Read Parquet (needs pyarrow), .csv or .tsv, and take the text from this column. (default: text)"
DEFAULT_FIELD = "text"
"""The default for the field of JSON lines and the column of tables that hold the text."""
_KINDS = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".json": "refused"}
_COMPRESSED = (".bz2", ".xz", ".zst", ".zip", ".7z", ".lz4")
"""The endings of files that would have to be decompressed first; `.gz` is read."""
_ROWS_AT_ONCE = 64
_MAX_CELL_BYTES = 1 << 30
"""The largest cell of a `.csv` that is read; `--max-bytes` leaves out smaller ones by themselves."""
_TEXT_TYPE = re.compile(r"(dictionary<values=)?(large_)?string")


class Document(NamedTuple):
    """The text of one document, and its source.

    `place` is the line or row of `file`, counted from 1, or 0 for a whole file. CRLF in `text` has become LF. A document without
    usable text has a `reason` instead, a phrase such as `empty`.
    """

    file: str
    place: int
    text: str = ""
    reason: str = ""


@dataclass(frozen=True)
class CorpusFormat:
    """How files are split into documents.

    `lines`: each non-blank line is a document. `field`: each line is a JSON object with the text in this field;
    `a.b` may also be the field b of the object a.
    `column`: the files are tables with the texts in this column, Parquet unless they are named `.csv` or `.tsv`. If none
    is set, the file name decides: `.jsonl` and `.ndjson` are JSON lines, `.parquet`, `.csv` and `.tsv` are tables, `.json` is
    refused, and any other file is one document. The content of `.gz` counts by the name without it. `max_docs` limits
    the number of documents, bad ones included. A document or line of more than `max_bytes` is bad.
    """

    # fmt: off
    field: str | None = setting(None, CORPUS, _FIELD, metavar="NAME", common=True, excludes=("column", "lines"))
    column: str | None = setting(None, CORPUS, _COLUMN, metavar="NAME", common=True, excludes=("lines",))
    lines: bool = setting(False, CORPUS, "Treat each line of a file as a sequence.", common=True)
    max_docs: int | None = setting(None, CORPUS, "Use only the first N documents.", low=1, high=10**12, common=True)
    max_bytes: int = setting(
        DEFAULT_MAX_BYTES, CORPUS, "Leave out larger documents.", parse=parse_bytes, metavar="SIZE", default="64.0 MiB"
    )
    # fmt: on

    def kind(self, file: str) -> str:
        """How a file is read: as `text`, `lines`, `json`, `parquet` or `csv`, or `refused`."""
        ending = os.path.splitext(file.lower().removesuffix(".gz"))[1]
        if ending in _COMPRESSED:
            return "refused"
        if self.lines or self.field is not None:
            return "lines" if self.lines else "json"
        named = _KINDS.get(ending, "text")
        return "parquet" if self.column is not None and named != "csv" else named

    def text(self, raw: bytes | None) -> str:
        """The text of one document. Raises `MhaError` for bytes that are none, and for no bytes."""
        if raw is None:
            raise MhaError("null")
        text = "".join(decoded([raw], Source(max_bytes=self.max_bytes)))
        if not text:
            raise MhaError("empty")
        return text


def documents(sources: Sequence[str], form: CorpusFormat) -> Iterator[Document]:
    """The documents of files, globs and (`-`) stdin, in the given order. Globs are sorted, and each file is read once.

    Files are read as UTF-8. Memory grows with the largest document, not with the corpus. Before the first document,
    raises `MhaError` if a source does not exist or cannot be read, a glob has no match, a Parquet file lacks the column
    or has numbers in it, or pyarrow is missing. Raises `MhaError` later if reading a file fails.
    """
    files = dict.fromkeys(file for source in sources for file in _matched(source))
    for file in files:
        _require_readable(file, form)
    return islice((document for file in files for document in _documents_of(file, form)), form.max_docs)


def _documents_of(file: str, form: CorpusFormat) -> Iterator[Document]:
    kind = form.kind(file)
    rows = {"parquet": _rows, "csv": _cells}.get(kind)
    contents = enumerate(rows(file, form.column or DEFAULT_FIELD), 1) if rows else _raw_texts(file, form)
    read = partial(_field_of, form) if kind == "json" else form.text
    for place, raw in contents:
        try:
            yield Document(file, place, read(raw))
        except MhaError as fault:
            yield Document(file, place, reason=fault.message)


def _matched(source: str) -> list[str]:
    """The files that a source names. An existing file whose name looks like a glob is a file."""
    if source == "-" or os.path.lexists(source) or not glob.has_magic(source):
        return [source]
    files = sorted(file for file in glob.iglob(source, recursive=True) if not os.path.isdir(file))
    if not files:
        raise MhaError(f"no file matches {shlex.quote(source)}", code="unreadable", path=source)
    return files


def is_pipe(source: str) -> bool:
    """Whether a source can be read only once."""
    return source == "-" or (os.path.exists(source) and stat.S_ISFIFO(os.stat(source).st_mode))


def _require_readable(file: str, form: CorpusFormat) -> None:
    """Raises `MhaError` unless the file can be read. A pipe is not opened, because it can be read only once."""
    if os.path.isdir(file):
        hint = f"{shlex.quote(os.path.join(file, '*'))} takes its files"
        raise MhaError(f"{file} is a directory, not a file", hint=hint, code="unreadable", path=file)
    if form.kind(file) == "refused":
        hint = "decompressed on stdin it can be read: … | mha scan - --field text"
        if file.lower().endswith(".json"):
            hint = "--field text reads it if each line is an object; jq -c '.[]' makes such lines of an array"
        raise UsageError(f"{file} holds neither text, JSON lines nor a table", hint=hint, path=file)
    if is_pipe(file):
        if form.kind(file) in ("parquet", "csv"):
            raise UsageError(f"{describe(file)} is a pipe: a table must be a regular file", path=file)
        return
    with opened(file):
        pass
    with _unpacked(file) as read:
        read(1)
    kinds, column = dict[str, str](), form.column or DEFAULT_FIELD
    if form.kind(file) == "parquet":
        with _parquet_file(file) as table:
            kinds = {field.name: str(field.type) for field in table.schema_arrow}
    elif form.kind(file) == "csv":
        with _csv_file(file) as rows:
            kinds = dict.fromkeys(rows.fieldnames or (), "string")
    else:
        return
    if not _TEXT_TYPE.match(kinds.get(column, "")):
        names = ", ".join(f"{name} ({kind})" for name, kind in list(kinds.items())[:20])
        raise UsageError(f"{file} has no text in a column {column!r}", hint=f"its columns are {names}", path=file)


@contextmanager
def _unpacked(file: str) -> Iterator[Callable[[int], bytes]]:
    """The `read(n)` of a file, of its content if it is named `.gz`."""
    if not file.lower().endswith(".gz"):
        with opened(file) as read:
            yield read
        return
    try:
        with gzip.open(file) as content:
            yield content.read
    except (OSError, EOFError, zlib.error) as fault:
        raise MhaError(f"{file} is no whole gzip file: {fault}", code="unreadable", path=file) from fault


def _raw_texts(file: str, form: CorpusFormat) -> Iterator[tuple[int, bytes]]:
    """The whole file, or each non-blank line with its number, truncated just above the size limit. Only LF ends a line."""
    most, place, line = form.max_bytes + 2, 1, b""
    with _unpacked(file) as read:
        if form.kind(file) == "text":
            yield 0, read_up_to(read, most)
            return
        while chunk := read(READ_CHUNK_BYTES):
            rest, *begun = chunk.split(b"\n")
            line += rest[: most - len(line)]
            for begins in begun:
                if line.strip():
                    yield place, line.removesuffix(b"\r")
                place, line = place + 1, begins[:most]
    if line.strip():
        yield place, line.removesuffix(b"\r")


def _field_of(form: CorpusFormat, raw: bytes | None) -> str:
    field = form.field or DEFAULT_FIELD
    try:
        entry = json.loads(form.text(raw))
    except (ValueError, RecursionError):
        raise MhaError("not JSON") from None
    if not isinstance(entry, dict):
        raise MhaError("not a JSON object")
    value = _at(entry, field)
    if not isinstance(value, str):
        raise MhaError(f"without text in the field {field!r}")
    try:
        return form.text(value.encode())
    except UnicodeEncodeError as fault:
        half = f"\\u{ord(value[fault.start]):04x}"
        raise MhaError(f"not text: it has half a surrogate pair, {half}") from None


def _at(entry: dict[str, Any], field: str) -> Any:
    """The value of a field, or, where the object has none of that name, of `a.b` the field b of the object a."""
    if field in entry:
        return entry[field]
    name, _, rest = field.partition(".")
    inner = entry.get(name)
    return _at(inner, rest) if rest and isinstance(inner, dict) else None


def _rows(file: str, column: str) -> Iterator[bytes | None]:
    """The bytes of each row, because text in Parquet may be no UTF-8."""
    with _parquet_file(file) as table:
        for batch in table.iter_batches(_ROWS_AT_ONCE, columns=[column]):
            values = batch.column(column)
            values = values.dictionary_decode() if hasattr(values, "dictionary_decode") else values
            yield from values.cast("large_binary").to_pylist()


def _cells(file: str, column: str) -> Iterator[bytes | None]:
    """The bytes of each row, because text may be no UTF-8."""
    with _csv_file(file) as rows:
        for row in rows:
            value = row.get(column)
            yield None if value is None else value.encode(errors="surrogateescape")


@contextmanager
def _csv_file(file: str) -> Iterator[csv.DictReader[str]]:
    """The rows of a table of values between commas or tabs. Faults become `MhaError`."""
    name = file.lower()
    csv.field_size_limit(_MAX_CELL_BYTES)
    opens: Any = gzip.open if name.endswith(".gz") else open
    try:
        with opens(file, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
            yield csv.DictReader(lines, delimiter="\t" if ".tsv" in name[-7:] else ",")
    except (OSError, EOFError, zlib.error, csv.Error) as fault:
        raise MhaError(f"{file} is no whole table: {fault}", code="unreadable", path=file) from fault


@contextmanager
def _parquet_file(file: str) -> Iterator[Any]:
    """The file, read page by page, because a row group may be larger than memory. Faults become `MhaError`."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise missing_library("pyarrow", file) from None
    try:
        with ParquetFile(file, buffer_size=READ_CHUNK_BYTES, pre_buffer=False) as table:
            yield table
    except (ArrowException, OSError) as fault:
        raise MhaError(f"{file} is no whole Parquet file: {fault}", code="unreadable", path=file) from fault
