"""Tokenizers: by word, by character or by byte (`tokenizer_file.py` has those of a `tokenizer.json`).

Every token keeps its character offsets in the source text.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import ClassVar

from mhacli.errors import MhaError
from mhacli.settings import Config

BUILT_IN = ("word", "char", "byte")


Token = tuple[str, tuple[int, int], int | None]
"""A token: its text, its range of the source (characters, end exclusive), and its id, None if the vocabulary assigns ids."""


def is_punctuation(character: str) -> bool:
    """Whether a character is punctuation: an ASCII mark or one of Unicode's P categories."""
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def is_inner_mark(text: str, place: int) -> bool:
    """Whether a mark is part of its word: an apostrophe between letters or digits, or a point or comma between digits.

    >>> [is_inner_mark("don't 3.14 a.b 'c", place) for place in (3, 7, 12, 15)]
    [True, True, False, False]
    """
    if not 0 < place < len(text) - 1:
        return False
    before, mark, after = text[place - 1], text[place], text[place + 1]
    if mark in APOSTROPHES:
        return (before.isalnum() or unicodedata.category(before).startswith("M")) and after.isalnum()
    return mark in ".," and before.isdecimal() and after.isdecimal()


APOSTROPHES = "'\N{RIGHT SINGLE QUOTATION MARK}"


@dataclass(frozen=True)
class BuiltInTokenizer:
    """The tokenizer of mha that a config names.

    `word` splits at white space, puts words in lower case, and drops punctuation or makes it tokens. With `inner_marks`,
    marks inside a word stay part of it; earlier versions treated them like other marks. `char` makes every character (code
    point) a token, white space included. `byte` does that with every byte of the UTF-8 text: ASCII by its character, other
    bytes as `<0xE2>`, with the range of their character.

    >>> [name for name, *_ in BuiltInTokenizer(Config()).tokens("Don't panic, cat!")]
    ["don't", 'panic', 'cat']
    >>> [name for name, *_ in BuiltInTokenizer(Config(punctuation="keep")).tokens("Don't!")]
    ["don't", '!']
    >>> [name for name, *_ in BuiltInTokenizer(Config(inner_marks=False)).tokens("Don't panic, cat!")]
    ['dont', 'panic', 'cat']
    """

    config: Config
    max_token_len: int | None = None
    vocabulary: ClassVar[None] = None

    def tokens(self, text: str) -> Iterator[Token]:
        """The tokens in order; a word has the range from its first to its last kept character. Raises `MhaError` for a word
        that is too long."""
        if self.config.tokenizer == "word":
            for chunk in re.finditer(r"\S+", text):
                require_token_len(chunk.end() - chunk.start(), self.max_token_len)
                for word, start, end in self._words(chunk.group()):
                    name = word if self.config.keep_case else word.lower()
                    yield name, (chunk.start() + start, chunk.start() + end), None
            return
        for i, character in enumerate(text):
            is_itself = self.config.tokenizer == "char" or character.isascii()
            for name in [character] if is_itself else [f"<0x{byte:02X}>" for byte in character.encode()]:
                yield name, (i, i + 1), None

    def count(self, pieces: Iterable[str]) -> Counter[str]:
        """The count of each token of a text given in pieces. Each run without white space, or each character, is cut once."""
        is_word, counts = self.config.tokenizer == "word", Counter[str]()
        texts = _chunks(pieces, self.max_token_len) if is_word else Counter(chain.from_iterable(pieces))
        for text, count in texts.items():
            for name, *_ in self.tokens(text):
                counts[name] += count
        return counts

    def _words(self, chunk: str) -> list[tuple[str, int, int]]:
        """The words of a run without white space, each with its start and end in the run."""
        marks = [place for place, character in enumerate(chunk) if is_punctuation(character)]
        if self.config.inner_marks:
            marks = [place for place in marks if not is_inner_mark(chunk, place)]
        if self.config.punctuation == "drop":
            kept = sorted(set(range(len(chunk))) - set(marks))
            return [("".join(chunk[place] for place in kept), kept[0], kept[-1] + 1)] if kept else []
        edges = [-1, *marks, len(chunk)]
        words = [(a + 1, b) for a, b in pairwise(edges) if b > a + 1]
        return [(chunk[a:b], a, b) for a, b in sorted(words + [(place, place + 1) for place in marks])]


def _chunks(pieces: Iterable[str], max_len: int | None) -> Counter[str]:
    """The count of each run without white space in a text given in pieces. Raises `MhaError` for one above the limit."""
    counts: Counter[str] = Counter()
    rest = ""
    for piece in chain(pieces, " "):
        chunks = (rest + piece).split()
        rest = chunks.pop() if chunks and not piece[-1].isspace() else ""
        counts.update(chunks)
        require_token_len(max(map(len, [*chunks, rest])), max_len)
    return counts


def require_token_len(length: int, limit: int | None) -> None:
    """Raises `MhaError` for a word longer than `limit`."""
    if limit is not None and length > limit:
        hint = f"--max-token-len {10 * limit} raises the limit; --tokenizer char needs no spaces"
        raise MhaError(f"a word has {length} or more characters, the limit is {limit}", hint=hint, code="too-large")
