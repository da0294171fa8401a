"""Units: the fixed runs of documents that are computed, written and redone as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import NamedTuple

from mhacli.results.record.corpus import named
from mhacli.text.corpus import BadDocument, Document

UNIT_SIZE = 16
"""Documents in a unit, bad ones counted; the last unit of a corpus may have fewer."""
NAME_LEN = 16


class Unit(NamedTuple):
    """Consecutive documents of a corpus, by their number from 0.

    The `name` says what decides the numbers: the same settings and documents have the same name. With `wants_example` the
    record of one of the documents is kept as an example.
    """

    number: int
    name: str
    documents: tuple[Document | BadDocument, ...]
    wants_example: bool = False

    @property
    def named(self) -> str:
        """Its documents as messages name them: `corpus.jsonl:1 to corpus.jsonl:16`."""
        first, last = self.documents[0], self.documents[-1]
        return f"{named(first.file, first.place)} to {named(last.file, last.place)}"


class UnitFiles(NamedTuple):
    """What computing a unit gives: the bytes of its files. `example` is empty where it was not wanted, or no document is good."""

    rows: bytes
    sums: bytes
    example: bytes
    n_documents: int
    n_bad: int
    n_tokens: int


def units(documents: Iterable[Document | BadDocument], settings_digest: str, size: int = UNIT_SIZE) -> Iterator[Unit]:
    """The units of a corpus, in its order. They depend on nothing but documents and settings."""
    rest = iter(documents)
    for number in count():
        members = tuple(islice(rest, size))
        if not members:
            return
        yield Unit(number, unit_name(number, members, settings_digest), members)


def unit_name(number: int, documents: Iterable[Document | BadDocument], settings_digest: str) -> str:
    """The number, so that names sort as the documents stand, and a digest of settings and documents."""
    text = "\n".join([settings_digest, *map(document_digest, documents)])
    return f"{number:08d}-{hashlib.sha256(text.encode()).hexdigest()[:NAME_LEN]}"


def document_digest(document: Document | BadDocument) -> str:
    """The sha256 of a document with its place, or of why it is bad."""
    words = [type(document).__name__, *map(str, document)]
    lengths = [str(len(word)) for word in words]  # so that no two documents have one text
    return hashlib.sha256("\0".join([*lengths, *words]).encode("utf-8", "surrogatepass")).hexdigest()
