"""Units: fixed groups of consecutive documents that are computed, written and repeated as a whole; and their tables of rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain, count, islice
from typing import NamedTuple

from mhacli.commands.scan.sums import EFFECTS, UnitDocument
from mhacli.record.corpus import named
from mhacli.record.effect import Effect
from mhacli.record.heads import HeadStatistics
from mhacli.record.tables import Column, EffectTable, HeadTable, Table
from mhacli.text.corpus import BadDocument, Document

UNIT_SIZE = 16
"""Documents in a unit, bad ones counted; the last unit of a corpus may have fewer."""


class Unit(NamedTuple):
    """Consecutive documents of a corpus, by their number from 0.

    The `name` contains a digest of the settings and documents, which determine the results. With `wants_example`, the record of
    one of the documents is kept as an example.
    """

    number: int
    name: str
    documents: tuple[Document | BadDocument, ...]
    wants_example: bool = False

    @property
    def named(self) -> str:
        """The first and last document, for messages: `corpus.jsonl:1 to corpus.jsonl:16`."""
        first, last = self.documents[0], self.documents[-1]
        return f"{named(first.file, first.place)} to {named(last.file, last.place)}"


class UnitFiles(NamedTuple):
    """The contents of the files of a computed unit. `example` is empty if it was not requested or no document is good."""

    rows: bytes
    sums: bytes
    example: bytes
    n_documents: int
    n_bad: int
    n_tokens: int


def units(documents: Iterable[Document | BadDocument], settings_digest: str) -> Iterator[Unit]:
    """The units of a corpus in order. They depend only on documents and settings."""
    remaining = iter(documents)
    for number in count():
        members = tuple(islice(remaining, UNIT_SIZE))
        if not members:
            return
        yield Unit(number, unit_name(number, members, settings_digest), members)


def unit_name(number: int, documents: Iterable[Document | BadDocument], settings_digest: str) -> str:
    """The number, so that names sort like the documents, and a digest of settings and documents."""
    text = "\n".join([settings_digest, *map(document_digest, documents)])
    return f"{number:08d}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def number_of(unit_name: str) -> int:
    """The number of the unit of this name."""
    return int(unit_name.partition("-")[0])


def document_digest(document: Document | BadDocument) -> str:
    """The sha256 of a document with its place, or of a bad document with the reason."""
    parts = [type(document).__name__, *map(str, document)]
    lengths = [str(len(part)) for part in parts]  # so that different documents have different texts
    return hashlib.sha256("\0".join([*lengths, *parts]).encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class DocumentTable(Table):
    """A row for each document, layer and head. The columns are `file`, `place` (line or row from 1, 0 for a whole file),
    `n_documents` (1) and `n_tokens`, those of `HeadTable`, and the `effects` of removing the heads, if there are any."""

    documents: Sequence[UnitDocument]
    heads: Sequence[Sequence[HeadStatistics]]
    effects: Sequence[Effect]

    def columns(self) -> Mapping[str, Column]:
        """The columns by name."""
        rows = [document for document, heads in zip(self.documents, self.heads, strict=True) for _ in heads]
        types = {"file": str, "place": int, "n_documents": int, "n_tokens": int}
        columns = {name: Column(kind, [getattr(document, name) for document in rows]) for name, kind in types.items()}
        columns |= HeadTable(chain.from_iterable(self.heads)).columns()
        changes = EffectTable(self.effects).columns()
        return columns | ({name: changes[name] for name in EFFECTS} if self.effects else {})

    def to_bytes(self, row_format: str) -> bytes:
        """The contents of the file, `jsonl` or `parquet`; equal rows give equal bytes. Raises `MhaError` without pyarrow."""
        if row_format == "jsonl":
            encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
            return "".join(f"{encode(row)}\n" for row in self.to_dicts()).encode()
        table, file = self.to_arrow(), BytesIO()
        from pyarrow import parquet

        parquet.write_table(table, file, compression="zstd")
        return file.getvalue()
