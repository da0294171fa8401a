"""The tokens of a text as a table: positions, ids, characters, and the names of a checkpoint's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.record.record import Record
from mhacli.render.base.format import PADDING, count_of, fitted, left_out, plain_table, token_text
from mhacli.render.base.options import Screen, Selection, ViewOptions, balanced
from mhacli.text.escape import token_label
from mhacli.text.tokens import UNKNOWN, TokenSequence

MAX_TOKEN_ROWS = 16
_GAP, _LEAST_TOKEN, _MOST_BYTES = 2, 12, 18


@dataclass(frozen=True)
class _TokenColumn:
    """A column beside the token: its heading, its text at an index, and the order in which it is dropped (0: never)."""

    name: str
    text_at: Callable[[int], Text]
    justify: Literal["left", "right"] = "left"
    yields: int = 0


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
    sequence, longest = family[index], max(len(other.tokens) for other in family)
    first = record.config.first_column(len(sequence.tokens), longest)
    rows = balanced(longest, longest if options.everything else MAX_TOKEN_ROWS)
    indices = [row - first for row in rows.shown]
    more = left_out(rows.hidden) if rows.hidden else Text()
    needed = max(more.cell_len, min(_LEAST_TOKEN, max(cell_len(token_text(sequence, i)) for i in indices)))
    columns = _fitting(_columns(record, index, of_context, indices), indices, screen.width - needed)
    room = max(len(PADDING), screen.width - _taken(columns, indices) - (0 if sequence.pieces else len(f" {UNKNOWN}")))
    token = _TokenColumn("token", lambda i: _token(record, sequence, i, room))
    at = 2 if sequence.pieces else 1  # ids of a checkpoint stand beside the index, those of mha after the token
    columns.insert(at, token)
    table = plain_table(*((column.name, column.justify == "right") for column in columns), gap=_GAP)
    for place, i in enumerate(indices):
        if rows.hidden and place == rows.before:
            table.add_row("⋮", *[""] * (at - 1), more)
        table.add_row(*(column.text_at(i) for column in columns))
    return Group(_title(record, index, longest - len(sequence.tokens), of_context), table)


def _title(record: Record, index: int, n_padding: int, of_context: bool) -> Text:
    sequence = (record.keys if of_context else record.sequences)[index]
    padding = f" + {n_padding} padding" if n_padding else ""
    title = Text(
        f"{_text_name(record, index, of_context)}: {count_of(len(sequence.tokens), 'token')}{padding}, ", style="bold"
    )
    size = len(record.vocabulary) if record.model is None else f"{record.model.n_vocabulary:,}"
    return title.append(f"vocabulary of {size}", style="not bold")


def _text_name(record: Record, index: int, of_context: bool) -> str:
    if record.model is None:
        return f"{'context' if of_context else 'sequence'} {index}"
    half = "" if record.context is None else "encoder" if of_context else "decoder"
    number = f"sequence {index}" if len(record.sequences) > 1 else ""
    return f"{half} {number}".strip() or "text"


def _token(record: Record, sequence: TokenSequence, index: int, room: int) -> Text:
    if not 0 <= index < len(sequence.tokens):
        return Text(PADDING, style="dim")
    token = Text(fitted(token_text(sequence, index), room), style="bold")
    if _is_unknown(record, sequence.ids[index], sequence.tokens[index]):
        token.append(f" {UNKNOWN}", style="not bold yellow")
    return token


def _is_unknown(record: Record, token_id: int, token: str) -> bool:
    is_listed = 0 <= token_id < len(record.vocabulary)
    return is_listed and record.vocabulary[token_id] == UNKNOWN != token


# ------------------------------------------------------------------------------------------------------------ columns


def _columns(record: Record, index: int, of_context: bool, indices: list[int]) -> list[_TokenColumn]:
    """The columns beside a token, the index first. Padding has only the index."""
    sequence = (record.keys if of_context else record.sequences)[index]

    def of_token(name: str, label_at: Callable[[int], str], **rest: object) -> _TokenColumn:
        def cell(i: int) -> Text:
            return Text(label_at(i)) if 0 <= i < len(sequence.tokens) else Text("–", style="dim")

        return _TokenColumn(name, cell, **rest)  # type: ignore[arg-type]

    def offsets(i: int) -> str:
        start, end = sequence.offsets[i]
        return "–" if pieces and start == end else f"{start}–{end}"

    pieces = sequence.pieces
    number = _TokenColumn("index", lambda i: Text(str(i)) if i >= 0 else Text("–", style="dim"), "right")
    columns = [number, of_token("id", lambda i: str(sequence.ids[i]), justify="right")]
    own_names = [i for i in indices if 0 <= i < len(pieces) and pieces[i].name != sequence.tokens[i]]
    if own_names:
        columns.append(of_token("piece", lambda i: fitted(token_label(pieces[i].name), _MOST_BYTES), yields=2))
    if pieces:
        columns.append(of_token("bytes", lambda i: fitted(pieces[i].bytes, _MOST_BYTES), yields=3))
    columns.append(of_token("offsets", offsets, yields=1 if pieces else 0))
    if _has_documents(record):
        columns.append(of_token("document", lambda i: str(sequence.documents[i]), justify="right"))
    if sequence.token_type_ids:
        columns.append(of_token("type", lambda i: str(sequence.token_type_ids[i]), justify="right"))
    if record.model is not None and any(_note(record, index, of_context, i) for i in indices):
        columns.append(_TokenColumn("", lambda i: Text(_note(record, index, of_context, i), style="cyan")))
    return columns


def _note(record: Record, index: int, of_context: bool, token: int) -> str:
    """A note on a checkpoint's token that is special, generated or unknown, with the text of an unknown one."""
    sequence = (record.keys if of_context else record.sequences)[index]
    if not 0 <= token < len(sequence.tokens):
        return "masked"
    generated = None if record.model is None or of_context else record.model.generated
    notes = ["generated"] if generated is not None and token >= generated.prompt_lens[index] else []
    typed = sequence.unknown(token)
    notes += [] if typed is None else [f"for {token_label(typed)}"]
    return ", ".join(notes + (["special"] if sequence.pieces and sequence.pieces[token].special else []))


def _has_documents(record: Record) -> bool:
    return any(sequence.documents for sequence in record.sequences)


def _taken(columns: list[_TokenColumn], indices: list[int]) -> int:
    """The width of the columns beside the token, gaps included."""
    widths = (max([cell_len(column.name), *(column.text_at(i).cell_len for i in indices)]) for column in columns)
    return sum(widths) + _GAP * len(columns)


def _fitting(columns: list[_TokenColumn], indices: list[int], width: int) -> list[_TokenColumn]:
    for step in range(3, 0, -1):
        if _taken(columns, indices) <= width:
            break
        columns = [column for column in columns if column.yields < step]
    return columns
