"""Reads texts within limits: arguments, files and pipes, and the documents of a corpus: text files,
JSON lines and tables.
"""

import codecs
import csv
import glob
import gzip
import json
import os
import re
import shlex
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

from mhacli.errors import MhaError, UsageError, library
from mhacli.io.files import READ_CHUNK_BYTES, describe, opened, read_up_to
from mhacli.numbers import shown
from mhacli.settings import DEFAULT_MAX_BYTES, Source, parse_bytes, setting

_HANDLERS = {"strict": "strict", "replace": "replace", "escape": "backslashreplace"}


def given_texts(given: Any, name: str) -> tuple[str, ...]:
    """The texts that a caller gives to the function `name`: one, or several. Raises `UsageError`
    for anything else.
    """
    texts = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    for text in texts:
        if not isinstance(text, str):
            hint = '"the cat sat", or ["the cat sat", "a dog"]'
            raise UsageError(f"{name} takes a text or several, not {given!r:.60}", hint=hint)
    return texts


def stream_text(path: str, source: Source) -> Iterator[str]:
    """The text of a file, pipe or (`-`) stdin in pieces of about a megabyte, so that memory stays
    constant.

    Raises `MhaError` as `decoded`, and if there is no text.
    """
    is_empty = True
    with opened(path) as read:
        for piece in decoded(
            iter(lambda: read(READ_CHUNK_BYTES), b""), source, describe(path), path
        ):
            is_empty = False
            yield piece
    if is_empty:
        raise _bad(describe(path), "empty", code="no-tokens", path=path)


def decoded(
    chunks: Iterable[bytes], source: Source, name: str = "", path: str | None = None
) -> Iterator[str]:
    """The text of bytes in pieces that are not empty, by the encoding of a source. A byte order
    mark is dropped, CRLF becomes LF, and a lone CR stays.

    Raises `MhaError` for bytes that the encoding lacks (with their offset), for text that looks
    binary, and for more than `max_bytes`; `name` and `path` are the source in its message, which
    without a name is the reason alone.
    """
    decoder = codecs.getincrementaldecoder(source.encoding)(_HANDLERS[source.errors])
    most = source.max_bytes or DEFAULT_MAX_BYTES
    n_bytes = 0
    is_begun, held = False, ""
    for chunk in chain(chunks, [b""]):
        n_bytes += len(chunk)
        if n_bytes > most:
            hint = "--max-bytes raises the limit"
            raise _bad(
                name, f"larger than {shown(most, 'bytes')}", hint=hint, code="too-large", path=path
            )
        try:
            piece = held + decoder.decode(chunk, not chunk)
        except UnicodeDecodeError as fault:
            # the decoder holds the tail of the last chunk
            offset = n_bytes - len(fault.object) + fault.start
            byte = f"\\x{fault.object[fault.start]:02x}"
            reason = f"not {source.encoding.upper()}: it has the byte {byte} at offset {offset}"
            hint = (
                "--encoding NAME reads another encoding; --errors replace or --errors escape reads"
                " it anyway"
            )
            if not offset and fault.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                hint = "it looks like UTF-16, which --encoding utf-16 reads"
            raise _bad(name, reason, hint=hint, path=path) from None
        if "\0" in piece:
            hint = "if it is UTF-16 or UTF-32, --encoding utf-16 or --encoding utf-32 reads it"
            raise _bad(
                name, "not text: it has a NUL character and looks binary", hint=hint, path=path
            )
        if piece and not is_begun:
            piece, is_begun = piece.removeprefix("\ufeff"), True
        held = "\r" if chunk and piece.endswith("\r") else ""
        piece = piece.removesuffix(held).replace("\r\n", "\n")
        if piece:
            yield piece


def _bad(
    name: str,
    reason: str,
    *,
    hint: str | None = None,
    code: str = "bad-text",
    path: str | None = None,
) -> MhaError:
    """The error for a text that cannot be used."""
    return MhaError(f"{name} is {reason}" if name else reason, hint=hint, code=code, path=path)


# ---------------------------------------------------------------------------- documents of a corpus

CORPUS = "Corpus"
DEFAULT_FIELD = "text"
"""The default for the field of JSON lines and the column of tables that hold the text."""
_KINDS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "array",
    **dict.fromkeys((".bz2", ".xz", ".zst", ".zip", ".7z", ".lz4"), "compressed"),
}
"""How files are read by the ending of their names, which `.gz` may follow. An array and other
compressed files are refused."""
_HINTS = {
    "array": (
        "--field text reads it if each line is an object; jq -c '.[]' makes such lines of an array"
    ),
    "compressed": "decompressed on stdin it can be read: … | mha scan - --field text",
}
_ROWS_AT_ONCE = 64
_MAX_CELL_BYTES = 1 << 30
"""The largest cell of a `.csv` that is read; `--max-bytes` leaves out smaller ones by
themselves."""
_TEXT_TYPE = re.compile(r"(dictionary<values=)?(large_)?string")


