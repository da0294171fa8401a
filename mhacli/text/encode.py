"""Reads texts within limits, and encodes them as sequences of token ids under one vocabulary."""

from __future__ import annotations

import codecs
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import get_args

from mhacli.errors import MhaError, UsageError
from mhacli.io.files import describe, read_chunks
from mhacli.settings import DEFAULT_MAX_BYTES, DEFAULT_MAX_TOKEN_LEN, DEFAULT_MAX_TOKENS, Config, OnBadBytes
from mhacli.text import vocabulary as vocabularies
from mhacli.text.tokenizer_file import FileTokenizer
from mhacli.text.tokenizers import ByteTokenizer, CharTokenizer, Token, Tokenizer, WordTokenizer
from mhacli.text.tokens import TokenSequence, places
from mhacli.text.vocabulary import UNKNOWN, Vocabulary


@dataclass(frozen=True)
class Limits:
    """The most tokens of a text, and the most characters of a word.

    `max_tokens` truncates texts; if it is None, a text with too many tokens is refused.
    """

    max_tokens: int | None = None
    max_token_len: int = DEFAULT_MAX_TOKEN_LEN


@dataclass(frozen=True)
class Encoded:
    """The token sequences, the context of each (None for self-attention), and the vocabulary of the ids.

    `notes` are remarks for the user, such as a truncated text or unknown words.
    """

    sequences: tuple[TokenSequence, ...]
    context: tuple[TokenSequence, ...] | None
    vocabulary: Vocabulary
    notes: tuple[str, ...] = ()

    @property
    def q_len(self) -> int:
        """The length to which all sequences are padded."""
        return max(len(sequence.tokens) for sequence in self.sequences)

    @property
    def k_len(self) -> int:
        """The length to which all keys are padded."""
        return max(len(sequence.tokens) for sequence in self.context or self.sequences)


def encode(
    texts: Sequence[str],
    config: Config,
    *,
    context: Sequence[str] = (),
    vocabulary: Vocabulary | None = None,
    vocabulary_source: str = "the vocabulary",
    limits: Limits = Limits(),
) -> Encoded:
    """The tokens and ids of every text and context. With `config.random`, sequences of positions without text.

    One context serves all texts; otherwise each text needs its own. The vocabulary is the tokenizer's, else the given
    one, else one built from all texts and contexts. Raises `MhaError` for texts with no tokens or too many, and
    `UsageError` if the number of contexts does not match.
    """
    if config.random is not None:
        return _random_rows(texts, context, config)
    _require_texts(texts, context, config)
    tokenizer = make_tokenizer(config, limits.max_token_len)
    tokenizer_vocabulary = tokenizer.vocabulary
    if tokenizer_vocabulary is not None and vocabulary is not None and tokenizer_vocabulary.tokens != vocabulary.tokens:
        raise UsageError(
            f"--vocab contradicts {config.tokenizer}, which has its own vocabulary", hint="leave out --vocab"
        )
    cut = [_cut(tokenizer, text, config, limits, _name(i, len(texts), "text")) for i, text in enumerate(texts)]
    cut_context = [
        _cut(tokenizer, text, config, limits, _name(i, len(context), "context")) for i, text in enumerate(context)
    ]
    words = (token.text for part in (*cut, *cut_context) for token in part.tokens)
    used_vocabulary = tokenizer_vocabulary or vocabulary or vocabularies.build(words)
    sequences = [
        _sequence(text, part, used_vocabulary, vocabulary_source) for text, part in zip(texts, cut, strict=True)
    ]
    keys = [
        _sequence(text, part, used_vocabulary, vocabulary_source)
        for text, part in zip(context, cut_context, strict=True)
    ]
    keys = keys * len(texts) if len(keys) == 1 else keys
    _require_places(sequences + keys, config)
    _require_same_documents(sequences, keys)
    notes = [note for part in (*cut, *cut_context) for note in part.notes]
    unknown = (
        _count_unknown(sequences + keys, used_vocabulary)
        if tokenizer_vocabulary is None and vocabulary is not None
        else 0
    )
    if unknown:
        notes.append(
            f"{unknown} of {sum(len(s.tokens) for s in sequences + keys)} tokens are not in the vocabulary and became {UNKNOWN}"
        )
    return Encoded(tuple(sequences), tuple(keys) or None, used_vocabulary, tuple(notes))


def _random_rows(texts: Sequence[str], context: Sequence[str], config: Config) -> Encoded:
    """Sequences of positions without text. The random vectors are drawn later, where tensors are made."""
    batch, length = config.random or (1, 1)
    if texts or context:
        raise UsageError(
            f"--random takes random vectors in place of text, but a {'text' if texts else 'context'} is given",
            hint=f"leave out --random or the {'text' if texts else 'context'}",
        )
    if config.positions == "learned" and length > config.max_positions:
        raise _too_long(length, config)
    return Encoded((places(length),) * batch, None, Vocabulary(()))


