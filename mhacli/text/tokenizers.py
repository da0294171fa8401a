"""Tokenizers: by word, by character, by byte, and those of a `tokenizer.json` and of every other
tokenizer of its library; vocabularies, the distinct tokens in order, with ids from 0 and counts;
and texts encoded as ids under one vocabulary.

Every token keeps its character offsets in the source text.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate, chain, groupby, islice, pairwise
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from msgspec import Struct, to_builtins

from mhacli.errors import MhaError, UsageError, bad_file, guarded, library
from mhacli.io.data import decode, load_json
from mhacli.io.files import read_whole
from mhacli.settings import DEFAULT_MAX_TOKEN_LEN, DEFAULT_MAX_TOKENS, TOKENIZERS, Config

from .tokens import UNKNOWN, Piece, Texts, TokenSequence, places, places_in


class Token(NamedTuple):
    """A token: its text, its range of the source (characters, end exclusive), and its id, None if
    the vocabulary assigns ids.
    """

    text: str
    offsets: tuple[int, int]
    id: int | None = None


def is_inner_mark(text: str, place: int) -> bool:
    """Whether a mark is part of its word: an apostrophe between letters or digits, or a point or
    comma between digits.

    >>> [is_inner_mark("don't 3.14 a.b 'c", place) for place in (3, 7, 12, 15)]
    [True, True, False, False]
    """
    if not 0 < place < len(text) - 1:
        return False
    before, mark, after = text[place - 1], text[place], text[place + 1]
    if mark in APOSTROPHES:
        is_behind_letter = before.isalnum() or unicodedata.category(before).startswith("M")
        return is_behind_letter and after.isalnum()
    return mark in ".," and before.isdecimal() and after.isdecimal()


APOSTROPHES = "'\N{RIGHT SINGLE QUOTATION MARK}"


@dataclass(frozen=True)
class BuiltInTokenizer:
    """The tokenizer of mha that a config names.

    `word` splits at white space, puts words in lower case, and drops punctuation or makes it
    tokens. With `inner_marks`, marks inside a word stay part of it; earlier versions treated them
    like other marks. `char` makes every character (code point) a token, white space included.
    `byte` does that with every byte of the UTF-8 text: ASCII by its character, other bytes as
    `<0xE2>`, with the range of their character.

    >>> [token.text for token in BuiltInTokenizer(Config()).tokens("Don't panic, cat!")]
    ["don't", 'panic', 'cat']
    >>> [token.text for token in BuiltInTokenizer(Config(punctuation="keep")).tokens("Don't!")]
    ["don't", '!']
    """

    config: Config
    max_token_len: int | None = None
    vocabulary: ClassVar[None] = None

    def tokens(self, text: str) -> Iterator[Token]:
        """The tokens in order; a word has the range from its first to its last kept character.
        Raises `MhaError` for a word that is too long.
        """
        if self.config.tokenizer == "word":
            for chunk in re.finditer(r"\S+", text):
                require_token_len(chunk.end() - chunk.start(), self.max_token_len)
                for word, start, end in self._words(chunk.group()):
                    name = word if self.config.keep_case else word.lower()
                    yield Token(name, (chunk.start() + start, chunk.start() + end))
            return
        for i, character in enumerate(text):
            names = [character]
            if self.config.tokenizer == "byte" and not character.isascii():
                names = [f"<0x{byte:02X}>" for byte in character.encode()]
            for name in names:
                yield Token(name, (i, i + 1))

    def count(self, pieces: Iterable[str]) -> Counter[str]:
        """The count of each token of a text given in pieces. Each run without white space, or each
        character, is cut once. Raises `MhaError` for a word that is too long.
        """
        texts: Counter[str] = Counter()
        rest = ""
        if self.config.tokenizer != "word":
            texts.update(chain.from_iterable(pieces))
        else:
            for piece in chain(pieces, " "):
                chunks = (rest + piece).split()
                rest = chunks.pop() if chunks and not piece[-1].isspace() else ""
                texts.update(chunks)
                require_token_len(max(map(len, [*chunks, rest])), self.max_token_len)
        counts: Counter[str] = Counter()
        for text, count in texts.items():
            for token in self.tokens(text):
                counts[token.text] += count
        return counts

    def _words(self, chunk: str) -> list[tuple[str, int, int]]:
        """The words of a run without white space, each with its start and end in the run."""
        categories = map(unicodedata.category, chunk)
        marks = [
            i
            for i, category in enumerate(categories)
            if category.startswith("P") or chunk[i] in string.punctuation
        ]
        if self.config.inner_marks:
            marks = [place for place in marks if not is_inner_mark(chunk, place)]
        if self.config.punctuation == "drop":
            kept = sorted(set(range(len(chunk))) - set(marks))
            if not kept:
                return []
            return [("".join(chunk[place] for place in kept), kept[0], kept[-1] + 1)]
        ranges = [(place, place + 1) for place in marks]
        ranges += [(a + 1, b) for a, b in pairwise([-1, *marks, len(chunk)]) if b > a + 1]
        return [(chunk[a:b], a, b) for a, b in sorted(ranges)]


def require_token_len(length: int, limit: int | None) -> None:
    """Raises `MhaError` for a word longer than `limit`."""
    if limit is not None and length > limit:
        hint = f"--max-token-len {10 * limit} raises the limit; --tokenizer char needs no spaces"
        raise MhaError(
            f"a word has {length} or more characters, the limit is {limit}",
            hint=hint,
            code="too-large",
        )


# --------------------------------------------------------------------------- the tokenizers library

MAX_FILE_BYTES = 64 << 20
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + i): byte for i, byte in enumerate(_OTHERS)
}
"""The byte for each character of a byte-level token: printable bytes stand for themselves, the
others count up from 256. Source: Radford et al. 2019 (GPT-2), `bytes_to_unicode` in its
encoder.py."""


Labelled = tuple[Piece, str | None]
"""The description of a token, and its text, None for a part of a character."""


class LibraryTokenizer:
    """Gives the tokens of a tokenizer of the tokenizers library, whose padding and truncation are
    switched off.

    A token is shown as the vocabulary spells it, decoded by the tokenizer's decoder: ` Eiffel` for
    `ĠEiffel` and `▁Eiffel`, `fel` for `##fel`. Special tokens and the token for unknown text are
    shown by their names. A token with a part of a character is shown as the text at its offsets
    with the number of the part: `日⟨1/3⟩`. `path` is the source in messages.
    """

    def __init__(self, library: Any, path: str) -> None:
        library.no_padding()
        library.no_truncation()
        self.library = library
        self.path = path
        self.special = {
            i for i, token in library.get_added_tokens_decoder().items() if token.special
        }
        is_byte_level = type(library.decoder).__name__ == "ByteLevel"
        self.unknown = None if is_byte_level else getattr(library.model, "unk_token", None)
        self.token = cache(self._token)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The names of all tokens by their ids. Raises `MhaError` if there are none, or too
        many.
        """
        by_id = {i: name for name, i in self.library.get_vocab(with_added_tokens=True).items()}
        size = max(by_id, default=-1) + 1
        if not 0 < size <= MAX_ENTRIES:
            raise bad_file(
                self.path,
                f"{self.path} has ids up to {size - 1}: at least 0, at most {MAX_ENTRIES - 1}",
            )
        return Vocabulary(tuple(by_id.get(i, f"<unused {i}>") for i in range(size)))

    def _token(self, token_id: int) -> Labelled:
        """The description of a token and its text, None for a part of a character. The text is
        decoded behind another token, because decoders drop the space before a text.
        """
        name = self.library.id_to_token(token_id) or f"<{token_id}>"
        content = name.encode("utf-8", "surrogatepass")
        decoder, is_special = self.library.decoder, token_id in self.special
        if decoder is not None and not is_special and name != self.unknown:
            text = guarded("the tokenizer", self.path, lambda: decoder.decode(["x", name])[1:])
            if "\ufffd" in text and "\ufffd" not in name:
                byte = _BYTE_NAME.fullmatch(name)
                content = bytes(BYTES[c] for c in name if c in BYTES)
                if byte is not None:
                    content = bytes.fromhex(byte[1])
            elif text != f" {name}":  # else the decoder puts spaces between words
                content = text.encode()
        try:
            return Piece(name, content.hex(), is_special), content.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return Piece(name, content.hex()), None

    def tokens(self, text: str) -> Iterator[Token]:
        """The tokens, including the special tokens that the tokenizer adds (with an empty
        range).
        """
        sequence = self.sequence(text)
        yield from map(Token, sequence.tokens, sequence.offsets, sequence.ids)

    def count(self, pieces: Iterable[str]) -> Counter[str]:
        """The count of each name, taken line by line, without the special tokens that the tokenizer
        adds.
        """
        counts: Counter[str] = Counter()
        for lines in _whole_lines(pieces):
            encode = partial(self.library.encode_batch, lines, add_special_tokens=False)
            for line in guarded("the tokenizer", self.path, encode):
                counts.update(line.tokens)
        return counts

    def sequence(self, text: str, *, special: bool = True) -> TokenSequence:
        """The tokens of a text, with the special tokens that the tokenizer adds unless `special` is
        false.
        """
        return self.beginning(text, None, special=special)[0]

    def beginning(
        self, text: str, limit: int | None, *, special: bool = True, pair: str | None = None
    ) -> tuple[TokenSequence, int]:
        """The first `limit` tokens of a text (None: all), or of it and its `pair`, and the number
        of further tokens.
        """
        encode = partial(self.library.encode, text, pair, add_special_tokens=special)
        encoding = guarded("the tokenizer", self.path, encode)
        ids, names = encoding.ids, encoding.tokens
        if len(ids) != len(names) or any(self.library.id_to_token(i) is None for i in set(ids)):
            pairs = f"{[*zip(names, ids, strict=False)]!r:.80}"
            raise bad_file(
                self.path,
                f"{self.path} gives {len(ids)} ids and {len(names)} tokens for a text, {pairs}: its"
                " post_processor must give every special token an id of the vocabulary",
            )
        # with all parts of the last character, which has at most four
        n = None if limit is None else limit + 3
        begins = [len(text) + 1 if number == 1 else 0 for number in encoding.sequence_ids]
        offsets = [
            (a + begin, b + begin) for begin, (a, b) in zip(begins, encoding.offsets, strict=True)
        ]
        words = [
            None if word is None else (begin, word)
            for begin, word in zip(begins, encoding.word_ids, strict=True)
        ]
        types = () if pair is None else tuple(encoding.type_ids[:n])
        text = text if pair is None else f"{text}\n{pair}"
        is_unigram = type(self.library.model).__name__ == "Unigram"
        labelled: list[Labelled] = []
        for i, token_id in enumerate(ids[:n]):
            piece, label = self.token(token_id)
            name = piece.name
            if encoding.special_tokens_mask[i]:
                piece, label = replace(piece, special=True), name
            elif name == self.unknown or (is_unigram and names[i].strip() != name):
                # Unigram names unknown text by the text
                typed = text[slice(*offsets[i])].encode("utf-8", "surrogatepass")
                piece, label = Piece(name, typed.hex()), name
            labelled.append((piece, label))
        bare = TokenSequence(text, (), tuple(ids[:n]), tuple(offsets[:n]), token_type_ids=types)
        sequence = _described(bare, labelled, words).first(limit)
        return sequence, len(ids) - len(sequence.ids)

    def of_ids(self, ids: Sequence[int]) -> TokenSequence:
        """The tokens of ids without a text: the text is what they stand for."""
        labelled = [self.token(i) for i in ids]
        contents = [bytes.fromhex(piece.bytes) for piece, _ in labelled]
        characters = b"".join(contents).decode("utf-8", "surrogateescape")
        character_of = [
            i for i, c in enumerate(characters) for _ in c.encode("utf-8", "surrogateescape")
        ]
        ends = accumulate(map(len, contents), initial=0)
        offsets = [
            (character_of[a], character_of[b - 1] + 1) if a < b else (0, 0)
            for a, b in pairwise(ends)
        ]
        text = re.sub(r"[\udc80-\udcff]", "\ufffd", characters)
        return _described(TokenSequence(text, (), tuple(ids), tuple(offsets)), labelled, [])


