"""A vocabulary: the distinct tokens of a text in order, with ids from 0 and counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from msgspec import Struct, to_builtins

from mhacli.errors import MhaError, bad_file
from mhacli.io.data import decode, load_json
from mhacli.io.files import read_whole
from mhacli.text.tokens import UNKNOWN

MAX_FILE_BYTES = 256 << 20
MAX_ENTRIES = 2_000_000


class Entry(Struct, frozen=True):
    """One token of a vocabulary: its id, its count (0 if unknown), and its size in UTF-8."""

    token: str
    id: int
    count: int
    bytes: int


class _File(Struct, frozen=True):
    """What is read of a file of mha. Those of earlier versions lack `inner_marks`, which their words did not have."""

    schema: Literal["mha.vocab/1"]
    tokens: tuple[Entry, ...]
    inner_marks: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """Tokens whose index is their id. `<unk>` stands for those that it lacks.

    `inner_marks` says whether its words have marks inside them (see `BuiltInTokenizer`); None if unknown.
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
            message = f"{missing!r} is not among the {len(self.tokens)} tokens of {source}, which has no <unk>"
            raise MhaError(message, code="unknown-token")
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
        raise bad_file(path, f"{path} holds {document!r:.80}, not a list of tokens or a map from token to id")
    if not 0 < len(pairs) <= MAX_ENTRIES:
        raise bad_file(path, f"{path} has {len(pairs)} tokens: at least 1, at most {MAX_ENTRIES}")
    ids, last = dict[str, int](), len(pairs) - 1
    by_id = dict[int, str]()
    for token, i in pairs:
        is_entry = isinstance(token, str) and type(i) is int and 0 <= i <= last
        if not is_entry or token in ids or i in by_id:
            rule = f"tokens are strings, their ids 0 to {last}, and each occurs once"
            raise bad_file(path, f"{path} gives {token!r:.80} the id {i!r:.80}, but {rule}")
        ids[token], by_id[i] = i, token
    tokens = tuple(by_id[i] for i in range(len(pairs)))
    return Vocabulary(tokens if UNKNOWN in ids else (*tokens, UNKNOWN), inner_marks)
