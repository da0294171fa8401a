"""Tokenizers: by word, by character, by byte, or by a `tokenizer.json`.

Every token keeps its character offsets in the source text.
"""

from __future__ import annotations

import os
import re
import shlex
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

from mhacli.errors import MhaError, UsageError, installing
from mhacli.io.files import read_whole
from mhacli.io.json_schema import load_json
from mhacli.settings import Punctuation
from mhacli.text.vocabulary import MAX_ENTRIES, Vocabulary

BUILT_IN = ("word", "char", "byte")
_WHITE_SPACE = re.compile(r"\s")


class Token(NamedTuple):
    """A token: its text, its range of the source (characters, end exclusive), and its id.

    `id` is None if the vocabulary assigns ids.
    """

    text: str
    start: int
    end: int
    id: int | None = None


class Tokenizer(Protocol):
    """Cuts text into tokens."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary of the tokenizer, or None."""
        ...

    def tokens(self, text: str) -> Iterator[Token]:
        """The tokens in order, lazily."""
        ...

    def count(self, pieces: Iterable[str]) -> Counter[str]:
        """The count of each token in a text given in pieces. Memory grows with the vocabulary only."""
        ...


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


class WordTokenizer:
    """Words split at white space, in lower case, with punctuation dropped or kept as separate tokens.

    With `inner_marks`, marks inside a word stay part of it; earlier versions treated them like other marks.

    >>> [t.text for t in WordTokenizer().tokens("Don't panic, cat!")]
    ["don't", 'panic', 'cat']
    >>> [t.text for t in WordTokenizer(punctuation="keep").tokens("Don't!")]
    ["don't", '!']
    >>> [t.text for t in WordTokenizer(inner_marks=False).tokens("Don't panic, cat!")]
    ['dont', 'panic', 'cat']
    """

    vocabulary = None

    def __init__(
        self,
        *,
        keep_case: bool = False,
        punctuation: Punctuation = "drop",
        inner_marks: bool = True,
        max_token_len: int | None = None,
    ) -> None:
        self._keep_case, self._punctuation, self._max_token_len = keep_case, punctuation, max_token_len
        self._inner_marks = inner_marks

    def tokens(self, text: str) -> Iterator[Token]:
        """The words, each with the range from its first to its last kept character."""
        for chunk in re.finditer(r"\S+", text):
            require_token_len(chunk.end() - chunk.start(), self._max_token_len)
            for word, start, end in self._words(chunk.group()):
                yield Token(self._cased(word), chunk.start() + start, chunk.start() + end)

    def count(self, pieces: Iterable[str]) -> Counter[str]:
        """Word counts, of the same words as `tokens` gives for the whole text."""
        counts: Counter[str] = Counter()
        for piece in _cut_at_white_space(pieces, self._max_token_len):
            for chunk, count in Counter(piece.split()).items():
                for word in (chunk,) if chunk.isalnum() else (word for word, _, _ in self._words(chunk)):
                    counts[word] += count
        cased: Counter[str] = Counter()
        for word, count in counts.items():  # word by word, because the lower case of a sigma depends on its word
            cased[self._cased(word)] += count
        return cased

    def _cased(self, text: str) -> str:
        return text if self._keep_case else text.lower()

    def _words(self, chunk: str) -> list[tuple[str, int, int]]:
        """The words of a run without white space, each with its start and end in the run."""
        marks = [place for place, character in enumerate(chunk) if is_punctuation(character)]
        if self._inner_marks:
            marks = [place for place in marks if not is_inner_mark(chunk, place)]
        if self._punctuation == "drop":
            kept = sorted(set(range(len(chunk))) - set(marks))
            return [("".join(chunk[place] for place in kept), kept[0], kept[-1] + 1)] if kept else []
        edges = [-1, *marks, len(chunk)]
        words = [(a + 1, b) for a, b in pairwise(edges) if b > a + 1]
        return [(chunk[a:b], a, b) for a, b in sorted(words + [(place, place + 1) for place in marks])]


class CharTokenizer:
    """Makes every character (code point) a token, white space included."""

    vocabulary = None

    def tokens(self, text: str) -> Iterator[Token]:
        """One token per character."""
        return (Token(character, i, i + 1) for i, character in enumerate(text))

    def count(self, pieces: Iterable[str]) -> Counter[str]:
        """Character counts."""
        counts: Counter[str] = Counter()
        for piece in pieces:
            counts.update(piece)
        return counts


class ByteTokenizer:
    """Makes every byte of the UTF-8 text a token: ASCII by its character, other bytes as `<0xE2>`."""

    vocabulary = None

    def tokens(self, text: str) -> Iterator[Token]:
        """One token per byte. The bytes of one character have the same range."""
        for i, character in enumerate(text):
            for byte in character.encode():
                yield Token(_byte_name(byte), i, i + 1)

    def count(self, pieces: Iterable[str]) -> Counter[str]:
        """Byte counts."""
        counts: Counter[int] = Counter()
        for piece in pieces:
            counts.update(piece.encode())
        return Counter({_byte_name(byte): count for byte, count in counts.items()})


def _byte_name(byte: int) -> str:
    return chr(byte) if byte < 0x80 else f"<0x{byte:02X}>"