def _described(
    bare: TokenSequence, labelled: Sequence[Labelled], words: Sequence[object]
) -> TokenSequence:
    """The tokens of a text, with the number of each word and of each part of a character."""
    tokens, pieces = _with_parts(bare, labelled)
    return replace(bare, tokens=tokens, pieces=_with_words(bare, tokens, pieces, words))


def _with_parts(
    bare: TokenSequence, labelled: Sequence[Labelled]
) -> tuple[tuple[str, ...], list[Piece]]:
    """The tokens of a text, and the pieces with the number of each part of a character.

    The parts of a character, which have no label, end at the same character. A byte of no character
    becomes Python's lone surrogate.
    """
    tokens = [label or "" for _, label in labelled]
    pieces = [piece for piece, _ in labelled]
    places = enumerate(zip(labelled, bare.offsets, strict=True))
    groups = groupby(places, lambda place: (place[1][0][1] is None, place[1][1][1]))
    for (is_part, end), group in groups:
        members = [i for i, _ in group] if is_part else []
        for part, i in enumerate(members, 1):
            content, typed = bytes.fromhex(pieces[i].bytes), bare.text[bare.offsets[i][0] : end]
            if "\ufffd" in typed:
                tokens[i] = content.decode("utf-8", "surrogateescape")
                continue
            if content[:1] == b" " and typed[:1] != " ":  # offsets may leave the space out
                typed = f" {typed}"
            tokens[i] = f"{typed}⟨{part}/{len(members)}⟩" if len(members) > 1 else typed
            pieces[i] = replace(pieces[i], part=part, parts=len(members))
    return tuple(tokens), pieces


