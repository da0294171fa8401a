"""A tokenized text as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

UNKNOWN = "<unk>"
"""The token of a vocabulary that stands for all others."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A checkpoint tokenizer's description of one token.

    `name` is the tokenizer's own name, `bytes` are the bytes of the token in hex (of the text for
    an unknown token), and `word` is the number of its word (None for special tokens). If a
    character is cut into several tokens, the token is `part` (from 1) of `parts`.
    """

    name: str
    bytes: str
    special: bool = False
    word: int | None = None
    part: int = 1
    parts: int = 1


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One text as tokens.

    `offsets` are characters of `text`, end exclusive. `documents` is the document of each token,
    counted from 0, and empty if the text is not split. `pieces` is set for tokenizers with their
    own token names. `token_type_ids` are those that a model reads with a pair of texts, which
    `text` has on two lines.
    """

    text: str
    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    documents: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()
    token_type_ids: tuple[int, ...] = ()

    @property
    def words(self) -> tuple[range, ...]:
        """The tokens of each word in order; a special token is alone, and without pieces every
        token is.
        """
        words = [piece.word for piece in self.pieces] or [None] * len(self.tokens)
        begins = [
            i for i, word in enumerate(words) if not i or word is None or word != words[i - 1]
        ]
        return tuple(range(a, b) for a, b in pairwise([*begins, len(words)]))

    @property
    def of_words(self) -> TokenSequence:
        """The text with its words in place of tokens: their only token, or their characters."""
        names, offsets = list[str](), list[tuple[int, int]]()
        for word in self.words:
            (begin, _), (_, end) = self.offsets[word[0]], self.offsets[word[-1]]
            names.append(self.tokens[word[0]] if len(word) == 1 else self.text[begin:end])
            offsets.append((begin, end))
        ids = tuple(self.ids[word[0]] for word in self.words)
        return TokenSequence(self.text, tuple(names), ids, tuple(offsets))

    def unknown(self, i: int) -> str | None:
        """The text for which token `i` stands if the vocabulary has no token for it, else None."""
        typed = self.text[slice(*self.offsets[i])]
        if not self.pieces or typed == self.tokens[i]:
            return None
        is_own = self.pieces[i].bytes == typed.encode("utf-8", "surrogatepass").hex()
        return typed if is_own else None

    def first(self, n: int | None) -> TokenSequence:
        """The first `n` tokens, or all."""
        names = ("tokens", "ids", "offsets", "documents", "pieces", "token_type_ids")
        return replace(self, **{name: getattr(self, name)[:n] for name in names})

    @property
    def covered(self) -> TokenSequence:
        """The sequence without the text behind its tokens."""
        return replace(self, text=self.text[: max((end for _, end in self.offsets), default=0)])


Sequences = tuple[TokenSequence, ...]


class Texts(NamedTuple):
    """The texts of a computation, and the context of each; None for attention of the texts to
    themselves.
    """

    sequences: Sequences = ()
    context: Sequences | None = None


def places_in(documents: Sequence[int], n: int) -> tuple[int, ...]:
    """The position of each of `n` tokens in its document, counted from 0; without documents in the
    text.
    """
    begins = {document: i for i, document in reversed([*enumerate(documents)])}
    return tuple(i - begins[document] for i, document in enumerate(documents)) or tuple(range(n))


def places(n: int) -> TokenSequence:
    """A sequence of bare positions: `x0`, `x1`, and so on."""
    return TokenSequence("", tuple(f"x{i}" for i in range(n)), tuple(range(n)), ((0, 0),) * n)


def behind(n: int, text: TokenSequence) -> TokenSequence:
    """A text behind `n` tokens whose positions alone are known. Their ids are −1, which is no
    token's.
    """
    tokens = (*places(n).tokens, *text.tokens)
    return TokenSequence("", tokens, (-1,) * n + text.ids, ((0, 0),) * len(tokens))


def spaced(tokens: Sequence[str], ids: Sequence[int]) -> TokenSequence:
    """A sequence of tokens without a text of their own: theirs has a blank between them."""
    ends = accumulate((len(token) + 1 for token in tokens), initial=0)
    spans = tuple((start, end - 1) for start, end in pairwise(ends))
    return TokenSequence(" ".join(tokens), tuple(tokens), tuple(ids), spans)


def named_by_ids(ids: Sequence[int]) -> TokenSequence:
    """A sequence whose ids alone are known; each id is its token's text."""
    return spaced([*map(str, ids)], ids)
