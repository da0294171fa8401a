"""Reads texts within limits: the bytes of files, pipes, arguments and corpora become text in one way."""

from __future__ import annotations

import codecs
import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from mhacli.errors import MhaError, UsageError
from mhacli.io.files import READ_CHUNK_BYTES, describe, format_size, opened
from mhacli.settings import DEFAULT_MAX_BYTES, OnBadBytes

_HANDLERS = {"strict": "strict", "replace": "replace", "escape": "backslashreplace"}
_OTHER_KINDS = {
    codecs.BOM_UTF16_LE: ("UTF-16, not UTF-8", "--encoding utf-16 reads it"),
    codecs.BOM_UTF16_BE: ("UTF-16, not UTF-8", "--encoding utf-16 reads it"),
    b"\x1f\x8b": ("compressed by gzip, not text", "gunzip unpacks it"),
}
"""The first two bytes of files that are no UTF-8, what they are, and a hint."""


class BadTextError(MhaError):
    """A text that cannot be used. `reason` is what is wrong with it, such as `not UTF-8: …` or `empty`."""

    def __init__(
        self, name: str, reason: str, *, hint: str | None = None, code: str = "bad-text", path: str | None = None
    ) -> None:
        super().__init__(f"{name} is {reason}", hint=hint, code=code, path=path)
        self.reason = reason


@dataclass(frozen=True)
class Decoding:
    """How bytes become text: the encoding, the treatment of bad bytes, and the most bytes from one source."""

    encoding: str = "utf-8"
    errors: OnBadBytes = "strict"
    max_bytes: int = DEFAULT_MAX_BYTES

    def __post_init__(self) -> None:
        """Raises `UsageError` for an unknown encoding or error rule."""
        try:
            codec = codecs.lookup(self.encoding)
        except (LookupError, ValueError):
            codec = None
        if codec is None or not codec._is_text_encoding:
            raise UsageError(
                f"--encoding {shlex.quote(self.encoding)} is not a text encoding of Python such as utf-8, utf-16 or latin-1"
            )
        if self.errors not in get_args(OnBadBytes):
            raise UsageError(f"--errors {shlex.quote(self.errors)} is not one of {', '.join(get_args(OnBadBytes))}")


def stream_text(path: str, decoding: Decoding) -> Iterator[str]:
    """The text of a file, pipe or (`-`) stdin in pieces of about a megabyte, so that memory stays constant.

    Raises `BadTextError` as `decoded`, and if there is no text.
    """
    is_empty = True
    with opened(path) as read:
        for piece in decoded(iter(lambda: read(READ_CHUNK_BYTES), b""), decoding, describe(path), path):
            is_empty = False
            yield piece
    if is_empty:
        raise BadTextError(describe(path), "empty", code="no-tokens", path=path)


def read_text(path: str, decoding: Decoding) -> str:
    """The whole text of a file, pipe or (`-`) stdin. Raises `BadTextError`."""
    return "".join(stream_text(path, decoding))


def argument_text(argument: str, decoding: Decoding) -> str:
    """A command-line argument as text. Its undecodable bytes (surrogates in Python) are treated by `decoding.errors`."""
    if not argument:
        raise UsageError("the text is empty", hint='try "the cat sat on the mat"')
    if not any("\ud800" <= character <= "\udfff" for character in argument):
        return argument.replace("\r\n", "\n")
    raw = Decoding("utf-8", decoding.errors, decoding.max_bytes)
    return "".join(decoded([os.fsencode(argument)], raw, "the text argument"))


def lines_of(text: str) -> list[str]:
    """The non-blank lines. Only LF ends a line."""
    return [line for line in text.split("\n") if line.strip()]


def decoded(chunks: Iterable[bytes], decoding: Decoding, name: str, path: str | None = None) -> Iterator[str]:
    """The text of bytes in pieces that are not empty. A byte order mark is dropped, CRLF becomes LF, and a lone CR stays.

    Raises `BadTextError` for bytes that the encoding lacks (with their offset), for text that looks binary, and for more
    than `max_bytes`; `name` and `path` are the source in its message.
    """
    decoder = codecs.getincrementaldecoder(decoding.encoding)(_HANDLERS[decoding.errors])
    seen, held = 0, ""
    is_utf8 = codecs.lookup(decoding.encoding).name == "utf-8"
    for chunk, is_last in _with_end(chunks):
        if not seen and is_utf8 and chunk[:2] in _OTHER_KINDS:
            reason, hint = _OTHER_KINDS[chunk[:2]]
            raise BadTextError(name, reason, hint=hint, path=path)
        is_first, seen = not seen, seen + len(chunk)
        if seen > decoding.max_bytes:
            limit = format_size(decoding.max_bytes)
            hint = "--max-bytes raises the limit"
            raise BadTextError(name, f"larger than {limit}", hint=hint, code="too-large", path=path)
        try:
            piece = held + decoder.decode(chunk, is_last)
        except UnicodeDecodeError as fault:
            raise _bad_bytes(fault, seen, decoding, name, path) from None
        if "\0" in piece:
            hint = "if it is UTF-16 or UTF-32, --encoding utf-16 or --encoding utf-32 reads it"
            raise BadTextError(name, "not text: it has a NUL character and looks binary", hint=hint, path=path)
        piece = piece.removeprefix("\ufeff") if is_first else piece
        held = "\r" if piece.endswith("\r") and not is_last else ""
        piece = piece[: len(piece) - len(held)].replace("\r\n", "\n")
        if piece:
            yield piece


def _with_end(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Each chunk and whether it is the last. Chunks have at least four bytes, so that no byte order mark is cut."""
    buffer = b""
    for chunk in chunks:
        buffer += chunk
        if len(buffer) >= 4:
            yield buffer, False
            buffer = b""
    yield buffer, True


def _bad_bytes(fault: UnicodeDecodeError, seen: int, decoding: Decoding, name: str, path: str | None) -> BadTextError:
    offset = seen - (len(fault.object) - fault.start)  # the decoder holds the tail of the last chunk
    reason = f"not {decoding.encoding.upper()}: it has the byte \\x{fault.object[fault.start]:02x} at offset {offset}"
    hint = "--encoding NAME reads another encoding; --errors replace or --errors escape reads it anyway"
    if path is not None and path.endswith(".safetensors"):
        quoted = shlex.quote(path)
        hint = f"it holds tensors, no text: mha show {quoted} draws a record, mha weights info {quoted} lists weights"
    return BadTextError(name, reason, hint=hint, path=path)