def _with_words(
    bare: TokenSequence, tokens: Sequence[str], pieces: Sequence[Piece], words: Sequence[object]
) -> tuple[Piece, ...]:
    """The pieces with the number of the word of each, except special ones.

    Words are those of the library, the numbers in `words`, if it splits texts, else what white
    space separates. A number, and a word with a mark inside, are one word.
    """
    text, offsets = bare.text, bare.offsets
    is_split = len({*words} - {None}) > 1

    def begins(i: int) -> bool:
        """Whether a word begins with a token."""
        if i == 0 or pieces[i - 1].special:
            return True
        start = offsets[i][0]
        if is_split:
            is_number = start > 0 and text[start - 1 : start + 1].isdecimal()
            is_within = is_number or is_inner_mark(text, start) or is_inner_mark(text, start - 1)
            return words[i] != words[i - 1] and not is_within
        is_after_space = tokens[i - 1][-1:].isspace() and tokens[i - 1] != " "
        is_apart = text[offsets[i - 1][1] : start].isspace()
        return is_after_space or is_apart or tokens[i][:1].isspace()

    numbered: list[Piece] = []
    word = -1
    for i, piece in enumerate(pieces):
        if piece.special:
            numbered.append(piece)
            continue
        if begins(i):
            word += 1
        numbered.append(replace(piece, word=word))
    return tuple(numbered)


