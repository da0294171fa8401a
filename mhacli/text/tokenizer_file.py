"""The tokens of a `tokenizer.json`, and of every other tokenizer of the tokenizers library."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, count, islice, pairwise
from typing import Any, NamedTuple, TypeVar

from mhacli.errors import MhaError, UsageError, installing
from mhacli.io.files import read_whole
from mhacli.text.tokenizers import BUILT_IN, Token, is_inner_mark
from mhacli.text.tokens import Piece, TokenSequence
from mhacli.text.vocabulary import MAX_ENTRIES, Vocabulary

T = TypeVar("T")
MAX_FILE_BYTES = 64 << 20
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_characters() -> dict[str, int]:
    """The byte for each character of a byte-level token: printable bytes stand for themselves, the others count up from 256.

    Source: Radford et al. 2019 (GPT-2), `bytes_to_unicode` in its encoder.py.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_characters()


class VocabularyToken(NamedTuple):
    """A token of a vocabulary: its name such as `ĠEiffel` and its bytes.

    `is_whole`: the bytes are whole characters. `is_special`: it is no text wherever it stands. `is_unknown`: it stands for every
    text that the vocabulary lacks.
    """

    name: str
    bytes: bytes
    is_whole: bool = True
    is_special: bool = False
    is_unknown: bool = False


@dataclass(frozen=True)
class EncodedText:
    """The tokens of a text and their ranges of it. `added` marks the special tokens around the text, and `words` are the
    library's numbers of words."""

    text: str
    ids: Sequence[int]
    tokens: Sequence[VocabularyToken]
    offsets: Sequence[tuple[int, int]]
    added: Sequence[int]
    words: Sequence[int | None]

    def sequence(self, limit: int | None = None) -> TokenSequence:
        """The first `limit` tokens, or all."""
        shown = list(islice(self.shown(), limit))
        tokens, pieces = tuple(label for label, _ in shown), tuple(piece for _, piece in shown)
        return TokenSequence(self.text, tokens, tuple(self.ids[:limit]), tuple(self.offsets[:limit]), pieces=pieces)

    def shown(self) -> Iterator[tuple[str, Piece]]:
        """The tokens in order, each as it is shown and as the tokenizer describes it."""
        is_split = len({*self.words} - {None}) > 1
        word = -1
        for i, token in enumerate(self.tokens):
            if self._is_special(i):
                yield token.name, Piece(token.name, token.bytes.hex(), special=True)
                continue
            word += self._begins_word(i, is_split)
            label, parts, content = token.name, (1, 1), token.bytes
            if token.is_unknown:
                content = self.text[slice(*self.offsets[i])].encode("utf-8", "surrogatepass")
            elif token.is_whole:
                label = token.bytes.decode("utf-8", "surrogatepass")
            else:
                label, parts = self._cut_character(i)
            yield label, Piece(token.name, content.hex(), False, word, *parts)

    def _is_special(self, i: int) -> bool:
        return bool(self.added[i]) or self.tokens[i].is_special

    def _begins_word(self, i: int, is_split: bool) -> bool:
        """Whether a word begins with token `i`: one of the library's, if it splits texts, else what follows white space.

        A number, and a word with a mark inside, are one word.
        """
        if not i or self._is_special(i - 1):
            return True
        start, before = self.offsets[i][0], self.tokens[i - 1].bytes
        if is_split:
            is_number = start > 0 and self.text[start - 1 : start + 1].isdecimal()
            is_within = is_number or is_inner_mark(self.text, start) or is_inner_mark(self.text, start - 1)
            return self.words[i] != self.words[i - 1] and not is_within
        is_after = (before[-1:].isspace() and before != b" ") or self.text[self.offsets[i - 1][1] : start].isspace()
        return is_after or self.tokens[i].bytes[:1].isspace()

    def _cut_character(self, i: int) -> tuple[str, tuple[int, int]]:
        """The text of a token with a part of a character, and the number of its first part and of all parts.

        Neighbours whose ranges have the character hold the others. A byte of no character becomes Python's lone surrogate.
        """

        def is_part(n: int, place: int) -> bool:
            return 0 <= n < len(self.ids) and not self.tokens[n].is_whole and place in range(*self.offsets[n])

        start, end = self.offsets[i]
        content, parts = self.tokens[i].bytes, (1, 1)
        if "\ufffd" in self.text[start:end]:
            return content.decode("utf-8", "surrogateescape"), parts
        label = " " if content[:1] == b" " and self.text[start] != " " else ""  # offsets may leave the space out
        for place in range(start, end):
            label += self.text[place]
            first = next(n for n in range(i, -1, -1) if not is_part(n - 1, place))
            last = next(n for n in count(i) if not is_part(n + 1, place))
            if first < last:
                label += f"⟨{i - first + 1}/{last - first + 1}⟩"
                parts = (i - first + 1, last - first + 1) if parts == (1, 1) else parts
        return label, parts


