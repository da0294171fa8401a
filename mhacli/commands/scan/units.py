"""Units: fixed groups of consecutive documents that are computed, written and repeated as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import NamedTuple

from mhacli.record.corpus import named
from mhacli.text.corpus import Document

UNIT_SIZE = 16
"""Documents in a unit, bad ones counted; the last unit of a corpus may have fewer."""
MAX_FILE_BYTES = 4 << 30
UnitFiles = tuple[bytes, bytes | None, bytes]
"""The contents of the files of a unit: rows, example and sums. The example is None if it is not wanted or no text is good."""


class Unit(NamedTuple):
    """Consecutive documents of a corpus, by their number from 0.

    The `name` contains a digest of the settings and documents, which determine the results. With `wants_example`, the record of
    one of the documents is kept as an example.
    """

    number: int
    name: str
    documents: tuple[Document, ...]
    wants_example: bool = False

    @property
    def named(self) -> str:
        """The first and last document, for messages: `corpus.jsonl:1 to corpus.jsonl:16`."""
        first, last = self.documents[0], self.documents[-1]
        return f"{named(first.file, first.place)} to {named(last.file, last.place)}"


def units(documents: Iterable[Document], settings_digest: str) -> Iterator[Unit]:
    """The units of a corpus in order. They depend only on documents and settings."""
    remaining = iter(documents)
    for number in count():
        members = tuple(islice(remaining, UNIT_SIZE))
        if not members:
            return
        yield Unit(number, unit_name(number, members, settings_digest), members)


def unit_name(number: int, documents: Iterable[Document], settings_digest: str) -> str:
    """The number, so that names sort like the documents, and a digest of settings and documents."""
    text = "\n".join([settings_digest, *map(document_digest, documents)])
    return f"{number:08d}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def number_of(unit_name: str) -> int:
    """The number of the unit of this name."""
    return int(unit_name.partition("-")[0])


def document_digest(document: Document) -> str:
    """The sha256 of a document with its place, or of a bad document with the reason."""
    kind = "BadDocument" if document.reason else "Document"  # as in the folders of earlier versions
    parts = [kind, document.file, str(document.place), document.reason or document.text]
    lengths = [str(len(part)) for part in parts]  # so that different documents have different texts
    return hashlib.sha256("\0".join([*lengths, *parts]).encode("utf-8", "surrogatepass")).hexdigest()