def file_tokenizer(path: str) -> LibraryTokenizer:
    """The tokenizer of a `tokenizer.json`. Raises `MhaError` if the file or the library is missing,
    or the file is not a tokenizer.
    """
    if not os.path.exists(path) and os.path.basename(path) == path and "." not in path:
        known = f"one of {', '.join(TOKENIZERS)} or the path of a tokenizer.json"
        raise UsageError(f"--tokenizer {shlex.quote(path)} is not {known}")
    data = read_whole(path, MAX_FILE_BYTES)
    kind = library("tokenizers", "a tokenizer.json").Tokenizer
    return LibraryTokenizer(
        guarded("the tokenizer", path, lambda: kind.from_str(data.decode())), path
    )


def _whole_lines(pieces: Iterable[str]) -> Iterator[list[str]]:
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield [line + "\n" for line in lines]
    yield [rest] if rest else []


Tokenizer = BuiltInTokenizer | LibraryTokenizer
"""What cuts text into tokens: `tokens` gives them in order, lazily if possible; `count` counts
those of a text given in pieces; `vocabulary` is the tokenizer's, or None."""


def make_tokenizer(config: Config, max_token_len: int | None = None) -> Tokenizer:
    """The tokenizer that the config names. Raises `MhaError` for an unusable `tokenizer.json`."""
    return (
        BuiltInTokenizer(config, max_token_len)
        if config.tokenizer in TOKENIZERS
        else file_tokenizer(config.tokenizer)
    )