class LibraryTokenizer:
    """Gives the tokens of a tokenizer of the tokenizers library, whose padding and truncation are switched off.

    A token is shown as the vocabulary spells it, decoded by the tokenizer's decoder: ` Eiffel` for `ĠEiffel` and `▁Eiffel`, `fel`
    for `##fel`. Special tokens and the token for unknown text are shown by their names. A token with a part of a character is
    shown as the text at its offsets with the number of the part: `日⟨1/3⟩`. `path` is the source in messages.
    """

    def __init__(self, library: Any, path: str) -> None:
        library.no_padding()
        library.no_truncation()
        self.library, self.path = library, path
        self.special = {i for i, token in library.get_added_tokens_decoder().items() if token.special}
        self.token = cache(self._token)

    def _token(self, token_id: int) -> VocabularyToken:
        """The token of an id. Its text is decoded behind another token, because decoders drop the space before a text."""
        name, decoder = self.library.id_to_token(token_id) or f"<{token_id}>", self.library.decoder
        if type(decoder).__name__ != "ByteLevel" and name == getattr(self.library.model, "unk_token", None):
            return VocabularyToken(name, name.encode(), is_unknown=True)
        if decoder is None or token_id in self.special:
            return VocabularyToken(name, name.encode("utf-8", "surrogatepass"), is_special=token_id in self.special)
        text = self.guarded(lambda: decoder.decode(["x", name])[1:])
        if "\ufffd" not in text or "\ufffd" in name:
            is_spaced = text == f" {name}"  # by the decoder, between words
            return VocabularyToken(name, name.encode() if is_spaced else text.encode())
        byte = _BYTE_NAME.fullmatch(name)
        content = bytes.fromhex(byte[1]) if byte else bytes(BYTES[c] for c in name if c in BYTES)
        return VocabularyToken(name, content, is_whole=content.decode("utf-8", "replace").encode() == content)

    def encoded(self, text: str, *, special: bool = True) -> EncodedText:
        """The tokens of a text, with the special tokens that the tokenizer adds unless `special` is false."""
        encoding = self.guarded(lambda: self.library.encode(text, add_special_tokens=special))
        ids, names = encoding.ids, encoding.tokens
        if len(ids) != len(names):
            raise self.refused(
                f"gives {len(ids)} ids and {len(names)} tokens for one text, where its post_processor must give every special "
                "token as many ids as tokens"
            )
        missing = next((i for i in set(ids) if self.library.id_to_token(i) is None), None)
        if missing is not None:
            raise self.refused(
                f"gives {names[ids.index(missing)]!r:.80} the id {missing}, which is not in its vocabulary"
            )
        tokens = [self.token(i) for i in ids]
        if type(self.library.model).__name__ == "Unigram":  # it names unknown text by the text
            tokens = [
                token._replace(is_unknown=True, is_special=False) if name.strip() != token.name else token
                for token, name in zip(tokens, names, strict=True)
            ]
        return EncodedText(text, ids, tokens, encoding.offsets, encoding.special_tokens_mask, encoding.word_ids)

    def sequence(self, text: str, *, special: bool = True) -> TokenSequence:
        """The tokens of a text, with the special tokens that the tokenizer adds unless `special` is false."""
        return self.encoded(text, special=special).sequence()

    def beginning(self, text: str, limit: int | None, *, special: bool = True) -> tuple[TokenSequence, int]:
        """The first `limit` tokens of a text (None: all), and the number of further tokens."""
        encoded = self.encoded(text, special=special)
        sequence = encoded.sequence(limit)
        return sequence, len(encoded.ids) - len(sequence.ids)

    def of_ids(self, ids: Sequence[int]) -> TokenSequence:
        """The tokens of ids without a text: the text is what they stand for."""
        tokens = [self.token(i) for i in ids]
        contents = [token.bytes for token in tokens]
        characters = b"".join(contents).decode("utf-8", "surrogateescape")
        character_of = [i for i, c in enumerate(characters) for _ in c.encode("utf-8", "surrogateescape")]
        ends = accumulate(map(len, contents), initial=0)
        offsets = [(character_of[a], character_of[b - 1] + 1) if a < b else (0, 0) for a, b in pairwise(ends)]
        text = re.sub(r"[\udc80-\udcff]", "\ufffd", characters)
        return EncodedText(text, ids, tokens, offsets, [0] * len(ids), [None] * len(ids)).sequence()

    def guarded(self, call: Callable[[], T]) -> T:
        """The result of a call of the library, with its faults as `MhaError`. Its panics are no `Exception` and write to
        stderr."""
        try:
            with silent_stderr():
                return call()
        except MemoryError:
            raise
        except BaseException as fault:
            if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":
                raise  # an interrupt is no fault of the file
            raise self.refused(f"cannot be used by the tokenizers library: {fault!s:.200}") from None

    def refused(self, fault: str) -> MhaError:
        """The error for a tokenizer with a fault."""
        return MhaError(f"{self.path} {fault}", code="bad-file", path=self.path)