def _cut_at_white_space(pieces: Iterable[str], max_token_len: int | None) -> Iterator[str]:
    """The text in pieces that end at white space, so that no word is cut. Raises `MhaError` for words above the limit."""
    rest: list[str] = []
    rest_len = 0
    for piece in pieces:
        cut = len(piece) - len(_last_word(piece))
        if cut:
            whole = "".join([*rest, piece[:cut]])
            _require_short_words(whole, max_token_len)
            yield whole
            rest, rest_len = [], 0
        rest.append(piece[cut:])
        rest_len += len(rest[-1])
        require_token_len(rest_len, max_token_len)
    yield "".join(rest)


def _last_word(text: str) -> str:
    return text.rsplit(maxsplit=1)[-1] if text and not text[-1].isspace() else ""


def _require_short_words(text: str, limit: int | None) -> None:
    """Raises `MhaError` for a word longer than `limit`. Every such word covers a multiple of `limit`, so only those are
    checked."""
    if limit is None:
        return
    for place in range(0, len(text), limit):
        space = _WHITE_SPACE.search(text, place, place + limit + 1)
        end = space.start() if space else min(len(text), place + limit + 1)
        require_token_len(len(_last_word(text[max(0, place - limit) : place])) + end - place, limit)


def require_token_len(length: int, limit: int | None) -> None:
    """Raises `MhaError` for a word longer than `limit`."""
    if limit is not None and length > limit:
        raise MhaError(
            f"a word has {length} characters or more, above the limit of {limit}",
            hint=f"--max-token-len {10 * limit} raises the limit; --tokenizer char needs no spaces",
            code="too-large",
        )


# ------------------------------------------------------------------------------------------------------ tokenizer.json


T = TypeVar("T")
MAX_FILE_BYTES = 64 << 20


class FileTokenizer:
    """Gives the tokens, ids and offsets of a `tokenizer.json`, with its padding and truncation switched off."""

    def __init__(self, path: str) -> None:
        """Raises `MhaError` if the file or the library is missing, or the file is not a tokenizer."""
        self._path = path
        data = self._read()
        library = _library()
        self.library = self._guarded(lambda: library.Tokenizer.from_str(data.decode()))
        self.library.no_padding()
        self.library.no_truncation()
        self.vocabulary = self._read_vocabulary()

    def tokens(self, text: str) -> Iterator[Token]:
        """The tokens, including the special tokens that the tokenizer adds (with an empty range)."""
        encoding = self._guarded(lambda: encoded(self.library, text))
        for piece, (start, end), token_id in zip(encoding.tokens, encoding.offsets, encoding.ids, strict=True):
            if token_id >= len(self.vocabulary.tokens):
                size = len(self.vocabulary.tokens)
                raise self._refused(f"gives {piece!r:.80} the id {token_id}, but has {size} tokens")
            yield Token(piece, start, end, token_id)

    def count(self, pieces: Iterable[str]) -> Counter[str]:
        """Token counts, taken line by line, without the special tokens that the tokenizer adds."""
        counts: Counter[str] = Counter()
        for lines in _whole_lines(pieces):
            for line in self._guarded(partial(self.library.encode_batch, lines, add_special_tokens=False)):
                counts.update(line.tokens)
        return counts

    def _read(self) -> bytes:
        if not os.path.exists(self._path) and os.path.basename(self._path) == self._path and "." not in self._path:
            raise UsageError(
                f"--tokenizer {shlex.quote(self._path)} is not one of {', '.join(BUILT_IN)} or the path of a tokenizer.json"
            )
        data = read_whole(self._path, MAX_FILE_BYTES)
        load_json(data, self._path)  # reports the position of a JSON error; the library does not
        return data

    def _read_vocabulary(self) -> Vocabulary:
        by_id = {i: token for token, i in self.library.get_vocab(with_added_tokens=True).items()}
        size = max(by_id, default=-1) + 1
        if not 0 < size <= MAX_ENTRIES:
            raise self._refused(
                f"has the id {size - 1}, above the limit of {MAX_ENTRIES - 1}" if size else "has an empty vocabulary"
            )
        return Vocabulary(tuple(by_id.get(i, f"<unused {i}>") for i in range(size)))

    def _guarded(self, call: Callable[[], T]) -> T:
        """The result of `call`, with faults of the library as `MhaError`. Its panics are no `Exception` and write to
        stderr."""
        try:
            with silent_stderr():
                return call()
        except MemoryError:
            raise
        except BaseException as fault:
            if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":
                raise  # an interrupt is no fault of the file
            raise self._refused(f"cannot be used by the tokenizers library: {fault!s:.200}") from None

    def _refused(self, fault: str) -> MhaError:
        return MhaError(f"{self._path} {fault}", code="bad-file", path=self._path)


def encoded(library: Any, text: str, *, special: bool = True) -> Any:
    """The library's encoding of a text, with the special tokens that the tokenizer adds unless `special` is false.

    Raises `ValueError` if the numbers of ids and tokens differ, which a faulty post-processor can cause.
    """
    encoding = library.encode(text, add_special_tokens=special)
    if not len(encoding.ids) == len(encoding.tokens) == len(encoding.offsets) == len(encoding.special_tokens_mask):
        raise ValueError(
            f"{len(encoding.ids)} ids and {len(encoding.tokens)} tokens for one text, where its post_processor must give every "
            "special token as many ids as tokens"
        )
    return encoding


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise MhaError(
            "a tokenizer.json needs the tokenizers library, which is not installed",
            hint=f"{installing('tokenizers')} installs it",
            code="missing-extra",
        ) from None
    return tokenizers


def _whole_lines(pieces: Iterable[str]) -> Iterator[list[str]]:
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield [line + "\n" for line in lines]
    yield [rest] if rest else []


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Discards everything written to stderr within the context, even by native code."""
    saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