def _require_texts(texts: Sequence[str], context: Sequence[str], config: Config) -> None:
    if not texts:
        raise UsageError("no text is given", hint='try mha run "the cat sat on the mat", --file PATH, or - for stdin')
    if len(context) not in (0, 1, len(texts)):
        raise UsageError(
            f"--context is given {len(context)} times for {len(texts)} texts: give it once, or once for each"
        )
    if config.needs_order and context:
        raise UsageError(
            f"--{config.needs_order} does not work with --context: a context has no order relative to the text",
            hint=f"leave out --{config.needs_order} or --context",
        )


def _require_places(sequences: Sequence[TokenSequence], config: Config) -> None:
    longest = max(max(sequence.places) + 1 for sequence in sequences)
    if config.positions == "learned" and longest > config.max_positions:
        raise _too_long(longest, config)


def _too_long(length: int, config: Config) -> MhaError:
    most = config.max_positions
    shorter = f"--max-tokens {most}" if config.random is None else f"--random {config.random[0]},{most}"
    return MhaError(
        f"{length} tokens are more than the {most} learned positions",
        hint=f"{shorter} fits; without --weights --max-positions {length} makes room for all",
        code="too-large",
    )


def _require_same_documents(sequences: Sequence[TokenSequence], keys: Sequence[TokenSequence]) -> None:
    for i, (sequence, context) in enumerate(zip(sequences, keys, strict=False)):
        counts = [max(side.documents, default=0) + 1 for side in (sequence, context)]
        if counts[0] != counts[1]:
            raise UsageError(
                f"text {i} has {counts[0]} documents, but its context has {counts[1]}",
                hint="document n of the text attends to document n of the context",
            )


def make_tokenizer(config: Config, max_token_len: int | None = None) -> Tokenizer:
    """The tokenizer that the config names. Raises `MhaError` for an unusable `tokenizer.json`."""
    if config.tokenizer == "word":
        return WordTokenizer(
            keep_case=config.keep_case,
            punctuation=config.punctuation,
            inner_marks=config.inner_marks,
            max_token_len=max_token_len,
        )
    if config.tokenizer == "char":
        return CharTokenizer()
    if config.tokenizer == "byte":
        return ByteTokenizer()
    return FileTokenizer(config.tokenizer)


def _name(i: int, count: int, kind: str) -> str:
    return f"the {kind}" if count == 1 else f"{kind} {i}"


@dataclass(frozen=True)
class _Cut:
    """The tokens of one text, the document of each token if the text is split into documents, and notes for the user."""

    tokens: list[Token]
    documents: list[int]
    notes: list[str]


def _cut(tokenizer: Tokenizer, text: str, config: Config, limits: Limits, name: str) -> _Cut:
    limit = DEFAULT_MAX_TOKENS if limits.max_tokens is None else limits.max_tokens
    numbered = list(islice(_tokens_of_documents(tokenizer, text, config.documents), limit + 1))
    tokens, documents = [token for _, token in numbered], [document for document, _ in numbered]
    if not tokens:
        raise no_tokens(tokenizer, name, is_blank=not text.strip())
    notes = []
    if config.documents is not None and config.documents not in text:
        notes.append(f"{name} is one document: the separator {config.documents!r} is not in it")
    if len(tokens) > limit:
        if limits.max_tokens is None:
            raise MhaError(
                f"{name} has more than {limit} tokens",
                hint=f"--max-tokens {limit} takes the first {limit}; a larger number raises the limit",
                code="too-large",
            )
        notes.append(f"only the first {limit:,} tokens of {name} are used (--max-tokens)")
    return _Cut(tokens[:limit], documents[:limit] if config.documents is not None else [], notes)


def _tokens_of_documents(tokenizer: Tokenizer, text: str, separator: str | None) -> Iterator[tuple[int, Token]]:
    """Each token with the number of its document. Separators give no tokens, and pieces without tokens are not counted."""
    document, start = 0, 0
    for piece in [text] if separator is None else text.split(separator):
        has_tokens = False
        for token in tokenizer.tokens(piece):
            has_tokens = True
            yield document, token._replace(start=token.start + start, end=token.end + start)
        document += has_tokens
        start += len(piece) + len(separator or "")


def no_tokens(tokenizer: Tokenizer, name: str, *, is_blank: bool) -> MhaError:
    """The error for a text without tokens, with the reason."""
    hint = None
    if is_blank:
        why = "it is only white space"
    elif tokenizer.vocabulary is not None:
        why = "the tokenizer makes none of it"
    else:
        why, hint = "it is only punctuation", "--punctuation keep makes every mark a token"
    return MhaError(f"{name} has no tokens: {why}", hint=hint, code="no-tokens")