# ------------------------------------------------------------------------------------- vocabularies

MAX_VOCABULARY_BYTES = 256 << 20
MAX_ENTRIES = 2_000_000


class Entry(Struct, frozen=True):
    """One token of a vocabulary: its id, its count (0 if unknown), and its size in UTF-8."""

    token: str
    id: int
    count: int
    bytes: int


class _File(Struct, frozen=True):
    """What is read of a file of mha. Those of earlier versions lack `inner_marks`, which their
    words did not have.
    """

    schema: Literal["mha.vocab/1"]
    tokens: tuple[Entry, ...]
    inner_marks: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """Tokens whose index is their id. `<unk>` stands for those that it lacks.

    `inner_marks` says whether its words have marks inside them (see `BuiltInTokenizer`); None if
    unknown. `source` is its file.
    """

    tokens: tuple[str, ...]
    inner_marks: bool | None = None
    source: str = "the vocabulary"

    @cached_property
    def id_of(self) -> Mapping[str, int]:
        """Token → id."""
        return {token: i for i, token in enumerate(self.tokens)}

    def ids(self, tokens: Sequence[str]) -> tuple[int, ...]:
        """The id of every token. Raises `MhaError` for a missing token if the vocabulary has no
        `<unk>`.
        """
        unknown = self.id_of.get(UNKNOWN, -1)
        missing = next((token for token in tokens if token not in self.id_of), None)
        if missing is not None and unknown < 0:
            message = (
                f"{missing!r} is not among the {len(self.tokens)} tokens of {self.source}, which"
                " has no <unk>"
            )
            raise MhaError(message, code="unknown-token")
        return tuple(self.id_of.get(token, unknown) for token in tokens)


def vocabulary_of(tokens: Iterable[str]) -> Vocabulary:
    """The vocabulary of the distinct tokens, sorted.

    >>> vocabulary_of(["the", "cat", "the"]).tokens
    ('cat', 'the')
    """
    return Vocabulary(tuple(sorted(set(tokens))))


def entries(
    counts: Counter[str], vocabulary: Vocabulary | None = None, *, of_bytes: bool = False
) -> list[Entry]:
    """The counted tokens in the order of their ids, which are alphabetical unless `vocabulary`
    assigns them.

    `of_bytes`: each token is a single byte, whatever its name.
    """
    ids = (vocabulary or vocabulary_of(counts)).id_of
    n_bytes = {
        token: 1 if of_bytes else len(token.encode("utf-8", "surrogatepass")) for token in counts
    }
    return [
        Entry(token, ids[token], counts[token], n_bytes[token])
        for token in sorted(counts, key=ids.__getitem__)
    ]


def vocabulary_json(rows: Iterable[Entry], tokenizer: str) -> str:
    """The document of schema `mha.vocab/1`: `{schema, tokenizer, inner_marks, tokens: [{token, id,
    count, bytes}]}`.
    """
    head = {"schema": "mha.vocab/1", "tokenizer": tokenizer, "inner_marks": True}
    return json.dumps(head | {"tokens": to_builtins(tuple(rows))}, indent=1) + "\n"


