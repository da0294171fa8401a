"""The contents of head pictures, and the text below them.

The chosen heads with maps in cells that fit; notes on cells and hidden sinks, and the provenance, as text and as
metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.cells import cell_len, set_cell_size

from mhacli.errors import MhaError, UsageError, first_names, out_of_range
from mhacli.record.arrays import Array
from mhacli.record.heads import HeadStatistics
from mhacli.record.record import InspectedLayer, Record
from mhacli.render.base.format import RECORD_BY, count_of, fitted, provenance, token_at, token_text, weight_text
from mhacli.render.base.options import Figure, ViewOptions
from mhacli.render.base.selection import first_produced, names_of, ranges, rows_in
from mhacli.render.checkpoint.patterns import merge_words, words_with
from mhacli.render.figures.scales import Shading
from mhacli.render.figures.svg import LINE, MONO_EM, Piece, Sheet, stacked, wrapped, written
from mhacli.render.heads.drawable import DrawableHead, drawable_heads, is_before_dropout
from mhacli.render.heads.head_map import HeadMap, head_map
from mhacli.text.escape import visible
from mhacli.text.tokens import TokenSequence


@dataclass(frozen=True)
class HeadPicture:
    """A head of a sequence to draw: its `whole` map, and the map `shown`, without sinks if they are hidden.

    `rows` are the requested queries, None for all. `in_words`: rows and columns are words merged from tokens.
    """

    head: DrawableHead
    sequence: int
    whole: HeadMap
    shown: HeadMap
    rows: tuple[int, ...] | None
    in_words: bool = False

    @property
    def label(self) -> str:
        """`layer 3 · head 5`, with the sequence if there are several."""
        layer = [] if self.head.layer is None else [self.head.layer.label]
        several = [f"sequence {self.sequence}"] if len(self.head.record.sequences) > 1 else []
        return " · ".join([*layer, f"head {self.head.head}", *several])

    @property
    def hidden_columns(self) -> tuple[int, ...]:
        """The columns that consist of hidden sinks. A block with a sink shows the weight of its other keys."""
        return self.shown.sinks if self.shown.taken is not None and self.shown.block == 1 else ()

    def query_name(self, row: int) -> str:
        """The token of a row or its positions, with its index unless all rows are drawn."""
        if self.rows is None:
            return self.shown.query_name(row)
        index = self.rows[row]
        return f"{index} {token_text(self.shown.queries, index)}"


def sequence_to_draw(record: Record, options: ViewOptions) -> int:
    """The sequence to draw: the requested one, or the first. Raises `UsageError` for several, or one out of range."""
    indices = tuple(dict.fromkeys(options.sequences or (0,)))
    if len(indices) > 1:
        raise UsageError(f"a picture shows one sequence, and --sequence names {', '.join(map(str, indices))}")
    if not 0 <= indices[0] < len(record.sequences):
        raise UsageError(out_of_range("--sequence", indices[0], len(record.sequences)))
    return indices[0]


def heads_to_draw(record: Record, options: ViewOptions) -> tuple[DrawableHead, ...]:
    """The requested heads that can be drawn. Raises `MhaError` if the record has none of them."""
    heads = drawable_heads(record, options)
    has_cells = all("pattern" in head.record.arrays for head in heads)
    if not heads or (options.words and not has_cells):
        what = "words" if options.words else "heads"
        raise MhaError(f"the {what} cannot be drawn: the record does not have their patterns", hint=_KEEP)
    return heads


_KEEP = "--keep pattern keeps them, --keep-limit makes room"


def head_picture(head: DrawableHead, sequence: int, options: ViewOptions, *, most: int) -> HeadPicture:
    """A head with its map in at most `most` cells per side. Raises `UsageError` for rows of a head stored in blocks."""
    rows = _rows(head, sequence, options)
    if options.words:
        head, rows = _in_words(head, sequence, rows)
    finest = head_map(head, sequence)
    if rows is not None:
        if finest.block > 1:
            raise UsageError(
                f"--from needs whole patterns, and the record has a map of {finest.block} × {finest.block} tokens a cell",
                hint=_KEEP,
            )
        whole = finest.of_rows(rows, max(1, -(-finest.weights.shape[1] // most)))
    else:
        whole = finest.fitting(most, most)
    shown = whole.without_sinks() if options.hide_sinks else whole
    return HeadPicture(head, sequence, whole, shown, rows, options.words)


def _rows(head: DrawableHead, sequence: int, options: ViewOptions) -> tuple[int, ...] | None:
    if options.rows is None:
        return None
    generated = None if head.record.model is None else head.record.model.generated
    produced = None if head.layer is None else first_produced(head.layer.kind, generated, sequence)
    rows = rows_in(options.rows, head.record.sequences[sequence], produced)
    if not rows:
        raise UsageError(f"--from names no query of {head.label}")
    return rows


def _in_words(
    head: DrawableHead, sequence: int, rows: tuple[int, ...] | None
) -> tuple[DrawableHead, tuple[int, ...] | None]:
    """The head with words in place of tokens. A word that contains a sink counts as a sink."""
    view = merge_words(head.record)
    if rows is not None:
        rows = words_with(head.record.sequences[sequence], rows)
    return replace(head, record=view, statistics=_sinks_in_words(head)), rows


def _sinks_in_words(head: DrawableHead) -> HeadStatistics | None:
    if head.statistics is None:
        return None
    sinks = []
    for sink in head.statistics.sink_keys:
        words = head.record.keys[sink.sequence].words
        sinks += [replace(sink, key=place) for place, word in enumerate(words) if sink.key in word]
    return replace(head.statistics, sinks=tuple(sinks))


# ---------------------------------------------------------------------------------------------------- options in words


def drawn_as(
    record: Record, options: ViewOptions, kind: Figure, *, pictures: Sequence[HeadPicture], shaded: Shading
) -> str:
    """The options on one line: `figure grid · heads 0, 2 · scale log · sinks hidden`."""
    picture = pictures[0]
    layers = [*dict.fromkeys(other.head.layer for other in pictures if other.head.layer is not None)]
    heads = sorted({other.head.head for other in pictures})
    parts = [f"figure {kind}"] + ([names_of(layers)] if layers else [])
    parts += [f"head{'s' * (len(heads) > 1)} {ranges(heads)}"]
    n = len(record.sequences)
    parts += [f"sequence {picture.sequence} of 0–{n - 1}"] if n > 1 else []
    parts += [f"scale {shaded.scale}", "sinks hidden" if options.hide_sinks else "sinks shown"]
    parts += [] if picture.rows is None else [f"queries {ranges(picture.rows)}"]
    return " · ".join([*parts, *(["words"] if options.words else [])])


def texts_of(pictures: Sequence[HeadPicture], cells: int) -> Iterator[str]:
    """A line of at most `cells` cells for each pair of texts: `5 tokens: “the cat …”`."""
    alike = of_same_texts(pictures)
    for group in alike:
        picture = group[0]
        queries, keys = picture.shown.queries, picture.shown.keys
        layers = [other.head.layer for other in group if other.head.layer is not None]
        where = f"{names_of(layers)}: " if len(alike) > 1 else ""
        if queries == keys:
            yield _text(where, queries, picture, cells)
        else:
            yield _text(f"{where}queries, ", queries, picture, cells)
            yield _text(f"{where}keys, ", keys, picture, cells)


def of_same_texts(pictures: Sequence[HeadPicture]) -> list[list[HeadPicture]]:
    """The heads grouped by their texts."""
    groups: list[list[HeadPicture]] = []
    for picture in pictures:
        texts = (picture.shown.queries, picture.shown.keys)
        group = next(
            (candidate for candidate in groups if (candidate[0].shown.queries, candidate[0].shown.keys) == texts), None
        )
        if group is None:
            groups.append([picture])
        else:
            group.append(picture)
    return groups


def _text(begin: str, text: TokenSequence, picture: HeadPicture, cells: int) -> str:
    """The number of tokens, and the text, shortened; random vectors have no text."""
    count = begin + count_of(len(text.tokens), "word" if picture.in_words else "token", grouped=True)
    words = " ".join(text.text.split())
    room = cells - cell_len(count) - len(": “”")
    return f"{count}: “{fitted(visible(words), room)}”" if words and room > 1 else count


# ------------------------------------------------------------------------------------------------------------ captions


_WORDS = (
    "words: attention weights are summed over the tokens of the attended word, and averaged over those of the attending word; "
    "the statistics of the head are of tokens"
)
_SIZE, _LABEL, _MOST_LINES, _MOST_SINKS = 9.5, 11, 6, 4
_DRAWN_AS = "drawn as"


def caption(notes: Sequence[str], *, width: float) -> Piece:
    """The notes as lines of this width. A note of more than six lines is cut with an ellipsis."""
    cells = max(30, int(width / (MONO_EM * _SIZE)))
    return stacked([_lines(note, cells) for note in notes], 1.0)


def _lines(text: str, cells: int) -> Piece:
    lines = wrapped(text, cells)
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], set_cell_size(lines[_MOST_LINES - 1], cells - 2).rstrip() + " …"]
    height = LINE * _SIZE
    content = "".join(written(0, (place + 1) * height - 3, line, _SIZE) for place, line in enumerate(lines))
    return Piece(content, cells * MONO_EM * _SIZE, len(lines) * height)


def map_notes(record: Record, pictures: Sequence[HeadPicture], shaded: Shading) -> Iterator[str]:
    """Sentences on what a cell is, and what was pooled, left out or hidden."""
    yield _what_a_cell_is(pictures)
    if record.corpus is not None:
        n_documents = count_of(record.corpus.n_documents, "document", grouped=True)
        yield (
            f"patterns of one document, {visible(record.corpus.example_named)}; types and statistics of heads are means over "
            f"{n_documents}"
        )
    if any(picture.in_words for picture in pictures):
        yield _WORDS
    rows = pictures[0].rows
    if rows is not None:
        yield f"{len(rows)} of {len(pictures[0].shown.queries.tokens)} queries are drawn"
    if shaded.is_exceeded:
        yield "a query that sees only one key gives it everything: such rows do not set the scale"
    if shaded.is_empty:
        yield "all drawn cells have the weight 0"
    if is_before_dropout(record):
        yield f"in training: the pattern before dropout {record.config.dropout:g}; the pattern after dropout is not drawn"
    if record.facts.padded:
        yield "padding is not drawn"


def unverified(layer: InspectedLayer) -> str:
    """Why the pattern of a layer may differ from its computation."""
    return f"NOT verified: {visible('; '.join(layer.unverified))}"


def removed_note(picture: HeadPicture, precision: int, *, is_hidden: bool) -> Iterator[str]:
    """The weight of a head's hidden sinks, and that of a sink logit."""
    learned = picture.whole.learned_mass
    if is_hidden and not picture.whole.sinks and learned is None:
        yield "this head has no sink, so nothing is taken out"
    elif is_hidden:
        mass, names = sink_text([picture], precision), _sink_names(picture)
        also = "" if learned is None else f", and the sink logit with {weight_text(learned, precision)}"
        yield (f"sinks are hidden: {names} with {mass}{also} taken out; the rest of each row is renormalised")
    elif learned is not None:
        mass = weight_text(learned, precision)
        yield f"a sink logit takes {mass} of all attention: no key gets it, so rows sum to less than 1"


