"""Reads texts within limits: the bytes of files, pipes, arguments and corpora become text in one way."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from itertools import chain

from mhacli.errors import MhaError, UsageError
from mhacli.io.files import READ_CHUNK_BYTES, describe, opened
from mhacli.settings import DEFAULT_MAX_BYTES, Source
from mhacli.text.numbers import shown

_HANDLERS = {"strict": "strict", "replace": "replace", "escape": "backslashreplace"}


def stream_text(path: str, source: Source) -> Iterator[str]:
    """The text of a file, pipe or (`-`) stdin in pieces of about a megabyte, so that memory stays constant.

    Raises `MhaError` as `decoded`, and if there is no text.
    """
    is_empty = True
    with opened(path) as read:
        for piece in decoded(iter(lambda: read(READ_CHUNK_BYTES), b""), source, describe(path), path):
            is_empty = False
            yield piece
    if is_empty:
        raise _bad(describe(path), "empty", code="no-tokens", path=path)


def argument_text(argument: str, source: Source) -> str:
    """A command-line argument as text. Its undecodable bytes (surrogates in Python) are treated by `source.errors`."""
    if not argument:
        raise UsageError("the text is empty", hint='try "the cat sat on the mat"')
    raw = argument.encode("utf-8", "surrogateescape")
    return "".join(decoded([raw], Source(errors=source.errors), "the text argument"))


def decoded(chunks: Iterable[bytes], source: Source, name: str = "", path: str | None = None) -> Iterator[str]:
    """The text of bytes in pieces that are not empty, by the encoding of a source. A byte order mark is dropped,
    CRLF becomes LF, and a lone CR stays.

    Raises `MhaError` for bytes that the encoding lacks (with their offset), for text that looks binary, and for more than
    `max_bytes`; `name` and `path` are the source in its message, which without a name is the reason alone.
    """
    decoder = codecs.getincrementaldecoder(source.encoding)(_HANDLERS[source.errors])
    most = source.max_bytes or DEFAULT_MAX_BYTES
    n_bytes, is_begun, held = 0, False, ""
    for chunk in chain(chunks, [b""]):
        n_bytes += len(chunk)
        if n_bytes > most:
            hint = "--max-bytes raises the limit"
            raise _bad(name, f"larger than {shown(most, 'bytes')}", hint=hint, code="too-large", path=path)
        try:
            piece = held + decoder.decode(chunk, not chunk)
        except UnicodeDecodeError as fault:
            offset = n_bytes - len(fault.object) + fault.start  # the decoder holds the tail of the last chunk
            reason = (
                f"not {source.encoding.upper()}: it has the byte \\x{fault.object[fault.start]:02x} at offset {offset}"
            )
            hint = "--encoding NAME reads another encoding; --errors replace or --errors escape reads it anyway"
            if not offset and fault.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                hint = "it looks like UTF-16, which --encoding utf-16 reads"
            raise _bad(name, reason, hint=hint, path=path) from None
        if "\0" in piece:
            hint = "if it is UTF-16 or UTF-32, --encoding utf-16 or --encoding utf-32 reads it"
            raise _bad(name, "not text: it has a NUL character and looks binary", hint=hint, path=path)
        if piece and not is_begun:
            piece, is_begun = piece.removeprefix("\ufeff"), True
        held = "\r" if chunk and piece.endswith("\r") else ""
        piece = piece.removesuffix(held).replace("\r\n", "\n")
        if piece:
            yield piece


def _bad(
    name: str, reason: str, *, hint: str | None = None, code: str = "bad-text", path: str | None = None
) -> MhaError:
    """The error for a text that cannot be used."""
    return MhaError(f"{name} is {reason}" if name else reason, hint=hint, code=code, path=path)
