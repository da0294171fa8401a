"""Texts into sequences of token ids under one vocabulary: everything that comes before the first tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from mhacli.errors import MhaError, UsageError
from mhacli.spec.config import DEFAULT_MAX_TOKEN_LEN, DEFAULT_MAX_TOKENS, Config
from mhacli.spec.tokens import TokenSequence
from mhacli.text import vocabulary as vocabularies
from mhacli.text.tokenizer_file import FileTokenizer
from mhacli.text.tokenizers import ByteTokenizer, CharTokenizer, Token, Tokenizer, WordTokenizer
from mhacli.text.vocabulary import UNKNOWN, Vocabulary


@dataclass(frozen=True)
class Limits:
    """How much text a run takes. `max_tokens` None: a longer text is refused; a number: its first tokens are taken."""

    max_tokens: int | None = None
    max_token_len: int = DEFAULT_MAX_TOKEN_LEN


@dataclass(frozen=True)
class Encoded:
    """The sequences, the context for each (None for self-attention), and the vocabulary that gave the ids.

    `notes` says what was done to the text that a reader should know: cut to a length, unknown words.
    """

    sequences: tuple[TokenSequence, ...]
    context: tuple[TokenSequence, ...] | None
    vocabulary: Vocabulary
    notes: tuple[str, ...] = ()

    @property
    def q_len(self) -> int:
        """The length that all sequences are padded to."""
        return max(len(sequence.tokens) for sequence in self.sequences)

    @property
    def k_len(self) -> int:
        """The length that all keys are padded to."""
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
    """Tokens and ids for every text and context, or, where the config asks for random rows, places without a text.

    One context serves all texts; otherwise there must be one for each. The vocabulary is that of the tokenizer where it
    brings its own, else the given one, else built from everything here. Raises `MhaError` for texts without tokens or
    with too many, and `UsageError` for contexts that do not match.
    """
    if config.random is not None:
        return _random_rows(texts, context, config)
    _require_texts(texts, context, config)
    tokenizer = make_tokenizer(config, limits.max_token_len)
    own = tokenizer.vocabulary
    if own is not None and vocabulary is not None and own.tokens != vocabulary.tokens:
        raise UsageError(f"vocab must be left to {config.tokenizer}, which brings its own, got another")
    cut = [_cut(tokenizer, text, config, limits, _name(i, len(texts), "text")) for i, text in enumerate(texts)]
    cut_context = [
        _cut(tokenizer, text, config, limits, _name(i, len(context), "context")) for i, text in enumerate(context)
    ]
    words = (token.text for made in (*cut, *cut_context) for token in made.tokens)
    known = own or vocabulary or vocabularies.build(words)
    sequences = [_sequence(text, made, known, vocabulary_source) for text, made in zip(texts, cut, strict=True)]
    keys = [_sequence(text, made, known, vocabulary_source) for text, made in zip(context, cut_context, strict=True)]
    keys = keys * len(texts) if len(keys) == 1 else keys
    _require_places(sequences + keys, config)
    _require_same_documents(sequences, keys)
    notes = [note for made in (*cut, *cut_context) for note in made.notes]
    unknown = _count_unknown(sequences + keys, known) if own is None and vocabulary is not None else 0
    if unknown:
        notes.append(
            f"{unknown} of {sum(len(s.tokens) for s in sequences + keys)} tokens are not in the vocabulary and became {UNKNOWN}"
        )
    return Encoded(tuple(sequences), tuple(keys) or None, known, tuple(notes))


def _random_rows(texts: Sequence[str], context: Sequence[str], config: Config) -> Encoded:
    """Places without words: the rows themselves are drawn where tensors are."""
    batch, length = config.random or (1, 1)
    if texts or context:
        raise UsageError(
            f"random must stand alone, got {'a text' if texts else 'a context'} besides: random rows take its place",
            hint="leave the text or --random out",
        )
    if config.positions == "learned" and length > config.max_positions:
        raise _too_long(length, config)
    places = tuple(f"x{i}" for i in range(length))
    rows = TokenSequence("", places, tuple(range(length)), ((0, 0),) * length)
    return Encoded((rows,) * batch, None, Vocabulary(()))


def _require_texts(texts: Sequence[str], context: Sequence[str], config: Config) -> None:
    if not texts:
        raise UsageError("text must be given", hint='try mha run "the cat sat on the mat", --file PATH, or - for stdin')
    if len(context) not in (0, 1, len(texts)):
        raise UsageError(f"context must be given once, or once for each of the {len(texts)} texts, got {len(context)}")
    if config.needs_order and context:
        raise UsageError(
            f"{config.needs_order} must be off with a context, got both: a context has no order relative to the text",
            hint=f"leave --{config.needs_order} or --context out",
        )


def _require_places(sequences: Sequence[TokenSequence], config: Config) -> None:
    longest = max(max(sequence.places) + 1 for sequence in sequences)
    if config.positions == "learned" and longest > config.max_positions:
        raise _too_long(longest, config)


def _too_long(length: int, config: Config) -> MhaError:
    most = config.max_positions
    shorter = (
        f"--max-tokens {most} takes a shorter text"
        if config.random is None
        else f"--random {config.random[0]},{most} fits"
    )
    return MhaError(
        f"there must be at most {most} tokens where positions are learned, got {length}",
        hint=f"{shorter}; --max-positions {length} makes a longer table, where it does not come from a file",
        code="too-large",
    )


def _require_same_documents(sequences: Sequence[TokenSequence], keys: Sequence[TokenSequence]) -> None:
    for i, (one, other) in enumerate(zip(sequences, keys, strict=False)):
        counts = [max(side.documents, default=0) + 1 for side in (one, other)]
        if counts[0] != counts[1]:
            raise UsageError(
                f"context must have as many documents as its text, {counts[0]} in sequence {i}, got {counts[1]}",
                hint="each document of the text reads the document of the context that has its number",
            )


def make_tokenizer(config: Config, max_token_len: int | None = None) -> Tokenizer:
    """The tokenizer that a config names. Raises `MhaError` for a `tokenizer.json` that cannot be used."""
    if config.tokenizer == "word":
        return WordTokenizer(keep_case=config.keep_case, punctuation=config.punctuation, max_token_len=max_token_len)
    if config.tokenizer == "char":
        return CharTokenizer()
    if config.tokenizer == "byte":
        return ByteTokenizer()
    return FileTokenizer(config.tokenizer)


def _name(i: int, count: int, kind: str) -> str:
    return f"the {kind}" if count == 1 else f"{kind} {i}"


@dataclass(frozen=True)
class _Cut:
    """The tokens of one text, the document of each where the text was cut into documents, and what to tell of it."""

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
                f"{name} must have at most {limit} tokens, got more",
                hint="--max-tokens N takes the first N; a larger N raises the limit",
                code="too-large",
            )
        notes.append(f"{name} is cut to its first {limit} tokens (--max-tokens)")
    return _Cut(tokens[:limit], documents[:limit] if config.documents is not None else [], notes)


def _tokens_of_documents(tokenizer: Tokenizer, text: str, separator: str | None) -> Iterator[tuple[int, Token]]:
    """Each token with the number of its document. The separator is no token; pieces without tokens are no documents."""
    document, start = 0, 0
    for piece in [text] if separator is None else text.split(separator):
        found = False
        for token in tokenizer.tokens(piece):
            found = True
            yield document, token._replace(start=token.start + start, end=token.end + start)
        document += found
        start += len(piece) + len(separator or "")


def no_tokens(tokenizer: Tokenizer, name: str, *, is_blank: bool) -> MhaError:
    """The error for a text of which no token is left, with the reason."""
    hint = None
    if is_blank:
        why = "it holds nothing but white space"
    elif tokenizer.vocabulary is not None:
        why = "the tokenizer makes nothing of it"
    else:
        why, hint = "it holds nothing but punctuation", "--punctuation keep makes every mark a token"
    return MhaError(f"{name} must have at least one token, got none: {why}", hint=hint, code="no-tokens")


def _sequence(text: str, made: _Cut, known: Vocabulary, source: str) -> TokenSequence:
    tokens = made.tokens
    own = [token.id for token in tokens if token.id is not None]
    ids = tuple(own) if len(own) == len(tokens) else known.ids([token.text for token in tokens], source)
    words = tuple(token.text for token in tokens)
    return TokenSequence(text, words, ids, tuple((token.start, token.end) for token in tokens), tuple(made.documents))


def _count_unknown(sequences: Sequence[TokenSequence], known: Vocabulary) -> int:
    return sum(token not in known.id_of for sequence in sequences for token in sequence.tokens)
