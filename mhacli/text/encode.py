"""Encodes texts as sequences of token ids under one vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from mhacli.errors import MhaError, UsageError
from mhacli.settings import DEFAULT_MAX_TOKEN_LEN, DEFAULT_MAX_TOKENS, Config
from mhacli.text.tokenizers import Token, Tokenizer, Vocabulary, make_tokenizer, vocabulary_of
from mhacli.text.tokens import UNKNOWN, TokenSequence, places

T = TypeVar("T")
Sequences = tuple[TokenSequence, ...]


def encode(
    texts: Sequence[str],
    config: Config,
    *,
    context: Sequence[str] = (),
    vocabulary: Vocabulary | None = None,
    vocabulary_source: str = "the vocabulary",
    max_tokens: int | None = None,
    max_token_len: int = DEFAULT_MAX_TOKEN_LEN,
) -> tuple[Sequences, Sequences | None, tuple[str, ...], tuple[str, ...]]:
    """The tokens and ids of every text, those of the context of each (None for self-attention), the tokens of the vocabulary, and
    remarks for the user, such as a truncated text or unknown words. With `config.random`, sequences of positions without text.

    One context serves all texts; otherwise each text needs its own. The vocabulary is the tokenizer's, else the given
    one, else one built from all texts and contexts. `max_tokens` truncates texts; without it, a text with too many tokens
    is refused. Raises `MhaError` for texts with no tokens or too many, and `UsageError` if texts and contexts do not match.
    """
    if config.random is not None:
        if texts or context:
            raise UsageError("--random takes random vectors in place of text: leave out --random or the text")
        batch, length = config.random  # the vectors are drawn later, where tensors are made
        sequences = [places(length)] * batch
        _require_positions(sequences, config, f"--random {batch},{config.max_positions}")
        return tuple(sequences), None, (), ()
    if not texts:
        raise UsageError("no text is given", hint='try "the cat sat on the mat"')
    if config.needs_order and context:
        order = "a context has no order relative to the text"
        raise UsageError(f"--{config.needs_order} does not work with --context: {order}")
    tokenizer, notes = make_tokenizer(config, max_token_len), list[str]()
    fixed = tokenizer.vocabulary
    if fixed is not None and vocabulary is not None and fixed.tokens != vocabulary.tokens:
        raise UsageError(f"leave out --vocab, which contradicts {config.tokenizer} with its own vocabulary")
    cut = []
    for kind, given in (("text", texts), ("context", context)):
        for i, text in enumerate(given):
            name = f"the {kind}" if len(given) == 1 else f"{kind} {i}"
            cut.append(_tokens_of(tokenizer, text, config, max_tokens, name, notes))
    used = fixed or vocabulary or vocabulary_of(token for sequence in cut for token in sequence.tokens)
    cut = [replace(each, ids=each.ids or used.ids(each.tokens, vocabulary_source)) for each in cut]
    sequences, keys = cut[: len(texts)], of_each(cut[len(texts) :], len(texts), "--context")
    _require_positions([*sequences, *keys], config, f"--max-tokens {config.max_positions}")
    for i, sides in enumerate(zip(sequences, keys, strict=False)):
        n_queries, n_keys = (max(side.documents, default=0) + 1 for side in sides)
        if n_queries != n_keys:
            raise UsageError(f"text {i} has {n_queries} documents, but its context, which needs as many, has {n_keys}")
    known = [token in used.id_of for sequence in (*sequences, *keys) for token in sequence.tokens]
    if fixed is None and not all(known):
        notes.append(f"{known.count(False)} of {len(known)} tokens are not in the vocabulary and became {UNKNOWN}")
    return tuple(sequences), tuple(keys) or None, used.tokens, tuple(notes)


def of_each(given: Sequence[T], n_texts: int, option: str) -> list[T]:
    """What is given beside each text; one serves all texts. Raises `UsageError` for any other number."""
    if len(given) not in (0, 1, n_texts):
        raise UsageError(f"{option} is given {len(given)} times for {n_texts} texts: give it once, or once for each")
    return [*given] * n_texts if len(given) == 1 else [*given]


def _require_positions(sequences: Sequence[TokenSequence], config: Config, shorter: str) -> None:
    """Raises `MhaError` for more tokens than learned positions; the options `shorter` would fit."""
    longest = max(max(sequence.places) + 1 for sequence in sequences)
    if config.positions == "learned" and longest > config.max_positions:
        hint = f"{shorter} fits; without --weights --max-positions {longest} makes room for all"
        message = f"{longest} tokens are more than the {config.max_positions} learned positions"
        raise MhaError(message, hint=hint, code="too-large")


def no_tokens(name: str) -> MhaError:
    """The error for a text without tokens."""
    hint = "--punctuation keep makes every mark a token"
    return MhaError(f"{name} has no token, only white space or punctuation", hint=hint, code="no-tokens")


def _tokens_of(
    tokenizer: Tokenizer, text: str, config: Config, max_tokens: int | None, name: str, notes: list[str]
) -> TokenSequence:
    """The tokens of one text, with ids if the tokenizer assigns them, and the document of each: separators give no tokens, and
    pieces without tokens are not counted. Adds remarks for the user to `notes`."""
    limit, separator = max_tokens or DEFAULT_MAX_TOKENS, config.documents
    tokens, documents, start = list[Token](), list[int](), 0
    for piece in [text] if separator is None else text.split(separator):
        number = documents[-1] + 1 if documents else 0
        for word, (first, end), token_id in islice(tokenizer.tokens(piece), limit + 1 - len(tokens)):
            tokens.append((word, (start + first, start + end), token_id))
            documents.append(number)
        start += len(piece) + len(separator or "")
    if not tokens:
        raise no_tokens(name)
    if separator is not None and separator not in text:
        notes.append(f"{name} is one document: the separator {separator!r} is not in it")
    if len(tokens) > limit:
        if max_tokens is None:
            hint = f"--max-tokens {limit} takes the first {limit}; a larger number raises the limit"
            raise MhaError(f"{name} has more than {limit} tokens", hint=hint, code="too-large")
        notes.append(f"only the first {limit:,} tokens of {name} are used (--max-tokens)")
    words, offsets, ids = zip(*tokens[:limit], strict=True)
    of_documents = () if separator is None else tuple(documents[:limit])
    return TokenSequence(text, words, () if tokenizer.vocabulary is None else ids, offsets, of_documents)
