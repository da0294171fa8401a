"""The tokens of a text as a table: positions, ids, characters, and the names of a checkpoint's
tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.record.record import Record
from mhacli.render.base.doc import Column, Table
from mhacli.render.base.format import PADDING, count_of, fitted, token_text
from mhacli.render.base.options import Screen, Selection, ViewOptions
from mhacli.render.base.terminal import table
from mhacli.text.escape import token_label
from mhacli.text.tokens import UNKNOWN, TokenSequence

MAX_TOKEN_ROWS = 16
_LEAST_TOKEN = 12
"""The least width of the column of tokens."""
_MOST_BYTES = 18
"""The most characters of a tokenizer's name of a token, and of its bytes."""


def token_tables(
    record: Record, sequences: Selection, options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The tables of the chosen sequences, each with its context, in the order of execution."""
    sides = [False] if record.context is None else [False, True]
    if record.model is not None:
        sides.reverse()  # an encoder runs first
    for place, index in enumerate(sequences.shown):
        if sequences.hidden and place == sequences.before:
            yield hidden(sequences.hidden, "sequence", "--all or --sequence")
        for of_context in sides:
            yield _token_table(record, index, options, screen, of_context=of_context)


def hidden(count: int, noun: str, option: str) -> Text:
    """A note on hidden parts of a view, with the option that shows them."""
    return Text(f"⋮ {count_of(count, noun)} not drawn ({option})", "dim")


def _token_table(
    record: Record, index: int, options: ViewOptions, screen: Screen, *, of_context: bool
) -> RenderableType:
    """The tokens of a sequence with index, id and characters, including padding.

    For a checkpoint also the tokenizer's name of a token, its bytes, and whether it is special or
    generated.
    """
    family = record.keys if of_context else record.sequences
    n_tokens = len(family[index].tokens)
    longest = max(len(other.tokens) for other in family)
    first = record.config.first_column(n_tokens, longest)
    tokens = Table(
        _columns(record, family[index], None if of_context else index),
        range(-first, longest - first),
        most=None if options.everything else MAX_TOKEN_ROWS,
        has_ends=True,
    )
    name = _text_name(record, index, of_context=of_context)
    padding = f" + {longest - n_tokens} padding" if n_tokens < longest else ""
    words = Text(f"{name}: {count_of(n_tokens, 'token')}{padding}, ", "bold")
    vocabulary = (
        str(len(record.vocabulary)) if record.model is None else f"{record.model.n_vocabulary:,}"
    )
    words.append(f"vocabulary of {vocabulary}", style="not bold")
    return Group(words, *table(tokens, screen.width))


def _text_name(record: Record, index: int, *, of_context: bool) -> str:
    """`sequence 0`, `context 0`; of a checkpoint `encoder`, `decoder sequence 1`, or `text`."""
    if record.model is None:
        return f"{'context' if of_context else 'sequence'} {index}"
    parts = []
    if record.context is not None:
        parts.append("encoder" if of_context else "decoder")
    if len(record.sequences) > 1:
        parts.append(f"sequence {index}")
    return " ".join(parts) or "text"


def _columns(record: Record, sequence: TokenSequence, index: int | None) -> list[Column[int]]:
    """The columns of a token, its index first, of the sequence at an `index` or of a context.
    Padding has only the index.
    """
    pieces = sequence.pieces
    inside = range(len(sequence.tokens))

    def of_token(
        heading: str, value: Callable[[int], object], style: str = "", **more: Any
    ) -> Column[int]:
        return Column(
            heading,
            lambda i: value(i) if i in inside else None,
            style=lambda i: style if i in inside else "dim",
            **more,
        )

    def offsets(i: int) -> str | None:
        start, end = sequence.offsets[i]
        return None if pieces and start == end else f"{start}–{end}"

    columns: list[Column[int]] = [
        Column("index", lambda i: i if i >= 0 else None, unit="integer"),
        of_token(
            "token",
            lambda i: _word(record, sequence, i),
            style="bold",
            none=PADDING,
            least=_LEAST_TOKEN,
        ),
    ]
    # ids of a checkpoint stand beside the index, those of mha after the token
    columns.insert(1 if pieces else 2, of_token("id", lambda i: sequence.ids[i], unit="id"))
    if any(piece.name != token for piece, token in zip(pieces, sequence.tokens, strict=False)):
        columns.append(
            of_token("piece", lambda i: fitted(token_label(pieces[i].name), _MOST_BYTES), drop=2)
        )
    if pieces:
        columns.append(of_token("bytes", lambda i: fitted(pieces[i].bytes, _MOST_BYTES), drop=3))
    columns.append(of_token("offsets", offsets, drop=1 if pieces else 0))
    if any(other.documents for other in record.sequences):
        columns.append(of_token("document", lambda i: sequence.documents[i], unit="integer"))
    if sequence.token_type_ids:
        columns.append(of_token("type", lambda i: sequence.token_type_ids[i], unit="integer"))
    if record.model is not None:
        prompt_len = len(sequence.tokens)
        if record.model.generated is not None and index is not None:
            prompt_len = record.model.generated.prompt_lens[index]
        notes = [_note(sequence, i, is_generated=i >= prompt_len) for i in inside]
        if any(notes):
            columns.append(of_token("", lambda i: notes[i], style="cyan", none="masked"))
    return columns


def _word(record: Record, sequence: TokenSequence, i: int) -> str:
    """A token, with a remark if it is not in the vocabulary."""
    token = token_text(sequence.tokens, i)
    has_entry = 0 <= sequence.ids[i] < len(record.vocabulary)
    if has_entry and record.vocabulary[sequence.ids[i]] == UNKNOWN != sequence.tokens[i]:
        return f"{token} {UNKNOWN}"
    return token


def _note(sequence: TokenSequence, token: int, *, is_generated: bool) -> str:
    """A note on a checkpoint's token that is special, generated or unknown, with the text of an
    unknown one.
    """
    parts = []
    if is_generated:
        parts.append("generated")
    characters = sequence.unknown(token)
    if characters is not None:
        parts.append(f"for {token_label(characters)}")
    if sequence.pieces and sequence.pieces[token].special:
        parts.append("special")
    return ", ".join(parts)
