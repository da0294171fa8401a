"""A vocabulary: the distinct tokens of a text in order, with ids from 0 and counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from msgspec import to_builtins

from mhacli.errors import MhaError
from mhacli.io.data import decode, load_json
from mhacli.io.files import read_whole

SCHEMA = "mha.vocab/1"
UNKNOWN = "<unk>"
MAX_FILE_BYTES = 256 << 20
MAX_ENTRIES = 2_000_000


@dataclass(frozen=True)
class Entry:
    """One token of a vocabulary: its id, its count (0 if unknown), and its size in UTF-8."""

    token: str
    id: int
    count: int
    bytes: int


@dataclass(frozen=True)
class Vocabulary:
    """Tokens whose index is their id.

    `unknown_id` is the id for tokens that the vocabulary lacks, if there is one. `inner_marks` says whether its words
    have marks inside them (see `WordTokenizer`); None if unknown.
    """

    tokens: tuple[str, ...]
    unknown_id: int | None = None
    inner_marks: bool | None = None

    @cached_property
    def id_of(self) -> Mapping[str, int]:
        """Token → id."""
        return {token: i for i, token in enumerate(self.tokens)}

    def ids(self, tokens: Iterable[str], source: str) -> tuple[int, ...]:
        """The id of every token. Raises `MhaError` for a missing token if the vocabulary has no `<unk>`."""
        token_ids = []
        for token in tokens:
            token_id = self.id_of.get(token, self.unknown_id)
            if token_id is None:
                raise MhaError(
                    f"{token!r} is not among the {len(self.tokens)} tokens of {source}",
                    hint="with --vocab FILE words that the vocabulary lacks become <unk>",
                    code="unknown-token",
                )
            token_ids.append(token_id)
        return tuple(token_ids)


def build(tokens: Iterable[str]) -> Vocabulary:
    """The vocabulary of the distinct tokens, sorted.

    >>> build(["the", "cat", "the"]).tokens
    ('cat', 'the')
    """
    return Vocabulary(tuple(sorted(set(tokens))))


def with_unknown(tokens: Iterable[str]) -> Vocabulary:
    """A vocabulary in the given order, with `<unk>` appended unless it is there."""
    listed = tuple(tokens)
    full = listed if UNKNOWN in listed else (*listed, UNKNOWN)
    return Vocabulary(full, full.index(UNKNOWN))


def as_stored(tokens: Sequence[str]) -> Vocabulary:
    """The vocabulary of a weights file, with or without `<unk>` as stored."""
    return Vocabulary(tuple(tokens), tokens.index(UNKNOWN) if UNKNOWN in tokens else None)


def entries(counts: Counter[str], vocabulary: Vocabulary | None = None, *, of_bytes: bool = False) -> list[Entry]:
    """The counted tokens in the order of their ids, which are alphabetical unless `vocabulary` assigns them.

    `of_bytes`: each token is a single byte, whatever its name.
    """
    ids = (vocabulary or build(counts)).id_of
    n_bytes = {token: 1 if of_bytes else len(token.encode("utf-8", "surrogatepass")) for token in counts}
    return [Entry(token, ids[token], counts[token], n_bytes[token]) for token in sorted(counts, key=ids.__getitem__)]


def to_json(rows: Iterable[Entry], tokenizer: str) -> str:
    """The document of schema `mha.vocab/1`: `{schema, tokenizer, inner_marks, tokens: [{token, id, count, bytes}]}`."""
    document = {"schema": SCHEMA, "tokenizer": tokenizer, "inner_marks": True, "tokens": to_builtins(tuple(rows))}
    return json.dumps(document, indent=1) + "\n"


def load(path: str) -> Vocabulary:
    """The vocabulary in a file of mha, a JSON list of tokens, or a JSON map from token to id as tokenizers save it.

    `<unk>` is appended unless the file has it. Raises `MhaError` for anything else.
    """
    document = load_json(read_whole(path, MAX_FILE_BYTES), path)
    if isinstance(document, dict) and "schema" in document:
        if document["schema"] != SCHEMA:
            raise _bad(path, f"has the schema {document['schema']!r:.80}, not {SCHEMA}")
        file = decode(_File, document, path)
        pairs = [(e.token, e.id) for e in file.tokens]
        return replace(with_unknown(_in_order(pairs, path)), inner_marks=file.inner_marks)
    if isinstance(document, dict):
        pairs = list(document.items())
    elif isinstance(document, list):
        pairs = [(token, i) for i, token in enumerate(document)]
    else:
        raise _bad(path, f"holds {document!r:.80}, not a list of tokens or a map from token to id")
    return with_unknown(_in_order(pairs, path))


@dataclass(frozen=True)
class _File:
    tokens: tuple[Entry, ...]
    inner_marks: bool = False


def _in_order(pairs: list[tuple[str, int]], path: str) -> list[str]:
    """The tokens by id. Raises `MhaError` unless the ids are 0 … n−1 without repetition, and the tokens distinct
    strings."""
    if not pairs or len(pairs) > MAX_ENTRIES:
        raise _bad(path, f"has {len(pairs)} tokens: at least 1, at most {MAX_ENTRIES}")
    for token, token_id in pairs:
        if not isinstance(token, str) or isinstance(token_id, bool) or not isinstance(token_id, int):
            raise _bad(path, f"maps {token!r:.80} to {token_id!r:.80}, not a string to a whole number")
    ordered = sorted(pairs, key=lambda pair: pair[1])
    for i, (token, token_id) in enumerate(ordered):
        if token_id != i:
            rule = f"the ids of {len(pairs)} tokens are 0 to {len(pairs) - 1}, each once"
            raise _bad(path, f"gives {token!r:.80} the id {token_id}, but {rule}")
    counts = Counter(token for token, _ in ordered)
    if len(counts) != len(ordered):
        raise _bad(path, f"has the token {counts.most_common(1)[0][0]!r:.80} twice")
    return [token for token, _ in ordered]


def _bad(path: str, fault: str) -> MhaError:
    return MhaError(f"{path} {fault}", code="bad-file", path=path)
