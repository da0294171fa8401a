"""A `tokenizer.json`, read with the `tokenizers` library of the extra `hf`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from mhacli.errors import MhaError, UsageError
from mhacli.io.extras import installing
from mhacli.io.files import read_whole
from mhacli.io.json_schema import load_json
from mhacli.text.tokenizers import BUILT_IN, Token
from mhacli.text.vocabulary import MAX_ENTRIES, Vocabulary

T = TypeVar("T")
MAX_FILE_BYTES = 64 << 20


class FileTokenizer:
    """The tokens, ids and offsets that a `tokenizer.json` gives; padding and truncation in it are switched off."""

    def __init__(self, path: str) -> None:
        """Raises `MhaError` when the file or the library is missing, or the file is not a tokenizer."""
        self._path = path
        data = self._read()
        library = _library()
        self.library = self._guarded(lambda: library.Tokenizer.from_str(data.decode()))
        self.library.no_padding()
        self.library.no_truncation()
        self.vocabulary = self._own_vocabulary()

    def tokens(self, text: str) -> Iterator[Token]:
        """The pieces, with the special tokens that the file adds (their span is empty)."""
        made = self._guarded(lambda: encoded(self.library, text))
        for piece, (start, end), token_id in zip(made.tokens, made.offsets, made.ids, strict=True):
            if token_id >= len(self.vocabulary.tokens):
                known = f"ids below {len(self.vocabulary.tokens)}, the size of its vocabulary"
                raise self._refused(f"a tokenizer that gives {known}", f"{token_id} for {piece!r:.80}")
            yield Token(piece, start, end, token_id)

    def count(self, pieces: Iterable[str]) -> Counter[str]:
        """Counts of the pieces of each line, without the special tokens that the file adds to a text."""
        counts: Counter[str] = Counter()
        for lines in _whole_lines(pieces):
            for line in self._guarded(partial(self.library.encode_batch, lines, add_special_tokens=False)):
                counts.update(line.tokens)
        return counts

    def _read(self) -> bytes:
        if not os.path.exists(self._path) and os.path.basename(self._path) == self._path and "." not in self._path:
            raise UsageError(
                f"tokenizer must be {', '.join(BUILT_IN)} or the path of a tokenizer.json, got {self._path!r}"
            )
        data = read_whole(self._path, MAX_FILE_BYTES)
        load_json(data, self._path)  # says where broken JSON breaks; the library does not
        return data

    def _own_vocabulary(self) -> Vocabulary:
        by_id = {i: token for token, i in self.library.get_vocab(with_added_tokens=True).items()}
        size = max(by_id, default=-1) + 1
        if not 0 < size <= MAX_ENTRIES:
            raise self._refused(f"ids from 0 to {MAX_ENTRIES - 1}", f"the largest id {size - 1}")
        return Vocabulary(tuple(by_id.get(i, f"<unused {i}>") for i in range(size)))

    def _guarded(self, call: Callable[[], T]) -> T:
        """The call's result. A panic of the library is no `Exception`, and it writes to stderr on its own."""
        try:
            with silent_stderr():
                return call()
        except MemoryError:
            raise
        except BaseException as fault:
            if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":
                raise  # an interrupt is none of the file's faults
            raise self._refused("a tokenizer that the tokenizers library can use", f"{fault!s:.200}") from None

    def _refused(self, rule: str, got: str) -> MhaError:
        return MhaError(f"{self._path} must be {rule}, got: {got}", code="bad-file", path=self._path)


def encoded(library: Any, text: str, *, special: bool = True) -> Any:
    """What a tokenizer of the library makes of a text, with the special tokens that it adds unless they are left out.

    Raises `ValueError` where these have more ids than names, or fewer, as a post-processor can say: nobody knows then which is
    whose.
    """
    made = library.encode(text, add_special_tokens=special)
    if not len(made.ids) == len(made.tokens) == len(made.offsets) == len(made.special_tokens_mask):
        raise ValueError(
            f"{len(made.ids)} ids and {len(made.tokens)} tokens for one text, where its post_processor must give every special "
            "token as many ids as tokens"
        )
    return made


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
    """Within it nothing reaches stderr, not even from native code."""
    saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