def read_vocabulary(path: str) -> Vocabulary:
    """The vocabulary in a file of mha, a JSON list of tokens, or a JSON map from token to id as
    tokenizers save it.

    `<unk>` is appended unless the file has it. Raises `MhaError` for anything else.
    """
    document = load_json(read_whole(path, MAX_VOCABULARY_BYTES), path)
    inner_marks = None
    if isinstance(document, dict) and "schema" in document:
        file = decode(_File, document, path)
        pairs = [(entry.token, entry.id) for entry in file.tokens]
        inner_marks = file.inner_marks
    elif isinstance(document, dict):
        pairs = list(document.items())
    elif isinstance(document, list):
        pairs = [(token, i) for i, token in enumerate(document)]
    else:
        raise bad_file(
            path, f"{path} holds {document!r:.80}, not a list of tokens or a map from token to id"
        )
    if not 0 < len(pairs) <= MAX_ENTRIES:
        raise bad_file(path, f"{path} has {len(pairs)} tokens: at least 1, at most {MAX_ENTRIES}")
    last = len(pairs) - 1
    ids: dict[str, int] = {}
    by_id: dict[int, str] = {}
    for token, i in pairs:
        is_entry = isinstance(token, str) and type(i) is int and 0 <= i <= last
        if not is_entry or token in ids or i in by_id:
            rule = f"tokens are strings, their ids 0 to {last}, and each occurs once"
            raise bad_file(path, f"{path} gives {token!r:.80} the id {i!r:.80}, but {rule}")
        ids[token] = i
        by_id[i] = token
    tokens = tuple(by_id[i] for i in range(len(pairs)))
    return Vocabulary(tokens if UNKNOWN in ids else (*tokens, UNKNOWN), inner_marks, source=path)


# ----------------------------------------------------------------------------------------- encoding

T = TypeVar("T")


class Encoded(NamedTuple):
    """Texts as tokens, the tokens of the vocabulary, and remarks for the user, such as a truncated
    text or unknown words.
    """

    texts: Texts
    vocabulary: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def encode(
    texts: Sequence[str],
    config: Config,
    *,
    context: Sequence[str] = (),
    vocabulary: Vocabulary | None = None,
    max_tokens: int | None = None,
    max_token_len: int = DEFAULT_MAX_TOKEN_LEN,
) -> Encoded:
    """The tokens and ids of every text and of the context of each. With `config.random`, sequences
    of positions without text.

    One context serves all texts; otherwise each text needs its own. The vocabulary is the
    tokenizer's, else the given one, else one built from all texts and contexts. `max_tokens`
    truncates texts; without it, a text with too many tokens is refused. Raises `MhaError` for texts
    with no tokens or too many, and `UsageError` if texts and contexts do not match.
    """
    _require_texts(texts, context, config)
    if config.random is not None:
        return _random_positions(*config.random, config)
    tokenizer = make_tokenizer(config, max_token_len)
    fixed = tokenizer.vocabulary
    if fixed is not None and vocabulary is not None and fixed.tokens != vocabulary.tokens:
        raise UsageError(
            f"leave out --vocab, which contradicts {config.tokenizer} with its own vocabulary"
        )
    named = [*_named("text", texts), *_named("context", context)]
    cut = [_tokens_of(tokenizer, text, config, max_tokens, name) for name, text in named]
    notes = [note for _, of_text in cut for note in of_text]
    used = fixed or vocabulary
    if used is None:
        used = vocabulary_of(token for sequence, _ in cut for token in sequence.tokens)
    every = [
        replace(sequence, ids=sequence.ids or used.ids(sequence.tokens)) for sequence, _ in cut
    ]
    sequences, keys = every[: len(texts)], of_each(every[len(texts) :], len(texts), "--context")
    _require_positions([*sequences, *keys], config, f"--max-tokens {config.max_positions}")
    _require_same_documents(sequences, keys)
    known = [token in used.id_of for sequence in (*sequences, *keys) for token in sequence.tokens]
    if fixed is None and not all(known):
        notes.append(
            f"{known.count(False)} of {len(known)} tokens are not in the vocabulary and became"
            f" {UNKNOWN}"
        )
    return Encoded(Texts(tuple(sequences), tuple(keys) or None), used.tokens, tuple(notes))


def _require_texts(texts: Sequence[str], context: Sequence[str], config: Config) -> None:
    """Raises `UsageError` for texts that a config does not take."""
    if config.random is not None:
        if texts or context:
            raise UsageError(
                "--random takes random vectors in place of text: leave out --random or the text"
            )
    elif not texts:
        raise UsageError("no text is given", hint='try "the cat sat on the mat"')
    elif config.needs_order and context:
        order = "a context has no order relative to the text"
        raise UsageError(f"--{config.needs_order} does not work with --context: {order}")


