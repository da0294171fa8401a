"""A vocabulary: the distinct tokens of a text in order, with ids from 0 and counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Literal

from msgspec import to_builtins

from mhacli.errors import MhaError, bad_file
from mhacli.io.data import decode, load_json
from mhacli.io.files import read_whole
from mhacli.text.tokens import UNKNOWN

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
class _File:
    """What is read of a file of mha. Those of earlier versions lack `inner_marks`, which their words did not have."""

    schema: Literal["mha.vocab/1"]
    tokens: tuple[Entry, ...]
    inner_marks: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """Tokens whose index is their id. `<unk>` stands for those that it lacks.

    `inner_marks` says whether its words have marks inside them (see `WordTokenizer`); None if unknown.
    """

    tokens: tuple[str, ...]
    inner_marks: bool | None = None

    @cached_property
    def id_of(self) -> Mapping[str, int]:
        """Token → id."""
        return {token: i for i, token in enumerate(self.tokens)}

    def ids(self, tokens: Sequence[str], source: str) -> tuple[int, ...]:
        """The id of every token. Raises `MhaError` for a missing token if the vocabulary has no `<unk>`."""
        unknown = self.id_of.get(UNKNOWN, -1)
        missing = next((token for token in tokens if token not in self.id_of), None)
        if missing is not None and unknown < 0:
            raise MhaError(
                f"{missing!r} is not among the {len(self.tokens)} tokens of {source}",
                hint="with --vocab FILE words that the vocabulary lacks become <unk>",
                code="unknown-token",
            )
        return tuple(self.id_of.get(token, unknown) for token in tokens)


def build(tokens: Iterable[str]) -> Vocabulary:
    """The vocabulary of the distinct tokens, sorted.

    >>> build(["the", "cat", "the"]).tokens
    ('cat', 'the')
    """
    return Vocabulary(tuple(sorted(set(tokens))))


def entries(counts: Counter[str], vocabulary: Vocabulary | None = None, *, of_bytes: bool = False) -> list[Entry]:
    """The counted tokens in the order of their ids, which are alphabetical unless `vocabulary` assigns them.

    `of_bytes`: each token is a single byte, whatever its name.
    """
    ids = (vocabulary or build(counts)).id_of
    n_bytes = {token: 1 if of_bytes else len(token.encode("utf-8", "surrogatepass")) for token in counts}
    return [Entry(token, ids[token], counts[token], n_bytes[token]) for token in sorted(counts, key=ids.__getitem__)]


def to_json(rows: Iterable[Entry], tokenizer: str) -> str:
    """The document of schema `mha.vocab/1`: `{schema, tokenizer, inner_marks, tokens: [{token, id, count, bytes}]}`."""
    head = {"schema": "mha.vocab/1", "tokenizer": tokenizer, "inner_marks": True}
    return json.dumps(head | {"tokens": to_builtins(tuple(rows))}, indent=1) + "\n"


def load(path: str) -> Vocabulary:
    """The vocabulary in a file of mha, a JSON list of tokens, or a JSON map from token to id as tokenizers save it.

    `<unk>` is appended unless the file has it. Raises `MhaError` for anything else.
    """
    document = load_json(read_whole(path, MAX_FILE_BYTES), path)
    inner_marks = None
    if isinstance(document, dict) and "schema" in document:
        file = decode(_File, document, path)
        pairs, inner_marks = [(entry.token, entry.id) for entry in file.tokens], file.inner_marks
    elif isinstance(document, dict):
        pairs = list(document.items())
    elif isinstance(document, list):
        pairs = [(token, i) for i, token in enumerate(document)]
    else:
        raise _bad(path, f"holds {document!r:.80}, not a list of tokens or a map from token to id")
    tokens = _in_order(pairs, path)
    return Vocabulary(tuple(tokens if UNKNOWN in tokens else [*tokens, UNKNOWN]), inner_marks)


def _in_order(pairs: list[tuple[str, int]], path: str) -> list[str]:
    """The tokens by id. Raises `MhaError` unless the ids are 0 … n−1 without repetition, and the tokens distinct
    strings."""
    if not 0 < len(pairs) <= MAX_ENTRIES:
        raise _bad(path, f"has {len(pairs)} tokens: at least 1, at most {MAX_ENTRIES}")
    for token, token_id in pairs:
        if not isinstance(token, str) or type(token_id) is not int:
            raise _bad(path, f"maps {token!r:.80} to {token_id!r:.80}, not a string to a whole number")
    ordered = sorted(pairs, key=itemgetter(1))
    for i, (token, token_id) in enumerate(ordered):
        if token_id != i:
            rule = f"the ids of {len(pairs)} tokens are 0 to {len(pairs) - 1}, each once"
            raise _bad(path, f"gives {token!r:.80} the id {token_id}, but {rule}")
    tokens = [token for token, _ in ordered]
    token, times = Counter(tokens).most_common(1)[0]
    if times > 1:
        raise _bad(path, f"has the token {token!r:.80} twice")
    return tokens


def _bad(path: str, fault: str) -> MhaError:
    return bad_file(path, f"{path} {fault}")
