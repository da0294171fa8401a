"""What a picture is of: the heads that were chosen, of one sequence, and their maps in cells that fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mhacli.errors import MhaError, UsageError
from mhacli.render.base.format import token_text
from mhacli.render.base.options import ViewOptions
from mhacli.render.base.rows import first_produced, rows_in
from mhacli.render.checkpoint import words as merged
from mhacli.render.heads.drawable import DrawableHead, drawable_heads
from mhacli.render.heads.head_map import HeadMap, head_map
from mhacli.results.record.heads import HeadStatistics
from mhacli.results.record.record import Record
from mhacli.text.tokenizers.pieces import words_of


@dataclass(frozen=True)
class Subject:
    """A head of a sequence as it is drawn: its map `whole`, and `shown`, without sinks where these are hidden. `rows` are the
    queries that were asked for, None for all; `in_words` says whether rows and columns are words, put together from tokens."""

    head: DrawableHead
    sequence: int
    whole: HeadMap
    shown: HeadMap
    rows: tuple[int, ...] | None
    in_words: bool = False

    @property
    def label(self) -> str:
        """`layer 3 · head 5`, with the sequence where there are several."""
        layer = [] if self.head.layer is None else [self.head.layer.label]
        several = [f"sequence {self.sequence}"] if len(self.head.record.sequences) > 1 else []
        return " · ".join([*layer, f"head {self.head.head}", *several])

    @property
    def hidden_columns(self) -> tuple[int, ...]:
        """The columns that are sinks alone, which are taken out. A block that holds a sink shows what is left of it."""
        return self.shown.sinks if self.shown.taken is not None and self.shown.block == 1 else ()

    def query_name(self, row: int) -> str:
        """The token of a row or its places; with its index where not all rows are drawn."""
        if self.rows is None:
            return self.shown.query_name(row)
        index = self.rows[row]
        return f"{index} {token_text(self.shown.queries, index)}"


def one_sequence(record: Record, options: ViewOptions) -> int:
    """The sequence to draw: the one that was asked for, or the first. Raises `UsageError` for several, or
    for one that does not exist."""
    asked = tuple(dict.fromkeys(options.sequences or (0,)))
    if len(asked) > 1:
        raise UsageError(f"sequence must be one for a picture, got {', '.join(map(str, asked))}")
    if not 0 <= asked[0] < len(record.sequences):
        raise UsageError(f"sequence must be from 0 to {len(record.sequences) - 1}, got {asked[0]}")
    return asked[0]


def chosen_subjects(record: Record, options: ViewOptions) -> tuple[DrawableHead, ...]:
    """The heads that can be drawn and were asked for. Raises `MhaError` where the record holds none of them."""
    heads = drawable_heads(record, options)
    has_cells = all("pattern" in head.record.arrays for head in heads)
    if not heads or (options.words and not has_cells):
        what = "words" if options.words else "heads"
        raise MhaError(f"the record must hold the pattern to draw its {what}, got none", hint=_KEEP)
    return heads


_KEEP = "--keep pattern keeps it, --keep-limit makes room"


def subject(drawn: DrawableHead, sequence: int, options: ViewOptions, *, most: int) -> Subject:
    """A head with its map in at most `most` cells a side. Raises `UsageError` for rows of a head that is known in blocks only."""
    rows = _rows(drawn, sequence, options)
    if options.words:
        drawn, rows = _in_words(drawn, sequence, rows)
    found = head_map(drawn, sequence)
    if rows is not None:
        if found.block > 1:
            raise UsageError(
                f"from must be of heads whose cells are kept, got a map of {found.block} × {found.block} tokens a cell",
                hint=_KEEP,
            )
        whole = found.of_rows(rows, max(1, -(-found.shares.shape[1] // most)))
    else:
        whole = found.fitting(most, most)
    shown = whole.without_sinks() if options.hide_sinks else whole
    return Subject(drawn, sequence, whole, shown, rows, options.words)


def _rows(drawn: DrawableHead, sequence: int, options: ViewOptions) -> tuple[int, ...] | None:
    if options.rows is None:
        return None
    made = None if drawn.record.model is None else drawn.record.model.generated
    produced = None if drawn.layer is None else first_produced(drawn.layer.kind, made, sequence)
    rows = rows_in(options.rows, drawn.record.sequences[sequence], produced)
    if not rows:
        raise UsageError(f"from must name queries of {drawn.label}, got none that it has")
    return rows


def _in_words(
    drawn: DrawableHead, sequence: int, rows: tuple[int, ...] | None
) -> tuple[DrawableHead, tuple[int, ...] | None]:
    """The head with a word where it had tokens; what counts as a sink is the word that holds it."""
    view = merged.merged(drawn.record)
    if rows is not None:
        rows = merged.words_with(drawn.record.sequences[sequence], rows)
    return replace(drawn, record=view, statistics=_sinks_in_words(drawn, view)), rows


def _sinks_in_words(drawn: DrawableHead, view: Record) -> HeadStatistics | None:
    if drawn.statistics is None:
        return None
    found = []
    for sink in drawn.statistics.sinks:
        words = words_of(drawn.record.keys[sink.sequence])
        found += [replace(sink, key=place) for place, word in enumerate(words) if sink.key in word]
    return replace(drawn.statistics, sinks=tuple(found))
