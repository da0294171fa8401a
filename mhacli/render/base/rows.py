"""Which queries of a pattern are drawn: what `--from` says, looked up in each text that a layer reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mhacli.errors import UsageError
from mhacli.render.base.options import Rows, ViewOptions, drawn_sequences
from mhacli.results.record.record import AttentionKind, Generated, texts_of
from mhacli.spec.tokens import TokenSequence


def first_produced(kind: AttentionKind, made: Generated | None, sequence: int) -> int | None:
    """The first query of which the model made the token that follows it: the last of the prompt. An encoder has none."""
    return None if made is None or kind == "encoder" else made.prompt_lens[sequence] - 1


def rows_in(rows: Rows, text: TokenSequence, produced: int | None) -> tuple[int, ...]:
    """The places of a text that are asked for, those of them that it has; the model made the token after `produced`."""
    n = len(text.tokens)
    if rows == "last":
        return (n - 1,)
    if rows == "generated":
        return () if produced is None else tuple(range(produced, n - 1))
    return tuple(row for row in dict.fromkeys(rows) if isinstance(row, int) and 0 <= row < n)


def drawn_texts(
    kinds: Iterable[AttentionKind],
    sequences: tuple[TokenSequence, ...],
    context: tuple[TokenSequence, ...] | None,
    options: ViewOptions,
) -> Iterator[TokenSequence]:
    """The texts whose tokens are the queries of layers of these kinds, those of the sequences that are drawn. Raises `UsageError`
    for a sequence that does not exist."""
    shown = drawn_sequences(options, len(sequences)).shown
    for kind in dict.fromkeys(kinds):
        queries, _ = texts_of(kind, sequences, context)
        yield from (queries[b] for b in shown)


def require_rows(rows: Rows | None, texts: Iterable[TokenSequence]) -> None:
    """Raises `UsageError` for a place that none of the texts has."""
    longest = max((len(text.tokens) for text in texts), default=0)
    if isinstance(rows, tuple) and longest and max(rows, default=0) >= longest:
        raise UsageError(f"from must name places from 0 to {longest - 1}, got {max(rows)}")


def require_generated(rows: Rows | None, *, is_generated: bool) -> None:
    """Raises `UsageError` for rows of generated tokens where there are none."""
    if rows == "generated" and not is_generated:
        raise UsageError("from generated must have tokens that the model made, got none", hint="add --generate N")
