"""Reads texts within limits: the bytes of files, pipes, arguments and corpora become text in one way."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

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


@dataclass(frozen=True)
class Decoding:
    """How bytes become text: the encoding, the treatment of bad bytes, and the most bytes from one source."""

    encoding: str = "utf-8"
    errors: OnBadBytes = "strict"
    max_bytes: int = DEFAULT_MAX_BYTES

    def __post_init__(self) -> None:
        """Raises `UsageError` for an unknown encoding."""
        try:
            "".encode(self.encoding)
        except (LookupError, ValueError) as fault:
            raise UsageError(f"--encoding {shlex.quote(self.encoding)}: {fault}") from None


def stream_text(path: str, decoding: Decoding) -> Iterator[str]:
    """The text of a file, pipe or (`-`) stdin in pieces of about a megabyte, so that memory stays constant.

    Raises `MhaError` as `decoded`, and if there is no text.
    """
    is_empty = True
    with opened(path) as read:
        for piece in decoded(iter(lambda: read(READ_CHUNK_BYTES), b""), decoding, describe(path), path):
            is_empty = False
            yield piece
    if is_empty:
        raise _bad(describe(path), "empty", code="no-tokens", path=path)


def read_text(path: str, decoding: Decoding) -> str:
    """The whole text of a file, pipe or (`-`) stdin. Raises `MhaError`."""
    return "".join(stream_text(path, decoding))


def argument_text(argument: str, decoding: Decoding) -> str:
    """A command-line argument as text. Its undecodable bytes (surrogates in Python) are treated by `decoding.errors`."""
    if not argument:
        raise UsageError("the text is empty", hint='try "the cat sat on the mat"')
    raw = argument.encode("utf-8", "surrogateescape")
    return "".join(decoded([raw], Decoding("utf-8", decoding.errors), "the text argument"))


def lines_of(text: str) -> list[str]:
    """The non-blank lines. Only LF ends a line."""
    return [line for line in text.split("\n") if line.strip()]


def decoded(chunks: Iterable[bytes], decoding: Decoding, name: str = "", path: str | None = None) -> Iterator[str]:
    """The text of bytes in pieces that are not empty. A byte order mark is dropped, CRLF becomes LF, and a lone CR stays.

    Raises `MhaError` for bytes that the encoding lacks (with their offset), for text that looks binary, and for more than
    `max_bytes`; `name` and `path` are the source in its message, which without a name is the reason alone.
    """
    decoder = codecs.getincrementaldecoder(decoding.encoding)(_HANDLERS[decoding.errors])
    n_bytes, is_begun, held = 0, False, ""
    for chunk in chain(chunks, [b""]):
        n_bytes += len(chunk)
        if n_bytes > decoding.max_bytes:
            limit, hint = format_size(decoding.max_bytes), "--max-bytes raises the limit"
            raise _bad(name, f"larger than {limit}", hint=hint, code="too-large", path=path)
        try:
            piece = held + decoder.decode(chunk, not chunk)
        except UnicodeDecodeError as fault:
            # the decoder holds the tail of the last chunk
            raise _bad_bytes(fault, n_bytes - len(fault.object), decoding, name, path) from None
        if "\0" in piece:
            hint = "if it is UTF-16 or UTF-32, --encoding utf-16 or --encoding utf-32 reads it"
            raise _bad(name, "not text: it has a NUL character and looks binary", hint=hint, path=path)
        if piece and not is_begun:
            piece, is_begun = piece.removeprefix("\ufeff"), True
        held = "\r" if chunk and piece.endswith("\r") else ""
        piece = piece.removesuffix(held).replace("\r\n", "\n")
        if piece:
            yield piece


def _bad_bytes(fault: UnicodeDecodeError, begin: int, decoding: Decoding, name: str, path: str | None) -> MhaError:
    """The error for a byte of no character, in bytes that begin at the offset `begin`."""
    if not begin and fault.object[:2] in _OTHER_KINDS:
        reason, hint = _OTHER_KINDS[fault.object[:2]]
    else:
        byte, offset = fault.object[fault.start], begin + fault.start
        reason = f"not {decoding.encoding.upper()}: it has the byte \\x{byte:02x} at offset {offset}"
        hint = "--encoding NAME reads another encoding; --errors replace or --errors escape reads it anyway"
    return _bad(name, reason, hint=hint, path=path)


def _bad(
    name: str, reason: str, *, hint: str | None = None, code: str = "bad-text", path: str | None = None
) -> MhaError:
    """The error for a text that cannot be used."""
    return MhaError(f"{name} is {reason}" if name else reason, hint=hint, code=code, path=path)