class FileTokenizer(LibraryTokenizer):
    """The tokenizer of a `tokenizer.json`, with its vocabulary."""

    def __init__(self, path: str) -> None:
        """Raises `MhaError` if the file or the library is missing, or the file is not a tokenizer."""
        if not os.path.exists(path) and os.path.basename(path) == path and "." not in path:
            raise UsageError(
                f"--tokenizer {shlex.quote(path)} is not one of {', '.join(BUILT_IN)} or the path of a tokenizer.json"
            )
        self.path = path
        data = read_whole(path, MAX_FILE_BYTES)
        library = _library()
        super().__init__(self.guarded(lambda: library.Tokenizer.from_str(data.decode())), path)
        by_id = {i: name for name, i in self.library.get_vocab(with_added_tokens=True).items()}
        size = max(by_id, default=-1) + 1
        if not 0 < size <= MAX_ENTRIES:
            raise self.refused(
                f"has the id {size - 1}, above the limit of {MAX_ENTRIES - 1}" if size else "has an empty vocabulary"
            )
        self.vocabulary = Vocabulary(tuple(by_id.get(i, f"<unused {i}>") for i in range(size)))

    def tokens(self, text: str) -> Iterator[Token]:
        """The tokens, including the special tokens that the tokenizer adds (with an empty range)."""
        encoded = self.encoded(text)
        for (label, _), (start, end), token_id in zip(encoded.shown(), encoded.offsets, encoded.ids, strict=True):
            yield Token(label, start, end, token_id)

    def count(self, pieces: Iterable[str]) -> Counter[str]:
        """The count of each name, taken line by line, without the special tokens that the tokenizer adds."""
        counts: Counter[str] = Counter()
        for lines in _whole_lines(pieces):
            for line in self.guarded(partial(self.library.encode_batch, lines, add_special_tokens=False)):
                counts.update(line.tokens)
        return counts


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
