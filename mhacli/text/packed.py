"""Packing: the tokens of consecutive documents in texts of equal length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mhacli.text.corpus import BadDocument, Document


class PackedText(NamedTuple):
    """Consecutive tokens of a corpus. `file` and `place` are those of the first document that has tokens here.

    `text` has the characters of the tokens, and `offsets` are their ranges in it. `ends` are the indices of the tokens between
    two documents, each of which belongs to the document before it. The special tokens around a text are not included.
    """

    file: str
    place: int
    text: str
    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]
    ends: tuple[int, ...] = ()

    @property
    def n_documents(self) -> int:
        """The number of documents that have tokens here."""
        return 1 + sum(end < len(self.ids) - 1 for end in self.ends)

    def part(self, start: int, stop: int) -> PackedText:
        """The tokens from `start` to `stop`, with their characters. They must be of the first document if `start` is not 0."""
        ids, offsets = tuple(self.ids[start:stop]), self.offsets[start:stop]
        begin = min((a for a, b in offsets if a < b), default=0)
        end = max((b for a, b in offsets if a < b), default=0)
        shifted = tuple((max(0, a - begin), max(0, b - begin)) for a, b in offsets)
        ends = tuple(end - start for end in self.ends if start <= end < stop)
        return PackedText(self.file, self.place, self.text[begin:end], ids, shifted, ends)


Item = Document | PackedText | BadDocument
"""A member of a unit: a document, a packed text or a bad document."""


def pack(pieces: Iterable[PackedText | BadDocument], length: int) -> Iterator[PackedText | BadDocument]:
    """The tokens of `pieces` in texts of `length` tokens; the last text may be shorter. Bad documents are passed on at once."""
    held: list[PackedText] = []
    room = length
    for piece in pieces:
        if isinstance(piece, BadDocument):
            yield piece
            continue
        start = 0
        while start < len(piece.ids):
            part = piece.part(start, start + room)
            held.append(part)
            start, room = start + len(part.ids), room - len(part.ids)
            if not room:
                yield _joined(held)
                held, room = [], length
    if held:
        yield _joined(held)


def _joined(parts: Sequence[PackedText]) -> PackedText:
    text = ""
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    ends: list[int] = []
    for part in parts:
        offsets += [(a + len(text), b + len(text)) for a, b in part.offsets]
        ends += [len(ids) + end for end in part.ends]
        ids += part.ids
        text += part.text
    return PackedText(parts[0].file, parts[0].place, text, tuple(ids), tuple(offsets), tuple(ends))