def _named(kind: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The texts with their names in messages: `the text`, or `text 0`, `text 1` of several."""
    for i, text in enumerate(texts):
        yield f"the {kind}" if len(texts) == 1 else f"{kind} {i}", text


def _random_positions(batch: int, length: int, config: Config) -> Encoded:
    """Sequences of positions, for vectors that are made later, where tensors are."""
    sequences = (places(length),) * batch
    _require_positions(sequences, config, f"--random {batch},{config.max_positions}")
    return Encoded(Texts(sequences))


def _require_same_documents(
    sequences: Sequence[TokenSequence], keys: Sequence[TokenSequence]
) -> None:
    """Raises `UsageError` for a context with another number of documents than its text."""
    for i, (text, context) in enumerate(zip(sequences, keys, strict=False)):
        n_queries = max(text.documents, default=0) + 1
        n_keys = max(context.documents, default=0) + 1
        if n_queries != n_keys:
            raise UsageError(
                f"text {i} has {n_queries} documents, but its context, which needs as many, has"
                f" {n_keys}"
            )


def of_each(given: Sequence[T], n_texts: int, option: str) -> list[T]:
    """What is given beside each text; one serves all texts. Raises `UsageError` for any other
    number.
    """
    if len(given) not in (0, 1, n_texts):
        raise UsageError(
            f"{option} is given {len(given)} times for {n_texts} texts: give it once, or once for"
            " each"
        )
    return [*given] * n_texts if len(given) == 1 else [*given]


def _require_positions(sequences: Sequence[TokenSequence], config: Config, shorter: str) -> None:
    """Raises `MhaError` for more tokens than learned positions; the options `shorter` would fit."""
    longest = max(max(places_in(each.documents, len(each.ids))) + 1 for each in sequences)
    if config.positions == "learned" and longest > config.max_positions:
        hint = f"{shorter} fits; without --weights --max-positions {longest} makes room for all"
        message = f"{longest} tokens are more than the {config.max_positions} learned positions"
        raise MhaError(message, hint=hint, code="too-large")


def no_tokens(name: str) -> MhaError:
    """The error for a text without tokens."""
    hint = "--punctuation keep makes every mark a token"
    return MhaError(
        f"{name} has no token, only white space or punctuation", hint=hint, code="no-tokens"
    )


def _tokens_of(
    tokenizer: Tokenizer, text: str, config: Config, max_tokens: int | None, name: str
) -> tuple[TokenSequence, list[str]]:
    """The tokens of one text, with ids if the tokenizer assigns them, and the document of each:
    separators give no tokens, and pieces without tokens are not counted. And remarks for the user.
    """
    limit, separator = max_tokens or DEFAULT_MAX_TOKENS, config.documents
    tokens: list[Token] = []
    documents: list[int] = []
    start = 0
    for piece in [text] if separator is None else text.split(separator):
        number = documents[-1] + 1 if documents else 0
        for token in islice(tokenizer.tokens(piece), limit + 1 - len(tokens)):
            begin, end = token.offsets
            tokens.append(token._replace(offsets=(start + begin, start + end)))
            documents.append(number)
        start += len(piece) + len(separator or "")
    if not tokens:
        raise no_tokens(name)
    notes: list[str] = []
    if separator is not None and separator not in text:
        notes.append(f"{name} is one document: the separator {separator!r} is not in it")
    if len(tokens) > limit:
        if max_tokens is None:
            hint = f"--max-tokens {limit} takes the first {limit}; a larger number raises the limit"
            raise MhaError(f"{name} has more than {limit} tokens", hint=hint, code="too-large")
        notes.append(f"only the first {limit:,} tokens of {name} are used (--max-tokens)")
    words, offsets, ids = zip(*tokens[:limit], strict=True)
    of_documents = () if separator is None else tuple(documents[:limit])
    of_tokens = () if tokenizer.vocabulary is None else ids
    return TokenSequence(text, words, of_tokens, offsets, of_documents), notes