class Document(NamedTuple):
    """The text of one document, and its source.

    `place` is the line or row of `file`, counted from 1, or 0 for a whole file. CRLF in `text` has
    become LF. A document without usable text has a `reason` instead, a phrase such as `empty`.
    """

    file: str
    place: int
    text: str = ""
    reason: str = ""


@dataclass(frozen=True)
class CorpusFormat:
    """How files are split into documents.

    `lines`: each non-blank line is a document. `field`: each line is a JSON object with the text in
    this field; `a.b` may also be the field b of the object a. `column`: the files are tables with
    the texts in this column, Parquet unless they are named `.csv` or `.tsv`. If none is set, the
    file name decides: `.jsonl` and `.ndjson` are JSON lines, `.parquet`, `.csv` and `.tsv` are
    tables, `.json` is refused, and any other file is one document. The content of `.gz` counts by
    the name without it. `max_docs` limits the number of documents, bad ones included. A document or
    line of more than `max_bytes` is bad.
    """

    field: str | None = setting(
        None,
        CORPUS,
        "Read JSON lines, and take the text from this field; a.b is b in a. (default: text)",
        metavar="NAME",
        common=True,
        excludes=("column", "lines"),
    )
    column: str | None = setting(
        None,
        CORPUS,
        "Read Parquet (needs pyarrow), .csv or .tsv, and take the text from this column. (default:"
        " text)",
        metavar="NAME",
        common=True,
        excludes=("lines",),
    )
    lines: bool = setting(False, CORPUS, "Treat each line of a file as a sequence.", common=True)
    max_docs: int | None = setting(
        None, CORPUS, "Use only the first N documents.", low=1, high=10**12, common=True
    )
    max_bytes: int = setting(
        DEFAULT_MAX_BYTES,
        CORPUS,
        "Leave out larger documents.",
        parse=parse_bytes,
        metavar="SIZE",
        default="64.0 MiB",
    )

    def kind(self, file: str) -> str:
        """How a file is read: as `text`, `lines` or one of `_KINDS`."""
        named = _KINDS.get(os.path.splitext(file.lower().removesuffix(".gz"))[1], "text")
        if named != "compressed" and (self.lines or self.field is not None):
            return "lines" if self.lines else "json"
        if self.column is not None and named in ("text", "json", "array"):
            return "parquet"
        return named

    def text(self, raw: bytes | None) -> str:
        """The text of one document. Raises `MhaError` for bytes that are none, and for no bytes."""
        text = "".join(decoded([raw or b""], Source(max_bytes=self.max_bytes)))
        if not text:
            raise MhaError("null" if raw is None else "empty")
        return text


def documents(sources: Sequence[str], form: CorpusFormat) -> Iterator[Document]:
    """The documents of files, globs and (`-`) stdin, in the given order. Globs are sorted, and each
    file is read once.

    Files are read as UTF-8. Memory grows with the largest document, not with the corpus. Before the
    first document, raises `MhaError` if a source does not exist or cannot be read, a glob has no
    match, a table lacks the column or has numbers in it, or pyarrow is missing. Raises `MhaError`
    later if reading a file fails.
    """
    files = dict.fromkeys(file for source in sources for file in _files_of(source))
    for file in files:
        _require_readable(file, form)

    def read_documents() -> Iterator[Document]:
        for file in files:
            text_of = partial(_field_of, form) if form.kind(file) == "json" else form.text
            for place, raw in _raw_texts(file, form):
                try:
                    yield Document(file, place, text_of(raw))
                except MhaError as fault:
                    yield Document(file, place, reason=fault.typed_message)

    return islice(read_documents(), form.max_docs)


def _files_of(source: str) -> list[str]:
    """The files of a source: an existing file whose name looks like a glob is a file. Raises
    `MhaError` for a glob that matches none.
    """
    if source == "-" or os.path.lexists(source) or not glob.has_magic(source):
        return [source]
    matched = [file for file in glob.iglob(source, recursive=True) if not os.path.isdir(file)]
    if not matched:
        raise MhaError(f"no file matches {shlex.quote(source)}", code="unreadable", path=source)
    return sorted(matched)


def _require_readable(file: str, form: CorpusFormat) -> None:
    """Raises `MhaError` for a file that no document can be read from."""
    kind, has_one_pass = form.kind(file), is_pipe(file)
    if os.path.isdir(file):
        inside = shlex.quote(os.path.join(file, "*"))
        message = f"{file} is a directory: {inside} takes its files"
        raise MhaError(message, code="unreadable", path=file)
    if kind in _HINTS:
        message = f"{file} holds neither text, JSON lines nor a table"
        raise UsageError(message, hint=_HINTS[kind], path=file)
    if has_one_pass and kind in ("parquet", "csv"):
        message = f"{describe(file)} is a pipe: a table must be a regular file"
        raise UsageError(message, path=file)
    if not has_one_pass:
        with opened(file):
            next(_raw_texts(file, form), None)