def _sequence(text: str, cut: _Cut, vocabulary: Vocabulary, source: str) -> TokenSequence:
    tokens = cut.tokens
    token_ids = [token.id for token in tokens if token.id is not None]
    ids = (
        tuple(token_ids) if len(token_ids) == len(tokens) else vocabulary.ids([token.text for token in tokens], source)
    )
    words = tuple(token.text for token in tokens)
    return TokenSequence(text, words, ids, tuple((token.start, token.end) for token in tokens), tuple(cut.documents))


def _count_unknown(sequences: Sequence[TokenSequence], vocabulary: Vocabulary) -> int:
    return sum(token not in vocabulary.id_of for sequence in sequences for token in sequence.tokens)


# ------------------------------------------------------------------------------------------------------------- reading


_UTF16_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


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

    A byte order mark is dropped, CRLF becomes LF, and a lone CR stays. Raises `MhaError` for bytes that the encoding
    lacks (with their offset), for text that looks binary, and for more than `max_bytes`.
    """
    chunks = read_chunks(path, decoding.max_bytes, "--max-bytes")
    return _decode_pieces(chunks, decoding, describe(path), path)


def read_text(path: str, decoding: Decoding) -> str:
    """The whole text of a file, pipe or (`-`) stdin, read as by `stream_text`. Raises `MhaError` also if it is empty."""
    text = "".join(stream_text(path, decoding))
    if not text:
        raise empty(path)
    return text


def empty(path: str) -> MhaError:
    """The error for an empty source."""
    return MhaError(f"{describe(path)} is empty", code="no-tokens", path=path)


def argument_text(argument: str, decoding: Decoding) -> str:
    """A command-line argument as text. Its undecodable bytes (surrogates in Python) are treated by `decoding.errors`."""
    if not argument:
        raise UsageError("the text is empty", hint='try "the cat sat on the mat"')
    if not any("\ud800" <= character <= "\udfff" for character in argument):
        return argument.replace("\r\n", "\n")
    raw = Decoding("utf-8", decoding.errors, decoding.max_bytes)
    return "".join(_decode_pieces([os.fsencode(argument)], raw, "the text argument", None))


def lines_of(text: str) -> list[str]:
    """The non-blank lines. Only LF ends a line."""
    return [line for line in text.split("\n") if line.strip()]


def _decode_pieces(chunks: Iterable[bytes], decoding: Decoding, name: str, path: str | None) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(decoding.encoding)(
        "strict" if decoding.errors == "strict" else _HANDLERS[decoding.errors]
    )
    seen, first, held_cr = 0, True, ""
    for chunk, final in _with_end(chunks):
        if first and decoding.encoding.replace("_", "-").lower() in ("utf-8", "utf8") and chunk[:2] in _UTF16_BOMS:
            raise MhaError(
                f"{name} is UTF-16, not UTF-8", hint="--encoding utf-16 reads it", code="bad-text", path=path
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
    """Each chunk and whether it is the last. Chunks have at least two bytes, so that no byte order mark is cut."""
    buffer = b""
    for chunk in chunks:
        buffer += chunk
        if len(buffer) >= 2:
            yield buffer, False
            buffer = b""
    yield buffer, True


def _bad_bytes(
    fault: UnicodeDecodeError, seen: int, chunk_len: int, decoding: Decoding, name: str, path: str | None
) -> MhaError:
    # the decoder buffers the tail of the previous chunk, so offsets count from the end of this chunk
    offset = seen + chunk_len - (len(fault.object) - fault.start)
    bad = "".join(f"\\x{byte:02x}" for byte in fault.object[fault.start : fault.start + 1])
    hint = "--encoding NAME reads another encoding; --errors replace or --errors escape reads it anyway"
    if path is not None and path.endswith(".safetensors"):
        quoted = shlex.quote(path)
        hint = f"it holds tensors, no text: mha show {quoted} draws a record, mha weights info {quoted} lists weights"
    return MhaError(
        f"{name} is not {decoding.encoding.upper()}: it has the byte {bad} at offset {offset}",
        hint=hint,
        code="bad-text",
        path=path,
    )


def _refuse_binary(piece: str, name: str, path: str | None) -> None:
    if "\0" in piece:
        raise MhaError(
            f"{name} is not text: it has a NUL character and looks binary",
            hint="if it is UTF-16 or UTF-32, --encoding utf-16 or --encoding utf-32 reads it",
            code="bad-text",
            path=path,
        )


_HANDLERS = {"replace": "replace", "escape": "backslashreplace"}
