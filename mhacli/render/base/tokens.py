"""The tokens of a text as a table: positions, ids, characters, and the names of a checkpoint's
tokenizer.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.record.record import Record
from mhacli.text.escape import token_label
from mhacli.text.tokens import UNKNOWN, TokenSequence

from .doc import Column, Table
from .format import PADDING, count_of, fitted, token_text
from .options import Screen, Selection, ViewOptions
from .terminal import table

T = TypeVar("T")
MAX_TOKEN_ROWS = 16
_LEAST_TOKEN = 12
"""The least width of the column of tokens."""
_MOST_BYTES = 18
"""The most characters of a tokenizer's name of a token, and of its bytes."""


def token_tables(
    record: Record, sequences: Selection, options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """The tables of the chosen sequences, each with its context, in the order of execution."""
    families = [record.sequences, *filter(None, [record.context])]
    vocabulary = str(len(record.vocabulary))
    if record.model is not None:
        vocabulary = f"{record.model.n_vocabulary:,}"
        families.reverse()  # an encoder runs first
    for place, index in enumerate(sequences.shown):
        if sequences.hidden and place == sequences.before:
            yield hidden(sequences.hidden, "sequence", "--all or --sequence")
        for texts in families:
            is_context = texts is record.context
            text = texts[index]
            longest = max(len(other.tokens) for other in texts)
            first = record.config.first_column(len(text.tokens), longest)
            tokens = Table(
                _columns(record, text, None if is_context else index),
                range(-first, longest - first),
                most=None if options.everything else MAX_TOKEN_ROWS,
                has_ends=True,
            )
            n_padding = longest - len(text.tokens)
            padding = f" + {n_padding} padding" if n_padding else ""
            n_tokens = f"{count_of(len(text.tokens), 'token')}{padding}"
            title = Text(f"{_name(record, index, is_context=is_context)}: {n_tokens}, ", "bold")
            title.append(f"vocabulary of {vocabulary}", style="not bold")
            yield Group(title, *table(tokens, screen.width))


def hidden(count: int, noun: str, option: str) -> Text:
    """A note on hidden parts of a view, with the option that shows them."""
    return Text(f"⋮ {count_of(count, noun)} not drawn ({option})", "dim")


def _name(record: Record, index: int, *, is_context: bool) -> str:
    """`sequence 0`, `context 0`; of a checkpoint `encoder`, `decoder sequence 1`, or `text`."""
    if record.model is None:
        return f"{'context' if is_context else 'sequence'} {index}"
    parts = []
    if record.context is not None:
        parts.append("encoder" if is_context else "decoder")
    if len(record.sequences) > 1:
        parts.append(f"sequence {index}")
    return " ".join(parts) or "text"


def _columns(record: Record, sequence: TokenSequence, index: int | None) -> list[Column[int]]:
    """The columns of a token, its index first, of the sequence at an `index` or of a context.
    Padding has only the index. Columns without a value for any token are left out.
    """
    pieces = sequence.pieces
    n_tokens = len(sequence.tokens)

    def of_token(
        heading: str,
        items: Sequence[T],
        value: Callable[[T], object] = lambda item: item,
        *,
        style: str = "",
        **more: Any,
    ) -> Iterator[Column[int]]:
        if items:
            yield Column(
                heading,
                lambda i: value(items[i]) if 0 <= i < n_tokens else None,
                style=lambda i: style if 0 <= i < n_tokens else "dim",
                **more,
            )

    def offsets(ends: tuple[int, int]) -> str | None:
        start, end = ends
        return None if pieces and start == end else f"{start}–{end}"

    is_renamed = any(
        piece.name != token for piece, token in zip(pieces, sequence.tokens, strict=False)
    )
    notes = _notes(record, sequence, index)
    columns: list[Column[int]] = [
        Column("index", lambda i: i if i >= 0 else None, unit="integer"),
        *of_token(
            "token",
            range(n_tokens),
            lambda i: _word(record, sequence, i),
            style="bold",
            none=PADDING,
            least=_LEAST_TOKEN,
        ),
        *of_token(
            "piece",
            pieces if is_renamed else (),
            lambda piece: fitted(token_label(piece.name), _MOST_BYTES),
            drop=2,
        ),
        *of_token(
            "bytes", pieces, lambda piece: fitted(token_label(piece.bytes), _MOST_BYTES), drop=3
        ),
        *of_token("offsets", sequence.offsets, offsets, drop=1 if pieces else 0),
        *of_token("document", sequence.documents, unit="integer"),
        *of_token("type", sequence.token_type_ids, unit="integer"),
        *of_token("", notes if any(notes) else (), style="cyan", none="masked"),
    ]
    place = 1 if pieces else 2
    # ids of a checkpoint stand beside the index, those of mha after the token
    columns[place:place] = of_token("id", sequence.ids, unit="id")
    return columns


def _word(record: Record, sequence: TokenSequence, i: int) -> str:
    """A token, with a remark if it is not in the vocabulary."""
    token = token_text(sequence.tokens, i)
    has_entry = 0 <= sequence.ids[i] < len(record.vocabulary)
    if has_entry and record.vocabulary[sequence.ids[i]] == UNKNOWN != sequence.tokens[i]:
        return f"{token} {UNKNOWN}"
    return token


def _notes(record: Record, sequence: TokenSequence, index: int | None) -> list[str]:
    """A note on each token of a checkpoint that is special, generated or unknown, with the text of
    an unknown one.
    """
    if record.model is None:
        return []
    prompt_len = len(sequence.tokens)
    if record.model.generated is not None and index is not None:
        prompt_len = record.model.generated.prompt_lens[index]
    notes = []
    for i in range(len(sequence.tokens)):
        parts = []
        if i >= prompt_len:
            parts.append("generated")
        characters = sequence.unknown(i)
        if characters is not None:
            parts.append(f"for {token_label(characters)}")
        if sequence.pieces and sequence.pieces[i].special:
            parts.append("special")
        notes.append(", ".join(parts))
    return notes