def sink_text(pictures: Sequence[HeadPicture], precision: int) -> str:
    """The mean weight of sinks over heads with finite weights."""
    mass = sink_mass(pictures)
    return f"{'an unknown part' if mass is None else weight_text(mass, precision)} of all attention"


def sink_mass(pictures: Sequence[HeadPicture]) -> float | None:
    """The mean weight of sinks over all queries of these heads with finite weights; None without such a query."""
    return _mean(
        [(picture.whole.sink_mass, picture.whole.sink_weights, picture.whole.n_queries) for picture in pictures]
    )


def learned_mass(pictures: Sequence[HeadPicture]) -> float | None:
    """The mean weight of sink logits over all queries of heads that have one; None without one."""
    maps = [picture.whole for picture in pictures]
    return _mean(
        [(m.learned_mass, m.learned, m.n_queries) for m in maps if m.learned is not None and m.learned_mass is not None]
    )


def _mean(masses: Sequence[tuple[float, Array, Array]]) -> float | None:
    """The mean of per-row masses, some of which may be NaN, weighted by the number of queries of each row."""
    counts = [float(n_queries[~np.isnan(rows)].sum()) for _, rows, n_queries in masses]
    return float(np.average([mass for mass, *_ in masses], weights=counts)) if sum(counts) else None