def is_pipe(source: str) -> bool:
    """Whether a source can be read only once."""
    return source == "-" or (os.path.exists(source) and stat.S_ISFIFO(os.stat(source).st_mode))


def _raw_texts(file: str, form: CorpusFormat) -> Iterator[tuple[int, bytes | None]]:
    """The bytes of each document with its place, truncated just above the size limit. Text in
    tables may be no UTF-8.
    """
    kind, most = form.kind(file), form.max_bytes + 2
    if kind in ("parquet", "csv"):
        read_column = _rows if kind == "parquet" else _cells
        yield from enumerate(read_column(file, form.column or DEFAULT_FIELD), 1)
        return
    is_packed = file.lower().endswith(".gz")
    with _whole(file, "gzip file") if is_packed else nullcontext(), ExitStack() as stack:
        read: Callable[[int], bytes]
        if is_packed:
            read = stack.enter_context(gzip.open(file)).read
        else:
            read = stack.enter_context(opened(file))
        if kind == "text":
            yield 0, read_up_to(read, most)
        else:
            yield from _lines(read, most)


def _lines(read: Callable[[int], bytes], most: int) -> Iterator[tuple[int, bytes]]:
    """Each non-blank line with its number. Only LF ends a line."""
    place, line = 1, b""
    while chunk := read(READ_CHUNK_BYTES):
        rest, *begun = chunk.split(b"\n")
        line += rest[: most - len(line)]
        for begins in begun:
            if line.strip():
                yield place, line.removesuffix(b"\r")
            place, line = place + 1, begins[:most]
    if line.strip():
        yield place, line.removesuffix(b"\r")


@contextmanager
def _whole(file: str, kind: str, fault_type: type[Exception] = OSError) -> Iterator[None]:
    """Turns the faults of reading a file into `MhaError`."""
    try:
        yield
    except (OSError, EOFError, zlib.error, fault_type) as fault:
        raise MhaError(
            f"{file} is no whole {kind}: {fault}", code="unreadable", path=file
        ) from fault


def _field_of(form: CorpusFormat, raw: bytes | None) -> str:
    """The text in the field of a JSON line. Where an object has no field `a.b`, it is the field b
    of the object a.
    """
    field = form.field or DEFAULT_FIELD
    try:
        entry = json.loads(form.text(raw))
    except (ValueError, RecursionError):
        raise MhaError("not JSON") from None
    if not isinstance(entry, dict):
        raise MhaError("not a JSON object")
    names = [field] if field in entry else field.split(".")
    for name in names:
        entry = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(entry, str):
        raise MhaError(f"without text in the field {field!r}")
    try:
        return form.text(entry.encode())
    except UnicodeEncodeError:
        raise MhaError("not text: it has half a surrogate pair") from None


def _rows(file: str, column: str) -> Iterator[bytes | None]:
    """The column of a Parquet file, read page by page, because a row group may be larger than
    memory.
    """
    parquet = library("pyarrow.parquet", file)
    with (
        _whole(file, "Parquet file", library("pyarrow", file).ArrowException),
        parquet.ParquetFile(file, buffer_size=READ_CHUNK_BYTES, pre_buffer=False) as table,
    ):
        _require_texts(file, column, {field.name: str(field.type) for field in table.schema_arrow})
        for batch in table.iter_batches(_ROWS_AT_ONCE, columns=[column]):
            yield from batch.column(column).cast("large_binary").to_pylist()


def _cells(file: str, column: str) -> Iterator[bytes | None]:
    """The column of a table of values between commas or tabs."""
    name = file.lower()
    csv.field_size_limit(_MAX_CELL_BYTES)
    opens: Any = gzip.open if name.endswith(".gz") else open
    with (
        _whole(file, "table", csv.Error),
        opens(file, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="") as lines,
    ):
        rows = csv.DictReader(lines, delimiter="\t" if ".tsv" in name[-7:] else ",")
        _require_texts(file, column, dict.fromkeys(rows.fieldnames or (), "string"))
        for row in rows:
            value = row.get(column)
            yield None if value is None else value.encode(errors="surrogateescape")


def _require_texts(file: str, column: str, kinds: Mapping[str, str]) -> None:
    """Raises `UsageError` unless the column of a table has texts, by the kinds of its columns."""
    if not _TEXT_TYPE.match(kinds.get(column, "")):
        names = ", ".join(f"{name} ({kind})" for name, kind in list(kinds.items())[:20])
        raise UsageError(
            f"{file} has no text in a column {column!r}", hint=f"its columns are {names}", path=file
        )
