"""Texts into sequences of token ids under one vocabulary: everything that comes before the first tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from mhacli.config import DEFAULT_MAX_TOKEN_LEN, DEFAULT_MAX_TOKENS, Config
from mhacli.errors import MhaError, UsageError
from mhacli.record import TokenSequence
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
    """Tokens and ids for every text and context.

    One context serves all texts; otherwise there must be one for each. The vocabulary is that of the tokenizer where it
    brings its own, else the given one, else built from everything here. Raises `MhaError` for texts without tokens or
    with too many, and `UsageError` for contexts that do not match.
    """
    if not texts:
        raise UsageError("text must be given", hint='try mha run "the cat sat on the mat", --file PATH, or - for stdin')
    if len(context) not in (0, 1, len(texts)):
        raise UsageError(f"context must be given once, or once for each of the {len(texts)} texts, got {len(context)}")
    ordered = "causal" if config.causal else "window" if config.window is not None else None
    if ordered and context:
        raise UsageError(
            f"{ordered} must be off with a context, got both: a context has no order relative to the text",
            hint=f"leave --{ordered} or --context out",
        )
    tokenizer = make_tokenizer(config, limits.max_token_len)
    own = tokenizer.vocabulary
    if own is not None and vocabulary is not None and own.tokens != vocabulary.tokens:
        raise UsageError(f"vocab must be left to {config.tokenizer}, which brings its own, got another")
    cut = [_tokens(tokenizer, text, limits, _name(i, len(texts), "text")) for i, text in enumerate(texts)]
    cut_context = [
        _tokens(tokenizer, text, limits, _name(i, len(context), "context")) for i, text in enumerate(context)
    ]
    words = (token.text for tokens, _ in (*cut, *cut_context) for token in tokens)
    known = own or vocabulary or vocabularies.build(words)
    sequences = [
        _sequence(text, tokens, known, vocabulary_source) for text, (tokens, _) in zip(texts, cut, strict=True)
    ]
    keys = [
        _sequence(text, tokens, known, vocabulary_source)
        for text, (tokens, _) in zip(context, cut_context, strict=True)
    ]
    notes = [note for _, note in (*cut, *cut_context) if note]
    unknown = _count_unknown(sequences + keys, known) if own is None and vocabulary is not None else 0
    if unknown:
        notes.append(
            f"{unknown} of {sum(len(s.tokens) for s in sequences + keys)} tokens are not in the vocabulary and became {UNKNOWN}"
        )
    return Encoded(
        tuple(sequences),
        tuple(keys * len(texts) if len(keys) == 1 else keys) or None,
        known,
        tuple(notes),
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


def _tokens(tokenizer: Tokenizer, text: str, limits: Limits, name: str) -> tuple[list[Token], str | None]:
    """The tokens of one text, and a note if it was cut."""
    limit = DEFAULT_MAX_TOKENS if limits.max_tokens is None else limits.max_tokens
    tokens = list(islice(tokenizer.tokens(text), limit + 1))
    if not tokens:
        raise no_tokens(tokenizer, name, is_blank=not text.strip())
    if len(tokens) <= limit:
        return tokens, None
    if limits.max_tokens is None:
        raise MhaError(
            f"{name} must have at most {limit} tokens, got more",
            hint="--max-tokens N takes the first N; a larger N raises the limit",
            code="too-large",
        )
    return tokens[:limit], f"{name} is cut to its first {limit} tokens (--max-tokens)"


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


def _sequence(text: str, tokens: Sequence[Token], known: Vocabulary, source: str) -> TokenSequence:
    own = [token.id for token in tokens if token.id is not None]
    ids = tuple(own) if len(own) == len(tokens) else known.ids([token.text for token in tokens], source)
    words = tuple(token.text for token in tokens)
    return TokenSequence(text, words, ids, tuple((token.start, token.end) for token in tokens))


def _count_unknown(sequences: Sequence[TokenSequence], known: Vocabulary) -> int:
    return sum(token not in known.id_of for sequence in sequences for token in sequence.tokens)
