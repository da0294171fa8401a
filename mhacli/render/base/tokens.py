"""The tokens of a text as a table: positions, ids, characters, and the names of a checkpoint's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.record.record import Record
from mhacli.render.base.doc import Column, Table
from mhacli.render.base.format import count_of, fitted, token_text
from mhacli.render.base.options import Screen, Selection, ViewOptions
from mhacli.render.base.terminal import table
from mhacli.text.escape import token_label
from mhacli.text.tokens import UNKNOWN, TokenSequence

MAX_TOKEN_ROWS = 16
_LEAST_TOKEN, _MOST_BYTES = 12, 18


def token_tables(
    record: Record, sequences: Selection, options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The tables of the chosen sequences, each with its context."""
    for place, index in enumerate(sequences.shown):
        if sequences.hidden and place == sequences.before:
            yield hidden(sequences.hidden, "sequence", "--all or --sequence")
        tables = [token_table(record, index, options, screen)]
        if record.context is not None:
            tables.append(token_table(record, index, options, screen, of_context=True))
        yield from tables if record.model is None else reversed(tables)  # an encoder runs first


def hidden(count: int, noun: str, option: str) -> Text:
    """A note on hidden parts of a view, with the option that shows them."""
    return Text(f"⋮ {count_of(count, noun)} not drawn ({option})", style="dim")


def token_table(
    record: Record, index: int, options: ViewOptions, screen: Screen, *, of_context: bool = False
) -> RenderableType:
    """The tokens of a sequence with index, id and characters, including padding.

    For a checkpoint also the tokenizer's name of a token, its bytes, and whether it is special or generated.
    """
    family = record.keys if of_context else record.sequences
    n_tokens, longest = len(family[index].tokens), max(len(other.tokens) for other in family)
    first = record.config.first_column(n_tokens, longest)
    tokens = Table(
        columns=_columns(record, index, of_context),
        rows=range(-first, longest - first),
        most=None if options.everything else MAX_TOKEN_ROWS,
        has_ends=True,
    )
    padding = f" + {longest - n_tokens} padding" if n_tokens < longest else ""
    title = f"{_text_name(record, index, of_context)}: {count_of(n_tokens, 'token')}{padding}, "
    size = len(record.vocabulary) if record.model is None else f"{record.model.n_vocabulary:,}"
    words = Text(title, style="bold").append(f"vocabulary of {size}", style="not bold")
    return Group(words, *table(tokens, screen.width))


def _text_name(record: Record, index: int, of_context: bool) -> str:
    if record.model is None:
        return f"{'context' if of_context else 'sequence'} {index}"
    half = "" if record.context is None else "encoder" if of_context else "decoder"
    number = f"sequence {index}" if len(record.sequences) > 1 else ""
    return f"{half} {number}".strip() or "text"


def _columns(record: Record, index: int, of_context: bool) -> list[Column[int]]:
    """The columns of a token at an index, the index first. Padding, whose index is outside, has only the index."""
    sequence = (record.keys if of_context else record.sequences)[index]
    pieces, inside = sequence.pieces, range(len(sequence.tokens))

    def of_token(heading: str, value: Callable[[int], object], **how: Any) -> Column[int]:
        return Column(
            heading=heading,
            value=lambda i: value(i) if i in inside else None,
            style=lambda i: "" if i in inside else "dim",
            **how,
        )

    def offsets(i: int) -> str | None:
        start, end = sequence.offsets[i]
        return None if pieces and start == end else f"{start}–{end}"

    def token_text_at(i: int) -> str:
        is_listed = i in inside and 0 <= sequence.ids[i] < len(record.vocabulary)
        is_unknown = is_listed and record.vocabulary[sequence.ids[i]] == UNKNOWN != sequence.tokens[i]
        return token_text(sequence, i) + (f" {UNKNOWN}" if is_unknown else "")

    number: Column[int] = Column(heading="index", value=lambda i: i if i >= 0 else None, unit="integer")
    token: Column[int] = Column(
        heading="token", value=token_text_at, least=_LEAST_TOKEN, style=lambda i: "bold" if i in inside else "dim"
    )
    columns = [number, of_token("id", lambda i: sequence.ids[i], unit="id"), token]
    if not pieces:  # ids of a checkpoint stand beside the index, those of mha after the token
        columns[1:] = reversed(columns[1:])
    if any(piece.name != token for piece, token in zip(pieces, sequence.tokens, strict=False)):
        columns.append(of_token("piece", lambda i: fitted(token_label(pieces[i].name), _MOST_BYTES), drop=2))
    if pieces:
        columns.append(of_token("bytes", lambda i: fitted(pieces[i].bytes, _MOST_BYTES), drop=3))
    columns.append(of_token("offsets", offsets, drop=1 if pieces else 0))
    if any(other.documents for other in record.sequences):
        columns.append(of_token("document", lambda i: sequence.documents[i], unit="integer"))
    if sequence.token_type_ids:
        columns.append(of_token("type", lambda i: sequence.token_type_ids[i], unit="integer"))
    if record.model is not None:
        generated = None if of_context else record.model.generated
        begin = len(sequence.tokens) if generated is None else generated.prompt_lens[index]
        notes = [_note(sequence, i, is_generated=i >= begin) for i in inside]
        if any(notes):
            note: Column[int] = Column(
                heading="", value=lambda i: notes[i] if i in inside else "masked", style=lambda i: "cyan"
            )
            columns.append(note)
    return columns


def _note(sequence: TokenSequence, token: int, *, is_generated: bool) -> str:
    """A note on a checkpoint's token that is special, generated or unknown, with the text of an unknown one."""
    typed = sequence.unknown(token)
    parts = ["generated"] if is_generated else []
    parts += [] if typed is None else [f"for {token_label(typed)}"]
    return ", ".join(parts + (["special"] if sequence.pieces and sequence.pieces[token].special else []))
