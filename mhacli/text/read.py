"""Text from arguments, files and stdin: decoded strictly, with a limit, and one kind of line end."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from mhacli.errors import MhaError, UsageError
from mhacli.io.files import describe, read_chunks
from mhacli.spec.config import DEFAULT_MAX_BYTES, OnBadBytes

_UTF16_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class Decoding:
    """How bytes become text: the encoding, what to do with bad bytes, and the most bytes to take from one source."""

    encoding: str = "utf-8"
    errors: OnBadBytes = "strict"
    max_bytes: int = DEFAULT_MAX_BYTES

    def __post_init__(self) -> None:
        """Raises `UsageError` for an encoding or error rule that does not exist."""
        try:
            known = codecs.lookup(self.encoding)
        except (LookupError, ValueError):
            known = None
        if known is None or not known._is_text_encoding:
            raise UsageError(
                f"encoding must be one that Python knows, such as utf-8, utf-16 or latin-1, got {self.encoding!r}"
            )
        if self.errors not in get_args(OnBadBytes):
            raise UsageError(f"errors must be one of {', '.join(get_args(OnBadBytes))}, got {self.errors!r}")


def stream_text(path: str, decoding: Decoding) -> Iterator[str]:
    """The text of a file, pipe or (`-`) stdin, in pieces of about a megabyte, so that memory stays flat.

    A byte order mark is dropped, CRLF becomes LF, a lone CR stays. Raises `MhaError` for bytes that the encoding does not
    have (with their offset), for text that looks binary, and beyond `max_bytes`.
    """
    chunks = read_chunks(path, decoding.max_bytes, "--max-bytes")
    return _decode_pieces(chunks, decoding, describe(path), path)


def read_text(path: str, decoding: Decoding) -> str:
    """The whole text of a file, pipe or (`-`) stdin; as `stream_text`. Raises `MhaError` also when it is empty."""
    text = "".join(stream_text(path, decoding))
    if not text:
        raise empty(path)
    return text


def empty(path: str) -> MhaError:
    """The error for a source that holds nothing at all."""
    return MhaError(f"{describe(path)} must hold some text, got an empty file", code="no-tokens", path=path)


def argument_text(argument: str, decoding: Decoding) -> str:
    """A command-line argument as text. Bytes that were not UTF-8 (surrogates, to Python) obey `decoding.errors`."""
    if not argument:
        raise UsageError("text must have at least one character, got an empty argument")
    if not any("\ud800" <= character <= "\udfff" for character in argument):
        return argument.replace("\r\n", "\n")
    raw = Decoding("utf-8", decoding.errors, decoding.max_bytes)
    return "".join(_decode_pieces([os.fsencode(argument)], raw, "the text argument", None))


def lines_of(text: str) -> list[str]:
    """The lines that hold something. Only LF ends a line here; other breaks are characters like any other."""
    return [line for line in text.split("\n") if line.strip()]


def _decode_pieces(chunks: Iterable[bytes], decoding: Decoding, name: str, path: str | None) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(decoding.encoding)(
        "strict" if decoding.errors == "strict" else _HANDLERS[decoding.errors]
    )
    seen, first, held_cr = 0, True, ""
    for chunk, final in _with_end(chunks):
        if first and decoding.encoding.replace("_", "-").lower() in ("utf-8", "utf8") and chunk[:2] in _UTF16_BOMS:
            raise MhaError(
                f"{name} must be UTF-8, got UTF-16", hint="--encoding utf-16 reads it", code="bad-text", path=path
            )
        try:
            piece = decoder.decode(chunk, final)
        except UnicodeDecodeError as fault:
            raise _bad_bytes(fault, seen, len(chunk), decoding, name, path) from None
        seen += len(chunk)
        if first and piece:
            piece, first = piece.removeprefix("\ufeff"), False
        _refuse_binary(piece, name, path)
        piece = held_cr + piece
        held_cr = "\r" if piece.endswith("\r") and not final else ""
        piece = piece.removesuffix("\r") if held_cr else piece
        if "\r" in piece:
            piece = piece.replace("\r\n", "\n")
        if piece:
            yield piece


def _with_end(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Each chunk and whether it is the last; of at least two bytes, so that a byte order mark is never cut."""
    held = b""
    for chunk in chunks:
        held += chunk
        if len(held) >= 2:
            yield held, False
            held = b""
    yield held, True


def _bad_bytes(
    fault: UnicodeDecodeError, seen: int, chunk_len: int, decoding: Decoding, name: str, path: str | None
) -> MhaError:
    # the decoder's own buffer holds the tail of the chunk before, so offsets count from the end of this one
    offset = seen + chunk_len - (len(fault.object) - fault.start)
    bad = "".join(f"\\x{byte:02x}" for byte in fault.object[fault.start : fault.start + 1])
    return MhaError(
        f"{name} must be {decoding.encoding.upper()}, got the byte {bad} at offset {offset}",
        hint="--encoding NAME reads another encoding; --errors replace or --errors escape reads it anyway",
        code="bad-text",
        path=path,
    )


def _refuse_binary(piece: str, name: str, path: str | None) -> None:
    if "\0" in piece:
        raise MhaError(
            f"{name} must be text, got a NUL character: it looks binary",
            hint="if it is UTF-16 or UTF-32 text, --encoding reads it",
            code="bad-text",
            path=path,
        )


_HANDLERS = {"replace": "replace", "escape": "backslashreplace"}