def _sink_names(picture: HeadPicture) -> str:
    keys = picture.whole.keys
    if not picture.whole.sinks:
        return "no key"
    named = first_names((token_at(token_text(keys, place), place) for place in picture.whole.sinks), _MOST_SINKS)
    return f"key {named}" if len(picture.whole.sinks) == 1 else f"keys {named}"


def _what_a_cell_is(pictures: Sequence[HeadPicture]) -> str:
    blocks = sorted({picture.shown.block for picture in pictures})
    if blocks == [1]:
        return "each cell: the attention weight that a query (row) gives to a key (column)"
    sizes = f"{blocks[0]}" if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
    rows = (
        "a query gives"
        if any(picture.rows is not None for picture in pictures)
        else f"{sizes} queries (rows) give on average"
    )
    return f"each cell: the attention weight that {rows} to {sizes} keys (a column) together"


def metadata(record: Record, sheet: Sheet) -> str:
    """The provenance as ASCII JSON: contents and options of the picture, the record's command, and the caption."""
    content = {
        "drawn": [*sheet.drawn],
        _DRAWN_AS: sheet.drawn_as,
        "said": [*sheet.sentences],
        "command": [*record.command],
        **{word: line for word, line in provenance(record) if word != RECORD_BY},
    }
    return json.dumps(content)
