"""Heads as pictures: one head with its tokens and numbers, or many on one scale, a row per layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mhacli.errors import MhaError, UsageError, first_names
from mhacli.record.heads import HeadStatistics, words_of_type
from mhacli.record.record import Record
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.doc import Column, Grid
from mhacli.render.base.format import count_of, fitted, short_text, token_at, token_text, type_text, weight_text
from mhacli.render.base.options import Scale, ViewOptions, chosen
from mhacli.render.base.selection import first_produced, names_of, rows_in
from mhacli.render.checkpoint.patterns import merge_words, words_with
from mhacli.render.figures.grids import grids, legend, scale_words
from mhacli.render.figures.svg import Sheet
from mhacli.render.heads.drawable import DrawableHead, drawable_heads, missing_notes, scale_of
from mhacli.render.heads.head_map import HeadMap, head_map, kv_head_of, largest_of_maps
from mhacli.text.escape import visible

_SIZES = ((1, 720.0, 512), (16, 168.0, 128), (160, 84.0, 64), (1 << 30, 48.0, 32))
"""By number of heads: the size of each map, and its most cells per side."""
_COLUMNS, _ACROSS = ((12, 4), (1 << 30, 8)), 32
"""By number of heads of one layer: the heads per row; and the most of one layer among several."""
_NAMED = 75
"""The most rows and columns with the names of tokens; more have positions."""
_WIDEST = 80
"""The most characters of a text that are shown."""
_KEEP = "--keep pattern keeps them, --keep-limit makes room"
_MOST_SINKS = 4


@dataclass(frozen=True)
class _Picture:
    """A head to draw: its `whole` map, and the map `shown`, without sinks if they are hidden; `rows` are the requested
    queries, None for all."""

    head: DrawableHead
    sequence: int
    whole: HeadMap
    shown: HeadMap
    rows: tuple[int, ...] | None

    @property
    def label(self) -> str:
        """`layer 3 · head 5`, with the sequence if there are several."""
        several = len(self.head.record.sequences) > 1
        return f"{self.head.label} · sequence {self.sequence}" if several else self.head.label


def heads_figure(record: Record, options: ViewOptions, kind: str) -> Sheet:
    """The picture of the chosen heads on one scale. Raises `UsageError` for a picture of one `head` if several are chosen."""
    heads = _heads(record, options)
    if kind == "head" and len(heads) > 1:
        hint = "try --layer 0 --head 0" if record.model is not None and options.layers is None else "try --head 0"
        raise UsageError(f"--figure head draws one head, and {len(heads)} are chosen", hint=hint)
    side, most = next(sizes[1:] for sizes in _SIZES if len(heads) <= sizes[0])
    sequence, scale = _sequence(record, options), scale_of(options, heads)
    pictures = [_picture(head, sequence, options, most) for head in heads]
    top = largest_of_maps([picture.shown for picture in pictures])
    titles = [_short_title(picture, options) if len(heads) > 1 else "" for picture in pictures]
    of_heads = [
        _grid(picture, title, options, scale=scale, top=top) for picture, title in zip(pictures, titles, strict=True)
    ]
    return Sheet(
        title=_title(pictures),
        about=[*_texts(pictures, options), *_types(pictures)],
        body=[grids([*_rows(pictures, of_heads)], side), legend(of_heads, "attention weight")],
        caption=[*_notes(record, pictures, options)],
        scale=scale_words(of_heads),
        drawn=[picture.label for picture in pictures],
    )


# --------------------------------------------------------------------------------------------------------- what is drawn


def _sequence(record: Record, options: ViewOptions) -> int:
    """The sequence to draw: the requested one, or the first. Raises `UsageError` for several, or one out of range."""
    shown = chosen(options.sequences, len(record.sequences), 1, False, "sequence").shown
    if options.sequences is None or len(shown) == 1:
        return shown[0]
    raise UsageError(f"a picture shows one sequence, and --sequence names {', '.join(map(str, shown))}")


def _heads(record: Record, options: ViewOptions) -> tuple[DrawableHead, ...]:
    """The requested heads that can be drawn. Raises `MhaError` if the record has none of them."""
    heads = drawable_heads(record, options)
    has_cells = all("pattern" in head.record.arrays for head in heads)
    if not heads or (options.words and not has_cells):
        what = "words" if options.words else "heads"
        raise MhaError(f"the {what} cannot be drawn: the record does not have their patterns", hint=_KEEP)
    return heads


def _picture(head: DrawableHead, sequence: int, options: ViewOptions, most: int) -> _Picture:
    """A head with its map in at most `most` cells per side. Raises `UsageError` for rows of a head stored in blocks."""
    rows, text = None, head.record.sequences[sequence]
    if options.rows is not None:
        generated = None if head.record.model is None else head.record.model.generated
        produced = None if head.layer is None else first_produced(head.layer.kind, generated, sequence)
        rows = rows_in(options.rows, text, produced)
        if not rows:
            raise UsageError(f"--from names no query of {head.label}")
    if options.words:
        head = replace(head, record=merge_words(head.record), statistics=_sinks_in_words(head))
        rows = None if rows is None else words_with(text, rows)
    finest = head_map(head, sequence)
    if rows is None:
        whole = finest.fitting(most, most)
    elif finest.block == 1:
        whole = finest.of_rows(rows, max(1, -(-finest.weights.shape[1] // most)))
    else:
        of_blocks = f"{finest.block} × {finest.block} tokens a cell"
        raise UsageError(f"--from needs whole patterns, and the record has a map of {of_blocks}", hint=_KEEP)
    return _Picture(head, sequence, whole, whole.without_sinks() if options.hide_sinks else whole, rows)


def _sinks_in_words(head: DrawableHead) -> HeadStatistics | None:
    """The statistics with the words that contain a sink in place of the sinks."""
    if head.statistics is None:
        return None
    sinks = []
    for sink in head.statistics.sink_keys:
        words = head.record.keys[sink.sequence].words
        sinks += [replace(sink, key=place) for place, word in enumerate(words) if sink.key in word]
    return replace(head.statistics, sinks=tuple(sinks))


def _grid(picture: _Picture, title: str, options: ViewOptions, *, scale: Scale, top: float) -> Grid:
    """The map of a head. Beside the cells are the row sums, and the weights of hidden sinks and of a sink logit."""
    shown, statistics = picture.shown, picture.head.statistics
    n_rows, n_columns = shown.weights.shape
    if picture.rows is not None:
        rows = [f"{place} {token_text(shown.queries, place)}" for place in picture.rows]
    else:
        rows = [shown.query_name(i) if n_rows <= _NAMED else str(shown.query_places(i)[0]) for i in range(n_rows)]
    columns = [shown.key_name(j) if n_columns <= _NAMED else str(shown.key_places(j)[0]) for j in range(n_columns)]
    taken = None
    if shown.taken is not None and shown.block == 1:
        taken = np.full(shown.weights.shape, np.nan)
        sinks = [*shown.sinks]
        taken[:, sinks] = np.where(picture.whole.is_open, picture.whole.weights, np.nan)[:, sinks]
    return Grid(
        title=title,
        values=shown.weights,
        allowed=shown.is_open,
        rows=rows,
        columns=columns,
        top=top,
        scale=scale,
        digits=options.precision,
        corner="query ↓ key →",
        meaning=picture.label if statistics is None else f"{picture.label} · {_of_statistics(statistics)}",
        beside=[*_beside(shown, options)] if not title else [],
        taken=taken,
    )


def _beside(shown: HeadMap, options: ViewOptions) -> Iterator[Column[int]]:
    sums = np.where(shown.is_open, shown.weights, 0.0).sum(axis=1)
    for heading, numbers in (("sinks", shown.taken), ("learned", shown.learned), ("Σ", sums)):
        if numbers is not None:
            texts = [weight_text(number, options.precision) for number in numbers.tolist()]
            yield Column(heading=heading, value=texts.__getitem__)


def _rows(pictures: Sequence[_Picture], of_heads: Sequence[Grid]) -> Iterator[tuple[str, Sequence[Grid]]]:
    """A row per layer, or several rows for a single layer."""
    layers: dict[str, list[Grid]] = {}
    for picture, of in zip(pictures, of_heads, strict=True):
        layer = picture.head.layer
        name = "" if layer is None else layer.label + ("" if layer.verified else " !")
        layers.setdefault(name, []).append(of)
    across = _ACROSS
    if len(layers) == 1:
        across = next(n for most, n in _COLUMNS if len(of_heads) <= most)
    for name, row in layers.items():
        for start in range(0, len(row), across):
            yield name if len(layers) > 1 else "", row[start : start + across]


# -------------------------------------------------------------------------------------------------------------- in words


def _title(pictures: Sequence[_Picture]) -> str:
    """The name of a single head, or the layers and the number of heads."""
    first = pictures[0]
    if len(pictures) == 1:
        return first.label + kv_head_of(first.head.record, first.head.head)
    layers = dict.fromkeys(layer for picture in pictures if (layer := picture.head.layer) is not None)
    parts = [names_of([*layers]), count_of(len(pictures), "head")]
    parts += [f"sequence {first.sequence}"] if len(first.head.record.sequences) > 1 else []
    return " · ".join(filter(None, parts))


def _short_title(picture: _Picture, options: ViewOptions) -> str:
    """The number of a head with the sign of its type, and the weight of its hidden sinks."""
    statistics = picture.head.statistics
    title = f"head {picture.head.head} {'' if statistics is None else KIND_SIGNS[statistics.kind][0]}"
    if picture.shown.taken is None or not picture.whole.sinks:
        return title
    return f"{title} {weight_text(picture.whole.sink_mass, options.precision)}"


def _texts(pictures: Sequence[_Picture], options: ViewOptions) -> Iterator[str]:
    """A line for each text that is read: `5 tokens: “the cat …”`."""
    pairs = [(picture.shown.queries, picture.shown.keys) for picture in pictures]
    read = [text for pair in pairs for text in pair]
    for place, text in enumerate(read):
        if text not in read[:place]:
            n_tokens = count_of(len(text.tokens), "word" if options.words else "token", grouped=True)
            words = visible(" ".join(text.text.split()))
            yield fitted(f"{n_tokens}: “{words}”", _WIDEST) if words else n_tokens


def _types(pictures: Sequence[_Picture]) -> Iterator[str]:
    """The types of heads with their signs, and the number of heads of each."""
    found = [head.statistics for picture in pictures if (head := picture.head).statistics is not None]
    if len(found) == 1:
        yield f"{KIND_SIGNS[found[0].kind][0]} {_of_statistics(found[0])}"
    elif found:
        kinds = [statistics.kind for statistics in found]
        signs = ((sign, kind) for kind, (sign, _) in KIND_SIGNS.items() if kind in kinds)
        yield " · ".join(f"{sign} {words_of_type(kind).name} {kinds.count(kind)}" for sign, kind in signs)


def _of_statistics(statistics: HeadStatistics) -> str:
    """The type and the entropy of a head."""
    name, entropy = type_text(statistics), statistics.entropy
    return name if entropy is None else f"{name} · entropy {short_text(entropy)} nats"


def _notes(record: Record, pictures: Sequence[_Picture], options: ViewOptions) -> Iterator[str]:
    """What a cell is, and what was pooled, left out, hidden or not verified."""
    block, rows = max(picture.shown.block for picture in pictures), pictures[0].rows
    queries = "a query (row) gives" if block == 1 or rows is not None else f"{block} queries (a row) give on average"
    keys = "a key (column)" if block == 1 else f"{block} keys (a column) together"
    yield f"each cell: the attention weight that {queries} to {keys}"
    if record.corpus is not None:
        of = count_of(record.corpus.n_documents, "document", grouped=True)
        yield f"patterns of one document, {visible(record.corpus.example_named)}; types and statistics are means over {of}"
    if options.words:
        yield "words: weights are summed over the tokens of a key, averaged over those of a query; statistics are of tokens"
    if rows is not None:
        yield f"{len(rows)} of {len(pictures[0].shown.queries.tokens)} queries are drawn"
    yield from _removed(pictures, options)
    for layer in dict.fromkeys(picture.head.layer for picture in pictures):
        if layer is not None and not layer.verified:
            yield f"! {layer.label}: NOT verified: {visible('; '.join(layer.unverified))}"
    yield from missing_notes(record, options)


def _removed(pictures: Sequence[_Picture], options: ViewOptions) -> Iterator[str]:
    """The weights of hidden sinks and of sink logits."""
    maps = [picture.whole for picture in pictures if np.isfinite(picture.whole.sink_weights).all()]
    sinks = [*dict.fromkeys(token_at(token_text(m.keys, place), place) for m in maps for place in m.sinks)]
    done = "; the rest of each row is renormalised" if options.hide_sinks else ""
    if options.hide_sinks and sinks:
        taken = weight_text(_mean([(m.sink_mass, m) for m in maps]), options.precision)
        yield f"sinks are taken out, {first_names(sinks, _MOST_SINKS)}, with {taken} of all attention{done}"
    elif options.hide_sinks:
        yield "no sink, so nothing is taken out"
    learned = [(mass, m) for m in maps if (mass := m.learned_mass) is not None]
    if learned:
        yield f"sink logits, which are no keys, have {weight_text(_mean(learned), options.precision)} of all attention{done}"


def _mean(masses: Sequence[tuple[float, HeadMap]]) -> float:
    """The mean of parts of attention over all queries of the maps."""
    counts = [max(1.0, float(m.n_queries.sum())) for _, m in masses]
    return float(np.average([mass for mass, _ in masses], weights=counts))
