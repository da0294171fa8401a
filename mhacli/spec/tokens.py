"""A text as tokens. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal


@dataclass(frozen=True)
class Piece:
    """What the tokenizer of a checkpoint says of a token besides its id: its own `name` for it, the `bytes` that it stands
    for in hex, whether it is `special`, and the number of the `word` that it is part of (None for special tokens).

    Where a character is cut into several tokens, the token is its `part` of `parts`, 1 first.
    """

    name: str
    bytes: str
    special: bool = False
    word: int | None = None
    part: int = 1
    parts: int = 1


@dataclass(frozen=True)
class TokenSequence:
    """One text as tokens. `offsets` are characters of `text`, end exclusive; `documents` says which document of the text
    each token belongs to, 0 first, and is empty where texts are not cut into documents. `pieces` are those of a tokenizer
    that has its own names for tokens, else empty; then `tokens` are what they stand for, and parts of a character are
    marked, `日⟨1/3⟩`."""

    text: str
    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    documents: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()

    @property
    def places(self) -> tuple[int, ...]:
        """The place of each token in its own document, 0 first."""
        begins: dict[int, int] = {}
        for index, document in enumerate(self.documents):
            begins.setdefault(document, index)
        return tuple(index - begins[document] for index, document in enumerate(self.documents)) or tuple(
            range(len(self.tokens))
        )


AttentionKind = Literal["self", "encoder", "decoder", "cross"]
"""Whose tokens an attention reads: those of the text itself; in a model of two halves the encoder's, the decoder's own, or from
the decoder those of the encoder."""


def places(n: int) -> TokenSequence:
    """A text of which only the places are known: `x0`, `x1`, and so on."""
    return TokenSequence("", tuple(f"x{i}" for i in range(n)), tuple(range(n)), ((0, 0),) * n)


def named_by_ids(ids: Sequence[int]) -> TokenSequence:
    """A text of which only the ids are known, each of which is its own name."""
    names = tuple(map(str, ids))
    ends = list(accumulate((len(name) + 1 for name in names), initial=0))
    spans = tuple((start, end - 1) for start, end in pairwise(ends))
    return TokenSequence(" ".join(names), names, tuple(ids), spans)
