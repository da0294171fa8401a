"""Units: fixed groups of consecutive documents that are computed, written and repeated as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import NamedTuple

from mhacli.record.corpus import named
from mhacli.text.corpus import BadDocument, Document

UNIT_SIZE = 16
"""Documents in a unit, bad ones counted; the last unit of a corpus may have fewer."""
NAME_LEN = 16


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


def units(documents: Iterable[Document | BadDocument], settings_digest: str, size: int = UNIT_SIZE) -> Iterator[Unit]:
    """The units of a corpus in order. They depend only on documents and settings."""
    remaining = iter(documents)
    for number in count():
        members = tuple(islice(remaining, size))
        if not members:
            return
        yield Unit(number, unit_name(number, members, settings_digest), members)


def unit_name(number: int, documents: Iterable[Document | BadDocument], settings_digest: str) -> str:
    """The number, so that names sort like the documents, and a digest of settings and documents."""
    text = "\n".join([settings_digest, *map(document_digest, documents)])
    return f"{number:08d}-{hashlib.sha256(text.encode()).hexdigest()[:NAME_LEN]}"


def document_digest(document: Document | BadDocument) -> str:
    """The sha256 of a document with its place, or of a bad document with the reason."""
    parts = [type(document).__name__, *map(str, document)]
    lengths = [str(len(part)) for part in parts]  # so that different documents have different texts
    return hashlib.sha256("\0".join([*lengths, *parts]).encode("utf-8", "surrogatepass")).hexdigest()
