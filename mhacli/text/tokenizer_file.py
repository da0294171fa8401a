"""The tokens of a `tokenizer.json`, and of every other tokenizer of the tokenizers library."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate, count, islice, pairwise
from types import SimpleNamespace
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
    """A token of a vocabulary: its name such as `ĠEiffel`, its bytes, and whether they are whole characters."""

    name: str
    bytes: bytes
    is_whole: bool


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
        self.added = library.get_added_tokens_decoder()
        self.token = cache(self._token)
        is_byte_level = type(library.decoder).__name__ == "ByteLevel"  # it knows every text
        self._unknown = None if is_byte_level else getattr(library.model, "unk_token", None)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is no text wherever it stands."""
        return token_id in self.added and bool(self.added[token_id].special)

    def _token(self, token_id: int) -> VocabularyToken:
        name, decoder = self.library.id_to_token(token_id) or f"<{token_id}>", self.library.decoder
        if decoder is None or self.is_special(token_id):
            return VocabularyToken(name, name.encode("utf-8", "surrogatepass"), True)
        text = decoder.decode(["x", name])[1:]  # behind another token, because decoders drop the space before a text
        if text == f" {name}":  # a space that the decoder puts between words
            text = name
        if "\ufffd" not in text or "\ufffd" in name:
            return VocabularyToken(name, text.encode(), True)
        byte = _BYTE_NAME.fullmatch(name)
        content = (
            bytes.fromhex(byte[1]) if byte else bytes(BYTES[character] for character in name if character in BYTES)
        )
        return VocabularyToken(name, content, content.decode("utf-8", "replace").encode() == content)

    def encoding(self, text: str, *, special: bool = True) -> Any:
        """The library's encoding of a text, with the special tokens that the tokenizer adds unless `special` is false."""

        def encode() -> Any:
            encoding = self.library.encode(text, add_special_tokens=special)
            lengths = len(encoding.ids), len(encoding.tokens)
            if lengths[0] != lengths[1]:
                raise ValueError(
                    f"{lengths[0]} ids and {lengths[1]} tokens for one text, where its post_processor must give every special "
                    "token as many ids as tokens"
                )
            return encoding

        return self.guarded(encode)

    def shown(self, text: str, encoding: Any) -> Iterator[tuple[str, Piece]]:
        """The tokens of an encoding, each as it is shown and as the tokenizer describes it. `ids`, `tokens`, `offsets`,
        `special_tokens_mask` and `word_ids` of the encoding are read."""
        ids, offsets, names, own_words = encoding.ids, encoding.offsets, encoding.tokens, encoding.word_ids
        is_split, is_unigram = len({*own_words} - {None}) > 1, type(self.library.model).__name__ == "Unigram"
        word, before = -1, None
        for i, (token_id, is_added) in enumerate(zip(ids, encoding.special_tokens_mask, strict=True)):
            token, (start, end) = self.token(token_id), offsets[i]
            is_unknown = not is_added and (
                token.name == self._unknown or (is_unigram and names[i].strip() != token.name)
            )
            if is_added or (self.is_special(token_id) and not is_unknown):
                before = None
                yield token.name, Piece(token.name, token.bytes.hex(), special=True)
                continue
            parts, label = (1, 1), token.name
            if not token.is_whole:
                label, parts = self._cut_character(text, ids, offsets, i)
            elif not is_unknown:
                label = token.bytes.decode("utf-8", "surrogatepass")
            content = text[start:end].encode("utf-8", "surrogatepass") if is_unknown else token.bytes
            if before is None:
                word += 1
            elif is_split:
                word += own_words[i] != own_words[i - 1] and not _is_within_word(text, start)
            else:
                gap = text[offsets[i - 1][1] : start]
                word += label[:1].isspace() or gap.isspace() or (before[-1:].isspace() and before != " ")
            before = label
            yield label, Piece(token.name, content.hex(), False, word, *parts)

    def sequence(self, text: str, *, special: bool = True) -> TokenSequence:
        """The tokens of a text, with the special tokens that the tokenizer adds unless `special` is false."""
        return self.beginning(text, None, special=special)[0]

    def beginning(self, text: str, limit: int | None, *, special: bool = True) -> tuple[TokenSequence, int]:
        """The first `limit` tokens of a text (None: all), and the number of further tokens."""
        encoding = self.encoding(text, special=special)
        shown = list(islice(self.shown(text, encoding), limit))
        return self._sequence(text, encoding, shown), len(encoding.ids) - len(shown)

    def of_ids(self, ids: Sequence[int]) -> TokenSequence:
        """The tokens of ids without a text: the text is what they stand for."""
        tokens = [self.token(i) for i in ids]
        contents = [token.bytes for token in tokens]
        characters = b"".join(contents).decode("utf-8", "surrogateescape")
        character_of = [i for i, c in enumerate(characters) for _ in c.encode("utf-8", "surrogateescape")]
        ends = accumulate(map(len, contents), initial=0)
        offsets = [(character_of[a], character_of[b - 1] + 1) if a < b else (0, 0) for a, b in pairwise(ends)]
        text = re.sub(r"[\udc80-\udcff]", "\ufffd", characters)
        mask = [int(self.is_special(i)) for i in ids]
        names = [token.name for token in tokens]
        encoding = SimpleNamespace(
            ids=list(ids), tokens=names, offsets=offsets, special_tokens_mask=mask, word_ids=[None] * len(ids)
        )
        return self._sequence(text, encoding, list(self.shown(text, encoding)))

    def _sequence(self, text: str, encoding: Any, shown: Sequence[tuple[str, Piece]]) -> TokenSequence:
        n, tokens, pieces = len(shown), tuple(label for label, _ in shown), tuple(piece for _, piece in shown)
        return TokenSequence(text, tokens, tuple(encoding.ids[:n]), tuple(encoding.offsets[:n]), pieces=pieces)

    def _cut_character(
        self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], i: int
    ) -> tuple[str, tuple[int, int]]:
        """The text of token `i`, which holds a part of a character, and the number of its first part and of all parts.

        Neighbours whose ranges have the character hold the others. A byte of no character becomes Python's
        lone surrogate.
        """

        def is_part(n: int, place: int) -> bool:
            is_inside = 0 <= n < len(ids) and offsets[n][0] <= place < offsets[n][1]
            return is_inside and not self.token(ids[n]).is_whole

        start, end = offsets[i]
        content, number = self.token(ids[i]).bytes, (1, 1)
        if "\ufffd" in text[start:end]:
            return content.decode("utf-8", "surrogateescape"), number
        label = " " if content[:1] == b" " and text[start] != " " else ""  # offsets may leave the space out
        for place in range(start, end):
            before = next(n for n in count() if not is_part(i - n - 1, place))
            after = next(n for n in count() if not is_part(i + n + 1, place))
            label += text[place]
            if before + after:
                place_number = (before + 1, before + 1 + after)
                label += "⟨{}/{}⟩".format(*place_number)
                number = place_number if number == (1, 1) else number
        return label, number

    def guarded(self, call: Callable[[], T]) -> T:
        """The result of a call of the library, with its faults as `MhaError`. Its panics are no `Exception` and write to
        stderr."""
        try:
            with silent_stderr():
                return call()
        except (MemoryError, MhaError):
            raise
        except BaseException as fault:
            if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":
                raise  # an interrupt is no fault of the file
            raise self.refused(f"cannot be used by the tokenizers library: {fault!s:.200}") from None

    def refused(self, fault: str) -> MhaError:
        """The error for a tokenizer with a fault."""
        return MhaError(f"{self.path} {fault}", code="bad-file", path=self.path)


def _is_within_word(text: str, place: int) -> bool:
    """Whether a word goes on at a position where a tokenizer cuts: in a number, or around a mark inside a word."""
    is_number = place > 0 and text[place - 1 : place + 1].isdecimal()
    return is_number or is_inner_mark(text, place) or is_inner_mark(text, place - 1)


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
        encoding, size = self.encoding(text), len(self.vocabulary.tokens)
        columns = zip(self.shown(text, encoding), encoding.tokens, encoding.offsets, encoding.ids, strict=True)
        for (label, _), name, (start, end), token_id in columns:
            if token_id >= size:
                raise self.refused(f"gives {name!r:.80} the id {token_id}, but has {size} tokens")
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
